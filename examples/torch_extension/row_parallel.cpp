/* A row-parallel linear layer as an operator of PyTorch, with the all-reduce fused into its chunks.
 *
 * Each rank has some columns of the input and of the weight. Their product is a partial sum of the
 * output, and the all-reduce of the partial sums is the output. The operator computes a chunk of
 * rows, starts its all-reduce and computes the next chunk meanwhile.
 *
 * row_parallel.py compiles this file and adds the gradient and the kernel for torch.compile.
 */
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kolo.h>

namespace {

// By default a chunk has at least this many rows and bytes. Fewer rows slow the product, fewer bytes
// the all-reduce. benchmark.py measured it.
constexpr int64_t CHUNK_ROWS = 512;
constexpr int64_t CHUNK_BYTES = 2 << 20;

// Returns the exception for a call of this thread that has just failed, with kolo's message.
std::exception_ptr error_of(kolo_result_t result) {
  kolo_error_t error = KOLO_ERROR_INITIALIZER;
  const bool is_known = kolo_last_error(nullptr, &error) == KOLO_OK && error.code == result;
  std::string message = is_known ? error.message : kolo_error_string(result);
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  switch (result) {
    case KOLO_ERR_ARGUMENT:
    case KOLO_ERR_SETTING:
    case KOLO_ERR_UNSUPPORTED:
      return std::make_exception_ptr(c10::ValueError(here, std::move(message)));
    default:
      // In Python this is torch.distributed.DistBackendError, a RuntimeError.
      return std::make_exception_ptr(c10::DistBackendError(here, std::move(message)));
  }
}

void check(kolo_result_t result) {
  if (result != KOLO_OK) {
    std::rethrow_exception(error_of(result));
  }
}

// The shape of a call: rows, columns, type and rows of a chunk. Calls of one shape make the same
// calls of kolo.
using Shape = std::array<int64_t, 4>;

struct Communicator {
  kolo_comm_t comm = nullptr;
  int32_t rank = 0;
  int32_t size = 0;
  // A thread holds this while it starts the chunks of a call, so that the chunks of two threads do
  // not mix. It does not order the calls: that is for the program, as all ranks make them in the
  // same order.
  std::mutex starts;
  // The shape on which the ranks agreed last. It is the same on all ranks.
  Shape agreed{-1};

  Communicator() = default;
  Communicator(const Communicator&) = delete;
  ~Communicator() {
    kolo_comm_destroy(comm);
  }
};

// The open communicators, by the numbers that kolo's handles are. Operators and torch.compile take
// an integer as it is, and a number that was closed is an error. The table is not freed at exit: a
// process that ends without close() did not say goodbye, and the other ranks get an error.
struct Table {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Communicator>> open;
};

Table& table() {
  static auto* const table = new Table;
  return *table;
}

std::shared_ptr<Communicator> communicator(int64_t handle) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().open.find(handle);
  TORCH_CHECK_VALUE(found != table().open.end(), "there is no communicator ", handle, ": it was closed or never opened");
  return found->second;
}

// Connects with all ranks that the launcher started. A timeout of 0 is the default.
int64_t open_communicator(int64_t timeout_ms) {
  TORCH_CHECK_VALUE(timeout_ms >= 0, "the timeout is ", timeout_ms, " ms; it cannot be negative");
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  config.timeout_ms = static_cast<uint64_t>(timeout_ms);
  auto opened = std::make_shared<Communicator>();
  check(kolo_comm_init_env(&opened->comm, &config));
  check(kolo_comm_rank(opened->comm, &opened->rank));
  check(kolo_comm_count(opened->comm, &opened->size));
  const auto handle = static_cast<int64_t>(reinterpret_cast<intptr_t>(opened->comm));
  const std::lock_guard lock(table().mutex);
  table().open.emplace(handle, std::move(opened));
  return handle;
}

// Calls of other threads in progress keep the communicator until they return.
void close_communicator(int64_t handle) {
  std::shared_ptr<Communicator> closed;
  const std::lock_guard lock(table().mutex);
  const auto found = table().open.find(handle);
  if (found != table().open.end()) {
    closed = std::move(found->second);
    table().open.erase(found);
  }
}

int64_t rank_of(int64_t handle) {
  return communicator(handle)->rank;
}

int64_t size_of(int64_t handle) {
  return communicator(handle)->size;
}

kolo_dtype_t dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return KOLO_FLOAT32;
    case at::kBFloat16:
      return KOLO_BFLOAT16;
    case at::kHalf:
      return KOLO_FLOAT16;
    case at::kDouble:
      return KOLO_FLOAT64;
    default:
      TORCH_CHECK_VALUE(false, "linear takes float32, bfloat16, float16 and float64, not ", type);
  }
}

// The all-reduces of a call. Their memory must outlive them, so the destructor waits for them. That
// ends, as every operation of kolo has a deadline.
class InFlight {
 public:
  explicit InFlight(kolo_comm_t comm) : comm_(comm) {}
  InFlight(const InFlight&) = delete;

  ~InFlight() {
    for (const auto work : works_) {
      kolo_work_wait(work);
      kolo_work_destroy(work);
    }
  }

  // Returns whether the all-reduce was started. If not, finish() throws.
  bool start(void* data, size_t count, kolo_dtype_t dtype) {
    works_.reserve(works_.size() + 1);
    kolo_work_t work;
    const auto result = kolo_start_all_reduce(data, data, count, dtype, KOLO_SUM, comm_, nullptr, &work);
    if (result != KOLO_OK) {
      failure_ = error_of(result);
      return false;
    }
    works_.push_back(work);
    return true;
  }

  // Waits for all, and throws the first failure. Later ones only say that there was an earlier one.
  void finish() {
    for (const auto work : works_) {
      const auto result = kolo_work_wait(work);
      if (result != KOLO_OK) {
        std::rethrow_exception(error_of(result));
      }
    }
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

 private:
  kolo_comm_t comm_;
  std::vector<kolo_work_t> works_;
  std::exception_ptr failure_;
};

// Fails if the ranks call linear with different shapes.
//
// kolo compares the counts of each all-reduce. But calls of 2 and 3 chunks begin with equal counts,
// and the third chunk of one rank would match the first chunk of another rank's next call. So the
// ranks compare their shapes first, unless this shape is the last on which they agreed. A rank that
// compares beside a rank that does not is a mismatch to kolo, and both get its error.
void agree(Communicator& self, const Shape& shape) {
  if (shape == self.agreed) {
    return;
  }
  self.agreed = {-1};
  std::vector<Shape> shapes(self.size);
  check(kolo_all_gather(shape.data(), shapes.data(), shape.size(), KOLO_INT64, self.comm, nullptr));
  for (int32_t rank = 1; rank < self.size; ++rank) {
    const auto& one = shapes[0];
    const auto& other = shapes[rank];
    TORCH_CHECK_VALUE(
        one == other, "ranks called linear with different shapes: on rank 0 the output has ", one[0], " rows and ", one[1],
        " columns of ", static_cast<at::ScalarType>(one[2]), " in chunks of ", one[3], " rows, on rank ", rank, " ", other[0],
        " rows and ", other[1], " columns of ", static_cast<at::ScalarType>(other[2]), " in chunks of ", other[3], " rows");
  }
  self.agreed = shape;
}

// The sum over all ranks of `x @ weight.T`. `chunk_rows` of 0 is the default.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t handle, int64_t chunk_rows) {
  // The gradient is in row_parallel.py. The operators below compute none.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK_VALUE(
      x.dim() >= 1 && weight.dim() == 2, "linear takes x of 1 dimension or more and weight of 2, not ", x.dim(), " and ", weight.dim());
  TORCH_CHECK_VALUE(
      x.size(-1) == weight.size(1), "x has ", x.size(-1), " columns and weight ", weight.size(1), "; they must be equal");
  TORCH_CHECK_VALUE(
      x.scalar_type() == weight.scalar_type(), "x is of ", x.scalar_type(), " and weight of ", weight.scalar_type(),
      "; they must be equal");
  TORCH_CHECK_VALUE(chunk_rows >= 0, "chunk_rows is ", chunk_rows, "; it cannot be negative");
  const auto dtype = dtype_of(x.scalar_type());
  const auto self = communicator(handle);

  const auto leading = x.sizes().slice(0, x.dim() - 1);
  const auto rows = c10::multiply_integers(leading);
  const auto columns = weight.size(0);
  const auto input = x.reshape({rows, x.size(-1)});
  const auto transposed = weight.t();
  auto sizes = leading.vec();
  sizes.push_back(columns);
  const auto output = at::empty(sizes, x.options());
  const auto result = output.view({rows, columns});
  const auto row_bytes = columns * static_cast<int64_t>(x.element_size());
  if (chunk_rows == 0) {
    chunk_rows = std::max(CHUNK_ROWS, CHUNK_BYTES / std::max<int64_t>(row_bytes, 1));
  }
  chunk_rows = std::clamp<int64_t>(chunk_rows, 1, std::max<int64_t>(rows, 1));

  std::unique_lock lock(self->starts);
  agree(*self, {rows, columns, static_cast<int64_t>(x.scalar_type()), chunk_rows});
  if (rows <= chunk_rows) {
    // Nothing overlaps, and a blocking call needs no other thread. Without rows it still compares
    // the calls of the ranks.
    at::Tensor whole = result;
    at::mm_out(whole, input, transposed);
    check(kolo_all_reduce(output.data_ptr(), output.data_ptr(), rows * columns, dtype, KOLO_SUM, self->comm, nullptr));
    return output;
  }
  InFlight chunks(self->comm);
  try {
    for (int64_t row = 0; row < rows; row += chunk_rows) {
      const auto count = std::min(chunk_rows, rows - row);
      auto chunk = result.narrow(0, row, count);
      at::mm_out(chunk, input.narrow(0, row, count), transposed);
      if (!chunks.start(chunk.data_ptr(), count * columns, dtype)) {
        kolo_comm_abort(self->comm);
        break;
      }
    }
  } catch (...) {
    // The other ranks wait for the remaining chunks. This makes them fail now and not at their
    // deadline.
    kolo_comm_abort(self->comm);
    throw;
  }
  lock.unlock();
  chunks.finish();
  return output;
}

} // namespace

TORCH_LIBRARY(row_parallel, library) {
  library.def("open(int timeout_ms) -> int", &open_communicator);
  library.def("close(int communicator) -> ()", &close_communicator);
  library.def("rank(int communicator) -> int", &rank_of);
  library.def("size(int communicator) -> int", &size_of);
  library.def("linear(Tensor x, Tensor weight, int communicator, int chunk_rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(row_parallel, CPU, library) {
  library.impl("linear", &linear);
}

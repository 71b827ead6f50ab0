#include "backend.hpp"

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "launch.hpp"
#include "signals.hpp"
#include "store.hpp"
#include "tensors.hpp"

namespace torch_kolo {

using c10d::OpType;

namespace {

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  TORCH_CHECK_VALUE(tensors.size() == 1, call, ": one tensor is expected, and there are ", tensors.size());
  return tensors.front();
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* call) {
  TORCH_CHECK_VALUE(lists.size() == 1, call, ": one list of tensors is expected, and there are ", lists.size());
  return lists.front();
}

void check_count(int64_t count, int64_t expected, const char* what, const char* call) {
  TORCH_CHECK_VALUE(count == expected, call, ": ", what, " has ", count, " elements, and ", expected, " are needed");
}

// A list with a tensor for each rank, all of one type and on one device.
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size, bool is_written, const char* call) {
  TORCH_CHECK_VALUE(
      static_cast<int>(list.size()) == size, call, ": the list has ", list.size(), " tensors, and there are ", size, " ranks");
  for (const auto& tensor : list) {
    is_written ? check_writable(tensor, call) : check_dense(tensor, call);
    check_same_type(tensor, like, call);
  }
}

bool are_even(const std::vector<at::Tensor>& list) {
  return std::all_of(list.begin(), list.end(), [&](const at::Tensor& tensor) { return tensor.numel() == list.front().numel(); });
}

std::vector<size_t> counts_of(const std::vector<at::Tensor>& list, size_t factor) {
  std::vector<size_t> counts;
  counts.reserve(list.size());
  for (const auto& tensor : list) {
    counts.push_back(static_cast<size_t>(tensor.numel()) * factor);
  }
  return counts;
}

// Returns the splits of all_to_all in elements. They count rows of the first dimension; without
// splits, the ranks share the rows evenly.
std::vector<size_t> counts_of(const std::vector<int64_t>& splits, const at::Tensor& tensor, int size, size_t factor, const char* what) {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        rows % size == 0, "all_to_all_single: the first dimension of the ", what, " is ", rows, ", which ", size,
        " ranks cannot share evenly; give split sizes");
    return std::vector<size_t>(size, static_cast<size_t>(tensor.numel() / size) * factor);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == size, "all_to_all_single: there are ", splits.size(), " ", what, " splits and ", size, " ranks");
  int64_t sum = 0;
  std::vector<size_t> counts;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "all_to_all_single: an ", what, " split is ", split);
    sum += split;
    counts.push_back(rows == 0 ? 0 : static_cast<size_t>(split) * static_cast<size_t>(tensor.numel() / rows) * factor);
  }
  TORCH_CHECK_VALUE(
      sum == rows, "all_to_all_single: the ", what, " splits sum up to ", sum, ", and its first dimension is ", rows);
  return counts;
}

// Checks the tensors of a call that has an output for each input.
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* call) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size() && !inputs.empty(), call, ": there are ", outputs.size(), " outputs and ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(inputs[i], call);
    check_writable(outputs[i], call);
    check_same_type(outputs[i], inputs[i], call);
  }
}

} // namespace

// ---- Beginning and end ----

ProcessGroupKolo::ProcessGroupKolo(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      options_(std::move(options)),
      made_with_(options_->timeout),
      members_(std::make_shared<Members>(Members{{options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end()}})) {
  init();
  TORCH_CHECK_VALUE(made_with_.count() > 0, "the timeout of a process group must be positive, and is ", made_with_.count(), " ms");
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (options_->enable_reconfigure) {
    return;
  }
#endif
  connect(store);
}

ProcessGroupKolo::ProcessGroupKolo(
    kolo_comm_t comm,
    int rank,
    int size,
    std::chrono::milliseconds made_with,
    c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      options_(std::move(options)),
      made_with_(made_with),
      members_(std::make_shared<Members>(Members{{options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end()}})) {
  init();
  collectives_.comm = comm;
  find_devices();
  connect_messages();
}

kolo_config_t ProcessGroupKolo::config() const {
  kolo_config_t config = KOLO_CONFIG_INITIALIZER;
  config.timeout_ms = static_cast<uint64_t>(made_with_.count());
  if (std::getenv("KOLO_START_TIMEOUT") == nullptr) {
    config.start_timeout_ms = config.timeout_ms;
  }
  config.transport = options_->transport.empty() ? nullptr : options_->transport.c_str();
  config.algorithm = options_->algorithm.empty() ? nullptr : options_->algorithm.c_str();
  config.reproducible = options_->reproducible ? 1 : 0;
  return config;
}

void ProcessGroupKolo::connect(const c10::intrusive_ptr<c10d::Store>& store) {
  Rendezvous rendezvous(store);
  const kolo_store_t callbacks = rendezvous.callbacks();
  const kolo_config_t config = this->config();
  const kolo_result_t result = kolo_comm_init_callbacks(&collectives_.comm, size_, &callbacks, rank_, &config);
  rethrow_of_handler();
  if (result == KOLO_ERR_STORE && !rendezvous.problem().empty()) {
    C10_THROW_ERROR(DistBackendError, c10::str("the store of the rendezvous failed: ", rendezvous.problem()));
  }
  check(result, *members_);
  find_devices();
  connect_messages();
}

void ProcessGroupKolo::find_devices() {
  int32_t has_devices = 0;
  has_devices_ = kolo_comm_has_devices(collectives_.comm, &has_devices) == KOLO_OK && has_devices != 0;
}

void ProcessGroupKolo::connect_messages() {
  if (size_ > 1) {
    const kolo_result_t split = kolo_comm_split(collectives_.comm, 0, rank_, &messages_.comm);
    if (split != KOLO_OK) {
      const auto error = error_of(split, *members_);
      close();
      std::rethrow_exception(error);
    }
  }
}

ProcessGroupKolo::~ProcessGroupKolo() {
  close();
}

// Joins threads that may need Python's lock.
void ProcessGroupKolo::close() {
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) {
    released.emplace();
  }
  hooks_->mute();
  for (Channel* channel : {&messages_, &collectives_}) {
    if (const kolo_comm_t comm = std::exchange(channel->comm, nullptr)) {
      kolo_comm_destroy(comm);
    }
    channel->waiter->close(options_->timeout);
  }
  hooks_->close();
}

void ProcessGroupKolo::shutdown() {
  close();
}

void ProcessGroupKolo::abort() {
  hooks_->mute();
  for (const Channel* channel : {&collectives_, &messages_}) {
    if (channel->comm != nullptr) {
      kolo_comm_abort(channel->comm);
    }
  }
}

c10d::ErrorType ProcessGroupKolo::getError() {
  for (const Channel* channel : {&collectives_, &messages_}) {
    kolo_result_t result = KOLO_OK;
    if (channel->comm != nullptr && kolo_comm_get_async_error(channel->comm, &result) == KOLO_OK && result != KOLO_OK) {
      return result == KOLO_ERR_PEER ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
    }
  }
  return c10d::ErrorType::SUCCESS;
}

kolo_comm_stats_t ProcessGroupKolo::stats() const {
  TORCH_CHECK_VALUE(collectives_.comm != nullptr, "stats: the process group has no communicator; it has ended, or has no members yet");
  kolo_comm_stats_t sum{};
  for (const Channel* channel : {&collectives_, &messages_}) {
    // A group of one rank has no messages.
    if (channel->comm != nullptr) {
      kolo_comm_stats_t stats{};
      stats.size = sizeof(stats);
      check(kolo_comm_stats(channel->comm, &stats), *members_);
      sum.device_whole += stats.device_whole;
      sum.device_staged += stats.device_staged;
      sum.device_in_place += stats.device_in_place;
      sum.device_through_areas += stats.device_through_areas;
      sum.device_copied += stats.device_copied;
      sum.device_one_shot += stats.device_one_shot;
    }
  }
  return sum;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupKolo::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) {
    return nullptr;
  }
  return merge(store, opts, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupKolo::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts,
    const int& rank,
    const int& size) {
  // The caller may use the connection of its store meanwhile.
  return c10::make_intrusive<ProcessGroupKolo>(store->clone(), rank, size, options_of(opts));
}

// Returns the timeout of the group, or the one that the call has.
c10::intrusive_ptr<ProcessGroupKolo::Options> ProcessGroupKolo::options_of(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto options = c10::make_intrusive<Options>(*options_);
  if (const auto* kolo = dynamic_cast<const Options*>(given.get())) {
    options = c10::make_intrusive<Options>(*kolo);
    options->profiled_as = options_->profiled_as;
  } else if (given) {
    options->timeout = given->timeout;
    options->group_name = given->group_name;
    options->global_ranks_in_group = given->global_ranks_in_group;
  }
  return options;
}

// ---- One tensor on every rank ----

ProcessGroupKolo::WorkPtr ProcessGroupKolo::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr const char* name = "broadcast";
  const at::Tensor& tensor = only(tensors, name);
  const bool is_root = opts.rootRank == rank_;
  is_root ? check_dense(tensor, name) : check_writable(tensor, name);
  const auto [dtype, factor] = moved(tensor.scalar_type());
  Launch launch(*this, {OpType::BROADCAST, name, opts.asyncOp, opts.timeout}, tensor);
  launch.by_segments(tensor, is_root, !is_root, [&, dtype = dtype, factor = factor](void* memory, size_t count) {
    launch.run(
        kolo_broadcast, kolo_start_broadcast, static_cast<const void*>(memory), memory, count * factor, dtype,
        static_cast<int32_t>(opts.rootRank));
  });
  return launch.done(tensors);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* name = "all_reduce";
  const at::Tensor& tensor = only(tensors, name);
  if (tensor.is_sparse()) {
    return allreduce_sparse(tensors, opts);
  }
  check_writable(tensor, name);
  const auto reduction = reduced(tensor.scalar_type(), opts.reduceOp, name);
  premultiply(tensors, opts.reduceOp);
  Launch launch(*this, {OpType::ALLREDUCE, name, opts.asyncOp, opts.timeout}, tensor);
  launch.by_segments(tensor, true, true, [&](void* memory, size_t count) {
    launch.run(
        kolo_all_reduce, kolo_start_all_reduce, static_cast<const void*>(memory), memory, count * reduction.elements.factor,
        reduction.elements.dtype, reduction.op);
  });
  return launch.done(tensors);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* name = "all_reduce_coalesced";
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": there are no tensors");
  for (const auto& tensor : tensors) {
    check_writable(tensor, name);
    TORCH_CHECK_VALUE(tensor.device() == tensors.front().device(), name, ": tensors are on different devices");
    reduced(tensor.scalar_type(), opts.reduceOp, name);
  }
  premultiply(tensors, opts.reduceOp);
  Launch launch(*this, {OpType::ALLREDUCE_COALESCED, name, opts.asyncOp, opts.timeout}, tensors.front(), tensors);
  for (const auto& tensor : tensors) {
    const auto reduction = reduced(tensor.scalar_type(), opts.reduceOp, name);
    launch.by_segments(tensor, true, true, [&](void* memory, size_t count) {
      launch.run(
          kolo_all_reduce, kolo_start_all_reduce, static_cast<const void*>(memory), memory, count * reduction.elements.factor,
          reduction.elements.dtype, reduction.op);
    });
  }
  return launch.done(tensors);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr const char* name = "reduce";
  const bool is_root = opts.rootRank == rank_;
  is_root ? check_writable(only(tensors, name), name) : check_dense(only(tensors, name), name);
  const auto reduction = reduced(tensors.front().scalar_type(), opts.reduceOp, name);
  if (is_root) {
    premultiply(tensors, opts.reduceOp);
  }
  const at::Tensor tensor = is_root ? tensors.front() : premultiplied(tensors, opts.reduceOp).front();
  Launch launch(*this, {OpType::REDUCE, name, opts.asyncOp, opts.timeout}, tensor);
  launch.by_segments(tensor, true, is_root, [&](void* memory, size_t count) {
    launch.run(
        kolo_reduce, kolo_start_reduce, static_cast<const void*>(memory), is_root ? memory : nullptr, count * reduction.elements.factor,
        reduction.elements.dtype, reduction.op, static_cast<int32_t>(opts.rootRank));
  });
  return launch.done(tensors);
}

// Each rank gets the indices and values of all ranks, and sums them in the order of ranks. The
// operation has ended when this returns, because the lengths are known only after the numbers of
// elements have arrived.
ProcessGroupKolo::WorkPtr ProcessGroupKolo::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* name = "sparse_all_reduce";
  const at::Tensor& tensor = only(tensors, name);
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse, name, ": the tensor is ", tensor.layout(), ", and only sparse COO is supported");
  const bool is_average = opts.reduceOp == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(
      is_average || opts.reduceOp == c10d::ReduceOp::SUM, name, ": only ReduceOp.SUM and AVG are supported for sparse tensors");
  if (is_average) {
    reduced(tensor.scalar_type(), opts.reduceOp, name);
  }
  Launch launch(*this, {OpType::_ALLREDUCE_SPARSE, name, false, opts.timeout}, {}, tensors);
  const at::Tensor mine = tensor.cpu().coalesce();
  const auto longs = at::TensorOptions(at::kLong);

  constexpr int64_t kMostDimensions = 64;
  constexpr int64_t kShape = 3 + kMostDimensions;
  TORCH_CHECK_VALUE(mine.dim() <= kMostDimensions, name, ": the tensor has more than ", kMostDimensions, " dimensions");
  at::Tensor shapes = at::zeros({size_, kShape + 1}, longs);
  auto* shape = shapes.data_ptr<int64_t>() + rank_ * (kShape + 1);
  shape[0] = static_cast<int64_t>(mine.scalar_type());
  shape[1] = mine.sparse_dim();
  shape[2] = mine.dense_dim();
  std::copy(mine.sizes().begin(), mine.sizes().end(), shape + 3);
  shape[kShape] = mine._nnz();
  launch.run(kolo_all_gather, kolo_start_all_gather, static_cast<const void*>(shape), shapes.data_ptr(), size_t{kShape + 1}, KOLO_INT64);

  std::vector<size_t> indices_of(size_), values_of(size_);
  const at::Tensor my_values = mine.values().contiguous();
  const int64_t sparse_dim = mine.sparse_dim();
  const int64_t each = my_values.numel() / std::max<int64_t>(mine._nnz(), 1);
  int64_t elements = 1;
  for (int64_t dim = sparse_dim; dim < mine.dim(); ++dim) {
    elements *= mine.size(dim);
  }
  TORCH_INTERNAL_ASSERT(mine._nnz() == 0 || each == elements);
  int64_t total = 0;
  const auto [dtype, factor] = moved(mine.scalar_type());
  for (int rank = 0; rank < size_; ++rank) {
    const auto* theirs = shapes.data_ptr<int64_t>() + rank * (kShape + 1);
    // All ranks see all shapes, so all come to the same result.
    const auto* first = shapes.data_ptr<int64_t>();
    TORCH_CHECK_VALUE(
        std::equal(first, first + kShape, theirs), name, ": the tensors of rank 0 and rank ", rank,
        " differ in type, size, or number of sparse dimensions");
    const int64_t nnz = theirs[kShape];
    TORCH_CHECK_VALUE(nnz >= 0, name, ": rank ", rank, " has ", nnz, " elements");
    total += nnz;
    indices_of[rank] = static_cast<size_t>(nnz * sparse_dim);
    values_of[rank] = static_cast<size_t>(nnz * elements) * factor;
  }
  const at::Tensor my_indices = mine.indices().t().contiguous();
  const at::Tensor indices = at::empty({total, sparse_dim}, longs);
  std::vector<int64_t> value_sizes{total};
  value_sizes.insert(value_sizes.end(), mine.sizes().begin() + sparse_dim, mine.sizes().end());
  const at::Tensor values = at::empty(value_sizes, my_values.options());
  launch.run(
      kolo_all_gather_v, kolo_start_all_gather_v, my_indices.const_data_ptr(), indices.data_ptr(),
      static_cast<const size_t*>(indices_of.data()), KOLO_INT64);
  launch.run(
      kolo_all_gather_v, kolo_start_all_gather_v, my_values.const_data_ptr(), values.data_ptr(),
      static_cast<const size_t*>(values_of.data()), dtype);
  at::Tensor sum = at::_sparse_coo_tensor_unsafe(indices.t(), values, mine.sizes()).coalesce();
  if (is_average) {
    sum.values().div_(size_);
  }
  tensor.copy_(sum);
  return launch.done(tensors);
}

// ---- Gathering and scattering ----

ProcessGroupKolo::WorkPtr ProcessGroupKolo::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && inputs.size() == 1, "all_gather: one tensor and one list are expected");
  Tensors flat;
  Launch launch(*this, {OpType::ALLGATHER, "all_gather", opts.asyncOp, opts.timeout}, only(inputs, "all_gather"));
  gather_lists(launch, "all_gather", outputs, inputs, flat);
  return launch.done(std::move(flat));
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  constexpr const char* name = "all_gather_coalesced";
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_, name, ": there are ", outputs.size(), " lists and ", size_, " ranks");
  TORCH_CHECK_VALUE(!inputs.empty(), name, ": there are no tensors");
  // This call has a list for each rank; other calls have one for each input.
  Lists by_input(inputs.size());
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), name, ": a list has ", list.size(), " tensors, and there are ", inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i) {
      by_input[i].push_back(list[i]);
    }
  }
  Tensors flat;
  Launch launch(*this, {OpType::ALLGATHER_COALESCED, name, opts.asyncOp, opts.timeout}, inputs.front(), inputs);
  gather_lists(launch, name, by_input, inputs, flat);
  return launch.done(std::move(flat));
}

void ProcessGroupKolo::gather_lists(Launch& launch, const char* name, const Lists& outputs, const Tensors& inputs, Tensors& flat) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dense(inputs[i], name);
    check_list(outputs[i], inputs[i], size_, true, name);
    check_same_type(inputs[i], inputs.front(), name);
    check_count(inputs[i].numel(), outputs[i][rank_].numel(), "the input", name);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto [dtype, factor] = moved(inputs[i].scalar_type());
    const auto counts = counts_of(outputs[i], factor);
    const at::Tensor to = launch.out(outputs[i]);
    const size_t before = std::accumulate(counts.begin(), counts.begin() + rank_, size_t{0}) / factor * to.element_size();
    const at::Tensor from = launch.apart(launch.in(inputs[i]), to, before);
    if (are_even(outputs[i])) {
      launch.run(kolo_all_gather, kolo_start_all_gather, from.const_data_ptr(), to.data_ptr(), counts[0], dtype);
    } else {
      launch.run(
          kolo_all_gather_v, kolo_start_all_gather_v, from.const_data_ptr(), to.data_ptr(), static_cast<const size_t*>(counts.data()),
          dtype);
    }
    flat.insert(flat.end(), outputs[i].begin(), outputs[i].end());
  }
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return gather_tensors({OpType::_ALLGATHER_BASE, "all_gather_into_tensor", opts.asyncOp, opts.timeout}, outputs, inputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  return gather_tensors(
      {OpType::COALESCED, "all_gather_into_tensor_coalesced", opts.asyncOp,
       opts.timeout},
      outputs, inputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::gather_tensors(const Call& call, const Tensors& outputs, const Tensors& inputs) {
  check_pairs(outputs, inputs, call.name);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_count(outputs[i].numel(), inputs[i].numel() * size_, "the output", call.name);
  }
  Launch launch(*this, call, inputs.front(), inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto [dtype, factor] = moved(inputs[i].scalar_type());
    const at::Tensor to = launch.out(outputs[i]);
    const at::Tensor from = launch.apart(launch.in(inputs[i]), to, rank_ * inputs[i].nbytes());
    launch.run(
        kolo_all_gather, kolo_start_all_gather, from.const_data_ptr(), to.data_ptr(), static_cast<size_t>(from.numel()) * factor, dtype);
  }
  return launch.done(outputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  constexpr const char* name = "gather";
  const at::Tensor& input = only(inputs, name);
  check_dense(input, name);
  const bool is_root = opts.rootRank == rank_;
  Tensors list;
  if (is_root) {
    list = only(outputs, name);
    check_list(list, input, size_, true, name);
    for (const auto& output : list) {
      check_count(output.numel(), input.numel(), "an output", name);
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty() || outputs.front().empty(), name, ": outputs are for the root only");
  }
  const auto [dtype, factor] = moved(input.scalar_type());
  Launch launch(*this, {OpType::GATHER, name, opts.asyncOp, opts.timeout}, input);
  at::Tensor from = launch.in(input);
  void* to = nullptr;
  if (is_root) {
    const at::Tensor memory = launch.out(list);
    from = launch.apart(from, memory, rank_ * from.nbytes());
    to = memory.data_ptr();
    launch.keep(memory);
  }
  launch.run(
      kolo_gather, kolo_start_gather, from.const_data_ptr(), to, static_cast<size_t>(from.numel()) * factor, dtype,
      static_cast<int32_t>(opts.rootRank));
  return launch.done(std::move(list));
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  Lists outputs;
  Tensors inputs{input};
  if (opts.rootRank == rank_) {
    check_writable(output, "gather_into_tensor");
    check_count(output.numel(), input.numel() * size_, "the output", "gather_into_tensor");
    TORCH_CHECK_VALUE(output.is_contiguous(), "gather_into_tensor: the output must be contiguous");
    outputs.push_back(output.view({size_, -1}).unbind(0));
  }
  return gather(outputs, inputs, opts);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  constexpr const char* name = "scatter";
  const at::Tensor& output = only(outputs, name);
  check_writable(output, name);
  const bool is_root = opts.rootRank == rank_;
  if (is_root) {
    const Tensors& list = only(inputs, name);
    check_list(list, output, size_, false, name);
    for (const auto& input : list) {
      check_count(input.numel(), output.numel(), "an input", name);
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty() || inputs.front().empty(), name, ": inputs are for the root only");
  }
  const auto [dtype, factor] = moved(output.scalar_type());
  Launch launch(*this, {OpType::SCATTER, name, opts.asyncOp, opts.timeout}, output, is_root ? at::TensorList(inputs.front()) : at::TensorList());
  at::Tensor from;
  if (is_root) {
    from = launch.in(inputs.front());
  }
  const at::Tensor to = is_root ? launch.out_apart(output, from) : launch.out(output);
  launch.run(
      kolo_scatter, kolo_start_scatter, from.defined() ? from.const_data_ptr() : nullptr, to.data_ptr(),
      static_cast<size_t>(to.numel()) * factor, dtype, static_cast<int32_t>(opts.rootRank));
  return launch.done(outputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr const char* name = "reduce_scatter";
  const at::Tensor& output = only(outputs, name);
  const Tensors& list = only(inputs, name);
  check_writable(output, name);
  check_list(list, output, size_, false, name);
  check_count(output.numel(), list[rank_].numel(), "the output", name);
  const auto reduction = reduced(output.scalar_type(), opts.reduceOp, name);
  const auto counts = counts_of(list, reduction.elements.factor);
  Launch launch(*this, {OpType::REDUCE_SCATTER, name, opts.asyncOp, opts.timeout}, output, list);
  const at::Tensor from = launch.in(premultiplied(list, opts.reduceOp));
  const at::Tensor to = launch.out_apart(output, from);
  if (are_even(list)) {
    launch.run(
        kolo_reduce_scatter, kolo_start_reduce_scatter, from.const_data_ptr(), to.data_ptr(), counts[0], reduction.elements.dtype,
        reduction.op);
  } else {
    launch.run(
        kolo_reduce_scatter_v, kolo_start_reduce_scatter_v, from.const_data_ptr(), to.data_ptr(), static_cast<const size_t*>(counts.data()),
        reduction.elements.dtype, reduction.op);
  }
  return launch.done(outputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return scatter_tensors(
      {OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", opts.asyncOp, opts.timeout}, outputs, inputs,
      opts.reduceOp);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  return scatter_tensors(
      {OpType::COALESCED, "reduce_scatter_tensor_coalesced", opts.asyncOp,
       opts.timeout},
      outputs, inputs, opts.reduceOp);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::scatter_tensors(
    const Call& call,
    const Tensors& outputs,
    const Tensors& inputs,
    const c10d::ReduceOp& op) {
  check_pairs(outputs, inputs, call.name);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_count(inputs[i].numel(), outputs[i].numel() * size_, "the input", call.name);
    reduced(inputs[i].scalar_type(), op, call.name);
  }
  const Tensors multiplied = premultiplied(inputs, op);
  Launch launch(*this, call, inputs.front(), inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto reduction = reduced(inputs[i].scalar_type(), op, call.name);
    const at::Tensor from = launch.in(multiplied[i]);
    const at::Tensor to = launch.out_apart(outputs[i], from);
    launch.run(
        kolo_reduce_scatter, kolo_start_reduce_scatter, from.const_data_ptr(), to.data_ptr(),
        static_cast<size_t>(to.numel()) * reduction.elements.factor, reduction.elements.dtype, reduction.op);
  }
  return launch.done(outputs);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    Splits& output_splits,
    Splits& input_splits,
    const c10d::AllToAllOptions& opts) {
  constexpr const char* name = "all_to_all_single";
  check_dense(input, name);
  check_writable(output, name);
  check_same_type(output, input, name);
  const auto [dtype, factor] = moved(input.scalar_type());
  const auto sends = counts_of(input_splits, input, size_, factor, "input");
  const auto receives = counts_of(output_splits, output, size_, factor, "output");
  Launch launch(*this, {OpType::ALLTOALL_BASE, name, opts.asyncOp, opts.timeout}, input);
  const at::Tensor to = launch.out(output);
  if (output_splits.empty() && input_splits.empty()) {
    check_count(output.numel(), input.numel(), "the output", name);
    const at::Tensor from = launch.apart(launch.in(input), to, 0);
    launch.run(kolo_all_to_all, kolo_start_all_to_all, from.const_data_ptr(), to.data_ptr(), sends[0], dtype);
  } else {
    const at::Tensor from = launch.apart(launch.in(input), to, std::nullopt);
    launch.run(
        kolo_all_to_all_v, kolo_start_all_to_all_v, from.const_data_ptr(), static_cast<const size_t*>(sends.data()), to.data_ptr(),
        static_cast<const size_t*>(receives.data()), dtype);
  }
  return launch.done({output});
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  constexpr const char* name = "all_to_all";
  TORCH_CHECK_VALUE(!inputs.empty(), name, ": there are no tensors");
  check_list(inputs, inputs.front(), size_, false, name);
  check_list(outputs, inputs.front(), size_, true, name);
  const auto [dtype, factor] = moved(inputs.front().scalar_type());
  const auto sends = counts_of(inputs, factor);
  const auto receives = counts_of(outputs, factor);
  Launch launch(*this, {OpType::ALLTOALL, name, opts.asyncOp, opts.timeout}, inputs.front(), inputs);
  const at::Tensor to = launch.out(outputs);
  const at::Tensor from = launch.apart(launch.in(inputs), to, std::nullopt);
  launch.run(
      kolo_all_to_all_v, kolo_start_all_to_all_v, from.const_data_ptr(), static_cast<const size_t*>(sends.data()), to.data_ptr(),
      static_cast<const size_t*>(receives.data()), dtype);
  return launch.done(outputs);
}

// ---- Barriers and messages ----

ProcessGroupKolo::WorkPtr ProcessGroupKolo::barrier(const c10d::BarrierOptions& opts) {
  // Earlier work of the device's current stream completes before the barrier, if the caller or the group names the
  // device. PyTorch passes on the numbers of devices, and not the device.
  constexpr auto cuda = c10::DeviceType::CUDA;
  std::optional<c10::Device> device = opts.device ? opts.device : getBoundDeviceId();
  if (!opts.device_ids.empty()) {
    device.emplace(cuda, static_cast<c10::DeviceIndex>(opts.device_ids.front()));
  }
  if (device && device->is_cuda() && c10::impl::hasDeviceGuardImpl(cuda)) {
    const c10::impl::VirtualGuardImpl impl(cuda);
    if (impl.deviceCount() > 0) {
      impl.synchronizeStream(impl.getStream(device->has_index() ? *device : impl.getDevice()));
    }
  }
  Launch launch(*this, {OpType::BARRIER, "barrier", opts.asyncOp, opts.timeout}, {});
  launch.run(kolo_barrier, kolo_start_barrier);
  return launch.done({});
}

// Each of kolo's barriers names the first missing rank; a roll call names all missing ranks.
void ProcessGroupKolo::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  TORCH_CHECK_WITH(
      DistBackendError, opts.timeout.count() != 0, "[Rank ", rank_, "]: Rank ", rank_, " timed out in monitoredBarrier after 0 ms, its timeout");
  const std::chrono::milliseconds timeout = opts.timeout.count() > 0 ? opts.timeout : options_->timeout;
  std::vector<int> missing;
  try {
    if (wait_all_ranks) {
      missing = roll_call(timeout);
    } else {
      Launch launch(*this, {OpType::BARRIER, "monitored_barrier", false, timeout}, {});
      launch.run(kolo_barrier, kolo_start_barrier);
      launch.done({});
    }
  } catch (const c10::DistBackendError& failed) {
    kolo_error_t error = KOLO_ERROR_INITIALIZER;
    const bool has_details = kolo_last_error(nullptr, &error) == KOLO_OK && error.rank >= 0;
    hooks_->failed();
    if (!has_details) {
      throw;
    }
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(gloo_text(rank_, c10::str("Rank ", error.rank), timeout), ": ", failed.what_without_backtrace()));
  }
  if (!missing.empty()) {
    hooks_->failed();
    report_absent(missing, timeout);
  }
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::send(Tensors& tensors, int to, int tag) {
  return message(tensors, to, tag, true);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::recv(Tensors& tensors, int from, int tag) {
  return message(tensors, from, tag, false);
}

// Without a peer, the first message from any rank is received.
ProcessGroupKolo::WorkPtr ProcessGroupKolo::message(Tensors& tensors, std::optional<int> peer, int tag, bool sends) {
  const char* name = sends ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, name);
  sends ? check_dense(tensor, name) : check_writable(tensor, name);
  TORCH_CHECK_VALUE(tag >= 0, name, ": the tag is ", tag, "; it must not be negative");
  const auto number = static_cast<uint32_t>(tag);
  const OpType type = sends ? OpType::SEND : peer ? OpType::RECV : OpType::RECVANYSOURCE;
  Launch launch(*this, {type, !peer ? "recvAnySource" : name, true, c10d::kUnsetTimeout, true}, tensor);
  at::Tensor memory = sends ? launch.in(tensor) : launch.out(tensor);
  auto [dtype, factor] = moved(tensor.scalar_type());
  size_t count = static_cast<size_t>(tensor.numel()) * factor;
  at::Tensor source;
  if (!peer) {
    source = at::full({1}, -1, at::kInt);
    launch.keep(source);
  }
  if (sends) {
    launch.run(kolo_send_tagged, kolo_start_send_tagged, memory.const_data_ptr(), count, dtype, *peer, number);
  } else if (peer) {
    launch.run(kolo_recv_tagged, kolo_start_recv_tagged, memory.data_ptr(), count, dtype, *peer, number);
  } else {
    launch.run(kolo_recv_any_tagged, kolo_start_recv_any_tagged, memory.data_ptr(), count, dtype, source.data_ptr<int32_t>(), number);
  }
  return launch.done(tensors, source);
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::recvAnysource(Tensors& tensors, int tag) {
  return message(tensors, std::nullopt, tag, false);
}

// ---- Several calls as one ----

void ProcessGroupKolo::startCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  TORCH_CHECK_VALUE(!coalescing_, "calls are being coalesced already: groups of calls cannot be nested; _end_coalescing ends one");
  coalescing_.emplace(Coalescing{std::this_thread::get_id(), std::make_shared<Flight>(members_, hooks_, CallRecord{}, nullptr), {}, false});
}

bool ProcessGroupKolo::collect(const std::shared_ptr<Flight>& flight, const Tensors& outputs, bool is_message) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  // Calls of other threads, such as those of callbacks, are not part of the group.
  if (!coalescing_ || coalescing_->thread != std::this_thread::get_id()) {
    return false;
  }
  coalescing_->flight->add(flight);
  coalescing_->outputs.insert(coalescing_->outputs.end(), outputs.begin(), outputs.end());
  coalescing_->has_messages |= is_message;
  return true;
}

ProcessGroupKolo::WorkPtr ProcessGroupKolo::endCoalescing() {
  std::unique_lock<std::mutex> lock(coalescing_mutex_);
  TORCH_CHECK_VALUE(coalescing_.has_value(), "no calls are being coalesced");
  Coalescing done = std::move(*coalescing_);
  coalescing_.reset();
  lock.unlock();
  const auto& waiter = done.has_messages ? messages_.waiter : collectives_.waiter;
  const KoloWork::Call call{rank_, options_->timeout, {next_call_key(), OpType::COALESCED, seq_}};
  auto work = c10::make_intrusive<KoloWork>(call, std::move(done.outputs), std::move(done.flight), waiter);
  if (options_->blocking_wait) {
    work->block_host();
  }
  return work;
}

// ---- Memory ----

bool ProcessGroupKolo::supportsTensorAlloc(c10::DeviceIndex device) {
  if (device >= 0 || collectives_.comm == nullptr || size_ == 1) {
    return false;
  }
  const char* transport = "";
  return kolo_comm_transport(collectives_.comm, &transport) == KOLO_OK && std::strncmp(transport, "shm", 3) == 0;
}

namespace {

// Allocates from the communicator's pool in shared memory. The memory may outlive the allocator. The
// allocator may outlive the process group: then `allocate` raises an error.
class PooledMemory final : public c10::Allocator {
 public:
  PooledMemory(kolo_comm_t comm, std::shared_ptr<const Members> members) : comm_(comm), members_(std::move(members)) {}

  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    check(kolo_mem_alloc_pooled(&memory, bytes, comm_), *members_);
    return {memory, memory, &free, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void free(void* memory) {
    kolo_mem_free(memory);
  }

  const kolo_comm_t comm_;
  const std::shared_ptr<const Members> members_;
};

} // namespace

std::shared_ptr<c10::Allocator> ProcessGroupKolo::getMemAllocator() {
  return std::make_shared<PooledMemory>(collectives_.comm, members_);
}

at::Tensor ProcessGroupKolo::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "allocateTensor: the kolo backend allocates memory of the host only");
  TORCH_CHECK_VALUE(size >= 0, "allocateTensor: the size is ", size);
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  c10::DataPtr memory;
  try {
    memory = PooledMemory(collectives_.comm, members_).allocate(bytes);
  } catch (const c10::Error& error) {
    // PyTorch asks by default, and works with ordinary memory, too. If the group has failed, the
    // next call says so.
    TORCH_WARN_ONCE(
        error.what_without_backtrace(),
        ". Tensors that PyTorch communicates are in ordinary memory, which takes longer: free shared memory, or raise its limit.");
    return at::empty({size}, options);
  }
  // Resizable as other tensors, because hooks of DDP may resize its buckets.
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), c10::GetAllocator(at::kCPU), /*resizable=*/true);
  return at::empty({0}, options).set_(std::move(storage), 0, {size});
}

} // namespace torch_kolo

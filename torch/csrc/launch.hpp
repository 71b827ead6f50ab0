// Makes one call: turns its tensors into memory that kolo can use, runs its operations, and returns
// the Work.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "backend.hpp"
#include "tensors.hpp"

namespace torch_kolo {

class Launch {
 public:
  using Call = ProcessGroupKolo::Call;
  // `like`: a tensor of the call, whose device all tensors share; undefined if the call has none.
  // `inputs`: the tensors that profiles show, if they are others than `like`.
  Launch(ProcessGroupKolo& group, const Call& call, const at::Tensor& like, std::optional<at::TensorList> inputs = std::nullopt);
  // If the call has failed halfway, operations that have started continue.
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Returns the elements of a tensor in contiguous memory that kolo can use: the tensor itself if
  // possible, otherwise a copy. `out` and `inout` copy back when the next operation has ended.
  at::Tensor in(const at::Tensor& tensor);
  at::Tensor out(const at::Tensor& tensor);
  at::Tensor inout(const at::Tensor& tensor);
  // The same for several tensors, one after the other in memory.
  at::Tensor in(const std::vector<at::Tensor>& tensors);
  at::Tensor out(const std::vector<at::Tensor>& tensors);
  // Returns `input`, or a copy of it if kolo would write to its memory while it reads it.
  at::Tensor apart(const at::Tensor& input, const at::Tensor& output, std::optional<size_t> in_place_at);
  // Returns memory for an output that kolo may write while it reads `input`.
  at::Tensor out_apart(const at::Tensor& output, const at::Tensor& input);

  // Runs `operation(memory, elements)` on a tensor that is read, written or both. A tensor on a
  // device that kolo cannot use is cut into segments, so that copies to the host, operations and
  // copies back overlap.
  template <typename F>
  void by_segments(const at::Tensor& tensor, bool is_read, bool is_written, F&& operation);

  // Runs or starts one of kolo's operations. `args` are its arguments before the communicator.
  template <typename Now, typename Start, typename... Args>
  void run(Now now, Start start, Args... args);

  // Keeps memory until the call has ended.
  void keep(const at::Tensor& memory);
  // Waits for copies from a device before kolo reads them. `run` calls it.
  void await_copies();

  // kolo writes the sender's rank to `source` if the message may come from any rank.
  c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> outputs, const at::Tensor& source = {});

 private:
  // Whether kolo can use the memory of this tensor's device.
  bool reaches(const at::Tensor& tensor) const {
    return stream_.has_value() || tensor.device().is_cpu();
  }
  at::Tensor memory_for(at::IntArrayRef sizes, const at::Tensor& like) const;
  void copy_back(const at::Tensor& to, const at::Tensor& from);
  // Throws unless the call succeeded. If the group has failed, abort hooks run first.
  void check_call(kolo_result_t result) {
    if (C10_UNLIKELY(result != KOLO_OK)) {
      fail(result);
    }
  }
  [[noreturn]] void fail(kolo_result_t result);
  // The copies to the host are complete when the current stream has reached this point.
  void arrives_from(c10::Device device);

  // Bytes of a tensor on a device that are copied at once.
  static constexpr int64_t kSegment = 4 << 20;

  ProcessGroupKolo& group_;
  const Call call_;
  ProcessGroupKolo::Channel& channel_;
  const std::chrono::milliseconds timeout_;
  const CallRecord record_;
  // The caller's stream, in whose order the call runs, if kolo accepts the memory of its device.
  const std::optional<c10::Stream> stream_;
  // Whether the call ends before it returns or, on a stream, before later work of the caller's
  // stream.
  const bool is_sync_;
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  std::function<void()> end_of_profile_;
  std::shared_ptr<Flight> flight_;
  std::vector<Copy> copies_;
  std::vector<c10::Event> arriving_;
  bool is_done_ = false;
};

// The deadline of a single call is a setting of the thread that makes it.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout, std::chrono::milliseconds usual) : is_set_(timeout != usual) {
    if (C10_UNLIKELY(is_set_)) {
      kolo_call_timeout(static_cast<uint64_t>(timeout.count()));
    }
  }
  ~Deadline() {
    if (C10_UNLIKELY(is_set_)) {
      kolo_call_timeout(0);
    }
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  const bool is_set_;
};

template <typename Now, typename Start, typename... Args>
void Launch::run(Now now, Start start, Args... args) {
  await_copies();
  const Deadline deadline(timeout_, group_.made_with_);
  const kolo_stream_t stream = stream_ ? stream_->native_handle() : nullptr;
  if (is_sync_) {
    // A call in a stream returns at once.
    if (C10_UNLIKELY(!stream_ && *channel_.in_flight > 0)) {
      // It waits for those, and signal handlers run in the wait for an operation.
      kolo_work_t work = nullptr;
      check_call(start(args..., channel_.comm, stream, &work));
      check_call(finish_now(work));
      return;
    }
    check_call(now(args..., channel_.comm, stream));
    return;
  }
  Step step;
  check_call(start(args..., channel_.comm, stream, &step.work));
  if (stream_) {
    step.device = stream_->device();
  }
  if (!copies_.empty()) {
    flight_->needs_host();
  }
  step.copies = std::move(copies_);
  copies_.clear();
  flight_->add(std::move(step));
}

template <typename F>
void Launch::by_segments(const at::Tensor& tensor, bool is_read, bool is_written, F&& operation) {
  if (reaches(tensor)) {
    const at::Tensor memory = !is_written ? in(tensor) : is_read ? inout(tensor) : out(tensor);
    operation(memory.data_ptr(), static_cast<size_t>(memory.numel()));
    return;
  }
  const at::Tensor flat = tensor.is_contiguous() ? tensor.view({-1}) : tensor.contiguous().view({-1});
  const at::Tensor host = memory_for(flat.sizes(), flat);
  const int64_t count = flat.numel();
  const int64_t segment = std::max<int64_t>(1, kSegment / static_cast<int64_t>(flat.element_size()));
  std::vector<c10::Event> arrived;
  for (int64_t start = 0; is_read && start < count; start += segment) {
    const int64_t length = std::min(segment, count - start);
    host.narrow(0, start, length).copy_(flat.narrow(0, start, length), /*non_blocking=*/true);
    arrived.emplace_back(flat.device().type());
    arrived.back().record(current_stream(flat.device()));
  }
  // An empty tensor is also one operation, because the other ranks count it.
  int64_t start = 0;
  size_t number = 0;
  do {
    const int64_t length = std::min(segment, count - start);
    if (is_read && count > 0) {
      arrived[number++].synchronize();
    }
    const at::Tensor part = host.narrow(0, start, length);
    start += length;
    if (is_written) {
      copy_back(flat.narrow(0, start - length, length), part);
      if (start == count && !tensor.is_contiguous()) {
        copy_back(tensor, flat.view(tensor.sizes()));
      }
    }
    flight_->keep(part);
    operation(part.data_ptr(), static_cast<size_t>(length));
    flight_->advance();
  } while (start < count);
}

} // namespace torch_kolo

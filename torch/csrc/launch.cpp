#include "launch.hpp"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

namespace torch_kolo {

namespace {

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.device().is_cpu();
}

// Begins an entry of PyTorch's profiler, with the shapes of tensors. Returns what ends it, on any
// thread; none if no profiler wants it.
std::function<void()> begin_profile(const std::string& backend, const char* name, at::TensorList tensors) {
  auto record = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!record->isActive()) {
    return nullptr;
  }
  record->_setAsync();
  const std::string title = backend + ":" + name;
  if (record->needsInputs()) {
    const std::vector<c10::IValue> inputs(tensors.begin(), tensors.end());
    record->before(title, &inputs);
  } else {
    record->before(title);
  }
  return at::wrapPropagateTLSState([record] { record->end(); });
}

} // namespace

Launch::Launch(ProcessGroupKolo& group, const Call& call, const at::Tensor& like, std::optional<at::TensorList> inputs)
    : group_(group),
      call_(call),
      channel_(call.is_message ? group.messages_ : group.collectives_),
      timeout_(call.timeout.count() > 0 ? call.timeout : group.options_->timeout),
      record_{next_call_key(), call.type, call.is_message ? group.seq_.load() : ++group.seq_},
      stream_(is_on_device(like) && group.has_devices_ ? std::optional(current_stream(like.device())) : std::nullopt),
      is_sync_(!call.is_async && (stream_ ? !group.options_->blocking_wait : !is_on_device(like))) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  TORCH_CHECK_VALUE(
      group.collectives_.comm != nullptr || !group.options_->enable_reconfigure, call.name,
      ": the process group has no members; call reconfigure first");
#endif
  std::function<void()> end_of_profile;
  if (C10_UNLIKELY(at::hasCallbacks())) {
    const at::TensorList shown = inputs ? *inputs : like.defined() ? at::TensorList(like) : at::TensorList();
    end_of_profile = begin_profile(group.options_->profiled_as, call.name, shown);
  }
  if (is_sync_) {
    end_of_profile_ = std::move(end_of_profile);
    return;
  }
  flight_ = std::make_shared<Flight>(group.members_, group.hooks_, record_, std::move(end_of_profile));
  if (is_on_device(like) && !stream_) {
    flight_->after_current_stream(like.device());
  }
}

Launch::~Launch() {
  if (C10_UNLIKELY(end_of_profile_ != nullptr)) {
    end_of_profile_();
  }
  if (!is_done_ && flight_ && !flight_->settle(0)) {
    hand_over(*channel_.waiter, record_.seq, flight_);
  }
}

void Launch::fail(kolo_result_t result) {
  const auto error = error_of(result, *group_.members_);
  if (ends_group(result)) {
    group_.hooks_->failed();
  }
  std::rethrow_exception(error);
}

at::Tensor Launch::memory_for(at::IntArrayRef sizes, const at::Tensor& like) const {
  if (reaches(like)) {
    return at::empty(sizes, like.options());
  }
  // Pinned memory, because copies between pageable memory and a device do not overlap with other
  // work.
  return at::empty(sizes, like.options().device(at::kCPU).pinned_memory(true));
}

void Launch::keep(const at::Tensor& memory) {
  if (flight_) {
    flight_->keep(memory);
  } else if (stream_) {
    // kolo still uses the memory when this returns. Freeing it waits for the stream, which waits
    // for kolo.
    c10::impl::VirtualGuardImpl(stream_->device_type()).recordDataPtrOnStream(memory.storage().data_ptr(), *stream_);
  }
}

void Launch::copy_back(const at::Tensor& to, const at::Tensor& from) {
  if (flight_ && stream_ && copies_.empty()) {
    flight_->after_current_stream(stream_->device());
  }
  copies_.push_back({to, from});
}

void Launch::arrives_from(c10::Device device) {
  c10::Event event(device.type());
  event.record(current_stream(device));
  arriving_.push_back(std::move(event));
}

void Launch::await_copies() {
  for (auto& event : arriving_) {
    event.synchronize();
  }
  arriving_.clear();
}

at::Tensor Launch::in(const at::Tensor& tensor) {
  at::Tensor memory = tensor;
  if (!reaches(tensor)) {
    memory = memory_for(tensor.sizes(), tensor);
    memory.copy_(tensor, /*non_blocking=*/true);
    arrives_from(tensor.device());
  } else if (!is_plain(tensor)) {
    memory = tensor.resolve_conj().resolve_neg().contiguous();
  }
  keep(memory);
  return memory;
}

at::Tensor Launch::out(const at::Tensor& tensor) {
  at::Tensor memory = tensor;
  if (!reaches(tensor) || !is_plain(tensor)) {
    memory = memory_for(tensor.sizes(), tensor);
    copy_back(tensor, memory);
  }
  keep(memory);
  return memory;
}

at::Tensor Launch::inout(const at::Tensor& tensor) {
  at::Tensor memory = in(tensor);
  if (!reaches(tensor) || !is_plain(tensor)) {
    copy_back(tensor, memory);
  }
  return memory;
}

namespace {

// Returns the tensors as one, if they are adjacent in memory.
at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  const char* end = nullptr;
  int64_t count = 0;
  for (const auto& tensor : tensors) {
    const auto* start = static_cast<const char*>(tensor.const_data_ptr());
    const bool follows = end == nullptr || (start == end && tensor.storage().is_alias_of(tensors.front().storage()));
    if (!is_plain(tensor) || tensor.numel() == 0 || !follows) {
      return {};
    }
    end = start + tensor.nbytes();
    count += tensor.numel();
  }
  return tensors.empty() ? at::Tensor() : tensors.front().as_strided({count}, {1});
}

int64_t count_of(const std::vector<at::Tensor>& tensors) {
  int64_t count = 0;
  for (const auto& tensor : tensors) {
    count += tensor.numel();
  }
  return count;
}

// Calls `each` with every tensor and its part of `memory`, in which the tensors follow each other.
template <typename Each>
void for_each_part(const at::Tensor& memory, const std::vector<at::Tensor>& tensors, Each each) {
  int64_t start = 0;
  for (const auto& tensor : tensors) {
    each(tensor, memory.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
}

} // namespace

at::Tensor Launch::in(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  at::Tensor memory = reaches(first) ? joined(tensors) : at::Tensor();
  if (!memory.defined()) {
    memory = memory_for({count_of(tensors)}, first);
    for_each_part(memory, tensors, [](const at::Tensor& tensor, const at::Tensor& part) {
      part.copy_(tensor, /*non_blocking=*/true);
    });
    if (!reaches(first)) {
      arrives_from(first.device());
    }
  }
  keep(memory);
  return memory;
}

at::Tensor Launch::out(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.front();
  at::Tensor memory = reaches(first) ? joined(tensors) : at::Tensor();
  if (!memory.defined()) {
    memory = memory_for({count_of(tensors)}, first);
    for_each_part(memory, tensors, [this](const at::Tensor& tensor, const at::Tensor& part) { copy_back(tensor, part); });
  }
  keep(memory);
  return memory;
}

at::Tensor Launch::apart(const at::Tensor& input, const at::Tensor& output, std::optional<size_t> in_place_at) {
  const auto* start = static_cast<const char*>(output.const_data_ptr());
  const bool is_in_place = in_place_at && input.const_data_ptr() == start + *in_place_at;
  if (is_in_place || !overlap(input, output)) {
    return input;
  }
  at::Tensor copy = input.clone();
  keep(copy);
  return copy;
}

at::Tensor Launch::out_apart(const at::Tensor& output, const at::Tensor& input) {
  if (!reaches(output) || !is_plain(output) || !overlap(output, input)) {
    return out(output);
  }
  at::Tensor memory = memory_for(output.sizes(), output);
  copy_back(output, memory);
  keep(memory);
  return memory;
}

c10::intrusive_ptr<c10d::Work> Launch::done(std::vector<at::Tensor> outputs, const at::Tensor& source) {
  is_done_ = true;
  KoloWork::Call call{group_.getRank(), timeout_, record_};
  if (is_sync_) {
    for (const auto& copy : copies_) {
      copy.to.copy_(copy.from);
    }
    call.milliseconds = std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - record_.began).count();
    group_.hooks_->completed(record_, call.milliseconds);
    return c10::make_intrusive<KoloWork>(call, std::move(outputs), nullptr, nullptr);
  }
  flight_->count_in(channel_.in_flight);
  group_.hooks_->watch(flight_);
  const bool is_collected = group_.collect(flight_, outputs, call_.is_message);
  auto work = c10::make_intrusive<KoloWork>(call, std::move(outputs), std::move(flight_), channel_.waiter);
  if (is_collected) {
    work->leave_flight();
  }
  work->set_source(source);
  if (source.defined() || group_.options_->blocking_wait) {
    work->block_host();
  }
  return work;
}

} // namespace torch_kolo

#include "work.hpp"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace torch_kolo {

namespace {

kolo_result_t wait_for(kolo_work_t work, uint64_t timeout_ms) {
  if (timeout_ms == kForever) {
    return kolo_work_wait(work);
  }
  return kolo_work_wait_timeout(work, timeout_ms);
}

// Each once.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    const c10::Device device = tensor.device();
    if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

} // namespace

// ---- Flight ----

Flight::~Flight() {
  // Whoever drops the last reference has seen it over, or it never started.
  for (auto& step : steps_) {
    if (step.work != nullptr) {
      kolo_work_destroy(step.work);
    }
  }
}

void Flight::after_current_stream(c10::Device device) {
  c10::Event event(device.type());
  event.record(current_stream(device));
  before_.push_back(std::move(event));
}

void Flight::advance() {
  for (auto& step : steps_) {
    int32_t done = 0;
    if (!step.is_over) {
      const kolo_result_t result = kolo_work_test(step.work, &done);
      if (done == 0) {
        return;
      }
      finish(step, result);
    }
  }
}

bool Flight::settle(uint64_t timeout_ms) {
  if (is_over()) {
    return true;
  }
  const auto began = std::chrono::steady_clock::now();
  for (auto& step : steps_) {
    uint64_t left = timeout_ms;
    if (timeout_ms != kForever) {
      const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began).count();
      left -= std::min<uint64_t>(timeout_ms, spent);
    }
    // Several threads may wait for one operation; the handle lives as long as this.
    const kolo_result_t result = wait_for(step.work, left);
    if (result == KOLO_IN_PROGRESS) {
      return false;
    }
    finish(step, result);
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_over()) {
      return true;
    }
    is_over_.store(true, std::memory_order_release);
    future.swap(future_);
  }
  if (future) {
    if (failure_) {
      future->setError(failure_);
    } else {
      // The future's events are recorded on the current streams, which may have much to do that has nothing to do with this.
      std::vector<c10::Stream> streams;
      for (const auto device : devices_of(outputs_)) {
        streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
      }
      const c10::MultiStreamGuard on_streams(streams);
      order_streams();
      future->markCompleted(c10::IValue(outputs_));
    }
  }
  return true;
}

void Flight::finish(Step& step, kolo_result_t result) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step.is_over) {
    return;
  }
  step.is_over = true;
  try {
    check(result, *members_);
    if (step.check) {
      step.check();
    }
    for (const auto& each : step.copies) {
      copy(each);
    }
  } catch (...) {
    if (!failure_) {
      failure_ = std::current_exception();
    }
  }
  step.copies.clear();
}

void Flight::copy(const Copy& copy) {
  // As kolo's own writes: no gradients, no count of versions.
  at::AutoDispatchBelowADInplaceOrView guard;
  const c10::Device device = copy.to.device();
  if (device.is_cpu()) {
    copy.to.copy_(copy.from);
    return;
  }
  c10::impl::VirtualGuardImpl impl(device.type());
  const c10::DeviceGuard on_device(device);
  if (!stream_) {
    stream_ = impl.getStreamFromGlobalPool(device);
    for (auto& event : before_) {
      event.block(*stream_);
    }
  }
  const c10::Stream stream = *stream_;
  const c10::StreamGuard on_stream(stream);
  copy.to.copy_(copy.from, /*non_blocking=*/true);
  impl.recordDataPtrOnStream(copy.to.storage().data_ptr(), stream);
  c10::Event event(device.type());
  event.record(stream);
  after_.push_back(std::move(event));
}

void Flight::order_streams() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& event : after_) {
    event.block(current_stream(event.device()));
  }
}

bool Flight::await_on_streams() {
  if (needs_host_) {
    return false;
  }
  for (const auto& step : steps_) {
    if (step.device.is_cpu()) {
      return false;
    }
  }
  // One that has failed by now is for the host, which says so.
  for (const auto& step : steps_) {
    if (kolo_work_wait_on(step.work, current_stream(step.device).native_handle()) != KOLO_OK) {
      return false;
    }
  }
  return true;
}

void Flight::cancel() {
  for (auto& step : steps_) {
    kolo_work_cancel(step.work);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Flight::future(const std::vector<at::Tensor>& outputs, bool& is_new) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_new = !is_over() && !future_;
  if (is_new) {
    future_ = future_of(outputs);
    outputs_ = outputs;
  }
  return future_;
}

// ---- Waiter ----

void Waiter::push(std::shared_ptr<Flight> flight) {
  std::lock_guard<std::mutex> starting(mutex_);
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->flights.push_back(std::move(flight));
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([state = state_] { run(*state); });
  }
  state_->changed.notify_one();
}

void Waiter::close() {
  std::lock_guard<std::mutex> starting(mutex_);
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_closed = true;
  }
  state_->changed.notify_one();
  if (!thread_.joinable()) {
    return;
  }
  // A callback of a future may hold the last reference to the process group.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Waiter::run(State& state) {
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.is_closed || !state.flights.empty(); });
    if (state.flights.empty()) {
      return;
    }
    auto flight = std::move(state.flights.front());
    state.flights.pop_front();
    // Messages that wait for different ranks take turns.
    const bool is_alone = state.in_order || state.flights.empty();
    const uint64_t patience = state.in_order ? kForever : is_alone ? 20 : 1;
    lock.unlock();
    const bool is_over = flight->settle(patience);
    if (is_over) {
      flight.reset();
    }
    lock.lock();
    if (!is_over) {
      state.flights.push_back(std::move(flight));
    }
  }
}

// ---- Work ----

KoloWork::KoloWork(const Call& call, std::vector<at::Tensor> outputs, std::shared_ptr<Flight> flight, std::shared_ptr<Waiter> waiter)
    : Work(call.rank, call.type, flight && at::hasCallbacks() ? call.title : nullptr),
      seq_(call.seq),
      timeout_(call.timeout),
      outputs_(std::move(outputs)),
      flight_(std::move(flight)),
      waiter_(std::move(waiter)) {}

KoloWork::~KoloWork() {
  end_profile();
  // After the end of the process group everything is over, and nobody must be left to a thread that nobody joins.
  if (flight_ && !flight_->settle(0)) {
    waiter_->push(std::move(flight_));
  }
}

bool KoloWork::isCompleted() {
  if (!flight_) {
    return true;
  }
  const bool is_over = flight_->settle(0);
  if (is_over) {
    end_profile();
  }
  return is_over;
}

bool KoloWork::isSuccess() const {
  return !flight_ || (flight_->is_over() && !flight_->failure());
}

std::exception_ptr KoloWork::exception() const {
  return flight_ && flight_->is_over() ? flight_->failure() : nullptr;
}

bool KoloWork::wait(std::chrono::milliseconds timeout) {
  if (!flight_) {
    return true;
  }
  const bool is_limited = timeout.count() > 0;
  if (!is_limited && !blocks_host_ && !flight_->is_over() && flight_->await_on_streams()) {
    end_profile();
    return true;
  }
  if (!flight_->settle(is_limited ? static_cast<uint64_t>(timeout.count()) : kForever)) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            c10d::opTypeToString(opType_), " seq=", seq_, " has not ended after ", timeout.count(),
            " ms, as long as wait() was told to wait. It goes on: wait again, or abort the process group."));
  }
  end_profile();
  if (flight_->failure()) {
    std::rethrow_exception(flight_->failure());
  }
  flight_->order_streams();
  return true;
}

void KoloWork::abort() {
  if (flight_) {
    flight_->cancel();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> KoloWork::getFuture() {
  if (flight_) {
    bool is_new = false;
    if (auto future = flight_->future(outputs_, is_new)) {
      if (is_new) {
        waiter_->push(flight_);
      }
      return future;
    }
  }
  auto future = future_of(outputs_);
  if (flight_ && flight_->failure()) {
    future->setError(flight_->failure());
  } else {
    if (flight_) {
      flight_->order_streams();
    }
    future->markCompleted(c10::IValue(outputs_));
  }
  return future;
}

void KoloWork::end_profile() {
  std::function<void()> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end.swap(recordFunctionEndCallback_);
  }
  if (end) {
    end();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& outputs) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices_of(outputs));
}

} // namespace torch_kolo

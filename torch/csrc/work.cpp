#include "work.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "signals.hpp"

namespace torch_kolo {

namespace {

kolo_result_t wait_for(kolo_work_t work, uint64_t timeout_ms) {
  if (timeout_ms == kForever) {
    return kolo_work_wait(work);
  }
  return kolo_work_wait_timeout(work, timeout_ms);
}

} // namespace

kolo_result_t wait_to_the_end(kolo_work_t work) {
  kolo_result_t result = KOLO_IN_PROGRESS;
  while (result == KOLO_IN_PROGRESS) {
    result = kolo_work_wait(work);
  }
  return result;
}

kolo_result_t finish_now(kolo_work_t work) {
  kolo_result_t result = kolo_work_wait(work);
  if (result == KOLO_IN_PROGRESS) {
    // A signal handler has raised an exception. The caller gets its tensors back.
    kolo_work_cancel(work);
    result = wait_to_the_end(work);
  }
  kolo_work_destroy(work);
  return result;
}

namespace {

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

// A future records its events on the current streams. These streams, one for each device, are ours,
// because the caller's may have unrelated work.
std::vector<c10::Stream> streams_for(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Stream> streams;
  for (const auto device : devices_of(tensors)) {
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  return streams;
}

} // namespace

// ---- Flight ----

Flight::~Flight() {
  leave();
  // The operation has ended or never started when the last reference is dropped.
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
  const auto left = [&] {
    if (timeout_ms == kForever) {
      return kForever;
    }
    const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began).count();
    return timeout_ms - std::min<uint64_t>(timeout_ms, spent);
  };
  for (auto& step : steps_) {
    // Several threads may wait for one operation. The handle lives as long as this object.
    const kolo_result_t result = wait_for(step.work, left());
    if (result == KOLO_IN_PROGRESS) {
      return false;
    }
    finish(step, result);
  }
  for (auto& part : parts_) {
    if (!part->settle(left())) {
      return false;
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_over()) {
      return true;
    }
    for (auto& part : parts_) {
      if (!failure_ && part->failure()) {
        failure_ = part->failure();
        result_ = part->result();
        ends_group_ = part->ends_group_;
      }
    }
    is_over_.store(true, std::memory_order_release);
  }
  leave();
  end_profile();
  // Without the lock, because hooks may wait for this call. One thread gets here.
  if (failure_) {
    await_hooks();
  } else {
    hooks_->completed(record_, milliseconds());
  }
  return true;
}

void Flight::leave() {
  if (auto in_flight = std::exchange(in_flight_, nullptr)) {
    --*in_flight;
  }
}

void Flight::end_profile() {
  std::function<void()> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end.swap(end_of_profile_);
  }
  if (C10_UNLIKELY(end != nullptr)) {
    end();
  }
}

void Flight::await_hooks() {
  if (ends_group_) {
    hooks_->failed();
  }
}

float Flight::milliseconds() const {
  float sum = static_cast<float>(nanoseconds_) / 1e6F;
  for (const auto& part : parts_) {
    sum += part->milliseconds();
  }
  return sum;
}

void Flight::finish(Step& step, kolo_result_t result) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step.is_over) {
    return;
  }
  step.is_over = true;
  const c10d::WorkResult of_step = work_result_of(result);
  try {
    check(result, *members_);
    uint64_t nanoseconds = 0;
    kolo_work_duration(step.work, &nanoseconds);
    nanoseconds_ += nanoseconds;
    for (const auto& each : step.copies) {
      copy(each, step.work);
    }
  } catch (...) {
    if (!failure_) {
      failure_ = std::current_exception();
      // A copy may have failed after the operation.
      result_ = result == KOLO_OK ? c10d::WorkResult::COMM_ERROR : of_step;
      ends_group_ = ends_group(result);
    }
  }
  step.copies.clear();
}

void Flight::copy(const Copy& copy, kolo_work_t work) {
  // The copy records no gradient and does not change the version counter, as kolo's own writes.
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
  // The operation has ended, except in the capture of a CUDA graph.
  check(kolo_work_wait_on(work, stream.native_handle()), *members_);
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
  // In the capture of a CUDA graph an operation counts as over, and a stream must wait for it. Another
  // one has ended, and then this does nothing.
  for (const auto& step : steps_) {
    if (!step.device.is_cpu()) {
      check(kolo_work_wait_on(step.work, current_stream(step.device).native_handle()), *members_);
    }
  }
  for (auto& part : parts_) {
    part->order_streams();
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
  // If the operation has failed by now, the host waits and reports the failure.
  for (const auto& step : steps_) {
    if (kolo_work_wait_on(step.work, current_stream(step.device).native_handle()) != KOLO_OK) {
      return false;
    }
  }
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->await_on_streams(); });
}

void Flight::cancel() {
  for (auto& step : steps_) {
    kolo_work_cancel(step.work);
  }
  for (auto& part : parts_) {
    part->cancel();
  }
}

Flight::FuturePtr Flight::future(const std::vector<at::Tensor>& outputs, bool& is_new) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_new = !is_over() && !future_;
  if (is_new) {
    future_ = future_of(outputs);
    outputs_ = outputs;
    due_.push_back(future_);
  }
  return future_;
}

Flight::FuturePtr Flight::future_on_streams(const std::vector<at::Tensor>& outputs) {
  const auto streams = streams_for(outputs);
  const c10::MultiStreamGuard on_streams(streams);
  if (streams.empty() || !await_on_streams()) {
    return {};
  }
  auto future = future_of(outputs);
  future->markCompleted(c10::IValue(outputs));
  return future;
}

Flight::FuturePtr Flight::result_future(bool& is_new) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_new = !is_over() && !result_future_;
  if (is_new) {
    result_future_ = future_of_result();
    due_.push_back(result_future_);
  }
  return result_future_;
}

Flight::FuturePtr Flight::future() {
  std::lock_guard<std::mutex> lock(mutex_);
  return future_;
}

Flight::FuturePtr Flight::result_future() {
  std::lock_guard<std::mutex> lock(mutex_);
  return result_future_;
}

void Flight::complete_future() {
  FuturePtr future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (due_.empty()) {
      return;
    }
    future = std::move(due_.back());
    due_.pop_back();
  }
  if (future == result_future()) {
    future->markCompleted(c10::IValue(static_cast<int64_t>(result_)));
    return;
  }
  if (failure_) {
    future->setError(failure_);
    return;
  }
  try {
    const c10::MultiStreamGuard on_streams(streams_for(outputs_));
    order_streams();
    future->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future->setErrorIfNeeded(std::current_exception());
  }
}

// ---- Waiter ----

struct Waiter::State {
  explicit State(bool in_order) : in_order(in_order) {}

  // Whether no thread waits for the first flight or an earlier one.
  bool needs_thread() const {
    return !flights.empty() && (awaited.empty() || flights.begin()->first < *awaited.begin());
  }
  // Wakes or starts a thread if none waits. The caller holds the mutex.
  static void provide_thread(const std::shared_ptr<State>& state);
  void join_ended() {
    for (auto& thread : ended) {
      if (thread.joinable()) {
        thread.join();
      }
    }
    ended.clear();
  }

  const bool in_order;
  std::mutex mutex;
  // The flights by number. Threads wait for them in this order.
  std::multimap<uint64_t, std::shared_ptr<Flight>> flights;
  // The numbers of the flights that threads wait for.
  std::multiset<uint64_t> awaited;
  // The next number of a message.
  uint64_t last_number = 0;
  std::condition_variable changed;
  size_t idle = 0;
  bool is_closed = false;
  std::list<std::thread> threads;
  // Threads that no longer use this object.
  std::list<std::thread> ended;
  std::condition_variable thread_ended;
};

void Waiter::State::provide_thread(const std::shared_ptr<State>& state) {
  if (!state->needs_thread()) {
    return;
  }
  if (state->idle > 0) {
    state->changed.notify_one();
    return;
  }
  state->join_ended();
  const auto self = state->threads.emplace(state->threads.end());
  try {
    *self = std::thread([state, self] { run(state, self); });
  } catch (const std::system_error&) {
    state->threads.erase(self);
    // Threads that run callbacks return later.
    if (state->threads.empty()) {
      throw;
    }
  }
}

Waiter::Waiter(bool in_order) : state_(std::make_shared<State>(in_order)) {}

void Waiter::push(uint64_t number, std::shared_ptr<Flight> flight) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  const auto place = state_->flights.emplace(state_->in_order ? number : ++state_->last_number, std::move(flight));
  try {
    State::provide_thread(state_);
  } catch (...) {
    state_->flights.erase(place);
    throw;
  }
}

void Waiter::close(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->is_closed = true;
  state_->changed.notify_all();
  // A callback of a future may hold the last reference to the process group.
  const auto is_other = [](const std::thread& thread) { return thread.joinable() && thread.get_id() != std::this_thread::get_id(); };
  auto& threads = state_->threads;
  const auto runs = [&] { return std::count_if(threads.begin(), threads.end(), is_other); };
  state_->thread_ended.wait_for(lock, std::min<std::chrono::milliseconds>(patience, std::chrono::hours(24)), [&] { return runs() == 0; });
  if (runs() > 0 && patience.count() > 0) {
    TORCH_WARN(
        runs(), " callbacks of futures have not returned ", patience.count(), " ms after the end of their process group, which no longer waits for them");
  }
  state_->join_ended();
  for (auto& thread : threads) {
    if (thread.joinable()) {
      thread.detach();
    }
  }
}

void Waiter::run(const std::shared_ptr<State>& state, std::list<std::thread>::iterator self) {
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    if (!state->needs_thread()) {
      if (state->idle > 0 || (state->is_closed && state->flights.empty())) {
        break;
      }
      ++state->idle;
      state->changed.wait(lock);
      --state->idle;
      continue;
    }
    const auto first = state->flights.begin();
    const auto awaited = state->awaited.insert(first->first);
    auto flight = std::move(first->second);
    state->flights.erase(first);
    // Messages that wait for different ranks take turns.
    const uint64_t patience = state->in_order ? kForever : state->flights.empty() ? 20 : 1;
    lock.unlock();
    const bool is_over = flight->settle(patience);
    lock.lock();
    state->awaited.erase(awaited);
    if (!is_over) {
      state->flights.emplace(++state->last_number, std::move(flight));
      continue;
    }
    if (flight->future() || flight->result_future()) {
      State::provide_thread(state);
    }
    lock.unlock();
    flight->complete_future();
    flight.reset();
    lock.lock();
  }
  if (state->is_closed) {
    state->changed.notify_all();
  }
  state->ended.splice(state->ended.end(), state->threads, self);
  state->thread_ended.notify_all();
}

// ---- Work ----

void hand_over(Waiter& waiter, uint64_t number, const std::shared_ptr<Flight>& flight) {
  try {
    waiter.push(number, flight);
  } catch (const std::system_error&) {
    // The system has no threads left. kolo uses the tensors until this returns, at the latest at
    // the operation's deadline.
    while (!flight->settle(kForever)) {
    }
  }
}

KoloWork::KoloWork(const Call& call, std::vector<at::Tensor> outputs, std::shared_ptr<Flight> flight, std::shared_ptr<Waiter> waiter)
    : Work(call.rank, call.record.type),
      record_(call.record),
      timeout_(call.timeout),
      milliseconds_(call.milliseconds),
      outputs_(std::move(outputs)),
      flight_(std::move(flight)),
      waiter_(std::move(waiter)) {}

KoloWork::~KoloWork() {
  // After the end of the process group all operations have ended. Leave no work to a thread that is
  // never joined.
  if (flight_ && !is_left_ && !flight_->settle(0)) {
    hand_over(*waiter_, record_.seq, flight_);
  }
}

bool KoloWork::isCompleted() {
  if (!flight_) {
    return true;
  }
  return flight_->settle(0);
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
    flight_->end_profile();
    return true;
  }
  if (!flight_->settle(is_limited ? static_cast<uint64_t>(timeout.count()) : kForever)) {
    rethrow_of_handler();
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            c10d::opTypeToString(opType_), " seq=", record_.seq, " has not ended after ", timeout.count(),
            " ms, the timeout of wait(). It continues: wait again, or abort the process group."));
  }
  // After wait(), the futures are completed, even if their callbacks still run.
  for (const auto& future : {flight_->result_future(), flight_->future()}) {
    if (future) {
      future->wait();
    }
  }
  if (flight_->failure()) {
    flight_->await_hooks();
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
    if (!blocks_host_ && !flight_->is_over()) {
      if (auto future = flight_->future_on_streams(outputs_)) {
        return future;
      }
    }
    bool is_new = false;
    if (auto future = flight_->future(outputs_, is_new)) {
      if (is_new) {
        leave_to_waiter(future);
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

c10::intrusive_ptr<c10::ivalue::Future> KoloWork::getFutureResult() {
  if (flight_) {
    bool is_new = false;
    if (auto future = flight_->result_future(is_new)) {
      if (is_new) {
        leave_to_waiter(future);
      }
      return future;
    }
  }
  auto future = future_of_result();
  future->markCompleted(c10::IValue(static_cast<int64_t>(flight_ ? flight_->result() : c10d::WorkResult::SUCCESS)));
  return future;
}

void KoloWork::leave_to_waiter(const Flight::FuturePtr& future) {
  try {
    waiter_->push(record_.seq, flight_);
    is_left_ = true;
  } catch (const std::exception&) {
    future->setError(std::current_exception());
  }
}

float KoloWork::getDuration() const {
  if (!flight_) {
    return milliseconds_;
  }
  TORCH_CHECK(flight_->is_over(), "the duration of an operation is known after its end: call wait() or is_completed() first");
  return flight_->milliseconds();
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& outputs) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices_of(outputs));
}

c10::intrusive_ptr<c10::ivalue::Future> future_of_result() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
}

} // namespace torch_kolo

// Operations in flight, and the threads that wait for them.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "error.hpp"
#include "hooks.hpp"

namespace torch_kolo {

// A copy that is made when an operation has ended: from the memory that kolo wrote to the caller's
// memory.
struct Copy {
  at::Tensor to;
  at::Tensor from;
};

// Returns the current stream of this thread on a device.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// One of kolo's operations, and the work after it.
struct Step {
  kolo_work_t work = nullptr;
  // The device on which kolo runs the operation, so that streams can wait for it in place of the
  // host.
  c10::Device device = at::kCPU;
  std::vector<Copy> copies;
  bool is_over = false;
};

// The operations in flight of one call of PyTorch, or of several coalesced calls. A flight outlives
// a Work that was not waited for, because kolo uses the tensors until the operations have ended.
class Flight {
 public:
  Flight(
      std::shared_ptr<const Members> members,
      std::shared_ptr<Hooks> hooks,
      const CallRecord& record,
      std::function<void()> end_of_profile)
      : members_(std::move(members)), hooks_(std::move(hooks)), record_(record), end_of_profile_(std::move(end_of_profile)) {}
  ~Flight();
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // The launching thread calls these, until `launched`.
  void keep(at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
  }
  void add(Step step) {
    steps_.push_back(std::move(step));
  }
  // Adds a part. The flight has ended when all its parts have ended.
  void add(std::shared_ptr<Flight> part) {
    parts_.push_back(std::move(part));
  }
  // Does the work after the steps that have ended by now, so that it overlaps with the others.
  void advance();
  // Copies to this device wait for the work that the calling thread's stream has so far.
  void after_current_stream(c10::Device device);
  // Counts this flight among those of its communicator until it has ended.
  void count_in(std::shared_ptr<std::atomic<int64_t>> in_flight) {
    in_flight_ = std::move(in_flight);
    ++*in_flight_;
  }
  // Whether the host has work after the end.
  void needs_host() {
    needs_host_ = true;
  }

  bool is_over() const {
    return is_over_.load(std::memory_order_acquire);
  }
  // Waits at most for the timeout and does the work after the end. Returns false if the flight has
  // not ended by then, or if a signal handler has raised an exception.
  bool settle(uint64_t timeout_ms);
  // After the end:
  const std::exception_ptr& failure() const {
    return failure_;
  }
  c10d::WorkResult result() const {
    return result_;
  }
  // The time of the operations, one after the other.
  float milliseconds() const;
  // Ends the entry of PyTorch's profiler. `settle` calls it.
  void end_profile();
  // Returns when the abort hooks have run, if the failure is that of the group.
  void await_hooks();
  // Makes the current streams of the calling thread wait for the copies to devices.
  void order_streams();
  // Makes them wait for the end in place of the host. Returns false if the host has work before.
  bool await_on_streams();
  void cancel();

  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  // Returns a future, which a Waiter completes. If `is_new`, the caller pushes this flight to a
  // Waiter. Returns none if the flight has ended without a future.
  FuturePtr future(const std::vector<at::Tensor>& outputs, bool& is_new);
  // Returns a completed future, whose users' streams wait for the end. Returns none if the host has
  // work before.
  FuturePtr future_on_streams(const std::vector<at::Tensor>& outputs);
  // As `future`, for the result, a number of c10d::WorkResult.
  FuturePtr result_future(bool& is_new);
  // Returns the futures that there are.
  FuturePtr future();
  FuturePtr result_future();
  // After the end: completes one of the futures that are not complete. This runs its callbacks,
  // which may take any time, and may wait for the other future.
  void complete_future();

 private:
  void finish(Step& step, kolo_result_t result);
  void leave();
  void copy(const Copy& copy, kolo_work_t work);

  const std::shared_ptr<const Members> members_;
  const std::shared_ptr<Hooks> hooks_;
  const CallRecord record_;
  std::function<void()> end_of_profile_;
  c10::SmallVector<Step, 1> steps_;
  std::vector<std::shared_ptr<Flight>> parts_;
  std::vector<at::Tensor> tensors_;
  bool needs_host_ = false;
  std::shared_ptr<std::atomic<int64_t>> in_flight_;
  // The streams of copies to a device. They follow the work that the caller's streams had at the
  // call.
  std::optional<c10::Stream> stream_;
  std::vector<c10::Event> before_;
  std::vector<c10::Event> after_;

  std::mutex mutex_;
  std::exception_ptr failure_;
  c10d::WorkResult result_ = c10d::WorkResult::SUCCESS;
  // Whether the failure is that of the group.
  bool ends_group_ = false;
  uint64_t nanoseconds_ = 0;
  std::atomic<bool> is_over_{false};
  FuturePtr future_;
  FuturePtr result_future_;
  // The futures that are not complete. A Waiter has this flight once for each.
  std::vector<FuturePtr> due_;
  std::vector<at::Tensor> outputs_;
};

constexpr uint64_t kForever = UINT64_MAX;

// Waits until an operation has ended, whatever signal handlers raise.
kolo_result_t wait_to_the_end(kolo_work_t work);

// Waits until an operation has ended, and frees its handle. Cancels it if a signal handler raises an
// exception.
kolo_result_t finish_now(kolo_work_t work);

// Threads that settle flights without a caller that waits (the Work was dropped, or has a future),
// and complete the futures.
//
// A callback of a future may wait for anything, also for a later flight. So one thread waits for
// flights, and before it completes a future, another thread takes its place: there is a thread for
// each callback that runs, and one that waits. The first starts with the first flight; of idle
// threads, one stays.
class Waiter {
 public:
  // Collectives end in the order of their calls; messages do not.
  explicit Waiter(bool in_order);
  ~Waiter() {
    close(std::chrono::milliseconds(0));
  }
  // `number`: the call's place in the order of the group's calls.
  void push(uint64_t number, std::shared_ptr<Flight> flight);
  // Waits until the callbacks have returned, at most for `patience`. The caller has ended all
  // flights before.
  void close(std::chrono::milliseconds patience);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state, std::list<std::thread>::iterator self);

  std::shared_ptr<State> state_;
};

// Leaves a flight that outlives its Work to a Waiter.
void hand_over(Waiter& waiter, uint64_t number, const std::shared_ptr<Flight>& flight);

// The result of a call. Without a flight, the call has succeeded.
class KoloWork final : public c10d::Work {
 public:
  struct Call {
    int rank;
    std::chrono::milliseconds timeout;
    CallRecord record;
    // Of a call without a flight.
    float milliseconds = 0;
  };
  KoloWork(const Call& call, std::vector<at::Tensor> outputs, std::shared_ptr<Flight> flight, std::shared_ptr<Waiter> waiter);
  ~KoloWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  void synchronize() override {
    wait();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  // In milliseconds. Every call is timed.
  float getDuration() const override;
  uint64_t getSequencenumber() const override {
    return record_.seq;
  }
  // The flight of a group of coalesced calls keeps this flight until its end.
  void leave_flight() {
    is_left_ = true;
  }
  // Not marked as overrides: older versions of PyTorch do not have them.
  virtual std::chrono::milliseconds getTimeout() const {
    return timeout_;
  }
  virtual uint64_t getCompletionKey() const {
    return record_.key;
  }
  // The source of a message, after the end.
  int sourceRank() const override {
    TORCH_CHECK(source_.defined(), "only a message that was received from any rank has a source");
    return *source_.const_data_ptr<int32_t>();
  }
  // For the option blocking_wait: wait() returns after the end, also on devices.
  void block_host() {
    blocks_host_ = true;
  }
  void set_source(const at::Tensor& source) {
    source_ = source;
  }

 private:
  // Leaves the flight to the Waiter, which completes its futures.
  void leave_to_waiter(const Flight::FuturePtr& future);

  const CallRecord record_;
  const std::chrono::milliseconds timeout_;
  const float milliseconds_;
  std::vector<at::Tensor> outputs_;
  // The sender's rank, if the message might come from any rank.
  at::Tensor source_;
  bool blocks_host_ = false;
  // Another flight or the Waiter keeps the flight until its end.
  bool is_left_ = false;
  std::shared_ptr<Flight> flight_;
  std::shared_ptr<Waiter> waiter_;
};

// Makes a future of these tensors with their devices. Without the devices, its callbacks would not
// wait for streams.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& outputs);
// Makes a future of a number of c10d::WorkResult.
c10::intrusive_ptr<c10::ivalue::Future> future_of_result();

} // namespace torch_kolo

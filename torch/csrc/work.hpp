// Operations in flight, and who waits for them.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "error.hpp"

namespace torch_kolo {

// What is copied once an operation has ended: from the memory that kolo wrote to where the caller wants it.
struct Copy {
  at::Tensor to;
  at::Tensor from;
};

// Where this thread gives a device what it has to do.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// One of kolo's operations, and what remains to be done after it.
struct Step {
  kolo_work_t work = nullptr;
  // Where kolo does it: streams of a device can wait for it, and the host need not.
  c10::Device device = at::kCPU;
  // Throws if what arrived is not what it should be.
  std::function<void()> check;
  std::vector<Copy> copies;
  bool is_over = false;
};

// What one call of PyTorch has in flight. It outlives the Work if nobody waited: kolo uses the tensors until it has ended.
class Flight {
 public:
  explicit Flight(std::shared_ptr<const Members> members) : members_(std::move(members)) {}
  ~Flight();
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // Until `launched`, by the thread that launches.
  void keep(at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
  }
  void add(Step step) {
    steps_.push_back(std::move(step));
  }
  // Does what remains to be done for steps that have ended by now; for overlap.
  void advance();
  // Copies to this device must wait for what the calling thread's stream has been given so far.
  void after_current_stream(c10::Device device);
  // The host has something to do when it has ended.
  void needs_host() {
    needs_host_ = true;
  }

  bool is_over() const {
    return is_over_.load(std::memory_order_acquire);
  }
  // Waits at most so long, and does what remains to be done. False if it has not ended by then.
  bool settle(uint64_t timeout_ms);
  // Once it is over:
  const std::exception_ptr& failure() const {
    return failure_;
  }
  // Has the current streams of the calling thread wait for what was copied to devices.
  void order_streams();
  // Has them wait for the end, in place of the host; false if that has something to do before.
  bool await_on_streams();
  void cancel();

  // A future that is completed when somebody settles this. `is_new` if nobody had asked for it before.
  c10::intrusive_ptr<c10::ivalue::Future> future(const std::vector<at::Tensor>& outputs, bool& is_new);

 private:
  void finish(Step& step, kolo_result_t result);
  void copy(const Copy& copy);

  std::shared_ptr<const Members> members_;
  c10::SmallVector<Step, 1> steps_;
  std::vector<at::Tensor> tensors_;
  bool needs_host_ = false;
  // Where copies to a device go on, after what the caller's streams had been given at the call.
  std::optional<c10::Stream> stream_;
  std::vector<c10::Event> before_;
  std::vector<c10::Event> after_;

  std::mutex mutex_;
  std::exception_ptr failure_;
  std::atomic<bool> is_over_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::vector<at::Tensor> outputs_;
};

constexpr uint64_t kForever = UINT64_MAX;

// A thread that settles flights that nobody else waits for: those with a future, and those whose Work was dropped. Started with the
// first of them.
class Waiter {
 public:
  // Collectives end in order; messages do not.
  explicit Waiter(bool in_order) : state_(std::make_shared<State>()) {
    state_->in_order = in_order;
  }
  ~Waiter() {
    close();
  }
  void push(std::shared_ptr<Flight> flight);
  // Returns when all flights are over, which somebody else has to see to.
  void close();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Flight>> flights;
    bool in_order = true;
    bool is_closed = false;
  };
  static void run(State& state);

  std::shared_ptr<State> state_;
  std::mutex mutex_;
  std::thread thread_;
};

// What a call returns. Without a flight, one that has ended well.
class KoloWork final : public c10d::Work {
 public:
  struct Call {
    int rank;
    c10d::OpType type;
    const char* title;
    uint64_t seq;
    std::chrono::milliseconds timeout;
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
  uint64_t getSequencenumber() const override {
    return seq_;
  }
  // Not marked as an override: older versions of PyTorch do not have it.
  virtual std::chrono::milliseconds getTimeout() const {
    return timeout_;
  }
  // Of a message, when it is over.
  int sourceRank() const override {
    TORCH_CHECK(source_.defined(), "only what is received from anybody has a source");
    return *source_.const_data_ptr<int32_t>();
  }
  // For whoever asked that wait() should return when all is over, also on devices.
  void block_host() {
    blocks_host_ = true;
  }
  void set_source(const at::Tensor& source) {
    source_ = source;
  }
  void add_outputs(const std::vector<at::Tensor>& outputs) {
    outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  }

 private:
  void end_profile();

  const uint64_t seq_;
  const std::chrono::milliseconds timeout_;
  std::vector<at::Tensor> outputs_;
  // Whose message it was, if it might be anybody's.
  at::Tensor source_;
  bool blocks_host_ = false;
  std::shared_ptr<Flight> flight_;
  std::shared_ptr<Waiter> waiter_;
};

// A future of these tensors, for the devices that they are on: without those, its callbacks would not wait for streams.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::vector<at::Tensor>& outputs);

} // namespace torch_kolo

// The process group: every collective of c10d::Backend, on a communicator of kolo.

#pragma once

#include <kolo.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "error.hpp"
#include "hooks.hpp"
#include "work.hpp"

// PyTorch has abort hooks since 2.14, and completion hooks since 2.15.
#if defined(C10D_BACKEND_HAS_HOOKS) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)
#define TORCH_KOLO_HAS_COMPLETION_HOOKS
#endif

namespace torch_kolo {

class Launch;

class ProcessGroupKolo final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : c10d::Backend::Options("kolo", timeout) {}
    // Not marked as an override: older versions of PyTorch do not have it.
    virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const {
      return c10::make_intrusive<Options>(*this);
    }

    // As in kolo_config_t. Empty means not set.
    std::string transport;
    std::string algorithm;
    bool reproducible = false;
    // Whether wait() on an operation on a device returns when the operation has ended, and throws
    // its failure. Otherwise wait() makes the current stream wait.
    bool blocking_wait = false;
    // The name of the backend in entries of profiles.
    std::string profiled_as = "kolo";
  };

  ProcessGroupKolo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  // Takes over a communicator that was made with this deadline.
  ProcessGroupKolo(
      kolo_comm_t comm,
      int rank,
      int size,
      std::chrono::milliseconds made_with,
      c10::intrusive_ptr<Options> options);
  ~ProcessGroupKolo() override;

  const std::string getBackendName() const override {
    return "kolo";
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  bool supportsShrinking() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  uint64_t getSequenceNumberForGroup() override {
    return seq_;
  }
  void setSequenceNumberForGroup() override {}
  c10d::ErrorType getError() override;
  // Whether kolo accepts the memory of devices.
  bool has_devices() const {
    return has_devices_;
  }
  // What the communicators have done so far, together.
  kolo_comm_stats_t stats() const;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Splits = std::vector<int64_t>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  // Not marked as an override: older versions of PyTorch do not have it.
  virtual WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      Splits& output_splits,
      Splits& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts,
      const int& rank,
      const int& size) override;
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude,
      int flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  void abort() override;
  void shutdown() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  // Every call is timed.
  void enableCollectivesTiming() override {}
#ifdef C10D_BACKEND_HAS_HOOKS
  // Not marked as an override: PyTorch 2.14 does not have it.
  virtual bool supportsAbortHooks() const {
    return true;
  }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef TORCH_KOLO_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override {
    return true;
  }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override {
    return true;
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

 private:
  friend class Launch;

  // Collectives and messages have a communicator each, so that a receive that waits does not block
  // collectives.
  struct Channel {
    explicit Channel(bool in_order) : waiter(std::make_shared<Waiter>(in_order)) {}
    kolo_comm_t comm = nullptr;
    std::shared_ptr<Waiter> waiter;
    // The nonblocking calls that have not ended, as far as this process has noticed.
    std::shared_ptr<std::atomic<int64_t>> in_flight = std::make_shared<std::atomic<int64_t>>(0);
  };
  // The asynchronous calls that a thread makes between startCoalescing and endCoalescing. They
  // start at once, and each has a Work of its own, as other calls. So no call is lost without
  // endCoalescing.
  struct Coalescing {
    std::thread::id thread;
    std::shared_ptr<Flight> flight;
    Tensors outputs;
    bool has_messages = false;
  };

  // The description of a call, for Launch.
  struct Call {
    c10d::OpType type;
    // The name in errors and in profiles.
    const char* name;
    bool is_async = true;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    bool is_message = false;
  };

  // As the options say. It refers to their strings.
  kolo_config_t config() const;
  void connect(const c10::intrusive_ptr<c10d::Store>& store);
  void connect_messages();
  void find_devices();
  c10::intrusive_ptr<Options> options_of(const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  // Adds a call to the Work of endCoalescing. Returns false if this thread is not coalescing.
  bool collect(const std::shared_ptr<Flight>& flight, const Tensors& outputs, bool is_message);
  // Returns the ranks that are missing.
  std::vector<int> roll_call(std::chrono::milliseconds timeout);
  [[noreturn]] void report_absent(const std::vector<int>& missing, std::chrono::milliseconds timeout) const;
  void close();
  void gather_lists(Launch& launch, const char* name, const Lists& outputs, const Tensors& inputs, Tensors& flat);
  WorkPtr gather_tensors(const Call& call, const Tensors& outputs, const Tensors& inputs);
  WorkPtr scatter_tensors(const Call& call, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceOp& op);
  WorkPtr message(Tensors& tensors, std::optional<int> peer, int tag, bool sends);

  const c10::intrusive_ptr<Options> options_;
  // The deadline with which the communicators were made.
  const std::chrono::milliseconds made_with_;
  std::shared_ptr<const Members> members_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>(options_->timeout);
  Channel collectives_{true};
  Channel messages_{false};
  bool has_devices_ = false;
  std::atomic<uint64_t> seq_{0};
  std::mutex coalescing_mutex_;
  std::optional<Coalescing> coalescing_;
  // What get_reconfigure_handle has returned; empty if there has been no call since the last
  // reconfigure.
  mutable std::mutex handle_mutex_;
  mutable std::string handle_;
};

} // namespace torch_kolo

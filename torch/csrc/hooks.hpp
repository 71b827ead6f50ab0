// What users register on a process group: functions that are told of the end of calls, and of the
// failure of the group.

#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_kolo {

class Flight;

// A call of PyTorch, as hooks are told of it.
struct CallRecord {
  // Unique in this process.
  uint64_t key = 0;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint64_t seq = 0;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
};

// Returns a number for CallRecord::key.
uint64_t next_call_key();

// The hooks of one process group.
//
// A hook runs on the thread that finds the end of a call: one that waits for it, a Waiter, or, for a
// call that no thread waits for, a thread of this object. None of them is a thread of kolo, and none
// holds a lock of the group. So a hook may block, take Python's lock and call the group.
class Hooks : public std::enable_shared_from_this<Hooks> {
 public:
  using AbortHook = std::function<void()>;
  using CompletionHook = std::function<void(uint64_t key, float milliseconds)>;
  using InfoHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // `patience`: how long a thread waits for a hook that another thread runs.
  explicit Hooks(std::chrono::milliseconds patience) : patience_(patience) {}
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  // It runs on any thread, and must be short, as PyTorch's header says.
  void add_completion_hook(int64_t id, CompletionHook hook);
  void remove_completion_hook(int64_t id);
  // There is at most one. It runs on the thread of this object.
  void set_info_hook(InfoHook hook);

  // A call has started. Its end is found within 0.1 s, also if no thread waits for it.
  void watch(const std::shared_ptr<Flight>& flight);
  // A call has completed.
  void completed(const CallRecord& call, float milliseconds);
  // The group has failed. Returns when the abort hooks have run. They run once for a failure,
  // although each of its calls in flight fails: other threads wait until they have returned.
  void failed();
  // The user ends the group: calls that fail from now on run no abort hooks.
  void mute();
  // Returns when all calls so far have ended and the hook has been told.
  void await_calls();
  // Ends the thread. The caller has ended all calls before.
  void close();
  // Ends the threads of all objects, with a short patience for hooks that run. Before the process
  // exits, because a hook in Python cannot go on while Python ends.
  static void close_all();
  // Undoes `mute` and `close`.
  void reopen();

 private:
  // Copies of a table share the hooks: the copy of a function of Python takes Python's lock, for
  // which no thread may wait while it holds the mutex.
  template <typename Hook>
  using Table = std::map<int64_t, std::shared_ptr<const Hook>>;
  enum class Failure { kNone, kHooksRun, kHooksHaveRun };

  void close(std::chrono::milliseconds patience);
  // The caller holds the mutex.
  void note_interest();
  void provide_thread();
  void run();

  const std::chrono::milliseconds patience_;
  // Whether there is any hook, and whether any is told of calls that complete.
  std::atomic<bool> is_wanted_{false};
  std::atomic<bool> wants_completions_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  // Tables are replaced, not changed, so that hooks run without the mutex.
  std::shared_ptr<const Table<AbortHook>> abort_hooks_ = std::make_shared<const Table<AbortHook>>();
  std::shared_ptr<const Table<CompletionHook>> completion_hooks_ = std::make_shared<const Table<CompletionHook>>();
  std::shared_ptr<const InfoHook> info_hook_;
  Failure failure_ = Failure::kNone;
  std::thread::id hook_thread_;
  bool is_muted_ = false;

  // Calls whose end may not have been found. The Work or a Waiter keeps them.
  std::vector<std::weak_ptr<Flight>> flights_;
  // What the info hook is to be told.
  std::vector<std::shared_ptr<c10d::WorkInfo>> infos_;
  bool is_busy_ = false;
  bool is_closed_ = false;
  bool is_running_ = false;
  std::thread thread_;
};

} // namespace torch_kolo

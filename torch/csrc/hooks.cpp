#include "hooks.hpp"

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "backend.hpp"
#include "work.hpp"

namespace torch_kolo {

namespace {

// How often the end of calls is looked for that no thread waits for. NCCL's watchdog takes as long.
constexpr std::chrono::milliseconds kPeriod{100};

// Hooks, and other threads that run hooks, may need Python's lock.
class WithoutPythonsLock {
 public:
  WithoutPythonsLock() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// Replaces a table by one in which a hook is set or, without a hook, removed. Returns the former
// table, which the caller frees without the mutex: that of a function of Python takes Python's lock.
template <typename Table, typename Hook>
std::shared_ptr<const Table> replace(std::shared_ptr<const Table>& table, int64_t id, std::shared_ptr<const Hook> hook) {
  auto changed = std::make_shared<Table>(*table);
  if (hook) {
    changed->insert_or_assign(id, std::move(hook));
  } else {
    changed->erase(id);
  }
  return std::exchange(table, std::move(changed));
}

// The objects whose threads run: these end before the process exits.
class Running {
 public:
  void add(std::weak_ptr<Hooks> hooks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(std::remove_if(all_.begin(), all_.end(), [](const auto& each) { return each.expired(); }), all_.end());
    all_.push_back(std::move(hooks));
  }

  std::vector<std::shared_ptr<Hooks>> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Hooks>> alive;
    for (const auto& each : std::exchange(all_, {})) {
      if (auto hooks = each.lock()) {
        alive.push_back(std::move(hooks));
      }
    }
    return alive;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Hooks>> all_;
};

// Never destroyed: threads may outlive static objects.
Running& running() {
  static auto* const all = new Running;
  return *all;
}

// The dump of the flight recorder takes 4 s.
constexpr std::chrono::seconds kPatienceAtExit(30);

// An exception of a hook does not change the outcome of the call that the hook reports.
template <typename Hook, typename... Args>
void call(const char* what, const Hook& hook, Args&&... args) {
  try {
    hook(std::forward<Args>(args)...);
  } catch (const std::exception& error) {
    TORCH_WARN(what, " of the kolo backend failed: ", error.what());
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    // Python ends the thread, because the process exits.
    throw;
#endif
  } catch (...) {
    TORCH_WARN(what, " of the kolo backend failed");
  }
}

} // namespace

uint64_t next_call_key() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// ---- What is registered ----

void Hooks::add_abort_hook(int64_t id, AbortHook hook) {
  const auto shared = std::make_shared<const AbortHook>(std::move(hook));
  std::shared_ptr<const Table<AbortHook>> former;
  const std::lock_guard<std::mutex> lock(mutex_);
  former = replace(abort_hooks_, id, shared);
  note_interest();
}

void Hooks::remove_abort_hook(int64_t id) {
  std::shared_ptr<const Table<AbortHook>> former;
  const std::lock_guard<std::mutex> lock(mutex_);
  former = replace(abort_hooks_, id, std::shared_ptr<const AbortHook>());
  note_interest();
}

void Hooks::add_completion_hook(int64_t id, CompletionHook hook) {
  const auto shared = std::make_shared<const CompletionHook>(std::move(hook));
  std::shared_ptr<const Table<CompletionHook>> former;
  const std::lock_guard<std::mutex> lock(mutex_);
  former = replace(completion_hooks_, id, shared);
  note_interest();
}

void Hooks::remove_completion_hook(int64_t id) {
  std::shared_ptr<const Table<CompletionHook>> former;
  const std::lock_guard<std::mutex> lock(mutex_);
  former = replace(completion_hooks_, id, std::shared_ptr<const CompletionHook>());
  note_interest();
}

void Hooks::set_info_hook(InfoHook hook) {
  auto shared = std::make_shared<const InfoHook>(std::move(hook));
  const std::lock_guard<std::mutex> lock(mutex_);
  info_hook_.swap(shared);
  note_interest();
}

void Hooks::note_interest() {
  wants_completions_ = !completion_hooks_->empty() || info_hook_;
  is_wanted_ = wants_completions_ || !abort_hooks_->empty();
}

// ---- What happens to calls ----

void Hooks::watch(const std::shared_ptr<Flight>& flight) {
  if (!is_wanted_) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_) {
    return;
  }
  flights_.push_back(flight);
  if (flights_.size() == 1) {
    provide_thread();
  }
}

void Hooks::completed(const CallRecord& record, float milliseconds) {
  if (!wants_completions_) {
    return;
  }
  std::shared_ptr<const Table<CompletionHook>> hooks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks = completion_hooks_;
    if (info_hook_ && !is_closed_) {
      const std::chrono::duration<float, std::milli> duration(milliseconds);
      infos_.push_back(std::make_shared<c10d::WorkInfo>(record.type, record.seq, record.began, std::chrono::steady_clock::now(), duration));
      provide_thread();
    }
  }
  for (const auto& [id, hook] : *hooks) {
    call("a completion hook", *hook, record.key, milliseconds);
  }
}

void Hooks::failed() {
  if (!is_wanted_) {
    return;
  }
  const WithoutPythonsLock released;
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_ == Failure::kHooksRun && hook_thread_ != std::this_thread::get_id()) {
    // A hook may end the group, and then waits for this thread.
    const auto is_over = [&] { return failure_ != Failure::kHooksRun || is_closed_; };
    changed_.wait_for(lock, std::min<std::chrono::milliseconds>(patience_, std::chrono::hours(24)), is_over);
    return;
  }
  if (failure_ != Failure::kNone || is_muted_) {
    return;
  }
  failure_ = Failure::kHooksRun;
  hook_thread_ = std::this_thread::get_id();
  const auto hooks = abort_hooks_;
  lock.unlock();
  for (const auto& [id, hook] : *hooks) {
    call("an abort hook", *hook);
  }
  lock.lock();
  failure_ = Failure::kHooksHaveRun;
  changed_.notify_all();
}

void Hooks::mute() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_muted_ = true;
}

// ---- Calls that no thread waits for ----

void Hooks::provide_thread() {
  if (is_running_) {
    changed_.notify_all();
    return;
  }
  try {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
    is_running_ = true;
    running().add(shared_from_this());
  } catch (const std::system_error& error) {
    TORCH_WARN("the kolo backend cannot start a thread for hooks, which learn later of the end of calls: ", error.what());
  }
}

void Hooks::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_closed_) {
    if (infos_.empty() && flights_.empty()) {
      changed_.wait(lock);
      continue;
    }
    if (infos_.empty()) {
      changed_.wait_for(lock, kPeriod, [&] { return is_closed_ || !infos_.empty(); });
    }
    const auto infos = std::exchange(infos_, {});
    auto flights = std::exchange(flights_, {});
    const auto hook = info_hook_;
    is_busy_ = true;
    lock.unlock();
    // The info hook first, because an abort hook may take long.
    for (const auto& info : infos) {
      call("a completion hook", *hook, info);
    }
    const auto is_over = [](const std::weak_ptr<Flight>& each) {
      const auto flight = each.lock();
      return !flight || flight->settle(0);
    };
    flights.erase(std::remove_if(flights.begin(), flights.end(), is_over), flights.end());
    lock.lock();
    flights_.insert(flights_.end(), flights.begin(), flights.end());
    is_busy_ = false;
    changed_.notify_all();
  }
  is_running_ = false;
  changed_.notify_all();
}

void Hooks::await_calls() {
  const WithoutPythonsLock released;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto flights = flights_;
  lock.unlock();
  for (const auto& each : flights) {
    if (const auto flight = each.lock()) {
      flight->settle(kForever);
    }
  }
  lock.lock();
  if (thread_.get_id() != std::this_thread::get_id()) {
    changed_.wait(lock, [&] { return !is_running_ || (infos_.empty() && !is_busy_); });
  }
}

void Hooks::close_all() {
  for (const auto& hooks : running().take()) {
    hooks->mute();
    hooks->close(kPatienceAtExit);
  }
}

void Hooks::close() {
  close(patience_);
}

void Hooks::close(std::chrono::milliseconds patience) {
  const WithoutPythonsLock released;
  std::unique_lock<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  if (!thread.joinable()) {
    return;
  }
  // A hook may hold the last reference to the process group.
  if (thread.get_id() != std::this_thread::get_id()) {
    changed_.wait_for(lock, std::min<std::chrono::milliseconds>(patience, std::chrono::hours(24)), [&] { return !is_running_; });
    if (!is_running_) {
      lock.unlock();
      thread.join();
      return;
    }
    TORCH_WARN("a hook has not returned ", patience.count(), " ms after the end of its process group, which no longer waits for it");
  }
  thread.detach();
}

void Hooks::reopen() {
  std::unique_lock<std::mutex> lock(mutex_);
  // The former thread, if a hook still runs on it.
  changed_.wait_for(lock, std::min<std::chrono::milliseconds>(patience_, std::chrono::hours(24)), [&] { return !is_running_; });
  flights_.clear();
  is_closed_ = is_muted_ = false;
  failure_ = Failure::kNone;
}

// ---- What PyTorch calls ----

void ProcessGroupKolo::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK_WITH(DistBackendError, onCompletionHook_ == nullptr, "this process group has a completion hook already");
  // PyTorch asks for this one in hasHooks().
  onCompletionHook_ = hook;
  hooks_->set_info_hook(std::move(hook));
}

void ProcessGroupKolo::waitForPendingWorks() {
  hooks_->await_calls();
}

#ifdef C10D_BACKEND_HAS_HOOKS

void ProcessGroupKolo::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  hooks_->add_abort_hook(id, std::move(hook));
}

void ProcessGroupKolo::unregisterAbortHook(int64_t id) {
  hooks_->remove_abort_hook(id);
}

#endif

#ifdef TORCH_KOLO_HAS_COMPLETION_HOOKS

void ProcessGroupKolo::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->add_completion_hook(id, [hook = std::move(hook)](uint64_t key, float milliseconds) { hook({key, milliseconds}); });
}

void ProcessGroupKolo::unregisterCompletionHook(int64_t id) {
  hooks_->remove_completion_hook(id);
}

#endif

} // namespace torch_kolo

#include "store.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "signals.hpp"

namespace torch_kolo {

namespace {

// How long to wait before the store is asked again. Each pause is twice the one before, up to a limit.
constexpr std::chrono::milliseconds shortest_pause(2);
constexpr std::chrono::milliseconds longest_pause(50);

std::vector<uint8_t> bytes(const void* value, size_t length) {
  const auto* start = static_cast<const uint8_t*>(value);
  return {start, start + length};
}

} // namespace

kolo_store_t Rendezvous::callbacks() {
  // Every process that reaches PyTorch's store can read and write it.
  const int32_t is_private = 0;
  return kolo_store_t{sizeof(kolo_store_t), this, set, get, claim, is_private};
}

// Exceptions must not leave a callback, so their message is kept.
template <typename F>
int32_t Rendezvous::guarded(void* self, F&& call) {
  auto& rendezvous = *static_cast<Rendezvous*>(self);
  try {
    call(*rendezvous.store_);
    return 0;
  } catch (const c10::Error& error) {
    rendezvous.problem_ = error.what_without_backtrace();
  } catch (const std::exception& error) {
    rendezvous.problem_ = error.what();
    // A store in Python may have run a signal handler.
    keep_of_handler();
  } catch (...) {
    rendezvous.problem_ = "an unknown exception";
  }
  return 1;
}

int32_t Rendezvous::set(void* self, const char* key, const void* value, size_t length, uint64_t) {
  return guarded(self, [&](c10d::Store& store) { store.set(std::string(key), bytes(value, length)); });
}

int32_t Rendezvous::get(void* self, const char* key, uint64_t timeout_ms, kolo_reply_t reply) {
  return guarded(self, [&](c10d::Store& store) {
    const std::string name(key);
    // kolo waits in short pieces, and PyTorch logs each wait that times out.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::chrono::nanoseconds pause = shortest_pause;
    while (!store.check({name})) {
      const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
      if (left.count() <= 0) {
        return;
      }
      std::this_thread::sleep_for(std::min(pause, left));
      pause = std::min<std::chrono::nanoseconds>(2 * pause, longest_pause);
    }
    const auto value = store.get(name);
    kolo_store_reply(reply, value.data(), value.size());
  });
}

int32_t Rendezvous::claim(void* self, const char* key, const void* value, size_t length, uint64_t, kolo_reply_t reply) {
  return guarded(self, [&](c10d::Store& store) {
    auto mine = bytes(value, length);
    std::vector<uint8_t> held;
    try {
      held = store.compareSet(std::string(key), std::vector<uint8_t>(), mine);
    } catch (const c10::NotImplementedError&) {
      // A store of the program's own. Two processes with one rank are then noticed later.
      store.set(std::string(key), mine);
      held = std::move(mine);
    }
    kolo_store_reply(reply, held.data(), held.size());
  });
}

} // namespace torch_kolo

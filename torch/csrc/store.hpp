// PyTorch's store as the store of kolo's rendezvous.

#pragma once

#include <kolo.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch_kolo {

class Rendezvous {
 public:
  explicit Rendezvous(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  // Is valid as long as this object.
  kolo_store_t callbacks();
  // Returns the store's message if it failed; otherwise empty.
  const std::string& problem() const {
    return problem_;
  }

 private:
  static int32_t set(void* self, const char* key, const void* value, size_t length, uint64_t timeout_ms);
  static int32_t get(void* self, const char* key, uint64_t timeout_ms, kolo_reply_t reply);
  static int32_t claim(void* self, const char* key, const void* value, size_t length, uint64_t timeout_ms, kolo_reply_t reply);

  template <typename F>
  static int32_t guarded(void* self, F&& call);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string problem_;
};

} // namespace torch_kolo

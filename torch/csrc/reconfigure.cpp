// PyTorch's reconfigure: a group exchanges its members.

#include <algorithm>
#include <numeric>

#include "backend.hpp"
#include "work.hpp"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace torch_kolo {

namespace {

constexpr size_t kDigits = 2 * sizeof(kolo_unique_id_t::internal);

// A handle is a unique id in hexadecimal digits.
std::string handle_of(const kolo_unique_id_t& id) {
  constexpr char digits[] = "0123456789abcdef";
  std::string handle;
  for (const uint8_t byte : id.internal) {
    handle += digits[byte >> 4];
    handle += digits[byte & 15];
  }
  return handle;
}

kolo_unique_id_t id_of(const std::string& handle) {
  TORCH_CHECK_VALUE(
      handle.size() == kDigits && handle.find_first_not_of("0123456789abcdef") == std::string::npos,
      "reconfigure: a handle is not one of the kolo backend's get_reconfigure_handle");
  kolo_unique_id_t id;
  for (size_t i = 0; i < sizeof(id.internal); ++i) {
    id.internal[i] = static_cast<uint8_t>(std::stoul(handle.substr(2 * i, 2), nullptr, 16));
  }
  return id;
}

} // namespace

// Another handle after each reconfigure, because a unique id is for one communicator.
c10d::ReconfigureHandle ProcessGroupKolo::get_reconfigure_handle() const {
  const std::lock_guard<std::mutex> lock(handle_mutex_);
  if (handle_.empty()) {
    kolo_unique_id_t id;
    check(kolo_get_unique_id(&id), *members_);
    handle_ = handle_of(id);
  }
  return handle_;
}

// The members meet at the process whose handle is the first.
ProcessGroupKolo::WorkPtr ProcessGroupKolo::reconfigure(const c10d::ReconfigureOptions& opts) {
  std::vector<c10d::ReconfigureHandle> handles;
  if (const auto* ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&opts.handles)) {
    handles = *ordered;
  } else {
    const auto& set = std::get<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles);
    handles.assign(set.begin(), set.end());
    std::sort(handles.begin(), handles.end());
  }
  for (const auto& handle : handles) {
    id_of(handle);
  }
  std::string mine;
  {
    const std::lock_guard<std::mutex> lock(handle_mutex_);
    mine = handle_;
  }
  const auto place = std::find(handles.begin(), handles.end(), mine);
  TORCH_CHECK_VALUE(
      place != handles.end(),
      "reconfigure: this process's handle is not in the list; a handle of get_reconfigure_handle is for one reconfigure");
  TORCH_CHECK_VALUE(
      std::count(handles.begin(), handles.end(), mine) == 1, "reconfigure: this process's handle is in the list more than once");

  close();
  {
    const std::lock_guard<std::mutex> lock(handle_mutex_);
    handle_.clear();
  }
  if (place != handles.begin()) {
    const kolo_unique_id_t unused = id_of(mine);
    check(kolo_discard_unique_id(&unused), *members_);
  }
  rank_ = static_cast<int>(place - handles.begin());
  size_ = static_cast<int>(handles.size());
  // The new members have no ranks in the job.
  std::vector<int64_t> ranks(handles.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  members_ = std::make_shared<Members>(Members{ranks});
  options_->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  collectives_.waiter = std::make_shared<Waiter>(true);
  messages_.waiter = std::make_shared<Waiter>(false);
  hooks_->reopen();
  seq_ = 0;

  kolo_config_t config = this->config();
  if (opts.timeout) {
    config.start_timeout_ms = static_cast<uint64_t>(std::max<int64_t>(opts.timeout->count(), 1));
  }
  // The uuid is not needed: the first handle has not been used before.
  check(kolo_comm_init_rank(&collectives_.comm, size_, id_of(handles.front()), rank_, &config), *members_);
  find_devices();
  connect_messages();
  const KoloWork::Call call{rank_, options_->timeout, {}};
  return c10::make_intrusive<KoloWork>(call, Tensors{}, nullptr, nullptr);
}

} // namespace torch_kolo

#endif

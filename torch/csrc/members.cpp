// Roll calls, and groups of the survivors of a failure.

#include "backend.hpp"

#include <algorithm>
#include <utility>

#include "launch.hpp"
#include "signals.hpp"

namespace torch_kolo {

namespace {

// Operations in flight. Their memory must outlive this object, so the caller aborts the
// communicator before it drops unfinished ones.
class Operations {
 public:
  explicit Operations(size_t count) : works_(count, nullptr) {}
  ~Operations() {
    for (const kolo_work_t work : works_) {
      if (work != nullptr) {
        wait_to_the_end(work);
        kolo_work_destroy(work);
      }
    }
  }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  kolo_work_t* operator[](size_t index) {
    return &works_[index];
  }
  // Returns KOLO_IN_PROGRESS if the operation has not ended by then.
  kolo_result_t wait_until(size_t index, std::chrono::steady_clock::time_point until) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
    const kolo_result_t result = kolo_work_wait_timeout(works_[index], static_cast<uint64_t>(std::max<int64_t>(left, 0)));
    rethrow_of_handler();
    return result;
  }

 private:
  std::vector<kolo_work_t> works_;
};

// "ranks 1 and 3 (2 and 6 of the job)".
std::string named(const std::vector<int>& ranks, const Members& members) {
  const auto list = [&](const auto& number_of) {
    std::string text;
    for (size_t i = 0; i < ranks.size(); ++i) {
      text += c10::str(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", number_of(ranks[i]));
    }
    return text;
  };
  std::string text = c10::str(ranks.size() == 1 ? "rank " : "ranks ", list([](int rank) { return static_cast<int64_t>(rank); }));
  const auto& global = members.global_ranks;
  const auto in_job = [&](int rank) { return static_cast<size_t>(rank) < global.size() ? global[rank] : rank; };
  if (std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return in_job(rank) != rank; })) {
    text += c10::str(" (", list(in_job), " of the job)");
  }
  return text;
}

} // namespace

// Each rank reports to rank 0, which tells all present ranks which ranks are missing. If any is
// missing, rank 0 ends the group once all present ranks know why.
std::vector<int> ProcessGroupKolo::roll_call(std::chrono::milliseconds timeout) {
  ++seq_;
  if (size_ == 1) {
    return {};
  }
  const kolo_comm_t comm = collectives_.comm;
  std::vector<uint8_t> is_present(size_, 0);
  is_present[0] = 1;
  if (rank_ != 0) {
    // Rank 0 may call just before its deadline, and then waits just as long for the other ranks.
    const Deadline deadline(2 * timeout, made_with_);
    const uint8_t here = 1;
    check(kolo_send(&here, 1, KOLO_UINT8, 0, comm, nullptr), *members_);
    check(kolo_recv(is_present.data(), is_present.size(), KOLO_UINT8, 0, comm, nullptr), *members_);
    check(kolo_send(&here, 1, KOLO_UINT8, 0, comm, nullptr), *members_);
  } else {
    // The deadline of an operation must not end the group before all ranks have been told.
    const Deadline deadline(4 * timeout, made_with_);
    std::vector<uint8_t> reports(size_), thanks(size_);
    Operations coming(size_), telling(size_), leaving(size_);
    try {
      for (int rank = 1; rank < size_; ++rank) {
        check(kolo_start_recv(&reports[rank], 1, KOLO_UINT8, rank, comm, nullptr, coming[rank]), *members_);
      }
      auto until = std::chrono::steady_clock::now() + timeout;
      for (int rank = 1; rank < size_; ++rank) {
        const kolo_result_t result = coming.wait_until(rank, until);
        is_present[rank] = result == KOLO_OK;
        if (result != KOLO_IN_PROGRESS) {
          check(result, *members_);
        }
      }
      for (int rank = 1; rank < size_; ++rank) {
        if (is_present[rank]) {
          check(kolo_start_send(is_present.data(), is_present.size(), KOLO_UINT8, rank, comm, nullptr, telling[rank]), *members_);
          check(kolo_start_recv(&thanks[rank], 1, KOLO_UINT8, rank, comm, nullptr, leaving[rank]), *members_);
        }
      }
      until = std::chrono::steady_clock::now() + timeout;
      for (int rank = 1; rank < size_; ++rank) {
        if (is_present[rank]) {
          // A rank that is gone by now has been told, or has failed for another reason.
          leaving.wait_until(rank, until);
        }
      }
    } catch (...) {
      hooks_->failed();
      abort();
      throw;
    }
    if (std::find(is_present.begin(), is_present.end(), 0) != is_present.end()) {
      hooks_->failed();
      abort();
    }
  }
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    if (!is_present[rank]) {
      missing.push_back(rank);
    }
  }
  return missing;
}

void ProcessGroupKolo::report_absent(const std::vector<int>& missing, std::chrono::milliseconds timeout) const {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          gloo_text(rank_, c10::str("Ranks ", c10::Join(", ", missing)), timeout), ": ", named(missing, *members_),
          " did not call monitored_barrier before its deadline of ", timeout.count() / 1000, ".", timeout.count() % 1000 / 100,
          "s. The process group has ended."));
}

// PyTorch names the ranks to leave out, and kolo's ranks agree on the survivors. Both must match.
c10::intrusive_ptr<c10d::Backend> ProcessGroupKolo::shrink(
    const std::vector<int64_t>& ranks_to_exclude,
    int,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto options = options_of(opts);
  TORCH_CHECK_VALUE(
      options->transport == options_->transport && options->algorithm == options_->algorithm &&
          options->reproducible == options_->reproducible,
      "shrink_group: the smaller group keeps the settings of its parent; pg_options can change the timeout only");
  std::vector<int> expected;
  options->global_ranks_in_group.clear();
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) == ranks_to_exclude.end()) {
      expected.push_back(rank);
      if (static_cast<size_t>(rank) < members_->global_ranks.size()) {
        options->global_ranks_in_group.push_back(static_cast<uint64_t>(members_->global_ranks[rank]));
      }
    }
  }
  TORCH_CHECK_VALUE(
      std::find(expected.begin(), expected.end(), rank_) != expected.end(), "shrink_group: rank ", rank_, " is in the list of ranks to leave out, and must not call it");
  if (messages_.comm != nullptr) {
    kolo_comm_abort(messages_.comm);
  }
  kolo_comm_t comm = nullptr;
  check(kolo_comm_shrink(collectives_.comm, &comm), *members_);
  int32_t count = 0, place = 0;
  kolo_comm_count(comm, &count);
  kolo_comm_rank(comm, &place);
  std::vector<int> left(count);
  const kolo_result_t result = kolo_all_gather(&rank_, left.data(), 1, KOLO_INT32, comm, nullptr);
  if (result != KOLO_OK || left != expected) {
    const auto error = result == KOLO_OK ? nullptr : error_of(result, *members_);
    kolo_comm_destroy(comm);
    if (error) {
      std::rethrow_exception(error);
    }
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "shrink_group: ", named(expected, *members_), " were to remain, and ", named(left, *members_),
            " have survived. The process group has ended."));
  }
  return c10::make_intrusive<ProcessGroupKolo>(comm, place, count, made_with_, options);
}

} // namespace torch_kolo

#include "error.hpp"

#include <c10/util/Exception.h>

#include "signals.hpp"

namespace torch_kolo {

namespace {

// Whether the deadline has passed.
bool is_timeout(const kolo_error_t& error) {
  return error.cause == KOLO_CAUSE_SILENT || error.cause == KOLO_CAUSE_ABSENT || error.cause == KOLO_CAUSE_STOPPED ||
      error.cause == KOLO_CAUSE_UNRESPONSIVE || error.cause == KOLO_CAUSE_UNMATCHED;
}

} // namespace

std::exception_ptr error_of(kolo_result_t result, const Members& members) {
  if (auto raised = raised_by_handler()) {
    return raised;
  }
  kolo_error_t error{};
  error.size = sizeof error;
  const bool has_details = kolo_last_error(nullptr, &error) == KOLO_OK && error.code == result;
  std::string text = has_details ? error.message : kolo_error_string(result);
  const auto& ranks = members.global_ranks;
  if (has_details && error.rank >= 0 && error.rank < static_cast<int64_t>(ranks.size()) && ranks[error.rank] != error.rank) {
    text += c10::str(" (Ranks are those of the process group; its rank ", error.rank, " is rank ", ranks[error.rank], " of the job.)");
  }
  if (has_details && is_timeout(error)) {
    // Programs look for these words, which are Gloo's.
    text += c10::str(". Timed out waiting ", error.after_us / 1000, "ms for the operation to complete");
  }
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  switch (result) {
    case KOLO_ERR_ARGUMENT:
    case KOLO_ERR_SETTING:
    case KOLO_ERR_UNSUPPORTED:
      return std::make_exception_ptr(c10::ValueError(here, std::move(text)));
    case KOLO_ERR_HANDLE:
      text = "this process group has been shut down";
      [[fallthrough]];
    default:
      return std::make_exception_ptr(c10::DistBackendError(here, std::move(text)));
  }
}

bool ends_group(kolo_result_t result) {
  switch (result) {
    case KOLO_OK:
    case KOLO_IN_PROGRESS:
    case KOLO_ERR_ARGUMENT:
    case KOLO_ERR_HANDLE:
    case KOLO_ERR_SETTING:
    case KOLO_ERR_UNSUPPORTED:
    case KOLO_ERR_ABORTED:
    case KOLO_ERR_FORKED:
      return false;
    default:
      return true;
  }
}

c10d::WorkResult work_result_of(kolo_result_t result) {
  if (result == KOLO_OK) {
    return c10d::WorkResult::SUCCESS;
  }
  kolo_error_t error{};
  error.size = sizeof error;
  const bool has_details = kolo_last_error(nullptr, &error) == KOLO_OK && error.code == result;
  return has_details && is_timeout(error) ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
}

std::string gloo_text(int rank, const std::string& who, std::chrono::milliseconds timeout) {
  return c10::str("[Rank ", rank, "]: ", who, " failed to pass monitoredBarrier in ", timeout.count(), " ms");
}

} // namespace torch_kolo

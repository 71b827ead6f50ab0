#include "error.hpp"

#include <c10/util/Exception.h>

namespace torch_kolo {

std::exception_ptr error_of(kolo_result_t result, const Members& members) {
  kolo_error_t error{};
  error.size = sizeof error;
  const bool is_told = kolo_last_error(nullptr, &error) == KOLO_OK && error.code == result;
  std::string text = is_told ? error.message : kolo_error_string(result);
  const auto& ranks = members.global_ranks;
  if (is_told && error.rank >= 0 && error.rank < static_cast<int64_t>(ranks.size()) && ranks[error.rank] != error.rank) {
    text += c10::str(" (Ranks are those of the process group; its rank ", error.rank, " is rank ", ranks[error.rank], " of the job.)");
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

} // namespace torch_kolo

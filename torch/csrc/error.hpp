// Kolo's errors as PyTorch's.

#pragma once

#include <kolo.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <exception>
#include <string>
#include <vector>

namespace torch_kolo {

// Who the ranks of a group are: its errors also say what number a rank has in the whole job.
struct Members {
  std::vector<int64_t> global_ranks;
};

// What the last call of this thread returned, with kolo's sentence: a DistBackendError, or a ValueError if the call could not be right.
std::exception_ptr error_of(kolo_result_t result, const Members& members);

// Throws unless the last call of this thread worked.
inline void check(kolo_result_t result, const Members& members) {
  if (C10_UNLIKELY(result != KOLO_OK)) {
    std::rethrow_exception(error_of(result, members));
  }
}

} // namespace torch_kolo

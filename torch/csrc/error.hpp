// Turns kolo's errors into PyTorch's.

#pragma once

#include <kolo.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <string>
#include <vector>

namespace torch_kolo {

// The ranks of a group as ranks of the job, which errors also name.
struct Members {
  std::vector<int64_t> global_ranks;
};

// Returns the error of this thread's last call, with kolo's message: a ValueError for wrong
// arguments, otherwise a DistBackendError. If the call ended because a signal handler raised an
// exception, it is that one.
std::exception_ptr error_of(kolo_result_t result, const Members& members);

// Returns whether a result is the failure of the whole group, after which no rank can use it.
// `KOLO_ERR_ABORTED` is not: this rank has ended its group.
bool ends_group(kolo_result_t result);

// Returns the result of this thread's last call in PyTorch's words.
c10d::WorkResult work_result_of(kolo_result_t result);

// Throws unless this thread's last call succeeded.
inline void check(kolo_result_t result, const Members& members) {
  if (C10_UNLIKELY(result != KOLO_OK)) {
    std::rethrow_exception(error_of(result, members));
  }
}

// The beginning of an error of monitored_barrier: programs look for these words, which are Gloo's.
// `who`: "Rank 1", or "Ranks 1, 2" where all are named.
std::string gloo_text(int rank, const std::string& who, std::chrono::milliseconds timeout);

} // namespace torch_kolo

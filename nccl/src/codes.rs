//! The numbers of `nccl.h`: results, element types, reductions and flags.

use std::ffi::{CStr, c_int};

pub(crate) type ncclResult_t = c_int;

pub(crate) const SUCCESS: ncclResult_t = 0;
pub(crate) const UNHANDLED_CUDA_ERROR: ncclResult_t = 1;
pub(crate) const SYSTEM_ERROR: ncclResult_t = 2;
pub(crate) const INTERNAL_ERROR: ncclResult_t = 3;
pub(crate) const INVALID_ARGUMENT: ncclResult_t = 4;
pub(crate) const INVALID_USAGE: ncclResult_t = 5;
pub(crate) const REMOTE_ERROR: ncclResult_t = 6;
pub(crate) const IN_PROGRESS: ncclResult_t = 7;

/// The version of NCCL whose interface this is: `NCCL_VERSION_CODE`.
pub(crate) const VERSION: c_int = 23203;

pub(crate) const API_MAGIC: u32 = 0xcafe_beef;
pub(crate) const SIM_MAGIC: u32 = 0x7468_5283;
pub(crate) const UNDEF_INT: c_int = c_int::MIN;
pub(crate) const SPLIT_NOCOLOR: c_int = -1;
pub(crate) const SHRINK_DEFAULT: c_int = 0;
pub(crate) const SHRINK_ABORT: c_int = 1;

/// The number of built-in reductions, and the first number of one by `ncclRedOpCreatePreMulSum`.
pub(crate) const NUM_OPS: c_int = 5;

/// Returns the meaning of a result in NCCL's words.
pub(crate) fn words(result: ncclResult_t) -> &'static CStr {
    match result {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM_ERROR => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        INTERNAL_ERROR => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        8 => c"timeout",
        _ => c"unknown result code",
    }
}

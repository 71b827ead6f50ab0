//! The results of calls.

use std::ffi::c_char;

use crate::stream::Refusal;

/// Why a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        $(pub(crate) const $name: Code = Code($number);)*

        /// Returns the name of a result and what it means, as texts of C.
        pub(crate) fn describe(code: i32) -> [*const c_char; 2] {
            let [name, text] = match code {
                0 => ["CUDA_SUCCESS\0", "no error\0"],
                $($number => [concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")],)*
                _ => ["CUDA_ERROR_UNKNOWN\0", "unknown error\0"],
            };
            [name.as_ptr().cast(), text.as_ptr().cast()]
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device kernel image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    ALREADY_MAPPED = 208, "resource already mapped";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
}

impl From<Refusal> for Code {
    fn from(refusal: Refusal) -> Code {
        match refusal {
            Refusal::Unsupported => STREAM_CAPTURE_UNSUPPORTED,
            Refusal::Invalidated => STREAM_CAPTURE_INVALIDATED,
            Refusal::Merge => STREAM_CAPTURE_MERGE,
            Refusal::Unmatched => STREAM_CAPTURE_UNMATCHED,
            Refusal::Unjoined => STREAM_CAPTURE_UNJOINED,
            Refusal::Isolation => STREAM_CAPTURE_ISOLATION,
            Refusal::CapturedEvent => CAPTURED_EVENT,
        }
    }
}

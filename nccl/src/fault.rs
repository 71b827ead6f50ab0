//! Why a call failed, before it becomes a number.

use std::any::Any;

use kolo::Error;

use crate::codes::*;

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Kolo(#[from] Error),
    #[error("{what} is null")]
    Null { what: &'static str },
    #[error("{what} is not aligned to the type that it points to")]
    Misaligned { what: &'static str },
    #[error("the length of {what} is {len}, more than memory can hold")]
    Long { what: &'static str, len: usize },
    #[error("{what} is not UTF-8")]
    Text { what: &'static str },
    #[error("{0}")]
    Argument(String),
    #[error("{0}")]
    Usage(String),
    #[error("{doing}: {problem}")]
    Cuda { doing: &'static str, problem: String },
    #[error("{0}")]
    System(String),
    #[error("{0}")]
    Remote(String),
    #[error("a defect of kolo: it panicked with {0:?}; please report it")]
    Panic(String),
}

impl Fault {
    pub(crate) fn argument(text: impl Into<String>) -> Fault {
        Fault::Argument(text.into())
    }

    pub(crate) fn usage(text: impl Into<String>) -> Fault {
        Fault::Usage(text.into())
    }

    /// Returns the fault of a function that kolo has no counterpart for.
    pub(crate) fn unavailable(what: &str, why: &str) -> Fault {
        Fault::Usage(format!("{what} is not available on kolo: {why}"))
    }

    /// Returns the fault of a panic, with its message.
    pub(crate) fn panic(panic: &(dyn Any + Send)) -> Fault {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        Fault::Panic(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned()))
    }

    pub(crate) fn code(&self) -> ncclResult_t {
        match self {
            Fault::Kolo(error) => code(error),
            Fault::Null { .. } | Fault::Misaligned { .. } | Fault::Long { .. } | Fault::Text { .. } => INVALID_ARGUMENT,
            Fault::Argument(_) => INVALID_ARGUMENT,
            Fault::Usage(_) => INVALID_USAGE,
            Fault::Cuda { .. } => UNHANDLED_CUDA_ERROR,
            Fault::System(_) => SYSTEM_ERROR,
            Fault::Remote(_) => REMOTE_ERROR,
            Fault::Panic(_) => INTERNAL_ERROR,
        }
    }
}

/// Returns NCCL's result for an error.
fn code(error: &Error) -> ncclResult_t {
    match error {
        Error::Argument { .. } | Error::Setting { .. } => INVALID_ARGUMENT,
        // The ranks at both ends run, and the program is wrong.
        Error::Mismatch { .. } | Error::Counts { .. } => INVALID_USAGE,
        Error::Peer { cause: kolo::Cause::Mismatch(_), .. } => INVALID_USAGE,
        Error::Peer { .. } | Error::Missing { .. } | Error::Excluded { .. } | Error::NotGrown { .. } => REMOTE_ERROR,
        Error::Revoked { first } => code(first),
        Error::Device { .. } => UNHANDLED_CUDA_ERROR,
        Error::NoMemory { .. } | Error::Os { .. } | Error::Store { .. } => SYSTEM_ERROR,
        Error::Panicked { .. } => INTERNAL_ERROR,
        // What the program did: an abort, a fork, two processes with one rank.
        _ => INVALID_USAGE,
    }
}

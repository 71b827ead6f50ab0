//! Why a call failed, before it becomes a code.

use kolo::{Error, ReducerError};

use crate::codes::*;
use crate::error::{blame, code, kolo_error_t, nothing, write};

/// Why a call failed, before it becomes a code.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Kolo(#[from] Error),
    #[error("the {what} handle is {}; pass one that kolo made and that was not destroyed", if *is_null { "null" } else { "not valid" })]
    Handle { what: &'static str, is_null: bool },
    #[error("{what} is null")]
    Null { what: &'static str },
    #[error("{what} is not aligned to the type that it points to")]
    Misaligned { what: &'static str },
    #[error("the length of {what} is {len}, more than memory can hold")]
    Long { what: &'static str, len: usize },
    #[error("{what} is {given}; {expected}")]
    Value { what: &'static str, given: i64, expected: String },
    #[error("{what} is not UTF-8")]
    Text { what: &'static str },
    #[error("{what}: {why}")]
    Unsupported { what: &'static str, why: &'static str },
    #[error("{what} in a group: {why}")]
    Group { what: &'static str, why: &'static str },
    #[error(
        "{what} is called while another call of this thread waits for other ranks (from the function of kolo_set_wait_check, or from \
         a signal handler that runs there): only kolo_comm_abort and kolo_comm_destroy are allowed; set a flag, and call it later"
    )]
    InWaitCheck { what: &'static str },
    #[error(
        "the program was compiled with the header of kolo {header}, and the loaded library is kolo {library}, which has another ABI; \
         compile the program with the header of this library, or install kolo {header}"
    )]
    Version { header: String, library: String },
    #[error("a defect of kolo: it panicked with {0:?}; please report it")]
    Panic(String),
}

impl From<ReducerError> for Fault {
    fn from(problem: ReducerError) -> Fault {
        Fault::Kolo(problem.into())
    }
}

impl Fault {
    pub(crate) fn value(what: &'static str, given: impl Into<i64>, expected: impl Into<String>) -> Fault {
        Fault::Value { what, given: given.into(), expected: expected.into() }
    }

    /// Returns the fault of a setting with an invalid value.
    pub(crate) fn setting(name: impl Into<String>, value: impl Into<String>, expected: impl Into<String>) -> Fault {
        Error::Setting { name: name.into(), value: value.into(), expected: expected.into() }.into()
    }

    pub(crate) fn code(&self) -> kolo_result_t {
        match self {
            Fault::Kolo(error) => code(error),
            Fault::Handle { .. } => KOLO_ERR_HANDLE,
            Fault::Null { .. } | Fault::Misaligned { .. } | Fault::Long { .. } => KOLO_ERR_ARGUMENT,
            Fault::Value { .. } | Fault::Text { .. } | Fault::Group { .. } | Fault::InWaitCheck { .. } => KOLO_ERR_ARGUMENT,
            Fault::Unsupported { .. } => KOLO_ERR_UNSUPPORTED,
            Fault::Version { .. } => KOLO_ERR_VERSION,
            Fault::Panic(_) => KOLO_ERR_INTERNAL,
        }
    }

    /// Returns what `kolo_last_error` gives.
    pub(crate) fn describe(&self) -> kolo_error_t {
        let mut described = nothing();
        described.code = self.code();
        write(&mut described.message, &self.to_string());
        match self {
            Fault::Kolo(error) => {
                described.usable = error.leaves_communicator_usable().into();
                blame(&mut described, error);
            }
            Fault::Panic(_) => described.usable = 0,
            _ => described.usable = 1,
        }
        described
    }
}

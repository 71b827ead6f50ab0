//! How a gradient reducer, or a call of it, is wrong.

use super::Error;
use crate::types::{DType, Rank};

/// How a gradient reducer, or a call of it, is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerError {
    /// Two ranks gave different parameters, buffers or options. All ranks report the same
    /// difference, the first one.
    #[error(
        "ranks differ at {what}: rank 0 has {first}, rank {rank} has {other}; all ranks must give the same parameters in the same \
         order, and the same options"
    )]
    Mismatch {
        /// The parameter, buffer or option.
        what: String,
        /// What rank 0 has.
        first: String,
        /// The lowest rank that differs.
        rank: Rank,
        /// What it has.
        other: String,
    },
    /// Another rank cannot make its reducer. No rank makes one.
    #[error("rank {rank} cannot make a reducer: {why}")]
    Refused {
        /// The lowest such rank.
        rank: Rank,
        /// The error of that rank.
        why: String,
    },
    /// The step ended, but gradients are missing. The step of the other ranks fails, too.
    #[error(
        "finish() was called, but {name}{} not ready; make it ready, say that it is unused, or choose Unused::Find or \
         Unused::Static", if *others > 0 { format!(" and {others} more are") } else { " is".to_owned() }
    )]
    NotReady {
        /// The first missing parameter in forward order.
        name: String,
        /// How many more are missing.
        others: usize,
    },
    /// A parameter was made ready, or declared unused, twice in a step.
    #[error("{name} was marked ready or unused twice in this step; accumulate gradients in separate steps")]
    Twice {
        /// The parameter.
        name: String,
    },
    /// A parameter was used that the first step had not used, although the graph was declared
    /// static.
    #[error("{name} was not used in the first step, but is in this one; with Unused::Static every step uses the same parameters")]
    NotStatic {
        /// The parameter.
        name: String,
    },
    /// A view of the gradient exists already.
    #[error("the gradient of {name} is being written already; drop its view first")]
    InView {
        /// The parameter.
        name: String,
    },
    /// The parameter's index is out of range.
    #[error("there is no parameter {index}; there are {count}")]
    NoParameter {
        /// What was given.
        index: usize,
        /// The number of parameters.
        count: usize,
    },
    /// The elements given or requested are not of the type of the parameter or buffer.
    #[error("{name} has elements of {dtype}, not {given}")]
    Elements {
        /// The parameter or buffer.
        name: String,
        /// Its element type.
        dtype: DType,
        /// The element type of the call.
        given: DType,
    },
    /// A tensor on the device was given or requested as host memory, or the other way round.
    #[error("{name} was described as in {0} memory, but {1} memory was given or asked for", place(*on_device), place(!on_device))]
    Place {
        /// The parameter or buffer.
        name: String,
        /// Whether it is on the device.
        on_device: bool,
    },
    /// The number of elements, or of tensors, is wrong.
    #[error("{name} has {expected}, but {given} were given")]
    Length {
        /// The parameter, the buffer, or the group of tensors.
        name: String,
        /// How many it has.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// A hook in C did not return 0.
    #[error("hook_function returned {returned} for bucket {bucket}, not 0 (as a kolo_result_t: {meaning})")]
    Hook {
        /// The bucket.
        bucket: usize,
        /// What it returned.
        returned: i32,
        /// The meaning of that number as a result of kolo.
        meaning: &'static str,
    },
    /// The call is not possible at this moment.
    #[error("{call}: {why}")]
    Moment {
        /// The call.
        call: &'static str,
        /// Why it is not possible.
        why: &'static str,
    },
}

impl From<ReducerError> for Error {
    fn from(problem: ReducerError) -> Error {
        Error::Reducer { problem: Box::new(problem) }
    }
}

fn place(on_device: bool) -> &'static str {
    if on_device { "the device's" } else { "host" }
}

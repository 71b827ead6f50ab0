//! kolo

mod attempt;
mod buffer;
mod door;
mod engine;
mod error;
mod reduce;
mod schedule;
mod store;
mod sync;
mod sys;
mod transport;
mod types;
mod window;

pub use error::{Argument, Cause, Error, Result, StoreProblem};
pub use schedule::Algorithm;
pub use types::{DType, Descriptor, Element, Op, Rank, ReduceOp};

/// What a collective would cost: the model with which kolo chooses its algorithms.
pub mod plan {
    pub use crate::schedule::select::{Candidate, Choice, CostModel, Layout, LinkCost, candidates};
}

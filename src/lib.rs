//! kolo

mod attempt;
mod bootstrap;
mod buffer;
mod comm;
mod config;
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
mod wire;

pub use comm::{Builder, Communicator, Registered, Scope};
pub use config::Transport;
pub use engine::progress::Work;
pub use error::{Argument, Cause, Error, Result, StoreProblem};
pub use half::{bf16, f16};
pub use schedule::Algorithm;
pub use store::{Store, TcpStoreServer};
pub use types::{DType, Descriptor, Element, Op, Rank, ReduceOp, UnknownName};

/// What a collective would cost: the model with which kolo chooses its algorithms.
pub mod plan {
    pub use crate::schedule::select::{Candidate, Choice, CostModel, Layout, LinkCost, candidates};
}

#[doc = include_str!("../docs/settings.md")]
pub mod settings {}

//! Failures: how ranks notice, diagnose and report them, and continue without the ranks that
//! failed.
//!
//! - [`context`] is one operation in progress: its deadline, and the errors that it fails with.
//! - [`cancel`] ends the operations of a communicator.
//! - [`status`] is what peers may learn of a communicator: what it does, why it failed, whether its
//!   rank continues. [`control`] asks for it in [`message`]s, and [`board`] answers.
//! - [`detector`] asks the peers for which operations wait long.
//! - [`report`] says why a communicator ended. [`diagnosis`] makes a report of what one rank sees,
//!   [`mismatch`] finds the rank whose call differs from those of the others, and [`agreement`]
//!   agrees on one report for all survivors.
//! - [`refused`] names the system call for which an operation failed.
//! - [`wait_check`] is what a thread asks while it waits.
//! - [`shrink`] lets the survivors agree on which ranks continue.

mod agreement;
mod ballot;
mod board;
mod cancel;
mod context;
mod control;
mod detector;
mod diagnosis;
mod encoding;
pub(crate) mod message;
mod mismatch;
mod refused;
mod report;
pub(crate) mod shrink;
mod status;
pub(crate) mod wait_check;

pub(crate) use agreement::{
    abort, agree_on_report, end_by_error, end_by_panic, end_by_shrink, give_up_former_part, give_up_part,
};
pub(crate) use board::StatusBoard;
pub(crate) use cancel::CancelToken;
#[cfg(test)]
pub(crate) use context::PANICS;
pub(crate) use context::{CommInfo, OpContext};
pub(crate) use control::{ControlChannel, QueryError, Written};
pub(crate) use message::{Query, Reply};
pub(crate) use refused::name_refused_call;
pub(crate) use report::culprit_of;
pub(crate) use status::CommStatus;

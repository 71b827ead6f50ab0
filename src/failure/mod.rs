//! What is known of how the ranks are, and what they tell each other beside their operations.
//!
//! - [`context`] is one operation under way: its deadline, and how it fails.
//! - [`cancel`] ends the operations of a communicator.
//! - [`status`] is what others may know of a communicator: what it does, why it failed, whether it goes on. [`control`] asks for
//!   it, in [`message`]s, and [`board`] answers.
//! - [`detector`] asks those for whom an operation waits long.
//! - [`report`] says why a communicator ended, and [`agreement`] makes of what each rank sees one report of all.
//! - [`shrink`] lets survivors agree on who goes on.

mod agreement;
mod ballot;
mod board;
mod cancel;
mod context;
mod control;
mod detector;
pub(crate) mod message;
mod report;
pub(crate) mod shrink;
mod status;

pub(crate) use agreement::{abort, agree_on_report};
pub(crate) use board::StatusBoard;
pub(crate) use cancel::CancelToken;
#[cfg(test)]
pub(crate) use context::PANICS;
pub(crate) use context::{CommInfo, OpContext};
pub(crate) use control::{ControlChannel, QueryError};
pub(crate) use message::{Query, Reply};
pub(crate) use status::CommStatus;

//! What is known of how the ranks are, and what they tell each other beside their operations.
//!
//! - [`context`] is one operation under way: its deadline, and how it fails.
//! - [`cancel`] ends the operations of a communicator.
//! - [`state`] answers those who ask a rank: what it does, why it failed, whether it goes on.
//! - [`detector`] asks those for whom an operation waits long.
//! - [`report`] says why a communicator ended, and [`agreement`] makes of what each rank sees one report of all.
//! - [`shrink`] lets survivors agree on who goes on.

mod agreement;
mod cancel;
mod context;
mod detector;
pub(crate) mod message;
mod report;
pub(crate) mod shrink;
mod state;

pub(crate) use agreement::{abort, settle};
pub(crate) use cancel::{Alarm, Puzzle, Wait};
#[cfg(test)]
pub(crate) use context::PANICS;
pub(crate) use context::{Attempt, Terms};
pub(crate) use message::{Answer, Question};
pub(crate) use state::{Boards, Bulletin, Contact, Unheard};

//! What is known of how the ranks are, and what they tell each other beside their operations.
//!
//! - [`recorder`] keeps what each communicator did last.
//! - [`bulletin`] answers those who ask a rank: what it does, why it failed, whether it goes on.
//! - [`watch`] asks those for whom an operation waits long.
//! - [`verdict`] makes of what each rank sees of a failure one report of all.
//! - [`shrink`] lets survivors agree on who goes on.

mod bulletin;
pub(crate) mod message;
mod notice;
pub(crate) mod recorder;
mod report;
pub(crate) mod shrink;
mod verdict;
mod watch;

pub(crate) use bulletin::{Boards, Bulletin, Contact, Unheard};
pub(crate) use message::{Answer, Question};
pub(crate) use recorder::{Recorder, Recording, Who, path, prepare};
pub(crate) use verdict::{abort, settle};

//! Executes schedules over links.
//!
//! One thread at a time drives an [`Engine`]. It sends from, receives into and reduces in user
//! memory, on all links at once, and sleeps only when no link moves.

mod by_tag;
pub(crate) mod frame;
mod in_flight;
mod job;
mod leave;
mod outgoing;
mod receive;
mod receivers;
mod run;
mod scratch;
mod state;
#[cfg(test)]
mod tests;
mod unexpected;
mod wait;

pub(crate) use in_flight::InFlight;
pub(crate) use job::{Job, Paused};
pub(crate) use receive::Now;
#[cfg(test)]
pub(crate) use run::Stepped;
pub(crate) use state::Engine;

//! What one rank does, in order, to take part in a collective over messages. Pure: no clock, no socket, no memory.
//!
//! A generator is a function from a [`Problem`] to an iterator of [`Step`]s; there is one file per family. The engine
//! executes the steps over links, and `simulate` executes those of all ranks with no network at all.
//!
//! # What a step means
//!
//! - Steps take effect in order. A `Send` only queues its bytes, and later steps go on while they drain; a step that
//!   would write memory which an earlier send has still to read waits for that send, element by element. So two ranks
//!   may send each other the very range into which they receive, and no order of sends can deadlock.
//! - A step with a `to` forwards: what has arrived (and been reduced) leaves while the rest of the step is on its way.
//! - Messages between two ranks arrive in the order in which they were sent, and both sides know their lengths.
//! - `finish` marks the step after which a range holds the whole reduction: the engine divides there for an average.
//! - The operands of a reduction are taken in the order of their ranks, so that both sides of an exchange compute the
//!   same bits.

mod algorithm;
mod barrier;
mod direct;
mod double_tree;
mod doubling;
mod generate;
mod halving;
mod model;
mod price;
mod problem;
mod ring;
pub(crate) mod select;
#[cfg(test)]
mod simulate;
mod step;
#[cfg(test)]
mod tests;
mod tree;

pub use algorithm::Algorithm;
pub(crate) use generate::steps;
pub(crate) use problem::{Blocks, Problem, chunk};
pub(crate) use step::{BufferRef, Span, Step};

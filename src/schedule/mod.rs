//! Schedules: what one rank does, in order, for a collective over messages. Pure: no clock, no
//! socket, no memory.
//!
//! A generator is a function from a [`Problem`] to an iterator of [`Step`]s, with one file per
//! family. The engine executes the steps over links, and the tests' simulator executes those of all
//! ranks without a network.
//!
//! # What a step means
//!
//! - Steps take effect in order. A `Send` only queues its bytes, and later steps continue while
//!   they drain. A step that would write memory which an earlier send has still to read waits for
//!   that send, element by element. So two ranks may send each other the very range into which they
//!   receive, and no order of sends can deadlock.
//! - A step with a `to` forwards: what has arrived (and been reduced) is sent while the rest
//!   arrives.
//! - Messages between two ranks arrive in the order in which they were sent. Both ranks know their
//!   lengths.
//! - `finish` marks the step after which a range holds the complete reduction: there the engine
//!   divides an average.
//! - A reduction takes its operands in the order of their ranks, so both sides of an exchange
//!   compute the same bits.

mod algorithm;
mod barrier;
mod compressed;
mod direct;
mod double_tree;
mod doubling;
mod generate;
mod halving;
mod model;
pub(crate) mod moves;
pub(crate) mod order;
mod price;
pub(crate) mod problem;
mod ring;
pub(crate) mod select;
mod step;
#[cfg(test)]
mod tests;
mod tree;
mod two_level;

pub use algorithm::Algorithm;
pub(crate) use compressed::{compressed, segment_of_compressed};
pub(crate) use generate::steps;
#[cfg(any(fuzzing, test))]
pub(crate) use problem::elements;
pub(crate) use problem::{Blocks, Problem, Racks, chunk};
pub(crate) use step::{BufferRef, Span, Step};

//! What is known of how the ranks are.

pub(crate) mod recorder;
mod report;

pub(crate) use recorder::{Recorder, Recording, Who, path, prepare};

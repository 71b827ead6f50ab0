//! A device of which the models have no need: there, a thread does what a stream would.

use crate::error::Result;

pub(crate) type Address = u64;
pub(crate) type StreamId = u64;

pub(crate) trait Device {
    unsafe fn write_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()>;
    unsafe fn wait_for_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()>;
}

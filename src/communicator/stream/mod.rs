//! Operations on the memory of GPUs, on slices of cudarc and in the order of a CUDA stream.

mod buffer;
mod form;
#[cfg(test)]
mod on_a_gpu_tests;

pub(crate) use buffer::in_turn;
pub use buffer::{DeviceBuffer, DeviceView, DeviceViewMut};
pub use form::OnStream;
#[cfg(test)]
pub(crate) use on_a_gpu_tests::on_one_gpu;

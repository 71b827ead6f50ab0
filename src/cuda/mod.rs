//! Buffers in the memory of GPUs.

#[cfg(feature = "cuda")]
mod kernels;

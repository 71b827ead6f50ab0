//! Buffers in device memory: what kolo needs of a device, how a collective is cut into rounds
//! that pass through the host, and how ranks reach each other's device memory. [`crate::device`] runs
//! the collectives.

pub(crate) mod barrier;
pub(crate) mod device;
pub(crate) mod direct;
#[cfg(test)]
pub(crate) mod fake_device;
pub(crate) mod held;
pub(crate) mod imports;
mod kernels;
pub(crate) mod lanes;
pub(crate) mod moves;
mod nvidia;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod rounds;
pub(crate) mod shared;
mod word_pool;
pub(crate) mod words;

pub(crate) use kernels::compiler;
pub(crate) use nvidia::driver;

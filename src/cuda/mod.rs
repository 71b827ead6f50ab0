//! Buffers in the memory of GPUs: what is asked of a device, how a collective on its memory is cut into pieces that pass through
//! the host, and how ranks reach each other's device memory. [`crate::communicator`] makes collectives of it.

pub(crate) mod device;
pub(crate) mod direct;
#[cfg(test)]
pub(crate) mod fake_device;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod nvidia;
pub(crate) mod peers;
pub(crate) mod pieces;

use std::sync::Arc;

use device::Driver;

/// The compiler for the kernels, or why there is none, for people; `None` if kolo was built without devices.
pub(crate) fn compiler() -> Option<Result<String, String>> {
    #[cfg(feature = "cuda")]
    return Some(kernels::compiler());
    #[cfg(not(feature = "cuda"))]
    None
}

/// The devices of this process; `None` if kolo was built without them, or if there is no driver for any.
pub(crate) fn driver() -> Option<Arc<dyn Driver>> {
    #[cfg(feature = "cuda")]
    return nvidia::driver();
    #[cfg(not(feature = "cuda"))]
    None
}

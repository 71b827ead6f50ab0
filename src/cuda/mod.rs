//! Buffers in device memory: what kolo needs of a device, how a collective is cut into rounds
//! that pass through the host, and how ranks reach each other's device memory. [`crate::exec`] runs
//! the collectives.

pub(crate) mod barrier;
pub(crate) mod device;
pub(crate) mod direct;
#[cfg(test)]
pub(crate) mod fake_device;
pub(crate) mod held;
pub(crate) mod imports;
#[cfg(feature = "cuda")]
mod kernels;
pub(crate) mod lanes;
pub(crate) mod moves;
#[cfg(feature = "cuda")]
mod nvidia;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod rounds;
pub(crate) mod shared;
pub(crate) mod words;

use std::sync::Arc;

use device::Driver;

/// Returns the version of the kernels' compiler, or why there is none, as text for users; `None` if
/// kolo was built without devices.
pub(crate) fn compiler() -> Option<Result<String, String>> {
    #[cfg(feature = "cuda")]
    return Some(kernels::compiler());
    #[cfg(not(feature = "cuda"))]
    None
}

/// Returns the driver of the devices; `None` if kolo was built without devices, or if no driver is
/// installed.
pub(crate) fn driver() -> Option<Arc<dyn Driver>> {
    #[cfg(feature = "cuda")]
    return nvidia::driver();
    #[cfg(not(feature = "cuda"))]
    None
}

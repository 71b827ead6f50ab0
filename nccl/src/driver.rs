//! The few calls of CUDA's driver that this library makes itself. The driver is looked for at run
//! time, and nothing here needs it.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use kolo::cudarc::driver::sys::{self, CUpointer_attribute, CUresult};
use kolo::cudarc::driver::{CudaContext, result};

use crate::fault::Fault;

/// Returns whether there is a driver that works.
pub(crate) fn is_there() -> bool {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    // SAFETY: it loads the driver's library, as kolo does.
    *IS_THERE.get_or_init(|| unsafe { sys::is_culib_present() } && result::init().is_ok())
}

fn check(result: CUresult, doing: &'static str) -> Result<(), Fault> {
    result.result().map_err(|error| Fault::Cuda { doing, problem: format!("{error:?}") })
}

/// Returns the device whose context is current, or 0, as CUDA's runtime has it; -1 without a driver.
pub(crate) fn current_device() -> c_int {
    if !is_there() {
        return -1;
    }
    let mut device = 0;
    // SAFETY: the number lives.
    match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
        CUresult::CUDA_SUCCESS => device,
        _ => 0,
    }
}

/// Returns the number of devices.
pub(crate) fn device_count() -> c_int {
    if is_there() { result::device::get_count().unwrap_or(0) } else { 0 }
}

/// Makes a context current if none is: that of device 0, as CUDA's runtime does.
fn with_context(doing: &'static str) -> Result<(), Fault> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer lives.
    check(unsafe { sys::cuCtxGetCurrent(&raw mut context) }, doing)?;
    if context.is_null() {
        let bound = CudaContext::new(0).and_then(|context| context.bind_to_thread());
        bound.map_err(|error| Fault::Cuda { doing, problem: format!("{error:?}") })?;
    }
    Ok(())
}

/// Returns whether an address is in the memory of a device.
pub(crate) fn is_on_device(address: *const c_void) -> bool {
    if !is_there() || address.is_null() {
        return false;
    }
    let mut kind = MaybeUninit::<u32>::new(0);
    let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: the attribute is a number of 32 bits, which lives.
    let result = unsafe { sys::cuPointerGetAttribute(kind.as_mut_ptr().cast(), which, address.addr() as u64) };
    // SAFETY: it was initialised above.
    result == CUresult::CUDA_SUCCESS && unsafe { kind.assume_init() } == 2
}

/// Waits until a stream has done the work that it has.
///
/// # Safety
///
/// The stream is null or lives.
pub(crate) unsafe fn synchronize(stream: *mut c_void) -> Result<(), Fault> {
    const DOING: &str = "waiting for the stream";
    if !is_there() {
        return Ok(());
    }
    with_context(DOING)?;
    // SAFETY: passed on.
    check(unsafe { sys::cuStreamSynchronize(stream.cast()) }, DOING)
}

/// Copies from memory of a device or of the host.
///
/// # Safety
///
/// `from` is valid for reading `to.len()` bytes, which nothing writes meanwhile.
pub(crate) unsafe fn read(to: &mut [u8], from: *const c_void) -> Result<(), Fault> {
    const DOING: &str = "copying from the device";
    if is_on_device(from) {
        with_context(DOING)?;
        // SAFETY: passed on, and the target is as long as it says.
        return check(unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from.addr() as u64, to.len()) }, DOING);
    }
    // SAFETY: passed on; the target was allocated by this library.
    unsafe { std::ptr::copy_nonoverlapping(from.cast(), to.as_mut_ptr(), to.len()) };
    Ok(())
}

/// Copies to memory of a device or of the host.
///
/// # Safety
///
/// `to` is valid for writing `from.len()` bytes, which nothing else uses meanwhile.
pub(crate) unsafe fn write(to: *mut c_void, from: &[u8]) -> Result<(), Fault> {
    const DOING: &str = "copying to the device";
    if is_on_device(to) {
        with_context(DOING)?;
        // SAFETY: passed on, and the source is as long as it says.
        return check(unsafe { sys::cuMemcpyHtoD_v2(to.addr() as u64, from.as_ptr().cast(), from.len()) }, DOING);
    }
    // SAFETY: passed on; the source was allocated by this library.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), from.len()) };
    Ok(())
}

/// Allocates memory of the current device.
pub(crate) fn allocate(bytes: usize) -> Result<*mut c_void, Fault> {
    const DOING: &str = "allocating memory of the device";
    with_context(DOING)?;
    let mut address = 0;
    // SAFETY: the number lives.
    check(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }, DOING)?;
    Ok(std::ptr::without_provenance_mut(address as usize))
}

/// Frees memory of [`allocate`].
///
/// # Safety
///
/// Nothing uses the memory any more.
pub(crate) unsafe fn free(address: *mut c_void) -> Result<(), Fault> {
    const DOING: &str = "freeing memory of the device";
    with_context(DOING)?;
    // SAFETY: passed on; the driver refuses an address that it did not allocate.
    check(unsafe { sys::cuMemFree_v2(address.addr() as u64) }, DOING)
}

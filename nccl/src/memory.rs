//! Memory that is allocated or registered here. Registering has no effect on how kolo moves data: it
//! finds out for itself which memory its peers reach.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use kolo::raw::between_forks;

use crate::codes::{SUCCESS, ncclResult_t};
use crate::comm::{Registration, enter, ncclComm_t};
use crate::driver;
use crate::environment::{Level, print};
use crate::fault::Fault;
use crate::pointers::place;

/// The alignment of host memory, and that of a window.
const PAGE: usize = 4096;

/// Host memory that was allocated and not freed, by address.
static ALLOCATED: Mutex<BTreeMap<usize, Layout>> = Mutex::new(BTreeMap::new());

/// Uses the table of host memory. No fork finds it locked.
fn allocated<T>(f: impl FnOnce(&mut BTreeMap<usize, Layout>) -> T) -> T {
    between_forks(|| f(&mut ALLOCATED.lock()))
}

/// Allocates memory of the current device, or of the host where there is no driver.
///
/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn allocate(to: *mut *mut c_void, size: usize) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let to = unsafe { place(to, "ptr")? };
    to.write(std::ptr::null_mut());
    if driver::is_there() {
        to.write(driver::allocate(size.max(1))?);
        return Ok(SUCCESS);
    }
    let layout = Layout::from_size_align(size.max(1), PAGE)
        .map_err(|_| Fault::argument(format!("size is {size}, more than memory can hold")))?;
    // SAFETY: the layout is not empty.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return Err(Fault::System(format!("there is no memory for {size} bytes")));
    }
    allocated(|all| all.insert(memory.expose_provenance(), layout));
    to.write(memory.cast());
    Ok(SUCCESS)
}

/// # Safety
///
/// Nothing uses the memory any more.
pub(crate) unsafe fn free(memory: *mut c_void) -> Result<ncclResult_t, Fault> {
    if memory.is_null() {
        return Ok(SUCCESS);
    }
    if let Some(layout) = allocated(|all| all.remove(&memory.addr())) {
        // SAFETY: it was allocated with this layout, and removed from the table once.
        unsafe { dealloc(memory.cast(), layout) };
        return Ok(SUCCESS);
    }
    if !driver::is_there() {
        return Err(Fault::argument("ptr was not allocated by ncclMemAlloc, or was freed before"));
    }
    // SAFETY: passed on.
    unsafe { driver::free(memory)? };
    Ok(SUCCESS)
}

/// Registers memory, and writes the handle.
///
/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn register(
    comm: ncclComm_t,
    buffer: *mut c_void,
    size: usize,
    to: *mut *mut c_void,
    is_window: bool,
) -> Result<ncclResult_t, Fault> {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let this = enter(comm)?;
    this.ready()?;
    // SAFETY: passed on.
    let to = unsafe { place(to, if is_window { "win" } else { "handle" })? };
    if buffer.is_null() || size == 0 {
        return Err(Fault::argument("buff is null or has no bytes"));
    }
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    this.registered.lock().insert(handle, Registration { address: buffer.expose_provenance(), is_window });
    print(Level::Info, || format!("registering {size} bytes: kolo moves registered and other memory alike"));
    to.write(std::ptr::without_provenance_mut(handle));
    Ok(SUCCESS)
}

pub(crate) fn deregister(comm: ncclComm_t, handle: *mut c_void, is_window: bool) -> Result<ncclResult_t, Fault> {
    let this = enter(comm)?;
    if handle.is_null() {
        return Ok(SUCCESS);
    }
    let mut registered = this.registered.lock();
    if registered.get(&handle.addr()).is_none_or(|registration| registration.is_window != is_window) {
        return Err(unknown());
    }
    registered.remove(&handle.addr());
    Ok(SUCCESS)
}

/// Writes the address of a window's memory.
///
/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn window_address(comm: ncclComm_t, window: *mut c_void, to: *mut *mut c_void) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let to = unsafe { place(to, "outUserPtr")? };
    let found = enter(comm)?.registered.lock().get(&window.addr()).copied().filter(|one| one.is_window);
    to.write(std::ptr::with_exposed_provenance_mut(found.ok_or_else(unknown)?.address));
    Ok(SUCCESS)
}

fn unknown() -> Fault {
    Fault::argument("the handle is not registered on this communicator")
}

pub(crate) fn no_suspension(comm: ncclComm_t) -> Result<ncclResult_t, Fault> {
    enter(comm)?;
    Err(Fault::unavailable("suspending a communicator", "it has no memory that it could give back and take again"))
}

pub(crate) fn no_statistics(comm: ncclComm_t, statistic: c_int) -> Result<ncclResult_t, Fault> {
    enter(comm)?;
    if !(0..=3).contains(&statistic) {
        return Err(Fault::argument(format!("stat is {statistic}; it must be from 0 to 3")));
    }
    Err(Fault::unavailable("ncclCommMemStats", "it does not count memory by communicator"))
}

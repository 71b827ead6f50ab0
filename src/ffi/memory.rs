//! Registered memory: buffers that the ranks of a host share.

use std::collections::BTreeMap;
use std::ffi::c_void;

use parking_lot::Mutex;

use super::communicator::{kolo_comm_t, on};
use super::fault::{Fault, kolo_result_t};
use super::{boundary, group, place};
use crate::Registered;

/// What was allocated and not freed, by address.
static ALLOCATED: Mutex<BTreeMap<usize, Registered<u8>>> = Mutex::new(BTreeMap::new());

/// Allocates `bytes` of zeroed memory, aligned to a page, that the ranks of this host share: kolo_all_reduce reads and writes
/// such buffers where they are, which is the least that can be moved. Where ranks cannot share memory it is ordinary memory, and everything
/// works as well.
///
/// A collective call of all ranks of `comm`, with the same number of bytes. `*ptr` is to be given to kolo_mem_free; it is NULL if this
/// fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_mem_alloc(ptr: *mut *mut c_void, bytes: usize, comm: kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer.
        let ptr = unsafe { place(ptr, "ptr")? };
        ptr.write(std::ptr::null_mut());
        group::refuse("kolo_mem_alloc")?;
        // Also none is some, so that it has an address of its own.
        let mut memory = this.comm.alloc::<u8>(bytes.max(1))?;
        let start = memory.as_mut_ptr();
        ALLOCATED.lock().insert(start.addr(), memory);
        ptr.write(start.cast());
        Ok(())
    })
}

/// Frees what kolo_mem_alloc allocated; of NULL, nothing. Not a collective call, and the communicator may be gone. Operations on the
/// memory must have ended. In a forked child it leaves the memory, which is the parent's, as it is.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_mem_free(ptr: *mut c_void) -> kolo_result_t {
    boundary(|| {
        if ptr.is_null() {
            return Ok(());
        }
        let memory = ALLOCATED.lock().remove(&ptr.addr());
        memory.map(drop).ok_or(Fault::Handle { what: "memory", is_null: false })
    })
}

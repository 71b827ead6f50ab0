//! Registered memory: buffers that the ranks of a host share.

use std::collections::BTreeMap;
use std::ffi::c_void;

use parking_lot::Mutex;

use kolo::raw::{alloc_uncleared, between_forks};
use kolo::{Pooled, Registered};

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::communicator::{kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;
use crate::pointers::place;

/// Memory that belongs to the caller.
enum Memory {
    Registered { _memory: Registered<u8> },
    Pooled { _memory: Pooled<u8> },
}

type Allocated = BTreeMap<usize, Memory>;

/// The memory that was allocated and not freed, by address; see [`allocated`].
static ALLOCATED: Mutex<Allocated> = Mutex::new(BTreeMap::new());

/// Uses the table of allocated memory. A forked child may free memory, too, so no fork finds the
/// table locked.
fn allocated<T>(f: impl FnOnce(&mut Allocated) -> T) -> T {
    between_forks(|| f(&mut ALLOCATED.lock()))
}

/// Allocates a registered buffer: `bytes` of zeroed memory, aligned to a page, that the ranks of
/// this host share. Collectives read and write such buffers in place, without a copy in between.
/// Where ranks cannot share memory, it is ordinary memory with the same use.
///
/// A collective call of all ranks of `comm`, with the same number of bytes. The caller passes
/// `*ptr` to kolo_mem_free; it is NULL if this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_mem_alloc(ptr: *mut *mut c_void, bytes: usize, comm: kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let ptr = unsafe { place(ptr, "ptr")? };
        ptr.write(std::ptr::null_mut());
        held::refuse("kolo_mem_alloc")?;
        // A buffer of 0 bytes gets 1, so that it has an address of its own.
        let mut memory = this.comm.alloc::<u8>(bytes.max(1))?;
        let start = memory.as_mut_ptr();
        allocated(|all| all.insert(start.addr(), Memory::Registered { _memory: memory }));
        ptr.write(start.cast());
        Ok(())
    })
}

/// Takes a registered buffer from the pool of `comm`: as kolo_mem_alloc, but this rank takes it
/// alone. It is not a collective call. The bytes are zeros or what earlier holders have left.
///
/// Freed buffers stay in the pool for later ones. The pool ends with the communicator and its last
/// buffer. The other ranks learn of new memory in a large collective of `comm`; until another one
/// has followed, operations copy it as they copy ordinary memory.
///
/// Without shared memory (ranks alone on their host, no room, too many buffers) it is ordinary
/// memory with the same use. KOLO_ERR_ARGUMENT if there is none of that either, KOLO_ERR_HANDLE if
/// `comm` is no communicator, KOLO_ERR_FORKED in a forked child.
///
/// The caller passes `*ptr` to kolo_mem_free; it is NULL if this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_mem_alloc_pooled(ptr: *mut *mut c_void, bytes: usize, comm: kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let ptr = unsafe { place(ptr, "ptr")? };
        ptr.write(std::ptr::null_mut());
        // A buffer of 0 bytes gets 1, so that it has an address of its own.
        let mut memory = alloc_uncleared(&this.comm, bytes.max(1))?;
        let start = memory.as_mut_ptr();
        allocated(|all| all.insert(start.addr(), Memory::Pooled { _memory: memory }));
        ptr.write(start.cast());
        Ok(())
    })
}

/// Frees memory of kolo_mem_alloc or kolo_mem_alloc_pooled; NULL has no effect. Not a collective
/// call; the communicator may be destroyed before. Operations on the memory must have ended. In a
/// forked child it does not change the memory, which belongs to the parent.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_mem_free(ptr: *mut c_void) -> kolo_result_t {
    boundary(|| {
        if ptr.is_null() {
            return Ok(());
        }
        let memory = allocated(|all| all.remove(&ptr.addr()));
        memory.map(drop).ok_or(Fault::Handle { what: "memory", is_null: false })
    })
}

#[cfg(all(test, unix, not(miri)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    use kolo::Communicator;

    use super::*;
    use crate::child::is_so_in_a_child;
    use crate::codes::KOLO_OK;

    #[test]
    fn a_forked_child_frees_while_another_thread_of_its_parent_allocates() {
        let comms = Communicator::in_process(1).unwrap();
        let memory = comms[0].alloc::<u8>(1).unwrap();
        let address = memory.as_ptr().addr();
        allocated(|all| all.insert(address, Memory::Registered { _memory: memory }));
        let is_over = AtomicBool::new(false);
        let failed = std::thread::scope(|scope| {
            scope.spawn(|| {
                // It holds the table as long as on a busy machine.
                while !is_over.load(Relaxed) {
                    allocated(|_| std::thread::sleep(Duration::from_millis(1)));
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let free = || kolo_mem_free(std::ptr::without_provenance_mut(address)) == KOLO_OK;
            let failed = (0..50).map(|_| is_so_in_a_child(free)).find(|ended| *ended != Some(true));
            is_over.store(true, Relaxed);
            failed
        });
        assert_eq!(failed, None, "a child that failed, or did not end");
        assert!(allocated(|all| all.remove(&address)).is_some(), "the children have freed it for their parent");
    }
}

//! Private memory in place of shared memory, on macOS.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

use super::mapping::write_every_page;

/// VM_FLAGS_OVERWRITE of the system's header.
const OVERWRITE: c_int = 0x4000;

// libc does not have this function.
unsafe extern "C" {
    static mach_task_self_: libc::mach_port_t;

    fn mach_vm_remap(
        target: libc::mach_port_t,
        target_address: *mut libc::mach_vm_address_t,
        size: libc::mach_vm_size_t,
        mask: libc::mach_vm_offset_t,
        flags: c_int,
        source: libc::mach_port_t,
        source_address: libc::mach_vm_address_t,
        copy: libc::boolean_t,
        current_access: *mut libc::vm_prot_t,
        most_access: *mut libc::vm_prot_t,
        inheritance: libc::vm_inherit_t,
    ) -> libc::kern_return_t;
}

/// Replaces pages by a private copy of them.
///
/// macOS maps the objects of `shm_open` as shared memory only, so they cannot be mapped again
/// privately, as on Linux. The kernel copies the mapping instead: it takes the copy, and then puts
/// it in the place of the pages. What another thread of this process writes to the pages between
/// the two, within microseconds, is lost. The caller's operation owns the range that peers may
/// write, so this concerns other data in its first and last page only.
///
/// # Safety
///
/// These are whole pages of a mapping of this process, which stay readable and writable.
pub(super) unsafe fn copy_in_place(at: NonNull<u8>, len: usize) -> io::Result<()> {
    let address = at.as_ptr().expose_provenance() as libc::mach_vm_address_t;
    let mut target = address;
    let (mut current, mut most) = (0, 0);
    // SAFETY: the caller vouches for the pages. The copy takes their place, contains the same
    // bytes, and is unmapped with the rest. The call writes an address and two numbers.
    let result = unsafe {
        mach_vm_remap(
            mach_task_self_,
            &mut target,
            len as libc::mach_vm_size_t,
            0,
            OVERWRITE,
            mach_task_self_,
            address,
            1,
            &mut current,
            &mut most,
            libc::VM_INHERIT_COPY as libc::vm_inherit_t,
        )
    };
    if result != libc::KERN_SUCCESS {
        return Err(io::Error::other(format!("the kernel does not copy the pages of shared memory: error {result} of Mach")));
    }
    // SAFETY: the pages are mapped.
    unsafe { write_every_page(at, len) };
    Ok(())
}

//! What processes leave behind that has a name.

use std::collections::BTreeSet;
use std::ffi::c_void;

use windows_sys::Wdk::Foundation::OBJECT_ATTRIBUTES;
use windows_sys::Win32::Foundation::{CloseHandle, HANDLE, UNICODE_STRING};
use windows_sys::Win32::System::RemoteDesktop::ProcessIdToSessionId;

use crate::job::{Job, wait_until};
use crate::runner::Outcome::{self, Passed};

#[link(name = "ntdll")]
unsafe extern "system" {
    fn NtOpenDirectoryObject(to: *mut HANDLE, access: u32, attributes: *const OBJECT_ATTRIBUTES) -> i32;
    fn NtQueryDirectoryObject(
        folder: HANDLE,
        to: *mut c_void,
        len: u32,
        is_single: u8,
        restarts: u8,
        context: *mut u32,
        written: *mut u32,
    ) -> i32;
}

/// The right to list the objects of a folder.
const DIRECTORY_QUERY: u32 = 1;

/// Returns the names of the objects of this session: events, sections with a name, and others.
fn objects() -> Vec<String> {
    let mut session = 0;
    // SAFETY: the call writes a number.
    assert_ne!(unsafe { ProcessIdToSessionId(std::process::id(), &mut session) }, 0);
    let name: Vec<u16> = format!("\\Sessions\\{session}\\BaseNamedObjects").encode_utf16().collect();
    let bytes = size_of_val(&*name) as u16;
    let name = UNICODE_STRING { Length: bytes, MaximumLength: bytes, Buffer: name.as_ptr().cast_mut() };
    let attributes = OBJECT_ATTRIBUTES { Length: size_of::<OBJECT_ATTRIBUTES>() as u32, ObjectName: &name, ..Default::default() };
    let mut folder = std::ptr::null_mut();
    // SAFETY: the attributes and the name live during the call.
    let status = unsafe { NtOpenDirectoryObject(&mut folder, DIRECTORY_QUERY, &attributes) };
    assert_eq!(status, 0, "the objects of this session: status {status:x}");
    let mut found = Vec::new();
    // Room for a name and a type.
    let mut entry = [0u64; 512];
    let mut context = 0;
    // SAFETY: the handle is open. The call writes an entry, which begins with the name: its length,
    // and its address within the entry.
    unsafe {
        let len = size_of_val(&entry) as u32;
        while NtQueryDirectoryObject(folder, entry.as_mut_ptr().cast(), len, 1, 0, &mut context, &mut 0) == 0 {
            let name = entry.as_ptr().cast::<UNICODE_STRING>().read();
            let units = std::slice::from_raw_parts(name.Buffer, usize::from(name.Length) / 2);
            found.push(String::from_utf16_lossy(units));
        }
        CloseHandle(folder);
    }
    found
}

/// Returns the names of kolo's objects and files.
fn names() -> BTreeSet<String> {
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path().display().to_string());
    // All processes of the user on this machine share one object.
    let is_of_a_job = |name: &String| name.contains("kolo") && !name.contains("kolo-machine");
    files.chain(objects()).filter(is_of_a_job).collect()
}

/// All ranks are killed. Their sections have no names, so that the system frees them with the last
/// process.
pub(crate) fn nothing_left_over() -> Outcome {
    let before = names();
    let mut job = Job::start("registered", 4, 600_000, |_, _| {});
    job.all_work();
    let of_job: BTreeSet<String> = names().difference(&before).cloned().collect();
    assert!(!of_job.is_empty(), "the ranks have no object with a name");
    (0..4).for_each(|rank| job.kill(rank));
    job.all_say("end");
    drop(job);
    wait_until("objects or files are left", || names().is_disjoint(&of_job));
    Passed(format!("{} objects", of_job.len()))
}

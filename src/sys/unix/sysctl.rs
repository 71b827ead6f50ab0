//! What the kernel of macOS says about itself, by name.

use std::ffi::CStr;

/// Returns a number; `None` if there is none of this name. The system stores it in four or eight
/// bytes.
pub(in crate::sys) fn number(name: &CStr) -> Option<u64> {
    let bytes = read(name)?;
    match bytes.len() {
        4 => Some(u32::from_ne_bytes(bytes.try_into().ok()?).into()),
        8 => Some(u64::from_ne_bytes(bytes.try_into().ok()?)),
        _ => None,
    }
}

/// Returns a text without its final zero; `None` if there is none of this name.
pub(in crate::sys) fn text(name: &CStr) -> Option<String> {
    let text = String::from_utf8(read(name)?).ok()?;
    Some(text.trim_end_matches('\0').to_owned()).filter(|text| !text.is_empty())
}

/// Returns a value of at most 128 bytes.
fn read(name: &CStr) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 128];
    let mut len = bytes.len();
    // SAFETY: the call writes at most `len` bytes, and sets `len` to how many it has written.
    let result = unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, std::ptr::null_mut(), 0) };
    bytes.truncate(len);
    (result == 0).then_some(bytes)
}

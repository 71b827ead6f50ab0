//! Who may open an object with a name: this user only.

use std::ffi::c_void;
use std::io;
use std::os::windows::io::{AsRawHandle, OwnedHandle};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use windows_sys::Win32::Foundation::{ERROR_SUCCESS, LocalFree};
use windows_sys::Win32::Security::Authorization::{
    ConvertSidToStringSidW, ConvertStringSecurityDescriptorToSecurityDescriptorW, GetSecurityInfo, SDDL_REVISION_1,
    SE_KERNEL_OBJECT,
};
use windows_sys::Win32::Security::{
    EqualSid, GetTokenInformation, OWNER_SECURITY_INFORMATION, PSECURITY_DESCRIPTOR, PSID, SECURITY_ATTRIBUTES, TOKEN_QUERY,
    TOKEN_USER, TokenUser,
};
use windows_sys::Win32::System::Threading::{GetCurrentProcess, OpenProcessToken};

use super::handle::{own, wide};

/// The user of this process.
pub(super) struct User {
    /// What the system tells about the user: a `TOKEN_USER`, and the bytes that it points to.
    token: Box<[u64]>,
    /// The user's identifier as a text.
    text: String,
}

// SAFETY: the bytes do not change, and the pointer in them points into the same allocation.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// Returns the user that this process runs as.
    pub(super) fn current() -> io::Result<&'static User> {
        static CURRENT: OnceLock<User> = OnceLock::new();
        if let Some(user) = CURRENT.get() {
            return Ok(user);
        }
        let user = User::ask()?;
        Ok(CURRENT.get_or_init(|| user))
    }

    fn ask() -> io::Result<User> {
        let mut token = null_mut();
        // SAFETY: the call writes a handle to `token`.
        if unsafe { OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &mut token) } == 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just made the handle.
        let token = unsafe { own(token) }?;
        // An identifier has at most 68 bytes.
        let (mut bytes, mut len) = (vec![0u64; 32].into_boxed_slice(), 0);
        let room = size_of_val(&*bytes) as u32;
        // SAFETY: the call writes at most `room` bytes.
        if unsafe { GetTokenInformation(token.as_raw_handle(), TokenUser, bytes.as_mut_ptr().cast(), room, &mut len) } == 0 {
            return Err(io::Error::last_os_error());
        }
        let mut user = User { token: bytes, text: String::new() };
        let mut text = null_mut();
        // SAFETY: the identifier is valid, and the call writes a pointer to `text`.
        if unsafe { ConvertSidToStringSidW(user.sid(), &mut text) } == 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the text ends with a zero. It is read before it is freed.
        unsafe {
            let len = (0..).take_while(|&at| *text.add(at) != 0).count();
            user.text = String::from_utf16_lossy(std::slice::from_raw_parts(text, len));
            LocalFree(text.cast());
        }
        Ok(user)
    }

    /// Returns the user's identifier as a text.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    fn sid(&self) -> PSID {
        // SAFETY: the system has written a TOKEN_USER there, and words are aligned for it.
        unsafe { (*self.token.as_ptr().cast::<TOKEN_USER>()).User.Sid }
    }
}

/// A security descriptor that the system has allocated.
struct Descriptor(PSECURITY_DESCRIPTOR);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the system allocated it, and it is freed once.
        unsafe { LocalFree(self.0) };
    }
}

/// Calls `make` with the attributes of an object that only this user can open.
pub(super) fn with_owner_only<T>(make: impl FnOnce(*const SECURITY_ATTRIBUTES) -> io::Result<T>) -> io::Result<T> {
    let user = User::current()?.text();
    // The user owns it and may do everything. A protected list inherits no other entry.
    let text = wide(&format!("O:{user}D:P(A;;GA;;;{user})"));
    let mut descriptor = null_mut();
    // SAFETY: the text ends with a zero, and the call writes a pointer to `descriptor`.
    let is_made = unsafe {
        ConvertStringSecurityDescriptorToSecurityDescriptorW(text.as_ptr(), SDDL_REVISION_1, &mut descriptor, null_mut())
    };
    if is_made == 0 {
        return Err(io::Error::last_os_error());
    }
    let descriptor = Descriptor(descriptor);
    let attributes = SECURITY_ATTRIBUTES {
        nLength: size_of::<SECURITY_ATTRIBUTES>() as u32,
        lpSecurityDescriptor: descriptor.0,
        bInheritHandle: 0,
    };
    make(&attributes)
}

/// Fails with `PermissionDenied` if an object belongs to another user, who may have taken its name.
pub(super) fn check_owner(object: &OwnedHandle) -> io::Result<()> {
    let (mut owner, mut descriptor): (PSID, *mut c_void) = (null_mut(), null_mut());
    // SAFETY: the handle is open, and the call writes two pointers.
    let result = unsafe {
        GetSecurityInfo(
            object.as_raw_handle(),
            SE_KERNEL_OBJECT,
            OWNER_SECURITY_INFORMATION,
            &mut owner,
            null_mut(),
            null_mut(),
            null_mut(),
            &mut descriptor,
        )
    };
    if result != ERROR_SUCCESS {
        return Err(io::Error::from_raw_os_error(result as i32));
    }
    let _descriptor = Descriptor(descriptor);
    let user = User::current()?;
    // SAFETY: both identifiers are valid: the descriptor and the user live until the end.
    if !std::ptr::eq(owner, null()) && unsafe { EqualSid(owner, user.sid()) } != 0 {
        return Ok(());
    }
    Err(io::ErrorKind::PermissionDenied.into())
}

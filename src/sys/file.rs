//! Files that only this user can have written.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use super::above_standard;

/// Why a file was not opened.
pub(crate) enum NotOpened {
    System(io::Error),
    /// Another user may have written the file. The text describes it and its owner.
    Untrusted(String),
}

impl NotOpened {
    pub(crate) fn into_error(self) -> io::Error {
        match self {
            NotOpened::System(error) => error,
            NotOpened::Untrusted(why) => io::Error::new(io::ErrorKind::PermissionDenied, why),
        }
    }
}

/// Opens a file that this user owns and others cannot write. It does not follow a symbolic link or
/// wait for a pipe. A file that it creates cannot be opened by others.
pub(crate) fn open_own(options: &mut OpenOptions, path: &Path) -> Result<File, NotOpened> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    }
    let file = above_standard(|| options.open(path)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists => NotOpened::System(error),
        // A link, or a file of another user, explains the error better.
        _ => match path.symlink_metadata().ok().and_then(|metadata| distrust(&metadata)) {
            Some(why) => NotOpened::Untrusted(why),
            None => NotOpened::System(error),
        },
    })?;
    match distrust(&file.metadata().map_err(NotOpened::System)?) {
        Some(why) => Err(NotOpened::Untrusted(why)),
        None => Ok(file),
    }
}

/// Returns why another user may have written a file, if so.
fn distrust(metadata: &Metadata) -> Option<String> {
    if metadata.is_symlink() {
        return Some("it is a symbolic link".to_owned());
    }
    if !metadata.is_file() {
        return Some("it is not a regular file".to_owned());
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let (owner, user, mode) = (metadata.uid(), rustix::process::geteuid().as_raw(), metadata.mode() & 0o7777);
        if owner != user {
            return Some(format!("it belongs to user {owner} (mode {mode:04o}), and this process runs as user {user}"));
        }
        if mode & 0o022 != 0 {
            return Some(format!("users other than its owner {owner} can write to it (mode {mode:04o})"));
        }
    }
    None
}

/// Checks, without creating a file, that this user can create one in a folder. Fails if the folder
/// is missing or not writable, or if its file system is read-only or full.
pub(crate) fn check_folder(folder: &Path) -> io::Result<()> {
    if !folder.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    #[cfg(unix)]
    {
        use rustix::fs::{Access, AtFlags, CWD, accessat, statvfs};
        use rustix::process::{getegid, geteuid, getgid, getuid};
        // For the effective user, Linux has a separate call, faccessat2, which some containers
        // forbid with EPERM.
        let is_itself = (getuid(), getgid()) == (geteuid(), getegid());
        let flags = if is_itself { AtFlags::empty() } else { AtFlags::EACCESS };
        accessat(CWD, folder, Access::WRITE_OK | Access::EXEC_OK, flags)?;
        let space = statvfs(folder)?;
        // Root may use blocks that are reserved. A file system that does not count blocks or files
        // reports 0 of 0.
        let is_root = geteuid().is_root();
        let (blocks, files) = if is_root { (space.f_bfree, space.f_ffree) } else { (space.f_bavail, space.f_favail) };
        if (space.f_blocks > 0 && blocks == 0) || (space.f_files > 0 && files == 0) {
            return Err(rustix::io::Errno::NOSPC.into());
        }
    }
    Ok(())
}

/// Returns whether files have owners and permissions on this system.
pub(crate) fn has_file_permissions() -> bool {
    cfg!(unix)
}

/// Returns whether paths begin with the letter of a drive on this system.
pub(crate) fn has_drive_letters() -> bool {
    cfg!(windows)
}

/// Returns whether users other than its owner can read or write a file, where the system has such
/// permissions.
pub(crate) fn is_open_to_others(file: &File) -> io::Result<bool> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        Ok(file.metadata()?.permissions().mode() & 0o077 != 0)
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        Ok(false)
    }
}

/// Locks a file, so that only this process has a lock on it, until it is closed. Other processes
/// can read and write it meanwhile.
pub(crate) fn try_lock(file: &File) -> Result<(), TryLockError> {
    #[cfg(not(all(windows, not(miri))))]
    return file.try_lock();
    #[cfg(all(windows, not(miri)))]
    super::windows::lock(file, true)
}

/// As [`try_lock`], for any number of processes at once, if none has locked the file alone.
pub(crate) fn try_lock_shared(file: &File) -> Result<(), TryLockError> {
    #[cfg(not(all(windows, not(miri))))]
    return file.try_lock_shared();
    #[cfg(all(windows, not(miri)))]
    super::windows::lock(file, false)
}

/// Returns whether an open file is still at a path, and was not removed or replaced.
pub(crate) fn is_still_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |metadata: &Metadata| (metadata.dev(), metadata.ino());
        matches!((file.metadata(), path.symlink_metadata()), (Ok(file), Ok(path)) if id(&file) == id(&path))
    }
    #[cfg(all(windows, not(miri)))]
    {
        let there = File::open(path).and_then(|file| super::windows::file_id(&file));
        matches!((super::windows::file_id(file), there), (Ok(file), Ok(path)) if file == path)
    }
    #[cfg(not(any(unix, all(windows, not(miri)))))]
    {
        let _ = (file, path);
        true
    }
}

/// Removes a file. Another one can be created in its place at once, even if a process still has it
/// open.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    #[cfg(all(windows, not(miri)))]
    {
        // Some versions of Windows keep the name until the last process closes the file, and let no
        // process use the name meanwhile.
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|_| io::Error::other("the system has no random numbers"))?;
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{:016x}", u64::from_le_bytes(random)));
        std::fs::rename(path, &aside)?;
        std::fs::remove_file(&aside)
    }
    #[cfg(not(all(windows, not(miri))))]
    std::fs::remove_file(path)
}

/// Closes a file. Network file systems then write the file back, and report errors of that here.
pub(crate) fn close(file: File) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::fd::IntoRawFd;
        // SAFETY: `file` owned the descriptor and has given it up.
        match unsafe { libc::close(file.into_raw_fd()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
    #[cfg(not(unix))]
    {
        drop(file);
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    /// Makes a system call fail in this thread from now on, as in containers that do not know it.
    fn forbid(call: libc::c_long) {
        let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        // Loads the number of the call. If it is the forbidden one, returns the error; otherwise
        // allows the call.
        let mut steps = [
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the program lives until the call returns, and the system keeps a copy.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
        }
    }

    #[test]
    fn a_folder_is_writable_in_a_container_that_forbids_new_system_calls() {
        let checked = std::thread::spawn(|| {
            forbid(libc::SYS_faccessat2);
            check_folder(&std::env::temp_dir())
        });
        checked.join().unwrap().unwrap();
    }
}

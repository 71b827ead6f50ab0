//! Unix sockets at paths, for systems without abstract names.
//!
//! A listener has a folder, which only its user can enter, with its socket. As long as it listens,
//! it holds a lock on the folder. A process that is killed leaves its folder, whose lock is free
//! then: the next process of this user that listens removes it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::local_socket::{LocalListener, LocalStream, connect_to};
use crate::sys::above_standard;
use crate::sys::file::{is_still_at, try_lock};

/// The extension of the folders of listeners, and of those that have no name yet.
const LOCAL: &str = "local";
const NEW: &str = "new";

/// The socket in the folder.
const SOCKET: &str = "s";

/// The most bytes of a path: the addresses of macOS have room for 104, and a zero ends them.
const LONGEST: usize = 103;

/// The bytes behind the path of all folders: a slash, a listener's name, and the socket.
const OF_A_NAME: usize = 48;

/// Returns where this user's listeners have their folders. Processes that find each other have the
/// same path.
pub(in crate::sys) fn folder_of_listeners() -> PathBuf {
    let folder = own_folder().unwrap_or_else(temporary_folder);
    if folder.as_os_str().len() + OF_A_NAME <= LONGEST { folder } else { PathBuf::from("/tmp") }
}

fn temporary_folder() -> PathBuf {
    crate::sys::variable("TMPDIR").filter(|folder| !folder.is_empty()).map_or_else(|| "/tmp".into(), PathBuf::from)
}

/// Returns the folder for caches of this user on this machine. Its environment does not change it,
/// and the system removes nothing from it. (From the folder for temporary files, it removes what
/// was not used for three days.)
#[cfg(not(target_os = "linux"))]
fn own_folder() -> Option<PathBuf> {
    use std::ffi::CStr;
    let mut path = [0u8; 1024];
    // SAFETY: the call writes at most as many bytes as there are.
    let len = unsafe { libc::confstr(libc::_CS_DARWIN_USER_CACHE_DIR, path.as_mut_ptr().cast(), path.len()) };
    let path = CStr::from_bytes_until_nul(path.get(..len)?).ok()?.to_str().ok()?;
    Some(path).filter(|path| !path.is_empty()).map(PathBuf::from)
}

#[cfg(target_os = "linux")]
fn own_folder() -> Option<PathBuf> {
    None
}

/// The folder of a listener, locked. It is removed with its socket when this value is dropped.
pub(crate) struct Folder {
    path: PathBuf,
    _lock: File,
    /// The process that made it. A forked child also has this value, but only the parent removes
    /// the folder.
    owner: u32,
}

impl Folder {
    /// Makes the folder of a name; `AddrInUse` if a listener has it. It gets its name once it is
    /// locked: without its lock it would look like one that was left.
    pub(super) fn make(path: PathBuf) -> io::Result<Folder> {
        remove_stale(&path);
        let new = path.with_extension(NEW);
        DirBuilder::new().mode(0o700).create(&new)?;
        let named = || {
            let lock = open(&new)?;
            try_lock(&lock).map_err(io::Error::from)?;
            if fs::symlink_metadata(&path).is_ok() {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            fs::rename(&new, &path)?;
            Ok(Folder { path, _lock: lock, owner: std::process::id() })
        };
        named().inspect_err(|_| _ = fs::remove_dir(&new))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.owner == std::process::id()
            && let Err(error) = remove(&self.path)
        {
            crate::log::debug!(%error, "cannot remove the folder of a local socket");
        }
    }
}

/// Opens a folder of this user that is not a symbolic link.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY);
    let folder = above_standard(|| options.open(path))?;
    let is_own = folder.metadata()?.uid() == rustix::process::geteuid().as_raw();
    if is_own { Ok(folder) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Returns whether a listener has a folder, or this process cannot know.
fn is_in_use(path: &Path) -> bool {
    match open(path) {
        Ok(folder) => try_lock(&folder).is_err(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Removes the folder of a listener whose process has ended.
fn remove_stale(path: &Path) {
    let Ok(folder) = open(path) else { return };
    // While it is locked, no process takes it for its own.
    if try_lock(&folder).is_ok() && is_still_at(&folder, path) {
        let removed = remove(path);
        crate::log::debug!(folder = %path.display(), ?removed, "removed the local socket of a process that has ended");
    }
}

/// Removes a folder that contains at most a socket.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::remove_dir(path),
    }
}

/// Removes all folders that ended processes of this user have left.
fn remove_all_stale(folder: &Path) {
    /// Far longer than a process needs to give a folder its name.
    const LONG: Duration = Duration::from_secs(60);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        if !name.to_str().is_some_and(|name| name.starts_with("kolo-")) {
            continue;
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some(LOCAL) => remove_stale(&path),
            Some(NEW)
                if entry.metadata().and_then(|of| of.modified()).is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LONG)) =>
            {
                remove_stale(&path);
            }
            _ => {}
        }
    }
}

/// Returns the folder of a name, which peers may have sent.
fn folder_of(folder: &Path, name: &str) -> io::Result<PathBuf> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if name.bytes().all(is_allowed) {
        Ok(folder.join(format!("{name}.{LOCAL}")))
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

impl LocalListener<Folder> {
    /// Listens under a name.
    pub(crate) fn bind(name: &str) -> io::Result<LocalListener<Folder>> {
        LocalListener::bind_in(&folder_of_listeners(), name)
    }

    pub(super) fn bind_in(folder: &Path, name: &str) -> io::Result<LocalListener<Folder>> {
        remove_all_stale(folder);
        let folder = Folder::make(folder_of(folder, name)?)?;
        LocalListener::at(&SocketAddr::from_pathname(folder.path.join(SOCKET))?, folder)
    }
}

/// Connects to a name of this host. Fails with `ConnectionRefused` if there is no listener of this
/// name, and with `TimedOut` if its queue is full until the deadline.
#[cfg(any(not(target_os = "linux"), kolo_posix))]
pub(in crate::sys) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
    connect_in(&folder_of_listeners(), name, deadline)
}

pub(super) fn connect_in(folder: &Path, name: &str, deadline: Instant) -> io::Result<LocalStream> {
    let path = folder_of(folder, name)?;
    let address = SocketAddr::from_pathname(path.join(SOCKET))?;
    // macOS refuses a connection if the queue is full, too.
    let is_full = |error: &io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => true,
        io::ErrorKind::ConnectionRefused => is_in_use(&path),
        _ => false,
    };
    connect_to(&address, deadline, is_full).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::ErrorKind::ConnectionRefused.into(),
        _ => error,
    })
}

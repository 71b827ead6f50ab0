//! Files that kolo creates in folders that it does not own, where other users may be able to write:
//! what they have put there is neither followed nor waited for.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::above_standard;

/// Writes a file that only this user can open, in place of what is at the path. A process that
/// reads it meanwhile reads the former file or the whole new one. A failed write leaves no partial
/// file.
///
/// The name under which the file is written is random and new, and a file of that name was not
/// there before. So no other user can have it written to another place, or open it.
pub fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let part = part_of(path)?;
    let mut file = create(&part)?;
    // A network file system may report an error of the write when the file is closed.
    let written = file.write_all(content).and_then(|()| super::close(file)).and_then(|()| std::fs::rename(&part, path));
    written.inspect_err(|_| _ = std::fs::remove_file(&part))
}

/// Returns a new path for a part of a file, in its folder.
fn part_of(path: &Path) -> io::Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(folder.join(format!(".kolo-{:016x}.part", getrandom::u64().map_err(io::Error::other)?)))
}

/// As [`write_file`], but writes to the device or pipe that is at the path, if there is one, such as
/// `/dev/stdout`. Without a reader, a pipe is an error. If it is full, this waits for its reader.
pub fn write_file_or_device(path: &Path, content: &[u8]) -> io::Result<()> {
    match open_device(path)? {
        Some(mut device) => device.write_all(content),
        None => write_file(path, content),
    }
}

/// Where a file will be written after work that takes long, so that the work is not lost.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
    device: Option<File>,
}

impl Destination {
    /// Opens the device or pipe that is at the path. If there is none, tries whether its folder takes a
    /// new file.
    pub fn open(path: &Path) -> io::Result<Destination> {
        let device = open_device(path)?;
        if device.is_none() {
            let part = part_of(path)?;
            drop(create(&part)?);
            std::fs::remove_file(part)?;
        }
        Ok(Destination { path: path.to_owned(), device })
    }

    /// Writes as [`write_file_or_device`].
    pub fn write(self, content: &[u8]) -> io::Result<()> {
        match self.device {
            Some(mut device) => device.write_all(content),
            None => write_file(&self.path, content),
        }
    }
}

/// Opens the device or pipe that is at the path, if there is one. A pipe without a reader is an error.
fn open_device(path: &Path) -> io::Result<Option<File>> {
    if !path.metadata().is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        return Ok(None);
    }
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = above_standard(|| options.open(path)).map_err(|error| without_reader(path, error))?;
    if file.metadata()?.is_file() {
        return Err(io::Error::other("it was a device or a pipe, and is a file now"));
    }
    #[cfg(unix)]
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - rustix::fs::OFlags::NONBLOCK)?;
    Ok(Some(file))
}

/// Says of a pipe that it has no reader. The system only says that there is no such device.
fn without_reader(path: &Path, error: io::Error) -> io::Error {
    #[cfg(unix)]
    if error.raw_os_error() == Some(libc::ENXIO)
        && path.metadata().is_ok_and(|there| std::os::unix::fs::FileTypeExt::is_fifo(&there.file_type()))
    {
        return io::Error::other("no process reads this pipe");
    }
    _ = path;
    error
}

/// Creates a regular file that only this user can open, where there is nothing, not even a symbolic
/// link.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    }
    let file = above_standard(|| options.open(path))?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Creates a folder that only this user can enter, and those above it that are missing. A folder
/// that is there already stays as it is.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Opens a regular file for reading. Does not wait for the other end of a pipe.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = above_standard(|| options.open(path))?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

#[cfg(all(test, unix, not(miri)))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("kolo-new-file-{test}-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Folder(path)
        }

        fn pipe(&self, name: &str) -> PathBuf {
            let path = self.0.join(name);
            let text = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: the text ends with a zero.
            assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o666) }, 0);
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// Fails if a call waits without end.
    fn in_time<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(call()));
        receiver.recv_timeout(Duration::from_secs(60)).expect("the call waits")
    }

    #[test]
    fn what_others_have_planted_is_replaced() {
        let folder = Folder::new("planted");
        let victim = folder.0.join("victim");
        std::fs::write(&victim, "theirs").unwrap();
        let link = folder.0.join("link");
        symlink(&victim, &link).unwrap();
        let dangling = folder.0.join("dangling");
        symlink(folder.0.join("absent"), &dangling).unwrap();
        let former = folder.0.join("former");
        std::fs::write(&former, "a longer text").unwrap();
        std::fs::set_permissions(&former, PermissionsExt::from_mode(0o666)).unwrap();
        for path in [folder.pipe("pipe"), link, dangling, former, folder.0.join("new")] {
            let there = path.clone();
            in_time(move || write_file(&there, b"ours")).unwrap();
            let metadata = path.symlink_metadata().unwrap();
            assert!(metadata.is_file(), "{}", path.display());
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{}", path.display());
            assert_eq!(std::fs::read(&path).unwrap(), b"ours", "{}", path.display());
        }
        assert_eq!(std::fs::read(&victim).unwrap(), b"theirs");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 6, "a partial file is left");
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_nothing() {
        let folder = Folder::new("nothing");
        // A folder cannot be replaced by a file.
        std::fs::create_dir(folder.0.join("folder")).unwrap();
        write_file(&folder.0.join("folder"), b"ours").unwrap_err();
        write_file(&folder.0.join("absent/file"), b"ours").unwrap_err();
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn devices_stay_and_a_pipe_without_a_reader_is_an_error() {
        let folder = Folder::new("devices");
        write_file_or_device(Path::new("/dev/null"), b"ours").unwrap();
        let pipe = folder.pipe("pipe");
        let there = pipe.clone();
        in_time(move || write_file_or_device(&there, b"ours")).unwrap_err();
        // More than a pipe holds.
        let there = pipe.clone();
        let reader = std::thread::spawn(move || std::fs::read(there).unwrap());
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while let Err(error) = write_file_or_device(&pipe, &[7; 1 << 20]) {
            assert!(std::time::Instant::now() < end, "{error}");
            std::thread::yield_now();
        }
        assert_eq!(reader.join().unwrap(), vec![7; 1 << 20]);
        let file = folder.0.join("file");
        write_file_or_device(&file, b"ours").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"ours");
    }

    #[test]
    fn a_destination_is_tried_before_it_is_written() {
        let folder = Folder::new("destination");
        assert!(Destination::open(&folder.0.join("absent/file")).is_err());
        let pipe = folder.pipe("pipe");
        let there = pipe.clone();
        let error = in_time(move || Destination::open(&there).err()).unwrap();
        assert_eq!(error.to_string(), "no process reads this pipe");
        let former = folder.0.join("former");
        std::fs::write(&former, "theirs").unwrap();
        let destination = Destination::open(&former).unwrap();
        assert_eq!(std::fs::read(&former).unwrap(), b"theirs");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2, "a partial file is left");
        destination.write(b"ours").unwrap();
        assert_eq!(std::fs::read(&former).unwrap(), b"ours");
    }

    #[test]
    fn reading_does_not_wait_for_a_pipe() {
        let folder = Folder::new("reading");
        let pipe = folder.pipe("pipe");
        in_time(move || open_regular(&pipe).map(drop)).unwrap_err();
        make_folder(&folder.0.join("a/b")).unwrap();
        make_folder(&folder.0.join("a/b")).unwrap();
        for made in ["a", "a/b"] {
            assert_eq!(folder.0.join(made).metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
    }
}

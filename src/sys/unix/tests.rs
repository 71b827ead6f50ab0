//! Tests of what only POSIX is needed for. Linux runs them, too.

#[cfg(all(target_os = "linux", not(kolo_posix)))]
#[allow(clippy::duplicate_mod, reason = "another type has the names that it takes from above")]
#[path = "../tests/sharing.rs"]
mod sharing;

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::local_socket::{LocalListener, LocalStream};
use super::memory::page_size;
use super::named_memory::NamedMemory;
use super::path_socket::{Folder, connect_in, folder_of_listeners};
use crate::sys::wait_until;

type Mapping = super::mapping::Mapping<NamedMemory>;

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A new folder for listeners, removed with its content.
struct Place(PathBuf);

impl Place {
    fn new(test: &str) -> Place {
        let path = std::env::temp_dir().join(format!("kolo-{}-{test}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Place(path)
    }

    fn listen(&self, name: &str) -> io::Result<LocalListener<Folder>> {
        LocalListener::bind_in(&self.0, name)
    }

    fn connect(&self, name: &str) -> io::Result<LocalStream> {
        connect_in(&self.0, name, late())
    }

    fn entries(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Leaves what a listener of a killed process leaves.
    fn leave(&self, name: &str) -> PathBuf {
        let path = self.0.join(format!("{name}.local"));
        fs::create_dir(&path).unwrap();
        drop(UnixListener::bind(path.join("s")).unwrap());
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Returns the two ends of a connection.
fn ends(test: &str) -> [LocalStream; 2] {
    let place = Place::new(test);
    let listener = place.listen("kolo-ends").unwrap();
    [place.connect("kolo-ends").unwrap(), listener.accept().unwrap()]
}

fn read(mapping: &Mapping, at: usize) -> u8 {
    assert!(at < mapping.len);
    // SAFETY: the byte is within the mapping, which no other thread uses.
    unsafe { mapping.base.add(at).read_volatile() }
}

fn write(mapping: &Mapping, at: usize, value: u8) {
    assert!(at < mapping.len);
    // SAFETY: as above.
    unsafe { mapping.base.add(at).write_volatile(value) }
}

#[test]
fn a_name_has_one_listener_and_leaves_nothing() {
    let place = Place::new("name");
    assert_eq!(place.connect("kolo-one").err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
    let listener = place.listen("kolo-one").unwrap();
    assert_eq!(place.listen("kolo-one").err().unwrap().kind(), io::ErrorKind::AddrInUse);
    let [folder] = &place.entries()[..] else { panic!("{:?}", place.entries()) };
    // Other users may not enter.
    assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & 0o777, 0o700);
    place.connect("kolo-one").unwrap();
    drop(listener);
    assert!(place.entries().is_empty(), "{:?}", place.entries());
    assert_eq!(place.connect("kolo-one").err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
    for name in ["kolo/../one", "kolo.one", "kolo\0"] {
        assert_eq!(place.connect(name).err().unwrap().kind(), io::ErrorKind::InvalidInput);
    }
}

#[test]
fn what_ended_processes_left_is_removed() {
    let place = Place::new("stale");
    let living = place.listen("kolo-living").unwrap();
    let [left, empty] = [place.leave("kolo-left"), place.0.join("kolo-empty.local")];
    fs::create_dir(&empty).unwrap();
    // These are no listener's: a folder with another file, a file, a link, another name.
    let other = place.leave("kolo-other");
    fs::write(other.join("file"), []).unwrap();
    fs::write(place.0.join("kolo-file.local"), []).unwrap();
    std::os::unix::fs::symlink("/tmp", place.0.join("kolo-link.local")).unwrap();
    fs::create_dir(place.0.join("kolo-folder")).unwrap();
    assert_eq!(place.connect("kolo-left").err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
    // The name of an ended process can be used again.
    let again = place.listen("kolo-left").unwrap();
    assert!(left.exists() && !empty.exists(), "{:?}", place.entries());
    place.connect("kolo-left").unwrap();
    place.connect("kolo-living").unwrap();
    assert_eq!(place.entries().len(), 6);
    drop((living, again));
    assert_eq!(place.entries().len(), 4);
}

/// Listeners that start at the same time take the folders of others for ones that were left.
#[test]
fn listeners_that_start_together_disturb_no_other() {
    let place = Place::new("together");
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let place = &place;
            scope.spawn(move || {
                for round in 0..50 {
                    let name = format!("kolo-{thread}-{round}");
                    let listener = place.listen(&name).unwrap();
                    place.connect(&name).unwrap();
                    listener.accept().unwrap();
                }
            });
        }
    });
    assert!(place.entries().is_empty(), "{:?}", place.entries());
}

#[test]
fn a_full_queue_keeps_no_process_waiting_for_long() {
    let place = Place::new("queue");
    let path = place.0.join("kolo-queue.local");
    let folder = Folder::make(path.clone()).unwrap();
    let listener = UnixListener::bind(path.join("s")).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match connect_in(&place.0, "kolo-queue", Instant::now() + Duration::from_millis(50)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100, "the queue is never full");
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    drop((listener, folder));
    assert_eq!(place.connect("kolo-queue").err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
}

/// An address has room for 103 bytes on macOS.
#[test]
fn the_path_of_a_listener_fits_an_address() {
    let name = format!("kolo-{}", "0".repeat(32));
    let longest = folder_of_listeners().join(format!("{name}.local/s"));
    assert!(longest.as_os_str().len() <= 103, "{}", longest.display());
    drop(LocalListener::<Folder>::bind(&name).unwrap());
    assert!(!longest.parent().unwrap().exists());
}

#[test]
fn memory_that_was_handed_over_has_no_name() {
    let [one, other] = ends("unnamed");
    let page = page_size();
    Mapping::create(page, page).unwrap().hand_over(&one).unwrap();
    let theirs = Mapping::take_over(&other, page, late()).unwrap();
    let flags = rustix::io::fcntl_getfd(theirs.file().unwrap().as_fd()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    // Other systems do not say it.
    if cfg!(target_os = "linux") {
        let name = fs::read_link(format!("/proc/self/fd/{}", theirs.file().unwrap().as_fd().as_raw_fd())).unwrap();
        assert!(name.to_string_lossy().ends_with(" (deleted)"), "{}", name.display());
    }
}

/// Whatever a peer writes into the table of extensions.
#[test]
fn nothing_behind_the_end_of_the_object_is_mapped() {
    const STEP: usize = 1 << 20;
    let one = Mapping::create(STEP, 8 * STEP).unwrap();
    let other = one.again().unwrap();
    let behind = 1000 * STEP..1001 * STEP;
    assert_eq!(other.extend(behind.clone(), late()).err().map(|error| error.kind()), Some(io::ErrorKind::OutOfMemory));
    let memory = other.file().unwrap();
    memory.extensions().add(&behind);
    assert_eq!(other.extension(behind).err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
}

/// The program has closed a descriptor, and another file has got its number.
#[test]
fn a_number_that_another_file_has_got_is_neither_used_nor_closed() {
    let page = page_size();
    let memory = Mapping::create(page, page).unwrap();
    let number = memory.file().unwrap().as_fd().as_raw_fd();
    let (mut reads, writes) = io::pipe().unwrap();
    // SAFETY: no other thread uses the number.
    assert_eq!(unsafe { libc::dup2(writes.as_raw_fd(), number) }, number);
    drop(writes);
    let error = memory.reserve(0..page, late()).unwrap_err();
    assert!(error.to_string().contains("the program has closed a descriptor"), "{error}");
    let [one, _other] = ends("number");
    assert!(memory.hand_over(&one).is_err() && memory.extend(page..2 * page, late()).is_err());
    drop(memory);
    // SAFETY: the number is that of the pipe, which nothing else closes.
    unsafe {
        assert_eq!(libc::write(number, b"x".as_ptr().cast(), 1), 1);
        assert_eq!(libc::close(number), 0);
    }
    let mut text = String::new();
    reads.read_to_string(&mut text).unwrap();
    assert_eq!(text, "x");
}

/// Run by the next test in a process of its own.
#[test]
#[ignore = "a part of another test"]
fn listen_until_killed() {
    let Some(place) = std::env::var_os("TEST_PLACE") else { return };
    let listener = LocalListener::bind_in(Path::new(&place), "kolo-peer").unwrap();
    let memory = Mapping::create(page_size(), page_size()).unwrap();
    write(&memory, 3, 7);
    loop {
        if let Ok(stream) = listener.accept() {
            memory.hand_over(&stream).unwrap();
            std::thread::sleep(Duration::from_secs(60));
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory comes from another process and outlives it, and the next listener removes what it left.
#[test]
fn a_killed_process_leaves_memory_and_no_socket() {
    let place = Place::new("killed");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sys::unix::tests::listen_until_killed", "--ignored"])
        .env("TEST_PLACE", &place.0)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut stream = None;
    wait_until("the process does not listen", || {
        stream = place.connect("kolo-peer").ok();
        stream.is_some()
    });
    let memory = Mapping::take_over(&stream.unwrap(), page_size(), late()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(read(&memory, 3), 7);
    assert_eq!(place.entries().len(), 1);
    assert_eq!(place.connect("kolo-peer").err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
    drop(place.listen("kolo-another").unwrap());
    assert!(place.entries().is_empty(), "{:?}", place.entries());
}

/// Another user can neither enter the folder of a listener nor pass for this user.
#[test]
#[cfg(target_os = "linux")]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        let said = b"NOT RUN: another user connects to a local socket; only root can become another user\n";
        return std::io::Write::write_all(&mut std::io::stderr(), said).unwrap();
    }
    const OTHER: u32 = 65534;
    // The raw call changes the user of this thread only; the C library's function would change all
    // threads.
    let become_other = || {
        // SAFETY: the arguments are numbers, and nothing on the thread needs root afterwards.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, OTHER, OTHER, OTHER) }, 0);
    };
    let place = Place::new("user");
    fs::set_permissions(&place.0, fs::Permissions::from_mode(0o777)).unwrap();
    let listener = place.listen("kolo-root").unwrap();
    let folder = place.entries().remove(0);
    std::thread::scope(|scope| {
        let connected = scope.spawn(|| {
            become_other();
            place.connect("kolo-root").err().map(|error| error.kind())
        });
        assert_eq!(connected.join().unwrap(), Some(io::ErrorKind::PermissionDenied));
        // Where it can connect, the listener sees which user it is.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(folder.join("s"), fs::Permissions::from_mode(0o777)).unwrap();
        let connected = scope.spawn(|| {
            become_other();
            let stream = place.connect("kolo-root").unwrap();
            // What a listener of this user left belongs to root, whose folder is not removed.
            assert!(!stream.is_of_this_user());
            stream
        });
        let _theirs = connected.join().unwrap();
        assert!(!listener.accept().unwrap().is_of_this_user());
    });
}

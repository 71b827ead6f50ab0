//! Files that this process hands over to other processes of its user, each to those that know its
//! ticket.
//!
//! A thread answers at an abstract socket. It hands nothing to processes of other users, and a
//! ticket cannot be guessed: it travels between ranks, which have authenticated each other.
//! `pidfd_getfd` would need no thread, but it needs the right to debug the other process, which
//! siblings do not have on many systems (Yama, the seccomp profiles of containers).

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sys::unix::local_socket::{LocalStream, connect_to};
use crate::sys::{Ticket, above_standard, between_forks, forks, is_refused, naming};

/// How long the thread waits for a connected process to show its ticket.
const TICKET_WAIT: Duration = Duration::from_millis(100);

/// The pause after a failure to accept, for example because no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Half of a ticket.
type Half = [u8; 16];

/// What this process exports.
struct Exporter {
    /// Forks that led to this process: a child has none of its parent's threads.
    forks: u32,
    /// The first half of all tickets, from which the name of the socket follows.
    name: Half,
    /// By the second half of their tickets.
    files: Mutex<HashMap<Half, OwnedFd>>,
}

static EXPORTER: Mutex<Option<Arc<Exporter>>> = Mutex::new(None);

/// A file that other processes can have until this is dropped. They keep what they have.
pub(crate) struct ExportedFile {
    exporter: Arc<Exporter>,
    token: Half,
}

/// A file that another process has handed over.
pub(crate) struct ImportedFile(OwnedFd);

fn random() -> io::Result<Half> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(random)
}

fn address(name: &[u8]) -> io::Result<SocketAddr> {
    let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("kolo-file-{hex}"))
}

impl Exporter {
    fn of_this_process() -> io::Result<Arc<Exporter>> {
        between_forks(|| {
            let mut exporter = EXPORTER.lock();
            if let Some(exporter) = exporter.as_ref().filter(|exporter| exporter.forks == forks()) {
                return Ok(exporter.clone());
            }
            let new = Arc::new(Exporter { forks: forks(), name: random()?, files: Mutex::default() });
            let listener = above_standard(|| UnixListener::bind_addr(&address(&new.name)?))?;
            let serving = new.clone();
            std::thread::Builder::new().name("kolo-files".to_owned()).spawn(move || serving.serve(&listener))?;
            Ok(exporter.insert(new).clone())
        })
    }

    fn serve(&self, listener: &UnixListener) {
        loop {
            let handed = match above_standard(|| listener.accept()).map_err(naming("accept4")) {
                Ok((stream, _)) => self.hand_over(stream),
                Err(error) if is_refused(&error) => return crate::log::warn!(%error, "this process exports no device memory"),
                Err(error) => {
                    std::thread::sleep(ACCEPT_PAUSE);
                    Err(error)
                }
            };
            if let Err(error) = handed {
                crate::log::debug!(%error, "a file is not handed over");
            }
        }
    }

    fn hand_over(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let stream = LocalStream::new(mio::net::UnixStream::from_std(stream));
        if !stream.is_of_this_user() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut token = Half::default();
        stream.until(Instant::now() + TICKET_WAIT).read_exact(&mut token)?;
        // Without a file, the other process finds the connection closed.
        self.files.lock().get(&token).map_or(Ok(()), |file| stream.send_file(file.as_fd()))
    }
}

impl ExportedFile {
    /// Exports a file, and takes it over also if this fails.
    ///
    /// # Safety
    ///
    /// `number` is an open file that nothing else closes.
    pub(crate) unsafe fn new(number: i32) -> io::Result<ExportedFile> {
        // SAFETY: the caller keeps the same contract.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        // A program that this process starts must not keep the memory.
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
        let (exporter, token) = (Exporter::of_this_process()?, random()?);
        exporter.files.lock().insert(token, file);
        Ok(ExportedFile { exporter, token })
    }

    pub(crate) fn ticket(&self) -> Ticket {
        let mut ticket = Ticket::default();
        ticket[..16].copy_from_slice(&self.exporter.name);
        ticket[16..].copy_from_slice(&self.token);
        ticket
    }
}

impl Drop for ExportedFile {
    fn drop(&mut self) {
        // A forked child drops only its own.
        if self.exporter.forks == forks() {
            self.exporter.files.lock().remove(&self.token);
        }
    }
}

impl ImportedFile {
    /// Has another process of this user hand over a file. Fails with `NotFound` if that process no
    /// longer exports it, with `ConnectionRefused` if the process has ended, and with `TimedOut` at the
    /// deadline, also if a forked child of that process still has its socket.
    pub(crate) fn fetch(ticket: &Ticket, deadline: Instant) -> io::Result<ImportedFile> {
        let (name, token) = ticket.split_at(16);
        let stream = connect_to(&address(name)?, deadline, |error| error.kind() == io::ErrorKind::WouldBlock)?;
        if !stream.is_of_this_user() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        stream.until(deadline).write_all(token)?;
        let file = stream.receive_file(deadline).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::ErrorKind::NotFound.into(),
            _ => error,
        })?;
        file.map(ImportedFile).ok_or_else(|| io::Error::other("the peer's message had no file"))
    }

    pub(crate) fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// Whether processes of this user can hand files over here, found out by a file that this process
/// exports itself. May take a second at its first call.
pub(crate) fn can_export_files() -> bool {
    static CAN: LazyLock<bool> = LazyLock::new(|| {
        let tried = (|| {
            let file = above_standard(|| std::fs::File::open("/dev/null"))?;
            // SAFETY: the file is open, and nothing else has its descriptor.
            let exported = unsafe { ExportedFile::new(std::os::fd::IntoRawFd::into_raw_fd(file))? };
            ImportedFile::fetch(&exported.ticket(), Instant::now() + Duration::from_secs(1))
        })();
        tried.inspect_err(|error| crate::log::info!(%error, "processes of this machine cannot hand files over")).is_ok()
    });
    *CAN
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// A file with this content.
    fn exported(content: &[u8]) -> ExportedFile {
        let (reads, mut writes) = io::pipe().unwrap();
        writes.write_all(content).unwrap();
        // SAFETY: nothing else has the descriptor.
        unsafe { ExportedFile::new(OwnedFd::from(reads).into_raw_fd()).unwrap() }
    }

    #[test]
    fn files_are_handed_over_to_those_with_a_ticket() {
        assert!(can_export_files());
        let [one, other] = [b"one", b"two"].map(|content| exported(content));
        for (file, content) in [(&other, "two"), (&one, "one")] {
            let borrowed = ImportedFile::fetch(&file.ticket(), soon()).unwrap();
            assert!(borrowed.number() > 2);
            let mut read = String::new();
            std::fs::File::from(borrowed.0).read_to_string(&mut read).unwrap();
            assert_eq!(read, content);
        }
        let mut forged = one.ticket();
        forged[31] ^= 1;
        let error = ImportedFile::fetch(&forged, soon()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let ticket = one.ticket();
        drop(one);
        let error = ImportedFile::fetch(&ticket, soon()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// The ticket of the test's parent process.
    const TICKET: &str = "TICKET_OF_AN_EXPORTED_FILE";

    #[test]
    fn another_process_borrows_a_file() {
        if let Ok(hex) = std::env::var(TICKET) {
            let ticket = std::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..][..2], 16).unwrap());
            let borrowed = ImportedFile::fetch(&ticket, soon()).unwrap();
            std::fs::File::from(borrowed.0).write_all(b"from a child").unwrap();
            return;
        }
        let (mut reads, writes) = io::pipe().unwrap();
        // SAFETY: nothing else has the descriptor.
        let exported = unsafe { ExportedFile::new(OwnedFd::from(writes).into_raw_fd()).unwrap() };
        let hex: String = exported.ticket().iter().map(|byte| format!("{byte:02x}")).collect();
        let name = std::thread::current().name().unwrap().to_owned();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args([&name, "--exact", "--test-threads=1"]).env(TICKET, hex).stdout(std::process::Stdio::null());
        let status = child.status().unwrap();
        assert!(status.success());
        drop(exported);
        let mut read = String::new();
        reads.read_to_string(&mut read).unwrap();
        assert_eq!(read, "from a child");
    }

    #[test]
    fn a_process_that_has_ended_or_is_silent_is_not_waited_for() {
        let error = ImportedFile::fetch(&[7; 32], soon()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        // It listens, and does not answer.
        let _silent = UnixListener::bind_addr(&address(&[9; 16]).unwrap()).unwrap();
        let began = Instant::now();
        let error = ImportedFile::fetch(&[9; 32], began + Duration::from_millis(200)).err().unwrap();
        assert!(error.kind() == io::ErrorKind::TimedOut && began.elapsed() < Duration::from_secs(5), "{error}");
    }

    /// A process that connects and says nothing holds the others up for a moment only.
    #[test]
    fn a_silent_borrower_does_not_keep_others_out() {
        let file = exported(b"one");
        let name = file.ticket();
        let silent: Vec<_> = (0..3).map(|_| UnixStream::connect_addr(&address(&name[..16]).unwrap()).unwrap()).collect();
        ImportedFile::fetch(&file.ticket(), soon()).unwrap();
        drop(silent);
    }
}

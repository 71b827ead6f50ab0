//! Connections between processes of one host: sockets on loopback.
//!
//! Every process of the machine can connect to loopback. So a listener leaves its port and two
//! random keys in memory with a name, which only this user can open. Both ends begin with one of
//! the keys each: a process of another user, and one that got the port of a listener that has
//! ended, knows neither. Behind the key each end names its process, so that memory can be handed
//! over.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::windows::io::{AsRawSocket, OwnedHandle};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};
use parking_lot::Mutex;
use windows_sys::Win32::Networking::WinSock::{POLLRDNORM, POLLWRNORM, SOCKET_ERROR, WSAPOLLFD, WSAPoll};
use windows_sys::Win32::System::Threading::PROCESS_DUP_HANDLE;

use super::process;
use super::view::NamedPage;
use crate::sys::{Process, listen};

/// What a listener leaves in memory: words that start as zeros.
#[repr(C)]
struct ListenerPage {
    /// Written last; 0 until then.
    port: AtomicU64,
    /// What a connection to the listener begins with, in two words for each direction.
    of_connector: [AtomicU64; 2],
    of_listener: [AtomicU64; 2],
}

impl ListenerPage {
    fn of(page: &NamedPage) -> &ListenerPage {
        // SAFETY: a page has more bytes than this, and starts as zeros, a valid one. It
        // is accessed through atomics only.
        unsafe { page.view.base().cast::<ListenerPage>().as_ref() }
    }
}

type Key = [u8; 16];

fn key(words: &[AtomicU64; 2]) -> Key {
    let mut key = [0; 16];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
    }
    key
}

/// Bytes with which each end begins: its key, its process, and when that was created.
const GREETING: usize = size_of::<Key>() + 4 + 8;

/// Returns the greeting of this process.
fn greeting(key: Key) -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    greeting[..16].copy_from_slice(&key);
    let Process { id, created } = Process::own();
    greeting[16..20].copy_from_slice(&id.to_le_bytes());
    greeting[20..].copy_from_slice(&created.to_le_bytes());
    greeting
}

/// The greeting of the other end, as far as it has come.
struct Greeted {
    expected: Key,
    bytes: [u8; GREETING],
    count: usize,
}

/// How long a connection on this machine may take, and the greeting of a process that has sent
/// something.
const LOCAL_HANDSHAKE: Duration = Duration::from_millis(300);

/// A connection inside the host. Reads and writes do not block; those of [`LocalStream::until`] do.
pub(crate) struct LocalStream {
    socket: mio::net::TcpStream,
    greeted: Mutex<Greeted>,
}

impl LocalStream {
    /// Connects to a name of this host. Fails with `ConnectionRefused` if there is no listener of
    /// this name, and with `TimedOut` if its queue is full until the deadline.
    pub(crate) fn connect(name: &str, deadline: Instant) -> io::Result<LocalStream> {
        let page = NamedPage::open(name).map_err(|error| match error.kind() {
            // The name ends with its process.
            io::ErrorKind::NotFound => io::ErrorKind::ConnectionRefused.into(),
            _ => error,
        })?;
        let page_words = ListenerPage::of(&page);
        let port = page_words.port.load(Ordering::Acquire) as u16;
        if port == 0 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(LOCAL_HANDSHAKE);
        let socket = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), left)?;
        LocalStream::begin(socket, key(&page_words.of_connector), key(&page_words.of_listener))
    }

    /// Sends this end's greeting.
    fn begin(mut socket: TcpStream, own: Key, expected: Key) -> io::Result<LocalStream> {
        // The socket is new, so there is room.
        socket.write_all(&greeting(own))?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let greeted = Greeted { expected, bytes: [0; GREETING], count: 0 };
        Ok(LocalStream { socket: mio::net::TcpStream::from_std(socket), greeted: Mutex::new(greeted) })
    }

    /// Returns `true`: a process of another user does not know the key, and every read fails.
    pub(crate) fn is_of_this_user(&self) -> bool {
        true
    }

    /// As on Unix. The peer's greeting may count as what has come.
    pub(crate) fn peek(&self) -> io::Result<usize> {
        self.socket.peek(&mut [0])
    }

    /// Returns `true`: a program has no call that closes all of its handles.
    pub(crate) fn is_intact(&self) -> bool {
        true
    }

    /// Returns the stream with reads and writes that wait until the deadline.
    pub(crate) fn until(&self, deadline: Instant) -> LocalUntil<'_> {
        LocalUntil { stream: self, deadline }
    }

    /// Reads the rest of the greeting. Returns false at the end of the stream.
    fn read_greeting(&self) -> io::Result<bool> {
        let mut greeted = self.greeted.lock();
        while greeted.count < GREETING {
            let Greeted { bytes, count, .. } = &mut *greeted;
            match (&self.socket).read(&mut bytes[*count..])? {
                0 => return Ok(false),
                more => *count += more,
            }
            if *count == GREETING && greeted.bytes[..16] != greeted.expected {
                greeted.count = 0;
                return Err(io::ErrorKind::PermissionDenied.into());
            }
        }
        Ok(true)
    }

    /// Opens the process at the other end, to hand something over to it.
    pub(super) fn peer_process(&self) -> io::Result<OwnedHandle> {
        let deadline = Instant::now() + LOCAL_HANDSHAKE;
        loop {
            match self.read_greeting() {
                Ok(true) => break,
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.until(deadline).wait(POLLRDNORM)?,
                Err(error) => return Err(error),
            }
        }
        let bytes = self.greeted.lock().bytes;
        let id = u32::from_le_bytes(bytes[16..20].try_into().expect("a process id has four bytes"));
        let created = u64::from_le_bytes(bytes[20..].try_into().expect("a time has eight bytes"));
        let process = process::open(Process { id, created }, PROCESS_DUP_HANDLE)?;
        process.ok_or_else(|| io::ErrorKind::ConnectionReset.into())
    }
}

impl Read for &LocalStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.read_greeting()? { (&self.socket).read(into) } else { Ok(0) }
    }
}

impl Write for &LocalStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        (&self.socket).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl mio::event::Source for LocalStream {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.socket.deregister(registry)
    }
}

/// A [`LocalStream`] whose reads and writes wait.
pub(crate) struct LocalUntil<'a> {
    stream: &'a LocalStream,
    deadline: Instant,
}

impl LocalUntil<'_> {
    /// Waits until the socket is ready, or fails with `TimedOut` at the deadline.
    fn wait(&self, events: i16) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let milliseconds = left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32;
        let mut poll = WSAPOLLFD { fd: self.stream.socket.as_raw_socket() as usize, events, revents: 0 };
        // SAFETY: the socket is open, and the call reads and writes one value.
        match unsafe { WSAPoll(&mut poll, 1, milliseconds) } {
            SOCKET_ERROR => Err(io::Error::last_os_error()),
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Repeats a call that does not block until it is done or the deadline has passed.
    fn repeat(&self, events: i16, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(events)?,
                result => return result,
            }
        }
    }
}

impl Read for LocalUntil<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.repeat(POLLRDNORM, || (&mut &*self.stream).read(into))
    }
}

impl Write for LocalUntil<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.repeat(POLLWRNORM, || (&mut &*self.stream).write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Accepts connections from processes of this user on this host, under a name that ends with this
/// process.
pub(crate) struct LocalListener {
    listener: mio::net::TcpListener,
    page: NamedPage,
}

impl LocalListener {
    pub(crate) fn bind(name: &str) -> io::Result<LocalListener> {
        let page = NamedPage::create(name).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => io::ErrorKind::AddrInUse.into(),
            _ => error,
        })?;
        let listener: TcpListener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
        listener.set_nonblocking(true)?;
        let mut keys = [0; 32];
        getrandom::fill(&mut keys).map_err(|_| io::Error::other("the system has no random numbers"))?;
        let page_words = ListenerPage::of(&page);
        let words = page_words.of_connector.iter().chain(&page_words.of_listener);
        for (word, bytes) in words.zip(keys.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().expect("a word has eight bytes")), Ordering::Relaxed);
        }
        page_words.port.store(listener.local_addr()?.port().into(), Ordering::Release);
        Ok(LocalListener { listener: mio::net::TcpListener::from_std(listener), page })
    }

    #[cfg(test)]
    pub(super) fn port(&self) -> u16 {
        ListenerPage::of(&self.page).port.load(Ordering::Acquire) as u16
    }

    /// Accepts the next connection; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<LocalStream> {
        let (socket, _) = self.listener.accept()?;
        // SAFETY: the value has owned the socket and has given it up.
        let socket = unsafe {
            use std::os::windows::io::{FromRawSocket, IntoRawSocket};
            TcpStream::from_raw_socket(socket.into_raw_socket())
        };
        let page_words = ListenerPage::of(&self.page);
        LocalStream::begin(socket, key(&page_words.of_listener), key(&page_words.of_connector))
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.listener, token, Interest::READABLE)
    }
}

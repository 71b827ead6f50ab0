//! Connections between processes of one host: Unix sockets. The systems differ in their names.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::sys::{Guarded, above_standard, naming};
use mio::{Interest, Registry, Token};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// Lets a call fail, without SIGPIPE, where the peer has closed the connection: the program may not
/// ignore the signal. On Apple's systems, mio sets an option of the socket that does this, and what
/// a listener accepts inherits it.
pub(super) const NO_SIGNAL: SendFlags = {
    #[cfg(not(target_vendor = "apple"))]
    {
        SendFlags::NOSIGNAL
    }
    #[cfg(target_vendor = "apple")]
    {
        SendFlags::empty()
    }
};

/// A connection inside the host. Reads and writes do not block; those of [`LocalStream::until`] do.
pub(crate) struct LocalStream(Guarded<mio::net::UnixStream>);

/// Connects to an address. Tries again while an error says that the listener's queue is full, and
/// fails with `TimedOut` if it is full until the deadline.
pub(in crate::sys) fn connect_to(
    address: &SocketAddr,
    deadline: Instant,
    is_full: impl Fn(&io::Error) -> bool,
) -> io::Result<LocalStream> {
    /// The pause before the next attempt to join a queue that is full.
    const PAUSE: Duration = Duration::from_millis(1);
    loop {
        // A blocking connect would wait as long as the listener's queue is full, and strangers can
        // keep it full. mio's does not block.
        match above_standard(|| mio::net::UnixStream::connect_addr(address)) {
            Ok(stream) => return Ok(LocalStream::new(stream)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if !is_full(&error) => return Err(error),
            Err(_) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl LocalStream {
    pub(in crate::sys) fn new(stream: mio::net::UnixStream) -> LocalStream {
        LocalStream(Guarded::new(stream))
    }

    /// Returns how many bytes the next read gets, at most 1; 0 if the peer has closed the connection, and
    /// `WouldBlock` if nothing has come.
    pub(crate) fn peek(&self) -> io::Result<usize> {
        let (_, count) = rustix::net::recv(&*self.0, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
        Ok(count)
    }

    /// Returns whether the program has left the connection open.
    pub(crate) fn is_intact(&self) -> bool {
        self.0.is_intact()
    }

    /// Returns whether the process at the other end runs as the user of this process.
    pub(crate) fn is_of_this_user(&self) -> bool {
        #[cfg(target_os = "linux")]
        let user = rustix::net::sockopt::socket_peercred(&self.0).ok().map(|peer| peer.uid.as_raw());
        #[cfg(not(target_os = "linux"))]
        let user = {
            use std::os::fd::AsRawFd;
            let (mut user, mut group) = (0, 0);
            // SAFETY: the socket is open, and the call writes two numbers.
            (unsafe { libc::getpeereid(self.0.as_raw_fd(), &mut user, &mut group) } == 0).then_some(user)
        };
        user == Some(rustix::process::geteuid().as_raw())
    }

    /// Hands a file over to the process at the other end. Fails with `WouldBlock` if the connection
    /// has no room for it.
    pub(in crate::sys) fn send_file(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&self.0, &[IoSlice::new(b"m")], &mut control, NO_SIGNAL)?;
        Ok(())
    }

    /// Receives the file that the process at the other end hands over; `None` if its message has no
    /// file. Fails with `TimedOut` at the deadline, and with `EMFILE` if this process has no descriptor for it.
    pub(in crate::sys) fn receive_file(&self, deadline: Instant) -> io::Result<Option<OwnedFd>> {
        #[cfg(target_os = "linux")]
        const FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;
        #[cfg(not(target_os = "linux"))]
        const FLAGS: RecvFlags = RecvFlags::empty();
        self.until(deadline).wait(PollFlags::IN)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = above_standard(|| {
            rustix::io::retry_on_intr(|| recvmsg(&self.0, &mut [IoSliceMut::new(&mut byte)], &mut control, FLAGS))
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // The system drops a file that finds no descriptor, and says only that.
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        file.map(close_on_exec).transpose()
    }

    /// Returns the stream with reads and writes that wait until the deadline.
    pub(crate) fn until(&self, deadline: Instant) -> LocalUntil<'_> {
        LocalUntil { stream: self, deadline }
    }
}

impl io::Read for &LocalStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(into)
    }
}

impl io::Write for &LocalStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, from, NO_SIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl mio::event::Source for LocalStream {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.0.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.0.deregister(registry)
    }
}

/// A [`LocalStream`] whose reads and writes wait.
pub(crate) struct LocalUntil<'a> {
    stream: &'a LocalStream,
    deadline: Instant,
}

impl LocalUntil<'_> {
    /// Waits until the stream is ready, or fails with `TimedOut` at the deadline.
    pub(super) fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&self.stream.0, flags)], Some(&timeout)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl io::Read for LocalUntil<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        (&mut &*self.stream).read(into)
    }
}

impl io::Write for LocalUntil<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.wait(PollFlags::OUT)?;
        (&mut &*self.stream).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Accepts connections from processes of this host.
pub(crate) struct LocalListener<Place> {
    listener: mio::net::UnixListener,
    /// What the name leaves in the file system; dropped after the listener.
    _place: Place,
}

impl<Place> LocalListener<Place> {
    /// Listens at an address.
    pub(in crate::sys) fn at(address: &SocketAddr, place: Place) -> io::Result<LocalListener<Place>> {
        let listener = above_standard(|| mio::net::UnixListener::bind_addr(address))?;
        Ok(LocalListener { listener, _place: place })
    }

    /// Accepts the next connection; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<LocalStream> {
        let accepted = above_standard(|| self.listener.accept()).map_err(naming("accept4"));
        accepted.map(|(stream, _)| LocalStream::new(stream))
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.listener, token, Interest::READABLE)
    }
}

/// Keeps a received descriptor from programs that this process starts.
///
/// Linux does this as it receives the descriptor. Elsewhere, a thread that starts a program between
/// the two calls hands the descriptor on to it, which keeps memory alive and reveals it to a
/// program of the same user.
fn close_on_exec(file: OwnedFd) -> io::Result<OwnedFd> {
    #[cfg(not(target_os = "linux"))]
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
    Ok(file)
}

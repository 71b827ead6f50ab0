//! Socket I/O on raw memory: what is sent and received may be changed by peers, so no reference to it is formed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

use crate::buffer::{RawSlice, RawSliceMut};

/// Listens at an address. Connections of a former run do not keep its port; a living server does.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    // On Windows the same option would let two servers share the port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// This machine's loopback address, if `ip` is one of its own; otherwise `ip`.
pub(crate) fn own_loopback(ip: IpAddr) -> IpAddr {
    let is_own = ip.is_unspecified() || UdpSocket::bind((ip, 0)).is_ok();
    match ip {
        _ if ip.is_loopback() || !is_own => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}

/// Chooses a congestion control that sends whatever the window allows, at once.
#[cfg(target_os = "linux")]
pub(crate) fn send_unpaced(socket: &socket2::Socket) -> io::Result<()> {
    // Every Linux has it, and allows everybody to choose it unless it is told otherwise.
    socket.set_tcp_congestion(b"reno")
}

/// The others do not pace of their own accord.
#[cfg(not(target_os = "linux"))]
pub(crate) fn send_unpaced(_: &socket2::Socket) -> io::Result<()> {
    Ok(())
}

/// The most bytes that one call moves; some systems refuse more than 2 GiB.
const MOST: usize = 1 << 30;

/// Bytes that are sent from one place, wherever they were.
#[cfg(unix)]
const SMALL: usize = 256;

/// The most parts that one call takes.
pub(crate) const PARTS: usize = 4;

/// Takes bytes from the front of `parts`, laid end to end; returns how many. `WouldBlock` if the socket takes none now.
///
/// # Safety
///
/// The parts are readable until this returns.
#[cfg(unix)]
pub(crate) unsafe fn send(socket: impl std::os::fd::AsFd, parts: &[RawSlice]) -> io::Result<usize> {
    // No SIGPIPE: the host program may not have chosen to ignore it. (Apple's sockets are set so when they are made.)
    #[cfg(not(target_vendor = "apple"))]
    let flags = libc::MSG_NOSIGNAL;
    #[cfg(target_vendor = "apple")]
    let flags = 0;
    if parts.iter().map(|part| part.len).sum::<usize>() <= SMALL {
        // One part is quicker than a vector of them, even with the copy.
        let mut bytes = [0u8; SMALL];
        let mut len = 0;
        for part in parts {
            // SAFETY: all parts together fit; the caller vouches for each.
            unsafe { std::ptr::copy_nonoverlapping(part.ptr, bytes.as_mut_ptr().add(len), part.len) };
            len += part.len;
        }
        // SAFETY: so many bytes have been written.
        return call(socket, |fd| unsafe { libc::send(fd, bytes.as_ptr().cast(), len, flags) });
    }
    let mut iov = vector(parts.iter().map(|part| (part.ptr.cast_mut(), part.len)));
    // SAFETY: `message` points to a valid vector; the caller vouches for the memory behind it.
    call(socket, |fd| unsafe { libc::sendmsg(fd, &message(&mut iov), flags) })
}

/// Fills `parts` from the front with what has arrived; returns how many bytes. 0 is the end of the stream, `WouldBlock` if
/// nothing has arrived.
///
/// # Safety
///
/// The parts are writable until this returns, and nobody else reads or writes them.
#[cfg(unix)]
pub(crate) unsafe fn receive(socket: impl std::os::fd::AsFd, parts: &[RawSliceMut]) -> io::Result<usize> {
    if let &[part] = parts {
        // SAFETY: the caller vouches for the memory.
        return call(socket, |fd| unsafe { libc::recv(fd, part.ptr.cast(), part.len.min(MOST), 0) });
    }
    let mut iov = vector(parts.iter().map(|part| (part.ptr, part.len)));
    // SAFETY: as for `send`.
    call(socket, |fd| unsafe { libc::recvmsg(fd, &mut message(&mut iov), 0) })
}

#[cfg(unix)]
fn vector(parts: impl Iterator<Item = (*mut u8, usize)>) -> [libc::iovec; PARTS] {
    let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PARTS];
    let mut room = MOST;
    for (slot, (ptr, len)) in iov.iter_mut().zip(parts) {
        let len = len.min(room);
        room -= len;
        *slot = libc::iovec { iov_base: ptr.cast(), iov_len: len };
    }
    iov
}

#[cfg(unix)]
fn message(iov: &mut [libc::iovec; PARTS]) -> libc::msghdr {
    // SAFETY: all fields of a msghdr may be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iov.as_mut_ptr();
    header.msg_iovlen = PARTS as _;
    header
}

/// Calls until no signal interrupts it.
#[cfg(unix)]
fn call(socket: impl std::os::fd::AsFd, mut call: impl FnMut(i32) -> isize) -> io::Result<usize> {
    use std::os::fd::AsRawFd;
    loop {
        let count = call(socket.as_fd().as_raw_fd());
        if count >= 0 {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// As above.
///
/// # Safety
///
/// As above.
#[cfg(windows)]
pub(crate) unsafe fn send(mut socket: impl io::Write, parts: &[RawSlice]) -> io::Result<usize> {
    let mut room = MOST;
    let slice = |part: &RawSlice| {
        let len = part.len.min(room);
        room -= len;
        // SAFETY: the caller vouches for the memory, and without shared memory on this platform no other process writes it.
        io::IoSlice::new(unsafe { std::slice::from_raw_parts(part.ptr, len) })
    };
    let slices: Vec<io::IoSlice<'_>> = parts.iter().map(slice).collect();
    socket.write_vectored(&slices)
}

/// As above.
///
/// # Safety
///
/// As above.
#[cfg(windows)]
pub(crate) unsafe fn receive(mut socket: impl io::Read, parts: &[RawSliceMut]) -> io::Result<usize> {
    let mut room = MOST;
    let slice = |part: &RawSliceMut| {
        let len = part.len.min(room);
        room -= len;
        // SAFETY: the caller vouches for the memory, and without shared memory on this platform no other process touches it.
        io::IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(part.ptr, len) })
    };
    let mut slices: Vec<io::IoSliceMut<'_>> = parts.iter().map(slice).collect();
    socket.read_vectored(&mut slices)
}
/// What this process lacks for another socket, if it lacks something.
pub(crate) fn want() -> Option<io::Error> {
    std::net::UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0)).err().filter(is_want)
}

/// Whether an error says that this process, or this machine, lacks something: it tells nothing of who was to be reached.
pub(crate) fn is_want(error: &io::Error) -> bool {
    #[cfg(unix)]
    const WANTS: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
    // WSAEMFILE, WSAENOBUFS, WSAEADDRNOTAVAIL.
    #[cfg(not(unix))]
    const WANTS: [i32; 3] = [10024, 10055, 10049];
    error.raw_os_error().is_some_and(|code| WANTS.contains(&code))
}

//! Socket I/O on raw memory. Peers may change that memory, so no reference to it is formed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::RangeInclusive;
use std::time::Duration;

use super::{Guarded, above_standard, is_refused, naming};
use crate::buffer::{RawSlice, RawSliceMut};

/// Listens at an address. Connections of a former run do not block its port, but a living server
/// does.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = new_socket(socket2::Domain::for_address(address))?;
    #[cfg(unix)]
    socket.set_reuse_address(true).map_err(naming("setsockopt"))?;
    #[cfg(windows)]
    keep_to_this_process(&socket)?;
    socket.bind(&address.into())?;
    socket.listen(4096).map_err(naming("listen"))?;
    Ok(socket.into())
}

/// Keeps other processes from listening at the address of a socket. Windows lets them, if they ask
/// for it, unless the socket that was first forbids it.
#[cfg(windows)]
fn keep_to_this_process(socket: &socket2::Socket) -> io::Result<()> {
    use std::os::windows::io::AsRawSocket;
    use windows_sys::Win32::Networking::WinSock::{SO_EXCLUSIVEADDRUSE, SOL_SOCKET, setsockopt};
    let (socket, yes) = (socket.as_raw_socket() as usize, 1u32);
    // SAFETY: the socket is open, and the system reads the four bytes of a number.
    match unsafe { setsockopt(socket, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, (&raw const yes).cast(), 4) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Listens at a port of the system's choice.
pub(crate) fn listen_anywhere(ip: IpAddr) -> io::Result<TcpListener> {
    listen((ip, 0).into())
}

/// Listens at a free port of a range. The last ones are tried first: a launcher's store takes one of
/// the first.
pub(crate) fn listen_within(ip: IpAddr, ports: &RangeInclusive<u16>) -> io::Result<TcpListener> {
    for port in ports.clone().rev() {
        match listen((ip, port).into()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            result => return result,
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "all ports of the range are taken"))
}

/// Begins to connect from an address of this machine, so that the peer's answers go there. On Linux,
/// the route to the peer chooses the interface through which the packets leave, and not their source
/// address, unless a rule of the routing says otherwise. The socket does not block.
pub(crate) fn connect_from(from: IpAddr, to: SocketAddr) -> io::Result<std::net::TcpStream> {
    begin_to_connect(Some(from), to)
}

/// Begins to connect. The socket does not block.
pub(crate) fn connect(to: SocketAddr) -> io::Result<std::net::TcpStream> {
    begin_to_connect(None, to)
}

/// Connects, or fails with `TimedOut`.
pub(crate) fn connect_within(to: SocketAddr, timeout: Duration) -> io::Result<Guarded<std::net::TcpStream>> {
    let socket = Guarded::new(new_socket(socket2::Domain::for_address(to))?);
    socket.connect_timeout(&to.into(), timeout).map_err(naming("connect"))?;
    Ok(socket.map(std::net::TcpStream::from))
}

fn begin_to_connect(from: Option<IpAddr>, to: SocketAddr) -> io::Result<std::net::TcpStream> {
    let socket = new_socket(socket2::Domain::for_address(to))?;
    socket.set_nonblocking(true)?;
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    match socket.connect(&to.into()) {
        Err(error) if !is_underway(&error) => Err(naming("connect")(error)),
        _ => Ok(socket.into()),
    }
}

/// Returns whether a call that would have waited goes on without the caller.
fn is_underway(error: &io::Error) -> bool {
    #[cfg(unix)]
    let is_begun = error.raw_os_error() == Some(libc::EINPROGRESS);
    #[cfg(not(unix))]
    let is_begun = false;
    is_begun || error.kind() == io::ErrorKind::WouldBlock
}

/// Returns whether the system asks its user about each program that listens to other machines.
pub(crate) fn asks_about_listeners() -> bool {
    cfg!(windows)
}

/// Returns this machine's loopback address if `ip` is one of its own addresses; otherwise `ip`.
pub(crate) fn own_loopback(ip: IpAddr) -> IpAddr {
    let is_own = ip.is_unspecified() || above_standard(|| UdpSocket::bind((ip, 0))).is_ok();
    match ip {
        _ if ip.is_loopback() || !is_own => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}

/// The congestion control that sends at once what the window allows. Every Linux has it, and by
/// default lets every process choose it. Other systems do not pace by default.
pub(crate) const UNPACED: Option<&str> = if cfg!(target_os = "linux") { Some("reno") } else { None };

/// The congestion control that does not take every lost packet for a full network.
pub(crate) const LOSS_TOLERANT: Option<&str> = if cfg!(target_os = "linux") { Some("bbr") } else { None };

/// Chooses the congestion control of a connection. The system refuses one that it does not have, or
/// that it keeps for the administrator.
#[cfg(target_os = "linux")]
pub(crate) fn set_congestion_control(socket: &socket2::Socket, name: &str) -> io::Result<()> {
    socket.set_tcp_congestion(name.as_bytes())
}

/// Says that this system has no such choice.
#[cfg(not(target_os = "linux"))]
pub(crate) fn set_congestion_control(_: &socket2::Socket, _: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Limits the bytes that a connection takes beyond those that it may send now. Without the limit it
/// takes what its buffer holds.
#[cfg(target_os = "linux")]
pub(crate) fn limit_unsent(socket: &socket2::Socket, bytes: u32) -> io::Result<()> {
    socket.set_tcp_notsent_lowat(bytes)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn limit_unsent(_: &socket2::Socket, _: u32) -> io::Result<()> {
    Ok(())
}

/// Returns a TCP socket that is not connected.
pub(crate) fn tcp_socket() -> io::Result<socket2::Socket> {
    new_socket(socket2::Domain::IPV4)
}

fn new_socket(domain: socket2::Domain) -> io::Result<socket2::Socket> {
    above_standard(|| socket2::Socket::new(domain, socket2::Type::STREAM, None)).map_err(naming("socket"))
}

/// Returns the congestion control of a connection; `None` if the system does not say.
#[cfg(target_os = "linux")]
pub(crate) fn congestion_control(socket: &socket2::Socket) -> Option<String> {
    let name = socket.tcp_congestion().ok()?;
    let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Some(String::from_utf8_lossy(&name[..len]).into_owned())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn congestion_control(_: &socket2::Socket) -> Option<String> {
    None
}

/// The most bytes that one call moves; some systems refuse more than 2 GiB.
const MOST: usize = 1 << 30;

/// Up to this many bytes are copied together before they are sent.
#[cfg(unix)]
const SMALL: usize = 256;

/// The parts that a call takes at little cost.
pub(crate) const PARTS: usize = 4;

/// The most parts that a call sends: it takes the first ones.
pub(crate) const MOST_PARTS: usize = 32;

/// Sends bytes from the front of `parts`, laid end to end; returns how many. `WouldBlock` if the
/// socket takes none now.
///
/// # Safety
///
/// The parts are readable until this returns.
#[cfg(unix)]
pub(crate) unsafe fn send(socket: impl std::os::fd::AsFd, parts: &[RawSlice]) -> io::Result<usize> {
    // Without SIGPIPE, which the program may not ignore. (On Apple's systems, an option of the
    // socket does this.)
    #[cfg(not(target_vendor = "apple"))]
    let flags = libc::MSG_NOSIGNAL;
    #[cfg(target_vendor = "apple")]
    let flags = 0;
    if parts.iter().map(|part| part.len).sum::<usize>() <= SMALL {
        // Sending one part is quicker than sending a vector, even with the copy.
        let mut bytes = [0u8; SMALL];
        let mut len = 0;
        for part in parts {
            // SAFETY: all parts together fit into `bytes`. The caller vouches for each part.
            unsafe { std::ptr::copy_nonoverlapping(part.ptr, bytes.as_mut_ptr().add(len), part.len) };
            len += part.len;
        }
        // SAFETY: the first `len` bytes have been written.
        return call(socket, |fd| unsafe { libc::send(fd, bytes.as_ptr().cast(), len, flags) });
    }
    let addresses = parts.iter().map(|part| (part.ptr.cast_mut(), part.len));
    let (mut few, mut many);
    let iov: &mut [libc::iovec] = if parts.len() <= PARTS {
        few = vector::<PARTS>(addresses);
        &mut few
    } else {
        many = vector::<MOST_PARTS>(addresses);
        &mut many
    };
    // SAFETY: `message` points to a valid vector; the caller vouches for the memory behind it.
    call(socket, |fd| unsafe { libc::sendmsg(fd, &message(iov), flags) })
}

/// Fills `parts` from the front with what has arrived; returns how many bytes. 0 is the end of the
/// stream, `WouldBlock` if nothing has arrived.
///
/// # Safety
///
/// The parts are writable until this returns, and no other thread accesses them.
#[cfg(unix)]
pub(crate) unsafe fn receive(socket: impl std::os::fd::AsFd, parts: &[RawSliceMut]) -> io::Result<usize> {
    if let &[part] = parts {
        // SAFETY: the caller vouches for the memory, and `part.len` bounds the call.
        return call(socket, |fd| unsafe { libc::recv(fd, part.ptr.cast(), part.len.min(MOST), 0) });
    }
    let mut iov = vector::<PARTS>(parts.iter().map(|part| (part.ptr, part.len)));
    // SAFETY: as for `send`.
    call(socket, |fd| unsafe { libc::recvmsg(fd, &mut message(&mut iov), 0) })
}

#[cfg(unix)]
fn vector<const N: usize>(parts: impl Iterator<Item = (*mut u8, usize)>) -> [libc::iovec; N] {
    let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N];
    let mut room = MOST;
    for (slot, (ptr, len)) in iov.iter_mut().zip(parts) {
        let len = len.min(room);
        room -= len;
        *slot = libc::iovec { iov_base: ptr.cast(), iov_len: len };
    }
    iov
}

#[cfg(unix)]
fn message(iov: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all fields of a msghdr may be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iov.as_mut_ptr();
    header.msg_iovlen = iov.len() as _;
    header
}

/// Repeats a call until no signal interrupts it.
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

/// Sends bytes as on Unix.
///
/// # Safety
///
/// The parts are readable until this returns.
#[cfg(windows)]
pub(crate) unsafe fn send(socket: impl std::os::windows::io::AsSocket, parts: &[RawSlice]) -> io::Result<usize> {
    use windows_sys::Win32::Networking::WinSock::WSASend;
    let addresses = parts.iter().map(|part| (part.ptr.cast_mut(), part.len));
    let (few, many);
    let buffers: &[_] = if parts.len() <= PARTS {
        few = vector::<PARTS>(addresses);
        &few
    } else {
        many = vector::<MOST_PARTS>(addresses);
        &many
    };
    let len = buffers.len() as u32;
    // SAFETY: the buffers are valid, and the caller vouches for the memory behind them. Without an
    // OVERLAPPED the system does not use them after the call.
    call(socket, |socket, count| unsafe { WSASend(socket, buffers.as_ptr(), len, count, 0, std::ptr::null_mut(), None) })
}

/// Receives bytes as on Unix.
///
/// # Safety
///
/// The parts are writable until this returns, and no other thread accesses them.
#[cfg(windows)]
pub(crate) unsafe fn receive(socket: impl std::os::windows::io::AsSocket, parts: &[RawSliceMut]) -> io::Result<usize> {
    use windows_sys::Win32::Networking::WinSock::WSARecv;
    let buffers = vector::<PARTS>(parts.iter().map(|part| (part.ptr, part.len)));
    let mut flags = 0;
    // SAFETY: as for `send`.
    call(socket, |socket, count| unsafe {
        WSARecv(socket, buffers.as_ptr(), PARTS as u32, count, &mut flags, std::ptr::null_mut(), None)
    })
}

#[cfg(windows)]
fn vector<const N: usize>(parts: impl Iterator<Item = (*mut u8, usize)>) -> [windows_sys::Win32::Networking::WinSock::WSABUF; N] {
    use windows_sys::Win32::Networking::WinSock::WSABUF;
    let mut buffers = [WSABUF { len: 0, buf: std::ptr::null_mut() }; N];
    let mut room = MOST;
    for (slot, (ptr, len)) in buffers.iter_mut().zip(parts) {
        let len = len.min(room);
        room -= len;
        *slot = WSABUF { len: len as u32, buf: ptr };
    }
    buffers
}

/// Makes a call that writes how many bytes it has moved.
#[cfg(windows)]
fn call(
    socket: impl std::os::windows::io::AsSocket,
    call: impl FnOnce(windows_sys::Win32::Networking::WinSock::SOCKET, *mut u32) -> i32,
) -> io::Result<usize> {
    use std::os::windows::io::AsRawSocket;
    let mut count = 0;
    match call(socket.as_socket().as_raw_socket() as usize, &mut count) {
        0 => Ok(count as usize),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the error if this process or machine lacks the resources for another socket.
pub(crate) fn resource_shortage() -> Option<io::Error> {
    shortage_of(1)
}

/// Returns the error if this process cannot open `sockets` more sockets because it, or the machine,
/// lacks a resource.
pub(crate) fn shortage_of(sockets: usize) -> Option<io::Error> {
    let open = |_| above_standard(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)));
    let opened: io::Result<Vec<UdpSocket>> = (0..sockets).map(open).collect();
    opened.err().filter(is_resource_shortage)
}

/// Returns whether an error says that this process or machine lacks a resource, or may not make a call,
/// and nothing about the peer.
pub(crate) fn is_resource_shortage(error: &io::Error) -> bool {
    #[cfg(unix)]
    const SHORTAGES: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
    // WSAEMFILE, WSAENOBUFS, WSAEADDRNOTAVAIL.
    #[cfg(not(unix))]
    const SHORTAGES: [i32; 3] = [10024, 10055, 10049];
    is_refused(error) || error.raw_os_error().is_some_and(|code| SHORTAGES.contains(&code))
}

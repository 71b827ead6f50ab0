//! Processes of Unix: signals, descriptors, forks, and what Linux says about sockets.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kolo::Registered;
use rustix::process::{Pid, Signal, getpid, kill_process};
use socket2::{Domain, SockAddr, Socket, Type};

/// Ranks write their traces when they are asked by a signal.
pub(in crate::soak) const HAS_SIGNALS: bool = true;
pub(in crate::soak) const HAS_FORKS: bool = true;
pub(in crate::soak) const CUTS_CONNECTIONS: bool = true;

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // The process may have ended. Its pid is not reused before the process is waited for.
        let _ = kill_process(pid, signal);
    }
}

/// Ends a rank at once.
pub(in crate::soak) fn kill(pid: u32) {
    send(pid, Signal::KILL);
}

/// Lets a stopped rank continue.
pub(in crate::soak) fn go_on(pid: u32) {
    send(pid, Signal::CONT);
}

/// Asks a rank to write its trace.
pub(in crate::soak) fn ask_for_trace(pid: u32) {
    send(pid, Signal::USR1);
}

pub(in crate::soak) fn kill_this_process() {
    let _ = kill_process(getpid(), Signal::KILL);
}

/// Stops this process until its parent lets it go on.
pub(in crate::soak) fn stop_this_process() {
    let _ = kill_process(getpid(), Signal::STOP);
}

/// Shuts down one of the sockets of this process that are connected to another.
pub(in crate::soak) fn cut_a_connection(choose: impl FnOnce(usize) -> usize) {
    let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = files.filter_map(|file| file.file_name().to_str()?.parse::<i32>().ok()).filter(|number| *number > 2);
    // SAFETY: the descriptor is only passed to system calls, which check it. If it was closed and
    // reused meanwhile, the new socket is cut instead, which is as good.
    let connected = numbers.filter(|number| rustix::net::getpeername(unsafe { BorrowedFd::borrow_raw(*number) }).is_ok());
    let connected: Vec<i32> = connected.collect();
    if let Some(chosen) = connected.get(choose(connected.len())) {
        // SAFETY: as above.
        let _ = rustix::net::shutdown(unsafe { BorrowedFd::borrow_raw(*chosen) }, rustix::net::Shutdown::Both);
    }
}

/// Forks a child that drops its copy of a buffer, as a child does that returns from `main`.
pub(in crate::soak) fn free_in_a_child(memory: &Registered<u64>) {
    use std::os::unix::process::CommandExt;
    let memory = std::ptr::from_ref(memory) as usize;
    let free = move || {
        // SAFETY: only the forked child runs this, while the parent waits and keeps the buffer
        // borrowed. The child drops its copy once and then ends.
        drop(unsafe { std::ptr::read(memory as *const Registered<u64>) });
        Err(std::io::ErrorKind::Interrupted.into())
    };
    let mut child = std::process::Command::new("ends before it starts");
    // SAFETY: the child has the forking thread only. Dropping a buffer makes system calls and takes
    // no lock that another thread may have held.
    let child = unsafe { child.pre_exec(free) };
    let ended = child.spawn();
    debug_assert!(ended.is_err());
}

/// The name of a listener that is not in the file system.
#[derive(Debug)]
pub(in crate::soak) struct LocalListener(String);

impl LocalListener {
    pub(in crate::soak) fn connect(&self, patience: Duration) -> Option<UnixStream> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).ok()?;
        // The listener of a stopped rank may have a full queue.
        socket.set_nonblocking(true).ok()?;
        socket.connect(&SockAddr::unix(format!("\0{}", self.0)).ok()?).ok()?;
        socket.set_nonblocking(false).ok()?;
        let stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(patience)).and_then(|()| stream.set_write_timeout(Some(patience))).ok()?;
        Some(stream)
    }
}

/// Returns the listeners of a process, with and without an address, from the tables of Linux.
pub(in crate::soak) fn listeners(pid: u32) -> (Vec<SocketAddr>, Vec<LocalListener>) {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<String> = files
        .filter_map(|file| {
            std::fs::read_link(file.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    let is_its = |inode: &str| sockets.iter().any(|socket| socket == inode);
    let table = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let (mut addresses, mut names) = (Vec::new(), Vec::new());
    for line in table("tcp").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The local address, the state (0A: listening) and the inode.
        if let [_, address, _, "0A", _, _, _, _, _, inode, ..] = fields[..]
            && is_its(inode)
        {
            addresses.extend(tcp_address(address));
        }
    }
    for line in table("unix").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The flags (one bit means listening), the inode and the name.
        if let [_, _, _, "00010000", _, _, inode, name] = fields[..]
            && is_its(inode)
        {
            names.extend(name.strip_prefix('@').map(|name| LocalListener(name.to_owned())));
        }
    }
    (addresses, names)
}

/// Parses an address as Linux shows it: the host as a number in the machine's byte order, and the
/// port.
fn tcp_address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let host = IpAddr::from(u32::from_str_radix(host, 16).ok()?.to_le_bytes());
    // A process that listens at all addresses also listens at this one.
    let host = if host.is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { host };
    Some(SocketAddr::new(host, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!(tcp_address("0100007F:1F90"), Some("127.0.0.1:8080".parse().unwrap()));
        assert_eq!(tcp_address("00000000:0050"), Some("127.0.0.1:80".parse().unwrap()));
        assert_eq!(tcp_address("nonsense"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn listeners_of_both_kinds_are_found_and_connected_to() {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};

        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let name = format!("kolo-soak-test-{}", std::process::id());
        let _local = UnixListener::bind_addr(&UnixAddress::from_abstract_name(&name).unwrap()).unwrap();
        let (addresses, names) = listeners(std::process::id());
        assert!(addresses.contains(&tcp.local_addr().unwrap()));
        let own = names.iter().find(|listener| listener.0 == name);
        assert!(own.unwrap().connect(Duration::from_secs(10)).is_some());
    }
}

//! A stranger: it knows the job's name and the addresses of its listeners, but not the secret.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

use super::script::{Dice, Round};

/// Connects to the listeners of the ranks and of their store until it is
/// [finished](Stranger::finish).
pub(crate) struct Stranger {
    /// The processes of the ranks that have been started.
    ranks: Arc<Mutex<Vec<u32>>>,
    is_over: Arc<AtomicBool>,
    /// Returns the number of connections, or an error that says which listener accepted the
    /// stranger.
    thread: JoinHandle<Result<u64, String>>,
}

/// How many silent connections the stranger keeps open: more than a listener serves at once.
const SILENT: usize = 100;

/// How long the stranger waits for an answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// The time between two connections, which leaves the processor to the ranks.
const PAUSE: Duration = Duration::from_millis(2);

impl Stranger {
    pub(crate) fn start(round: &Round, job: &str, store: Option<SocketAddr>) -> Stranger {
        let (ranks, is_over) = (Arc::<Mutex<Vec<u32>>>::default(), Arc::<AtomicBool>::default());
        let visits = Visits {
            dice: Dice::new(&[round.seed, round.number, u64::MAX - 1]),
            job: job.to_owned(),
            world: round.ranks,
            silent: VecDeque::new(),
        };
        let (known, told) = (ranks.clone(), is_over.clone());
        let thread = std::thread::spawn(move || visits.go_on_until(&told, &known, store));
        Stranger { ranks, is_over, thread }
    }

    /// Adds a process whose listeners the stranger connects to.
    pub(crate) fn call_at(&self, pid: u32) {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
    }

    /// Ends the stranger and returns the number of its connections. An error says which listener
    /// accepted it.
    pub(crate) fn finish(self) -> Result<u64, String> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|_| Err("the stranger panicked".to_owned()))
    }
}

struct Visits {
    dice: Dice,
    job: String,
    world: usize,
    /// Connections that stay open.
    silent: VecDeque<Connection>,
}

impl Visits {
    fn go_on_until(mut self, is_over: &AtomicBool, ranks: &Mutex<Vec<u32>>, store: Option<SocketAddr>) -> Result<u64, String> {
        let mut calls = 0;
        while !is_over.load(Ordering::Relaxed) {
            let pids = ranks.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let listeners = pids.iter().enumerate().flat_map(|(rank, pid)| listeners(*pid).into_iter().map(move |at| (rank, at)));
            let store = store.map(|address| (0, Listener::Tcp(address)));
            for (rank, listener) in store.into_iter().chain(listeners) {
                // Its process may have ended.
                if let Some(connection) = listener.connect() {
                    calls += 1;
                    if self.call(connection, matches!(listener, Listener::Local(_)), rank) {
                        return Err(format!("rank {rank} accepted a stranger without the secret at {listener:?}"));
                    }
                }
                std::thread::sleep(PAUSE);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(calls)
    }

    /// Returns whether the listener of a rank accepts the stranger.
    fn call(&mut self, mut connection: Connection, is_local: bool, rank: usize) -> bool {
        match self.dice.below(5) {
            // Close at once.
            0 => false,
            // Send nothing and stay.
            1 => {
                self.silent.push_back(connection);
                if self.silent.len() > SILENT {
                    self.silent.pop_front();
                }
                false
            }
            2 => {
                let bytes: Vec<u8> = (0..self.dice.below(300)).map(|_| self.dice.below(256) as u8).collect();
                let _ = connection.write_all(&bytes);
                false
            }
            // Speak the protocol with an empty key.
            _ => {
                let from = (rank + 1 + self.dice.below(self.world - 1)) % self.world;
                kolo::stranger::is_believed(&mut connection, is_local, &self.job, from, rank, self.dice.below(6) as u8)
            }
        }
    }
}

/// The address of a listener.
#[derive(Debug)]
enum Listener {
    Tcp(SocketAddr),
    /// A name that is not in the file system.
    Local(String),
}

trait Both: Read + Write + Send {}

impl<T: Read + Write + Send> Both for T {}

type Connection = Box<dyn Both>;

impl Listener {
    fn connect(&self) -> Option<Connection> {
        match self {
            Listener::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, PATIENCE).ok()?;
                stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).ok()?;
                Some(Box::new(stream))
            }
            Listener::Local(name) => {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None).ok()?;
                // The listener of a stopped rank may have a full queue.
                socket.set_nonblocking(true).ok()?;
                socket.connect(&SockAddr::unix(format!("\0{name}")).ok()?).ok()?;
                socket.set_nonblocking(false).ok()?;
                let stream = UnixStream::from(socket);
                stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).ok()?;
                Some(Box::new(stream))
            }
        }
    }
}

/// Returns the listeners of a process from the tables of Linux.
fn listeners(pid: u32) -> Vec<Listener> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<String> = files
        .filter_map(|file| {
            std::fs::read_link(file.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    let is_its = |inode: &str| sockets.iter().any(|socket| socket == inode);
    let table = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let mut listeners = Vec::new();
    for line in table("tcp").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The local address, the state (0A: listening) and the inode.
        if let [_, address, _, "0A", _, _, _, _, _, inode, ..] = fields[..]
            && is_its(inode)
        {
            listeners.extend(tcp_address(address).map(Listener::Tcp));
        }
    }
    for line in table("unix").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The flags (one bit means listening), the inode and the name.
        if let [_, _, _, "00010000", _, _, inode, name] = fields[..]
            && is_its(inode)
        {
            listeners.extend(name.strip_prefix('@').map(|name| Listener::Local(name.to_owned())));
        }
    }
    listeners
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
        let found = listeners(std::process::id());
        let at_port = |listener: &&Listener| matches!(listener, Listener::Tcp(address) if *address == tcp.local_addr().unwrap());
        let at_name = |listener: &&Listener| matches!(listener, Listener::Local(other) if *other == name);
        assert!(found.iter().find(at_port).unwrap().connect().is_some());
        assert!(found.iter().find(at_name).unwrap().connect().is_some());
    }
}

//! The server, on a thread of its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mio::{Events, Interest, Token};
use parking_lot::Mutex;

use super::protocol::{CLAIM, FOUND, FULL, GET, LONGEST_REQUEST, NOT_FOUND, Request, response};
use crate::config::{self, process_env};
use crate::error::{Result, StoreError};
use crate::network::identity::Identity;
use crate::network::listener::handshake::{Hello, Purpose};
use crate::network::listener::{Listener, Stream};
use crate::sys::{self, Poll, TcpStream, Waker};

/// The most that a server stores, in bytes of keys and values.
pub(super) const CAPACITY: usize = 256 << 20;

const WAKER: Token = Token(usize::MAX);

/// Serves a `tcp://` store until it is dropped.
///
/// Rank 0 serves its store by itself. A launcher, or a program that needs to know the port, can do
/// it instead: see [`Builder::store_is_served`](crate::Builder::store_is_served).
pub struct TcpStoreServer {
    // Dropped first, so that no client is admitted any more.
    listener: Listener,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    /// As of [`Listener`].
    owner: u32,
}

impl TcpStoreServer {
    /// Serves the ranks of one job at an address; port 0 picks a port, of `KOLO_PORTS` if that is
    /// set. The ranks share the job's name and its secret, if it has one.
    ///
    /// # Errors
    ///
    /// [`Error::Store`](crate::Error::Store) if the address is taken or may not be used, or if
    /// other machines reach it although there is no secret and `KOLO_INSECURE` is not set.
    /// [`Error::Setting`](crate::Error::Setting) if that variable has an invalid value.
    pub fn bind(address: SocketAddr, job: &str, secret: Option<[u8; 32]>) -> Result<TcpStoreServer> {
        let identity = Identity::new(job, secret).insecure(config::insecure(&process_env)?.unwrap_or(false));
        if !address.ip().is_loopback() && !identity.may_listen() {
            return Err(StoreError::NoSecret.at(format!("tcp://{address}")));
        }
        let server = match config::ports(&process_env)?.filter(|_| address.port() == 0) {
            Some(ports) => sys::listen_within(address.ip(), &ports).and_then(|tcp| TcpStoreServer::serve_on(tcp, identity)),
            None => TcpStoreServer::serve(address, identity),
        };
        server.map_err(|error| port_problem(address, error).at(format!("tcp://{address}")))
    }

    pub(super) fn serve(address: SocketAddr, identity: Identity) -> io::Result<TcpStoreServer> {
        TcpStoreServer::serve_on(sys::listen(address)?, identity)
    }

    fn serve_on(listener: std::net::TcpListener, identity: Identity) -> io::Result<TcpStoreServer> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(&poll, WAKER)?);
        let stop = Arc::new(AtomicBool::new(false));
        let arrivals: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let (admitted, wake) = (arrivals.clone(), waker.clone());
        let listener = Listener::open(Some(listener), None, identity, move |hello: Hello, stream| {
            if let (Purpose::Store, Stream::Tcp(stream)) = (hello.purpose, stream) {
                admitted.lock().push(stream);
                if let Err(error) = wake.wake() {
                    crate::log::error!(%error, "cannot wake the store's server for a client");
                }
            }
        })?;
        let stopped = stop.clone();
        let mut server =
            Server { poll, clients: HashMap::new(), waiting: HashMap::new(), next: 0, values: HashMap::new(), size: 0 };
        let thread = std::thread::Builder::new().name("kolo-store".to_owned()).spawn(move || {
            if let Err(error) = server.serve(&arrivals, &stopped) {
                crate::log::error!(%error, "the store's server failed: the store is no longer served");
            }
        })?;
        Ok(TcpStoreServer { listener, stop, waker, thread: Some(thread), owner: std::process::id() })
    }

    /// Returns the address where the store is served.
    pub fn address(&self) -> SocketAddr {
        self.listener.address().expect("a listener on TCP has an address")
    }

    /// Returns the system's error if the server has not been able to accept a client for so long.
    pub(super) fn shortage(&self, long: Duration) -> Option<io::Error> {
        self.listener.shortage(long)
    }

    /// Returns the URL for the ranks.
    pub fn url(&self) -> String {
        format!("tcp://{}", self.address())
    }
}

impl fmt::Debug for TcpStoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStoreServer").field("address", &self.listener.address()).finish_non_exhaustive()
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return std::mem::forget((self.thread.take(), self.waker.clone()));
        }
        self.stop.store(true, Ordering::Release);
        if let (Ok(()), Some(thread)) = (self.waker.wake(), self.thread.take()) {
            sys::join(thread);
        }
    }
}

/// Returns why the store cannot be served at an address.
pub(super) fn port_problem(address: SocketAddr, error: io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::AddrInUse => StoreError::PortTaken { address, holder: sys::port_holder(&[address]) },
        io::ErrorKind::PermissionDenied if !sys::is_refused(&error) => {
            StoreError::Url(format!("this process may not listen at {address} ({error}); choose a port above 1023"))
        }
        _ => StoreError::io("serving it")(error),
    }
}

/// The most connections at one time. Every rank needs one.
const MOST_CLIENTS: usize = 1 << 16;

/// The state of the server's thread.
struct Server {
    poll: Poll,
    clients: HashMap<usize, Client>,
    /// The clients that wait for each key.
    waiting: HashMap<String, Vec<usize>>,
    next: usize,
    /// All clients that read a value send the same bytes: the table of a large job has megabytes, and
    /// every rank reads it.
    values: HashMap<String, Bytes>,
    /// Bytes of all keys and values.
    size: usize,
}

struct Client {
    stream: TcpStream,
    received: BytesMut,
    unsent: VecDeque<Bytes>,
    /// The key that the client waits for, and until when.
    awaits: Option<(String, Instant)>,
}

impl Server {
    fn serve(&mut self, arrivals: &Mutex<Vec<TcpStream>>, stop: &AtomicBool) -> io::Result<()> {
        let mut events = Events::with_capacity(256);
        while !stop.load(Ordering::Acquire) {
            let next_deadline = self.clients.values().filter_map(|client| Some(client.awaits.as_ref()?.1)).min();
            let timeout = next_deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            }
            let mut active: Vec<usize> =
                events.iter().filter(|event| event.token() != WAKER).map(|event| event.token().0).collect();
            for mut stream in arrivals.lock().drain(..) {
                self.next += 1;
                let interest = Interest::READABLE | Interest::WRITABLE;
                if self.clients.len() < MOST_CLIENTS
                    && self.poll.registry().register(&mut stream, Token(self.next), interest).is_ok()
                {
                    let client = Client { stream, received: BytesMut::new(), unsent: VecDeque::new(), awaits: None };
                    self.clients.insert(self.next, client);
                    active.push(self.next);
                }
            }
            for number in active {
                self.serve_client(number);
            }
            self.answer_late();
        }
        Ok(())
    }

    /// Reads and answers the requests of one client, as far as possible without waiting.
    fn serve_client(&mut self, number: usize) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let mut stays = client.receive();
        while let Some(client) = self.clients.get_mut(&number) {
            stays &= client.send();
            match client.next_request() {
                Ok(Some(request)) => self.execute(number, request),
                Ok(None) => break,
                Err(()) => {
                    stays = false;
                    break;
                }
            }
        }
        if !stays && let Some(Client { awaits: Some((key, _)), .. }) = self.clients.remove(&number) {
            self.forget_waiting([key].into());
        }
    }

    /// Forgets the clients that no longer wait for these keys.
    fn forget_waiting(&mut self, keys: HashSet<String>) {
        for key in keys {
            if let Some(waiting) = self.waiting.get_mut(&key) {
                let waits = |client: &Client| client.awaits.as_ref().is_some_and(|(awaited, _)| *awaited == key);
                waiting.retain(|number| self.clients.get(number).is_some_and(waits));
                if waiting.is_empty() {
                    self.waiting.remove(&key);
                }
            }
        }
    }

    /// Executes a request. Answers it now, or when its key is set or its timeout has passed.
    fn execute(&mut self, number: usize, request: Request) {
        let Request { operation, key, value, timeout } = request;
        let there = self.values.get(&key);
        let response = match (operation, there) {
            (GET | CLAIM, Some(value)) => Some((FOUND, value.clone())),
            (GET, None) if timeout.is_zero() => Some((NOT_FOUND, Bytes::new())),
            (GET, None) => None,
            _ => {
                let freed = there.map_or(0, |old| key.len() + old.len());
                let size = self.size - freed + key.len() + value.len();
                if size > CAPACITY {
                    Some((FULL, Bytes::new()))
                } else {
                    let value = Bytes::from(value);
                    self.size = size;
                    self.values.insert(key.clone(), value.clone());
                    self.answer_waiting(&key, &value);
                    Some((FOUND, value))
                }
            }
        };
        let Some(client) = self.clients.get_mut(&number) else { return };
        match response {
            Some((status, value)) => client.respond(status, value),
            None => {
                self.waiting.entry(key.clone()).or_default().push(number);
                client.awaits = Some((key, Instant::now() + timeout));
            }
        }
    }

    /// Answers the clients that wait for a key.
    fn answer_waiting(&mut self, key: &str, value: &Bytes) {
        for number in self.waiting.remove(key).unwrap_or_default() {
            let Some(client) = self.clients.get_mut(&number) else { continue };
            client.awaits = None;
            client.respond(FOUND, value.clone());
            // If the connection is broken, the next read shows it.
            client.send();
        }
    }

    /// Answers the clients whose timeout has passed.
    fn answer_late(&mut self) {
        let now = Instant::now();
        let mut keys = HashSet::new();
        for client in self.clients.values_mut().filter(|client| client.awaits.as_ref().is_some_and(|(_, until)| *until <= now)) {
            keys.extend(client.awaits.take().map(|(key, _)| key));
            client.respond(NOT_FOUND, Bytes::new());
            client.send();
        }
        self.forget_waiting(keys);
    }
}

impl Client {
    /// Reads what has come; false at the end of the connection.
    fn receive(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.received.put_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
            if self.received.len() > LONGEST_REQUEST {
                return false;
            }
        }
    }

    /// Takes the next complete request, unless the client waits for a response or has not read the
    /// last one. Fails if the bytes are not a request.
    fn next_request(&mut self) -> Result<Option<Request>, ()> {
        if self.awaits.is_some() || !self.unsent.is_empty() {
            return Ok(None);
        }
        Request::take(&mut self.received)
    }

    fn respond(&mut self, status: u8, value: Bytes) {
        self.unsent.extend(response(status, value).into_iter().filter(|part| !part.is_empty()));
    }

    /// Sends what the connection takes; false if it is broken.
    fn send(&mut self) -> bool {
        while let Some(part) = self.unsent.front_mut() {
            match self.stream.write(part) {
                Ok(count) => {
                    part.advance(count);
                    if part.is_empty() {
                        self.unsent.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

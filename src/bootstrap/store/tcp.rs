//! A store that rank 0 (or `kolo run`) serves over TCP.
//!
//! Callers pass the job's handshake first. Then each request is `operation (1), 0 (1), length of key (2), length of value (4),
//! timeout in milliseconds (8), key, value`, and its response `status (1), 0 (3), length of value (4), value`; all
//! little-endian.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;

use super::{LARGEST_VALUE, LONGEST_KEY, Store, check};
use crate::bootstrap::listener::handshake::{self, Hello, Identity, Purpose, Refusal};
use crate::bootstrap::listener::{self, DialError, Listener, Stream};
use crate::error::{Result, StoreProblem};
use crate::sys;

const REQUEST: usize = 16;
const RESPONSE: usize = 8;

const SET: u8 = 1;
const GET: u8 = 2;
const CLAIM: u8 = 3;

const FOUND: u8 = 0;
const NOT_FOUND: u8 = 1;
const FULL: u8 = 2;

/// The most that a server keeps, in bytes of keys and values.
const CAPACITY: usize = 256 << 20;

/// How long a response may take in any case beyond the timeout that was asked for.
const GRACE: Duration = Duration::from_secs(5);

const WAKER: Token = Token(usize::MAX);

/// Serves a `tcp://` store until it is dropped.
///
/// Rank 0 does so by itself. A launcher, or a program that needs to know the port, does it instead: see
/// [`Builder::store_is_served`](crate::Builder::store_is_served).
pub struct TcpStoreServer {
    // Dropped first: no caller comes any more.
    listener: Listener,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Serves at an address (port 0 picks one) the ranks of one job, who share its name and its secret, if it has one.
    pub fn bind(address: SocketAddr, job: &str, secret: Option<[u8; 32]>) -> Result<TcpStoreServer> {
        let identity = Identity::new(job, secret).insecure(std::env::var("KOLO_INSECURE").is_ok_and(|value| value == "1"));
        if !address.ip().is_loopback() && !identity.may_listen() {
            return Err(StoreProblem::NoSecret.at(format!("tcp://{address}")));
        }
        let server = TcpStoreServer::serve(address, identity);
        server.map_err(|error| port_problem(address, error).at(format!("tcp://{address}")))
    }

    fn serve(address: SocketAddr, identity: Identity) -> io::Result<TcpStoreServer> {
        let listener = sys::listen(address)?;
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let stop = Arc::new(AtomicBool::new(false));
        let arrivals: Arc<Mutex<Vec<mio::net::TcpStream>>> = Arc::default();
        let (admitted, bell) = (arrivals.clone(), waker.clone());
        let listener = Listener::open(Some(listener), None, identity, move |hello: Hello, stream| {
            if let (Purpose::Store, Stream::Tcp(stream)) = (hello.purpose, stream) {
                admitted.lock().push(stream);
                if let Err(error) = bell.wake() {
                    tracing::error!(%error, "the store's server cannot be woken");
                }
            }
        })?;
        let stopped = stop.clone();
        let mut clerk = Clerk { poll, clients: HashMap::new(), next: 0, values: HashMap::new(), size: 0 };
        let thread = std::thread::Builder::new().name("kolo-store".to_owned()).spawn(move || {
            if let Err(error) = clerk.serve(&arrivals, &stopped) {
                tracing::error!(%error, "the store is no longer served");
            }
        })?;
        Ok(TcpStoreServer { listener, stop, waker, thread: Some(thread) })
    }

    /// Where it is served.
    pub fn address(&self) -> SocketAddr {
        self.listener.address().expect("the listener was opened with a listener")
    }

    /// The URL under which ranks reach it.
    pub fn url(&self) -> String {
        format!("tcp://{}", self.address())
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let (Ok(()), Some(thread)) = (self.waker.wake(), self.thread.take()) {
            // A panic there has been printed, and there is nothing to mend.
            let _ = thread.join();
        }
    }
}

fn port_problem(address: SocketAddr, error: io::Error) -> StoreProblem {
    match error.kind() {
        io::ErrorKind::AddrInUse => StoreProblem::PortTaken { address, holder: sys::port_holder(address.port()) },
        io::ErrorKind::PermissionDenied => {
            StoreProblem::Url(format!("this process may not listen at {address} ({error}); choose a port above 1023"))
        }
        _ => StoreProblem::io("serving it")(error),
    }
}

/// Connections at one time, of which every rank needs one.
const MOST_CLIENTS: usize = 1 << 16;

/// What the server's thread works on.
struct Clerk {
    poll: Poll,
    clients: HashMap<usize, Client>,
    next: usize,
    values: HashMap<String, Vec<u8>>,
    /// Bytes of all keys and values.
    size: usize,
}

struct Client {
    stream: mio::net::TcpStream,
    heard: BytesMut,
    to_say: BytesMut,
    /// The key that it waits for, and until when.
    awaits: Option<(String, Instant)>,
}

struct Request {
    operation: u8,
    key: String,
    value: Vec<u8>,
    timeout: Duration,
}

impl Request {
    /// Takes the next whole request off the front of what has been heard; an error if it is none.
    fn take(heard: &mut BytesMut) -> Result<Option<Request>, ()> {
        if heard.len() < REQUEST {
            return Ok(None);
        }
        let mut header = &heard[..REQUEST];
        let (operation, zero) = (header.get_u8(), header.get_u8());
        let (key_len, value_len) = (usize::from(header.get_u16_le()), header.get_u32_le() as usize);
        let timeout = Duration::from_millis(header.get_u64_le().min(1 << 32));
        let is_known = matches!(operation, SET | GET | CLAIM) && zero == 0;
        if !is_known || key_len > LONGEST_KEY || value_len > LARGEST_VALUE {
            return Err(());
        }
        if heard.len() < REQUEST + key_len + value_len {
            return Ok(None);
        }
        heard.advance(REQUEST);
        let key = String::from_utf8(heard.split_to(key_len).to_vec()).map_err(drop)?;
        let value = heard.split_to(value_len).to_vec();
        Ok(Some(Request { operation, key, value, timeout }))
    }
}

impl Clerk {
    fn serve(&mut self, arrivals: &Mutex<Vec<mio::net::TcpStream>>, stop: &AtomicBool) -> io::Result<()> {
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
                    let client = Client { stream, heard: BytesMut::new(), to_say: BytesMut::new(), awaits: None };
                    self.clients.insert(self.next, client);
                    active.push(self.next);
                }
            }
            for number in active {
                self.attend(number);
            }
            self.answer_late();
        }
        Ok(())
    }

    /// Hears and answers one client, as far as that goes now.
    fn attend(&mut self, number: usize) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let mut stays = client.hear();
        while let Some(client) = self.clients.get_mut(&number) {
            stays &= client.say();
            match client.next_request() {
                Ok(Some(request)) => self.carry_out(number, request),
                Ok(None) => break,
                Err(()) => {
                    stays = false;
                    break;
                }
            }
        }
        if !stays {
            self.clients.remove(&number);
        }
    }

    fn carry_out(&mut self, number: usize, request: Request) {
        let Request { operation, key, value, timeout } = request;
        let there = self.values.get(&key);
        let response = match (operation, there) {
            (GET | CLAIM, Some(value)) => Some((FOUND, value.clone())),
            (GET, None) if timeout.is_zero() => Some((NOT_FOUND, Vec::new())),
            (GET, None) => None,
            _ => {
                let freed = there.map_or(0, |old| key.len() + old.len());
                let size = self.size - freed + key.len() + value.len();
                if size > CAPACITY {
                    Some((FULL, Vec::new()))
                } else {
                    self.size = size;
                    self.values.insert(key.clone(), value.clone());
                    self.answer_waiting(&key, &value);
                    Some((FOUND, value))
                }
            }
        };
        let Some(client) = self.clients.get_mut(&number) else { return };
        match response {
            Some((status, value)) => client.respond(status, &value),
            None => client.awaits = Some((key, Instant::now() + timeout)),
        }
    }

    fn answer_waiting(&mut self, key: &str, value: &[u8]) {
        for client in self.clients.values_mut().filter(|client| client.awaits.as_ref().is_some_and(|(awaited, _)| awaited == key))
        {
            client.awaits = None;
            client.respond(FOUND, value);
            // A broken connection shows when it is heard next.
            client.say();
        }
    }

    fn answer_late(&mut self) {
        let now = Instant::now();
        for client in self.clients.values_mut().filter(|client| client.awaits.as_ref().is_some_and(|(_, until)| *until <= now)) {
            client.awaits = None;
            client.respond(NOT_FOUND, &[]);
            client.say();
        }
    }
}

impl Client {
    /// Reads what has come; false at the end of the connection.
    fn hear(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.heard.put_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
            if self.heard.len() > REQUEST + LONGEST_KEY + LARGEST_VALUE {
                return false;
            }
        }
    }

    /// The next whole request, unless the client waits for the answer to one or has not read the last; an error if it is none.
    fn next_request(&mut self) -> Result<Option<Request>, ()> {
        if self.awaits.is_some() || !self.to_say.is_empty() {
            return Ok(None);
        }
        Request::take(&mut self.heard)
    }

    fn respond(&mut self, status: u8, value: &[u8]) {
        self.to_say.put_u32_le(status.into());
        self.to_say.put_u32_le(value.len() as u32);
        self.to_say.put_slice(value);
    }

    /// Writes what the connection takes; false if it is broken.
    fn say(&mut self) -> bool {
        while !self.to_say.is_empty() {
            match self.stream.write(&self.to_say) {
                Ok(count) => self.to_say.advance(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// A rank's connection to the server.
pub(crate) struct TcpStore {
    stream: Mutex<TcpStream>,
    url: String,
    /// When the start ends: until then the server may be silent. Its process may be paused.
    deadline: Instant,
    // Rank 0 serves the others.
    _server: Option<TcpStoreServer>,
}

impl TcpStore {
    pub(super) fn open(host: &str, port: u16, owner: bool, identity: &Identity, deadline: Instant) -> Result<TcpStore> {
        let url = if host.contains(':') { format!("tcp://[{host}]:{port}") } else { format!("tcp://{host}:{port}") };
        if !owner {
            if port == 0 {
                let problem =
                    "only rank 0 can use port 0; the other ranks need the port that it picked, which it logs".to_owned();
                return Err(StoreProblem::Url(problem).at(url));
            }
            return TcpStore::call(host, &[port], identity, deadline).map_err(|problem| problem.at(url));
        }
        let server = serve_at(host, port, identity, deadline).map_err(|problem| problem.at(&url))?;
        if port == 0 {
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            tracing::warn!(
                url = format!("tcp://{host}:{}", server.address().port()),
                "rank 0 serves the store at a port that it picked"
            );
        }
        TcpStore::of_server(server, identity, deadline)
    }

    /// The store on the first of these ports that is rank 0's to take, or that serves this job: for launchers that give
    /// ranks an address but no port to themselves.
    pub(crate) fn open_any(host: &str, ports: &[u16], owner: bool, identity: &Identity, deadline: Instant) -> Result<TcpStore> {
        let url = format!("tcp://{host}:{}", ports.iter().map(u16::to_string).collect::<Vec<_>>().join("|"));
        if !owner {
            return TcpStore::call(host, ports, identity, deadline).map_err(|problem| problem.at(url));
        }
        let mut last = None;
        for &port in ports {
            match serve_at(host, port, identity, deadline) {
                Ok(server) => return TcpStore::of_server(server, identity, deadline),
                Err(problem) => last = Some(problem),
            }
        }
        Err(last.unwrap_or_else(|| StoreProblem::Url("it has no port".to_owned())).at(url))
    }

    fn of_server(server: TcpStoreServer, identity: &Identity, deadline: Instant) -> Result<TcpStore> {
        let address = server.address();
        let reachable = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(IpAddr::from([127, 0, 0, 1]), address.port()),
            IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), address.port()),
            _ => address,
        };
        let stream = connect(reachable, identity, deadline).map_err(|problem| match problem {
            Attempt::Again(error) => StoreProblem::io("reaching its own server")(error).at(server.url()),
            Attempt::Final(problem) => problem.at(server.url()),
        })?;
        Ok(TcpStore { stream: Mutex::new(stream), url: server.url(), deadline, _server: Some(server) })
    }

    /// Connects as soon as one of the ports serves this job.
    fn call(host: &str, ports: &[u16], identity: &Identity, deadline: Instant) -> Result<TcpStore, StoreProblem> {
        let started = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let mut last = String::new();
            for &port in ports {
                // Resolved anew each time: in clusters, names appear with their hosts.
                let addresses = match sys::resolve(host, port, deadline) {
                    Ok(addresses) => addresses,
                    Err(error) => {
                        last = format!("cannot resolve {host}: {error}");
                        continue;
                    }
                };
                for address in addresses {
                    match connect(address, identity, deadline) {
                        Ok(stream) => {
                            let url = format!("tcp://{address}");
                            return Ok(TcpStore { stream: Mutex::new(stream), url, deadline, _server: None });
                        }
                        Err(Attempt::Again(error)) => last = format!("{address}: {error}"),
                        // On one of several ports, somebody else may be at home.
                        Err(Attempt::Final(problem)) if ports.len() > 1 => last = format!("{address}: {problem}"),
                        Err(Attempt::Final(problem)) => return Err(problem),
                    }
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StoreProblem::Unreachable { waited: started.elapsed(), last });
            }
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(Duration::from_millis(100));
        }
    }

    fn ask(&self, operation: u8, key: &str, value: &[u8], timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        check(key, value)?;
        let mut request = BytesMut::with_capacity(REQUEST + key.len() + value.len());
        request.put_u8(operation);
        request.put_u8(0);
        request.put_u16_le(key.len() as u16);
        request.put_u32_le(value.len() as u32);
        request.put_u64_le(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        request.put_slice(key.as_bytes());
        request.put_slice(value);
        let stream = self.stream.lock();
        let mut until = listener::Until { stream: &stream, deadline: self.deadline.max(Instant::now() + timeout + GRACE) };
        let lost = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => StoreProblem::io(
                "its server closed the connection; rank 0 may have ended, or belong to another job that started with it",
            )(error),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                StoreProblem::io("asking its server, which does not answer; is rank 0 paused?")(io::ErrorKind::TimedOut.into())
            }
            _ => StoreProblem::io("asking its server")(error),
        };
        match until.write_all(&request).and_then(|()| response(&mut until)).map_err(lost)? {
            (FOUND, value) => Ok(Some(value)),
            (NOT_FOUND, _) => Ok(None),
            (FULL, _) => Err(StoreProblem::TooLarge { what: "a value", bytes: value.len(), limit: CAPACITY }),
            _ => Err(StoreProblem::Foreign("its server answered nonsense".to_owned())),
        }
    }
}

/// Reads a response: its status and its value.
fn response(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut header = [0; RESPONSE];
    stream.read_exact(&mut header)?;
    let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if len > LARGEST_VALUE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut value = vec![0; len];
    stream.read_exact(&mut value)?;
    Ok((header[0], value))
}

/// Whatever a client says, and whatever a server answers.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut heard = BytesMut::from(bytes);
    while let Ok(Some(Request { operation, key, value, .. })) = Request::take(&mut heard) {
        assert!(matches!(operation, SET | GET | CLAIM) && key.len() <= LONGEST_KEY && value.len() <= LARGEST_VALUE);
        assert!(heard.len() + REQUEST + key.len() + value.len() <= bytes.len(), "more is read than there is");
    }
    if let Ok((_, value)) = response(&mut &*bytes) {
        assert!(value.len() + RESPONSE <= bytes.len(), "more is read than there is");
    }
}

/// A request.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample() -> Vec<u8> {
    [&[SET, 0, 3, 0, 5, 0, 0, 0][..], &100u64.to_le_bytes(), b"keyvalue"].concat()
}

/// Serves at a name or an address of this machine.
fn serve_at(host: &str, port: u16, identity: &Identity, deadline: Instant) -> Result<TcpStoreServer, StoreProblem> {
    let addresses = sys::resolve(host, port, deadline).map_err(StoreProblem::io("resolving its host"))?;
    let is_name = host.parse::<IpAddr>().is_err() && !host.eq_ignore_ascii_case("localhost");
    let mut last = None;
    for mut address in addresses {
        // Many systems have a host's own name mean 127.0.1.1, where ranks on other hosts, who get its true address for the
        // same name, would find nobody.
        if is_name && address.ip().is_loopback() && identity.may_listen() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            });
        }
        address = listening(address, identity);
        match TcpStoreServer::serve(address, identity.clone()) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some((address, error)),
        }
    }
    let Some((address, error)) = last else {
        return Err(StoreProblem::Url(format!("{host} has no address")));
    };
    match error.kind() {
        // If it is a store of kolo's, its job says more than the port.
        io::ErrorKind::AddrInUse => {
            let problem = port_problem(address, error);
            match connect(address, identity, deadline.min(Instant::now() + Duration::from_secs(1))) {
                Err(Attempt::Final(found @ StoreProblem::OtherJob { .. })) => Err(found),
                _ => Err(problem),
            }
        }
        io::ErrorKind::AddrNotAvailable => {
            let advice = format!("{host} ({}) is not an address of this machine, where rank 0 runs", address.ip());
            Err(StoreProblem::Url(advice))
        }
        _ => Err(port_problem(address, error)),
    }
}

enum Attempt {
    /// Nobody is there yet.
    Again(io::Error),
    /// Trying again will not help.
    Final(StoreProblem),
}

/// Where ranks without a secret listen: what is an address of this machine, others cannot reach.
fn listening(address: SocketAddr, identity: &Identity) -> SocketAddr {
    if identity.may_listen() { address } else { SocketAddr::new(sys::own_loopback(address.ip()), address.port()) }
}

fn connect(address: SocketAddr, identity: &Identity, deadline: Instant) -> Result<TcpStream, Attempt> {
    let address = listening(address, identity);
    if !address.ip().is_loopback() && !identity.may_listen() {
        return Err(Attempt::Final(StoreProblem::NoSecret));
    }
    let hello = Hello::new(Purpose::Store, 0, 0, 0);
    let deadline = deadline.min(Instant::now() + Duration::from_secs(2));
    let stream = listener::dial(address, identity, &hello, deadline).map_err(|error| match error {
        DialError::Connect(error) | DialError::Io(error) => Attempt::Again(error),
        DialError::Refused(Refusal::Job { theirs }) => {
            Attempt::Final(StoreProblem::OtherJob { theirs: theirs.unwrap_or_default(), mine: identity.job().to_owned() })
        }
        DialError::Refused(Refusal::Run) => {
            Attempt::Final(StoreProblem::Foreign(format!("a rank of a job answers at {address}")))
        }
        DialError::Refused(Refusal::Secret) => Attempt::Final(StoreProblem::Secret),
        DialError::Refused(Refusal::Foreign) => {
            Attempt::Final(StoreProblem::Foreign(format!("another program answers at {address}")))
        }
        DialError::Refused(Refusal::Version { theirs }) => {
            Attempt::Final(StoreProblem::Version { theirs: theirs.into(), mine: handshake::VERSION.into() })
        }
    })?;
    blocking(stream).map_err(Attempt::Again)
}

/// Turns a stream that does not block into one that does.
fn blocking(stream: mio::net::TcpStream) -> io::Result<TcpStream> {
    let stream = TcpStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

impl Store for TcpStore {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
        self.ask(SET, key, value, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        self.ask(GET, key, &[], timeout)
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        self.ask(CLAIM, key, value, timeout)?.ok_or_else(|| StoreProblem::Foreign("its server answered nonsense".to_owned()))
    }
}

//! Accepts connections on a thread of its own.
//!
//! The thread accepts and shakes hands, so that a peer never waits for a collective that this
//! process is busy with. It drops connections that do not speak the protocol, are too slow or too
//! many. A dropped connection leaves nothing behind.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::net::TcpListener;
use mio::{Events, Interest, Token};
use parking_lot::Mutex;

use super::handshake::{Acceptor, Hello, LONGEST, NONCE, Purpose};
use super::query;
use super::stream::Stream;
use crate::network::identity::{Identity, random_number};
use crate::sys::{self, Guarded, LocalListener, Poll, Waker, above_standard};
use crate::timeouts::{ACCEPT_PAUSE, HANDSHAKE, NO_DESCRIPTOR};

/// How many strangers may be connected at once, each of which takes a descriptor. A connection is a
/// stranger's until its hello has shown that the peer knows the secret. When another peer connects,
/// the listener drops the stranger that has been connected longest. So silent strangers keep no
/// member out: a member sends its hello as soon as it has connected.
pub(super) const STRANGERS: usize = 64;

/// How many members may shake hands at once. None of them makes room for a stranger. There are more
/// only in a job without a secret, where every hello is accepted. Then the listener drops the
/// oldest member, too. A member that was dropped tries again.
const MEMBERS: usize = 1024;

/// How many hellos are remembered, the last ones. A peer that repeats one of them has overheard it,
/// and is a stranger.
pub(super) const REMEMBERED: usize = 4096;

/// How many connections are accepted before those already accepted are served again.
const AT_ONCE: usize = 16;

/// The least time between two log messages about that failure.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(10);

const WAKER: Token = Token(usize::MAX);
const TCP: Token = Token(usize::MAX - 1);
const LOCAL: Token = Token(usize::MAX - 2);

/// What a process does with peers that have completed the handshake.
pub(crate) trait Handler: Send + 'static {
    /// Takes the connection of a peer.
    fn admit(&mut self, hello: Hello, stream: Stream);

    /// Returns the reply to a peer's query. It runs on the listener's thread and must not wait.
    fn answer(&mut self, _hello: &Hello, _query: &[u8]) -> Vec<u8> {
        Vec::new()
    }

    /// Learns that no more connections come: the system refuses this process a call which each one needs, or it
    /// has had no descriptor for one for long.
    fn refused(&mut self, _error: &Arc<io::Error>) {}

    /// Learns that this process has a descriptor again.
    fn accepts_again(&mut self) {}
}

impl<F: FnMut(Hello, Stream) + Send + 'static> Handler for F {
    fn admit(&mut self, hello: Hello, stream: Stream) {
        self(hello, stream);
    }
}

/// Accepts connections on its own thread until it is dropped.
pub(crate) struct Listener {
    addresses: Vec<SocketAddr>,
    name: Option<String>,
    stop: Arc<AtomicBool>,
    shortage: Arc<Mutex<Option<Shortage>>>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread. A forked child also has this value, and not the thread.
    owner: u32,
}

/// The process cannot accept connections, for want of descriptors for example.
struct Shortage {
    since: Instant,
    last: Arc<io::Error>,
    /// Whether the handler knows.
    is_told: bool,
}

impl Listener {
    /// Accepts connections on the listeners of `tcp` and on a name that only this host can reach, where they are
    /// given. Passes the peers that share `identity` to `handler`.
    pub(crate) fn open(
        tcp: impl IntoIterator<Item = StdListener>,
        local: Option<(String, LocalListener)>,
        identity: Identity,
        handler: impl Handler,
    ) -> io::Result<Listener> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(&poll, WAKER)?);
        let (mut addresses, mut network) = (Vec::new(), Vec::new());
        for listener in tcp {
            addresses.push(listener.local_addr()?);
            listener.set_nonblocking(true)?;
            let mut listener = TcpListener::from_std(listener);
            poll.registry().register(&mut listener, TCP, Interest::READABLE)?;
            network.push(listener);
        }
        let (name, mut local) = local.unzip();
        if let Some(listener) = &mut local {
            listener.register(poll.registry(), LOCAL)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let shortage = Arc::new(Mutex::new(None));
        let mut server = Server {
            poll,
            network,
            local,
            identity,
            connections: HashMap::new(),
            nonces: RecentNonces::default(),
            next: 0,
            backlog: Backlog::Empty,
            is_locals_turn: false,
            shortage: shortage.clone(),
            logged: None,
            handler,
        };
        server.try_out()?;
        let thread = std::thread::Builder::new().name("kolo-listener".to_owned()).spawn(move || {
            if let Err(error) = server.serve(&stopped) {
                crate::log::error!(%error, "the listener failed: this process accepts no more connections");
                server.look_for_refusal();
            }
        })?;
        let owner = std::process::id();
        Ok(Listener { addresses, name, stop, shortage, waker, thread: Some(thread), owner })
    }

    /// Returns the listener's first address in the network.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.addresses.first().copied()
    }

    /// Returns all of its addresses in the network.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns the listener's name on this host.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the system's error if this process has not been able to accept a connection for so
    /// long, or may not accept any.
    pub(crate) fn shortage(&self, long: Duration) -> Option<io::Error> {
        let shortage = self.shortage.lock();
        let is_over = |shortage: &&Shortage| shortage.since.elapsed() >= long || sys::is_refused(&shortage.last);
        let Shortage { last, .. } = shortage.as_ref().filter(is_over)?;
        Some(io::Error::new(last.kind(), last.clone()))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            // A child of a fork closes nothing: macOS does not hand the waker's kqueue down, and
            // its number may be that of another file in the child.
            return std::mem::forget((self.thread.take(), self.waker.clone()));
        }
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            crate::log::error!(%error, "cannot close the listener");
            return;
        }
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            sys::join(thread);
        }
    }
}

/// Returns a name for a listener that other programs cannot guess.
pub(crate) fn random_name() -> String {
    format!("kolo-{:016x}", random_number())
}

/// The state of the listener's thread.
struct Server<H> {
    poll: Poll,
    network: Vec<TcpListener>,
    local: Option<LocalListener>,
    identity: Identity,
    /// The connections that are shaking hands, by token.
    connections: HashMap<usize, Connection>,
    nonces: RecentNonces,
    /// The token of the next connection.
    next: usize,
    backlog: Backlog,
    /// Whether the local socket or the network is accepted from first. They alternate, so that
    /// neither keeps the other out.
    is_locals_turn: bool,
    /// Set while connections cannot be accepted.
    shortage: Arc<Mutex<Option<Shortage>>>,
    /// When a failure to accept was last logged.
    logged: Option<Instant>,
    handler: H,
}

/// The nonces of the last hellos, in the order in which they came.
#[derive(Default)]
pub(super) struct RecentNonces {
    pub(super) nonces: HashSet<[u8; NONCE]>,
    pub(super) order: VecDeque<[u8; NONCE]>,
}

impl RecentNonces {
    /// Remembers a nonce. Returns whether it came for the first time, as far as is remembered.
    pub(super) fn is_new(&mut self, nonce: [u8; NONCE]) -> bool {
        let is_new = self.nonces.insert(nonce);
        if is_new {
            self.order.push_back(nonce);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.nonces.remove(&oldest);
        }
        is_new
    }
}

/// The connections that have not been accepted.
#[derive(Clone, Copy, PartialEq)]
enum Backlog {
    Empty,
    /// There may be connections to accept.
    Ready,
    /// There is a connection that cannot be accepted at the moment.
    Blocked,
}

/// A connection that has not been passed on.
struct Connection {
    stream: Stream,
    state: ConnectionState,
    deadline: Instant,
}

/// How far a connection has come.
enum ConnectionState {
    ShakingHands(Acceptor),
    /// The peer has completed the handshake and sends a query, of which these bytes have come.
    Asking(Hello, Vec<u8>),
    /// The reply is being sent, and this many bytes of it have been.
    Replying(Vec<u8>, usize),
}

impl Connection {
    /// Sends a message of the handshake; false if it does not fit. They are smaller than the buffer
    /// of a fresh socket: one that does not fit goes to a stranger.
    fn send(&mut self, reply: &[u8]) -> bool {
        self.stream.write(reply).ok() == Some(reply.len())
    }

    /// Returns whether the peer has shown that it knows the secret.
    fn is_member(&self) -> bool {
        match &self.state {
            ConnectionState::ShakingHands(acceptor) => acceptor.challenged().is_some(),
            ConnectionState::Asking(..) | ConnectionState::Replying(..) => true,
        }
    }

    /// Returns how many bytes to read next; `None` if the peer sends a query that is too long. Not
    /// a byte is read beyond the handshake: the rest belongs to the owner of the stream.
    fn wanted(&self) -> Option<usize> {
        match &self.state {
            ConnectionState::ShakingHands(acceptor) => Some(acceptor.wanted()),
            ConnectionState::Asking(_, received) => query::missing(received).map(|missing| missing.min(LONGEST)),
            ConnectionState::Replying(..) => None,
        }
    }

    /// Sends what the socket takes of a reply; returns whether bytes are left.
    fn reply(&mut self) -> bool {
        let ConnectionState::Replying(reply, sent) = &mut self.state else { return false };
        while *sent < reply.len() {
            match self.stream.write(&reply[*sent..]) {
                Ok(0) => return false,
                Ok(count) => *sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        false
    }
}

/// What becomes of a connection after it has been served.
enum Served {
    Keep,
    Drop,
    PassOn(Hello),
}

impl<H: Handler> Server<H> {
    /// Makes the calls that every connection needs, so that the start fails at once if the system
    /// refuses one of them.
    fn try_out(&mut self) -> io::Result<()> {
        for listener in &self.network {
            socket2::SockRef::from(listener).set_tcp_nodelay(true).map_err(sys::naming("setsockopt"))?;
        }
        // One turn for the network, and one for the host. There may be connections already.
        for _ in 0..2 {
            match self.accept_next() {
                Some(Ok(stream)) => self.welcome(stream),
                Some(Err(error)) if sys::is_refused(&error) => return Err(error),
                // The thread tries again.
                Some(Err(_)) | None => {}
            }
        }
        // The system does not announce once more what has come before.
        self.backlog = Backlog::Ready;
        Ok(())
    }

    fn serve(&mut self, stop: &AtomicBool) -> io::Result<()> {
        let mut events = Events::with_capacity(64);
        while !stop.load(Ordering::Acquire) {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    TCP | LOCAL => self.backlog = Backlog::Ready,
                    Token(number) => self.serve_connection(number),
                }
            }
            self.drop_late_connections();
            if self.backlog != Backlog::Empty {
                self.backlog = self.accept_some();
            }
        }
        Ok(())
    }

    /// Returns how long to wait for an event: until the first deadline, or until the next attempt
    /// to accept.
    fn timeout(&self) -> Option<Duration> {
        let next_deadline = self.connections.values().map(|connection| connection.deadline).min();
        let timeout = next_deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match self.backlog {
            Backlog::Empty => timeout,
            Backlog::Ready => Some(Duration::ZERO),
            Backlog::Blocked => Some(timeout.unwrap_or(ACCEPT_PAUSE).min(ACCEPT_PAUSE)),
        }
    }

    /// Drops the connections that have taken too long. What they have sent by now counts: this
    /// process may have been paused.
    fn drop_late_connections(&mut self) {
        let now = Instant::now();
        let late = self.connections.iter().filter(|(_, connection)| connection.deadline <= now);
        let late: Vec<usize> = late.map(|(&number, _)| number).collect();
        for number in late {
            self.serve_connection(number);
            if self.connections.get(&number).is_some_and(|connection| connection.deadline <= now) {
                self.connections.remove(&number);
            }
        }
    }

    /// Accepts some of the connections that have come; returns whether there may be more.
    fn accept_some(&mut self) -> Backlog {
        for _ in 0..AT_ONCE {
            let accepted = self.accept_next();
            if !matches!(accepted, Some(Err(_))) {
                let over = self.shortage.lock().take_if(|shortage| !sys::is_refused(&shortage.last));
                if over.is_some_and(|shortage| shortage.is_told) {
                    self.handler.accepts_again();
                }
            }
            let stream = match accepted {
                None => return Backlog::Empty,
                Some(Ok(stream)) => stream,
                // The peer has closed the connection again.
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                // The process may have no descriptors left just now.
                Some(Err(error)) => {
                    let is_refused = sys::is_refused(&error);
                    self.note_shortage(error);
                    // A call that is refused is made again for the next connection.
                    return if is_refused { Backlog::Empty } else { Backlog::Blocked };
                }
            };
            self.welcome(stream);
        }
        Backlog::Ready
    }

    /// Begins to shake hands with a process that has connected, unless it is another user's that
    /// cannot be a member.
    fn welcome(&mut self, stream: Stream) {
        if let Stream::Local(stream) = &stream
            && self.identity.is_of_one_user()
            && !stream.is_of_this_user()
        {
            return crate::log::debug!("dropped a connection of another user");
        }
        self.make_room();
        self.add(stream);
    }

    /// Accepts one connection, in turns from the network and from the host; `None` if there is
    /// none.
    fn accept_next(&mut self) -> Option<io::Result<Stream>> {
        self.is_locals_turn = !self.is_locals_turn;
        let is_ready = |result: &io::Result<Stream>| match result {
            Ok(_) => true,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        let accepted = |listener: &TcpListener| {
            above_standard(|| listener.accept())
                .map_err(sys::naming("accept4"))
                .map(|(stream, _)| Stream::Tcp(Guarded::new(stream)))
        };
        let tcp = || self.network.iter().map(accepted).find(is_ready);
        let local = || self.local.as_ref().map(|listener| above_standard(|| listener.accept()).map(Stream::Local));
        match self.is_locals_turn {
            true => local().filter(is_ready).or_else(tcp),
            false => tcp().or_else(|| local().filter(is_ready)),
        }
    }

    /// Begins the handshake on a connection.
    fn add(&mut self, mut stream: Stream) {
        let number = self.next;
        self.next = (self.next + 1) % (usize::MAX / 2);
        if self.poll.registry().register(stream.source(), Token(number), Interest::READABLE).is_ok() {
            let state = ConnectionState::ShakingHands(Acceptor::new(stream.medium()));
            self.connections.insert(number, Connection { stream, state, deadline: Instant::now() + HANDSHAKE });
            // The peer may have sent its hello already.
            self.serve_connection(number);
        } else {
            self.look_for_refusal();
        }
    }

    /// Notes if the system refuses this process a call now that each connection needs.
    fn look_for_refusal(&mut self) {
        if let Err(error) = sys::try_out() {
            self.note_shortage(error);
        }
    }

    /// Notes why a connection cannot be accepted.
    fn note_shortage(&mut self, error: io::Error) {
        let error = Arc::new(error);
        let is_refused = sys::is_refused(&error);
        if is_due(&mut self.logged, Instant::now()) {
            match is_refused {
                true => crate::log::error!(%error, "cannot accept connections"),
                false => {
                    crate::log::warn!(%error, "cannot accept connections at the moment; trying again every {ACCEPT_PAUSE:?}")
                }
            }
        }
        let before = self.shortage.lock().as_ref().map(|shortage| (shortage.since, shortage.is_told));
        let (since, was_told) = before.unwrap_or((Instant::now(), false));
        let is_told = is_refused || since.elapsed() >= NO_DESCRIPTOR;
        if is_refused || is_told && !was_told {
            self.handler.refused(&error);
        }
        *self.shortage.lock() = Some(Shortage { since, last: error, is_told });
    }

    /// Drops the oldest stranger and the oldest member, if there are too many.
    fn make_room(&mut self) {
        for (are_members, most) in [(false, STRANGERS), (true, MEMBERS)] {
            let alike = || self.connections.iter().filter(|(_, connection)| connection.is_member() == are_members);
            if alike().count() >= most
                && let Some((&number, _)) = alike().min_by_key(|(_, connection)| connection.deadline)
            {
                self.connections.remove(&number);
            }
        }
    }

    /// Reads what a peer has sent and answers it. Passes the connection on if the handshake is
    /// complete.
    fn serve_connection(&mut self, number: usize) {
        match self.advance(number) {
            Served::Keep => {}
            Served::Drop => {
                self.connections.remove(&number);
                // The peer need not be the cause.
                self.look_for_refusal();
            }
            Served::PassOn(hello) => {
                let Some(connection) = self.connections.remove(&number) else { return };
                match connection.stream.release(self.poll.registry()) {
                    Ok(stream) => self.handler.admit(hello, stream),
                    Err(error) => crate::log::warn!(%error, from = hello.from, "lost the connection of a rank"),
                }
            }
        }
    }

    fn advance(&mut self, number: usize) -> Served {
        let Some(connection) = self.connections.get_mut(&number) else { return Served::Keep };
        if let ConnectionState::Replying(..) = connection.state {
            return if connection.reply() { Served::Keep } else { Served::Drop };
        }
        loop {
            let mut bytes = [0; LONGEST];
            let Some(wanted) = connection.wanted() else { return Served::Drop };
            let count = match connection.stream.read(&mut bytes[..wanted]) {
                Ok(0) => return Served::Drop,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Served::Keep,
                Err(_) => return Served::Drop,
            };
            let next = match &mut connection.state {
                ConnectionState::ShakingHands(_) => shake_hands(connection, &self.identity, &mut self.nonces, &bytes[..count]),
                ConnectionState::Asking(hello, received) => {
                    received.extend_from_slice(&bytes[..count]);
                    if query::missing(received) == Some(0) {
                        let reply = self.handler.answer(hello, query::message(received));
                        connection.state = ConnectionState::Replying(query::prefixed(&reply), 0);
                        if !connection.reply() {
                            return Served::Drop;
                        }
                        // A long reply goes on when the peer has read some of it, until the deadline.
                        let (source, token) = (connection.stream.source(), Token(number));
                        let is_watched = self.poll.registry().reregister(source, token, Interest::WRITABLE).is_ok();
                        return if is_watched { Served::Keep } else { Served::Drop };
                    }
                    ControlFlow::Continue(())
                }
                // Nothing is read any more.
                ConnectionState::Replying(..) => return Served::Drop,
            };
            if let ControlFlow::Break(served) = next {
                return served;
            }
        }
    }
}

/// Takes in bytes of a handshake and answers them. Breaks when the connection needs no more reading
/// here.
fn shake_hands(connection: &mut Connection, identity: &Identity, nonces: &mut RecentNonces, bytes: &[u8]) -> ControlFlow<Served> {
    let ConnectionState::ShakingHands(acceptor) = &mut connection.state else { return ControlFlow::Continue(()) };
    let answer = acceptor.receive(identity, bytes);
    // A member makes a new hello for each attempt.
    if answer.reply.is_some() && acceptor.challenged().is_some_and(|nonce| !nonces.is_new(nonce)) {
        crate::log::debug!("dropped a connection that repeats another one's hello");
        return ControlFlow::Break(Served::Drop);
    }
    if let Some(reply) = answer.reply {
        if !connection.send(&reply) {
            return ControlFlow::Break(Served::Drop);
        }
        // The next message has a deadline of its own.
        connection.deadline = Instant::now() + HANDSHAKE;
    }
    match answer.outcome {
        None => ControlFlow::Continue(()),
        Some(Err(refusal)) => {
            crate::log::debug!(?refusal, "refused a connection");
            ControlFlow::Break(Served::Drop)
        }
        Some(Ok(hello)) if matches!(hello.purpose, Purpose::Query | Purpose::Observe) => {
            connection.state = ConnectionState::Asking(hello, Vec::new());
            connection.deadline = Instant::now() + HANDSHAKE;
            ControlFlow::Continue(())
        }
        Some(Ok(hello)) => ControlFlow::Break(Served::PassOn(hello)),
    }
}

/// Returns whether a repeated event is to be logged now, and notes that it was.
pub(super) fn is_due(logged: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = logged.is_none_or(|logged| now.duration_since(logged) >= LOG_INTERVAL);
    if is_due {
        *logged = Some(now);
    }
    is_due
}

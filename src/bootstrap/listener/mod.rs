//! Who is let in: the socket on which a process takes connections, and what a caller must prove before anything else of the
//! library sees it.
//!
//! A [`Listener`] is one small thread that accepts and shakes hands, so that a caller never waits for a collective that the
//! process is busy with. Callers that do not speak the protocol, are too slow or too many are turned away and leave nothing
//! behind.

mod connector;
pub(crate) mod handshake;
pub mod stranger;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::event::Source;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Registry, Token, Waker};

use crate::sys::{LocalListener, LocalStream};
use crate::transport::tcp;
pub(crate) use connector::{Connector, Target};
use handshake::{Acceptor, Hello, Identity, Medium, NONCE, Purpose, Refusal};

/// How long a caller may take for each message of the handshake.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many strangers may be connected at once, each of which takes a descriptor. A caller is a stranger until its hello has shown
/// that it knows the secret. When another connects, the listener drops the stranger that has been connected longest. So silent
/// strangers keep no member out: a member sends its hello as soon as it has connected.
const STRANGERS: usize = 64;

/// How many members may shake hands at once. None of them makes room for a stranger. There are more only in a job without a
/// secret, where every hello is accepted; then the listener drops the oldest member, too. A caller that was dropped tries
/// again.
const MEMBERS: usize = 1024;

/// How many hellos are remembered, the last ones: who repeats one of them has overheard it, and is a stranger.
const REMEMBERED: usize = 4096;

/// How many callers are taken in before those who are in are heard again.
const AT_ONCE: usize = 16;

/// The longest question, and the longest answer.
const LONGEST_QUESTION: usize = 64 << 10;
const LONGEST_ANSWER: usize = 1 << 20;

/// How long before it is tried again to accept connections when that has failed, and how often it is said at most.
const RETRY: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(10);

const WAKER: Token = Token(usize::MAX);
const TCP: Token = Token(usize::MAX - 1);
const LOCAL: Token = Token(usize::MAX - 2);

/// A connection whose other end has proved who it is.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Local(LocalStream),
}

impl Stream {
    fn source(&mut self) -> &mut dyn Source {
        match self {
            Stream::Tcp(stream) => stream,
            Stream::Local(stream) => stream,
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Local(stream) => (&*stream).read(into),
        }
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(from),
            Stream::Local(stream) => (&*stream).write(from),
        }
    }

    /// After the handshake: it is no longer listened to here, and is fit for a link.
    fn release(mut self, registry: &Registry) -> io::Result<Stream> {
        registry.deregister(self.source())?;
        if let Stream::Tcp(stream) = &self {
            tcp::prepare(stream)?;
        }
        Ok(self)
    }
}

/// Whom a listener serves.
pub(crate) trait Host: Send + 'static {
    /// Takes the connection of a caller who has proved who it is.
    fn admit(&mut self, hello: Hello, stream: Stream);

    /// What to say to a caller who has proved who it is and asks something. On the listener's thread: it must not wait.
    fn answer(&mut self, _hello: &Hello, _question: &[u8]) -> Vec<u8> {
        Vec::new()
    }
}

impl<F: FnMut(Hello, Stream) + Send + 'static> Host for F {
    fn admit(&mut self, hello: Hello, stream: Stream) {
        self(hello, stream);
    }
}

/// Takes connections on its own thread until it is dropped.
pub(crate) struct Listener {
    address: Option<SocketAddr>,
    name: Option<String>,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Takes connections on `tcp` and on a name that only this host can reach, as many of them as are given, and passes those
    /// who share `identity` and ask for nothing wrong to `host`.
    pub(crate) fn open(
        tcp: Option<StdListener>,
        local: Option<(String, LocalListener)>,
        identity: Identity,
        host: impl Host,
    ) -> io::Result<Listener> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let address = tcp.as_ref().map(StdListener::local_addr).transpose()?;
        let mut tcp = tcp.map(|listener| listener.set_nonblocking(true).map(|()| TcpListener::from_std(listener))).transpose()?;
        if let Some(listener) = &mut tcp {
            poll.registry().register(listener, TCP, Interest::READABLE)?;
        }
        let (name, mut local) = local.unzip();
        if let Some(listener) = &mut local {
            listener.register(poll.registry(), LOCAL)?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let mut porter = Porter {
            poll,
            tcp,
            local,
            identity,
            callers: HashMap::new(),
            heard: Heard::default(),
            next: 0,
            waiting: Waiting::Nobody,
            is_locals_turn: false,
            said: None,
            host,
        };
        let thread = std::thread::Builder::new().name("kolo-listener".to_owned()).spawn(move || {
            if let Err(error) = porter.serve(&stopped) {
                tracing::error!(%error, "no more connections are accepted");
            }
        })?;
        Ok(Listener { address, name, stop, waker, thread: Some(thread) })
    }

    /// Where the listener is in the network.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// What the listener is called on this host.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "the listener cannot be closed");
            return;
        }
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic there has been printed, and there is nothing to mend.
            let _ = thread.join();
        }
    }
}

/// A random name for a listener.
pub(crate) fn random_name() -> String {
    format!("kolo-{:032x}", u128::from_le_bytes(handshake::random()))
}

/// What the listener's thread works on.
struct Porter<H> {
    poll: Poll,
    tcp: Option<TcpListener>,
    local: Option<LocalListener>,
    identity: Identity,
    /// Those who shake hands.
    callers: HashMap<usize, Caller>,
    heard: Heard,
    next: usize,
    waiting: Waiting,
    /// Whether who comes from this host or who comes through the network is asked in first: neither keeps the other out.
    is_locals_turn: bool,
    /// When it was last said that connections cannot be accepted.
    said: Option<Instant>,
    host: H,
}

/// The nonces of the last hellos, in the order in which they came.
#[derive(Default)]
struct Heard {
    nonces: HashSet<[u8; NONCE]>,
    order: VecDeque<[u8; NONCE]>,
}

impl Heard {
    /// Whether a hello comes for the first time, as far as is remembered.
    fn is_new(&mut self, nonce: [u8; NONCE]) -> bool {
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

/// Who waits outside.
#[derive(Clone, Copy, PartialEq)]
enum Waiting {
    Nobody,
    /// Perhaps somebody.
    Somebody,
    /// Somebody who cannot be taken in at the moment.
    InVain,
}

struct Caller {
    stream: Stream,
    state: CallerState,
    deadline: Instant,
}

/// How far a caller has come.
enum CallerState {
    Shaking(Acceptor),
    /// It has proved who it is, and asks: the length of the question in 4 bytes, then the question, as far as they have come.
    Asking(Hello, Vec<u8>),
}

impl Caller {
    /// Says something; false if it does not fit. Replies are smaller than the buffer of a fresh socket: one that does not fit is
    /// to nobody that we know.
    fn say(&mut self, reply: &[u8]) -> bool {
        self.stream.write(reply).ok() == Some(reply.len())
    }

    /// Whether it has shown that it knows the secret.
    fn is_member(&self) -> bool {
        match &self.state {
            CallerState::Shaking(acceptor) => acceptor.challenged().is_some(),
            CallerState::Asking(..) => true,
        }
    }
}

impl<H: Host> Porter<H> {
    fn serve(&mut self, stop: &AtomicBool) -> io::Result<()> {
        let mut events = Events::with_capacity(64);
        while !stop.load(Ordering::Acquire) {
            let next_deadline = self.callers.values().map(|caller| caller.deadline).min();
            let timeout = next_deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = match self.waiting {
                Waiting::Nobody => timeout,
                Waiting::Somebody => Some(Duration::ZERO),
                Waiting::InVain => Some(timeout.unwrap_or(RETRY).min(RETRY)),
            };
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    TCP | LOCAL => self.waiting = Waiting::Somebody,
                    Token(caller) => self.listen(caller),
                }
            }
            self.turn_away_the_late();
            if self.waiting != Waiting::Nobody {
                self.waiting = self.accept();
            }
        }
        Ok(())
    }

    /// Turns away the callers that have taken too long. What they have said by now counts: it may be this process that was paused.
    fn turn_away_the_late(&mut self) {
        let now = Instant::now();
        let late: Vec<usize> =
            self.callers.iter().filter(|(_, caller)| caller.deadline <= now).map(|(&number, _)| number).collect();
        for number in late {
            self.listen(number);
            if self.callers.get(&number).is_some_and(|caller| caller.deadline <= now) {
                self.callers.remove(&number);
            }
        }
    }

    /// Takes in some of the callers that have come; whether more wait.
    fn accept(&mut self) -> Waiting {
        for _ in 0..AT_ONCE {
            self.is_locals_turn = !self.is_locals_turn;
            let tcp = || self.tcp.as_ref().map(|listener| listener.accept().map(|(stream, _)| Stream::Tcp(stream)));
            let local = || self.local.as_ref().map(|listener| listener.accept().map(Stream::Local));
            let is_somebody = |result: &io::Result<Stream>| !is_nobody(result);
            let stream = match self.is_locals_turn {
                true => local().filter(is_somebody).or_else(|| tcp().filter(is_somebody)),
                false => tcp().filter(is_somebody).or_else(|| local().filter(is_somebody)),
            };
            let mut stream = match stream {
                None => return Waiting::Nobody,
                Some(Ok(stream)) => stream,
                // One that has gone again; or the process has no descriptors left just now.
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Some(Err(error)) => {
                    if is_due(&mut self.said, Instant::now()) {
                        tracing::warn!(%error, "connections cannot be accepted at the moment; this is tried again and again");
                    }
                    return Waiting::InVain;
                }
            };
            if let Stream::Local(stream) = &stream
                && self.identity.is_of_one_user()
                && !stream.is_of_this_user()
            {
                tracing::debug!("a caller of another user was turned away");
                continue;
            }
            self.make_room();
            let number = self.next;
            self.next = (self.next + 1) % (usize::MAX / 2);
            let medium = match &stream {
                Stream::Tcp(_) => Medium::Network,
                Stream::Local(_) => Medium::Local,
            };
            if self.poll.registry().register(stream.source(), Token(number), Interest::READABLE).is_ok() {
                let state = CallerState::Shaking(Acceptor::new(medium));
                let caller = Caller { stream, state, deadline: Instant::now() + PATIENCE };
                self.callers.insert(number, caller);
                // It may have spoken already.
                self.listen(number);
            }
        }
        Waiting::Somebody
    }

    /// Drops the oldest stranger and the oldest member, if there are too many.
    fn make_room(&mut self) {
        for (are_members, most) in [(false, STRANGERS), (true, MEMBERS)] {
            let alike = || self.callers.iter().filter(|(_, caller)| caller.is_member() == are_members);
            if alike().count() >= most
                && let Some((&number, _)) = alike().min_by_key(|(_, caller)| caller.deadline)
            {
                self.callers.remove(&number);
            }
        }
    }

    /// Hears what a caller says, as far as it has.
    fn listen(&mut self, number: usize) {
        let Some(caller) = self.callers.get_mut(&number) else { return };
        let stays = loop {
            // Not a byte is read beyond what is needed: the rest is for those to whom the stream is passed.
            let mut bytes = [0; handshake::LONGEST];
            let wanted = match &caller.state {
                CallerState::Shaking(acceptor) => acceptor.wanted(),
                CallerState::Asking(_, heard) => match missing(heard) {
                    Some(missing) => missing.min(bytes.len()),
                    None => break false,
                },
            };
            let count = match caller.stream.read(&mut bytes[..wanted]) {
                Ok(0) => break false,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => break error.kind() == io::ErrorKind::WouldBlock,
            };
            let answer = match &mut caller.state {
                CallerState::Shaking(acceptor) => {
                    let answer = acceptor.hear(&self.identity, &bytes[..count]);
                    // A member makes a new hello for each attempt.
                    if answer.reply.is_some() && acceptor.challenged().is_some_and(|nonce| !self.heard.is_new(nonce)) {
                        tracing::debug!("a caller that repeats another's hello was turned away");
                        break false;
                    }
                    answer
                }
                CallerState::Asking(hello, heard) => {
                    heard.extend_from_slice(&bytes[..count]);
                    if missing(heard) == Some(0) {
                        let answer = self.host.answer(hello, &heard[PREFIX..]);
                        caller.say(&prefixed(&answer));
                        break false;
                    }
                    continue;
                }
            };
            if let Some(reply) = answer.reply {
                if !caller.say(&reply) {
                    break false;
                }
                // What it says next has a time of its own.
                caller.deadline = Instant::now() + PATIENCE;
            }
            match answer.outcome {
                None => {}
                Some(Err(refusal)) => {
                    tracing::debug!(?refusal, "a caller was turned away");
                    break false;
                }
                Some(Ok(hello)) if hello.purpose == Purpose::Ask => {
                    caller.state = CallerState::Asking(hello, Vec::new());
                    caller.deadline = Instant::now() + PATIENCE;
                }
                Some(Ok(hello)) => {
                    if let Some(caller) = self.callers.remove(&number) {
                        self.pass_on(hello, caller.stream);
                    }
                    return;
                }
            }
        };
        if !stays {
            self.callers.remove(&number);
        }
    }

    fn pass_on(&mut self, hello: Hello, stream: Stream) {
        match stream.release(self.poll.registry()) {
            Ok(stream) => self.host.admit(hello, stream),
            Err(error) => tracing::warn!(%error, "a connection was lost"),
        }
    }
}

/// Whether something that happens again and again is to be said now.
fn is_due(said: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = said.is_none_or(|said| now.duration_since(said) >= SELDOM);
    if is_due {
        *said = Some(now);
    }
    is_due
}

/// Bytes of a length before a question or an answer.
const PREFIX: usize = 4;

/// How many bytes of a question are missing that has come so far; `None` if it will be too long.
fn missing(heard: &[u8]) -> Option<usize> {
    let Some(prefix) = heard.first_chunk::<PREFIX>() else { return Some(PREFIX - heard.len()) };
    let len = u32::from_le_bytes(*prefix) as usize;
    (len <= LONGEST_QUESTION).then(|| PREFIX + len - heard.len())
}

fn prefixed(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes()[..], text].concat()
}

fn is_nobody(result: &io::Result<Stream>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Why a listener was not opened.
#[derive(Debug)]
pub(crate) enum DialError {
    /// Nobody took the connection.
    Connect(io::Error),
    /// Somebody took it, and then said nothing, or went.
    Io(io::Error),
    Refused(Refusal),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> DialError {
        DialError::Io(error)
    }
}

/// Connects to a listener in the network, and waits until it is let in. A [`Connector`] does so without waiting.
pub(crate) fn dial(address: SocketAddr, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<TcpStream, DialError> {
    let stream = connect(address, identity, hello, deadline)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nonblocking(true)?;
    let stream = TcpStream::from_std(stream);
    tcp::prepare(&stream)?;
    Ok(stream)
}

fn connect(address: SocketAddr, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<std::net::TcpStream, DialError> {
    again_and_again(deadline, || {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = std::net::TcpStream::connect_timeout(&address, left).map_err(DialError::Connect)?;
        stream.set_nodelay(true)?;
        handshake::introduce(&mut Until { stream: &stream, deadline }, identity, Medium::Network, hello)?;
        Ok(stream)
    })
}

/// Repeats a handshake that ends early, until the deadline: the listener made room for others. One that has ended refuses the next.
fn again_and_again<T>(deadline: Instant, mut shake_hands: impl FnMut() -> Result<T, DialError>) -> Result<T, DialError> {
    loop {
        match shake_hands() {
            Err(error @ DialError::Io(_)) if connector::may_pass(&error) => {
                if Instant::now() + AGAIN >= deadline {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                std::thread::sleep(AGAIN);
            }
            result => return result,
        }
    }
}

/// How long before a handshake that ended early is tried again.
const AGAIN: Duration = Duration::from_millis(5);

/// A stream whose reads and writes end with a deadline, however slowly the peer speaks.
pub(crate) struct Until<'a> {
    pub(crate) stream: &'a std::net::TcpStream,
    pub(crate) deadline: Instant,
}

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(into)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects to a listener of this host, and waits until it is let in.
pub(crate) fn dial_local(name: &str, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<LocalStream, DialError> {
    again_and_again(deadline, || {
        let stream = connect_local(name, identity, deadline)?;
        handshake::introduce(&mut stream.until(deadline), identity, Medium::Local, hello)?;
        Ok(stream)
    })
}

/// Connects to a name of this host, where another user may have taken the name of a rank that has ended.
fn connect_local(name: &str, identity: &Identity, deadline: Instant) -> Result<LocalStream, DialError> {
    let stream = LocalStream::connect(name, deadline).map_err(DialError::Connect)?;
    match identity.is_of_one_user() && !stream.is_of_this_user() {
        true => Err(DialError::Refused(Refusal::Foreign)),
        false => Ok(stream),
    }
}

/// Asks a question at a listener in the network.
pub(crate) fn ask(
    address: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    question: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let stream = connect(address, identity, hello, deadline)?;
    converse(&mut Until { stream: &stream, deadline }, question)
}

/// Asks a question at a listener of this host.
pub(crate) fn ask_local(
    name: &str,
    identity: &Identity,
    hello: &Hello,
    question: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let stream = dial_local(name, identity, hello, deadline)?;
    converse(&mut stream.until(deadline), question)
}

/// Says a question to a listener that has let this process in, and hears the answer.
fn converse(stream: &mut (impl Read + Write), question: &[u8]) -> Result<Vec<u8>, DialError> {
    stream.write_all(&prefixed(question))?;
    let mut prefix = [0; PREFIX];
    stream.read_exact(&mut prefix)?;
    let len = u32::from_le_bytes(prefix) as usize;
    if len > LONGEST_ANSWER {
        return Err(io::Error::from(io::ErrorKind::InvalidData).into());
    }
    let mut answer = vec![0; len];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream as StdStream;
    use std::sync::mpsc;

    use super::*;
    use handshake::Purpose;

    fn listener(identity: Identity) -> (Listener, mpsc::Receiver<Hello>) {
        let (send, receive) = mpsc::channel();
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let listener =
            Listener::open(Some(listener), None, identity, move |hello: Hello, _: Stream| send.send(hello).unwrap()).unwrap();
        (listener, receive)
    }

    fn hello() -> Hello {
        Hello::new(Purpose::Link, 77, 3, 0)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn who_shares_job_and_secret_is_let_in() {
        let identity = Identity::new("job", Some([7; 32]));
        let (listener, admitted) = listener(identity.clone());
        dial(listener.address().unwrap(), &identity, &hello(), soon()).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
    }

    #[test]
    fn who_does_not_is_told_why() {
        let (listener, admitted) = listener(Identity::new("job", Some([7; 32])));
        let dial = |identity| dial(listener.address().unwrap(), &identity, &hello(), soon()).map(drop);
        match dial(Identity::new("other", Some([7; 32]))) {
            Err(DialError::Refused(Refusal::Job { theirs })) => assert_eq!(theirs.as_deref(), Some("job")),
            other => panic!("{other:?}"),
        }
        for secret in [None, Some([8; 32])] {
            assert!(matches!(dial(Identity::new("job", secret)), Err(DialError::Refused(Refusal::Secret))));
        }
        assert!(admitted.try_recv().is_err());
    }

    /// A process of an earlier run calls at a port that has been used again.
    #[test]
    fn processes_of_an_earlier_run_have_no_effect() {
        let job = Identity::new("job", None);
        let (earlier, now) = (job.clone().of_run([1; 16], [7; 32]), job.of_run([2; 16], [7; 32]));
        let (listener, admitted) = listener(now.clone());
        let dial = |identity| dial(listener.address().unwrap(), identity, &hello(), soon()).map(drop);
        assert!(matches!(dial(&earlier), Err(DialError::Refused(Refusal::Run))));
        dial(&now).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
        assert!(admitted.try_recv().is_err());
    }

    /// Ranks that agreed on a secret through a store where others could write accept no other user of the machine, even with the secret.
    #[test]
    #[cfg(target_os = "linux")]
    fn another_user_is_a_stranger_unless_the_secret_was_given() {
        // SAFETY: it has no arguments, and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            println!("NOT RUN: another user calls at a local socket; only root can become one");
            return;
        }
        for (is_agreed, is_let_in) in [(false, true), (true, false)] {
            let identity = Identity::new("job", None).of_run([1; 16], [7; 32]);
            let identity = if is_agreed { identity.agreed() } else { identity };
            let name = random_name();
            let local = (name.clone(), LocalListener::bind(&name).unwrap());
            let (send, admitted) = mpsc::channel();
            let _door =
                Listener::open(None, Some(local), identity.clone(), move |hello: Hello, _: Stream| send.send(hello).unwrap());
            dial_local(&name, &identity, &hello(), soon()).unwrap();
            assert_eq!(admitted.recv().unwrap(), hello());
            let (another, stranger) = (name.clone(), identity.clone());
            let called = std::thread::spawn(move || {
                // Of this thread only: the system keeps users for each, and only the C library makes them one.
                // SAFETY: numbers; nothing of this thread needs root.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
                // A stranger is told nothing, and tries again until the deadline.
                let deadline = if is_let_in { soon() } else { Instant::now() + PATIENCE };
                dial_local(&another, &stranger, &hello(), deadline).is_ok()
            });
            assert_eq!(called.join().unwrap(), is_let_in, "agreed: {is_agreed}");
            // A caller that is let in knows it a little before the host does.
            let patience = if is_let_in { Duration::from_secs(60) } else { Duration::ZERO };
            assert_eq!(admitted.recv_timeout(patience).is_ok(), is_let_in);
        }
    }

    /// Answers a question with itself, twice.
    struct Echo;

    impl Host for Echo {
        fn admit(&mut self, _: Hello, _: Stream) {
            panic!("nobody wants to stay");
        }

        fn answer(&mut self, hello: &Hello, question: &[u8]) -> Vec<u8> {
            assert_eq!(hello.purpose, Purpose::Ask);
            question.repeat(2)
        }
    }

    #[test]
    fn questions_are_answered_to_who_may_ask() {
        let identity = Identity::new("job", Some([7; 32]));
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let listener = Listener::open(Some(listener), None, identity.clone(), Echo).unwrap();
        let ask = |identity: &Identity, question: &[u8]| {
            ask(listener.address().unwrap(), identity, &Hello::new(Purpose::Ask, 77, 3, 0), question, soon())
        };
        for len in [0, 1, 63, 64, 5000, LONGEST_QUESTION] {
            let question: Vec<u8> = (0..len).map(|i| i as u8).collect();
            assert_eq!(ask(&identity, &question).unwrap(), question.repeat(2));
        }
        assert!(matches!(ask(&identity, &[0; LONGEST_QUESTION + 1]), Err(DialError::Io(_))));
        let stranger = Identity::new("job", Some([8; 32]));
        assert!(matches!(ask(&stranger, b"?"), Err(DialError::Refused(Refusal::Secret))));
    }

    /// More members than there may be strangers are in the middle of the handshake at once.
    #[test]
    fn all_members_are_let_in_at_once() {
        const AT_ONCE: usize = 200;
        let identity = Identity::new("job", Some([7; 32]));
        let (listener, admitted) = listener(identity.clone());
        let address = listener.address().unwrap();
        let deadline = soon();
        loop {
            let began = Instant::now();
            let mut members: Vec<_> = (0..AT_ONCE)
                .map(|_| {
                    let member = handshake::Introduction::new(&identity, Medium::Network, &hello());
                    let mut stream = StdStream::connect(address).unwrap();
                    stream.write_all(member.hello()).unwrap();
                    (member, stream)
                })
                .collect();
            let proofs: io::Result<Vec<Vec<u8>>> = members
                .iter_mut()
                .map(|(member, stream)| {
                    let mut challenge = vec![0; member.wanted()];
                    stream.read_exact(&mut challenge)?;
                    let handshake::Step::Say(proof) = member.hear(&challenge) else { panic!("it is no challenge") };
                    Ok(proof)
                })
                .collect();
            let said = proofs.and_then(|proofs| members.iter_mut().zip(&proofs).try_for_each(|((_, s), p)| s.write_all(p)));
            // Members, too, are turned away that take too long, as these may on a slow machine.
            if began.elapsed() >= PATIENCE / 2 {
                assert!(Instant::now() < deadline, "this machine is too slow for so many handshakes");
                drop(members);
                while admitted.recv_timeout(PATIENCE).is_ok() {}
                continue;
            }
            said.expect("a member made room for another");
            assert_eq!((0..AT_ONCE).map_while(|_| admitted.recv_timeout(Duration::from_secs(60)).ok()).count(), AT_ONCE);
            return;
        }
    }

    /// A caller that has said hello is a member, and is not turned away for strangers, however many they are.
    #[test]
    fn members_do_not_make_room_for_strangers() {
        let identity = Identity::new("job", Some([7; 32]));
        let (listener, admitted) = listener(identity.clone());
        let address = listener.address().unwrap();
        let deadline = soon();
        loop {
            let mut member = handshake::Introduction::new(&identity, Medium::Network, &hello());
            let mut stream = StdStream::connect(address).unwrap();
            stream.write_all(member.hello()).unwrap();
            let mut challenge = vec![0; member.wanted()];
            stream.read_exact(&mut challenge).unwrap();
            let began = Instant::now();
            let mut strangers: Vec<StdStream> = (0..3 * STRANGERS).map(|_| StdStream::connect(address).unwrap()).collect();
            // When those have made room that came after the member, it would have had to, too.
            strangers[STRANGERS].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert!(matches!(strangers[STRANGERS].read(&mut [0]), Ok(0) | Err(_)));
            let handshake::Step::Say(proof) = member.hear(&challenge) else { panic!("it is no challenge") };
            let said = stream.write_all(&proof);
            // A member, too, is turned away that takes too long, as this one may on a slow machine.
            if began.elapsed() >= PATIENCE / 2 {
                assert!(Instant::now() < deadline, "this machine is too slow for a handshake");
                let _ = admitted.recv_timeout(PATIENCE);
                continue;
            }
            said.unwrap();
            assert_eq!(admitted.recv_timeout(Duration::from_secs(60)).unwrap(), hello());
            return;
        }
    }

    /// A process that repeats a hello that it has overheard takes no more places than other strangers.
    #[test]
    fn who_repeats_a_hello_is_a_stranger() {
        let identity = Identity::new("job", Some([7; 32]));
        let (listener, admitted) = listener(identity.clone());
        let address = listener.address().unwrap();
        let overheard = handshake::Introduction::new(&identity, Medium::Network, &hello());
        let challenged = (0..3 * STRANGERS).filter(|_| {
            let mut stream = StdStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream.write_all(overheard.hello()).unwrap();
            // A member reads a challenge; a stranger the end.
            stream.read(&mut [0]).is_ok_and(|count| count > 0)
        });
        assert_eq!(challenged.count(), 1);
        dial(address, &identity, &hello(), soon()).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
    }

    #[test]
    fn as_many_hellos_are_remembered_as_are_said_to_be() {
        let mut heard = Heard::default();
        let nonce = |number: usize| (number as u128).to_le_bytes();
        assert!((0..=REMEMBERED).all(|number| heard.is_new(nonce(number))));
        assert!((1..=REMEMBERED).all(|number| !heard.is_new(nonce(number))));
        assert!(heard.is_new(nonce(0)), "the oldest is forgotten");
        assert_eq!((heard.nonces.len(), heard.order.len()), (REMEMBERED, REMEMBERED));
    }

    /// The listener drops a connection in the middle of the handshake: the caller comes again, whether it waits or not.
    #[test]
    fn handshakes_that_end_early_are_tried_again() {
        let identity = Identity::new("job", Some([7; 32]));
        let (listener, admitted) = listener(identity.clone());
        let address = listener.address().unwrap();
        // Between the two, a relay that ends the first three connections.
        let between = StdListener::bind("127.0.0.1:0").unwrap();
        let target = between.local_addr().unwrap();
        std::thread::spawn(move || {
            for number in 0u32.. {
                let Ok((caller, _)) = between.accept() else { return };
                if number % 4 == 3 {
                    let listener = StdStream::connect(address).unwrap();
                    for (mut from, mut to) in [(caller.try_clone().unwrap(), listener.try_clone().unwrap()), (listener, caller)] {
                        std::thread::spawn(move || io::copy(&mut from, &mut to));
                    }
                }
            }
        });
        dial(target, &identity, &hello(), soon()).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());

        let mut poll = Poll::new().unwrap();
        let mut events = Events::with_capacity(8);
        let mut connector = Connector::new(Target::Network(target), hello());
        while connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none() {
            poll.poll(&mut events, connector.left()).unwrap();
        }
        assert_eq!(admitted.recv().unwrap(), hello());
    }

    /// A listener that is paused keeps no caller from doing other things, and lets it in when it goes on.
    #[test]
    fn a_connector_never_waits() {
        let identity = Identity::new("job", Some([7; 32]));
        let (go_on, paused) = mpsc::channel::<()>();
        let (send, admitted) = mpsc::channel();
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let host = move |hello: Hello, _: Stream| {
            let _ = paused.recv();
            let _ = send.send(hello);
        };
        let listener = Listener::open(Some(listener), None, identity.clone(), host).unwrap();
        dial(address, &identity, &hello(), soon()).unwrap();
        let mut poll = Poll::new().unwrap();
        let mut events = Events::with_capacity(8);
        let mut connector = Connector::new(Target::Network(address), hello());
        for _ in 0..100 {
            assert!(connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none());
            poll.poll(&mut events, Some(Duration::from_millis(1))).unwrap();
        }
        drop(go_on);
        while connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none() {
            poll.poll(&mut events, connector.left()).unwrap();
        }
        assert_eq!(admitted.iter().take(2).count(), 2);
        drop(listener);
    }

    #[test]
    fn what_happens_often_is_said_seldom() {
        let (mut said, start) = (None, Instant::now());
        let times = (0..1000).filter(|&i| is_due(&mut said, start + i * RETRY)).count();
        assert_eq!(times, (1000 * RETRY.as_millis() / SELDOM.as_millis()) as usize);
    }

    #[test]
    fn garbage_silence_and_crowds_do_not_keep_others_out() {
        let identity = Identity::new("job", None);
        let (listener, admitted) = listener(identity.clone());
        let address = listener.address().unwrap();
        let mut strangers = Vec::new();
        for i in 0..300u32 {
            let mut stranger = StdStream::connect(address).unwrap();
            if i % 2 == 0 {
                let _ = stranger.write_all(&[i as u8; 200]);
            }
            strangers.push(stranger);
        }
        // The silent ones are turned away after a second; until then there may be no place.
        let deadline = soon();
        while dial(address, &identity, &hello(), deadline).is_err() {
            assert!(Instant::now() < deadline, "strangers keep ranks out");
        }
        assert_eq!(admitted.recv().unwrap(), hello());
    }
}

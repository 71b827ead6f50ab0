//! Who is let in: the socket on which a process takes connections, and what a caller must prove before anything else of the
//! library sees it.
//!
//! A [`Door`] is one small thread that accepts and shakes hands, so that a caller never waits for a collective that the
//! process is busy with. Callers that do not speak the protocol, are too slow or too many are turned away and leave nothing
//! behind.

pub(crate) mod handshake;
pub mod stranger;

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use crate::sys::{LocalListener, LocalStream};
use crate::transport::tcp;
use handshake::{Acceptor, Hello, Identity, Medium, Purpose, Refusal};

/// How long a caller may take to shake hands.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many callers may shake hands at once, each of which takes a descriptor. When another comes, the one that has come least far
/// has to make room, and of those the one that has been there longest: whoever belongs here is done in a fraction of a millisecond,
/// and those who say nothing keep nobody out.
const PENDING: usize = 64;

/// How many callers are taken in before those who are in are heard again.
const AT_ONCE: usize = 16;

/// The longest question, and the longest answer.
const LONGEST_QUESTION: usize = 64 << 10;
const LONGEST_ANSWER: usize = 1 << 20;

/// How long before it is tried again to let in those who wait outside.
const RETRY: Duration = Duration::from_millis(20);

const WAKER: Token = Token(usize::MAX);
const TCP: Token = Token(usize::MAX - 1);
const LOCAL: Token = Token(usize::MAX - 2);

/// A connection whose other end has proved who it is.
pub(crate) enum Stream {
    Tcp(TcpStream),
    Local(LocalStream),
}

/// Whom a door serves.
pub(crate) trait Host: Send + 'static {
    /// Takes the connection of a caller who has proved who it is.
    fn admit(&mut self, hello: Hello, stream: Stream);

    /// What to say to a caller who has proved who it is and asks something. On the door's thread: it must not wait.
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
pub(crate) struct Door {
    address: Option<SocketAddr>,
    name: Option<String>,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Takes connections on `tcp` and on a name that only this host can reach, as many of them as are given, and passes those
    /// who share `identity` and ask for nothing wrong to `host`.
    pub(crate) fn open(
        tcp: Option<StdListener>,
        local: Option<(String, LocalListener)>,
        identity: Identity,
        host: impl Host,
    ) -> io::Result<Door> {
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
            next: 0,
            waiting: Waiting::Nobody,
            is_locals_turn: false,
            host,
        };
        let thread = std::thread::Builder::new().name("kolo-door".to_owned()).spawn(move || {
            if let Err(error) = porter.serve(&stopped) {
                tracing::error!(%error, "no more connections are accepted");
            }
        })?;
        Ok(Door { address, name, stop, waker, thread: Some(thread) })
    }

    /// Where the door is in the network.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// What the door is called on this host.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "the door cannot be closed");
            return;
        }
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic there has been printed, and there is nothing to mend.
            let _ = thread.join();
        }
    }
}

/// A random name for a door.
pub(crate) fn random_name() -> String {
    format!("kolo-{:032x}", u128::from_le_bytes(handshake::random()))
}

/// What the door's thread works on.
struct Porter<H> {
    poll: Poll,
    tcp: Option<TcpListener>,
    local: Option<LocalListener>,
    identity: Identity,
    /// Those who shake hands.
    callers: HashMap<usize, Caller>,
    next: usize,
    waiting: Waiting,
    /// Whether who comes from this host or who comes through the network is asked in first: neither keeps the other out.
    is_locals_turn: bool,
    host: H,
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
    stage: Stage,
    deadline: Instant,
}

/// How far a caller has come.
enum Stage {
    Shaking(Acceptor),
    /// It has proved who it is, and asks: the length of the question in 4 bytes, then the question, as far as they have come.
    Asking(Hello, Vec<u8>),
}

impl Caller {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Local(stream) => (&*stream).read(into),
        }
    }

    /// Says something; false if it does not fit. Replies are smaller than the buffer of a fresh socket: one that does not fit is
    /// to nobody that we know.
    fn say(&mut self, reply: &[u8]) -> bool {
        let written = match &mut self.stream {
            Stream::Tcp(stream) => stream.write(reply),
            Stream::Local(stream) => (&*stream).write(reply),
        };
        written.ok() == Some(reply.len())
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
            let now = Instant::now();
            self.callers.retain(|_, caller| caller.deadline > now);
            if self.waiting != Waiting::Nobody {
                self.waiting = self.accept();
            }
        }
        Ok(())
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
                    tracing::warn!(%error, "a caller could not be let in yet");
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
            if self.callers.len() >= PENDING && !self.make_room() {
                return Waiting::InVain;
            }
            let number = self.next;
            self.next = (self.next + 1) % (usize::MAX / 2);
            let registry = self.poll.registry();
            let (registered, medium) = match &mut stream {
                Stream::Tcp(stream) => (registry.register(stream, Token(number), Interest::READABLE), Medium::Network),
                Stream::Local(stream) => (registry.register(stream, Token(number), Interest::READABLE), Medium::Local),
            };
            if registered.is_ok() {
                let stage = Stage::Shaking(Acceptor::new(medium));
                let caller = Caller { stream, stage, deadline: Instant::now() + PATIENCE };
                self.callers.insert(number, caller);
                // It may have spoken already.
                self.listen(number);
            }
        }
        Waiting::Somebody
    }

    /// Turns away a caller; whether there is one that may be.
    fn make_room(&mut self) -> bool {
        let progress = |caller: &Caller| match &caller.stage {
            Stage::Shaking(acceptor) => Some((acceptor.has_introduced_himself(), caller.deadline)),
            Stage::Asking(..) => None,
        };
        let callers = self.callers.iter().filter_map(|(&number, caller)| Some((progress(caller)?, number)));
        let Some((_, number)) = callers.min() else { return false };
        self.callers.remove(&number);
        true
    }

    /// Hears what a caller says, as far as it has.
    fn listen(&mut self, number: usize) {
        let Some(caller) = self.callers.get_mut(&number) else { return };
        let stays = loop {
            // Not a byte is read beyond what is needed: the rest is for those to whom the stream is passed.
            let mut bytes = [0; handshake::LONGEST];
            let wanted = match &caller.stage {
                Stage::Shaking(acceptor) => acceptor.wanted(),
                Stage::Asking(_, heard) => match missing(heard) {
                    Some(missing) => missing.min(bytes.len()),
                    None => break false,
                },
            };
            let count = match caller.read(&mut bytes[..wanted]) {
                Ok(0) => break false,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => break error.kind() == io::ErrorKind::WouldBlock,
            };
            let answer = match &mut caller.stage {
                Stage::Shaking(acceptor) => acceptor.hear(&self.identity, &bytes[..count]),
                Stage::Asking(hello, heard) => {
                    heard.extend_from_slice(&bytes[..count]);
                    if missing(heard) == Some(0) {
                        let answer = self.host.answer(hello, &heard[PREFIX..]);
                        caller.say(&prefixed(&answer));
                        break false;
                    }
                    continue;
                }
            };
            if let Some(reply) = answer.reply
                && !caller.say(&reply)
            {
                break false;
            }
            match answer.outcome {
                None => {}
                Some(Err(refusal)) => {
                    tracing::debug!(?refusal, "a caller was turned away");
                    break false;
                }
                Some(Ok(hello)) if hello.purpose == Purpose::Ask => {
                    caller.stage = Stage::Asking(hello, Vec::new());
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

    fn pass_on(&mut self, hello: Hello, mut stream: Stream) {
        let registry = self.poll.registry();
        let released = match &mut stream {
            Stream::Tcp(stream) => registry.deregister(stream).and_then(|()| tcp::prepare(&*stream)),
            Stream::Local(stream) => registry.deregister(stream),
        };
        match released {
            Ok(()) => self.host.admit(hello, stream),
            Err(error) => tracing::warn!(%error, "a connection was lost"),
        }
    }
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

/// Why a door was not opened.
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

/// Calls at a door in the network.
pub(crate) fn dial(address: SocketAddr, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<TcpStream, DialError> {
    dial_within(address, identity, hello, Duration::MAX, deadline)
}

/// As [`dial`], where the system has only so much of the time to connect.
pub(crate) fn dial_within(
    address: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    connecting: Duration,
    deadline: Instant,
) -> Result<TcpStream, DialError> {
    let left = deadline.saturating_duration_since(Instant::now()).min(connecting).max(Duration::from_millis(1));
    let stream = std::net::TcpStream::connect_timeout(&address, left).map_err(DialError::Connect)?;
    stream.set_nodelay(true)?;
    handshake::introduce(&mut Until { stream: &stream, deadline }, identity, Medium::Network, hello)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nonblocking(true)?;
    let stream = TcpStream::from_std(stream);
    tcp::prepare(&stream)?;
    Ok(stream)
}

/// A stream whose reads and writes end with a deadline, however slowly the peer speaks.
struct Until<'a> {
    stream: &'a std::net::TcpStream,
    deadline: Instant,
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

/// Calls at a door of this host.
pub(crate) fn dial_local(name: &str, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<LocalStream, DialError> {
    let stream = connect_local(name, identity, deadline)?;
    handshake::introduce(&mut stream.until(deadline), identity, Medium::Local, hello)?;
    Ok(stream)
}

/// Connects to a name of this host, where another user may have taken the name of a rank that has ended.
fn connect_local(name: &str, identity: &Identity, deadline: Instant) -> Result<LocalStream, DialError> {
    let stream = LocalStream::connect(name, deadline).map_err(DialError::Connect)?;
    match identity.is_of_one_user() && !stream.is_of_this_user() {
        true => Err(DialError::Refused(Refusal::Foreign)),
        false => Ok(stream),
    }
}

/// Asks a question at a door in the network.
pub(crate) fn ask(
    address: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    question: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = std::net::TcpStream::connect_timeout(&address, left).map_err(DialError::Connect)?;
    stream.set_nodelay(true)?;
    converse(&mut Until { stream: &stream, deadline }, identity, Medium::Network, hello, question)
}

/// Asks a question at a door of this host.
pub(crate) fn ask_local(
    name: &str,
    identity: &Identity,
    hello: &Hello,
    question: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let stream = connect_local(name, identity, deadline)?;
    converse(&mut stream.until(deadline), identity, Medium::Local, hello, question)
}

fn converse(
    stream: &mut (impl Read + Write),
    identity: &Identity,
    medium: Medium,
    hello: &Hello,
    question: &[u8],
) -> Result<Vec<u8>, DialError> {
    handshake::introduce(stream, identity, medium, hello)?;
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

    fn door(identity: Identity) -> (Door, mpsc::Receiver<Hello>) {
        let (send, receive) = mpsc::channel();
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let door = Door::open(Some(listener), None, identity, move |hello: Hello, _: Stream| send.send(hello).unwrap()).unwrap();
        (door, receive)
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
        let (door, admitted) = door(identity.clone());
        dial(door.address().unwrap(), &identity, &hello(), soon()).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
    }

    #[test]
    fn who_does_not_is_told_why() {
        let (door, admitted) = door(Identity::new("job", Some([7; 32])));
        let dial = |identity| dial(door.address().unwrap(), &identity, &hello(), soon()).map(drop);
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
        let (door, admitted) = door(now.clone());
        let dial = |identity| dial(door.address().unwrap(), identity, &hello(), soon()).map(drop);
        assert!(matches!(dial(&earlier), Err(DialError::Refused(Refusal::Run))));
        dial(&now).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
        assert!(admitted.try_recv().is_err());
    }

    /// Who agreed on a secret through a store where others could write lets in no other user of the machine, whatever it knows.
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
            let _door = Door::open(None, Some(local), identity.clone(), move |hello: Hello, _: Stream| send.send(hello).unwrap());
            dial_local(&name, &identity, &hello(), soon()).unwrap();
            assert_eq!(admitted.recv().unwrap(), hello());
            let (another, stranger) = (name.clone(), identity.clone());
            let called = std::thread::spawn(move || {
                // Of this thread only: the system keeps users for each, and only the C library makes them one.
                // SAFETY: numbers; nothing of this thread needs root.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
                dial_local(&another, &stranger, &hello(), soon()).is_ok()
            });
            assert_eq!(called.join().unwrap(), is_let_in, "agreed: {is_agreed}");
            assert_eq!(admitted.try_recv().is_ok(), is_let_in);
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
        let door = Door::open(Some(listener), None, identity.clone(), Echo).unwrap();
        let ask = |identity: &Identity, question: &[u8]| {
            ask(door.address().unwrap(), identity, &Hello::new(Purpose::Ask, 77, 3, 0), question, soon())
        };
        for len in [0, 1, 63, 64, 5000, LONGEST_QUESTION] {
            let question: Vec<u8> = (0..len).map(|i| i as u8).collect();
            assert_eq!(ask(&identity, &question).unwrap(), question.repeat(2));
        }
        assert!(matches!(ask(&identity, &[0; LONGEST_QUESTION + 1]), Err(DialError::Io(_))));
        let stranger = Identity::new("job", Some([8; 32]));
        assert!(matches!(ask(&stranger, b"?"), Err(DialError::Refused(Refusal::Secret))));
    }

    #[test]
    fn garbage_silence_and_crowds_do_not_keep_others_out() {
        let identity = Identity::new("job", None);
        let (door, admitted) = door(identity.clone());
        let address = door.address().unwrap();
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

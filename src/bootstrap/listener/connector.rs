//! Connects to a listener: the system connects, then the two ends shake hands, and what ends early is tried again.
//!
//! Nothing here waits. So an engine makes connections beside its operations, whose deadlines and ends hold meanwhile.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use super::handshake::{Hello, Identity, Introduction, LONGEST, Medium, Step};
use super::{DialError, Stream};
use crate::sys;

/// How long the system may take to connect before it is tried anew, at first and at most. The system itself repeats what was lost
/// on the way after a second, then seldom.
const FIRST_PATIENCE: Duration = Duration::from_millis(300);
const MOST_PATIENCE: Duration = Duration::from_secs(5);

/// How long after a failed attempt the next begins, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MOST_PAUSE: Duration = Duration::from_millis(200);

/// Where a process listens.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Network(SocketAddr),
    /// A name that only processes of its host can reach.
    Local(String),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Network(address) => write!(f, "{address}"),
            Target::Local(name) => write!(f, "@{name}"),
        }
    }
}

/// Makes one connection, in as many attempts as that takes.
pub(crate) struct Connector {
    target: Target,
    hello: Hello,
    attempt: Option<Connecting>,
    /// When an attempt that has not connected is given up; without one, when the next begins.
    next: Instant,
    patience: Duration,
    pause: Duration,
}

impl Connector {
    pub(crate) fn new(target: Target, hello: Hello) -> Connector {
        let next = Instant::now();
        Connector { target, hello, attempt: None, next, patience: FIRST_PATIENCE, pause: FIRST_PAUSE }
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn is_local(&self) -> bool {
        matches!(self.target, Target::Local(_))
    }

    /// Goes on as far as it can now: returns the connection once the listener has let this process in. `None` means that there is
    /// nothing to do until `token` is woken, or until [`Connector::left`] has passed. Fails with what another attempt cannot mend.
    pub(crate) fn advance(
        &mut self,
        identity: &Identity,
        registry: &Registry,
        token: Token,
    ) -> Result<Option<Stream>, DialError> {
        loop {
            let now = Instant::now();
            let Some(attempt) = &mut self.attempt else {
                if now < self.next {
                    return Ok(None);
                }
                match Connecting::begin(&self.target, identity, &self.hello, registry, token) {
                    Ok(attempt) => (self.attempt, self.next) = (Some(attempt), now + self.patience),
                    Err(error) => self.try_again_after(error)?,
                }
                continue;
            };
            match attempt.advance() {
                Ok(true) => {
                    let attempt = self.attempt.take().expect("it is under way");
                    return Ok(Some(attempt.stream.release(registry)?));
                }
                Ok(false) if !attempt.is_connected && now >= self.next => {
                    self.attempt = None;
                    self.patience = (2 * self.patience).min(MOST_PATIENCE);
                }
                Ok(false) => return Ok(None),
                Err(error) => self.try_again_after(error)?,
            }
        }
    }

    /// How long until [`Connector::advance`] has something to do, though nothing wakes the token.
    pub(crate) fn left(&self) -> Option<Duration> {
        // A listener that is paused takes what is said when it goes on.
        let waits_for_listener = self.attempt.as_ref().is_some_and(|attempt| attempt.is_connected);
        (!waits_for_listener).then(|| self.next.saturating_duration_since(Instant::now()))
    }

    fn try_again_after(&mut self, error: DialError) -> Result<(), DialError> {
        self.attempt = None;
        if !may_pass(&error) {
            return Err(error);
        }
        tracing::debug!(?error, target = ?self.target, "a connection is tried again");
        self.next = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(MOST_PAUSE);
        Ok(())
    }
}

/// Whether the next attempt may fare better. A process that has ended ends the one under way, and refuses the next.
pub(super) fn may_pass(error: &DialError) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut, UnexpectedEof,
    };
    match error {
        DialError::Connect(error) | DialError::Io(error) if sys::is_want(error) => false,
        DialError::Connect(error) => matches!(
            error.kind(),
            TimedOut | ConnectionReset | ConnectionAborted | HostUnreachable | NetworkUnreachable | NetworkDown
        ),
        // The listener made room, or gave up on a process that had been paused.
        DialError::Io(error) => {
            matches!(error.kind(), ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof | TimedOut)
        }
        DialError::Refused(_) => false,
    }
}

/// One attempt.
struct Connecting {
    stream: Stream,
    introduction: Introduction,
    is_connected: bool,
    /// What this end has still to say.
    unsaid: Vec<u8>,
}

impl Connecting {
    fn begin(
        target: &Target,
        identity: &Identity,
        hello: &Hello,
        registry: &Registry,
        token: Token,
    ) -> Result<Connecting, DialError> {
        let (mut stream, medium) = match target {
            Target::Network(address) => (Stream::Tcp(TcpStream::connect(*address).map_err(DialError::Connect)?), Medium::Network),
            // When the listener's queue is full, this does not wait until it is not.
            Target::Local(name) => (Stream::Local(super::connect_local(name, identity, Instant::now())?), Medium::Local),
        };
        registry.register(stream.source(), token, Interest::READABLE | Interest::WRITABLE)?;
        let introduction = Introduction::new(identity, medium, hello);
        let unsaid = introduction.hello().to_vec();
        Ok(Connecting { stream, introduction, is_connected: false, unsaid })
    }

    /// Whether the listener has let this process in.
    fn advance(&mut self) -> Result<bool, DialError> {
        self.is_connected = self.is_connected || self.connects()?;
        while self.is_connected {
            let result = match &self.unsaid[..] {
                [] => self.hear()?,
                unsaid => self.stream.write(unsaid).map(|count| {
                    self.unsaid.drain(..count);
                    false
                }),
            };
            match result {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Hears what the listener says, as far as it has; whether that is that it lets this process in.
    fn hear(&mut self) -> Result<io::Result<bool>, DialError> {
        // Not a byte is read beyond what is needed: the rest is for those to whom the stream is passed.
        let mut bytes = [0; LONGEST];
        let count = match self.stream.read(&mut bytes[..self.introduction.wanted()]) {
            Ok(0) => return Ok(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => count,
            Err(error) => return Ok(Err(error)),
        };
        match self.introduction.hear(&bytes[..count]) {
            Step::Hear => {}
            Step::Say(message) => self.unsaid = message,
            Step::Done(outcome) => return outcome.map(|()| Ok(true)).map_err(DialError::Refused),
        }
        Ok(Ok(false))
    }

    /// Whether the system has connected.
    fn connects(&self) -> Result<bool, DialError> {
        let Stream::Tcp(stream) = &self.stream else { return Ok(true) };
        if let Some(error) = stream.take_error()? {
            return Err(DialError::Connect(error));
        }
        match stream.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            Err(error) => return Err(DialError::Connect(error)),
        }
        stream.set_nodelay(true)?;
        Ok(true)
    }
}

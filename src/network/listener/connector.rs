//! Connects to a listener without waiting, so that an engine can connect while its operations go
//! on.
//!
//! The system connects, then the two ends shake hands. An attempt that ends early is repeated.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};

use super::dial::{DialError, connect_local};
use super::handshake::{Hello, Initiator, LONGEST, Step};
use super::stream::Stream;
use crate::config::CongestionControl;
use crate::network::identity::{Identity, Medium};
use crate::sys;
use crate::timeouts::{FIRST_CONNECT, FIRST_CONNECT_PAUSE, LONGEST_CONNECT, LONGEST_CONNECT_PAUSE};
use crate::transport::congestion;

/// Where a process listens.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Network(SocketAddr),
    /// In the network, reached from one of this machine's addresses.
    Rail {
        from: IpAddr,
        to: SocketAddr,
    },
    /// A name that only processes of its host can reach.
    Local(String),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Network(address) => write!(f, "{address}"),
            Target::Rail { from, to } => write!(f, "{to} (from {from})"),
            Target::Local(name) => write!(f, "@{name}"),
        }
    }
}

/// Makes one connection, in as many attempts as needed.
pub(crate) struct Connector {
    target: Target,
    hello: Hello,
    /// Set until the round trip has decided how many lanes the link has.
    undecided: Option<CongestionControl>,
    attempt: Option<Connecting>,
    /// When the current attempt is given up unless it has connected. Without an attempt, when the
    /// next one begins.
    next: Instant,
    patience: Duration,
    pause: Duration,
}

impl Connector {
    pub(crate) fn new(target: Target, hello: Hello) -> Connector {
        let next = Instant::now();
        Connector { target, hello, undecided: None, attempt: None, next, patience: FIRST_CONNECT, pause: FIRST_CONNECT_PAUSE }
    }

    /// Has the round trip decide how many lanes the link has, once this connection, the first of them,
    /// exists and has this congestion control.
    pub(crate) fn with_lanes_by_round_trip(mut self, congestion_control: CongestionControl) -> Connector {
        self.undecided = Some(congestion_control);
        self
    }

    /// Returns how many lanes the link has.
    pub(crate) fn lanes(&self) -> u8 {
        self.hello.lanes
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn is_local(&self) -> bool {
        matches!(self.target, Target::Local(_))
    }

    /// Advances as far as possible without waiting. Returns the connection once the listener has
    /// admitted this process, and `None` if there is nothing to do until `token` is woken or
    /// [`Connector::left`] has passed.
    ///
    /// # Errors
    ///
    /// An error that another attempt cannot mend.
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
            let advanced = attempt.connects().and_then(|is_connected| {
                if is_connected && let Some(control) = self.undecided.take() {
                    self.hello.lanes = attempt.lanes(&control);
                    attempt.greet(identity, &self.hello);
                }
                attempt.advance()
            });
            match advanced {
                Ok(true) => {
                    let attempt = self.attempt.take().expect("the attempt exists: it has just advanced");
                    return Ok(Some(attempt.stream.release(registry)?));
                }
                Ok(false) if !attempt.is_connected && now >= self.next => {
                    self.attempt = None;
                    self.patience = (2 * self.patience).min(LONGEST_CONNECT);
                }
                Ok(false) => return Ok(None),
                Err(error) => self.try_again_after(error)?,
            }
        }
    }

    /// Returns how long until [`Connector::advance`] has something to do even if nothing wakes the
    /// token.
    pub(crate) fn left(&self) -> Option<Duration> {
        // A paused listener reads the hello when it continues.
        let waits_for_listener = self.attempt.as_ref().is_some_and(|attempt| attempt.is_connected);
        (!waits_for_listener).then(|| self.next.saturating_duration_since(Instant::now()))
    }

    fn try_again_after(&mut self, error: DialError) -> Result<(), DialError> {
        self.attempt = None;
        if !error.is_transient() {
            return Err(error);
        }
        crate::log::debug!(?error, target = ?self.target, "cannot connect; trying again");
        self.next = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(LONGEST_CONNECT_PAUSE);
        Ok(())
    }
}

/// One attempt.
struct Connecting {
    stream: Stream,
    initiator: Initiator,
    is_connected: bool,
    /// Bytes that this end has still to send.
    unsent: Vec<u8>,
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
            Target::Network(address) => {
                let stream = sys::connect(*address).map_err(DialError::Connect)?;
                (Stream::Tcp(sys::TcpStream::from_std(stream)), Medium::Network)
            }
            Target::Rail { from, to } => {
                let stream = sys::connect_from(*from, *to).map_err(DialError::Connect)?;
                (Stream::Tcp(sys::TcpStream::from_std(stream)), Medium::Network)
            }
            // If the listener's queue is full, this fails at once.
            Target::Local(name) => (Stream::Local(connect_local(name, identity, Instant::now())?), Medium::Local),
        };
        registry.register(stream.source(), token, Interest::READABLE | Interest::WRITABLE)?;
        let initiator = Initiator::new(identity, medium, hello);
        let unsent = initiator.hello().to_vec();
        Ok(Connecting { stream, initiator, is_connected: false, unsent })
    }

    /// Begins with another hello. Nothing has been sent yet.
    fn greet(&mut self, identity: &Identity, hello: &Hello) {
        self.initiator = Initiator::new(identity, Medium::Network, hello);
        self.unsent = self.initiator.hello().to_vec();
    }

    /// Returns how many lanes the link has, by its round trip. The system has connected.
    fn lanes(&self, control: &CongestionControl) -> u8 {
        let Stream::Tcp(stream) = &self.stream else { return 1 };
        congestion::control(stream, control);
        congestion::lanes(stream)
    }

    /// Advances the attempt; returns whether the listener has admitted this process.
    fn advance(&mut self) -> Result<bool, DialError> {
        while self.is_connected {
            let result = match &self.unsent[..] {
                [] => self.receive()?,
                unsent => self.stream.write(unsent).map(|count| {
                    self.unsent.drain(..count);
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

    /// Reads what the listener has sent; returns whether it admits this process.
    fn receive(&mut self) -> Result<io::Result<bool>, DialError> {
        // Not a byte is read beyond the handshake: the rest belongs to the owner of the stream.
        let mut bytes = [0; LONGEST];
        let count = match self.stream.read(&mut bytes[..self.initiator.wanted()]) {
            Ok(0) => return Ok(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => count,
            Err(error) => return Ok(Err(error)),
        };
        match self.initiator.receive(&bytes[..count]) {
            Step::Receive => {}
            Step::Send(message) => self.unsent = message,
            Step::Done(outcome) => return outcome.map(|()| Ok(true)).map_err(DialError::Refused),
        }
        Ok(Ok(false))
    }

    /// Finds out whether the system has connected, and sets the socket up if so.
    fn connects(&mut self) -> Result<bool, DialError> {
        self.is_connected = self.is_connected || self.has_connected()?;
        Ok(self.is_connected)
    }

    fn has_connected(&self) -> Result<bool, DialError> {
        let Stream::Tcp(stream) = &self.stream else { return Ok(true) };
        if let Some(error) = stream.take_error()? {
            return Err(DialError::Connect(error));
        }
        match stream.peer_addr() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            Err(error) => return Err(DialError::Connect(error)),
        }
        stream.set_nodelay(true).map_err(sys::naming("setsockopt"))?;
        Ok(true)
    }
}

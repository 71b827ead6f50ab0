//! Connects to a listener and waits until it admits this process. A [`super::Connector`] does so
//! without waiting.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::handshake::{Hello, Initiator, LONGEST, Refusal, Step};
use super::query::exchange;
use super::stream::Until;
use crate::network::identity::{Identity, Medium};
use crate::sys::{self, Guarded, LocalStream, TcpStream};
use crate::timeouts::HANDSHAKE_PAUSE;
use crate::transport::tcp;

/// Why a listener did not admit this process.
#[derive(Debug)]
pub(crate) enum DialError {
    /// There is no connection.
    Connect(io::Error),
    /// The connection was made, and then ended or stayed silent.
    Io(io::Error),
    Refused(Refusal),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> DialError {
        DialError::Io(error)
    }
}

impl DialError {
    /// Returns whether the next attempt may succeed. A process that has ended closes the connection
    /// of the current attempt and refuses the next.
    pub(super) fn is_transient(&self) -> bool {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut,
            UnexpectedEof,
        };
        match self {
            DialError::Connect(error) | DialError::Io(error) if sys::is_resource_shortage(error) => false,
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
}

/// Connects to a listener in the network. The stream is fit for a link and does not block.
pub(crate) fn dial(address: SocketAddr, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<TcpStream, DialError> {
    let stream = connect(address, identity, hello, deadline)?;
    stream.set_read_timeout(None).map_err(sys::naming("setsockopt"))?;
    stream.set_write_timeout(None).map_err(sys::naming("setsockopt"))?;
    stream.set_nonblocking(true)?;
    let stream = stream.map(mio::net::TcpStream::from_std);
    tcp::prepare(&stream)?;
    Ok(stream)
}

/// Connects to a listener of this host.
pub(crate) fn dial_local(name: &str, identity: &Identity, hello: &Hello, deadline: Instant) -> Result<LocalStream, DialError> {
    retry(deadline, || {
        let stream = connect_local(name, identity, deadline)?;
        shake_hands(&mut stream.until(deadline), identity, Medium::Local, hello)?;
        Ok(stream)
    })
}

/// Sends a query to a listener in the network, and returns the reply.
pub(crate) fn query(
    address: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    query: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let stream = connect(address, identity, hello, deadline)?;
    Ok(exchange(&mut Until { stream: &stream, deadline }, query)?)
}

/// Sends a query to a listener of this host, and returns the reply.
pub(crate) fn query_local(
    name: &str,
    identity: &Identity,
    hello: &Hello,
    query: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, DialError> {
    let stream = dial_local(name, identity, hello, deadline)?;
    Ok(exchange(&mut stream.until(deadline), query)?)
}

fn connect(
    address: SocketAddr,
    identity: &Identity,
    hello: &Hello,
    deadline: Instant,
) -> Result<Guarded<std::net::TcpStream>, DialError> {
    retry(deadline, || {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = sys::connect_within(address, left).map_err(DialError::Connect)?;
        stream.set_nodelay(true).map_err(sys::naming("setsockopt"))?;
        shake_hands(&mut Until { stream: &stream, deadline }, identity, Medium::Network, hello)?;
        Ok(stream)
    })
}

/// Connects to a name of this host. Another user may have taken the name of a rank that has ended,
/// so the owner is checked.
pub(super) fn connect_local(name: &str, identity: &Identity, deadline: Instant) -> Result<LocalStream, DialError> {
    let stream = LocalStream::connect(name, deadline).map_err(DialError::Connect)?;
    match identity.is_of_one_user() && !stream.is_of_this_user() {
        true => Err(DialError::Refused(Refusal::Foreign)),
        false => Ok(stream),
    }
}

/// Repeats a handshake that the listener ends early to make room for other connections, until the
/// deadline.
fn retry<T>(deadline: Instant, mut attempt: impl FnMut() -> Result<T, DialError>) -> Result<T, DialError> {
    loop {
        match attempt() {
            Err(error @ DialError::Io(_)) if error.is_transient() => {
                if Instant::now() + HANDSHAKE_PAUSE >= deadline {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                std::thread::sleep(HANDSHAKE_PAUSE);
            }
            result => return result,
        }
    }
}

/// Runs the initiator's side of the handshake on a stream whose calls wait.
pub(super) fn shake_hands(
    stream: &mut (impl Read + Write),
    identity: &Identity,
    medium: Medium,
    hello: &Hello,
) -> Result<(), DialError> {
    let mut initiator = Initiator::new(identity, medium, hello);
    stream.write_all(initiator.hello())?;
    loop {
        let mut bytes = [0; LONGEST];
        let bytes = &mut bytes[..initiator.wanted()];
        stream.read_exact(bytes)?;
        match initiator.receive(bytes) {
            Step::Receive => {}
            Step::Send(message) => stream.write_all(&message)?,
            Step::Done(outcome) => return outcome.map_err(DialError::Refused),
        }
    }
}

/// Feeds an initiator the answers of a listener without the secret: the initiator must not trust
/// it.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_initiator(answers: &[u8]) {
    struct Answers<'a>(&'a [u8]);
    impl Read for Answers<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }
    impl Write for Answers<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let identity = Identity::new("job", Some([1; 32]));
    let hello = Hello::new(super::handshake::Purpose::Link, 1, 1, 0);
    let outcome = shake_hands(&mut Answers(answers), &identity, Medium::Network, &hello);
    assert!(outcome.is_err(), "the initiator trusts a stranger's listener");
}

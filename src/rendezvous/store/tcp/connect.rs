//! Connects to a server of the store.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::network::identity::Identity;
use crate::network::listener::handshake::{self, Hello, Purpose, Refusal};
use crate::network::listener::{self, DialError};
use crate::sys::{self, Guarded};

/// Why an attempt to connect failed.
pub(super) enum ConnectError {
    /// There is no server yet.
    Transient(io::Error),
    /// Another attempt would fail, too.
    Permanent(StoreError),
    /// The system refuses this process a call: it reaches no server at all.
    Own(StoreError),
}

/// Returns where ranks listen. Without a secret, an address of this machine becomes one that only
/// this machine can reach.
pub(super) fn listening(address: SocketAddr, identity: &Identity) -> SocketAddr {
    if identity.may_listen() { address } else { SocketAddr::new(sys::own_loopback(address.ip()), address.port()) }
}

/// Connects to a server of this job, and shakes hands.
pub(super) fn connect(address: SocketAddr, identity: &Identity, deadline: Instant) -> Result<Guarded<TcpStream>, ConnectError> {
    let address = listening(address, identity);
    if !address.ip().is_loopback() && !identity.may_listen() {
        return Err(ConnectError::Permanent(StoreError::NoSecret));
    }
    let hello = Hello::new(Purpose::Store, 0, 0, 0);
    let deadline = deadline.min(Instant::now() + Duration::from_secs(2));
    let stream = listener::dial(address, identity, &hello, deadline).map_err(|error| match error {
        DialError::Connect(error) | DialError::Io(error) if sys::is_refused(&error) => {
            ConnectError::Own(StoreError::io("connecting to it")(error))
        }
        DialError::Connect(error) | DialError::Io(error) => ConnectError::Transient(error),
        DialError::Refused(Refusal::Job { theirs }) => {
            ConnectError::Permanent(StoreError::OtherJob { theirs: theirs.unwrap_or_default(), mine: identity.job().to_owned() })
        }
        DialError::Refused(Refusal::Run) => {
            ConnectError::Permanent(StoreError::Foreign(format!("a rank of a job answers at {address}")))
        }
        DialError::Refused(Refusal::Secret) => ConnectError::Permanent(StoreError::Secret),
        DialError::Refused(Refusal::Foreign) => {
            ConnectError::Permanent(StoreError::Foreign(format!("another program answers at {address}")))
        }
        DialError::Refused(Refusal::Version { theirs }) => {
            ConnectError::Permanent(StoreError::Version { theirs: theirs.into(), mine: handshake::VERSION.into() })
        }
    })?;
    blocking(stream).map_err(ConnectError::Transient)
}

/// Makes the calls of a stream wait.
fn blocking(stream: sys::TcpStream) -> io::Result<Guarded<TcpStream>> {
    let stream = stream.map(TcpStream::from);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

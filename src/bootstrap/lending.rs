//! How a process maps a segment of another one: it calls at that one's local listener, whose thread hands the descriptor over,
//! whatever the owner is busy with.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::network::Network;
use crate::bootstrap::host_group::Lender;
use crate::bootstrap::listener::handshake::Purpose;
use crate::bootstrap::listener::{self, DialError, Stream};
use crate::sys::Segment;
use crate::transport::memory::Hub;
use crate::types::Rank;

/// The segments that the other ranks of this host may map, by number.
#[derive(Default)]
pub(super) struct Lent(Mutex<HashMap<u32, Arc<Segment>>>);

impl Lent {
    /// Hands a segment over. A caller for one that is not lent finds the connection closed.
    pub(super) fn hand_over(&self, id: u64, stream: &Stream) {
        let segment = u32::try_from(id).ok().and_then(|id| self.0.lock().get(&id).cloned());
        if let (Some(segment), Stream::Local(stream)) = (segment, stream) {
            // The connection is new: its buffer has room for both.
            let len = (segment.len() as u64).to_le_bytes();
            let sent = (&mut &*stream).write_all(&len).and_then(|()| segment.hand_over(stream));
            if let Err(error) = sent {
                tracing::debug!(%error, "a segment was not handed over");
            }
        }
    }
}

/// How the processes of a job lend each other segments.
pub(super) struct NetworkLender {
    pub(super) network: Arc<Network>,
}

/// How long before a rank calls again whose call was cut short.
const AGAIN: Duration = Duration::from_millis(1);

impl NetworkLender {
    fn call(&self, owner: Rank, id: u32, deadline: Instant) -> Result<Arc<Segment>, DialError> {
        let (name, identity, hello) = self.network.local(Purpose::Segment, id.into(), owner);
        let stream = listener::dial_local(name, identity, &hello, deadline)?;
        let not_lent = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::ErrorKind::NotFound.into(),
            _ => error,
        };
        let mut len = [0; 8];
        stream.until(deadline).read_exact(&mut len).map_err(not_lent)?;
        let len = usize::try_from(u64::from_le_bytes(len)).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Arc::new(Segment::take_over(&stream, len, deadline)?))
    }
}

impl Lender for NetworkLender {
    fn lend(&self, id: u32, segment: &Arc<Segment>) {
        self.network.lent().0.lock().insert(id, segment.clone());
    }

    fn withdraw(&self, id: u32) {
        self.network.lent().0.lock().remove(&id);
    }

    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Segment>> {
        loop {
            let error = match self.call(owner, id, deadline) {
                Ok(segment) => return Ok(segment),
                Err(DialError::Connect(error)) => return Err(error),
                Err(DialError::Io(error)) => error,
                Err(DialError::Refused(refusal)) => {
                    tracing::warn!(?refusal, owner, "a rank of this host refuses a segment");
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
            };
            // A listener that is short of room cuts handshakes short.
            let is_cut = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset);
            if !is_cut || Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn process(&self, rank: Rank) -> Option<u32> {
        let peers = &self.network.peers;
        peers[self.network.rank].sees(&peers[rank])
    }
}

/// How the ranks of one process do.
pub(super) struct ProcessLender {
    pub(super) hub: Arc<Hub>,
    pub(super) rank: Rank,
}

impl Lender for ProcessLender {
    fn lend(&self, id: u32, segment: &Arc<Segment>) {
        self.hub.lend((self.rank, id), segment.clone());
    }

    fn withdraw(&self, id: u32) {
        self.hub.withdraw((self.rank, id));
    }

    fn fetch(&self, owner: Rank, id: u32, _: Instant) -> io::Result<Arc<Segment>> {
        self.hub.lent((owner, id)).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn process(&self, _: Rank) -> Option<u32> {
        None
    }
}

//! How a process maps a shared-memory region of another: it connects to that one's local listener,
//! whose thread hands the descriptor over, whatever operation the owner is in.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Instant;

use super::process::Network;
use crate::host_group::RegionExchange;
use crate::network::listener::handshake::Purpose;
use crate::network::listener::{self, DialError};
use crate::sys::{Process, Region};
use crate::timeouts::REGION_PAUSE;
use crate::types::Rank;

/// Exports regions between processes.
pub(crate) struct NetworkRegions {
    pub(crate) network: Arc<Network>,
}

impl NetworkRegions {
    fn fetch_once(&self, owner: Rank, id: u32, deadline: Instant) -> Result<Arc<Region>, DialError> {
        let (name, identity, hello) = self.network.local(Purpose::Region, id.into(), owner);
        let stream = listener::dial_local(name, identity, &hello, deadline)?;
        let not_exported = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::ErrorKind::NotFound.into(),
            _ => error,
        };
        let mut len = [0; 8];
        stream.until(deadline).read_exact(&mut len).map_err(not_exported)?;
        let len = usize::try_from(u64::from_le_bytes(len)).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Arc::new(Region::take_over(&stream, len, deadline)?))
    }
}

impl RegionExchange for NetworkRegions {
    fn export(&self, id: u32, region: &Arc<Region>) {
        self.network.exported().insert(id, region.clone());
    }

    fn withdraw(&self, id: u32) {
        self.network.exported().remove(id);
    }

    fn fetch(&self, owner: Rank, id: u32, deadline: Instant) -> io::Result<Arc<Region>> {
        loop {
            let error = match self.fetch_once(owner, id, deadline) {
                Ok(region) => return Ok(region),
                Err(DialError::Connect(error)) => return Err(error),
                Err(DialError::Io(error)) => error,
                Err(DialError::Refused(refusal)) => {
                    crate::log::warn!(?refusal, owner, "a rank of this host refuses to hand over shared memory");
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
            };
            // A listener that needs room for other connections cuts handshakes short.
            let is_cut = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset);
            if !is_cut || Instant::now() >= deadline {
                return Err(error);
            }
            std::thread::sleep(REGION_PAUSE);
        }
    }

    fn process(&self, rank: Rank) -> Option<Process> {
        self.network.visible_process(rank)
    }
}

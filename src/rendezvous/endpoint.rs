//! Where a rank listens to the others, and what it publishes about that.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::start::Start;
use super::store::StoreUrl;
use crate::config::{ports_text, process_env};
use crate::error::{Error, Result};
use crate::failure::StatusBoard;
use crate::network::address;
use crate::network::identity::{Identity, random_number};
use crate::network::listener::{self, Listener};
use crate::network::peer_info::{self, PeerInfo};
use crate::network::topology;
use crate::network::{Dispatcher, Mailbox};
use crate::sys::{self, LocalListener, Process};

/// A rank's sockets for one run, the connections that came in through them, and what peers may
/// learn of the rank there.
pub(super) struct Endpoint {
    pub(super) listener: Listener,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) board: Arc<StatusBoard>,
}

impl Endpoint {
    /// Listens to the ranks of a run, at an address of this machine and at a name that only this
    /// host can reach.
    pub(super) fn open(start: &Start<'_>, ip: IpAddr, identity: &Identity) -> Result<Endpoint> {
        // If only this machine can reach the store, all ranks are on it.
        let is_store_local = matches!(start.store_url, Some(StoreUrl::Tcp { .. })) && !start.identity.may_listen();
        let ips = match &start.settings.rails {
            _ if is_store_local => vec![sys::own_loopback(ip)],
            Some(rails) => address::rails(rails)?.into_iter().map(|chosen| chosen.ip).collect(),
            None => vec![ip],
        };
        let ports = start.settings.ports.as_ref();
        let tcp = ips.into_iter().map(|ip| listen(ip, ports)).collect::<Result<Vec<_>>>()?;
        let name = listener::random_name();
        let local = match LocalListener::bind(&name) {
            Ok(listener) => Some((name, listener)),
            Err(error) => {
                crate::log::debug!(%error, "cannot listen inside the host; this rank shares no memory");
                None
            }
        };
        let (mailbox, board) = (Arc::new(Mailbox::default()), Arc::new(StatusBoard::default()));
        let dispatcher = Dispatcher { rank: start.rank, world: start.world_size, mailbox: mailbox.clone(), board: board.clone() };
        let listener = Listener::open(tcp, local, identity.clone(), dispatcher).map_err(Error::os("opening the listener"))?;
        Ok(Endpoint { listener, mailbox, board })
    }

    /// Returns what this rank publishes about itself.
    pub(super) fn peer(&self, start: &Start<'_>) -> Result<PeerInfo> {
        let address = self.listener.address();
        let address =
            address.ok_or_else(|| Error::Unsupported { what: "a network", why: "the listener has no address".to_owned() })?;
        let local_name = self.listener.name().unwrap_or_default().to_owned();
        let machine = sys::boot_identity().filter(|_| !local_name.is_empty());
        let Process { id, created } = Process::own();
        let declared = start.settings.host.as_deref().unwrap_or_default();
        Ok(PeerInfo {
            version: peer_info::version(),
            rank: start.rank,
            world_size: start.world_size,
            instance: random_number(),
            host: start.host(),
            pid: id,
            created,
            pid_namespace: sys::process_namespace().unwrap_or(0),
            machine: machine.map_or_else(String::new, |identity| format!("{identity} {declared}")),
            address,
            local_name,
            more_rails: self.listener.addresses()[1..].to_vec(),
            encrypts: start.settings.tls.is_some(),
            has_cuda: cfg!(feature = "cuda"),
            topology: topology::position(start.settings.topology.clone(), &process_env)
                .map_or_else(String::new, |position| position.path),
        })
    }
}

/// Listens at a free port of a range, or at one of the system's choice.
fn listen(ip: IpAddr, ports: Option<&RangeInclusive<u16>>) -> Result<TcpListener> {
    let listener = match ports {
        None => sys::listen_anywhere(ip),
        Some(ports) => sys::listen_within(ip, ports),
    };
    listener.map_err(|error| match ports {
        Some(ports) if error.kind() == io::ErrorKind::AddrInUse => {
            let expected = format!(
                "a range with a free port at {ip}, where all {} are taken; every rank of a host needs one, and the store one more",
                ports.len()
            );
            Error::setting("KOLO_PORTS", ports_text(ports), expected)
        }
        _ => Error::os(format!("listening at {ip}"))(error),
    })
}

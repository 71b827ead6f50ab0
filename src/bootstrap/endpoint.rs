//! Where a rank listens to the others, and what it tells them of that.

use std::net::{IpAddr, TcpListener};
use std::sync::Arc;

use super::Start;
use super::network::{Mailbox, Reception};
use super::peer_info::{self, Card};
use crate::bootstrap::listener::handshake::{Identity, random};
use crate::bootstrap::listener::{self, Door};
use crate::bootstrap::store::Place;
use crate::error::{Error, Result};
use crate::failure::StatusBoard;
use crate::sys::{self, LocalListener};

/// A rank's sockets for one run, what came in through them, and what the others read of this rank there.
pub(super) struct Listener {
    pub(super) door: Door,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) board: Arc<StatusBoard>,
}

impl Listener {
    /// Listens to the ranks of a run, at an address of this machine and at a name that only this host reaches.
    pub(super) fn open(start: &Start<'_>, ip: IpAddr, identity: &Identity) -> Result<Listener> {
        // If only this machine reaches the store, all ranks are on it.
        let is_store_local = matches!(start.place, Some(Place::Tcp { .. })) && !start.identity.may_listen();
        let ip = if is_store_local { sys::own_loopback(ip) } else { ip };
        let tcp = TcpListener::bind((ip, 0)).map_err(Error::os(format!("listening at {ip}")))?;
        let name = listener::random_name();
        let local = match LocalListener::bind(&name) {
            Ok(listener) => Some((name, listener)),
            Err(error) => {
                tracing::debug!(%error, "this rank cannot share memory with others");
                None
            }
        };
        let (mailbox, board) = (Arc::new(Mailbox::default()), Arc::new(StatusBoard::default()));
        let reception = Reception { rank: start.rank, world: start.world_size, mailbox: mailbox.clone(), board: board.clone() };
        let door = Door::open(Some(tcp), local, identity.clone(), reception).map_err(Error::os("opening the listener"))?;
        Ok(Listener { door, mailbox, board })
    }

    /// What this rank tells the others of itself.
    pub(super) fn card(&self, start: &Start<'_>) -> Result<Card> {
        let address = self.door.address();
        let address =
            address.ok_or_else(|| Error::Unsupported { what: "a network", why: "the listener has no address".to_owned() })?;
        let local_name = self.door.name().unwrap_or_default().to_owned();
        let neighbourhood = sys::boot_identity().filter(|_| !local_name.is_empty());
        let declared = start.settings.host.as_deref().unwrap_or_default();
        Ok(Card {
            version: peer_info::version(),
            rank: start.rank,
            world_size: start.world_size,
            instance: u128::from_le_bytes(random()) as u64,
            host: start.host(),
            pid: std::process::id(),
            pid_namespace: sys::process_namespace().unwrap_or(0),
            neighbourhood: neighbourhood.map_or_else(String::new, |identity| format!("{identity} {declared}")),
            address,
            local_name,
            encrypts: start.settings.tls.is_some(),
        })
    }
}

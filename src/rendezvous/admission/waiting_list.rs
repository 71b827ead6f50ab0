//! The waiting list, as rank 0 of the communicator sees it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::{Admission, CLOSED, admission_at, newcomer_at};
use crate::config::Settings;
use crate::error::{Error, Result, StoreError};
use crate::network::identity::{Identity, random, random_secret};
use crate::network::listener::handshake::{Hello, Purpose};
use crate::network::listener::{self, DialError};
use crate::network::peer_info::{self, PeerInfo};
use crate::rendezvous::peer_table::{OwnFailure, Refusal};
use crate::rendezvous::run_info::{self, RunInfo, Source};
use crate::rendezvous::signed::SignedStore;
use crate::rendezvous::start::MOST_RANKS;
use crate::rendezvous::store::{Store, StoreUrl};
use crate::sys;
use crate::timeouts::{LIST_GOODBYE, LIST_VALUE, NEWCOMER_PROBE, NEWCOMER_PROBES};
use crate::types::Rank;

/// The most places that are read at once. The others are read at the next growth.
const PLACES_AT_ONCE: usize = 64;

/// How often a newcomer is probed that gives no answer.
const TRIES: u32 = 3;

/// The list of those who wait.
pub(super) struct WaitingList {
    store: Arc<dyn Store>,
    pub(super) place: Option<StoreUrl>,
    /// With the number of the list in place of that of a run.
    identity: Identity,
    /// The first place that has not been read.
    next: usize,
    /// Newcomers that gave no answer, and how often they were probed.
    silent: VecDeque<(WaitingNewcomer, u32)>,
    opened: Instant,
}

/// A newcomer that waits.
#[derive(Clone)]
pub(crate) struct WaitingNewcomer {
    place: usize,
    peer: PeerInfo,
    identity: Identity,
}

impl WaitingNewcomer {
    /// Returns the process, for messages.
    pub(crate) fn process(&self) -> String {
        self.peer.process()
    }

    /// Asks the newcomer's listener whether it waits.
    fn probe(&self) -> Probed {
        match self.dial() {
            Ok(()) => Probed::Waits,
            Err(error) => {
                crate::log::info!(
                    ?error,
                    newcomer = self.process(),
                    "a newcomer has ended, or cannot be reached; it is not admitted"
                );
                if is_gone(&error) { Probed::Gone } else { Probed::Silent }
            }
        }
    }

    /// Returns that the newcomer has ended, if it has, as the failure of a rank.
    pub(crate) fn absence(&self, rank: Rank) -> Option<OwnFailure> {
        let error = self.dial().err()?;
        let why = "its process ended while it was being admitted".to_owned();
        is_gone(&error).then(|| OwnFailure { rank, host: self.peer.host.clone(), pid: self.peer.pid, why })
    }

    fn dial(&self) -> Result<(), DialError> {
        let hello = Hello::new(Purpose::Probe, 0, self.place + 1, self.place);
        listener::dial(self.peer.address, &self.identity, &hello, Instant::now() + NEWCOMER_PROBE).map(drop)
    }
}

/// What a probe of a newcomer has found.
enum Probed {
    Waits,
    /// Its process has ended.
    Gone,
    /// It may live.
    Silent,
}

/// Returns whether this error of a probe means that the process has ended.
fn is_gone(error: &DialError) -> bool {
    match error {
        DialError::Connect(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        // Another process got its port.
        DialError::Refused(_) => true,
        DialError::Io(_) => false,
    }
}

impl WaitingList {
    /// Opens a list in a store, and announces it. `identity` has the secret, if this process knows
    /// one already; `is_given` says whether newcomers were given it, too.
    ///
    /// # Errors
    ///
    /// The store fails, or newcomers could learn the secret only from a store that any process can
    /// read.
    pub(super) fn open(
        store: Arc<dyn Store>,
        place: Option<StoreUrl>,
        identity: &Identity,
        is_given: bool,
    ) -> Result<WaitingList> {
        let secret = identity.secret().unwrap_or_else(random_secret);
        let identity = identity.clone().of_run(random(), secret);
        let run_info = match (is_given, store.is_private()) {
            (true, _) => RunInfo::of_given(run_info::WAITING_LIST, &*store, &identity),
            (false, true) => RunInfo { run: identity.run(), secret: Source::Shared { secret } },
            (false, false) => {
                let why = "the ranks were given no secret, and a newcomer cannot learn it from this store, which other processes \
                           can read; give all ranks and newcomers a secret (KOLO_SECRET_FILE), or use a file:// store";
                return Err(Error::Unsupported { what: "growing", why: why.to_owned() });
            }
        };
        let set = store.set(run_info::WAITING_LIST, &run_info.encode(), LIST_VALUE);
        set.map_err(|problem| problem.at(store.url()))?;
        crate::log::info!(store = store.url(), "opened a waiting list for newcomers");
        Ok(WaitingList { store, place, identity, next: 0, silent: VecDeque::new(), opened: Instant::now() })
    }

    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns how long ago the list was opened.
    pub(super) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Returns the newcomers that wait, as many as a communicator of `ranks` ranks can admit.
    pub(super) fn look(&mut self, ranks: usize, settings: &Settings) -> Result<Vec<WaitingNewcomer>> {
        let most = PLACES_AT_ONCE.min(MOST_RANKS.saturating_sub(ranks));
        let mut asked = std::mem::take(&mut self.silent);
        let (began, mut found) = (Instant::now(), Vec::new());
        for _ in 0..most {
            if began.elapsed() >= NEWCOMER_PROBES {
                break;
            }
            let (waiting, tries) = match asked.pop_front() {
                Some(asked) => asked,
                None => match self.read_next(settings)? {
                    Read::Newcomer(waiting) => (*waiting, 0),
                    Read::Other => continue,
                    Read::Nothing => break,
                },
            };
            match waiting.probe() {
                Probed::Waits => found.push(waiting),
                Probed::Silent if tries + 1 < TRIES => self.silent.push_back((waiting, tries + 1)),
                Probed::Silent | Probed::Gone => {}
            }
        }
        asked.append(&mut self.silent);
        self.silent = asked;
        Ok(found)
    }

    /// Reads the next place. Refuses a newcomer that cannot be a rank of this job.
    fn read_next(&mut self, settings: &Settings) -> Result<Read> {
        let (signed, place) = (SignedStore::new(&*self.store, &self.identity), self.next);
        let peer = match signed.get(&newcomer_at(place), place, Duration::ZERO) {
            Ok(None) => return Ok(Read::Nothing),
            Ok(Some(bytes)) => PeerInfo::decode(&bytes).filter(|peer| peer.rank == place),
            Err(StoreError::Forged { key }) => {
                crate::log::warn!(key, "a value in the waiting list has no valid signature; it is passed over");
                None
            }
            Err(problem) => return Err(problem.at(self.store.url())),
        };
        self.next += 1;
        let Some(peer) = peer else { return Ok(Read::Other) };
        if let Some(refusal) = disagreement(&peer, settings) {
            self.write(place, &Admission::Refused(refusal), LIST_VALUE)?;
            return Ok(Read::Other);
        }
        Ok(Read::Newcomer(Box::new(WaitingNewcomer { place, peer, identity: self.identity.clone() })))
    }

    /// Tells newcomers, by the deadline, that they become the ranks from `first` on of a communicator.
    pub(super) fn admit(&self, newcomers: &[WaitingNewcomer], growth: u64, first: Rank, deadline: Instant) -> Result<()> {
        let world_size = first + newcomers.len();
        for (rank, newcomer) in (first..).zip(newcomers) {
            let patience = LIST_VALUE.min(deadline.saturating_duration_since(Instant::now()));
            self.write(newcomer.place, &Admission::Admitted { growth, rank, world_size }, patience)?;
        }
        Ok(())
    }

    fn write(&self, place: usize, admission: &Admission, patience: Duration) -> Result<()> {
        let signed = SignedStore::new(&*self.store, &self.identity);
        let written = signed.set(&admission_at(place), 0, &admission.encode(), patience);
        written.map_err(|problem| problem.at(self.store.url()))
    }

    /// Tells newcomers that the job has ended.
    pub(super) fn close(&self) {
        if let Err(problem) = SignedStore::new(&*self.store, &self.identity).set(CLOSED, 0, &[], LIST_GOODBYE) {
            crate::log::debug!(%problem, "cannot tell newcomers that the job has ended");
        }
    }
}

/// What is at a place of the list.
enum Read {
    Newcomer(Box<WaitingNewcomer>),
    /// A newcomer that was refused, or the value of a stranger.
    Other,
    Nothing,
}

/// Returns why a newcomer cannot be a rank of this job, if it cannot.
fn disagreement(peer: &PeerInfo, settings: &Settings) -> Option<Refusal> {
    let host = settings.host.clone().unwrap_or_else(sys::hostname);
    let (version, encrypts, pid) = (peer_info::version(), settings.tls.is_some(), std::process::id());
    let zero = PeerInfo { version, rank: 0, host, pid, encrypts, ..peer.clone() };
    zero.disagreement(peer).map(|_| Refusal::Disagrees { other: Box::new(peer.clone()), zero: Box::new(zero) })
}

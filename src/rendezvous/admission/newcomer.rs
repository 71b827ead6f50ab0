//! A process that waits to be admitted to a job.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::job::Job;
use super::message::{Admission, CLOSED, admission_at, newcomer_at};
use crate::error::{Error, Result, StoreError};
use crate::failure::wait_check;
use crate::network::address;
use crate::network::identity::Identity;
use crate::rendezvous::endpoint::Endpoint;
use crate::rendezvous::peer_table::OwnFailure;
use crate::rendezvous::run_info::{self, RunInfo, Source};
use crate::rendezvous::signed::SignedStore;
use crate::rendezvous::start::Start;
use crate::rendezvous::store::{Store, StoreUrl};
use crate::timeouts::{NEWCOMER_PAUSE, RUN_INFO_CHECK};
use crate::types::Rank;

/// Why no rank admits a process.
const ENDED: &str = "the job has ended";
const NO_LIST: &str =
    "there is no waiting list: no rank has called grow, or the job has ended; check that KOLO_STORE names the store of the job";

/// A process that waits.
pub(crate) struct Newcomer<'a> {
    job: &'a Job,
    began: Instant,
    deadline: Instant,
    store: Arc<dyn Store>,
    place: Option<StoreUrl>,
    /// The run info of the list that the process waits in.
    announced: Option<Vec<u8>>,
    waits: Option<Place>,
    /// What is known of the reason why no rank admits it.
    why: Option<Error>,
}

/// A place in a waiting list.
struct Place {
    number: usize,
    identity: Identity,
    /// Rank 0 connects to it, to see that this process lives.
    _endpoint: Endpoint,
}

/// What an admitted process starts with.
pub(crate) struct Admitted {
    pub(crate) growth: u64,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// With the secret of the job.
    pub(crate) identity: Identity,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) store_url: Option<StoreUrl>,
}

impl<'a> Newcomer<'a> {
    /// Opens the store. Waits until the deadline for one that is not served yet.
    pub(crate) fn new(job: &'a Job, began: Instant, deadline: Instant) -> Result<Newcomer<'a>> {
        let opened = job.open_store(false, deadline);
        let (store, place) = opened.map_err(|error| no_store(job, began, error))?;
        Ok(Newcomer { job, began, deadline, store, place, announced: None, waits: None, why: None })
    }

    /// Waits until the ranks of the job admit this process. It may be called again after a growth
    /// that failed.
    ///
    /// # Errors
    ///
    /// [`Error::NotAdmitted`] at the deadline, or when the job has ended.
    pub(crate) fn wait(&mut self) -> Result<Admitted> {
        loop {
            wait_check::go_on().map_err(Error::os("waiting to be admitted"))?;
            let problem = match self.look() {
                Ok(Some(admitted)) => return Ok(admitted),
                Ok(None) => None,
                Err(Problem::Store(problem)) => Some(problem),
                Err(Problem::Final(error)) => return Err(error),
            };
            if Instant::now() >= self.deadline {
                let problem = problem.map(|problem| problem.at(self.store.url()));
                return Err(self.not_admitted(problem));
            }
            match problem {
                // Rank 0 has not replaced the file of another job yet.
                None | Some(StoreError::OtherJob { .. }) => {}
                Some(problem) => {
                    crate::log::info!(%problem, "the store failed while this process waited to be admitted; opening it again");
                    self.leave();
                    let opened = self.job.open_store(false, self.deadline);
                    (self.store, self.place) = opened.map_err(|error| no_store(self.job, self.began, error))?;
                }
            }
            std::thread::sleep(NEWCOMER_PAUSE.min(self.deadline.saturating_duration_since(Instant::now())));
        }
    }

    /// Gives up the place in the list: the next [`Newcomer::wait`] takes another one.
    pub(crate) fn failed(&mut self, error: Error) {
        crate::log::info!(%error, "the growth that admitted this process failed; it waits for another");
        self.leave();
        self.why = Some(error);
    }

    /// Returns why the growth that admits this process has ended, if it has: rank 0 has announced
    /// another list since, or the job has ended.
    pub(crate) fn absence(&self, admitted: &Admitted, rank: Rank) -> Option<OwnFailure> {
        let current = admitted.store.get(run_info::WAITING_LIST, Duration::ZERO).ok()?;
        let why = if current != self.announced {
            "the growth has failed"
        } else if is_closed(&*admitted.store, &admitted.identity) {
            ENDED
        } else {
            return None;
        };
        Some(OwnFailure { rank, host: "the job".to_owned(), pid: 0, why: why.to_owned() })
    }

    fn leave(&mut self) {
        (self.announced, self.waits) = (None, None);
    }

    /// Looks into the store for what this process waits for.
    fn look(&mut self) -> Result<Option<Admitted>, Problem> {
        let patience = RUN_INFO_CHECK.min(self.deadline.saturating_duration_since(Instant::now()));
        let has_place = self.waits.is_some();
        let current = self.store.get(run_info::WAITING_LIST, if has_place { Duration::ZERO } else { patience })?;
        if let Some(current) = current.filter(|current| self.announced.as_ref() != Some(current)) {
            self.waits = None;
            self.waits = self.take_place(&current)?;
            self.announced = Some(current);
        }
        let Some(place) = &self.waits else { return Ok(None) };
        let signed = SignedStore::new(&*self.store, &place.identity);
        let admission = match signed.get(&admission_at(place.number), 0, patience) {
            Err(StoreError::Forged { .. }) | Ok(None) => {
                if is_closed(&*self.store, &place.identity) {
                    return Err(Problem::Final(self.refused(ENDED.to_owned())));
                }
                return Ok(None);
            }
            other => other?,
        };
        match admission.and_then(|bytes| Admission::decode(&bytes)) {
            Some(Admission::Admitted { growth, rank, world_size }) => Ok(Some(Admitted {
                growth,
                rank,
                world_size,
                identity: place.identity.clone(),
                store: self.store.clone(),
                store_url: self.place.clone(),
            })),
            Some(Admission::Refused(refusal)) => Err(Problem::Final(refusal.error(&self.store.url()))),
            None => Ok(None),
        }
    }

    /// Takes a place in the list of a run info; `None` if the run info cannot be trusted, or
    /// the list is closed.
    fn take_place(&mut self, announced: &[u8]) -> Result<Option<Place>, Problem> {
        let Some(identity) = self.learn(announced) else { return Ok(None) };
        if is_closed(&*self.store, &identity) {
            // The job may be started again.
            self.why = Some(self.refused(ENDED.to_owned()));
            return Ok(None);
        }
        let settings = &self.job.settings;
        let place = self.place.as_ref().and_then(StoreUrl::host_and_port);
        let ip = address::choose(place, settings.interface.as_deref(), settings.rails.as_deref(), self.deadline)
            .map_err(Problem::Final)?
            .ip;
        let store = self.store.clone();
        let signed = SignedStore::new(&*store, &identity);
        let patience = self.deadline.saturating_duration_since(Instant::now()).max(RUN_INFO_CHECK);
        let start = |number: usize| Start {
            rank: number,
            world_size: number + 2,
            identity: identity.clone(),
            store: &*store,
            store_url: self.place.clone(),
            settings,
            deadline: self.deadline,
            absence: None,
        };
        let mut number = 0;
        let endpoint = Endpoint::open(&start(number), ip, &identity).map_err(Problem::Final)?;
        loop {
            if Instant::now() >= self.deadline {
                return Ok(None);
            }
            if self.store.get(&signed.name(&newcomer_at(number)), Duration::ZERO)?.is_some() {
                number += 1;
                continue;
            }
            let mine = endpoint.peer(&start(number)).map_err(Problem::Final)?.encode();
            match signed.claim(&newcomer_at(number), number, &mine, patience) {
                Ok(holder) if holder == mine => {
                    crate::log::info!(place = number, store = store.url(), "waiting to be admitted");
                    return Ok(Some(Place { number, identity: identity.clone(), _endpoint: endpoint }));
                }
                // Another newcomer has the place, or a process without the secret has written there.
                Ok(_) | Err(StoreError::Forged { .. }) => number += 1,
                Err(problem) => return Err(problem.into()),
            }
        }
    }

    /// Returns the identity of the list of a run info; `None` if it cannot be trusted.
    fn learn(&mut self, announced: &[u8]) -> Option<Identity> {
        let given = self.job.given();
        let Some(run_info) = RunInfo::decode(announced) else {
            let what = "its waiting list is none that this version of kolo knows".to_owned();
            self.why = Some(StoreError::Foreign(what).at(self.store.url()));
            return None;
        };
        let identity = |secret| given.clone().of_run(run_info.run, secret);
        let learned = match (run_info.secret, given.secret()) {
            (Source::Given { .. }, Some(secret)) => {
                let identity = identity(secret);
                let is_of_job = run_info.is_of(run_info::WAITING_LIST, &*self.store, &identity);
                is_of_job.then_some(identity).ok_or_else(|| StoreError::Forged { key: run_info::WAITING_LIST.to_owned() })
            }
            // Any process may have written a secret into another store.
            (Source::Shared { secret }, None) if self.store.is_private() => Ok(identity(secret)),
            _ => Err(StoreError::Secret),
        };
        match learned {
            Ok(identity) => {
                self.why.take_if(|why| matches!(why, Error::Store { .. } | Error::NotAdmitted { .. }));
                Some(identity)
            }
            Err(problem) => {
                self.why = Some(problem.at(self.store.url()));
                None
            }
        }
    }

    /// Returns the error of a process that has waited in vain.
    fn not_admitted(&mut self, problem: Option<Error>) -> Error {
        if let Some(error) = problem {
            return error;
        }
        match (self.why.take(), &self.waits) {
            (Some(error), None) if self.announced.is_some() => error,
            (Some(error), _) => self.refused(format!("the last growth failed: {error}")),
            (None, Some(_)) => self.refused(
                "it waited in the list, and the ranks did not call grow; set KOLO_START_TIMEOUT to more than the time between two calls of grow"
                    .to_owned(),
            ),
            (None, None) => self.refused(
                NO_LIST.to_owned(),
            ),
        }
    }

    fn refused(&self, why: String) -> Error {
        let job = self.job.given().job().to_owned();
        Error::NotAdmitted { job, store: self.store.url(), waited: self.began.elapsed(), why }
    }
}

/// Returns the error of a process that cannot open the store.
fn no_store(job: &Job, began: Instant, error: Error) -> Error {
    match error {
        Error::Store { store, problem: problem @ StoreError::Unreachable { .. } } => {
            let (job, waited) = (job.given().job().to_owned(), began.elapsed());
            Error::NotAdmitted { job, store, waited, why: format!("{NO_LIST} ({problem})") }
        }
        error => error,
    }
}

/// Returns whether a list is closed.
fn is_closed(store: &dyn Store, identity: &Identity) -> bool {
    matches!(SignedStore::new(store, identity).get(CLOSED, 0, Duration::ZERO), Ok(Some(_)))
}

/// Why a look into the store failed.
enum Problem {
    /// The store failed, and may be back soon.
    Store(StoreError),
    /// The process does not wait any longer.
    Final(Error),
}

impl From<StoreError> for Problem {
    fn from(problem: StoreError) -> Problem {
        Problem::Store(problem)
    }
}

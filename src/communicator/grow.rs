//! How a communicator grows by processes that join the job.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::connect::connect;
use super::{Communicator, OfJob, calls};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::config::Settings;
use crate::error::{Error, Result, shown};
use crate::failure::{Query, QueryError};
use crate::network::identity::random_number;
use crate::rendezvous::admission::{Job, WaitingNewcomer, Within};
use crate::rendezvous::{OwnFailure, Start};
use crate::timeouts::{GROWTH_CHECK, GROWTH_QUERY};
use crate::types::{Member, Op, Rank};

/// What rank 0 has found. It tells the others this, then the number of the growth, then how many
/// newcomers there are.
const NOTHING: u64 = 0;
const NEWCOMERS: u64 = 1;
const FAILURE: u64 = 2;

/// The most bytes of a reason.
const LONGEST_REASON: usize = 1024;

impl Communicator {
    /// Admits the processes that wait to join the job ([`Builder::join`](crate::Builder::join)).
    /// Returns a communicator of the ranks of this one, with their numbers, and of the newcomers,
    /// which get the numbers that follow; or `None` if no process waits. This communicator stays
    /// usable.
    ///
    /// This is a collective call. A program makes it where it can continue with more ranks, such as
    /// every few steps. If no process waits, it costs a look into the store on rank 0 and a
    /// small broadcast. The first call opens the store, for which newcomers wait. It admits none
    /// that has not found the store before.
    ///
    /// Newcomers know nothing of the program's state: send it with
    /// [`broadcast`](Communicator::broadcast).
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # let store = format!("hash://grow-{}", std::process::id());
    /// # let builder = || kolo::Communicator::builder().store(&store);
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| builder().join(true).connect().unwrap().barrier().unwrap());
    ///     let comm = builder().rank(0).world_size(1).connect()?;
    ///     let larger = loop {
    ///         // A step of the program.
    ///         if let Some(larger) = comm.grow()? {
    ///             break larger;
    ///         }
    ///     };
    ///     assert_eq!(larger.world_size(), 2);
    ///     larger.barrier()
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotGrown`] on all ranks if the store fails, or if a newcomer fails while it is
    /// admitted: this communicator stays usable, and the newcomers that live wait for the next call.
    /// Each step takes at most [`Builder::start_timeout`](crate::Builder::start_timeout) from when
    /// the last rank has come to it. If the waiting list cannot be opened, calls in the next 30 s
    /// return the same error at once. [`Error::Unsupported`] if this communicator was split from
    /// another one, or if its ranks are threads of [`Communicator::in_process`]. Otherwise those of
    /// every operation: see [`Communicator`](Communicator#errors).
    pub fn grow(&self) -> Result<Option<Communicator>> {
        self.check_process(Op::Grow)?;
        let Some(OfJob { job, .. }) = &self.job else {
            let why = "this communicator is a part of another one, or its ranks are threads of one process, or it \
                       started by a store that the program had only for the start; call grow on the communicator of all ranks, \
                       which started by another store, and split it again";
            return Err(Error::Unsupported { what: "growing", why: why.to_owned() });
        };
        // This communicator has failed: rank 0 must not look, because the others do not hear of it.
        if let Some(failure) = self.failure() {
            return Err(Error::Revoked { first: Arc::new(failure.clone()) });
        }
        let deadline = self.growth_deadline();
        let found = if self.rank() == 0 { job.look(self.world_size(), deadline) } else { Ok(Vec::new()) };
        let mut words = match &found {
            Ok(newcomers) if newcomers.is_empty() => [NOTHING, 0, 0],
            Ok(newcomers) => [NEWCOMERS, random_number(), newcomers.len() as u64],
            Err(_) => [FAILURE, 0, 0],
        };
        let heard = self.receive_from_rank_0(&mut words);
        if heard.is_err() && found.as_ref().is_ok_and(|found| !found.is_empty()) {
            job.reopen();
        }
        heard?;
        match words {
            [NEWCOMERS, growth, newcomers] => {
                let found = found.unwrap_or_default();
                let growth =
                    Growth { comm: self, job, number: growth, world_size: self.world_size() + newcomers as usize, found };
                growth.run().inspect_err(|_| job.reopen()).map(Some)
            }
            [FAILURE, ..] => {
                let mut reason = [0; LONGEST_REASON];
                if let Err(error) = &found {
                    let text = error.to_string();
                    let len = text.len().min(LONGEST_REASON);
                    reason[..len].copy_from_slice(&text.as_bytes()[..len]);
                }
                self.receive_from_rank_0(&mut reason)?;
                let why = String::from_utf8_lossy(&reason).trim_end_matches('\0').to_owned();
                Err(Error::NotGrown { why })
            }
            _ => Ok(None),
        }
    }

    /// Broadcasts rank 0's `buf` to all ranks.
    fn receive_from_rank_0<T: crate::types::Element>(&self, buf: &mut [T]) -> Result<()> {
        self.agree(calls::broadcast::<T>(RawSliceMut::of(buf), 0))
    }

    /// Returns the deadline of a step of a growth that all ranks have come to.
    fn growth_deadline(&self) -> Instant {
        Instant::now() + self.exec.state.info.start_timeout
    }

    /// Waits until all ranks of a communicator that has grown know that it has. Until then a rank may
    /// drop it, because another one could not connect.
    pub(super) fn confirm_growth(&self) -> Result<()> {
        self.agree(calls::barrier())
    }

    /// Runs a small collective of a growth. A rank may come to it later than another one by as long
    /// as connecting may take.
    fn agree(&self, call: Call) -> Result<()> {
        let info = &self.exec.state.info;
        let timeout = Some(info.timeout.saturating_add(info.start_timeout * 2));
        // SAFETY: the callers borrow the buffers of the call until this returns.
        unsafe { self.exec.submit(Call { on_behalf_of: Some(Op::Grow), timeout, ..call }) }
    }

    /// Returns what this rank has, if all ranks have theirs. Otherwise all of them fail.
    fn all_have<T>(&self, mine: Result<T>) -> Result<T> {
        let word = [u64::from(mine.is_ok())];
        let mut all = vec![0u64; self.world_size()];
        self.agree(calls::all_gather::<u64>(RawSlice::of(&word), RawSliceMut::of(&mut all)))?;
        match (mine, all.iter().position(|&has| has == 0)) {
            (Err(error), _) => Err(Error::NotGrown { why: error.to_string() }),
            (Ok(_), Some(rank)) => {
                let Member { host, pid } = &self.exec.state.info.members[rank];
                Err(Error::NotGrown { why: format!("rank {rank} ({host}, pid {pid}) failed; its own error says why") })
            }
            (Ok(mine), None) => Ok(mine),
        }
    }
}

/// A growth that the ranks have agreed on.
struct Growth<'a> {
    comm: &'a Communicator,
    job: &'a Arc<Job>,
    number: u64,
    world_size: usize,
    /// The newcomers, on rank 0.
    found: Vec<WaitingNewcomer>,
}

impl Growth<'_> {
    fn run(&self) -> Result<Communicator> {
        let Growth { comm, job, number, .. } = *self;
        let began = Instant::now();
        // The ranks may have come to this growth at very different times, and come together in each
        // of these votes.
        let (store, store_url) = comm.all_have(job.store_for_growth(comm.growth_deadline()))?;
        comm.all_have(job.admit(&self.found, number, comm.world_size(), comm.growth_deadline()))?;

        let within = Within::new(&*store, number);
        // A communicator of one host does not measure the network, whatever its settings say.
        let mut shared = comm.exec.state.settings;
        shared.cost_model.are_measured = job.settings.shared.cost_model.are_measured;
        let settings = Settings { shared, ..job.settings.clone() };
        let ended = Ended { growth: self, asked: Mutex::default() };
        let absence = |rank| ended.absence(rank);
        let start = Start {
            rank: comm.rank(),
            world_size: self.world_size,
            identity: job.identity().clone(),
            store: &within,
            store_url,
            settings: &settings,
            deadline: comm.growth_deadline(),
            absence: Some(&absence),
        };
        // The new ranks may offer metrics at the ports of the old ones.
        comm.exec.state.core.lock().fabric().withdraw_offers();
        let larger = connect(&start).map(|(core, info, _)| comm.of_same_process(core, info));
        let larger = comm.all_have(larger).map(|larger| larger.of_job(job.clone()));
        match &larger {
            Ok(larger) => {
                crate::log::info!(ranks = larger.world_size(), of = comm.world_size(), after = %shown::time(began.elapsed()), "grown");
                if let Err(error) = larger.confirm_growth() {
                    // All ranks have the larger communicator, whose next operation reports this.
                    crate::log::info!(%error, "a rank has failed since the communicator has grown");
                }
            }
            Err(error) => {
                crate::log::info!(%error, "a growth failed");
                comm.exec.state.core.lock().fabric().renew_offers(&settings, Instant::now() + GROWTH_QUERY);
            }
        }
        larger
    }
}

/// Finds out which ranks have ended while a growth waits for them.
struct Ended<'a> {
    growth: &'a Growth<'a>,
    /// When a rank was last asked.
    asked: Mutex<Option<Instant>>,
}

impl Ended<'_> {
    /// Returns the failure of a rank of the larger communicator, if it has ended.
    fn absence(&self, rank: Rank) -> Option<OwnFailure> {
        let comm = self.growth.comm;
        if let Some(failure) = comm.failure() {
            let Member { host, pid } = comm.exec.state.info.members[comm.rank()].clone();
            let why = format!("the communicator ended while it grew: {failure}");
            return Some(OwnFailure { rank: comm.rank(), host: host.to_string(), pid, why });
        }
        let now = Instant::now();
        // The first question comes after a while: a rank that lives has come by then.
        let is_due = now >= *self.asked.lock().get_or_insert(now) + GROWTH_CHECK;
        if !is_due {
            return None;
        }
        *self.asked.lock() = Some(now);
        let Some(first) = rank.checked_sub(comm.world_size()) else { return ended_member(comm, rank) };
        self.growth.found.get(first)?.absence(rank)
    }
}

/// Returns the failure of a rank of this communicator, if it has ended.
fn ended_member(comm: &Communicator, rank: Rank) -> Option<OwnFailure> {
    let control = comm.exec.state.status.control().filter(|_| rank != comm.rank())?;
    let answer = control.ask(rank, &Query::Doing(None), GROWTH_QUERY);
    let Member { host, pid } = comm.exec.state.info.members[rank].clone();
    let why = "its process ended while the communicator grew".to_owned();
    matches!(answer, Err(QueryError::Gone | QueryError::Died)).then(|| OwnFailure { rank, host: host.to_string(), pid, why })
}

//! One rank of a soak.

use std::io::Write;
use std::time::Duration;

use kolo::{Algorithm, Communicator, Error, Transport};
use serde::{Deserialize, Serialize};

use super::check::{carry_out, collect, fork};
use super::holder::Holder;
use super::script::{Dice, Fault, Ingredient, Path, Round, START, Step};
use super::system;

/// The report of a rank at its end.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Report {
    pub(crate) operations: u64,
    pub(crate) failure: Option<Failure>,
    /// How many ranks continued after the failure.
    pub(crate) survivors: Option<usize>,
    /// Whether the survivors continued without this rank.
    pub(crate) excluded: bool,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Failure {
    pub(crate) text: String,
    /// The rank of the job that the error names.
    pub(crate) culprit: Option<usize>,
    /// Whether it happened on a communicator of some of the ranks, or while one was made. Then the
    /// other ranks may learn of it from this rank.
    pub(crate) on_part: bool,
    /// How many operations of this rank had completed before.
    pub(crate) after: u64,
}

/// The line of output that a rank writes just before it stops itself.
pub(crate) const STOPS: &str = "stops";

/// Takes part in a round. An error is a wrong result or a failure that no fault explains.
pub(crate) fn take_part(round: &Round, rank: usize) -> Result<Report, String> {
    let say = |error: Error| format!("rank {rank} cannot connect: {error}");
    let mut builder = Communicator::builder().timeout(round.timeout).start_timeout(START);
    builder = match round.path {
        Path::Windows => builder,
        Path::Links => builder.algorithm(Algorithm::Ring),
        Path::Tcp => builder.transport(Transport::Tcp).sockets(round.sockets),
        Path::Hosts => builder.host(format!("host{}", rank % 2)),
    };
    let world = builder.connect().map_err(say)?;
    if rank == round.victim && round.fault.is_unlinked() {
        stop();
    }
    let mut holder = None;
    let report = take_steps(round, rank, &world, &mut holder)?;
    // The holder keeps its buffer until now, even if the communicator has failed.
    holder.map_or(Ok(()), Holder::finish).map_err(|what| format!("rank {rank}: {what}"))?;
    Ok(report)
}

/// Runs the steps and, if one fails, continues among the survivors.
fn take_steps(round: &Round, rank: usize, world: &Communicator, holder: &mut Option<Holder>) -> Result<Report, String> {
    let mut report = Report::default();
    let failure = match dance(round, rank, world, holder, &mut report.operations) {
        Ok(()) => return Ok(report),
        // Returning drops the communicators in order.
        Err(Missed::Left) => return Ok(report),
        Err(Missed::Wrong(what)) => return Err(what),
        Err(Missed::Failed(failure)) => failure,
    };
    report.failure = Some(Failure { after: report.operations, ..failure });
    match world.shrink() {
        Ok(rest) => {
            report.survivors = Some(rest.world_size());
            go_on(round, &rest, &mut report.operations)?;
        }
        Err(Error::Excluded { .. }) => report.excluded = true,
        Err(error) => return Err(format!("rank {rank} cannot continue after {:?}: {error}", report.failure)),
    }
    Ok(report)
}

/// Why a rank did not complete all steps.
enum Missed {
    /// The fault of the round is that it leaves.
    Left,
    Wrong(String),
    Failed(Failure),
}

/// Runs the steps.
fn dance(
    round: &Round,
    rank: usize,
    world: &Communicator,
    holder: &mut Option<Holder>,
    operations: &mut u64,
) -> Result<(), Missed> {
    // Each communicator with its ranks as ranks of the job.
    let mut others: Vec<(Communicator, Vec<usize>)> = Vec::new();
    let all_ranks: Vec<usize> = (0..round.ranks).collect();
    let is_victim = rank == round.victim;
    if round.has(Ingredient::Holder) {
        *holder = Some(Holder::start(world).map_err(|error| Missed::failed(&error).on(&all_ranks, false))?);
    }
    for number in 0..round.steps {
        if is_victim && number == round.at {
            if round.fault == Fault::Leave {
                return Err(Missed::Left);
            }
            suffer(round);
        }
        if is_victim && number + 1 == round.steps && matches!(round.fault, Fault::Kill) {
            // Wait for the signal.
            std::thread::park();
        }
        let step = round.step(number, others.len());
        match step {
            Step::Split { parts, reverses } => {
                let color = |rank: usize| rank % parts;
                let key = if reverses { round.ranks - rank } else { rank };
                let mut members: Vec<usize> = all_ranks.iter().copied().filter(|other| color(*other) == color(rank)).collect();
                if reverses {
                    members.reverse();
                }
                let part = world.split(color(rank), key).map_err(|error| Missed::failed(&error).on(&all_ranks, true))?;
                others.push((part, members));
            }
            Step::Drop { which } => drop(others.remove(which)),
            Step::Collective { on, .. } | Step::Collect { on, .. } | Step::Fork { on, .. } => {
                let (comm, members) = match on.checked_sub(1) {
                    None => (world, &all_ranks),
                    Some(other) => (&others[other].0, &others[other].1),
                };
                run(comm, &step, number).map_err(|missed| missed.on(members, on > 0))?;
                *operations += 1;
            }
        }
    }
    Ok(())
}

/// Runs a step that is an operation.
fn run(comm: &Communicator, step: &Step, number: u64) -> Result<(), Missed> {
    let wrong = match step {
        Step::Collective { call, .. } => carry_out(comm, call),
        Step::Collect { collect: messages, .. } => collect(comm, messages),
        Step::Fork { words, salt, .. } => fork(comm, *words, *salt),
        Step::Split { .. } | Step::Drop { .. } => Ok(0),
    };
    match wrong {
        Ok(0) => Ok(()),
        Ok(wrong) => {
            let (rank, ranks) = (comm.rank(), comm.world_size());
            Err(Missed::Wrong(format!("{wrong} wrong elements on rank {rank} of {ranks} in step {number}: {step:?}")))
        }
        Err(error) => Err(Missed::failed(&error)),
    }
}

impl Missed {
    fn failed(error: &Error) -> Missed {
        Missed::Failed(Failure { text: error.to_string(), culprit: error.culprit(), on_part: false, after: 0 })
    }

    /// Makes a failure. The culprit becomes a rank of the job.
    fn on(self, members: &[usize], on_part: bool) -> Missed {
        match self {
            Missed::Failed(failure) => {
                let culprit = failure.culprit.and_then(|culprit| members.get(culprit).copied());
                Missed::Failed(Failure { culprit, on_part, ..failure })
            }
            other => other,
        }
    }
}

/// Runs some more steps among the survivors.
fn go_on(round: &Round, rest: &Communicator, operations: &mut u64) -> Result<(), String> {
    let after = round.afterwards();
    for number in 0..after.steps {
        match run(rest, &after.step(number, 0), number) {
            Ok(()) => *operations += 1,
            Err(Missed::Wrong(what)) => return Err(format!("after the failure: {what}")),
            Err(Missed::Failed(failure)) => return Err(format!("after the failure, the survivors failed: {}", failure.text)),
            Err(Missed::Left) => {}
        }
    }
    Ok(())
}

/// Injects the fault from a thread of its own, so that it hits this rank in the middle of an
/// operation.
fn suffer(round: &Round) {
    let Round { fault, after, .. } = *round;
    let mut dice = Dice::new(&[round.seed, round.number, u64::MAX]);
    std::thread::spawn(move || {
        std::thread::sleep(after);
        match fault {
            Fault::Kill => system::kill_this_process(),
            Fault::Pause | Fault::Stop => stop(),
            Fault::Cut => system::cut_a_connection(|count| dice.below(count)),
            // These faults do not hit this rank, or are injected elsewhere.
            Fault::PauseUnlinked | Fault::StopUnlinked | Fault::Nothing | Fault::Leave | Fault::Crash => {}
        }
    });
    // Delay the fault, so that it does not always hit the next operation.
    if after > Duration::from_millis(1) {
        std::thread::yield_now();
    }
}

/// Stops this process until its parent continues it.
fn stop() {
    println!("{STOPS}");
    let _ = std::io::stdout().flush();
    system::stop_this_process();
}

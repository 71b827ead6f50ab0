//! `kolo compare`: measures the same work on kolo, on other libraries and on bounds of the machine,
//! in interleaved rounds.
//!
//! On a shared machine absolute times mean little. So the contestants take turns, question by
//! question, and the result is the median of the ratios within the rounds.

mod arena;
mod arguments;
mod bounds;
mod busy;
mod contestant;
mod mpi;
mod placement;
mod rank;
mod report;
mod start;
mod system;
mod task;
mod trial;

use std::time::Instant;

use crate::bench::operation::Operation;
use crate::files::{self, Output};
use crate::interrupt::Interrupt;
use crate::progress::{Progress, left};
use crate::run::process::Signal;
use crate::table::remark;
use crate::units::{count, show_rounded};
use crate::{Failure, is_read};
use arena::{Arena, Folder, Question, place};
use busy::Busy;
use contestant::Contestant;
use placement::{Placement, State};
use report::{Report, Samples};
use task::{Subject, Task};

pub(crate) use arguments::Args;
pub(crate) use rank::{Args as RankArgs, compete};

/// Sizes near which other libraries change their algorithm.
const SIZES: [u64; 6] = [8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 64 << 20];

/// Compares. Returns the signal that ended the comparison, if one did: then the report has the rounds
/// until then.
pub(crate) fn compare(args: &Args) -> Result<Option<Signal>, Failure> {
    files::check(args.json.as_deref(), args.plot.as_deref())?;
    if !args.task.has_sizes() && !args.sizes.is_empty() {
        return Err(Failure::Usage(format!("{} has no sizes", args.task.name())));
    }
    if matches!(args.task, Task::Question(subject) if subject.is_messages()) && args.ranks != 2 {
        return Err(Failure::Usage(format!("{} is between 2 ranks", args.task.name())));
    }
    for (at, peer) in args.peers.iter().enumerate() {
        if args.peers[..at].iter().any(|other| other.mpi == peer.mpi) {
            return Err(Failure::Usage(format!("--peer gives two folders for {}", peer.mpi.name())));
        }
    }
    let mut contestants = vec![if args.tcp { Contestant::KoloTcp } else { Contestant::Kolo }];
    // The bounds would stretch the axes of a plot.
    let mut undrawn = Vec::new();
    let peers = args.peers.iter().map(|peer| peer.mpi.name());
    for name in args.with.iter().map(String::as_str).chain(peers) {
        for contestant in Contestant::named(name, args.tcp, args.task).map_err(Failure::Usage)? {
            if name == "bounds" && !args.plot_bounds {
                undrawn.push(contestant);
            } else {
                undrawn.retain(|other| *other != contestant);
            }
            if !contestants.contains(&contestant) {
                contestants.push(contestant);
            }
        }
    }
    let (json, plot) = (Output::open(args.json.as_deref())?, Output::open(args.plot.as_deref())?);
    // From now on, a signal ends the comparison in order, so that its folder is removed.
    let path = Folder::new_path()?;
    let removed = path.clone();
    let interrupt = Interrupt::watch(None, true, move || _ = std::fs::remove_dir_all(&removed))?;
    let folder = Folder::make(path)?;
    let run = Run { args, interrupt, has_files: args.json.is_some() || args.plot.is_some() };
    let busy = Busy::start();
    let mut report = match args.task {
        Task::Start => start::compare(&run, &folder, contestants)?,
        Task::Question(subject) => operate(&run, folder, subject, contestants)?,
    };
    report.was_busy(busy.processors());
    let signal = run.interrupt.signal();
    if report.is_empty() {
        return Ok(signal);
    }
    report.print();
    if let Some(json) = json {
        json.write_json(&report)?;
    }
    if let Some(plot) = plot {
        report.draw(plot, &undrawn).map_err(|error| format!("the plot cannot be drawn: {error}"))?;
    }
    Ok(signal)
}

/// A comparison that may be ended before its time.
struct Run<'a> {
    args: &'a Args,
    interrupt: Interrupt,
    has_files: bool,
}

impl Run<'_> {
    /// Returns whether a signal has ended the comparison, or nothing reads its result.
    fn is_over(&self) -> bool {
        self.interrupt.signal().is_some() || !is_read() && !self.has_files
    }

    /// Does the rounds. `step` does one of the steps of each. Returns what ended the rounds early.
    fn rounds(&self, steps: usize, mut step: impl FnMut(usize, usize) -> Result<(), String>) -> Result<(), String> {
        let rounds = self.args.rounds as usize;
        let mut progress = Progress::new();
        // The first round takes less time than the others.
        let mut second = Instant::now();
        for round in 0..rounds {
            if round == 1 {
                second = Instant::now();
            }
            for at in 0..steps {
                if self.is_over() {
                    return Ok(());
                }
                progress.show(|| {
                    let name = self.args.task.name();
                    let done = (round.max(1) - 1) * steps + if round == 0 { 0 } else { at };
                    let left = match done {
                        0 => String::new(),
                        _ => format!(", {}", left(second.elapsed(), done, (rounds - 1) * steps)),
                    };
                    format!("{name}: round {} of {rounds}{left}", round + 1)
                });
                step(round, at)?;
            }
        }
        Ok(())
    }
}

fn operate(run: &Run<'_>, folder: Folder, subject: Subject, contestants: Vec<Contestant>) -> Result<Report, String> {
    let args = run.args;
    let ranks = args.ranks as usize;
    let mut arena = Arena::new(ranks, folder)?;
    remark(&format!("{} of f32, {ranks} ranks on this machine, {}", subject.name(), count(args.rounds as usize, "round")));
    let mut progress = Progress::new();
    for contestant in contestants {
        progress.show(|| format!("starting {}", contestant.name()));
        let entered = arena.enter(contestant, &args.peers, &|| run.is_over());
        progress.clear();
        if run.is_over() {
            break;
        }
        match entered {
            Ok(prepared) => prepared.say_versions(),
            Err(why) if contestant.is_kolo() && arena.is_empty() => {
                return Err(format!("{} cannot take part: {why}", contestant.name()));
            }
            Err(why) => remark(&format!("NOT RUN: {}: {why}", contestant.name())),
        }
    }
    let sizes = match subject {
        Subject::Operation(Operation::Barrier) => &[0][..],
        _ if args.sizes.is_empty() => &SIZES,
        _ => &args.sizes,
    };
    let sizes: Vec<usize> = sizes.iter().map(|&size| subject.bytes(size, ranks)).collect();
    if subject != Subject::Operation(Operation::Barrier) {
        show_rounded(&args.sizes, sizes.iter().map(|&size| size as u64)).iter().for_each(|rounded| remark(rounded));
    }
    let contestants = arena.contestants();
    let mut samples: Vec<Vec<Samples>> = Vec::new();
    samples.resize_with(sizes.len(), || contestants.iter().map(|_| Samples::default()).collect());
    let mut calls = vec![vec![None; contestants.len()]; sizes.len()];
    let mut placement = Placement::default();
    let mut states: Vec<Vec<Option<State>>> = vec![Vec::new(); sizes.len()];
    placement.probe();
    run.rounds(sizes.len() * contestants.len(), |round, at| {
        let (size, turn) = (at / contestants.len(), at % contestants.len());
        let place = place(round, turn, contestants.len());
        let (samples, call) = (&mut samples[size][place], &mut calls[size][place]);
        let last = if subject == Subject::Overlap { *call } else { samples.last() };
        let (question, began) = (Question::new(subject, sizes[size], last), Instant::now());
        samples.add(arena.ask(place, question)?);
        *call = Some(question.call(began.elapsed()));
        if turn + 1 == contestants.len() {
            states[size].push(placement.probe());
        }
        Ok(())
    })?;
    drop(arena);
    let mut report = Report::new(subject.name(), ranks, args.tcp, args.rounds);
    report.was_placed(&placement);
    for ((bytes, samples), states) in sizes.into_iter().zip(samples).zip(states) {
        report.add(bytes as u64, &contestants, samples, &states);
    }
    Ok(report)
}

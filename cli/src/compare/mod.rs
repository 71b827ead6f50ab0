//! `kolo compare`: measures the same work on kolo, on other libraries and on bounds of the machine,
//! in interleaved rounds.
//!
//! On a shared machine absolute times mean little. So the contestants take turns, question by
//! question, and the result is the median of the ratios within the rounds.

mod arena;
mod bounds;
mod contestant;
mod rank;
mod report;
mod start;

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::bench::operation::Operation;
use crate::units::{bytes, count};
use crate::{files, say};
use arena::{Arena, Question};
use contestant::Contestant;
use report::{Report, Samples};

pub(crate) use rank::{Args as RankArgs, compete};

/// Arguments of `kolo compare`. The program installs nothing: it names a missing library and how to
/// install it.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// What to compare: all_reduce, broadcast, barrier, all_gather, reduce_scatter or all_to_all,
    /// of f32, summed; or start: from the start of the launcher to the end of the last rank, with
    /// one barrier
    #[arg(default_value = "all_reduce", value_parser = task, value_name = "OP")]
    task: Task,
    /// How many ranks of each contestant
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(2..=256), default_value = "2")]
    ranks: u32,
    /// The other contestants: gloo, openmpi, mpich, bounds, deepspeed, or one of kolo-registered,
    /// kolo-bf16, kolo-tcp, openmpi-tcp, mpich-tcp, copy, stream, scale, exchange, roundtrip, futex
    #[arg(long = "with", value_delimiter = ',', default_value = "gloo,openmpi,mpich,bounds")]
    with: Vec<String>,
    /// Use TCP inside the host too
    #[arg(long)]
    tcp: bool,
    /// Sizes in bytes, for operations that have one [default: 8,1K,4K,64K,1M,64M]
    #[arg(long, value_parser = bytes, value_delimiter = ',')]
    sizes: Vec<u64>,
    /// How many rounds
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "30")]
    rounds: u32,
    /// Write every figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw times and ratios against size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Sizes near which other libraries change their algorithm.
const SIZES: [u64; 6] = [8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 64 << 20];

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    /// From the start of the launcher to the end of the last rank, with one barrier.
    Start,
    Operation(Operation),
}

impl Task {
    fn name(self) -> &'static str {
        match self {
            Task::Start => "start",
            Task::Operation(op) => op.name(),
        }
    }

    fn has_sizes(self) -> bool {
        !matches!(self, Task::Start | Task::Operation(Operation::Barrier))
    }
}

fn task(text: &str) -> Result<Task, String> {
    use Operation::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
    let operations = [AllReduce, Broadcast, Barrier, AllGather, ReduceScatter, AllToAll].map(Task::Operation);
    let known = || operations.into_iter().chain([Task::Start]);
    known().find(|task| task.name() == text).ok_or_else(|| {
        let names: Vec<_> = known().map(Task::name).collect();
        format!("{text} cannot be compared; these can: {}", names.join(", "))
    })
}

pub(crate) fn compare(args: &Args) -> Result<(), String> {
    files::check(args.json.as_deref(), args.plot.as_deref())?;
    if !args.task.has_sizes() && !args.sizes.is_empty() {
        return Err(format!("{} has no sizes", args.task.name()));
    }
    let mut contestants = vec![if args.tcp { Contestant::KoloTcp } else { Contestant::Kolo }];
    for name in &args.with {
        for contestant in Contestant::named(name, args.tcp, args.task)? {
            if !contestants.contains(&contestant) {
                contestants.push(contestant);
            }
        }
    }
    let report = match args.task {
        Task::Start => start::compare(args, contestants)?,
        Task::Operation(op) => operate(args, op, contestants)?,
    };
    report.print();
    if let Some(file) = &args.json {
        files::write_json(file, &report)?;
    }
    if let Some(file) = &args.plot {
        report.draw(file).map_err(|error| format!("{} cannot be drawn: {error}", file.display()))?;
    }
    Ok(())
}

fn operate(args: &Args, op: Operation, contestants: Vec<Contestant>) -> Result<Report, String> {
    let ranks = args.ranks as usize;
    let mut arena = Arena::new(ranks)?;
    say(&format!("# {} of f32, {ranks} ranks on this machine, {}", op.name(), count(args.rounds as usize, "round")));
    for contestant in contestants {
        if let Err(why) = arena.enter(contestant) {
            if contestant.is_kolo() && arena.is_empty() {
                return Err(format!("{} cannot take part: {why}", contestant.name()));
            }
            say(&format!("# NOT RUN: {}: {why}", contestant.name()));
        }
    }
    let sizes = match op {
        Operation::Barrier => &[0][..],
        _ if args.sizes.is_empty() => &SIZES,
        _ => &args.sizes,
    };
    // The bytes that are measured for each size, as in `kolo bench`.
    let sizes: Vec<usize> = sizes.iter().map(|&bytes| op.elements(bytes, size_of::<f32>(), ranks) * size_of::<f32>()).collect();
    let contestants = arena.contestants();
    let mut samples: Vec<Vec<Samples>> = Vec::new();
    samples.resize_with(sizes.len(), || contestants.iter().map(|_| Samples::default()).collect());
    for round in 0..args.rounds as usize {
        for (&bytes, samples) in sizes.iter().zip(&mut samples) {
            for place in turns(round, contestants.len()) {
                let question = Question::new(op, bytes, samples[place].last());
                samples[place].add(arena.ask(place, question)?);
            }
        }
    }
    let mut report = Report::new(op.name(), ranks, args.tcp, args.rounds);
    for (&bytes, samples) in sizes.iter().zip(&samples) {
        report.add(bytes as u64, &contestants, samples);
    }
    Ok(report)
}

/// Returns the order of the contestants in a round. It rotates, so that each contestant starts
/// equally often.
fn turns(round: usize, contestants: usize) -> impl Iterator<Item = usize> {
    (0..contestants).map(move |turn| (turn + round) % contestants)
}

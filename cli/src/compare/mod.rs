//! `kolo compare`: the same work on kolo, on other libraries and on what the machine can do at best, in interleaved rounds.
//!
//! On a shared machine absolute times mean little. So the contestants take turns, question by question, and what counts is the
//! median of the ratios within the rounds.

mod arena;
mod contestant;
mod rank;
mod report;

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::bench::operation::Operation;
use crate::units::bytes;
use crate::{files, say};
use arena::{Arena, Question};
use contestant::Contestant;
use report::{Report, Samples};

pub(crate) use rank::{Args as RankArgs, compete};

/// Arguments of `kolo compare`. Nothing is installed for it: who is missing is named, with what to install.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The operation: all_reduce, broadcast, barrier, all_gather, reduce_scatter or all_to_all; of f32, summed
    #[arg(default_value = "all_reduce", value_parser = operation)]
    op: Operation,
    /// How many ranks of each contestant
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(2..=256), default_value = "2")]
    ranks: u32,
    /// Whom to compare with: gloo, openmpi, mpich, bounds, or one of kolo-registered, kolo-tcp, openmpi-tcp, mpich-tcp, copy, stream,
    /// scale, exchange, roundtrip
    #[arg(long = "with", value_delimiter = ',', default_value = "gloo,openmpi,mpich,bounds")]
    with: Vec<String>,
    /// Over TCP, also inside the host
    #[arg(long)]
    tcp: bool,
    /// Sizes in bytes
    #[arg(long, value_parser = bytes, value_delimiter = ',', default_value = "8,1K,4K,64K,1M,64M")]
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

fn operation(text: &str) -> Result<Operation, String> {
    use Operation::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
    let known = [AllReduce, Broadcast, Barrier, AllGather, ReduceScatter, AllToAll];
    let names = known.map(Operation::name).join(", ");
    known.into_iter().find(|op| op.name() == text).ok_or_else(|| format!("{text} cannot be compared; these can: {names}"))
}

pub(crate) fn compare(args: &Args) -> Result<(), String> {
    files::check(args.json.as_deref(), args.plot.as_deref())?;
    let mut contestants = vec![if args.tcp { Contestant::KoloTcp } else { Contestant::Kolo }];
    for name in &args.with {
        for contestant in Contestant::named(name, args.tcp, args.op)? {
            if !contestants.contains(&contestant) {
                contestants.push(contestant);
            }
        }
    }
    let ranks = args.ranks as usize;
    let mut arena = Arena::new(ranks)?;
    say(&format!("# {} of f32, {ranks} ranks on this machine, {} rounds", args.op.name(), args.rounds));
    for contestant in contestants {
        if let Err(why) = arena.enter(contestant) {
            if contestant.is_kolo() && arena.is_empty() {
                return Err(why);
            }
            say(&format!("# NOT RUN: {}: {why}", contestant.name()));
        }
    }
    let sizes = if args.op == Operation::Barrier { &[0][..] } else { &args.sizes };
    // What is measured for each size, as in `kolo bench`.
    let sizes: Vec<usize> =
        sizes.iter().map(|&bytes| args.op.elements(bytes, size_of::<f32>(), ranks) * size_of::<f32>()).collect();
    let contestants = arena.contestants();
    let mut samples: Vec<Vec<Samples>> = Vec::new();
    samples.resize_with(sizes.len(), || contestants.iter().map(|_| Samples::default()).collect());
    for round in 0..args.rounds as usize {
        for (&bytes, samples) in sizes.iter().zip(&mut samples) {
            // Nobody always has the same neighbour before it.
            for place in (0..contestants.len()).map(|turn| (turn + round) % contestants.len()) {
                let question = Question::new(args.op, bytes, samples[place].last());
                samples[place].add(arena.ask(place, question)?);
            }
        }
    }
    let mut report = Report::new(args.op.name(), ranks, args.tcp, args.rounds);
    for (&bytes, samples) in sizes.iter().zip(&samples) {
        report.add(bytes as u64, &contestants, samples);
    }
    report.print();
    if let Some(file) = &args.json {
        files::write_json(file, &report)?;
    }
    if let Some(file) = &args.plot {
        report.draw(file).map_err(|error| format!("{} cannot be drawn: {error}", file.display()))?;
    }
    Ok(())
}

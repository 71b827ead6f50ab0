//! `kolo compare`: measures the same work on kolo, on other libraries and on bounds of the machine,
//! in interleaved rounds.
//!
//! On a shared machine absolute times mean little. So the contestants take turns, question by
//! question, and the result is the median of the ratios within the rounds.

mod arena;
mod arguments;
mod bounds;
mod contestant;
mod rank;
mod report;
mod start;
mod system;

use crate::bench::operation::Operation;
use crate::units::count;
use crate::{files, say};
use arena::{Arena, Question, turns};
use arguments::{Subject, Task};
use contestant::Contestant;
use report::{Report, Samples};

pub(crate) use arguments::Args;
pub(crate) use rank::{Args as RankArgs, compete};

/// Sizes near which other libraries change their algorithm.
const SIZES: [u64; 6] = [8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 64 << 20];

pub(crate) fn compare(args: &Args) -> Result<(), String> {
    files::check(args.json.as_deref(), args.plot.as_deref())?;
    if !args.task.has_sizes() && !args.sizes.is_empty() {
        return Err(format!("{} has no sizes", args.task.name()));
    }
    if matches!(args.task, Task::Question(subject) if subject.is_messages()) && args.ranks != 2 {
        return Err(format!("{} is between 2 ranks", args.task.name()));
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
        Task::Question(subject) => operate(args, subject, contestants)?,
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

fn operate(args: &Args, subject: Subject, contestants: Vec<Contestant>) -> Result<Report, String> {
    let ranks = args.ranks as usize;
    let mut arena = Arena::new(ranks)?;
    say(&format!("# {} of f32, {ranks} ranks on this machine, {}", subject.name(), count(args.rounds as usize, "round")));
    for contestant in contestants {
        if let Err(why) = arena.enter(contestant) {
            if contestant.is_kolo() && arena.is_empty() {
                return Err(format!("{} cannot take part: {why}", contestant.name()));
            }
            say(&format!("# NOT RUN: {}: {why}", contestant.name()));
        }
    }
    let sizes = match subject {
        Subject::Operation(Operation::Barrier) => &[0][..],
        _ if args.sizes.is_empty() => &SIZES,
        _ => &args.sizes,
    };
    let sizes: Vec<usize> = sizes.iter().map(|&size| subject.bytes(size, ranks)).collect();
    let contestants = arena.contestants();
    let mut samples: Vec<Vec<Samples>> = Vec::new();
    samples.resize_with(sizes.len(), || contestants.iter().map(|_| Samples::default()).collect());
    for round in 0..args.rounds as usize {
        for (&bytes, samples) in sizes.iter().zip(&mut samples) {
            for place in turns(round, contestants.len()) {
                let question = Question::new(subject, bytes, samples[place].last());
                samples[place].add(arena.ask(place, question)?);
            }
        }
    }
    let mut report = Report::new(subject.name(), ranks, args.tcp, args.rounds);
    for (&bytes, samples) in sizes.iter().zip(&samples) {
        report.add(bytes as u64, &contestants, samples);
    }
    Ok(report)
}

//! How long a job takes that calls one barrier: from the start of the launcher to the end of its
//! last rank.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Run;
use super::arena::{Folder, START, Started, place};
use super::contestant::{Contestant, OVER, Prepared};
use super::report::{Report, Samples};
use super::task::Task;
use crate::progress::Progress;
use crate::table::remark;
use crate::units::count;

pub(super) fn compare(run: &Run<'_>, folder: &Folder, contestants: Vec<Contestant>) -> Result<Report, String> {
    let (args, ranks) = (run.args, run.args.ranks as usize);
    let rounds = count(args.rounds as usize, "round");
    remark(&format!("start of {ranks} ranks on this machine, one barrier and their end, {rounds}"));
    let mut present = Vec::new();
    let mut progress = Progress::new();
    for contestant in contestants {
        progress.show(|| format!("starting {}", contestant.name()));
        // The first start shows whether the contestant works, and loads its files into memory.
        let prepared = contestant.prepare(folder.path(), &args.peers, &|| run.is_over());
        let started = prepared.and_then(|prepared| start(run, &prepared, folder.path()).map(|_| prepared));
        progress.clear();
        if run.is_over() {
            break;
        }
        match started {
            Ok(prepared) => {
                prepared.say_versions();
                present.push(prepared);
            }
            Err(why) if present.is_empty() => return Err(format!("{} cannot take part: {why}", contestant.name())),
            Err(why) => remark(&format!("NOT RUN: {}: {why}", contestant.name())),
        }
    }
    let mut samples: Vec<Samples> = present.iter().map(|_| Samples::default()).collect();
    run.rounds(present.len(), |round, turn| {
        let place = place(round, turn, present.len());
        match start(run, &present[place], folder.path()) {
            // The round is not complete, and does not count.
            Err(_) if run.is_over() => Ok(()),
            time => {
                samples[place].add(vec![time?]);
                Ok(())
            }
        }
    })?;
    let mut report = Report::new(Task::Start.name(), ranks, args.tcp, args.rounds);
    let contestants: Vec<Contestant> = present.iter().map(|prepared| prepared.contestant).collect();
    report.add(0, &contestants, samples, &[]);
    Ok(report)
}

/// Returns the seconds of one start.
fn start(run: &Run<'_>, prepared: &Prepared, folder: &Path) -> Result<f64, String> {
    let began = Instant::now();
    let mut started = Started(prepared.start(run.args.ranks as usize, folder, None)?);
    let ended = wait(run, prepared.contestant, &mut started, began);
    if ended.is_err() {
        started.stop();
    }
    ended.map(|()| began.elapsed().as_secs_f64())
}

/// Waits until all processes have ended well.
fn wait(run: &Run<'_>, contestant: Contestant, started: &mut Started, began: Instant) -> Result<(), String> {
    for child in &mut started.0 {
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                break status;
            }
            if began.elapsed() >= START {
                return Err(format!("{} did not end within {START:?}", contestant.name()));
            }
            if run.is_over() {
                return Err(OVER.to_owned());
            }
            // Much less than any start takes, and long enough to leave the processors to the ranks.
            std::thread::sleep(Duration::from_micros(200));
        };
        if !status.success() {
            return Err(format!("{} fails: {status}", contestant.name()));
        }
    }
    Ok(())
}

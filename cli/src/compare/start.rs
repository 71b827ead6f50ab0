//! How long a job takes that calls one barrier: from the start of the launcher to the end of its
//! last rank.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use super::Run;
use super::arena::{Folder, START, place};
use super::arguments::Task;
use super::contestant::Contestant;
use super::report::{Report, Samples};
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
        let started = contestant.prepare(folder.path()).and_then(|()| start(contestant, ranks, folder.path()));
        progress.clear();
        if run.is_over() {
            break;
        }
        match started {
            Ok(_) => present.push(contestant),
            Err(why) if present.is_empty() => return Err(format!("{} cannot take part: {why}", contestant.name())),
            Err(why) => remark(&format!("NOT RUN: {}: {why}", contestant.name())),
        }
    }
    let mut samples: Vec<Samples> = present.iter().map(|_| Samples::default()).collect();
    run.rounds(present.len(), |round, turn| {
        let place = place(round, turn, present.len());
        samples[place].add(vec![start(present[place], ranks, folder.path())?]);
        Ok(())
    })?;
    let mut report = Report::new(Task::Start.name(), ranks, args.tcp, args.rounds);
    report.add(0, &present, samples);
    Ok(report)
}

/// Returns the seconds of one start.
fn start(contestant: Contestant, ranks: usize, folder: &Path) -> Result<f64, String> {
    let began = Instant::now();
    let mut started = Started(contestant.start(ranks, folder, None)?);
    for child in &mut started.0 {
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                break status;
            }
            if began.elapsed() >= START {
                return Err(format!("{} did not end within {START:?}", contestant.name()));
            }
            // Much less than any start takes, and long enough to leave the processors to the ranks.
            std::thread::sleep(Duration::from_micros(200));
        };
        if !status.success() {
            return Err(format!("{} fails: {status}", contestant.name()));
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Processes that are killed when this is dropped, so that they do not outlive a failed start.
struct Started(Vec<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

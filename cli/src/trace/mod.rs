//! `kolo trace`: analyses the flight recorders of all ranks together.

mod analysis;
mod chrome;
pub(crate) mod dump;

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::complain;
use crate::units::{count, show_ranks, show_seconds};
use crate::{files, say};
use analysis::{Disagreement, Job, Lateness};
use dump::{Devices, Dump, Operation, Outcome};

/// Arguments of `kolo trace`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The files of the ranks of one run, or the folder with them. With KOLO_TRACE_DIR set, ranks
    /// write them there when an operation fails
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Write a trace for chrome://tracing and ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
}

pub(crate) fn trace(args: &Args) -> Result<(), String> {
    files::check(args.chrome.as_deref(), None)?;
    let (mut dumps, mut unread) = (Vec::new(), 0);
    for file in &all_files(&args.files)? {
        let bytes = std::fs::read(file).map_err(|error| format!("it cannot be read: {error}"));
        match bytes.and_then(|bytes| Dump::parse(&bytes)) {
            Ok(dump) => dumps.push(dump),
            Err(problem) => {
                complain(&format!("kolo: {}: {problem}", file.display()));
                unread += 1;
            }
        }
    }
    if dumps.is_empty() {
        return Err("there is no file that can be read".to_owned());
    }
    let job = Job::new(dumps)?;
    head(&job);
    let disagreement = job.disagreement();
    match &disagreement {
        Some(disagreement) => say_disagreement(&job, disagreement),
        None => say("no disagreement: the records of all ranks match"),
    }
    lateness(&job);
    paths_on_devices(&job);
    if let Some(file) = &args.chrome {
        chrome::write(&job, file)?;
    }
    if unread > 0 { Err(format!("{} could not be used", count(unread, "file"))) } else { Ok(()) }
}

/// Puts the files in a folder in its place, because shells of Windows replace no `*`.
fn all_files(given: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for path in given {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let unread = |error: std::io::Error| format!("{} cannot be read: {error}", path.display());
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(unread)?;
        let mut found: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
        found.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        if found.is_empty() {
            return Err(format!("{} contains no file of a rank (*.json)", path.display()));
        }
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

fn head(job: &Job) {
    let first = &job.dumps[0];
    let ranks: Vec<usize> = job.dumps.iter().map(|dump| dump.rank).collect();
    say(&format!("job {}, {}; files of {}", first.job, count(first.members.len(), "rank"), show_ranks(&ranks)));
    for rank in job.silent() {
        let member = &first.members[rank];
        let blaming = |dump: &&Dump| {
            let culprits = dump
                .communicators
                .iter()
                .filter_map(|communicator| Some(communicator.ranks[communicator.failure.as_ref()?.rank?]));
            culprits.into_iter().any(|culprit| culprit == rank)
        };
        let blaming: Vec<usize> = job.dumps.iter().filter(blaming).map(|dump| dump.rank).collect();
        let why = if blaming.is_empty() {
            "it may have been killed, or none of its operations failed".to_owned()
        } else {
            format!("the failure that ended {} names it: it was killed, or could not write", show_ranks(&blaming))
        };
        say(&format!("no file of rank {rank} ({}, pid {}): {why}", member.host, member.pid));
    }
    for (rank, correction) in &job.corrections {
        let by = show_seconds(correction.unsigned_abs() as f64 * 1e-9);
        let how = if *correction > 0 { "forward" } else { "back" };
        say(&format!("the clock of rank {rank}'s host contradicts the others: it is put {how} by {by}"));
    }
    for dump in &job.dumps {
        for communicator in &dump.communicators {
            if let Some(failure) = &communicator.failure {
                say(&format!("rank {} on {}: {}", dump.rank, communicator.name(), failure.text));
            }
        }
        if dump.reason != "error" && dump.communicators.iter().all(|communicator| communicator.failure.is_none()) {
            let open = dump.communicators.iter().flat_map(|communicator| &communicator.operations);
            let open = open.filter(|operation| operation.outcome == Outcome::UnderWay).count();
            if open > 0 {
                say(&format!("rank {} was in the middle of {} when it wrote its file", dump.rank, count(open, "operation")));
            }
        }
    }
    say("");
}

fn say_disagreement(job: &Job, disagreement: &Disagreement<'_>) {
    let Disagreement { communicator, seq, message, called, missing, began } = disagreement;
    let silent: Vec<usize> = communicator.ranks.iter().copied().filter(|rank| job.silent().contains(rank)).collect();
    let of_job = |rank: &usize| communicator.ranks[*rank];
    let which = match message {
        None => format!("seq {seq}"),
        Some((from, to)) => format!("message {seq} from rank {} to rank {}", of_job(from), of_job(to)),
    };
    let title = if disagreement.agrees() { "no disagreement; first failure" } else { "first disagreement" };
    say(&format!("{title}: {}, {which}", communicator.name()));
    let views = job.communicators();
    let views = &views[&*communicator.id];
    for (call, came) in called {
        let ranks: Vec<usize> = came.iter().map(|(rank, _)| of_job(rank)).collect();
        let ended: Vec<String> = came.iter().map(|(_, operation)| outcome(operation)).collect();
        let ended = if ended.iter().all(|other| *other == ended[0]) { ended[0].clone() } else { ended.join(", ") };
        let start = |(rank, operation): &(usize, &Operation)| job.time(views[rank].0, operation.start_ns) - began;
        let late = came.iter().map(start).max().unwrap_or(0);
        say(&format!("  {}: {call}, {ended}{}", show_ranks(&ranks), after(late)));
    }
    for (rank, last) in missing {
        let did = match last {
            None => "it has no operation on this communicator".to_owned(),
            Some(last) => {
                let at = views[rank].0;
                let ago = began - job.time(at, last.end_ns.unwrap_or(last.start_ns));
                let when =
                    format!("{} {}", show_seconds(ago.unsigned_abs() as f64 * 1e-9), if ago < 0 { "later" } else { "earlier" });
                format!("its last is seq {}, {}, {} ({when})", last.seq, last.call, outcome(last))
            }
        };
        say(&format!("  rank {} has not called it: {did}", of_job(rank)));
    }
    let starts =
        called.iter().flat_map(|(_, came)| came).map(|(rank, operation)| (job.time(views[rank].0, operation.start_ns), rank));
    if !silent.is_empty() {
        say(&format!("  {} left no file", show_ranks(&silent)));
    }
    if let (true, Some((last, rank))) = (missing.is_empty(), starts.max().filter(|(last, _)| last > began)) {
        say(&format!("  rank {} called last, {} after the first", of_job(rank), show_seconds((last - began) as f64 * 1e-9)));
    } else if !missing.is_empty() {
        let ends = called.iter().flat_map(|(_, came)| came);
        let until = ends.map(|(rank, operation)| {
            let (at, _) = views[rank];
            job.time(at, operation.end_ns.unwrap_or(job.dumps[at].clock.monotonic_ns))
        });
        let waited = until.max().unwrap_or(*began) - began;
        let ranks: Vec<usize> = missing.iter().map(|(rank, _)| of_job(rank)).collect();
        say(&format!(
            "  the others waited for {} for at least {}",
            show_ranks(&ranks),
            show_seconds(waited.max(0) as f64 * 1e-9)
        ));
    }
}

fn after(ns: i128) -> String {
    if ns == 0 { String::new() } else { format!(", begun {} after the first", show_seconds(ns as f64 * 1e-9)) }
}

fn outcome(operation: &Operation) -> String {
    let took = operation.end_ns.map_or(0, |end| end.saturating_sub(operation.start_ns)) as f64 * 1e-9;
    match operation.outcome {
        Outcome::Ok => "done".to_owned(),
        Outcome::Failed => format!("failed after {}", show_seconds(took)),
        Outcome::UnderWay => "under way".to_owned(),
    }
}

fn lateness(job: &Job) {
    let (late, collectives) = job.lateness();
    if collectives == 0 {
        return;
    }
    let mut order: Vec<(&usize, &Lateness)> = late.iter().collect();
    order.sort_by_key(|(_, late)| std::cmp::Reverse(late.waited));
    say("");
    say(&format!("late ranks, over {}:", count(collectives as usize, "collective")));
    for (rank, late) in order {
        let Some((most, communicator, seq, call)) = &late.worst else { continue };
        say(&format!(
            "  rank {rank}: {} times; others waited {} in all, at most {} ({communicator}, seq {seq}, {call})",
            late.last,
            show_seconds(late.waited as f64 * 1e-9),
            show_seconds(*most as f64 * 1e-9),
        ));
    }
}

/// Ranks with the same counts share a line.
fn paths_on_devices(job: &Job) {
    let mut lines = Vec::new();
    for views in job.communicators().into_values() {
        let mut counted: Vec<(Devices, Vec<usize>)> = Vec::new();
        for (at, communicator) in views.values().filter(|(_, communicator)| !communicator.devices.are_unused()) {
            let rank = job.dumps[*at].rank;
            match counted.iter_mut().find(|(devices, _)| *devices == communicator.devices) {
                Some((_, ranks)) => ranks.push(rank),
                None => counted.push((communicator.devices, vec![rank])),
            }
        }
        let name = views.values().next().expect("a rank has the communicator").1.name();
        lines.extend(counted.iter().map(|(devices, ranks)| format!("  {name}, {}: {devices}", show_ranks(ranks))));
    }
    if lines.is_empty() {
        return;
    }
    say("");
    say("paths of operations on the memory of devices:");
    lines.iter().for_each(|line| say(line));
}

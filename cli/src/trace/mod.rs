//! `kolo trace`: analyses the flight recorders of all ranks together.

mod analysis;
mod chrome;
pub(crate) mod dump;

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::files::{self, Output};
use crate::table::say_prose as say;
use crate::units::{count, show_ranks, show_seconds};
use crate::{Failure, complain};
use analysis::{Disagreement, Job, Lateness};
use dump::{Dump, Operation, Outcome};

/// Arguments of `kolo trace`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The files of the ranks of one run, or the folder with them. With KOLO_TRACE_DIR set, ranks
    /// write them there when an operation fails
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Write a trace for chrome://tracing and ui.perfetto.dev to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
}

pub(crate) fn trace(args: &Args) -> Result<(), Failure> {
    files::check(args.chrome.as_deref(), None)?;
    let output = Output::open(args.chrome.as_deref())?;
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
        return Err("there is no file that can be read".to_owned().into());
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
    if let Some(output) = output {
        chrome::write(&job, output)?;
    }
    if unread > 0 { Err(format!("{} could not be used", count(unread, "file")).into()) } else { Ok(()) }
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
    let whys = job.silent().into_iter().map(|rank| {
        let blaming = |dump: &&Dump| {
            let culprits = dump
                .communicators
                .iter()
                .filter_map(|communicator| Some(communicator.ranks[communicator.failure.as_ref()?.rank?]));
            culprits.into_iter().any(|culprit| culprit == rank)
        };
        let blaming: Vec<usize> = job.dumps.iter().filter(blaming).map(|dump| dump.rank).collect();
        (blaming, rank)
    });
    for (blaming, ranks) in grouped(whys) {
        let it = if ranks.len() == 1 { "it" } else { "each" };
        let why = if blaming.is_empty() {
            format!("{it} may have been killed, or none of its operations failed")
        } else {
            format!("the failure that ended {} names {it}: it was killed, or could not write", show_ranks(&blaming))
        };
        let member = |rank: &usize| format!("rank {rank} ({}, pid {})", first.members[*rank].host, first.members[*rank].pid);
        say(&format!("no file of {}: {why}", ranks.iter().map(member).collect::<Vec<_>>().join(", ")));
    }
    for (rank, correction) in &job.corrections {
        let by = show_seconds(correction.unsigned_abs() as f64 * 1e-9);
        let how = if *correction > 0 { "forward" } else { "back" };
        say(&format!("the clock of rank {rank}'s host contradicts the others: it is put {how} by {by}"));
    }
    let communicators = job.dumps.iter().flat_map(|dump| dump.communicators.iter().map(move |of_rank| (dump.rank, of_rank)));
    let failures = communicators.filter_map(|(rank, of_rank)| {
        let (before, took, after) = around_time(&of_rank.failure.as_ref()?.text);
        Some(((of_rank.name(), before, after), (rank, took)))
    });
    for ((name, before, after), failed) in grouped(failures) {
        let ranks: Vec<usize> = failed.iter().map(|(rank, _)| *rank).collect();
        let mut times: Vec<&str> = failed.iter().map(|(_, took)| *took).collect();
        times.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        times.dedup();
        let times = if let [first, .., last] = times[..] { format!("{first} to {last}") } else { times.concat() };
        say(&format!("{} on {name}: {before}{times}{after}", show_ranks(&ranks)));
    }
    let mut waiting = Vec::new();
    for dump in &job.dumps {
        if dump.reason != "error" && dump.communicators.iter().all(|communicator| communicator.failure.is_none()) {
            let open = dump.communicators.iter().flat_map(|communicator| &communicator.operations);
            let open = open.filter(|operation| operation.outcome == Outcome::UnderWay).count();
            if open > 0 {
                waiting.push((open, dump.rank));
            }
        }
    }
    for (open, ranks) in grouped(waiting.into_iter()) {
        let (was, its) = if ranks.len() == 1 { ("was", "it wrote its file") } else { ("were", "they wrote their files") };
        say(&format!("{} {was} in the middle of {} when {its}", show_ranks(&ranks), count(open, "operation")));
    }
    say("");
}

/// Returns the values of each key, in the order in which the keys come first.
fn grouped<K: PartialEq, V>(pairs: impl Iterator<Item = (K, V)>) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (key, value) in pairs {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// Splits the sentence of an error at the time after which the operation failed. It differs between
/// the ranks.
fn around_time(text: &str) -> (&str, &str, &str) {
    const BEFORE: &str = " failed after ";
    let Some(from) = text.find(BEFORE).map(|at| at + BEFORE.len()) else { return (text, "", "") };
    let to = text[from..].find(':').map_or(text.len(), |len| from + len);
    (&text[..from], &text[from..to], &text[to..])
}

/// Returns the seconds of a time as errors show it.
fn seconds(time: &str) -> f64 {
    let number = time.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let scale = match &time[number.len()..] {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        _ => 1.0,
    };
    number.parse().map_or(0.0, |number: f64| number * scale)
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
        let ended = outcomes(came.iter().map(|(_, operation)| *operation));
        let start = |(rank, operation): &(usize, &Operation)| job.time(views[rank].0, operation.start_ns) - began;
        let late = came.iter().map(start).max().unwrap_or(0);
        say(&format!("  {}: {call}, {ended}{}", show_ranks(&ranks), after(late)));
    }
    let lasts = missing.iter().map(|(rank, last)| {
        let key = last.map(|last| (last.seq, last.call.to_string(), last.outcome));
        (key, (of_job(rank), *rank, *last))
    });
    for (_, alike) in grouped(lasts) {
        let ranks: Vec<usize> = alike.iter().map(|(of_job, ..)| *of_job).collect();
        let (has, it, its) = if ranks.len() == 1 { ("has", "it has", "its") } else { ("have", "they have", "their") };
        let last = alike[0].2;
        let did = last.map_or_else(
            || format!("{it} no operation on this communicator"),
            |last| {
                let ago = alike.iter().filter_map(|(_, rank, last)| {
                    let last = (*last)?;
                    Some(began - job.time(views[rank].0, last.end_ns.unwrap_or(last.start_ns)))
                });
                let mut ago: Vec<i128> = ago.collect();
                ago.sort_unstable();
                let when = |ns: &i128| {
                    format!("{} {}", show_seconds(ns.unsigned_abs() as f64 * 1e-9), if *ns < 0 { "later" } else { "earlier" })
                };
                let mut whens: Vec<String> = ago.first().into_iter().chain(ago.last()).map(when).collect();
                whens.dedup();
                let ended = outcomes(alike.iter().filter_map(|(_, _, last)| *last));
                format!("{its} last is seq {}, {}, {ended} ({})", last.seq, last.call, whens.join(" to "))
            },
        );
        say(&format!("  {} {has} not called it: {did}", show_ranks(&ranks)));
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

/// Describes how operations ended: those together that ended in one way.
fn outcomes<'a>(operations: impl Iterator<Item = &'a Operation>) -> String {
    let took = |operation: &Operation| operation.end_ns.map_or(0, |end| end.saturating_sub(operation.start_ns));
    let described =
        grouped(operations.map(|operation| (operation.outcome, took(operation)))).into_iter().map(|(outcome, mut took)| {
            took.sort_unstable();
            let mut times: Vec<String> =
                took.first().into_iter().chain(took.last()).map(|ns| show_seconds(*ns as f64 * 1e-9)).collect();
            times.dedup();
            match outcome {
                Outcome::Ok => "done".to_owned(),
                Outcome::Failed => format!("failed after {}", times.join(" to ")),
                Outcome::UnderWay => "under way".to_owned(),
            }
        });
    described.collect::<Vec<_>>().join(", ")
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
        let used = views.values().filter(|(_, communicator)| !communicator.devices.are_unused());
        let counted = grouped(used.map(|(at, communicator)| (communicator.devices, job.dumps[*at].rank)));
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

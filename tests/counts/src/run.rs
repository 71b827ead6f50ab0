//! Counts all cases and compares them with the table.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use crate::cases::{self, Api, Case, Form, Mode};
use crate::counter::{Counts, Rough};
use crate::job::{self, Job};
use crate::rank;
use crate::table::{self, Table};
use crate::traced::Traced;

/// If this variable is set, the counts become the expected ones.
const WRITE: &str = "KOLO_WRITE_COUNTS";

/// How often a case is counted at most. A count in which the rank has waited for a peer is
/// discarded. One in which another thread of the process came between differs from the others.
const MOST: usize = 12;

/// How many counts have to be the same.
const SAME: usize = 2;

/// How often a case is counted for a new table: some operations cost more once in a while.
const FOR_TABLE: usize = 4;

/// Bytes of flags, beside those of the form.
const FLAG_BYTES: usize = 4 << 10;

/// What a rank may load and store elsewhere, such as on the stack, beside a part of its buffer:
/// less than another copy.
const ELSEWHERE: usize = 64 << 10;
const PART: usize = 4;

/// What has been counted so far.
struct Results {
    expected: Table,
    counted: Table,
    writes: bool,
    passed: usize,
    failures: Vec<String>,
    not_run: Vec<String>,
}

pub(crate) fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some(job::RANK) {
        let api = if arguments.next().as_deref() == Some("c") { Api::C } else { Api::Rust };
        rank::main(api);
    }
    if cfg!(debug_assertions) {
        println!("NOT RUN: counts are those of a release build; run .ci/run counts");
        return ExitCode::SUCCESS;
    }
    let began = Instant::now();
    let folder = std::env::temp_dir().join(format!("kolo-counts-{}", std::process::id()));
    // Later, no permission is missing unless something is wrong.
    if let Err(error) = Traced::start(Command::new("true"))
        && error.kind() == ErrorKind::PermissionDenied
    {
        println!("NOT RUN: the system does not let a process trace its children: {error}");
        return ExitCode::SUCCESS;
    }
    let result = std::fs::create_dir(&folder).and_then(|()| count_all(&folder, first.as_deref()));
    // Another run removes nothing of this one.
    let _ = std::fs::remove_dir_all(&folder);
    match result {
        Ok(results) => report(&results, began),
        Err(error) => {
            eprintln!("the counts failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The C library, which cargo has built beside this program.
fn library() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("libkolo.so");
    let advice = || format!("{} does not exist: cargo build --release -p kolo-capi", path.display());
    if path.exists() { Ok(path) } else { Err(Error::new(ErrorKind::NotFound, advice())) }
}

/// Why ranks cannot read each other's memory here, if they cannot.
fn no_cma() -> Option<String> {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    let is_free = scope.trim() == "0";
    (!is_free).then(|| format!("rows with cma: kernel.yama.ptrace_scope is {}", scope.trim()))
}

/// Counts the cases whose row contains `filter`.
fn count_all(folder: &Path, filter: Option<&str>) -> Result<Results> {
    let library = library()?;
    let mut results = Results {
        expected: Table::read(),
        counted: Table::read(),
        writes: std::env::var_os(WRITE).is_some(),
        passed: 0,
        failures: Vec::new(),
        not_run: Vec::new(),
    };
    let cases: Vec<Case> =
        cases::all().into_iter().filter(|case| filter.is_none_or(|filter| case.key().contains(filter))).collect();
    if cases.is_empty() {
        let why = format!("no row contains {:?}", filter.unwrap_or_default());
        return Err(Error::new(ErrorKind::InvalidInput, why));
    }
    let no_cma = no_cma();
    for api in [Api::C, Api::Rust] {
        for (ranks, mode) in [(2, Mode::Staged), (4, Mode::Staged), (2, Mode::Cma), (4, Mode::Cma)] {
            let of_job = |case: &&Case| case.ranks == ranks && case.mode() == mode && case.is_counted(api);
            let of_job: Vec<_> = cases.iter().filter(of_job).collect();
            if of_job.is_empty() {
                continue;
            }
            if let (Mode::Cma, Some(why)) = (mode, &no_cma) {
                if !results.not_run.contains(why) {
                    results.not_run.push(why.clone());
                }
                continue;
            }
            let mut job = Job::start(api, ranks, mode, folder, &library)?;
            for case in of_job {
                results.count(&mut job, case, api)?;
            }
        }
    }
    if results.writes {
        results.counted.write(&cases::all())?;
        println!("wrote {}", table::path().display());
    }
    let table = Table::read();
    results.failures.extend(table.without_case(&cases::all()));
    results.failures.extend(table::wrong_in_docs()?);
    Ok(results)
}

impl Results {
    /// Counts a case until enough counts are as expected, or too many were taken.
    fn count(&mut self, job: &mut Job, case: &Case, api: Api) -> Result<()> {
        job.warm_up(*case)?;
        let began = Instant::now();
        let mut all: Vec<(Counts, Rough)> = Vec::new();
        let mut waits = 0;
        for _ in 0..MOST {
            let (counts, rough) = job.count(*case)?;
            if rough.waited {
                waits += 1;
                continue;
            }
            all.push((counts, rough));
            let (counts, _) = &all[all.len() - 1];
            let is_enough = match self.writes {
                true => all.len() == FOR_TABLE,
                false => {
                    let is_expected = self.expected.differences(case, api, counts).is_empty();
                    is_expected && all.iter().filter(|(other, _)| other == counts).count() == SAME
                }
            };
            if is_enough {
                break;
            }
        }
        let same = |counts: &Counts| all.iter().filter(|(other, _)| other == counts).count();
        let title = format!("{}, through {api}", case.key());
        let best = all.iter().max_by_key(|(counts, _)| {
            let is_expected = !self.writes && self.expected.differences(case, api, counts).is_empty();
            let fewest = std::cmp::Reverse((counts.loaded, counts.locked));
            (is_expected && same(counts) >= SAME, same(counts), fewest)
        });
        let Some((counts, rough)) = best else {
            self.failures.push(format!("{title}: the rank waited for a peer each time"));
            return Ok(());
        };
        println!(
            "{title}: {} instructions, {} times the same of {} and {waits} with waits, {:.1} s",
            rough.instructions,
            same(counts),
            all.len(),
            began.elapsed().as_secs_f64()
        );
        let before = self.failures.len();
        if same(counts) < SAME {
            self.failures.push(format!("{title}: no two of {} counts are the same", all.len()));
        }
        if let Some(why) = wrong_bytes(case, counts, rough) {
            self.failures.push(format!("{title}: {why}"));
        }
        if self.writes {
            self.counted.add(case, api, counts, rough.instructions);
        } else {
            let differences = self.expected.differences(case, api, counts);
            if !differences.is_empty() {
                self.failures.push(explain(&title, &differences, rough));
            }
        }
        if let Some(most) = self.expected.most_instructions(case, api).filter(|&most| !self.writes && rough.instructions > most) {
            self.failures.push(format!("{title}: {} instructions, where the table allows {most}", rough.instructions));
        }
        self.passed += usize::from(before == self.failures.len());
        Ok(())
    }
}

/// What differs from docs/architecture.md.
fn wrong_bytes(case: &Case, counts: &Counts, rough: &Rough) -> Option<String> {
    let moved = (counts.loaded + counts.stored) as usize;
    let (least, most) = case.form.bytes(case.ranks, case.bytes);
    if !(least..=most + FLAG_BYTES).contains(&moved) {
        let row = case.form.row().map_or("a message", |(_, bytes)| bytes);
        return Some(format!("{moved} bytes are not {row}: {least} to {most}, and at most {FLAG_BYTES} of flags"));
    }
    let allowed = ELSEWHERE + case.bytes / PART;
    let is_elsewhere = rough.elsewhere as usize > allowed && case.form != Form::Message;
    is_elsewhere.then(|| format!("{} bytes elsewhere, such as on the stack, are more than {allowed}", rough.elsewhere))
}

/// A table of what differs, and where the locked instructions are.
fn explain(title: &str, differences: &[(&'static str, String, String)], rough: &Rough) -> String {
    let mut text = format!("{title}\n    {:<14} {:>28} {:>28}\n", "", "counted", "expected");
    for (column, counted, expected) in differences {
        text += &format!("    {column:<14} {counted:>28} {expected:>28}\n");
    }
    if differences.iter().any(|(column, ..)| column.starts_with("locked")) {
        text += &format!("    locked at {}\n", rough.locked_at.join(" "));
    }
    text
}

fn report(results: &Results, began: Instant) -> ExitCode {
    for why in &results.not_run {
        println!("NOT RUN: {why}");
    }
    for failure in &results.failures {
        println!("FAILED: {failure}");
    }
    if !results.failures.is_empty() {
        println!(
            "{} counts failed. More than expected is a regression: find it with `addr2line -fie target/release/libkolo.so` \
             and the addresses, or with what the change does. If the change has to cost this, or costs less, write the \
             new counts with `{WRITE}=1 .ci/run counts`, and say why in the commit.",
            results.failures.len()
        );
        return ExitCode::FAILURE;
    }
    println!("{} passed in {} s", results.passed, began.elapsed().as_secs());
    ExitCode::SUCCESS
}

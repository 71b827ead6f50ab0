//! The table of the expected counts, and what docs/architecture.md says of the forms.

use std::collections::BTreeMap;
use std::fs;
use std::io::Result;
use std::path::{Path, PathBuf};

use crate::cases::{Api, Case, FORMS};
use crate::counter::Counts;

/// The columns of an operation, and then those of its counts.
const COLUMNS: [&str; 14] = [
    "operation",
    "ranks",
    "bytes",
    "memory",
    "system calls",
    "locked, C",
    "locked, Rust",
    "clock",
    "lines loaded",
    "lines stored",
    "bytes loaded",
    "bytes stored",
    "instructions, C",
    "instructions, Rust",
];
const KEYS: usize = 4;
/// The columns that are counted through each interface.
const LOCKED: [(Api, usize); 2] = [(Api::C, 5), (Api::Rust, 6)];
const INSTRUCTIONS: [(Api, usize); 2] = [(Api::C, 12), (Api::Rust, 13)];

/// The instructions that the table allows are this much more than were counted, in percent, and a multiple of
/// [`STEP`]: they differ with the compiler and the processor.
const SLACK: u64 = 20;
const STEP: u64 = 50;

/// In a column of an interface through which the row is not counted.
const NOT_COUNTED: &str = "-";

/// Rows of a table in Markdown, by their keys.
pub(crate) struct Table {
    rows: BTreeMap<String, Vec<String>>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("table.md")
}

fn architecture() -> PathBuf {
    root().join("docs/architecture.md")
}

/// The cells of a row.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.strip_prefix("| ")?.strip_suffix(" |")?;
    Some(inner.split(" | ").map(str::to_owned).collect())
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// The name and the numbers of the system calls, such as `4 getpid, 9 process_vm_readv`.
fn system_calls(numbers: &[u64]) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for &number in numbers {
        let name = match number as i64 {
            libc::SYS_getpid => "getpid".to_owned(),
            libc::SYS_gettid => "gettid".to_owned(),
            libc::SYS_process_vm_readv => "process_vm_readv".to_owned(),
            libc::SYS_futex => "futex".to_owned(),
            libc::SYS_sched_yield => "sched_yield".to_owned(),
            libc::SYS_clock_gettime => "clock_gettime".to_owned(),
            libc::SYS_write => "write".to_owned(),
            libc::SYS_read => "read".to_owned(),
            libc::SYS_mmap => "mmap".to_owned(),
            libc::SYS_munmap => "munmap".to_owned(),
            libc::SYS_madvise => "madvise".to_owned(),
            number => format!("number {number}"),
        };
        *counts.entry(name).or_default() += 1;
    }
    let names: Vec<_> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
    if names.is_empty() { "0".to_owned() } else { names.join(", ") }
}

/// The column of an interface.
fn column(of_each: [(Api, usize); 2], api: Api) -> usize {
    of_each.into_iter().find(|&(of, _)| of == api).expect("each interface has a column").1
}

/// The columns of counts, with the column of the interface.
fn columns(api: Api, counts: &Counts) -> Vec<(usize, String)> {
    vec![
        (4, system_calls(&counts.system_calls)),
        (column(LOCKED, api), counts.locked.to_string()),
        (7, counts.clock.to_string()),
        (8, counts.loaded_lines.to_string()),
        (9, counts.stored_lines.to_string()),
        (10, counts.loaded.to_string()),
        (11, counts.stored.to_string()),
    ]
}

impl Table {
    /// Reads the expected counts; without a file there are none.
    pub(crate) fn read() -> Table {
        let text = fs::read_to_string(path()).unwrap_or_default();
        let rows = text.lines().filter_map(cells).filter(|cells| cells.len() == COLUMNS.len() && cells[0] != COLUMNS[0]);
        Table { rows: rows.map(|cells| (cells[..KEYS].join(" | "), cells)).collect() }
    }

    /// The columns in which counts differ from what is expected: name, counted, expected.
    pub(crate) fn differences(&self, case: &Case, api: Api, counts: &Counts) -> Vec<(&'static str, String, String)> {
        let row = self.rows.get(&case.key());
        columns(api, counts)
            .into_iter()
            .map(|(at, counted)| (COLUMNS[at], counted, row.map_or("no row", |row| row[at].as_str()).to_owned()))
            .filter(|(_, counted, expected)| counted != expected)
            .collect()
    }

    /// The most instructions that a case may take, if the table limits them.
    pub(crate) fn most_instructions(&self, case: &Case, api: Api) -> Option<u64> {
        self.rows.get(&case.key())?[column(INSTRUCTIONS, api)].parse().ok()
    }

    /// The rows that belong to no case, which nothing compares.
    pub(crate) fn without_case(&self, cases: &[Case]) -> Vec<String> {
        let is_known = |key: &String| cases.iter().any(|case| case.key() == *key);
        let unknown = self.rows.keys().filter(|key| !is_known(key));
        unknown.map(|key| format!("the table has a row of no case: {key}")).collect()
    }

    /// Adds counts to the row of a case, which the first interface makes.
    pub(crate) fn add(&mut self, case: &Case, api: Api, counts: &Counts, instructions: u64) {
        let key = case.key();
        let row = self.rows.entry(key.clone()).or_insert_with(|| {
            let mut row: Vec<String> = key.split(" | ").map(str::to_owned).collect();
            row.resize(COLUMNS.len(), NOT_COUNTED.to_owned());
            row
        });
        for (at, counted) in columns(api, counts) {
            row[at] = counted;
        }
        if case.is_short() {
            row[column(INSTRUCTIONS, api)] = ((instructions * (100 + SLACK)).div_ceil(100 * STEP) * STEP).to_string();
        }
    }

    /// Writes the table, in the order of the cases.
    pub(crate) fn write(&self, cases: &[Case]) -> Result<()> {
        let header = COLUMNS.map(str::to_owned);
        let mut text = format!("{INTRODUCTION}\n{}\n|{}\n", line(&header), "---|".repeat(COLUMNS.len()));
        for row in cases.iter().filter_map(|case| self.rows.get(&case.key())) {
            text += &line(row);
            text.push('\n');
        }
        fs::write(path(), text)
    }
}

/// What docs/architecture.md says otherwise than the forms here.
pub(crate) fn wrong_in_docs() -> Result<Vec<String>> {
    let page = fs::read_to_string(architecture())?;
    let mut wrong = Vec::new();
    for (name, bytes) in FORMS.into_iter().filter_map(|form| form.row()) {
        let row = page.lines().filter_map(cells).find(|cells| cells[0] == name);
        if row.as_ref().and_then(|row| row.get(2)).is_none_or(|cell| cell != bytes) {
            wrong.push(format!("docs/architecture.md does not say that the form `{name}` moves {bytes}"));
        }
    }
    Ok(wrong)
}

const INTRODUCTION: &str = "\
# What an operation costs, in counts

`.ci/run counts` counts this, and fails if a figure is another one. `KOLO_WRITE_COUNTS=1 .ci/run
counts` writes the figures anew.

Each row is one operation in the steady state, in which the rank waits for no peer. \"locked\" are
locked instructions and full fences, \"clock\" are readings of the clock. Lines are cache lines of
shared memory. Bytes are those of shared memory, of the buffers, and what the system copies. The
root of a broadcast looks once in eight operations at one line more of each peer. The shortest
operations may take as many instructions as the last columns say, a fifth more than were counted.

At 4 ranks there is no cma all-reduce. It checks its deadline about 20 times; each check takes a
lock that the failure detector may hold, so the count of locked instructions varies.
";

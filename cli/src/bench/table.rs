//! The table: with `--wide` that of nccl-tests, otherwise what fits 80 columns of it. There, the head
//! says what all rows have in common.

use super::arguments::Args;
use super::report::{Line, Report, Row};
use crate::say;
use crate::table::{remark, say_wrapped};
use crate::units::count;

/// The columns of one form: title, unit and width. The narrow table lacks the last two, and the wrong
/// elements if none are counted.
const FORM: [(&str, &str, usize); 6] = [
    ("time", "(us)", 9),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 6),
    ("p50", "(us)", 9),
    ("p99", "(us)", 9),
];

/// The columns that `args` ask for, with a blank before each.
fn columns(args: &Args, cells: [&str; FORM.len()]) -> String {
    let shown = match args {
        Args { wide: true, .. } => FORM.len(),
        Args { check: true, .. } => 4,
        _ => 3,
    };
    FORM.iter().zip(cells).take(shown).map(|((_, _, width), cell)| format!(" {cell:>width$}")).collect()
}

/// The columns of a row before those of its forms.
fn start(is_wide: bool, [size, count, dtype, redop, root]: [&str; 5]) -> String {
    if is_wide { format!("{size:>11} {count:>11} {dtype:>5} {redop:>7} {root:>4} ") } else { format!("{size:>10} ") }
}

pub(super) fn head(report: &Report, args: &Args, rounded: Option<&str>) {
    let Report { ranks, hosts, transport, .. } = report;
    let registered = if args.registered { ", registered buffers" } else { "" };
    let (ranks, hosts) = (count(*ranks, "rank"), count(*hosts, "host"));
    let wire = report.wire_dtype.map_or_else(String::new, |wire| format!(", {wire} between hosts from 16 KiB on"));
    let root = report.root.map_or_else(String::new, |root| format!(", root {root}"));
    let what = report.redop.map_or_else(|| report.dtype.to_owned(), |redop| format!("{redop} of {}", report.dtype));
    let version = env!("CARGO_PKG_VERSION");
    remark(&format!("kolo {version} {}, {what}{root}: {ranks} on {hosts} over {transport}{registered}{wire}", report.op));
    let forms: Vec<&str> = args.forms().into_iter().map(|in_place| if in_place { "in-place" } else { "out-of-place" }).collect();
    let more = if args.wide { "" } else { " (--wide: more)" };
    remark(&format!("{}{more}; times: the mean of a loop of calls, slowest rank", forms.join(" and ")));
    rounded.into_iter().for_each(remark);
    say("#");
    let over = |text: &dyn Fn(&str) -> String| forms.iter().map(|form| text(form)).collect::<Vec<_>>().join("  ");
    if args.wide {
        let width = columns(args, [""; FORM.len()]).len();
        say(&format!("# {}{}", start(args.wide, [""; 5]), over(&|form| format!("{form:^width$}"))));
    }
    let titles = over(&|_| columns(args, FORM.map(|(title, ..)| title)));
    say(&format!("# {}{titles}  algorithm", start(args.wide, ["size", "count", "type", "redop", "root"])));
    let units = over(&|_| columns(args, FORM.map(|(_, unit, _)| unit)));
    say(format!("# {}{units}", start(args.wide, ["(B)", "(elements)", "", "", ""])).trim_end());
}

pub(super) fn row(report: &Report, row: &Row, args: &Args) {
    let forms: Vec<String> = row.lines().map(|line| form(line, args)).collect();
    let root = report.root.map_or_else(|| "-1".to_owned(), |root| root.to_string());
    let cells = [&row.bytes.to_string(), &row.count.to_string(), report.dtype, report.redop.unwrap_or("none"), &root];
    let start = format!("  {}{}  ", start(args.wide, cells), forms.join("  "));
    if args.wide { say(&(start + &row.algorithm)) } else { say_wrapped(&start, &row.algorithm) }
}

fn form(line: &Line, args: &Args) -> String {
    let wrong = line.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
    let [time, p50, p99] = [line.mean_us, line.p50_us, line.p99_us].map(microseconds);
    let [algbw, busbw] = [line.algbw_gbs, line.busbw_gbs].map(|rate| format!("{rate:.2}"));
    columns(args, [&time, &algbw, &busbw, &wrong, &p50, &p99])
}

/// Shows a time in microseconds with four significant digits where they fit.
fn microseconds(us: f64) -> String {
    match us {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 10_000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

pub(super) fn foot(report: &Report) {
    let rates: Vec<f64> = report.rows.iter().flat_map(Row::lines).map(|line| line.busbw_gbs).collect();
    if rates.iter().any(|&rate| rate > 0.0) {
        say("#");
        say(&format!("# Avg bus bandwidth    : {:.4} GB/s", rates.iter().sum::<f64>() / rates.len() as f64));
    }
    if !report.devices.are_unused() {
        remark(&format!("Paths on devices     : {}", report.devices));
    }
    let wrong: Vec<u64> = report.rows.iter().flat_map(Row::lines).filter_map(|line| line.wrong).collect();
    if !wrong.is_empty() {
        let total: u64 = wrong.iter().sum();
        say(&format!("# Out of bounds values : {total} {}", if total == 0 { "OK" } else { "FAILED" }));
    }
}

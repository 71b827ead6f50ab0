//! The table that nccl-tests prints.

use super::arguments::Args;
use super::report::{Line, Report, Row};
use crate::say;
use crate::units::count;

/// Columns of one form: time, algorithm and bus bandwidth, wrong elements, median and 99th
/// percentile.
const FORM: usize = 9 + 8 + 8 + 8 + 9 + 9 + 5;

pub(super) fn head(report: &Report, args: &Args) {
    let Report { ranks, hosts, transport, .. } = report;
    let registered = if args.registered { ", registered buffers" } else { "" };
    let (ranks, hosts) = (count(*ranks, "rank"), count(*hosts, "host"));
    let wire = report.wire_dtype.map_or_else(String::new, |wire| format!(", {wire} between hosts from 16 KiB on"));
    say(&format!("# kolo {} {}: {ranks} on {hosts} over {transport}{registered}{wire}", env!("CARGO_PKG_VERSION"), report.op));
    say(&format!(
        "# {} warm-up and {} measured samples, each a loop of 4 to 200 calls after a barrier (--json tells); times are means, of \
         the slowest rank",
        args.warmup, args.iters
    ));
    say("#");
    let forms = if report.operation.has_in_place() { vec!["out-of-place", "in-place"] } else { vec!["out-of-place"] };
    let over = |text: &dyn Fn(&str) -> String| forms.iter().map(|form| text(form)).collect::<Vec<_>>().join("   ");
    let columns = |time: &str, rest: [&str; 5]| {
        format!("{time:>9} {:>8} {:>8} {:>8} {:>9} {:>9}", rest[0], rest[1], rest[2], rest[3], rest[4])
    };
    say(&format!("# {:>12} {:>12} {:>6} {:>8} {:>5}   {}", "", "", "", "", "", over(&|form| format!("{form:^FORM$}"))));
    let names = over(&|_| columns("time", ["algbw", "busbw", "#wrong", "p50", "p99"]));
    say(&format!("# {:>12} {:>12} {:>6} {:>8} {:>5}   {names}  algorithm", "size", "count", "type", "redop", "root"));
    let units = over(&|_| columns("(us)", ["(GB/s)", "(GB/s)", "", "(us)", "(us)"]));
    say(&format!("# {:>12} {:>12} {:>6} {:>8} {:>5}   {units}", "(B)", "(elements)", "", "", ""));
}

pub(super) fn row(report: &Report, row: &Row) {
    let forms: Vec<String> = row.lines().map(form).collect();
    let root = report.root.map_or_else(|| "-1".to_owned(), |root| root.to_string());
    let redop = report.redop.unwrap_or("none");
    say(&format!(
        "  {:>12} {:>12} {:>6} {redop:>8} {root:>5}   {}  {}",
        row.bytes,
        row.count,
        report.dtype,
        forms.join("   "),
        row.algorithm
    ));
}

fn form(line: &Line) -> String {
    let wrong = line.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
    let [time, p50, p99] = [line.mean_us, line.p50_us, line.p99_us].map(microseconds);
    format!("{time:>9} {:>8.2} {:>8.2} {wrong:>8} {p50:>9} {p99:>9}", line.algbw_gbs, line.busbw_gbs)
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
        say(&format!("# Paths on devices     : {}", report.devices));
    }
    let wrong: Vec<u64> = report.rows.iter().flat_map(Row::lines).filter_map(|line| line.wrong).collect();
    if !wrong.is_empty() {
        let total: u64 = wrong.iter().sum();
        say(&format!("# Out of bounds values : {total} {}", if total == 0 { "OK" } else { "FAILED" }));
    }
}

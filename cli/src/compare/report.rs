//! The figures of a comparison.

use std::error::Error;
use std::path::Path;

use serde::Serialize;

use super::contestant::Contestant;
use crate::bench::measure::percentile;
use crate::chart::{self, Curve};
use crate::say;
use crate::units::show_bytes;

/// The times of one contestant at one size, in seconds.
#[derive(Default)]
pub(super) struct Samples {
    all: Vec<f64>,
    /// The median of each round.
    medians: Vec<f64>,
}

impl Samples {
    /// Adds the times of one round.
    pub(super) fn add(&mut self, mut times: Vec<f64>) {
        times.sort_by(f64::total_cmp);
        self.medians.push(percentile(&times, 0.5));
        self.all.extend(times);
    }

    /// Returns the median of the last round.
    pub(super) fn last(&self) -> Option<f64> {
        self.medians.last().copied()
    }

    /// Returns how many times as long as the other these took: the median of the ratios within the
    /// rounds.
    fn ratio(&self, other: &Samples) -> f64 {
        // The first round only finds out how long a call takes.
        let from = usize::from(self.medians.len() > 1);
        let mut ratios: Vec<f64> = self.medians[from..].iter().zip(&other.medians[from..]).map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        percentile(&ratios, 0.5)
    }
}

/// All figures of a comparison.
#[derive(Serialize)]
pub(super) struct Report {
    kolo: &'static str,
    op: &'static str,
    ranks: usize,
    tcp: bool,
    rounds: u32,
    rows: Vec<Row>,
}

/// One size.
#[derive(Serialize)]
struct Row {
    bytes: u64,
    contestants: Vec<Times>,
}

/// The times of one contestant at one size.
#[derive(Serialize)]
struct Times {
    name: &'static str,
    p50_us: f64,
    p99_us: f64,
    /// The median over the rounds of its time divided by kolo's.
    ratio: f64,
    samples: usize,
}

impl Report {
    /// A report without rows.
    pub(super) fn new(op: &'static str, ranks: usize, tcp: bool, rounds: u32) -> Report {
        Report { kolo: env!("CARGO_PKG_VERSION"), op, ranks, tcp, rounds, rows: Vec::new() }
    }

    /// Adds the samples of one size. All contestants are compared with the first.
    pub(super) fn add(&mut self, bytes: u64, contestants: &[Contestant], samples: &[Samples]) {
        let times = |(contestant, samples_of): (&Contestant, &Samples)| {
            let mut all = samples_of.all.clone();
            all.sort_by(f64::total_cmp);
            let [p50_us, p99_us] = [0.5, 0.99].map(|share| percentile(&all, share) * 1e6);
            Times { name: contestant.name(), p50_us, p99_us, ratio: samples_of.ratio(&samples[0]), samples: all.len() }
        };
        self.rows.push(Row { bytes, contestants: contestants.iter().zip(samples).map(times).collect() });
    }

    pub(super) fn print(&self) {
        say("# times in us; ratio: the median over the rounds of a contestant's time divided by kolo's");
        say(&format!("{:>10}  {:<16} {:>12} {:>12} {:>9}", "size", "contestant", "p50", "p99", "ratio"));
        for row in &self.rows {
            for (i, times) in row.contestants.iter().enumerate() {
                // An operation without a size has one row, of size 0.
                let size = if i == 0 && row.bytes > 0 { show_bytes(row.bytes) } else { String::new() };
                let Times { name, p50_us, p99_us, ratio, .. } = times;
                say(&format!("{size:>10}  {name:<16} {p50_us:>12.2} {p99_us:>12.2} {ratio:>9.2}"));
            }
        }
    }

    pub(super) fn draw(&self, file: &Path) -> Result<(), Box<dyn Error>> {
        let title = format!("{}, {} ranks, f32{}", self.op, self.ranks, if self.tcp { ", TCP" } else { "" });
        let curves = |value: fn(&Times) -> f64| -> Vec<Curve> {
            let count = self.rows.first().map_or(0, |row| row.contestants.len());
            (0..count)
                .map(|i| {
                    let points = self.rows.iter().map(|row| (row.bytes.max(1) as f64, value(&row.contestants[i]))).collect();
                    (self.rows[0].contestants[i].name, chart::COLOURS[i % chart::COLOURS.len()], points)
                })
                .collect()
        };
        let panels =
            [("latency, median (us)", curves(|times| times.p50_us)), ("time divided by kolo's", curves(|times| times.ratio))];
        chart::draw(&title, &panels, file)
    }
}

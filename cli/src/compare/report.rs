//! What a comparison found.

use std::error::Error;
use std::path::Path;

use serde::Serialize;

use super::contestant::Contestant;
use crate::chart::{self, Curve};
use crate::say;
use crate::units::show_bytes;

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
pub(super) struct Row {
    pub(super) bytes: u64,
    pub(super) contestants: Vec<Times>,
}

/// The times of one contestant at one size, in seconds.
#[derive(Serialize)]
pub(super) struct Times {
    name: &'static str,
    p50_us: f64,
    p99_us: f64,
    /// The median of its time divided by kolo's, over the rounds: how many times faster kolo is.
    ratio: f64,
    samples: usize,
    #[serde(skip)]
    all: Vec<f64>,
    #[serde(skip)]
    medians: Vec<f64>,
}

impl Row {
    pub(super) fn new(bytes: u64, contestants: Vec<Contestant>) -> Row {
        let times = |contestant: Contestant| Times {
            name: contestant.name(),
            p50_us: 0.0,
            p99_us: 0.0,
            ratio: 0.0,
            samples: 0,
            all: Vec::new(),
            medians: Vec::new(),
        };
        Row { bytes, contestants: contestants.into_iter().map(times).collect() }
    }
}

impl Times {
    /// The times of one round.
    pub(super) fn add(&mut self, times: Vec<f64>) {
        self.medians.push(percentile(&times, 0.5));
        self.all.extend(times);
    }

    /// The median of the last round.
    pub(super) fn last(&self) -> Option<f64> {
        self.medians.last().copied()
    }
}

/// The number that so much of all are not larger than (nearest rank).
fn percentile(numbers: &[f64], share: f64) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted[at.clamp(1, sorted.len()) - 1]
}

impl Report {
    /// Sums up what the rounds found. The first contestant is the one that all are compared with.
    pub(super) fn new(op: &'static str, ranks: usize, tcp: bool, rounds: u32, mut rows: Vec<Row>) -> Report {
        for row in &mut rows {
            let reference = row.contestants[0].medians.clone();
            for times in &mut row.contestants {
                // The first round finds out how long things take.
                let from = usize::from(times.medians.len() > 1);
                let ratios: Vec<f64> =
                    times.medians[from..].iter().zip(&reference[from..]).map(|(its, kolo)| its / kolo).collect();
                times.p50_us = percentile(&times.all, 0.5) * 1e6;
                times.p99_us = percentile(&times.all, 0.99) * 1e6;
                times.ratio = percentile(&ratios, 0.5);
                times.samples = times.all.len();
            }
        }
        Report { kolo: env!("CARGO_PKG_VERSION"), op, ranks, tcp, rounds, rows }
    }

    pub(super) fn print(&self) {
        say("# times in us; ratio: the median over the rounds of a contestant's time divided by kolo's");
        say(&format!("{:>10}  {:<16} {:>12} {:>12} {:>9}", "size", "who", "p50", "p99", "ratio"));
        for row in &self.rows {
            for (i, times) in row.contestants.iter().enumerate() {
                let size = if i == 0 { show_bytes(row.bytes) } else { String::new() };
                let Times { name, p50_us, p99_us, ratio, .. } = times;
                say(&format!("{size:>10}  {name:<16} {p50_us:>12.2} {p99_us:>12.2} {ratio:>9.2}"));
            }
        }
    }

    pub(super) fn write(&self, file: &Path) -> Result<(), Box<dyn Error>> {
        std::fs::write(file, serde_json::to_string_pretty(self)?)?;
        Ok(())
    }

    pub(super) fn draw(&self, file: &Path) -> Result<(), Box<dyn Error>> {
        let title = format!("{}, {} ranks, f32{}", self.op, self.ranks, if self.tcp { ", TCP" } else { "" });
        let curves = |value: fn(&Times) -> f64, from: usize| -> Vec<Curve> {
            let count = self.rows.first().map_or(0, |row| row.contestants.len());
            (from..count)
                .map(|i| {
                    let points = self.rows.iter().map(|row| (row.bytes.max(1) as f64, value(&row.contestants[i]))).collect();
                    (self.rows[0].contestants[i].name, chart::COLOURS[i % chart::COLOURS.len()], points)
                })
                .collect()
        };
        let panels = [
            ("latency, median (us)", curves(|times| times.p50_us, 0)),
            ("time divided by kolo's", curves(|times| times.ratio, 1)),
        ];
        chart::draw(&title, &panels, file)
    }
}

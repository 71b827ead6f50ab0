//! The figures of a comparison.

use std::error::Error;

use serde::Serialize;

use super::contestant::Contestant;
use super::placement::{self, Met, Placement, State};
use crate::bench::measure::percentile;
use crate::bench::plot::over_sizes;
use crate::chart::{COLOURS, Curve};
use crate::files::Output;
use crate::table::{Side, Table, remark};
use crate::units::show_bytes;

/// From how many processors on the report says that other programs use them.
const BUSY: f64 = 0.2;

/// The most rounds without a middle half: the first one only finds out how long a call takes, and three
/// have less than a half between their outer ones.
const HALVED: usize = 4;

/// The times of one contestant at one size, in seconds, sorted within each round.
#[derive(Default)]
pub(super) struct Samples(Vec<Vec<f64>>);

impl Samples {
    /// Adds the times of one round.
    pub(super) fn add(&mut self, mut times: Vec<f64>) {
        times.sort_by(f64::total_cmp);
        self.0.push(times);
    }

    /// Returns the median of the last round.
    pub(super) fn last(&self) -> Option<f64> {
        self.0.last().map(|times| percentile(times, 0.5))
    }

    /// Returns how many times as long as the other these took, in each round that counts, sorted.
    fn ratios(&self, other: &Samples, counts: impl Fn(usize) -> bool) -> Vec<f64> {
        // The first round only finds out how long a call takes.
        let from = usize::from(self.0.len() > 1);
        let rounds = self.0.iter().zip(&other.0).enumerate().skip(from).filter(|(round, _)| counts(*round));
        let mut ratios: Vec<f64> = rounds.map(|(_, (a, b))| percentile(a, 0.5) / percentile(b, 0.5)).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }
}

/// All figures of a comparison.
#[derive(Serialize)]
pub(super) struct Report {
    kolo: &'static str,
    op: &'static str,
    ranks: usize,
    tcp: bool,
    /// How many were asked for. A signal ends a comparison before.
    rounds: u32,
    /// How many processors other programs used meanwhile, where the system says so.
    busy_processors: Option<f64>,
    /// What was met of both states of the processors, where the system says.
    near: Option<Met>,
    far: Option<Met>,
    rows: Vec<Row>,
}

/// One size.
#[derive(Serialize)]
struct Row {
    bytes: u64,
    /// How many rounds were complete.
    rounds: usize,
    contestants: Vec<Times>,
}

/// The times of one contestant at one size.
#[derive(Serialize)]
struct Times {
    name: &'static str,
    p50_us: f64,
    p99_us: f64,
    /// The median over the rounds of its time divided by kolo's, and the quartiles.
    ratio: f64,
    ratio_p25: f64,
    ratio_p75: f64,
    /// The median ratio of the rounds in which the processors were near, or far; none if there were none.
    ratio_near: Option<f64>,
    ratio_far: Option<f64>,
    samples: usize,
}

impl Report {
    /// A report without rows.
    pub(super) fn new(op: &'static str, ranks: usize, tcp: bool, rounds: u32) -> Report {
        let (near, far) = (None, None);
        Report { kolo: env!("CARGO_PKG_VERSION"), op, ranks, tcp, rounds, busy_processors: None, near, far, rows: Vec::new() }
    }

    /// Takes how many processors other programs used.
    pub(super) fn was_busy(&mut self, processors: Option<f64>) {
        self.busy_processors = processors;
    }

    /// Takes where the processors were.
    pub(super) fn was_placed(&mut self, placement: &Placement) {
        (self.near, self.far) = (placement.met(State::Near), placement.met(State::Far));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Adds the complete rounds of one size, if there are any. All contestants are compared with the
    /// first. `states` says where the processors were in each round.
    pub(super) fn add(&mut self, bytes: u64, contestants: &[Contestant], mut samples: Vec<Samples>, states: &[Option<State>]) {
        let rounds = samples.iter().map(|samples| samples.0.len()).min().unwrap_or(0);
        if rounds == 0 {
            return;
        }
        samples.iter_mut().for_each(|samples| samples.0.truncate(rounds));
        let times = |(contestant, samples_of): (&Contestant, &Samples)| {
            let mut all = samples_of.0.concat();
            all.sort_by(f64::total_cmp);
            let [p50_us, p99_us] = [0.5, 0.99].map(|share| percentile(&all, share) * 1e6);
            let ratios = samples_of.ratios(&samples[0], |_| true);
            let [ratio, ratio_p25, ratio_p75] = [0.5, 0.25, 0.75].map(|share| percentile(&ratios, share));
            let [ratio_near, ratio_far] = [State::Near, State::Far].map(|state| {
                let ratios = samples_of.ratios(&samples[0], |round| states.get(round) == Some(&Some(state)));
                (!ratios.is_empty()).then(|| percentile(&ratios, 0.5))
            });
            let name = contestant.name();
            Times { name, p50_us, p99_us, ratio, ratio_p25, ratio_p75, ratio_near, ratio_far, samples: all.len() }
        };
        self.rows.push(Row { bytes, rounds, contestants: contestants.iter().zip(&samples).map(times).collect() });
    }

    pub(super) fn print(&self) {
        // A few rounds have no middle half.
        let has_half = self.rows.iter().all(|row| row.rounds > HALVED);
        let half = if has_half { ", and the middle half of them" } else { "" };
        remark(&format!(
            "times in us. ratio: in each round, a contestant's median time divided by kolo's; the median over the rounds{half}. \
             The machine changes between rounds, so it is not the ratio of two p50",
        ));
        if let Some(processors) = self.busy_processors.filter(|processors| *processors >= BUSY) {
            let all = kolo::settings::cores();
            remark(&format!(
                "BUSY: other programs used {processors:.1} of {all} processors meanwhile: times are longer than on a quiet \
                 machine, and ratios vary"
            ));
        }
        placement::say([&self.near, &self.far]);
        let columns = [
            ("size", Side::Right),
            ("contestant", Side::Left),
            ("p50", Side::Right),
            ("p99", Side::Spare),
            ("ratio", Side::Right),
            ("middle half", Side::Right),
            ("near", Side::Right),
            ("far", Side::Right),
        ];
        let is_apart = self.near.is_some() && self.far.is_some();
        // A cell is shown if its column is.
        let is_shown = |column: usize| match columns[column].0 {
            "middle half" => has_half,
            "near" | "far" => is_apart,
            _ => true,
        };
        let shown: Vec<(&str, Side)> =
            (0..columns.len()).filter(|column| is_shown(*column)).map(|column| columns[column]).collect();
        let mut table = Table::new(&shown);
        for row in &self.rows {
            for (i, times) in row.contestants.iter().enumerate() {
                // An operation without a size has one row, of size 0.
                let size = if i == 0 && row.bytes > 0 { show_bytes(row.bytes) } else { String::new() };
                let Times { name, p50_us, p99_us, ratio, ratio_p25, ratio_p75, ratio_near, ratio_far, .. } = times;
                let half = if i == 0 { String::new() } else { format!("{ratio_p25:.2}-{ratio_p75:.2}") };
                let numbers = [p50_us, p99_us, ratio].map(|number| format!("{number:.2}"));
                let apart = [ratio_near, ratio_far].map(|ratio| ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")));
                let cells = [vec![size, (*name).to_owned()], numbers.to_vec(), vec![half], apart.to_vec()].concat();
                table.add(cells.into_iter().enumerate().filter(|(column, _)| is_shown(*column)).map(|(_, cell)| cell).collect());
            }
        }
        table.say(false);
    }

    /// Draws the times and ratios of all contestants but those that are `hidden`.
    pub(super) fn draw(&self, output: Output, hidden: &[Contestant]) -> Result<(), Box<dyn Error>> {
        let title = format!("{}, {} ranks, f32{}", self.op, self.ranks, if self.tcp { ", TCP" } else { "" });
        let curves = |value: fn(&Times) -> f64| -> Vec<Curve> {
            let count = self.rows.first().map_or(0, |row| row.contestants.len());
            let is_hidden = |name| hidden.iter().any(|hidden| hidden.name() == name);
            (0..count)
                .filter(|&i| !is_hidden(self.rows[0].contestants[i].name))
                .map(|i| {
                    let points = self.rows.iter().map(|row| (row.bytes.max(1) as f64, value(&row.contestants[i]))).collect();
                    Curve::new(self.rows[0].contestants[i].name, COLOURS[i % COLOURS.len()], points)
                })
                .collect()
        };
        let panels =
            [("latency, median (us)", curves(|times| times.p50_us)), ("time divided by kolo's", curves(|times| times.ratio))];
        over_sizes(&title, panels, output)
    }
}

//! `kolo plan --simulate`: the time of each algorithm by events, beside its price.

use std::time::Duration;

use clap::Args as ClapArgs;
use kolo::plan::{Candidate, CostModel, Layout};
use kolo::{Op, Rank};
use serde_json::json;

use super::timing::{Scenario, Simulated, simulate};
use crate::say;
use crate::table::{Side, Table};
use crate::units::{bytes, duration, show_bytes, show_seconds};

/// Arguments of a simulation.
#[derive(ClapArgs)]
pub(super) struct SimulateArgs {
    /// Simulate every message, with the contention of shared links, racks and stragglers
    #[arg(long)]
    pub(super) simulate: bool,
    /// Spread the hosts evenly over this many racks, each with an uplink
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "1")]
    pub(super) racks: u32,
    /// How many times the bandwidth of a rack's uplink its hosts have together [default: 1]
    #[arg(long, requires = "racks", help_heading = "With --racks", value_parser = factor)]
    oversubscription: Option<f64>,
    /// How much longer a message between racks takes [default: 0s]
    #[arg(long, requires = "racks", help_heading = "With --racks", value_parser = duration)]
    rack_latency: Option<Duration>,
    /// A rank that calls later than the others: 3:5ms; can be given several times
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_name = "RANK:TIME", value_parser = straggler)]
    straggler: Vec<(Rank, f64)>,
    /// Make every rank late at random: the mean of an exponential distribution
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_parser = duration, default_value = "0s")]
    jitter: Duration,
    /// The seed of the jitter
    #[arg(long, requires = "simulate", help_heading = "With --simulate", default_value = "0")]
    seed: u64,
    /// Bytes that an interface sends at once after a pause, as the bucket of a token bucket filter
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_parser = bytes, default_value = "0")]
    burst: u64,
    /// The number of processors that all ranks share, as on a test bed of one machine [default: one for each rank]
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_parser = clap::value_parser!(u32).range(1..))]
    processors: Option<u32>,
    /// Processor time of a message between hosts, at either end [default: 3us]
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_parser = duration)]
    overhead: Option<Duration>,
    /// Simulate this many consecutive calls, and print the mean
    #[arg(long, requires = "simulate", help_heading = "With --simulate", value_parser = clap::value_parser!(u32).range(1..=10_000), default_value = "1")]
    calls: u32,
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Draw times against ranks to this folder, for 2 to RANKS ranks, and print which algorithm wins
    #[arg(long, requires = "simulate", help_heading = "With --simulate", conflicts_with = "json", value_name = "FOLDER")]
    pub(super) plots: Option<std::path::PathBuf>,
}

fn factor(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| (1e-3..=1e6).contains(number));
    number.ok_or_else(|| "it is a factor from 0.001 to 1000000, such as 4".to_owned())
}

fn straggler(text: &str) -> Result<(Rank, f64), String> {
    let parts = text.split_once(':').and_then(|(rank, time)| Some((rank.trim().parse().ok()?, duration(time).ok()?)));
    let (rank, late) = parts.ok_or_else(|| format!("{text:?} is not RANK:TIME; write 3:5ms"))?;
    Ok((rank, late.as_secs_f64()))
}

impl SimulateArgs {
    /// Returns the layout in racks, and adds what their uplinks cost to the model.
    pub(super) fn in_racks(&self, layout: Layout, model: &mut CostModel, is_measured: bool) -> Result<Layout, String> {
        if self.racks as usize > layout.hosts {
            return Err(format!("{} hosts cannot be in {} racks", layout.hosts, self.racks));
        }
        if self.racks == 1 && (self.oversubscription.is_some() || self.rack_latency.is_some()) {
            return Err(
                "one rack has no uplinks, which --oversubscription and --rack-latency describe; give more racks".to_owned()
            );
        }
        if self.racks > 1 && self.racks as usize == layout.hosts {
            let why = "each host would be alone in its rack, and to a job that is the same as no racks; give fewer";
            return Err(format!("{} hosts in {} racks: {why}", layout.hosts, self.racks));
        }
        let layout = layout.in_racks(self.racks as usize);
        if let Some(longer) = self.rack_latency {
            model.uplink.latency = model.network.latency + longer.as_secs_f64();
        }
        // What is measured stays, unless an option says otherwise.
        if let Some(factor) = self.oversubscription.or((!is_measured).then_some(1.0)) {
            model.uplink.per_byte = model.network.per_byte * factor / (layout.hosts as f64 / layout.racks as f64);
        }
        Ok(layout)
    }

    pub(super) fn scenario(&self, layout: Layout, mut model: CostModel) -> Result<Scenario, String> {
        if let Some((rank, _)) = self.straggler.iter().find(|(rank, _)| *rank >= layout.ranks) {
            return Err(format!("rank {rank} is late, but there are only {} ranks", layout.ranks));
        }
        if let Some(overhead) = self.overhead {
            model.network.overhead = overhead.as_secs_f64();
        }
        let mut scenario = Scenario::new(layout, model);
        scenario.racks = self.racks as usize;
        scenario.oversubscription = self.oversubscription.unwrap_or(1.0);
        scenario.rack_latency = self.rack_latency.unwrap_or_default().as_secs_f64();
        scenario.late.clone_from(&self.straggler);
        scenario.jitter = self.jitter.as_secs_f64();
        scenario.seed = self.seed;
        scenario.burst = self.burst as f64;
        scenario.processors = self.processors.map(|number| number as usize);
        scenario.calls = self.calls as usize;
        Ok(scenario)
    }
}

/// Prints algorithms, the first of which is the best, as JSON.
pub(super) fn print_json(op: Op, bytes: u64, scenario: &Scenario, rows: Vec<serde_json::Value>) -> Result<(), String> {
    let Layout { ranks, hosts, .. } = scenario.layout;
    let whole = json!({"op": op.name(), "bytes": bytes, "ranks": ranks, "hosts": hosts, "algorithms": rows});
    say(&serde_json::to_string_pretty(&whole).map_err(|error| error.to_string())?);
    Ok(())
}

/// Simulates candidates, and prints those that can be simulated, fastest first.
pub(super) fn print(
    args: &SimulateArgs,
    op: Op,
    bytes: u64,
    found: &[Candidate],
    scenario: &Scenario,
    is_wide: bool,
) -> Result<(), String> {
    let simulated = found
        .iter()
        .map(|candidate| (candidate, simulate(op, bytes, (candidate.choice.algorithm, candidate.choice.between), scenario)));
    let mut rows: Vec<(&Candidate, Option<Simulated>)> = simulated.collect();
    rows.sort_by(|a, b| {
        let seconds = |row: &(&Candidate, Option<Simulated>)| row.1.map_or(f64::INFINITY, |found| found.seconds);
        seconds(a).total_cmp(&seconds(b))
    });
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(candidate, found)| {
                json!({
                    "algorithm": candidate.choice.to_string(),
                    "priced_s": candidate.seconds,
                    "simulated_s": found.map(|found| found.seconds),
                    "busiest_link_bytes": found.map(|found| found.busiest_bytes),
                    "critical_rank": found.map(|found| found.critical),
                    "messages": found.map(|found| found.messages),
                    "method": found.map(|found| found.method.to_string()),
                })
            })
            .collect();
        return print_json(op, bytes, scenario, rows);
    }
    let mut table = Table::new(&[
        ("algorithm", Side::Left),
        ("simulated", Side::Right),
        ("priced", Side::Right),
        ("ratio", Side::Spare),
        ("busiest link", Side::Spare),
        ("critical", Side::Wide),
        ("messages", Side::Wide),
        ("how", Side::Left),
    ]);
    for (candidate, found) in rows {
        let (name, priced) = (candidate.choice.to_string(), show_seconds(candidate.seconds));
        let cells = match found {
            Some(found) => [
                name,
                show_seconds(found.seconds),
                priced,
                format!("{:.2}", found.seconds / candidate.seconds),
                show_bytes(found.busiest_bytes.round() as u64),
                found.critical.to_string(),
                found.messages.to_string(),
                found.method.to_string(),
            ],
            None => [name, "-".to_owned(), priced, String::new(), String::new(), String::new(), String::new(), String::new()],
        };
        table.add(cells.to_vec());
    }
    table.say(is_wide);
    Ok(())
}

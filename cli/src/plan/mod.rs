//! `kolo plan`: prints the choice of algorithm and why the others lose.

mod plots;
mod simulate;
mod timing;

use std::sync::LazyLock;
use std::time::Duration;

use clap::Args as ClapArgs;
use kolo::plan::{Candidate, CostModel, Layout, MeasuredCosts, MeasuredHosts, PairClass, candidates, measured, measured_hosts};
use kolo::settings::{BANDWIDTH, bandwidth, selection_of_environment, topology_of_environment};
use kolo::{Algorithm, Op};

use crate::names::{named, none};
use crate::table::{Side, Table, say_prose};
use crate::units::{bytes, count, duration, show_bytes, show_seconds};
use crate::{Failure, say};
use timing::Links;

/// Arguments of `kolo plan`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The operation
    #[arg(value_parser = named(&PLANNED, Op::name, none))]
    op: Op,
    /// Bytes of the buffer, or of all blocks together: 8, 4K, 1M
    #[arg(short, long, value_parser = bytes, default_value = "1M")]
    bytes: u64,
    /// How many ranks
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: u32,
    /// How many hosts; ranks are spread evenly
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "1")]
    hosts: u32,
    /// Use messages inside hosts too, as with KOLO_TRANSPORT=tcp
    #[arg(long)]
    no_windows: bool,
    /// Use this algorithm [default: KOLO_ALGORITHM, or the cheapest]
    #[arg(long, value_parser = named(Algorithm::ALL, Algorithm::name, none))]
    algorithm: Option<Algorithm>,
    /// Latency between hosts [default: KOLO_NETWORK_LATENCY, or 25us]
    #[arg(long, value_parser = duration)]
    latency: Option<Duration>,
    /// Gigabytes per second of one host's network interface [default: KOLO_NETWORK_BANDWIDTH, or
    /// 1.25]
    #[arg(long, value_parser = gigabytes)]
    bandwidth: Option<f64>,
    /// Use the latency, bandwidth and reduction rate that a job has measured last, and list all that
    /// jobs have measured from this machine
    #[arg(long, conflicts_with_all = ["latency", "bandwidth"])]
    measured: bool,
    /// Print all columns, however wide the terminal is
    #[arg(long)]
    wide: bool,
    #[command(flatten)]
    simulation: simulate::SimulateArgs,
}

/// Operations that have algorithms. An operation with a count for each rank has the same plan as the one
/// without, and a receive that of its send.
static PLANNED: LazyLock<Vec<Op>> = LazyLock::new(|| {
    let has_algorithms = |op| !candidates(op, 0, Layout::even(2, 1), &CostModel::default()).is_empty();
    let is_planned = |op: &Op| has_algorithms(*op) && *op != Op::Recv && !op.name().ends_with("_v");
    Op::ALL.iter().copied().filter(is_planned).collect()
});

fn gigabytes(text: &str) -> Result<f64, String> {
    bandwidth(text.trim()).ok_or_else(|| BANDWIDTH.to_owned())
}

pub(crate) fn plan(args: &Args) -> Result<(), Failure> {
    if args.hosts > args.ranks {
        return Err(Failure::Usage(format!("{} ranks cannot be on {} hosts", args.ranks, args.hosts)));
    }
    let (algorithm, mut model) = selection_of_environment().map_err(|error| error.to_string())?;
    let algorithm = args.algorithm.or(algorithm);
    if let Some(latency) = args.latency {
        model.network.latency = latency.as_secs_f64();
        model.uplink.latency = model.network.latency;
    }
    if let Some(rate) = args.bandwidth {
        model.network.per_byte = 1e-9 / rate;
    }
    let links = if args.measured { use_measured(&mut model, args)? } else { None };
    let (ranks, hosts) = (args.ranks as usize, args.hosts as usize);
    let mut layout = Layout::even(ranks, if args.no_windows { ranks } else { hosts });
    layout.windows &= !args.no_windows;
    let layout = args.simulation.in_racks(layout, &mut model, args.measured).map_err(Failure::Usage)?;
    let bytes = if args.op == Op::Barrier { 0 } else { args.bytes };
    let mut scenario = args.simulation.scenario(layout, model).map_err(Failure::Usage)?;
    let measured = links.as_ref().map(|links| links.order.len());
    scenario.links = links.filter(|links| links.order.len() == layout.hosts && layout.racks == 1);
    if let (Some(measured), None, true) = (measured, &scenario.links, args.simulation.simulate && !args.simulation.json) {
        say_prose(&format!("the links of {} were measured; those of this simulation are alike", count(measured, "host")));
    }
    if let Some(folder) = &args.simulation.plots {
        return Ok(plots::draw(&scenario, folder)?);
    }

    let found = candidates(args.op, bytes, layout, &model);
    let chosen = match algorithm {
        None => 0,
        Some(forced) => found.iter().position(|candidate| candidate.choice.algorithm == forced).ok_or_else(|| {
            let known: Vec<String> = found.iter().map(|candidate| candidate.choice.algorithm.to_string()).collect();
            Failure::Usage(format!("{} has no {forced} here; it has {}", args.op, known.join(", ")))
        })?,
    };
    let Some(winner) = found.get(chosen) else {
        return Err(Failure::Usage(format!("{} needs at least two ranks", args.op)));
    };

    if args.simulation.json {
        if args.simulation.simulate {
            simulate::print(&args.simulation, args.op, bytes, &found, &scenario, args.wide)?;
        } else {
            let rows = found.iter().enumerate().map(|(i, candidate)| json(candidate, i == chosen)).collect();
            simulate::print_json(args.op, bytes, &scenario, rows)?;
        }
        return Ok(());
    }
    let size = if args.op == Op::Barrier { String::new() } else { format!(" of {}", show_bytes(bytes)) };
    let racks = if layout.racks > 1 { format!(" in {} racks (--racks)", layout.racks) } else { String::new() };
    say_prose(&format!("{}{size} among {} on {}{racks}", args.op, count(ranks, "rank"), count(hosts, "host")));
    if let Some((path, source)) = topology_of_environment().map_err(|error| error.to_string())? {
        say_prose(&format!("in a job, this host is at {path} ({source})"));
    }
    if args.simulation.simulate {
        return Ok(simulate::print(&args.simulation, args.op, bytes, &found, &scenario, args.wide)?);
    }
    say_prose(&format!("{}{}", winner.choice, if algorithm.is_some() { " (forced)" } else { "" }));
    say_prose(&format!("  predicted time           {}", show_seconds(winner.seconds)));
    say_prose(&format!(
        "  on the wire, per rank    {} in {} messages",
        show_bytes(winner.sent_per_rank),
        winner.messages_per_rank
    ));
    say("");
    let mut table = Table::new(&[
        ("algorithm", Side::Left),
        ("time", Side::Right),
        ("latency", Side::Wide),
        ("transfer", Side::Wide),
        ("reduction", Side::Wide),
        ("sent/rank", Side::Wide),
        ("messages", Side::Wide),
        ("why", Side::Left),
    ]);
    for (i, candidate) in found.iter().enumerate() {
        table.add(vec![
            candidate.choice.to_string(),
            show_seconds(candidate.seconds),
            show_seconds(candidate.latency),
            show_seconds(candidate.transfer),
            show_seconds(candidate.reduction),
            show_bytes(candidate.sent_per_rank),
            candidate.messages_per_rank.to_string(),
            if i == chosen { "chosen".to_owned() } else { why(candidate, winner, algorithm.is_some()) },
        ]);
    }
    table.say(args.wide);
    Ok(())
}

fn json(candidate: &Candidate, is_chosen: bool) -> serde_json::Value {
    serde_json::json!({
        "algorithm": candidate.choice.to_string(),
        "is_chosen": is_chosen,
        "priced_s": candidate.seconds,
        "latency_s": candidate.latency,
        "transfer_s": candidate.transfer,
        "reduction_s": candidate.reduction,
        "sent_per_rank_bytes": candidate.sent_per_rank,
        "messages_per_rank": candidate.messages_per_rank,
    })
}

/// Takes the latest of what jobs have measured from this machine, and prints all of it, unless JSON is
/// printed. Returns the links, if each two hosts were measured.
fn use_measured(model: &mut CostModel, args: &Args) -> Result<Option<Links>, String> {
    let known = measured();
    let Some(latest) = known.iter().find(|costs| costs.class != PairClass::Pair) else {
        return Err("no job has measured costs from this machine: a job over several hosts does when it starts, unless \
                    KOLO_NETWORK_LATENCY or KOLO_NETWORK_BANDWIDTH gives them"
            .to_owned());
    };
    let mut table = Table::new(&[
        ("from", Side::Left),
        ("to", Side::Left),
        ("links", Side::Wide),
        ("where", Side::Left),
        ("latency", Side::Right),
        ("GB/s", Side::Right),
        ("reduction", Side::Wide),
        ("age", Side::Right),
    ]);
    for MeasuredCosts { from, to, links, class, network, reduce, at, .. } in &known {
        let rate = |per_byte: f64| if per_byte > 0.0 { format!("{:.2}", 1e-9 / per_byte) } else { "-".to_owned() };
        let age = at.elapsed().unwrap_or_default().as_secs();
        let age = if age < 7200 { format!("{} min", age / 60) } else { format!("{} h", age / 3600) };
        let (from, to, links, place) = (from.to_string(), to.to_string(), links.to_string(), class.name().to_owned());
        table.add(vec![from, to, links, place, show_seconds(network.latency), rate(network.per_byte), rate(*reduce), age]);
    }
    let of_class = |class| known.iter().find(|costs| costs.class == class);
    let inside = if latest.class == PairClass::Hosts { latest } else { of_class(PairClass::SameRack).unwrap_or(latest) };
    (model.network, model.reduce) = (inside.network, inside.reduce);
    *model = model.with_uplink(of_class(PairClass::OtherRack).map_or(inside.network, |costs| costs.network));
    let pairs = measured_hosts(&known, *model);
    if !args.simulation.json {
        table.say(args.wide);
        if let Some(MeasuredHosts { hosts, order, .. }) = &pairs {
            let order: Vec<&str> = order.iter().map(|&host| &*hosts[host]).collect();
            say(&format!("schedules visit {}", order.join(", ")));
        }
        say("");
    }
    Ok(pairs.map(|MeasuredHosts { order, links, model: along, .. }| {
        *model = along;
        Links { order, costs: links }
    }))
}

/// Returns the main reason why a candidate loses to the winner.
fn why(candidate: &Candidate, winner: &Candidate, is_forced: bool) -> String {
    let losses = [
        ("latency", candidate.latency - winner.latency),
        ("transfer", candidate.transfer - winner.transfer),
        ("reduction", candidate.reduction - winner.reduction),
    ];
    let (what, most) = losses.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(("time", 0.0));
    if candidate.seconds <= winner.seconds {
        // Of two that cost about the same, the hierarchical form is chosen.
        return if is_forced { "not forced" } else { "about as long" }.to_owned();
    }
    format!("{:.1} times as long: {} more {what}", candidate.seconds / winner.seconds, show_seconds(most))
}

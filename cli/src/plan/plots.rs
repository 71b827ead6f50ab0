//! Plots of simulated times against the number of ranks.

use std::path::Path;

use kolo::plan::{Candidate, Layout, candidates};
use kolo::{Algorithm, Op};

use super::timing::{Scenario, simulate};
use crate::chart::{self, COLOURS, Curve, Panel, Scale};
use crate::files::Output;
use crate::say;
use crate::units::{show_bytes, show_seconds};

/// Each with the unit of its times, and how many of it a second has.
const SIZES: [(u64, &str, f64); 4] = [(8, "us", 1e6), (1 << 20, "us", 1e6), (64 << 20, "ms", 1e3), (1 << 30, "ms", 1e3)];

/// The algorithms that the plots show, each in one colour in all plots.
const SHOWN: [(Algorithm, &str); 5] = [
    (Algorithm::Ring, "ring"),
    (Algorithm::DoubleTree, "double tree"),
    (Algorithm::HalvingDoubling, "halving-doubling"),
    (Algorithm::RecursiveDoubling, "recursive doubling"),
    (Algorithm::Hierarchical, "hierarchy"),
];

/// Simulates an all-reduce of each size for 2, 4, 8 ranks and so on up to those of the scenario, with
/// as many ranks on each host. Draws two files to `folder`, and prints the fastest of each as a table.
pub(super) fn draw(scenario: &Scenario, folder: &Path) -> Result<(), String> {
    let Layout { ranks: most, hosts, windows, .. } = scenario.layout;
    let per_host = most / hosts;
    // Before the simulations, which take long.
    std::fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let open = |which| Output::open(Some(&folder.join(format!("{which}-{per_host}.svg"))));
    let outputs = [open("small")?, open("large")?];
    let worlds: Vec<usize> = std::iter::successors(Some(2), |world| Some(2 * world)).take_while(|&world| world <= most).collect();
    // Beyond 1,024 ranks the curves are smooth, and simulations take seconds.
    let is_shown = |world: &usize| world / per_host >= 2 && (*world <= 1024 || world.ilog2().is_multiple_of(2));
    let worlds: Vec<usize> = worlds.into_iter().filter(is_shown).collect();
    say(&format!("| ranks | {} |", SIZES.map(|(bytes, ..)| show_bytes(bytes)).join(" | ")));
    say(&format!("|---|{}", "---|".repeat(SIZES.len())));
    let mut curves: Vec<Vec<Curve>> = SIZES
        .iter()
        .map(|_| SHOWN.iter().zip(COLOURS).map(|((_, name), colour)| Curve::new(name, colour, Vec::new())).collect())
        .collect();
    for &world in &worlds {
        let layout = Layout::even(world, world / per_host);
        let layout = if windows { layout } else { Layout::even(world, world) };
        let layout = layout.in_racks(scenario.racks);
        let scenario = &{
            let mut smaller = scenario.clone();
            (smaller.layout, smaller.racks) = (layout, scenario.racks.min(layout.hosts));
            smaller.late.retain(|(rank, _)| *rank < world);
            smaller
        };
        let mut row = Vec::new();
        for (curves, (bytes, _, units)) in curves.iter_mut().zip(SIZES) {
            let mut best: Option<(f64, &str)> = None;
            for candidate in candidates(Op::AllReduce, bytes, layout, &scenario.model) {
                let Some((index, seconds)) = time(&candidate, bytes, scenario) else { continue };
                curves[index].points.push((world as f64, seconds * units));
                if best.is_none_or(|(least, _)| seconds < least) {
                    best = Some((seconds, SHOWN[index].1));
                }
            }
            row.push(best.map_or_else(|| "-".to_owned(), |(seconds, name)| format!("{name}, {}", show_seconds(seconds))));
        }
        say(&format!("| {world} | {} |", row.join(" | ")));
    }
    let names = SIZES.map(|(bytes, unit, _)| format!("{}, time ({unit})", show_bytes(bytes)));
    for curves in &mut curves {
        curves.retain(|curve| !curve.points.is_empty());
    }
    let scale = Scale::Log(|ranks| format!("{ranks:.0}"));
    let panel = |(y, curves)| Panel { x: "ranks", y, scale, curves };
    let panels: Vec<Panel> = names.into_iter().zip(curves).map(panel).collect();
    for (panels, output) in panels.chunks(2).zip(outputs.into_iter().flatten()) {
        let on = if per_host == 1 { "one rank on each host".to_owned() } else { format!("{per_host} ranks on each host") };
        let text = chart::draw(Some(&format!("all_reduce, simulated, {on}")), panels, panels.len());
        output.write(&text.map_err(|error| format!("the plots cannot be drawn: {error}"))?)?;
    }
    Ok(())
}

/// Returns the index of a candidate's curve and its seconds, if it is shown and can be simulated.
fn time(candidate: &Candidate, bytes: u64, scenario: &Scenario) -> Option<(usize, f64)> {
    let index = SHOWN.iter().position(|(algorithm, _)| *algorithm == candidate.choice.algorithm)?;
    simulate(Op::AllReduce, bytes, (candidate.choice.algorithm, candidate.choice.between), scenario)
        .map(|found| (index, found.seconds))
}

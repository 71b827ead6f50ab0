//! Bandwidth and latency against size, as SVG.

use std::error::Error;

use super::report::{Line, Report};
use crate::chart::{self, COLOURS, Curve, Panel, Scale};
use crate::files::Output;
use crate::units::{count, show_bytes};

pub(super) fn draw(report: &Report, output: Output) -> Result<(), Box<dyn Error>> {
    let title = format!("{}, {}, {}, {}", report.op, count(report.ranks, "rank"), report.transport, report.dtype);
    // The bandwidth at the median time, so that both panels show the same samples.
    let bandwidth = |line: &Line| line.busbw_gbs * line.mean_us / line.p50_us.max(f64::MIN_POSITIVE);
    // A barrier, for example, has no bandwidth.
    let panels =
        [("bus bandwidth (GB/s)", curves(report, bandwidth)), ("latency, median (us)", curves(report, |line| line.p50_us))];
    over_sizes(&title, panels, output)
}

/// Draws panels over sizes: the name of each one's values, and its curves.
pub(crate) fn over_sizes(title: &str, panels: [(&str, Vec<Curve>); 2], output: Output) -> Result<(), Box<dyn Error>> {
    let scale = Scale::Log(|size| show_bytes(size.round() as u64));
    let panels = panels.map(|(y, curves)| Panel { x: "size", y: y.to_owned(), scale, curves });
    Ok(output.write(&chart::draw(Some(title), &panels, panels.len())?)?)
}

/// Returns the points of both forms that logarithmic axes can show.
fn curves(report: &Report, value: impl Fn(&Line) -> f64) -> Vec<Curve> {
    let forms = [("out of place", COLOURS[0]), ("in place", COLOURS[1])];
    let points = |in_place: bool| {
        let rows = report.rows.iter();
        // An operation without a size is at one byte, because logarithmic axes have no zero.
        let point = |(size, line): (u64, &Option<Line>)| Some((size.max(1) as f64, value(line.as_ref()?)));
        let rows = rows.map(|row| (row.bytes, if in_place { &row.in_place } else { &row.out_of_place }));
        rows.filter_map(point).filter(|point| point.1 > 0.0).collect::<Vec<_>>()
    };
    let curve = |((name, colour), in_place): ((&str, _), bool)| Curve::new(name, colour, points(in_place));
    forms.into_iter().zip([false, true]).map(curve).filter(|curve| !curve.points.is_empty()).collect()
}

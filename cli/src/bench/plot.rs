//! Bandwidth and latency against size, as SVG.

use std::error::Error;

use super::report::{Line, Report};
use crate::chart::{self, COLOURS, Curve};
use crate::files::Output;
use crate::units::count;

pub(super) fn draw(report: &Report, output: Output) -> Result<(), Box<dyn Error>> {
    let title = format!("{}, {}, {}, {}", report.op, count(report.ranks, "rank"), report.transport, report.dtype);
    // The bandwidth at the median time, so that both panels show the same samples.
    let bandwidth = |line: &Line| line.busbw_gbs * line.mean_us / line.p50_us.max(f64::MIN_POSITIVE);
    // A barrier, for example, has no bandwidth.
    let panels =
        [("bus bandwidth (GB/s)", curves(report, bandwidth)), ("latency, median (us)", curves(report, |line| line.p50_us))];
    chart::draw(&title, &panels, output)
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
    let curves = forms.into_iter().zip([false, true]).map(|((name, colour), in_place)| (name, colour, points(in_place)));
    curves.filter(|(_, _, points)| !points.is_empty()).collect()
}

//! Bandwidth and latency against size, as SVG.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use super::report::{Line, Report};
use crate::units::{count, show_bytes};

const SIZE: (u32, u32) = (1100, 480);
const OUT_OF_PLACE: RGBColor = RGBColor(31, 119, 180);
const IN_PLACE: RGBColor = RGBColor(214, 96, 40);

/// One curve: a name, a colour, and points of size and value.
type Curve = (&'static str, RGBColor, Vec<(f64, f64)>);

pub(super) fn draw(report: &Report, file: &Path) -> Result<(), Box<dyn Error>> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let title = format!("{}, {}, {}, {}", report.op, count(report.ranks, "rank"), report.transport, report.dtype);
        let area = area.titled(&title, ("sans-serif", 20))?;
        // The bandwidth at the median time, so that both panels show the same runs.
        let bandwidth = |line: &Line| line.busbw_gbs * line.mean_us / line.p50_us.max(f64::MIN_POSITIVE);
        let panels =
            [("bus bandwidth (GB/s)", curves(report, bandwidth)), ("latency, median (us)", curves(report, |line| line.p50_us))];
        // A barrier, for example, has no bandwidth.
        let panels: Vec<_> = panels.into_iter().filter(|(_, curves)| !curves.is_empty()).collect();
        if panels.is_empty() {
            return Err("there is nothing to draw: all sizes are 0 bytes".into());
        }
        for (area, (name, curves)) in area.split_evenly((1, panels.len())).iter().zip(&panels) {
            panel(area, name, curves)?;
        }
        area.present()?;
    }
    std::fs::write(file, text)?;
    Ok(())
}

/// What of both forms can be drawn on logarithmic axes.
fn curves(report: &Report, value: impl Fn(&Line) -> f64) -> Vec<Curve> {
    let forms = [("out of place", OUT_OF_PLACE), ("in place", IN_PLACE)];
    let points = |in_place: bool| {
        let rows = report.rows.iter();
        // What has no size stands at one byte, as logarithmic axes have no zero.
        let point = |(size, line): (u64, &Option<Line>)| Some((size.max(1) as f64, value(line.as_ref()?)));
        let rows = rows.map(|row| (row.bytes, if in_place { &row.in_place } else { &row.out_of_place }));
        rows.filter_map(point).filter(|point| point.1 > 0.0).collect::<Vec<_>>()
    };
    let curves = forms.into_iter().zip([false, true]).map(|((name, colour), in_place)| (name, colour, points(in_place)));
    curves.filter(|(_, _, points)| !points.is_empty()).collect()
}

fn panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    name: &str,
    curves: &[Curve],
) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    let points = || curves.iter().flat_map(|(_, _, points)| points);
    let range = |of: fn(&(f64, f64)) -> f64| {
        let (least, most) =
            points().map(of).fold((f64::INFINITY, 0.0f64), |(least, most), value| (least.min(value), most.max(value)));
        // Room around, and a range even for a single point.
        if least.is_finite() { least / 1.5..most * 1.5 } else { 0.5..2.0 }
    };
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(range(|point| point.0).log_scale().base(2.0), range(|point| point.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("size")
        .y_desc(name)
        .x_label_formatter(&|size| show_bytes(size.round() as u64))
        .y_label_formatter(&|value| if *value >= 10.0 { format!("{value:.0}") } else { format!("{value}") })
        .x_labels(8)
        .light_line_style(BLACK.mix(0.06))
        .bold_line_style(BLACK.mix(0.14))
        .draw()?;
    for (name, colour, points) in curves {
        let line = chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        line.label(*name).legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

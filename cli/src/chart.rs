//! Curves over sizes on logarithmic axes, as SVG.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use crate::units::show_bytes;

/// Width of one panel, and height.
const PANEL: (u32, u32) = (550, 480);
/// Room for the names of many curves, beside them.
const NAMES: i32 = 150;

/// Colours that can be told apart, also by those who see red and green as one.
pub(crate) const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 90, 160),
    RGBColor(214, 96, 40),
    RGBColor(0, 130, 100),
    RGBColor(170, 80, 150),
    RGBColor(90, 90, 90),
    RGBColor(200, 160, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 60, 20),
    RGBColor(0, 0, 0),
    RGBColor(240, 140, 170),
];

/// One curve: a name, a colour, and points of size and value.
pub(crate) type Curve = (&'static str, RGBColor, Vec<(f64, f64)>);

/// Draws panels side by side: the name of each one's values, and its curves. Those without curves are left out.
pub(crate) fn draw(title: &str, panels: &[(&str, Vec<Curve>)], file: &Path) -> Result<(), Box<dyn Error>> {
    let panels: Vec<_> = panels.iter().filter(|(_, curves)| !curves.is_empty()).collect();
    if panels.is_empty() {
        return Err("there is nothing to draw".into());
    }
    let many = panels.iter().any(|(_, curves)| curves.len() > 2);
    let width = PANEL.0 + if many { NAMES as u32 } else { 0 };
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (width * panels.len() as u32, PANEL.1)).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.titled(title, ("sans-serif", 20))?;
        for (area, (name, curves)) in area.split_evenly((1, panels.len())).iter().zip(panels) {
            panel(area, name, curves)?;
        }
        area.present()?;
    }
    std::fs::write(file, text)?;
    Ok(())
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
    // A few names fit into the corner where curves that grow with the size leave room.
    let many = curves.len() > 2;
    let width = area.dim_in_pixel().0 as i32;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(if many { NAMES } else { 12 })
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
    if many {
        for ((name, colour, _), row) in curves.iter().zip(0..) {
            let (x, y) = (width - NAMES + 12, 24 + 18 * row);
            area.draw(&PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)))?;
            area.draw(&Text::new(*name, (x + 24, y - 6), ("sans-serif", 13)))?;
        }
        return Ok(());
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

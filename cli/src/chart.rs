//! Curves over sizes, or over numbers of ranks, on logarithmic axes, as SVG.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::files::Output;
use crate::units::show_bytes;

/// Width and height of one panel, in pixels: two panels fill the width of a page on GitHub.
const PANEL: (u32, u32) = (440, 340);
/// Height of the title, and of one row of the legend.
const TITLE: u32 = 34;
const LEGEND_ROW: u32 = 22;
const FONT: (&str, u32) = ("sans-serif", 14);

/// Colours that can be told apart, also by readers who see red and green as one.
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

/// What the horizontal axis shows, and how a value is written there.
pub(crate) struct Axis {
    pub(crate) name: &'static str,
    pub(crate) label: fn(f64) -> String,
}

/// Draws panels over sizes.
pub(crate) fn draw(title: &str, panels: &[(&str, Vec<Curve>)], output: Output) -> Result<(), Box<dyn Error>> {
    let sizes = Axis { name: "size", label: |size| show_bytes(size.round() as u64) };
    draw_over(&sizes, title, panels, output)
}

/// Draws panels side by side under one legend: the name of each one's values, and its curves.
/// Panels without curves are left out.
pub(crate) fn draw_over(axis: &Axis, title: &str, panels: &[(&str, Vec<Curve>)], output: Output) -> Result<(), Box<dyn Error>> {
    let panels: Vec<_> = panels.iter().filter(|(_, curves)| !curves.is_empty()).collect();
    if panels.is_empty() {
        return Err("there is nothing to draw".into());
    }
    let width = PANEL.0 * panels.len() as u32;
    let legend = Legend::new(panels.iter().flat_map(|(_, curves)| curves), width);
    let mut text = String::new();
    {
        let size = (width, TITLE + legend.height() + PANEL.1);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.titled(title, ("sans-serif", 18))?;
        let (top, area) = area.split_vertically(legend.height());
        legend.draw(&top)?;
        for (area, (name, curves)) in area.split_evenly((1, panels.len())).iter().zip(panels) {
            panel(area, axis, name, curves)?;
        }
        area.present()?;
    }
    Ok(output.write(&text)?)
}

/// The names of all curves with their colours, in rows.
struct Legend {
    /// Name, colour and the place of its left end.
    entries: Vec<(&'static str, RGBColor, (i32, i32))>,
    rows: u32,
}

impl Legend {
    /// Lays out each name once, in rows of at most `width` pixels.
    fn new<'a>(curves: impl Iterator<Item = &'a Curve>, width: u32) -> Legend {
        const LEFT: i32 = 80;
        let mut entries: Vec<(&'static str, RGBColor, (i32, i32))> = Vec::new();
        let (mut x, mut rows) = (LEFT, 1);
        for &(name, colour, _) in curves {
            if entries.iter().any(|entry| entry.0 == name) {
                continue;
            }
            // The colour, the name in letters of about eight pixels, and a gap.
            let room = 24 + 8 * name.len() as i32 + 20;
            if x + room > width as i32 && x > LEFT {
                (x, rows) = (LEFT, rows + 1);
            }
            entries.push((name, colour, (x, (rows - 1) * LEGEND_ROW as i32)));
            x += room;
        }
        Legend { entries, rows: rows as u32 }
    }

    fn height(&self) -> u32 {
        self.rows * LEGEND_ROW
    }

    fn draw<DB: DrawingBackend>(&self, area: &DrawingArea<DB, Shift>) -> Result<(), Box<dyn Error>>
    where
        DB::ErrorType: 'static,
    {
        for &(name, colour, (x, y)) in &self.entries {
            area.draw(&PathElement::new([(x, y + 9), (x + 18, y + 9)], colour.stroke_width(3)))?;
            area.draw(&Text::new(name, (x + 24, y + 2), FONT))?;
        }
        Ok(())
    }
}

fn panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    axis: &Axis,
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
        .margin(8)
        .margin_right(24)
        .x_label_area_size(46)
        .y_label_area_size(66)
        .build_cartesian_2d(range(|point| point.0).log_scale().base(2.0), range(|point| point.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(axis.name)
        .y_desc(name)
        .x_label_formatter(&|value| (axis.label)(*value))
        .y_label_formatter(&|value| if *value >= 10.0 { format!("{value:.0}") } else { format!("{value}") })
        .x_labels(6)
        .label_style(FONT)
        .axis_desc_style(FONT)
        .light_line_style(BLACK.mix(0.06))
        .bold_line_style(BLACK.mix(0.14))
        .draw()?;
    for (_, colour, points) in curves {
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    Ok(())
}

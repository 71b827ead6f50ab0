//! Curves in panels under one legend, as SVG. The trainer in `examples/resnet` has this file, too.

use std::error::Error;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

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

/// A line.
#[derive(Clone)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) colour: RGBColor,
    pub(crate) points: Vec<(f64, f64)>,
    /// Whether the points show.
    pub(crate) has_marks: bool,
}

impl Curve {
    /// Returns a line whose points show.
    pub(crate) fn new(name: &str, colour: RGBColor, points: Vec<(f64, f64)>) -> Curve {
        Curve { name: name.to_owned(), colour, points, has_marks: true }
    }
}

/// The axes of a panel.
#[derive(Clone, Copy)]
pub(crate) enum Scale {
    /// Logarithmic, with how values are written below.
    Log(fn(f64) -> String),
    /// Linear. The vertical one begins with zero or with the least value.
    Linear { from_zero: bool },
}

/// Some curves over one axis.
pub(crate) struct Panel {
    /// What the axes show.
    pub(crate) x: &'static str,
    pub(crate) y: String,
    pub(crate) scale: Scale,
    pub(crate) curves: Vec<Curve>,
}

/// Draws panels in rows of so many. Panels without curves are left out.
pub(crate) fn draw(title: Option<&str>, panels: &[Panel], columns: usize) -> Result<String, Box<dyn Error>> {
    let has_points = |panel: &&Panel| panel.curves.iter().any(|curve| !curve.points.is_empty());
    let panels: Vec<&Panel> = panels.iter().filter(has_points).collect();
    if panels.is_empty() {
        return Err("there is nothing to draw".into());
    }
    let columns = columns.min(panels.len());
    let rows = panels.len().div_ceil(columns);
    let width = PANEL.0 * columns as u32;
    let legend = Legend::new(panels.iter().flat_map(|panel| &panel.curves), width);
    let mut text = String::new();
    {
        let above = if title.is_some() { TITLE } else { 0 };
        let size = (width, above + legend.height() + PANEL.1 * rows as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE)?;
        let area = if let Some(title) = title { area.titled(title, ("sans-serif", 18))? } else { area };
        let (top, area) = area.split_vertically(legend.height());
        legend.draw(&top)?;
        for (area, panel) in area.split_evenly((rows, columns)).iter().zip(panels) {
            match panel.scale {
                Scale::Log(_) => {
                    let [x, y] = [log_range(panel, |point| point.0), log_range(panel, |point| point.1)];
                    draw_panel(area, panel, x.log_scale().base(2.0), y.log_scale())?;
                }
                Scale::Linear { from_zero } => {
                    let x = linear_range(panel, |point| point.0, true);
                    draw_panel(area, panel, x, linear_range(panel, |point| point.1, from_zero))?;
                }
            }
        }
        area.present()?;
    }
    Ok(text)
}

/// The names of all curves with their colours, in rows.
struct Legend<'a> {
    /// Name, colour and the place of its left end.
    entries: Vec<(&'a str, RGBColor, (i32, i32))>,
    rows: u32,
}

impl<'a> Legend<'a> {
    /// Lays out each name once, in rows of at most `width` pixels.
    fn new(curves: impl Iterator<Item = &'a Curve>, width: u32) -> Legend<'a> {
        const LEFT: i32 = 80;
        let mut entries: Vec<(&str, RGBColor, (i32, i32))> = Vec::new();
        let (mut x, mut rows) = (LEFT, 1);
        for Curve { name, colour, .. } in curves {
            if entries.iter().any(|entry| entry.0 == name) {
                continue;
            }
            // The colour, the name in letters of about eight pixels, and a gap.
            let room = 24 + 8 * name.len() as i32 + 20;
            if x + room > width as i32 && x > LEFT {
                (x, rows) = (LEFT, rows + 1);
            }
            entries.push((name, *colour, (x, (rows - 1) * LEGEND_ROW as i32)));
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

fn log_range(panel: &Panel, of: fn(&(f64, f64)) -> f64) -> Range<f64> {
    let values = panel.curves.iter().flat_map(|curve| &curve.points).map(of);
    let (least, most) = values.fold((f64::INFINITY, 0.0f64), |(least, most), value| (least.min(value), most.max(value)));
    // Room around, and a range even for a single point.
    if least.is_finite() { least / 1.5..most * 1.5 } else { 0.5..2.0 }
}

fn linear_range(panel: &Panel, of: fn(&(f64, f64)) -> f64, from_zero: bool) -> Range<f64> {
    let values = panel.curves.iter().flat_map(|curve| &curve.points).map(of).filter(|value| value.is_finite());
    let (least, most) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
    let least = if from_zero { 0.0 } else { least };
    // Room above, and a range even for a single point.
    let room = (0.06 * (most - least)).max(1e-3 * most.abs()).max(1e-9);
    (if from_zero { 0.0 } else { least - room })..most + room
}

fn draw_panel<DB, X, Y>(area: &DrawingArea<DB, Shift>, panel: &Panel, x: X, y: Y) -> Result<(), Box<dyn Error>>
where
    DB: DrawingBackend,
    DB::ErrorType: 'static,
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut chart =
        ChartBuilder::on(area).margin(8).margin_right(24).x_label_area_size(46).y_label_area_size(66).build_cartesian_2d(x, y)?;
    let of_value = |value: &f64| if *value >= 10.0 { format!("{value:.0}") } else { format!("{value}") };
    let of_size = |value: &f64| if let Scale::Log(label) = panel.scale { label(*value) } else { String::new() };
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(panel.x).y_desc(&panel.y).x_labels(6).label_style(FONT).axis_desc_style(FONT);
    if let Scale::Log(_) = panel.scale {
        mesh.x_label_formatter(&of_size).y_label_formatter(&of_value);
    }
    mesh.light_line_style(BLACK.mix(0.06)).bold_line_style(BLACK.mix(0.14)).draw()?;
    for Curve { colour, points, has_marks, .. } in &panel.curves {
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        if *has_marks {
            chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
        }
    }
    Ok(())
}

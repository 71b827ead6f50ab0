//! Curves of runs, as SVG.

use std::error::Error;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::runs::{Run, efficiency, read_all};

/// Width and height of one panel.
const PANEL: (u32, u32) = (480, 340);

/// Colours that can be told apart, also by readers who see red and green as one.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 90, 160),
    RGBColor(214, 96, 40),
    RGBColor(0, 130, 100),
    RGBColor(170, 80, 150),
    RGBColor(90, 90, 90),
    RGBColor(200, 160, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 60, 20),
];

/// A line, or points with lines between them.
struct Curve {
    name: String,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
    has_marks: bool,
}

/// Some curves over one axis.
struct Panel {
    x: &'static str,
    y: &'static str,
    curves: Vec<Curve>,
    from_zero: bool,
}

/// Draws the runs in these folders: losses, accuracies and how busy the ranks were. With several
/// numbers of ranks, also draws the time of an epoch and the scaling efficiency.
pub(crate) fn draw(folders: &[PathBuf], file: &Path) -> Result<(), String> {
    let mut runs = read_all(folders)?;
    runs.sort_by_key(|run| run.start.ranks);
    let panels: Vec<Panel> =
        panels(&runs).into_iter().filter(|panel| panel.curves.iter().any(|curve| !curve.points.is_empty())).collect();
    if panels.is_empty() {
        return Err("there is nothing to draw: no run has made a step".to_owned());
    }
    let text = render(&panels).map_err(|error| format!("{} cannot be drawn: {error}", file.display()))?;
    std::fs::write(file, text).map_err(|error| format!("{} cannot be written: {error}", file.display()))
}

/// Returns an error if the file cannot be written. Does not change the file.
pub(crate) fn check(file: &Path) -> Result<(), String> {
    let is_new = !file.exists();
    let opened = std::fs::File::options().create(true).append(true).open(file);
    opened.map_err(|error| format!("{} cannot be written: {error}", file.display()))?;
    if is_new {
        // Leave no empty file before the plot is drawn.
        let _ = std::fs::remove_file(file);
    }
    Ok(())
}

fn panels(runs: &[Run]) -> Vec<Panel> {
    let of_runs = |has_marks, points: &dyn Fn(&Run) -> Vec<(f64, f64)>| -> Vec<Curve> {
        let curve = |(i, run): (usize, &Run)| Curve {
            name: run.name.clone(),
            colour: COLOURS[i % COLOURS.len()],
            points: points(run),
            has_marks,
        };
        runs.iter().enumerate().map(curve).collect()
    };
    let accuracies =
        of_runs(true, &|run| run.epochs.iter().map(|epoch| (epoch.epoch as f64, 100.0 * epoch.test_accuracy)).collect());
    let mut panels = vec![
        Panel { x: "epochs", y: "loss in training", curves: of_runs(false, &losses), from_zero: true },
        Panel { x: "epochs", y: "accuracy in tests, %", curves: accuracies, from_zero: false },
    ];
    if runs.iter().any(|run| run.start.ranks != runs[0].start.ranks) {
        panels.push(by_ranks(runs, "seconds an epoch", &Run::epoch_seconds));
        panels.push(by_ranks(runs, "scaling efficiency", &|run| efficiency(runs, run)));
    }
    let computing = of_runs(false, &|run| {
        let busy = run.steps.iter().map(|step| (step.epoch, 100.0 * (1.0 - step.waiting - step.loading)));
        smooth(busy.collect())
    });
    panels.push(Panel { x: "epochs", y: "time spent computing, %", curves: computing, from_zero: true });
    panels
}

/// Returns the panel of a value by number of ranks, with a curve for each group of comparable runs.
fn by_ranks(runs: &[Run], y: &'static str, value: &dyn Fn(&Run) -> Option<f64>) -> Panel {
    let mut curves: Vec<(&Run, Curve)> = Vec::new();
    for run in runs {
        let Some(value) = value(run) else { continue };
        let place = curves.iter().position(|(first, _)| first.is_like(run)).unwrap_or_else(|| {
            let colour = COLOURS[curves.len() % COLOURS.len()];
            let name = format!("{} as {}", run.start.arch, run.name);
            curves.push((run, Curve { name, colour, points: Vec::new(), has_marks: true }));
            curves.len() - 1
        });
        curves[place].1.points.push((run.start.ranks as f64, value));
    }
    Panel { x: "ranks", y, curves: curves.into_iter().map(|(_, curve)| curve).collect(), from_zero: true }
}

fn losses(run: &Run) -> Vec<(f64, f64)> {
    smooth(run.steps.iter().map(|step| (step.epoch, step.loss)).collect())
}

/// Averages neighbours if there are many points.
fn smooth(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let width = (points.len() / 100).max(1);
    let mean = |part: &[(f64, f64)]| {
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / part.len() as f64, sum.1 / part.len() as f64)
    };
    points.chunks(width).map(mean).collect()
}

fn render(panels: &[Panel]) -> Result<String, Box<dyn Error>> {
    let columns = panels.len().min(2);
    let rows = panels.len().div_ceil(columns);
    let mut text = String::new();
    {
        let size = (PANEL.0 * columns as u32, PANEL.1 * rows as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE)?;
        for (area, panel) in area.split_evenly((rows, columns)).iter().zip(panels) {
            render_panel(area, panel)?;
        }
        area.present()?;
    }
    Ok(text)
}

fn render_panel<DB: DrawingBackend>(area: &DrawingArea<DB, Shift>, panel: &Panel) -> Result<(), Box<dyn Error>>
where
    DB::ErrorType: 'static,
{
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let range = |of: fn(&(f64, f64)) -> f64, from_zero: bool| {
        let values = points().map(of).filter(|value| value.is_finite());
        let (least, most) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
        let least = if from_zero { 0.0 } else { least };
        // Room above, and a range even for a single point.
        let room = (0.06 * (most - least)).max(1e-3 * most.abs()).max(1e-9);
        (if from_zero { 0.0 } else { least - room })..most + room
    };
    let y = range(|point| point.1, panel.from_zero);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(52)
        .build_cartesian_2d(range(|point| point.0, true), y.clone())?;
    chart
        .configure_mesh()
        .x_desc(panel.x)
        .y_desc(panel.y)
        .x_labels(8)
        .y_labels(6)
        .light_line_style(BLACK.mix(0.05))
        .bold_line_style(BLACK.mix(0.13))
        .draw()?;
    for Curve { name, colour, points, has_marks } in &panel.curves {
        let colour = *colour;
        let line = chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        line.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        if *has_marks {
            chart.draw_series(points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
        }
    }
    if panel.curves.len() > 1 {
        // Falling curves leave room for the names above, rising ones below.
        let middle = (y.start + y.end) / 2.0;
        let ends_low = panel.curves.iter().filter_map(|curve| curve.points.last()).all(|point| point.1 < middle);
        let corner = if ends_low { SeriesLabelPosition::UpperRight } else { SeriesLabelPosition::LowerRight };
        chart.configure_series_labels().position(corner).background_style(WHITE.mix(0.9)).border_style(BLACK.mix(0.3)).draw()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::tests::run;

    #[test]
    fn each_net_has_a_curve_of_its_own() {
        let mut runs = vec![run(1, 100.0), run(1, 60.0), run(2, 190.0), run(2, 110.0)];
        runs.iter_mut().skip(1).step_by(2).for_each(|run| run.start.arch = "resnet56".to_owned());
        let Panel { curves, .. } = by_ranks(&runs, "seconds an epoch", &Run::epoch_seconds);
        let points: Vec<Vec<f64>> = curves.iter().map(|curve| curve.points.iter().map(|point| point.0).collect()).collect();
        assert_eq!(points, [[1.0, 2.0], [1.0, 2.0]]);
        assert!(curves[0].name.starts_with("resnet20") && curves[1].name.starts_with("resnet56"));
    }
}

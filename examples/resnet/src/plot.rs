//! Curves of runs, as SVG.

use std::path::{Path, PathBuf};

use crate::chart::{self, COLOURS, Curve, Panel, Scale};
use crate::runs::{Run, efficiency, read_all};

/// Draws the runs in these folders: losses, accuracies and how busy the ranks were. With several
/// numbers of ranks, also draws the time of an epoch and the scaling efficiency.
pub(crate) fn draw(folders: &[PathBuf], file: &Path) -> Result<(), String> {
    let mut runs = read_all(folders)?;
    runs.sort_by_key(|run| run.start.ranks);
    if runs.iter().all(|run| run.steps.is_empty() && run.epochs.is_empty()) {
        return Err("there is nothing to draw: no run has made a step".to_owned());
    }
    let text = chart::draw(None, &panels(&runs), 2).map_err(|error| format!("{} cannot be drawn: {error}", file.display()))?;
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
    let by_epochs =
        |y: &str, from_zero, curves| Panel { x: "epochs", y: y.to_owned(), scale: Scale::Linear { from_zero }, curves };
    let mut panels =
        vec![by_epochs("loss in training", true, of_runs(false, &losses)), by_epochs("accuracy in tests, %", false, accuracies)];
    if runs.iter().any(|run| run.start.ranks != runs[0].start.ranks) {
        panels.push(by_ranks(runs, "seconds an epoch", &Run::epoch_seconds));
        panels.push(by_ranks(runs, "scaling efficiency", &|run| efficiency(runs, run)));
    }
    let computing = of_runs(false, &|run| {
        let busy = run.steps.iter().map(|step| (step.epoch, 100.0 * (1.0 - step.waiting - step.loading)));
        smooth(busy.collect())
    });
    panels.push(by_epochs("time spent computing, %", true, computing));
    panels
}

/// Returns the panel of a value by number of ranks, with a curve for each group of comparable runs.
fn by_ranks(runs: &[Run], y: &str, value: &dyn Fn(&Run) -> Option<f64>) -> Panel {
    let mut curves: Vec<(&Run, Curve)> = Vec::new();
    for run in runs {
        let Some(value) = value(run) else { continue };
        let place = curves.iter().position(|(first, _)| first.is_like(run)).unwrap_or_else(|| {
            // All panels have one legend, which also has the runs.
            let colour = COLOURS[(runs.len() + curves.len()) % COLOURS.len()];
            let name = format!("{} as {}", run.start.arch, run.name);
            curves.push((run, Curve { name, colour, points: Vec::new(), has_marks: true }));
            curves.len() - 1
        });
        curves[place].1.points.push((run.start.ranks as f64, value));
    }
    let curves = curves.into_iter().map(|(_, curve)| curve).collect();
    Panel { x: "ranks", y: y.to_owned(), scale: Scale::Linear { from_zero: true }, curves }
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

//! `resnet report`: compares runs by number of ranks.

use crate::arguments::ReportArgs;
use crate::runs::{Run, efficiency};

pub(crate) fn report(args: &ReportArgs) -> Result<(), String> {
    let mut runs = args.runs.iter().map(|folder| Run::read(folder)).collect::<Result<Vec<_>, _>>()?;
    runs.sort_by(|a, b| (&a.start.arch, a.start.ranks).cmp(&(&b.start.arch, b.start.ranks)));
    table(&runs).iter().for_each(|line| crate::progress::say(line));
    if let Some(file) = &args.plot {
        crate::plot::draw(&args.runs, file)?;
        crate::progress::say(&format!("drawn: {}", file.display()));
    }
    Ok(())
}

/// Returns the lines of a Markdown table.
fn table(runs: &[Run]) -> Vec<String> {
    let heads = ["run", "net", "ranks", "batch", "s an epoch", "images/s", "efficiency", "waiting", "epochs", "best test"];
    let show = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), text);
    let percent = |value: f64| format!("{:.1} %", 100.0 * value);
    let mut rows = vec![heads.map(str::to_owned)];
    rows.extend(runs.iter().map(|run| {
        [
            run.name.clone(),
            run.start.arch.clone(),
            run.start.ranks.to_string(),
            run.start.global_batch.to_string(),
            show(run.epoch_seconds(), |s| format!("{s:.1}")),
            show(run.images_per_s(), |speed| format!("{speed:.0}")),
            show(efficiency(runs, run), |e| format!("{e:.2}")),
            show(run.waiting(), percent),
            run.epochs.len().to_string(),
            show(run.best(), percent),
        ]
    }));
    let widths: Vec<usize> = (0..heads.len()).map(|i| rows.iter().map(|row| row[i].len()).max().unwrap_or(0)).collect();
    let line = |cells: Vec<String>| format!("| {} |", cells.join(" | "));
    let mut lines: Vec<String> =
        rows.iter().map(|row| line(row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect())).collect();
    lines.insert(1, line(widths.iter().map(|&width| "-".repeat(width)).collect()));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::tests::run;

    #[test]
    fn efficiency_is_against_the_fewest_ranks() {
        let runs = [run(1, 100.0), run(2, 190.0), run(4, 200.0)];
        let lines = table(&runs);
        assert_eq!(lines.len(), 5);
        let cells = |line: usize| lines[line].split('|').map(str::trim).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells(2)[3..11], ["1", "128", "10.0", "100", "1.00", "2.0 %", "3", "70.0 %"]);
        assert_eq!(cells(3)[5..8], ["5.3", "190", "0.95"]);
        assert_eq!(cells(4)[7], "0.50");
        let none = Run { epochs: Vec::new(), ..run(1, 1.0) };
        assert_eq!(table(&[none])[2].matches(" - ").count(), 5);
    }
}

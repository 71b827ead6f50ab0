//! The output of rank 0: one changing line on a terminal, otherwise a line for each report.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::metrics::{Epoch, Step};

/// The time between lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

/// The progress of a run, on standard output.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    epochs: usize,
    written: Option<Instant>,
}

impl Progress {
    pub(crate) fn new(epochs: usize) -> Progress {
        Progress { bar: None, epochs, written: None }
    }

    /// Starts an epoch of which some steps may have been made.
    pub(crate) fn begin(&mut self, epoch: usize, steps: usize, made: usize) {
        if std::io::stdout().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(steps as u64), indicatif::ProgressDrawTarget::stdout());
            let template = "{prefix} {bar:20} {pos}/{len} {msg} {eta} left";
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(format!("epoch {}/{}", epoch + 1, self.epochs));
            bar.set_position(made as u64);
            bar.reset_eta();
            self.bar = Some(bar);
        }
    }

    /// Shows that steps of the epoch have been made.
    pub(crate) fn step(&mut self, made: usize, steps: usize, at: &Step) {
        let text = describe(at);
        match &self.bar {
            Some(bar) => {
                bar.set_position(made as u64);
                bar.set_message(text);
            }
            None if made == steps || self.written.is_none_or(|written| written.elapsed() >= EVERY) => {
                self.written = Some(Instant::now());
                say(&format!("epoch {}/{}, step {made}/{steps}: {text}", at.epoch.ceil(), self.epochs));
            }
            None => {}
        }
    }

    /// Shows that an epoch has ended.
    pub(crate) fn epoch(&mut self, epoch: &Epoch) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        say(&format!(
            "epoch {}/{} in {:.1} s, {:.0} images/s: loss {:.3}, accuracy {:.1} %; test: loss {:.3}, accuracy {:.1} %",
            epoch.epoch,
            self.epochs,
            epoch.seconds,
            epoch.images_per_s,
            epoch.train_loss,
            100.0 * epoch.train_accuracy,
            epoch.test_loss,
            100.0 * epoch.test_accuracy,
        ));
    }

    /// Writes a line that stays.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

/// Writes a problem to standard error, in one piece, because several ranks and their launcher may
/// do so at once.
pub(crate) fn complain(problem: &str) {
    // Without a reader, the run continues.
    let _ = std::io::stderr().write_all(format!("resnet: {problem}\n").as_bytes());
}

fn describe(at: &Step) -> String {
    let slowest =
        if at.slower > 0.02 { format!(", rank {} slowest by {:.0} %", at.slowest, 100.0 * at.slower) } else { String::new() };
    format!(
        "loss {:.3}, accuracy {:.1} %, {:.0} images/s, {:.1} % waiting{slowest}",
        at.loss,
        100.0 * at.accuracy,
        at.images_per_s,
        100.0 * at.waiting
    )
}

/// Writes a line. Without a reader, the run continues.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

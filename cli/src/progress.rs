//! A line on the terminal that says how far a command is. Where standard error is no terminal, there
//! is none.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::has_controls;
use crate::table::columns_of_terminal;

/// How often the line changes.
const INTERVAL: Duration = Duration::from_millis(200);

/// The line, which is removed when this is dropped.
pub(crate) struct Progress {
    is_terminal: bool,
    shown: Option<Instant>,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { is_terminal: std::io::stderr().is_terminal() && has_controls(), shown: None }
    }

    /// Shows a line, unless another one was shown a moment ago.
    pub(crate) fn show(&mut self, line: impl FnOnce() -> String) {
        if self.is_terminal && self.shown.is_none_or(|shown| shown.elapsed() >= INTERVAL) {
            // A longer line could not be removed.
            let shown: String = line().chars().take(columns_of_terminal() - 1).collect();
            write(&format!("\r{shown}\x1b[K"));
            self.shown = Some(Instant::now());
        }
    }

    /// Removes the line, so that others can be written.
    pub(crate) fn clear(&mut self) {
        if self.shown.take().is_some() {
            write("\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn write(text: &str) {
    // The line is no result.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Describes how long something takes that is `done` after `elapsed`: `1 min 20 s left`.
pub(crate) fn left(elapsed: Duration, done: usize, total: usize) -> String {
    let seconds = (elapsed.as_secs_f64() / done.max(1) as f64 * total.saturating_sub(done) as f64).ceil() as u64;
    match seconds {
        0..60 => format!("{seconds} s left"),
        60..3600 => format!("{} min {} s left", seconds / 60, seconds % 60),
        _ => format!("{} h {} min left", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_is_left() {
        let after = |seconds| left(Duration::from_secs(seconds), 3, 9);
        assert_eq!([5, 40, 4000].map(after), ["10 s left", "1 min 20 s left", "2 h 13 min left"]);
    }
}

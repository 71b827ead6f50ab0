//! The output of the ranks, line by line, each with the number of its rank.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::sync::Arc;

use anstyle::{AnsiColor, Style};

use crate::complain;

/// The prefix of each rank's lines.
#[derive(Clone)]
pub(super) struct Palette {
    prefixes: Arc<Option<[Vec<String>; 2]>>,
}

const COLOURS: [AnsiColor; 6] =
    [AnsiColor::Cyan, AnsiColor::Green, AnsiColor::Yellow, AnsiColor::Magenta, AnsiColor::Blue, AnsiColor::Red];

impl Palette {
    /// Makes the prefixes of `ranks` ranks, in colour on a terminal unless `NO_COLOR` is set.
    pub(super) fn new(ranks: usize, prefixes: bool) -> Palette {
        if !prefixes {
            return Palette { prefixes: Arc::new(None) };
        }
        let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let width = (ranks - 1).to_string().len();
        let all = |is_terminal: bool| {
            let prefix = |rank: usize| {
                let colour = COLOURS[rank % COLOURS.len()];
                let style = if is_terminal && wants_colour { Style::new().fg_color(Some(colour.into())) } else { Style::new() };
                format!("{style}[{rank:>width$}]{style:#} ")
            };
            (0..ranks).map(prefix).collect()
        };
        let prefixes = [all(std::io::stdout().is_terminal()), all(std::io::stderr().is_terminal())];
        Palette { prefixes: Arc::new(Some(prefixes)) }
    }

    fn prefix(&self, rank: usize, is_error: bool) -> &str {
        self.prefixes.as_ref().as_ref().map_or("", |prefixes| &prefixes[usize::from(is_error)][rank])
    }

    /// Flushes standard output after the last line.
    pub(super) fn finish(&self) {
        // The reader of the output may have gone.
        let _ = std::io::stdout().flush();
    }
}

/// The longest line that is kept whole, in bytes.
const LONGEST: u64 = 64 << 10;

/// Forwards a stream line by line, on a thread of its own.
pub(super) fn forward(pipe: impl Read + Send + 'static, palette: &Palette, rank: usize, is_error: bool) {
    let palette = palette.clone();
    let thread = std::thread::Builder::new().name(format!("output-{rank}"));
    let copy = move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            line.extend_from_slice(palette.prefix(rank, is_error).as_bytes());
            match reader.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            // One call for each line, so that lines of different ranks do not mix. If the reader
            // has gone, the pipe is closed, so that the rank notices.
            let written = if is_error { std::io::stderr().write_all(&line) } else { std::io::stdout().lock().write_all(&line) };
            if written.is_err() {
                break;
            }
        }
    };
    if let Err(error) = thread.spawn(copy) {
        complain(&format!("kolo run: output of rank {rank} is lost: {error}"));
    }
}

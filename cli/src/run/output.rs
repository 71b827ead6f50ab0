//! The output of the ranks, line by line, each with the number of its rank.

use std::io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Read, Write};
use std::sync::{Arc, OnceLock};

use anstyle::{AnsiColor, Style};

use super::logs::Logs;
use crate::{complain, wants_colour};

/// Where the lines of each rank go, after which prefix, and whether lines were lost.
#[derive(Clone)]
pub(super) struct Palette {
    logs: Option<Arc<Logs>>,
    prefixes: Arc<Option<[Vec<String>; 2]>>,
    /// Why standard output, standard error or a file cannot be written, although its reader has not
    /// gone: a disk may be full.
    problem: Arc<OnceLock<String>>,
}

const COLOURS: [AnsiColor; 6] =
    [AnsiColor::Cyan, AnsiColor::Green, AnsiColor::Yellow, AnsiColor::Magenta, AnsiColor::Blue, AnsiColor::Red];

impl Palette {
    /// Makes the prefixes of `ranks` ranks, in colour on a terminal unless `NO_COLOR` is set.
    pub(super) fn new(ranks: usize, prefixes: bool, logs: Option<Logs>) -> Palette {
        let logs = logs.map(Arc::new);
        if !prefixes {
            return Palette { logs, prefixes: Arc::new(None), problem: Arc::default() };
        }
        let width = (ranks - 1).to_string().len();
        let all = |is_terminal: bool| {
            let prefix = |rank: usize| {
                let colour = COLOURS[rank % COLOURS.len()];
                let style = if is_terminal && wants_colour() { Style::new().fg_color(Some(colour.into())) } else { Style::new() };
                format!("{style}[{rank:>width$}]{style:#} ")
            };
            (0..ranks).map(prefix).collect()
        };
        let prefixes = [all(io::stdout().is_terminal()), all(io::stderr().is_terminal())];
        Palette { logs, prefixes: Arc::new(Some(prefixes)), problem: Arc::default() }
    }

    /// Ranks have started.
    pub(super) fn begin(&self) {
        if let Some(Err(problem)) = self.logs.as_ref().map(|logs| logs.begin()) {
            self.problem.get_or_init(|| problem);
        }
    }

    fn prefix(&self, rank: usize, is_error: bool) -> &str {
        self.prefixes.as_ref().as_ref().map_or("", |prefixes| &prefixes[usize::from(is_error)][rank])
    }

    /// Has the lines of a rank written as they are.
    pub(super) fn without_prefix_of(mut self, rank: usize) -> Palette {
        if let Some(prefixes) = Arc::make_mut(&mut self.prefixes) {
            prefixes.iter_mut().for_each(|all| all[rank].clear());
        }
        self
    }

    /// Writes a line of a rank. Returns whether to go on: not if the reader of the output has gone.
    /// A full disk does not end the job.
    pub(super) fn write(&self, rank: usize, is_error: bool, line: &[u8]) -> bool {
        if let Some(logs) = &self.logs {
            if let Err(problem) = logs.write(rank, is_error, line) {
                self.problem.get_or_init(|| problem);
            }
            if !logs.tee {
                return true;
            }
        }
        // One call for each line, so that lines of different ranks do not mix.
        let line = [self.prefix(rank, is_error).as_bytes(), line].concat();
        let written = if is_error { io::stderr().write_all(&line) } else { io::stdout().lock().write_all(&line) };
        self.noted(written, is_error)
    }

    /// Returns what writes the lines of one stream of a rank.
    pub(super) fn sink(&self, rank: usize, is_error: bool) -> Sink {
        let palette = self.clone();
        Box::new(move |line| palette.write(rank, is_error, line))
    }

    /// Flushes standard output after the last line. Returns why lines were lost, if any were.
    pub(super) fn finish(&self) -> Option<&str> {
        // The reader of the output may have gone.
        let _ = self.noted(io::stdout().flush(), false);
        self.problem.get().map(String::as_str)
    }

    /// Keeps the reason of a failed write. Returns whether to go on reading: not if the reader of
    /// the output has gone.
    fn noted(&self, written: io::Result<()>, is_error: bool) -> bool {
        match written {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::BrokenPipe => false,
            Err(error) => {
                let stream = if is_error { "error" } else { "output" };
                self.problem.get_or_init(|| format!("standard {stream} cannot be written: {error}"));
                true
            }
        }
    }
}

/// The longest line that is kept whole, in bytes.
pub(super) const LONGEST: u64 = 64 << 10;

/// Takes a line of a rank, with its line break. Returns whether to go on reading.
pub(super) type Sink = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Forwards a stream line by line, on a thread of its own.
pub(super) fn forward(pipe: impl Read + Send + 'static, rank: usize, mut sink: Sink) {
    let thread = std::thread::Builder::new().name(format!("output-{rank}"));
    let copy = move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            // If the reader has gone, the pipe is closed, so that the rank notices.
            if !sink(&line) {
                break;
            }
        }
    };
    if let Err(error) = thread.spawn(copy) {
        complain(&format!("kolo run: output of rank {rank} is lost: {error}"));
    }
}

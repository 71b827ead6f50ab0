//! One start of a job: its signals, its output, and how it ends.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded, select_biased, unbounded};

use super::LAUNCHER_FAILED;
use super::arguments::Args;
use super::logs::Logs;
use super::output::Palette;
use super::process::{Event, Signal};
use super::program::{Program, has_input};
use super::supervise::Failure;
use crate::check_command;

/// Why a job was not started: an exit status, and what to say unless it has been said.
pub(super) struct Refusal(pub(super) ExitCode, pub(super) Option<String>);

impl From<String> for Refusal {
    fn from(message: String) -> Refusal {
        Refusal(LAUNCHER_FAILED.into(), Some(message))
    }
}

/// How a job has ended that was started.
pub(super) struct Ended {
    pub(super) failure: Option<Failure>,
    pub(super) palette: Palette,
    pub(super) ranks: usize,
}

/// One start of the job.
pub(super) struct Attempt<'a> {
    pub(super) args: &'a Args,
    /// The folder of `--log-dir`, by a path that a change of the working directory does not change.
    pub(super) log_dir: Option<&'a Path>,
    /// How many starts came before.
    pub(super) restarts: u32,
    pub(super) signals: &'a Receiver<Event>,
    /// The first signal that asked the job to end.
    pub(super) asked_to_end: &'a Arc<OnceLock<Signal>>,
}

/// Tells of signals, and of what becomes of ranks that were started together.
pub(super) struct Events {
    pub(super) sender: Sender<Event>,
    pub(super) receiver: Receiver<Event>,
    /// Ends the thread that passes signals on.
    passing: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Events {
    /// Waits until a signal that was taken is noted, too: it keeps the job from starting again.
    fn drop(&mut self) {
        self.passing = None;
        // A thread that has panicked has said so.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Attempt<'_> {
    /// Returns new events: what is still to come of other ranks is not among them. A signal that comes
    /// while there are none waits for the next ones.
    pub(super) fn events(&self) -> Result<Events, String> {
        let (sender, receiver) = unbounded();
        let (passing, is_over) = bounded::<()>(0);
        let (signals, events, asked_to_end) = (self.signals.clone(), sender.clone(), self.asked_to_end.clone());
        let pass = move || {
            loop {
                select_biased! {
                    recv(is_over) -> _ => return,
                    recv(signals) -> signal => {
                        let Ok(signal) = signal else { return };
                        if let Event::Signalled(signal) = signal
                            && signal.ends()
                        {
                            asked_to_end.get_or_init(|| signal);
                        }
                        _ = events.send(signal);
                    },
                }
            }
        };
        let thread = std::thread::Builder::new().name("signals-of-start".to_owned()).spawn(pass);
        let thread = thread.map_err(|error| format!("cannot watch for signals: {error}"))?;
        Ok(Events { sender, receiver, passing: Some(passing), thread: Some(thread) })
    }

    /// Checks the words of a built-in command before ranks start with them, once.
    pub(super) fn check(&self, program: &Program<'_>, ranks: usize, is_here: bool) -> Result<(), Refusal> {
        match program.own_command() {
            // What is wrong with them has been said.
            Some(words) if self.restarts == 0 => check_command(words, ranks, is_here).map_err(|code| Refusal(code, None)),
            _ => Ok(()),
        }
    }

    /// Returns whether rank 0 reads what the launcher reads: of several starts the first, which may have
    /// read a part of it.
    pub(super) fn reads_input(&self) -> bool {
        self.restarts == 0 && has_input()
    }

    /// Returns where the lines of the ranks go.
    pub(super) fn palette(&self, program: &Program<'_>, ranks: usize) -> Result<Palette, String> {
        let logs = self.log_dir.map(|folder| Logs::new(folder, ranks, self.args.tee, self.restarts > 0)).transpose()?;
        let palette = Palette::new(ranks, !self.args.no_prefix, logs);
        // Rank 0 of a built-in command prints a report.
        Ok(if program.is_built_in { palette.without_prefix_of(0) } else { palette })
    }

    /// Returns what programs that torchrun starts are told, too.
    pub(super) fn variables(&self) -> Vec<(OsString, OsString)> {
        if self.args.max_restarts == 0 {
            return Vec::new();
        }
        vec![("TORCHELASTIC_RESTART_COUNT".into(), self.restarts.to_string().into())]
    }
}

//! A job, started again after a failure of a rank as often as `--max-restarts` says.
//!
//! As with torchrun, all ranks start again: the program goes on from what it has saved. Each start is a
//! job with a name and a secret of its own, so that what is left of the last one disturbs nothing.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased, unbounded};

use super::arguments::Args;
use super::output::{Logs, Palette};
use super::process::{self, Event, Signal};
use super::program::Program;
use super::remote::Host;
use super::supervise::Failure;
use super::{LAUNCHER_FAILED, launch, remote};
use crate::units::count;
use crate::{check_command, complain};

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
    /// How many starts came before.
    pub(super) restarts: u32,
    signals: &'a Receiver<Event>,
    /// The first signal that asked the job to end.
    asked_to_end: &'a Arc<OnceLock<Signal>>,
}

/// Tells of signals, and of what becomes of ranks that were started together.
pub(super) struct Events {
    pub(super) sender: Sender<Event>,
    pub(super) receiver: Receiver<Event>,
    /// Ends the thread that passes signals on.
    _passing: Sender<()>,
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
        thread.map_err(|error| format!("cannot watch for signals: {error}"))?;
        Ok(Events { sender, receiver, _passing: passing })
    }

    /// Checks the words of a built-in command before ranks start with them, once.
    pub(super) fn check(&self, program: &Program<'_>, ranks: usize, is_here: bool) -> Result<(), Refusal> {
        match program.own_command() {
            // What is wrong with them has been said.
            Some(words) if self.restarts == 0 => check_command(words, ranks, is_here).map_err(|code| Refusal(code, None)),
            _ => Ok(()),
        }
    }

    /// Returns where the lines of the ranks go.
    pub(super) fn palette(&self, ranks: usize) -> Result<Palette, String> {
        let Args { log_dir, tee, no_prefix, .. } = self.args;
        let logs = log_dir.as_ref().map(|folder| Logs::new(folder, ranks, *tee, self.restarts > 0)).transpose()?;
        Ok(Palette::new(ranks, !no_prefix, logs))
    }

    /// Returns what programs that torchrun starts are told, too.
    pub(super) fn variables(&self) -> Vec<(OsString, OsString)> {
        if self.args.max_restarts == 0 {
            return Vec::new();
        }
        vec![("TORCHELASTIC_RESTART_COUNT".into(), self.restarts.to_string().into())]
    }
}

/// What is known of a start when all have ended.
struct Row {
    took: Duration,
    code: i32,
    reason: String,
}

/// Starts the job, on this machine unless there are hosts, until it succeeds or may not start again.
pub(super) fn run(args: &Args, hosts: Option<&[Host]>) -> Result<ExitCode, Refusal> {
    let (sender, signals) = unbounded();
    process::watch_signals(&sender).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let asked_to_end = Arc::new(OnceLock::new());
    let mut rows = Vec::new();
    for restarts in 0.. {
        let began = Instant::now();
        let attempt = Attempt { args, restarts, signals: &signals, asked_to_end: &asked_to_end };
        let Ended { failure, palette, ranks } = match hosts {
            Some(hosts) => remote::launch(&attempt, hosts),
            None => launch(&attempt),
        }?;
        let lost = palette.finish();
        if let Some(problem) = lost {
            complain(&format!("kolo run: {problem}; output of the ranks is lost"));
        }
        let code = match failure.as_ref().map_or(0, |failure| failure.exit_code(ranks)) {
            0 if lost.is_some() => 1,
            code => code,
        };
        let reason =
            failure.as_ref().map_or_else(|| "all ranks ended with status 0".to_owned(), |failure| failure.describe(ranks));
        let may_start_again = restarts < args.max_restarts && asked_to_end.get().is_none();
        let starts_again = may_start_again && matches!(failure, Some(Failure::Rank(..)));
        if starts_again {
            complain(&format!("kolo run: {reason}; all ranks start again ({} of {})", restarts + 1, count_of(args.max_restarts)));
        } else if failure.is_some() {
            complain(&format!("kolo run: {reason}"));
        }
        rows.push(Row { took: began.elapsed(), code, reason });
        if !starts_again {
            report(&rows);
            return Ok(process::exit(code));
        }
    }
    unreachable!("there are fewer restarts than numbers")
}

fn count_of(restarts: u32) -> String {
    count(restarts as usize, "restart")
}

/// Reports how each start has ended, if there were several.
fn report(rows: &[Row]) {
    if rows.len() == 1 {
        return;
    }
    complain("kolo run: start   seconds  status  ended because");
    for (start, Row { took, code, reason }) in rows.iter().enumerate() {
        complain(&format!("kolo run: {:>5} {:>9.1} {code:>7}  {reason}", start + 1, took.as_secs_f64()));
    }
}

//! `kolo run`: starts ranks of a program on this machine.
//!
//! The launcher serves the store of the rendezvous. Each job has a name and a secret of its own, so
//! that jobs on one machine stay apart. The launcher forwards signals, and ends all ranks when one
//! fails.

mod failures;
mod guard;
mod output;
pub(crate) mod process;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use crossbeam_channel::{Receiver, Sender, bounded, select, unbounded};
use kolo::TcpStoreServer;

use crate::complain;
use crate::random::{hexadecimal, random};
use crate::units::duration;
use failures::{FailureFolder, Name, Names};
use guard::Guard;
use output::{Palette, forward};
use process::{Event, OUTPUT_PATIENCE, Process, RankOutput, Signal};

pub(crate) use guard::{Args as GuardArgs, guard};

/// Arguments of `kolo run`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// How many ranks to start
    #[arg(short = 'n', long = "ranks", value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks: u32,
    /// Do not write the rank before each line of output
    #[arg(long)]
    no_prefix: bool,
    /// How long the other ranks may take to report after one has failed
    #[arg(long, value_parser = duration, default_value = "1s")]
    grace: Duration,
    /// The program and its arguments; `bench ...` is the built-in command
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Commands of this program that ranks run.
const BUILT_IN: [&str; 1] = ["bench"];

/// Exit status when the launcher itself fails.
pub(crate) const LAUNCHER_FAILED: u8 = 125;
/// Exit status when the program cannot be started.
const NOT_STARTED: u8 = 127;

/// Why a job ended before its time.
enum Failure {
    /// The rank that caused the failure.
    Rank(Cause),
    /// A signal told the launcher to end the job.
    Stopped(Signal),
}

/// The rank that caused a failure, and the rank that its own failure names, if it names one.
struct Cause {
    rank: FailedRank,
    names: Option<usize>,
}

/// A rank that has ended with a failure.
#[derive(Clone, Copy)]
struct FailedRank {
    rank: usize,
    pid: u32,
    status: ExitStatus,
    after: Duration,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    match launch(args) {
        Ok(code) => code,
        Err((code, message)) => {
            complain(&format!("kolo run: {message}"));
            ExitCode::from(code)
        }
    }
}

fn launch(args: &Args) -> Result<ExitCode, (u8, String)> {
    let failed = |message: String| (LAUNCHER_FAILED, message);
    let program = Program::new(args).map_err(failed)?;
    let job = hexadecimal(&random::<8>().map_err(failed)?);
    // A secret in the launcher's environment reaches the ranks through theirs.
    let given = kolo::settings::secret_of_environment().map_err(|error| failed(error.to_string()))?;
    let secret = given.map_or_else(random::<32>, Ok).map_err(failed)?;
    let address = ([127, 0, 0, 1], 0).into();
    let server = TcpStoreServer::bind(address, &job, Some(secret)).map_err(|error| failed(error.to_string()))?;
    let (events, event) = unbounded();
    process::watch_signals(&events).map_err(|error| failed(format!("cannot watch for signals: {error}")))?;

    let palette = Palette::new(args.ranks as usize, !args.no_prefix);
    // The guard comes first: the launcher may be killed while it starts ranks.
    let guard = Guard::start(&job);
    let failures = FailureFolder::new(&job);
    let mut ranks = Ranks { processes: Vec::new(), began: Instant::now(), grace: args.grace, failures, guard };
    // Nothing is sent. The channel closes when all output of the ranks has been forwarded.
    let (unread, all_read) = bounded(0);
    for rank in 0..args.ranks as usize {
        let mut command = program.command(rank);
        command
            .env("KOLO_RANK", rank.to_string())
            .env("KOLO_WORLD_SIZE", args.ranks.to_string())
            .env("KOLO_LOCAL_RANK", rank.to_string())
            .env("KOLO_LOCAL_WORLD_SIZE", args.ranks.to_string())
            .env("KOLO_STORE", server.url())
            .env("KOLO_STORE_SERVED", "1")
            .env("KOLO_JOB_ID", &job);
        if given.is_none() {
            command.env("KOLO_SECRET", hexadecimal(&secret));
        }
        match &ranks.failures {
            Some(folder) => command.env("KOLO_FAILURE_FILE", folder.file(rank)),
            None => command.env_remove("KOLO_FAILURE_FILE"),
        };
        match start(&mut command, rank, &palette, &events, &unread, &mut ranks.guard) {
            Ok(process) => ranks.processes.push(Some(process)),
            Err(error) => {
                ranks.stop_all(&event);
                let name = Path::new(&program.file).display();
                return Err((NOT_STARTED, format!("{name} cannot be started: {error}")));
            }
        }
    }
    drop(unread);
    let mut failure = ranks.wait(&event);
    drop(server);
    // The ranks' output is written before the report of their end, however slow its reader is.
    if !matches!(failure, Some(Failure::Stopped(_))) {
        failure = drain(&all_read, &event).map(Failure::Stopped).or(failure);
    }
    let lost = palette.finish();
    if let Some(problem) = lost {
        complain(&format!("kolo run: {problem}; output of the ranks is lost"));
    }
    Ok(match failure {
        None if lost.is_some() => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
        Some(failure) => {
            complain(&format!("kolo run: {}", describe(&failure, args.ranks)));
            let code = match failure {
                Failure::Rank(cause) => process::exit_code(cause.rank.status),
                Failure::Stopped(signal) => signal.exit_code(),
            };
            // Some systems exit at once.
            drop(ranks);
            process::exit(code)
        }
    })
}

/// The program that ranks run.
struct Program<'a> {
    file: OsString,
    arguments: &'a [OsString],
    is_built_in: bool,
}

impl Program<'_> {
    fn new(args: &Args) -> Result<Program<'_>, String> {
        let (file, arguments) = args.program.split_first().ok_or("no program was given")?;
        if BUILT_IN.iter().any(|name| file == name) {
            let this = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
            return Ok(Program { file: this.into_os_string(), arguments: &args.program, is_built_in: true });
        }
        Ok(Program { file: file.clone(), arguments, is_built_in: false })
    }

    /// Returns the command of a rank, with its standard input, output and error.
    fn command(&self, rank: usize) -> Command {
        let mut command = Command::new(&self.file);
        command.args(self.arguments);
        let reads = rank == 0 && !std::io::IsTerminal::is_terminal(&std::io::stdin());
        command.stdin(if reads { Stdio::inherit() } else { Stdio::null() });
        // Rank 0 of a built-in command prints a report and has the terminal to itself.
        let has_terminal = self.is_built_in && rank == 0;
        if !has_terminal {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        command
    }
}

/// Waits until all output of the ranks has been forwarded. Returns the signal that ended the wait,
/// if one did.
fn drain(all_read: &Receiver<()>, event: &Receiver<Event>) -> Option<Signal> {
    let patience = OUTPUT_PATIENCE.unwrap_or(Duration::MAX);
    loop {
        select! {
            recv(all_read) -> _ => return None,
            recv(event) -> event => match event {
                Ok(Event::Signalled(signal)) if signal.ends() => return Some(signal),
                _ => {}
            },
            default(patience) => return None,
        }
    }
}

/// Starts one rank, and threads that forward its output and wait for its end.
fn start(
    command: &mut Command,
    rank: usize,
    palette: &Palette,
    events: &Sender<Event>,
    unread: &Sender<()>,
    guard: &mut Guard,
) -> std::io::Result<Process> {
    process::prepare(command);
    let (rank_of_errors, runs) = std::io::pipe()?;
    let rank_of_output = rank_of_errors.try_clone()?;
    let mut child = command.spawn()?;
    let process = Process::new(&child);
    guard.add(process.pid());
    let unread = Some(unread.clone());
    if let Some(pipe) = child.stdout.take() {
        forward(RankOutput { pipe, rank: rank_of_output, unread: unread.clone() }, palette, rank, false);
    }
    if let Some(pipe) = child.stderr.take() {
        forward(RankOutput { pipe, rank: rank_of_errors, unread }, palette, rank, true);
    }
    let events = events.clone();
    std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
        let status = child.wait();
        drop(runs);
        if let Ok(status) = status {
            // The receiver is gone if the launcher is ending.
            let _ = events.send(Event::Ended(rank, status));
        }
    })?;
    Ok(process)
}

fn describe(failure: &Failure, ranks: u32) -> String {
    match failure {
        Failure::Rank(Cause { rank: FailedRank { rank, pid, status, after }, names }) => {
            let others = if ranks > 1 { "; the other ranks were stopped" } else { "" };
            let names = names.map_or_else(String::new, |other| format!("; its error names rank {other}"));
            format!("rank {rank} (pid {pid}) {} after {:.1} s{names}{others}", process::describe(*status), after.as_secs_f64())
        }
        Failure::Stopped(signal) => format!("stopped by {signal}"),
    }
}

/// The ranks that were started.
struct Ranks {
    /// `None` for those that have ended.
    processes: Vec<Option<Process>>,
    began: Instant,
    grace: Duration,
    failures: Option<FailureFolder>,
    guard: Guard,
}

/// How urgently the ranks are asked to end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    /// The ranks are not asked to end.
    Running,
    /// A rank has failed; the other ranks have time to notice and to report it.
    Reporting,
    /// The ranks have been told to terminate.
    Terminating,
    /// The ranks have been killed.
    Killed,
}

/// How far a job has come to its end.
struct End {
    /// The ranks that failed by themselves, in the order in which they ended.
    failed: Vec<FailedRank>,
    /// The signal that ended the job before a rank failed.
    stopped: Option<Signal>,
    urgency: Urgency,
    /// When the urgency grows.
    deadline: Option<Instant>,
}

impl End {
    fn become_urgent(&mut self, urgency: Urgency, patience: Duration) {
        (self.urgency, self.deadline) = (urgency, Some(Instant::now() + patience));
    }
}

/// How long ranks may take to terminate before they are killed.
const TERMINATION: Duration = Duration::from_secs(3);

impl Ranks {
    fn signal(&self, signal: Signal) {
        self.processes.iter().flatten().for_each(|process| process.signal(signal));
    }

    /// Waits until all ranks have ended. Returns why the job failed, if it did.
    fn wait(&mut self, events: &Receiver<Event>) -> Option<Failure> {
        let mut end = End { failed: Vec::new(), stopped: None, urgency: Urgency::Running, deadline: None };
        while self.processes.iter().any(Option::is_some) {
            let event = match end.deadline {
                Some(deadline) => events.recv_deadline(deadline).ok(),
                None => events.recv().ok(),
            };
            match event {
                Some(Event::Ended(rank, status)) => self.ended(rank, status, &mut end),
                Some(Event::Signalled(signal)) => self.signalled(signal, &mut end),
                None => self.urge(&mut end),
            }
        }
        let stopped = end.stopped.map(Failure::Stopped);
        let names = self.failures.as_ref().map(|folder| folder.names(self.processes.len())).unwrap_or_default();
        stopped.or_else(|| cause(&end.failed, &names).map(Failure::Rank))
    }

    /// Notes the end of a rank. After the first failure, the other ranks get time to report.
    fn ended(&mut self, rank: usize, status: ExitStatus, end: &mut End) {
        let Some(process) = self.processes[rank].take() else { return };
        let has_failed = !status.success() || !end.failed.is_empty() || end.stopped.is_some();
        if has_failed {
            // Processes that the rank has started do not outlive the job.
            process.signal(Signal::KILL);
        }
        self.guard.remove(process.pid());
        // A rank that was told to end has not failed by itself.
        if !status.success() && end.urgency <= Urgency::Reporting {
            end.failed.push(FailedRank { rank, pid: process.pid(), status, after: self.began.elapsed() });
            if end.urgency == Urgency::Running {
                end.become_urgent(Urgency::Reporting, self.grace);
            }
        }
    }

    /// Forwards a signal to the ranks. A signal that ends the job starts its deadline.
    fn signalled(&self, signal: Signal, end: &mut End) {
        self.signal(signal);
        if signal.ends() {
            if end.failed.is_empty() {
                end.stopped.get_or_insert(signal);
            }
            // A second signal kills the ranks at once.
            let again = end.urgency >= Urgency::Terminating;
            end.become_urgent(Urgency::Terminating, if again { Duration::ZERO } else { TERMINATION });
        }
    }

    /// Asks the ranks more urgently to end, at a deadline.
    fn urge(&self, end: &mut End) {
        if end.urgency < Urgency::Terminating {
            self.signal(Signal::TERMINATE);
            end.become_urgent(Urgency::Terminating, TERMINATION);
        } else {
            self.signal(Signal::KILL);
            (end.urgency, end.deadline) = (Urgency::Killed, None);
        }
    }

    /// Ends the ranks that have started when another cannot be started.
    fn stop_all(&mut self, events: &Receiver<Event>) {
        self.signal(Signal::KILL);
        self.wait(events);
    }
}

/// Returns the rank that caused a failure. Ranks that failed because of it may end first. Their
/// error names another failed rank. Of several causes, a rank that was killed comes first, since no
/// rank kills another, and then the one that ended first. If the errors name each other, the latest
/// one counts.
fn cause(failed: &[FailedRank], names: &Names) -> Option<Cause> {
    let named = |name: &Name| failed.iter().find(|failed| failed.rank == name.rank);
    let is_cause = |failed: &&FailedRank| names.get(&failed.rank).and_then(named).is_none();
    let was_killed = |failed: &&FailedRank| process::was_killed(failed.status);
    let causes: Vec<&FailedRank> = failed.iter().filter(is_cause).collect();
    let latest = failed.iter().filter_map(|failed| names.get(&failed.rank)).max_by_key(|name| name.written);
    let rank = causes.iter().copied().find(was_killed).or(causes.first().copied()).or(latest.and_then(named))?;
    let name = names.get(&rank.rank).filter(|name| named(name).is_none());
    Some(Cause { rank: *rank, names: name.map(|name| name.rank) })
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn the_latest_error_counts_if_errors_name_each_other() {
        let status = ExitStatus::from_raw(1 << 8);
        let failed = [1, 0, 2].map(|rank| FailedRank { rank, pid: 1, status, after: Duration::ZERO });
        let cause_of = |names: &[(usize, usize, u64)]| {
            let name = |&(by, rank, at)| (by, Name { rank, written: SystemTime::UNIX_EPOCH + Duration::from_secs(at) });
            cause(&failed, &names.iter().map(name).collect()).map(|cause| (cause.rank.rank, cause.names)).unwrap()
        };
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3), (2, 0, 1)]), (2, None));
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3), (2, 0, 4)]), (0, None));
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3)]), (2, None));
        assert_eq!(cause_of(&[(0, 1, 2), (1, 3, 3), (2, 1, 4)]), (1, Some(3)));
    }
}

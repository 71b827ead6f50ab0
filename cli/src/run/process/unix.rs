//! Processes and signals of Unix.

use std::fmt;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus};
use std::sync::Arc;

use crossbeam_channel::Sender;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal as Number, kill_process_group};
use signal_hook::consts::{SIGABRT, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::run::process::Event;

/// A signal that the launcher forwards.
#[derive(Clone, Copy)]
pub(crate) struct Signal(i32);

impl Signal {
    pub(crate) const TERMINATE: Signal = Signal(SIGTERM);
    pub(crate) const KILL: Signal = Signal(signal_hook::consts::SIGKILL);

    /// Returns whether the signal asks the job to end.
    pub(crate) fn ends(self) -> bool {
        matches!(self.0, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
    }

    /// Returns the exit status of a job that the signal ended, by the convention of shells.
    pub(crate) fn exit_code(self) -> i32 {
        128 + self.0
    }

    /// Returns the signal of a name, as [`Display`](fmt::Display) writes it. The numbers of some
    /// signals differ between systems.
    pub(crate) fn parse(name: &str) -> Option<Signal> {
        (1..=64).map(Signal).find(|signal| signal.to_string() == name)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match signal_hook::low_level::signal_name(self.0) {
            Some(name) => f.write_str(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// Sends a signal to the process group of a rank: the rank and the processes that it has
/// started.
pub(crate) fn send(pid: u32, signal: Signal) {
    if let (Some(pid), Some(number)) = (Pid::from_raw(pid as i32), Number::from_named_raw(signal.0)) {
        // The whole group may have ended. A stopped process ends only when it continues.
        let _ = kill_process_group(pid, number);
        if signal.ends() {
            let _ = kill_process_group(pid, Number::CONT);
        }
    }
}

/// The processes of a rank: the rank, and those that it starts.
pub(crate) struct Group(u32);

impl Group {
    pub(crate) fn of(child: &Child) -> Group {
        Group(child.id())
    }

    pub(crate) fn send(&self, signal: Signal) {
        send(self.0, signal);
    }
}

/// Ties the ranks to the life of this launcher. Here they are tied when they start.
pub(crate) struct Tie;

impl Tie {
    pub(crate) fn new() -> Tie {
        Tie
    }
}

/// Prepares the start of a rank, so that it gets signals from the launcher only and does not
/// outlive it.
pub(crate) fn prepare(command: &mut Command) {
    command.process_group(0);
    #[cfg(target_os = "linux")]
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; this is one
    // system call.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Number::KILL))?));
    }
}

/// Starts a process, and returns a pipe to its standard input.
pub(crate) fn spawn_reader(command: &mut Command) -> io::Result<ChildStdin> {
    // A socket, unlike a pipe, can be written without SIGPIPE where that signal is not ignored:
    // `announce` writes there.
    let (ours, theirs) = UnixStream::pair()?;
    command.stdin(OwnedFd::from(theirs)).spawn()?;
    Ok(OwnedFd::from(ours).into())
}

/// Has the process that will be started write `?` and its id into the pipe of [`spawn_reader`], before
/// its program begins.
pub(crate) fn announce(command: &mut Command, reader: &ChildStdin) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::net::{SendFlags, send};
        use std::io::Write;
        let reader = reader.as_fd().try_clone_to_owned()?;
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; this writes an
        // integer into an array and makes two system calls.
        unsafe {
            command.pre_exec(move || {
                let mut line = [0; 16];
                let mut rest = line.as_mut_slice();
                writeln!(rest, "?{}", std::process::id())?;
                let len = 16 - rest.len();
                // If the reader has exited, the rank runs without it.
                let _ = send(&reader, &line[..len], SendFlags::NOSIGNAL);
                Ok(())
            });
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (command, reader);
    Ok(())
}

/// Has the process that will be started run on these processors alone.
pub(crate) fn use_processors(command: &mut Command, processors: &[u32]) {
    #[cfg(target_os = "linux")]
    {
        use rustix::thread::{CpuSet, sched_setaffinity};
        let mut set = CpuSet::new();
        processors.iter().for_each(|processor| set.set(*processor as usize));
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; this is one system
        // call.
        unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &set)?)) };
    }
    // Elsewhere ranks are not bound: no domain is known there.
    #[cfg(not(target_os = "linux"))]
    let _ = (command, processors);
}

/// Makes a folder that only its user can open.
pub(crate) fn make_private_folder(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().mode(0o700).create(path)
}

/// Prepares the start of a process that gets no signal that is meant for the launcher, and
/// outlives it.
pub(crate) fn become_independent(command: &mut Command) {
    command.process_group(0);
}

/// Has this process ignore the signals that ask a job to end.
pub(crate) fn ignore_signals() -> io::Result<()> {
    // Reads that a handler interrupts are repeated.
    [SIGHUP, SIGINT, SIGQUIT, SIGTERM].into_iter().try_for_each(|signal| {
        signal_hook::flag::register(signal, Arc::default())?;
        Ok(())
    })
}

/// The output of a rank. A program that the rank has started may keep the pipe open after the
/// rank has ended. So the output is also complete when the rank has ended and the pipe is
/// empty.
pub(crate) struct RankOutput<P> {
    pub(crate) pipe: P,
    /// A pipe that closes when the rank ends.
    pub(crate) rank: PipeReader,
    /// Dropped when all output of the rank has been read.
    pub(crate) unread: Option<Sender<()>>,
}

impl<P: Read + AsFd> Read for RankOutput<P> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        if self.unread.is_some() {
            let mut either = [PollFd::new(&self.pipe, PollFlags::IN), PollFd::new(&self.rank, PollFlags::IN)];
            retry_on_intr(|| poll(&mut either, None))?;
            let has_ended = !either[1].revents().is_empty();
            // Look for remaining output after the end only: the rank may write just before it
            // ends.
            if has_ended && retry_on_intr(|| poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&NOW)))? == 0 {
                self.unread = None;
            }
        }
        self.pipe.read(into)
    }
}

/// How long to wait until all output of a rank has been read. `None`: this system reports the
/// end.
pub(crate) const OUTPUT_PATIENCE: Option<std::time::Duration> = None;

/// Sends signals to the receiver of events, from a thread of its own.
pub(crate) fn watch_signals(events: &Sender<Event>) -> io::Result<()> {
    // The parent of the launcher may have set SIGCHLD to be ignored. Then the end of a child
    // would not be reported.
    signal_hook::flag::register(SIGCHLD, Arc::default())?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2])?;
    let events = events.clone();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signalled(Signal(signal))).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

pub(crate) fn exit_code(status: ExitStatus) -> i32 {
    // By the convention of shells.
    status.code().unwrap_or_else(|| Signal(status.signal().unwrap_or(0)).exit_code())
}

/// Ends the program with a status of a rank or of a signal.
pub(crate) fn exit(code: i32) -> ExitCode {
    ExitCode::from(code as u8)
}

/// Returns whether a signal ended the process from outside. A process that aborts ends itself.
pub(crate) fn was_killed(status: ExitStatus) -> bool {
    status.signal().is_some_and(|signal| signal != SIGABRT)
}

/// Returns how a process ended, for a launcher on another host.
pub(crate) fn encode_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, signal) => Signal(signal.unwrap_or(0)).to_string(),
    }
}

/// Returns the status that [`encode_status`] has written.
pub(crate) fn decode_status(text: &str) -> Option<ExitStatus> {
    let raw = match text.strip_prefix("exit ") {
        Some(code) => i32::from(code.parse::<u8>().ok()?) << 8,
        None => Signal::parse(text)?.0,
    };
    Some(ExitStatus::from_raw(raw))
}

/// Describes how processes ended: `was ended by SIGKILL`.
pub(crate) fn describe(status: ExitStatus, processes: usize) -> String {
    let was = if processes == 1 { "was" } else { "were" };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("{was} ended by {}", Signal(signal)),
        (None, None) => format!("ended: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_announces_itself_before_its_program_begins() {
        let (ours, mut reader) = UnixStream::pair().unwrap();
        let ours = ChildStdin::from(OwnedFd::from(ours));
        // Its program never begins.
        let mut command = Command::new("/no/program");
        announce(&mut command, &ours).unwrap();
        command.spawn().unwrap_err();
        drop((command, ours));
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        let id = said.strip_prefix('?').and_then(|rest| rest.strip_suffix('\n')).map(str::parse::<u32>);
        assert!(matches!(id, Some(Ok(id)) if id != std::process::id()), "{said}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_runs_without_a_reader() {
        let (ours, reader) = UnixStream::pair().unwrap();
        drop(reader);
        let mut command = Command::new("true");
        announce(&mut command, &ChildStdin::from(OwnedFd::from(ours))).unwrap();
        assert!(command.status().unwrap().success());
    }

    #[test]
    fn one_process_was_ended_and_several_were() {
        let killed = |processes| describe(ExitStatus::from_raw(9), processes);
        assert_eq!([killed(1), killed(3)], ["was ended by SIGKILL", "were ended by SIGKILL"]);
    }

    #[test]
    fn a_status_is_the_same_on_another_host() {
        for raw in [0, 3 << 8, 255 << 8, 9, 11, 6, 15] {
            let status = ExitStatus::from_raw(raw);
            assert_eq!(decode_status(&encode_status(status)), Some(status), "{}", encode_status(status));
        }
        for text in ["", "exit", "exit 256", "exit -1", "SIGNONE", "signal 0", "signal 65"] {
            assert_eq!(decode_status(text), None, "{text}");
        }
    }
}

//! The launcher's connection to the agent of a host.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use serde::Serialize;

use super::super::failures::Report;
use super::super::output::Palette;
use super::super::process::{self, Event, Process, Signal, become_independent};
use super::protocol::{Frame, LARGEST, PREAMBLE, ToAgent, ToLauncher, bytes, message, read};
use super::window::Window;
use crate::complain;

/// How many bytes of rank 0's input may be under way.
const INPUT_WINDOW: usize = 64 << 10;

/// How much a shell may write before the agent starts, in bytes.
const LONGEST_GREETING: usize = 64 << 10;

/// How many lines of ssh and of the agent are kept for the report of a failure.
const KEPT_LINES: usize = 20;

/// How long ssh may take to end when its output has ended.
const END: Duration = Duration::from_secs(3);

/// How long to wait for the last lines of ssh after a good end.
const LAST_LINES: Duration = Duration::from_millis(200);

/// The ranks of a job that have started, and their failures.
#[derive(Default)]
pub(super) struct Notes {
    pids: Mutex<HashMap<usize, u32>>,
    reports: Mutex<BTreeMap<usize, Report>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    pub(super) fn pid(&self, rank: usize) -> u32 {
        lock(&self.pids).get(&rank).copied().unwrap_or(0)
    }

    pub(super) fn reports(&self) -> MutexGuard<'_, BTreeMap<usize, Report>> {
        lock(&self.reports)
    }
}

/// Where the answers of agents go.
#[derive(Clone)]
pub(super) struct Receivers {
    pub(super) palette: Palette,
    pub(super) events: Sender<Event>,
    /// The address of a host that is ready, or why it is not.
    pub(super) answers: Sender<(usize, Result<SocketAddr, String>)>,
    pub(super) notes: Arc<Notes>,
    /// Dropped when all output of a host was written.
    pub(super) unread: Sender<()>,
}

/// How the user can find out why an agent does not start.
pub(super) struct Advice {
    /// Whether ssh starts the agent.
    pub(super) is_remote: bool,
    /// How to check whether ssh works.
    pub(super) connection: String,
    /// How to check the program on the host.
    pub(super) program: String,
}

/// A connection to the agent of a host.
pub(super) struct Connection {
    pub(super) host: Arc<str>,
    pub(super) ranks: Range<usize>,
    /// ssh, or the agent itself.
    process: Process,
    /// `None` closes the connection.
    outgoing: Sender<Option<Vec<u8>>>,
    input: Arc<Window>,
}

/// What the threads of a connection share.
struct Shared {
    index: usize,
    host: Arc<str>,
    ranks: Range<usize>,
    outgoing: Sender<Option<Vec<u8>>>,
    input: Arc<Window>,
    lines: Arc<Lines>,
    advice: Advice,
}

impl Connection {
    /// Starts an agent by a command, and threads that talk to it.
    pub(super) fn open(
        index: usize,
        host: Arc<str>,
        ranks: Range<usize>,
        mut command: Command,
        advice: Advice,
        receivers: Receivers,
    ) -> io::Result<Connection> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The environment of a process can be seen by others of the user. Ctrl-C is for the launcher.
        command.env_remove("KOLO_SECRET");
        become_independent(&mut command);
        let mut child = command.spawn()?;
        let missing = || io::Error::other("a pipe is missing");
        let mut to = child.stdin.take().ok_or_else(missing)?;
        let from = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        let process = Process::new(&child);
        let (outgoing, messages) = unbounded::<Option<Vec<u8>>>();
        let input = Arc::new(Window::new(INPUT_WINDOW));
        let lines = Arc::new(Lines { host: host.clone(), kept: Mutex::default() });
        let shared = Shared {
            index,
            host: host.clone(),
            ranks: ranks.clone(),
            outgoing: outgoing.clone(),
            input: input.clone(),
            lines: lines.clone(),
            advice,
        };
        let thread = |what: &str| std::thread::Builder::new().name(format!("{what}-{index}"));
        thread("to-host").spawn(move || {
            // If the agent is gone, the thread that reads says so.
            while let Ok(Some(frame)) = messages.recv() {
                if to.write_all(&frame).is_err() {
                    return;
                }
            }
        })?;
        let (errors_end, all_errors) = bounded::<()>(0);
        thread("errors-of-host").spawn(move || {
            lines.read(errors);
            drop(errors_end);
        })?;
        thread("from-host").spawn(move || shared.receive(child, from, &all_errors, &receivers))?;
        Ok(Connection { host, ranks, process, outgoing, input })
    }

    pub(super) fn tell(&self, what: &ToAgent) -> io::Result<()> {
        tell(&self.outgoing, what)
    }

    /// Returns what sends the input of rank 0 to this host.
    pub(super) fn input(&self) -> impl FnMut(&[u8]) -> bool + Send + 'static {
        let (outgoing, window, rank) = (self.outgoing.clone(), self.input.clone(), self.ranks.start);
        move |part| {
            let frame = bytes(rank, false, part).ok();
            window.take(part.len()) && frame.is_some_and(|frame| outgoing.send(Some(frame)).is_ok())
        }
    }

    /// Returns what tells the agent that the launcher lives. Returns `false` after the end.
    pub(super) fn heartbeat(&self) -> impl Fn() -> bool + Send + 'static {
        let outgoing = self.outgoing.clone();
        move || tell(&outgoing, &ToAgent::Lives).is_ok()
    }

    /// Closes the connection: the agent ends its ranks and itself.
    pub(super) fn close(&self) {
        _ = self.outgoing.send(None);
        self.process.signal(Signal::TERMINATE);
    }

    /// Ends ssh, or the agent, at once.
    pub(super) fn kill(&self) {
        self.process.signal(Signal::KILL);
    }
}

fn tell(outgoing: &Sender<Option<Vec<u8>>>, what: &impl Serialize) -> io::Result<()> {
    outgoing.send(Some(message(what)?)).map_err(io::Error::other)
}

/// What ssh and the agent write to standard error.
struct Lines {
    host: Arc<str>,
    /// The last lines, until the host is ready. From then on, lines are passed on.
    kept: Mutex<(Vec<String>, bool)>,
}

impl Lines {
    fn read(&self, pipe: ChildStderr) {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while matches!(reader.by_ref().take(4096).read_until(b'\n', &mut line), Ok(read) if read > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            let mut kept = lock(&self.kept);
            if kept.1 {
                self.pass_on(&text);
            } else if !text.is_empty() {
                if kept.0.len() == KEPT_LINES {
                    kept.0.remove(0);
                }
                kept.0.push(text);
            }
        }
    }

    fn pass_on(&self, text: &str) {
        complain(&format!("kolo run: host {}: {text}", self.host));
    }

    /// Passes on what was kept, and all that follows.
    fn pass_all_on(&self) {
        let mut kept = lock(&self.kept);
        kept.0.drain(..).for_each(|text| self.pass_on(&text));
        kept.1 = true;
    }

    fn text(&self) -> String {
        lock(&self.kept).0.join("; ")
    }
}

/// How far the conversation with an agent has come when it ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Silent,
    Greeted,
    Ready,
    /// The agent cannot start ranks, and has said why.
    Refused,
    /// The agent has nothing more to say.
    Done,
}

impl Shared {
    /// Receives what the agent says until its end.
    fn receive(self, mut child: Child, from: ChildStdout, all_errors: &Receiver<()>, receivers: &Receivers) {
        let mut stage = Stage::Silent;
        let (lines, written) = unbounded();
        self.write_output(written, receivers);
        let ended = self.converse(from, &mut stage, &lines, receivers);
        drop(lines);
        self.input.close();
        if ended.is_err() {
            // The agent does not follow the protocol.
            _ = child.kill();
        }
        let status = wait(&mut child);
        // A connection that ssh shares and keeps open (ControlPersist) keeps the pipe open.
        _ = all_errors.recv_timeout(if matches!(stage, Stage::Done | Stage::Refused) { LAST_LINES } else { END });
        match stage {
            Stage::Refused => {}
            // A rank whose end the agent has not told is lost, too.
            Stage::Ready | Stage::Done => {
                let why = self.why_it_was_lost(status, ended.err());
                _ = receivers.events.send(Event::Lost(self.index, why));
            }
            Stage::Silent | Stage::Greeted => {
                let why = self.why_it_did_not_start(stage, status, ended.err());
                _ = receivers.answers.send((self.index, Err(why)));
            }
        }
    }

    fn converse(
        &self,
        from: ChildStdout,
        stage: &mut Stage,
        lines: &Sender<(usize, bool, Vec<u8>)>,
        receivers: &Receivers,
    ) -> io::Result<()> {
        let mut from = BufReader::new(from);
        if !self.skip_greeting(&mut from)? {
            return Ok(());
        }
        *stage = Stage::Greeted;
        let wrong = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the agent sent a message that the protocol does not have; install the same version of kolo on all hosts",
            )
        };
        while let Some(frame) = read::<ToLauncher>(&mut from, LARGEST)? {
            let rank = match &frame {
                Frame::Bytes { rank, .. } => Some(*rank),
                Frame::Message(
                    ToLauncher::Started { rank, .. } | ToLauncher::NotStarted { rank, .. } | ToLauncher::Ended { rank, .. },
                ) => Some(*rank),
                Frame::Message(_) => None,
            };
            if rank.is_some_and(|rank| !self.ranks.contains(&rank)) {
                return Err(wrong());
            }
            match frame {
                Frame::Bytes { rank, is_error, bytes } => _ = lines.send((rank, is_error, bytes)),
                Frame::Message(ToLauncher::Ready { master }) => {
                    *stage = Stage::Ready;
                    self.lines.pass_all_on();
                    _ = receivers.answers.send((self.index, Ok(master)));
                }
                Frame::Message(ToLauncher::Refused(why)) => {
                    *stage = Stage::Refused;
                    _ = receivers.answers.send((self.index, Err(format!("cannot start ranks on host {}: {why}", self.host))));
                }
                Frame::Message(ToLauncher::Started { rank, pid }) => _ = lock(&receivers.notes.pids).insert(rank, pid),
                Frame::Message(ToLauncher::NotStarted { rank, why }) => {
                    _ = receivers.events.send(Event::NotStarted(rank, format!("{why} on host {}", self.host)));
                }
                Frame::Message(ToLauncher::Ended { rank, status, failures }) => {
                    let status = process::decode_status(&status).ok_or_else(wrong)?;
                    if let Some((text, age)) = failures {
                        let now = SystemTime::now();
                        let written = now.checked_sub(Duration::from_millis(age)).unwrap_or(now);
                        receivers.notes.reports().insert(rank, Report { text, written });
                    }
                    _ = receivers.events.send(Event::Ended(rank, status));
                }
                Frame::Message(ToLauncher::Taken(bytes)) => self.input.give(bytes),
                Frame::Message(ToLauncher::Done) => *stage = Stage::Done,
            }
        }
        Ok(())
    }

    /// Reads what the shell of the host writes, up to the agent's first line. Returns `false` at the
    /// end of the stream.
    fn skip_greeting(&self, from: &mut impl BufRead) -> io::Result<bool> {
        let mut left = LONGEST_GREETING;
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = from.by_ref().take(left as u64).read_until(b'\n', &mut line)?;
            // The shell may not end its last line.
            if line.ends_with(PREAMBLE) {
                return Ok(true);
            }
            let text = String::from_utf8_lossy(&line);
            if let Some(other) = text.trim_end().strip_prefix("kolo agent: protocol ") {
                return Err(io::Error::other(format!(
                    "kolo there has protocol {other}, and this one another; install the same version"
                )));
            }
            if read == 0 && left > 0 {
                return Ok(false);
            }
            left -= read;
            if left == 0 {
                return Err(io::Error::other(format!(
                    "the shell there writes more than {LONGEST_GREETING} bytes before the agent"
                )));
            }
            self.lines.pass_on(text.trim_end());
        }
    }

    /// Writes the output of ranks on a thread of its own, because its reader may be slow.
    fn write_output(&self, lines: Receiver<(usize, bool, Vec<u8>)>, receivers: &Receivers) {
        let (palette, unread, outgoing) = (receivers.palette.clone(), receivers.unread.clone(), self.outgoing.clone());
        let copy = move || {
            let mut closed = Vec::new();
            for (rank, is_error, line) in lines {
                if !closed.contains(&(rank, is_error)) && !palette.write(rank, is_error, &line) {
                    closed.push((rank, is_error));
                    _ = tell(&outgoing, &ToAgent::Unread { rank, is_error });
                }
                _ = tell(&outgoing, &ToAgent::Written(line.len()));
            }
            drop(unread);
        };
        if let Err(error) = std::thread::Builder::new().name(format!("output-of-host-{}", self.index)).spawn(copy) {
            complain(&format!("kolo run: output of host {} is lost: {error}", self.host));
        }
    }

    fn why_it_did_not_start(&self, stage: Stage, status: Option<ExitStatus>, error: Option<io::Error>) -> String {
        let said = self.lines.text();
        let what = match (error, said.is_empty(), status) {
            (Some(error), true, _) => error.to_string(),
            (Some(error), false, _) => format!("{error}; {said}"),
            (None, false, _) => said,
            (None, true, Some(status)) => format!("{} {} without a message", self.process_name(), process::describe(status, 1)),
            (None, true, None) => format!("{} closed its output and does not end", self.process_name()),
        };
        let Advice { is_remote, connection, program } = &self.advice;
        let advice = match status.and_then(|status| status.code()) {
            _ if stage == Stage::Greeted || !is_remote => String::new(),
            Some(255) => format!("; check {connection}"),
            Some(126 | 127) => format!("; install kolo there, or give its path there with --remote-program; check {program}"),
            _ => format!("; is kolo there the same version as here? check {program}"),
        };
        format!("cannot start ranks on host {}: {what}{advice}", self.host)
    }

    fn why_it_was_lost(&self, status: Option<ExitStatus>, error: Option<io::Error>) -> String {
        let how = match (error, status) {
            (Some(error), _) => error.to_string(),
            (None, Some(status)) => format!("{} {}", self.process_name(), process::describe(status, 1)),
            (None, None) => format!("{} closed its output", self.process_name()),
        };
        format!("the connection to the agent of host {} ended: {how}", self.host)
    }

    fn process_name(&self) -> &'static str {
        if self.advice.is_remote { "ssh" } else { "the agent" }
    }
}

/// Waits for the end of a process, and kills it if it takes long.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + END;
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            ended => return ended.ok().flatten(),
        }
    }
    _ = child.kill();
    child.wait().ok().filter(|_| false)
}

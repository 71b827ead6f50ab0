//! The agent of a host: starts the ranks there for a launcher that reaches it over ssh.
//!
//! It obeys the launcher's messages. If the connection ends, or the launcher says nothing for
//! minutes, the agent ends its ranks and itself. If the agent is killed, its guard ends the ranks.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::{ChildStdin, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender, bounded, select, unbounded};
use serde::Serialize;

use super::super::arguments::MOST_RANKS;
use super::super::bind::Bindings;
use super::super::local::LocalRanks;
use super::super::output::Sink;
use super::super::process::{self, Event, Signal, watch_signals};
use super::super::program::{self, Program};
use super::super::supervise::Ranks;
use super::protocol::{Frame, Job, LARGEST_JOB, PREAMBLE, ToAgent, ToLauncher, WINDOW, bytes, message, read};
use super::window::Window;
use crate::complain;

/// How long the launcher may say nothing. It may have been stopped for a while.
const SILENCE: Duration = Duration::from_secs(300);

/// How long the description of the job may take.
const DESCRIPTION: Duration = Duration::from_secs(60);

/// How long a connection to the launcher's store may take.
const STORE: Duration = Duration::from_secs(5);

/// How long ranks may take to terminate after the launcher has gone, before they are killed.
const TERMINATION: Duration = Duration::from_secs(3);

/// How long ranks may take to end after they were killed, and the last output to be sent.
const LAST: Duration = Duration::from_secs(10);

/// The most bytes of a rank's failures that are sent. The last ones count.
const LONGEST_REPORT: usize = 128 << 10;

/// Runs as the agent.
pub(crate) fn agent() -> ExitCode {
    if std::io::IsTerminal::is_terminal(&std::io::stdin()) {
        complain("kolo agent: `kolo run --hosts` starts this command on its hosts; it is of no use by hand");
        return ExitCode::FAILURE;
    }
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            complain(&format!("kolo agent: {problem}"));
            ExitCode::FAILURE
        }
    }
}

/// Where frames for the launcher go; `None` is the end.
type Frames = Sender<Option<Vec<u8>>>;

/// What the launcher says; `None` when the connection has ended.
type Heard = Option<Frame<ToAgent>>;

fn serve() -> Result<(), String> {
    let (events, event) = unbounded();
    watch_signals(&events).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let (outgoing, all_written) = start_writing()?;
    _ = outgoing.send(Some(PREAMBLE.to_vec()));
    let heard = start_reading()?;
    let launcher = Launcher { outgoing, window: Arc::new(Window::new(WINDOW)) };
    let job = match heard.recv_timeout(DESCRIPTION) {
        Ok(Some(Frame::Message(ToAgent::Job(job)))) => job,
        _ => return Err("no job came from the launcher; use the same version of kolo on both machines".to_owned()),
    };
    let (program, master, bindings) = match prepare(&job) {
        Ok(prepared) => prepared,
        Err(why) => {
            launcher.tell(&ToLauncher::Refused(why));
            launcher.finish(&all_written);
            return Ok(());
        }
    };
    launcher.tell(&ToLauncher::Ready { master });
    let master = loop {
        match heard.recv_timeout(SILENCE) {
            Ok(Some(Frame::Message(ToAgent::Start { master }))) => break master,
            Ok(Some(Frame::Message(ToAgent::Lives))) => {}
            // Another host is not ready.
            _ => return Ok(()),
        }
    };
    let ranks = LocalRanks::new(&format!("{}-{}", job.name, job.host), job.first);
    let unread = (0..job.ranks).map(|_| [AtomicBool::new(false), AtomicBool::new(false)]).collect();
    let keep_going = job.keep_going;
    let mut agent =
        Agent { launcher, ranks, first: job.first, unread, input: None, keep_going, has_failed: false, shutdown: Shutdown::No };
    let (reading, all_read) = bounded(0);
    agent.start((&job, master, &bindings), &program, &events, &reading);
    drop(reading);
    agent.supervise(&event, &heard);
    agent.send_rest(&event, &heard, &all_read);
    agent.launcher.tell(&ToLauncher::Done);
    agent.launcher.finish(&all_written);
    Ok(())
}

/// Checks whether the ranks of a job can start here. Returns their program, an address of this host with
/// a free port, and the processors of each rank.
fn prepare(job: &Job) -> Result<(Program<'_>, SocketAddr, Bindings), String> {
    let most = MOST_RANKS as usize;
    if job.ranks == 0 || job.world_size > most || job.first.checked_add(job.ranks).is_none_or(|end| job.world_size < end) {
        return Err("the job has no ranks here, or too many".to_owned());
    }
    std::env::set_current_dir(&job.directory).map_err(|error| {
        let directory = job.directory.display();
        format!("the working directory {directory} is not there: {error}; make it, or give another one with --directory")
    })?;
    let connected = TcpStream::connect_timeout(&job.store, STORE).map_err(|error| {
        let store = job.store;
        format!(
            "it cannot reach the launcher's store at {store}: {error}; give --address or KOLO_INTERFACE with an address of the \
             launcher's machine that the host reaches, or open the port"
        )
    })?;
    let own = connected.local_addr().and_then(|own| program::free_address(own.ip()));
    let own = own.map_err(|error| format!("no port is free: {error}"))?;
    Ok((Program::new(&job.program)?.with_nccl(job.has_nccl)?, own, Bindings::new(job.bind_to, job.ranks)?))
}

/// Starts to write frames, on a thread of its own: a write waits if the launcher does not read. The
/// receiver is closed when all frames up to `None` were written.
fn start_writing() -> Result<(Frames, Receiver<()>), String> {
    let (outgoing, frames): (Frames, _) = unbounded();
    let (written, all_written) = bounded(0);
    let write = move || {
        let mut out = std::io::stdout().lock();
        while let Ok(Some(frame)) = frames.recv() {
            // If the launcher is gone, the thread that reads notices.
            if out.write_all(&frame).and_then(|()| out.flush()).is_err() {
                break;
            }
        }
        drop(written);
    };
    let thread = std::thread::Builder::new().name("to-launcher".to_owned()).spawn(write);
    thread.map_err(|error| format!("cannot start a thread: {error}"))?;
    Ok((outgoing, all_written))
}

/// Starts to read the launcher's frames.
fn start_reading() -> Result<Receiver<Heard>, String> {
    let (frames, heard) = unbounded();
    let listen = move || {
        let mut from = std::io::stdin().lock();
        loop {
            let frame = read(&mut from, LARGEST_JOB).unwrap_or_else(|error| {
                tracing::debug!(%error, "the connection to the launcher ends");
                None
            });
            let is_end = frame.is_none();
            if frames.send(frame).is_err() || is_end {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("from-launcher".to_owned()).spawn(listen);
    thread.map_err(|error| format!("cannot start a thread: {error}"))?;
    Ok(heard)
}

/// Whether nothing reads the output and the errors of each rank any more.
type Unread = [[AtomicBool; 2]];

/// The way to the launcher.
#[derive(Clone)]
struct Launcher {
    outgoing: Frames,
    /// How much output may be under way.
    window: Arc<Window>,
}

impl Launcher {
    fn tell(&self, what: &impl Serialize) {
        match message(what) {
            Ok(frame) => _ = self.outgoing.send(Some(frame)),
            Err(error) => tracing::warn!(%error, "the launcher cannot be told"),
        }
    }

    /// Returns what sends the lines of a rank, until nothing reads them any more.
    fn sink(&self, unread: Arc<Unread>, rank: usize, at: usize, is_error: bool) -> Sink {
        let launcher = self.clone();
        Box::new(move |line| {
            if unread[at][usize::from(is_error)].load(Relaxed) {
                return false;
            }
            // Without a launcher, the rank still ends in its own way.
            if launcher.window.take(line.len())
                && let Ok(frame) = bytes(rank, is_error, line)
            {
                _ = launcher.outgoing.send(Some(frame));
            }
            true
        })
    }

    /// Waits until all messages were written.
    fn finish(&self, all_written: &Receiver<()>) {
        _ = self.outgoing.send(None);
        _ = all_written.recv_timeout(LAST);
    }
}

/// How far the agent is in ending its ranks of its own accord.
#[derive(Clone, Copy)]
enum Shutdown {
    No,
    /// The ranks were told to terminate, and are killed then.
    Terminating(Instant),
    /// The ranks were killed, and are awaited until then.
    Killed(Instant),
}

/// The agent with its ranks.
struct Agent {
    launcher: Launcher,
    ranks: LocalRanks,
    first: usize,
    unread: Arc<Unread>,
    /// Where the input of rank 0 goes.
    input: Option<Sender<Vec<u8>>>,
    /// Whether the other ranks go on when one has failed.
    keep_going: bool,
    /// Whether the job has failed.
    has_failed: bool,
    shutdown: Shutdown,
}

impl Agent {
    fn start(
        &mut self,
        (job, master, bindings): (&Job, SocketAddr, &Bindings),
        program: &Program<'_>,
        events: &Sender<Event>,
        reading: &Sender<()>,
    ) {
        let place = program::Job {
            name: &job.name,
            world_size: job.world_size,
            first: job.first,
            ranks: job.ranks,
            store: job.store,
            master,
            secret: Some(&job.secret),
        };
        for rank in job.first..job.first + job.ranks {
            let has_input = job.has_input && rank == 0;
            let mut command = program.command(if has_input { Stdio::piped() } else { Stdio::null() });
            command.envs(job.environment.iter().map(|(name, value)| (name, value)));
            place.tell(&mut command, rank);
            program.replace_nccl(&mut command);
            let (launcher, unread, at) = (&self.launcher, &self.unread, rank - job.first);
            if job.report_bindings {
                // The launcher writes the name of the host before it.
                complain(&bindings.describe(&command, rank, at));
            }
            bindings.apply(&mut command, at);
            let sink = |is_error| launcher.sink(unread.clone(), rank, at, is_error);
            match self.ranks.start(&mut command, sink, events, reading) {
                Ok(input) => {
                    let pid = self.ranks.last_pid().unwrap_or(0);
                    self.launcher.tell(&ToLauncher::Started { rank, pid });
                    self.input = self.input.take().or_else(|| input.and_then(|pipe| feed(pipe, self.launcher.clone())));
                }
                Err(error) => {
                    let why = program.cannot_be_started(&error);
                    for rank in rank..job.first + job.ranks {
                        self.launcher.tell(&ToLauncher::NotStarted { rank, why: why.clone() });
                    }
                    return;
                }
            }
        }
    }

    /// Waits until all ranks have ended.
    fn supervise(&mut self, events: &Receiver<Event>, heard: &Receiver<Heard>) {
        let mut silence = Instant::now() + SILENCE;
        while self.ranks.are_running() {
            let deadline = match self.shutdown {
                Shutdown::No => silence,
                Shutdown::Terminating(deadline) | Shutdown::Killed(deadline) => deadline,
            };
            // After the end of the connection, its channel is closed and always ready.
            let never = crossbeam_channel::never();
            let heard = if matches!(self.shutdown, Shutdown::No) { heard } else { &never };
            select! {
                recv(events) -> event => match event {
                    Ok(Event::Ended(rank, status)) => self.ended(rank, status),
                    Ok(Event::Signalled(signal)) if signal.ends() => self.end("it got a signal"),
                    _ => {}
                },
                recv(heard) -> frame => {
                    silence = Instant::now() + SILENCE;
                    match frame {
                        Ok(Some(frame)) => self.obey(frame),
                        _ => self.end("the connection to the launcher has ended"),
                    }
                },
                default(deadline.saturating_duration_since(Instant::now())) => match self.shutdown {
                    Shutdown::No => self.end("the launcher says nothing"),
                    Shutdown::Terminating(_) => {
                        self.ranks.signal(Signal::KILL);
                        self.shutdown = Shutdown::Killed(Instant::now() + LAST);
                    }
                    // The system does not end them.
                    Shutdown::Killed(_) => return,
                },
            }
        }
    }

    /// Sends the output that is left.
    fn send_rest(&mut self, events: &Receiver<Event>, heard: &Receiver<Heard>, all_read: &Receiver<()>) {
        while matches!(self.shutdown, Shutdown::No) {
            select! {
                recv(all_read) -> _ => return,
                recv(events) -> event => match event {
                    Ok(Event::Signalled(signal)) if signal.ends() => return,
                    _ => {}
                },
                recv(heard) -> frame => match frame {
                    Ok(Some(frame)) => self.obey(frame),
                    _ => return,
                },
                default(SILENCE) => return,
            }
        }
    }

    fn obey(&mut self, frame: Frame<ToAgent>) {
        match frame {
            Frame::Message(ToAgent::Signal(name)) => {
                if let Some(signal) = Signal::parse(&name) {
                    self.has_failed |= signal.ends();
                    self.ranks.signal(signal);
                }
            }
            Frame::Message(ToAgent::Failed) => self.has_failed = true,
            Frame::Message(ToAgent::Written(bytes)) => self.launcher.window.give(bytes),
            Frame::Message(ToAgent::Unread { rank, is_error }) => {
                if let Some(rank) = rank.checked_sub(self.first).and_then(|at| self.unread.get(at)) {
                    rank[usize::from(is_error)].store(true, Relaxed);
                }
            }
            Frame::Bytes { bytes, .. } => {
                if bytes.is_empty() {
                    self.input = None;
                } else if let Some(input) = &self.input {
                    _ = input.send(bytes);
                }
            }
            Frame::Message(ToAgent::Lives | ToAgent::Start { .. } | ToAgent::Job(_)) => {}
        }
    }

    fn ended(&mut self, rank: usize, status: std::process::ExitStatus) {
        let has_failed = !status.success();
        self.has_failed |= has_failed && !self.keep_going;
        if self.ranks.ended(rank, has_failed || self.has_failed).is_some() {
            let failures = self.ranks.report(rank).map(|report| {
                let age = SystemTime::now().duration_since(report.written).unwrap_or_default();
                (tail(&report.text).to_owned(), age.as_millis() as u64)
            });
            self.launcher.tell(&ToLauncher::Ended { rank, status: process::encode_status(status), failures });
        }
    }

    /// Ends the ranks, without the launcher.
    fn end(&mut self, why: &str) {
        tracing::debug!(why, "the agent ends its ranks");
        self.launcher.window.close();
        self.has_failed = true;
        self.ranks.signal(Signal::TERMINATE);
        if matches!(self.shutdown, Shutdown::No) {
            self.shutdown = Shutdown::Terminating(Instant::now() + TERMINATION);
        }
    }
}

/// Returns the last lines of a file of failures.
fn tail(text: &str) -> &str {
    let Some(from) = text.len().checked_sub(LONGEST_REPORT) else { return text };
    let line = text.as_bytes()[from..].iter().position(|byte| *byte == b'\n');
    line.map_or("", |line| &text[from + line + 1..])
}

/// Writes the input of rank 0, on a thread of its own: the rank may not read it.
fn feed(mut pipe: ChildStdin, launcher: Launcher) -> Option<Sender<Vec<u8>>> {
    let (input, parts) = unbounded::<Vec<u8>>();
    let write = move || {
        for part in parts {
            // A rank that reads no more gets no more.
            if pipe.write_all(&part).is_err() {
                return;
            }
            launcher.tell(&ToLauncher::Taken(part.len()));
        }
    };
    std::thread::Builder::new().name("input".to_owned()).spawn(write).ok().map(|_| input)
}

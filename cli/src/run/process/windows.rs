//! Processes of Windows: jobs, so that no process outlives its launcher, and the events of consoles.

use std::fmt;
use std::io::{self, ErrorKind, PipeReader, Read};
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::os::windows::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crossbeam_channel::Sender;
use windows_sys::Win32::Foundation::{HANDLE, STATUS_CONTROL_C_EXIT};
use windows_sys::Win32::System::Console::{CTRL_BREAK_EVENT, CTRL_C_EVENT, GenerateConsoleCtrlEvent, SetConsoleCtrlHandler};
use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE, JOBOBJECT_EXTENDED_LIMIT_INFORMATION,
    JobObjectExtendedLimitInformation, SetInformationJobObject, TerminateJobObject,
};
use windows_sys::Win32::System::Threading::{CREATE_NEW_PROCESS_GROUP, CREATE_NO_WINDOW, GetCurrentProcess};

use super::Event;

/// A request that a console has for its processes, or that the launcher has for its ranks.
#[derive(Clone, Copy)]
pub(crate) enum Signal {
    Interrupt,
    Break,
    /// The window was closed, or the user logs off.
    Close,
    /// To end at once.
    Kill,
}

impl Signal {
    pub(crate) const TERMINATE: Signal = Signal::Break;
    pub(crate) const KILL: Signal = Signal::Kill;

    pub(crate) fn ends(self) -> bool {
        true
    }

    /// Returns the request of a name, as [`Display`](fmt::Display) writes it.
    pub(crate) fn parse(name: &str) -> Option<Signal> {
        [Signal::Interrupt, Signal::Break, Signal::Close, Signal::Kill].into_iter().find(|signal| signal.to_string() == name)
    }

    /// Returns the exit status of a program that the console has ended.
    pub(crate) fn exit_code(self) -> i32 {
        STATUS_CONTROL_C_EXIT
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signal::Interrupt => "Ctrl-C",
            Signal::Break => "Ctrl-Break",
            Signal::Close => "the end of its console",
            Signal::Kill => "a request to end at once",
        })
    }
}

/// A job of the system: processes, and those that they start.
struct Job(OwnedHandle);

impl Job {
    /// Makes a job whose processes end when the last handle of it is closed.
    fn new() -> io::Result<Job> {
        // SAFETY: the job has no attributes and no name. The call has just made the handle.
        let handle = unsafe { CreateJobObjectW(std::ptr::null(), std::ptr::null()) };
        if handle.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        let job = Job(unsafe { OwnedHandle::from_raw_handle(handle) });
        job.limit(JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE)?;
        Ok(job)
    }

    fn limit(&self, flags: u32) -> io::Result<()> {
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
        limits.BasicLimitInformation.LimitFlags = flags;
        let len = size_of::<JOBOBJECT_EXTENDED_LIMIT_INFORMATION>() as u32;
        // SAFETY: the handle is open, and the call reads `len` bytes of the limits.
        let is_set = unsafe {
            SetInformationJobObject(self.0.as_raw_handle(), JobObjectExtendedLimitInformation, (&raw const limits).cast(), len)
        };
        if is_set == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Adds a process, and those that it will start.
    fn add(&self, process: HANDLE) -> io::Result<()> {
        // SAFETY: both handles are open.
        if unsafe { AssignProcessToJobObject(self.0.as_raw_handle(), process) } == 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// The processes of a rank: the rank, and those that it starts.
pub(crate) struct Group {
    pid: u32,
    /// `None` if the system does not let the launcher make one.
    job: Option<Job>,
}

impl Group {
    pub(crate) fn of(child: &Child) -> Group {
        let job = Job::new().and_then(|job| job.add(child.as_raw_handle()).map(|()| job));
        if let Err(error) = &job {
            tracing::warn!(%error, pid = child.id(), "programs that a rank starts may outlive it");
        }
        Group { pid: child.id(), job: job.ok() }
    }

    pub(crate) fn send(&self, signal: Signal) {
        // SAFETY: the call takes numbers.
        let is_sent = !matches!(signal, Signal::Kill) && unsafe { GenerateConsoleCtrlEvent(CTRL_BREAK_EVENT, self.pid) } != 0;
        // Without a console there is no milder way.
        if let Some(job) = self.job.as_ref().filter(|_| !is_sent) {
            // SAFETY: the handle is open.
            unsafe { TerminateJobObject(job.0.as_raw_handle(), 1) };
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What a rank leaves behind without a failure may go on.
        _ = self.job.as_ref().map(|job| job.limit(0));
    }
}

/// Ties the ranks to the life of this launcher: the system ends them if the launcher is killed.
pub(crate) struct Tie(Option<Job>);

impl Tie {
    pub(crate) fn new() -> Tie {
        // SAFETY: the call returns a constant, which needs no closing.
        let tied = Job::new().and_then(|job| job.add(unsafe { GetCurrentProcess() }).map(|()| job));
        if let Err(error) = &tied {
            tracing::warn!(%error, "programs that the ranks start may outlive this launcher if it is killed");
        }
        Tie(tied.ok())
    }
}

impl Drop for Tie {
    fn drop(&mut self) {
        // The launcher itself belongs to the job, and is about to exit with a status of its own.
        _ = self.0.as_ref().map(|job| job.limit(0));
    }
}

/// Does nothing: the system ends the ranks with the launcher. Their ids may be those of other
/// processes by now.
pub(crate) fn send(_: u32, _: Signal) {}

/// Prepares the start of a rank, so that Ctrl-C reaches the launcher only.
pub(crate) fn prepare(command: &mut Command) {
    command.creation_flags(CREATE_NEW_PROCESS_GROUP);
}

/// Starts a process, and returns a pipe to its standard input.
pub(crate) fn spawn_reader(command: &mut Command) -> io::Result<ChildStdin> {
    command.stdin(Stdio::piped()).spawn()?.stdin.take().ok_or_else(|| ErrorKind::BrokenPipe.into())
}

/// A job of the system ends the processes here, those that have just begun, too.
pub(crate) fn announce(_: &mut Command, _: &ChildStdin) -> io::Result<()> {
    Ok(())
}

/// Ranks are not bound: no domain is known here.
pub(crate) fn use_processors(_: &mut Command, _: &[u32]) {}

/// Makes a folder. The folder for temporary files belongs to the user.
pub(crate) fn make_private_folder(path: &Path) -> io::Result<()> {
    std::fs::create_dir(path)
}

/// Prepares the start of a process that gets no event of the launcher's console.
pub(crate) fn become_independent(command: &mut Command) {
    command.creation_flags(CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW);
}

pub(crate) fn ignore_signals() -> io::Result<()> {
    Ok(())
}

/// The output of a rank.
pub(crate) struct RankOutput<P> {
    pub(crate) pipe: P,
    /// A pipe that closes when the rank ends.
    #[expect(dead_code, reason = "this system cannot wait for two pipes at once")]
    pub(crate) rank: PipeReader,
    /// Dropped with this value, at the end of the pipe.
    #[expect(dead_code, reason = "it is kept to be dropped")]
    pub(crate) unread: Option<Sender<()>>,
}

impl<P: Read> Read for RankOutput<P> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.pipe.read(into)
    }
}

/// How long to wait for the end of the pipe. A program that the rank has started may keep it open.
pub(crate) const OUTPUT_PATIENCE: Option<Duration> = Some(Duration::from_secs(2));

/// Who hears of the console's events.
static WATCHER: OnceLock<Sender<Event>> = OnceLock::new();

/// Sends the console's events to the receiver. The system calls the handler on a thread of its own.
pub(crate) fn watch_signals(events: &Sender<Event>) -> io::Result<()> {
    // To be called once in a process.
    _ = WATCHER.set(events.clone());
    // SAFETY: the handler may run at any time from now on, and uses only the static above.
    if unsafe { SetConsoleCtrlHandler(Some(handle), 1) } == 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

unsafe extern "system" fn handle(event: u32) -> i32 {
    let signal = match event {
        CTRL_C_EVENT => Signal::Interrupt,
        CTRL_BREAK_EVENT => Signal::Break,
        _ => Signal::Close,
    };
    let is_sent = WATCHER.get().is_some_and(|watcher| watcher.send(Event::Signalled(signal)).is_ok());
    // The system ends this process when the handler returns, so the launcher gets the time that
    // there is to end its ranks.
    if is_sent && matches!(signal, Signal::Close) {
        std::thread::sleep(Duration::from_secs(60));
    }
    is_sent.into()
}

/// What ended a process, for the codes that the system itself gives.
const REASONS: [(u32, &str); 7] = [
    (0xc000_0005, "an access violation"),
    (0xc000_001d, "an illegal instruction"),
    (0xc000_0094, "a division by zero"),
    (0xc000_00fd, "a stack overflow"),
    (0xc000_013a, "Ctrl-C or Ctrl-Break"),
    (0xc000_0374, "a corrupt heap"),
    (ABORTED, "a call of abort"),
];

/// With this status, a process ends itself.
const ABORTED: u32 = 0xc000_0409;

pub(crate) fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or(1)
}

/// Ends the program with a status of a rank or of a signal.
pub(crate) fn exit(code: i32) -> ExitCode {
    match u8::try_from(code) {
        Ok(code) => ExitCode::from(code),
        // All 32 bits are the status on this system.
        Err(_) => std::process::exit(code),
    }
}

/// Returns whether the system ended the process because of a fault. Whether another process ended
/// it, the system does not tell.
pub(crate) fn was_killed(status: ExitStatus) -> bool {
    status.code().is_some_and(|code| code as u32 >= 0xc000_0000 && code as u32 != ABORTED)
}

/// Returns how a process ended, for a launcher on another host.
pub(crate) fn encode_status(status: ExitStatus) -> String {
    format!("exit {}", exit_code(status))
}

/// Returns the status that [`encode_status`] has written.
pub(crate) fn decode_status(text: &str) -> Option<ExitStatus> {
    let code: i32 = text.strip_prefix("exit ")?.parse().ok()?;
    Some(ExitStatus::from_raw(code as u32))
}

/// Describes how processes ended: `exited with status 1`.
pub(crate) fn describe(status: ExitStatus, processes: usize) -> String {
    let was = if processes == 1 { "was" } else { "were" };
    let Some(code) = status.code() else { return format!("ended: {status}") };
    match REASONS.iter().find(|(reason, _)| *reason == code as u32) {
        Some((code, reason)) => format!("{was} ended by {reason} (status {code:#x})"),
        None if code as u32 >= 0xc000_0000 => format!("{was} ended by the system (status {:#x})", code as u32),
        None => format!("exited with status {code}"),
    }
}

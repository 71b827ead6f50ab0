//! Processes and signals, as far as systems differ.

#[cfg(unix)]
mod platform {
    use std::fmt;
    use std::io::{self, PipeReader, Read};
    use std::os::fd::AsFd;
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Command, ExitStatus};
    use std::sync::Arc;

    use crossbeam_channel::Sender;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::retry_on_intr;
    use rustix::process::{Pid, Signal as Number, kill_process_group};
    use signal_hook::consts::{SIGABRT, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    use signal_hook::iterator::Signals;

    use crate::run::Event;

    /// A signal that is passed on.
    #[derive(Clone, Copy)]
    pub(crate) struct Signal(i32);

    impl Signal {
        pub(crate) const TERMINATE: Signal = Signal(SIGTERM);
        pub(crate) const KILL: Signal = Signal(signal_hook::consts::SIGKILL);

        /// Whether whoever sent it wants the job to end.
        pub(crate) fn ends(self) -> bool {
            matches!(self.0, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
        }

        /// The status of a job that it ended, as shells have it.
        pub(crate) fn exit_code(self) -> u8 {
            128 + self.0 as u8
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

    /// Sends a signal to a rank and all that it has started: they are a process group.
    pub(super) fn send(pid: u32, signal: Signal) {
        if let (Some(pid), Some(number)) = (Pid::from_raw(pid as i32), Number::from_named_raw(signal.0)) {
            // All of it may just have ended. Who is stopped has to go on to end.
            let _ = kill_process_group(pid, number);
            if signal.ends() {
                let _ = kill_process_group(pid, Number::CONT);
            }
        }
    }

    /// Before a rank starts: it gets signals from the launcher only, and does not outlive it.
    pub(crate) fn prepare(command: &mut Command) {
        command.process_group(0);
        #[cfg(target_os = "linux")]
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; this is one system call.
        unsafe {
            command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Number::KILL))?));
        }
    }

    /// What a rank writes. A program that it has started may keep the pipe open after the rank has ended, so the end of the pipe
    /// is not the only sign that all that the rank wrote has been read.
    pub(crate) struct RankOutput<P> {
        pub(crate) pipe: P,
        /// Ends with the rank.
        pub(crate) rank: PipeReader,
        /// Dropped when all that the rank wrote has been read.
        pub(crate) unread: Option<Sender<()>>,
    }

    impl<P: Read + AsFd> Read for RankOutput<P> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
            if self.unread.is_some() {
                let mut either = [PollFd::new(&self.pipe, PollFlags::IN), PollFd::new(&self.rank, PollFlags::IN)];
                retry_on_intr(|| poll(&mut either, None))?;
                let has_ended = !either[1].revents().is_empty();
                // Whether anything is left is asked after the end: it may have been written just before.
                if has_ended && retry_on_intr(|| poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&NOW)))? == 0 {
                    self.unread = None;
                }
            }
            self.pipe.read(into)
        }
    }

    /// How long to wait until all that a rank wrote has been read: that is known here.
    pub(crate) const OUTPUT_PATIENCE: Option<std::time::Duration> = None;

    /// Passes signals to whoever waits for events, from a thread of its own.
    pub(crate) fn watch_signals(events: &Sender<Event>) -> io::Result<()> {
        // Whoever started the launcher may have left it ignored, and then the end of a child is never told.
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

    pub(crate) fn exit_code(status: ExitStatus) -> u8 {
        // As shells do it.
        status.code().map_or_else(|| Signal(status.signal().unwrap_or(0)).exit_code(), |code| code as u8)
    }

    /// Whether somebody or something ended it; a process that aborts does so itself.
    pub(crate) fn was_killed(status: ExitStatus) -> bool {
        status.signal().is_some_and(|signal| signal != SIGABRT)
    }

    pub(crate) fn describe(status: ExitStatus) -> String {
        match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with status {code}"),
            (None, Some(signal)) => format!("was ended by {}", Signal(signal)),
            (None, None) => format!("ended: {status}"),
        }
    }
}

#[cfg(not(unix))]
mod platform {
    use std::fmt;
    use std::io::{self, PipeReader, Read};
    use std::process::{Command, ExitStatus};
    use std::time::Duration;

    use crossbeam_channel::Sender;

    use crate::run::Event;

    /// What can be asked of a process here: to end at once.
    #[derive(Clone, Copy)]
    pub(crate) struct Signal;

    impl Signal {
        pub(crate) const TERMINATE: Signal = Signal;
        pub(crate) const KILL: Signal = Signal;

        pub(crate) fn ends(self) -> bool {
            true
        }

        pub(crate) fn exit_code(self) -> u8 {
            1
        }
    }

    impl fmt::Display for Signal {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("request")
        }
    }

    pub(super) fn send(pid: u32, _: Signal) {
        // The system's own program: a handle to end it with is held by the thread that waits.
        let _ = Command::new("taskkill").args(["/F", "/T", "/PID", &pid.to_string()]).output();
    }

    pub(crate) fn prepare(_: &mut Command) {}

    /// What a rank writes.
    pub(crate) struct RankOutput<P> {
        pub(crate) pipe: P,
        /// Ends with the rank.
        #[expect(dead_code, reason = "a pipe cannot be waited for beside another here")]
        pub(crate) rank: PipeReader,
        /// Dropped with this, at the end of the pipe.
        #[expect(dead_code, reason = "it is kept to be dropped")]
        pub(crate) unread: Option<Sender<()>>,
    }

    impl<P: Read> Read for RankOutput<P> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.pipe.read(into)
        }
    }

    /// How long to wait for the end of the pipe, which a program that the rank has started may keep open.
    pub(crate) const OUTPUT_PATIENCE: Option<Duration> = Some(Duration::from_secs(2));

    /// Nothing comes: see [`Event::Signalled`].
    pub(crate) fn watch_signals(_: &Sender<Event>) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn exit_code(status: ExitStatus) -> u8 {
        status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1))
    }

    /// That cannot be told here.
    pub(crate) fn was_killed(_: ExitStatus) -> bool {
        false
    }

    pub(crate) fn describe(status: ExitStatus) -> String {
        format!("ended with {status}")
    }
}

use std::process::Child;

pub(super) use platform::{OUTPUT_PATIENCE, RankOutput};
pub(crate) use platform::{Signal, describe, exit_code, prepare, was_killed, watch_signals};

/// A rank's process, as long as nobody has been told of its end.
pub(crate) struct Process {
    pid: u32,
}

impl Process {
    pub(crate) fn new(child: &Child) -> Process {
        Process { pid: child.id() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn signal(&self, signal: Signal) {
        platform::send(self.pid, signal);
    }
}

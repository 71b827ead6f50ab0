//! The guard: a process that ends the ranks of a launcher that was killed.
//!
//! A launcher that is killed cannot end its ranks. On Linux the system ends its children, but not
//! the programs that these have started, as `sh -c` does. So a second process reads from a pipe
//! which ranks run. The launcher holds the other end. The pipe closes when the launcher exits or is
//! killed. Then the guard kills the process groups of the ranks that have not ended. A process tells
//! the guard of itself before it becomes a rank: a launcher that is killed at that moment no longer
//! can. (On Windows the system ends all of them, and the guard removes the files.)

use std::collections::HashSet;
use std::io::{self, BufRead, Write};
use std::process::{ChildStdin, Command, Stdio};

use clap::Args as ClapArgs;

use super::failures::FailureFolder;
use super::process::{Signal, Tie, announce, become_independent, ignore_signals, send, spawn_reader};

/// Arguments of the guard.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The name of the job
    job: String,
}

/// The launcher's end of the pipe.
pub(super) struct Guard {
    pipe: Option<ChildStdin>,
    _tie: Tie,
}

impl Guard {
    /// Starts the process. Without it the job runs all the same.
    pub(super) fn start(job: &str) -> Guard {
        let start = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["guard", job]).stdout(Stdio::null()).stderr(Stdio::null());
            become_independent(&mut command);
            spawn_reader(&mut command)
        };
        let started = start();
        if let Err(error) = &started {
            tracing::warn!(%error, "programs that the ranks start may outlive this launcher if it is killed");
        }
        // The guard itself is not tied.
        Guard { pipe: started.ok(), _tie: Tie::new() }
    }

    /// Starts a rank. The guard knows of it before its program begins.
    pub(super) fn spawn(&mut self, command: &mut Command) -> io::Result<std::process::Child> {
        if let Some(pipe) = &self.pipe {
            announce(command, pipe)?;
        }
        let started = command.spawn();
        match &started {
            Ok(child) => self.write(&format!("+{}\n", child.id())),
            Err(_) => self.write("!\n"),
        }
        started
    }

    /// Reports that a rank has ended.
    pub(super) fn remove(&mut self, pid: u32) {
        self.write(&format!("-{pid}\n"));
    }

    fn write(&mut self, line: &str) {
        // If the guard has exited, the job continues without it.
        let _ = self.pipe.as_mut().map(|pipe| pipe.write_all(line.as_bytes()));
    }
}

/// Runs as the guard.
pub(crate) fn guard(args: &Args) {
    // A signal that ends the launcher ends the guard when the pipe closes.
    let _ = ignore_signals();
    let mut ranks = HashSet::new();
    // A process that has announced itself, before the launcher says whether its program began.
    let mut starting = None;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_at_checked(1).map(|(sign, pid)| (sign, pid.parse::<u32>())) {
            Some(("?", Ok(pid))) => starting = Some(pid),
            Some(("!", _)) => starting = None,
            Some(("+", Ok(pid))) => {
                starting = None;
                ranks.insert(pid);
            }
            Some(("-", Ok(pid))) => _ = ranks.remove(&pid),
            _ => {}
        }
    }
    ranks.into_iter().chain(starting).for_each(|pid| send(pid, Signal::KILL));
    drop(FailureFolder::of(&args.job));
}

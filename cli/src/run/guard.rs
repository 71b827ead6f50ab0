//! The guard: a process that ends the ranks of a launcher that was killed.
//!
//! A launcher that is killed cannot end its ranks. On Linux the system ends its children, but not
//! the programs that these have started, as `sh -c` does. So a second process reads from a pipe
//! which ranks run. The launcher holds the other end. The pipe closes when the launcher exits or is
//! killed. Then the guard kills the process groups of the ranks that have not ended. (On Windows the
//! system ends all of them, and the guard removes the files.)

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::process::{Child, Command, Stdio};

use clap::Args as ClapArgs;

use super::failures::FailureFolder;
use super::process::{Signal, Tie, become_independent, ignore_signals, send};

/// Arguments of the guard.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The name of the job
    job: String,
}

/// The launcher's end of the pipe.
pub(super) struct Guard {
    process: Option<Child>,
    _tie: Tie,
}

impl Guard {
    /// Starts the process. Without it the job runs all the same.
    pub(super) fn start(job: &str) -> Guard {
        let start = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["guard", job]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            become_independent(&mut command);
            command.spawn()
        };
        let started = start();
        if let Err(error) = &started {
            tracing::warn!(%error, "programs that the ranks start may outlive this launcher if it is killed");
        }
        // The guard itself is not tied.
        Guard { process: started.ok(), _tie: Tie::new() }
    }

    /// Reports that a rank runs.
    pub(super) fn add(&mut self, pid: u32) {
        self.write(&format!("+{pid}\n"));
    }

    /// Reports that a rank has ended.
    pub(super) fn remove(&mut self, pid: u32) {
        self.write(&format!("-{pid}\n"));
    }

    fn write(&mut self, line: &str) {
        // If the guard has exited, the job continues without it.
        let pipe = self.process.as_mut().and_then(|child| child.stdin.as_mut());
        let _ = pipe.map(|pipe| pipe.write_all(line.as_bytes()));
    }
}

/// Runs as the guard.
pub(crate) fn guard(args: &Args) {
    // A signal that ends the launcher ends the guard when the pipe closes.
    let _ = ignore_signals();
    let mut ranks = HashSet::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_at_checked(1).map(|(sign, pid)| (sign, pid.parse::<u32>())) {
            Some(("+", Ok(pid))) => _ = ranks.insert(pid),
            Some(("-", Ok(pid))) => _ = ranks.remove(&pid),
            _ => {}
        }
    }
    ranks.into_iter().for_each(|pid| send(pid, Signal::KILL));
    drop(FailureFolder::of(&args.job));
}

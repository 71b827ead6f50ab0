//! The ranks that this process starts.

use std::io;
use std::process::{ChildStdin, Command};

use crossbeam_channel::Sender;

use super::cause::Member;
use super::failures::{FailureFolder, Names, Report, names};
use super::guard::Guard;
use super::output::{Sink, forward};
use super::process::{Event, Process, RankOutput, Signal, prepare};
use super::supervise::Ranks;

/// The ranks that this process has started.
pub(super) struct LocalRanks {
    first: usize,
    /// `None` for those that have ended.
    processes: Vec<Option<Process>>,
    failures: Option<FailureFolder>,
    guard: Guard,
}

impl LocalRanks {
    /// Prepares the start of ranks. `name` belongs to the job and this host alone.
    pub(super) fn new(name: &str, first: usize) -> LocalRanks {
        // The guard comes first: this process may be killed while it starts ranks.
        let guard = Guard::start(name);
        LocalRanks { first, processes: Vec::new(), failures: FailureFolder::new(name), guard }
    }

    /// Starts the next rank, and threads that forward its output and wait for its end. Returns the
    /// standard input of the rank if it is a pipe.
    pub(super) fn start(
        &mut self,
        command: &mut Command,
        sink: impl Fn(bool) -> Sink,
        events: &Sender<Event>,
        unread: &Sender<()>,
    ) -> io::Result<Option<ChildStdin>> {
        let rank = self.first + self.processes.len();
        match &self.failures {
            Some(folder) => command.env("KOLO_FAILURE_FILE", folder.file(rank)),
            None => command.env_remove("KOLO_FAILURE_FILE"),
        };
        // `kolo top` looks there, unless the user has chosen another folder.
        if let Some(folder) = &self.failures
            && !has_top_folder(command)
        {
            command.env("KOLO_TOP_DIR", folder.path());
        }
        prepare(command);
        let (rank_of_errors, runs) = io::pipe()?;
        let rank_of_output = rank_of_errors.try_clone()?;
        let mut child = self.guard.spawn(command)?;
        self.processes.push(Some(Process::new(&child)));
        let unread = Some(unread.clone());
        if let Some(pipe) = child.stdout.take() {
            forward(RankOutput { pipe, rank: rank_of_output, unread: unread.clone() }, rank, sink(false));
        }
        if let Some(pipe) = child.stderr.take() {
            forward(RankOutput { pipe, rank: rank_of_errors, unread }, rank, sink(true));
        }
        let input = child.stdin.take();
        let events = events.clone();
        std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
            let status = child.wait();
            drop(runs);
            if let Ok(status) = status {
                // The receiver is gone if the launcher is ending.
                let _ = events.send(Event::Ended(rank, status));
            }
        })?;
        Ok(input)
    }

    /// Returns the process of the rank that was started last.
    pub(super) fn last_pid(&self) -> Option<u32> {
        self.processes.last()?.as_ref().map(Process::pid)
    }

    /// Returns what a rank has reported of its failures.
    pub(super) fn report(&self, rank: usize) -> Option<Report> {
        self.failures.as_ref()?.report(rank)
    }
}

impl Ranks for LocalRanks {
    fn running(&self) -> Vec<usize> {
        let is_running = |at: &usize| self.processes[*at].is_some();
        (0..self.processes.len()).filter(is_running).map(|at| self.first + at).collect()
    }

    fn signal(&self, signal: Signal) {
        self.processes.iter().flatten().for_each(|process| process.signal(signal));
    }

    fn ended(&mut self, rank: usize, has_failed: bool) -> Option<Member> {
        let process = self.processes.get_mut(rank.checked_sub(self.first)?)?.take()?;
        if has_failed {
            // Processes that the rank has started do not outlive the job.
            process.signal(Signal::KILL);
        }
        self.guard.remove(process.pid());
        Some(Member { rank, pid: process.pid(), host: None })
    }

    fn names(&self) -> Names {
        let ranks = self.first..self.first + self.processes.len();
        names(&ranks.filter_map(|rank| Some((rank, self.report(rank)?))).collect(), self.processes.len())
    }
}

/// Whether the user has chosen where a rank lets `kolo top` find it: for this command, or in the
/// environment that it inherits.
fn has_top_folder(command: &Command) -> bool {
    let given = command.get_envs().find(|(name, _)| *name == "KOLO_TOP_DIR").map(|(_, folder)| folder.map(ToOwned::to_owned));
    given.unwrap_or_else(|| std::env::var_os("KOLO_TOP_DIR")).is_some_and(|folder| !folder.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_the_user_chose_is_kept() {
        let mut command = Command::new("program");
        assert!(has_top_folder(command.env("KOLO_TOP_DIR", "/run/top")));
        assert!(!has_top_folder(command.env("KOLO_TOP_DIR", "")));
        assert!(!has_top_folder(command.env_remove("KOLO_TOP_DIR")));
    }
}

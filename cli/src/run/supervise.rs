//! Waits for the ranks of a job: forwards signals, and ends all ranks when one has failed.

use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use super::cause::{Cause, Ending, FailedRank, Member, cause};
use super::failures::Names;
use super::process::{self, Event, OUTPUT_PATIENCE, Signal};
use super::{LAUNCHER_FAILED, NOT_STARTED};
use crate::complain;

/// The ranks that were started, on this machine or on several hosts.
pub(super) trait Ranks {
    fn are_running(&self) -> bool;
    /// Sends a signal to all ranks.
    fn signal(&self, signal: Signal);
    /// Notes that a rank has ended. Returns the rank, unless its end was noted before. After a
    /// failure of the job, the processes that the rank has started end, too.
    fn ended(&mut self, rank: usize, has_failed: bool) -> Option<Member>;
    /// Notes that a rank has failed.
    fn failed(&self) {}
    /// Notes that a host was lost. Returns its ranks that had not ended.
    fn lost(&mut self, _host: usize) -> Vec<Member> {
        Vec::new()
    }
    /// Returns which rank the failure of each rank names.
    fn names(&self) -> Names;
    /// How long ranks may take to end after they were killed; `None` where the system reports it.
    const PATIENCE: Option<Duration> = None;
    /// Waits no longer for the ranks that run.
    fn abandon(&mut self) {}
}

/// Why a job ended before its time.
pub(super) enum Failure {
    /// The rank that caused the failure, and whether every rank is known to have ended.
    Rank(Cause, bool),
    /// A signal told the launcher to end the job.
    Stopped(Signal),
    /// A rank could not be started.
    NotStarted(String),
}

impl Failure {
    fn describe(&self, ranks: usize) -> String {
        match self {
            Failure::Rank(Cause { rank: FailedRank { member, ending, after }, names }, all_ended) => {
                let Member { rank, pid, host } = member;
                let after = after.as_secs_f64();
                let others = match (ranks > 1, all_ended) {
                    (false, _) => "",
                    (true, true) => "; the other ranks were stopped",
                    (true, false) => "; the other ranks were stopped, where their host answers",
                };
                let on = host.as_ref().map_or_else(String::new, |host| format!(" on {host}"));
                let names = names.map_or_else(String::new, |other| format!("; its error names rank {other}"));
                match ending {
                    Ending::Status(status) => {
                        format!("rank {rank}{on} (pid {pid}) {} after {after:.1} s{names}{others}", process::describe(*status))
                    }
                    Ending::Lost(why) => format!("rank {rank}{on} was lost after {after:.1} s: {why}{others}"),
                }
            }
            Failure::Stopped(signal) => format!("stopped by {signal}"),
            Failure::NotStarted(why) => why.clone(),
        }
    }

    fn exit_code(&self) -> i32 {
        match self {
            Failure::Rank(cause, _) => match cause.rank.ending {
                Ending::Status(status) => process::exit_code(status),
                Ending::Lost(_) => LAUNCHER_FAILED.into(),
            },
            Failure::Stopped(signal) => signal.exit_code(),
            Failure::NotStarted(_) => NOT_STARTED.into(),
        }
    }

    /// Reports the failure, and returns the exit status of the launcher.
    pub(super) fn report(&self, ranks: usize) -> ExitCode {
        complain(&format!("kolo run: {}", self.describe(ranks)));
        process::exit(self.exit_code())
    }
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

/// How long ranks may take to terminate before they are killed.
pub(super) const TERMINATION: Duration = Duration::from_secs(3);

/// Waits for the ranks of a job.
pub(super) struct Supervisor<R> {
    pub(super) ranks: R,
    began: Instant,
    grace: Duration,
    /// The ranks that failed by themselves, in the order in which they ended.
    failed: Vec<FailedRank>,
    /// The signal that ended the job before a rank failed.
    stopped: Option<Signal>,
    /// Why a rank was not started.
    not_started: Option<String>,
    urgency: Urgency,
    /// When the urgency grows.
    deadline: Option<Instant>,
    /// Whether every rank is known to have ended: none was lost or abandoned.
    all_ended: bool,
}

impl<R: Ranks> Supervisor<R> {
    pub(super) fn new(ranks: R, grace: Duration) -> Supervisor<R> {
        Supervisor {
            ranks,
            began: Instant::now(),
            grace,
            failed: Vec::new(),
            stopped: None,
            not_started: None,
            urgency: Urgency::Running,
            deadline: None,
            all_ended: true,
        }
    }

    /// Waits until all ranks have ended. Returns why the job failed, if it did.
    pub(super) fn wait(&mut self, events: &Receiver<Event>) -> Option<Failure> {
        while self.ranks.are_running() {
            let event = match self.deadline {
                Some(deadline) => events.recv_deadline(deadline).ok(),
                None => events.recv().ok(),
            };
            match event {
                Some(Event::Ended(rank, status)) => self.ended(rank, status),
                Some(Event::NotStarted(rank, why)) => self.not_started(rank, why),
                Some(Event::Lost(host, why)) => self.lost(host, &why),
                Some(Event::Signalled(signal)) => self.signalled(signal),
                None => self.urge(),
            }
        }
        let stopped = self.stopped.map(Failure::Stopped);
        let not_started = self.not_started.take().map(Failure::NotStarted);
        stopped.or(not_started).or_else(|| {
            let cause = cause(&self.failed, &self.ranks.names())?;
            Some(Failure::Rank(cause, self.all_ended))
        })
    }

    fn become_urgent(&mut self, urgency: Urgency, patience: Duration) {
        (self.urgency, self.deadline) = (urgency, Some(Instant::now() + patience));
    }

    /// Notes the end of a rank. After the first failure, the other ranks get time to report.
    fn ended(&mut self, rank: usize, status: ExitStatus) {
        let has_failed = !status.success() || !self.failed.is_empty() || self.stopped.is_some();
        let Some(member) = self.ranks.ended(rank, has_failed) else { return };
        if !status.success() {
            self.failed(member, Ending::Status(status));
        }
    }

    fn failed(&mut self, member: Member, ending: Ending) {
        // A rank that was told to end has not failed by itself.
        if self.urgency <= Urgency::Reporting {
            self.failed.push(FailedRank { member, ending, after: self.began.elapsed() });
            if self.urgency == Urgency::Running {
                self.ranks.failed();
                self.become_urgent(Urgency::Reporting, self.grace);
            }
        }
    }

    fn not_started(&mut self, rank: usize, why: String) {
        if self.ranks.ended(rank, true).is_some() {
            self.not_started.get_or_insert(why);
            self.ranks.failed();
            self.become_urgent(Urgency::Terminating, Duration::ZERO);
        }
    }

    fn lost(&mut self, host: usize, why: &str) {
        for member in self.ranks.lost(host) {
            self.all_ended = false;
            self.failed(member, Ending::Lost(why.into()));
        }
    }

    /// Forwards a signal to the ranks. A signal that ends the job starts its deadline.
    fn signalled(&mut self, signal: Signal) {
        self.ranks.signal(signal);
        if signal.ends() {
            if self.failed.is_empty() {
                self.stopped.get_or_insert(signal);
            }
            // A second signal kills the ranks at once.
            let again = self.urgency >= Urgency::Terminating;
            self.become_urgent(Urgency::Terminating, if again { Duration::ZERO } else { TERMINATION });
        }
    }

    /// Asks the ranks more urgently to end, at a deadline.
    fn urge(&mut self) {
        match self.urgency {
            Urgency::Running | Urgency::Reporting => {
                self.ranks.signal(Signal::TERMINATE);
                self.become_urgent(Urgency::Terminating, TERMINATION);
            }
            Urgency::Terminating => {
                self.ranks.signal(Signal::KILL);
                (self.urgency, self.deadline) = (Urgency::Killed, R::PATIENCE.map(|patience| Instant::now() + patience));
            }
            Urgency::Killed => {
                self.all_ended = false;
                self.ranks.abandon();
            }
        }
    }

    /// Ends the ranks that have started when another cannot be started.
    pub(super) fn stop_all(&mut self, events: &Receiver<Event>) {
        self.ranks.signal(Signal::KILL);
        self.wait(events);
    }
}

/// Waits until all output of the ranks has been forwarded. Returns the signal that ended the wait,
/// if one did.
pub(super) fn drain(all_read: &Receiver<()>, event: &Receiver<Event>) -> Option<Signal> {
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

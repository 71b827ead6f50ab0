//! Waits for the ranks of a job: forwards signals, and ends all ranks when one has failed.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, select};

use super::cause::{Cause, Ending, FailedRank, Member, cause};
use super::failures::Names;
use super::process::{self, Event, OUTPUT_PATIENCE, Signal};
use super::{LAUNCHER_FAILED, NOT_STARTED};
use crate::units::{count, show_ranks};

/// The ranks that were started, on this machine or on several hosts.
pub(super) trait Ranks {
    fn are_running(&self) -> bool {
        !self.running().is_empty()
    }
    /// Returns the ranks whose end has not been noted.
    fn running(&self) -> Vec<usize>;
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

/// Why a job ended before its time, or which ranks it lost.
pub(super) enum Failure {
    /// The rank that caused the failure, those that were lost with it, and how the others ended.
    Rank(Cause, Vec<FailedRank>, Others),
    /// The ranks that failed while the others went on, in the order in which they ended.
    Survived(Vec<FailedRank>),
    /// A signal told the launcher to end the job.
    Stopped(Signal),
    /// A rank could not be started.
    NotStarted(String),
}

/// How the ranks ended that have not caused the failure of a job.
#[derive(Default)]
pub(super) struct Others {
    /// Those that the launcher stopped.
    stopped: Vec<usize>,
    /// Whether a rank is not known to have ended: it was lost or abandoned.
    may_run: bool,
}

impl Others {
    /// Describes the end of all ranks but those that caused the failure.
    fn describe(&self, others: usize) -> String {
        let stopped = match self.stopped.len() {
            _ if others == 0 => return String::new(),
            0 if others == 1 => return "; the other rank ended by itself".to_owned(),
            0 => return "; the other ranks ended by themselves".to_owned(),
            1 if others == 1 => "the other rank was".to_owned(),
            all if all == others => "the other ranks were".to_owned(),
            1 => format!("{} was", show_ranks(&self.stopped)),
            _ => format!("{} were", show_ranks(&self.stopped)),
        };
        format!("; {stopped} stopped{}", if self.may_run { ", where their host answers" } else { "" })
    }
}

impl Failure {
    pub(super) fn describe(&self, ranks: usize) -> String {
        match self {
            Failure::Rank(Cause { names, .. }, failed, others) => {
                let names = names.map_or_else(String::new, |other| format!("; its error names rank {other}"));
                format!("{}{names}{}", describe_all(failed), others.describe(ranks - failed.len()))
            }
            Failure::Survived(failed) => {
                let left = match ranks - failed.len() {
                    0 => "no rank".to_owned(),
                    left => count(left, "rank"),
                };
                format!("{}; {left} ended with status 0", describe_all(failed))
            }
            Failure::Stopped(signal) => format!("stopped by {signal}"),
            Failure::NotStarted(why) => why.clone(),
        }
    }

    /// Returns the exit status of the launcher.
    pub(super) fn exit_code(&self, ranks: usize) -> i32 {
        let of = |rank: &FailedRank| match rank.ending {
            Ending::Status(status) => process::exit_code(status),
            Ending::Lost(_) => LAUNCHER_FAILED.into(),
        };
        match self {
            Failure::Rank(cause, ..) => of(&cause.rank),
            // The last rank survived all others.
            Failure::Survived(failed) if failed.len() == ranks => failed.last().map_or(0, of),
            Failure::Survived(_) => 0,
            Failure::Stopped(signal) => signal.exit_code(),
            Failure::NotStarted(_) => NOT_STARTED.into(),
        }
    }
}

/// Describes ranks that have failed in one way: `rank 1 on b (pid 4711) was ended by SIGKILL after 2.3 s`.
fn describe(failed: &[&FailedRank]) -> String {
    let [first, ..] = failed else { return String::new() };
    let last = failed.last().unwrap_or(first);
    let Member { pid, host, .. } = &first.member;
    let ranks: Vec<usize> = failed.iter().map(|failed| failed.member.rank).collect();
    let on = host.as_ref().map_or_else(String::new, |host| format!(" on {host}"));
    let (from, to) = (format!("{:.1}", first.after.as_secs_f64()), format!("{:.1}", last.after.as_secs_f64()));
    let after = if from == to { format!("after {from} s") } else { format!("after {from} to {to} s") };
    let who = show_ranks(&ranks);
    match &first.ending {
        Ending::Status(status) => {
            let pid = if failed.len() == 1 { format!(" (pid {pid})") } else { String::new() };
            format!("{who}{on}{pid} {} {after}", process::describe(*status, failed.len()))
        }
        Ending::Lost(why) => format!("{who}{on} {} lost {after}: {why}", if failed.len() == 1 { "was" } else { "were" }),
    }
}

/// Whether two ranks failed in one way, on one host.
fn is_alike(a: &FailedRank, b: &FailedRank) -> bool {
    a.ending == b.ending && a.member.host == b.member.host
}

/// Describes all ranks that have failed, those together that did so in one way on one host.
fn describe_all(failed: &[FailedRank]) -> String {
    let mut groups: Vec<Vec<&FailedRank>> = Vec::new();
    for rank in failed {
        match groups.iter_mut().find(|group| is_alike(group[0], rank)) {
            Some(group) => group.push(rank),
            None => groups.push(vec![rank]),
        }
    }
    groups.iter().map(|group| describe(group)).collect::<Vec<_>>().join("; ")
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

/// Waits for the ranks of a job.
pub(super) struct Supervisor<R> {
    pub(super) ranks: R,
    began: Instant,
    /// How long the other ranks have to end after one has failed; `None` if they go on.
    grace: Option<Duration>,
    /// How long ranks may take to terminate before they are killed.
    kill_after: Duration,
    /// The ranks that failed by themselves, in the order in which they ended.
    failed: Vec<FailedRank>,
    /// The signal that ended the job before a rank failed.
    stopped: Option<Signal>,
    /// Why a rank was not started.
    not_started: Option<String>,
    urgency: Urgency,
    /// When the urgency grows.
    deadline: Option<Instant>,
    others: Others,
}

impl<R: Ranks> Supervisor<R> {
    pub(super) fn new(ranks: R, grace: Option<Duration>, kill_after: Duration) -> Supervisor<R> {
        Supervisor {
            ranks,
            began: Instant::now(),
            grace,
            kill_after,
            failed: Vec::new(),
            stopped: None,
            not_started: None,
            urgency: Urgency::Running,
            deadline: None,
            others: Others::default(),
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
        stopped.or(not_started).or_else(|| self.outcome())
    }

    /// Returns how the job has failed, or which ranks it lost.
    fn outcome(&mut self) -> Option<Failure> {
        if self.failed.is_empty() {
            return None;
        }
        if self.grace.is_none() {
            return Some(Failure::Survived(std::mem::take(&mut self.failed)));
        }
        let cause = cause(&self.failed, &self.ranks.names())?;
        let is_lost_too = |other: &FailedRank| matches!(other.ending, Ending::Lost(_)) && is_alike(other, &cause.rank);
        let mut failed = vec![cause.rank.clone()];
        self.failed.retain(|other| other.member.rank != cause.rank.member.rank && is_lost_too(other));
        failed.append(&mut self.failed);
        Some(Failure::Rank(cause, failed, std::mem::take(&mut self.others)))
    }

    fn become_urgent(&mut self, urgency: Urgency, patience: Duration) {
        (self.urgency, self.deadline) = (urgency, Some(Instant::now() + patience));
    }

    /// Notes the end of a rank. After the first failure, the other ranks get time to report.
    fn ended(&mut self, rank: usize, status: ExitStatus) {
        let job_has_failed = self.grace.is_some() && !self.failed.is_empty() || self.stopped.is_some();
        let has_failed = !status.success() || job_has_failed;
        let Some(member) = self.ranks.ended(rank, has_failed) else { return };
        if !status.success() {
            self.failed(member, Ending::Status(status));
        }
    }

    fn failed(&mut self, member: Member, ending: Ending) {
        // A rank that was told to end has not failed by itself.
        if self.urgency <= Urgency::Reporting {
            self.failed.push(FailedRank { member, ending, after: self.began.elapsed() });
            if self.urgency == Urgency::Running
                && let Some(grace) = self.grace
            {
                self.ranks.failed();
                self.become_urgent(Urgency::Reporting, grace);
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
            self.others.may_run = true;
            self.failed(member, Ending::Lost(why.into()));
        }
    }

    /// Forwards a signal to the ranks. A signal that ends the job starts its deadline.
    fn signalled(&mut self, signal: Signal) {
        if signal.ends() && self.urgency < Urgency::Terminating {
            self.others.stopped = self.ranks.running();
        }
        self.ranks.signal(signal);
        if signal.ends() {
            if self.failed.is_empty() || self.grace.is_none() {
                self.stopped.get_or_insert(signal);
            }
            // A second signal kills the ranks at once.
            let again = self.urgency >= Urgency::Terminating;
            self.become_urgent(Urgency::Terminating, if again { Duration::ZERO } else { self.kill_after });
        }
    }

    /// Asks the ranks more urgently to end, at a deadline.
    fn urge(&mut self) {
        match self.urgency {
            Urgency::Running | Urgency::Reporting => {
                self.others.stopped = self.ranks.running();
                self.ranks.signal(Signal::TERMINATE);
                self.become_urgent(Urgency::Terminating, self.kill_after);
            }
            Urgency::Terminating => {
                self.ranks.signal(Signal::KILL);
                (self.urgency, self.deadline) = (Urgency::Killed, R::PATIENCE.map(|patience| Instant::now() + patience));
            }
            Urgency::Killed => {
                self.others.may_run = true;
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

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use crossbeam_channel::{Sender, unbounded};

    use super::*;

    /// Ranks that end when they are told to.
    struct Fake {
        running: Vec<usize>,
        events: Sender<Event>,
    }

    impl Ranks for Fake {
        fn running(&self) -> Vec<usize> {
            self.running.clone()
        }

        fn signal(&self, _: Signal) {
            let ended = |&rank: &usize| _ = self.events.send(Event::Ended(rank, ExitStatus::from_raw(15)));
            self.running.iter().for_each(ended);
        }

        fn ended(&mut self, rank: usize, _: bool) -> Option<Member> {
            let at = self.running.iter().position(|other| *other == rank)?;
            self.running.remove(at);
            Some(member(rank))
        }

        fn lost(&mut self, host: usize) -> Vec<Member> {
            let lost = self.running.iter().position(|rank| *rank == host).map(|at| self.running.split_off(at));
            lost.into_iter().flatten().map(member).collect()
        }

        fn names(&self) -> Names {
            Names::new()
        }
    }

    fn member(rank: usize) -> Member {
        Member { rank, pid: 7, host: None }
    }

    /// Runs ranks of which these end by themselves, or are lost with their host; times are left out of the report.
    fn report(ranks: usize, grace: Option<Duration>, ends: &[Result<(usize, i32), usize>]) -> (String, i32) {
        let (sender, events) = unbounded();
        for end in ends {
            let event = match *end {
                Ok((rank, status)) => Event::Ended(rank, ExitStatus::from_raw(status << 8)),
                Err(host) => Event::Lost(host, "it went".to_owned()),
            };
            sender.send(event).unwrap();
        }
        let mut supervisor = Supervisor::new(Fake { running: (0..ranks).collect(), events: sender }, grace, Duration::MAX / 4);
        let failure = supervisor.wait(&events).unwrap();
        let words: Vec<_> = failure.describe(ranks).split(' ').map(str::to_owned).collect();
        let is_time = |at: usize| at > 0 && matches!(&*words[at - 1], "after" | "to") && words[at].contains('.');
        let kept = (0..words.len()).filter(|at| !is_time(*at) && words[*at] != "to").map(|at| &*words[at]);
        (kept.collect::<Vec<_>>().join(" "), failure.exit_code(ranks))
    }

    #[test]
    fn only_ranks_that_were_stopped_are_said_to_be() {
        let now = Some(Duration::ZERO);
        let stopped = |ranks, ends: &[_]| report(ranks, now, ends).0;
        assert_eq!(stopped(3, &[Ok((1, 7))]), "rank 1 (pid 7) exited with status 7 after s; the other ranks were stopped");
        assert_eq!(stopped(3, &[Ok((0, 0)), Ok((1, 7))]), "rank 1 (pid 7) exited with status 7 after s; rank 2 was stopped");
        assert_eq!(stopped(2, &[Ok((1, 7))]), "rank 1 (pid 7) exited with status 7 after s; the other rank was stopped");
        let both = "rank 1 (pid 7) exited with status 7 after s; ranks 2, 3 were stopped";
        assert_eq!(stopped(4, &[Ok((0, 0)), Ok((1, 7))]), both);
        assert_eq!(stopped(1, &[Ok((0, 7))]), "rank 0 (pid 7) exited with status 7 after s");
        let late = report(3, Some(Duration::MAX / 4), &[Ok((0, 0)), Ok((1, 7)), Ok((2, 1))]).0;
        assert_eq!(late, "rank 1 (pid 7) exited with status 7 after s; the other ranks ended by themselves");
        let lost = "ranks 2, 3 were lost after s: it went; the other ranks were stopped, where their host answers";
        assert_eq!(stopped(4, &[Err(2)]), lost);
    }

    #[test]
    fn survivors_decide_the_status_if_they_go_on() {
        let on = |ends: &[_]| report(4, None, ends);
        let died = "rank 1 (pid 7) exited with status 7 after s; ";
        let (said, code) = on(&[Ok((1, 7)), Ok((0, 0)), Ok((2, 0)), Ok((3, 0))]);
        assert_eq!((said, code), (format!("{died}3 ranks ended with status 0"), 0));
        let (said, code) = on(&[Ok((0, 0)), Ok((1, 7)), Err(2)]);
        assert_eq!((said, code), (format!("{died}ranks 2, 3 were lost after s: it went; 1 rank ended with status 0"), 0));
        let (said, code) = on(&[Ok((1, 7)), Ok((0, 5)), Ok((2, 5)), Ok((3, 5))]);
        assert_eq!((said, code), (format!("{died}ranks 0, 2, 3 exited with status 5 after s; no rank ended with status 0"), 5));
    }
}

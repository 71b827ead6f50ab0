//! What `kolo top` shows: the object of `--json`, which `docs/top.md` describes.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kolo::observer::{Communicator, Silence, Snapshot};
use serde::Serialize;

use super::state::{Known, State};
use super::waits::{Culprit, culprits, edges};

/// The version of the object. It changes when a key is removed or means something else.
const FORMAT: u32 = 1;

/// A job at one moment.
#[derive(Debug, Serialize)]
pub(super) struct View {
    kolo_top: u32,
    /// Seconds since 1970.
    time_unix_s: f64,
    pub(super) job: String,
    pub(super) run: String,
    pub(super) world_size: usize,
    pub(super) ranks: Vec<Rank>,
    /// The ranks that keep others waiting.
    pub(super) waited_for: Vec<WaitedFor>,
    pub(super) failures: Vec<Failure>,
}

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Doing {
    /// An operation runs.
    Running,
    /// An operation runs and waits for another rank.
    Waiting,
    /// No operation runs.
    Idle,
    /// The operating system reports that the process is stopped.
    Stopped,
    /// The process does not answer.
    NoAnswer,
    /// The process has ended, or has left the job.
    Gone,
    /// The process refuses to answer.
    Refused,
    /// The rank has not been asked yet.
    Unknown,
}

/// One rank.
#[derive(Debug, Serialize)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    address: String,
    version: Option<String>,
    pub(super) state: Doing,
    /// Why it does not answer, if it does not.
    pub(super) silence: Option<String>,
    /// For how long it has not answered.
    pub(super) silent_s: Option<f64>,
    /// The ranks for which it waits.
    pub(super) waits_for: Vec<usize>,
    pub(super) communicators: Vec<Comm>,
    communicators_omitted: u64,
    pub(super) links: Vec<Link>,
}

/// One communicator of a rank.
#[derive(Debug, Serialize)]
pub(super) struct Comm {
    pub(super) comm: String,
    rank: usize,
    pub(super) size: usize,
    /// The sequence numbers of the last collectives that have begun and completed.
    pub(super) begun: u64,
    completed: u64,
    /// For how long no operation has run.
    pub(super) idle_s: Option<f64>,
    pub(super) running: Vec<Operation>,
    pub(super) operations: u64,
    pub(super) operations_per_s: Option<f64>,
    pub(super) bytes: u64,
    pub(super) bytes_per_s: Option<f64>,
    totals: Vec<Total>,
    failure: Option<String>,
}

/// An operation that runs.
#[derive(Debug, Serialize)]
pub(super) struct Operation {
    pub(super) op: String,
    pub(super) dtype: String,
    count: u64,
    pub(super) bytes: u64,
    pub(super) seq: u64,
    /// The root or the peer, as a rank of the communicator.
    root: Option<u32>,
    pub(super) algorithm: Option<String>,
    pub(super) age_s: f64,
}

/// What one operation of a communicator came to.
#[derive(Debug, Serialize)]
struct Total {
    op: String,
    begun: u64,
    bytes: u64,
    seconds: f64,
    failed: u64,
}

/// One link of a rank.
#[derive(Debug, Serialize)]
pub(super) struct Link {
    comm: String,
    /// The peer, as a rank of the job.
    pub(super) peer: usize,
    pub(super) kind: String,
    sent: u64,
    received: u64,
    pub(super) sent_per_s: Option<f64>,
    pub(super) received_per_s: Option<f64>,
    lost_rails: u64,
    pub(super) retransmits: Option<u64>,
    pub(super) round_trip_s: Option<f64>,
    pub(super) slow: Option<Slow>,
}

/// What a link carries that carried much more before in the same operation.
#[derive(Debug, Serialize)]
pub(super) struct Slow {
    pub(super) bytes_per_s: u64,
    pub(super) before_bytes_per_s: u64,
}

/// A rank that keeps others waiting.
#[derive(Debug, Serialize)]
pub(super) struct WaitedFor {
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u32,
    /// The ranks that wait for it, perhaps through others.
    pub(super) by: Vec<usize>,
    pub(super) comm: String,
    pub(super) op: String,
    pub(super) seq: u64,
    /// The longest of these waits.
    pub(super) for_s: f64,
    pub(super) why: String,
}

/// A failure that ended a communicator.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    /// The rank that reports it.
    pub(super) rank: usize,
    comm: String,
    pub(super) message: String,
    /// The rank of the job that it names.
    names: Option<usize>,
}

impl View {
    /// Makes the view of what is known now.
    pub(super) fn new(state: &State, now: Instant) -> View {
        let edges = edges(state);
        let mut waits: HashMap<usize, Vec<usize>> = HashMap::new();
        for edge in &edges {
            let of = waits.entry(edge.from).or_default();
            if !of.contains(&edge.to) {
                of.push(edge.to);
            }
        }
        let ranks = state.peers.iter().zip(&state.ranks).map(|(peer, known)| {
            let snapshot = known.last.as_ref().map(|(_, snapshot)| &**snapshot);
            let waits_for = waits.remove(&peer.rank).unwrap_or_default();
            Rank {
                rank: peer.rank,
                host: peer.host.clone(),
                pid: peer.pid,
                address: peer.address.to_string(),
                version: snapshot.map(|snapshot| snapshot.version.clone()),
                state: doing(known, !waits_for.is_empty()),
                silence: known.silence.as_ref().map(|(_, silence)| silence.to_string()),
                silent_s: known.silence.as_ref().map(|(since, _)| {
                    let last = known.last.as_ref().map_or(*since, |(at, _)| *at);
                    now.saturating_duration_since(last).as_secs_f64()
                }),
                waits_for,
                communicators: snapshot.map(|_| communicators(known)).unwrap_or_default(),
                communicators_omitted: snapshot.map_or(0, |snapshot| snapshot.omitted),
                links: links(known),
            }
        });
        let waited_for = culprits(&edges).iter().map(|culprit| waited_for(state, culprit)).collect();
        View {
            kolo_top: FORMAT,
            time_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            job: state.job.clone(),
            run: state.run.clone(),
            world_size: state.peers.len(),
            ranks: ranks.collect(),
            waited_for,
            failures: failures(state),
        }
    }

    /// Returns whether no rank runs any more.
    pub(super) fn has_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.state == Doing::Gone)
    }

    /// Returns a rank that refuses to answer and why, if no rank answers.
    pub(super) fn refusal(&self) -> Option<(usize, &str)> {
        let answers = |rank: &Rank| matches!(rank.state, Doing::Running | Doing::Waiting | Doing::Idle);
        if self.ranks.iter().any(answers) {
            return None;
        }
        let refusing = self.ranks.iter().find(|rank| rank.state == Doing::Refused)?;
        Some((refusing.rank, refusing.silence.as_deref().unwrap_or_default()))
    }
}

fn doing(known: &Known, waits: bool) -> Doing {
    match (&known.silence, &known.last) {
        (Some((_, Silence::Stopped)), _) => Doing::Stopped,
        (Some((_, Silence::Mute | Silence::Unreachable(_))), _) => Doing::NoAnswer,
        (Some((_, Silence::Gone)), _) => Doing::Gone,
        (Some((_, Silence::Refused(_))), _) => Doing::Refused,
        (None, None) => Doing::Unknown,
        (None, Some(_)) if waits => Doing::Waiting,
        (None, Some((_, snapshot))) => match snapshot.communicators.iter().any(|comm| !comm.running.is_empty()) {
            true => Doing::Running,
            false => Doing::Idle,
        },
    }
}

fn name(comm: u64) -> String {
    format!("{comm:x}")
}

/// Returns the time between the last two answers and the one before, if the rank answers.
fn pair(known: &Known) -> Option<(f64, &Snapshot)> {
    let ((last, _), (before, snapshot)) = (known.last.as_ref()?, known.before.as_ref()?);
    let seconds = last.saturating_duration_since(*before).as_secs_f64();
    (known.silence.is_none() && seconds > 0.0).then_some((seconds, &**snapshot))
}

fn rate(now: u64, before: u64, seconds: f64) -> Option<f64> {
    now.checked_sub(before).map(|more| more as f64 / seconds)
}

fn communicators(known: &Known) -> Vec<Comm> {
    let Some((_, snapshot)) = &known.last else { return Vec::new() };
    let sums = |comm: &Communicator| {
        let totals = comm.totals.iter();
        totals.fold((0, 0), |(begun, bytes), total| (begun + total.begun, bytes + total.bytes))
    };
    let comm = |comm: &Communicator| {
        let (operations, bytes) = sums(comm);
        let before = pair(known).and_then(|(seconds, before)| {
            let before = before.communicators.iter().find(|other| other.id == comm.id)?;
            Some((seconds, sums(before)))
        });
        Comm {
            comm: name(comm.id),
            rank: comm.rank,
            size: comm.members.len(),
            begun: comm.begun,
            completed: comm.completed,
            idle_s: comm.idle.map(|idle| idle.as_secs_f64()),
            running: comm.running.iter().map(operation).collect(),
            operations,
            operations_per_s: before.and_then(|(seconds, (begun, _))| rate(operations, begun, seconds)),
            bytes,
            bytes_per_s: before.and_then(|(seconds, (_, sent))| rate(bytes, sent, seconds)),
            totals: comm
                .totals
                .iter()
                .map(|total| Total {
                    op: total.op.to_string(),
                    begun: total.begun,
                    bytes: total.bytes,
                    seconds: total.time.as_secs_f64(),
                    failed: total.failed,
                })
                .collect(),
            failure: comm.failure.as_ref().map(|failure| failure.message.clone()),
        }
    };
    snapshot.communicators.iter().map(comm).collect()
}

fn operation(running: &kolo::observer::Running) -> Operation {
    Operation {
        op: running.op.to_string(),
        dtype: running.dtype.to_string(),
        count: running.count,
        bytes: running.bytes,
        seq: running.seq,
        root: running.root,
        algorithm: running.algorithm.clone(),
        age_s: running.age.as_secs_f64(),
    }
}

fn links(known: &Known) -> Vec<Link> {
    let Some((_, snapshot)) = &known.last else { return Vec::new() };
    let mut links = Vec::new();
    for comm in &snapshot.communicators {
        let before = pair(known).and_then(|(seconds, before)| {
            let before = before.communicators.iter().find(|other| other.id == comm.id)?;
            Some((seconds, before))
        });
        for link in &comm.links {
            let Some(&peer) = comm.members.get(link.peer) else { continue };
            let rates = before.and_then(|(seconds, before)| {
                // A link that was not there has sent nothing.
                let earlier = before.links.iter().find(|other| other.peer == link.peer);
                let (sent, received) = earlier.map_or((0, 0), |earlier| (earlier.sent, earlier.received));
                Some((rate(link.sent, sent, seconds)?, rate(link.received, received, seconds)?))
            });
            links.push(Link {
                comm: name(comm.id),
                peer,
                kind: link.kind.clone(),
                sent: link.sent,
                received: link.received,
                sent_per_s: rates.map(|(sent, _)| sent),
                received_per_s: rates.map(|(_, received)| received),
                lost_rails: link.lost_rails,
                retransmits: link.tcp.map(|(retransmits, _)| retransmits),
                round_trip_s: link.tcp.map(|(_, round_trip)| round_trip.as_secs_f64()),
                slow: link.slow.map(|(bytes_per_s, before_bytes_per_s)| Slow { bytes_per_s, before_bytes_per_s }),
            });
        }
    }
    links
}

fn waited_for(state: &State, culprit: &Culprit) -> WaitedFor {
    let Culprit { rank, by, longest } = culprit;
    let (peer, known) = (&state.peers[*rank], &state.ranks[*rank]);
    let comm = known.last.as_ref().and_then(|(_, last)| last.communicators.iter().find(|comm| comm.id == longest.comm));
    let why = match (&known.silence, comm) {
        (Some((_, silence)), _) => silence.to_string(),
        (None, None) => "it has no such communicator: it has not made it yet, or has left it".to_owned(),
        (None, Some(comm)) if comm.begun < longest.seq => {
            let idle = comm.idle.map_or_else(String::new, |idle| format!(", idle for {}", seconds(idle)));
            match comm.begun {
                0 => format!("it has called no collective here{idle}"),
                begun => format!("it has not called the operation: its last collective is #{begun}{idle}"),
            }
        }
        (None, Some(_)) => "it has called the operation and does not complete it".to_owned(),
    };
    WaitedFor {
        rank: *rank,
        host: peer.host.clone(),
        pid: peer.pid,
        by: by.clone(),
        comm: name(longest.comm),
        op: longest.op.clone(),
        seq: longest.seq,
        for_s: longest.age.as_secs_f64(),
        why,
    }
}

/// Returns a time in seconds, as it is shown.
pub(super) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn failures(state: &State) -> Vec<Failure> {
    let mut failures = Vec::new();
    for (rank, known) in state.ranks.iter().enumerate() {
        let Some((_, snapshot)) = &known.last else { continue };
        for comm in &snapshot.communicators {
            if let Some(failure) = &comm.failure {
                let names = failure.rank.and_then(|rank| comm.members.get(rank).copied());
                failures.push(Failure { rank, comm: name(comm.id), message: failure.message.clone(), names });
            }
        }
    }
    failures
}

#[cfg(test)]
mod tests {
    use kolo::observer;

    use super::super::sample::{all_reduce, comm, link, snapshot, state, totals};
    use super::*;

    #[test]
    fn rates_come_from_two_answers() {
        let mut state = state(2);
        let now = Instant::now();
        let answer = |begun, bytes| {
            let (totals, links) = (totals(begun), vec![link(1, "tcp", bytes, 3)]);
            snapshot(0, vec![Communicator { totals, links, ..comm(0, 2, begun, vec![]) }])
        };
        state.hear(0, now, Ok(answer(10, 9_000)));
        let view = View::new(&state, now);
        assert_eq!((view.ranks[0].state, view.ranks[1].state), (Doing::Idle, Doing::Unknown));
        assert_eq!((view.ranks[0].links[0].sent_per_s, view.ranks[0].communicators[0].operations_per_s), (None, None));
        state.hear(0, now + Duration::from_millis(500), Ok(answer(15, 18_000)));
        let rank = &View::new(&state, now).ranks[0];
        assert_eq!(rank.communicators[0].operations_per_s, Some(10.0));
        assert_eq!((rank.links[0].sent_per_s, rank.links[0].received_per_s), (Some(18_000.0), Some(16_000.0)));
        assert_eq!((rank.links[0].retransmits, rank.links[0].peer), (Some(3), 1));
    }

    #[test]
    fn the_rank_that_is_waited_for_is_named_with_the_reason() {
        let mut state = state(3);
        let now = Instant::now();
        let age = Duration::from_secs(4);
        for rank in 0..2 {
            state.hear(rank, now, Ok(snapshot(rank, vec![comm(rank, 3, 9, vec![all_reduce(9, age)])])));
        }
        state.hear(2, now, Ok(snapshot(2, vec![comm(2, 3, 8, vec![])])));
        let waited = |state: &State| {
            let view = View::new(state, now + Duration::from_secs(2));
            assert_eq!(view.ranks[0].waits_for, [2]);
            assert_eq!(view.waited_for.len(), 1);
            let WaitedFor { rank, by, op, seq, for_s, why, .. } = &view.waited_for[0];
            assert_eq!((*rank, &**by, &**op, *seq, *for_s), (2, &[0, 1][..], "all_reduce", 9, 4.0));
            (view.ranks[2].state, view.ranks[2].silent_s, why.clone())
        };
        let (state_before, silent, why) = waited(&state);
        assert_eq!((state_before, silent), (Doing::Idle, None));
        assert_eq!(why, "it has not called the operation: its last collective is #8, idle for 0.0 s");
        state.hear(2, now + Duration::from_secs(1), Err(Silence::Stopped));
        assert_eq!(waited(&state), (Doing::Stopped, Some(2.0), "its process is stopped".to_owned()));
    }

    #[test]
    fn failures_name_ranks_of_the_job() {
        let mut state = state(4);
        let failure = Some(observer::Failure { message: "rank 1 died".to_owned(), rank: Some(1) });
        let part = Communicator { id: 31, members: vec![1, 3], failure, ..Communicator::default() };
        state.hear(1, Instant::now(), Ok(snapshot(1, vec![part])));
        let view = View::new(&state, Instant::now());
        let Failure { rank, comm, message, names } = &view.failures[0];
        assert_eq!((*rank, &**comm, &**message, *names), (1, "1f", "rank 1 died", Some(3)));
    }

    #[test]
    fn a_job_has_ended_when_all_ranks_are_gone() {
        let mut state = state(2);
        state.hear(0, Instant::now(), Err(Silence::Gone));
        assert!(!View::new(&state, Instant::now()).has_ended());
        state.hear(1, Instant::now(), Err(Silence::Gone));
        assert!(View::new(&state, Instant::now()).has_ended());
        state.hear(1, Instant::now(), Err(Silence::Refused("wrong secret".to_owned())));
        assert_eq!(View::new(&state, Instant::now()).refusal(), Some((1, "wrong secret")));
    }
}

//! What several ranks' files say together: where the ranks first disagree, and who came late.

use std::collections::{BTreeMap, BTreeSet};

use super::dump::{Call, Communicator, Dump, Operation, Outcome};

/// The files of one run, with their times on one scale.
pub(crate) struct Job {
    /// In the order of ranks, one for each rank that left any.
    pub(crate) dumps: Vec<Dump>,
    /// What to add to a rank's times to have nanoseconds since 1970, in the order of `dumps`.
    offsets: Vec<i128>,
    /// By how much the clocks of some ranks were corrected: the first of the ranks with such a clock.
    pub(crate) corrections: Vec<(usize, i128)>,
}

/// The operations that belong together, one for each rank of a communicator that should have taken part.
struct Meeting<'a> {
    key: Key,
    /// Those that came, in the order of ranks of the communicator.
    came: Vec<(usize, &'a Operation)>,
    /// Those whose file says that they did not.
    missing: Vec<usize>,
}

/// What tells the meetings of a communicator apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Collective {
        seq: u64,
    },
    /// The n-th message from one rank to another.
    Message {
        from: usize,
        to: usize,
        seq: u64,
    },
}

/// The ranks of one communicator that left a file: each with its number in it.
pub(crate) type Views<'a> = BTreeMap<usize, (usize, &'a Communicator)>;

/// Where ranks first disagree, or if they do not, what failed first.
pub(crate) struct Disagreement<'a> {
    /// The communicator, as one of the ranks has it.
    pub(crate) communicator: &'a Communicator,
    pub(crate) seq: u64,
    /// Between which ranks, if it is a message.
    pub(crate) message: Option<(usize, usize)>,
    /// Who called what: those who called the same together, most ranks first. Ranks of the communicator.
    pub(crate) called: Vec<(&'a Call, Vec<(usize, &'a Operation)>)>,
    /// Who did not come, and what each of them did last.
    pub(crate) missing: Vec<(usize, Option<&'a Operation>)>,
    /// When the first came; nanoseconds since 1970.
    pub(crate) began: i128,
}

/// How a rank came to the collectives of the job.
#[derive(Clone, Default)]
pub(crate) struct Lateness {
    /// How often it came last of all, and how long those who came first waited for it, in all, in nanoseconds.
    pub(crate) last: u64,
    pub(crate) waited: i128,
    /// The longest of these: how long, in which communicator, and the operation.
    pub(crate) worst: Option<(i128, String, u64, Call)>,
}

impl Job {
    /// Puts the files of one run together; says what is wrong if they are of several.
    pub(crate) fn new(mut dumps: Vec<Dump>) -> Result<Job, String> {
        let runs: BTreeSet<(&str, &str)> = dumps.iter().map(|dump| (&*dump.job, &*dump.run)).collect();
        if runs.len() > 1 {
            let list: Vec<String> = runs.iter().map(|(job, run)| format!("job {job}, run {run}")).collect();
            return Err(format!("the files are of several runs: {}; give those of one", list.join("; ")));
        }
        if dumps.iter().any(|dump| dump.members != dumps[0].members) {
            return Err("the files disagree on who takes part in the job; they are not of one run".to_owned());
        }
        dumps.sort_by_key(|dump| (dump.rank, std::cmp::Reverse(dump.clock.monotonic_ns)));
        // Of a rank that left several, the last.
        dumps.dedup_by_key(|dump| dump.rank);
        let mut clocks: BTreeMap<&str, i128> = BTreeMap::new();
        let offset = |dump: &Dump| i128::from(dump.clock.unix_ns) - i128::from(dump.clock.monotonic_ns);
        let offsets = dumps.iter().map(|dump| match &*dump.clock.id {
            "" => offset(dump),
            // Ranks with one clock have one offset, whatever happened to the wall clock between their files.
            id => *clocks.entry(id).or_insert_with(|| offset(dump)),
        });
        let offsets = offsets.collect();
        let mut job = Job { dumps, offsets, corrections: Vec::new() };
        job.correct_clocks();
        Ok(job)
    }

    /// Ranks of the job that left no file.
    pub(crate) fn silent(&self) -> Vec<usize> {
        (0..self.dumps[0].members.len()).filter(|rank| self.dumps.iter().all(|dump| dump.rank != *rank)).collect()
    }

    /// When a time of one of the files was, in nanoseconds since 1970.
    pub(crate) fn time(&self, dump: usize, ns: u64) -> i128 {
        i128::from(ns) + self.offsets[dump]
    }

    /// The communicators, and the ranks that say something of them.
    pub(crate) fn communicators(&self) -> BTreeMap<&str, Views<'_>> {
        let mut all: BTreeMap<&str, Views<'_>> = BTreeMap::new();
        for (at, dump) in self.dumps.iter().enumerate() {
            for communicator in &dump.communicators {
                all.entry(&communicator.id).or_default().insert(communicator.rank, (at, communicator));
            }
        }
        all
    }

    /// Nobody leaves such a collective before everybody has come. Where the clocks of two machines say otherwise, one of them is
    /// taken to be wrong, by as much as makes it possible.
    fn correct_clocks(&mut self) {
        const SYNCHRONISES: [&str; 5] = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
        let clock = |at: usize| match &*self.dumps[at].clock.id {
            "" => format!("of rank {}", self.dumps[at].rank),
            id => id.to_owned(),
        };
        let first = clock(0);
        // For each other clock: the least and the most that may be added to it.
        let mut bounds: BTreeMap<String, (i128, i128)> = BTreeMap::new();
        for views in self.communicators().into_values() {
            for meeting in meetings(&views) {
                let complete = |(rank, operation): &(usize, &Operation)| {
                    let at = views[rank].0;
                    let end = operation
                        .end_ns
                        .filter(|_| operation.outcome == Outcome::Ok && operation.bytes > 0 || operation.call.op == "barrier")?;
                    Some((at, self.time(at, operation.start_ns), self.time(at, end)))
                };
                let came: Vec<_> = meeting.came.iter().filter_map(complete).collect();
                if !meeting.came.first().is_some_and(|(_, operation)| SYNCHRONISES.contains(&&*operation.call.op)) {
                    continue;
                }
                for (_, start, end) in came.iter().filter(|(at, ..)| clock(*at) == first) {
                    for (at, their_start, their_end) in came.iter().filter(|(at, ..)| clock(*at) != first) {
                        let (least, most) = bounds.entry(clock(*at)).or_insert((i128::MIN, i128::MAX));
                        *least = (*least).max(start - their_end);
                        *most = (*most).min(end - their_start);
                    }
                }
            }
        }
        let mut corrected = BTreeSet::new();
        for at in 0..self.dumps.len() {
            let clock = clock(at);
            if let Some(&(least, most)) = bounds.get(&clock).filter(|(least, most)| least <= most && (*least > 0 || *most < 0)) {
                let correction = least + (most - least) / 2;
                self.offsets[at] += correction;
                if corrected.insert(clock) {
                    self.corrections.push((self.dumps[at].rank, correction));
                }
            }
        }
    }

    /// The first operation on which ranks disagree: they called different things, or some came and others did not. If there is
    /// none, the first that failed.
    pub(crate) fn disagreement(&self) -> Option<Disagreement<'_>> {
        let mut first: Option<Disagreement<'_>> = None;
        for views in self.communicators().into_values() {
            // Who has not come yet is missed only where others could not go on.
            let is_stuck =
                views.values().any(|(_, view)| view.operations.iter().any(|operation| operation.outcome != Outcome::Ok));
            for meeting in meetings(&views) {
                let waits = matches!(meeting.key, Key::Collective { .. })
                    || meeting.came.iter().any(|(_, operation)| operation.outcome != Outcome::Ok);
                let differs = meeting.came.iter().any(|(_, operation)| !matches(&operation.call, &meeting.came[0].1.call));
                let disagrees = differs || (!meeting.missing.is_empty() && is_stuck && waits);
                let failed = meeting.came.iter().any(|(_, operation)| operation.outcome == Outcome::Failed);
                let began = meeting.came.iter().map(|(rank, operation)| self.time(views[rank].0, operation.start_ns)).min();
                let Some(began) = began.filter(|_| disagrees || failed) else { continue };
                if first.as_ref().is_none_or(|first| (!disagrees, began) < (first.agrees(), first.began)) {
                    first = Some(describe(&views, &meeting, began));
                }
            }
        }
        first
    }

    /// Who came late to collectives, by rank of the job; and how many collectives say so.
    pub(crate) fn lateness(&self) -> (BTreeMap<usize, Lateness>, u64) {
        let mut all: BTreeMap<usize, Lateness> = BTreeMap::new();
        let mut counted = 0;
        for views in self.communicators().into_values() {
            for meeting in meetings(&views).iter().filter(|meeting| matches!(meeting.key, Key::Collective { .. })) {
                let start = |(rank, operation): &(usize, &Operation)| (self.time(views[rank].0, operation.start_ns), *rank);
                let (Some(first), Some(last)) = (meeting.came.iter().map(start).min(), meeting.came.iter().map(start).max())
                else {
                    continue;
                };
                if meeting.came.len() < 2 {
                    continue;
                }
                counted += 1;
                let (at, communicator) = views[&last.1];
                let late = all.entry(self.dumps[at].rank).or_default();
                let by = last.0 - first.0;
                late.last += 1;
                late.waited += by;
                if late.worst.as_ref().is_none_or(|(most, ..)| by > *most) {
                    let Key::Collective { seq } = meeting.key else { continue };
                    late.worst = Some((by, communicator.name(), seq, meeting.came[0].1.call.clone()));
                }
            }
        }
        (all, counted)
    }
}

impl Disagreement<'_> {
    /// All came, and called the same.
    pub(crate) fn agrees(&self) -> bool {
        self.missing.is_empty() && self.called.windows(2).all(|pair| matches(pair[0].0, pair[1].0))
    }
}

/// Whether two ranks called what belongs together.
fn matches(a: &Call, b: &Call) -> bool {
    let of_message = |call: &Call| matches!(&*call.op, "send" | "recv");
    if of_message(a) && of_message(b) { (&a.dtype, a.count) == (&b.dtype, b.count) } else { a == b }
}

/// The operations of a communicator's ranks, as they belong together, in their order.
fn meetings<'a>(views: &Views<'a>) -> Vec<Meeting<'a>> {
    let mut came: BTreeMap<Key, Vec<(usize, &Operation)>> = BTreeMap::new();
    for (&rank, (_, view)) in views {
        for operation in &view.operations {
            came.entry(key(rank, operation)).or_default().push((rank, operation));
        }
    }
    // The last of each kind that a rank has come to.
    let last = |rank: usize, of: &dyn Fn(Key) -> Option<u64>| {
        views.get(&rank).map(|(_, view)| view.operations.iter().filter_map(|operation| of(key(rank, operation))).max())
    };
    let meeting = |(key, came): (Key, Vec<(usize, &'a Operation)>)| {
        let (expected, seq) = match key {
            Key::Collective { seq } => (views.keys().copied().collect(), seq),
            Key::Message { from, to, seq } => (vec![from, to], seq),
        };
        let of = |other: Key| match (key, other) {
            (Key::Collective { .. }, Key::Collective { seq }) => Some(seq),
            (Key::Message { from, to, .. }, Key::Message { from: f, to: t, seq }) if (f, t) == (from, to) => Some(seq),
            _ => None,
        };
        // One that is further, or whose first is later, has only forgotten it.
        let has_not_come = |rank: &usize| match last(*rank, &of) {
            Some(last) => last.is_none_or(|last| last < seq),
            None => false,
        };
        let missing =
            expected.into_iter().filter(|rank| came.iter().all(|(other, _)| other != rank)).filter(has_not_come).collect();
        Meeting { key, came, missing }
    };
    came.into_iter().map(meeting).collect()
}

fn key(rank: usize, operation: &Operation) -> Key {
    let seq = operation.seq;
    match operation.peer {
        None => Key::Collective { seq },
        Some(peer) if operation.call.op == "send" => Key::Message { from: rank, to: peer, seq },
        Some(peer) => Key::Message { from: peer, to: rank, seq },
    }
}

fn describe<'a>(views: &Views<'a>, meeting: &Meeting<'a>, began: i128) -> Disagreement<'a> {
    let mut called: Vec<(&Call, Vec<(usize, &Operation)>)> = Vec::new();
    for &(rank, operation) in &meeting.came {
        match called.iter_mut().find(|(call, _)| **call == operation.call) {
            Some((_, ranks)) => ranks.push((rank, operation)),
            None => called.push((&operation.call, vec![(rank, operation)])),
        }
    }
    called.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let last = |&rank: &usize| (rank, views[&rank].1.operations.iter().max_by_key(|operation| operation.start_ns));
    let (seq, message) = match meeting.key {
        Key::Collective { seq } => (seq, None),
        Key::Message { from, to, seq } => (seq, Some((from, to))),
    };
    let communicator = views.values().next().expect("somebody came").1;
    Disagreement { communicator, seq, message, called, missing: meeting.missing.iter().map(last).collect(), began }
}

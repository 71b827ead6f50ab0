//! Compares the files of several ranks: where the ranks first disagree, and which ranks are late.

use std::collections::{BTreeMap, BTreeSet};

use super::dump::{Call, Communicator, Dump, Operation, Outcome};

/// The files of one run, with their times on one scale.
pub(crate) struct Job {
    /// One for each rank that left a file, in the order of ranks.
    pub(crate) dumps: Vec<Dump>,
    /// What to add to a rank's times to get nanoseconds since 1970, in the order of `dumps`.
    offsets: Vec<i128>,
    /// The corrections of clocks, in nanoseconds, each with the first rank that has that clock.
    pub(crate) corrections: Vec<(usize, i128)>,
}

/// The operations that belong together: one for each rank that takes part.
struct Meeting<'a> {
    key: Key,
    /// The operations of the ranks that called it, in the order of ranks of the communicator.
    came: Vec<(usize, &'a Operation)>,
    /// The ranks whose file shows that they did not call it.
    missing: Vec<usize>,
}

/// The identity of such a group of operations on a communicator.
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

/// The ranks of one communicator that left a file, each with its rank in the communicator.
pub(crate) type Views<'a> = BTreeMap<usize, (usize, &'a Communicator)>;

/// The first disagreement of the ranks or, without one, the first failure.
pub(crate) struct Disagreement<'a> {
    /// The communicator, as one of the ranks has it.
    pub(crate) communicator: &'a Communicator,
    pub(crate) seq: u64,
    /// For a message, its two ranks.
    pub(crate) message: Option<(usize, usize)>,
    /// The calls, each with the ranks of the communicator that made it; the most frequent call
    /// first.
    pub(crate) called: Vec<(&'a Call, Vec<(usize, &'a Operation)>)>,
    /// The ranks that did not call, each with its last operation.
    pub(crate) missing: Vec<(usize, Option<&'a Operation>)>,
    /// When the first rank called, in nanoseconds since 1970.
    pub(crate) began: i128,
}

/// How late a rank was for the collectives of the job.
#[derive(Clone, Default)]
pub(crate) struct Lateness {
    /// How often the rank was the last, and how long the first rank waited for it in all, in
    /// nanoseconds.
    pub(crate) last: u64,
    pub(crate) waited: i128,
    /// The longest of these waits: its length, the communicator and the operation.
    pub(crate) worst: Option<(i128, String, u64, Call)>,
}

impl Job {
    /// Puts the files of one run together. Returns an error if they are of several runs.
    pub(crate) fn new(mut dumps: Vec<Dump>) -> Result<Job, String> {
        let runs: BTreeSet<(&str, &str)> = dumps.iter().map(|dump| (&*dump.job, &*dump.run)).collect();
        if runs.len() > 1 {
            let list: Vec<String> = runs.iter().map(|(job, run)| format!("job {job}, run {run}")).collect();
            return Err(format!("the files are of several runs: {}; give those of one", list.join("; ")));
        }
        if dumps.iter().any(|dump| dump.members != dumps[0].members) {
            return Err("the files disagree on the ranks of the job; they are not of one run".to_owned());
        }
        dumps.sort_by_key(|dump| (dump.rank, std::cmp::Reverse(dump.clock.monotonic_ns)));
        // The last file of a rank that left several.
        dumps.dedup_by_key(|dump| dump.rank);
        let mut clocks: BTreeMap<&str, i128> = BTreeMap::new();
        let offset = |dump: &Dump| i128::from(dump.clock.unix_ns) - i128::from(dump.clock.monotonic_ns);
        let offsets = dumps.iter().map(|dump| match &*dump.clock.id {
            "" => offset(dump),
            // Ranks with one clock have one offset, even if the wall clock changed between their
            // files.
            id => *clocks.entry(id).or_insert_with(|| offset(dump)),
        });
        let offsets = offsets.collect();
        let mut job = Job { dumps, offsets, corrections: Vec::new() };
        job.correct_clocks();
        Ok(job)
    }

    /// Returns the ranks of the job that left no file.
    pub(crate) fn silent(&self) -> Vec<usize> {
        (0..self.dumps[0].members.len()).filter(|rank| self.dumps.iter().all(|dump| dump.rank != *rank)).collect()
    }

    /// Converts a time of a file to nanoseconds since 1970.
    pub(crate) fn time(&self, dump: usize, ns: u64) -> i128 {
        i128::from(ns) + self.offsets[dump]
    }

    /// Returns the communicators, each with the ranks whose files mention it.
    pub(crate) fn communicators(&self) -> BTreeMap<&str, Views<'_>> {
        let mut all: BTreeMap<&str, Views<'_>> = BTreeMap::new();
        for (at, dump) in self.dumps.iter().enumerate() {
            for communicator in &dump.communicators {
                all.entry(&communicator.id).or_default().insert(communicator.rank, (at, communicator));
            }
        }
        all
    }

    /// Corrects clocks. No rank leaves a synchronising collective before all ranks have called it.
    /// If the clocks of two machines contradict this, one of them gets the smallest correction that
    /// removes the contradiction.
    fn correct_clocks(&mut self) {
        const SYNCHRONISES: [&str; 5] = ["barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
        let clock = |at: usize| match &*self.dumps[at].clock.id {
            "" => format!("of rank {}", self.dumps[at].rank),
            id => id.to_owned(),
        };
        let first = clock(0);
        // For each other clock: the least and the greatest correction.
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

    /// Finds the first operation on which ranks disagree: they made different calls, or only some
    /// ranks called it. Without one, finds the first that failed.
    pub(crate) fn disagreement(&self) -> Option<Disagreement<'_>> {
        let mut first: Option<Disagreement<'_>> = None;
        for views in self.communicators().into_values() {
            // A rank that has not called yet is missing only where others waited for it.
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

    /// Returns for each rank of the job how late it was, and the number of collectives that this
    /// counts.
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
    /// Returns whether all ranks made the same call.
    pub(crate) fn agrees(&self) -> bool {
        self.missing.is_empty() && self.called.windows(2).all(|pair| matches(pair[0].0, pair[1].0))
    }
}

/// Returns whether the calls of two ranks match.
fn matches(a: &Call, b: &Call) -> bool {
    let of_message = |call: &Call| matches!(&*call.op, "send" | "recv");
    if of_message(a) && of_message(b) { (&a.dtype, a.count) == (&b.dtype, b.count) } else { a == b }
}

/// Groups the operations of a communicator's ranks that belong together, in their order.
fn meetings<'a>(views: &Views<'a>) -> Vec<Meeting<'a>> {
    let mut came: BTreeMap<Key, Vec<(usize, &Operation)>> = BTreeMap::new();
    for (&rank, (_, view)) in views {
        for operation in &view.operations {
            came.entry(key(rank, operation)).or_default().push((rank, operation));
        }
    }
    // The last number of each kind that a rank has reached.
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
        // A rank that is further, or whose record begins later, has only overwritten it.
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
    let communicator = views.values().next().expect("a rank recorded the operation").1;
    Disagreement { communicator, seq, message, called, missing: meeting.missing.iter().map(last).collect(), began }
}

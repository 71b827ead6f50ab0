//! Notices that a link carries much less than before.
//!
//! Only the time counts in which written bytes wait for the network: neither the program nor the peer decides
//! the rate then. What else uses an interface does, and depends on the operation. So only those count in which
//! a rank sends to one other at a time, only while no other link of the process has bytes that wait, and a rate
//! is compared with those of the same operation at a similar size.

use std::collections::HashMap;
use std::time::Duration;

use crate::sys::Flow;
use crate::timeouts::{RATE, SLOW_LINK};
use crate::types::Op;

/// A link is slow if it carries less than it did by this factor.
const SLOW: f64 = 3.0;

/// It is no longer slow if it carries less by a smaller factor than this.
const FAST: f64 = 1.5;

/// The operations in which a rank sends to one other at a time.
const IN_TURN: [Op; 5] = [Op::AllReduce, Op::ReduceScatter, Op::AllGather, Op::Broadcast, Op::Reduce];

/// The bytes of an operation from which on it can have bytes wait at a link.
const LONG: u64 = 64 << 10;

/// An operation, and the binary logarithm of its bytes.
pub(super) type Kind = (Op, u32);

/// Returns the kind of an operation, if it can have bytes wait.
pub(super) fn kind(op: Op, bytes: u64) -> Option<Kind> {
    (bytes >= LONG).then(|| (op, bytes.ilog2()))
}

/// What a link carries, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slow {
    pub(crate) rate: f64,
    /// The most that it carried before.
    pub(crate) before: f64,
    pub(crate) op: Op,
}

/// What has changed about a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    Slow(Slow),
    /// It carries again what it did.
    Recovered,
}

/// The rates of one link.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// How many bytes the program had written at the last look.
    written: u64,
    /// What was seen then, and which operation ran, if bytes waited for the network.
    last: Option<(Flow, Kind)>,
    rates: HashMap<Kind, Rates>,
    /// How long it has carried little.
    little: Duration,
    slow: Option<Slow>,
}

/// The rates while one kind of operation runs.
#[derive(Debug, Default)]
struct Rates {
    /// Of the rate that is being measured.
    bytes: u64,
    busy: Duration,
    /// The highest rate.
    most: f64,
}

impl Pace {
    /// Returns whether a look can find anything, now that the program has written this many bytes.
    pub(super) fn is_due(&mut self, written: u64) -> bool {
        std::mem::replace(&mut self.written, written) != written || self.last.is_some()
    }

    /// Takes what the system says now. `kind` is that of the last operation; `None` if it was a short one, and
    /// then bytes that wait are those of an operation before it. Returns what has changed.
    pub(super) fn look(&mut self, flow: Flow, kind: Option<Kind>) -> Option<Change> {
        let kind = kind.or(self.last.map(|(_, kind)| kind));
        let now = kind.filter(|&(op, _)| flow.is_full && IN_TURN.contains(&op)).map(|kind| (flow, kind));
        let (before, kind) = std::mem::replace(&mut self.last, now)?;
        now.filter(|(_, other)| *other == kind)?;
        // A rail that was opened anew begins at 0.
        let bytes = flow.acknowledged.checked_sub(before.acknowledged)?;
        let busy = flow.busy.checked_sub(before.busy)?;
        let rates = self.rates.entry(kind).or_default();
        rates.bytes += bytes;
        rates.busy += busy;
        if rates.busy < RATE {
            return None;
        }
        let (rate, busy) = (rates.bytes as f64 / rates.busy.as_secs_f64(), rates.busy);
        rates.most = rates.most.max(rate);
        (rates.bytes, rates.busy) = (0, Duration::ZERO);
        let before = rates.most;
        if rate * SLOW >= before {
            self.little = Duration::ZERO;
            return self.slow.take_if(|_| rate * FAST >= before).map(|_| Change::Recovered);
        }
        self.little += busy;
        let slow = Slow { rate, before, op: kind.0 };
        let was_slow = self.slow.is_some();
        if was_slow || self.little >= SLOW_LINK {
            self.slow = Some(slow);
        }
        self.slow.filter(|_| !was_slow).map(Change::Slow)
    }

    /// Returns what the link carries if it is slow.
    pub(super) fn slow(&self) -> Option<Slow> {
        self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: Kind = (Op::AllReduce, 24);
    const SMALL: Kind = (Op::AllReduce, 20);

    /// A link, and what it has carried.
    #[derive(Default)]
    struct Link {
        pace: Pace,
        flow: Flow,
    }

    impl Link {
        /// Carries this many bytes per second for some seconds, and returns what changed.
        fn carry(&mut self, kind: Kind, rate: u64, seconds: u32) -> Vec<Change> {
            let mut changes = Vec::new();
            for _ in 0..20 * seconds {
                changes.extend(self.pace.look(Flow { is_full: true, ..self.flow }, Some(kind)));
                self.flow.acknowledged += rate / 20;
                self.flow.busy += Duration::from_millis(50);
                changes.extend(self.pace.look(Flow { is_full: true, ..self.flow }, Some(kind)));
            }
            changes
        }
    }

    #[test]
    fn a_link_that_carries_a_third_for_a_while_is_slow_until_it_recovers() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        assert_eq!(link.carry(LARGE, 50_000_000, 10), [], "half is usual");
        assert_eq!(link.carry(LARGE, 12_000_000, 1), [], "for too short a time");
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        let [Change::Slow(slow)] = link.carry(LARGE, 12_000_000, 10)[..] else { panic!("it is slow") };
        assert_eq!((slow.op, slow.before, slow.rate), (Op::AllReduce, 120_000_000.0, 12_000_000.0));
        assert_eq!(link.pace.slow(), Some(slow));
        assert_eq!(link.carry(LARGE, 50_000_000, 3), [], "not fast yet");
        assert_eq!(link.carry(LARGE, 120_000_000, 3), [Change::Recovered]);
        assert_eq!(link.pace.slow(), None);
    }

    #[test]
    fn only_like_operations_are_compared() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        assert_eq!(link.carry(SMALL, 12_000_000, 10), []);
        assert_eq!(link.carry((Op::AllGather, 24), 12_000_000, 10), []);
        assert!(!link.carry(LARGE, 12_000_000, 10).is_empty());
    }

    /// What one of many links carries depends on how many others have ended.
    #[test]
    fn operations_that_send_to_several_at_once_are_not_compared() {
        for op in [Op::AllToAll, Op::Gather, Op::Scatter, Op::Send] {
            let mut link = Link::default();
            assert_eq!(link.carry((op, 24), 120_000_000, 3), []);
            assert_eq!(link.carry((op, 24), 12_000_000, 10), [], "{op}");
        }
    }

    /// A system buffers what a long operation has written. It leaves while the next, short ones run.
    #[test]
    fn bytes_that_wait_are_those_of_the_last_long_operation() {
        assert_eq!((kind(Op::AllReduce, 8), kind(LARGE.0, 16 << 20)), (None, Some(LARGE)));
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        let mut changes = Vec::new();
        for _ in 0..10 {
            link.pace.look(Flow { is_full: true, ..link.flow }, Some(LARGE));
            for _ in 0..10 {
                link.flow.acknowledged += 600_000;
                link.flow.busy += Duration::from_millis(50);
                changes.extend(link.pace.look(Flow { is_full: true, ..link.flow }, None));
            }
            link.pace.look(link.flow, None);
        }
        assert!(matches!(changes[..], [Change::Slow(_)]), "{changes:?}");
    }

    /// The program decides the rate where nothing waits to be sent, where none of its operations has run, or
    /// where the operation has changed.
    #[test]
    fn time_in_which_the_network_does_not_decide_does_not_count() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        let full = |is_full| (move |flow: Flow| Flow { is_full, ..flow }, Some(LARGE));
        for looks in [[full(false), full(true)], [full(true), full(false)], [(full(true).0, None), full(true)]] {
            for _ in 0..200 {
                let [before, after] = looks;
                assert_eq!(link.pace.look(before.0(link.flow), before.1), None);
                link.flow.acknowledged += 1000;
                link.flow.busy += Duration::from_millis(50);
                assert_eq!(link.pace.look(after.0(link.flow), after.1), None);
                link.pace.last = None;
            }
        }
        assert_eq!(link.pace.slow(), None);
    }

    #[test]
    fn an_idle_link_is_left_alone() {
        let mut link = Link::default();
        assert!(!link.pace.is_due(0) && link.pace.is_due(1) && !link.pace.is_due(1));
        link.pace.look(Flow { is_full: true, ..link.flow }, Some(LARGE));
        assert!(link.pace.is_due(1), "bytes wait");
        link.pace.look(link.flow, Some(LARGE));
        assert!(!link.pace.is_due(1));
    }

    #[test]
    fn a_connection_that_was_opened_anew_begins_again() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        link.flow = Flow::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
    }
}

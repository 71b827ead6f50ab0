//! Notices that a link carries much less than before.
//!
//! Only the time counts in which written bytes wait for the network: neither the program nor the peer decides
//! the rate then. What else uses an interface does. So only algorithms count by which a rank sends to one other
//! and receives from one at a time, only while no other link of the process has bytes that wait, and a link is
//! slow only if its host sends little in all: processes of one host share its interfaces. A rate is compared with
//! those of the same kind of operation.

use std::collections::HashMap;
use std::time::Duration;

use crate::schedule::Algorithm;
use crate::sys::Flow;
use crate::timeouts::{RATE_WINDOW, SLOW_LINK};
use crate::types::Op;

/// A link is slow if it carries less than it did by this factor.
const SLOW: f64 = 3.0;

/// A slow link recovers once it carries more than its highest rate divided by this.
const FAST: f64 = 1.5;

/// The algorithms by which a rank sends to one other and receives from one at a time.
const IN_TURN: [Algorithm; 3] = [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling];

/// The bytes of an operation from which on it can have bytes wait at a link.
const LONG: u64 = 64 << 10;

/// An operation, the algorithm between hosts, and the binary logarithm of its bytes.
pub(super) type OpKind = (Op, Algorithm, u32);

/// Returns the kind of an operation, if it can have bytes wait. `None` as the algorithm is that of a message.
pub(super) fn kind(op: Op, algorithm: Option<Algorithm>, bytes: u64) -> Option<OpKind> {
    (bytes >= LONG).then(|| (op, algorithm.unwrap_or(Algorithm::Direct), bytes.ilog2()))
}

/// What is seen of a link at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkReading {
    pub(super) flow: Flow,
    /// Bytes that the host has sent so far, if the system says.
    pub(super) of_host: Option<u64>,
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
pub(super) struct LinkPace {
    /// How many bytes the program had written at the last look.
    written: u64,
    /// What was seen then, and which operation ran, if bytes waited for the network.
    last: Option<(LinkReading, OpKind)>,
    rates: HashMap<OpKind, Rates>,
    /// How long it has carried little.
    little: Duration,
    slow: Option<Slow>,
}

/// The rates while one kind of operation runs.
#[derive(Debug, Default)]
struct Rates {
    /// Of the rate that is being measured.
    bytes: u64,
    of_host: u64,
    busy: Duration,
    /// The highest rates of the link, and of the host.
    most: f64,
    most_of_host: f64,
}

impl LinkPace {
    /// Returns whether a look can find anything, now that the program has written this many bytes.
    pub(super) fn is_due(&mut self, written: u64) -> bool {
        std::mem::replace(&mut self.written, written) != written || self.last.is_some()
    }

    /// Takes what the system says now. `kind` is that of the last operation; `None` if it was a short one, and
    /// then bytes that wait are those of an operation before it. Returns what has changed.
    pub(super) fn look(&mut self, seen: LinkReading, kind: Option<OpKind>) -> Option<Change> {
        let kind = kind.or(self.last.map(|(_, kind)| kind));
        let now = kind.filter(|(_, algorithm, _)| seen.flow.is_full && IN_TURN.contains(algorithm)).map(|kind| (seen, kind));
        let (before, kind) = std::mem::replace(&mut self.last, now)?;
        now.filter(|(_, other)| *other == kind)?;
        // A rail that was opened anew begins at 0.
        let bytes = seen.flow.acknowledged.checked_sub(before.flow.acknowledged)?;
        let busy = seen.flow.busy.checked_sub(before.flow.busy)?;
        let of_host = match (seen.of_host, before.of_host) {
            (Some(now), Some(before)) => now.checked_sub(before)?,
            (None, None) => 0,
            // It has not said it once.
            _ => return None,
        };
        let rates = self.rates.entry(kind).or_default();
        rates.bytes += bytes;
        rates.of_host += of_host;
        rates.busy += busy;
        if rates.busy < RATE_WINDOW {
            return None;
        }
        let busy = std::mem::take(&mut rates.busy);
        let rate = std::mem::take(&mut rates.bytes) as f64 / busy.as_secs_f64();
        let of_host = std::mem::take(&mut rates.of_host) as f64 / busy.as_secs_f64();
        (rates.most, rates.most_of_host) = (rates.most.max(rate), rates.most_of_host.max(of_host));
        let before = rates.most;
        if rate * SLOW >= before {
            self.little = Duration::ZERO;
            return self.slow.take_if(|_| rate * FAST >= before).map(|_| Change::Recovered);
        }
        // Others of this host use its interface.
        if of_host > 0.0 && of_host * SLOW >= rates.most_of_host {
            return None;
        }
        self.little += busy;
        let slow = Slow { rate, before, op: kind.0 };
        let was_slow = self.slow.is_some();
        if was_slow || self.little >= SLOW_LINK {
            self.slow = Some(slow);
        }
        self.slow.filter(|_| !was_slow).map(Change::Slow)
    }

    /// Forgets that the link is slow. Returns whether it was.
    pub(super) fn recover(&mut self) -> bool {
        self.little = Duration::ZERO;
        self.slow.take().is_some()
    }

    /// Returns what the link carries if it is slow.
    pub(super) fn slow(&self) -> Option<Slow> {
        self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: OpKind = (Op::AllReduce, Algorithm::Ring, 24);
    const SMALL: OpKind = (Op::AllReduce, Algorithm::Ring, 20);

    /// A link, and what it has carried.
    #[derive(Default)]
    struct Link {
        pace: LinkPace,
        flow: Flow,
        /// What the other links of the host carry, in bytes per second, and have carried.
        others: u64,
        of_others: u64,
    }

    impl Link {
        fn seen(&self, is_full: bool) -> LinkReading {
            LinkReading { flow: Flow { is_full, ..self.flow }, of_host: Some(self.flow.acknowledged + self.of_others) }
        }

        /// Carries this many bytes per second for some seconds, and returns what changed.
        fn carry(&mut self, kind: OpKind, rate: u64, seconds: u32) -> Vec<Change> {
            let mut changes = Vec::new();
            for _ in 0..20 * seconds {
                changes.extend(self.pace.look(self.seen(true), Some(kind)));
                self.flow.acknowledged += rate / 20;
                self.of_others += self.others / 20;
                self.flow.busy += Duration::from_millis(50);
                changes.extend(self.pace.look(self.seen(true), Some(kind)));
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
        assert_eq!(link.carry((Op::AllGather, Algorithm::Ring, 24), 12_000_000, 10), []);
        assert!(!link.carry(LARGE, 12_000_000, 10).is_empty());
    }

    /// What one of many links carries depends on how many others have ended.
    #[test]
    fn algorithms_that_use_several_links_at_once_are_not_compared() {
        for algorithm in [Some(Algorithm::Direct), Some(Algorithm::Binomial), Some(Algorithm::DoubleTree), None] {
            let kind = kind(Op::AllReduce, algorithm, 16 << 20).unwrap();
            let mut link = Link::default();
            assert_eq!(link.carry(kind, 120_000_000, 3), []);
            assert_eq!(link.carry(kind, 12_000_000, 10), [], "{algorithm:?}");
        }
    }

    #[test]
    fn a_link_is_not_slow_while_other_processes_use_the_interface() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        link.others = 90_000_000;
        assert_eq!(link.carry(LARGE, 30_000_000, 10), []);
        link.others = 0;
        assert!(matches!(link.carry(LARGE, 30_000_000, 10)[..], [Change::Slow(_)]));
    }

    /// A system buffers what a long operation has written. It leaves while the next, short ones run.
    #[test]
    fn bytes_that_wait_are_those_of_the_last_long_operation() {
        let ring = Some(Algorithm::Ring);
        assert_eq!((kind(Op::AllReduce, ring, 8), kind(Op::AllReduce, ring, 16 << 20)), (None, Some(LARGE)));
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        let mut changes = Vec::new();
        for _ in 0..10 {
            link.pace.look(link.seen(true), Some(LARGE));
            for _ in 0..10 {
                link.flow.acknowledged += 600_000;
                link.flow.busy += Duration::from_millis(50);
                changes.extend(link.pace.look(link.seen(true), None));
            }
            link.pace.look(link.seen(false), None);
        }
        assert!(matches!(changes[..], [Change::Slow(_)]), "{changes:?}");
    }

    /// The program decides the rate where nothing waits to be sent, where none of its operations has run, or
    /// where the operation has changed.
    #[test]
    fn time_in_which_the_network_does_not_decide_does_not_count() {
        let mut link = Link::default();
        assert_eq!(link.carry(LARGE, 120_000_000, 3), []);
        for looks in [
            [(false, Some(LARGE)), (true, Some(LARGE))],
            [(true, Some(LARGE)), (false, Some(LARGE))],
            [(true, None), (true, Some(LARGE))],
        ] {
            for _ in 0..200 {
                let [before, after] = looks;
                assert_eq!(link.pace.look(link.seen(before.0), before.1), None);
                link.flow.acknowledged += 1000;
                link.flow.busy += Duration::from_millis(50);
                assert_eq!(link.pace.look(link.seen(after.0), after.1), None);
                link.pace.last = None;
            }
        }
        assert_eq!(link.pace.slow(), None);
    }

    #[test]
    fn an_idle_link_is_left_alone() {
        let mut link = Link::default();
        assert!(!link.pace.is_due(0) && link.pace.is_due(1) && !link.pace.is_due(1));
        link.pace.look(link.seen(true), Some(LARGE));
        assert!(link.pace.is_due(1), "bytes wait");
        link.pace.look(link.seen(false), Some(LARGE));
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

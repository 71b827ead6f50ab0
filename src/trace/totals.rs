//! What the operations of one communicator come to, by operation: for metrics and `kolo top`.
//!
//! The thread that runs the communicator's operations counts, and any thread may read. Counting
//! takes no locked instruction, because one thread at a time counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::Op;

/// The counters of one operation.
#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    bytes: AtomicU64,
}

/// The counters of a communicator.
pub(crate) struct Totals {
    counts: [Counts; Op::ALL.len()],
    /// Ticks that operations took whose end was timed.
    ticks: [AtomicU64; Op::ALL.len()],
    failed: [AtomicU64; Op::ALL.len()],
}

/// What one operation of a communicator came to so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpTotal {
    pub(crate) op: Op,
    pub(crate) begun: u64,
    /// Bytes of this rank's buffers.
    pub(crate) bytes: u64,
    pub(crate) ticks: u64,
    pub(crate) failed: u64,
}

impl Default for Totals {
    fn default() -> Totals {
        Totals {
            counts: std::array::from_fn(|_| Counts::default()),
            ticks: std::array::from_fn(|_| AtomicU64::new(0)),
            failed: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

/// Adds to a counter that no other thread changes meanwhile.
#[inline(always)]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

impl Totals {
    /// Counts an operation that begins. `op` is the number of an [`Op`]; another number is ignored.
    /// One thread at a time calls this.
    #[inline(always)]
    pub(super) fn begin(&self, op: u8, bytes: u64) {
        if let Some(counts) = self.counts.get(usize::from(op)) {
            add(&counts.begun, 1);
            add(&counts.bytes, bytes);
        }
    }

    /// Counts an operation whose end was timed. One thread at a time calls this.
    #[inline]
    pub(super) fn end(&self, op: u8, ticks: u64, succeeded: bool) {
        if let (Some(total), Some(failed)) = (self.ticks.get(usize::from(op)), self.failed.get(usize::from(op))) {
            add(total, ticks);
            if !succeeded {
                add(failed, 1);
            }
        }
    }

    /// Returns the operations that have been called.
    pub(crate) fn read(&self) -> Vec<OpTotal> {
        let read = |counters: &[AtomicU64], op: Op| counters[op as usize].load(Ordering::Relaxed);
        let total = |op: Op| {
            let Counts { begun, bytes } = &self.counts[op as usize];
            let (begun, bytes) = (begun.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
            OpTotal { op, begun, bytes, ticks: read(&self.ticks, op), failed: read(&self.failed, op) }
        };
        Op::ALL.iter().map(|&op| total(op)).filter(|total| total.begun > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_apart() {
        let totals = Totals::default();
        totals.begin(Op::AllReduce as u8, 100);
        totals.begin(Op::AllReduce as u8, 28);
        totals.begin(Op::Connect as u8, 0);
        totals.end(Op::AllReduce as u8, 7, false);
        totals.begin(255, 1);
        totals.end(255, 1, false);
        let none = OpTotal { op: Op::Connect, begun: 1, bytes: 0, ticks: 0, failed: 0 };
        assert_eq!(totals.read(), [OpTotal { op: Op::AllReduce, begun: 2, bytes: 128, ticks: 7, failed: 1 }, none]);
    }

    #[test]
    fn the_numbers_of_operations_are_their_places() {
        assert!(Op::ALL.iter().enumerate().all(|(at, &op)| at == op as usize));
    }
}

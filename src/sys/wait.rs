//! How to wait for another rank: spin, then yield, then sleep.
//!
//! With a processor for every rank, spinning hands over in a tenth of a microsecond where sleeping takes tens. With more
//! ranks than processors, whoever spins keeps the awaited rank from running: then a few yields, and sleep. How long it pays
//! to spin also depends on who else uses the machine, so it is learnt from how waits end.

use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a communicator's waits spin and yield before they sleep.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Microseconds to spin now; between `LEAST_SPIN` and `most_spin`.
    spin: AtomicU32,
    most_spin: u32,
    yields: u32,
}

const LEAST_SPIN: u32 = 2;
/// How often to yield before sleeping. With 4 ranks on 2 cores 16 yields keep nearly all waits from the futex, where 4 let one in a
/// hundred sleep for 40 us; more bring nothing.
const YIELDS: u32 = 16;
/// Checks before the clock is read for the first time, and between readings.
const CHECKS: u32 = 32;

impl Patience {
    /// For a communicator of which `ranks` share this machine's processors.
    pub(crate) fn new(ranks: usize) -> Patience {
        let most_spin = if ranks <= super::cores() { 50 } else { 0 };
        Patience { spin: AtomicU32::new(most_spin), most_spin, yields: YIELDS }
    }

    /// A wait that starts now.
    pub(crate) fn start(&self) -> Waiting<'_> {
        Waiting { patience: self, checks: 0, yields: 0, spinning_since: None }
    }

    /// A wait ended while it spun: spinning pays.
    fn spun_enough(&self) {
        let spin = self.spin.load(Ordering::Relaxed);
        if spin < self.most_spin {
            self.spin.store((2 * spin).min(self.most_spin), Ordering::Relaxed);
        }
    }

    /// A wait went on to sleep: spinning was for nothing.
    fn spun_in_vain(&self) {
        let spin = self.spin.load(Ordering::Relaxed);
        self.spin.store((spin - spin / 4).max(LEAST_SPIN.min(self.most_spin)), Ordering::Relaxed);
    }
}

/// One wait under way.
pub(crate) struct Waiting<'a> {
    patience: &'a Patience,
    checks: u32,
    yields: u32,
    spinning_since: Option<Instant>,
}

impl Waiting<'_> {
    /// Call between two checks of what is waited for. True when it is time to sleep, from then on always.
    #[inline]
    pub(crate) fn pause(&mut self) -> bool {
        if self.patience.most_spin > 0 && self.yields == 0 {
            self.checks += 1;
            if !self.checks.is_multiple_of(CHECKS) || self.still_spinning() {
                hint::spin_loop();
                return false;
            }
        }
        if self.yields < self.patience.yields {
            self.yields += 1;
            thread::yield_now();
            return false;
        }
        true
    }

    #[cold]
    fn still_spinning(&mut self) -> bool {
        let since = *self.spinning_since.get_or_insert_with(Instant::now);
        since.elapsed() < Duration::from_micros(self.patience.spin.load(Ordering::Relaxed).into())
    }

    /// What was waited for has happened.
    #[inline]
    pub(crate) fn done(self) {
        if self.yields > 0 && self.patience.most_spin > 0 {
            self.patience.spun_in_vain();
        } else if self.spinning_since.is_some() {
            self.patience.spun_enough();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversubscribed_wait_sleeps_after_a_few_yields() {
        let patience = Patience::new(usize::MAX);
        let mut waiting = patience.start();
        let pauses = (0..).take_while(|_| !waiting.pause()).count();
        assert_eq!(pauses, YIELDS as usize);
        assert!(waiting.pause());
    }

    #[test]
    fn waits_that_sleep_make_later_waits_spin_less_and_the_other_way_round() {
        let patience = Patience { spin: AtomicU32::new(50), most_spin: 50, yields: YIELDS };
        for _ in 0..20 {
            let mut waiting = patience.start();
            while !waiting.pause() {}
            waiting.done();
        }
        let learnt = patience.spin.load(Ordering::Relaxed);
        assert!((LEAST_SPIN..10).contains(&learnt), "{learnt}");
        for _ in 0..10 {
            patience.spun_enough();
        }
        assert_eq!(patience.spin.load(Ordering::Relaxed), 50);
    }
}

//! How to wait for another rank: spin, then yield, then sleep.
//!
//! With a processor for every rank, a spinning rank sees a change within a tenth of a microsecond,
//! and a sleeping rank within tens of microseconds. With more ranks than processors, a spinning
//! rank keeps the awaited rank from running; then a few yields and sleep are better. How long to
//! spin also depends on other users of the machine, so it is learnt from the times that waits take.
//! Whether to yield is learnt, too: a thread that yields to a computing process gets its processor
//! back after milliseconds, and a sleeping thread is woken at once.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a communicator's waits spin and yield before they sleep.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Microseconds to spin now; between `LEAST_SPIN` and `most_spin`.
    spin: AtomicU32,
    /// 0 if there are more ranks than processors.
    most_spin: AtomicU32,
    /// How often to yield now; at most `YIELDS`.
    yields: AtomicU32,
    /// Waits that yielded or slept since another process last computed meanwhile.
    waits: AtomicU32,
}

/// Paces looks at what wakes no thread, such as a word that a device writes: without pause while it may
/// take microseconds only. `crossbeam_utils::Backoff` yields from the eighth look on, and never sleeps.
#[derive(Debug, Default)]
pub(crate) struct Backoff(Cell<u32>);

impl Backoff {
    pub(crate) fn wait(&self) {
        self.0.set(self.0.get().saturating_add(1));
        match self.0.get() {
            0..100 => hint::spin_loop(),
            100..2000 => thread::yield_now(),
            _ => thread::sleep(Duration::from_micros(50)),
        }
    }

    /// The next look is the first one for something else.
    pub(crate) fn reset(&self) {
        self.0.set(0);
    }
}

/// One wait under way.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    checks: u32,
    yields: u32,
    /// Whether yielding returned at once: no other thread wants this processor.
    is_alone: bool,
    slept: bool,
    spinning_since: Option<Instant>,
    yielding_since: Option<Instant>,
}

impl Waiting {
    /// Returns whether the wait has taken so long that reading the clock costs little in
    /// comparison.
    #[inline]
    pub(crate) fn is_long(&self) -> bool {
        self.checks >= CHECKS || self.yields > 0
    }
}

const LEAST_SPIN: u32 = 2;
const MOST_SPIN: u32 = 50;
/// For waits of this many microseconds, spinning is useless; for shorter ones it is not, even if
/// they slept. Two ranks that both sleep wake each other every 50 to 100 us, and would continue so
/// if every sleep counted against spinning. A wait for a rank without a processor takes
/// milliseconds.
const IN_VAIN: u32 = 4 * MOST_SPIN;
/// How often to yield before sleeping. With 4 ranks on 2 cores, 16 yields keep nearly all waits
/// from the futex. With 4 yields, one wait in a hundred sleeps for 40 us. More than 16 have no
/// effect.
const YIELDS: u32 = 16;
/// If a wait's yields took this long, another process computed meanwhile: other ranks take about
/// ten microseconds each.
const TAKEN: Duration = Duration::from_millis(1);
/// If a yield took less time, no other thread got the processor.
const ALONE: Duration = Duration::from_micros(1);
/// A process that computes once in so many waits changes nothing: on average, the milliseconds cost
/// each of them less than it would cost to sleep.
const RARE: u32 = 1024;
/// After this many waits without such a process, there are twice as many yields.
const AGAIN: u32 = 128;
/// After this many waits without yields, one is tried again.
const RETRY: u32 = 256;
/// Checks before the clock is read for the first time, and between readings.
const CHECKS: u32 = 32;

impl Patience {
    /// For a communicator with `ranks` ranks on this machine, which may use the same processors as
    /// this process.
    pub(crate) fn new(ranks: usize) -> Patience {
        let patience = Patience {
            spin: AtomicU32::new(0),
            most_spin: AtomicU32::new(0),
            yields: AtomicU32::new(YIELDS),
            waits: AtomicU32::new(0),
        };
        patience.set_crowded(ranks > super::cores());
        patience
    }

    /// Says whether there are more ranks than processors, so that a rank that waits keeps another
    /// one from running.
    pub(crate) fn set_crowded(&self, is_crowded: bool) {
        let most_spin = if is_crowded { 0 } else { MOST_SPIN };
        if self.most_spin.swap(most_spin, Ordering::Relaxed) != most_spin {
            self.spin.store(most_spin, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_crowded(&self) -> bool {
        self.most_spin() == 0
    }

    fn most_spin(&self) -> u32 {
        self.most_spin.load(Ordering::Relaxed)
    }

    /// To be called between two checks of the awaited condition. Returns true when it is time to
    /// sleep, and from then on.
    #[inline]
    pub(crate) fn pause(&self, waiting: &mut Waiting) -> bool {
        if self.most_spin() > 0 && (waiting.yields == 0 || waiting.is_alone) {
            waiting.checks += 1;
            if !waiting.checks.is_multiple_of(CHECKS) || self.still_spins(waiting) {
                hint::spin_loop();
                return false;
            }
        }
        if !waiting.slept && !waiting.is_alone && waiting.yields < self.yields.load(Ordering::Relaxed) {
            waiting.yielding_since.get_or_insert_with(Instant::now);
            waiting.yields += 1;
            thread::yield_now();
            return false;
        }
        // A rank that has learnt to spin little, because it shared its processor, would sleep too
        // soon when it no longer does.
        if self.most_spin() > 0
            && !waiting.is_alone
            && waiting.yielding_since.is_some_and(|since| since.elapsed() < ALONE * waiting.yields)
        {
            waiting.is_alone = true;
            return false;
        }
        if !waiting.slept {
            waiting.slept = true;
            if let Some(since) = waiting.yielding_since.take() {
                self.yielded(since);
            }
        }
        true
    }

    #[cold]
    fn still_spins(&self, waiting: &mut Waiting) -> bool {
        let since = *waiting.spinning_since.get_or_insert_with(Instant::now);
        let spin = if waiting.is_alone { self.most_spin() } else { self.spin.load(Ordering::Relaxed) };
        since.elapsed() < Duration::from_micros(spin.into())
    }

    /// Ends a wait, because the condition holds, and learns from its time. Returns whether it held only
    /// when this thread had let others run: the awaited one may share its processor.
    #[inline]
    pub(crate) fn done(&self, waiting: Waiting) -> bool {
        let is_helped_by_yielding = waiting.yields > 0 && !waiting.is_alone && !waiting.slept;
        let gave_way = is_helped_by_yielding || waiting.slept;
        if let Some(since) = waiting.yielding_since {
            self.yielded(since);
        }
        if waiting.slept || waiting.yielding_since.is_some() {
            self.waited();
        }
        let Some(since) = waiting.spinning_since else { return gave_way };
        // If yielding helped, this thread's spinning had prevented what it waits for.
        if is_helped_by_yielding || (waiting.slept && since.elapsed() >= Duration::from_micros(IN_VAIN.into())) {
            self.spun_in_vain();
        } else {
            self.spun_enough();
        }
        gave_way
    }

    /// Notes that a wait was short enough for spinning.
    fn spun_enough(&self) {
        let spin = self.spin.load(Ordering::Relaxed);
        if spin < self.most_spin() {
            self.spin.store((2 * spin).min(self.most_spin()), Ordering::Relaxed);
        }
    }

    /// Notes that a wait was too long for spinning.
    fn spun_in_vain(&self) {
        let spin = self.spin.load(Ordering::Relaxed);
        self.spin.store((spin - spin / 4).max(LEAST_SPIN.min(self.most_spin())), Ordering::Relaxed);
    }

    /// Notes that a wait has yielded since then.
    fn yielded(&self, since: Instant) {
        if since.elapsed() < TAKEN {
            return;
        }
        if self.waits.load(Ordering::Relaxed) < RARE {
            let yields = self.yields.load(Ordering::Relaxed);
            self.yields.store(yields / 4, Ordering::Relaxed);
        }
        self.waits.store(0, Ordering::Relaxed);
    }

    /// Notes that a wait has yielded or slept.
    fn waited(&self) {
        let waits = self.waits.load(Ordering::Relaxed).wrapping_add(1);
        self.waits.store(waits, Ordering::Relaxed);
        let yields = self.yields.load(Ordering::Relaxed);
        let retry = if yields == 0 { RETRY } else { AGAIN };
        if yields < YIELDS && waits.is_multiple_of(retry) {
            self.yields.store((2 * yields).clamp(1, YIELDS), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversubscribed_wait_sleeps_after_a_few_yields() {
        let patience = Patience::new(usize::MAX);
        let mut waiting = Waiting::default();
        let pauses = (0..).take_while(|_| !patience.pause(&mut waiting)).count();
        assert_eq!(pauses, YIELDS as usize);
        assert!(patience.pause(&mut waiting));
    }

    #[test]
    fn long_yields_are_given_up_and_tried_again_later() {
        let patience = Patience::new(usize::MAX);
        let yields = || patience.yields.load(Ordering::Relaxed);
        let yield_for_long = |sleeps: bool| {
            let mut waiting = Waiting { yielding_since: Instant::now().checked_sub(TAKEN), yields: 1, ..Waiting::default() };
            while sleeps && !patience.pause(&mut waiting) {}
            patience.done(waiting);
        };
        let wait = |times: u32| (0..times).for_each(|_| patience.waited());
        // The wait that yielded notes it, whether it slept or not.
        for sleeps in [true, false, true] {
            let before = yields();
            yield_for_long(sleeps);
            assert!(yields() < before, "{sleeps}");
        }
        assert_eq!(yields(), 0);
        // A yield is tried again soon, but not at once.
        wait(RETRY - 2);
        assert_eq!(yields(), 0);
        wait(2);
        assert_eq!(yields(), 1);
        yield_for_long(true);
        yield_for_long(true);
        assert_eq!(yields(), 0);
        wait(RETRY + 4 * AGAIN);
        assert_eq!(yields(), YIELDS);
        wait(RARE);
        assert_eq!(yields(), YIELDS);
        // Once in a while changes nothing.
        yield_for_long(true);
        assert_eq!(yields(), YIELDS);
    }

    #[test]
    fn long_waits_make_later_waits_spin_less_and_the_other_way_round() {
        let patience = Patience::new(1);
        let wait = |so_far| {
            let mut waiting = Waiting { spinning_since: Instant::now().checked_sub(so_far), ..Waiting::default() };
            while !patience.pause(&mut waiting) {}
            patience.done(waiting);
        };
        for _ in 0..20 {
            wait(Duration::from_secs(1));
        }
        let learnt = patience.spin.load(Ordering::Relaxed);
        assert!((LEAST_SPIN..10).contains(&learnt), "{learnt}");
        for _ in 0..10 {
            patience.spun_enough();
        }
        assert_eq!(patience.spin.load(Ordering::Relaxed), MOST_SPIN);
    }

    #[test]
    fn a_wait_that_ended_with_a_yield_counts_as_one_that_was_spun_in_vain() {
        let patience = Patience::new(1);
        let mut waiting = Waiting::default();
        while waiting.yields == 0 {
            assert!(!patience.pause(&mut waiting));
        }
        assert!(patience.done(waiting));
        assert!(patience.spin.load(Ordering::Relaxed) < MOST_SPIN);
    }

    /// Beside other processes, a rank that shares its peer's processor learns that by sleeping only: the
    /// others run when it yields.
    #[test]
    fn only_a_wait_that_yielded_or_slept_gave_way() {
        for ranks in [1, usize::MAX] {
            let patience = Patience::new(ranks);
            assert!(!patience.done(Waiting::default()));
            let mut waiting = Waiting::default();
            while !patience.pause(&mut waiting) {}
            assert!(patience.done(waiting));
        }
    }

    #[test]
    fn a_short_wait_that_slept_counts_as_one_in_which_spinning_pays() {
        let patience = Patience::new(1);
        patience.spin.store(LEAST_SPIN, Ordering::Relaxed);
        // A thread may lose its processor at any time, so not every attempt is short.
        let grew = (0..1000).any(|_| {
            let mut waiting = Waiting::default();
            while !patience.pause(&mut waiting) {}
            patience.done(waiting);
            patience.spin.load(Ordering::Relaxed) > LEAST_SPIN
        });
        assert!(grew);
    }
}

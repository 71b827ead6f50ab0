//! How ranks that share a processor, beside one that is idle, move apart.
//!
//! Ranks on one processor hand it to each other by yielding or sleeping, which takes twenty to three
//! hundred times as long as an operation of ranks with a processor each. The scheduler may leave them
//! there: it avoids moving a thread that ran a moment ago, because of the thread's caches, and it wakes
//! a rank where its peer runs if other programs compute on the other processors. So each rank tells its
//! peers on which processor it waits. If a processor has two ranks more than another one that this rank
//! may use, the highest rank there moves.

use std::time::{Duration, Instant};

use super::flag_area::FlagArea;
use super::flags::{Phases, is_reached};
use crate::sync::Ordering;
use crate::sys;

/// A rank looks at the processors in one of this many waits that yielded or slept: a rank that shares its
/// processor does so in every operation.
const WAITS: u32 = 16;
/// What a peer has told is old after this many phases.
const RECENT: u32 = 8 * WAITS;
/// The time after a look in which a rank does not look again. After a move that did not last, it
/// is twice as long as before: other processes may compute where this rank moves to.
const SETTLE: Duration = Duration::from_micros(200);
const LONGEST: Duration = Duration::from_secs(1);

/// When a rank looks at the processors of its peers, and when it may move.
#[derive(Debug)]
pub(super) struct Placement {
    waits: u32,
    looked: Option<Instant>,
    moved: Option<Instant>,
    settle: Duration,
}

impl Placement {
    pub(super) const fn new() -> Placement {
        Placement { waits: 0, looked: None, moved: None, settle: SETTLE }
    }

    fn may_look(&self, now: Instant) -> bool {
        self.looked.is_none_or(|looked| now - looked >= self.settle)
    }

    /// Notes that this rank has looked where to move.
    fn looked(&mut self, now: Instant, has_moved: bool) {
        self.looked = Some(now);
        if has_moved {
            // A move that has lasted ten times as long as it had to was a good one.
            let is_soon = self.moved.is_some_and(|moved| now - moved < 10 * self.settle);
            self.settle = if is_soon { (2 * self.settle).min(LONGEST) } else { SETTLE };
            self.moved = Some(now);
        }
    }

    /// Notes that a wait was over only when this rank had yielded or slept.
    pub(super) fn gave_way(&mut self, phases: &Phases<FlagArea>, rank: usize, ranks: usize) {
        self.waits += 1;
        if self.waits.is_multiple_of(WAITS) {
            self.move_apart(phases, rank, ranks);
        }
    }

    /// Tells the peers where this rank runs, and moves it if its processor has at least two ranks
    /// more than another one.
    #[cold]
    fn move_apart(&mut self, phases: &Phases<FlagArea>, rank: usize, ranks: usize) {
        let Some(own) = sys::processor() else { return };
        let phase = phases.next();
        // 0 is a rank that has told nothing.
        phases.lines.place(rank).store(u64::from(own + 1) << 32 | u64::from(phase), Ordering::Relaxed);
        let processor = |peer| {
            let place = phases.lines.place(peer).load(Ordering::Relaxed);
            let is_recent = is_reached(place as u32, phase.wrapping_sub(RECENT));
            ((place >> 32) as u32).checked_sub(1).filter(|_| is_recent)
        };
        let is_there = |peer| processor(peer) == Some(own);
        let is_last_of_several = (0..rank).any(is_there) && !(rank + 1..ranks).any(is_there);
        if !is_last_of_several {
            return;
        }
        let now = Instant::now();
        if !self.may_look(now) {
            return;
        }
        let load = |on| (0..ranks).filter(|&peer| processor(peer) == Some(on)).count();
        let has_moved = load(own).checked_sub(2).is_some_and(|most| sys::move_thread(most, load));
        self.looked(now, has_moved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_that_do_not_last_become_rare() {
        let (mut placement, mut now) = (Placement::new(), Instant::now());
        let mut move_after = |time: Duration| {
            now += time;
            placement.looked(now, true);
            placement.settle
        };
        assert_eq!(move_after(SETTLE), SETTLE);
        assert_eq!(move_after(2 * SETTLE), 2 * SETTLE);
        assert_eq!(move_after(3 * SETTLE), 4 * SETTLE);
        assert_eq!(move_after(40 * SETTLE), SETTLE);
        assert!((0..20).map(|_| move_after(SETTLE)).is_sorted());
        assert_eq!(move_after(SETTLE), LONGEST);
        // Looking in vain changes nothing.
        now += LONGEST;
        assert!(placement.may_look(now));
        placement.looked(now, false);
        assert_eq!(placement.settle, LONGEST);
        assert!(!placement.may_look(now + SETTLE));
    }
}

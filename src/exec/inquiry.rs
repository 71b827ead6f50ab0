//! When the ranks of a communicator ask each other whether a link has changed: at the same call, which follows
//! from what all of them know alike.

use crate::schedule::order::PairCost;

/// The least time between two questions, in nanoseconds by the costs, and as a multiple of a message's latency.
const PAUSE: u64 = 1_000_000_000;
const MESSAGES: u64 = 512;

/// How many times as long the time between two questions becomes at most.
const LONGEST: u64 = 128;

/// What one rank counts of the calls that use links. All ranks count the same.
pub(super) struct Inquiry {
    /// Bytes of the calls since the last question.
    past: u64,
    /// Bytes between two questions, now and at most.
    pause: u64,
    longest: u64,
    /// Whether pairs have to be measured again, because of what was found the last time.
    is_open: bool,
}

impl Inquiry {
    /// `link` is what one of those costs that the calls use, and `is_slower` says whether one carries less than at
    /// the start.
    pub(super) fn new(link: PairCost, is_slower: bool) -> Inquiry {
        let pause = PAUSE.max(link.latency.saturating_mul(MESSAGES)).saturating_mul(1000) / link.per_byte.max(1);
        Inquiry { past: 0, pause, longest: pause.saturating_mul(LONGEST), is_open: is_slower }
    }

    /// Counts a call. Returns whether the ranks ask before it, if they can.
    pub(super) fn is_due(&mut self, bytes: u64, can_ask: bool) -> bool {
        self.past = self.past.saturating_add(bytes);
        let is_due = can_ask && self.past >= self.pause;
        if is_due {
            self.past = 0;
        }
        is_due
    }

    /// Returns whether pairs have to be measured again.
    pub(super) fn take_open(&mut self) -> bool {
        std::mem::take(&mut self.is_open)
    }

    /// Notes that pairs were measured again, and whether all links are certain to carry what they did at the
    /// start. To measure again and again must cost little, so the next question is twice as far away.
    pub(super) fn answered(&mut self, is_as_before: bool) {
        self.pause = self.pause.saturating_mul(2).min(self.longest);
        self.is_open = !is_as_before;
    }

    /// Notes that pairs could not be measured now.
    pub(super) fn postpone(&mut self) {
        self.is_open = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 Gb/s.
    const LINK: PairCost = PairCost { latency: 50_000, per_byte: 8_000 };

    /// Returns the bytes from one question to the next, in calls of 1 MB.
    fn pause(inquiry: &mut Inquiry) -> u64 {
        (1..100_000).find(|_| inquiry.is_due(1_000_000, true)).expect("it is due some time") * 1_000_000
    }

    #[test]
    fn questions_are_rare_and_become_rarer_with_each_answer() {
        let mut inquiry = Inquiry::new(LINK, false);
        assert_eq!((pause(&mut inquiry), pause(&mut inquiry)), (125_000_000, 125_000_000), "a second");
        assert!(!inquiry.is_due(u64::MAX, false) && inquiry.is_due(0, true) && !inquiry.is_due(1, true), "at a call that can");
        inquiry.past = 0;
        inquiry.answered(true);
        assert_eq!(pause(&mut inquiry), 250_000_000);
        assert!(!inquiry.take_open());
        inquiry.answered(false);
        assert_eq!(pause(&mut inquiry), 500_000_000);
        assert!(inquiry.take_open() && !inquiry.take_open(), "a slow link is measured once more");
        (0..20).for_each(|_| inquiry.answered(true));
        assert_eq!(pause(&mut inquiry), 128 * 125_000_000);
        assert!(Inquiry::new(LINK, true).take_open(), "in a part that was made while a link was slow");
    }

    #[test]
    fn the_messages_of_a_question_take_a_small_part_of_the_time() {
        let far = PairCost { latency: 100_000_000, ..LINK };
        assert_eq!(pause(&mut Inquiry::new(far, false)), 512 * 12_500_000);
    }

    #[test]
    fn any_costs_give_some_pause() {
        for (latency, per_byte) in [(0, 0), (u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX)] {
            let mut inquiry = Inquiry::new(PairCost { latency, per_byte }, false);
            inquiry.answered(true);
            inquiry.is_due(u64::MAX, true);
            assert!(!inquiry.is_due(0, true) || inquiry.pause == 0);
        }
    }
}

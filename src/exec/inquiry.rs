//! When the ranks of a communicator ask each other whether a link has changed: at the same call, which follows
//! from what all of them know alike.

use crate::schedule::order::PairCost;

/// How long the calls between two questions take at least by the costs, in nanoseconds, and how many times as
/// long as a message.
const PAUSE: u64 = 1_000_000_000;
const MESSAGES: u64 = 512;

/// What one rank counts of the calls that use links. All ranks count the same.
pub(super) struct Inquiry {
    /// Bytes of the calls since the last question.
    past: u64,
    /// How many of them there are between two questions.
    pause: u64,
    /// Whether pairs have to be measured again, because of what was found the last time.
    is_open: bool,
}

impl Inquiry {
    /// `link` is what one of those costs that the calls use.
    pub(super) fn new(link: PairCost) -> Inquiry {
        let pause = PAUSE.max(link.latency.saturating_mul(MESSAGES));
        Inquiry { past: 0, pause: pause.saturating_mul(1000) / link.per_byte.max(1), is_open: false }
    }

    /// Counts a call. Returns whether the ranks ask before it.
    pub(super) fn is_due(&mut self, bytes: u64) -> bool {
        self.past = self.past.saturating_add(bytes);
        let is_due = self.past >= self.pause;
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
        self.pause = self.pause.saturating_mul(2);
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
        (1..100_000).find(|_| inquiry.is_due(1_000_000)).expect("it is due some time") * 1_000_000
    }

    #[test]
    fn questions_are_rare_and_become_rarer_with_each_answer() {
        let mut inquiry = Inquiry::new(LINK);
        assert_eq!((pause(&mut inquiry), pause(&mut inquiry)), (125_000_000, 125_000_000), "a second");
        assert!(inquiry.is_due(u64::MAX) && !inquiry.is_due(1));
        inquiry.past = 0;
        inquiry.answered(true);
        assert_eq!(pause(&mut inquiry), 250_000_000);
        assert!(!inquiry.take_open());
        inquiry.answered(false);
        assert_eq!(pause(&mut inquiry), 500_000_000);
        assert!(inquiry.take_open() && !inquiry.take_open(), "a slow link is measured once more");
    }

    #[test]
    fn the_messages_of_a_question_take_a_small_part_of_the_time() {
        let far = PairCost { latency: 100_000_000, ..LINK };
        assert_eq!(pause(&mut Inquiry::new(far)), 512 * 12_500_000);
    }

    #[test]
    fn any_costs_give_some_pause() {
        for (latency, per_byte) in [(0, 0), (u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX)] {
            let mut inquiry = Inquiry::new(PairCost { latency, per_byte });
            inquiry.answered(true);
            inquiry.is_due(u64::MAX);
            assert!(!inquiry.is_due(0) || inquiry.pause == 0);
        }
    }
}

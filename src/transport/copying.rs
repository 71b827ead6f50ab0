//! How a producer copies messages to its ring: through the caches, or past them.
//!
//! Two processors that share a cache pass a line on in some nanoseconds. Two that share none take ten times
//! as long to hand a line back that the other one has read, and then memory is faster: lines that are
//! written past the caches are the reader's at once. Which of the two holds depends on where the
//! scheduler, or a hypervisor, has placed the ranks, and changes. So a producer measures now and then
//! how long its copies take, and takes the faster way.

use std::ops::Range;

use crate::config::CopyMode;
use crate::reduce;
use crate::sys::ticks;

/// From this many bytes on, a message may pass the caches by: the handful of lines of a shorter one is
/// there as soon by either way.
pub(super) const LEAST: usize = 4 << 10;

/// The fewest bytes of each size for which copies are measured apart. What no longer fits in a cache takes
/// another time by either way.
const SIZES: [usize; 3] = [LEAST, 256 << 10, 8 << 20];

/// Of so many messages, the copy of one is timed.
const TIMED: u32 = 16;

/// Of so many messages, one takes the way that was slower: it may be the faster one now. A power of two.
const TRIED: u32 = 256;

/// How often each way is tried at first.
const AT_FIRST: u32 = 2;

/// How one message is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    size: usize,
    is_streamed: bool,
    is_timed: bool,
}

impl Way {
    const SHORT: Way = Way { size: 0, is_streamed: false, is_timed: false };

    /// Whether the lines of the ring come to this processor's caches.
    pub(super) fn is_by_caches(self) -> bool {
        !self.is_streamed
    }

    /// Returns when the copy began, if it is timed.
    pub(super) fn begin(self) -> Option<u64> {
        self.is_timed.then(ticks)
    }

    /// Copies a part of the message.
    ///
    /// # Safety
    ///
    /// As for [`reduce::copy`].
    #[inline]
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: passed on.
        unsafe {
            match self.is_streamed && len >= LEAST / 2 {
                true => reduce::copy_streaming(from, to, len),
                false => reduce::copy(from, to, len),
            }
        }
    }
}

/// What one producer knows of its copies.
#[derive(Debug)]
pub(super) struct Copying {
    copy_mode: CopyMode,
    /// By size.
    measured: [Measured; SIZES.len()],
    /// The message that is timed and that the consumer has not read yet.
    timed: Option<Timed>,
}

/// A message whose copy to the ring was timed.
#[derive(Debug)]
struct Timed {
    way: Way,
    bytes: u64,
    /// Where it ends in the stream.
    to: u64,
    ticks: u64,
}

/// Messages of one size.
#[derive(Debug, Default)]
struct Measured {
    /// How many there were while no other was timed.
    messages: u32,
    is_streamed: bool,
    /// The last two times for 1,024 bytes, through the caches and past them; 0 for one that was not measured.
    /// The shorter one counts: in the other, something else may have come between.
    ticks: [[u32; 2]; 2],
}

impl Copying {
    pub(super) fn new(copy_mode: CopyMode) -> Copying {
        Copying { copy_mode, measured: Default::default(), timed: None }
    }

    /// Chooses how the next `part` bytes are copied of a message of which `left` bytes are left. `read`
    /// returns the end of the part that the consumer has timed last, and its ticks.
    #[inline]
    pub(super) fn way(&mut self, left: usize, part: usize, read: impl FnOnce() -> (u64, u64)) -> Way {
        if part < LEAST {
            return Way::SHORT;
        }
        let size = SIZES.iter().skip(1).filter(|&&least| left >= least).count();
        match self.copy_mode {
            CopyMode::Auto | CopyMode::Cma => {
                self.learn(read);
                let measured = &mut self.measured[size];
                match self.timed {
                    None => measured.next(size),
                    Some(_) => Way { size, is_streamed: measured.is_streamed, is_timed: false },
                }
            }
            mode => Way { is_streamed: mode == CopyMode::Streamed, ..Way::SHORT },
        }
    }

    /// Takes when the copy of a message began, which has just ended, and where it is in the stream.
    #[inline]
    pub(super) fn ended(&mut self, way: Way, began: Option<u64>, at: Range<u64>) {
        if let Some(began) = began {
            let (bytes, to) = (at.end - at.start, at.end);
            self.timed = Some(Timed { way, bytes, to, ticks: ticks().wrapping_sub(began) });
        }
    }

    /// Takes both times of a message, once the consumer has read it.
    #[inline]
    fn learn(&mut self, read: impl FnOnce() -> (u64, u64)) {
        let Some(Timed { way, bytes, to, ticks }) = &self.timed else { return };
        let (read_to, read_ticks) = read();
        if read_to >= *to {
            // Of a message that came in small pieces, no piece was timed.
            if read_ticks > 0 {
                let ticks = ticks.saturating_add(read_ticks).saturating_mul(1024) / bytes;
                self.measured[way.size].took(way.is_streamed, ticks);
            }
            self.timed = None;
        }
    }
}

impl Measured {
    fn next(&mut self, size: usize) -> Way {
        let number = self.messages;
        self.messages = number.wrapping_add(1);
        // At first, nothing is known of either way.
        let is_first = number < 2 * AT_FIRST;
        let tries = number % TRIED == TRIED - 1;
        let is_streamed = if is_first { number % 2 == 1 } else { self.is_streamed != tries };
        Way { size, is_streamed, is_timed: is_first || tries || number.is_multiple_of(TIMED) }
    }

    fn took(&mut self, is_streamed: bool, ticks: u64) {
        let [latest, before] = &mut self.ticks[usize::from(is_streamed)];
        (*latest, *before) = (u32::try_from(ticks).unwrap_or(u32::MAX).max(1), *latest);
        let least = |[a, b]: [u32; 2]| if b == 0 { a } else { a.min(b) };
        let [cached, streamed] = self.ticks.map(least);
        self.is_streamed = streamed != 0 && streamed < cached;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends messages of which a KiB takes so many ticks through the caches and past them. Returns how many
    /// of them passed the caches.
    fn send(copying: &mut Copying, bytes: usize, messages: u32, ticks: [u64; 2]) -> u32 {
        let mut streamed = 0;
        for _ in 0..messages {
            let read = copying.timed.as_ref().map_or(0, |timed| timed.to);
            let way = copying.way(bytes, bytes, || (read, 1));
            streamed += u32::from(way.is_streamed);
            if way.is_timed {
                let ticks = ticks[usize::from(way.is_streamed)] * (bytes as u64 / 1024);
                copying.timed = Some(Timed { way, bytes: bytes as u64, to: read + bytes as u64, ticks });
            }
        }
        streamed
    }

    #[test]
    fn messages_take_the_faster_way_also_when_it_changes() {
        const ROUND: u32 = 4 * TRIED;
        let (near, far) = ([100, 200], [700, 200]);
        for bytes in SIZES {
            let mut copying = Copying::new(CopyMode::Auto);
            // Only what is tried takes the slower way.
            assert_eq!(send(&mut copying, bytes, ROUND, near), AT_FIRST + ROUND / TRIED, "{bytes}");
            let late = ROUND - send(&mut copying, bytes, ROUND, far);
            assert!(late <= 2 * TIMED + ROUND / TRIED, "{bytes}: {late} through the caches");
            let back = send(&mut copying, bytes, ROUND, near);
            assert!(back <= 3 * TRIED, "{bytes}: {back} past the caches");
        }
    }

    /// A copy during which something else ran says nothing of its way.
    #[test]
    fn one_slow_copy_changes_nothing() {
        let mut copying = Copying::new(CopyMode::Auto);
        send(&mut copying, LEAST, TRIED, [100, 200]);
        send(&mut copying, LEAST, 1, [90_000, 90_000]);
        assert_eq!(send(&mut copying, LEAST, TIMED, [100, 200]), 0);
    }

    /// What no reader has timed is not waited for by other messages, and not asked for twice.
    #[test]
    fn an_unread_message_holds_nothing_up() {
        let mut copying = Copying::new(CopyMode::Auto);
        let way = copying.way(LEAST, LEAST, || unreachable!("nothing is timed"));
        assert!(way.is_timed);
        copying.ended(way, Some(0), 0..LEAST as u64);
        for _ in 0..4 * TRIED {
            let way = copying.way(LEAST, LEAST, || (0, 0));
            assert!(!way.is_timed && !way.is_streamed);
        }
    }

    #[test]
    fn short_messages_and_set_modes_measure_nothing() {
        for (mode, bytes, is_streamed) in [
            (CopyMode::Auto, LEAST - 1, false),
            (CopyMode::Streamed, LEAST - 1, false),
            (CopyMode::Streamed, LEAST, true),
            (CopyMode::Staged, 1 << 20, false),
        ] {
            let mut copying = Copying::new(mode);
            for _ in 0..2 * TRIED {
                let way = copying.way(bytes, bytes, || unreachable!("nothing is timed"));
                assert_eq!((way.is_streamed, way.is_timed), (is_streamed, false), "{mode}, {bytes} bytes");
            }
        }
    }
}

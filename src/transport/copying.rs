//! How a producer copies messages to its ring: through the caches, or past them (*streamed*).
//!
//! Two processors that share a cache pass a line on in some nanoseconds. Two that share none take ten times
//! as long to hand back a line that the other one has read, and then memory is faster: lines that are
//! written past the caches are the consumer's at once. Which of the two holds depends on where the
//! scheduler, or a hypervisor, has placed the ranks, and changes. So a producer autotunes: now and then it
//! measures how long it takes to write a part of a message, and has the consumer measure how long it takes
//! to read it. It takes the way whose sum is less.

use std::ops::Range;

use crate::config::CopyMode;
use crate::reduce;
use crate::sys::ticks;

/// From this many bytes on, a part may be streamed: the handful of lines of a shorter one is there as soon by
/// either way.
pub(super) const LEAST: usize = 4 << 10;

/// The fewest bytes of each size for which copies are measured apart, by what is left of the message. What no
/// longer fits in a cache takes another time by either way.
const SIZES: [usize; 3] = [LEAST, 256 << 10, 8 << 20];

/// Times one part in this many.
const TIMED: u32 = 16;

/// One part in this many takes the way that was slower: it may be the faster one now.
const TRIED: u32 = 256;

/// How one part of a message is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    size: usize,
    pub(super) is_streamed: bool,
    is_timed: bool,
}

impl Way {
    const SHORT: Way = Way { size: 0, is_streamed: false, is_timed: false };

    /// Returns when the copy began, if it is timed.
    pub(super) fn begin(self) -> Option<u64> {
        self.is_timed.then(ticks)
    }

    /// Copies a piece of the part.
    ///
    /// # Safety
    ///
    /// As for [`reduce::copy`].
    #[inline]
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: passed on.
        unsafe {
            // A header is of a line or two, which its consumer reads at once.
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
    /// The part that is timed and that the consumer has not read yet.
    timed: Option<Timed>,
}

/// A part whose copy to the ring was timed.
#[derive(Debug)]
struct Timed {
    way: Way,
    bytes: u64,
    /// Where it ends in the stream.
    to: u64,
    ticks: u64,
}

/// Parts of messages of one size.
#[derive(Debug, Default)]
struct Measured {
    /// How many there were while no other was timed.
    parts: u32,
    is_streamed: bool,
    /// The last two times for 1,024 bytes, through the caches and streamed; 0 for one that was not measured.
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

    /// Takes when the copy of a part began, which has just ended, and where it is in the stream.
    #[inline]
    pub(super) fn ended(&mut self, way: Way, began: Option<u64>, at: Range<u64>) {
        if let Some(began) = began {
            let (bytes, to) = (at.end - at.start, at.end);
            self.timed = Some(Timed { way, bytes, to, ticks: ticks().saturating_sub(began) });
        }
    }

    /// Takes both times of a part, once the consumer has read it.
    #[inline]
    fn learn(&mut self, read: impl FnOnce() -> (u64, u64)) {
        let Some(Timed { way, bytes, to, ticks }) = &self.timed else { return };
        let (read_to, read_ticks) = read();
        if read_to >= *to {
            // Of a part that was read in small pieces, no piece was timed.
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
        let [cached, streamed] = self.ticks.map(|ticks| ticks.iter().filter(|&&ticks| ticks > 0).count());
        if cached.min(streamed) < 2 {
            // At first, both ways in turns.
            return Way { size, is_streamed: streamed < cached, is_timed: true };
        }
        let number = self.parts;
        self.parts = number.wrapping_add(1);
        let tries = number % TRIED == TRIED - 1;
        Way { size, is_streamed: self.is_streamed != tries, is_timed: tries || number.is_multiple_of(TIMED) }
    }

    fn took(&mut self, is_streamed: bool, ticks: u64) {
        let [latest, before] = &mut self.ticks[usize::from(is_streamed)];
        (*latest, *before) = (u32::try_from(ticks).unwrap_or(u32::MAX).max(1), *latest);
        let least = |[a, b]: [u32; 2]| if b == 0 { a } else { a.min(b) };
        let [cached, streamed] = self.ticks.map(least);
        self.is_streamed = streamed < cached;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends messages, of which a KiB takes these ticks through the caches and streamed. Returns how many were
    /// streamed.
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
            let tried = send(&mut copying, bytes, ROUND, near);
            assert!((1..=2 + ROUND / TRIED).contains(&tried), "{bytes}: {tried} streamed");
            let late = ROUND - send(&mut copying, bytes, ROUND, far);
            assert!(late <= 2 * TIMED + ROUND / TRIED, "{bytes}: {late} through the caches");
            let back = send(&mut copying, bytes, ROUND, near);
            assert!(back <= 3 * TRIED, "{bytes}: {back} streamed");
        }
    }

    /// A copy during which something else ran says nothing of its way.
    #[test]
    fn one_slow_copy_changes_nothing() {
        let mut copying = Copying::new(CopyMode::Auto);
        send(&mut copying, LEAST, TRIED - TIMED, [100, 200]);
        for slow in [0, 1] {
            let mut ticks = [100, 200];
            ticks[slow] = 90_000;
            let timed = |copying: &Copying| copying.measured[0].ticks[slow][0] > 50_000;
            for _ in 0..2 * TRIED {
                if timed(&copying) {
                    break;
                }
                send(&mut copying, LEAST, 1, ticks);
            }
            assert!(timed(&copying) && !copying.measured[0].is_streamed, "{slow}: {copying:?}");
        }
    }

    /// What the consumer has not read is not waited for by other messages, and not asked for twice. What it has
    /// read in small pieces is not counted.
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
        let again = copying.way(LEAST, LEAST, || (LEAST as u64, 0));
        assert_eq!((again, copying.measured[0].ticks), (way, [[0; 2]; 2]));
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

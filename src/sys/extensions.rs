//! The table of the extensions of shared memory, where the system cannot make the memory larger.
//!
//! Such memory is made with the addresses of its extensions. Its processes note in a table which of
//! them exist.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The room of the memory is this many times what its processes are expected to extend it to.
pub(super) const MORE: usize = 8;

/// The bytes of which extensions consist.
pub(super) const UNIT: usize = 1 << 20;

const WORDS: usize = 512;

/// A bit for each unit that a process has extended the memory by. It starts as zeros, and all
/// processes access it through atomics.
#[repr(C)]
pub(super) struct Extensions([AtomicU64; WORDS]);

impl Extensions {
    /// Fails with `OutOfMemory` if the table cannot describe an extension.
    pub(super) fn check(range: &Range<usize>) -> io::Result<()> {
        units(range).map(drop).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Notes that the memory has been extended by a range. From now on other processes find it.
    pub(super) fn add(&self, range: &Range<usize>) {
        units(range).into_iter().flatten().for_each(|(word, bit)| _ = self.0[word].fetch_or(bit, Ordering::AcqRel));
    }

    /// Returns whether the memory has been extended by a range.
    pub(super) fn contain(&self, range: &Range<usize>) -> bool {
        let is_extended = |(word, bit): (usize, u64)| self.0[word].load(Ordering::Acquire) & bit != 0;
        units(range).is_some_and(|mut units| units.all(is_extended))
    }
}

/// Returns where the bit of each unit of a range is: the word, and the bit there. `None` if the
/// range does not consist of units for which there are bits.
fn units(range: &Range<usize>) -> Option<impl Iterator<Item = (usize, u64)> + use<>> {
    const BITS: usize = u64::BITS as usize;
    let (first, end) = (range.start / UNIT, range.end / UNIT);
    let fits = range.start.is_multiple_of(UNIT) && range.end.is_multiple_of(UNIT) && end <= WORDS * BITS;
    fits.then(|| (first..end).map(|unit| (unit / BITS, 1 << (unit % BITS))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_found_once_all_its_units_were_added() {
        let table = Extensions([const { AtomicU64::new(0) }; WORDS]);
        let range = |units: Range<usize>| units.start * UNIT..units.end * UNIT;
        table.add(&range(63..65));
        assert!(table.contain(&range(63..65)) && table.contain(&range(64..65)));
        assert!(!table.contain(&range(62..64)) && !table.contain(&range(64..66)));
        // Parts of units, and units behind the table, are refused.
        let wrong = [0..1, 1..UNIT, range(WORDS * 64..WORDS * 64 + 1)];
        assert!(wrong.iter().all(|range| Extensions::check(range).is_err() && !table.contain(range)));
        assert!(Extensions::check(&range(WORDS * 64 - 1..WORDS * 64)).is_ok());
    }
}

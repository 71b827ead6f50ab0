//! What is known about the copy modes of this machine. [`super::autotune`] measures it.

use crate::config::CopyMode;

/// What an operation does with its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// An all-reduce reduces it.
    Reduced = 0,
    /// An all-gather or all-to-all copies it from each rank to its peers.
    Copied = 1,
    /// A broadcast or scatter copies it from one rank to its peers.
    Spread = 2,
}

/// The number of kinds of traffic.
const TRAFFICS: usize = 3;

/// The number of sizes for which copy modes are measured apart.
pub(super) const SIZES: usize = 2;

impl Traffic {
    /// From this many bytes on, a buffer is large, and staging may not be the fastest copy mode.
    pub(super) const fn large(self) -> usize {
        match self {
            Traffic::Reduced => 1 << 20,
            Traffic::Copied | Traffic::Spread => 64 << 10,
        }
    }

    /// From this many bytes on, another copy mode may be the fastest: reduced data no longer fits
    /// the caches of most processors.
    const fn very_large(self) -> usize {
        match self {
            Traffic::Reduced => 8 << 20,
            Traffic::Copied | Traffic::Spread => 1 << 20,
        }
    }

    /// Bytes of the buffers with which copy modes are measured: one for large buffers, one for very
    /// large ones.
    pub(super) const fn measured(self) -> [usize; SIZES] {
        match self {
            Traffic::Reduced => [self.large(), 2 * self.very_large()],
            Traffic::Copied | Traffic::Spread => [2 * self.large(), self.very_large()],
        }
    }

    /// The size of a buffer of `bytes`, from 0.
    pub(super) const fn size(self, bytes: usize) -> usize {
        (bytes >= self.very_large()) as usize
    }
}

/// From this many bytes on, copied data is staged: reading 64 MiB by cma takes a third longer than
/// staging it with non-temporal copies.
const STAGED_COPIES: usize = 8 << 20;

/// The copy modes for large private buffers, as far as they are known.
pub(crate) struct Autotune {
    /// The copy mode of the settings.
    pub(super) wanted: CopyMode,
    /// The fastest copy mode by traffic and size; `Auto` until it is measured.
    pub(super) measured: [[CopyMode; SIZES]; TRAFFICS],
    /// Whether all ranks can read each other's memory; `None` until they have tried.
    pub(super) may_read: Option<bool>,
    /// Bytes over all ranks up to which one phase is faster than two; `None` until it is measured.
    pub(super) one_shot: Option<usize>,
}

impl Autotune {
    pub(crate) fn new(wanted: CopyMode) -> Autotune {
        Autotune { wanted, measured: [[CopyMode::Auto; SIZES]; TRAFFICS], may_read: None, one_shot: None }
    }

    /// The same, with what the same ranks have measured before, in the form of
    /// [`Autotune::encode`].
    pub(crate) fn with_tuning(wanted: CopyMode, tuning: Option<u64>) -> Autotune {
        let mut autotune = Autotune::new(wanted);
        let Some(word) = tuning else { return autotune };
        let mut bits = (0..).step_by(2).map(|shift| (word >> shift & 3) as u8);
        let mut next = || bits.next().unwrap_or_default();
        for measured in autotune.measured.iter_mut().flatten() {
            *measured = CopyMode::from_number(next()).unwrap_or(CopyMode::Auto);
        }
        autotune.may_read = next().checked_sub(1).map(|may| may != 0);
        autotune.one_shot = usize::try_from(word >> 32).ok().filter(|&limit| limit > 0);
        autotune
    }

    /// Returns what is known, in one word.
    pub(crate) fn encode(&self) -> u64 {
        let may_read = self.may_read.map_or(0, |may| 1 + u64::from(may));
        let bits = self.measured.iter().flatten().map(|&mode| mode as u64).chain([may_read]);
        let one_shot = (self.one_shot.unwrap_or(0) as u64) << 32;
        bits.enumerate().fold(one_shot, |word, (at, bits)| word | bits << (2 * at))
    }

    /// Whether the limit of one phase has been measured.
    #[cfg(test)]
    pub(super) fn has_measured_one_shot(&self) -> bool {
        self.one_shot.is_some()
    }

    /// Returns the copy mode for a buffer, if it need not be measured.
    pub(super) fn known(&self, traffic: Traffic, bytes: usize) -> Option<CopyMode> {
        let copy_mode = match (self.wanted, self.may_read) {
            _ if bytes < traffic.large() => CopyMode::Staged,
            (CopyMode::Auto, _) if traffic != Traffic::Reduced && bytes >= STAGED_COPIES => CopyMode::Staged,
            (CopyMode::Auto, _) => self.measured[traffic as usize][traffic.size(bytes)],
            (CopyMode::Cma, None) => CopyMode::Auto,
            (CopyMode::Cma, Some(false)) => CopyMode::Staged,
            (wanted, _) => wanted,
        };
        (copy_mode != CopyMode::Auto).then_some(copy_mode)
    }
}

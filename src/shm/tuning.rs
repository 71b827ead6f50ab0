//! What is known of how private buffers pass on this machine. [`super::autotune`] finds it out.

use crate::config::CopyMode;

/// From so many bytes on a buffer is large.
pub(super) const LARGE: usize = 1 << 20;

/// From so many bytes on it is too large for the caches of most processors, and other ways may be quicker.
const VERY_LARGE: usize = 8 << 20;

/// Bytes of the buffer with which ways are tried: one of the large, one of the very large.
pub(super) const TRIED: [usize; 2] = [LARGE, 2 * VERY_LARGE];

/// What an operation does with the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// All-reduces it.
    Reduced = 0,
    /// Gives it to all others as it is.
    Copied = 1,
}

/// What is known of how large private buffers pass.
pub(crate) struct Autotune {
    /// What the settings say.
    pub(super) wanted: CopyMode,
    /// What the trials have said, by traffic and size; `Auto` until then.
    pub(super) tried: [[CopyMode; TRIED.len()]; 2],
    /// Whether all ranks can read each other's memory; `None` until that has been tried.
    pub(super) may_read: Option<bool>,
    /// Bytes over all ranks up to which one phase is quicker than two; `None` until that has been tried.
    pub(super) one_shot: Option<usize>,
}

impl Autotune {
    pub(crate) fn new(wanted: CopyMode) -> Autotune {
        Autotune { wanted, tried: [[CopyMode::Auto; TRIED.len()]; 2], may_read: None, one_shot: None }
    }

    /// The same, with what the same ranks have found out before, as [`Autotune::encode`] says it.
    pub(crate) fn with_tuning(wanted: CopyMode, tuning: Option<u64>) -> Autotune {
        let mut autotune = Autotune::new(wanted);
        let Some(word) = tuning else { return autotune };
        let mut bits = (0..).step_by(2).map(|shift| (word >> shift & 3) as u8);
        let mut next = || bits.next().unwrap_or_default();
        for tried in autotune.tried.iter_mut().flatten() {
            *tried = CopyMode::from_number(next()).unwrap_or(CopyMode::Auto);
        }
        autotune.may_read = next().checked_sub(1).map(|may| may != 0);
        autotune.one_shot = usize::try_from(word >> 32).ok().filter(|&limit| limit > 0);
        autotune
    }

    /// What is known, in one word.
    pub(crate) fn encode(&self) -> u64 {
        let may_read = self.may_read.map_or(0, |may| 1 + u64::from(may));
        let bits = self.tried.iter().flatten().map(|&tried| tried as u64).chain([may_read]);
        let one_shot = (self.one_shot.unwrap_or(0) as u64) << 32;
        bits.enumerate().fold(one_shot, |word, (at, bits)| word | bits << (2 * at))
    }

    /// Whether it is known up to which size one phase is quicker than two.
    #[cfg(test)]
    pub(super) fn has_tried_one_shot(&self) -> bool {
        self.one_shot.is_some()
    }

    /// How a buffer passes, if that need not be tried.
    pub(super) fn known(&self, traffic: Traffic, bytes: usize) -> Option<CopyMode> {
        let copy_mode = match (self.wanted, self.may_read) {
            _ if bytes < LARGE => CopyMode::Staged,
            // Read, 64 MiB take a third longer than past the caches through slots.
            (CopyMode::Auto, _) if traffic == Traffic::Copied && bytes >= VERY_LARGE => CopyMode::Staged,
            (CopyMode::Auto, _) => self.tried[traffic as usize][size(bytes)],
            (CopyMode::Cma, None) => CopyMode::Auto,
            (CopyMode::Cma, Some(false)) => CopyMode::Staged,
            (wanted, _) => wanted,
        };
        (copy_mode != CopyMode::Auto).then_some(copy_mode)
    }
}

pub(super) fn size(bytes: usize) -> usize {
    usize::from(bytes >= VERY_LARGE)
}

//! What is known about the copy modes of this machine. [`super::autotune`] measures it.

use std::time::{Duration, Instant};

use crate::call::Call;
use crate::config::CopyMode;
use crate::types::{DType, Op, ReduceOp};

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
pub(super) const SIZES: usize = 3;

/// From this many bytes on, in the buffer or in all blocks together, ranks tell each other what is
/// registered, and staging may not be the fastest copy mode: ranks whose processors share no cache hand the
/// lines of a slot to and fro, and take three times as long as if they streamed.
pub(super) const LARGE: usize = 32 << 10;

/// From this many bytes on, what is not large is streamed if the smallest large buffers are.
const SHORT: usize = 4 << 10;

/// Bytes of the buffers with which the copy modes of each size are measured.
pub(super) const MEASURED: [usize; SIZES] = [64 << 10, 1 << 20, 16 << 20];

impl Traffic {
    pub(super) const fn of(op: Op) -> Traffic {
        match op {
            Op::Broadcast | Op::Scatter => Traffic::Spread,
            op if op.reduces() => Traffic::Reduced,
            _ => Traffic::Copied,
        }
    }

    /// The fewest bytes of each size. From the third on, data no longer fits the caches of most
    /// processors.
    const fn sizes(self) -> [usize; SIZES] {
        match self {
            Traffic::Reduced => [LARGE, 256 << 10, 8 << 20],
            Traffic::Copied | Traffic::Spread => [LARGE, 1 << 20, 8 << 20],
        }
    }

    /// The size of a buffer of `bytes`, from 0.
    pub(super) const fn size(self, bytes: usize) -> usize {
        let [_, second, third] = self.sizes();
        (bytes >= second) as usize + (bytes >= third) as usize
    }
}

/// A copy mode is measured again after operations that take this many times as long as the
/// measurement.
const AGAIN_AFTER: f64 = 100.0;

/// How many times rarer measurements become while nothing changes.
const MOST_RARE: u32 = 64;

/// Operations until a copy mode is measured again that another communicator has measured.
const AGAIN_AFTER_OTHERS: u32 = 10_000;

/// The fastest copy mode for one traffic and size. It is measured again from time to time: a
/// scheduler or a hypervisor moves ranks to processors that share a cache, or apart. All ranks
/// count the same operations, so they measure in the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Measured {
    /// `Auto` until it is measured.
    copy_mode: CopyMode,
    /// Operations until it is measured again.
    left: u32,
    /// How many these were after the last measurement.
    interval: u32,
}

impl Measured {
    fn new(copy_mode: CopyMode) -> Measured {
        Measured { copy_mode, left: AGAIN_AFTER_OTHERS, interval: AGAIN_AFTER_OTHERS }
    }

    /// Takes the result of a measurement. `cost` is how many operations take as long as that
    /// measurement: the same number on all ranks. Measurements become rare while nothing changes.
    fn set(&mut self, copy_mode: CopyMode, cost: f64) {
        let first = (AGAIN_AFTER * cost) as u32;
        self.interval = match copy_mode == self.copy_mode {
            true => self.interval.saturating_mul(2).clamp(first, first.saturating_mul(MOST_RARE)),
            false => first,
        };
        self.copy_mode = copy_mode;
        self.left = self.interval;
    }
}

/// A rank judges a pace by the quickest of this many operations: in the others it may have waited for a
/// late peer.
const JUDGED: u32 = 8;

/// A rank doubts the copy mode if its operations take this many times as long as they did after the last
/// measurement, or this part of the time. Far processors take three times as long as near ones, and more.
const CHANGE: f32 = 1.7;

/// A rank does not doubt what was measured in the first of this many parts of the operations until the next
/// measurement: of ten operations, at most the time of one goes into measuring. While measurements find
/// nothing new, these operations are more and more, and doubts become rare.
const TRUSTED: u32 = 10;

/// Calls that take about as long as each other while the processors stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alike {
    op: Op,
    dtype: DType,
    redop: Option<ReduceOp>,
    bytes: usize,
}

impl Alike {
    pub(super) fn new(call: &Call, bytes: usize) -> Alike {
        Alike { op: call.op, dtype: call.dtype, redop: call.redop, bytes }
    }
}

/// How long calls take that are alike.
#[derive(Clone, Copy, Debug)]
struct Pace {
    of: Alike,
    /// The least time after the last measurement; `None` until that is known.
    at_first: Option<Duration>,
    /// The least time since the last judgement, and of how many operations.
    least: Duration,
    operations: u32,
}

impl Pace {
    fn new(of: Alike) -> Pace {
        Pace { of, at_first: None, least: Duration::MAX, operations: 0 }
    }

    /// Counts an operation. Returns whether the latest ones took another time than the first.
    fn is_changed_by(&mut self, took: Duration) -> bool {
        self.least = self.least.min(took);
        self.operations += 1;
        if self.operations < JUDGED {
            return false;
        }
        self.operations = 0;
        let least = std::mem::replace(&mut self.least, Duration::MAX);
        let at_first = *self.at_first.get_or_insert(least);
        least > at_first.mul_f32(CHANGE) || at_first > least.mul_f32(CHANGE)
    }
}

/// The paces that are kept. A program that makes more kinds of calls in turns has none that is judged, and
/// waits for the next measurement.
const PACES: usize = 16;

/// The copy modes for large private buffers, as far as they are known.
pub(crate) struct Autotune {
    /// The copy mode of the settings.
    pub(super) wanted: CopyMode,
    /// By traffic and size.
    measured: [[Measured; SIZES]; TRAFFICS],
    /// On this rank: its peers may find other times. The latest ones, the next to be replaced at
    /// `oldest` once they are [`PACES`].
    paces: Vec<Pace>,
    oldest: usize,
    /// Whether this rank asks its peers to measure again, in the operation under way.
    doubts: bool,
    /// By traffic and size, whether this rank has found another pace since the last measurement.
    changed: [[bool; SIZES]; TRAFFICS],
    /// Whether all ranks can read each other's memory; `None` until they have tried.
    pub(super) may_read: Option<bool>,
}

impl Autotune {
    pub(crate) fn new(wanted: CopyMode) -> Autotune {
        let measured = [[Measured::new(CopyMode::Auto); SIZES]; TRAFFICS];
        let (paces, changed) = (Vec::with_capacity(PACES), [[false; SIZES]; TRAFFICS]);
        Autotune { wanted, measured, paces, oldest: 0, doubts: false, changed, may_read: None }
    }

    /// The same, with what the same ranks have measured before, in the form of
    /// [`Autotune::encode`].
    pub(crate) fn with_tuning(wanted: CopyMode, tuning: Option<u64>) -> Autotune {
        let mut autotune = Autotune::new(wanted);
        let Some(word) = tuning else { return autotune };
        let mut bits = (0..).step_by(2).map(|shift| (word >> shift & 3) as u8);
        let mut next = || bits.next().unwrap_or_default();
        for measured in autotune.measured.iter_mut().flatten() {
            *measured = Measured::new(CopyMode::from_number(next()).unwrap_or(CopyMode::Auto));
        }
        autotune.may_read = next().checked_sub(1).map(|may| may != 0);
        autotune
    }

    /// Returns what is known, in one word.
    pub(crate) fn encode(&self) -> u64 {
        let may_read = self.may_read.map_or(0, |may| 1 + u64::from(may));
        let bits = self.measured.iter().flatten().map(|measured| measured.copy_mode as u64).chain([may_read]);
        bits.enumerate().fold(0, |word, (at, bits)| word | bits << (2 * at))
    }

    /// Operations until a copy mode is measured again.
    #[cfg(test)]
    pub(super) fn left(&self, traffic: Traffic, bytes: usize) -> u32 {
        self.measured[traffic as usize][traffic.size(bytes)].left
    }

    /// As [`Autotune::known`], at the beginning of an operation, which counts.
    pub(super) fn count(&mut self, traffic: Traffic, bytes: usize) -> Option<CopyMode> {
        let measured = &mut self.measured[traffic as usize][traffic.size(bytes)];
        // In a broadcast or scatter the root does not wait for its peers. A measurement would.
        if traffic != Traffic::Spread && bytes >= LARGE && measured.copy_mode != CopyMode::Auto {
            measured.left = measured.left.saturating_sub(1);
        }
        let is_trusted = measured.interval - measured.left < measured.interval / TRUSTED;
        // What is measured in this operation anyway need not be doubted.
        self.doubts = self.changed[traffic as usize][traffic.size(bytes)] && !is_trusted && measured.left > 0;
        self.known(traffic, bytes)
    }

    /// Whether this rank doubts the copy mode of the operation under way.
    pub(super) fn doubts(&self) -> bool {
        self.doubts
    }

    /// Has this rank find, or not, that operations take another time than before.
    #[cfg(test)]
    pub(super) fn pretend_changed(&mut self, traffic: Traffic, bytes: usize, is_changed: bool) {
        self.changed[traffic as usize][traffic.size(bytes)] = is_changed;
    }

    /// Has the copy mode measured in the next operation of this kind. All ranks do so in the same one.
    pub(super) fn expire(&mut self, traffic: Traffic, bytes: usize) {
        self.measured[traffic as usize][traffic.size(bytes)].left = 0;
    }

    /// Whether it matters how long an operation takes. The same on all ranks.
    pub(super) fn is_timed(&self, bytes: usize) -> bool {
        self.wanted == CopyMode::Auto && bytes >= LARGE
    }

    /// Takes how long an operation took in a copy mode that was known when it began. Those that are not
    /// timed have no beginning.
    pub(super) fn took(&mut self, of: Alike, began: Option<Instant>) {
        let Some(took) = began.map(|began| began.elapsed()) else { return };
        let traffic = Traffic::of(of.op);
        let at = self.paces.iter().position(|pace| pace.of == of).unwrap_or_else(|| self.keep_pace(Pace::new(of)));
        self.changed[traffic as usize][traffic.size(of.bytes)] |= self.paces[at].is_changed_by(took);
    }

    /// Returns where the pace is kept.
    fn keep_pace(&mut self, pace: Pace) -> usize {
        if self.paces.len() < PACES {
            self.paces.push(pace);
            return self.paces.len() - 1;
        }
        self.oldest = (self.oldest + 1) % PACES;
        self.paces[self.oldest] = pace;
        self.oldest
    }

    /// The copy mode for a buffer, also if it is time to measure it again. `Auto` if nothing is
    /// known.
    pub(super) fn last(&self, traffic: Traffic, bytes: usize) -> CopyMode {
        let measured = self.measured[traffic as usize][traffic.size(bytes)].copy_mode;
        self.known(traffic, bytes).unwrap_or(measured)
    }

    /// Takes the result of a measurement; see [`Measured::set`].
    pub(super) fn set(&mut self, traffic: Traffic, bytes: usize, copy_mode: CopyMode, cost: f64) {
        self.measured[traffic as usize][traffic.size(bytes)].set(copy_mode, cost);
        self.changed[traffic as usize][traffic.size(bytes)] = false;
        // Others were not measured, and keep the pace by which they are judged.
        self.paces.retain(|Pace { of, .. }| Traffic::of(of.op) != traffic || traffic.size(of.bytes) != traffic.size(bytes));
    }

    /// Puts a measurement off, for which there is no time. Returns the copy mode until then.
    pub(super) fn put_off(&mut self, traffic: Traffic, bytes: usize) -> CopyMode {
        let measured = &mut self.measured[traffic as usize][traffic.size(bytes)];
        measured.left = measured.interval;
        if measured.copy_mode == CopyMode::Auto { CopyMode::Staged } else { measured.copy_mode }
    }

    /// Returns the copy mode for a buffer, if it need not be measured.
    pub(super) fn known(&self, traffic: Traffic, bytes: usize) -> Option<CopyMode> {
        let copy_mode = match (self.wanted, self.may_read) {
            _ if bytes < SHORT => CopyMode::Staged,
            _ if bytes < LARGE => match (self.wanted, self.measured[traffic as usize][0].copy_mode) {
                (CopyMode::Streamed, _) | (CopyMode::Auto, CopyMode::Streamed) => CopyMode::Streamed,
                _ => CopyMode::Staged,
            },
            (CopyMode::Auto, _) => match self.measured[traffic as usize][traffic.size(bytes)] {
                Measured { left: 0, .. } => CopyMode::Auto,
                Measured { copy_mode: CopyMode::Cma, .. } if self.may_read == Some(false) => CopyMode::Staged,
                Measured { copy_mode, .. } => copy_mode,
            },
            (CopyMode::Cma, None) => CopyMode::Auto,
            (CopyMode::Cma, Some(false)) => CopyMode::Staged,
            (wanted, _) => wanted,
        };
        (copy_mode != CopyMode::Auto).then_some(copy_mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_become_rare_while_nothing_changes() {
        let mut measured = Measured::new(CopyMode::Auto);
        let intervals = [
            (CopyMode::Staged, 100),
            (CopyMode::Staged, 200),
            (CopyMode::Staged, 400),
            (CopyMode::Streamed, 100),
            (CopyMode::Streamed, 200),
        ];
        for (copy_mode, interval) in intervals {
            measured.set(copy_mode, 1.0);
            assert_eq!(measured, Measured { copy_mode, left: interval, interval });
        }
        (0..40).for_each(|_| measured.set(CopyMode::Streamed, 1.0));
        assert_eq!(measured.interval, 100 * MOST_RARE);
    }

    #[test]
    fn a_pace_changes_if_the_quickest_of_several_operations_does() {
        let mut pace = Pace::new(alike(Op::AllReduce, 1 << 20));
        let mut of =
            |times: [u64; JUDGED as usize]| times.map(|us| pace.is_changed_by(Duration::from_micros(us))).contains(&true);
        assert!(!of([30, 10, 90, 90, 90, 90, 90, 90]));
        // A rank that is often late, or interrupted.
        assert!(!of([90, 90, 90, 90, 90, 90, 90, 15]));
        assert!(of([20; JUDGED as usize]));
        assert!(!of([10; JUDGED as usize]));
        assert!(of([5; JUDGED as usize]));
    }

    fn alike(op: Op, bytes: usize) -> Alike {
        Alike { op, dtype: DType::F32, redop: op.reduces().then_some(ReduceOp::Sum), bytes }
    }

    /// Runs the operations of a judgement, each of which takes a time or more. Returns whether a rank now
    /// finds that the pace has changed.
    fn judge(autotune: &mut Autotune, of: Alike, took: Duration) -> bool {
        (0..JUDGED).for_each(|_| autotune.took(of, Instant::now().checked_sub(took)));
        let traffic = Traffic::of(of.op);
        autotune.changed[traffic as usize][traffic.size(of.bytes)]
    }

    /// Each call has a pace of its own: of two kinds, neither is taken for a change of the other. What is
    /// measured anew for one size leaves the paces of the other sizes.
    #[test]
    fn only_calls_that_are_alike_are_compared() {
        // The clock of a system that has just started does not go back far.
        let [near, far] = [2, 8].map(Duration::from_secs);
        let (reduced, scattered) = (alike(Op::AllReduce, 1 << 20), alike(Op::ReduceScatter, 1 << 20));
        let (short, large) = (alike(Op::AllReduce, 64 << 10), alike(Op::AllReduce, 16 << 20));
        let mut autotune = Autotune::new(CopyMode::Auto);
        for (of, took) in [(reduced, near), (scattered, far), (short, near), (large, near)] {
            assert!(!judge(&mut autotune, of, took));
            assert!(!judge(&mut autotune, of, took));
        }
        assert!(judge(&mut autotune, short, far));
        autotune.set(Traffic::Reduced, short.bytes, CopyMode::Streamed, 1.0);
        assert!(!judge(&mut autotune, short, far), "measured anew");
        assert!(judge(&mut autotune, large, far), "not measured");
    }

    /// A program that makes many kinds of calls has no pace judged by another's.
    #[test]
    fn the_oldest_pace_gives_way() {
        let mut autotune = Autotune::new(CopyMode::Auto);
        for (number, kilobytes) in (64..64 + 3 * PACES).enumerate() {
            let of = alike(Op::AllReduce, kilobytes << 10);
            assert!(!judge(&mut autotune, of, Duration::from_secs(1 << (number % 4))));
            assert!(autotune.paces.len() <= PACES);
        }
    }

    #[test]
    fn a_copy_mode_is_doubted_when_it_is_not_new() {
        let mut autotune = Autotune::new(CopyMode::Auto);
        let (traffic, bytes) = (Traffic::Reduced, 1 << 20);
        autotune.set(traffic, bytes, CopyMode::Staged, 1.0);
        autotune.pretend_changed(traffic, bytes, true);
        let doubted_at = (1..100).find(|_| autotune.count(traffic, bytes).is_some() && autotune.doubts());
        assert_eq!(doubted_at, Some(100 / TRUSTED));
        autotune.expire(traffic, bytes);
        assert_eq!(autotune.known(traffic, bytes), None);
        // It was right all the same: doubts become rarer.
        autotune.set(traffic, bytes, CopyMode::Staged, 1.0);
        autotune.pretend_changed(traffic, bytes, true);
        let doubted_at = (1..100).find(|_| autotune.count(traffic, bytes).is_some() && autotune.doubts());
        assert_eq!(doubted_at, Some(200 / TRUSTED));
    }

    /// Short data is not measured: where large data is streamed, a line of a slot costs as much for short
    /// data.
    #[test]
    fn short_data_is_streamed_if_large_data_is() {
        let of_short = |autotune: &Autotune| [SHORT - 1, SHORT, LARGE - 1].map(|bytes| autotune.known(Traffic::Copied, bytes));
        let (staged, streamed) = (Some(CopyMode::Staged), Some(CopyMode::Streamed));
        let mut autotune = Autotune::new(CopyMode::Auto);
        assert_eq!(of_short(&autotune), [staged; 3]);
        for (of_large, expected) in [(CopyMode::Streamed, streamed), (CopyMode::Cma, staged), (CopyMode::Staged, staged)] {
            autotune.set(Traffic::Copied, LARGE, of_large, 1.0);
            assert_eq!(of_short(&autotune), [staged, expected, expected], "{of_large}");
            assert_eq!(autotune.known(Traffic::Reduced, LARGE - 1), staged);
        }
        assert_eq!(of_short(&Autotune::new(CopyMode::Streamed)), [staged, streamed, streamed]);
        assert_eq!(of_short(&Autotune::new(CopyMode::Cma)), [staged; 3]);
    }

    #[test]
    fn what_is_known_survives_a_word() {
        let mut autotune = Autotune::new(CopyMode::Auto);
        autotune.set(Traffic::Reduced, 1 << 20, CopyMode::Streamed, 1.0);
        autotune.set(Traffic::Copied, 1 << 20, CopyMode::Cma, 1.0);
        autotune.set(Traffic::Spread, 64 << 10, CopyMode::Staged, 1.0);
        autotune.may_read = Some(true);
        let copy = Autotune::with_tuning(CopyMode::Auto, Some(autotune.encode()));
        for traffic in [Traffic::Reduced, Traffic::Copied, Traffic::Spread] {
            for bytes in [64 << 10, 1 << 20, 8 << 20] {
                assert_eq!(copy.known(traffic, bytes), autotune.known(traffic, bytes), "{traffic:?}, {bytes} bytes");
            }
        }
        assert_eq!(copy.may_read, autotune.may_read);
    }
}

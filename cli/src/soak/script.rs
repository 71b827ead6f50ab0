//! What happens in a round: all of it follows from the seed, the number of the round and the number of ranks.

use std::time::Duration;

use clap::ValueEnum;
use kolo::{DType, ReduceOp};

use crate::bench::operation::Operation;

/// Random numbers that follow from what they are for (SplitMix64).
#[derive(Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(for_what: &[u64]) -> Dice {
        let mut dice = Dice(0x6b6f_6c6f);
        for word in for_what {
            dice.0 = dice.next() ^ word;
        }
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// Through what the ranks of a round exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Windows,
    /// Links of shared memory.
    Links,
    Tcp,
    /// Two declared hosts.
    Hosts,
}

/// Where the ranks of a round meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// A store that `kolo soak` serves, always the same.
    Served,
    /// A file, always the same.
    File,
}

/// What goes wrong in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    Nothing,
    /// A rank is killed while it carries out a step.
    Kill,
    /// It is stopped, and goes on before anybody's patience ends.
    Pause,
    /// It is stopped for longer than that.
    Stop,
    /// One of its connections is cut.
    Cut,
    /// It leaves early.
    Leave,
    /// All ranks are killed, perhaps while they still start.
    Crash,
}

/// One job, from its start to its end.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) seed: u64,
    pub(crate) number: u64,
    pub(crate) ranks: usize,
    pub(crate) path: Path,
    pub(crate) meeting: Meeting,
    pub(crate) sockets: usize,
    pub(crate) fault: Fault,
    /// Whom the fault concerns, in which step, and how long after that step has begun. Of a crash: how long after the start.
    pub(crate) victim: usize,
    pub(crate) at: u64,
    pub(crate) after: Duration,
    pub(crate) steps: u64,
    /// Communicators are divided, too.
    pub(crate) splits: bool,
    /// How long one operation may take.
    pub(crate) timeout: Duration,
}

/// What all ranks do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A collective on one of the communicators.
    Collective { on: usize, call: Call },
    /// The communicator of all is divided: so many parts.
    Split { parts: usize, reverses: bool },
    /// One of those that came of that is given up.
    Drop { which: usize },
}

/// One collective. Roots and counts are taken modulo what the communicator has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) op: Operation,
    pub(crate) dtype: DType,
    pub(crate) redop: ReduceOp,
    pub(crate) root: usize,
    pub(crate) bytes: u64,
    pub(crate) how: How,
    /// What the numbers in the buffers depend on.
    pub(crate) salt: u32,
}

/// With what buffers, and whether this thread waits meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    OutOfPlace,
    InPlace,
    Registered,
    /// In the background, in place. Of the operations that are tried so, see `check`.
    Asynchronous,
}

/// The longest that a rank may be stopped without being missed.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);
/// Stopped for so long it is missed: longer than the operations' deadline in such rounds, and the survivors' agreement.
pub(crate) const STOP: Duration = Duration::from_secs(9);
const SHORT_DEADLINE: Duration = Duration::from_secs(3);
const LONG_DEADLINE: Duration = Duration::from_secs(30);

impl Round {
    pub(crate) fn new(seed: u64, number: u64, ranks: usize) -> Round {
        let mut dice = Dice::new(&[seed, number]);
        // A stop costs as much time as many other rounds.
        let fault = match dice.below(48) {
            0..16 => Fault::Nothing,
            16..28 => Fault::Kill,
            28..34 => Fault::Pause,
            34 => Fault::Stop,
            35..40 => Fault::Cut,
            40..44 => Fault::Leave,
            _ => Fault::Crash,
        };
        let steps = 20 + dice.below(180) as u64;
        let after = match fault {
            Fault::Crash => Duration::from_millis(dice.below(250) as u64),
            _ => Duration::from_micros(dice.below(1500) as u64),
        };
        Round {
            seed,
            number,
            ranks,
            path: dice.one_of(&[Path::Windows, Path::Windows, Path::Links, Path::Tcp, Path::Tcp, Path::Hosts]),
            meeting: dice.one_of(&[Meeting::Served, Meeting::File]),
            sockets: dice.one_of(&[1, 1, 2, 3]),
            fault,
            victim: dice.below(ranks),
            // Before the last step, which all take together.
            at: dice.below(steps as usize - 1) as u64,
            after,
            steps,
            splits: dice.one_in(2),
            timeout: if fault == Fault::Stop { SHORT_DEADLINE } else { LONG_DEADLINE },
        }
    }

    /// One of the steps, when there are so many communicators besides that of all. The last is of all ranks together.
    pub(crate) fn step(&self, number: u64, others: usize) -> Step {
        let mut dice = Dice::new(&[self.seed, self.number, 1 + number]);
        let is_last = number + 1 == self.steps;
        if self.splits && !is_last && dice.one_in(12) {
            return match others {
                3.. => Step::Drop { which: dice.below(others) },
                _ => Step::Split { parts: 1 + dice.below(self.ranks), reverses: dice.one_in(2) },
            };
        }
        let on = if is_last || dice.one_in(2) { 0 } else { dice.below(1 + others) };
        Step::Collective { on, call: Call::random(&mut dice, is_last) }
    }
}

impl Call {
    fn random(dice: &mut Dice, is_last: bool) -> Call {
        let operations = Operation::value_variants();
        // Nobody leaves an all-reduce before all have come.
        let op = if is_last { Operation::AllReduce } else { dice.one_of(operations) };
        let dtypes: Vec<DType> = DType::ALL.iter().copied().filter(|dtype| *dtype != DType::Bool).collect();
        let dtype = dice.one_of(&dtypes);
        let redops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|redop| redop.applies_to(dtype)).collect();
        let redop = dice.one_of(&redops);
        // Mostly small, now and then large enough for every path.
        let most = dice.one_of(&[0, 8, 64, 4 << 10, 4 << 10, 100 << 10, 100 << 10, 3 << 20]);
        let bytes = if is_last { 8 } else { dice.below(most + 1) as u64 };
        let how = dice.one_of(&[How::OutOfPlace, How::InPlace, How::InPlace, How::Registered, How::Asynchronous]);
        Call { op, dtype, redop, root: dice.below(1 << 16), bytes, how, salt: dice.next() as u32 >> 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_from_the_seed_and_differ() {
        let show = |seed, number| {
            let round = Round::new(seed, number, 4);
            format!("{round:?} {:?}", (0..round.steps).map(|step| round.step(step, 2)).collect::<Vec<_>>())
        };
        assert_eq!(show(1, 2), show(1, 2));
        assert_ne!(show(1, 2), show(1, 3));
        assert_ne!(show(1, 2), show(2, 2));
    }

    #[test]
    fn all_there_is_comes_up() {
        let rounds: Vec<Round> = (0..300).map(|number| Round::new(7, number, 4)).collect();
        for fault in [Fault::Nothing, Fault::Kill, Fault::Pause, Fault::Stop, Fault::Cut, Fault::Leave, Fault::Crash] {
            assert!(rounds.iter().any(|round| round.fault == fault), "{fault:?}");
        }
        for path in [Path::Windows, Path::Links, Path::Tcp, Path::Hosts] {
            assert!(rounds.iter().any(|round| round.path == path), "{path:?}");
        }
        let steps: Vec<Step> =
            rounds.iter().flat_map(|round| (0..round.steps).map(|step| round.step(step, (step % 4) as usize))).collect();
        let calls: Vec<&Call> =
            steps.iter().filter_map(|step| if let Step::Collective { call, .. } = step { Some(call) } else { None }).collect();
        for op in Operation::value_variants() {
            assert!(calls.iter().any(|call| call.op == *op), "{op:?}");
        }
        assert!(
            steps.iter().any(|step| matches!(step, Step::Split { .. }))
                && steps.iter().any(|step| matches!(step, Step::Drop { .. }))
        );
        for round in &rounds {
            assert!(round.at + 1 < round.steps && round.victim < 4);
            assert!(matches!(
                round.step(round.steps - 1, 3),
                Step::Collective { on: 0, call: Call { op: Operation::AllReduce, bytes: 8, .. } }
            ));
        }
    }
}

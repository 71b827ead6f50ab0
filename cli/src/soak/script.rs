//! The script of a round. It follows from the seed, the number of the round and the number of
//! ranks.

use std::time::Duration;

use clap::ValueEnum;
use kolo::{DType, ReduceOp};

use super::system;
use crate::bench::operation::Operation;

/// Random numbers from a seed (SplitMix64).
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

    /// Returns a number small enough that others can be added without overflow.
    fn salt(&mut self) -> u32 {
        self.next() as u32 >> 1
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

/// The links of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Windows,
    /// Links of shared memory.
    Links,
    Tcp,
    /// Two declared hosts.
    Hosts,
}

/// The rendezvous of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rendezvous {
    /// A store that `kolo soak` serves for all rounds.
    Served,
    /// A file store for all rounds.
    File,
}

/// The fault of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    Nothing,
    /// A rank is killed during a step.
    Kill,
    /// A rank is stopped, and continues before any deadline.
    Pause,
    /// A rank is stopped before its first operation, when no rank has a link to it, and continues
    /// before the deadline.
    PauseUnlinked,
    /// A rank is stopped for longer than the deadline.
    Stop,
    /// A rank is stopped for longer than the deadline, before its first operation.
    StopUnlinked,
    /// A connection of a rank is cut.
    Cut,
    /// A rank leaves early.
    Leave,
    /// All ranks are killed, possibly while they start.
    Crash,
}

/// What a round may have besides its collectives and its fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Ingredient {
    /// The communicator of all ranks is split.
    Splits,
    /// Dozens of splits live at once.
    ManySplits,
    /// A thread of each rank writes and checks a registered buffer that no operation uses, from the
    /// start to the end.
    Holder,
    /// Forked children free registered memory that their parents still use.
    Forks,
    /// A process without the secret connects to every listener of the ranks, from before the start
    /// to the end.
    Stranger,
}

impl Ingredient {
    /// Whether this system has it.
    pub(crate) fn is_possible(self) -> bool {
        system::HAS_FORKS || self != Ingredient::Forks
    }

    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Ingredient::Splits => "splits",
            Ingredient::ManySplits => "dozens of splits",
            Ingredient::Holder => "a held buffer",
            Ingredient::Forks => "forks",
            Ingredient::Stranger => "a stranger",
        }
    }
}

/// One job, from its start to its end.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) seed: u64,
    pub(crate) number: u64,
    pub(crate) ranks: usize,
    pub(crate) path: Path,
    pub(crate) rendezvous: Rendezvous,
    pub(crate) sockets: usize,
    pub(crate) fault: Fault,
    /// The rank that the fault hits, the step, and how long after the start of that step. For a
    /// crash: how long after the start of the job.
    pub(crate) victim: usize,
    pub(crate) at: u64,
    pub(crate) after: Duration,
    pub(crate) steps: u64,
    pub(crate) with: Vec<Ingredient>,
    /// How long one operation may take.
    pub(crate) timeout: Duration,
}

/// The next operation of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A collective on one of the communicators.
    Collective { on: usize, call: Call },
    /// Each rank sends to the root, which receives from any.
    Collect { on: usize, collect: Collect },
    /// The communicator of all ranks is split into this many parts.
    Split { parts: usize, reverses: bool },
    /// One of these parts is dropped.
    Drop { which: usize },
    /// Each rank allocates `words` registered words and forks a child that frees them.
    Fork { on: usize, words: usize, salt: u32 },
}

/// Messages to one rank, which receives them in the order of arrival. Their size is odd, so that
/// the headers of later messages are at any offset of a link's buffer, its end included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collect {
    /// Taken modulo the ranks of the communicator.
    pub(crate) root: usize,
    /// How many messages each of the other ranks sends.
    pub(crate) messages: usize,
    pub(crate) bytes: usize,
    /// The seed of the contents.
    pub(crate) salt: u32,
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
    /// The seed of the numbers in the buffers.
    pub(crate) salt: u32,
}

/// The kind of buffers, and whether the call is blocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    OutOfPlace,
    InPlace,
    Registered,
    /// Nonblocking and in place. `check` lists the operations that have this form.
    Asynchronous,
}

/// The length of a short stop, which no rank notices.
const PAUSE: Duration = Duration::from_millis(200);
/// The length of a stop that exceeds every wait in the start of a link, but not the deadline.
const PAUSE_UNLINKED: Duration = Duration::from_secs(7);
/// The length of a stop that exceeds the deadline in such rounds and the survivors' agreement.
const STOP: Duration = Duration::from_secs(12);
const SHORT_DEADLINE: Duration = Duration::from_secs(5);
/// A deadline that no operation reaches, even on a busy machine.
const LONG_DEADLINE: Duration = Duration::from_secs(120);
/// How long the ranks of a round may take to connect.
pub(crate) const START: Duration = LONG_DEADLINE;

/// A distance between ranks without a link after the start: links are made at distances that are
/// powers of two.
const UNLINKED: usize = 3;
const UNLINKED_RANKS: usize = 8;

impl Fault {
    /// Whether this system has it.
    pub(crate) fn is_possible(self) -> bool {
        system::CUTS_CONNECTIONS || self != Fault::Cut
    }

    /// Returns how long the victim is stopped.
    pub(crate) fn stop(self) -> Option<Duration> {
        match self {
            Fault::Pause => Some(PAUSE),
            Fault::PauseUnlinked => Some(PAUSE_UNLINKED),
            Fault::Stop | Fault::StopUnlinked => Some(STOP),
            Fault::Nothing | Fault::Kill | Fault::Cut | Fault::Leave | Fault::Crash => None,
        }
    }

    /// Whether the victim is stopped for longer than the deadline.
    pub(crate) fn outlasts_the_deadline(self) -> bool {
        matches!(self, Fault::Stop | Fault::StopUnlinked)
    }

    /// Whether the victim is stopped when it has no link yet.
    pub(crate) fn is_unlinked(self) -> bool {
        matches!(self, Fault::PauseUnlinked | Fault::StopUnlinked)
    }
}

impl Round {
    pub(crate) fn new(seed: u64, number: u64, ranks: usize) -> Round {
        let mut dice = Dice::new(&[seed, number]);
        // Stops are rare, because one takes as long as many other rounds.
        let fault = match dice.below(96) {
            0..30 => Fault::Nothing,
            30..54 => Fault::Kill,
            54..66 => Fault::Pause,
            66 => Fault::PauseUnlinked,
            67 => Fault::Stop,
            68 => Fault::StopUnlinked,
            69..79 => Fault::Cut,
            79..87 => Fault::Leave,
            _ => Fault::Crash,
        };
        let fault = if fault.is_possible() { fault } else { Fault::Nothing };
        let ranks = if fault.is_unlinked() { ranks.max(UNLINKED_RANKS) } else { ranks };
        let steps = 20 + dice.below(180) as u64;
        let after = match fault {
            Fault::Crash => Duration::from_millis(dice.below(250) as u64),
            _ => Duration::from_micros(dice.below(1500) as u64),
        };
        let path = dice.one_of(&[Path::Windows, Path::Windows, Path::Links, Path::Tcp, Path::Tcp, Path::Hosts]);
        let mut with = Vec::new();
        match dice.below(8) {
            0..3 => with.push(Ingredient::Splits),
            3 => with.push(Ingredient::ManySplits),
            _ => {}
        }
        for (ingredient, one_in) in [(Ingredient::Holder, 3), (Ingredient::Forks, 3), (Ingredient::Stranger, 2)] {
            if dice.one_in(one_in) && ingredient.is_possible() {
                with.push(ingredient);
            }
        }
        Round {
            seed,
            number,
            ranks,
            // Only TCP links are opened at first use.
            path: if fault.is_unlinked() { Path::Tcp } else { path },
            rendezvous: dice.one_of(&[Rendezvous::Served, Rendezvous::File]),
            sockets: dice.one_of(&[1, 1, 2, 3]),
            fault,
            victim: dice.below(ranks),
            // Before the last step, which all ranks do together.
            at: if fault.is_unlinked() { 0 } else { dice.below(steps as usize - 1) as u64 },
            after,
            steps,
            with,
            timeout: if fault.outlasts_the_deadline() { SHORT_DEADLINE } else { LONG_DEADLINE },
        }
    }

    pub(crate) fn has(&self, ingredient: Ingredient) -> bool {
        self.with.contains(&ingredient)
    }

    /// Returns the further steps of the survivors of a failure, without faults and splits.
    pub(crate) fn afterwards(&self) -> Round {
        let with = self.with.iter().copied().filter(|ingredient| *ingredient == Ingredient::Forks).collect();
        Round { fault: Fault::Nothing, with, steps: 10, seed: self.seed ^ 1 << 63, ..self.clone() }
    }

    /// Returns how many communicators there may be at once besides that of all ranks.
    fn most_others(&self) -> usize {
        match () {
            () if self.has(Ingredient::ManySplits) => 48,
            () if self.has(Ingredient::Splits) => 3,
            () => 0,
        }
    }

    /// Returns a step, given the number of communicators besides that of all ranks. In the last
    /// step all ranks take part.
    pub(crate) fn step(&self, number: u64, others: usize) -> Step {
        let mut dice = Dice::new(&[self.seed, self.number, 1 + number]);
        if number + 1 == self.steps {
            return Step::Collective { on: 0, call: Call::last(&mut dice) };
        }
        if number == 0 && self.fault.is_unlinked() {
            // Messages to a rank to which the victim has no link or, if the victim continues in
            // time, from that rank.
            let is_other = !self.fault.outlasts_the_deadline() && dice.one_in(2);
            let root = if is_other { (self.victim + UNLINKED) % self.ranks } else { self.victim };
            return Step::Collect { on: 0, collect: Collect { root, ..Collect::random(&mut dice) } };
        }
        let most = self.most_others();
        // Dozens are alive at once only if most steps are splits.
        let splits_one_in = if most > 3 { 2 } else { 12 };
        if most > 0 && dice.one_in(splits_one_in) {
            return match others < most {
                true => Step::Split { parts: 1 + dice.below(self.ranks), reverses: dice.one_in(2) },
                false => Step::Drop { which: dice.below(others) },
            };
        }
        let on = if dice.one_in(2) { 0 } else { dice.below(1 + others) };
        if self.has(Ingredient::Forks) && dice.one_in(16) {
            return Step::Fork { on, words: 1 + dice.below(100_000), salt: dice.salt() };
        }
        // A rank that receives from any until its deadline cannot know which rank is missing.
        match dice.one_in(8) && !self.fault.outlasts_the_deadline() {
            true => Step::Collect { on, collect: Collect::random(&mut dice) },
            false => Step::Collective { on, call: Call::random(&mut dice) },
        }
    }
}

impl Collect {
    fn random(dice: &mut Dice) -> Collect {
        let root = dice.below(1 << 16);
        // Some messages are larger than the buffer of a link.
        let messages = 1 + dice.below(300);
        let bytes = 2 * dice.one_of(&[0, 1, 8, 30, 500, 3000]) + 1;
        Collect { root, messages, bytes, salt: dice.salt() }
    }
}

impl Call {
    fn random(dice: &mut Dice) -> Call {
        let op = dice.one_of(Operation::value_variants());
        // Mostly small, sometimes large enough for every path.
        let most = dice.one_of(&[0, 8, 64, 4 << 10, 4 << 10, 100 << 10, 100 << 10, 3 << 20]);
        let bytes = dice.below(most + 1) as u64;
        Call::of(op, bytes, dice)
    }

    /// Returns the last step: an all-reduce, which no rank leaves before all have called it.
    fn last(dice: &mut Dice) -> Call {
        Call::of(Operation::AllReduce, 8, dice)
    }

    fn of(op: Operation, bytes: u64, dice: &mut Dice) -> Call {
        let dtypes: Vec<DType> =
            DType::ALL.iter().copied().filter(|dtype| !matches!(dtype, DType::Bool | DType::F8E4M3 | DType::F8E5M2)).collect();
        let dtype = dice.one_of(&dtypes);
        let redops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|redop| redop.applies_to(dtype)).collect();
        let redop = dice.one_of(&redops);
        let how = dice.one_of(&[How::OutOfPlace, How::InPlace, How::InPlace, How::Registered, How::Asynchronous]);
        Call { op, dtype, redop, root: dice.below(1 << 16), bytes, how, salt: dice.salt() }
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
        for fault in Fault::value_variants().iter().filter(|fault| fault.is_possible()) {
            assert!(rounds.iter().any(|round| round.fault == *fault), "{fault:?}");
        }
        for ingredient in Ingredient::value_variants().iter().filter(|ingredient| ingredient.is_possible()) {
            let has_killed = |round: &&Round| round.has(*ingredient) && round.fault == Fault::Kill;
            assert!(rounds.iter().any(|round| has_killed(&round)), "{ingredient:?}");
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
        assert!(steps.iter().any(|step| matches!(step, Step::Collect { .. })));
        assert_eq!(steps.iter().any(|step| matches!(step, Step::Fork { .. })), Ingredient::Forks.is_possible());
        assert!(
            steps.iter().any(|step| matches!(step, Step::Split { .. }))
                && steps.iter().any(|step| matches!(step, Step::Drop { .. }))
        );
        for round in &rounds {
            assert!(round.at + 1 < round.steps && round.victim < round.ranks);
            assert!(matches!(
                round.step(round.steps - 1, 3),
                Step::Collective { on: 0, call: Call { op: Operation::AllReduce, bytes: 8, .. } }
            ));
        }
    }

    #[test]
    fn dozens_of_splits_live_at_once() {
        let most =
            (0..300).map(|number| Round::new(7, number, 4)).filter(|round| round.has(Ingredient::ManySplits)).map(|round| {
                let mut others: usize = 0;
                let counts = (0..round.steps).map(|number| {
                    match round.step(number, others) {
                        Step::Split { .. } => others += 1,
                        Step::Drop { .. } => others -= 1,
                        _ => {}
                    }
                    others
                });
                counts.max().unwrap()
            });
        assert_eq!(most.max(), Some(48));
    }

    #[test]
    fn headers_come_to_every_place_of_a_buffer() {
        let round = Round { steps: 4000, ..Round::new(7, 0, 4) };
        let collects = (0..round.steps).filter_map(|number| match round.step(number, 0) {
            Step::Collect { collect, .. } => Some(collect),
            _ => None,
        });
        let collects: Vec<Collect> = collects.collect();
        assert!(collects.iter().all(|collect| collect.bytes % 2 == 1));
        // Larger than any buffer.
        assert!(collects.iter().any(|collect| collect.bytes * collect.messages > 1 << 20));
    }

    #[test]
    fn who_is_stopped_without_links_is_so_before_the_first_step() {
        let rounds: Vec<Round> =
            (0..600).map(|number| Round::new(3, number, 4)).filter(|round| round.fault.is_unlinked()).collect();
        assert!(rounds.len() > 2);
        for round in rounds {
            assert_eq!((round.at, round.path, round.ranks), (0, Path::Tcp, 8));
            // The larger number of steps.
            assert_eq!(format!("{round:?}"), format!("{:?}", Round::new(round.seed, round.number, round.ranks)));
            assert!(matches!(round.step(0, 0), Step::Collect { .. }));
            let outlasts = round.fault.stop().unwrap() > round.timeout;
            assert_eq!(outlasts, round.fault == Fault::StopUnlinked);
        }
    }
}

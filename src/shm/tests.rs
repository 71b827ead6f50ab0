//! Every collective in a window, run by threads on heap memory and checked against the expected
//! result.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::autotune::{self, TIME_NEEDED};
use super::flag_area::FlagArea;
use super::flags::{Phases, SLOTS};
use super::groups::{Groups, PhaseGroups};
use super::registered::Allocation;
use super::slots::SLOT;
use super::tuning::Traffic;
use super::window::Layout;
use super::{Autotune, Window};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Counts};
use crate::config::{CopyMode, FlagLayout};
use crate::error::{Cause, Error, Result};
use crate::failure::{CommInfo, OpContext};
use crate::host_group;
use crate::host_group::area::{AREA, Area};
use crate::schedule::select::has_window;
use crate::schedule::{Blocks, elements};
use crate::sys::{Domains, PageSize, Patience, Processors, Region, every_case};
use crate::types::{DType, Descriptor, Member, Op, ReduceOp, mix};

/// Bytes of buffers that are large for every kind of traffic.
const LARGE: usize = 1 << 20;

/// The operations that run in a window, without those with a count for each rank but one.
static OPS: LazyLock<Vec<Op>> =
    LazyLock::new(|| Op::ALL.iter().copied().filter(|op| has_window(*op) && *op != Op::ReduceScatterV).collect());

fn info(rank: usize, ranks: usize, timeout: Duration) -> CommInfo {
    let members = vec![Member { host: "node-a".into(), pid: 1 }; ranks];
    CommInfo { rank, members, timeout, start_timeout: timeout, cancel: Arc::default() }
}

const LATE: Duration = Duration::from_secs(120);

/// One rank with its window.
struct RankWindow {
    window: Window,
    info: CommInfo,
    seq: u64,
}

/// Runs `body` on every rank.
fn on_ranks(ranks: usize, timeout: Duration, body: impl Fn(&mut RankWindow, usize) + Sync) {
    on_ranks_with(CopyMode::Auto, ranks, timeout, body);
}

fn on_ranks_with(copy_mode: CopyMode, ranks: usize, timeout: Duration, body: impl Fn(&mut RankWindow, usize) + Sync) {
    on_ranks_in(None, copy_mode, ranks, timeout, body);
}

/// As [`on_ranks_with`], in these groups.
fn on_ranks_in(
    groups: Option<&Groups>,
    copy_mode: CopyMode,
    ranks: usize,
    timeout: Duration,
    body: impl Fn(&mut RankWindow, usize) + Sync,
) {
    let hosts = host_group::fuzz::of_threads(ranks);
    let members: Arc<[usize]> = (0..ranks).collect();
    let area = Arc::new(Region::heap(ranks * AREA));
    std::thread::scope(|scope| {
        for (rank, host) in hosts.into_iter().enumerate() {
            let (area, members, body) = (Area::new(area.clone(), AREA, rank, ranks), members.clone(), &body);
            scope.spawn(move || {
                let patience = Arc::new(Patience::new(ranks));
                let autotune = Autotune::new(copy_mode);
                let mut window = Window::new(area, members.clone(), members, host, patience, autotune, FlagLayout::Auto);
                if let Some(groups) = groups {
                    window.layout = Layout::Groups(Box::new(PhaseGroups::same(groups.clone())));
                }
                body(&mut RankWindow { window, info: info(rank, ranks, timeout), seq: 0 }, rank);
            });
        }
    });
}

impl RankWindow {
    /// Runs one operation on words.
    fn run(
        &mut self,
        op: Op,
        count: usize,
        offsets: Option<&[usize]>,
        root: usize,
        input: RawSlice,
        output: RawSliceMut,
    ) -> Result<()> {
        self.seq += 1;
        let root_field = matches!(op, Op::Reduce | Op::Broadcast | Op::Gather | Op::Scatter).then_some(root as u32);
        let descriptor = Descriptor {
            op,
            dtype: DType::U64,
            redop: op.reduces().then_some(ReduceOp::Sum),
            root: root_field,
            count: count as u64,
            seq: self.seq,
            ..Descriptor::nothing()
        };
        let context = OpContext::new(descriptor, &self.info);
        let (redop, recv_counts) = (Some(ReduceOp::Sum), offsets.map(Counts::at));
        let call = Call { count, root, redop, recv_counts, send: input, recv: output, ..Call::of(op, DType::U64) };
        // SAFETY: the test lends both buffers until this returns.
        unsafe { self.window.run(&context, &call) }
    }

    /// Runs one operation on random words and checks the result.
    fn check(&mut self, op: Op, count: usize, root: usize, in_place: bool, seed: u64) {
        let mut memory = stale(2 * self.info.members.len() * (count + 2));
        self.check_in(RawSliceMut::of(&mut memory), op, count, root, in_place, seed);
    }

    /// As [`RankWindow::check`], with buffers in `memory`, which has room for a block more than
    /// twice the blocks of all ranks.
    fn check_in(&mut self, memory: RawSliceMut, op: Op, count: usize, root: usize, in_place: bool, seed: u64) {
        let (rank, ranks) = (self.info.rank, self.info.members.len());
        let offsets: Vec<usize> = if op == Op::AllGatherV {
            (0..=ranks).map(|rank| (0..rank).map(|r| count + r % 3).sum()).collect()
        } else {
            (0..=ranks).map(|rank| rank * count).collect()
        };
        let (at, all) = (offsets[rank], offsets[ranks]);
        let (inputs, outputs, [input_at, output_at]) = elements(op, rank, root, ranks, count, &Blocks::Listed(&offsets));
        let (input_at, output_at) = if in_place { (input_at, output_at) } else { (0, inputs) };
        assert!((input_at + inputs).max(output_at + outputs) * 8 <= memory.len);
        let at_word = |i: usize| memory.ptr.cast::<u64>().wrapping_add(i);
        let words = |rank: usize| Words::of(mix(seed, rank as u64), all.max(count));
        let sum = || (0..ranks).map(words).reduce(Words::plus).unwrap();
        let given = words(rank).take(0, inputs);
        // SAFETY: the words are within the memory, which belongs to this rank.
        unsafe { given.as_ptr().copy_to_nonoverlapping(at_word(input_at), inputs) };
        let whole = memory;
        let input = whole.as_const().skip(8 * input_at).take(8 * inputs);
        let output = whole.skip(8 * output_at).take(8 * outputs);
        let listed = (op == Op::AllGatherV).then_some(&offsets[..]);
        self.run(op, count, listed, root, input, output).unwrap();
        let blocks = |of: &dyn Fn(usize) -> Vec<u64>| (0..ranks).flat_map(of).collect::<Vec<u64>>();
        let expected = match op {
            _ if outputs == 0 => Vec::new(),
            Op::AllReduce | Op::Reduce => sum().take(0, outputs),
            Op::Broadcast => words(root).take(0, outputs),
            Op::AllGather | Op::AllGatherV | Op::Gather => blocks(&|from| words(from).take(0, offsets[from + 1] - offsets[from])),
            Op::ReduceScatter => sum().take(at, outputs),
            Op::AllToAll => blocks(&|from| words(from).take(rank * count, count)),
            Op::Scatter => words(root).take(at, outputs),
            _ => unreachable!(),
        };
        let mut got = vec![0; outputs];
        // SAFETY: as above.
        unsafe { at_word(output_at).copy_to_nonoverlapping(got.as_mut_ptr(), outputs) };
        if got != expected {
            let i = (0..outputs).find(|&i| got[i] != expected[i]).unwrap();
            let [got, expected] = [got[i], expected[i]];
            panic!("rank {rank}, {op} x {count}, root {root}, in place {in_place}, word {i}: {got:x} instead of {expected:x}");
        }
    }
}

/// Returns words that no operation has written.
fn stale(words: usize) -> Vec<u64> {
    let mut memory = vec![0u64; words];
    // SAFETY: any bytes are words.
    unsafe { memory.as_mut_ptr().write_bytes(u8::MAX, words) };
    memory
}

/// Random words, which repeat: a prime number of them, so that no block or segment that is out of place
/// has the words of its place.
struct Words(Vec<u64>);

impl Words {
    /// As many as tests need that take `most`.
    fn of(seed: u64, most: usize) -> Words {
        Words((0..most.clamp(1, 1021) as u64).map(|i| mix(seed, i)).collect())
    }

    fn plus(mut self, other: Words) -> Words {
        self.0.iter_mut().zip(other.0).for_each(|(word, more)| *word = word.wrapping_add(more));
        self
    }

    fn take(&self, from: usize, count: usize) -> Vec<u64> {
        let mut taken = Vec::with_capacity(count);
        let mut at = from % self.0.len();
        while taken.len() < count {
            let rest = (self.0.len() - at).min(count - taken.len());
            taken.extend_from_slice(&self.0[at..at + rest]);
            at = 0;
        }
        taken
    }
}

#[test]
fn every_collective() {
    let worlds: &[usize] = if cfg!(miri) { &[2, 3] } else { &[1, 2, 3, 4, 5, 8] };
    for &ranks in worlds {
        on_ranks(ranks, LATE, |rank_window, _| {
            let large = [SLOT / 8, SLOT / 4 + 17, SLOT + 3];
            let sizes: Vec<usize> = [1, 2, 5, 100].into_iter().chain(large.into_iter().filter(|_| !cfg!(miri))).collect();
            for (round, &count) in sizes.iter().enumerate() {
                for (i, &op) in OPS.iter().enumerate() {
                    // Large ones in turns, unless every case is tried.
                    let turn = (i + round + ranks) % 3;
                    let is_tried = |in_place: bool| every_case() || count < 1000 || turn == usize::from(in_place);
                    for in_place in [false, true].into_iter().filter(|&in_place| is_tried(in_place)) {
                        rank_window.check(op, count, round % ranks, in_place, round as u64);
                    }
                }
            }
        });
    }
}

/// Ranks run as far ahead of each other as they can: roots run ahead, small and large operations
/// alternate.
#[test]
fn many_operations_in_a_row() {
    let rounds = if cfg!(miri) { 8 } else { 4000 };
    on_ranks(3, LATE, |rank_window, _| {
        for round in 0..rounds {
            let op = OPS[mix(1, round) as usize % OPS.len()];
            let count = if !cfg!(miri) && round % 50 == 0 { 3 * SLOT / 8 } else { 1 + mix(2, round) as usize % 40 };
            rank_window.check(op, count, round as usize % 3, round % 2 == 0, round);
        }
    });
}

/// Whether the system reads memory of other processes. A process may always read its own.
fn reads_processes() -> bool {
    cfg!(all(any(target_os = "linux", windows), not(miri), not(kolo_posix)))
}

/// Large buffers in every copy mode, and in the one that autotune measures as the fastest.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn large_buffers() {
    for &copy_mode in CopyMode::ALL {
        for &ranks in if every_case() { &[2, 3, 5][..] } else { &[2, 3] } {
            on_ranks_with(copy_mode, ranks, LATE, |rank_window, _| {
                for (round, count) in [LARGE / 8 - 1, LARGE / 8, LARGE / 8 + 77].into_iter().enumerate() {
                    for (i, &op) in OPS.iter().enumerate() {
                        // In turns, unless every case is tried.
                        for in_place in
                            [false, true].into_iter().filter(|&it| every_case() || it == (i + round).is_multiple_of(2))
                        {
                            rank_window.check(op, count, round % ranks, in_place, round as u64);
                        }
                    }
                }
                match copy_mode {
                    CopyMode::Cma if reads_processes() => assert!(rank_window.window.reads > 0),
                    CopyMode::Auto => {}
                    _ => assert_eq!(rank_window.window.reads, 0),
                }
                for traffic in [Traffic::Reduced, Traffic::Copied, Traffic::Spread] {
                    let taken = rank_window.window.autotune.known(traffic, LARGE);
                    match copy_mode {
                        CopyMode::Auto => assert!(taken.is_some_and(|taken| taken != CopyMode::Auto)),
                        CopyMode::Cma if !reads_processes() => assert_eq!(taken, Some(CopyMode::Staged)),
                        copy_mode => assert_eq!(taken, Some(copy_mode)),
                    }
                }
            });
        }
    }
}

/// The results are the same if the buffers of all ranks are registered, of none, or only of some.
/// If those that matter are registered, they are used.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn registered_buffers() {
    for ranks in [2, 3, 5] {
        let count = 10_001usize;
        let part = (16 * ranks * (count + 2) + 64).next_multiple_of(PageSize::system().bytes());
        let registered = Arc::new(Allocation { region: Arc::new(Region::heap(ranks * part)), part });
        on_ranks(ranks, LATE, |rank_window, rank| {
            rank_window.window.heap().add(registered.clone());
            for (round, &op) in OPS.iter().cycle().take(6 * OPS.len()).enumerate() {
                let (kind, in_place, root) = (round / OPS.len() % 3, round >= 3 * OPS.len(), round % ranks);
                let mut private = stale(2 * ranks * (count + 2));
                let whole = RawSliceMut { ptr: registered.at(rank, 64), len: 8 * private.len() };
                let uses_registered = |rank: usize| kind == 0 || (kind == 1 && rank.is_multiple_of(2));
                let memory = if uses_registered(rank) { whole } else { RawSliceMut::of(&mut private) };
                let before = rank_window.window.loans;
                rank_window.check_in(memory, op, count, root, in_place, round as u64);
                let all = (0..ranks).all(uses_registered);
                let expected = match op {
                    Op::Barrier | Op::Reduce | Op::Gather => false,
                    Op::Broadcast | Op::Scatter => uses_registered(root),
                    Op::AllToAll => all && !in_place,
                    _ => all,
                };
                let used = rank_window.window.loans - before;
                assert_eq!(used, u64::from(expected), "{op}, registered: {kind}, in place: {in_place}");
            }
        });
    }
}

/// Ranks use memory that each takes alone, where it lies: not in the first operation, which tells
/// the peers of it, nor in the second, which says that they have mapped it, but in those after it.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn pooled_buffers() {
    for ranks in [2, 3] {
        let count = 10_001usize;
        on_ranks(ranks, LATE, |rank_window, rank| {
            let pool = rank_window.window.pool();
            // Ranks take different blocks, and give some back.
            let others: Vec<_> = (0..rank).map(|_| pool.take(5000).unwrap()).collect();
            let len = 16 * ranks * (count + 2);
            let mut block = pool.take(len).unwrap();
            drop(others);
            for (round, &op) in OPS.iter().cycle().take(3 * OPS.len()).enumerate() {
                if round % 4 == 3 {
                    block = pool.take(len).unwrap();
                }
                let before = rank_window.window.loans;
                let memory = RawSliceMut { ptr: block.start(), len };
                rank_window.check_in(memory, op, count, round % ranks, false, round as u64);
                let used = rank_window.window.loans - before == 1;
                let expected = round >= OPS.len() && !matches!(op, Op::Barrier | Op::Reduce | Op::Gather);
                assert!(used == expected || round < OPS.len(), "round {round}, {op}: {used}");
            }
        });
    }
}

#[test]
fn a_call_mismatch_fails_on_both_ranks_and_writes_no_memory() {
    on_ranks(2, LATE, |rank_window, rank| {
        let mut memory = [7u64; 4];
        let count = 3 + rank;
        let chunk = RawSliceMut::of(&mut memory).take(8 * count);
        match rank_window.run(Op::AllReduce, count, None, 0, chunk.as_const(), chunk) {
            Err(Error::Mismatch { rank: me, peer, mine, theirs, .. }) => {
                assert_eq!((me, peer), (rank, 1 - rank));
                assert_eq!((mine.count, theirs.count), (count as u64, 7 - count as u64));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(memory, [7; 4]);
    });
}

#[test]
fn a_rank_that_is_late_leaves_or_fails_is_named() {
    // Short enough to wait for, and long enough for the two other ranks on a busy machine.
    let deadline = Duration::from_secs(3);
    for (absence, expected) in [(0, Cause::Silent { deadline }), (1, Cause::Left { last_seq: 5 }), (2, Cause::Revoked)] {
        let timeout = if absence == 0 { deadline } else { LATE };
        on_ranks(3, timeout, |rank_window, rank| {
            if rank == 1 {
                if absence > 0 {
                    rank_window.window.leave(5, absence == 2);
                }
                return;
            }
            match rank_window.run(Op::Barrier, 0, None, 0, RawSlice::EMPTY, RawSliceMut::EMPTY) {
                Err(Error::Peer { rank: 1, cause, op: Op::Barrier, .. }) => assert_eq!(cause, expected),
                other => panic!("{other:?}"),
            }
        });
    }
}

/// One rank cannot read an input, such as memory of a device. Then all ranks stage theirs.
#[test]
#[cfg_attr(miri, ignore = "Miri reads no memory of processes")]
fn an_input_that_cannot_be_read_is_staged() {
    const COPIES: [Op; 5] = [Op::Broadcast, Op::Scatter, Op::AllGather, Op::AllGatherV, Op::AllToAll];
    on_ranks_with(CopyMode::Cma, 3, LATE, |rank_window, rank| {
        rank_window.check(Op::AllGather, LARGE / 8, 0, false, 0);
        rank_window.window.cannot_read = rank == 1;
        let before = rank_window.window.reads;
        for (seed, op) in (1..).zip(COPIES) {
            for root in 0..3 {
                rank_window.check(op, LARGE / 8, root, seed % 2 == 0, seed);
            }
        }
        assert!(!reads_processes() || rank_window.window.reads > before);
    });
}

/// Measurements may take longer than a short deadline. Then no rank measures, and no operation
/// fails.
#[test]
#[cfg_attr(miri, ignore = "too slow for a deadline of 3 s")]
fn nothing_is_measured_if_a_deadline_is_too_short() {
    on_ranks(3, LATE, |rank_window, rank| {
        let all_reduce = |rank_window: &mut RankWindow, seed| rank_window.check(Op::AllReduce, LARGE / 8, 0, true, seed);
        let is_measured = |rank_window: &RankWindow| rank_window.window.autotune.known(Traffic::Reduced, LARGE).is_some();
        // The short deadline of one rank is enough.
        rank_window.info.timeout = if rank == 1 { TIME_NEEDED * 3 / 4 } else { LATE };
        all_reduce(rank_window, 1);
        assert!(!is_measured(rank_window));
        rank_window.info.timeout = LATE;
        all_reduce(rank_window, 2);
        assert!(is_measured(rank_window));
    });
}

/// All ranks measure again in the same operation.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn copy_modes_are_measured_again() {
    for (traffic, op) in [(Traffic::Reduced, Op::AllReduce), (Traffic::Copied, Op::AllGather)] {
        on_ranks(3, LATE, |rank_window, _| {
            let left = |rank_window: &RankWindow| rank_window.window.autotune.left(traffic, LARGE);
            // The second changes the mode, so it is measured again after two operations.
            rank_window.window.autotune.set(traffic, LARGE, CopyMode::Staged, 1.0);
            rank_window.window.autotune.set(traffic, LARGE, CopyMode::Streamed, 0.02);
            for expected in [2, 1] {
                assert_eq!(left(rank_window), expected);
                rank_window.check(op, LARGE / 8, 0, true, 1);
            }
            assert!(left(rank_window) > 100, "{}", left(rank_window));
            rank_window.check(op, LARGE / 8, 0, true, 2);
        });
    }
}

/// One rank that finds operations quicker or slower than before is enough: all ranks measure again, in
/// the same operation.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn a_change_of_pace_has_all_ranks_measure_again() {
    for (traffic, op) in [(Traffic::Reduced, Op::AllReduce), (Traffic::Copied, Op::AllGather)] {
        on_ranks(3, LATE, |rank_window, rank| {
            let left = |rank_window: &RankWindow| rank_window.window.autotune.left(traffic, LARGE);
            rank_window.check(op, LARGE / 8, 0, true, 1);
            // The second changes the mode, so it is measured again after 20 operations.
            rank_window.window.autotune.set(traffic, LARGE, CopyMode::Staged, 1.0);
            rank_window.window.autotune.set(traffic, LARGE, CopyMode::Streamed, 0.2);
            rank_window.check(op, LARGE / 8, 0, true, 2);
            assert_eq!(left(rank_window), 19);
            // Rank 1 says so in the next operation, and all measure in the one after it.
            rank_window.window.autotune.pretend_changed(traffic, LARGE, rank == 1);
            rank_window.check(op, LARGE / 8, 0, true, 3);
            assert_eq!((left(rank_window), rank_window.window.autotune.doubts()), (0, rank == 1));
            rank_window.check(op, LARGE / 8, 0, true, 4);
            assert!(left(rank_window) > 100 && !rank_window.window.autotune.doubts(), "{}", left(rank_window));
        });
    }
}

/// The system may stop letting ranks read each other's memory, for one if a process gives up its
/// user. Then a measurement finds that, no operation fails, and cma is not taken for fast.
#[test]
#[cfg_attr(miri, ignore = "Miri reads no memory of processes")]
fn rights_that_are_given_up_are_noticed() {
    let cases = [(Traffic::Reduced, Op::AllReduce), (Traffic::Copied, Op::AllGather)];
    for (traffic, op) in cases {
        for before in [CopyMode::Staged, CopyMode::Cma] {
            on_ranks(3, LATE, |rank_window, rank| {
                let count = LARGE / 8;
                rank_window.check(op, count, 0, true, 1);
                let autotune = &mut rank_window.window.autotune;
                // The second changes the mode, so it is measured again after two operations.
                autotune.set(traffic, LARGE, CopyMode::Streamed, 1.0);
                autotune.set(traffic, LARGE, before, 0.02);
                // One rank is enough.
                rank_window.window.cannot_read = rank == 1;
                for seed in 2..6 {
                    rank_window.check(op, count, 0, true, seed);
                }
                let known = rank_window.window.autotune.known(traffic, LARGE);
                assert!(matches!(known, Some(CopyMode::Staged | CopyMode::Streamed)), "{known:?}");
            });
        }
    }
}

/// Ranks that are bound to a processor each spin, although each alone may use fewer processors than
/// there are ranks. Of two ranks on one processor, none does.
#[test]
fn ranks_learn_whether_each_has_a_processor() {
    for (same, is_crowded) in [(false, false), (true, true)] {
        on_ranks(3, LATE, |rank_window, rank| {
            let window = &mut rank_window.window;
            window.patience.set_crowded(!is_crowded);
            let first = if same { 0 } else { rank as u32 };
            let processors = Processors { count: 1, first, last: first };
            window.phases.lines.rank_state(rank).set_affinity((processors, Domains::default()));
            rank_window.check(Op::AllReduce, 1, 0, false, 1);
            assert_eq!(rank_window.window.patience.is_crowded(), is_crowded);
        });
    }
}

/// A measurement ends in time with any number of repetitions and a slow rank.
#[test]
fn a_measurement_ends_long_before_the_deadline() {
    on_ranks(2, LATE, |rank_window, rank| {
        let info = CommInfo { timeout: 2 * TIME_NEEDED, ..rank_window.info.clone() };
        let context = OpContext::new(Descriptor { op: Op::Barrier, seq: 1, ..Descriptor::nothing() }, &info);
        let repetitions = std::cell::Cell::new(0u64);
        let slow = |_: &mut Window, _| {
            repetitions.set(repetitions.get() + 1);
            std::thread::sleep(Duration::from_millis(5 * rank as u64));
            Ok(true)
        };
        let times = autotune::race(&mut rank_window.window, &context, usize::MAX, [true, false], slow).unwrap();
        assert!(times[0] >= 5e6 && times[1] > 1e18, "{times:?}");
        assert!(repetitions.get() > 0 && !context.left().is_zero());
    });
}

/// Ranks in groups: uneven ones, some of one rank, and some whose ranks are not consecutive.
mod in_groups {
    use super::*;

    fn uneven(ranks: usize) -> Groups {
        let ends = [0, 1, 4, 6, 11, 13, 24, 40, 64].map(|end: usize| end.min(ranks));
        let groups: Vec<Vec<usize>> = ends.windows(2).map(|ends| (ends[0]..ends[1]).collect()).collect();
        Groups::of(&groups.iter().filter(|group| !group.is_empty()).map(Vec::as_slice).collect::<Vec<_>>())
    }

    fn in_turns(ranks: usize, count: usize) -> Groups {
        let groups: Vec<Vec<usize>> = (0..count).map(|group| (group..ranks).step_by(count).collect()).collect();
        Groups::of(&groups.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Every operation: inline in the words that leaders give each other and in more, in one shot
    /// and segment by segment.
    #[test]
    fn every_collective_is_right() {
        let layouts = if cfg!(miri) {
            vec![(3, uneven(3))]
        } else {
            let few = [(2, uneven(2)), (8, uneven(8)), (13, in_turns(13, 4))];
            let many = || [(23, uneven(23)), (64, in_turns(64, 8))];
            few.into_iter().chain(every_case().then(many).into_iter().flatten()).collect()
        };
        for (ranks, groups) in layouts {
            on_ranks_in(Some(&groups), CopyMode::Auto, ranks, LATE, |rank_window, _| {
                for (round, count) in [1, 2, 5, 100].into_iter().enumerate() {
                    for &op in OPS.iter() {
                        for in_place in [false, true] {
                            rank_window.check(op, count, (7 * round + 1) % ranks, in_place, round as u64);
                        }
                    }
                }
                if ranks < if every_case() { 20 } else { 10 } && !cfg!(miri) {
                    for (i, &op) in OPS.iter().enumerate() {
                        // One of them in each layout, unless every case is tried.
                        let turn = (i + usize::from(ranks > 2)) % 2;
                        let sizes = [SLOT / 4 + 17, SLOT + 3];
                        for &count in if every_case() { &sizes[..] } else { &sizes[turn..=turn] } {
                            rank_window.check(op, count, 1, true, 3);
                        }
                    }
                }
                assert!(matches!(rank_window.window.layout, Layout::Groups(_)));
            });
        }
    }

    /// Ranks run as far ahead of each other as they can.
    #[test]
    fn many_operations_in_a_row() {
        let rounds = if cfg!(miri) { 8 } else { 1500 };
        for groups in [uneven(5), in_turns(5, 2)] {
            on_ranks_in(Some(&groups), CopyMode::Auto, 5, LATE, |rank_window, _| {
                for round in 0..rounds {
                    let op = OPS[mix(1, round) as usize % OPS.len()];
                    let count = if !cfg!(miri) && round % 50 == 0 { 3 * SLOT / 8 } else { 1 + mix(2, round) as usize % 8 };
                    rank_window.check(op, count, round as usize % 5, round % 2 == 0, round);
                }
            });
        }
    }

    /// Sums of floats depend on their order, which is that of ranks in every layout.
    #[test]
    fn sums_have_the_same_bits_as_without_groups() {
        // Powers by a constant, not powi, whose last bits Miri draws at random.
        const MAGNITUDES: [f64; 9] = [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4];
        let rounds = if cfg!(miri) { 3 } else { 20 };
        let bits = |groups: Option<&Groups>| {
            let results = parking_lot::Mutex::new(Vec::new());
            on_ranks_in(groups, CopyMode::Auto, 9, LATE, |rank_window, rank| {
                for seq in 0..rounds {
                    let value = (mix(seq, rank as u64) % 1000) as f64 * MAGNITUDES[rank];
                    let mut memory = [value, -value / 3.0];
                    for count in [1, 2] {
                        rank_window.seq += 1;
                        let descriptor = Descriptor {
                            op: Op::AllReduce,
                            dtype: DType::F64,
                            redop: Some(ReduceOp::Sum),
                            count: count as u64,
                            seq: rank_window.seq,
                            ..Descriptor::nothing()
                        };
                        let context = OpContext::new(descriptor, &rank_window.info);
                        let chunk = RawSliceMut::of(&mut memory).take(8 * count);
                        let (redop, send) = (Some(ReduceOp::Sum), chunk.as_const());
                        let call = Call { count, redop, send, recv: chunk, ..Call::of(Op::AllReduce, DType::F64) };
                        // SAFETY: the test lends the buffer until this returns.
                        unsafe { rank_window.window.run(&context, &call).unwrap() };
                    }
                    results.lock().push((seq, memory.map(f64::to_bits)));
                }
            });
            let mut results = results.into_inner();
            results.sort_unstable();
            results.dedup();
            assert_eq!(results.len() as u64, rounds, "ranks got different bits");
            results
        };
        let flat = bits(None);
        assert_eq!(bits(Some(&in_turns(9, 4))), flat);
        assert_eq!(bits(Some(&uneven(9))), flat);
    }

    /// Every rank names a rank that calls something else, whichever rank it is: a leader or a
    /// member, of any group. That rank names another one.
    #[test]
    fn a_call_mismatch_is_named_on_every_rank() {
        let odds: &[usize] = if cfg!(miri) { &[0, 4] } else { &[0, 1, 3, 4, 8] };
        for &odd in odds {
            for theirs in [Op::Barrier, Op::Broadcast, Op::AllGather] {
                on_ranks_in(Some(&in_turns(9, 3)), CopyMode::Auto, 9, LATE, |rank_window, rank| {
                    rank_window.check(Op::AllReduce, 1, 0, false, 1);
                    let mut memory = [7u64; 9];
                    let op = if rank == odd { theirs } else { Op::AllReduce };
                    let chunk = RawSliceMut::of(&mut memory);
                    let (input, output) = match op {
                        Op::Barrier => (RawSlice::EMPTY, RawSliceMut::EMPTY),
                        Op::AllGather => (chunk.as_const().skip(8 * rank).take(8), chunk),
                        _ => (chunk.as_const().take(8), chunk.take(8)),
                    };
                    match rank_window.run(op, 1, None, odd, input, output) {
                        // The root of a broadcast waits for no rank. The next operation tells it.
                        Ok(()) if op == Op::Broadcast => {}
                        Err(Error::Mismatch { rank: me, peer, mine, theirs: other, .. }) => {
                            assert_eq!(me, rank);
                            assert!(if rank == odd { peer != odd } else { peer == odd }, "{rank} names {peer}, not {odd}");
                            let (of_odd, of_others) = if rank == odd { (mine, other) } else { (other, mine) };
                            assert_eq!((of_odd.op, of_others.op), (theirs, Op::AllReduce));
                        }
                        other => panic!("{rank}, {odd} calls {theirs}: {other:?}"),
                    }
                    assert_eq!(memory, [7; 9]);
                });
            }
        }
    }

    /// A leader or a member that is late, leaves or fails is named by every other rank.
    #[test]
    fn a_rank_that_is_late_leaves_or_fails_is_named() {
        let deadline = Duration::from_secs(3);
        for (gone, absence, expected) in [
            (0, 0, Cause::Silent { deadline }),
            (4, 0, Cause::Silent { deadline }),
            (0, 1, Cause::Left { last_seq: 5 }),
            (1, 1, Cause::Left { last_seq: 5 }),
            (5, 1, Cause::Left { last_seq: 5 }),
            (2, 2, Cause::Revoked),
            (6, 2, Cause::Revoked),
        ] {
            let timeout = if absence == 0 { deadline } else { LATE };
            on_ranks_in(Some(&in_turns(7, 3)), CopyMode::Auto, 7, timeout, |rank_window, rank| {
                rank_window.check(Op::AllReduce, 1, 0, false, 1);
                if rank == gone {
                    if absence > 0 {
                        rank_window.window.leave(5, absence == 2);
                    }
                    return;
                }
                match rank_window.run(Op::Barrier, 0, None, 0, RawSlice::EMPTY, RawSliceMut::EMPTY) {
                    Err(Error::Peer { rank, cause, op: Op::Barrier, .. }) if rank == gone => assert_eq!(cause, expected),
                    other => panic!("{other:?}"),
                }
            });
        }
    }

    /// A leader that publishes its flag line and ends before it leads: the others have all that
    /// they need.
    #[test]
    fn a_leader_that_ends_after_it_has_published_keeps_none_waiting() {
        on_ranks_in(Some(&in_turns(6, 2)), CopyMode::Auto, 6, LATE, |rank_window, rank| {
            if rank == 1 {
                // What `Window::run` does up to the wait.
                let descriptor = Descriptor { op: Op::Barrier, dtype: DType::U64, seq: 1, ..Descriptor::nothing() };
                let info = rank_window.info.clone();
                let context = OpContext::new(descriptor, &info);
                let window = &mut rank_window.window;
                window.chain = Descriptor::chained(window.chain, context.fingerprint);
                window.begin_phase(&context, &[0; 6]).unwrap();
                window.phases.publish();
                return window.leave(1, false);
            }
            rank_window.run(Op::Barrier, 0, None, 0, RawSlice::EMPTY, RawSliceMut::EMPTY).unwrap();
        });
    }

    /// A rank that waits too long goes on without its leader, so this takes many operations.
    #[test]
    #[cfg_attr(miri, ignore = "in Miri every wait is too long")]
    fn leaders_release_their_members() {
        let rounds = 3000;
        for (op, count) in [(Op::Barrier, 0), (Op::AllReduce, 1)] {
            on_ranks_in(Some(&Groups::of(&[&[0, 1]])), CopyMode::Auto, 2, LATE, |rank_window, rank| {
                (0..rounds).for_each(|round| rank_window.check(op, count, 0, false, round));
                assert_eq!(rank_window.window.releases > 0, rank == 1, "{op}, rank {rank}");
            });
        }
    }

    /// All ranks decide in the first operation in which all wait for all.
    #[test]
    fn the_setting_decides() {
        for (setting, is_grouped) in [(FlagLayout::Hierarchy, true), (FlagLayout::Flat, false), (FlagLayout::Auto, false)] {
            on_ranks(4, LATE, |rank_window, _| {
                rank_window.window.layout = Layout::Undecided(setting);
                rank_window.check(Op::Gather, 1, 0, false, 1);
                assert!(matches!(rank_window.window.layout, Layout::Undecided(_)));
                rank_window.check(Op::AllReduce, 1, 0, false, 1);
                assert_eq!(matches!(rank_window.window.layout, Layout::Groups(_)), is_grouped);
                rank_window.check(Op::AllReduce, 1, 0, false, 2);
            });
        }
    }
}

/// These tests need mapped memory and another process.
#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
mod taken_back {
    use super::*;
    use crate::shm::flag_area::PRESENT;
    use crate::shm::pool::Pool;
    use crate::shm::registered::Heap;
    use crate::sync::Ordering;

    /// An operation lends a range of one of two allocations and fails while a peer, whose process
    /// has ended or not, still writes there. Returns whether this rank sees what that peer writes
    /// afterwards: in the pages of the range, in the other pages of that allocation, and in the
    /// other allocation.
    fn seen_after_a_failure(peer_has_ended: bool, page: PageSize) -> [bool; 3] {
        let mut peer = std::process::Command::new(if peer_has_ended { "true" } else { "cat" })
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        if peer_has_ended {
            // The process remains as a zombie until it is waited for.
            crate::sys::wait_until("the peer lives", || crate::sys::has_ended(crate::sys::Process::with_id(peer.id())));
        }
        let area = Area::new(Arc::new(Region::heap(2 * AREA)), AREA, 0, 2);
        let (members, host) = (Arc::<[usize]>::from([0, 1]), host_group::fuzz::of_threads(2).remove(0));
        let mut window = Window::new(
            area,
            members.clone(),
            members,
            host,
            Arc::new(Patience::new(2)),
            Autotune::new(CopyMode::Staged),
            FlagLayout::Flat,
        );
        window.heap = Heap::new(0, page, Pool::new(window.host.clone()));
        let part = 4 * page.bytes();
        let [lent, other] = [(); 2].map(|()| Arc::new(Allocation { region: Region::create(2 * part).unwrap().into(), part }));
        for allocation in [&lent, &other] {
            window.heap.add(allocation.clone());
            // SAFETY: this is the rank's part, which no other rank knows.
            unsafe { allocation.at(0, 0).write_bytes(1, part) };
        }
        let rank_state = window.phases.lines.rank_state(1);
        rank_state.pid.store(peer.id(), Ordering::Relaxed);
        rank_state.namespace.store(window.namespace, Ordering::Relaxed);
        rank_state.state.store(PRESENT, Ordering::Relaxed);
        rank_state.borrows.store(1, Ordering::Relaxed);
        let info = info(0, 2, LATE);
        let context = OpContext::new(Descriptor { op: Op::AllReduce, seq: 1, ..Descriptor::nothing() }, &info);
        // The output is in the middle of the third page, the input in the first.
        let input = RawSlice { ptr: lent.at(0, 8), len: 800 };
        let output = RawSliceMut { ptr: lent.at(0, 2 * page.bytes() + 8), len: 800 };
        assert!(window.lend_memory(&context, input, Some(output)).is_some());
        assert!(window.lend_memory(&context, input, Some(output)).is_none(), "the buffers were lent twice");

        window.leave(1, true);
        assert!(window.lend_memory(&context, input, Some(output)).is_none(), "the buffers were lent after they were revoked");
        let pages =
            [(&lent, 2), (&lent, 0), (&other, 2)].map(|(allocation, n)| (allocation, n * page.bytes()..(n + 1) * page.bytes()));
        let seen = pages.map(|(allocation, bytes)| {
            let theirs = allocation.region.mapped_again().unwrap();
            let seen = bytes.step_by(512).map(|at| {
                // SAFETY: both addresses are within this rank's part, which no thread uses
                // meanwhile.
                unsafe {
                    assert_eq!(allocation.at(0, at).read_volatile(), 1, "the content is lost");
                    theirs.at(at).write_volatile(2);
                    allocation.at(0, at).read_volatile() == 2
                }
            });
            let seen: Vec<bool> = seen.collect();
            assert!(seen.iter().all(|&one| one == seen[0]), "only part of a page is seen");
            seen[0]
        });
        peer.kill().unwrap();
        peer.wait().unwrap();
        seen
    }

    #[test]
    fn a_failure_touches_only_what_the_operation_had_lent() {
        for page in [PageSize::system(), PageSize::of(64 << 10)] {
            assert_eq!(seen_after_a_failure(true, page), [true; 3], "memory was made private although the writer has ended");
            assert_eq!(seen_after_a_failure(false, page), [false, true, true], "{page:?}");
        }
    }
}

/// The phases of two ranks that share flags.
fn two_ranks() -> [Phases<FlagArea>; 2] {
    let region = Arc::new(Region::heap(2 * AREA));
    [0, 1].map(|rank| {
        let area = Area::new(region.clone(), AREA, rank, 2);
        Phases::new(FlagArea { parts: area.parts().clone() }, rank, 2)
    })
}

/// What a rank knows of its peers may be older than half of the range of the phases in shared
/// memory. It must not read as new then.
#[test]
fn old_knowledge_of_peers_is_not_taken_for_new() {
    for passed in [1 << 20, (1 << 31) + 1000, 3 << 30, u32::MAX - 2] {
        let mut ranks = two_ranks();
        // Both see each other's first phase, and then nothing of each other for long.
        ranks.iter_mut().for_each(Phases::publish);
        let [root, reader] = &mut ranks;
        assert!(root.has_reached(1, 1) && reader.has_reached(0, 1));
        root.finish();
        reader.finish();
        root.pass(passed);
        reader.pass(passed);
        let last = 1u32.wrapping_add(passed);
        assert!(!reader.has_reached(0, last.wrapping_add(1)), "after {passed} phases");
        let mut ahead = 0;
        while root.is_retired(1, root.next()) && ahead < 100 {
            root.publish();
            ahead += 1;
        }
        assert_eq!(ahead, SLOTS, "after {passed} phases, the root overwrites no slot that was not read");
    }
}

/// A rank may have staged something so long ago that 32 bits do not tell whether its peers have read it.
/// Its stage must be free all the same.
#[test]
fn what_was_staged_long_ago_has_been_read() {
    for passed in [1 << 20, (1 << 31) + 1000, 3 << 30, u32::MAX - 2] {
        let mut ranks = two_ranks();
        ranks.iter_mut().for_each(Phases::publish);
        let [stages, reads] = &mut ranks;
        let first = stages.finish();
        let is_read = |stages: &Phases<FlagArea>, phase| super::flags::has_finished(&stages.lines, 1, phase, stages.last());
        assert!(!is_read(stages, first), "it has not been read");
        reads.finish();
        for round in 1..=3 {
            stages.pass(passed);
            reads.pass(passed);
            assert!(is_read(stages, first), "after {round} times {passed} phases");
        }
        stages.publish();
        let latest = stages.finish();
        assert!(!is_read(stages, latest) && is_read(stages, first), "after {passed} phases");
    }
}

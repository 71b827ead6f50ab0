//! A peer that writes arbitrary bytes to its state, its flag lines and the lines of a group leader.

use std::sync::Arc;
use std::time::Duration;

use super::flag_area::FlagArea;
use super::flags::{FlagLine, FlagLines, Phases, SLOTS};
use super::groups::{Groups, PhaseGroups};
use super::hierarchy::GroupLines;
use super::registered::Allocation;
use super::window::Layout;
use super::{Autotune, Window};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::config::{CopyMode, FlagLayout};
use crate::failure::{CommInfo, OpContext};
use crate::host_group;
use crate::host_group::area::{AREA, Area, USABLE};
use crate::host_group::stage::FIRST;
use crate::schedule::select::has_window;
use crate::schedule::{Blocks, elements};
use crate::sync::Ordering;
use crate::sys::{Patience, Region};
use crate::types::{DType, Descriptor, Member, Op, ReduceOp};

/// The operations that run in a window.
fn ops() -> Vec<Op> {
    Op::ALL.iter().copied().filter(|op| has_window(*op)).collect()
}

/// Words of one rank's buffer: for inline, one-shot and segment by segment.
const COUNTS: [usize; 4] = [1, 6, 500, 40_000];

/// Runs one operation with such a peer. The first bytes say what this rank calls and how far the
/// peer keeps to the protocol; the rest fills the peer's state and its lines. The operation may
/// fail, but it may not panic, wait forever or access other memory.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some((&[what, keeps, count], written)) = bytes.split_first_chunk::<3>() else { return };
    let (op, count) = (ops()[usize::from(what) % ops().len()], COUNTS[usize::from(count) % COUNTS.len()]);
    let region = Arc::new(Region::heap(2 * AREA));
    // The layout is decided by the setting, or there are groups: both ranks lead one, or the peer
    // leads this rank.
    let groups: Option<&[&[usize]]> = match keeps >> 5 & 3 {
        0 | 1 => None,
        2 => Some(&[&[0], &[1]]),
        _ => Some(&[&[0, 1]]),
    };
    let (rank, other) = if groups.is_some_and(|groups| groups.len() == 1) { (1, 0) } else { (0, 1) };
    let host = host_group::fuzz::of_threads(2).remove(rank);
    let (area, members) = (Area::new(region.clone(), AREA, rank, 2), Arc::<[usize]>::from([0, 1]));
    let peer = FlagArea { parts: area.parts().clone() };
    let patience = Arc::new(Patience::new(usize::MAX));
    let layout = if keeps & 32 == 0 { FlagLayout::Flat } else { FlagLayout::Hierarchy };
    let mut window = Window::new(area, members.clone(), members, host, patience, Autotune::new(CopyMode::Staged), layout);
    if let Some(groups) = groups {
        window.layout = Layout::Groups(Box::new(PhaseGroups::same(Groups::of(groups))));
    }
    let registered = Arc::new(Allocation { region: Arc::new(Region::heap(2 * BUFFER)), part: BUFFER });
    window.heap().add(registered.clone());

    // SAFETY: the peer's state and its lines consist of words, for which all bits are valid. No
    // other thread uses them yet.
    unsafe { std::ptr::copy_nonoverlapping(written.as_ptr(), region.at(other * AREA), written.len().min(USABLE)) };
    if keeps & 16 == 0 {
        // The peer announces a stage that exists.
        peer.rank_state(other).stage.store(FIRST, Ordering::Relaxed);
    }
    let descriptor = Descriptor {
        op,
        dtype: DType::U64,
        redop: op.reduces().then_some(ReduceOp::Sum),
        count: count as u64,
        seq: 1,
        ..Descriptor::nothing()
    };
    let members = vec![Member { host: "node-a".into(), pid: 1 }; 2];
    let info =
        CommInfo { rank, members, timeout: Duration::from_millis(1), start_timeout: Duration::ZERO, cancel: Arc::default() };
    let context = OpContext::new(descriptor, &info);
    for phase in 1..=SLOTS as u32 {
        let line: &FlagLine = peer.line(other, Phases::<FlagArea>::slot(phase));
        if keeps & 1 != 0 {
            // The peer has published every phase that this rank waits for.
            line.phase.store(phase + (1 << 20) * SLOTS as u32, Ordering::Relaxed);
        }
        if keeps & 2 != 0 {
            let fingerprint = Descriptor::chained(0, context.fingerprint);
            line.agree(fingerprint);
            if keeps & 1 != 0 {
                peer.leader_lines(other, Phases::<FlagArea>::slot(phase)).agree(phase, fingerprint);
            }
        }
    }
    let is_registered = keeps & 4 != 0;
    let root = usize::from(keeps >> 3 & 1);
    let (given, got, _) = elements(op, rank, root, 2, count, &Blocks::Even(count));
    let mut private = [vec![1u64; given], vec![2u64; got]];
    let (input, output) = if is_registered && given.max(got) * 16 <= BUFFER {
        let input = RawSlice { ptr: registered.at(rank, 0), len: given * 8 };
        (input, RawSliceMut { ptr: registered.at(rank, BUFFER / 2), len: got * 8 })
    } else {
        let [input, output] = &mut private;
        (RawSlice::of(input), RawSliceMut::of(output))
    };
    let (root, redop) = (usize::from(keeps >> 3 & 1), Some(ReduceOp::Sum));
    let call = Call { count, root, redop, send: input, recv: output, ..Call::of(op, DType::U64) };
    // SAFETY: the buffers live until this returns, and the peer is not a thread.
    let outcome = unsafe { window.run(&context, &call) };
    if let Err(error) = &outcome {
        assert!(!error.to_string().is_empty());
    }
    // `leave` would wait for seconds for a peer that claims to write.
    peer.rank_state(other).borrows.store(0, Ordering::Relaxed);
    window.leave(1, outcome.is_err());
}

/// Bytes of a registered buffer's part.
const BUFFER: usize = 64 << 10;

/// For each operation and each kind of groups, a peer that keeps to the protocol and one whose
/// state and lines are full of bytes.
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let full: Vec<u8> = (0..USABLE).map(|at| (at % 251) as u8).collect();
    let layouts = [0, 2 << 5, 3 << 5];
    let of = |op| layouts.into_iter().flat_map(move |groups| [(op, 7 | groups, op, false), (op, 3 | groups, 1, true)]);
    let samples = (0..ops().len() as u8).flat_map(of);
    samples.map(|(op, keeps, count, is_full)| [&[op, keeps, count][..], if is_full { &full } else { &[] }].concat()).collect()
}

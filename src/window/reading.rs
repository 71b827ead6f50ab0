//! Private memory with nothing staged: the system copies what each rank needs out of the other processes.
//!
//! Every byte moves once less than through slots, and none is written into a cache from which another core has to fetch it.
//! But the system looks up every page. Which is quicker depends on the machine; [`trial`] finds out.

use super::direct::Memory;
use super::trial::{self, LARGE, Traffic};
use super::{NOTES, Window};
use crate::attempt::Attempt;
use crate::config::Passage;
use crate::error::{Cause, Result};
use crate::schedule::chunk;
use crate::sys;
use crate::types::Op;

/// Carries out an operation in which everybody gets data of everybody as it is; false, and nothing done, if it is not one, or
/// if it is better staged. (Where one rank has what the others want, it had better help them: staged, it copies, too.)
pub(super) fn copy(window: &mut Window, attempt: &Attempt<'_>, memory: Memory<'_>) -> Result<bool> {
    let call = memory.call;
    if !matches!(call.op, Op::AllGather | Op::AllGatherV | Op::AllToAll) {
        return Ok(false);
    }
    let bytes = call.blocks.range(memory.ranks - 1).end * call.element;
    if bytes < LARGE || trial::passage(window, attempt, Traffic::Copied, bytes)? != Passage::Read {
        return Ok(false);
    }
    copy_now(window, attempt, memory)
}

/// As [`copy`], without asking whether it is better; false if a rank's input would be overwritten while others read it.
pub(super) fn copy_now(window: &mut Window, attempt: &Attempt<'_>, memory: Memory<'_>) -> Result<bool> {
    let Memory { call, rank, ranks } = memory;
    let (input, output) = (call.input.ptr.addr(), call.output.ptr.addr());
    let overlap = input < output + call.output.len && output < input + call.input.len;
    let is_overwritten = call.op == Op::AllToAll && overlap;
    let mut notes = [0; NOTES];
    (notes[0], notes[1]) = (call.input.ptr.expose_provenance() as u64, is_overwritten.into());
    let turn = window.exchange(attempt, notes)?;
    let theirs: Vec<_> = (0..ranks).map(|peer| window.turns.line(peer, turn).notes()).collect();
    if is_overwritten || (0..ranks).any(|peer| peer != rank && theirs[peer][1] != 0) {
        return Ok(false);
    }
    // Each begins with the next, so that not all read from one.
    for peer in (0..ranks).map(|step| (rank + step) % ranks) {
        let to = call.blocks.range(peer);
        // An all-gather's input is the block itself.
        let from = if call.op == Op::AllToAll { call.blocks.range(rank) } else { 0..to.len() };
        let to = memory.output(&to);
        if peer == rank {
            // SAFETY: the caller of `Window::run` vouches for both buffers.
            unsafe { memory.copy(memory.input(&from), to, from.len()) };
        } else {
            let address = theirs[peer][0] + (from.start * call.element) as u64;
            // SAFETY: the caller of `Window::run` vouches for the output.
            unsafe { read(window, attempt, peer, address, to, from.len() * call.element)? };
        }
    }
    // Nobody returns before everybody has read.
    window.meet(attempt)?;
    Ok(true)
}

/// Bytes that are read from each rank at once, and reduced while they are in the cache.
const BLOCK: usize = 128 << 10;

/// Memory to read into, aligned for every element.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

/// Everybody reduces its slice from the others' inputs, then takes their slices from their outputs.
///
/// In place that is no different: in the first half a rank writes only its own slice, which nobody else reads then; in the second
/// only the others', of which nobody reads this rank's copy.
pub(super) fn all_reduce(
    window: &mut Window,
    attempt: &Attempt<'_>,
    memory: Memory<'_>,
    parts: &mut Vec<*const u8>,
) -> Result<()> {
    let Memory { call, rank, ranks } = memory;
    let address = |ptr: *const u8| ptr.expose_provenance() as u64;
    let mut notes = [0; NOTES];
    (notes[0], notes[1]) = (address(call.input.ptr), address(call.output.ptr));
    let turn = window.exchange(attempt, notes)?;
    let addresses: Vec<_> = (0..ranks).map(|peer| window.turns.line(peer, turn).notes()).collect();

    let mine = chunk(call.count, ranks, rank);
    let block = BLOCK / call.element;
    let room = (mine.len().min(block) * call.element).div_ceil(size_of::<Aligned>());
    let mut scratch = vec![Aligned([0; 64]); (ranks - 1) * room];
    for start in mine.clone().step_by(block) {
        let elements = start..(start + block).min(mine.end);
        let bytes = elements.len() * call.element;
        parts.clear();
        let mut rooms = scratch.chunks_exact_mut(room.max(1));
        for (peer, &[input, ..]) in addresses.iter().enumerate() {
            if peer == rank {
                parts.push(memory.input(&elements));
                continue;
            }
            let room = rooms.next().expect("there is one for each other rank").as_mut_ptr().cast::<u8>();
            // SAFETY: there is room for a block.
            unsafe { read(window, attempt, peer, input + (start * call.element) as u64, room, bytes)? };
            parts.push(room);
        }
        // SAFETY: the parts are this rank's input and rooms, of so many elements; the caller of `Window::run` vouches for the
        // buffers.
        unsafe { memory.fold(parts, memory.output(&elements), elements.len()) };
    }
    window.meet(attempt)?;
    // Each begins with the next, so that not all read from one.
    for peer in (1..ranks).map(|step| (rank + step) % ranks) {
        let theirs = chunk(call.count, ranks, peer);
        let from = addresses[peer][1] + (theirs.start * call.element) as u64;
        // SAFETY: the caller of `Window::run` vouches for the output.
        unsafe { read(window, attempt, peer, from, memory.output(&theirs), theirs.len() * call.element)? };
    }
    // Nobody returns before everybody has read.
    window.meet(attempt)
}

/// Reads memory of another rank.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and nobody else touches it meanwhile.
unsafe fn read(window: &mut Window, attempt: &Attempt<'_>, peer: usize, from: u64, to: *mut u8, len: usize) -> Result<()> {
    let process = window.process(peer).ok_or(std::io::ErrorKind::NotFound.into());
    // SAFETY: passed on.
    let Err(error) = process.and_then(|pid| unsafe { sys::read_process(pid, from, to, len) }) else { return Ok(()) };
    // A rank that is gone, or has failed, no longer has the memory that it spoke of.
    window.look_after_peers(attempt, peer, window.turns.next())?;
    tracing::error!(rank = window.members[peer], %error, "memory of another process cannot be read");
    Err(attempt.failed(window.members[peer], Cause::Corrupt("the address of a buffer that cannot be read")))
}

/// Whether every rank can read the memory of every other.
pub(super) fn is_allowed(window: &mut Window, attempt: &Attempt<'_>) -> Result<bool> {
    // Something to read that is not the same everywhere.
    let canary = [u64::from(std::process::id()), attempt.fingerprint, window.rank as u64];
    let mut notes = [0; NOTES];
    notes[0] = canary.as_ptr().expose_provenance() as u64;
    notes[1..=canary.len()].copy_from_slice(&canary);
    let turn = window.exchange(attempt, notes)?;
    let can_read = |peer: usize| {
        let notes = window.turns.line(peer, turn).notes();
        let mut seen = [0u64; 3];
        // SAFETY: `seen` is as long.
        let read = window.process(peer).map(|pid| unsafe { sys::read_process(pid, notes[0], seen.as_mut_ptr().cast(), 24) });
        matches!(read, Some(Ok(()))) && seen[..] == notes[1..=3]
    };
    let all = window.peers().all(can_read);
    let mut notes = [0; NOTES];
    notes[0] = all.into();
    // The canaries live until everybody has read them.
    let turn = window.exchange(attempt, notes)?;
    Ok((0..window.members.len()).all(|peer| window.turns.line(peer, turn).notes()[0] != 0))
}

//! Private memory with nothing staged: the system copies what each rank needs out of the other processes.
//!
//! Every byte moves once less than through slots, and none is written into a cache from which another core has to fetch it.
//! But the system looks up every page. Which is quicker depends on the machine; [`super::autotune`] finds out.

use super::flags::WORDS;
use super::pipeline::Memory;
use super::window::{CacheLine, Window};
use crate::buffer::RawSlice;
use crate::error::{Cause, Result};
use crate::failure::OpContext;
use crate::schedule::chunk;
use crate::sys;
use crate::types::Op;

/// Carries out an operation in which everybody gets data of everybody as it is; false, and nothing done, if a rank's input would be overwritten while others read it, or cannot
/// be read by the system at all.
pub(super) fn copy(window: &mut Window, context: &OpContext<'_>, memory: Memory<'_>) -> Result<bool> {
    let Memory { call, rank, ranks } = memory;
    let (input, output) = (call.input.ptr.addr(), call.output.ptr.addr());
    let overlap = input < output + call.output.len && output < input + call.input.len;
    let cannot_lend = (call.op == Op::AllToAll && overlap) || !is_readable(call.input);
    let mut words = [0; WORDS];
    (words[0], words[1]) = (call.input.ptr.expose_provenance() as u64, cannot_lend.into());
    let phase = window.exchange(context, words)?;
    note(window, phase);
    if window.told.iter().any(|words| words[1] != 0) {
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
            let address = window.told[peer][0] + (from.start * call.element) as u64;
            // SAFETY: the caller of `Window::run` vouches for the output; in place others read only this rank's own block of it.
            unsafe { read(window, context, peer, address, to, from.len() * call.element)? };
        }
    }
    depart(window, context)?;
    Ok(true)
}

/// Keeps what everybody told in a phase, before the lines are used again.
fn note(window: &mut Window, phase: u32) {
    for peer in 0..window.told.len() {
        window.told[peer] = window.phases.line(peer, phase).words();
    }
}

/// The last phase: nobody returns before everybody has read. What was read counts only if nobody had failed by then: a rank
/// that fails says so before its memory is its caller's again.
fn depart(window: &mut Window, context: &OpContext<'_>) -> Result<()> {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    window.check_nobody_failed(context)?;
    window.meet(context)
}

/// Whether the system can read this memory of the own process, as far as the ends tell. Memory of devices it cannot.
fn is_readable(memory: RawSlice) -> bool {
    let Some(last) = memory.len.checked_sub(1) else { return true };
    [0, last].into_iter().all(|at| {
        let address = memory.skip(at).ptr.expose_provenance() as u64;
        let mut byte = 0u8;
        // SAFETY: `byte` is as long.
        unsafe { sys::read_process(std::process::id(), address, &mut byte, 1) }.is_ok()
    })
}

/// Bytes that are read from all other ranks together, and then reduced while they are in the cache.
const BLOCK: usize = 128 << 10;

/// Bytes that are read before it is looked whether to go on.
const PIECE: usize = 4 << 20;

/// Everybody reduces its slice from the others' inputs, then takes their slices from their outputs. False, and nothing done, if
/// the system cannot read a rank's buffers.
///
/// In place that is no different: in the first half a rank writes only its own slice, which nobody else reads then; in the second
/// only the others', of which nobody reads this rank's copy.
pub(super) fn all_reduce(
    window: &mut Window,
    context: &OpContext<'_>,
    memory: Memory<'_>,
    parts: &mut Vec<*const u8>,
) -> Result<bool> {
    let Memory { call, rank, ranks } = memory;
    let address = |ptr: *const u8| ptr.expose_provenance() as u64;
    let mut words = [0; WORDS];
    (words[0], words[1]) = (address(call.input.ptr), address(call.output.ptr));
    words[2] = (is_readable(call.input) && is_readable(call.output.as_const())).into();
    let phase = window.exchange(context, words)?;
    note(window, phase);
    if window.told.iter().any(|words| words[2] == 0) {
        return Ok(false);
    }
    let mine = chunk(call.count, ranks, rank);
    let room = (BLOCK / (ranks - 1).max(1)).next_multiple_of(size_of::<CacheLine>());
    let block = room / call.element;
    let mut rooms = std::mem::take(&mut window.rooms);
    rooms.resize((ranks - 1) * room / size_of::<CacheLine>(), CacheLine([0; 64]));
    for start in mine.clone().step_by(block) {
        let elements = start..(start + block).min(mine.end);
        let bytes = elements.len() * call.element;
        parts.clear();
        let mut free = rooms.chunks_exact_mut(room / size_of::<CacheLine>());
        for peer in 0..ranks {
            if peer == rank {
                parts.push(memory.input(&elements));
                continue;
            }
            let room = free.next().expect("there is one for each other rank").as_mut_ptr().cast::<u8>();
            let from = window.told[peer][0] + (start * call.element) as u64;
            // SAFETY: there is room for a block.
            unsafe { read(window, context, peer, from, room, bytes)? };
            parts.push(room);
        }
        // SAFETY: the parts are this rank's input and rooms, of so many elements; the caller of `Window::run` vouches for the
        // buffers.
        unsafe { memory.fold(parts, memory.output(&elements), elements.len()) };
    }
    window.rooms = rooms;
    window.meet(context)?;
    // Each begins with the next, so that not all read from one.
    for peer in (1..ranks).map(|step| (rank + step) % ranks) {
        let theirs = chunk(call.count, ranks, peer);
        let from = window.told[peer][1] + (theirs.start * call.element) as u64;
        // SAFETY: the caller of `Window::run` vouches for the output, of which others read only this rank's slice.
        unsafe { read(window, context, peer, from, memory.output(&theirs), theirs.len() * call.element)? };
    }
    depart(window, context)?;
    Ok(true)
}

/// Reads memory of another rank.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and nobody else touches it meanwhile.
unsafe fn read(window: &mut Window, context: &OpContext<'_>, peer: usize, from: u64, to: *mut u8, len: usize) -> Result<()> {
    #[cfg(test)]
    {
        window.reads += 1;
    }
    let process = window.process(peer).unwrap_or(u32::MAX);
    for at in (0..len).step_by(PIECE) {
        context.patience_with(window.members[peer])?;
        // SAFETY: within what the caller vouches for. If the peer has ended, its number may be another's by now: then this
        // operation fails in the next phase, which the peer does not come to.
        let read = unsafe { sys::read_process(process, from + at as u64, to.add(at), PIECE.min(len - at)) };
        let Err(error) = read else { continue };
        // A rank that is gone, or has failed, no longer has the memory that it spoke of. The phase after the next it cannot come to
        // without this one, so who waits for it learns why.
        let never = window.phases.next().wrapping_add(1);
        // The process has ended, which its watch may notice a little later.
        if sys::is_no_process(&error) {
            window.wait(context, peer, never)?;
        }
        window.look_after_peers(context, peer, never)?;
        tracing::error!(rank = window.members[peer], %error, "memory of another process cannot be read");
        return Err(context.failed(window.members[peer], Cause::Corrupt("the address of a buffer that cannot be read")));
    }
    Ok(())
}

/// Whether every rank can read the memory of every other.
pub(super) fn is_allowed(window: &mut Window, context: &OpContext<'_>) -> Result<bool> {
    // Something to read that is not the same everywhere.
    let canary = [u64::from(std::process::id()), context.fingerprint, window.rank as u64];
    let mut words = [0; WORDS];
    words[0] = canary.as_ptr().expose_provenance() as u64;
    words[1..=canary.len()].copy_from_slice(&canary);
    let phase = window.exchange(context, words)?;
    let can_read = |peer: usize| {
        let words = window.phases.line(peer, phase).words();
        let mut seen = [0u64; 3];
        // SAFETY: `seen` is as long.
        let read = window.process(peer).map(|pid| unsafe { sys::read_process(pid, words[0], seen.as_mut_ptr().cast(), 24) });
        matches!(read, Some(Ok(()))) && seen[..] == words[1..=3]
    };
    let all = window.peers().all(can_read);
    let mut words = [0; WORDS];
    words[0] = all.into();
    // The canaries live until everybody has read them.
    let phase = window.exchange(context, words)?;
    Ok((0..window.members.len()).all(|peer| window.phases.line(peer, phase).words()[0] != 0))
}

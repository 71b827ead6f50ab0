//! Cross-memory attach: the system copies what each rank needs from the private memory of the other
//! processes.
//!
//! Every byte moves one time less than through slots, and none is written into a cache from which
//! another core has to fetch it. But the system looks up every page, and each rank has to touch its
//! pages before. [`super::autotune`] measures which is faster on this machine.

use super::flags::WORDS;
use super::part::Part;
use super::window::{CacheLine, Window};
use crate::buffer::RawSlice;
use crate::error::{Cause, Result};
use crate::failure::OpContext;
use crate::schedule::chunk;
use crate::sys::{self, Process};

/// Runs an operation that copies blocks. Returns false on all ranks if a rank's input would be
/// overwritten while peers read it, or if the system cannot read an input, such as memory of a
/// device. Then outputs may have been written, but no input was.
pub(super) fn copy(window: &mut Window, context: &OpContext<'_>, part: Part<'_>) -> Result<bool> {
    let Part { call, rank, ranks, .. } = part;
    // SAFETY: the caller of `Window::run` vouches for the input.
    unsafe { call.send.fault_in() };
    let mut words = [0; WORDS];
    words[0] = call.send.ptr.expose_provenance() as u64;
    words[1] = part.overwrites_what_peers_read().into();
    let phase = window.exchange(context, &words)?;
    keep_words(window, phase);
    if window.peer_words.iter().any(|words| words[1] != 0) {
        return Ok(false);
    }
    let inputs = part.inputs();
    let mut is_read = true;
    // Each rank begins at its own number, so that not all read from the same rank.
    for peer in (0..ranks).map(|step| (rank + step) % ranks).filter(|peer| inputs.contains(peer)) {
        let (from, to) = part.taken(peer);
        let to = part.output(&to);
        if peer == rank {
            // SAFETY: the caller of `Window::run` vouches for both buffers.
            unsafe { part.copy(part.input(&from), to, from.len()) };
        } else if is_read {
            let address = window.peer_words[peer][0] + (from.start * part.element) as u64;
            // SAFETY: the caller of `Window::run` vouches for the output. In place, peers read only
            // this rank's own block of it.
            is_read = unsafe { read(window, context, peer, address, to, from.len() * part.element)? };
        }
    }
    last_phase(window, context, is_read)
}

/// Keeps the words of all ranks in a phase, before the flag lines are used again.
fn keep_words(window: &mut Window, phase: u32) {
    for peer in 0..window.peer_words.len() {
        window.peer_words[peer] = window.phases.line(peer, phase).words();
    }
}

/// Runs the last phase: no rank returns before all have read. Returns whether all have read what
/// they need, the same on all ranks. What this rank has read is valid only if no peer has failed by
/// now: a rank that fails says so before its memory belongs to its caller again.
fn last_phase(window: &mut Window, context: &OpContext<'_>, is_read: bool) -> Result<bool> {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    window.check_no_peer_failed(context)?;
    window.all(context, is_read)
}

/// Whether the system can read this memory of this process. Only its ends are tried. The system
/// cannot read device memory.
fn is_readable(part: RawSlice) -> bool {
    let Some(last) = part.len.checked_sub(1) else { return true };
    let own = Process::own();
    [0, last].into_iter().all(|at| {
        let address = part.skip(at).ptr.expose_provenance() as u64;
        let mut byte = 0u8;
        // SAFETY: `byte` has room for one byte.
        unsafe { sys::read_process(own, address, &mut byte, 1) }.is_ok()
    })
}

/// Bytes that are read from all peers together and reduced while they are in the cache.
const BLOCK: usize = 128 << 10;

/// Bytes that are read between two checks of the deadline.
const MOST_READ: usize = 4 << 20;

/// Whether the system lets this rank read the ends of all peers' inputs and outputs now. A process
/// may have given up rights since [`is_allowed`].
fn can_read_peers(window: &Window, len: usize) -> bool {
    #[cfg(test)]
    if window.cannot_read {
        return false;
    }
    window.peers().all(|peer| {
        let Some(process) = window.process(peer) else { return false };
        window.peer_words[peer][..2].iter().all(|&buffer| {
            let mut byte = 0u8;
            let last = buffer.wrapping_add((len - 1) as u64);
            // SAFETY: `byte` has room for one byte.
            unsafe { sys::read_process(process, last, &mut byte, 1) }.is_ok()
        })
    })
}

/// Runs an all-reduce: each rank reduces its chunk from the peers' inputs, then copies the peers'
/// chunks from their outputs. Returns false on all ranks, and has done nothing, if the system
/// cannot read a rank's buffers.
///
/// This also holds in place. In the first half a rank writes only its own chunk, which no peer
/// reads then. In the second half it writes only the peers' chunks, and no peer reads its copies of
/// those.
pub(super) fn all_reduce(
    window: &mut Window,
    context: &OpContext<'_>,
    part: Part<'_>,
    parts: &mut Vec<*const u8>,
) -> Result<bool> {
    let Part { call, rank, ranks, .. } = part;
    let address = |ptr: *const u8| ptr.expose_provenance() as u64;
    // Peers read the output where this rank has just written it.
    // SAFETY: the caller of `Window::run` vouches for the input.
    unsafe { call.send.fault_in() };
    let mut words = [0; WORDS];
    (words[0], words[1]) = (address(call.send.ptr), address(call.recv.ptr));
    // In place, both are the same memory.
    let is_in_place = call.send.ptr == call.recv.ptr.cast_const();
    words[2] = (is_readable(call.send) && (is_in_place || is_readable(call.recv.as_const()))).into();
    let phase = window.exchange(context, &words)?;
    keep_words(window, phase);
    if window.peer_words.iter().any(|words| words[2] == 0) {
        return Ok(false);
    }
    // Once a rank writes its output, there is no way back: in place, its input is gone.
    let can_read = can_read_peers(window, call.send.len);
    if !window.all(context, can_read)? {
        window.autotune.may_read = Some(false);
        return Ok(false);
    }
    reduce_chunk(window, context, part, parts)?;
    window.barrier(context)?;
    // Each rank begins with the next one, so that not all read from the same rank.
    for peer in (1..ranks).map(|step| (rank + step) % ranks) {
        let theirs = chunk(call.count, ranks, peer);
        let from = window.peer_words[peer][1] + (theirs.start * part.element) as u64;
        // SAFETY: the caller of `Window::run` vouches for the output, of which peers read only this
        // rank's chunk.
        unsafe { read_known(window, context, peer, from, part.output(&theirs), theirs.len() * part.element)? };
    }
    last_phase(window, context, true)
}

/// Reduces this rank's chunk of all inputs to its output, block by block. `window.peer_words` has
/// the addresses of the inputs.
fn reduce_chunk(window: &mut Window, context: &OpContext<'_>, part: Part<'_>, parts: &mut Vec<*const u8>) -> Result<()> {
    let Part { call, rank, ranks, .. } = part;
    let mine = chunk(call.count, ranks, rank);
    let room = (BLOCK / (ranks - 1).max(1)).next_multiple_of(size_of::<CacheLine>());
    let block = room / part.element;
    let mut scratch = std::mem::take(&mut window.scratch);
    scratch.resize((ranks - 1) * room / size_of::<CacheLine>(), CacheLine([0; 64]));
    for start in mine.clone().step_by(block) {
        let elements = start..(start + block).min(mine.end);
        let bytes = elements.len() * part.element;
        parts.clear();
        let mut free = scratch.chunks_exact_mut(room / size_of::<CacheLine>());
        for peer in 0..ranks {
            if peer == rank {
                parts.push(part.input(&elements));
                continue;
            }
            let copy = free.next().expect("the scratch memory has room for each peer").as_mut_ptr().cast::<u8>();
            let from = window.peer_words[peer][0] + (start * part.element) as u64;
            // SAFETY: each peer's part of the scratch memory holds a block.
            unsafe { read_known(window, context, peer, from, copy, bytes)? };
            parts.push(copy);
        }
        // SAFETY: the parts are this rank's input and copies of its peers' inputs, of `elements`
        // each. The caller of `Window::run` vouches for the buffers.
        unsafe { part.fold(parts, part.output(&elements), elements.len()) };
    }
    window.scratch = scratch;
    Ok(())
}

/// As [`read`], of memory that its rank has read itself: if this rank cannot, that is an error.
///
/// # Safety
///
/// As for [`read`].
unsafe fn read_known(
    window: &mut Window,
    context: &OpContext<'_>,
    peer: usize,
    from: u64,
    to: *mut u8,
    len: usize,
) -> Result<()> {
    // SAFETY: the caller keeps the same contract.
    match unsafe { read(window, context, peer, from, to, len)? } {
        true => Ok(()),
        false => Err(context.failed(window.members[peer], Cause::Corrupt("the address of a buffer that cannot be read"))),
    }
}

/// Reads memory of another rank. Returns false if the system cannot read it, although the rank has
/// neither ended nor failed.
///
/// # Safety
///
/// `to` is writable for `len` bytes, and no other thread accesses it meanwhile.
unsafe fn read(window: &mut Window, context: &OpContext<'_>, peer: usize, from: u64, to: *mut u8, len: usize) -> Result<bool> {
    #[cfg(test)]
    {
        window.reads += 1;
        if window.cannot_read {
            return Ok(false);
        }
    }
    let process = window.process(peer).unwrap_or(Process::with_id(u32::MAX));
    for at in (0..len).step_by(MOST_READ) {
        context.patience_with(window.members[peer], Some(at as u64))?;
        // SAFETY: the range is within what the caller vouches for. If the peer has ended, its
        // process id may be another process's by now: then this operation fails in the next phase,
        // which the peer does not reach.
        let read = unsafe { sys::read_process(process, from + at as u64, to.add(at), MOST_READ.min(len - at)) };
        let Err(error) = read else { continue };
        // A peer that has ended or failed no longer has the memory that it announced. No peer can
        // reach the phase after the next one without this rank, so waiting for it returns the
        // reason.
        let never = window.phases.next().wrapping_add(1);
        // The process has ended; the failure detector may notice a little later.
        if sys::is_no_process(&error) {
            window.wait(context, peer, never)?;
        }
        window.check_peers_can_reach(context, peer, never)?;
        crate::log::warn!(rank = window.members[peer], %error, "cannot read memory of another process");
        return Ok(false);
    }
    Ok(true)
}

/// Whether every rank can read the memory of every other.
pub(super) fn is_allowed(window: &mut Window, context: &OpContext<'_>) -> Result<bool> {
    // Words that differ between ranks.
    let canary = [u64::from(std::process::id()), context.fingerprint, window.rank as u64];
    let mut words = [0; WORDS];
    words[0] = canary.as_ptr().expose_provenance() as u64;
    words[1..=canary.len()].copy_from_slice(&canary);
    let phase = window.exchange(context, &words)?;
    let can_read = |peer: usize| {
        let words = window.phases.line(peer, phase).words();
        let mut seen = [0u64; 3];
        // SAFETY: `seen` has 24 bytes.
        let read =
            window.process(peer).map(|process| unsafe { sys::read_process(process, words[0], seen.as_mut_ptr().cast(), 24) });
        matches!(read, Some(Ok(()))) && seen[..] == words[1..=3]
    };
    let can_read_all = window.peers().all(can_read);
    // The canary stays alive until all ranks have read it.
    window.all(context, can_read_all)
}

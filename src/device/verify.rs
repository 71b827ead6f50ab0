//! Whether a device really reaches the areas of other ranks. Some machines report peer access
//! between GPUs, and lose or change what one of them writes to the other: an IOMMU or the access
//! control (ACS) of PCIe switches redirects it. Nothing but trying shows that.

use std::sync::Arc;
use std::time::Duration;

use super::bind::copy_kernel;
use super::state::finish;
use crate::cuda::device::{Address, Device, MOST_PARTS, Reduction, uuid};
use crate::cuda::peers::Record;
use crate::cuda::shared::shared;
use crate::error::{Error, Result};
use crate::types::{DType, Rank, mix};

/// Bytes of a pattern.
const PATTERN: usize = 4 << 10;

/// Bytes of an area that ranks use to verify that they reach it. In each area, every rank has a
/// place to which it writes. The owner has as many more, for what it sends and reads back.
pub(super) const VERIFIED: usize = 2 * MOST_PARTS * PATTERN;

const DOING: &str = "verifying that it reaches another rank's memory";

/// Has the device write a pattern to each area that is not of this process and device, and read it
/// back. `areas` has the address of each rank's area, or 0 if this rank does not use it. The
/// kernels of collectives access memory in the same way.
///
/// # Errors
///
/// The inner [`Error::Device`] says why the device does not reach an area. With the outer one the
/// device may still write to the areas: it has not done its work after `timeout`.
pub(super) fn verify(
    device: &Arc<dyn Device>,
    rank: Rank,
    records: &[Record],
    areas: &[Address],
    timeout: Duration,
) -> Result<Result<()>> {
    let own = &records[rank];
    let is_beyond = |peer: Rank| (records[peer].process, records[peer].device) != (own.process, own.device);
    let peers: Vec<Rank> = (0..records.len()).filter(|&peer| areas[peer] != 0 && is_beyond(peer)).collect();
    if peers.is_empty() {
        return Ok(Ok(()));
    }
    let (dtype, redop) = copy_kernel(DType::U64);
    let made = device.prepare(dtype, Some(redop)).and_then(|()| {
        let lane = shared(&**device).lanes.take(device)?;
        // What is written, and what reads back.
        Ok((lane, shared(&**device).pinned.take(device, 2 * peers.len() * PATTERN)?))
    });
    let (lane, memory) = match made {
        Ok(made) => made,
        Err(error) => return Ok(Err(error)),
    };
    let written = |i: usize| memory.at(i * PATTERN);
    let read = |i: usize| memory.at((peers.len() + i) * PATTERN);
    for (i, &peer) in peers.iter().enumerate() {
        // No other area, and no earlier content of this memory, has this pattern.
        let seed = mix(own.process ^ records[peer].process, own.news[0].map_or(0, |area| area.extent.id) ^ (peer as u64) << 32);
        for word in 0..PATTERN / 8 {
            // SAFETY: the memory has room for as many patterns, and is aligned for words.
            unsafe { written(i).cast::<u64>().add(word).write(mix(seed, word as u64)) };
        }
    }
    let sent = |peer: Rank| areas[rank] + ((MOST_PARTS + peer) * PATTERN) as Address;
    let theirs = |peer: Rank| areas[peer] + (rank * PATTERN) as Address;
    let stream = lane.stream.id;
    let copy = |from: Address, to: Address| {
        let (sources, targets, count) = (&[from][..], &[to][..], PATTERN / dtype.size());
        // SAFETY: both are places in areas, which the ranks keep until all have agreed.
        unsafe { device.reduce(stream, &Reduction { dtype, redop, sources, targets, count, divisor: 1 }) }
    };
    let enqueue = || -> Result<()> {
        // All are written first: a later write must not change what an earlier one has left.
        for (i, &peer) in peers.iter().enumerate() {
            // SAFETY: the place is within this rank's area, and the pattern stays until the stream is done.
            unsafe { device.copy_in(stream, written(i), sent(peer), PATTERN)? };
            copy(sent(peer), theirs(peer))?;
        }
        for (i, &peer) in peers.iter().enumerate() {
            // SAFETY: as above.
            unsafe { device.zero(stream, sent(peer), PATTERN)? };
            copy(theirs(peer), sent(peer))?;
            // SAFETY: as above.
            unsafe { device.copy_out(stream, sent(peer), read(i), PATTERN)? };
        }
        Ok(())
    };
    let enqueued = enqueue();
    // Also if a part was refused: the other ranks may free their areas when this rank has returned.
    if let Err(error) = finish(&lane, timeout) {
        // The stream may still come to it.
        std::mem::forget((memory, lane));
        return Err(error);
    }
    shared(&**device).lanes.give_back(lane);
    let is_lost = |&(i, _): &(usize, &Rank)| {
        // SAFETY: both have as many bytes, and the stream is done with them.
        unsafe { std::slice::from_raw_parts(written(i), PATTERN) != std::slice::from_raw_parts(read(i), PATTERN) }
    };
    let lost = peers.iter().enumerate().find(is_lost).map(|(_, &peer)| peer);
    if let Some(memory) = shared(&**device).pinned.give_back(memory) {
        device.held().later(move || drop(memory));
    }
    if enqueued.is_err() {
        return Ok(enqueued);
    }
    let Some(peer) = lost else { return Ok(Ok(())) };
    let (here, there) = (uuid(&own.device), uuid(&records[peer].device));
    let problem = format!("what {here} writes to {there} of rank {peer} does not read back");
    crate::log::warn!(
        device = device.name(),
        "{problem}: all data passes through the host; the driver reports that the devices reach each other, so check the IOMMU and \
         ACS of this machine"
    );
    Ok(Err(Error::Device { device: device.name(), doing: DOING, problem }))
}

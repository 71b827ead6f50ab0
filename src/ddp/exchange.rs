//! Makes values equal that the reducer does not own: parameters and buffers.

use std::ops::Range;

use super::buckets::Buckets;
use super::float::is_of_gradients;
use super::hook::with_float;
use super::layout::BucketLayout;
use super::on_device::BucketDevice;
use super::parameter::{Parameter, TensorMut};
use crate::buffer::Address;
use crate::communicator::Communicator;
use crate::error::{ReducerError, Result};
use crate::reduce::scale;
use crate::types::{DType, Rank, ReduceOp};

/// How values become equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    Broadcast(Rank),
    /// The average of the ranks that have not joined. Values that are not floating-point numbers
    /// are broadcast from the lowest of these ranks.
    Average,
}

/// The ranks that have values, as [`Reducer::join`](super::Reducer::join) leaves them.
#[derive(Clone, Copy)]
struct Contributors {
    count: usize,
    lowest: Rank,
}

impl Contributors {
    fn of(active: &[bool]) -> Contributors {
        let count = active.iter().filter(|&&active| active).count();
        Contributors { count, lowest: active.iter().position(|&active| active).unwrap_or(0) }
    }

    /// The reduction that leads to the average, and the factor by which its result is multiplied.
    fn average(self, world: usize) -> (ReduceOp, Option<f64>) {
        if self.count == world { (ReduceOp::Average, None) } else { (ReduceOp::Sum, Some(1.0 / self.count as f64)) }
    }
}

/// Exchanges the values of a set of tensors, one bucket at a time, through the buckets' memory. A
/// rank without tensors contributes zeros and discards the result.
///
/// # Safety
///
/// Nothing else uses the buckets during the call. The tensors are those that the buckets were laid
/// out for: of the type, length and memory described.
pub(super) unsafe fn exchange(
    comm: &Communicator,
    buckets: &Buckets,
    mut tensors: Option<&mut [TensorMut<'_>]>,
    how: Exchange,
    active: &[bool],
) -> Result<()> {
    let contributors = Contributors::of(active);
    for place in &buckets.layout.buckets {
        let Some(on) = buckets.device_of(place) else {
            // SAFETY: as promised by the caller.
            unsafe { exchange_on_host(comm, buckets, place, tensors.as_deref_mut(), how, contributors)? };
            continue;
        };
        let at = buckets.at(place).addr() as Address;
        // SAFETY: as promised by the caller.
        let result = unsafe { exchange_on_device(comm, on, place, at, tensors.as_deref(), how, contributors) };
        // The stream must not use the tensors any more once this returns them to the caller.
        result.inspect_err(|_| _ = on.drain())?;
    }
    Ok(())
}

/// [`exchange`] for one bucket in host memory.
///
/// # Safety
///
/// As for [`exchange`].
unsafe fn exchange_on_host(
    comm: &Communicator,
    buckets: &Buckets,
    place: &BucketLayout,
    tensors: Option<&mut [TensorMut<'_>]>,
    how: Exchange,
    contributors: Contributors,
) -> Result<()> {
    // SAFETY: the range lies within the buckets' memory, to which no other reference exists. Peers
    // write it only during the collectives below.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buckets.at(place), place.bytes.len()) };
    let size = place.dtype.size();
    match &tensors {
        None => bytes.fill(0),
        Some(tensors) => {
            for (index, range) in &place.members {
                let memory = tensors[*index].memory;
                // SAFETY: the tensor is borrowed mutably and has the type and length described.
                let values = unsafe { std::slice::from_raw_parts(memory.ptr, memory.len) };
                bytes[range.start * size..range.end * size].copy_from_slice(values);
            }
        }
    }
    match how {
        Exchange::Average if is_of_gradients(place.dtype) => average(comm, place.dtype, bytes, contributors)?,
        Exchange::Average => broadcast(comm, place.dtype, bytes, contributors.lowest)?,
        Exchange::Broadcast(root) => broadcast(comm, place.dtype, bytes, root)?,
    }
    let Some(tensors) = tensors else { return Ok(()) };
    for (index, range) in &place.members {
        let memory = tensors[*index].memory;
        // SAFETY: as above. The tensor gets elements of its own type, from a rank's tensor of that
        // type.
        let values = unsafe { std::slice::from_raw_parts_mut(memory.ptr, memory.len) };
        values.copy_from_slice(&bytes[range.start * size..range.end * size]);
    }
    Ok(())
}

/// Averages the elements of a bucket over the ranks that contribute.
fn average(comm: &Communicator, dtype: DType, bytes: &mut [u8], contributors: Contributors) -> Result<()> {
    let (redop, factor) = contributors.average(comm.world_size());
    with_float!(dtype, T => {
        let count = bytes.len() / size_of::<T>();
        // SAFETY: the bytes are borrowed mutably, are elements of this type, and start at a
        // multiple of any element's size.
        let values = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), count) };
        comm.all_reduce(values, redop)?;
        if let Some(factor) = factor {
            scale(values, factor);
        }
    });
    Ok(())
}

/// Broadcasts the elements of a bucket.
fn broadcast(comm: &Communicator, dtype: DType, bytes: &mut [u8], root: Rank) -> Result<()> {
    comm.broadcast(bytes, root)?;
    if dtype == DType::Bool {
        // Only 0 and 1 are valid in a `bool`, and what a peer sends may be neither.
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    Ok(())
}

/// [`exchange`] for one bucket in the memory of a device, at the address `at`, in the order of the
/// caller's stream. The stream has completed it when this returns without an error.
///
/// # Safety
///
/// As for [`exchange`].
unsafe fn exchange_on_device(
    comm: &Communicator,
    on: &BucketDevice,
    place: &BucketLayout,
    at: Address,
    tensors: Option<&[TensorMut<'_>]>,
    how: Exchange,
    contributors: Contributors,
) -> Result<()> {
    let size = place.dtype.size();
    let count = place.bytes.len() / size;
    let parts = |tensors: &[TensorMut<'_>]| {
        let part = |(index, range): &(usize, Range<usize>)| {
            let memory = tensors[*index].memory;
            (memory.ptr.addr() as Address, at + (range.start * size) as Address, memory.len)
        };
        place.members.iter().map(part).collect::<Vec<_>>()
    };
    // SAFETY: all ranges lie within the bucket, which this call alone uses. The tensors are
    // borrowed mutably and have the type and length described, on the device.
    unsafe {
        match tensors {
            None => on.zero(at, place.bytes.len())?,
            Some(tensors) => parts(tensors).into_iter().try_for_each(|(tensor, own, len)| on.copy(tensor, own, len))?,
        }
        on.catch_up(comm)?;
        match how {
            Exchange::Average if is_of_gradients(place.dtype) => {
                let (redop, factor) = contributors.average(comm.world_size());
                on.all_reduce(comm, (place.dtype, redop), at, count)?;
                if let Some(factor) = factor {
                    on.scale_in_turn(comm, place.dtype, at, count, factor)?;
                }
            }
            Exchange::Average => on.broadcast(comm, place.dtype, at, count, contributors.lowest)?,
            Exchange::Broadcast(root) => on.broadcast(comm, place.dtype, at, count, root)?,
        }
        if let Some(tensors) = tensors {
            parts(tensors).into_iter().try_for_each(|(tensor, own, len)| on.copy(own, tensor, len))?;
        }
    }
    on.catch_up(comm)
}

/// Refuses tensors that are not those described.
pub(super) fn check(what: &str, described: &[Parameter], tensors: &[TensorMut<'_>]) -> Result<()> {
    if described.len() != tensors.len() {
        let problem = ReducerError::Length { name: what.to_owned(), expected: described.len(), given: tensors.len() };
        return Err(problem.into());
    }
    for (parameter, tensor) in described.iter().zip(tensors) {
        parameter.expect(tensor.dtype)?;
        parameter.expect_place(tensor.on_device)?;
        parameter.expect_count(tensor.count)?;
    }
    Ok(())
}

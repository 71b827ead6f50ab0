//! Makes values equal that the reducer does not own: parameters and buffers.

use std::ops::Range;

use super::buckets::Buckets;
use super::core::Core;
use super::float::scale;
use super::hook::with_float;
use super::layout::BucketLayout;
use super::on_device::OnDevice;
use super::parameter::{Parameter, TensorMut};
use crate::communicator::Communicator;
use crate::cuda::device::Address;
use crate::error::{ReducerProblem, Result};
use crate::types::{DType, Rank, ReduceOp};

/// How values become equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    Broadcast(Rank),
    /// The average of the ranks that have not joined; what are not floating-point numbers is broadcast from the lowest of them.
    Average,
}

/// Exchanges the values of a set of tensors, a bucket at a time, by way of the buckets' memory. A rank without tensors gives
/// zeros, and drops what it gets.
///
/// # Safety
///
/// Nobody else uses the buckets meanwhile.
pub(super) unsafe fn exchange(
    comm: &Communicator,
    buckets: &Buckets,
    mut tensors: Option<&mut [TensorMut<'_>]>,
    how: Exchange,
    active: &[bool],
) -> Result<()> {
    let contributors = active.iter().filter(|&&active| active).count();
    let lowest = active.iter().position(|&active| active).unwrap_or(0);
    for place in &buckets.layout.buckets {
        if let Some(on) = buckets.device_of(place) {
            let at = buckets.at(place).addr() as Address;
            // SAFETY: passed on.
            let result = unsafe { exchange_on_device(comm, on, place, at, tensors.as_deref(), how, (contributors, lowest)) };
            // The tensors are about to be the caller's again.
            result.inspect_err(|_| _ = on.drain())?;
            continue;
        }
        // SAFETY: within the buckets' memory, and passed on: no other reference exists. Peers write it only in the collective below.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buckets.at(place), place.bytes.len()) };
        let size = place.dtype.size();
        match &tensors {
            None => bytes.fill(0),
            Some(tensors) => {
                for (index, range) in &place.members {
                    let memory = tensors[*index].memory;
                    // SAFETY: the tensor is borrowed mutably, and was found to be of the type and length described.
                    let values = unsafe { std::slice::from_raw_parts(memory.ptr, memory.len) };
                    bytes[range.start * size..range.end * size].copy_from_slice(values);
                }
            }
        }
        let root = match how {
            Exchange::Average if place.dtype.is_float() => {
                with_float!(place.dtype, T => {
                    // SAFETY: as for the bytes, which start at a multiple of any element's size.
                    let values = unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), bytes.len() / size) };
                    if contributors == comm.world_size() {
                        comm.all_reduce(values, ReduceOp::Average)?;
                    } else {
                        comm.all_reduce(values, ReduceOp::Sum)?;
                        scale(values, 1.0 / contributors as f64);
                    }
                });
                None
            }
            Exchange::Average => Some(lowest),
            Exchange::Broadcast(root) => Some(root),
        };
        if let Some(root) = root {
            comm.broadcast(bytes, root)?;
            if place.dtype == DType::Bool {
                // A value that goes back into a `bool` must be one, whatever came.
                bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
            }
        }
        for (index, range) in &place.members {
            let Some(tensors) = &mut tensors else { continue };
            let memory = tensors[*index].memory;
            // SAFETY: as above. It gets elements of its own type, from a rank's tensor of that type.
            let values = unsafe { std::slice::from_raw_parts_mut(memory.ptr, memory.len) };
            values.copy_from_slice(&bytes[range.start * size..range.end * size]);
        }
    }
    Ok(())
}

/// The same of one bucket at an address of a device, given by so many ranks, of which this is the lowest: in the order of the
/// caller's stream, which has come behind it at the end.
///
/// # Safety
///
/// As for [`exchange`].
unsafe fn exchange_on_device(
    comm: &Communicator,
    on: &OnDevice,
    place: &BucketLayout,
    at: Address,
    tensors: Option<&[TensorMut<'_>]>,
    how: Exchange,
    (contributors, lowest): (usize, Rank),
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
    // SAFETY: within the bucket, and passed on: tensors are borrowed mutably, and were found to be of the type and length described,
    // on the device.
    unsafe {
        match tensors {
            None => on.zero(at, place.bytes.len())?,
            Some(tensors) => parts(tensors).into_iter().try_for_each(|(tensor, own, len)| on.copy(tensor, own, len))?,
        }
        on.catch_up(comm)?;
        match how {
            Exchange::Average if place.dtype.is_float() => {
                let redop = if contributors == comm.world_size() { ReduceOp::Average } else { ReduceOp::Sum };
                on.all_reduce(comm, (place.dtype, redop), at, count)?;
                if redop == ReduceOp::Sum {
                    // Seldom, and not worth a kernel.
                    scale_on_host(comm, on, place, at, 1.0 / contributors as f64)?;
                }
            }
            Exchange::Average => on.broadcast(comm, place.dtype, at, count, lowest)?,
            Exchange::Broadcast(root) => on.broadcast(comm, place.dtype, at, count, root)?,
        }
        if let Some(tensors) = tensors {
            parts(tensors).into_iter().try_for_each(|(tensor, own, len)| on.copy(own, tensor, len))?;
        }
    }
    on.catch_up(comm)
}

/// Multiplies the elements of a bucket at an address of a device.
///
/// # Safety
///
/// As for [`exchange`].
unsafe fn scale_on_host(comm: &Communicator, on: &OnDevice, place: &BucketLayout, at: Address, factor: f64) -> Result<()> {
    with_float!(place.dtype, T => {
        let mut values = vec![T::default(); place.bytes.len() / size_of::<T>()];
        // SAFETY: as many elements, of which every pattern of bits is one; the rest is passed on.
        let result = unsafe { on.fetch(comm, at, values.as_mut_ptr().cast(), place.bytes.len()) }.and_then(|()| {
            scale(&mut values, factor);
            // SAFETY: as above.
            unsafe { on.bring(comm, values.as_ptr().cast(), at, place.bytes.len()) }
        });
        // What a device may still be copying is not freed.
        result.inspect_err(|_| std::mem::forget(values))
    })
}

/// Refuses tensors that are not those described.
pub(super) fn check(what: &str, described: &[Parameter], tensors: &[TensorMut<'_>]) -> Result<()> {
    if described.len() != tensors.len() {
        let problem = ReducerProblem::Length { name: what.to_owned(), expected: described.len(), given: tensors.len() };
        return Err(problem.into());
    }
    for (parameter, tensor) in described.iter().zip(tensors) {
        parameter.expect(tensor.dtype)?;
        parameter.expect_place(tensor.on_device)?;
        parameter.expect_count(tensor.count)?;
    }
    Ok(())
}

/// What a rank is about to do, where those that have joined must hear of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// It has no more input, and does what the others do.
    Joined,
    Step,
    /// It makes the buckets anew, before a step.
    Rebuild,
    Parameters(Exchange),
    Buffers(Exchange),
}

impl Intent {
    pub(super) fn call(self) -> &'static str {
        match self {
            Intent::Joined => "join",
            Intent::Step | Intent::Rebuild => "begin",
            Intent::Parameters(Exchange::Broadcast(_)) => "broadcast_parameters",
            Intent::Parameters(Exchange::Average) => "average_parameters",
            Intent::Buffers(_) => "sync_buffers",
        }
    }

    /// The kind of call, the kind of exchange, and its rank.
    fn encode(self) -> [u32; 3] {
        let exchange = |exchange| match exchange {
            Exchange::Broadcast(root) => [0, root as u32],
            Exchange::Average => [1, 0],
        };
        let ([how, root], kind) = match self {
            Intent::Joined => ([0, 0], 0),
            Intent::Step => ([0, 0], 1),
            Intent::Parameters(how) => (exchange(how), 2),
            Intent::Buffers(how) => (exchange(how), 3),
            Intent::Rebuild => ([0, 0], 4),
        };
        [kind, how, root]
    }

    /// `None` if no kolo wrote it.
    fn decode([kind, how, root]: [u32; 3]) -> Option<Intent> {
        let exchange = match how {
            0 => Exchange::Broadcast(root as Rank),
            1 => Exchange::Average,
            _ => return None,
        };
        match kind {
            0 => Some(Intent::Joined),
            1 => Some(Intent::Step),
            2 => Some(Intent::Parameters(exchange)),
            3 => Some(Intent::Buffers(exchange)),
            4 => Some(Intent::Rebuild),
            _ => None,
        }
    }
}

impl Core {
    /// Tells the others what this rank is about to do, and hears what they are: what all do that have not joined, and which
    /// those are.
    pub(super) fn meet(&self, mine: Intent) -> Result<(Intent, Vec<bool>)> {
        let mut all = vec![0; 3 * self.comm.world_size()];
        self.comm.all_gather(&mine.encode(), &mut all)?;
        let intents = all.chunks_exact(3).map(|words| Intent::decode([words[0], words[1], words[2]]));
        let intents = intents.collect::<Option<Vec<Intent>>>().unwrap_or_default();
        let mut others = intents.iter().filter(|&&intent| intent != Intent::Joined);
        let first = others.next().copied().unwrap_or(Intent::Joined);
        if intents.is_empty() || others.any(|&other| other != first) {
            let why = "another rank calls something else; all must make the same calls in the same order";
            return Err(ReducerProblem::Moment { call: mine.call(), why }.into());
        }
        Ok((first, intents.iter().map(|&intent| intent != Intent::Joined).collect()))
    }

    /// The same, of a rank that has not joined: which ranks have not.
    pub(super) fn announce(&self, mine: Intent) -> Result<Vec<bool>> {
        self.meet(mine).map(|(_, active)| active)
    }
}

//! Makes values equal that the reducer does not own: parameters and buffers.

use super::buckets::Buckets;
use super::core::Core;
use super::float::scale;
use super::hook::with_float;
use super::parameter::{Parameter, TensorMut};
use crate::comm::Communicator;
use crate::error::{Error, ReducerProblem, Result};
use crate::types::{Rank, ReduceOp};

/// How values become equal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Exchange {
    Broadcast(Rank),
    /// The average of the ranks that have something to give, as many as said; integers are broadcast from the rank.
    Average(usize, Rank),
}

/// Exchanges the values of a set of tensors, a bucket at a time, by way of the buckets' memory. A rank without tensors gives
/// zeros, and drops what it gets.
///
/// # Safety
///
/// Nobody else uses the buckets meanwhile.
pub(super) unsafe fn exchange(
    comm: &Communicator,
    described: &[Parameter],
    buckets: &Buckets,
    mut tensors: Option<&mut [TensorMut<'_>]>,
    how: Exchange,
) -> Result<()> {
    for place in &buckets.layout.buckets {
        // SAFETY: within the buckets' memory, and passed on: no other reference exists. Peers write it only in the collective below.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buckets.at(&place.bytes), place.bytes.len()) };
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
            Exchange::Average(contributors, _) if place.dtype.is_float() => {
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
            Exchange::Average(_, root) | Exchange::Broadcast(root) => Some(root),
        };
        if let Some(root) = root {
            comm.broadcast(bytes, root)?;
        }
        for (index, range) in &place.members {
            let Some(tensors) = &mut tensors else { continue };
            let memory = tensors[*index].memory;
            // SAFETY: as above. It gets elements of its own type, from a rank's tensor of that type.
            let values = unsafe { std::slice::from_raw_parts_mut(memory.ptr, memory.len) };
            values.copy_from_slice(&bytes[range.start * size..range.end * size]);
        }
    }
    debug_assert!(described.len() == buckets.layout.places.len());
    Ok(())
}

/// Refuses tensors that are not those described.
pub(super) fn check(what: &str, described: &[Parameter], tensors: &[TensorMut<'_>]) -> Result<()> {
    if described.len() != tensors.len() {
        let problem = ReducerProblem::Length { name: what.to_owned(), expected: described.len(), given: tensors.len() };
        return Err(problem.into());
    }
    for (parameter, tensor) in described.iter().zip(tensors) {
        parameter.expect(tensor.dtype)?;
        parameter.expect_count(tensor.count)?;
    }
    Ok(())
}

impl Core {
    /// What a rank is about to do, as others hear it.
    pub(super) const JOINED: u64 = 0;
    pub(super) const STEP: u64 = 1;
    pub(super) const PARAMETERS: u64 = 2;
    pub(super) const BUFFERS: u64 = 3;

    /// Tells the others what this rank is about to do, and hears it of them.
    pub(super) fn hear(&self, mine: u64) -> Result<Vec<u64>> {
        let mut all = vec![0; self.comm.world_size()];
        self.comm.all_gather(&[mine], &mut all)?;
        Ok(all)
    }

    /// The same, of a rank that has input: which ranks have. They must be about to do the same.
    pub(super) fn announce(&self, mine: u64) -> Result<Vec<bool>> {
        let all = self.hear(mine)?;
        match all.iter().find(|&&other| other != mine && other != Core::JOINED) {
            None => Ok(all.iter().map(|&other| other != Core::JOINED).collect()),
            Some(_) => Err(Error::from(ReducerProblem::Moment { call: "begin", why: "other ranks call something else" })),
        }
    }
}

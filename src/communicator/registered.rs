//! Registered buffers, in memory that all ranks of a host map.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Communicator;
use crate::call::Call;
use crate::error::{ArgumentError, Error, Result};
use crate::shm::registered::Allocation;
use crate::sys::{PageSize, Region};
use crate::types::{Element, Op};

/// A registered buffer, which peers on the same host read and write in place; see
/// [`Communicator::alloc`]. It is a slice of elements that start as zeros.
pub struct Registered<T: Element> {
    memory: Arc<Allocation>,
    /// This rank's part.
    place: usize,
    len: usize,
    elements: PhantomData<T>,
}

impl Communicator {
    /// Allocates `len` elements of zeros in memory that the ranks of this host share.
    /// Collectives read and write such buffers in place, without staging; only `reduce`, `gather` and
    /// an `all_to_all` in place do not. Where ranks cannot share memory it is ordinary memory, and
    /// operations stage it. [`Communicator::alloc_pooled`] is for a rank alone.
    ///
    /// This is a collective call: all ranks allocate the same length. Each rank may drop its buffer
    /// at any time. A forked child shares the memory with its parent, and frees nothing when it
    /// drops the buffer.
    ///
    /// Peers use a buffer only during an operation to which this rank has lent it. After a failure
    /// they do not use it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the length is more than an address space can hold,
    /// [`Error::NoMemory`] on all ranks if one of them has no memory, [`Error::Mismatch`] if ranks give
    /// different lengths, [`Error::Os`] if the system did not find the memory before the deadline of
    /// operations.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let mut gradients = comm.alloc::<f32>(1 << 20)?;
    /// gradients.fill(1.0);
    /// comm.all_reduce(&mut gradients, kolo::ReduceOp::Average)?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Registered<T>> {
        let call = Call { on_behalf_of: Some(Op::Alloc), count: len, ..Call::new::<T>(Op::Barrier) };
        let (memory, place) = self.allocate(call, size_of::<T>())?;
        Ok(Registered { memory, place, len, elements: PhantomData })
    }

    /// Allocates a part for each rank, for the elements of `call`: a barrier, in which all ranks
    /// compare their lengths. Returns the memory and this rank's place in it.
    fn allocate(&self, call: Call, element: usize) -> Result<(Arc<Allocation>, usize)> {
        let len = call.count;
        // At least one element, so that there is a page to share.
        let bytes = len.max(1).checked_mul(element).and_then(|bytes| PageSize::system().round_up(bytes));
        let whole = bytes.and_then(|bytes| bytes.checked_mul(self.world_size()));
        let bytes = bytes.filter(|_| whole.is_some_and(|whole| whole <= isize::MAX as usize));
        let bytes = bytes.ok_or(Error::Argument { op: Op::Alloc, problem: ArgumentError::TooMany { count: len } })?;
        // After the operations that the ranks started before.
        self.exec.exclusively(call.clone(), |core| {
            // SAFETY: a barrier touches no buffer.
            unsafe { self.exec.run_on(core, call)? };
            let info = &self.exec.state.info;
            let shared = core.allocate(info, bytes).map_err(|error| self.exec.state.fail(core, error))?;
            let place = core.place_on_host().0;
            let own = || Some((Arc::new(Allocation { region: Arc::new(Region::try_heap(bytes)?), part: bytes }), 0));
            let mine = shared.map(|memory| (memory, place)).or_else(own);
            // The ranks of another host may share memory, and those of this one not.
            let have = self.gather_words(core, Op::Alloc, &[mine.is_some().into()])?;
            let lacks = have.iter().position(|&has| has == 0);
            match (mine, lacks) {
                (Some(mine), None) => Ok(mine),
                (mine, lacks) => {
                    mine.iter().for_each(|(memory, place)| memory.release(*place));
                    let rank = lacks.expect("a rank without memory has said so");
                    Err(Error::NoMemory { op: Op::Alloc, rank, host: info.members[rank].host.clone(), bytes: bytes as u64 })
                }
            }
        })
    }
}

impl<T: Element> Deref for Registered<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: this rank's part has room for `len` elements, is aligned to a page and started
        // zeroed, which is a value of every element. Peers write it only in collectives to which
        // this rank has lent it mutably, and not after one has failed.
        unsafe { std::slice::from_raw_parts(self.memory.at(self.place, 0).cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nothing else refers to this rank's part.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at(self.place, 0).cast(), self.len) }
    }
}

impl<T: Element> AsRef<[T]> for Registered<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> AsMut<[T]> for Registered<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> Drop for Registered<T> {
    fn drop(&mut self) {
        // The address stays reserved until all ranks have dropped their buffers. The memory is
        // freed now, except in a forked child.
        self.memory.release(self.place);
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Communicator, ReduceOp};

    /// Peers write a rank's buffer while that rank has borrowed it for its call. Miri knows what
    /// borrows allow.
    #[test]
    fn ranks_of_a_process_reduce_in_each_others_buffers() {
        // More than is reduced in one shot.
        const LEN: usize = 5000;
        let comms = Communicator::in_process(2).unwrap();
        std::thread::scope(|scope| {
            for comm in comms {
                scope.spawn(move || {
                    let rank = comm.rank() as u64;
                    let (mut a, mut b) = (comm.alloc::<u64>(LEN).unwrap(), comm.alloc::<u64>(2 * LEN).unwrap());
                    for round in 0..if cfg!(miri) { 1 } else { 2 } {
                        a.fill(rank + round);
                        comm.all_reduce(&mut a, ReduceOp::Sum).unwrap();
                        assert!(a.iter().all(|&sum| sum == 1 + 2 * round), "{:?}", &a[..9]);
                        // Parts of one buffer, and of two.
                        let (front, back) = b.split_at_mut(LEN);
                        comm.all_reduce_into(&a, back, ReduceOp::Sum).unwrap();
                        comm.all_reduce_into(back, front, ReduceOp::Max).unwrap();
                        assert!(b.iter().all(|&sum| sum == 2 + 4 * round));
                    }
                });
            }
        });
    }
}

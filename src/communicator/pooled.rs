//! Buffers that a rank takes alone, in memory that all ranks of a host map.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::Communicator;
use crate::error::{ArgumentError, Error, Result};
use crate::shm::Block;
use crate::sys::Region;
use crate::types::{Element, Op};

/// A buffer of the pool of a communicator, which peers on the same host read and write in place; see
/// [`Communicator::alloc_pooled`]. It is a slice of elements that start as zeros.
pub struct Pooled<T: Element> {
    memory: Memory,
    len: usize,
    elements: PhantomData<T>,
}

enum Memory {
    Shared(Block),
    Private(Region),
}

impl Communicator {
    /// Takes `len` elements of zeros from memory that the ranks of this host share. As with
    /// [`Communicator::alloc`], collectives on such buffers read and write them in place. But this
    /// is not a collective call: each rank takes and drops buffers at any time. Without shared
    /// memory (a rank alone on its host, no room, too many buffers) it is ordinary memory with the
    /// same use. A warning is logged if the cause is missing room.
    ///
    /// Dropped buffers stay in the pool for later ones. The pool ends with the communicator and its
    /// last buffer. Peers learn of new memory in a large collective of the communicator; until
    /// another one has followed, operations stage it.
    ///
    /// In a forked child, dropping a buffer changes nothing: the memory is the parent's.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the length is more than an address space can hold,
    /// [`Error::NoMemory`] with this rank if there is no memory, [`Error::Forked`] in a forked child.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// # for comm in kolo::Communicator::in_process(1)? {
    /// let mut activations = comm.alloc_pooled::<f32>(1 << 20)?;
    /// activations.fill(1.0);
    /// comm.all_reduce(&mut activations, kolo::ReduceOp::Sum)?;
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn alloc_pooled<T: Element>(&self, len: usize) -> Result<Pooled<T>> {
        let pooled = self.alloc_uncleared::<T>(len)?;
        // SAFETY: the memory has room for `len` elements and belongs to this call.
        unsafe { pooled.start().write_bytes(0, len) };
        Ok(pooled)
    }

    /// As [`Communicator::alloc_pooled`], but the elements are what earlier holders have left.
    pub(crate) fn alloc_uncleared<T: Element>(&self, len: usize) -> Result<Pooled<T>> {
        self.exec.state.check_process(Op::Alloc)?;
        let too_many = || Error::Argument { op: Op::Alloc, problem: ArgumentError::TooMany { count: len } };
        let bytes = len.max(1).checked_mul(size_of::<T>()).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(too_many)?;
        let taken = self.exec.state.pool.as_ref().map(|pool| pool.take(bytes));
        let memory = match taken {
            Some(Ok(block)) => Memory::Shared(block),
            other => {
                if let Some(Err(error)) = other {
                    crate::log::warn!(%error, bytes, "no shared memory; operations stage this buffer");
                }
                let (rank, info) = (self.rank(), &self.exec.state.info);
                let no_memory =
                    || Error::NoMemory { op: Op::Alloc, rank, host: info.members[rank].host.clone(), bytes: bytes as u64 };
                Memory::Private(Region::try_heap(bytes).ok_or_else(no_memory)?)
            }
        };
        Ok(Pooled { memory, len, elements: PhantomData })
    }
}

impl<T: Element> Pooled<T> {
    fn start(&self) -> *mut T {
        match &self.memory {
            Memory::Shared(block) => block.start().cast(),
            Memory::Private(region) => region.at(0).cast(),
        }
    }
}

impl<T: Element> Deref for Pooled<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory has room for `len` elements, is aligned to a page and was cleared, or
        // its elements are bytes. Peers write it only in collectives to which this rank has lent it
        // mutably, and not after one has failed.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl<T: Element> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and nothing else refers to this memory.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl<T: Element> AsRef<[T]> for Pooled<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> AsMut<[T]> for Pooled<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Pooled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Communicator, ReduceOp};

    /// Ranks take and drop buffers of their own while they reduce in each other's.
    #[test]
    fn each_rank_takes_buffers_alone() {
        // More than is reduced in one shot, and enough to be read in place.
        const LEN: usize = if cfg!(miri) { 5000 } else { 20_000 };
        let comms = Communicator::in_process(2).unwrap();
        std::thread::scope(|scope| {
            for comm in comms {
                scope.spawn(move || {
                    let rank = comm.rank() as u64;
                    for round in 0..if cfg!(miri) { 3 } else { 8 } {
                        let spare = (rank == 0).then(|| comm.alloc_pooled::<u8>(3).unwrap());
                        let mut buffer = comm.alloc_pooled::<u64>(LEN).unwrap();
                        assert!(buffer.iter().all(|&element| element == 0));
                        buffer.fill(rank + round);
                        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                        assert!(buffer.iter().all(|&sum| sum == 1 + 2 * round));
                        let mut all = comm.alloc_pooled::<u64>(2 * LEN).unwrap();
                        buffer.fill(10 * round + rank);
                        comm.all_gather(&buffer, &mut all).unwrap();
                        assert!(all[..LEN].iter().all(|&element| element == 10 * round));
                        assert!(all[LEN..].iter().all(|&element| element == 10 * round + 1));
                        drop(spare);
                    }
                });
            }
        });
    }

    #[test]
    fn a_buffer_outlives_its_communicator() {
        let comm = Communicator::in_process(2).unwrap().remove(0);
        let mut buffer = comm.alloc_pooled::<f32>(10).unwrap();
        drop(comm);
        buffer.fill(2.0);
        assert_eq!(buffer[..], [2.0; 10]);
    }

    #[test]
    fn a_length_beyond_memory_is_an_error() {
        let comm = Communicator::in_process(1).unwrap().remove(0);
        assert!(comm.alloc_pooled::<u64>(usize::MAX / 4).is_err());
        assert_eq!(comm.alloc_pooled::<u64>(0).unwrap().len(), 0);
    }
}

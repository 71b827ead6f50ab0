//! The blocking form of every operation: it borrows its buffers and returns when this rank's part
//! is done.
//!
//! Inside a host the operation runs on the calling thread. [`Communicator`] documents what all
//! operations have in common.

use super::operations::operations;
use super::{Communicator, calls};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::error::Result;
use crate::types::{Element, Rank, ReduceOp, Tag};

/// The type of an argument.
macro_rules! argument {
    (input) => { &[T] };
    (output) => { &mut [T] };
    (in_place) => { &mut [T] };
    (root_input) => { Option<&[T]> };
    (root_output) => { Option<&mut [T]> };
    (counts) => { &[usize] };
    ($value:ident) => { $value };
}

/// What the call holds of an argument.
macro_rules! raw {
    (input, $slice:expr) => {
        RawSlice::of($slice)
    };
    (output, $slice:expr) => {
        RawSliceMut::of($slice)
    };
    (in_place, $slice:expr) => {
        RawSliceMut::of($slice)
    };
    (root_input, $slice:expr) => {
        $slice.map(RawSlice::of)
    };
    (root_output, $slice:expr) => {
        $slice.map(RawSliceMut::of)
    };
    ($kind:ident, $value:expr) => {
        $value
    };
}
pub(super) use raw;

macro_rules! blocking {
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| () => $call:expr) => {
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// Those of every operation: see [`Communicator`](Communicator#errors).
        pub fn $name(&self) -> Result<()> {
            self.submit($call)
        }
    };
    ($(#[$doc:meta])* $name:ident, $start:ident |$comm:ident| ($($arg:ident: $kind:ident),*) => $call:expr) => {
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// Those of every operation: see [`Communicator`](Communicator#errors).
        pub fn $name<T: Element>(&self, $($arg: argument!($kind)),*) -> Result<()> {
            let $comm = self;
            $(let $arg = raw!($kind, $arg);)*
            $comm.submit($call)
        }
    };
}

impl Communicator {
    fn submit(&self, call: Call) -> Result<()> {
        // SAFETY: every caller is a public method that made `call` from slices which its own caller
        // lends until it returns: those that are written are borrowed mutably, and those that are
        // read cannot be written meanwhile.
        unsafe { self.exec.submit(call) }
    }

    operations!(blocking);

    /// Receives the next message without a tag of any rank and returns the rank that sent it: the message that
    /// arrives first, of those that no earlier receive waits for.
    ///
    /// Every rank that sends gives as many elements of the same type.
    ///
    /// # Errors
    ///
    /// If no rank sends before the deadline, the error names the lowest of the other ranks as
    /// silent. If one was killed, this fails at once, although others may send; so it does if a process
    /// on this host ended without dropping its communicator.
    ///
    /// ```no_run
    /// # fn main() -> kolo::Result<()> {
    /// # let comm = kolo::Communicator::from_env()?;
    /// let mut answer = [0u64; 4];
    /// let worker = comm.recv_any(&mut answer)?;
    /// println!("rank {worker} answered {answer:?}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn recv_any<T: Element>(&self, buf: &mut [T]) -> Result<Rank> {
        self.recv_any_tagged(buf, 0)
    }

    /// [`Communicator::recv_any`] of a message with a tag, by [`Communicator::send_tagged`].
    ///
    /// # Errors
    ///
    /// As for [`Communicator::recv_any`]. If every other rank has left, this fails at once, although this
    /// rank might send to itself.
    pub fn recv_any_tagged<T: Element>(&self, buf: &mut [T], tag: Tag) -> Result<Rank> {
        let mut source = self.rank();
        let call = calls::recv_any::<T>(RawSliceMut::of(buf), &mut source, self.rank());
        self.submit(calls::tagged(call, tag))?;
        Ok(source)
    }

    /// Sends to rank `to` and receives from rank `from`, which may be the same, at the same time.
    ///
    /// ```no_run
    /// # fn main() -> kolo::Result<()> {
    /// # let comm = kolo::Communicator::from_env()?;
    /// // Every rank passes a value to the next one in a ring.
    /// let (rank, world) = (comm.rank(), comm.world_size());
    /// let mut received = [0u64];
    /// comm.send_recv(&[rank as u64], (rank + 1) % world, &mut received, (rank + world - 1) % world)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of every operation: see [`Communicator`](Communicator#errors).
    pub fn send_recv<T: Element, U: Element>(&self, send: &[T], to: Rank, recv: &mut [U], from: Rank) -> Result<()> {
        let calls = [calls::send::<T>(RawSlice::of(send), to), calls::recv::<U>(RawSliceMut::of(recv), from)];
        // SAFETY: as in `submit`.
        unsafe { self.exec.submit_together(calls) }
    }

    /// As [`Communicator::send_recv`], in one buffer: what is received replaces what is sent, of which
    /// kolo makes a copy.
    ///
    /// # Errors
    ///
    /// Those of every operation: see [`Communicator`](Communicator#errors).
    pub fn send_recv_in_place<T: Element>(&self, buf: &mut [T], to: Rank, from: Rank) -> Result<()> {
        let memory = RawSliceMut::of(buf);
        let calls = [calls::send::<T>(memory.as_const(), to), calls::recv::<T>(memory, from)];
        // SAFETY: as in `submit`. The copy keeps what is sent apart.
        unsafe { self.exec.submit_together(calls) }
    }
}

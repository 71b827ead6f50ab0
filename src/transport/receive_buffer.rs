//! Where arrived bytes wait in links over sockets.

use super::ALIGN;
use crate::buffer::{RawSlice, RawSliceMut};

/// Bytes of the buffer, which stays in a cache.
pub(super) const BUFFER: usize = 256 << 10;

/// A ring of bytes that have arrived and not been consumed. The byte at stream offset n is at n
/// modulo the size.
pub(super) struct ReceiveBuffer {
    bytes: Box<[Aligned]>,
    /// Stream position of the first byte that has not been consumed.
    front: u64,
    /// Stream position up to which bytes have arrived.
    back: u64,
}

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Aligned([u8; ALIGN]);

impl ReceiveBuffer {
    pub(super) fn new() -> ReceiveBuffer {
        ReceiveBuffer { bytes: vec![Aligned([0; ALIGN]); BUFFER / ALIGN].into_boxed_slice(), front: 0, back: 0 }
    }

    pub(super) fn len(&self) -> usize {
        (self.back - self.front) as usize
    }

    /// Returns the bytes from a stream position up to the end of the ring, at most `len`.
    fn stretch(&mut self, position: u64, len: usize) -> RawSliceMut {
        let at = position as usize % BUFFER;
        RawSliceMut { ptr: self.bytes.as_mut_ptr().cast::<u8>().wrapping_add(at), len: len.min(BUFFER - at) }
    }

    /// Returns where the stream's bytes from `position` on go, as far as there is room, at most
    /// `len`. There are two parts where the ring wraps around.
    pub(super) fn room_at(&mut self, position: u64, len: usize) -> [RawSliceMut; 2] {
        let len = len.min((self.front + BUFFER as u64 - position) as usize);
        let first = self.stretch(position, len);
        [first, self.stretch(position + first.len as u64, len - first.len)]
    }

    /// Returns where the next bytes go.
    pub(super) fn room(&mut self) -> [RawSliceMut; 2] {
        self.room_at(self.back, BUFFER)
    }

    /// Notes that bytes have been written after the last one.
    pub(super) fn filled(&mut self, count: usize) {
        self.back += count as u64;
        debug_assert!(self.len() <= BUFFER);
    }

    /// Notes that bytes have bypassed the empty ring.
    pub(super) fn passed(&mut self, count: usize) {
        debug_assert_eq!(self.front, self.back);
        self.front += count as u64;
        self.back = self.front;
    }

    /// Returns bytes from the front, at most `want`.
    pub(super) fn front(&mut self, want: usize) -> RawSlice {
        let len = want.min(self.len());
        self.stretch(self.front, len).as_const()
    }

    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.len());
        self.front += count as u64;
    }

    /// Moves bytes to `into`, as many as there are and fit.
    pub(super) fn take(&mut self, into: RawSliceMut) -> usize {
        let mut rest = into;
        while rest.len > 0 && self.len() > 0 {
            let part = self.front(rest.len);
            // SAFETY: `part` is in the ring, and the caller of the link vouches for `into`.
            unsafe { std::ptr::copy_nonoverlapping(part.ptr, rest.ptr, part.len) };
            self.consume(part.len);
            rest = rest.skip(part.len);
        }
        into.len - rest.len
    }
}

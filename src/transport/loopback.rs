//! The link of a rank to itself: a buffer that grows.

use std::io;

use mio::{Registry, Token};

use super::{ALIGN, Link};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;

/// Bytes that a rank keeps of messages of one peer, or of itself, until they are received. Later ones
/// wait at the sender.
pub(crate) const MOST_WAITING: usize = 64 << 20;

/// Bytes of the buffer that are kept when all have been received.
const KEPT: usize = 1 << 20;

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Aligned([u8; ALIGN]);

/// The bytes that a rank has sent itself.
#[derive(Default)]
pub(super) struct Loopback {
    bytes: Vec<Aligned>,
    /// The bytes that have not been received are those from `front` to `back`. The byte at stream offset n
    /// is at n modulo [`ALIGN`].
    front: usize,
    back: usize,
}

impl Loopback {
    fn memory(&mut self) -> RawSliceMut {
        RawSliceMut { ptr: self.bytes.as_mut_ptr().cast(), len: self.bytes.len() * ALIGN }
    }

    /// Makes room for `len` bytes at the back.
    fn reserve(&mut self, len: usize) -> Result<(), Cause> {
        // The bytes move to the front once that frees more than it copies.
        let skipped = self.front - self.front % ALIGN;
        if skipped > self.back - self.front {
            self.bytes.copy_within(skipped / ALIGN..self.back.div_ceil(ALIGN), 0);
            (self.front, self.back) = (self.front - skipped, self.back - skipped);
        }
        let blocks = (self.back + len).div_ceil(ALIGN);
        if let Some(more) = blocks.checked_sub(self.bytes.len()) {
            self.bytes.try_reserve(more).map_err(|_| Cause::Broken(io::ErrorKind::OutOfMemory))?;
            self.bytes.resize(blocks, Aligned([0; ALIGN]));
        }
        Ok(())
    }

    /// Appends bytes for which there is room.
    ///
    /// # Safety
    ///
    /// `part` is readable until this returns.
    unsafe fn push(&mut self, part: RawSlice) {
        let into = self.memory().skip(self.back).take(part.len);
        // SAFETY: the buffer has room for the part, which the caller vouches for. It is not the caller's.
        unsafe { std::ptr::copy_nonoverlapping(part.ptr, into.ptr, into.len) };
        self.back += part.len;
    }
}

impl Link for Loopback {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        let mut room = MOST_WAITING - (self.back - self.front).min(MOST_WAITING);
        let wanted = parts.iter().map(|part| part.len).sum::<usize>().min(room);
        self.reserve(wanted)?;
        for part in parts {
            let part = part.take(room);
            // SAFETY: passed on.
            unsafe { self.push(part) };
            room -= part.len;
        }
        Ok(wanted)
    }

    unsafe fn send_whole(&mut self, parts: &[RawSlice]) -> Result<bool, Cause> {
        let fits = self.back - self.front + parts.iter().map(|part| part.len).sum::<usize>() <= MOST_WAITING;
        // SAFETY: passed on.
        Ok(fits && unsafe { self.send(parts) }.is_ok())
    }

    unsafe fn send_last(&mut self, message: RawSlice) -> Result<usize, Cause> {
        // A rank that leaves does not tell itself.
        Ok(message.len)
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        let (front, len) = (self.front, self.back - self.front);
        Ok(self.memory().as_const().skip(front).take(len.min(want)))
    }

    fn consume(&mut self, count: usize) {
        self.front += count;
        if self.front == self.back {
            let at = self.front % ALIGN;
            (self.front, self.back) = (at, at);
            self.bytes.truncate(KEPT / ALIGN);
            self.bytes.shrink_to(KEPT / ALIGN);
        }
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let part = self.peek(into.len)?;
        // SAFETY: the buffer has these bytes, and the caller vouches for `into`, which is not in it.
        unsafe { std::ptr::copy_nonoverlapping(part.ptr, into.ptr, part.len) };
        self.consume(part.len);
        Ok(part.len)
    }

    fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        // Only this rank's thread fills and empties it.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes come out as they went in, at addresses like their places in the stream, whatever is left over.
    #[test]
    fn a_stream_keeps_its_bytes_and_its_alignment() {
        let mut link = Loopback::default();
        let (mut sent, mut received) = (0usize, 0usize);
        for round in 0..200 {
            let bytes: Vec<u8> = (sent..sent + round * 7 % 300).map(|at| at as u8).collect();
            let (first, rest) = bytes.split_at(bytes.len() / 3);
            // SAFETY: the bytes are borrowed for the call.
            assert_eq!(unsafe { link.send(&[RawSlice::of(first), RawSlice::of(rest)]) }, Ok(bytes.len()));
            sent += bytes.len();
            let part = link.peek(round * 11 % 290).unwrap();
            assert!(part.len == 0 || part.ptr.addr() % ALIGN == received % ALIGN);
            let mut into = vec![0; part.len];
            // SAFETY: as above.
            assert_eq!(unsafe { link.receive(RawSliceMut::of(&mut into)) }, Ok(part.len));
            assert!((received..).zip(&into).all(|(at, &byte)| byte == at as u8), "round {round}");
            received += part.len;
        }
        assert!(received > 10_000 && link.bytes.len() * ALIGN < 1 << 16);
    }

    #[test]
    fn it_holds_no_more_than_its_bound() {
        let mut link = Loopback::default();
        let bytes = vec![1u8; 40 << 20];
        let parts = [RawSlice::of(&bytes)];
        // SAFETY: the bytes are borrowed for the calls.
        unsafe {
            assert_eq!(link.send_whole(&parts), Ok(true));
            assert_eq!(link.send_whole(&parts), Ok(false));
            assert_eq!(link.send(&parts), Ok(24 << 20));
            assert_eq!(link.send(&parts), Ok(0));
        }
        link.consume(MOST_WAITING);
        assert!(link.bytes.capacity() * ALIGN <= 2 * KEPT);
    }
}

//! The header of every message between two ranks.
//!
//! ```text
//!  0        4     5        6         8            16                                48
//! +--------+-----+--------+---------+------------+----------------------------------+----------
//! | "kolo" |kind | version| 0       | bytes      | descriptor of the operation      | payload, padded to 16
//! +--------+-----+--------+---------+------------+----------------------------------+----------
//! ```
//!
//! All numbers are little-endian. Thanks to the padding, every payload starts at a multiple of 16
//! in its stream.

use crate::buffer::RawSliceMut;
use crate::error::Cause;
use crate::transport::Link;
use crate::types::Descriptor;

/// Bytes of a frame's header.
pub(super) const HEADER: usize = 48;

const MAGIC: [u8; 4] = *b"kolo";
const VERSION: u8 = 1;

/// The kinds of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Part of an operation.
    Data = 1,
    /// The last message: the sender drops its communicator. The descriptor's sequence number is
    /// that of its last operation.
    Goodbye = 2,
    /// The last message: an operation failed on the sender.
    Revoked = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    /// Bytes of payload, without the padding.
    pub(super) len: u64,
    /// The encoded [`Descriptor`].
    pub(super) descriptor: [u64; Descriptor::WORDS],
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = VERSION;
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        for (to, word) in bytes[16..].chunks_exact_mut(8).zip(self.descriptor) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Returns the frame that these bytes encode, or `None` if they are not a frame of this
    /// version.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Frame> {
        if bytes[..4] != MAGIC || bytes[5] != VERSION || bytes[6..8] != [0, 0] {
            return None;
        }
        let kind = [Kind::Data, Kind::Goodbye, Kind::Revoked].into_iter().find(|&kind| kind as u8 == bytes[4])?;
        let mut words = bytes[8..].as_chunks().0.iter().map(|&word| u64::from_le_bytes(word));
        let len = words.next()?;
        let mut descriptor = [0; Descriptor::WORDS];
        descriptor.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        Some(Frame { kind, len, descriptor })
    }

    /// Returns why the peer takes part no longer, if the message says that.
    pub(super) fn parting(&self) -> Option<Cause> {
        match self.kind {
            Kind::Data => None,
            Kind::Revoked => Some(Cause::Revoked),
            Kind::Goodbye => Some(Cause::Left { last_seq: Descriptor::decode(self.descriptor).map_or(0, |left| left.seq) }),
        }
    }
}

/// The message that comes in from one peer: first its header, then its payload.
///
/// A link may deliver a header in two parts: at the end of its ring, or while the rest is on the
/// way. The inbox joins them, so the rest of the engine sees complete headers only.
pub(super) struct Inbox {
    header: [u8; HEADER],
    /// Bytes of the header received so far.
    len: usize,
    /// Whether an operation receives the payload after the header, or it is kept as unexpected.
    is_taken: bool,
    /// Whether messages of the peer are kept as unexpected.
    pub(super) has_unexpected: bool,
}

impl Inbox {
    pub(super) const EMPTY: Inbox = Inbox { header: [0; HEADER], len: 0, is_taken: false, has_unexpected: false };

    /// Returns the header of the next message once all of it has arrived, and the same one until
    /// [`Inbox::take`]. Sets `moved` if more of it arrived.
    pub(super) fn header(&mut self, link: &mut dyn Link, moved: &mut bool) -> Result<Option<&[u8; HEADER]>, Cause> {
        if self.is_taken {
            return Ok(None);
        }
        while self.len < HEADER {
            // SAFETY: the inbox owns the header.
            let count = unsafe { link.receive(RawSliceMut::of(&mut self.header[self.len..]))? };
            if count == 0 {
                return Ok(None);
            }
            self.len += count;
            *moved = true;
        }
        Ok(Some(&self.header))
    }

    /// Whether nothing of a message has been received that no receive has got.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0 && !self.has_unexpected
    }

    /// Whether the next message is there, and no operation has taken it.
    pub(super) fn is_held(&self) -> bool {
        self.len == HEADER && !self.is_taken
    }

    /// Whether the payload of a message is next.
    #[inline]
    pub(super) fn is_taken(&self) -> bool {
        self.is_taken
    }

    /// Assigns the message to an operation: the link continues with its payload, until
    /// [`Inbox::end`].
    pub(super) fn take(&mut self) {
        debug_assert_eq!(self.len, HEADER);
        self.is_taken = true;
    }

    /// Called once the payload and its padding have been received: the next message follows.
    pub(super) fn end(&mut self) {
        (self.len, self.is_taken) = (0, false);
    }

    /// Returns why the peer takes part no longer, if its next message says that.
    pub(super) fn farewell(&mut self, link: &mut dyn Link) -> Option<Cause> {
        let header = self.header(link, &mut false).ok().flatten()?;
        Frame::decode(header)?.parting()
    }
}

/// Decodes any bytes as a header.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else { return };
    let Some(frame) = Frame::decode(header) else { return };
    assert_eq!(&frame.encode(), header, "a decoded header encodes to other bytes");
    fuzz_descriptor(frame.descriptor);
}

/// Decodes any words as a descriptor.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_descriptor(words: [u64; Descriptor::WORDS]) {
    let Some(descriptor) = Descriptor::decode(words) else { return };
    assert_eq!(descriptor.encode(), words, "a decoded descriptor encodes to other words");
    assert!(!descriptor.to_string().is_empty());
}

/// Returns the header of a valid message.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample() -> Vec<u8> {
    let descriptor = Descriptor { op: crate::types::Op::AllReduce, seq: 7, count: 100, root: Some(1), ..Descriptor::nothing() };
    Frame { kind: Kind::Data, len: 400, descriptor: descriptor.encode() }.encode().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        for kind in [Kind::Data, Kind::Goodbye, Kind::Revoked] {
            let frame = Frame { kind, len: 0x0123_4567_89ab_cdef, descriptor: [1, u64::MAX, 3 << 40, 4] };
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn other_bytes_are_no_frame() {
        let good = Frame { kind: Kind::Data, len: 8, descriptor: [0; 4] }.encode();
        for at in 0..8 {
            let mut bad = good;
            bad[at] ^= 0x80;
            assert_eq!(Frame::decode(&bad), None, "byte {at}");
        }
    }
}

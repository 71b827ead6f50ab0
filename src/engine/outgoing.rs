//! A message that is being sent.

use super::frame::HEADER;
use crate::buffer::RawSlice;
use crate::transport::ALIGN;
use crate::types::Rank;

/// A message that has not drained.
pub(super) struct Outgoing {
    pub(super) message: u64,
    /// The number of the job that sends it.
    pub(super) job: u64,
    pub(super) to: Rank,
    pub(super) header: [u8; HEADER],
    pub(super) payload: RawSlice,
    /// Bytes of the payload that may be sent: not all of them while the step that forwards them
    /// still receives.
    pub(super) ready: usize,
    /// Whether the peer may read the payload where it is.
    pub(super) lends: bool,
    /// Bytes sent so far, of header, payload and padding.
    pub(super) sent: usize,
}

impl Outgoing {
    #[inline]
    pub(super) fn len(&self) -> usize {
        HEADER + self.payload.len.next_multiple_of(ALIGN)
    }

    /// Returns what may be sent now.
    #[inline]
    pub(super) fn rest(&self) -> [RawSlice; 3] {
        static ZEROS: [u8; ALIGN] = [0; ALIGN];
        let of_header = self.sent.min(HEADER);
        let of_payload = (self.sent - of_header).min(self.payload.len);
        let of_padding = self.sent - of_header - of_payload;
        let padding =
            if self.ready == self.payload.len { self.payload.len.next_multiple_of(ALIGN) - self.payload.len } else { 0 };
        [
            RawSlice::of(&self.header[of_header..]),
            self.payload.take(self.ready).skip(of_payload.min(self.ready)),
            RawSlice::of(&ZEROS[..padding - of_padding.min(padding)]),
        ]
    }

    /// Returns the part of the payload that is still to be read.
    #[inline]
    pub(super) fn unread(&self) -> RawSlice {
        self.payload.skip(self.sent.saturating_sub(HEADER).min(self.payload.len))
    }
}

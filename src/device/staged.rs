//! Collectives on device memory through host memory, round by round. Streams copy the segments; a
//! rank whose buffers are in host memory copies them itself.

use super::call::{DeviceCall, cut_of};
use super::host_area::{HostArea, SEGMENT, segment_of_host};
use super::operation::DeviceOperation;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::{Call, Counts};
use crate::cuda::rounds::{Buffer, Cut};
use crate::error::{ArgumentError, Error, Result};

impl DeviceOperation<'_> {
    /// # Safety
    ///
    /// As for [`DeviceOperation::run`].
    pub(super) unsafe fn staged(&mut self, bound: &DeviceCall, cut: &Cut, area: &HostArea) -> Result<()> {
        for round in 0..cut.rounds {
            self.until_arrived(bound, round)?;
            let segment = area.segment(self.world, round);
            // SAFETY: the stream has filled the segment, and waits for this round's end.
            unsafe { self.run_round(cut, round, segment)? };
            self.end(bound, round);
        }
        Ok(())
    }

    /// The same, with this rank's buffers in host memory.
    ///
    /// # Safety
    ///
    /// As for [`DeviceOperation::run`].
    pub(super) unsafe fn staged_on_host(&mut self, call: &Call) -> Result<()> {
        let Call { send, recv, .. } = *call;
        let cut = cut_of(call, self.world).into_rounds_of(SEGMENT);
        let (memory, place) = self.devices.area.get().cloned().ok_or_else(|| self.confused())?;
        let segment = memory.at(place, segment_of_host(self.world));
        for round in 0..cut.rounds {
            for row in cut.rows(self.rank, Buffer::Send, round) {
                // SAFETY: rows are within the buffer, and within the segment, which is apart from it.
                unsafe {
                    std::ptr::copy_nonoverlapping(send.skip(row.of_buffer).ptr, segment.add(row.of_segment), row.len);
                }
            }
            // SAFETY: only calls on host memory use the segment, one after the other.
            unsafe { self.run_round(&cut, round, segment)? };
            for row in cut.rows(self.rank, Buffer::Recv, round) {
                // SAFETY: as above.
                unsafe {
                    std::ptr::copy_nonoverlapping(segment.add(row.of_segment), recv.skip(row.of_buffer).ptr, row.len);
                }
            }
        }
        Ok(())
    }

    /// Runs the collective on one round's segment.
    unsafe fn run_round(&mut self, cut: &Cut, round: usize, segment: *mut u8) -> Result<()> {
        let counts = cut.counts(round);
        let mut call = Call { on_device: None, on_behalf_of: Some(self.call.op), count: counts[0], ..self.call.clone() };
        let problem = ArgumentError::TooMany { count: self.call.count };
        let counts = Counts::new(&counts).ok_or(Error::Argument { op: self.call.op, problem })?;
        for of_call in [&mut call.send_counts, &mut call.recv_counts] {
            if of_call.is_some() {
                *of_call = Some(counts.clone());
            }
        }
        let (send, recv) = (cut.span(self.rank, Buffer::Send, round), cut.span(self.rank, Buffer::Recv, round));
        // SAFETY: both are within the segment.
        unsafe {
            call.send = RawSlice { ptr: segment.add(send.start), len: send.len() };
            call.recv = RawSliceMut { ptr: segment.add(recv.start), len: recv.len() };
            self.on_host(&call)
        }
    }
}

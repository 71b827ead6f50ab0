//! Collectives on device memory through host memory: as a whole, or segment by segment.

use super::operation::{OnDevices, SHORT};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::cuda::segments::{Cut, Row, Segment};
use crate::error::{ArgumentError, Error, Result};
use crate::exec::call::Call;
use crate::exec::device_state::{Area, SLOTS};
use crate::types::Op;

/// Bytes of a segment: enough that starting a copy does not count, and few enough that the first
/// and the last segment, which overlap with nothing, do not count either.
const SEGMENT: usize = 2 << 20;

/// Bytes of host memory that stay for whole calls: enough for both buffers of a short one.
const SCRATCH: usize = 4 * SHORT as usize;

impl OnDevices<'_> {
    /// Through host memory, as all ranks do.
    ///
    /// # Safety
    ///
    /// As for [`OnDevices::run`], here and below.
    pub(super) unsafe fn through_host(&mut self) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self.call.op {
                Op::AllGatherV | Op::ReduceScatterV => self.whole(),
                _ => self.in_segments(),
            }
        }
    }

    /// The whole call, on host memory instead of the device's.
    pub(super) unsafe fn whole(&mut self) -> Result<()> {
        let Call { send, recv, .. } = *self.call;
        let Some(lent) = self.call.lent.clone().filter(|_| self.touches_device()) else {
            // SAFETY: passed on.
            return unsafe { self.on_host(self.call) };
        };
        let [sends, receives] = lent.on_device;
        let room = |len: usize, is_on_device: bool| if is_on_device { len.next_multiple_of(64) } else { 0 };
        let for_send = room(send.len, sends);
        let len = for_send + room(recv.len, receives);
        // If this fails, the memory stays until nothing is in flight there.
        self.prepare_scratch(len)?;
        let at = |this: &Self, offset: usize| this.core.devices.scratch.as_ref().expect("it was prepared").at(offset);
        let mut call = Call { lent: None, ..self.call.clone() };
        // SAFETY: there is room for both, and the caller vouches for the buffers.
        unsafe {
            if sends {
                call.send.ptr = at(self, 0);
                let lanes = self.lanes()?;
                lanes.device.copy_out(lanes.out.id, send.ptr.addr() as u64, call.send.ptr.cast_mut(), send.len)?;
                lanes.outs[0].record(lanes.out.id)?;
                lanes.until_done(&lanes.outs[0])?;
            }
            if receives {
                call.recv.ptr = at(self, for_send);
            }
            self.on_host(&call)?;
            if receives {
                let lanes = self.lanes()?;
                lanes.device.copy_in(lanes.back.id, call.recv.ptr, recv.ptr.addr() as u64, recv.len)?;
                lanes.finish()?;
            }
        }
        if len > SCRATCH {
            self.core.devices.scratch = None;
        }
        Ok(())
    }

    /// Prepares host memory for a whole call. Short calls reuse it, pinned.
    fn prepare_scratch(&mut self, len: usize) -> Result<()> {
        let device = self.lanes()?.device.clone();
        if self.core.devices.scratch.as_ref().is_none_or(|scratch| scratch.memory.part < len) {
            let problem = ArgumentError::TooMany { count: self.call.count };
            let mut scratch = Area::private(len.max(SCRATCH)).ok_or(Error::Argument { op: self.call.op, problem })?;
            if len <= SCRATCH {
                scratch.pin(&device);
            }
            self.core.devices.scratch = Some(scratch);
        }
        Ok(())
    }

    /// Segment by segment through host memory; all ranks cut the same segments.
    unsafe fn in_segments(&mut self) -> Result<()> {
        let Call { op, dtype, root, count, .. } = *self.call;
        let cut = Cut { op, rank: self.rank, world: self.world, root, count, size: dtype.size() };
        let slot_len = SEGMENT.max(cut.width());
        self.prepare_area(SLOTS * slot_len)?;
        let segments: Vec<Segment> = cut.segments(SEGMENT).collect();
        // SAFETY: passed on; a slot is used for one segment after the other.
        unsafe {
            self.bring(&segments[0], 0, slot_len)?;
            for (i, segment) in segments.iter().enumerate() {
                if let Some(next) = segments.get(i + 1) {
                    let slot = (i + 1) % SLOTS;
                    if i + 1 >= SLOTS {
                        self.until(slot, false)?;
                    }
                    self.bring(next, slot, slot_len)?;
                }
                let slot = i % SLOTS;
                self.until(slot, true)?;
                self.reduce_segment(segment, slot, slot_len)?;
                self.take_back(segment, slot, slot_len)?;
            }
            for slot in 0..SLOTS.min(segments.len()) {
                self.until(slot, false)?;
            }
        }
        Ok(())
    }

    /// Waits until a slot's segment has come from the device, or has returned to it.
    fn until(&mut self, slot: usize, has_come: bool) -> Result<()> {
        let [out, back] = self.call.lent.as_ref().map_or([false; 2], |lent| lent.on_device);
        if !(if has_come { out } else { back }) {
            return Ok(());
        }
        let lanes = self.lanes()?;
        lanes.until_done(if has_come { &lanes.outs[slot] } else { &lanes.backs[slot] })
    }

    /// Starts the copies of a segment from this rank's send buffer.
    unsafe fn bring(&mut self, segment: &Segment, slot: usize, slot_len: usize) -> Result<()> {
        let Call { send, .. } = *self.call;
        let memory = self.slot(slot, slot_len);
        if !self.call.lent.as_ref().is_some_and(|lent| lent.on_device[0]) {
            for &Row { of_buffer, of_segment, len } in &segment.out {
                // SAFETY: rows are within the buffer, and within the slot, which is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(send.skip(of_buffer).ptr, memory.add(of_segment), len) };
            }
            return Ok(());
        }
        let lanes = self.lanes()?;
        for &Row { of_buffer, of_segment, len } in &segment.out {
            // SAFETY: as above; the slot is not touched until the event is done.
            unsafe { lanes.device.copy_out(lanes.out.id, send.skip(of_buffer).ptr.addr() as u64, memory.add(of_segment), len)? };
        }
        lanes.outs[slot].record(lanes.out.id)
    }

    unsafe fn reduce_segment(&mut self, segment: &Segment, slot: usize, slot_len: usize) -> Result<()> {
        let memory = self.slot(slot, slot_len);
        let mut call = Call { lent: None, on_behalf_of: Some(self.call.op), count: segment.count, ..self.call.clone() };
        // SAFETY: both are within the slot.
        unsafe {
            call.send = RawSlice { ptr: memory.add(segment.send.start), len: segment.send.len() };
            call.recv = RawSliceMut { ptr: memory.add(segment.recv.start), len: segment.recv.len() };
            self.on_host(&call)
        }
    }

    /// Starts the copies of a segment to this rank's receive buffer.
    unsafe fn take_back(&mut self, segment: &Segment, slot: usize, slot_len: usize) -> Result<()> {
        let Call { recv, .. } = *self.call;
        let memory = self.slot(slot, slot_len);
        if !self.call.lent.as_ref().is_some_and(|lent| lent.on_device[1]) {
            for &Row { of_buffer, of_segment, len } in &segment.back {
                // SAFETY: rows are within the buffer, and within the slot, which is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(memory.add(of_segment), recv.skip(of_buffer).ptr, len) };
            }
            return Ok(());
        }
        let lanes = self.lanes()?;
        for &Row { of_buffer, of_segment, len } in &segment.back {
            // SAFETY: as above; the slot is not touched until the event is done.
            unsafe { lanes.device.copy_in(lanes.back.id, memory.add(of_segment), recv.skip(of_buffer).ptr.addr() as u64, len)? };
        }
        lanes.backs[slot].record(lanes.back.id)
    }

    fn slot(&self, slot: usize, slot_len: usize) -> *mut u8 {
        self.core.devices.area.as_ref().expect("it was prepared").at(slot * slot_len)
    }

    /// Prepares host memory for segments, on all ranks.
    fn prepare_area(&mut self, len: usize) -> Result<()> {
        // All ranks decide alike whether the area is long enough, because they made the same calls.
        if self.core.devices.area.as_ref().is_none_or(|area| area.memory.part < len) {
            self.core.devices.area = None;
            let shared = self.core.allocate(&self.shared.info, len)?;
            let (place, _) = self.core.place_on_host();
            let area = match shared {
                Some(memory) => Some(Area { pinned: None, memory, place }),
                None => Area::private(len),
            };
            let problem = ArgumentError::TooMany { count: self.call.count };
            self.core.devices.area = Some(area.ok_or(Error::Argument { op: self.call.op, problem })?);
        }
        if let Some(lent) = &self.call.lent
            && let Some(area) = &mut self.core.devices.area
        {
            area.pin(&lent.device);
        }
        Ok(())
    }
}

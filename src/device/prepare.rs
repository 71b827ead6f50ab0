//! What ranks find out together before their first large call with device memory: whether they can
//! reach each other's memory. No driver call is made here.

use super::host_area::{area_len, private_area};
use super::operation::DeviceOperation;
use super::state::Prepared;
use crate::cuda::peers::{Announcement, BufferAt, Exported, Participation, Record};
use crate::error::{ArgumentError, Error, Result};

impl DeviceOperation<'_> {
    /// Tells the other ranks that this one prepares for its first large call on a device, and of its
    /// area.
    pub(super) fn prepare(&mut self, area: Option<Exported>) -> Result<Prepared> {
        // Ranks that called before may have prepared already, with this one.
        if let Some((memory, place)) = self.devices.area.get() {
            return Ok(Prepared::Staged(memory.clone(), *place));
        }
        if !self.shared.may_be_direct() {
            _ = self.agree_on_participation(Participation::Prepares)?;
            return self.prepare_host();
        }
        let announced = Announcement { news: [area, None], ..Announcement::nothing([BufferAt::Device; 2]) };
        let records = self.exchange(&self.record(Participation::Prepares, announced))?;
        if records.iter().any(|record| {
            matches!(record.participation, Participation::Direct | Participation::Captures | Participation::Replays)
        }) {
            return Err(self.mixed(&records));
        }
        // All ranks have the same records and decide alike.
        if records.iter().all(|record| record.participation == Participation::Prepares && record.news[0].is_some()) {
            Ok(Prepared::Reachable(records))
        } else {
            self.prepare_host()
        }
    }

    /// Agrees whether all ranks have opened what they need.
    pub(super) fn agree_on_areas(&mut self, is_open: bool, records: &[Record]) -> Result<Prepared> {
        if self.agree(is_open)? { Ok(Prepared::Reachable(records.to_vec())) } else { self.prepare_host() }
    }

    /// Makes host memory for segments, on all ranks.
    pub(super) fn prepare_host(&mut self) -> Result<Prepared> {
        let (memory, place) = match self.devices.area.get() {
            Some(area) => area.clone(),
            None => {
                let len = area_len(self.world);
                let shared = self.core.allocate(&self.shared.info, len)?;
                let (place, _) = self.core.place_on_host();
                let area = shared.map(|memory| (memory, place)).or_else(|| Some((private_area(len)?, 0)));
                let problem = ArgumentError::TooMany { count: self.call.count };
                let area = area.ok_or(Error::Argument { op: self.call.op, problem })?;
                self.devices.area.get_or_init(|| area).clone()
            }
        };
        Ok(Prepared::Staged(memory, place))
    }
}

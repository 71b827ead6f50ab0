//! What ranks find out together before their first large call with device memory: whether they can
//! reach each other's memory. No driver call is made here.

use super::operation::OnDevices;
use crate::cuda::peers::{BufferAt, Exported, Part, Record, Said};
use crate::error::{ArgumentError, Error, Result};
use crate::exec::device_state::Prepared;
use crate::exec::host_area::{area_len, private_area};

impl OnDevices<'_> {
    /// Tells the other ranks that this one prepares for its first large call on a device, and of its
    /// area.
    pub(in crate::exec) fn prepare(&mut self, area: Option<Exported>) -> Result<Prepared> {
        // Ranks that called before may have prepared already, with this one.
        if let Some((memory, place)) = &self.core.devices.area {
            return Ok(Prepared::Staged(memory.clone(), *place));
        }
        if !self.shared.may_be_direct() {
            _ = self.agree_on_part(Part::Prepares)?;
            return self.prepare_host();
        }
        let said = Said { news: [area, None], ..Said::nothing([BufferAt::Device; 2]) };
        let records = self.exchange(&self.record(Part::Prepares, said))?;
        if records.iter().any(|record| matches!(record.part, Part::Direct | Part::Captures | Part::Replays)) {
            return Err(self.mixed(&records));
        }
        // All ranks have the same records and decide alike.
        if records.iter().all(|record| record.part == Part::Prepares && record.news[0].is_some()) {
            Ok(Prepared::Reachable(records))
        } else {
            self.prepare_host()
        }
    }

    /// Agrees whether all ranks have opened what they need.
    pub(in crate::exec) fn agree_on_areas(&mut self, is_open: bool, records: &[Record]) -> Result<Prepared> {
        if self.agree(is_open)? { Ok(Prepared::Reachable(records.to_vec())) } else { self.prepare_host() }
    }

    /// Makes host memory for segments, on all ranks.
    pub(super) fn prepare_host(&mut self) -> Result<Prepared> {
        if self.core.devices.area.is_none() {
            let len = area_len(self.world);
            let shared = self.core.allocate(&self.shared.info, len)?;
            let (place, _) = self.core.place_on_host();
            let area = shared.map(|memory| (memory, place)).or_else(|| Some((private_area(len)?, 0)));
            let problem = ArgumentError::TooMany { count: self.call.count };
            self.core.devices.area = Some(area.ok_or(Error::Argument { op: self.call.op, problem })?);
        }
        let (memory, place) = self.core.devices.area.as_ref().expect("it is there");
        Ok(Prepared::Staged(memory.clone(), *place))
    }
}

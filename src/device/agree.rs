//! What ranks tell each other before an operation that may concern devices.

use super::call::device_call;
use super::operation::DeviceOperation;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::cuda::device::DeviceId;
use crate::cuda::peers::{Announcement, Participation, Record};
use crate::error::{Cause, Error, Result};
use crate::failure::OpContext;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp};

/// The device of a rank whose buffers are in host memory.
const NO_DEVICE: DeviceId = [0; 16];

impl DeviceOperation<'_> {
    /// What this rank tells its peers about its call.
    pub(super) fn record(&self, participation: Participation, announced: Announcement) -> Record {
        let Announcement { places, news, gone, opened } = announced;
        let call = self.call.descriptor(0).encode();
        let device = device_call(self.call).map_or(NO_DEVICE, |bound| bound.device.id());
        Record { call, participation, process: self.devices.process(), device, places, opened, news, gone }
    }

    /// Gathers the records of all ranks. Fails if they do not call the same.
    pub(super) fn exchange(&mut self, mine: &Record) -> Result<Vec<Record>> {
        let words = mine.call;
        let described = self.call.descriptor(0);
        let mine = mine.encode();
        let mut all = vec![0; self.world * Record::LEN];
        let mut call = Call { described: Some(described), ..self.beside(Op::AllGather, DType::U8, Record::LEN) };
        (call.send, call.recv) = (RawSlice::of(&mine), RawSliceMut::of(&mut all));
        // SAFETY: both are borrowed for the call, and have the lengths that it states.
        unsafe { self.on_host(&call)? };
        let mut records = Vec::with_capacity(self.world);
        for (peer, bytes) in all.chunks(Record::LEN).enumerate() {
            let record = Record::decode(bytes);
            let record = record.ok_or_else(|| self.failed(peer, Cause::Corrupt("what says where a buffer is")))?;
            if record.call != words {
                return Err(self.mismatch(peer, words, record.call));
            }
            records.push(record);
        }
        Ok(records)
    }

    /// Gathers the records of ranks that all take part in the same way. Fails if one does not.
    pub(super) fn exchange_as(&mut self, participation: Participation, announced: Announcement) -> Result<Vec<Record>> {
        let records = self.exchange(&self.record(participation, announced))?;
        if records.iter().all(|record| record.participation == participation) { Ok(records) } else { Err(self.mixed(&records)) }
    }

    pub(super) fn failed(&self, peer: Rank, cause: Cause) -> Error {
        let descriptor = self.call.descriptor(self.core.next_seq() - 1);
        OpContext::new(descriptor, &self.shared.info).failed(peer, cause)
    }

    fn mismatch(&self, peer: Rank, mine: [u64; Descriptor::WORDS], theirs: [u64; Descriptor::WORDS]) -> Error {
        let decode = |words| Descriptor::decode(words).map(|decoded| Descriptor { seq: self.core.next_seq() - 1, ..decoded });
        match (decode(mine), decode(theirs)) {
            (Some(mine), Some(theirs)) => OpContext::new(mine, &self.shared.info).mismatch(peer, mine, theirs),
            _ => self.failed(peer, Cause::Corrupt("what it called")),
        }
    }

    /// As the exchange of records, where no rank can reach another one's device: only how they take
    /// part.
    pub(super) fn agree_on_participation(&mut self, mine: Participation) -> Result<Participation> {
        let number = match mine {
            Participation::Prepares => 0,
            Participation::Staged | Participation::Direct | Participation::Captures | Participation::Replays => 1,
            Participation::Host => 2,
        };
        Ok(match self.least(number)? {
            0 => Participation::Prepares,
            1 => Participation::Staged,
            _ => Participation::Host,
        })
    }

    /// Whether all ranks agree.
    pub(super) fn agree(&mut self, yes: bool) -> Result<bool> {
        Ok(self.least(yes.into())? != 0)
    }

    /// The least number of all ranks.
    fn least(&mut self, mine: u8) -> Result<u8> {
        let mut least = [mine];
        let mut call = self.beside(Op::AllReduce, DType::U8, 1);
        let memory = RawSliceMut::of(&mut least);
        (call.redop, call.send, call.recv) = (Some(ReduceOp::Min), memory.as_const(), memory);
        call.described = Some(self.call.descriptor(0));
        // SAFETY: `least` is borrowed for the call.
        unsafe { self.on_host(&call)? };
        Ok(least[0])
    }
}

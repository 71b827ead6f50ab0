//! What ranks tell each other before an operation that may concern devices.

use std::sync::LazyLock;

use super::operation::OnDevices;
use crate::bootstrap::identity;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::cuda::device::DeviceId;
use crate::cuda::peers::{Part, Record, Said};
use crate::error::{Cause, Error, Result};
use crate::exec::call::Call;
use crate::failure::OpContext;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp, mix};

/// The device of a rank whose buffers are in host memory.
const NO_DEVICE: DeviceId = [0; 16];

impl OnDevices<'_> {
    /// What this rank tells its peers about its call.
    pub(super) fn record(&self, part: Part, said: Said) -> Record {
        let Said { places, news, gone, opened } = said;
        let call = self.call.descriptor(0).encode();
        let device = self.call.lent.as_ref().map_or(NO_DEVICE, |lent| lent.device.id());
        Record { call, part, process: self.core.devices.process.unwrap_or_else(process), device, places, opened, news, gone }
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
    pub(in crate::exec) fn exchange_as(&mut self, part: Part, said: Said) -> Result<Vec<Record>> {
        let records = self.exchange(&self.record(part, said))?;
        if records.iter().all(|record| record.part == part) { Ok(records) } else { Err(self.mixed(&records)) }
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
    pub(super) fn agree_on_part(&mut self, mine: Part) -> Result<Part> {
        let number = match mine {
            Part::Prepares => 0,
            Part::Staged | Part::Direct | Part::Captures | Part::Replays => 1,
            Part::Host => 2,
        };
        Ok(match self.least(number)? {
            0 => Part::Prepares,
            1 => Part::Staged,
            _ => Part::Host,
        })
    }

    /// Whether all ranks agree.
    pub(in crate::exec) fn agree(&mut self, yes: bool) -> Result<bool> {
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

/// A number of this process that no other process has, a forked child included.
fn process() -> u64 {
    mix(*PROCESS, std::process::id().into())
}

/// Drawn by the process that first needed it; its forked children inherit it.
static PROCESS: LazyLock<u64> = LazyLock::new(|| u64::from_le_bytes(std::array::from_fn(|i| identity::random()[i])));

//! Where the buffers of all ranks are: what each rank tells its peers, and which buffers all ranks
//! can reach.

use std::sync::LazyLock;

use super::operation::OnDevices;
use crate::bootstrap::identity;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::cuda::device::DeviceId;
use crate::cuda::direct::{Buffer, Plan};
use crate::cuda::peers::{BufferAt, Peers, Record};
use crate::error::{Cause, Error, Result};
use crate::exec::call::Call;
use crate::failure::OpContext;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp, mix};

/// The device of a rank whose buffers are in host memory.
const NO_DEVICE: DeviceId = [0; 16];

impl OnDevices<'_> {
    /// Tells all ranks where this rank's buffers are, and returns where theirs are.
    pub(super) fn tell(&mut self) -> Result<Vec<Record>> {
        let words = self.call.descriptor(0).encode();
        let op = self.call.op;
        let (call, world) = (self.call, self.world);
        let lengths = |peer| call.lengths(peer, world).map_err(|problem| Error::Argument { op, problem });
        self.exchange(self.record(words), |peer| lengths(peer).map(|lengths| lengths.map(|len| len as u64)))
    }

    /// Gathers the records of all ranks. Their buffers have at least the lengths that `needed`
    /// returns.
    pub(super) fn exchange(&mut self, mine: Record, needed: impl Fn(Rank) -> Result<[u64; 2]>) -> Result<Vec<Record>> {
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
            let record = Record::decode(bytes, needed(peer)?);
            // A peer that made another call has other lengths.
            let theirs = bytes.first_chunk::<{ Descriptor::WORDS * 8 }>().map(words_of);
            if let Some(theirs) = theirs.filter(|theirs| *theirs != words) {
                return Err(self.mismatch(peer, words, theirs));
            }
            records.push(record.ok_or_else(|| self.failed(peer, Cause::Corrupt("what says where a buffer is")))?);
        }
        Ok(records)
    }

    pub(super) fn record(&self, call: [u64; Descriptor::WORDS]) -> Record {
        let lent = self.call.lent.as_ref();
        let place = |buffer: Buffer, address: *const u8, len: usize| match lent {
            _ if len == 0 => BufferAt::Nowhere,
            Some(lent) if lent.on_device[buffer as usize] && !lent.has_kernels => BufferAt::Inert,
            Some(lent) if lent.on_device[buffer as usize] => {
                let address = address.addr() as u64;
                let open = lent.device.extent(address).and_then(|extent| Ok((extent, lent.device.export(&extent)?)));
                match open {
                    Ok((extent, handle)) => BufferAt::Open { extent, handle, offset: address - extent.base },
                    Err(error) => {
                        tracing::debug!(%error, "other ranks cannot reach this memory: it passes through the host");
                        BufferAt::Hidden
                    }
                }
            }
            _ => BufferAt::Host,
        };
        let Call { send, recv, .. } = *self.call;
        let places = [place(Buffer::Send, send.ptr, send.len), place(Buffer::Recv, recv.ptr, recv.len)];
        let device = lent.map_or(NO_DEVICE, |lent| lent.device.id());
        Record {
            call,
            process: self.core.devices.process.unwrap_or_else(process),
            device,
            is_in_place: send.ptr == recv.ptr,
            places,
        }
    }

    fn failed(&self, peer: Rank, cause: Cause) -> Error {
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

    /// Closes the memory of peers if a rank now uses another device: it was opened for the earlier
    /// one. All ranks see the same records, and close the same memory.
    pub(super) fn look_for_other_devices(&mut self, records: &[Record]) {
        let devices = &mut self.core.devices;
        devices.of_ranks.resize(records.len(), NO_DEVICE);
        let mut is_other = false;
        for (known, record) in devices.of_ranks.iter_mut().zip(records).filter(|(_, record)| record.device != NO_DEVICE) {
            is_other |= *known != NO_DEVICE && *known != record.device;
            *known = record.device;
        }
        if is_other {
            (devices.peers, devices.on_device) = (Peers::default(), None);
        }
    }

    /// Where all ranks' buffers are from here, if every rank can reach all of them.
    pub(super) fn reach(&mut self, records: &[Record]) -> Result<Option<Vec<[u64; 2]>>> {
        let is_in_place = records.iter().any(|record| record.is_in_place);
        let is_open = |place: &BufferAt| matches!(place, BufferAt::Nowhere | BufferAt::Open { .. });
        let may = Plan::is_possible(self.call.op, is_in_place) && records.iter().all(|record| record.places.iter().all(is_open));
        // All ranks have the same records and decide alike.
        if !may {
            return Ok(None);
        }
        let mut peers = std::mem::take(&mut self.core.devices.peers);
        let opened = self.open(&mut peers, records);
        self.core.devices.peers = peers;
        opened?;
        let peers = &self.core.devices.peers;
        let address = |rank: Rank, place: &BufferAt| match place {
            BufferAt::Nowhere => Some(0),
            place => peers.address(rank, place),
        };
        let both = |(rank, record): (Rank, &Record)| Some([address(rank, &record.places[0])?, address(rank, &record.places[1])?]);
        Ok(records.iter().enumerate().map(both).collect())
    }

    /// Opens the memory that is new in these records, where all ranks can.
    pub(super) fn open(&mut self, peers: &mut Peers, records: &[Record]) -> Result<()> {
        let Some(lent) = &self.call.lent else { return Ok(()) };
        let news = peers.news(records);
        if news.is_empty() {
            return Ok(());
        }
        let opened = peers.open(&lent.device, &records[self.rank], records, &news);
        if let Err(error) = &opened {
            tracing::info!(%error, "memory of other ranks cannot be reached: it passes through the host");
        }
        let by_all = self.agree(opened.is_ok())?;
        peers.apply_results(records, &news, by_all);
        Ok(())
    }

    /// Whether all ranks agree.
    pub(super) fn agree(&mut self, yes: bool) -> Result<bool> {
        let mut answer = [u8::from(yes)];
        let mut call = self.beside(Op::AllReduce, DType::U8, 1);
        let memory = RawSliceMut::of(&mut answer);
        (call.redop, call.send, call.recv) = (Some(ReduceOp::Min), memory.as_const(), memory);
        call.described = Some(self.call.descriptor(0));
        // SAFETY: `answer` is borrowed for the call.
        unsafe { self.on_host(&call)? };
        Ok(answer[0] != 0)
    }
}

/// A number of this process that no other process has, a forked child included.
fn process() -> u64 {
    mix(*PROCESS, std::process::id().into())
}

/// Drawn by the process that first needed it; its forked children inherit it.
static PROCESS: LazyLock<u64> = LazyLock::new(|| u64::from_le_bytes(std::array::from_fn(|i| identity::random()[i])));

fn words_of(bytes: &[u8; Descriptor::WORDS * 8]) -> [u64; Descriptor::WORDS] {
    std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * i + byte])))
}

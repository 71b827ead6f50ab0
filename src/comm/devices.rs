//! Collectives of which some buffers, or all, are in the memory of GPUs.
//!
//! Short ones pass through the host as they are. Of others, ranks first tell each other where their buffers are. If all can reach
//! all, each does its part where the buffers are ("direct"). Where they cannot, because memory is of one of CUDA's pools, an all-reduce
//! passes through areas on the devices that all can reach. Otherwise operations are cut into pieces that pass through pinned host memory:
//! while one is being reduced there, the next is on its way from the device, and the one before on its way back.
//!
//! The host waits for devices, and ranks for each other on the host; no stream waits for another process. For what a process that
//! died was to do never comes, and a stream that waited for it could never be used again. The caller's stream waits at a gate,
//! which opens when the operation has ended, however that was.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use super::call::Call;
use super::{Communicator, Core, Shared};
use crate::buffer::{Chunk, ChunkMut};
use crate::config::DevicePath;
use crate::cuda;
use crate::cuda::device::{
    Address, Device, DeviceId, Driver, Event, Gate, MOST_PARTS, Memory, Pinned, Reduction, Stream, StreamId,
};
use crate::cuda::direct::{self, Buffer, Move, Plan};
use crate::cuda::peers::{Peers, Place, Record};
use crate::cuda::pieces::{Cut, Piece, Row};
use crate::door::handshake;
use crate::error::{Argument, Cause, Error, Result};
use crate::sys::Segment;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp, mix};
use crate::window::heap::Allocation;

/// Up to so many bytes an operation is not worth asking where the others' buffers are.
const SHORT: u64 = 64 << 10;

/// Bytes of a piece: enough that starting a copy does not count, and few enough that the first and the last, beside which nothing
/// else goes on, do not either.
const PIECE: usize = 2 << 20;

/// Bytes of the area of a rank on its device: enough that two meetings of the ranks do not count.
const DEVICE_AREA: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// Pieces that are under way at once: one comes, one is reduced, one goes.
const SLOTS: usize = 3;

/// What a call needs whose buffers are on a device, or that takes its turn in a stream.
pub(crate) struct Lent {
    device: Arc<dyn Device>,
    /// Whether the send and the receive buffer are the device's.
    on_device: [bool; 2],
    /// Where the call takes its turn.
    stream: StreamId,
    /// Done when that has come to the call.
    ready: Event,
    /// Where streams can wait for its end.
    gate: Option<Gate>,
    /// Whether the caller's stream does.
    is_closed: AtomicBool,
    /// Whether the device can reduce.
    has_kernels: bool,
}

impl Lent {
    /// Has the caller's stream wait for the end, if it can: the caller need not, then.
    pub(super) fn close(&self) -> Result<bool> {
        let closed = self.close_on(self.stream)?;
        self.is_closed.store(closed, Ordering::Relaxed);
        Ok(closed)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Whether the caller's stream has come to the call, or cannot any more.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.is_done().unwrap_or(true)
    }

    /// Has a stream wait for the end, if it can.
    pub(crate) fn close_on(&self, stream: StreamId) -> Result<bool> {
        self.gate.as_ref().map(|gate| gate.close(&*self.device, stream)).transpose().map(|closed| closed.is_some())
    }

    /// The call has ended.
    pub(super) fn open(&self) {
        if let Some(gate) = &self.gate {
            gate.open();
        }
    }
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("device", &self.device.name()).field("on_device", &self.on_device).finish_non_exhaustive()
    }
}

/// Of a rank that has its buffers in host memory.
const NO_DEVICE: DeviceId = [0; 16];

/// How a device reduces for a call, or makes bools of bytes.
fn reduction(call: &Call) -> Option<ReduceOp> {
    call.redop.or((call.dtype == DType::Bool).then_some(ReduceOp::Max))
}

/// What a communicator keeps for devices.
#[derive(Default)]
pub(super) struct Devices {
    lanes: Option<Lanes>,
    /// For pieces. Ranks of one host share it, so that what is reduced need not be staged once more.
    area: Option<Area>,
    /// For what is short.
    scratch: Option<Area>,
    on_device: Option<DeviceArea>,
    peers: Peers,
    /// The device that each rank last had, if any.
    of_ranks: Vec<DeviceId>,
    /// A number that tests have of their own.
    process: Option<u64>,
}

impl Devices {
    /// An operation has failed: other ranks may not have heard of it yet, and use this one's area until they do. It is never freed.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(self.on_device.take().and_then(|area| area.memory));
    }
}

/// kolo's own streams on a device.
struct Lanes {
    device: Arc<dyn Device>,
    out: Stream,
    back: Stream,
    /// For each slot, when its piece has come, and when it has gone.
    outs: [Event; SLOTS],
    backs: [Event; SLOTS],
    /// How long what they are given may take: of the call that uses them.
    timeout: Duration,
}

impl Lanes {
    fn new(device: &Arc<dyn Device>) -> Result<Lanes> {
        let events = || -> Result<[Event; SLOTS]> { Ok([Event::new(device)?, Event::new(device)?, Event::new(device)?]) };
        Ok(Lanes {
            out: Stream::new(device)?,
            back: Stream::new(device)?,
            outs: events()?,
            backs: events()?,
            device: device.clone(),
            timeout: Duration::MAX,
        })
    }

    fn until_done(&self, event: &Event) -> Result<()> {
        until_done(event, self.timeout)
    }
}

/// Host memory through which pieces pass.
struct Area {
    /// Before the memory, for it is unpinned first. What could not be pinned is not tried again.
    pinned: Option<Option<Pinned>>,
    memory: Arc<Allocation>,
    place: usize,
}

impl Area {
    fn private(len: usize) -> Option<Area> {
        let segment = Arc::new(Segment::try_heap(len)?);
        Some(Area { pinned: None, memory: Arc::new(Allocation { segment, part: len }), place: 0 })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.memory.at(self.place, offset)
    }

    /// Makes it known to a device. Without, copies stop over, but they are right.
    fn pin(&mut self, device: &Arc<dyn Device>) {
        if self.pinned.is_none() {
            // SAFETY: the memory is dropped after that.
            let pinned = unsafe { Pinned::new(device, self.at(0), self.memory.part) };
            let pinned = pinned.inspect_err(|error| tracing::warn!(%error, "host memory cannot be pinned: copies take longer"));
            self.pinned = Some(pinned.ok());
        }
    }
}

/// Device memory through which passes what is in memory that others cannot reach.
struct DeviceArea {
    /// What makes the addresses valid.
    _peers: Peers,
    memory: Option<Memory>,
    /// Where each rank's is from here; `None` if not all can reach all.
    addresses: Option<Vec<Address>>,
}

impl Communicator {
    fn driver(&self) -> Option<&Arc<dyn Driver>> {
        let devices = || if self.shared.settings.devices { cuda::driver() } else { None };
        self.shared.driver.get_or_init(devices).as_ref()
    }

    /// A device, by the number under which this process sees it.
    #[cfg(feature = "cuda")]
    pub(super) fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        self.driver().ok_or_else(|| self.no_devices("device memory"))?.device(ordinal)
    }

    /// Why there are none.
    fn no_devices(&self, what: &'static str) -> Error {
        let why = match (cfg!(feature = "cuda"), self.shared.settings.devices) {
            (false, _) => "this kolo was built without the feature `cuda`",
            (true, false) => "rank 0 has no devices, or KOLO_DEVICES=none there; see Builder::devices",
            (true, true) => "there is no CUDA driver here; `kolo doctor` says more",
        };
        Error::Unsupported { what, why: why.to_owned() }
    }

    /// Finds out whether a call's buffers are a device's. If so, or if it has a stream, it takes its turn there.
    pub(crate) fn lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        const NULL: StreamId = StreamId(0);
        let Some(driver) = self.driver() else {
            return if stream == NULL { Ok(()) } else { Err(self.no_devices("a stream")) };
        };
        let locate = |ptr: *const u8, len: usize| if len > 0 { driver.locate(ptr) } else { Ok(None) };
        let send = locate(call.send.ptr, call.send.len)?;
        let recv = locate(call.recv.ptr, call.recv.len)?;
        let on_device = [send.is_some(), recv.is_some()];
        let device = match (send, recv) {
            (Some(send), Some(recv)) if send.id() != recv.id() => {
                let why = format!("one is on {}, the other on {}; copy one of them", send.name(), recv.name());
                return Err(Error::Unsupported { what: "a call with buffers on two devices", why });
            }
            (Some(device), _) | (None, Some(device)) => device,
            (None, None) if stream == NULL => return Ok(()),
            (None, None) => driver.device_of(stream)?,
        };
        if device.is_capturing(stream)? {
            let why = "other ranks take part, on their hosts; call it outside of the capture".to_owned();
            return Err(Error::Unsupported { what: "a collective in a CUDA graph", why });
        }
        let ready = Event::new(&device)?;
        ready.record(stream)?;
        let gate = device.gates()?.and_then(|gates| gates.take());
        // On this thread, for it may wait for streams, of which none waits for this call yet.
        let prepared = if on_device.contains(&true) { device.prepare(call.dtype, reduction(call)) } else { Ok(()) };
        let has_kernels = prepared
            .inspect_err(|error| tracing::warn!(%error, "there are no kernels: what is on this device passes through the host"))
            .is_ok();
        let is_closed = AtomicBool::new(false);
        call.lent = Some(Arc::new(Lent { device, on_device, stream, ready, gate, is_closed, has_kernels }));
        Ok(())
    }

    /// Queues a call that is lent, and waits for its end only if its stream does not.
    ///
    /// # Safety
    ///
    /// What the call reads and writes stays valid until its stream has come behind it, and nobody else uses it until then.
    pub(super) unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        self.check_not_failed()?;
        let waits = !self.close(call)?;
        let call = call.clone();
        // SAFETY: passed on.
        let work = unsafe { self.start_prepared(call)? };
        if waits { work.wait() } else { Ok(()) }
    }
}

impl Communicator {
    /// A call whose failure nobody will wait for says that of an earlier one.
    pub(super) fn check_not_failed(&self) -> Result<()> {
        match self.shared.failure.get() {
            Some(first) => Err(Error::Revoked { first: first.clone() }),
            None => Ok(()),
        }
    }

    /// Has a call's stream wait for its end, if it can and may.
    ///
    /// The first call of a kind has to be waited for: memory is allocated, pinned and opened for it, and kernels are loaded. The
    /// driver may wait for all streams of the device then, and would wait for ever for one that waits for this call.
    pub(super) fn close(&self, call: &Call) -> Result<bool> {
        let Some(lent) = &call.lent else { return Ok(false) };
        let is_large = call.bytes(self.world_size()) > SHORT;
        let is_known = !self.shared.kinds.lock().insert((call.op, call.dtype, call.redop, is_large));
        // Where to put who sent is the caller's only until the call returns.
        if is_known && call.source.is_none() { lent.close() } else { Ok(false) }
    }
}

impl Shared {
    /// Whether ranks tell each other where the buffers of a call are: not of one alone, for it depends on what all know.
    fn asks(&self, call: &Call) -> bool {
        let may_differ = matches!(call.op, Op::AllToAllV | Op::Barrier);
        self.settings.devices && !may_differ && call.bytes(self.layout.ranks) > SHORT
    }

    /// A collective, on whatever memory.
    ///
    /// # Safety
    ///
    /// As for [`Core::collective`].
    #[inline]
    pub(super) unsafe fn collective(&self, core: &mut Core, call: &Call) -> Result<()> {
        if !self.settings.devices || (call.lent.is_none() && !self.asks(call)) {
            // SAFETY: passed on.
            return unsafe { core.collective(&self.terms, &self.recording.history, call) };
        }
        // SAFETY: passed on.
        unsafe { OnDevices::new(self, core, call).carry_out() }
    }

    /// Waits until the caller's stream has come to a call.
    fn until_ready(&self, call: &Call, lent: &Lent, seq: Option<u64>) -> Result<()> {
        let timeout = call.timeout.unwrap_or(self.terms.timeout);
        let began = Instant::now();
        let mut looks = Looks::default();
        while !lent.ready.is_done()? {
            if self.terms.alarm.stops(seq) {
                return Err(Error::Aborted { op: call.op, seq: seq.unwrap_or(0) });
            }
            if began.elapsed() >= timeout {
                let problem = format!("it is not done after {timeout:.1?}; give the call more time, or find out what it does");
                let doing = "waiting for what the stream was given before";
                return Err(Error::Device { device: lent.device.name(), doing, problem });
            }
            looks.look_again();
        }
        Ok(())
    }
}

/// A message on its way through host memory, which takes the place of the device's.
pub(super) struct Staged {
    memory: Segment,
    /// Where it goes when it has been received.
    to: ChunkMut,
    lent: Arc<Lent>,
    /// How long a copy may take.
    timeout: Duration,
}

impl Staged {
    /// What a message needs before it is sent or received; `None` if it is not lent. Keep it until the message has ended.
    ///
    /// # Safety
    ///
    /// The call's buffers are lent until it has ended.
    pub(super) unsafe fn begin(shared: &Shared, call: &mut Call) -> Result<Option<Staged>> {
        let Some(lent) = call.lent.take() else { return Ok(None) };
        shared.until_ready(call, &lent, None)?;
        let (send, recv) = (call.send, call.recv);
        let problem = Argument::TooMany { count: call.count };
        let memory = Segment::try_heap(send.len.max(recv.len).max(1)).ok_or(Error::Argument { op: call.op, problem })?;
        let timeout = call.timeout.unwrap_or(shared.terms.timeout);
        let mut staged = Staged { memory, to: ChunkMut::EMPTY, lent, timeout };
        let [sends, receives] = staged.lent.on_device;
        let there = staged.memory.at(0);
        if sends {
            // SAFETY: there is room for it.
            staged.copy(|device, stream| unsafe { device.copy_out(stream, send.ptr.addr() as u64, there, send.len) })?;
            call.send.ptr = there;
        }
        if receives {
            staged.to = recv;
            call.recv.ptr = there;
        }
        Ok(Some(staged))
    }

    /// Takes what was received to the device.
    ///
    /// # Safety
    ///
    /// The buffer is still lent.
    pub(super) unsafe fn finish(&self) -> Result<()> {
        if self.to.len == 0 {
            return Ok(());
        }
        let (from, to) = (self.memory.at(0), self.to.ptr.addr() as u64);
        // SAFETY: both are as long.
        self.copy(|device, stream| unsafe { device.copy_in(stream, from, to, self.to.len) })
    }

    /// Does so, and waits for it.
    fn copy(&self, copy: impl FnOnce(&dyn Device, StreamId) -> Result<()>) -> Result<()> {
        let device = &self.lent.device;
        let (stream, event) = (Stream::new(device)?, Event::new(device)?);
        copy(&**device, stream.id)?;
        event.record(stream.id)?;
        until_done(&event, self.timeout)
    }
}

/// Waits for what depends on this rank's copies and kernels only.
fn until_done(event: &Event, timeout: Duration) -> Result<()> {
    let began = Instant::now();
    let mut looks = Looks::default();
    while !event.is_done()? {
        if began.elapsed() >= timeout {
            let problem = format!("the device has not come to it after {timeout:.1?}; find out what else it does");
            return Err(Error::Device { device: event.device().name(), doing: "copying or reducing", problem });
        }
        looks.look_again();
    }
    Ok(())
}

/// So long what is under way on a device is waited for when its operation has failed.
const DRAIN: Duration = Duration::from_secs(5);

/// How often it is looked whether a device is done: without pause while that may be a matter of microseconds.
#[derive(Default)]
struct Looks(u32);

impl Looks {
    fn look_again(&mut self) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..100 => std::hint::spin_loop(),
            100..2000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// One collective, as it is carried out.
struct OnDevices<'a> {
    shared: &'a Shared,
    core: &'a mut Core,
    call: &'a Call,
    rank: Rank,
    world: usize,
}

impl<'a> OnDevices<'a> {
    fn new(shared: &'a Shared, core: &'a mut Core, call: &'a Call) -> OnDevices<'a> {
        OnDevices { rank: shared.terms.rank, world: shared.layout.ranks, shared, core, call }
    }

    /// # Safety
    ///
    /// As for [`Core::collective`].
    unsafe fn carry_out(&mut self) -> Result<()> {
        if let Some(lent) = &self.call.lent {
            self.shared.until_ready(self.call, lent, Some(self.core.next_seq()))?;
        }
        // SAFETY: passed on.
        let result = unsafe { self.carry_out_when_ready() };
        if result.is_err() {
            // The buffers are about to be the caller's again.
            self.drain();
        }
        result
    }

    unsafe fn carry_out_when_ready(&mut self) -> Result<()> {
        let touches_device = self.call.lent.as_ref().is_some_and(|lent| lent.on_device.contains(&true));
        // SAFETY: passed on, as below.
        unsafe {
            if self.world == 1 && self.call.lent.as_ref().is_some_and(|lent| lent.on_device == [true; 2]) {
                return self.alone();
            }
            if !self.shared.asks(self.call) || self.world == 1 {
                return if touches_device { self.whole() } else { self.on_host(self.call) };
            }
            if !self.may_be_direct() {
                // Where they are is of no interest, only whether all are the host's.
                return if self.agree(!touches_device)? {
                    self.on_host(self.call)
                } else if matches!(self.call.op, Op::AllGatherV | Op::ReduceScatterV) {
                    if touches_device { self.whole() } else { self.on_host(self.call) }
                } else {
                    self.in_pieces()
                };
            }
            let records = self.tell()?;
            self.look_for_other_devices(&records);
            if records.iter().flat_map(|record| record.places).all(|place| matches!(place, Place::Nowhere | Place::Host)) {
                return self.on_host(self.call);
            }
            if let Some(addresses) = self.reach(&records)? {
                return self.direct(&addresses);
            }
            let is_on_device = |place: Place| matches!(place, Place::Hidden | Place::Open { .. });
            let all_are = || records.iter().flat_map(|record| record.places).all(is_on_device);
            if self.call.op == Op::AllReduce
                && self.may_be_direct()
                && all_are()
                && let Some(areas) = self.areas()?
            {
                return self.through_areas(&areas);
            }
            match self.call.op {
                Op::AllGatherV | Op::ReduceScatterV => self.whole(),
                _ => self.in_pieces(),
            }
        }
    }

    /// An error if the operation has been given up: what other ranks lent for it may be theirs again.
    fn check_not_given_up(&self) -> Result<()> {
        let seq = self.core.next_seq();
        if self.shared.terms.alarm.stops(Some(seq)) { Err(Error::Aborted { op: self.call.op, seq }) } else { Ok(()) }
    }

    /// A part of the call, in host memory.
    unsafe fn on_host(&mut self, call: &Call) -> Result<()> {
        let (terms, history) = (&self.shared.terms, &self.shared.recording.history);
        // SAFETY: passed on.
        unsafe { self.core.collective(terms, history, call) }
    }

    /// A call that serves this one.
    fn beside(&self, op: Op, dtype: DType, count: usize) -> Call {
        let on_behalf_of = Some(self.call.op);
        Call { op, on_behalf_of, dtype, count, timeout: self.call.timeout, ..Call::new::<u8>(op) }
    }

    /// Tells all ranks where this one's buffers are, and learns where theirs are.
    fn tell(&mut self) -> Result<Vec<Record>> {
        let words = self.call.descriptor(0, 0).encode();
        let op = self.call.op;
        let (call, world) = (self.call, self.world);
        let lengths = |peer| call.lengths(peer, world).map_err(|problem| Error::Argument { op, problem });
        self.exchange(self.record(words), |peer| lengths(peer).map(|lengths| lengths.map(|len| len as u64)))
    }

    /// Gives all ranks a record, and takes theirs, of buffers that are at least so long.
    fn exchange(&mut self, mine: Record, needed: impl Fn(Rank) -> Result<[u64; 2]>) -> Result<Vec<Record>> {
        let words = mine.call;
        let described = self.call.descriptor(0, 0);
        let mine = mine.encode();
        let mut all = vec![0; self.world * Record::LEN];
        let mut call = Call { described: Some(described), ..self.beside(Op::AllGather, DType::U8, Record::LEN) };
        (call.send, call.recv) = (Chunk::of(&mine), ChunkMut::of(&mut all));
        // SAFETY: both are borrowed for the call, and as long as it says.
        unsafe { self.on_host(&call)? };
        let mut records = Vec::with_capacity(self.world);
        for (peer, bytes) in all.chunks(Record::LEN).enumerate() {
            let record = Record::decode(bytes, needed(peer)?);
            // A call that does not match has other lengths.
            let theirs = bytes.first_chunk::<{ Descriptor::WORDS * 8 }>().map(words_of);
            if let Some(theirs) = theirs.filter(|theirs| *theirs != words) {
                return Err(self.mismatch(peer, words, theirs));
            }
            records.push(record.ok_or_else(|| self.failed(peer, Cause::Corrupt("what says where a buffer is")))?);
        }
        Ok(records)
    }

    fn record(&self, call: [u64; Descriptor::WORDS]) -> Record {
        let lent = self.call.lent.as_ref();
        let place = |buffer: Buffer, address: *const u8, len: usize| match lent {
            _ if len == 0 => Place::Nowhere,
            Some(lent) if lent.on_device[buffer as usize] && !lent.has_kernels => Place::Inert,
            Some(lent) if lent.on_device[buffer as usize] => {
                let address = address.addr() as u64;
                let open = lent.device.extent(address).and_then(|extent| Ok((extent, lent.device.export(&extent)?)));
                match open {
                    Ok((extent, handle)) => Place::Open { extent, handle, offset: address - extent.base },
                    Err(error) => {
                        tracing::debug!(%error, "other ranks cannot reach this memory: it passes through the host");
                        Place::Hidden
                    }
                }
            }
            _ => Place::Host,
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
        let descriptor = self.call.descriptor(self.core.next_seq() - 1, 0);
        crate::attempt::Attempt::new(descriptor, &self.shared.terms).failed(peer, cause)
    }

    fn mismatch(&self, peer: Rank, mine: [u64; Descriptor::WORDS], theirs: [u64; Descriptor::WORDS]) -> Error {
        let decode = |words| Descriptor::decode(words).map(|decoded| Descriptor { seq: self.core.next_seq() - 1, ..decoded });
        match (decode(mine), decode(theirs)) {
            (Some(mine), Some(theirs)) => crate::attempt::Attempt::new(mine, &self.shared.terms).mismatch(peer, mine, theirs),
            _ => self.failed(peer, Cause::Corrupt("what it called")),
        }
    }

    /// What was opened for one device is of no use to another. All ranks see the same, and forget the same.
    fn look_for_other_devices(&mut self, records: &[Record]) {
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

    /// Where all ranks' buffers are from here, if all of them can be reached by all.
    fn reach(&mut self, records: &[Record]) -> Result<Option<Vec<[u64; 2]>>> {
        let is_in_place = records.iter().any(|record| record.is_in_place);
        let is_open = |place: &Place| matches!(place, Place::Nowhere | Place::Open { .. });
        let may = self.may_be_direct()
            && Plan::is_possible(self.call.op, is_in_place)
            && records.iter().all(|record| record.places.iter().all(is_open));
        // What follows from the records is the same on all ranks.
        if !may {
            return Ok(None);
        }
        let mut peers = std::mem::take(&mut self.core.devices.peers);
        let opened = self.open(&mut peers, records);
        self.core.devices.peers = peers;
        opened?;
        let peers = &self.core.devices.peers;
        let address = |rank: Rank, place: &Place| match place {
            Place::Nowhere => Some(0),
            place => peers.address(rank, place),
        };
        let both = |(rank, record): (Rank, &Record)| Some([address(rank, &record.places[0])?, address(rank, &record.places[1])?]);
        Ok(records.iter().enumerate().map(both).collect())
    }

    /// Whether ranks could reach each other's devices, as far as all of them know it without asking.
    fn may_be_direct(&self) -> bool {
        self.shared.settings.device_path == DevicePath::Auto && self.world <= MOST_PARTS && self.shared.layout.hosts == 1
    }

    /// Opens what is new in these records, as far as all ranks can.
    fn open(&mut self, peers: &mut Peers, records: &[Record]) -> Result<()> {
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
        peers.settle(records, &news, by_all);
        Ok(())
    }

    /// Where the areas of all ranks are, if all can reach all.
    fn areas(&mut self) -> Result<Option<Vec<Address>>> {
        // Whether there are any is the same on all ranks: they come and stay together.
        if self.core.devices.on_device.is_none() {
            let lent = self.call.lent.as_ref().expect("its buffers are on a device");
            // Who has no memory for one says so, like who has one that others cannot reach.
            let memory = Memory::new(&lent.device, DEVICE_AREA);
            let place = memory.as_ref().ok().and_then(|memory| {
                let extent = lent.device.extent(memory.address).ok()?;
                Some(Place::Open { extent, handle: lent.device.export(&extent).ok()?, offset: memory.address - extent.base })
            });
            let words = self.call.descriptor(0, 0).encode();
            let places = [place.unwrap_or(Place::Hidden), Place::Nowhere];
            let records = self.exchange(Record { places, ..self.record(words) }, |_| Ok([DEVICE_AREA as u64, 0]))?;
            let is_open = |record: &Record| matches!(record.places[0], Place::Open { .. });
            // Apart from those of users' memory, which come and go.
            let mut peers = Peers::default();
            let mut addresses = None;
            if records.iter().all(is_open) {
                self.open(&mut peers, &records)?;
                let address = |(rank, record): (Rank, &Record)| peers.address(rank, &record.places[0]);
                addresses = records.iter().enumerate().map(address).collect();
            }
            let memory = memory.inspect_err(|error| {
                tracing::info!(%error, "there is no area on the device: its memory passes through the host");
            });
            // Of no use unless all have one.
            let memory = memory.ok().filter(|_| addresses.is_some());
            self.core.devices.on_device = Some(DeviceArea { _peers: peers, memory, addresses });
        }
        Ok(self.core.devices.on_device.as_ref().and_then(|area| area.addresses.clone()))
    }

    /// An all-reduce of buffers that only their own ranks can reach. Of each piece every rank copies into its area what others
    /// reduce, reduces its own slice from its buffer and the others' areas into its buffer and its area, and copies the others'
    /// slices from theirs. Each byte of a buffer moves twice as often as where all can reach it, which is the least.
    unsafe fn through_areas(&mut self, areas: &[Address]) -> Result<()> {
        let Call { dtype, redop, count, send, recv, .. } = *self.call;
        let (rank, world, size) = (self.rank, self.world, dtype.size());
        let (send, recv) = (send.ptr.addr() as u64, recv.ptr.addr() as u64);
        let redop = redop.expect("an all-reduce reduces");
        // Half of an area: of the piece before, others still copy this rank's slice out of the other half.
        let per_piece = DEVICE_AREA / 2 / size;
        for (i, start) in (0..count).step_by(per_piece).enumerate() {
            let half = ((i % 2) * (DEVICE_AREA / 2)) as u64;
            let area = |rank: Rank| areas[rank] + half;
            let len = per_piece.min(count - start);
            let slice = |rank: Rank| {
                let (at, len) = direct::slice(len, size, world, rank);
                ((at * size) as u64, len)
            };
            let others = || (1..world).map(|i| (rank + i) % world).filter(|&peer| slice(peer).1 > 0);
            let piece = (start * size) as u64;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: slices are within the piece, pieces within the buffer, and within half the area. Nobody reads from there:
                // before they met for the last piece, all have done with the one before.
                unsafe { device.copy(stream, send + piece + at, area(rank) + at, len * size)? };
            }
            lanes.backs[0].record(stream)?;
            lanes.until_done(&lanes.backs[0])?;
            self.meet()?;
            self.check_not_given_up()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            let (at, count) = slice(rank);
            if count > 0 {
                let own = |peer: Rank| if peer == rank { send + piece + at } else { area(peer) + at };
                let sources: Vec<Address> = (0..world).map(own).collect();
                let targets = [recv + piece + at, area(rank) + at];
                let reduction = Reduction { dtype, redop, sources: &sources, targets: &targets, count, divisor: world };
                // SAFETY: all have copied what is read. This rank's slice of its area is read by nobody yet.
                unsafe { device.reduce(stream, &reduction)? };
            }
            lanes.backs[0].record(stream)?;
            lanes.until_done(&lanes.backs[0])?;
            self.meet()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: the peer has reduced it, and writes there again when all have met after this copy is done.
                unsafe { device.copy(stream, area(peer) + at, recv + piece + at, len * size)? };
            }
        }
        let lanes = self.lanes()?;
        lanes.backs[0].record(lanes.back.id)?;
        lanes.until_done(&lanes.backs[0])?;
        // Nobody returns, and perhaps frees its area, before all have copied from there.
        self.meet()
    }

    /// Waits for all ranks.
    fn meet(&mut self) -> Result<()> {
        let barrier = self.beside(Op::Barrier, DType::U8, 0);
        // SAFETY: a barrier touches no buffer.
        unsafe { self.on_host(&barrier) }
    }

    /// Whether all ranks say yes.
    fn agree(&mut self, yes: bool) -> Result<bool> {
        let mut answer = [u8::from(yes)];
        let mut call = self.beside(Op::AllReduce, DType::U8, 1);
        let memory = ChunkMut::of(&mut answer);
        (call.redop, call.send, call.recv) = (Some(ReduceOp::Min), memory.as_const(), memory);
        call.described = Some(self.call.descriptor(0, 0));
        // SAFETY: `answer` is borrowed for the call.
        unsafe { self.on_host(&call)? };
        Ok(answer[0] != 0)
    }

    /// This rank's part where the buffers are. When it is called, those of all ranks are ready.
    unsafe fn direct(&mut self, addresses: &[[u64; 2]]) -> Result<()> {
        let Call { op, dtype, redop, root, count, .. } = *self.call;
        let counts = self.call.recv_counts.as_ref().or(self.call.send_counts.as_ref());
        let offsets = counts.map(super::call::Counts::offsets);
        let moves = Plan { op, dtype, rank: self.rank, world: self.world, root, count, offsets }.moves();
        if !moves.is_empty() {
            self.check_not_given_up()?;
            let world = self.world;
            let lanes = self.lanes()?;
            for one in &moves {
                // SAFETY: all parts are of buffers that their ranks have lent, and no two ranks touch what one of them writes.
                unsafe { give(lanes, one, addresses, (dtype, redop, world))? };
            }
            lanes.backs[0].record(lanes.back.id)?;
            lanes.until_done(&lanes.backs[0])?;
        }
        // Nobody returns before all have read from, and written to, its buffers.
        self.meet()
    }

    /// The call of the only rank: a copy.
    unsafe fn alone(&mut self) -> Result<()> {
        let Call { send, recv, .. } = *self.call;
        if send.ptr == recv.ptr {
            return Ok(());
        }
        let lanes = self.lanes()?;
        // SAFETY: passed on; alone, both are equally long.
        unsafe { lanes.device.copy(lanes.back.id, send.ptr.addr() as u64, recv.ptr.addr() as u64, recv.len)? };
        lanes.backs[0].record(lanes.back.id)?;
        lanes.until_done(&lanes.backs[0])
    }

    /// The call as it is, on host memory instead of the device's.
    unsafe fn whole(&mut self) -> Result<()> {
        let Call { send, recv, op, .. } = *self.call;
        let lent = self.call.lent.clone();
        let on_device = lent.as_ref().map_or([false; 2], |lent| lent.on_device);
        let room = |len: usize, is_on_device: bool| if is_on_device { len.next_multiple_of(64) } else { 0 };
        let sends = room(send.len, on_device[0]);
        let len = sends + room(recv.len, on_device[1]);
        let is_short = len <= 4 * SHORT as usize;
        let mut area = match self.core.devices.scratch.take().filter(|_| is_short) {
            Some(area) => area,
            None => Area::private(if is_short { 4 * SHORT as usize } else { len })
                .ok_or(Error::Argument { op, problem: Argument::TooMany { count: self.call.count } })?,
        };
        let mut call = Call { lent: None, ..self.call.clone() };
        // SAFETY: there is room for both, and the caller vouches for the buffers.
        unsafe {
            if on_device[0] {
                let lanes = self.lanes()?;
                if is_short {
                    area.pin(&lanes.device);
                }
                lanes.device.copy_out(lanes.out.id, send.ptr.addr() as u64, area.at(0), send.len)?;
                lanes.outs[0].record(lanes.out.id)?;
                lanes.until_done(&lanes.outs[0])?;
                call.send.ptr = area.at(0);
            }
            if on_device[1] {
                call.recv.ptr = area.at(sends);
            }
            self.on_host(&call)?;
            if on_device[1] && recv.len > 0 {
                let lanes = self.lanes()?;
                lanes.device.copy_in(lanes.back.id, area.at(sends), recv.ptr.addr() as u64, recv.len)?;
                lanes.backs[0].record(lanes.back.id)?;
                lanes.until_done(&lanes.backs[0])?;
            }
        }
        if is_short {
            self.core.devices.scratch = Some(area);
        }
        Ok(())
    }

    /// Piece by piece through host memory, all ranks the same.
    unsafe fn in_pieces(&mut self) -> Result<()> {
        let Call { op, dtype, root, count, .. } = *self.call;
        let cut = Cut { op, rank: self.rank, world: self.world, root, count, size: dtype.size() };
        let slot_len = PIECE.max(cut.width());
        self.prepare_area(SLOTS * slot_len)?;
        let pieces: Vec<Piece> = cut.pieces(PIECE).collect();
        // SAFETY: passed on: a slot is used for one piece after the other.
        unsafe {
            self.bring(&pieces[0], 0, slot_len)?;
            for (i, piece) in pieces.iter().enumerate() {
                if let Some(next) = pieces.get(i + 1) {
                    let slot = (i + 1) % SLOTS;
                    if i + 1 >= SLOTS {
                        self.until(slot, false)?;
                    }
                    self.bring(next, slot, slot_len)?;
                }
                let slot = i % SLOTS;
                self.until(slot, true)?;
                self.reduce_piece(piece, slot, slot_len)?;
                self.take_back(piece, slot, slot_len)?;
            }
            for slot in 0..SLOTS.min(pieces.len()) {
                self.until(slot, false)?;
            }
        }
        Ok(())
    }

    /// Waits until a slot's piece has come, or has gone.
    fn until(&mut self, slot: usize, has_come: bool) -> Result<()> {
        let [out, back] = self.call.lent.as_ref().map_or([false; 2], |lent| lent.on_device);
        if !(if has_come { out } else { back }) {
            return Ok(());
        }
        let lanes = self.lanes()?;
        lanes.until_done(if has_come { &lanes.outs[slot] } else { &lanes.backs[slot] })
    }

    /// Starts the copies of what a piece takes from this rank's send buffer.
    unsafe fn bring(&mut self, piece: &Piece, slot: usize, slot_len: usize) -> Result<()> {
        let Call { send, .. } = *self.call;
        let memory = self.slot(slot, slot_len);
        if !self.call.lent.as_ref().is_some_and(|lent| lent.on_device[0]) {
            for &Row { of_buffer, of_piece, len } in &piece.out {
                // SAFETY: rows are within the buffer, and within the slot, which is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(send.skip(of_buffer).ptr, memory.add(of_piece), len) };
            }
            return Ok(());
        }
        let lanes = self.lanes()?;
        for &Row { of_buffer, of_piece, len } in &piece.out {
            // SAFETY: as above; the slot is not touched until the event is done.
            unsafe { lanes.device.copy_out(lanes.out.id, send.skip(of_buffer).ptr.addr() as u64, memory.add(of_piece), len)? };
        }
        lanes.outs[slot].record(lanes.out.id)
    }

    unsafe fn reduce_piece(&mut self, piece: &Piece, slot: usize, slot_len: usize) -> Result<()> {
        let memory = self.slot(slot, slot_len);
        let mut call = Call { lent: None, on_behalf_of: Some(self.call.op), count: piece.count, ..self.call.clone() };
        // SAFETY: both are within the slot.
        unsafe {
            call.send = Chunk { ptr: memory.add(piece.send.start), len: piece.send.len() };
            call.recv = ChunkMut { ptr: memory.add(piece.recv.start), len: piece.recv.len() };
            self.on_host(&call)
        }
    }

    /// Starts the copies of what a piece gives to this rank's receive buffer.
    unsafe fn take_back(&mut self, piece: &Piece, slot: usize, slot_len: usize) -> Result<()> {
        let Call { recv, .. } = *self.call;
        let memory = self.slot(slot, slot_len);
        if !self.call.lent.as_ref().is_some_and(|lent| lent.on_device[1]) {
            for &Row { of_buffer, of_piece, len } in &piece.back {
                // SAFETY: rows are within the buffer, and within the slot, which is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(memory.add(of_piece), recv.skip(of_buffer).ptr, len) };
            }
            return Ok(());
        }
        let lanes = self.lanes()?;
        for &Row { of_buffer, of_piece, len } in &piece.back {
            // SAFETY: as above; the slot is not touched until the event is done.
            unsafe { lanes.device.copy_in(lanes.back.id, memory.add(of_piece), recv.skip(of_buffer).ptr.addr() as u64, len)? };
        }
        lanes.backs[slot].record(lanes.back.id)
    }

    fn slot(&self, slot: usize, slot_len: usize) -> *mut u8 {
        self.core.devices.area.as_ref().expect("it was prepared").at(slot * slot_len)
    }

    /// The streams on the call's device.
    fn lanes(&mut self) -> Result<&Lanes> {
        let lent = self.call.lent.as_ref().expect("only of calls that are lent");
        let devices = &mut self.core.devices;
        if devices.lanes.as_ref().is_some_and(|lanes| lanes.device.id() != lent.device.id()) {
            (devices.lanes, devices.scratch) = (None, None);
            if let Some(area) = &mut devices.area {
                area.pinned = None;
            }
        }
        let mut lanes = match devices.lanes.take() {
            Some(lanes) => lanes,
            None => Lanes::new(&lent.device)?,
        };
        lanes.timeout = self.call.timeout.unwrap_or(self.shared.terms.timeout);
        Ok(devices.lanes.insert(lanes))
    }

    /// Host memory for pieces, on all ranks.
    fn prepare_area(&mut self, len: usize) -> Result<()> {
        // Whether there is enough is the same on all ranks: it depends on what they called.
        if self.core.devices.area.as_ref().is_none_or(|area| area.memory.part < len) {
            self.core.devices.area = None;
            let shared = self.core.allocate(&self.shared.terms, len)?;
            let place = self.core.place_on_host();
            let area = match shared {
                Some(memory) => Some(Area { pinned: None, memory, place }),
                None => Area::private(len),
            };
            let problem = Argument::TooMany { count: self.call.count };
            self.core.devices.area = Some(area.ok_or(Error::Argument { op: self.call.op, problem })?);
        }
        if let Some(lent) = &self.call.lent
            && let Some(area) = &mut self.core.devices.area
        {
            area.pin(&lent.device);
        }
        Ok(())
    }

    /// Waits until nothing of this operation is under way on the device.
    fn drain(&mut self) {
        let Some(lanes) = &self.core.devices.lanes else { return };
        for (stream, event) in [(&lanes.out, &lanes.outs[0]), (&lanes.back, &lanes.backs[0])] {
            if let Err(error) = event.record(stream.id).and_then(|()| until_done(event, DRAIN)) {
                tracing::warn!(%error, "what was under way on the device has failed as well");
            }
        }
    }
}

/// Gives a device one move to do.
///
/// # Safety
///
/// All parts are within buffers that can be reached there, and stay until it is done.
unsafe fn give(
    lanes: &Lanes,
    one: &Move,
    addresses: &[[u64; 2]],
    (dtype, redop, world): (DType, Option<ReduceOp>, usize),
) -> Result<()> {
    let address = |part: &crate::cuda::direct::Part| addresses[part.rank][part.buffer as usize] + part.offset;
    let sources: Vec<u64> = one.sources.iter().map(address).collect();
    let targets: Vec<u64> = one.targets.iter().map(address).collect();
    // SAFETY: passed on.
    unsafe {
        match redop {
            Some(redop) => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop, sources, targets, count: one.count, divisor: world };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            // What is no bool becomes one.
            None if dtype == DType::Bool => {
                let (sources, targets) = (&sources[..], &targets[..]);
                let reduction = Reduction { dtype, redop: ReduceOp::Max, sources, targets, count: one.count, divisor: 1 };
                lanes.device.reduce(lanes.back.id, &reduction)
            }
            None if sources == targets => Ok(()),
            None => lanes.device.copy(lanes.back.id, sources[0], targets[0], one.count * dtype.size()),
        }
    }
}

fn words_of(bytes: &[u8; Descriptor::WORDS * 8]) -> [u64; Descriptor::WORDS] {
    std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * i + byte])))
}

/// A number of this process that no other has; a copy that a fork made has its own.
fn process() -> u64 {
    mix(*PROCESS, std::process::id().into())
}

static PROCESS: LazyLock<u64> = LazyLock::new(|| u64::from_le_bytes(std::array::from_fn(|i| handshake::random()[i])));

#[cfg(test)]
mod tests;

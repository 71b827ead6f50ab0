//! The host's side of a collective on device memory: it waits for words of streams and for peers, and
//! writes words. It calls no driver, except where streams cannot wait for words.

use std::time::{Duration, Instant};

use super::call::{DeviceCall, Path, device_call};
use super::handshake::Handshake;
use super::state::{DeviceState, finish};
use super::watchdog::Watched;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::config;
use crate::cuda::device::{Event, MOST_PARTS};
use crate::cuda::peers::{Announcement, BufferAt, Participation, Record};
use crate::error::{Cause, Error, Result};
use crate::exec::Core;
use crate::progress::CommState;
use crate::sys::Backoff;
use crate::trace::PathTaken;
use crate::types::{DType, Op, Rank};

/// The largest operation, in bytes, that passes through host memory as a whole, and for which the
/// ranks do not ask each other where their buffers are.
pub(super) const SHORT: u64 = 64 << 10;

impl DeviceState {
    /// Whether the host can run a message now: its stream has arrived, or the message comes into pinned
    /// memory. A stream on which a graph is replayed before must arrive: the graph may have earlier
    /// messages of the same ranks.
    pub(super) fn can_begin(&self, bound: &DeviceCall) -> bool {
        bound.has_arrived() || (bound.receives_into_pinned() && !self.graphs.is_any())
    }
}

impl CommState {
    /// Whether the ranks tell each other where the buffers of a call are. It depends only on what
    /// all ranks know.
    pub(super) fn asks(&self, call: &Call) -> bool {
        let has_form = matches!(
            call.op,
            Op::AllReduce
                | Op::Reduce
                | Op::Broadcast
                | Op::AllGather
                | Op::AllGatherV
                | Op::ReduceScatter
                | Op::ReduceScatterV
                | Op::AllToAll
                | Op::Gather
                | Op::Scatter
        );
        self.settings.devices && has_form && call.bytes(self.layout.ranks) > SHORT
    }

    /// Whether ranks may be able to reach each other's devices, from what all of them know without
    /// asking.
    pub(super) fn may_be_direct(&self) -> bool {
        let Self { settings, layout, .. } = self;
        settings.device_path == config::DevicePath::Auto && layout.ranks <= MOST_PARTS && layout.hosts == 1
    }

    /// Waits until a stream has come to a point of a call.
    pub(super) fn until_stream(
        &self,
        call: &Call,
        bound: &DeviceCall,
        seq: Option<u64>,
        is_there: impl Fn(&Handshake) -> bool,
    ) -> Result<()> {
        let Some(handshake) = bound.handshake() else { return Ok(()) };
        let timeout = call.timeout.unwrap_or(self.info.timeout);
        self.until(|| Ok(is_there(handshake)), &bound.device.name(), timeout, call.op, seq)?;
        // A stream that was let go runs ahead, and overwrites what it has brought.
        if handshake.is_released() { Err(Error::Aborted { op: call.op, seq: seq.unwrap_or(0) }) } else { Ok(()) }
    }

    /// Waits for an event of the caller's stream.
    pub(super) fn until_event(&self, event: &Event, timeout: Duration, op: Op) -> Result<()> {
        self.until(|| event.is_done(), &event.device().name(), timeout, op, None)
    }

    fn until(&self, is_so: impl Fn() -> Result<bool>, device: &str, timeout: Duration, op: Op, seq: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let backoff = Backoff::default();
        while !is_so()? {
            if self.info.cancel.stops(seq) {
                return Err(Error::Aborted { op, seq: seq.unwrap_or(0) });
            }
            if began.elapsed() >= timeout {
                let problem = format!(
                    "the stream has not done its part of {op} after {}; give the call more time, or check what the \
                     stream does",
                    crate::error::shown::time(timeout)
                );
                return Err(Error::Device { device: device.to_owned(), doing: "waiting for a stream", problem });
            }
            backoff.wait();
        }
        Ok(())
    }
}

/// One collective while it runs.
pub(super) struct DeviceOperation<'a> {
    pub(super) shared: &'a CommState,
    pub(super) devices: &'a DeviceState,
    pub(super) core: &'a mut Core,
    pub(super) call: &'a Call,
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// Lets the stream continue if this thread does not.
    watched: Option<Watched>,
    /// The path of the call's data, once it is known.
    pub(super) path: Option<PathTaken>,
}

impl<'a> DeviceOperation<'a> {
    pub(super) fn new(
        shared: &'a CommState,
        devices: &'a DeviceState,
        core: &'a mut Core,
        call: &'a Call,
    ) -> DeviceOperation<'a> {
        let (rank, world) = (shared.info.rank, shared.layout.ranks);
        DeviceOperation { rank, world, shared, devices, core, call, watched: None, path: None }
    }

    /// Runs the collective.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    pub(super) unsafe fn run(&mut self) -> Result<()> {
        let Some(bound) = device_call(self.call) else {
            // SAFETY: passed on.
            return unsafe { self.with_host_memory(self.call) };
        };
        if let Some(shared) = bound.handshake().and_then(|_| self.devices.comm.get()?.upgrade()) {
            self.watched = Some(Watched::new(&shared, self.call.timeout.unwrap_or(shared.info.timeout)));
        }
        // SAFETY: passed on.
        let result = unsafe { self.run_bound(bound) }.and_then(|()| self.until_left(bound));
        match (&result, self.path) {
            (Ok(()), Some(path)) => self.shared.recording.counters.count(path),
            (Ok(()), None) => {}
            (Err(_), _) => bound.release(),
        }
        result
    }

    pub(super) fn step(&self) {
        if let Some(watched) = &self.watched {
            watched.step();
        }
    }

    unsafe fn run_bound(&mut self, bound: &DeviceCall) -> Result<()> {
        let path = bound.path().expect("a call that is bound has been enqueued before it is queued");
        // Kernels that wait for each other find out for themselves whether the streams have arrived.
        if !path.have_barrier() {
            self.until_arrived(bound, 0)?;
        }
        let mut call = Call { on_device: None, ..self.call.clone() };
        // SAFETY: passed on; the memory of the path is as long as the buffers.
        unsafe {
            match path {
                Path::DeviceCopy => Ok(()),
                Path::OrderOnly => self.with_host_memory(&call).map(|()| self.end(bound, 0)),
                Path::Pinned { send, recv, .. } => {
                    self.path = Some(PathTaken::Whole);
                    call.send.ptr = send.map_or(call.send.ptr, |pinned| pinned.host);
                    call.recv.ptr = recv.map_or(call.recv.ptr, |pinned| pinned.host);
                    self.with_host_memory(&call).map(|()| self.end(bound, 0))
                }
                Path::Staged { cut, area } => {
                    if self.participation_of_all(Participation::Staged)? != Participation::Staged {
                        return Err(self.confused());
                    }
                    self.path = Some(PathTaken::Staged);
                    self.staged(bound, cut, area)
                }
                Path::Direct { cut, peers, announced } => self.direct(bound, cut, peers, announced),
                Path::OneShot { peers } => self.one_shot(bound, peers),
                Path::Copied { memory, send, recv, lane, to } => {
                    self.path = Some(PathTaken::Copied);
                    call.send.ptr = send.map_or(call.send.ptr, |offset| memory.at(offset));
                    call.recv.ptr = recv.map_or(call.recv.ptr, |offset| memory.at(offset));
                    self.with_host_memory(&call)?;
                    if recv.is_some() {
                        lane.device.copy_in(lane.stream.id, call.recv.ptr, to.ptr.addr() as u64, to.len)?;
                        let finished = finish(lane, call.timeout.unwrap_or(self.shared.info.timeout));
                        // The device may still copy from it.
                        finished.inspect_err(|_| std::mem::forget(memory.clone()))?;
                    }
                    Ok(())
                }
            }
        }
    }

    /// Runs a call with this rank's buffers in host memory. Those of other ranks may be on devices.
    ///
    /// # Safety
    ///
    /// As for [`DeviceOperation::run`].
    unsafe fn with_host_memory(&mut self, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            if self.world == 1 || !self.shared.asks(call) {
                return self.on_host(call);
            }
            match self.participation_of_all(Participation::Host)? {
                Participation::Host => self.on_host(call),
                _ => self.staged_on_host(call),
            }
        }
    }

    /// Tells the other ranks how this one takes part, and returns how all do: with host memory, if
    /// all of them do, or staged. Prepares with those that are new.
    fn participation_of_all(&mut self, mine: Participation) -> Result<Participation> {
        loop {
            let all = if self.shared.may_be_direct() {
                let places = self.places(mine);
                let records = self.exchange(&self.record(mine, Announcement::nothing(places)))?;
                let is = |of: Participation| records.iter().any(|record| record.participation == of);
                if is(Participation::Direct) || is(Participation::Captures) || is(Participation::Replays) {
                    return Err(self.mixed(&records));
                }
                if is(Participation::Prepares) {
                    Participation::Prepares
                } else if is(Participation::Staged) {
                    Participation::Staged
                } else {
                    Participation::Host
                }
            } else {
                self.agree_on_participation(mine)?
            };
            if all != Participation::Prepares {
                return Ok(all);
            }
            // Not all prepare, so their memory cannot be reached: through the host.
            self.prepare_host()?;
        }
    }

    fn places(&self, participation: Participation) -> [BufferAt; 2] {
        let of = |len: usize| match (len, participation) {
            (0, _) => BufferAt::Nowhere,
            (_, Participation::Host) => BufferAt::Host,
            _ => BufferAt::Device,
        };
        [of(self.call.send.len), of(self.call.recv.len)]
    }

    /// Returns the error for ranks that cannot take part together. It is the same on all ranks.
    pub(super) fn mixed(&self, records: &[Record]) -> Error {
        let op = self.call.op;
        let of = |rank: Rank| records[rank].participation;
        if records.iter().any(|record| matches!(record.participation, Participation::Captures | Participation::Replays)) {
            let how = |rank: Rank| match of(rank) {
                Participation::Captures => format!("captures {op} in a CUDA graph"),
                Participation::Replays => format!("replays a CUDA graph with {op}"),
                _ => format!("calls {op}"),
            };
            let other = records.iter().position(|record| record.participation != of(0)).unwrap_or(0);
            let (first, second) = (how(0), how(other));
            let why = format!("rank 0 {first}, and rank {other} {second}; capture and replay the same calls on all ranks");
            return Error::Unsupported { what: "an operation in a CUDA graph on some ranks alone", why };
        }
        // Some ranks have prepared to reach each other's memory, and others call with host memory.
        let other = records.iter().position(|record| record.participation != Participation::Direct).unwrap_or(0);
        let how = if of(other) == Participation::Prepares { "another device" } else { "host memory" };
        let why = format!(
            "rank {other} calls {op} with {how} and others with device memory, after calls in which all had the memory of \
             one device each; call with the same memory as before, or set KOLO_DEVICE_PATH=staged on all ranks"
        );
        Error::Unsupported { what: "host and device memory in one large operation of this communicator", why }
    }

    /// Returns the error for ranks that do not take part in the same way.
    pub(super) fn confused(&self) -> Error {
        self.failed(self.rank, Cause::Corrupt("what says how a rank takes part"))
    }

    pub(super) fn until_arrived(&self, bound: &DeviceCall, round: usize) -> Result<()> {
        self.step();
        self.shared
            .until_stream(self.call, bound, Some(self.core.next_seq()), |handshake| handshake.words().has_arrived(round as u32))
    }

    fn until_left(&self, bound: &DeviceCall) -> Result<()> {
        self.step();
        self.shared.until_stream(self.call, bound, Some(self.core.next_seq()), Handshake::has_left)
    }

    pub(super) fn end(&self, bound: &DeviceCall, round: usize) {
        if let Some(handshake) = bound.handshake() {
            handshake.end(round as u32);
        }
    }

    /// Fails if the operation has been cancelled: buffers of other ranks may no longer be valid.
    pub(super) fn check_not_cancelled(&self) -> Result<()> {
        let seq = self.core.next_seq();
        if self.shared.info.cancel.stops(Some(seq)) { Err(Error::Aborted { op: self.call.op, seq }) } else { Ok(()) }
    }

    /// Runs a part of the call on host memory.
    ///
    /// # Safety
    ///
    /// As for [`DeviceOperation::run`].
    pub(super) unsafe fn on_host(&mut self, call: &Call) -> Result<()> {
        let (info, history) = (&self.shared.info, &self.shared.recording.history);
        self.step();
        // SAFETY: passed on.
        let result = unsafe { self.core.run_on_host(info, history, call) };
        self.step();
        result
    }

    /// A call that is a part of this one. Other ranks see it as this one's operation.
    pub(super) fn beside(&self, op: Op, dtype: DType, count: usize) -> Call {
        let on_behalf_of = Some(self.call.op);
        Call { op, on_behalf_of, dtype, count, timeout: self.call.timeout, ..Call::new::<u8>(op) }
    }

    /// Waits for all ranks.
    pub(super) fn synchronise(&mut self) -> Result<()> {
        let barrier = Call { send: RawSlice::EMPTY, recv: RawSliceMut::EMPTY, ..self.beside(Op::Barrier, DType::U8, 0) };
        // SAFETY: a barrier touches no buffer.
        unsafe { self.on_host(&barrier) }
    }
}

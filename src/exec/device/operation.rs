//! The host's side of a collective on device memory: it waits for words of streams and for peers, and
//! writes words. It calls no driver, except where streams cannot wait for words.

use std::time::{Duration, Instant};

use super::watchdog::Watched;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config;
use crate::cuda::device::{Event, MOST_PARTS};
use crate::cuda::peers::{BufferAt, Part, Record, Said};
use crate::error::{Cause, Error, Result};
use crate::exec::call::Call;
use crate::exec::core::Core;
use crate::exec::device_state::{Looks, finish};
use crate::exec::lent::{Gate, Lent, Path};
use crate::exec::state::CommState;
use crate::trace::PathTaken;
use crate::types::{DType, Op, Rank};

/// The largest operation, in bytes, that passes through host memory as a whole, and for which the
/// ranks do not ask each other where their buffers are.
pub(in crate::exec) const SHORT: u64 = 64 << 10;

impl CommState {
    /// Whether a collective may concern devices, on this rank or another.
    #[inline]
    pub(in crate::exec) fn concerns_devices(&self, call: &Call) -> bool {
        self.settings.devices && (call.lent.is_some() || self.asks(call))
    }

    /// Whether the ranks tell each other where the buffers of a call are. It depends only on what
    /// all ranks know.
    pub(in crate::exec) fn asks(&self, call: &Call) -> bool {
        let may_differ = matches!(call.op, Op::AllToAllV | Op::Barrier) || call.op.is_point_to_point();
        self.settings.devices && !may_differ && call.bytes(self.layout.ranks) > SHORT
    }

    /// Whether ranks may be able to reach each other's devices, from what all of them know without
    /// asking.
    pub(in crate::exec) fn may_be_direct(&self) -> bool {
        let Self { settings, layout, .. } = self;
        settings.device_path == config::DevicePath::Auto && layout.ranks <= MOST_PARTS && layout.hosts == 1
    }

    /// Whether the host can run a message now: its stream has arrived, or the message comes into pinned
    /// memory. A stream on which a graph is replayed before must arrive: the graph may have earlier
    /// messages of the same ranks.
    pub(in crate::exec) fn can_run_message(&self, lent: &Lent) -> bool {
        lent.has_arrived() || (lent.receives_into_pinned() && !self.graphs.is_any())
    }

    /// Waits until a stream has come to a point of a call.
    pub(in crate::exec) fn until_stream(
        &self,
        call: &Call,
        lent: &Lent,
        seq: Option<u64>,
        is_there: impl Fn(&Gate) -> bool,
    ) -> Result<()> {
        let Some(gate) = lent.gate() else { return Ok(()) };
        let timeout = call.timeout.unwrap_or(self.info.timeout);
        self.until(|| Ok(is_there(gate)), &lent.device.name(), timeout, call.op, seq)?;
        // A stream that was let go runs ahead, and overwrites what it has brought.
        if gate.is_released() { Err(Error::Aborted { op: call.op, seq: seq.unwrap_or(0) }) } else { Ok(()) }
    }

    /// Waits for an event of the caller's stream.
    pub(in crate::exec) fn until_event(&self, event: &Event, timeout: Duration, op: Op) -> Result<()> {
        self.until(|| event.is_done(), &event.device().name(), timeout, op, None)
    }

    fn until(&self, is_so: impl Fn() -> Result<bool>, device: &str, timeout: Duration, op: Op, seq: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let mut looks = Looks::default();
        while !is_so()? {
            if self.info.cancel.stops(seq) {
                return Err(Error::Aborted { op, seq: seq.unwrap_or(0) });
            }
            if began.elapsed() >= timeout {
                let problem = format!(
                    "the stream has not done its part of {op} after {timeout:.1?}; give the call more time, or check what the \
                     stream does"
                );
                return Err(Error::Device { device: device.to_owned(), doing: "waiting for a stream", problem });
            }
            looks.look_again();
        }
        Ok(())
    }
}

/// One collective while it runs.
pub(in crate::exec) struct OnDevices<'a> {
    pub(super) shared: &'a CommState,
    pub(super) core: &'a mut Core,
    pub(super) call: &'a Call,
    pub(super) rank: Rank,
    pub(super) world: usize,
    /// Lets the stream continue if this thread does not.
    watched: Option<Watched>,
    /// The path of the call's data, once it is known.
    pub(super) path: Option<PathTaken>,
}

impl<'a> OnDevices<'a> {
    pub(in crate::exec) fn new(shared: &'a CommState, core: &'a mut Core, call: &'a Call) -> OnDevices<'a> {
        OnDevices { rank: shared.info.rank, world: shared.layout.ranks, shared, core, call, watched: None, path: None }
    }

    /// Runs the collective.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    pub(in crate::exec) unsafe fn run(&mut self) -> Result<()> {
        let Some(lent) = &self.call.lent else {
            // SAFETY: passed on.
            return unsafe { self.with_host_memory(self.call) };
        };
        if let Some(shared) = lent.gate().and_then(|_| self.shared.this.upgrade()) {
            self.watched = Some(Watched::new(&shared, self.call.timeout.unwrap_or(shared.info.timeout)));
        }
        // SAFETY: passed on.
        let result = unsafe { self.run_lent(lent) }.and_then(|()| self.until_left(lent));
        match (&result, self.path) {
            (Ok(()), Some(path)) => self.shared.recording.counters.count(path),
            (Ok(()), None) => {}
            (Err(_), _) => lent.release(),
        }
        result
    }

    pub(super) fn step(&self) {
        if let Some(watched) = &self.watched {
            watched.step();
        }
    }

    unsafe fn run_lent(&mut self, lent: &Lent) -> Result<()> {
        let path = lent.path().expect("a call that is lent has been enqueued before it is queued");
        // Kernels that wait for each other find out for themselves whether the streams have arrived.
        if !path.have_barrier() {
            self.until_arrived(lent, 0)?;
        }
        let mut call = Call { lent: None, ..self.call.clone() };
        // SAFETY: passed on; the memory of the path is as long as the buffers.
        unsafe {
            match path {
                Path::Alone => Ok(()),
                Path::Turn => self.with_host_memory(&call).map(|()| self.end(lent, 0)),
                Path::Whole { send, recv, .. } => {
                    self.path = Some(PathTaken::Whole);
                    call.send.ptr = send.map_or(call.send.ptr, |pinned| pinned.host);
                    call.recv.ptr = recv.map_or(call.recv.ptr, |pinned| pinned.host);
                    self.with_host_memory(&call).map(|()| self.end(lent, 0))
                }
                Path::Staged { cut, area } => {
                    if self.who_takes_part(Part::Staged)? != Part::Staged {
                        return Err(self.confused());
                    }
                    self.path = Some(PathTaken::Staged);
                    self.staged(lent, cut, area)
                }
                Path::Direct { cut, peers, said } => self.direct(lent, cut, peers, said),
                Path::OneShot { peers } => self.one_shot(lent, peers),
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
    /// As for [`OnDevices::run`].
    unsafe fn with_host_memory(&mut self, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            if self.world == 1 || !self.shared.asks(call) {
                return self.on_host(call);
            }
            match self.who_takes_part(Part::Host)? {
                Part::Host => self.on_host(call),
                _ => self.staged_on_host(call),
            }
        }
    }

    /// Tells the other ranks how this one takes part, and returns how all do: with host memory, if
    /// all of them do, or staged. Prepares with those that are new.
    fn who_takes_part(&mut self, mine: Part) -> Result<Part> {
        loop {
            let all = if self.shared.may_be_direct() {
                let places = self.places(mine);
                let records = self.exchange(&self.record(mine, Said::nothing(places)))?;
                let is = |part: Part| records.iter().any(|record| record.part == part);
                if is(Part::Direct) || is(Part::Captures) || is(Part::Replays) {
                    return Err(self.mixed(&records));
                }
                if is(Part::Prepares) {
                    Part::Prepares
                } else if is(Part::Staged) {
                    Part::Staged
                } else {
                    Part::Host
                }
            } else {
                self.agree_on_part(mine)?
            };
            if all != Part::Prepares {
                return Ok(all);
            }
            // Not all prepare, so their memory cannot be reached: through the host.
            self.prepare_host()?;
        }
    }

    fn places(&self, part: Part) -> [BufferAt; 2] {
        let of = |len: usize| match (len, part) {
            (0, _) => BufferAt::Nowhere,
            (_, Part::Host) => BufferAt::Host,
            _ => BufferAt::Device,
        };
        [of(self.call.send.len), of(self.call.recv.len)]
    }

    /// Returns the error for ranks that cannot take part together. It is the same on all ranks.
    pub(super) fn mixed(&self, records: &[Record]) -> Error {
        let op = self.call.op;
        let part = |rank: Rank| records[rank].part;
        if records.iter().any(|record| matches!(record.part, Part::Captures | Part::Replays)) {
            let how = |rank: Rank| match part(rank) {
                Part::Captures => format!("captures {op} in a CUDA graph"),
                Part::Replays => format!("replays a CUDA graph with {op}"),
                _ => format!("calls {op}"),
            };
            let other = records.iter().position(|record| record.part != part(0)).unwrap_or(0);
            let (first, second) = (how(0), how(other));
            let why = format!("rank 0 {first}, and rank {other} {second}; capture and replay the same calls on all ranks");
            return Error::Unsupported { what: "an operation in a CUDA graph on some ranks alone", why };
        }
        // Some ranks have prepared to reach each other's memory, and others call with host memory.
        let other = records.iter().position(|record| record.part != Part::Direct).unwrap_or(0);
        let how = if part(other) == Part::Prepares { "another device" } else { "host memory" };
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

    pub(super) fn until_arrived(&self, lent: &Lent, round: usize) -> Result<()> {
        self.step();
        self.shared.until_stream(self.call, lent, Some(self.core.next_seq()), |gate| gate.words().has_arrived(round as u32))
    }

    fn until_left(&self, lent: &Lent) -> Result<()> {
        self.step();
        self.shared.until_stream(self.call, lent, Some(self.core.next_seq()), Gate::has_left)
    }

    pub(super) fn end(&self, lent: &Lent, round: usize) {
        if let Some(gate) = lent.gate() {
            gate.end(round as u32);
        }
    }

    /// Fails if the operation has been cancelled: its buffers on other ranks may no longer be lent.
    pub(super) fn check_not_cancelled(&self) -> Result<()> {
        let seq = self.core.next_seq();
        if self.shared.info.cancel.stops(Some(seq)) { Err(Error::Aborted { op: self.call.op, seq }) } else { Ok(()) }
    }

    /// Runs a part of the call on host memory.
    ///
    /// # Safety
    ///
    /// As for [`OnDevices::run`].
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

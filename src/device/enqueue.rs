//! The caller's side of a call on a device: all of its work is enqueued on a stream before the call
//! is queued. From then on nothing of it calls the driver.

use std::io::ErrorKind;
use std::sync::Arc;

use smallvec::SmallVec;

use super::bind::{copy_kernel, kernel};
use super::call::{DeviceCall, Enqueued, Path, PinnedAt, cut_of, device_call, device_call_to_keep, refused};
use super::caller::Caller;
use super::handshake::{Given, Handshake};
use super::host_area::{HostArea, SEGMENT, SLOTS};
use super::operation::SHORT;
use super::state::{Calling, LaneOf, Mode, finish};
use crate::call::Call;
use crate::cuda::device::{Address, Device, Event, Extent, Handle, MovesAt, Reduction, StreamId};
use crate::cuda::direct::Plan;
use crate::cuda::lanes::Lane;
use crate::cuda::moves::Moves;
use crate::cuda::peers::{Announcement, BufferAt, HALVES, ONE_SHOT, Peers};
use crate::cuda::rounds::{Buffer, Cut, Row};
use crate::cuda::shared::shared;
use crate::error::{Error, Result};
use crate::sys::Region;
use crate::types::{DType, Op, Rank, ReduceOp};

/// The most rounds of a large direct call, unless its segments would not fit the area. Each round
/// takes some microseconds also where nothing passes through the areas.
const ROUNDS: usize = 8;

/// How often a rank looks which of the allocations that peers have open it has freed.
const SWEEP: u64 = 64;

impl Caller<'_> {
    /// Enqueues bound calls on their callers' streams, or on kolo's own stream if a caller's
    /// stream shall not wait for them. Nothing is enqueued if this fails with an error that leaves
    /// the communicator usable. Several calls are messages, which run side by side.
    ///
    /// `queue` has the calls run. It is called before the first of them waits on a stream: the driver
    /// may keep this thread from enqueueing the rest until the stream has gone on.
    pub(super) fn enqueue(&self, calls: &[Call], is_apart: bool, queue: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Some(first) = calls.iter().find(|call| call.on_device.is_some()) else { return queue() };
        self.state.check_process(first.op)?;
        let capture = |call: &Call| device_call(call).and_then(|bound| bound.capture);
        if calls.iter().any(|call| capture(call) != capture(first)) {
            let why = "a CUDA graph captures the stream of one, and not that of another".to_owned();
            return Err(Error::Unsupported { what: "messages side by side", why });
        }
        let mut calling = self.devices.calling.lock();
        let bound: SmallVec<[(&Call, Arc<DeviceCall>); 2]> =
            calls.iter().filter_map(|call| Some((call, device_call_to_keep(call)?))).collect();
        for (call, bound) in &bound {
            let Ready { path, handshake, lane } = self.get_ready(&mut calling, call, bound, is_apart).map_err(refused)?;
            let captured_end = lane.as_ref().filter(|_| bound.is_captured()).map(|_| Event::new(&bound.device));
            let captured_end = captured_end.transpose().map_err(refused)?;
            let stream = lane.map_or(bound.stream, |lane| lane.stream.id);
            let is_new = bound.enqueued.set(Enqueued { path, stream, captured_end, handshake }).is_ok();
            debug_assert!(is_new, "a call is enqueued once");
            self.devices.add_on_stream(bound);
        }
        // From here on the stream has work of the calls: a failure ends the communicator.
        let give = |calling: &mut Calling| -> Result<()> {
            for step in [Step::Send, Step::Receive] {
                for (call, bound) in &bound {
                    let _enqueueing = bound.device.held().enqueueing();
                    // SAFETY: the caller keeps the buffers until the call has ended.
                    unsafe { enqueued(bound).give_to_stream(calling, (call, bound), self.state.info.rank, step)? };
                }
            }
            Ok(())
        };
        queue()?;
        self.add_to_graph(calls).map_err(refused)?;
        let given = give(&mut calling);
        drop(calling);
        given.map_err(|error| {
            // First all, in the order of their calls: what follows may wait for one of them, and a kernel of these
            // must not take its task while one of an earlier call runs.
            self.state.devices.release();
            bound.iter().for_each(|(_, bound)| end_what_was_given(bound));
            match self.state.fail_outside(error.clone()) {
                // The thread that runs the call has noticed it first, but not why.
                Error::Revoked { .. } => error,
                failed => failed,
            }
        })
    }

    /// Makes everything that a call needs.
    fn get_ready(&self, calling: &mut Calling, call: &Call, bound: &Arc<DeviceCall>, is_apart: bool) -> Result<Ready> {
        let device = &bound.device;
        let is_captured = bound.is_captured();
        if !device.has_words()? {
            if is_captured {
                let why = "streams of this device cannot wait for the host".to_owned();
                return Err(Error::Unsupported { what: "a collective in a CUDA graph", why });
            }
            return self.copy_now(calling, call, bound);
        }
        let lane = match (is_apart, is_captured) {
            (false, _) => None,
            (true, false) => Some(calling.lane(device, LaneOf::of(call, self.state.info.rank, self.state.layout.ranks))?),
            (true, true) => Some(calling.captured_lane(device, bound.capture)?),
        };
        let world = self.state.layout.ranks;
        let [sends, receives] = bound.on_device;
        let handshake = |rounds: usize, moves, memory| -> Result<Option<Handshake>> {
            let handshake = Handshake::new(device, shared(&**device).words.take(device, rounds as u32)?, moves, memory);
            Ok(Some(if is_captured { handshake.replayed() } else { handshake }))
        };
        if !sends && !receives {
            return Ok(Ready { path: Path::OrderOnly, handshake: handshake(1, None, None)?, lane });
        }
        if world == 1 && sends && receives && !call.op.is_point_to_point() {
            // The host does nothing in a replay.
            let handshake = if is_captured { None } else { handshake(1, None, None)? };
            return Ok(Ready { path: Path::DeviceCopy, handshake, lane });
        }
        // One buffer is on the device, the other in host memory.
        let is_divided = (call.send.len > 0 && !sends) || (call.recv.len > 0 && !receives);
        if !self.state.asks(call) || world == 1 || is_divided {
            let room = |len: usize, is_on_device: bool| if is_on_device { len.next_multiple_of(64) } else { 0 };
            let (for_send, for_recv) = (room(call.send.len, sends), room(call.recv.len, receives));
            let memory = shared(&**device).pinned.take(device, for_send + for_recv)?;
            let at = |offset: usize| PinnedAt::of(&memory, offset);
            let by_kernel = bound.has_kernels && !self.may_share_device(calling);
            let path = Path::Pinned { send: sends.then(|| at(0)), recv: receives.then(|| at(for_send)), by_kernel };
            return Ok(Ready { path, handshake: handshake(1, None, Some(memory))?, lane });
        }
        let mode = self.mode(calling, call, bound)?;
        let cut = cut_of(call, world);
        let staged = |area: Arc<HostArea>| {
            let cut = cut.clone().into_rounds_of(SEGMENT);
            let handshake = handshake(cut.rounds, None, None)?;
            Ok(Ready { path: Path::Staged { cut, area }, handshake, lane: lane.clone() })
        };
        match mode {
            Mode::Staged(_) if is_captured => staged(self.area_of_graph(call, bound)?),
            Mode::Staged(area) => staged(area),
            Mode::Direct(..) if !bound.has_kernels => {
                let why = "its kernel could not be loaded, although those of earlier calls could".to_owned();
                Err(Error::Unsupported { what: "a reduction on a device", why })
            }
            Mode::Direct(_, peers) if peers.have_barrier() && call.op == Op::AllReduce && call.send.len <= ONE_SHOT => {
                let moves = Some(shared(&**device).pinned.take(device, Moves::bytes(2))?);
                Ok(Ready { path: Path::OneShot { peers }, handshake: handshake(1, moves, None)?, lane })
            }
            Mode::Direct(_, peers) => {
                let captured = if is_captured { Some(self.open_for_graph(calling, call, bound, &peers)?) } else { None };
                if let Some(None) = captured {
                    return staged(self.area_of_graph(call, bound)?);
                }
                // All is in place in a graph, so one kernel moves it.
                let cut = if is_captured { cut } else { direct_rounds(cut, &peers, world) };
                let moves = match peers.is_leader() {
                    true => {
                        let most = Plan::most_moves(world, &peers.leaders, self.state.info.rank);
                        Some(shared(&**device).pinned.take(device, Moves::bytes(most))?)
                    }
                    false => None,
                };
                let handshake = handshake(cut.rounds, moves, None)?;
                // Last: what is announced must be sent.
                let announced = captured.flatten().unwrap_or_else(|| self.announce(calling, call, bound, &peers));
                Ok(Ready { path: Path::Direct { cut, peers, announced: announced.into() }, handshake, lane })
            }
        }
    }

    /// Whether other ranks may have this rank's device too. Kernels of several processes take turns there,
    /// and each turn takes tens of microseconds; copy engines serve them side by side. Before the first large
    /// call it is not known, but some ranks must share if this host has more of them than devices.
    fn may_share_device(&self, calling: &Calling) -> bool {
        match &calling.mode {
            Some(Mode::Direct(_, peers)) => peers.share_devices(),
            _ => self.devices.driver(self.state).is_some_and(|driver| self.state.neighbours > driver.count()),
        }
    }

    /// What this rank says of its buffers in a direct call.
    pub(super) fn announce(&self, calling: &mut Calling, call: &Call, bound: &DeviceCall, peers: &Peers) -> Announcement {
        let device = &bound.device;
        let at = |len: usize, is_on_device: bool| match (len, is_on_device) {
            (0, _) => BufferAt::Nowhere,
            (_, true) => BufferAt::Device,
            (_, false) => BufferAt::Host,
        };
        let places = [at(call.send.len, bound.on_device[0]), at(call.recv.len, bound.on_device[1])];
        let export = |place: BufferAt, ptr: *const u8, len: usize| {
            let address = ptr.addr() as Address;
            let extent = device.extent(address).ok().filter(|_| place == BufferAt::Device)?;
            // A buffer may go on in another allocation.
            let offset = address.checked_sub(extent.base).filter(|offset| offset + len as u64 <= extent.size)?;
            let handle = device.export(&extent).inspect_err(|error| crate::log::debug!(%error, "peers cannot open this memory"));
            Some((extent, handle.ok(), offset))
        };
        let exports = [export(places[0], call.send.ptr, call.send.len), export(places[1], call.recv.ptr, call.recv.len)];
        calling.calls += 1;
        let own = peers.own();
        let is_new = |(extent, ..): &(Extent, Option<Handle>, u64)| !own.iter().any(|known| known.id == extent.id);
        if calling.calls.is_multiple_of(SWEEP) || exports.iter().flatten().any(is_new) {
            for extent in own {
                if device.extent(extent.base).ok().is_none_or(|now| now.id != extent.id) {
                    peers.has_gone(&extent);
                }
            }
        }
        // In place it would overwrite what its peers have not read yet.
        let may_be_open = call.op != Op::AllToAll || call.send.ptr != call.recv.ptr.cast_const();
        peers.announce(device, exports, places, may_be_open)
    }

    /// Copies what is sent to host memory, because streams cannot wait for the host.
    fn copy_now(&self, calling: &mut Calling, call: &Call, bound: &DeviceCall) -> Result<Ready> {
        let lane = calling.lane(&bound.device, LaneOf::Collectives)?;
        let [sends, receives] = bound.on_device;
        let for_send = if sends { call.send.len.next_multiple_of(64) } else { 0 };
        let for_recv = if receives { call.recv.len } else { 0 };
        let bytes = (for_send + for_recv).max(1);
        let memory = Region::try_heap(bytes).ok_or_else(|| {
            // The other ranks make the call, too.
            let what = format!("{}: allocating {bytes} bytes of host memory for a call on {}", call.op, bound.device.name());
            self.state.fail_outside(Error::os(what)(ErrorKind::OutOfMemory.into()))
        })?;
        let memory = Arc::new(memory);
        let timeout = call.timeout.unwrap_or(self.state.info.timeout);
        lane.follow(bound.stream)?;
        if sends {
            // SAFETY: there is room for it. The caller's buffer is valid, and the copy is awaited.
            unsafe { lane.device.copy_out(lane.stream.id, call.send.ptr.addr() as u64, memory.at(0), call.send.len)? };
        }
        finish(&lane, timeout).inspect_err(|_| {
            // The device may still copy to it.
            std::mem::forget(memory.clone());
            self.state.abort();
        })?;
        let (send, recv) = (sends.then_some(0), receives.then_some(for_send));
        let path = Path::Copied { memory, send, recv, lane, to: call.recv };
        Ok(Ready { path, handshake: None, lane: None })
    }
}

/// Has the stream say that it has left a call of which it was given a part.
fn end_what_was_given(bound: &DeviceCall) {
    let Some(Enqueued { stream, handshake: Some(handshake), .. }) = bound.enqueued.get() else { return };
    if handshake.is_given(Given::Part) {
        let is_said = handshake.words().enqueue_left(&*bound.device, *stream).is_ok();
        handshake.set_given(if is_said { Given::All } else { Given::Lost });
    }
}

fn enqueued(bound: &DeviceCall) -> &Enqueued {
    bound.enqueued.get().expect("it was set before")
}

/// Messages run side by side: the stream copies all that are sent before it waits for the first one
/// that is received. All else is one step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Send,
    Receive,
}

/// What a call needs in order to be enqueued.
struct Ready {
    path: Path,
    handshake: Option<Handshake>,
    lane: Option<Arc<Lane>>,
}

/// Cuts a direct call into rounds. On several devices, short rounds let one of them copy to its area while
/// another runs its kernel. On one, all of that comes one after the other.
fn direct_rounds(mut cut: Cut, peers: &Peers, world: usize) -> Cut {
    cut.is_apart = cut.op == Op::AllToAll;
    let slack = Cut::slack(2 * world);
    let half = peers.area_len / HALVES - slack;
    let least = if peers.share_devices() { half } else { half / 4 };
    let share = cut.segment_bytes().div_ceil(ROUNDS).clamp(least, half);
    cut.into_rounds_of(share)
}

/// The kernel of a call.
struct Launch {
    kernel: (DType, ReduceOp),
    /// Whether it may wait for those of other ranks.
    may_wait: bool,
    /// Memory of the device for what it is to do.
    moves: Address,
}

/// The segments that a call passes through.
struct Segments<'a> {
    slots: usize,
    /// Where the segment of a round is.
    at: Box<dyn Fn(usize) -> Segment + 'a>,
}

enum Segment {
    Host(*mut u8),
    Device(Address),
}

impl Enqueued {
    /// Enqueues the work of one step of a call.
    ///
    /// # Safety
    ///
    /// The call's buffers are valid until the stream has passed the call.
    unsafe fn give_to_stream(
        &self,
        calling: &mut Calling,
        (call, bound): (&Call, &Arc<DeviceCall>),
        rank: Rank,
        step: Step,
    ) -> Result<()> {
        let (device, stream) = (&*bound.device, self.stream);
        let (send, recv) = (call.send.ptr.addr() as Address, call.recv.ptr.addr() as Address);
        if step == Step::Send && stream != bound.stream {
            let captured = calling.captured_lanes.iter().map(|(_, lane)| lane);
            let lane = calling.lanes.iter().map(|(_, lane)| lane).chain(captured).find(|lane| lane.stream.id == stream);
            lane.map_or(Ok(()), |lane| lane.follow(bound.stream))?;
        }
        let Some(handshake) = &self.handshake else {
            if matches!(self.path, Path::DeviceCopy) && step == Step::Receive && send != recv {
                // SAFETY: the caller vouches for the buffers.
                unsafe { device.copy(stream, send, recv, call.recv.len)? };
            }
            return self.mark_captured_end(step);
        };
        let words = handshake.words();
        handshake.set_given(Given::Part);
        if step == Step::Send && bound.is_captured() {
            words.enqueue_rewind(device, stream)?;
        }
        // SAFETY: the memory of the path has room for the buffers, and lives until the stream has
        // left. The caller vouches for the buffers.
        unsafe {
            match (&self.path, step) {
                (Path::Copied { .. }, _) => return Ok(()),
                (Path::Pinned { send: out, by_kernel, .. }, Step::Send) => {
                    match *out {
                        Some(out) if *by_kernel && is_short(call.send.len) => {
                            copy_by_kernel(device, stream, call.dtype, (send, out.device), call.send.len)?;
                        }
                        Some(out) => device.copy_out(stream, send, out.host, call.send.len)?,
                        None => {}
                    }
                    return words.enqueue_arrived(device, stream, 0);
                }
                (Path::OrderOnly, Step::Send) => return words.enqueue_arrived(device, stream, 0),
                (_, Step::Send) => return Ok(()),
                (Path::Pinned { recv: back, by_kernel, .. }, Step::Receive) => {
                    // Before it comes back, the host has what is sent.
                    if call.recv.len > 0 || bound.is_captured() {
                        words.enqueue_until_end(device, stream, 0)?;
                    }
                    if let Some(back) = *back {
                        if *by_kernel && is_short(call.recv.len) {
                            copy_by_kernel(device, stream, call.dtype, (back.device, recv), call.recv.len)?;
                        } else {
                            device.copy_in(stream, back.host, recv, call.recv.len)?;
                        }
                    }
                }
                (Path::OrderOnly, Step::Receive) => {
                    words.enqueue_until_end(device, stream, 0)?;
                }
                (Path::DeviceCopy, Step::Receive) => {
                    if send != recv {
                        device.copy(stream, send, recv, call.recv.len)?;
                    }
                    words.enqueue_arrived(device, stream, 0)?;
                }
                (Path::Staged { cut, area }, Step::Receive) => {
                    // A graph has an area of its own.
                    if !bound.is_captured() {
                        wait_for_last(calling, bound, stream)?;
                    }
                    let at = |round: usize| Segment::Host(area.segment(cut.world, round));
                    let segments = Segments { slots: SLOTS, at: Box::new(at) };
                    self.give_rounds(call, bound, (cut, rank), Some(&segments), None)?;
                }
                (Path::Direct { cut, peers, announced }, Step::Receive) => {
                    let passes = announced.places.contains(&BufferAt::Device);
                    if passes {
                        wait_for_last(calling, bound, stream)?;
                    }
                    let at = |round: usize| Segment::Device(peers.own_segment(round));
                    let segments = Segments { slots: HALVES, at: Box::new(at) };
                    // The host orders what passes through areas.
                    let may_wait = peers.have_barrier() && !passes;
                    let kernel =
                        peers.is_leader().then(|| Launch { kernel: kernel(call), may_wait, moves: peers.moves_on_device() });
                    self.give_rounds(call, bound, (cut, rank), passes.then_some(&segments), kernel)?;
                }
                (Path::OneShot { peers }, Step::Receive) => {
                    let cut = cut_of(call, peers.leaders.len());
                    let kernel = Launch { kernel: kernel(call), may_wait: true, moves: peers.moves_on_device() };
                    self.give_rounds(call, bound, (&cut, rank), None, Some(kernel))?;
                }
            }
        }
        words.enqueue_left(device, stream)?;
        handshake.set_given(Given::All);
        self.mark_captured_end(step)
    }

    /// Marks the end of a captured call, for streams that wait for it in the capture.
    fn mark_captured_end(&self, step: Step) -> Result<()> {
        match &self.captured_end {
            Some(end) if step == Step::Receive => end.record(self.stream),
            _ => Ok(()),
        }
    }

    /// Enqueues the rounds of a call. Each copies to a segment and from it, or uses the buffers in
    /// place; and runs this rank's kernel, if it has one, which may wait for those of other
    /// ranks.
    ///
    /// # Safety
    ///
    /// As for [`Enqueued::give_to_stream`].
    unsafe fn give_rounds(
        &self,
        call: &Call,
        bound: &DeviceCall,
        (cut, rank): (&Cut, Rank),
        segments: Option<&Segments<'_>>,
        kernel: Option<Launch>,
    ) -> Result<()> {
        let handshake = self.handshake.as_ref().expect("rounds have words");
        let (device, stream, words) = (&*bound.device, self.stream, handshake.words());
        let bring = |round: usize| -> Result<()> {
            if let Some(Segments { at, .. }) = segments {
                for Row { of_buffer, of_segment, len } in cut.rows(rank, Buffer::Send, round) {
                    let from = (call.send.ptr.addr() + of_buffer) as Address;
                    // SAFETY: rows are within the buffer and the segment, which nothing else uses in
                    // this round: the stream has taken the earlier one from there.
                    unsafe {
                        match at(round) {
                            Segment::Host(segment) => device.copy_out(stream, from, segment.add(of_segment), len)?,
                            Segment::Device(segment) => device.copy(stream, from, segment + of_segment as Address, len)?,
                        }
                    }
                }
            }
            words.enqueue_arrived(device, stream, round as u32)
        };
        let take = |round: usize| -> Result<()> {
            let Some(Segments { at, .. }) = segments else { return Ok(()) };
            for Row { of_buffer, of_segment, len } in cut.rows(rank, Buffer::Recv, round) {
                let to = (call.recv.ptr.addr() + of_buffer) as Address;
                // SAFETY: as above.
                unsafe {
                    match at(round) {
                        Segment::Host(segment) => device.copy_in(stream, segment.add(of_segment), to, len)?,
                        Segment::Device(segment) => device.copy(stream, segment + of_segment as Address, to, len)?,
                    }
                }
            }
            Ok(())
        };
        let ahead = segments.map_or(1, |segments| segments.slots).min(cut.rounds);
        for round in 0..ahead {
            bring(round)?;
        }
        for round in 0..cut.rounds {
            if let (Some(Launch { kernel, may_wait, moves }), Some(on_host)) = (&kernel, handshake.moves()) {
                words.enqueue_until_go(device, stream, round as u32)?;
                let moves = MovesAt { on_device: *moves, on_host };
                // SAFETY: the moves stay until the stream has left. The host tells what every rank
                // has announced.
                unsafe { device.run_moves(stream, *kernel, moves, call.bytes(cut.world), *may_wait)? };
                words.enqueue_done(device, stream, round as u32)?;
            }
            if segments.is_some() || round + 1 == cut.rounds {
                words.enqueue_until_end(device, stream, round as u32)?;
            }
            take(round)?;
            if segments.is_some() && round + ahead < cut.rounds {
                bring(round + ahead)?;
            }
        }
        Ok(())
    }
}

/// Whether a kernel may copy a buffer between the device and pinned memory: it starts sooner than a
/// copy engine, which is faster for long ones.
fn is_short(len: usize) -> bool {
    len as u64 <= SHORT
}

/// Has a kernel copy `len` bytes.
///
/// # Safety
///
/// Both are on the device or pinned, and stay valid until the stream has passed the copy.
unsafe fn copy_by_kernel(
    device: &dyn Device,
    stream: StreamId,
    dtype: DType,
    (from, to): (Address, Address),
    len: usize,
) -> Result<()> {
    let (dtype, redop) = copy_kernel(dtype);
    let (sources, targets, count) = (&[from][..], &[to][..], len / dtype.size());
    let copy = Reduction { dtype, redop, sources, targets, count, divisor: 1 };
    // SAFETY: passed on.
    if len > 0 { unsafe { device.reduce(stream, &copy) } } else { Ok(()) }
}

/// Has a stream wait until that of the last call that used this rank's area has left it. Also if it
/// seems to be the same stream: a handle may stand for a stream of each thread.
fn wait_for_last(calling: &mut Calling, bound: &Arc<DeviceCall>, stream: StreamId) -> Result<()> {
    let last = std::mem::replace(&mut calling.last, Arc::downgrade(bound));
    let Some(last) = last.upgrade() else { return Ok(()) };
    match last.enqueued.get() {
        Some(Enqueued { handshake: Some(handshake), .. }) => handshake.words().enqueue_until_over(&*bound.device, stream),
        _ => Ok(()),
    }
}

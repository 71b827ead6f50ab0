//! What carries out calls: one at a time, by whichever thread holds it.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mio::Waker;

use super::call::{Call, Counts};
use super::device::Devices;
use crate::bootstrap::fabric::Fabric;
use crate::bootstrap::host_group::area::Area;
use crate::bootstrap::peer_failed;
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config::{SharedSettings, Transport};
use crate::engine::{Engine, Job};
use crate::error::{Error, Result};
use crate::failure::agree_on_report;
use crate::failure::{CommInfo, OpContext};
use crate::reduce::{Kernel, normalise_bools};
use crate::schedule::select::{Choice, Layout, has_window, piece_bytes, select};
use crate::schedule::{Algorithm, Blocks, Problem, chunk, steps};
use crate::shm::registered::Allocation;
use crate::shm::{self, Autotune, Window, WindowCall};
use crate::sys::{Patience, Segment};
use crate::trace::{self, LogEntry, OpLog, Recording};
use crate::transport::Mesh;
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp};

/// How the ranks of a part share memory.
pub(crate) enum Agreed {
    /// By windows; in this area, with what they have measured before, if there are several of them on this host.
    Windows(Option<Area>, Option<u64>),
    /// Not at all.
    Messages,
}

pub(crate) struct Core {
    fabric: Fabric,
    recording: Arc<Recording>,
    settings: SharedSettings,
    layout: Layout,
    patience: Arc<Patience>,
    /// Made when the first message is needed.
    engine: Option<Engine>,
    window: Option<Window>,
    /// Operations so far.
    seq: u64,
    /// Messages sent to each peer so far.
    sent: Vec<u64>,
    /// Partial results between windows and messages; kept for its memory.
    partial: Vec<u64>,
    pub(crate) devices: Devices,
}

impl Core {
    /// The ranks of `fabric`, all of which call this together, ready for their first operation.
    pub(crate) fn start(fabric: Fabric, settings: SharedSettings, info: &CommInfo, began: Instant) -> Result<Core> {
        let mut core = Core::new(fabric, settings);
        core.connect(info, began)?;
        Ok(core)
    }

    /// The ranks of `fabric`, which is a part of a communicator and has agreed through it on how its ranks share memory.
    pub(crate) fn start_part(fabric: Fabric, settings: SharedSettings, info: &CommInfo, agreed: Agreed) -> Result<Core> {
        let mut core = Core::new(fabric, settings);
        match agreed {
            Agreed::Windows(area, tuning) => {
                if let Some(area) = area {
                    core.enter(info, area, tuning);
                }
            }
            Agreed::Messages => core.leave_windows(),
        }
        // Between hosts no rank opens links before it needs them.
        if core.layout.windows && core.layout.hosts == 1 {
            core.finish_connecting(info, |core| core.meet_first(info))?;
        }
        Ok(core)
    }

    /// The ranks of `fabric`, to be connected.
    pub(crate) fn new(fabric: Fabric, settings: SharedSettings) -> Core {
        let world = fabric.world();
        let neighbours = fabric.neighbours();
        let hosts = fabric.hosts();
        let per_host = |host: usize| hosts.iter().filter(|&&other| other == host).count();
        let uses_memory = settings.transport != Transport::Tcp;
        let leaders = (0..world).filter(|&rank| hosts[rank] == rank);
        let layout = Layout {
            ranks: world,
            hosts: leaders.clone().count(),
            fewest_per_host: leaders.map(per_host).min().unwrap_or(1),
            windows: uses_memory && (0..world).any(|rank| hosts[rank] != rank),
        };
        let patience = Arc::new(Patience::new(neighbours.len()));
        Core {
            recording: fabric.recording().clone(),
            fabric,
            settings,
            layout,
            patience,
            engine: None,
            window: None,
            seq: 0,
            sent: vec![0; world],
            partial: Vec::new(),
            devices: Devices::default(),
        }
    }

    /// Connects with the others, which do the same. Nothing may come before it.
    pub(crate) fn connect(&mut self, info: &CommInfo, began: Instant) -> Result<()> {
        self.finish_connecting(info, |core| core.try_to_connect(info, began))
    }

    fn finish_connecting(&mut self, info: &CommInfo, connect: impl FnOnce(&mut Core) -> Result<()>) -> Result<()> {
        connect(self).map_err(|error| {
            let error = agree_on_report(self.fabric.status(), info, error);
            self.part(true);
            self.recording.failed(&error);
            error
        })
    }

    fn try_to_connect(&mut self, info: &CommInfo, began: Instant) -> Result<()> {
        if self.fabric.world() == 1 {
            return Ok(());
        }
        let neighbours = self.fabric.neighbours();
        self.open_window(info, &neighbours, began)?;
        self.meet_first(info)
    }

    /// Waits until all ranks have connected.
    fn meet_first(&mut self, info: &CommInfo) -> Result<()> {
        let descriptor = Descriptor { op: Op::Connect, ..Descriptor::nothing() };
        let entry = self.recording.history.begin(descriptor.encode(), 0, 0);
        let met = self.meet(OpContext::new(descriptor, info));
        self.recording.history.end(entry, met.is_ok());
        met
    }

    /// Shares a window with the neighbours, if every rank of every host can.
    fn open_window(&mut self, info: &CommInfo, neighbours: &Arc<[Rank]>, began: Instant) -> Result<()> {
        if !self.layout.windows {
            return Ok(());
        }
        let mut has_window = neighbours.len() <= shm::MOST_RANKS;
        if neighbours.len() > 1 && has_window {
            let shared = self.fabric.share(began + info.timeout);
            let area = shared.map_err(|failed| peer_failed(failed, &info.members, began))?;
            has_window = area.is_some();
            if let Some(area) = area {
                self.enter(info, area, None);
            }
        }
        if self.layout.hosts > 1 {
            // The others' windows cannot be seen from here.
            let mut everybody = [u8::from(has_window)];
            let chunk = RawSliceMut::of(&mut everybody);
            let descriptor = Descriptor { op: Op::Connect, count: 1, ..Descriptor::nothing() };
            let kernel = Kernel::new(DType::U8, ReduceOp::Min);
            let context = OpContext::new(descriptor, info);
            // SAFETY: `everybody` is borrowed for the call.
            unsafe { self.messages(context, Op::AllReduce, Algorithm::RecursiveDoubling, None, 1, chunk, kernel)? };
            has_window = everybody[0] != 0;
        }
        if !has_window {
            self.leave_windows();
        }
        Ok(())
    }

    /// Uses a window in this area from now on; `tuning` is what all its ranks have measured before.
    fn enter(&mut self, info: &CommInfo, area: Area, tuning: Option<u64>) {
        let host = self.fabric.host().expect("there is no area without a host group").clone();
        let neighbours = self.fabric.neighbours();
        let jobs = neighbours.iter().map(|&rank| self.fabric.members()[rank]).collect();
        let autotune = Autotune::with_tuning(self.settings.copy_mode, tuning);
        let window = Window::new(area, neighbours, jobs, host, self.patience.clone(), autotune);
        info.cancel.attach(window.waker());
        self.window = Some(window);
    }

    /// Some rank has no window: all exchange messages instead.
    fn leave_windows(&mut self) {
        tracing::warn!("ranks of a host cannot share memory; they exchange messages instead");
        self.window = None;
        self.layout.windows = false;
        self.fabric.leave_host();
    }

    /// Waits for everybody to come to the same point.
    fn meet(&mut self, context: OpContext<'_>) -> Result<()> {
        let choice = self.choose(Op::Barrier, 0);
        // SAFETY: a barrier touches no buffer.
        unsafe { self.carry_out(&context, &Call::new::<u8>(Op::Barrier), choice) }
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.recording
    }

    /// The number of the next collective.
    #[inline]
    pub(crate) fn next_seq(&self) -> u64 {
        self.seq + 1
    }

    /// The sequence number that a call gets if it is carried out next; 0 for a receive from any rank.
    #[cold]
    pub(crate) fn next_number(&self, call: &Call) -> u64 {
        match call.op {
            Op::Send => self.sent[call.root] + 1,
            Op::Recv if call.source.is_some() => 0,
            Op::Recv => self.engine.as_ref().map_or(0, |engine| engine.received_from(call.root)) + 1,
            _ => self.next_seq(),
        }
    }

    pub(crate) fn settings(&self) -> SharedSettings {
        self.settings
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Ends the sleep on links of whoever carries out an operation.
    pub(crate) fn waker(&mut self) -> Result<Arc<Waker>> {
        self.engine().map(|engine| engine.waker())
    }

    /// How a collective of so many bytes is carried out.
    #[inline]
    pub(crate) fn choose(&self, op: Op, bytes: u64) -> Choice {
        let SharedSettings { algorithm: forced, reproducible, .. } = self.settings;
        let one_window = self.layout.windows && self.layout.hosts == 1;
        // On one host windows win by far: no need to compute by how much.
        if one_window && has_window(op) && (forced.is_none() || reproducible) {
            return Choice { algorithm: Algorithm::Window, between: None };
        }
        // These two sum in the order of ranks.
        let forced = if reproducible && op.reduces() { Some(Algorithm::Direct) } else { forced };
        select(op, bytes, self.layout, &self.settings.model, forced)
    }

    /// Carries out a collective, which is written down in `history`.
    ///
    /// # Safety
    ///
    /// The call was checked; its buffers are valid until this returns, and nobody else uses them.
    #[inline]
    pub(crate) unsafe fn collective(&mut self, info: &CommInfo, history: &OpLog, call: &Call) -> Result<()> {
        self.seq += 1;
        let world = self.layout.ranks;
        let (descriptor, bytes) = (call.descriptor(self.seq, 0), call.bytes(world));
        let choice = (world > 1 && !call.is_empty(world)).then(|| self.choose(call.op, bytes));
        let note = LogEntry::new(history, bytes, trace::path(choice));
        let context = OpContext::noted(descriptor, info, call.timeout, &note);
        // Windows do so themselves, when nothing waits for this rank any more.
        if note.is_large() || choice.is_none_or(|choice| choice.algorithm != Algorithm::Window) {
            context.note();
        }
        // SAFETY: passed on.
        let result = unsafe { self.collective_by(choice, &context, call) };
        note.end(&context.words, result.is_ok());
        result
    }

    /// Without a choice, there is nothing to be done with other ranks.
    ///
    /// # Safety
    ///
    /// As for [`Core::collective`].
    #[inline]
    unsafe fn collective_by(&mut self, choice: Option<Choice>, context: &OpContext<'_>, call: &Call) -> Result<()> {
        let Some(choice) = choice else {
            if call.send.ptr != call.recv.ptr {
                // SAFETY: the caller vouches for both. Alone, they are equally long, and apart if they are not the same; of several
                // ranks, they are empty.
                unsafe { std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.recv.len) };
            }
            return Ok(());
        };
        // SAFETY: passed on.
        unsafe {
            let result = self.carry_out(context, call, choice);
            if call.dtype == DType::Bool {
                // All that may have been written, whatever the outcome: in place, blocks of others serve as scratch.
                let (send, recv) = (call.send, call.recv);
                normalise_bools(recv.ptr, recv.len);
                if send.ptr.addr() <= recv.ptr.addr() && recv.ptr.addr() < send.ptr.addr() + send.len {
                    normalise_bools(send.ptr.cast_mut(), send.len);
                }
            }
            result
        }
    }

    /// # Safety
    ///
    /// As for [`Core::collective`].
    #[inline]
    unsafe fn carry_out(&mut self, context: &OpContext<'_>, call: &Call, choice: Choice) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match (choice.algorithm, choice.between) {
                (Algorithm::Window, _) => self.in_window(context, call),
                (Algorithm::Hierarchical, Some(between)) => self.in_hierarchy(context, call, between),
                (algorithm, _) => self.by_messages(context.clone(), call, algorithm),
            }
        }
    }

    /// A collective of ranks that are all on this host.
    #[inline]
    unsafe fn in_window(&mut self, context: &OpContext<'_>, call: &Call) -> Result<()> {
        let counts = call.recv_counts.as_ref().or(call.send_counts.as_ref());
        let window_call = WindowCall {
            count: call.count,
            blocks: counts.map_or(Blocks::Even(call.count), |counts| counts.blocks()),
            root: call.root,
            kernel: kernel(call),
            finish: Some(self.layout.ranks),
            ..WindowCall::new(call.op, call.send, call.recv, call.dtype.size())
        };
        let window = self.window.as_mut().expect("a layout with windows has one");
        // SAFETY: passed on.
        unsafe { window.run(context, &window_call) }
    }

    /// A collective over messages of all ranks.
    unsafe fn by_messages<'c>(&mut self, context: OpContext<'c>, call: &'c Call, algorithm: Algorithm) -> Result<()> {
        let Layout { ranks: world, .. } = self.layout;
        let rank = self.fabric.rank();
        let element = call.dtype.size();
        let blocks = |counts: &'c Option<Counts>| counts.as_ref().map_or(Blocks::Even(call.count), Counts::blocks);
        let problem = Problem {
            op: call.op,
            rank,
            world,
            root: call.root,
            count: call.count,
            sends: blocks(&call.send_counts),
            recvs: blocks(&call.recv_counts),
            piece: (piece_bytes(algorithm) / element).max(1),
        };
        let job = Job {
            context,
            steps: steps(algorithm, problem),
            ranks: None,
            rank,
            world,
            input: call.send,
            output: call.recv,
            element,
            kernel: kernel(call),
            parts: world,
            source: None,
        };
        // SAFETY: passed on.
        unsafe { self.engine()?.run(job) }
    }

    /// A collective over messages of some ranks, in place in `memory`; of all if `ranks` is `None`. Rank 0 of them is the root.
    ///
    /// # Safety
    ///
    /// The memory is valid and nobody else uses it until this returns.
    #[expect(clippy::too_many_arguments, reason = "it is what a job consists of")]
    unsafe fn messages(
        &mut self,
        context: OpContext<'_>,
        op: Op,
        algorithm: Algorithm,
        ranks: Option<(&[Rank], Rank)>,
        element: usize,
        memory: RawSliceMut,
        kernel: Option<Kernel>,
    ) -> Result<()> {
        let all = self.layout.ranks;
        let (world, root) = ranks.map_or((all, 0), |(ranks, root)| (ranks.len(), root));
        let rank = match ranks {
            Some((ranks, _)) => ranks.iter().position(|&rank| rank == self.fabric.rank()).expect("this rank is one of them"),
            None => self.fabric.rank(),
        };
        if world == 1 {
            return Ok(());
        }
        let count = memory.len / element;
        let none = Blocks::Even(0);
        let piece = (piece_bytes(algorithm) / element).max(1);
        let job = Job {
            context,
            steps: steps(algorithm, Problem { op, rank, world, root, count, sends: none, recvs: none, piece }),
            ranks: ranks.map(|(ranks, _)| ranks),
            rank,
            world,
            input: memory.as_const(),
            output: memory,
            element,
            kernel,
            parts: all,
            source: None,
        };
        // SAFETY: passed on.
        unsafe { self.engine()?.run(job) }
    }

    /// Windows inside each host, messages between hosts.
    unsafe fn in_hierarchy(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        context.begin();
        // SAFETY: passed on.
        unsafe {
            match call.op {
                Op::AllReduce => self.all_reduce_in_hierarchy(context, call, between),
                Op::Reduce => self.reduce_in_hierarchy(context, call, between),
                Op::Broadcast => self.broadcast_in_hierarchy(context, call, between),
                Op::Barrier => self.barrier_in_hierarchy(context, between),
                op => unreachable!("{op} is not composed"),
            }
        }
    }

    /// Each host reduces, every rank a slice ("rail"); equal slices meet between hosts; each host gathers.
    unsafe fn all_reduce_in_hierarchy(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let element = call.dtype.size();
        let rails = self.layout.fewest_per_host;
        let (place, neighbours) = self.place();
        // Ranks beyond the fewest of any host have no slice of their own.
        let offsets: Vec<usize> =
            (0..=neighbours).map(|rank| if rank < rails { chunk(call.count, rails, rank).start } else { call.count }).collect();
        let slice = call.recv.skip(offsets[place] * element).take((offsets[place + 1] - offsets[place]) * element);
        let blocks = Blocks::Listed(&offsets);
        let kernel = kernel(call);
        let local = |op, input, output| WindowCall { blocks, kernel, ..WindowCall::new(op, input, output, element) };
        // SAFETY: passed on; the slice is this rank's part of the receive buffer, and the calls are in place or apart.
        unsafe {
            if let Some(window) = &mut self.window {
                window.run(context, &local(Op::ReduceScatterV, call.send, slice))?;
            } else if call.send.ptr != call.recv.ptr {
                std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.send.len);
            }
            if place < rails && slice.len > 0 {
                let rail = self.rail(place);
                self.messages(context.clone(), Op::AllReduce, between, Some((&rail, 0)), element, slice, kernel)?;
            }
            match &mut self.window {
                Some(window) => window.run(context, &local(Op::AllGatherV, slice.as_const(), call.recv)),
                None => Ok(()),
            }
        }
    }

    /// Each host reduces to one rank, on the root's host the root; these reduce to the root.
    unsafe fn reduce_in_hierarchy(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let element = call.dtype.size();
        let (heads, root) = self.heads(call.root);
        let is_head = heads.contains(&context.info.rank);
        let mut partial = std::mem::take(&mut self.partial);
        let output = if context.info.rank == call.root {
            call.recv
        } else if is_head {
            partial.resize(call.send.len.div_ceil(size_of::<u64>()), 0);
            RawSliceMut::of(&mut partial).take(call.send.len)
        } else {
            RawSliceMut::EMPTY
        };
        let kernel = kernel(call);
        let head = self.head_of_my_host(&heads);
        // SAFETY: passed on; partial results are this rank's own.
        let result = unsafe {
            let reduced = match &mut self.window {
                Some(window) => {
                    let local = WindowCall::new(Op::Reduce, call.send, output, element);
                    window.run(context, &WindowCall { count: call.count, root: head, kernel, ..local })
                }
                None => {
                    if call.send.ptr != output.ptr {
                        std::ptr::copy_nonoverlapping(call.send.ptr, output.ptr, output.len);
                    }
                    Ok(())
                }
            };
            reduced.and_then(|()| match is_head {
                true => self.messages(context.clone(), Op::Reduce, between, Some((&heads, root)), element, output, kernel),
                false => Ok(()),
            })
        };
        self.partial = partial;
        result
    }

    /// The root sends to one rank of each host; these spread it.
    unsafe fn broadcast_in_hierarchy(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let element = call.dtype.size();
        let (heads, root) = self.heads(call.root);
        let head = self.head_of_my_host(&heads);
        // SAFETY: passed on.
        unsafe {
            if context.info.rank == call.root && call.send.ptr != call.recv.ptr {
                std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.send.len);
            }
            if heads.contains(&context.info.rank) {
                self.messages(context.clone(), Op::Broadcast, between, Some((&heads, root)), element, call.recv, None)?;
            }
            let Some(window) = &mut self.window else { return Ok(()) };
            let local = WindowCall::new(Op::Broadcast, call.recv.as_const(), call.recv, element);
            window.run(context, &WindowCall { count: call.count, root: head, ..local })
        }
    }

    /// Each host waits for its own, one rank of each for the others, and each host for that one.
    unsafe fn barrier_in_hierarchy(&mut self, context: &OpContext<'_>, between: Algorithm) -> Result<()> {
        let (heads, _) = self.heads(0);
        let local = WindowCall::new(Op::Barrier, RawSlice::EMPTY, RawSliceMut::EMPTY, 1);
        // SAFETY: no buffer is touched.
        unsafe {
            if let Some(window) = &mut self.window {
                window.run(context, &local)?;
            }
            if heads.contains(&context.info.rank) {
                self.messages(context.clone(), Op::Barrier, between, Some((&heads, 0)), 1, RawSliceMut::EMPTY, None)?;
            }
            match &mut self.window {
                Some(window) => window.run(context, &local),
                None => Ok(()),
            }
        }
    }

    /// This rank's place among its neighbours, and how many they are.
    fn place(&self) -> (usize, usize) {
        self.window.as_ref().map_or((0, 1), |window| (window.rank(), window.members().len()))
    }

    /// The ranks with the same place on every host.
    fn rail(&self, place: usize) -> Vec<Rank> {
        let hosts = self.fabric.hosts();
        let nth = |host: usize| (0..hosts.len()).filter(|&rank| hosts[rank] == host).nth(place);
        (0..hosts.len()).filter(|&rank| hosts[rank] == rank).filter_map(nth).collect()
    }

    /// One rank of each host, on the root's host the root, and the root's number among them.
    fn heads(&self, root: Rank) -> (Vec<Rank>, Rank) {
        let hosts = self.fabric.hosts();
        let head = |host: usize| if hosts[root] == host { root } else { host };
        let heads: Vec<Rank> = (0..hosts.len()).filter(|&rank| hosts[rank] == rank).map(head).collect();
        let number = heads.iter().position(|&head| head == root).expect("the root is a head");
        (heads, number)
    }

    /// The place among the neighbours of the one that is a head.
    fn head_of_my_host(&self, heads: &[Rank]) -> usize {
        let members = self.window.as_ref().map(Window::members);
        members.and_then(|members| members.iter().position(|member| heads.contains(member))).unwrap_or(0)
    }

    /// Carries out sends and receives side by side: those that `next` yields, also while others are under way. `finished` is
    /// called for each that ends, with its place among those under way.
    ///
    /// # Safety
    ///
    /// As for [`Core::collective`], for each call until it has ended.
    pub(crate) unsafe fn point_to_point(
        &mut self,
        info: &CommInfo,
        mut next: impl FnMut() -> Option<Call>,
        mut finished: impl FnMut(usize),
    ) -> Result<()> {
        self.engine()?;
        let Core { engine: Some(engine), recording, sent, fabric, layout, .. } = self else {
            unreachable!("the engine was just made")
        };
        // For each call under way, its entry in the recording, and what has to be made true or false when it has ended.
        let under_way: RefCell<Vec<(trace::EntryId, Option<RawSliceMut>)>> = RefCell::default();
        let next = || {
            let call = next()?;
            let Call { op, root, count, send, recv, source, dtype, timeout, .. } = call;
            // What is received gets its number when it comes.
            sent[root] += u64::from(op == Op::Send);
            let seq = if op == Op::Send { sent[root] } else { 0 };
            let context = OpContext::new(call.descriptor(seq, 0), info).within(timeout);
            let peer = source.is_none().then_some(root as u32);
            let with_peer = Descriptor { op, root: peer, ..context.descriptor };
            let entry = recording.history.begin(with_peer.encode(), (send.len + recv.len) as u64, 0);
            under_way.borrow_mut().push((entry, (dtype == DType::Bool && op == Op::Recv).then_some(recv)));
            let (rank, world, none) = (fabric.rank(), layout.ranks, Blocks::Even(0));
            Some(Job {
                context,
                steps: steps(Algorithm::Direct, Problem { op, rank, world, root, count, sends: none, recvs: none, piece: 1 }),
                ranks: None,
                rank,
                world,
                input: send,
                output: recv,
                element: dtype.size(),
                kernel: None,
                parts: 1,
                source,
            })
        };
        let ended = |place: usize| {
            let (entry, bools) = under_way.borrow_mut().remove(place);
            recording.history.end(entry, true);
            if let Some(chunk) = bools {
                // SAFETY: the call has ended but its buffer has not been given back yet.
                unsafe { normalise_bools(chunk.ptr, chunk.len) };
            }
            finished(place);
        };
        // SAFETY: passed on.
        let result = unsafe { engine.run_together(next, ended) };
        // Those that did not end.
        for (entry, bools) in under_way.into_inner() {
            recording.history.end(entry, false);
            if let Some(chunk) = bools {
                // SAFETY: as above.
                unsafe { normalise_bools(chunk.ptr, chunk.len) };
            }
        }
        result
    }

    fn engine(&mut self) -> Result<&mut Engine> {
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                let Some(opener) = self.fabric.opener() else {
                    return Err(Error::Unsupported { what: "a message", why: "this rank is alone".to_owned() });
                };
                let mesh = Mesh::new(self.layout.ranks, opener).map_err(Error::os("preparing to wait for peers"))?;
                let engine = Engine::new(mesh, self.layout.ranks, self.patience.clone());
                let waker = engine.waker();
                self.fabric.status().cancel.attach(move || {
                    if let Err(error) = waker.wake() {
                        tracing::warn!(%error, "what waits for links gives up a little later");
                    }
                });
                engine
            }
        };
        Ok(self.engine.insert(engine))
    }

    /// This rank's place among those of its host.
    pub(crate) fn place_on_host(&self) -> usize {
        self.place().0
    }

    /// Memory with a part of `part` bytes, whole pages, for each rank of this host, mapped by all of them; `None` if they cannot share
    /// any.
    pub(crate) fn allocate(&mut self, info: &CommInfo, part: usize) -> Result<Option<Arc<Allocation>>> {
        self.seq += 1;
        let Some(window) = &mut self.window else { return Ok(None) };
        // What everybody has dropped is unmapped now.
        let mut dropped = window.heap().dropped();
        let redop = Some(ReduceOp::BitAnd);
        let descriptor = Descriptor { op: Op::Alloc, dtype: DType::U64, redop, seq: self.seq, ..Descriptor::nothing() };
        // One word more, so that there is one before the first allocation.
        dropped.push(0);
        let memory = RawSliceMut::of(&mut dropped);
        let element = size_of::<u64>();
        let call = WindowCall {
            count: memory.len / element,
            kernel: Kernel::new(DType::U64, ReduceOp::BitAnd),
            ..WindowCall::new(Op::AllReduce, memory.as_const(), memory, element)
        };
        let entry = self.recording.history.begin(descriptor.encode(), 0, 0);
        // SAFETY: `dropped` is borrowed for the call.
        let agreed = unsafe { window.run(&OpContext::new(descriptor, info), &call) };
        self.recording.history.end(entry, agreed.is_ok());
        agreed?;
        window.heap().forget(&dropped);
        let segment = self.share(info, descriptor, part)?;
        let registered = segment.map(|segment| Arc::new(Allocation { segment, part }));
        if let (Some(window), Some(registered)) = (&mut self.window, &registered) {
            window.heap().add(registered.clone());
        }
        Ok(registered)
    }

    /// A segment with a part for each rank of this host, which their leader makes; `None` if one of them cannot have it.
    fn share(&mut self, info: &CommInfo, descriptor: Descriptor, part: usize) -> Result<Option<Arc<Segment>>> {
        let (Some(host), Some(window)) = (self.fabric.host().cloned(), &mut self.window) else { return Ok(None) };
        let (place, ranks) = (window.rank(), window.members().len());
        let context = OpContext::new(descriptor, info);
        let deadline = Instant::now() + info.timeout;
        let made = (place == 0).then(|| host.create(ranks * part)).transpose();
        let mine = made.inspect_err(|error| tracing::warn!(%error, "no shared memory")).ok().flatten();
        let lent = mine.as_ref().map_or(0, |segment| host.lend(segment));
        let shared = (|| {
            let id = window.tell(&context, [lent.into(), 0, 0, 0, 0, 0])?[0][0];
            let found = match u32::try_from(id) {
                Ok(0) | Err(_) => None,
                Ok(_) if place == 0 => mine,
                Ok(id) => window.fetch(&context, 0, id)?.inspect_err(|error| tracing::warn!(%error, "no shared memory")).ok(),
            };
            let mine = place * part..(place + 1) * part;
            let found = found.filter(|segment| segment.len() == ranks * part);
            let found = match found.map(|segment| segment.reserve_by(mine, deadline).map(|()| segment)).transpose() {
                // It is this rank that the others wait for.
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    let (Descriptor { op, seq, .. }, CommInfo { rank, timeout, .. }) = (descriptor, info);
                    let what =
                        format!("rank {rank} has not reserved {part} bytes of shared memory within its deadline of {timeout:?}");
                    let advice = "allocate less, or set a longer timeout";
                    return Err(Error::os(format!("{op} seq={seq}: {what}; {advice}"))(error));
                }
                found => found.inspect_err(|error| tracing::warn!(%error, "no shared memory")).ok().flatten(),
            };
            let have = window.tell(&context, [found.is_some().into(), 0, 0, 0, 0, 0])?;
            Ok(found.filter(|_| have.iter().all(|notes| notes[0] != 0)))
        })();
        if lent != 0 {
            host.withdraw(lent);
        }
        // The descriptor stays open: it takes one to make memory private that a peer may write into after a failure.
        shared
    }

    /// This rank's window, if it has one.
    pub(crate) fn window(&mut self) -> Option<&mut Window> {
        self.window.as_mut()
    }

    /// A call has panicked, and its caller may free the buffers: no message refers to them any more.
    pub(crate) fn forget_buffers(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.forget_messages();
        }
    }

    #[cfg(test)]
    pub(crate) fn refers_to_buffers(&self) -> bool {
        self.engine.as_ref().is_some_and(Engine::has_messages)
    }

    /// Tells the others that this rank takes part no more.
    pub(crate) fn part(&mut self, failed: bool) {
        self.fabric.status().last_seq.store(self.seq, Ordering::Relaxed);
        let callers = if failed { Vec::new() } else { self.fabric.peers_with_links() };
        // Some rank may have connected with this one, which has sent and received nothing so far.
        let (seq, engine) = (self.seq, if callers.is_empty() { self.engine.as_mut() } else { self.engine().ok() });
        if let Some(engine) = engine {
            engine.part(seq, failed, &callers);
        }
        if let Some(window) = &mut self.window {
            window.part(self.seq, failed);
        }
    }
}

fn kernel(call: &Call) -> Option<Kernel> {
    call.redop.and_then(|redop| Kernel::new(call.dtype, redop))
}

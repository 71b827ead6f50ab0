//! The calls that CUDA graphs have captured. A launch of a graph does not call kolo, so the progress
//! thread looks whether the stream of a replay has arrived at such a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::call::{DeviceCall, device_call};
use super::handshake::{Given, Handshake};
use crate::call::Call;
use crate::cuda::device::{Device, StreamId};
use crate::error::Result;

/// The graphs that have captured calls of a communicator.
#[derive(Default)]
pub(crate) struct Graphs {
    all: Mutex<Vec<Graph>>,
    /// Whether there are any. It is looked at before the lock is taken.
    is_any: AtomicBool,
}

struct Graph {
    device: Arc<dyn Device>,
    capture: u64,
    /// Calls in the order in which they were captured: a collective, or messages side by side. Each
    /// replay runs them in this order, also if parts of the graph run side by side. So all ranks run
    /// them in the same order.
    steps: Vec<Vec<Call>>,
    /// The step that runs next.
    next: usize,
    /// Set when the graph and all that was instantiated from it have been destroyed.
    is_gone: Arc<AtomicBool>,
}

impl Graphs {
    /// Whether there are any.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    /// Adds calls that the graph captures to which the work of a stream goes.
    pub(super) fn add(&self, device: &Arc<dyn Device>, (stream, capture): (StreamId, u64), calls: Vec<Call>) -> Result<()> {
        let is_it = |graph: &Graph| graph.capture == capture && graph.device.id() == device.id();
        let is_gone = Arc::<AtomicBool>::default();
        // Not locked during a driver call, which may wait for a replay that needs the lock.
        if !self.all.lock().iter().any(is_it) {
            device.watch_graph(stream, is_gone.clone())?;
        }
        let mut all = self.all.lock();
        match all.iter_mut().find(|graph| is_it(graph)) {
            Some(graph) => graph.steps.push(calls),
            None => all.push(Graph { device: device.clone(), capture, steps: vec![calls], next: 0, is_gone }),
        }
        self.is_any.store(true, Ordering::Release);
        Ok(())
    }

    /// Begins the replay that has arrived, and returns its calls, which must be run. Forgets graphs that
    /// are gone.
    pub(super) fn next_replay(&self) -> Option<Vec<Call>> {
        if !self.is_any() {
            return None;
        }
        let mut all = self.all.lock();
        let gone: Vec<Graph> = all.extract_if(.., |graph| graph.is_gone.load(Ordering::Acquire)).collect();
        let arrived = all.iter_mut().find_map(Graph::next_replay);
        drop(all);
        if !gone.is_empty() {
            gone.iter().for_each(Graph::take_back);
            drop(gone);
            // Not before: what they had is used again by the graph of whoever sees that there is none.
            let all = self.all.lock();
            self.is_any.store(!all.is_empty(), Ordering::Release);
        }
        arrived
    }

    /// The communicator has ended. Its graphs can still be replayed: then their calls move nothing
    /// between ranks, and streams that wait for them continue.
    pub(super) fn abandon(&self) {
        let all = std::mem::take(&mut *self.all.lock());
        self.is_any.store(false, Ordering::Release);
        // No kernel is told to move anything more, before peers may free what it would move.
        all.iter().flat_map(Graph::handshakes).for_each(Handshake::release);
        abandoned::add(all);
    }
}

impl Graph {
    fn handshakes(&self) -> impl Iterator<Item = &Handshake> {
        self.steps.iter().flatten().filter_map(|call| device_call(call)?.handshake())
    }

    fn next_replay(&mut self) -> Option<Vec<Call>> {
        let step = &self.steps[self.next];
        let handshakes = || step.iter().filter_map(|call| device_call(call)?.handshake());
        // Messages side by side all arrive before the stream waits for one of them.
        if !handshakes().all(Handshake::has_replay) {
            return None;
        }
        handshakes().for_each(Handshake::begin_replay);
        // A communicator that is closed meanwhile waits for the end of the replay.
        step.iter().filter_map(device_call).for_each(DeviceCall::set_unattended);
        self.next = (self.next + 1) % self.steps.len();
        Some(step.clone())
    }

    /// No stream comes to the calls any more.
    fn take_back(&self) {
        self.handshakes().filter(|handshake| handshake.is_given(Given::All)).for_each(Handshake::take_back);
    }
}

/// The graphs of communicators that have ended. A thread lets their replays continue. It makes no
/// driver call, because such a call may wait for their streams.
mod abandoned {
    use std::sync::atomic::Ordering;

    use parking_lot::Mutex;

    use super::Graph;
    use crate::device::handshake::Handshake;
    use crate::timeouts::STREAM_LOOK;

    #[derive(Default)]
    struct List {
        graphs: Vec<Graph>,
        has_thread: bool,
    }

    static LIST: Mutex<List> = Mutex::new(List { graphs: Vec::new(), has_thread: false });

    pub(super) fn add(graphs: Vec<Graph>) {
        let is_own = |graph: &Graph| graph.device.held().is_own();
        if !graphs.iter().any(is_own) {
            // None, or those of a forked child's parent.
            return;
        }
        let mut list = LIST.lock();
        list.graphs.extend(graphs.into_iter().filter(is_own));
        if !list.has_thread {
            match std::thread::Builder::new().name("kolo-cuda-graph".to_owned()).spawn(work) {
                Ok(_) => list.has_thread = true,
                // The next one tries again.
                Err(error) => crate::log::warn!(%error, "replays of graphs whose communicator has ended do not continue"),
            }
        }
    }

    fn work() {
        loop {
            let mut list = LIST.lock();
            list.graphs.iter().flat_map(Graph::handshakes).for_each(Handshake::release_replay);
            let gone: Vec<Graph> = list.graphs.extract_if(.., |graph| graph.is_gone.load(Ordering::Acquire)).collect();
            list.has_thread = !list.graphs.is_empty();
            let has_more = list.has_thread;
            drop(list);
            gone.iter().for_each(Graph::take_back);
            drop(gone);
            if !has_more {
                return;
            }
            std::thread::sleep(STREAM_LOOK);
        }
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        self.abandon();
    }
}

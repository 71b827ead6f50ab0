//! The state with which a communicator runs its operations, one at a time, on whichever thread
//! holds it.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, OnceLock};

use super::inquiry::Inquiry;
use super::repeated::LastCalls;
use crate::call::Call;
use crate::config::{SharedSettings, Transport};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::network::fabric::Fabric;
use crate::network::topology::HostOrder;
use crate::schedule::Algorithm;
use crate::schedule::order::{ORDERED, PairCosts};
use crate::schedule::select::{Choice, Layout, has_window, select};
use crate::shm::Window;
use crate::sys::{Patience, Waker};
use crate::trace::Recording;
use crate::transport::Mesh;
use crate::types::{Op, Rank};

pub(crate) struct Core {
    pub(super) fabric: Fabric,
    pub(super) recording: Arc<Recording>,
    pub(super) settings: SharedSettings,
    pub(super) layout: Layout,
    /// The lowest rank of each host, in the order in which schedules visit hosts.
    pub(super) first_on_host: Arc<[Rank]>,
    /// Where each rack starts in that order, and where the last one ends. Empty without racks.
    pub(super) racks: Arc<[usize]>,
    /// All ranks in the order of their hosts, if that is another one than theirs.
    pub(super) order: Option<Arc<[Rank]>>,
    /// When the ranks ask each other next whether a link has changed, if the order follows what was measured.
    pub(super) inquiry: Option<Inquiry>,
    /// The last choice, and for what it was made.
    chosen: Option<(Op, u64, Choice)>,
    /// The last short calls, which need not be checked again.
    pub(super) last_calls: LastCalls,
    pub(super) patience: Arc<Patience>,
    /// Made when the first message is needed.
    pub(super) engine: Option<Engine>,
    /// Wakes the thread that sleeps on links; set when the engine is made.
    pub(crate) links: Arc<OnceLock<Arc<Waker>>>,
    /// The memory that the ranks of this host share, if they can.
    pub(super) window: Option<Window>,
    /// The sequence number of the last collective.
    pub(super) seq: u64,
    /// Messages sent to each peer so far.
    pub(super) sent: Vec<u64>,
    /// A host's partial result between shared memory and messages; kept for its memory.
    pub(super) partial: Vec<u64>,
}

impl Core {
    /// The ranks of `fabric`, not connected yet.
    pub(crate) fn new(fabric: Fabric, settings: SharedSettings) -> Core {
        let world = fabric.world();
        let neighbours = fabric.neighbours();
        let hosts = fabric.hosts();
        let per_host = |host: usize| hosts.iter().filter(|&&other| other == host).count();
        let uses_memory = settings.transport != Transport::Tcp;
        let first: Vec<Rank> = (0..world).filter(|&rank| hosts[rank] == rank).collect();
        let paths: Vec<&str> = first.iter().map(|&rank| fabric.topology(rank)).collect();
        let by_rack = HostOrder::of(&paths);
        let layout = Layout {
            ranks: world,
            hosts: first.len(),
            fewest_per_host: first.iter().map(|&host| per_host(host)).min().unwrap_or(1),
            racks: by_rack.as_ref().map_or(1, |order| order.racks().count()),
            fewest_per_rack: by_rack.as_ref().map_or(first.len(), HostOrder::fewest_per_rack),
            windows: uses_memory && (0..world).any(|rank| hosts[rank] != rank),
        };
        let visited = by_rack.as_ref().map(|by_rack| by_rack.hosts.iter().map(|&host| first[host]).collect());
        let patience = Arc::new(Patience::new(neighbours.len()));
        let mut core = Core {
            first_on_host: first.into(),
            racks: by_rack.map_or_else(Vec::new, |by_rack| by_rack.racks).into(),
            order: None,
            inquiry: None,
            recording: fabric.recording().clone(),
            fabric,
            settings,
            layout,
            chosen: None,
            last_calls: LastCalls::default(),
            patience,
            engine: None,
            links: Arc::default(),
            window: None,
            seq: 0,
            sent: vec![0; world],
            partial: Vec::new(),
        };
        match visited {
            Some(first_on_host) => core.visit(first_on_host),
            None => core.follow_measured(),
        }
        core
    }

    /// Visits hosts in the order that is best by what the job has measured between them, if it has.
    pub(super) fn follow_measured(&mut self) {
        let Some((between, hosts)) = self.fabric.costs_between(&self.first_on_host) else { return };
        let costs = between.costs.among(&hosts);
        let order = between.order(&hosts, &costs);
        self.settings.cost_model.model = costs.model(between.model, between.usual, &order);
        let first: Vec<Rank> = order.iter().map(|&host| self.first_on_host[host]).collect();
        let inquiry = Inquiry::new(costs.link_of_ring(&order), between.is_slower);
        self.visit(first);
        self.chosen = None;
        self.inquiry = ORDERED.contains(&hosts.len()).then_some(inquiry);
    }

    /// Visits hosts in the order that is best by these costs between them. `first` are their lowest ranks. Returns
    /// whether a link carries clearly less than at the start.
    pub(super) fn follow(&mut self, first: Vec<Rank>, costs: PairCosts) -> bool {
        let inquiry = self.inquiry.take();
        self.fabric.renew_costs(&first, costs);
        self.visit(first);
        self.follow_measured();
        self.inquiry = inquiry;
        self.fabric.costs_between(&[]).is_some_and(|(between, _)| between.is_slower)
    }

    /// Has schedules visit hosts in this order.
    fn visit(&mut self, first_on_host: Vec<Rank>) {
        let hosts = self.fabric.hosts();
        let ranks = first_on_host.iter().flat_map(|&host| (0..hosts.len()).filter(move |&rank| hosts[rank] == host));
        self.order = Some(ranks.collect::<Arc<[Rank]>>()).filter(|order| !order.is_sorted());
        self.first_on_host = first_on_host.into();
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.recording
    }

    pub(crate) fn settings(&self) -> SharedSettings {
        self.settings
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// This rank's window, if it has one.
    pub(crate) fn window(&mut self) -> Option<&mut Window> {
        self.window.as_mut()
    }

    /// This rank's index among the ranks of its host that share memory, and how many they are.
    pub(crate) fn place_on_host(&self) -> (usize, usize) {
        self.window.as_ref().map_or((0, 1), |window| (window.rank(), window.members().len()))
    }

    /// How many more messages this rank has sent than received; below zero, it wraps. The sum over all ranks is
    /// the number of messages in flight.
    pub(super) fn messages_in_flight(&self) -> u64 {
        let received = |engine: &Engine| (0..self.layout.ranks).map(|peer| engine.received_from(peer)).sum();
        self.sent.iter().sum::<u64>().wrapping_sub(self.engine.as_ref().map_or(0, received))
    }

    /// The sequence number of the next collective.
    #[inline]
    pub(crate) fn next_seq(&self) -> u64 {
        self.seq + 1
    }

    /// The sequence number that a call gets if it is the next to run; 0 for a receive from any
    /// rank.
    #[cold]
    pub(crate) fn next_number(&self, call: &Call) -> u64 {
        match call.op {
            Op::Send => self.sent[call.root] + 1,
            Op::Recv if call.source.is_some() => 0,
            Op::Recv => self.engine.as_ref().map_or(0, |engine| engine.received_from(call.root)) + 1,
            _ => self.next_seq(),
        }
    }

    /// Returns the path and the algorithm of a collective of `bytes` bytes. Programs repeat their
    /// calls, so the last choice is kept: the costs take a fifth of the instructions of a short
    /// operation over links.
    #[inline]
    pub(crate) fn choose(&mut self, op: Op, bytes: u64) -> Choice {
        if let Some(choice) = without_costs(&self.settings, self.layout, op) {
            return choice;
        }
        match self.chosen {
            Some((for_op, for_bytes, choice)) if (for_op, for_bytes) == (op, bytes) => choice,
            _ => {
                let choice = by_costs(&self.settings, self.layout, op, bytes);
                self.chosen = Some((op, bytes, choice));
                choice
            }
        }
    }

    /// Makes the next choice anew: the costs have changed.
    pub(super) fn forget_choice(&mut self) {
        self.chosen = None;
    }

    /// The engine, made with its first use.
    pub(crate) fn engine(&mut self) -> Result<&mut Engine> {
        if self.engine.is_none() {
            let opener = self.fabric.opener(self.settings.copy_mode);
            let mesh = Mesh::new(self.layout.ranks, opener).map_err(Error::os("preparing to wait for peers"))?;
            let mesh = mesh.with_loopback(self.fabric.rank()).listed_in(self.fabric.recording().links.clone());
            let engine = Engine::new(mesh, self.layout.ranks, self.patience.clone());
            let waker = engine.waker();
            self.engine = Some(engine);
            _ = self.links.set(waker.clone());
            // See `Queue::push`.
            fence(Ordering::SeqCst);
            self.fabric.status().cancel.attach(move || {
                if let Err(error) = waker.wake() {
                    crate::log::warn!(%error, "the thread that waits for links was not woken; it sees the cancellation later");
                }
            });
        }
        Ok(self.engine.as_mut().expect("the engine was just made"))
    }

    /// Drops all messages that refer to buffers: a call has panicked, and its caller may free them.
    pub(crate) fn forget_buffers(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.forget_messages();
        }
    }

    #[cfg(test)]
    pub(crate) fn refers_to_buffers(&self) -> bool {
        self.engine.as_ref().is_some_and(Engine::has_messages)
    }

    /// Tells the other ranks that this one takes no further part.
    pub(crate) fn leave(&mut self, failed: bool) {
        self.fabric.status().last_seq.store(self.seq, Ordering::Relaxed);
        let callers = if failed { Vec::new() } else { self.fabric.peers_with_links() };
        // A peer may have connected to this rank, which has neither sent nor received a message
        // yet.
        let (seq, engine) = (self.seq, if callers.is_empty() { self.engine.as_mut() } else { self.engine().ok() });
        if let Some(engine) = engine {
            if failed {
                // Of messages that were interrupted.
                engine.forget_messages();
            }
            engine.leave(seq, failed, &callers);
        }
        if let Some(window) = &mut self.window {
            window.leave(self.seq, failed);
        }
        if failed {
            self.fabric.refuse_connections();
        }
    }
}

/// As [`Core::choose`], without the core.
#[inline]
pub(crate) fn choose(settings: &SharedSettings, layout: Layout, op: Op, bytes: u64) -> Choice {
    without_costs(settings, layout, op).unwrap_or_else(|| by_costs(settings, layout, op, bytes))
}

/// The choice where the costs need not be computed: on one host shared memory is always the
/// fastest.
#[inline]
fn without_costs(settings: &SharedSettings, layout: Layout, op: Op) -> Option<Choice> {
    let one_window = layout.windows && layout.hosts == 1;
    (one_window && has_window(op) && (settings.algorithm.is_none() || settings.reproducible))
        .then_some(Choice { algorithm: Algorithm::Window, between: None })
}

#[inline(never)]
fn by_costs(settings: &SharedSettings, layout: Layout, op: Op, bytes: u64) -> Choice {
    // These two reduce in the order of ranks.
    let forced = if settings.reproducible && op.reduces() { Some(Algorithm::Direct) } else { settings.algorithm };
    select(op, bytes, layout, &settings.cost_model.model, forced)
}

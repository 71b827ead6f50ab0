//! The ranks and the events of a simulation.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kolo::Rank;
use kolo::plan::Move;

use super::network::Network;
use super::placement::Placement;
use super::programme::Programme;
use super::scenario::{ELEMENT, Method, Scenario, Simulated};

/// How far a rank has come in a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Before,
    Messages,
    After,
}

/// A message that a step receives.
#[derive(Clone, Copy)]
struct Incoming {
    channel: usize,
    forward: Option<usize>,
    left: u64,
    reduces: bool,
    has_begun: bool,
}

struct Simulant {
    stage: Stage,
    calls: usize,
    moves: Option<Box<dyn Iterator<Item = Move>>>,
    incoming: Option<Incoming>,
    /// When its processor has finished everything so far.
    clock: f64,
    origin: Rank,
    is_done: bool,
}

/// The ranks of a host that have come to a phase in shared memory.
#[derive(Clone, Copy, Default)]
struct Gathered {
    ranks: usize,
    latest: f64,
    origin: Rank,
}

#[derive(Clone, Copy)]
enum Event {
    Starts(Rank),
    /// Bytes of a channel may be sent.
    Ready {
        channel: usize,
        bytes: u64,
        origin: Rank,
    },
    /// A port has sent what it sent.
    Free {
        port: usize,
    },
    /// The head of some bytes reaches a port. `tail` is the earliest time of their end there.
    Passes {
        channel: usize,
        bytes: u64,
        hop: usize,
        tail: f64,
    },
    Arrives {
        channel: usize,
        bytes: u64,
    },
    /// The ranks of a host have finished a phase in shared memory.
    Synchronised {
        host: usize,
        origin: Rank,
    },
}

/// An event in the order of time, then of creation.
struct Entry(f64, u64, Event);

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// A simulation of the first `period` ranks. A peer beyond them does what the rank does that is as
/// far into its own period.
pub(super) struct World<'a> {
    programme: &'a Programme,
    scenario: &'a Scenario,
    placement: &'a Placement,
    network: Network<'a>,
    ranks: Vec<Simulant>,
    hosts: Vec<Gathered>,
    /// When each shared processor is free.
    processors: Vec<f64>,
    /// The most bytes that move at once.
    piece: u64,
    events: BinaryHeap<Reverse<Entry>>,
    created: u64,
    messages: u64,
    /// The last rank to finish so far: when, and on whose start it depended.
    last: (f64, Rank),
}

impl<'a> World<'a> {
    pub(super) fn new(
        programme: &'a Programme,
        scenario: &'a Scenario,
        placement: &'a Placement,
        period: usize,
        piece: u64,
        late: Vec<f64>,
    ) -> World<'a> {
        let Scenario { model, burst, oversubscription, rack_latency, .. } = *scenario;
        let links = scenario.links.as_ref().map(|links| links.placed(programme.moves.op, programme.moves.algorithm));
        let network = Network::new(placement, period, model, burst, oversubscription, rack_latency, links);
        let simulant = |rank: Rank| Simulant {
            stage: Stage::Before,
            calls: scenario.calls.max(1),
            moves: None,
            incoming: None,
            clock: 0.0,
            origin: rank,
            is_done: false,
        };
        let mut world = World {
            programme,
            scenario,
            placement,
            network,
            ranks: (0..period).map(simulant).collect(),
            hosts: vec![Gathered::default(); placement.host_of(period - 1) + 1],
            processors: vec![0.0; scenario.processors.unwrap_or(0)],
            piece,
            events: BinaryHeap::new(),
            created: 0,
            messages: 0,
            last: (0.0, 0),
        };
        for (rank, late) in late.into_iter().enumerate() {
            world.plan(late, Event::Starts(rank));
        }
        world
    }

    pub(super) fn run(mut self, method: Method) -> Simulated {
        while let Some(Reverse(Entry(now, _, event))) = self.events.pop() {
            self.happen(now, event);
        }
        debug_assert!(self.ranks.iter().all(|rank| rank.is_done), "a rank waits for ever");
        let calls = self.scenario.calls.max(1) as f64;
        let busiest_bytes = self.network.busiest() as f64 / calls;
        Simulated { seconds: self.last.0 / calls, busiest_bytes, critical: self.last.1, messages: self.messages, method }
    }

    fn plan(&mut self, at: f64, event: Event) {
        self.created += 1;
        self.events.push(Reverse(Entry(at, self.created, event)));
    }

    fn happen(&mut self, now: f64, event: Event) {
        match event {
            Event::Starts(rank) => {
                self.ranks[rank].clock = now;
                self.enter(rank, Stage::Before, now);
            }
            Event::Ready { channel, bytes, origin } => {
                let through = &mut self.network.channels[channel];
                through.ready += bytes;
                through.origin = origin;
                if !std::mem::replace(&mut through.is_queued, true) {
                    let port = through.out;
                    self.network.ports[port].queue.push_back(channel);
                    self.serve(port, now);
                }
            }
            Event::Free { port } => {
                self.network.ports[port].is_busy = false;
                self.serve(port, now);
            }
            Event::Passes { channel, bytes, hop, tail } => self.pass(channel, bytes, hop, now, tail),
            Event::Arrives { channel, bytes } => {
                let through = &mut self.network.channels[channel];
                through.available += bytes;
                let (rank, origin) = (through.to, through.origin);
                let waits = self.ranks[rank].incoming.is_some_and(|incoming| incoming.channel == channel);
                if waits {
                    let simulant = &mut self.ranks[rank];
                    if now > simulant.clock {
                        simulant.origin = origin;
                    }
                    self.advance(rank, now);
                }
            }
            Event::Synchronised { host, origin } => {
                let first = self.placement.first(host);
                for rank in first..first + self.placement.on_host(host) {
                    self.ranks[rank].origin = origin;
                    self.ranks[rank].clock = now;
                    self.leave(rank, now);
                }
            }
        }
    }

    /// Sends the next piece through a port, if it is idle.
    fn serve(&mut self, port: usize, now: f64) {
        if self.network.ports[port].is_busy {
            return;
        }
        let Some(channel) = self.network.ports[port].queue.pop_front() else { return };
        let through = &mut self.network.channels[channel];
        let bytes = through.ready.min(self.piece);
        through.ready -= bytes;
        let (hop, wire) = (through.hops[0], through.wire);
        through.is_queued = through.ready > 0;
        let goes_on = through.is_queued;
        let out = &mut self.network.ports[port];
        let (begin, end) = out.pass(now, bytes);
        out.is_busy = true;
        if goes_on {
            out.queue.push_back(channel);
        }
        self.plan(end, Event::Free { port });
        match hop {
            Some((_, away)) => self.plan(begin + away, Event::Passes { channel, bytes, hop: 0, tail: end + away }),
            None => self.plan(end + wire, Event::Arrives { channel, bytes }),
        }
    }

    /// Passes a further port: the head may go on before the tail has come.
    fn pass(&mut self, channel: usize, bytes: u64, hop: usize, now: f64, tail: f64) {
        let hops = self.network.channels[channel].hops;
        let Some((port, _)) = hops[hop] else { return };
        let (begin, end) = self.network.ports[port].pass(now, bytes);
        let end = end.max(tail);
        match hops.get(hop + 1).copied().flatten() {
            Some((_, away)) => self.plan(begin + away, Event::Passes { channel, bytes, hop: hop + 1, tail: end + away }),
            None => self.plan(end, Event::Arrives { channel, bytes }),
        }
    }

    /// Has a rank's processor work from `now` on, or when it is free. Returns when it has finished.
    fn work(&mut self, rank: Rank, now: f64, seconds: f64) -> f64 {
        let mut begin = now.max(self.ranks[rank].clock);
        if let Some(processor) = self.processors.iter_mut().min_by(|a, b| a.total_cmp(b)).filter(|_| seconds > 0.0) {
            begin = begin.max(*processor);
            *processor = begin + seconds;
        }
        self.ranks[rank].clock = begin + seconds;
        begin + seconds
    }

    /// Enters a stage of a call, or skips it if the programme does not have it.
    fn enter(&mut self, rank: Rank, stage: Stage, now: f64) {
        self.ranks[rank].stage = stage;
        let window = match (self.programme.windows, stage) {
            (Some([before, _]), Stage::Before) => before,
            (Some([_, after]), Stage::After) => after,
            _ => None,
        };
        if let Some(seconds) = window {
            let host = self.placement.host_of(rank);
            let origin = self.ranks[rank].origin;
            let gathered = &mut self.hosts[host];
            gathered.ranks += 1;
            if gathered.ranks == 1 || now > gathered.latest {
                (gathered.latest, gathered.origin) = (now, origin);
            }
            if gathered.ranks == self.placement.on_host(host) {
                let Gathered { latest, origin, .. } = std::mem::take(gathered);
                self.plan(latest + seconds, Event::Synchronised { host, origin });
            }
            return;
        }
        if stage != Stage::Messages {
            return self.leave(rank, now);
        }
        self.ranks[rank].moves = match self.programme.windows {
            None => Some(self.programme.moves(0, rank)),
            Some(_) => {
                let host = self.placement.host_of(rank);
                let column = rank - self.placement.first(host);
                (column < self.programme.columns).then(|| self.programme.moves(column, host))
            }
        };
        self.advance(rank, now);
    }

    /// Goes on to the next stage, or to the next call.
    fn leave(&mut self, rank: Rank, now: f64) {
        let simulant = &mut self.ranks[rank];
        match simulant.stage {
            Stage::Before => self.enter(rank, Stage::Messages, now),
            Stage::Messages => self.enter(rank, Stage::After, now),
            Stage::After if simulant.calls > 1 => {
                simulant.calls -= 1;
                // A call begins by an event, so that many calls need no deep stack.
                let at = simulant.clock.max(now);
                self.plan(at, Event::Starts(rank));
            }
            Stage::After => {
                simulant.is_done = true;
                let at = simulant.clock.max(now);
                if at >= self.last.0 {
                    self.last = (at, simulant.origin);
                }
            }
        }
    }

    /// Returns the channel between this rank and a member of its schedule.
    fn channel(&mut self, rank: Rank, member: usize, is_from: bool) -> usize {
        let peer = match self.programme.windows {
            None => member,
            Some(_) => self.placement.first(member) + rank - self.placement.first(self.placement.host_of(rank)),
        };
        if is_from { self.network.channel(peer, rank) } else { self.network.channel(rank, peer) }
    }

    fn overhead(&self, channel: usize) -> f64 {
        let model = &self.scenario.model;
        if self.network.channels[channel].is_local { model.local.overhead } else { model.network.overhead }
    }

    /// Takes a rank's steps as far as what has arrived allows.
    fn advance(&mut self, rank: Rank, now: f64) {
        loop {
            if let Some(incoming) = self.ranks[rank].incoming {
                match self.receive(rank, incoming, now) {
                    Some(left) => self.ranks[rank].incoming = Some(left).filter(|left| left.left > 0),
                    None => return,
                }
                continue;
            }
            let Some(next) = self.ranks[rank].moves.as_mut().and_then(Iterator::next) else {
                self.ranks[rank].moves = None;
                let at = self.ranks[rank].clock.max(now);
                return self.leave(rank, at);
            };
            self.begin(rank, next, now);
        }
    }

    fn begin(&mut self, rank: Rank, next: Move, now: f64) {
        // A message without elements has a header.
        let bytes = |len: usize| (len as u64 * ELEMENT).max(1);
        let (from, to, len, reduces) = match next {
            Move::Send { to, len } => {
                let channel = self.channel(rank, to, false);
                let at = self.work(rank, now, self.overhead(channel));
                self.messages += 1;
                let origin = self.ranks[rank].origin;
                return self.plan(at, Event::Ready { channel, bytes: bytes(len), origin });
            }
            Move::Fold { len } => {
                let others = (self.programme.moves.world - 1) as f64;
                let seconds = others * (len as u64 * ELEMENT) as f64 * self.scenario.model.reduce;
                self.work(rank, now, seconds);
                return;
            }
            Move::Receive { from, to, len, reduces } => (from, to, len, reduces),
        };
        let channel = self.channel(rank, from, true);
        let forward = to.map(|to| self.channel(rank, to, false));
        self.messages += u64::from(forward.is_some());
        self.ranks[rank].incoming = Some(Incoming { channel, forward, left: bytes(len), reduces, has_begun: false });
    }

    /// Receives a piece of a message, reduces and forwards it. Returns the rest of the message;
    /// `None` if nothing has arrived.
    fn receive(&mut self, rank: Rank, incoming: Incoming, now: f64) -> Option<Incoming> {
        let Incoming { channel, forward, left, reduces, has_begun } = incoming;
        let bytes = self.network.channels[channel].available.min(left).min(self.piece);
        if bytes == 0 {
            return None;
        }
        self.network.channels[channel].available -= bytes;
        let reduction = if reduces { bytes as f64 * self.scenario.model.reduce } else { 0.0 };
        let begun = if has_begun { 0.0 } else { self.overhead(channel) + forward.map_or(0.0, |to| self.overhead(to)) };
        let at = self.work(rank, now, begun + reduction);
        if let Some(channel) = forward {
            let origin = self.ranks[rank].origin;
            self.plan(at, Event::Ready { channel, bytes, origin });
        }
        Some(Incoming { left: left - bytes, has_begun: true, ..incoming })
    }
}

//! Interfaces, uplinks and the channels through them.

use std::collections::{HashMap, VecDeque};

use kolo::Rank;
use kolo::plan::{CostModel, LinkCost};

use super::placement::Placement;

/// What bytes pass one after the other: a host's interface in one direction, a rack's uplink in one
/// direction, or the copying of a rank to its neighbours.
#[derive(Default)]
pub(super) struct Port {
    per_byte: f64,
    /// Seconds of bytes that pass at once after a pause.
    burst: f64,
    /// When all bytes so far have passed at the port's rate.
    free: f64,
    /// Channels that have bytes to send, in turns.
    pub(super) queue: VecDeque<usize>,
    pub(super) is_busy: bool,
    pub(super) bytes: u64,
}

impl Port {
    fn new(per_byte: f64, burst: f64) -> Port {
        Port { per_byte, burst: burst * per_byte, ..Port::default() }
    }

    /// Passes bytes that come at `now`. Returns when they begin and end.
    pub(super) fn pass(&mut self, now: f64, bytes: u64) -> (f64, f64) {
        let begin = now.max(self.free - self.burst);
        self.free = self.free.max(now) + bytes as f64 * self.per_byte;
        self.bytes += bytes;
        (begin, begin.max(self.free - self.burst))
    }
}

/// The ordered bytes from one rank to another.
pub(super) struct Channel {
    pub(super) to: Rank,
    pub(super) is_local: bool,
    /// Where its bytes leave the sender.
    pub(super) out: usize,
    /// The further ports on its way, with the seconds to the head of each.
    pub(super) hops: [Option<(usize, f64)>; 3],
    /// Seconds on the way if there are no further ports.
    pub(super) wire: f64,
    /// Bytes that may be sent.
    pub(super) ready: u64,
    pub(super) is_queued: bool,
    /// Bytes that have arrived, and that no step has received.
    pub(super) available: u64,
    /// The rank on whose start the last bytes depended.
    pub(super) origin: Rank,
}

pub(super) struct Network<'a> {
    placement: &'a Placement,
    period: usize,
    model: CostModel,
    rack_latency: f64,
    pub(super) ports: Vec<Port>,
    pub(super) channels: Vec<Channel>,
    /// Channels by receiver, and by the distance from the sender.
    found: HashMap<(u32, u32), usize>,
    /// The numbers of hosts and racks that are simulated.
    hosts: usize,
    racks: usize,
    /// What messages between two hosts cost, by both, if that differs.
    links: Option<Vec<Vec<LinkCost>>>,
}

impl<'a> Network<'a> {
    pub(super) fn new(
        placement: &'a Placement,
        period: usize,
        model: CostModel,
        burst: f64,
        oversubscription: f64,
        rack_latency: f64,
        links: Option<Vec<Vec<LinkCost>>>,
    ) -> Network<'a> {
        let hosts = placement.host_of(period - 1) + 1;
        let racks = placement.rack_of(hosts - 1) + 1;
        // Plots have other numbers of hosts.
        let links = links.filter(|links| links.len() == hosts);
        // An interface carries what its fastest link does.
        let fastest = |host: usize| {
            let row = |links: &Vec<Vec<LinkCost>>| {
                let others = (0..hosts).filter(|&other| other != host).map(|other| links[host][other].per_byte);
                others.fold(f64::INFINITY, f64::min)
            };
            links.as_ref().filter(|_| hosts > 1).map_or(model.network.per_byte, row)
        };
        let interface = |port: usize| Port::new(fastest(port % hosts), burst);
        let uplink =
            |rack: usize| Port::new(model.network.per_byte * oversubscription / placement.in_rack(rack % racks) as f64, 0.0);
        let copies = |_| Port::new(model.local.per_byte, 0.0);
        let interfaces = (0..2 * hosts).map(interface);
        let between = links.iter().flatten().flatten().map(|link| Port::new(link.per_byte, burst));
        let ports = interfaces.chain((0..2 * racks).map(uplink)).chain((0..period).map(copies)).chain(between).collect();
        Network {
            placement,
            period,
            model,
            rack_latency,
            ports,
            channels: Vec::new(),
            found: HashMap::new(),
            hosts,
            racks,
            links,
        }
    }

    /// Returns the channel to a receiver that is simulated from a sender, or from a simulated sender
    /// to a receiver: only their distance and the receiver's place in the period count.
    pub(super) fn channel(&mut self, from: Rank, to: Rank) -> usize {
        let Placement { ranks, .. } = *self.placement;
        let key = ((to % self.period) as u32, ((to + ranks - from) % ranks) as u32);
        if let Some(&channel) = self.found.get(&key) {
            return channel;
        }
        let [from_host, to_host] = [from, to].map(|rank| self.placement.host_of(rank));
        let [from_rack, to_rack] = [from_host, to_host].map(|host| self.placement.rack_of(host));
        let [sender, receiver] = [from, to].map(|rank| rank % self.period);
        let [out_host, in_host] = [sender, receiver].map(|rank| self.placement.host_of(rank));
        let is_local = from_host == to_host;
        // A message of no bytes takes the latency, which contains the processor time at both ends.
        let cost = if is_local { self.model.local } else { self.model.network };
        let link = self.links.as_ref().filter(|_| !is_local).map(|links| links[from_host][to_host]);
        let wire = (link.map_or(cost.latency, |link| link.latency) - 2.0 * cost.overhead).max(0.0);
        let interface_in = self.hosts + in_host;
        let uplink = 2 * self.hosts;
        let between = uplink + 2 * self.racks + self.period + from_host * self.hosts + to_host;
        let hops = match (is_local, from_rack == to_rack) {
            (true, _) => [None; 3],
            (_, true) if link.is_some() => [Some((between, wire)), Some((interface_in, 0.0)), None],
            (_, true) => [Some((interface_in, wire)), None, None],
            _ => [
                Some((uplink + from_rack % self.racks, wire)),
                Some((uplink + self.racks + to_rack % self.racks, self.rack_latency)),
                Some((interface_in, 0.0)),
            ],
        };
        let out = if is_local { uplink + 2 * self.racks + sender } else { out_host };
        let channel =
            Channel { to: receiver, is_local, out, hops, wire, ready: 0, is_queued: false, available: 0, origin: sender };
        self.channels.push(channel);
        self.found.insert(key, self.channels.len() - 1);
        self.channels.len() - 1
    }

    /// Returns the bytes that passed the busiest interface or uplink.
    pub(super) fn busiest(&self) -> u64 {
        let shared = &self.ports[..2 * self.hosts + if self.placement.racks > 1 { 2 * self.racks } else { 0 }];
        shared.iter().map(|port| port.bytes).max().unwrap_or(0)
    }
}

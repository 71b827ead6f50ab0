//! Jobs for tests.

use std::time::Duration;

use kolo::observer::{Communicator, Link, OpSummary, Peer, Running, Snapshot};
use kolo::{DType, Op};

use super::state::State;

/// A job whose ranks have not answered, two on each host.
pub(super) fn state(ranks: usize) -> State {
    let peer = |rank: usize| Peer {
        rank,
        host: format!("node{}", rank / 2),
        pid: 4100 + rank as u32,
        address: ([10, 0, 0, rank as u8], 40_000).into(),
    };
    State::new("train", "5eed5eed5eed5eed", (0..ranks).map(peer).collect())
}

pub(super) fn snapshot(rank: usize, communicators: Vec<Communicator>) -> Snapshot {
    Snapshot { version: "0.1.0".to_owned(), pid: 4100 + rank as u32, rank, communicators, omitted: 0 }
}

/// The communicator of all ranks.
pub(super) fn comm(rank: usize, ranks: usize, begun: u64, running: Vec<Running>) -> Communicator {
    let completed = begun - running.len().min(1).min(begun as usize) as u64;
    let idle = running.is_empty().then_some(Duration::from_millis(4));
    Communicator { id: 0, rank, members: (0..ranks).collect(), begun, completed, running, idle, ..Communicator::default() }
}

pub(super) fn all_reduce(seq: u64, age: Duration) -> Running {
    let (dtype, count) = (DType::F32, 6_553_600);
    let algorithm = Some("hierarchical (ring)".to_owned());
    Running { op: Op::AllReduce, dtype, count, bytes: 4 * count, seq, root: None, algorithm, age }
}

/// What this number of operations came to.
pub(super) fn totals(begun: u64) -> Vec<OpSummary> {
    let time = Duration::from_millis(20) * begun as u32;
    vec![OpSummary { op: Op::AllReduce, begun, bytes: begun * 26_214_400, time, failed: 0 }]
}

pub(super) fn link(peer: usize, kind: &str, bytes: u64, retransmits: u64) -> Link {
    let tcp = (kind == "tcp").then_some((retransmits, Duration::from_micros(180)));
    Link { peer, kind: kind.to_owned(), sent: bytes, received: bytes - bytes / 9, lost_rails: 0, tcp, slow: None }
}

//! Takes the snapshot of this rank. The listener's thread and that of the exporter call this, while
//! operations run: it waits for no lock that an operation takes.

use std::time::Duration;

use super::snapshot::{Communicator, Failure, Link, MOST_COMMUNICATORS, OpSummary, Running, Snapshot, Wait};
use crate::failure::{CommStatus, StatusBoard};
use crate::sys::{self, Timeline};
use crate::trace::{self, LinkTotal, OpTotal, Operation};
use crate::types::Rank;

/// The query for a snapshot.
pub(crate) const STATUS: &[u8] = b"status";

/// The most links of one communicator that a snapshot has. With [`MOST_COMMUNICATORS`], a reply
/// stays shorter than the longest that peers read: [`MOST_BYTES`] bounds what many links add.
const MOST_LINKS: usize = 4096;

/// From this many bytes on, the snapshot has no more communicators.
const MOST_BYTES: usize = 512 << 10;

/// The last operations among which those that run are looked for.
const RECENT: u64 = 64;

/// The most characters of an error's message.
const LONGEST_MESSAGE: usize = 2 << 10;

/// Answers the query of a process that knows the secret and is no rank.
pub(crate) fn answer(board: &StatusBoard, rank: Rank, query: &[u8]) -> Vec<u8> {
    if query == STATUS { snapshot(board, rank).encode() } else { Vec::new() }
}

/// Returns what this rank does.
pub(crate) fn snapshot(board: &StatusBoard, rank: Rank) -> Snapshot {
    let timeline = Timeline::up_to_now();
    let statuses = board.statuses(rank);
    let mut communicators = Vec::new();
    let mut bytes = 0;
    for (id, status) in statuses.iter().take(MOST_COMMUNICATORS) {
        let seen = communicator(*id, status, &timeline);
        // A link takes at most this many bytes, and so do two ranks.
        let failure = seen.failure.as_ref().map_or(0, |failure| failure.message.len());
        bytes += 100 * (1 + seen.links.len() + seen.running.len() + seen.totals.len()) + 16 * seen.members.len() + failure;
        // One communicator alone is shorter than the longest reply.
        if bytes >= MOST_BYTES && !communicators.is_empty() {
            break;
        }
        communicators.push(seen);
    }
    let omitted = (statuses.len() - communicators.len()) as u64;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Snapshot { version, pid: std::process::id(), rank, communicators, omitted }
}

fn communicator(id: u64, status: &CommStatus, timeline: &Timeline) -> Communicator {
    let recording = &status.recording;
    let history = &recording.history;
    let now = sys::monotonic();
    let age = |start: Duration| now.saturating_sub(start);
    let running: Vec<Running> =
        history.running(RECENT, timeline).iter().map(|operation| described(operation, age(operation.start))).collect();
    let last = history.last(timeline).and_then(|last| last.end);
    let waits = status.waits_now().into_iter();
    Communicator {
        id,
        rank: status.rank,
        members: status.members().to_vec(),
        begun: history.last_begun(),
        completed: history.last_completed(),
        idle: last.filter(|_| running.is_empty()).map(age),
        running,
        waits: waits
            .map(|(peer, age, call)| Wait { peer, age, op: call.map(|call| call.op), seq: call.map_or(0, |call| call.seq) })
            .collect(),
        totals: history.totals.read().into_iter().map(|total| summary(total, timeline)).collect(),
        links: recording.links.read(MOST_LINKS).into_iter().map(link).collect(),
        failure: recording.failure().map(|(message, rank)| Failure { message: shortened(message), rank: *rank }),
    }
}

fn described(operation: &Operation, age: Duration) -> Running {
    let call = operation.descriptor;
    Running {
        op: call.op,
        dtype: call.dtype,
        count: call.count,
        bytes: operation.bytes,
        seq: call.seq,
        root: call.root,
        algorithm: trace::choice(operation.path).map(|choice| choice.to_string()),
        age,
    }
}

fn summary(total: OpTotal, timeline: &Timeline) -> OpSummary {
    let OpTotal { op, begun, bytes, ticks, failed } = total;
    OpSummary { op, begun, bytes, time: timeline.span(ticks), failed }
}

fn link(total: LinkTotal) -> Link {
    let LinkTotal { peer, kind, sent, received, lost_rails, connections, slow } = total;
    let tcp = connections.map(|of| (of.retransmits, Duration::from_micros(of.round_trip)));
    let slow = slow.map(|slow| (slow.rate as u64, slow.before as u64));
    Link { peer, kind: kind.to_owned(), sent, received, lost_rails, tcp, slow }
}

fn shortened(message: &str) -> String {
    message.chars().take(LONGEST_MESSAGE).collect()
}

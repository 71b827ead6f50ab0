//! The trace in the format of Chrome and Perfetto: a process for each rank, a track for each
//! communicator.

use serde_json::{Value, json};

use super::analysis::Job;
use super::dump::{Communicator, Operation, Outcome};
use crate::files::Output;

/// Writes the file for `chrome://tracing` and <https://ui.perfetto.dev>.
pub(crate) fn write(job: &Job, output: Output) -> Result<(), String> {
    let mut events = Vec::new();
    let starts = job.dumps.iter().enumerate().flat_map(|(at, dump)| {
        let operations = dump.communicators.iter().flat_map(|communicator| &communicator.operations);
        operations.map(move |operation| job.time(at, operation.start_ns))
    });
    let zero = starts.min().unwrap_or(0);
    for (at, dump) in job.dumps.iter().enumerate() {
        let member = &dump.members[dump.rank];
        events.push(json!({"ph": "M", "name": "process_name", "pid": dump.rank,
            "args": {"name": format!("rank {} ({}, pid {})", dump.rank, member.host, member.pid)}}));
        events.push(json!({"ph": "M", "name": "process_sort_index", "pid": dump.rank, "args": {"sort_index": dump.rank}}));
        let written = job.time(at, dump.clock.monotonic_ns);
        for (track, communicator) in dump.communicators.iter().enumerate() {
            let mut name = format!("{}, rank {} of {}", communicator.name(), communicator.rank, communicator.ranks.len());
            if !communicator.devices.are_unused() {
                name += &format!(" (on devices: {})", communicator.devices);
            }
            events.push(json!({"ph": "M", "name": "thread_name", "pid": dump.rank, "tid": track, "args": {"name": name}}));
            for (number, operation) in communicator.operations.iter().enumerate() {
                // An operation in flight ends when the file was written.
                let (start, end) = (job.time(at, operation.start_ns), operation.end_ns.map_or(written, |end| job.time(at, end)));
                let micros = |ns: i128| ns as f64 / 1e3;
                let (start, duration) = (micros(start - zero), micros((end - start).max(0)));
                let place = Place { rank: dump.rank, track, number };
                events.extend(place.events(communicator, operation, start, duration));
            }
        }
    }
    output.write_json(&json!({"displayTimeUnit": "ns", "traceEvents": events}))
}

/// The process and the track of an operation.
struct Place {
    rank: usize,
    track: usize,
    /// The number of the operation on its communicator.
    number: usize,
}

impl Place {
    fn events(&self, communicator: &Communicator, operation: &Operation, start: f64, duration: f64) -> Vec<Value> {
        let Place { rank, track, number } = self;
        let category = match operation.outcome {
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
            Outcome::UnderWay => "under way",
        };
        let name = match operation.outcome {
            Outcome::Ok => operation.call.op.clone(),
            _ => format!("{} ({category})", operation.call.op),
        };
        let args = json!({
            "seq": operation.seq, "call": operation.call.to_string(), "bytes": operation.bytes, "algorithm": operation.algorithm,
            "peer": operation.peer, "outcome": category, "communicator": communicator.id,
        });
        if !operation.is_point_to_point() {
            return vec![
                json!({"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": start, "dur": duration,
                "args": args}),
            ];
        }
        // Messages overlap, which only asynchronous events may.
        let id = format!("{rank}.{track}.{number}");
        vec![
            json!({"ph": "b", "name": name, "cat": "messages", "id": id, "pid": rank, "tid": track, "ts": start, "args": args}),
            json!({"ph": "e", "name": name, "cat": "messages", "id": id, "pid": rank, "tid": track, "ts": start + duration}),
        ]
    }
}

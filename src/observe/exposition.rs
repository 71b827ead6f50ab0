//! A snapshot in the text format of Prometheus, version 0.0.4.
//!
//! Units are bytes and seconds. What describes the process has the names of OpenTelemetry, in
//! `target_info`, as its exporters to Prometheus write it.

use std::fmt::{self, Display, Write};

use super::snapshot::{Communicator, Snapshot};
use crate::types::Rank;

/// The media type of the text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The process that is described.
pub(crate) struct Target {
    pub(crate) job: String,
    pub(crate) host: String,
    pub(crate) rank: Rank,
}

/// Returns the metrics of a rank.
pub(crate) fn exposition(target: &Target, snapshot: &Snapshot) -> String {
    let mut text = Exposition { text: String::new(), rank: snapshot.rank };
    let Target { job, host, rank } = target;
    let labels = [
        ("service_name", &"kolo" as &dyn Display),
        ("service_namespace", job),
        ("service_instance_id", &rank.to_string()),
        ("service_version", &snapshot.version),
        ("host_name", host),
        ("process_pid", &snapshot.pid),
    ];
    text.family("target_info", "gauge", "The rank, with the names of OpenTelemetry.");
    text.sample("target_info", &labels, 1.0);
    operations(&mut text, &snapshot.communicators);
    links(&mut text, &snapshot.communicators);
    text.text
}

fn operations(text: &mut Exposition, communicators: &[Communicator]) {
    let totals = || communicators.iter().flat_map(|of| of.totals.iter().map(move |total| (Id(of.id), total)));
    text.family("kolo_operations_total", "counter", "Operations that have begun.");
    for (id, total) in totals() {
        text.sample("kolo_operations_total", &[("comm", &id), ("op", &total.op)], total.begun as f64);
    }
    text.family("kolo_operation_bytes_total", "counter", "Bytes of this rank's buffers in operations that have begun.");
    for (id, total) in totals() {
        text.sample("kolo_operation_bytes_total", &[("comm", &id), ("op", &total.op)], total.bytes as f64);
    }
    let help = "Time that operations took that waited or moved 4 KiB or more; shorter ones are not timed.";
    text.family("kolo_operation_seconds_total", "counter", help);
    for (id, total) in totals() {
        text.sample("kolo_operation_seconds_total", &[("comm", &id), ("op", &total.op)], total.time.as_secs_f64());
    }
    text.family("kolo_operation_failures_total", "counter", "Operations that have failed.");
    for (id, total) in totals() {
        text.sample("kolo_operation_failures_total", &[("comm", &id), ("op", &total.op)], total.failed as f64);
    }
    text.family(
        "kolo_operation_age_seconds",
        "gauge",
        "For how long the oldest operation has run that runs now; 0 if none does.",
    );
    for of in communicators {
        let age = of.running.iter().map(|running| running.age.as_secs_f64()).fold(0.0, f64::max);
        text.sample("kolo_operation_age_seconds", &[("comm", &Id(of.id))], age);
    }
    text.family("kolo_collective_sequence", "gauge", "The sequence number of the last collective that has begun.");
    for of in communicators {
        text.sample("kolo_collective_sequence", &[("comm", &Id(of.id))], of.begun as f64);
    }
    text.family("kolo_wait_seconds", "gauge", "For how long an operation has waited for a peer, a rank of the job.");
    for of in communicators {
        for wait in &of.waits {
            let Some(peer) = of.members.get(wait.peer) else { continue };
            let op = wait.op.map_or("unknown", |op| op.name());
            text.sample("kolo_wait_seconds", &[("comm", &Id(of.id)), ("op", &op), ("peer", peer)], wait.age.as_secs_f64());
        }
    }
    text.family("kolo_communicator_failed", "gauge", "1 if a failure has ended the communicator, else 0.");
    for of in communicators {
        text.sample("kolo_communicator_failed", &[("comm", &Id(of.id))], f64::from(of.failure.is_some()));
    }
}

fn links(text: &mut Exposition, communicators: &[Communicator]) {
    for (name, kind, help) in [
        ("kolo_link_sent_bytes_total", "counter", "Bytes that were sent to a peer, a rank of the job."),
        ("kolo_link_received_bytes_total", "counter", "Bytes that arrived from a peer, a rank of the job."),
        ("kolo_link_lost_rails_total", "counter", "Rails of links to a peer that failed."),
        ("kolo_link_retransmits_total", "counter", "TCP segments to a peer that were sent again, since the link was opened."),
        ("kolo_link_round_trip_seconds", "gauge", "The smoothed round trip of TCP to a peer."),
        (
            "kolo_link_slowdown",
            "gauge",
            "How many times as much a link carried before in the same operation; 1 if it is not slow.",
        ),
    ] {
        text.family(name, kind, help);
        for of in communicators {
            for link in &of.links {
                let Some(peer) = of.members.get(link.peer) else { continue };
                let value = match name {
                    "kolo_link_sent_bytes_total" => Some(link.sent as f64),
                    "kolo_link_received_bytes_total" => Some(link.received as f64),
                    "kolo_link_lost_rails_total" => Some(link.lost_rails as f64),
                    "kolo_link_retransmits_total" => link.tcp.map(|(retransmits, _)| retransmits as f64),
                    "kolo_link_round_trip_seconds" => link.tcp.map(|(_, round_trip)| round_trip.as_secs_f64()),
                    _ => link.tcp.map(|_| link.slow.map_or(1.0, |(rate, before)| before as f64 / rate.max(1) as f64)),
                };
                if let Some(value) = value {
                    text.sample(name, &[("comm", &Id(of.id)), ("peer", peer), ("kind", &link.kind)], value);
                }
            }
        }
    }
}

/// A comm id.
struct Id(u64);

impl Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

struct Exposition {
    text: String,
    rank: Rank,
}

// Writing to a String does not fail.
impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &dyn Display)], value: f64) {
        let _ = write!(self.text, "{name}{{rank=\"{}\"", self.rank);
        for (label, text) in labels {
            let _ = write!(self.text, ",{label}=\"{}\"", Escaped(&text.to_string()));
        }
        let _ = writeln!(self.text, "}} {value}");
    }
}

/// The value of a label.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                _ => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::sample;
    use super::*;

    #[test]
    fn a_snapshot_becomes_samples() {
        let target = Target { job: "a \"job\"".to_owned(), host: "node7".to_owned(), rank: 2 };
        let text = exposition(&target, &sample());
        for line in [
            "target_info{rank=\"2\",service_name=\"kolo\",service_namespace=\"a \\\"job\\\"\",service_instance_id=\"2\",\
             service_version=\"0.1.0\",host_name=\"node7\",process_pid=\"77\"} 1",
            "# TYPE kolo_operations_total counter",
            "kolo_operations_total{rank=\"2\",comm=\"0\",op=\"all_reduce\"} 9",
            "kolo_operation_bytes_total{rank=\"2\",comm=\"0\",op=\"all_reduce\"} 144",
            "kolo_operation_seconds_total{rank=\"2\",comm=\"0\",op=\"all_reduce\"} 0.00003",
            "kolo_operation_failures_total{rank=\"2\",comm=\"0\",op=\"all_reduce\"} 1",
            "kolo_operation_age_seconds{rank=\"2\",comm=\"0\"} 1.5",
            "kolo_operation_age_seconds{rank=\"2\",comm=\"7\"} 0",
            "kolo_collective_sequence{rank=\"2\",comm=\"0\"} 9",
            // Rank 2 of the communicator is rank 4 of the job.
            "kolo_wait_seconds{rank=\"2\",comm=\"0\",op=\"all_reduce\",peer=\"4\"} 1",
            "kolo_communicator_failed{rank=\"2\",comm=\"0\"} 1",
            "kolo_link_sent_bytes_total{rank=\"2\",comm=\"0\",peer=\"0\",kind=\"shm\"} 1",
            "kolo_link_received_bytes_total{rank=\"2\",comm=\"0\",peer=\"4\",kind=\"tcp\"} 4",
            "kolo_link_lost_rails_total{rank=\"2\",comm=\"0\",peer=\"4\",kind=\"tcp\"} 1",
            "kolo_link_retransmits_total{rank=\"2\",comm=\"0\",peer=\"4\",kind=\"tcp\"} 5",
            "kolo_link_round_trip_seconds{rank=\"2\",comm=\"0\",peer=\"4\",kind=\"tcp\"} 0.00006",
            "kolo_link_slowdown{rank=\"2\",comm=\"0\",peer=\"4\",kind=\"tcp\"} 4",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("retransmits_total{rank=\"2\",comm=\"0\",peer=\"0\""), "shared memory sends nothing again");
    }
}

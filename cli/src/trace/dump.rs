//! The files of the flight recorder. Their content is untrusted and may be cut off.

use serde::{Deserialize, Serialize};

/// The format of files that this version reads.
const FORMAT: u64 = 1;

/// The file of one rank.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Dump {
    pub(crate) job: String,
    /// The same on all ranks of one run of a job.
    pub(crate) run: String,
    pub(crate) rank: usize,
    pub(crate) reason: String,
    pub(crate) clock: Clock,
    /// All ranks of the job, in their order.
    pub(crate) members: Vec<Member>,
    pub(crate) communicators: Vec<Communicator>,
}

/// The times of two clocks when the file was written. The file uses the first clock.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Clock {
    /// Equal for ranks that read the same monotonic clock; empty if that is not known.
    pub(crate) id: String,
    pub(crate) monotonic_ns: u64,
    pub(crate) unix_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Member {
    pub(crate) rank: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Communicator {
    pub(crate) id: String,
    /// This rank in the communicator.
    pub(crate) rank: usize,
    /// The communicator's ranks as ranks of the job.
    pub(crate) ranks: Vec<usize>,
    pub(crate) failure: Option<Failure>,
    /// Not in files of early builds.
    #[serde(default)]
    pub(crate) devices: Devices,
    pub(crate) operations: Vec<Operation>,
}

/// How many operations on the memory of devices took each path, as `kolo::DeviceStats` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Devices {
    pub(crate) in_place: u64,
    pub(crate) through_areas: u64,
    pub(crate) one_shot: u64,
    pub(crate) staged: u64,
    pub(crate) whole: u64,
    pub(crate) copied: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Failure {
    pub(crate) text: String,
    /// The rank of the communicator that the error names.
    pub(crate) rank: Option<usize>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Operation {
    pub(crate) seq: u64,
    #[serde(flatten)]
    pub(crate) call: Call,
    /// The peer of a send or a receive.
    pub(crate) peer: Option<usize>,
    pub(crate) bytes: u64,
    pub(crate) algorithm: Option<String>,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: Option<u64>,
    pub(crate) outcome: Outcome,
}

/// What all ranks must agree on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Call {
    pub(crate) op: String,
    pub(crate) dtype: String,
    pub(crate) count: u64,
    pub(crate) redop: Option<String>,
    pub(crate) root: Option<u64>,
    /// A hash of the counts of all ranks.
    pub(crate) counts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum Outcome {
    #[serde(rename = "ok")]
    Ok,
    #[serde(rename = "failed")]
    Failed,
    #[serde(rename = "under way")]
    UnderWay,
}

impl Dump {
    /// Reads a file. An error says what is wrong with it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Dump, String> {
        #[derive(Deserialize)]
        struct Head {
            kolo_trace: Option<u64>,
        }
        let damaged = |error: serde_json::Error| match error.classify() {
            serde_json::error::Category::Eof if bytes.iter().all(u8::is_ascii_whitespace) => "it is empty".to_owned(),
            serde_json::error::Category::Eof => "it was cut off".to_owned(),
            _ => format!("it is damaged: {error}"),
        };
        match serde_json::from_slice::<Head>(bytes).map_err(damaged)?.kolo_trace {
            None => return Err("it is no trace of kolo".to_owned()),
            Some(FORMAT) => {}
            Some(other) => {
                return Err(format!("it has format {other}, and this kolo reads format {FORMAT}; use the kolo that wrote it"));
            }
        }
        let dump: Dump = serde_json::from_slice(bytes).map_err(damaged)?;
        dump.check().map_err(|what| format!("it is damaged: {what}"))?;
        Ok(dump)
    }

    /// Checks what the rest of the program relies on.
    fn check(&self) -> Result<(), String> {
        let world = self.members.len();
        if self.rank >= world {
            return Err(format!("it is of rank {} of {world}", self.rank));
        }
        if let Some(member) = self.members.iter().enumerate().find_map(|(at, member)| (member.rank != at).then_some(member)) {
            return Err(format!("rank {} is not in its place", member.rank));
        }
        for communicator in &self.communicators {
            let Communicator { id, rank, ranks, .. } = communicator;
            if ranks.get(*rank) != Some(&self.rank) || ranks.iter().any(|&rank| rank >= world) {
                return Err(format!("communicator {id} has ranks that cannot be"));
            }
            let out_of_range = |rank: Option<usize>| rank.is_some_and(|rank| rank >= ranks.len());
            if out_of_range(communicator.failure.as_ref().and_then(|failure| failure.rank))
                || communicator.operations.iter().any(|operation| out_of_range(operation.peer))
            {
                return Err(format!("communicator {id} has no such rank as it names"));
            }
        }
        Ok(())
    }
}

impl Communicator {
    /// Returns the name of the communicator.
    pub(crate) fn name(&self) -> String {
        if self.id.bytes().all(|digit| digit == b'0') { "world".to_owned() } else { format!("communicator {}", self.id) }
    }
}

impl Operation {
    pub(crate) fn is_point_to_point(&self) -> bool {
        self.peer.is_some()
    }
}

impl Devices {
    /// Returns whether no operation was on the memory of a device.
    pub(crate) fn are_unused(&self) -> bool {
        *self == Devices::default()
    }
}

/// Names the paths that were taken.
impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Devices { in_place, through_areas, one_shot, staged, whole, copied } = *self;
        let paths = [
            (in_place, "in place"),
            (through_areas, "through areas"),
            (one_shot, "one-shot"),
            (staged, "staged"),
            (whole, "whole"),
            (copied, "copied"),
        ];
        let taken: Vec<String> =
            paths.into_iter().filter(|(count, _)| *count > 0).map(|(count, path)| format!("{count} {path}")).collect();
        f.write_str(&taken.join(", "))
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.op)?;
        if !matches!(&*self.op, "barrier" | "connect" | "split" | "alloc") {
            write!(f, " {} x {}", self.dtype, self.count)?;
        }
        if let Some(redop) = &self.redop {
            write!(f, " {redop}")?;
        }
        if let Some(root) = self.root {
            write!(f, " root={root}")?;
        }
        if self.counts != 0 {
            write!(f, " counts#{:08x}", self.counts)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"kolo_trace": 1, "version": "0.1.0", "reason": "call", "job": "j", "run": "00", "rank": 1,
        "clock": {"id": "b", "monotonic_ns": 5, "unix_ns": 6},
        "members": [{"rank": 0, "host": "h", "pid": 1}, {"rank": 1, "host": "h", "pid": 2}],
        "communicators": [{"id": "0000", "rank": 1, "ranks": [0, 1], "begun": 1, "failure": null, "operations": [
        {"seq": 1, "op": "send", "dtype": "u8", "count": 3, "redop": null, "peer": 0, "counts": 0, "bytes": 3,
        "algorithm": null, "start_ns": 1, "end_ns": null, "outcome": "under way"}]}]}"#;

    #[test]
    fn paths_on_devices_are_read_if_the_file_has_them() {
        let devices = |with: &str| {
            let file = GOOD.replace("\"failure\": null", &format!("\"failure\": null{with}"));
            Dump::parse(file.as_bytes()).unwrap().communicators[0].devices
        };
        assert!(devices("").are_unused());
        let all = devices(
            ", \"devices\": {\"whole\": 1, \"staged\": 2, \"in_place\": 3, \"through_areas\": 4, \"copied\": 5, \
             \"one_shot\": 6, \"new\": 7}",
        );
        assert_eq!(all.to_string(), "3 in place, 4 through areas, 6 one-shot, 2 staged, 1 whole, 5 copied");
        let some = devices(", \"devices\": {\"whole\": 0, \"staged\": 7}");
        assert!(!some.are_unused());
        assert_eq!(some.to_string(), "7 staged");
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let dump = Dump::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(dump.communicators[0].operations[0].peer, Some(0));
        for (from, to, hint) in [
            (GOOD, "", "it is empty"),
            (GOOD, "{}", "no trace of kolo"),
            (GOOD, "\u{0}\u{1}", "damaged"),
            ("\"kolo_trace\": 1", "\"kolo_trace\": 2", "format 2, and this kolo reads format 1"),
            ("\"rank\": 1,\n", "\"rank\": 2,\n", "rank 2 of 2"),
            ("{\"rank\": 0,", "{\"rank\": 7,", "rank 7 is not in its place"),
            ("[0, 1]", "[1, 0]", "ranks that cannot be"),
            ("[0, 1]", "[9, 1]", "ranks that cannot be"),
            ("\"peer\": 0", "\"peer\": 2", "no such rank"),
            ("under way", "lost", "unknown variant"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = Dump::parse(GOOD.replace(from, to).as_bytes()).unwrap_err();
            assert!(error.contains(hint), "{to}: {error}");
        }
        for cut in 1..GOOD.len() {
            let error = Dump::parse(&GOOD.as_bytes()[..cut]).unwrap_err();
            assert!(error.contains("cut off"), "{cut}: {error}");
        }
    }
}

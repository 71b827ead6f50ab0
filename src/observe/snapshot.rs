//! What one rank does at one moment, and its encoding. The decoder accepts any input.

use std::time::Duration;

use crate::types::{DType, Op, Rank};
use crate::wire::{Reader, Writer};

/// Changes when readers of the former version would misunderstand a snapshot.
const FORMAT: u64 = 2;

/// The most communicators that a snapshot has, those with the lowest ids; and the most ranks of one that
/// are read.
pub(super) const MOST_COMMUNICATORS: usize = 128;
const MOST_MEMBERS: usize = 1 << 16;

/// What one rank does at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The version of kolo.
    pub version: String,
    /// The process.
    pub pid: u32,
    /// The rank in the job.
    pub rank: Rank,
    /// The communicators of the rank, in the order of their ids.
    pub communicators: Vec<Communicator>,
    /// How many communicators were left out because there are too many.
    pub omitted: u64,
}

/// One communicator of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Communicator {
    /// The same on all ranks of the communicator.
    pub id: u64,
    /// The rank in this communicator.
    pub rank: Rank,
    /// The ranks of the communicator as ranks of the job.
    pub members: Vec<Rank>,
    /// The sequence number of the last collective that has begun; 0 if none.
    pub begun: u64,
    /// The sequence number of the last collective that has completed; 0 if none.
    pub completed: u64,
    /// The operations that run, in the order in which they began.
    pub running: Vec<Running>,
    /// How long ago the last operation ended, if none runs and one has run.
    pub idle: Option<Duration>,
    /// The peers for which operations wait, as far as the rank knows them.
    pub waits: Vec<Wait>,
    /// What each operation came to.
    pub totals: Vec<OpSummary>,
    /// What went over each link.
    pub links: Vec<Link>,
    /// The error that ended the communicator.
    pub failure: Option<Failure>,
}

/// An operation that runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Running {
    /// The operation.
    pub op: Op,
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements.
    pub count: u64,
    /// The bytes of this rank's buffers.
    pub bytes: u64,
    /// The sequence number: of collectives, or of messages to or from this peer.
    pub seq: u64,
    /// The root; for a send or a receive the peer.
    pub root: Option<u32>,
    /// The algorithm, if one is recorded.
    pub algorithm: Option<String>,
    /// How long it has run.
    pub age: Duration,
}

/// A wait of an operation for a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// The peer in the communicator.
    pub peer: Rank,
    /// How long it has waited for this peer.
    pub age: Duration,
    /// The operation, if it is known.
    pub op: Option<Op>,
    /// Its sequence number.
    pub seq: u64,
}

/// What one operation came to so far.
#[derive(Clone, Debug, PartialEq)]
pub struct OpSummary {
    /// The operation.
    pub op: Op,
    /// How many have begun.
    pub begun: u64,
    /// The bytes of this rank's buffers.
    pub bytes: u64,
    /// The time that they took. Operations that are short and small are not timed and count as 0.
    pub time: Duration,
    /// How many have failed.
    pub failed: u64,
}

/// What went over one link so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// The peer in the communicator.
    pub peer: Rank,
    /// `tcp`, `tls`, `shm` or `memory`.
    pub kind: String,
    /// Bytes that were sent.
    pub sent: u64,
    /// Bytes that arrived.
    pub received: u64,
    /// How often a rail of the link failed.
    pub lost_rails: u64,
    /// The TCP segments that were sent again, and the round trip; `None` where there is no TCP or
    /// the system does not say.
    pub tcp: Option<(u64, Duration)>,
    /// What the link carries, in bytes per second, and the most that it carried before in the same operation,
    /// while that is much more; measured by TCP on Linux.
    pub slow: Option<(u64, u64)>,
}

/// The error that ended a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The error's message.
    pub message: String,
    /// The rank that it names, in the communicator.
    pub rank: Option<Rank>,
}

impl Snapshot {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.number(FORMAT).text(&self.version).number(self.pid.into()).number(self.rank as u64);
        writer.list(&self.communicators, |writer, communicator| communicator.write(writer)).number(self.omitted);
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Snapshot> {
        let mut reader = Reader::new(bytes);
        if reader.number()? != FORMAT {
            return None;
        }
        let mut left = MOST_COMMUNICATORS;
        Some(Snapshot {
            version: reader.text()?,
            pid: reader.number()?.try_into().ok()?,
            rank: reader.size()?,
            communicators: reader.list(|reader| {
                left = left.checked_sub(1)?;
                Communicator::read(reader)
            })?,
            omitted: reader.number()?,
        })
    }
}

fn write_time(writer: &mut Writer, time: Duration) {
    writer.number(time.as_nanos() as u64);
}

fn read_time(reader: &mut Reader<'_>) -> Option<Duration> {
    reader.number().map(Duration::from_nanos)
}

/// Ranks at equal distances: the first, the distance, and how many.
type Run = (usize, usize, usize);

/// Returns the rank that continues a run; `None` if there is no such number.
fn following(first: Rank, step: usize, len: usize) -> Option<Rank> {
    first.checked_add(step.checked_mul(len)?)
}

/// Cuts ranks into runs, because most communicators consist of few.
fn runs(ranks: &[Rank]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((first, step, len)) if *len == 1 && rank > *first => (*step, *len) = (rank - *first, 2),
            Some((first, step, len)) if *len > 1 && following(*first, *step, *len) == Some(rank) => *len += 1,
            _ => runs.push((rank, 1, 1)),
        }
    }
    runs
}

impl Communicator {
    fn write(&self, writer: &mut Writer) {
        writer.number(self.id).number(self.rank as u64);
        writer.list(&runs(&self.members), |writer, &(first, step, len)| {
            writer.number(first as u64).number(step as u64).number(len as u64);
        });
        writer.number(self.begun).number(self.completed);
        writer.list(&self.running, |writer, Running { op, dtype, count, bytes, seq, root, algorithm, age }| {
            writer.number(*op as u64).number(*dtype as u64).number(*count).number(*bytes).number(*seq);
            writer.list(root.as_slice(), |writer, &root| _ = writer.number(root.into()));
            writer.list(algorithm.as_slice(), |writer, name| _ = writer.text(name));
            write_time(writer, *age);
        });
        writer.list(self.idle.as_slice(), |writer, &idle| write_time(writer, idle));
        writer.list(&self.waits, |writer, Wait { peer, age, op, seq }| {
            write_time(writer.number(*peer as u64), *age);
            writer.list(op.as_slice(), |writer, &op| _ = writer.number(op as u64)).number(*seq);
        });
        writer.list(&self.totals, |writer, OpSummary { op, begun, bytes, time, failed }| {
            write_time(writer.number(*op as u64).number(*begun).number(*bytes), *time);
            writer.number(*failed);
        });
        writer.list(&self.links, |writer, Link { peer, kind, sent, received, lost_rails, tcp, slow }| {
            writer.number(*peer as u64).text(kind).number(*sent).number(*received).number(*lost_rails);
            writer.list(tcp.as_slice(), |writer, &(retransmits, round_trip)| {
                write_time(writer.number(retransmits), round_trip);
            });
            writer.list(slow.as_slice(), |writer, &(rate, before)| _ = writer.number(rate).number(before));
        });
        writer.list(self.failure.as_slice(), |writer, Failure { message, rank }| {
            writer.text(message).list(rank.as_slice(), |writer, &rank| _ = writer.number(rank as u64));
        });
    }

    fn read(reader: &mut Reader<'_>) -> Option<Communicator> {
        let (id, rank) = (reader.number()?, reader.size()?);
        let mut members = Vec::new();
        for (first, step, len) in reader.list(|reader| Some((reader.size()?, reader.size()?, reader.size()?)))? {
            if len > MOST_MEMBERS - members.len() {
                return None;
            }
            for at in 0..len {
                members.push(following(first, step, at)?);
            }
        }
        Some(Communicator {
            id,
            rank,
            members,
            begun: reader.number()?,
            completed: reader.number()?,
            running: reader.list(|reader| {
                Some(Running {
                    op: read_op(reader)?,
                    dtype: DType::from_number(reader.number()?.try_into().ok()?)?,
                    count: reader.number()?,
                    bytes: reader.number()?,
                    seq: reader.number()?,
                    root: reader.list(|reader| u32::try_from(reader.number()?).ok())?.pop(),
                    algorithm: reader.list(Reader::text)?.pop(),
                    age: read_time(reader)?,
                })
            })?,
            idle: reader.list(read_time)?.pop(),
            waits: reader.list(|reader| {
                let (peer, age) = (reader.size()?, read_time(reader)?);
                Some(Wait { peer, age, op: reader.list(read_op)?.pop(), seq: reader.number()? })
            })?,
            totals: reader.list(|reader| {
                let (op, begun, bytes) = (read_op(reader)?, reader.number()?, reader.number()?);
                Some(OpSummary { op, begun, bytes, time: read_time(reader)?, failed: reader.number()? })
            })?,
            links: reader.list(|reader| {
                let (peer, kind, sent, received) = (reader.size()?, reader.text()?, reader.number()?, reader.number()?);
                let lost_rails = reader.number()?;
                let tcp = reader.list(|reader| Some((reader.number()?, read_time(reader)?)))?.pop();
                let slow = reader.list(|reader| Some((reader.number()?, reader.number()?)))?.pop();
                Some(Link { peer, kind, sent, received, lost_rails, tcp, slow })
            })?,
            failure: reader
                .list(|reader| Some(Failure { message: reader.text()?, rank: reader.list(Reader::size)?.pop() }))?
                .pop(),
        })
    }
}

fn read_op(reader: &mut Reader<'_>) -> Option<Op> {
    Op::from_number(reader.number()?.try_into().ok()?)
}

/// Returns a snapshot with every kind of field.
#[cfg(any(fuzzing, test))]
pub(super) fn sample() -> Snapshot {
    let running = Running {
        op: Op::AllReduce,
        dtype: DType::F32,
        count: 4,
        bytes: 16,
        seq: 9,
        root: Some(1),
        algorithm: Some("ring".to_owned()),
        age: Duration::from_millis(1500),
    };
    let communicator = Communicator {
        id: 0,
        rank: 1,
        members: vec![0, 2, 4, 6, 7, 3],
        begun: 9,
        completed: 8,
        running: vec![running],
        idle: None,
        waits: vec![Wait { peer: 2, age: Duration::from_secs(1), op: Some(Op::AllReduce), seq: 9 }],
        totals: vec![OpSummary { op: Op::AllReduce, begun: 9, bytes: 144, time: Duration::from_micros(30), failed: 1 }],
        links: vec![
            Link { peer: 0, kind: "shm".to_owned(), sent: 1, received: 2, lost_rails: 0, tcp: None, slow: None },
            Link {
                peer: 2,
                kind: "tcp".to_owned(),
                sent: 3,
                received: 4,
                lost_rails: 1,
                tcp: Some((5, Duration::from_micros(60))),
                slow: Some((7, 28)),
            },
        ],
        failure: Some(Failure { message: "rank 2 \"died\"\n".to_owned(), rank: Some(2) }),
    };
    let idle = Communicator { id: 7, members: vec![4], idle: Some(Duration::from_secs(2)), ..Communicator::default() };
    let communicators = vec![communicator, idle];
    Snapshot { version: "0.1.0".to_owned(), pid: 77, rank: 2, communicators, omitted: 3 }
}

/// Returns snapshots as a rank sends them.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    vec![sample().encode(), Snapshot::default().encode()]
}

/// Decodes any bytes as a snapshot.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(snapshot) = Snapshot::decode(bytes) {
        assert_eq!(Snapshot::decode(&snapshot.encode()), Some(snapshot), "a decoded snapshot encodes to another");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_snapshot_survives_the_wire() {
        assert_eq!(Snapshot::decode(&sample().encode()), Some(sample()));
        assert_eq!(Snapshot::decode(&Snapshot::default().encode()), Some(Snapshot::default()));
    }

    #[test]
    fn ranks_at_equal_distances_take_little_room() {
        let all = Communicator { members: (0..4096).collect(), ..Communicator::default() };
        let every_eighth = Communicator { members: (0..512).map(|rank| 3 + 8 * rank).collect(), ..Communicator::default() };
        let snapshot = Snapshot { communicators: vec![all, every_eighth], ..Snapshot::default() };
        let bytes = snapshot.encode();
        assert!(bytes.len() < 500, "{}", bytes.len());
        assert_eq!(Snapshot::decode(&bytes), Some(snapshot));
    }

    #[test]
    fn a_run_without_end_is_refused() {
        let mut writer = Writer::default();
        writer.number(FORMAT).text("").number(0).number(0).number(1).number(0).number(0);
        writer.number(1).number(0).number(0).number(u64::MAX);
        assert_eq!(Snapshot::decode(&writer.0), None);
    }

    #[test]
    fn the_largest_numbers_survive() {
        for members in [vec![0, usize::MAX, 1], vec![usize::MAX - 1, usize::MAX, 0], vec![1, usize::MAX, 0, usize::MAX]] {
            let communicators = vec![Communicator { members, ..Communicator::default() }];
            let snapshot = Snapshot { communicators, ..Snapshot::default() };
            assert_eq!(Snapshot::decode(&snapshot.encode()), Some(snapshot));
        }
    }

    proptest! {
        #[test]
        fn damaged_snapshots_cause_no_panic(at in 0usize..2000, bits: u8, cut in 0usize..2000) {
            let mut bytes = sample().encode();
            let at = at % bytes.len();
            bytes[at] ^= bits;
            bytes.truncate(cut);
            fuzz(&bytes);
        }

        #[test]
        fn any_ranks_survive(members in proptest::collection::vec(0usize..40, 0..40)) {
            let communicators = vec![Communicator { members, ..Communicator::default() }];
            let snapshot = Snapshot { communicators, ..Snapshot::default() };
            prop_assert_eq!(Snapshot::decode(&snapshot.encode()), Some(snapshot));
        }
    }
}

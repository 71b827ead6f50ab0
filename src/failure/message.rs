//! Queries and replies as bytes. The decoders accept any input.

use super::cancel::Diagnosing;
use super::encoding::{read_call, read_words, write_call, write_words};
use super::report::FailureReport;
use crate::types::{Descriptor, Rank};
use crate::wire::{Reader, Writer};

/// The ranks that continue after a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// A random number that identifies the new communicator.
    pub(crate) nonce: u64,
    /// Their ranks in the failed communicator, ascending.
    pub(crate) members: Vec<Rank>,
}

impl Decision {
    /// Whether all of its ranks exist in a communicator of `world` ranks.
    pub(super) fn is_of(&self, world: usize) -> bool {
        self.members.iter().all(|&rank| rank < world)
    }
}

/// A query from one rank to another of the same communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// Asks what the rank does. Holds the operation in which the asking rank waits for it.
    Doing(Option<Descriptor>),
    /// Sends the reports on why the communicator ended, and asks for the rank's own.
    Reports(Vec<FailureReport>),
    /// The sender wants to continue without the failed ranks. Asks whether the rank does, too.
    Join,
    /// The sender is about to decide, with this ballot. Asks for decisions that the rank knows.
    Prepare(u64),
    /// The sender's decision, with its ballot.
    Decided(Decision, u64),
}

/// The answer to a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The process has no such communicator.
    Unknown,
    /// The rank has dropped the communicator, after this operation.
    Left { last_seq: u64 },
    /// What the rank does, as an answer to [`Query::Doing`] and [`Query::Reports`].
    Doing {
        /// The reports that the rank knows of why the communicator ended.
        reports: Vec<FailureReport>,
        diagnosing: Option<Diagnosing>,
        /// The rank for which it waits, and its operation.
        waits: Option<(Rank, [u64; Descriptor::WORDS])>,
        /// If it waits for no rank here: the rank of the job for which it waits in another
        /// communicator, and the operation.
        elsewhere: Option<(Rank, Option<Descriptor>)>,
        /// Its call with the sequence number of the asking rank's operation, if that is a
        /// collective.
        at_your_seq: Option<Descriptor>,
        /// The last collective that it completed.
        last_seq: u64,
    },
    /// Whether the rank wants to continue, the highest ballot that it has promised, and the
    /// decision, if there is one.
    Joins { shrinks: bool, promised: u64, decision: Option<Decision> },
}

const DOING: u64 = 1;
const REPORTS: u64 = 2;
const JOIN: u64 = 3;
const DECIDED: u64 = 4;
const PREPARE: u64 = 5;

const UNKNOWN: u64 = 1;
const LEFT: u64 = 2;
const DOES: u64 = 3;
const JOINS: u64 = 4;

impl Query {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Query::Doing(call) => _ = writer.number(DOING).list(call.as_slice(), write_call),
            Query::Reports(reports) => _ = writer.number(REPORTS).list(reports, |writer, report| report.write(writer)),
            Query::Join => _ = writer.number(JOIN),
            Query::Prepare(ballot) => _ = writer.number(PREPARE).number(*ballot),
            Query::Decided(decision, ballot) => write_decision(writer.number(DECIDED).number(*ballot), decision),
        }
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Query> {
        let mut reader = Reader::new(bytes);
        Some(match reader.number()? {
            DOING => Query::Doing(reader.list(read_call)?.pop()),
            REPORTS => Query::Reports(reader.list(FailureReport::read)?),
            JOIN => Query::Join,
            PREPARE => Query::Prepare(reader.number()?),
            DECIDED => {
                let ballot = reader.number()?;
                Query::Decided(read_decision(&mut reader)?, ballot)
            }
            _ => return None,
        })
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Reply::Unknown => _ = writer.number(UNKNOWN),
            Reply::Left { last_seq } => _ = writer.number(LEFT).number(*last_seq),
            Reply::Doing { reports, diagnosing, waits, elsewhere, at_your_seq, last_seq } => {
                writer.number(DOES).list(reports, |writer, report| report.write(writer));
                writer.list(diagnosing.as_slice(), |writer, diagnosing| {
                    writer.list(diagnosing.about.as_slice(), |writer, &rank| _ = writer.number(rank as u64));
                    writer.number(diagnosing.is_cut_off.into());
                });
                writer.list(waits.as_slice(), |writer, &(peer, words)| write_words(writer.number(peer as u64), words));
                writer.list(elsewhere.as_slice(), |writer, (peer, call)| {
                    let writer = writer.number(*peer as u64);
                    writer.list(call.as_slice(), write_call);
                });
                writer.list(at_your_seq.as_slice(), write_call).number(*last_seq);
            }
            Reply::Joins { shrinks, promised, decision } => {
                writer.number(JOINS).number((*shrinks).into()).number(*promised);
                writer.list(decision.as_slice(), write_decision);
            }
        }
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Reply> {
        let mut reader = Reader::new(bytes);
        Some(match reader.number()? {
            UNKNOWN => Reply::Unknown,
            LEFT => Reply::Left { last_seq: reader.number()? },
            DOES => Reply::Doing {
                reports: reader.list(FailureReport::read)?,
                diagnosing: reader.list(read_diagnosing)?.pop(),
                waits: reader.list(|reader| Some((reader.size()?, read_words(reader)?)))?.pop(),
                elsewhere: reader.list(|reader| Some((reader.size()?, reader.list(read_call)?.pop())))?.pop(),
                at_your_seq: reader.list(read_call)?.pop(),
                last_seq: reader.number()?,
            },
            JOINS => {
                let (shrinks, promised) = (reader.number()? != 0, reader.number()?);
                Reply::Joins { shrinks, promised, decision: reader.list(read_decision)?.pop() }
            }
            _ => return None,
        })
    }
}

fn read_diagnosing(reader: &mut Reader<'_>) -> Option<Diagnosing> {
    Some(Diagnosing { about: reader.list(Reader::size)?.pop(), is_cut_off: reader.number()? != 0 })
}

fn write_decision(writer: &mut Writer, decision: &Decision) {
    writer.number(decision.nonce).list(&decision.members, |writer, &member| _ = writer.number(member as u64));
}

fn read_decision(reader: &mut Reader<'_>) -> Option<Decision> {
    let (nonce, members) = (reader.number()?, reader.list(Reader::size)?);
    let is_ordered = |members: &[Rank]| members.iter().zip(members.iter().skip(1)).all(|(one, next)| one < next);
    (!members.is_empty() && is_ordered(&members)).then_some(Decision { nonce, members })
}

/// Decodes any bytes as a query and as a reply.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(query) = Query::decode(bytes) {
        assert_eq!(Query::decode(&query.encode()), Some(query), "a decoded query encodes to another");
    }
    if let Some(reply) = Reply::decode(bytes) {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply), "a decoded reply encodes to another");
    }
}

/// Returns some valid messages of each kind.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let call = Descriptor { seq: 7, count: 3, ..Descriptor::nothing() };
    let decision = Decision { nonce: 5, members: vec![0, 2, 3] };
    let waits = Some((1, call.encode()));
    vec![
        Query::Doing(Some(call)).encode(),
        Query::Join.encode(),
        Query::Prepare(17).encode(),
        Query::Decided(decision.clone(), 17).encode(),
        Reply::Left { last_seq: 9 }.encode(),
        Reply::Doing {
            reports: Vec::new(),
            diagnosing: Some(Diagnosing::default()),
            waits,
            elsewhere: Some((3, Some(call))),
            at_your_seq: Some(call),
            last_seq: 6,
        }
        .encode(),
        Reply::Joins { shrinks: true, promised: 17, decision: Some(decision) }.encode(),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::report::Failure;
    use super::*;
    use crate::error::Cause;

    #[test]
    fn messages_survive_the_wire() {
        let decision = Decision { nonce: 7 << 60, members: vec![0, 2, 5] };
        let call = Descriptor { seq: 9, ..Descriptor::nothing() };
        let what = Failure::Failed { culprit: 3, cause: Cause::Died };
        let reports = vec![FailureReport { origin: 0, what, during: call, after: Duration::from_millis(1), completed: 8 }];
        for query in [
            Query::Doing(None),
            Query::Doing(Some(call)),
            Query::Reports(vec![]),
            Query::Reports(reports.clone()),
            Query::Join,
            Query::Prepare(9),
            Query::Decided(decision.clone(), 1 << 40),
        ] {
            assert_eq!(Query::decode(&query.encode()), Some(query));
        }
        let joins = |decision| Reply::Joins { shrinks: true, promised: 3, decision };
        let does = |waits, elsewhere, at_your_seq| Reply::Doing {
            reports: reports.clone(),
            diagnosing: Some(Diagnosing { about: Some(3), is_cut_off: true }),
            waits,
            elsewhere,
            at_your_seq,
            last_seq: 4,
        };
        for answer in [
            Reply::Unknown,
            Reply::Left { last_seq: 812 },
            does(None, None, None),
            does(None, Some((5, None)), None),
            does(Some((2, call.encode())), Some((1, Some(call))), Some(call)),
            joins(None),
            joins(Some(decision)),
        ] {
            assert_eq!(Reply::decode(&answer.encode()), Some(answer));
        }
    }

    #[test]
    fn members_out_of_order_are_refused() {
        for members in [vec![], vec![1, 1], vec![2, 0]] {
            assert_eq!(Query::decode(&Query::Decided(Decision { nonce: 0, members }, 0).encode()), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u64..8) {
            let _ = (Query::decode(&bytes), Reply::decode(&bytes));
            let tagged = [&kind.to_le_bytes()[..], &bytes].concat();
            let _ = (Query::decode(&tagged), Reply::decode(&tagged));
        }
    }
}

//! The reports in which ranks tell each other why a communicator ended, and the order in which they
//! count.

use std::cmp::Reverse;
use std::io::ErrorKind;
use std::time::Duration;

use super::context::CommInfo;
use super::encoding::{read_call, write_call};
use crate::error::{CallMismatch, Cause, Elsewhere, Error, Unmatched};
use crate::types::{Descriptor, Member, Op, Rank, Tag};
use crate::wire::{Reader, Writer};

/// What one rank diagnosed. All ranks in it are ranks of the communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailureReport {
    /// The rank that made the report.
    pub(crate) origin: Rank,
    pub(crate) what: Failure,
    /// The operation that failed on that rank.
    pub(crate) during: Descriptor,
    /// How long it had been running.
    pub(crate) after: Duration,
    /// The last collective that was completed on that rank.
    pub(crate) completed: u64,
}

/// The kinds of failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Failed {
        culprit: Rank,
        cause: Cause,
    },
    /// Ranks called different operations: one that made the right call, and the rank at fault. They
    /// were found among the calls of `known` ranks. In a tie, as many of these made the one call as
    /// the other.
    Mismatch {
        ranks: [Rank; 2],
        calls: [Descriptor; 2],
        known: usize,
        is_tie: bool,
    },
    Counts {
        from: Rank,
        to: Rank,
        sent: u64,
        expected: u64,
    },
}

/// Returns the place of a cause in the order of what explains what. A rank that was killed comes before
/// one that left in good order, and that one before one that only keeps others waiting.
fn class(cause: &Cause) -> u8 {
    match cause {
        Cause::Diverged | Cause::Corrupt(_) | Cause::Secret | Cause::Tls(_) | Cause::Mismatch(_) | Cause::Counts { .. } => 1,
        Cause::Aborted | Cause::Failed(_) | Cause::Panicked => 2,
        Cause::Died | Cause::Closed => 3,
        // It may have left.
        Cause::Gone => 4,
        Cause::Broken(_) | Cause::Unreachable { .. } => 5,
        Cause::Stopped { .. } | Cause::Unresponsive { .. } => 6,
        Cause::Left { .. } => 7,
        Cause::Absent { .. } | Cause::Unmatched { .. } => 8,
        Cause::Silent { .. } => 9,
        Cause::Revoked => 10,
        Cause::Shrinks => 11,
    }
}

/// Returns the rank to name of those that are lost.
pub(crate) fn culprit_of<'a>(lost: impl IntoIterator<Item = &'a (Rank, Cause)>) -> Option<&'a (Rank, Cause)> {
    lost.into_iter().min_by_key(|(rank, cause)| (class(cause), *rank))
}

impl FailureReport {
    /// Returns the rank that has failed and cannot answer, if the report is of one, and the cause.
    pub(super) fn absence(&self) -> Option<(Rank, &Cause)> {
        let Failure::Failed { culprit, cause } = &self.what else { return None };
        let cannot_answer = matches!(
            cause,
            Cause::Died
                | Cause::Closed
                | Cause::Gone
                | Cause::Stopped { .. }
                | Cause::Unresponsive { .. }
                | Cause::Unreachable { .. }
        );
        cannot_answer.then_some((*culprit, cause))
    }

    /// The order in which reports count: all ranks report the least. A failure that explains others
    /// comes first: a rank that is gone or called another operation keeps others waiting, and not
    /// the other way round. Of two mismatches, the one found among more calls counts.
    pub(crate) fn order(&self) -> (u8, Reverse<usize>, Rank, u64, Rank) {
        let (class, culprit) = match &self.what {
            Failure::Mismatch { ranks: [_, culprit], .. } => (0, *culprit),
            Failure::Counts { from, .. } => (0, *from),
            Failure::Failed { culprit, cause } => (class(cause), *culprit),
        };
        let known = if let Failure::Mismatch { known, .. } = self.what { known } else { 0 };
        (class, Reverse(known), culprit, self.during.seq, self.origin)
    }

    /// Returns the report for an error, or `None` if the error is not about a peer.
    pub(crate) fn of(error: &Error, info: &CommInfo, completed: u64) -> Option<FailureReport> {
        let origin = info.rank;
        Some(match error {
            Error::Peer { rank, op, seq, dtype, count, after, cause, .. } => {
                let during = Descriptor { op: *op, seq: *seq, dtype: *dtype, count: *count, ..Descriptor::nothing() };
                FailureReport {
                    origin,
                    what: Failure::Failed { culprit: *rank, cause: cause.clone() },
                    during,
                    after: *after,
                    completed,
                }
            }
            Error::Mismatch { rank, peer, mine, theirs, is_tie, .. } => {
                let (ranks, calls, is_tie) = ([*rank, *peer], [**mine, **theirs], *is_tie);
                let what = Failure::Mismatch { ranks, calls, known: 2, is_tie };
                FailureReport { origin, what, during: **mine, after: Duration::ZERO, completed }
            }
            Error::Counts { rank, peer, op, seq, sent, expected, .. } => {
                let what = Failure::Counts { from: *peer, to: *rank, sent: *sent, expected: *expected };
                let during = Descriptor { op: *op, seq: *seq, ..Descriptor::nothing() };
                FailureReport { origin, what, during, after: Duration::ZERO, completed }
            }
            _ => return None,
        })
    }

    /// Returns the error that this rank reports. `during` is the operation that was running here,
    /// and its age. `call_at` returns this rank's collective with a sequence number.
    pub(crate) fn error(
        &self,
        info: &CommInfo,
        during: Option<(Descriptor, Duration)>,
        call_at: impl FnOnce(u64) -> Option<Descriptor>,
    ) -> Error {
        let peer = |rank: Rank, cause| {
            let (Descriptor { op, seq, dtype, count, .. }, after) = during.unwrap_or((self.during, self.after));
            let after = if after.is_zero() { self.after } else { after };
            let Member { host, pid } = info.members[rank].clone();
            Error::Peer { rank, host, pid, op, seq, dtype, count, after, cause }
        };
        let host = |rank: Rank| info.members[rank].host.clone();
        let me = info.rank;
        // This rank waited in another call than the one in which a peer waited for it.
        if let (Failure::Failed { culprit, cause: Cause::Absent { .. } }, Some((mine, _))) = (&self.what, during)
            && *culprit == me
            && self.origin != me
            && mine.op.of_pair() != self.during.op.of_pair()
        {
            return Error::Mismatch {
                culprit: me,
                rank: me,
                peer: self.origin,
                host: host(self.origin),
                mine: Box::new(mine),
                theirs: Box::new(self.during),
                is_tie: false,
            };
        }
        match &self.what {
            Failure::Failed { culprit, cause: Cause::Aborted | Cause::Panicked | Cause::Shrinks } if *culprit == me => {
                let Descriptor { op, seq, .. } = during.map_or(self.during, |(during, _)| during);
                Error::Aborted { op, seq }
            }
            Failure::Failed { culprit, cause } => peer(*culprit, cause.clone()),
            Failure::Mismatch { ranks: [witness, culprit], calls: [right, wrong], is_tie, .. } => {
                let (witness, culprit, right, wrong, is_tie) = (*witness, *culprit, *right, *wrong, *is_tie);
                let is_collective = [right, wrong].iter().all(|call| !call.op.is_point_to_point() && call.op != Op::Connect);
                let is_message = during.is_some_and(|(during, _)| during.op.is_point_to_point());
                let mine = match me {
                    _ if me == witness => Some(right),
                    _ if me == culprit => Some(wrong),
                    // A send or receive of this rank is no call that could match.
                    _ if is_collective && !is_message => call_at(wrong.seq),
                    _ => None,
                };
                let shown = |mine, peer, theirs| Error::Mismatch {
                    culprit,
                    rank: me,
                    peer,
                    host: host(peer),
                    mine: Box::new(mine),
                    theirs: Box::new(theirs),
                    // This rank may have made a third call.
                    is_tie: is_tie && [right, wrong].contains(&mine),
                };
                match mine {
                    // This rank made the wrong call too.
                    Some(mine) if mine == wrong => shown(mine, witness, right),
                    Some(mine) => shown(mine, culprit, wrong),
                    // This rank has not made the call.
                    None => {
                        let calls = CallMismatch { mine: wrong, rank: witness, theirs: right, is_tie };
                        peer(culprit, Cause::Mismatch(Box::new(calls)))
                    }
                }
            }
            Failure::Counts { from, to, sent, expected } if *to == me => {
                let Descriptor { op, seq, .. } = self.during;
                Error::Counts { rank: me, peer: *from, host: host(*from), op, seq, sent: *sent, expected: *expected }
            }
            Failure::Counts { from, to, sent, expected } => {
                peer(*from, Cause::Counts { to: *to, sent: *sent, expected: *expected })
            }
        }
    }

    /// Whether all of its ranks exist in a communicator of `world` ranks.
    pub(crate) fn is_of(&self, world: usize) -> bool {
        let ranks = match &self.what {
            Failure::Failed { culprit, cause: Cause::Mismatch(differs) } => [*culprit, differs.rank],
            Failure::Failed { culprit, cause: Cause::Counts { to, .. } } => [*culprit, *to],
            Failure::Failed { culprit, cause: Cause::Absent { elsewhere: Some(elsewhere), .. } } => {
                [*culprit, elsewhere.rank.unwrap_or(*culprit)]
            }
            Failure::Failed { culprit, .. } => [*culprit; 2],
            Failure::Mismatch { ranks, .. } => *ranks,
            Failure::Counts { from, to, .. } => [*from, *to],
        };
        self.origin < world && ranks.iter().all(|&rank| rank < world)
    }

    pub(super) fn write(&self, writer: &mut Writer) {
        writer.number(self.origin as u64).number(self.after.as_micros() as u64).number(self.completed);
        write_call(writer, &self.during);
        match &self.what {
            Failure::Failed { culprit, cause } => write_cause(writer.number(0).number(*culprit as u64), cause),
            Failure::Mismatch { ranks, calls, known, is_tie } => {
                writer.number(1).number(ranks[0] as u64).number(ranks[1] as u64).number(*known as u64).number((*is_tie).into());
                calls.iter().for_each(|call| write_call(writer, call));
            }
            Failure::Counts { from, to, sent, expected } => {
                writer.number(2).number(*from as u64).number(*to as u64).number(*sent).number(*expected);
            }
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Option<FailureReport> {
        let (origin, after) = (reader.size()?, Duration::from_micros(reader.number()?));
        let completed = reader.number()?;
        let during = read_call(reader)?;
        let what = match reader.number()? {
            0 => Failure::Failed { culprit: reader.size()?, cause: read_cause(reader)? },
            1 => {
                let (ranks, known, is_tie) = ([reader.size()?, reader.size()?], reader.size()?, reader.number()? != 0);
                Failure::Mismatch { ranks, calls: [read_call(reader)?, read_call(reader)?], known, is_tie }
            }
            2 => Failure::Counts { from: reader.size()?, to: reader.size()?, sent: reader.number()?, expected: reader.number()? },
            _ => return None,
        };
        Some(FailureReport { origin, what, during, after, completed })
    }
}

/// The kinds of I/O error that have a number in messages. Others become the last.
const KINDS: [ErrorKind; 12] = [
    ErrorKind::ConnectionRefused,
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::NotConnected,
    ErrorKind::AddrNotAvailable,
    ErrorKind::TimedOut,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::NetworkDown,
    ErrorKind::BrokenPipe,
    ErrorKind::PermissionDenied,
    ErrorKind::Other,
];

fn write_cause(writer: &mut Writer, cause: &Cause) {
    let micros = |duration: &Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let kind = |kind: &ErrorKind| KINDS.iter().position(|known| known == kind).unwrap_or(KINDS.len() - 1) as u64;
    match cause {
        Cause::Closed => writer.number(0),
        Cause::Died => writer.number(1),
        Cause::Left { last_seq } => writer.number(2).number(*last_seq),
        Cause::Silent { deadline } => writer.number(3).number(micros(deadline)),
        Cause::Broken(broken) => writer.number(4).number(kind(broken)),
        Cause::Unreachable { address, kind: why } => writer.number(5).text(address).number(kind(why)),
        Cause::Secret => writer.number(6),
        Cause::Revoked => writer.number(7),
        Cause::Diverged => writer.number(8),
        Cause::Corrupt(_) => writer.number(9),
        Cause::Absent { deadline, last_seq, elsewhere } => {
            writer.number(10).number(micros(deadline)).number(*last_seq).list(elsewhere.as_slice(), |writer, elsewhere| {
                let Elsewhere { job_rank, rank, call } = **elsewhere;
                writer.number(job_rank as u64).list(rank.as_slice(), |writer, &rank| _ = writer.number(rank as u64));
                writer.list(call.as_slice(), write_call);
            })
        }
        Cause::Stopped { deadline } => writer.number(11).number(micros(deadline)),
        Cause::Unresponsive { deadline } => writer.number(12).number(micros(deadline)),
        Cause::Gone => writer.number(13),
        Cause::Aborted => writer.number(14),
        Cause::Mismatch(differs) => {
            write_call(writer.number(15).number(differs.rank as u64), &differs.mine);
            write_call(writer, &differs.theirs);
            writer.number(differs.is_tie.into())
        }
        Cause::Counts { to, sent, expected } => writer.number(16).number(*to as u64).number(*sent).number(*expected),
        Cause::Tls(why) => writer.number(17).text(why),
        Cause::Panicked => writer.number(18),
        Cause::Failed(why) => writer.number(19).text(why),
        Cause::Shrinks => writer.number(20),
        Cause::Unmatched { deadline, unmatched } => {
            let Unmatched { tag, is_itself, waiting, tags, refused } = &**unmatched;
            // 0 is none.
            let number = |tag: &Option<Tag>| tag.map_or(0, |tag| u64::from(tag) + 1);
            writer.number(21).number(micros(deadline)).number(number(tag)).number((*is_itself).into());
            writer.number(*waiting).number(number(refused)).list(tags, |writer, &tag| _ = writer.number(tag.into()))
        }
    };
}

fn read_cause(reader: &mut Reader<'_>) -> Option<Cause> {
    let kind = reader.number()?;
    let mut micros = || reader.number().map(Duration::from_micros);
    Some(match kind {
        0 => Cause::Closed,
        1 => Cause::Died,
        2 => Cause::Left { last_seq: reader.number()? },
        3 => Cause::Silent { deadline: micros()? },
        4 => Cause::Broken(*KINDS.get(reader.size()?)?),
        5 => Cause::Unreachable { address: reader.text()?, kind: *KINDS.get(reader.size()?)? },
        6 => Cause::Secret,
        7 => Cause::Revoked,
        8 => Cause::Diverged,
        9 => Cause::Corrupt("another rank reports it"),
        10 => {
            let (deadline, last_seq) = (micros()?, reader.number()?);
            let elsewhere = reader.list(|reader| {
                let (job_rank, rank) = (reader.size()?, reader.list(Reader::size)?.pop());
                Some(Box::new(Elsewhere { job_rank, rank, call: reader.list(read_call)?.pop() }))
            })?;
            Cause::Absent { deadline, last_seq, elsewhere: elsewhere.into_iter().next() }
        }
        11 => Cause::Stopped { deadline: micros()? },
        12 => Cause::Unresponsive { deadline: micros()? },
        13 => Cause::Gone,
        14 => Cause::Aborted,
        15 => {
            let rank = reader.size()?;
            let (mine, theirs, is_tie) = (read_call(reader)?, read_call(reader)?, reader.number()? != 0);
            Cause::Mismatch(Box::new(CallMismatch { mine, rank, theirs, is_tie }))
        }
        16 => Cause::Counts { to: reader.size()?, sent: reader.number()?, expected: reader.number()? },
        17 => Cause::Tls(reader.text()?),
        18 => Cause::Panicked,
        19 => Cause::Failed(reader.text()?),
        20 => Cause::Shrinks,
        21 => {
            let deadline = micros()?;
            let tag_of = |number: u64| number.checked_sub(1).map(|tag| tag as Tag);
            let (tag, is_itself) = (tag_of(reader.number()?), reader.number()? != 0);
            let (waiting, refused) = (reader.number()?, tag_of(reader.number()?));
            let tags = reader.list(|reader| Some(reader.number()? as Tag))?;
            Cause::Unmatched { deadline, unmatched: Box::new(Unmatched { tag, is_itself, waiting, tags, refused }) }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_wire() {
        let during = Descriptor { seq: 812, count: 3, ..Descriptor::nothing() };
        let deadline = Duration::from_micros(1_500_000);
        let elsewhere = Elsewhere { job_rank: 9, rank: Some(0), call: Some(during) };
        let (last_seq, address) = (7, "[fd00::2]:4000".to_owned());
        let causes = [
            Cause::Closed,
            Cause::Shrinks,
            Cause::Died,
            Cause::Left { last_seq },
            Cause::Silent { deadline },
            Cause::Broken(ErrorKind::ConnectionReset),
            Cause::Unreachable { address, kind: ErrorKind::TimedOut },
            Cause::Secret,
            Cause::Revoked,
            Cause::Diverged,
            Cause::Corrupt("another rank reports it"),
            Cause::Absent { deadline, last_seq, elsewhere: None },
            Cause::Absent { deadline, last_seq, elsewhere: Some(Box::new(elsewhere)) },
            Cause::Stopped { deadline },
            Cause::Unresponsive { deadline },
            Cause::Gone,
            Cause::Aborted,
            Cause::Mismatch(Box::new(CallMismatch { mine: during, rank: 1, theirs: Descriptor::nothing(), is_tie: true })),
            Cause::Counts { to: 1, sent: 4, expected: 8 },
            Cause::Tls("unknown issuer".to_owned()),
            Cause::Panicked,
            Cause::Failed("listening: too many open files".to_owned()),
            Cause::Unmatched {
                deadline,
                unmatched: Box::new(Unmatched { tag: Some(9), is_itself: false, waiting: 3, tags: vec![5, 7], refused: Some(0) }),
            },
        ];
        let failed = causes.map(|cause| Failure::Failed { culprit: 2, cause });
        let pairs = [
            Failure::Mismatch { ranks: [0, 3], calls: [during, Descriptor::nothing()], known: 4, is_tie: true },
            Failure::Counts { from: 2, to: 0, sent: 1, expected: 9 },
        ];
        for what in failed.into_iter().chain(pairs) {
            let report = FailureReport { origin: 1, what, during, after: Duration::from_micros(83_000), completed: 811 };
            let mut writer = Writer::default();
            report.write(&mut writer);
            assert_eq!(FailureReport::read(&mut Reader::new(&writer.0)), Some(report.clone()));
            assert!(report.is_of(4) && !report.is_of(1));
        }
    }
}

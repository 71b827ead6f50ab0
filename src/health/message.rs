//! Questions and answers as bytes. Reading expects anything.

use super::shrink::Decision;
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// What a rank asks another of the same communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// I want to go on without those who failed. You too?
    Join,
    /// These go on.
    Decided(Decision),
}

/// What it hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// There is no such communicator here.
    Unknown,
    /// There is none any more; its last operation was this.
    Left { last_seq: u64 },
    /// Whether the rank wants to go on, too, and who does, if that is decided.
    Joins { shrinks: bool, decision: Option<Decision> },
}

const JOIN: u64 = 1;
const DECIDED: u64 = 2;

const UNKNOWN: u64 = 0;
const LEFT: u64 = 1;
const JOINS: u64 = 2;

impl Question {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Question::Join => _ = writer.number(JOIN),
            Question::Decided(decision) => write_decision(writer.number(DECIDED), decision),
        }
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Question> {
        let mut reader = Reader::new(bytes);
        Some(match reader.number()? {
            JOIN => Question::Join,
            DECIDED => Question::Decided(read_decision(&mut reader)?),
            _ => return None,
        })
    }
}

impl Answer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Answer::Unknown => _ = writer.number(UNKNOWN),
            Answer::Left { last_seq } => _ = writer.number(LEFT).number(*last_seq),
            Answer::Joins { shrinks, decision } => {
                writer.number(JOINS).number((*shrinks).into());
                writer.list(decision.as_slice(), write_decision);
            }
        }
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Answer> {
        let mut reader = Reader::new(bytes);
        Some(match reader.number()? {
            UNKNOWN => Answer::Unknown,
            LEFT => Answer::Left { last_seq: reader.number()? },
            JOINS => {
                let shrinks = reader.number()? != 0;
                Answer::Joins { shrinks, decision: reader.list(read_decision)?.pop() }
            }
            _ => return None,
        })
    }
}

fn write_decision(writer: &mut Writer, decision: &Decision) {
    writer.number(decision.nonce).list(&decision.members, |writer, &member| _ = writer.number(member as u64));
}

fn read_decision(reader: &mut Reader<'_>) -> Option<Decision> {
    let (nonce, members) = (reader.number()?, reader.list(Reader::size)?);
    let is_ordered = |members: &[Rank]| members.iter().zip(members.iter().skip(1)).all(|(one, next)| one < next);
    (!members.is_empty() && is_ordered(&members)).then_some(Decision { nonce, members })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let decision = Decision { nonce: 7 << 60, members: vec![0, 2, 5] };
        for question in [Question::Join, Question::Decided(decision.clone())] {
            assert_eq!(Question::decode(&question.encode()), Some(question));
        }
        let joins = |decision| Answer::Joins { shrinks: true, decision };
        for answer in [Answer::Unknown, Answer::Left { last_seq: 812 }, joins(None), joins(Some(decision))] {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
    }

    #[test]
    fn members_without_an_order_are_no_decision() {
        for members in [vec![], vec![1, 1], vec![2, 0]] {
            assert_eq!(Question::decode(&Question::Decided(Decision { nonce: 0, members }).encode()), None);
        }
    }

    proptest! {
        #[test]
        fn anything_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u64..8) {
            let _ = (Question::decode(&bytes), Answer::decode(&bytes));
            let tagged = [&kind.to_le_bytes()[..], &bytes].concat();
            let _ = (Question::decode(&tagged), Answer::decode(&tagged));
        }
    }
}

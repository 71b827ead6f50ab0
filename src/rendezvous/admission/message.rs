//! What rank 0 writes to the place of a newcomer, and the keys of a waiting list.

use crate::rendezvous::peer_table::{PeerTable, Refusal};
use crate::rendezvous::start::MOST_RANKS;
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// Present once the job has ended.
pub(super) const CLOSED: &str = "closed";

/// The peer info of the newcomer with this place.
pub(super) fn newcomer_at(place: usize) -> String {
    format!("newcomer/{place}")
}

/// The admission of the newcomer with this place.
pub(super) fn admission_at(place: usize) -> String {
    format!("admission/{place}")
}

/// What becomes of a newcomer.
#[derive(Clone, Debug)]
pub(super) enum Admission {
    /// It becomes this rank of the communicator that this growth makes.
    Admitted { growth: u64, rank: Rank, world_size: usize },
    /// It cannot be a rank of the job.
    Refused(Refusal),
}

const ADMITTED: u64 = 0;
const REFUSED: u64 = 1;

impl Admission {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Admission::Admitted { growth, rank, world_size } => {
                writer.number(ADMITTED).number(*growth).number(*rank as u64).number(*world_size as u64);
            }
            Admission::Refused(refusal) => {
                writer.number(REFUSED).bytes(&PeerTable::Refused(refusal.clone()).encode());
            }
        }
        writer.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Admission> {
        let mut reader = Reader::new(bytes);
        match reader.number()? {
            ADMITTED => {
                let (growth, rank, world_size) = (reader.number()?, reader.size()?, reader.size()?);
                // Its rank 0 was there before.
                let is_valid = rank > 0 && rank < world_size && world_size <= MOST_RANKS;
                is_valid.then_some(Admission::Admitted { growth, rank, world_size })
            }
            REFUSED => match PeerTable::decode(reader.bytes()?)? {
                PeerTable::Refused(refusal) => Some(Admission::Refused(refusal)),
                PeerTable::Members { .. } => None,
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples() -> [Vec<u8>; 2] {
        let refusal = Refusal::Forged { key: "newcomer/0".to_owned() };
        [Admission::Admitted { growth: 7, rank: 2, world_size: 3 }, Admission::Refused(refusal)].map(|one| one.encode())
    }

    #[test]
    fn admissions_survive_encoding() {
        for sample in samples() {
            assert_eq!(Admission::decode(&sample).unwrap().encode(), sample);
            for len in 0..sample.len() {
                assert!(Admission::decode(&sample[..len]).is_none(), "cut at {len}");
            }
        }
    }

    #[test]
    fn a_rank_out_of_range_is_refused() {
        for (rank, world_size) in [(0, 2), (2, 2), (3, 2), (1, usize::MAX)] {
            let bytes = Admission::Admitted { growth: 1, rank, world_size }.encode();
            assert!(Admission::decode(&bytes).is_none(), "rank {rank} of {world_size}");
        }
    }

    proptest! {
        #[test]
        fn damaged_admissions_cause_no_panic(which in 0usize..2, at in 0usize..100, bits: u8, cut in 0usize..100) {
            let mut bytes = samples()[which].clone();
            let at = at % bytes.len();
            bytes[at] ^= bits;
            bytes.truncate(cut);
            if let Some(Admission::Admitted { rank, world_size, .. }) = Admission::decode(&bytes) {
                prop_assert!(rank < world_size);
            }
        }
    }
}

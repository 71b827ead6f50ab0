//! Compares what the ranks were given, and finds the first difference.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::builder::ReducerBuilder;
use crate::communicator::Communicator;
use crate::error::{Error, ReducerError, Result};
use crate::types::Rank;

/// What a rank was given: texts under keys, compared in the order of the keys.
type Listing = BTreeMap<(u32, u32), String>;

const PARAMETERS: u32 = 0;
const BUFFERS: u32 = 1;
const OPTIONS: u32 = 2;

/// The most bytes of a listing; no model needs as many.
const MOST_BYTES: u64 = 1 << 28;

/// The key that stands for no difference.
const NONE: [u32; 2] = [u32::MAX; 2];

fn label((section, index): (u32, u32)) -> String {
    match section {
        PARAMETERS => format!("parameter {index}"),
        BUFFERS => format!("buffer {index}"),
        _ => "the options".to_owned(),
    }
}

fn listing(builder: &ReducerBuilder) -> Listing {
    let ReducerBuilder {
        parameters,
        buffers,
        bucket_bytes,
        first_bucket_bytes,
        unused,
        uneven,
        overlap: _,
        rebuild,
        hook,
        device: _,
    } = builder;
    let entries = |section, list: &[super::Parameter]| {
        let texts = list.iter().enumerate().map(move |(index, entry)| ((section, index as u32), entry.to_string()));
        texts.collect::<Vec<_>>()
    };
    let options = format!(
        "buckets of {first_bucket_bytes} and {bucket_bytes} bytes, Unused::{unused:?}, Uneven::{uneven:?}, rebuild={rebuild}, hook {:?}",
        hook.name()
    );
    let all = [entries(PARAMETERS, parameters), entries(BUFFERS, buffers), vec![((OPTIONS, 0), options)]];
    all.into_iter().flatten().collect()
}

/// Fails on every rank if the ranks were given different parameters, buffers or options. A
/// collective call; it costs one small collective if all agree.
pub(super) fn agree_on_options(comm: &Communicator, builder: &ReducerBuilder) -> Result<()> {
    let mine = listing(builder);
    let encoded = encode(&mine);
    let digest: [u8; 32] = Sha256::digest(&encoded).into();
    let mut digests = vec![0u8; 32 * comm.world_size()];
    comm.all_gather(&digest, &mut digests)?;
    if digests.chunks_exact(32).all(|other| other == digest) {
        return Ok(());
    }
    let first = decode(&broadcast(comm, encoded, 0)?);
    let difference = difference(&first, &mine).map_or(NONE, |(section, index)| [section, index]);
    let mut differences = vec![0u32; 2 * comm.world_size()];
    comm.all_gather(&difference, &mut differences)?;
    let earliest = differences.chunks_exact(2).enumerate().map(|(rank, key)| ((key[0], key[1]), rank)).min();
    let (key, rank) = earliest.expect("a communicator has a rank");
    let text = |listing: &Listing| listing.get(&key).map_or_else(|| "nothing".to_owned(), |text| format!("`{text}`"));
    let other = broadcast(comm, text(&mine).into_bytes(), rank)?;
    let other = String::from_utf8_lossy(&other).into_owned();
    Err(ReducerError::Mismatch { what: label(key), first: text(&first), rank, other }.into())
}

/// Succeeds if all ranks succeeded. Otherwise every rank learns which rank failed first, and why. A
/// collective call.
pub(super) fn agree_on_success<T>(comm: &Communicator, mine: Result<T>) -> Result<T> {
    let mut all = vec![0u8; comm.world_size()];
    comm.all_gather(&[u8::from(mine.is_err())], &mut all)?;
    let Some(first) = all.iter().position(|&failed| failed != 0) else { return mine };
    let text = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let text = broadcast(comm, text.into_bytes(), first)?;
    mine.and_then(|_| Err(ReducerError::Refused { rank: first, why: String::from_utf8_lossy(&text).into_owned() }.into()))
}

/// Returns the first key under which two listings have different texts.
fn difference(one: &Listing, other: &Listing) -> Option<(u32, u32)> {
    one.keys().chain(other.keys()).filter(|key| one.get(key) != other.get(key)).min().copied()
}

/// Encodes the key, the length and the text of every entry.
fn encode(listing: &Listing) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (&(section, index), text) in listing {
        for number in [section, index, text.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// Decodes as many entries as are valid. A missing entry counts as a difference.
fn decode(mut bytes: &[u8]) -> Listing {
    let mut listing = Listing::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<12>() {
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let Some((text, rest)) = rest.split_at_checked(number(8) as usize) else { break };
        listing.insert((number(0), number(4)), String::from_utf8_lossy(text).into_owned());
        bytes = rest;
    }
    listing
}

/// Broadcasts bytes whose length only the root knows.
fn broadcast(comm: &Communicator, mine: Vec<u8>, root: Rank) -> Result<Vec<u8>> {
    let mut len = [mine.len() as u64];
    comm.broadcast(&mut len, root)?;
    if len[0] > MOST_BYTES {
        let value = format!("{} bytes", len[0]);
        return Err(Error::setting("parameters", value, "names and shapes that can be compared: at most 256 MiB"));
    }
    let mut bytes = if comm.rank() == root { mine } else { vec![0; len[0] as usize] };
    comm.broadcast(&mut bytes, root)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ddp::Parameter;
    use crate::types::DType;

    #[test]
    fn listings_survive_the_wire() {
        let parameters = [Parameter::new("a\n`b`", [2, 3], DType::F32), Parameter::new("", [], DType::BF16)];
        let mine = listing(&ReducerBuilder::default().parameters(parameters));
        assert_eq!(decode(&encode(&mine)), mine);
        let encoded = encode(&mine);
        for len in 0..encoded.len() {
            // Decoding ends on any input.
            assert!(difference(&decode(&encoded[..len]), &mine).is_some(), "{len}");
        }
    }

    #[test]
    fn the_first_difference_is_found_whichever_list_is_longer() {
        let named = |names: &[&str]| {
            let parameters: Vec<_> = names.iter().map(|&name| Parameter::new(name, [1], DType::F32)).collect();
            listing(&ReducerBuilder::default().parameters(parameters))
        };
        assert_eq!(difference(&named(&["a", "b"]), &named(&["a", "c"])), Some((PARAMETERS, 1)));
        assert_eq!(difference(&named(&["a"]), &named(&["a", "c"])), Some((PARAMETERS, 1)));
        assert_eq!(difference(&named(&["a", "c"]), &named(&["a"])), Some((PARAMETERS, 1)));
        assert_eq!(difference(&named(&["a"]), &named(&["a"])), None);
    }
}

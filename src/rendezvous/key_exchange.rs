//! How ranks agree on a secret through a store that other processes can read: X25519 (RFC 7748),
//! with a key pair of each rank for this run only.
//!
//! Rank 0 chooses the secret and announces its public key. Each other rank puts its own public key
//! into the store ([`KeyShare`]). Rank 0 answers with the secret, encrypted and signed with a key
//! that only these two ranks can compute. A process that only reads the store learns nothing. A
//! process that can write to the store can replace a rank's public key with its own: the exchange
//! cannot distinguish a rank from a process that writes first.

use crate::network::identity::{Key, Run, random_secret};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// A rank's keys for one run.
#[derive(Clone)]
pub(super) struct KeyPair {
    private: [u8; 32],
    pub(super) public: [u8; 32],
}

impl KeyPair {
    pub(super) fn random() -> KeyPair {
        KeyPair::of(random_secret())
    }

    fn of(private: [u8; 32]) -> KeyPair {
        KeyPair { private, public: x25519_dalek::x25519(private, x25519_dalek::X25519_BASEPOINT_BYTES) }
    }

    /// Returns the key that only this rank and the owner of a public key can compute; `None` if the
    /// public key is of small order.
    fn shared(&self, theirs: &[u8; 32]) -> Option<Key> {
        let shared = multiply(self.private, *theirs)?;
        Some(Key::derive(Some(&shared), "kolo key exchange"))
    }
}

/// Computes X25519; `None` for public keys of small order, which give zeros with every private key.
/// No rank has such a key.
fn multiply(private: [u8; 32], public: [u8; 32]) -> Option<[u8; 32]> {
    Some(x25519_dalek::x25519(private, public)).filter(|product| *product != [0; 32])
}

/// What a rank puts into the store: its public key, and its process for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyShare {
    pub(super) public: [u8; 32],
    pub(super) process: String,
}

/// The most characters of a process's name that an error shows.
const MOST_SHOWN: usize = 100;

impl KeyShare {
    /// Returns the process for an error message: quoted, escaped and cut, because any process may
    /// have written it.
    pub(super) fn shown(&self) -> String {
        format!("{:?}", self.process.chars().take(MOST_SHOWN).collect::<String>())
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(&self.public).text(&self.process);
        writer.0
    }

    /// Decodes a public key; `None` if no rank can have written these bytes.
    pub(super) fn decode(bytes: &[u8]) -> Option<KeyShare> {
        let mut reader = Reader::new(bytes);
        let public = reader.bytes()?.try_into().ok()?;
        // Any private key reveals a public key of small order.
        multiply([1; 32], public)?;
        Some(KeyShare { public, process: reader.text()? })
    }
}

/// One exchange of keys, between rank 0 and another rank.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) job: &'a str,
    pub(super) run: Run,
    /// The rank that learns the secret from rank 0.
    pub(super) rank: Rank,
    /// The public keys of rank 0 and of that rank.
    pub(super) publics: [[u8; 32]; 2],
}

impl Exchange<'_> {
    /// Encrypts the secret for the rank; `None` if its public key is of small order.
    pub(super) fn wrap(&self, zero: &KeyPair, secret: &[u8; 32]) -> Option<Vec<u8>> {
        let key = zero.shared(&self.publics[1])?;
        let hidden = self.masked(&key, secret);
        Some([hidden, self.mac(&key, &hidden)].concat())
    }

    /// Decrypts the secret; `None` if rank 0 did not encrypt it for this exchange.
    pub(super) fn unwrap(&self, own: &KeyPair, wrapped: &[u8]) -> Option<[u8; 32]> {
        let (hidden, mac) = wrapped.split_first_chunk().filter(|(_, mac)| mac.len() == 32)?;
        let key = own.shared(&self.publics[0])?;
        key.is_signed(&[b"mac", &self.context(), hidden], mac).then(|| self.masked(&key, hidden))
    }

    /// Encrypts or decrypts 32 bytes. A key serves for one secret only.
    fn masked(&self, key: &Key, bytes: &[u8; 32]) -> [u8; 32] {
        let mask = key.sign(&[b"mask", &self.context()]);
        std::array::from_fn(|i| bytes[i] ^ mask[i])
    }

    fn mac(&self, key: &Key, hidden: &[u8; 32]) -> [u8; 32] {
        key.sign(&[b"mac", &self.context(), hidden])
    }

    fn context(&self) -> Vec<u8> {
        let mut context = Writer::default();
        context.text(self.job).bytes(&self.run).number(self.rank as u64);
        context.bytes(&self.publics[0]).bytes(&self.publics[1]);
        context.0
    }
}

/// Decodes what a store holds in place of a public key or the encrypted secret.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(key_share) = KeyShare::decode(bytes) {
        assert_eq!(KeyShare::decode(&key_share.encode()), Some(key_share), "a key share changes when it is encoded and decoded");
    }
    let own = KeyPair { private: [5; 32], public: [6; 32] };
    let exchange = Exchange { job: "job", run: [3; 16], rank: 1, publics: [[9; 32], own.public] };
    assert_eq!(exchange.unwrap(&own, bytes), None, "a rank accepts a secret that rank 0 did not encrypt");
}

/// Returns a public key, and an encrypted secret for another rank.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let (zero, other) = (KeyPair::of([1; 32]), KeyPair::of([2; 32]));
    let exchange = Exchange { job: "job", run: [3; 16], rank: 1, publics: [zero.public, other.public] };
    let key_share = KeyShare { public: other.public, process: "process 7 on node1".to_owned() };
    vec![key_share.encode(), exchange.wrap(&zero, &[4; 32]).unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_reaches_the_rank_that_it_is_for_and_no_other() {
        let (zero, one, two) = (KeyPair::random(), KeyPair::random(), KeyPair::random());
        let exchange = Exchange { job: "job", run: [3; 16], rank: 1, publics: [zero.public, one.public] };
        let wrapped = exchange.wrap(&zero, &[4; 32]).unwrap();
        assert_eq!(exchange.unwrap(&one, &wrapped), Some([4; 32]));
        assert!(!wrapped.windows(8).any(|bytes| bytes == [4; 8]), "the secret is readable in the store");
        assert_eq!(exchange.unwrap(&two, &wrapped), None);
        for other in [
            Exchange { job: "other", ..exchange },
            Exchange { run: [4; 16], ..exchange },
            Exchange { rank: 2, ..exchange },
            Exchange { publics: [two.public, one.public], ..exchange },
            Exchange { publics: [zero.public, two.public], ..exchange },
        ] {
            assert_eq!(other.unwrap(&one, &wrapped), None);
        }
        for at in 0..wrapped.len() {
            let mut changed = wrapped.clone();
            changed[at] ^= 1;
            assert_eq!(exchange.unwrap(&one, &changed), None, "changed at {at}");
        }
    }

    /// Any process may have written the name.
    #[test]
    fn the_process_of_a_public_key_is_shown_as_one_short_line() {
        let shown = |process: &str| KeyShare { public: [1; 32], process: process.to_owned() }.shown();
        assert_eq!(shown("process 7 on here"), "\"process 7 on here\"");
        assert_eq!(shown("a\n\u{1b}[2J"), "\"a\\n\\u{1b}[2J\"");
        assert_eq!(shown(&"x".repeat(1 << 16)).len(), MOST_SHOWN + 2);
    }

    /// With points of small order, every process knows the key.
    #[test]
    fn public_keys_of_small_order_are_refused() {
        let zero = KeyPair::random();
        for public in [[0; 32], std::array::from_fn(|i| u8::from(i == 0))] {
            let exchange = Exchange { job: "job", run: [3; 16], rank: 1, publics: [zero.public, public] };
            assert_eq!(exchange.wrap(&zero, &[4; 32]), None);
            assert_eq!(KeyShare::decode(&KeyShare { public, process: "a stranger".to_owned() }.encode()), None);
        }
    }
}

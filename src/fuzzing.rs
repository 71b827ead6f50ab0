//! The functions that decode bytes from outside, for the fuzzers in `fuzz/`. This module exists
//! only when the crate is compiled for fuzzing or tests, and is not part of the API.

use crate::engine::frame;
use crate::failure::message;
use crate::network::listener::handshake;
use crate::network::{fuzz as network, listener};
use crate::observe;
use crate::rendezvous::store::{file, tcp};
use crate::rendezvous::{key_exchange, peer_table, run_info};
use crate::shm::fuzz as flag_lines;
use crate::types::Descriptor;

/// One target of a fuzzer.
#[derive(Debug)]
pub struct Target {
    /// The name in `fuzz/`.
    pub name: &'static str,
    /// Decodes the bytes. Panics if the result is wrong.
    pub feed: fn(&[u8]),
    /// Returns inputs as a correct peer sends them, to begin with.
    pub samples: fn() -> Vec<Vec<u8>>,
}

/// All targets of the library. `kolo trace` has one more.
pub const TARGETS: [Target; 13] = [
    Target {
        name: "handshake_acceptor",
        feed: handshake_acceptor,
        samples: || vec![[&[7][..], &handshake::samples()[0]].concat()],
    },
    Target { name: "handshake_initiator", feed: listener::fuzz_initiator, samples: || vec![handshake::samples()[1].clone()] },
    Target { name: "listener", feed: network::listener, samples: network::samples },
    Target { name: "frame", feed: frame::fuzz, samples: || vec![frame::sample()] },
    Target { name: "descriptor", feed: descriptor, samples: || vec![frame::sample()[16..].to_vec()] },
    Target { name: "message", feed: message::fuzz, samples: message::samples },
    Target { name: "run_info", feed: run_info::fuzz, samples: run_info::samples },
    Target { name: "key_exchange", feed: key_exchange::fuzz, samples: key_exchange::samples },
    Target { name: "peer_info", feed: peer_table::fuzz, samples: peer_table::samples },
    Target { name: "snapshot", feed: observe::fuzz, samples: observe::samples },
    Target { name: "file_store", feed: file::fuzz, samples: || vec![file::sample()] },
    Target { name: "flag_lines", feed: flag_lines::fuzz, samples: flag_lines::samples },
    Target { name: "tcp_store", feed: tcp::fuzz, samples: || vec![tcp::sample(), [0u8, 0, 0, 0, 2, 0, 0, 0, 7, 7].to_vec()] },
];

/// Feeds bytes to the target of this name.
pub fn feed(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("no target has this name");
    (target.feed)(bytes);
}

/// The first byte is the size of the portions in which the listener receives the others.
fn handshake_acceptor(bytes: &[u8]) {
    if let Some((portion, sent)) = bytes.split_first() {
        handshake::fuzz_acceptor(sent, (*portion).into());
    }
}

fn descriptor(bytes: &[u8]) {
    let mut words = [0; Descriptor::WORDS];
    for (word, &bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(bytes);
    }
    frame::fuzz_descriptor(words);
}

#[cfg(test)]
mod tests {
    use super::{TARGETS, Target};
    use crate::types::mix;

    /// Pseudo-random numbers below a bound.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = mix(self.0, 1);
            (self.0 >> 8) as usize % bound.max(1)
        }
    }

    /// Returns a sample of which parts are changed, removed, repeated or replaced.
    fn mutated(sample: &[u8], dice: &mut Dice) -> Vec<u8> {
        let mut bytes = sample.to_vec();
        for _ in 0..=dice.below(4) {
            let at = dice.below(bytes.len());
            let len = dice.below(bytes.len() - at + 1);
            match dice.below(6) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << dice.below(8),
                1 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][dice.below(5)],
                2 => bytes.truncate(at),
                3 => _ = bytes.drain(at..at + len),
                4 => {
                    let again = bytes[at..at + len].to_vec();
                    bytes.splice(at..at, again);
                }
                _ => {
                    let noise: Vec<u8> = (0..dice.below(20)).map(|_| dice.below(256) as u8).collect();
                    bytes.splice(at..at, noise);
                }
            }
        }
        bytes
    }

    /// Runs all targets for a short time, with any compiler.
    #[test]
    fn no_input_causes_harm() {
        for Target { name, feed, samples } in &TARGETS {
            // A peer may let this rank wait until its deadline.
            let rounds = match *name {
                _ if cfg!(miri) => 20,
                "flag_lines" => 500,
                // Its peers have connections, and wait for each other.
                "listener" => 200,
                _ if crate::sys::every_case() => 5000,
                _ => 1000,
            };
            let samples = samples();
            samples.iter().for_each(|sample| feed(sample));
            for round in 0..rounds {
                let mut dice = Dice(mix(round, name.len() as u64));
                let sample = &samples[dice.below(samples.len())];
                feed(&mutated(sample, &mut dice));
                let noise: Vec<u8> = (0..dice.below(200)).map(|_| dice.below(256) as u8).collect();
                feed(&noise);
            }
        }
    }
}

//! Everything that reads bytes from outside, for `fuzz/` to feed with whatever it likes. Not part of the library: it is there
//! only when the crate is compiled for fuzzing.

use crate::bootstrap::listener::handshake;
use crate::bootstrap::store::{file, tcp};
use crate::bootstrap::{announcement, fuzz as bootstrap, key_exchange, peer_info};
use crate::engine::frame;
use crate::failure::message;
use crate::shm::fuzz as window;
use crate::types::Descriptor;

/// A reader of bytes: its name, what takes the bytes, and such as a well-meaning other end would send.
pub struct Target {
    /// What it is called in `fuzz/`.
    pub name: &'static str,
    /// Panics if what is read is not as it should be.
    pub feed: fn(&[u8]),
    /// To begin with.
    pub samples: fn() -> Vec<Vec<u8>>,
}

/// All there are in the library. `kolo trace` has one more.
pub const TARGETS: [Target; 12] = [
    Target { name: "handshake_door", feed: handshake_door, samples: || vec![[&[7][..], &handshake::samples()[0]].concat()] },
    Target { name: "handshake_caller", feed: handshake::fuzz_caller, samples: || vec![handshake::samples()[1].clone()] },
    Target { name: "listener", feed: bootstrap::listener, samples: bootstrap::samples },
    Target { name: "frame", feed: frame::fuzz, samples: || vec![frame::sample()] },
    Target { name: "descriptor", feed: descriptor, samples: || vec![frame::sample()[16..].to_vec()] },
    Target { name: "message", feed: message::fuzz, samples: message::samples },
    Target { name: "announcement", feed: announcement::fuzz, samples: announcement::samples },
    Target { name: "key_exchange", feed: key_exchange::fuzz, samples: key_exchange::samples },
    Target { name: "card", feed: peer_info::fuzz, samples: peer_info::samples },
    Target { name: "file_store", feed: file::fuzz, samples: || vec![file::sample()] },
    Target { name: "window", feed: window::fuzz, samples: window::samples },
    Target { name: "tcp_store", feed: tcp::fuzz, samples: || vec![tcp::sample(), [0u8, 0, 0, 0, 2, 0, 0, 0, 7, 7].to_vec()] },
];

/// Feeds the target of a name.
pub fn feed(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("there is such a target");
    (target.feed)(bytes);
}

/// The first byte says in what portions the others come.
fn handshake_door(bytes: &[u8]) {
    if let Some((portion, said)) = bytes.split_first() {
        handshake::fuzz_door(said, (*portion).into());
    }
}

fn descriptor(bytes: &[u8]) {
    let mut words = [0; Descriptor::WORDS];
    for (word, eight) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = eight.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    }
    frame::fuzz_descriptor(words);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::mix;

    /// Numbers below a bound.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = mix(self.0, 1);
            (self.0 >> 8) as usize % bound.max(1)
        }
    }

    /// A sample with some of it changed, cut out, doubled or exchanged.
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

    /// What the fuzzers do at length, shortly, and with any compiler.
    #[test]
    fn nothing_that_comes_does_harm() {
        for Target { name, feed, samples } in &TARGETS {
            // A peer may let this rank wait until its deadline.
            let rounds = match *name {
                _ if cfg!(miri) => 20,
                "window" => 500,
                // Its callers have connections, and wait for each other.
                "listener" => 200,
                _ => 5000,
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

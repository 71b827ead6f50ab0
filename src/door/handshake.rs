//! How two processes find out that they belong to the same job, without either telling a stranger the secret.
//!
//! ```text
//! caller                                             door
//! Hello: version, purpose, job, ranks, nonce  --->
//!                                             <---   Challenge: nonce, HMAC(secret, "door" + Hello + nonce)
//! Proof: HMAC(secret, "caller" + Hello + nonce) -->
//!                                             <---   Welcome
//! ```
//!
//! The MACs are HMAC-SHA256 and compared in constant time. They cover the version, the job and the ranks, so nobody in the
//! middle can change them. Without a secret they are keyed with nothing: then they protect against mistakes only.
//!
//! Pure: bytes in, bytes out.

use std::io::{Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::DialError;
use crate::types::Rank;

/// Changes with every change of what goes over sockets or through shared memory.
pub(crate) const VERSION: u16 = 6;

const MAGIC: [u8; 4] = *b"kolo";
const NONCE: usize = 16;
const MAC: usize = 32;
const HELLO: usize = 64;
/// Status, a zero, the version; then nonce and MAC, or the door's job as text.
const CHALLENGE: usize = 4 + NONCE + MAC;

/// No message of a handshake is longer.
pub(super) const LONGEST: usize = HELLO;

/// What makes a process part of a job.
#[derive(Clone)]
pub(crate) struct Identity {
    job: String,
    digest: [u8; NONCE],
    secret: Option<[u8; 32]>,
    insecure: bool,
}

impl Identity {
    pub(crate) fn new(job: &str, secret: Option<[u8; 32]>) -> Identity {
        let mut digest = [0; NONCE];
        digest.copy_from_slice(&Sha256::digest(job.as_bytes())[..NONCE]);
        Identity { job: job.to_owned(), digest, secret, insecure: false }
    }

    /// Whether a process without a secret may listen to other machines.
    pub(crate) fn insecure(self, insecure: bool) -> Identity {
        Identity { insecure, ..self }
    }

    pub(crate) fn with_secret(self, secret: [u8; 32]) -> Identity {
        Identity { secret: Some(secret), ..self }
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Whether this process may listen where other machines reach it.
    pub(crate) fn may_listen(&self) -> bool {
        if self.secret.is_none() && self.insecure {
            tracing::warn!("without a secret, whoever reaches this process can join or disturb the job (KOLO_INSECURE)");
        }
        self.secret.is_some() || self.insecure
    }

    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    fn mac(&self, who: &[u8], hello: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
        let key = self.secret.as_ref().map_or(&[][..], |secret| secret);
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        [who, hello, nonce].into_iter().for_each(|part| mac.update(part));
        mac
    }
}

/// 16 unpredictable bytes.
pub(crate) fn random() -> [u8; NONCE] {
    let mut bytes = [0; NONCE];
    getrandom::fill(&mut bytes).expect("the system has random numbers");
    bytes
}

/// What a caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// To be a link between two ranks of a communicator, or a lane of one.
    Link = 1,
    /// To join the window of its host's ranks.
    Window = 2,
    /// To say that it cannot join the window.
    Apart = 3,
    /// To use the store.
    Store = 4,
    /// To learn whether somebody is there.
    Probe = 5,
    /// To ask one question about a communicator, which the door answers.
    Ask = 6,
}

/// What a caller says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// Which connection of a link this is, of how many.
    pub(crate) lane: u8,
    pub(crate) lanes: u8,
    /// The communicator.
    pub(crate) channel: u64,
    /// The caller, and who it wants; ranks of the job.
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Why a door stays closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Whoever is there does not speak the protocol.
    Foreign,
    Version {
        theirs: u16,
    },
    Job {
        theirs: String,
    },
    Secret,
}

const CHALLENGES: u8 = 0;
const REFUSES_VERSION: u8 = 1;
const REFUSES_JOB: u8 = 2;
const WELCOMES: u8 = 3;
const REFUSES_SECRET: u8 = 4;

impl Hello {
    /// A connection that is not one of several.
    pub(crate) fn new(purpose: Purpose, channel: u64, from: Rank, to: Rank) -> Hello {
        Hello { purpose, lane: 0, lanes: 1, channel, from: from as u32, to: to as u32 }
    }

    fn encode(&self, identity: &Identity, nonce: [u8; NONCE]) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..9].copy_from_slice(&[self.purpose as u8, self.lane, self.lanes]);
        bytes[16..32].copy_from_slice(&identity.digest);
        bytes[32..40].copy_from_slice(&self.channel.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.from.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.to.to_le_bytes());
        bytes[48..].copy_from_slice(&nonce);
        bytes
    }

    fn decode(bytes: &[u8; HELLO], identity: &Identity) -> Result<Hello, Refusal> {
        let number = |at: usize, len: usize| bytes[at..at + len].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        if bytes[..4] != MAGIC {
            return Err(Refusal::Foreign);
        }
        let theirs = number(4, 2) as u16;
        if theirs != VERSION {
            return Err(Refusal::Version { theirs });
        }
        if bytes[16..32] != identity.digest {
            return Err(Refusal::Job { theirs: String::new() });
        }
        let purposes = [Purpose::Link, Purpose::Window, Purpose::Apart, Purpose::Store, Purpose::Probe, Purpose::Ask];
        let purpose = purposes.into_iter().find(|&purpose| purpose as u8 == bytes[6]).ok_or(Refusal::Foreign)?;
        let [lane, lanes] = [bytes[7], bytes[8]];
        if lane >= lanes || bytes[9..16] != [0; 7] {
            return Err(Refusal::Foreign);
        }
        Ok(Hello { purpose, lane, lanes, channel: number(32, 8), from: number(40, 4) as u32, to: number(44, 4) as u32 })
    }
}

/// The door's side of one handshake.
#[derive(Default)]
pub(super) struct Acceptor {
    heard: Vec<u8>,
    /// The hello as it came, as it was understood, and the nonce that was sent back.
    challenged: Option<([u8; HELLO], Hello, [u8; NONCE])>,
}

/// What the door does after it has heard something.
pub(super) struct Answer {
    pub(super) reply: Option<Vec<u8>>,
    pub(super) outcome: Option<Result<Hello, Refusal>>,
}

impl Acceptor {
    /// How many bytes are still missing of the message that the caller sends now.
    pub(super) fn wanted(&self) -> usize {
        let whole = if self.challenged.is_none() { HELLO } else { MAC };
        whole - self.heard.len()
    }

    /// Whether the caller has said which job it belongs to, and it was this one.
    pub(super) fn has_introduced_himself(&self) -> bool {
        self.challenged.is_some()
    }

    /// Hears at most `wanted` bytes.
    pub(super) fn hear(&mut self, identity: &Identity, bytes: &[u8]) -> Answer {
        self.heard.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return Answer { reply: None, outcome: None };
        }
        let heard = std::mem::take(&mut self.heard);
        match self.challenged.take() {
            None => {
                let mut hello = [0; HELLO];
                hello.copy_from_slice(&heard);
                self.challenge(identity, hello)
            }
            Some((bytes, hello, nonce)) => {
                let is_proved = identity.mac(b"caller", &bytes, &nonce).verify_slice(&heard).is_ok();
                let status = if is_proved { WELCOMES } else { REFUSES_SECRET };
                Answer { reply: Some(vec![status]), outcome: Some(if is_proved { Ok(hello) } else { Err(Refusal::Secret) }) }
            }
        }
    }

    fn challenge(&mut self, identity: &Identity, bytes: [u8; HELLO]) -> Answer {
        let mut reply = vec![0; CHALLENGE];
        reply[2..4].copy_from_slice(&VERSION.to_le_bytes());
        match Hello::decode(&bytes, identity) {
            Ok(hello) => {
                let nonce = random();
                reply[0] = CHALLENGES;
                reply[4..4 + NONCE].copy_from_slice(&nonce);
                reply[4 + NONCE..].copy_from_slice(&identity.mac(b"door", &bytes, &nonce).finalize().into_bytes());
                self.challenged = Some((bytes, hello, nonce));
                Answer { reply: Some(reply), outcome: None }
            }
            Err(refusal) => {
                match refusal {
                    Refusal::Version { .. } => reply[0] = REFUSES_VERSION,
                    Refusal::Job { .. } => {
                        reply[0] = REFUSES_JOB;
                        let job = &identity.job.as_bytes()[..identity.job.len().min(NONCE + MAC)];
                        reply[4..4 + job.len()].copy_from_slice(job);
                    }
                    // To a stranger nothing is said.
                    Refusal::Foreign | Refusal::Secret => return Answer { reply: None, outcome: Some(Err(refusal)) },
                }
                Answer { reply: Some(reply), outcome: Some(Err(refusal)) }
            }
        }
    }
}

/// The caller's side.
pub(super) fn introduce(stream: &mut (impl Read + Write), identity: &Identity, hello: &Hello) -> Result<(), DialError> {
    let hello = hello.encode(identity, random());
    stream.write_all(&hello)?;
    let mut challenge = [0; CHALLENGE];
    stream.read_exact(&mut challenge)?;
    let version = u16::from_le_bytes([challenge[2], challenge[3]]);
    let (nonce, mac) = challenge[4..].split_at(NONCE);
    match challenge[0] {
        CHALLENGES if version == VERSION => {}
        REFUSES_VERSION => return Err(DialError::Refused(Refusal::Version { theirs: version })),
        REFUSES_JOB => {
            let job = challenge[4..].split(|&byte| byte == 0).next().unwrap_or_default();
            let theirs = String::from_utf8_lossy(job).into_owned();
            return Err(DialError::Refused(Refusal::Job { theirs }));
        }
        _ => return Err(DialError::Refused(Refusal::Foreign)),
    }
    if identity.mac(b"door", &hello, nonce).verify_slice(mac).is_err() {
        return Err(DialError::Refused(Refusal::Secret));
    }
    stream.write_all(&identity.mac(b"caller", &hello, nonce).finalize().into_bytes())?;
    let mut status = [0];
    stream.read_exact(&mut status)?;
    match status[0] {
        WELCOMES => Ok(()),
        REFUSES_SECRET => Err(DialError::Refused(Refusal::Secret)),
        _ => Err(DialError::Refused(Refusal::Foreign)),
    }
}

/// Whatever a stranger says to a door, in portions of so many bytes: no panic, no entry, and no answer without end.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_door(said: &[u8], portion: usize) {
    let identity = Identity::new("job", Some([1; 32]));
    let mut acceptor = Acceptor::default();
    let (mut rest, mut replied) = (said, 0);
    while !rest.is_empty() {
        let wanted = acceptor.wanted();
        assert!((1..=LONGEST).contains(&wanted), "{wanted} bytes are wanted");
        let (now, later) = rest.split_at(wanted.min(rest.len()).min(portion.max(1)));
        rest = later;
        let Answer { reply, outcome } = acceptor.hear(&identity, now);
        replied += reply.map_or(0, |reply| reply.len());
        assert!(!matches!(outcome, Some(Ok(_))), "a stranger is let in");
        assert!(replied <= 2 * LONGEST, "{replied} bytes are answered");
        if outcome.is_some() {
            return;
        }
    }
}

/// Whatever a door answers that does not know the secret: nobody takes it for one of his job.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_caller(answers: &[u8]) {
    struct Answers<'a>(&'a [u8]);
    impl Read for Answers<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(into)
        }
    }
    impl Write for Answers<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let identity = Identity::new("job", Some([1; 32]));
    let hello = Hello::new(Purpose::Link, 1, 1, 0);
    assert!(introduce(&mut Answers(answers), &identity, &hello).is_err(), "a stranger's door is trusted");
}

/// What a caller with the secret says first, and what such a door answers.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> [Vec<u8>; 2] {
    let identity = Identity::new("job", Some([1; 32]));
    let hello = Hello::new(Purpose::Link, 1, 1, 0).encode(&identity, random());
    let answer = Acceptor::default().hear(&identity, &hello).reply.unwrap_or_default();
    [hello.to_vec(), answer]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever a stranger says, in whatever portions: no panic, no entry, and nothing is asked for without end.
        #[test]
        fn strangers_are_not_let_in(bytes in proptest::collection::vec(any::<u8>(), 0..400), start in 0usize..64) {
            let identity = Identity::new("job", Some([1; 32]));
            let real = Hello::new(Purpose::Link, 1, 1, 0).encode(&identity, random());
            // As far as `start` it looks like a real one.
            let said: Vec<u8> = real[..start].iter().copied().chain(bytes).collect();
            let mut acceptor = Acceptor::default();
            let mut rest = &said[..];
            let mut replied = 0;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(acceptor.wanted().min(rest.len()).min(7));
                rest = later;
                let answer = acceptor.hear(&identity, now);
                replied += answer.reply.map_or(0, |reply| reply.len());
                prop_assert!(!matches!(answer.outcome, Some(Ok(_))));
                prop_assert!(replied <= 128);
                if answer.outcome.is_some() {
                    break;
                }
            }
        }
    }

    #[test]
    fn another_version_is_refused_with_both() {
        let identity = Identity::new("job", None);
        let mut bytes = Hello::new(Purpose::Store, 0, 0, 0).encode(&identity, random());
        bytes[4] = 9;
        let answer = Acceptor::default().hear(&identity, &bytes);
        assert_eq!(answer.outcome, Some(Err(Refusal::Version { theirs: 9 })));
        assert_eq!(answer.reply.unwrap()[..4], [REFUSES_VERSION, 0, VERSION as u8, 0]);
    }
}

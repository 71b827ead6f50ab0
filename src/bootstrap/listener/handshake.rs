//! How two processes find out that they belong to the same run of the same job, without either telling a stranger anything.
//!
//! ```text
//! caller                                                      listener
//! Hello: version, purpose, job, run, ranks, nonce,
//!        HMAC(key, "hello" + all this)                  --->
//!                                                       <---  Challenge: nonce, HMAC(key, "listener" + Hello + nonce)
//! Proof: HMAC(key, "caller" + Hello + nonce)            --->
//!                                                       <---  Welcome
//! ```
//!
//! The MACs are HMAC-SHA256 and compared in constant time. They cover the version, the job, the run and the ranks. The key is
//! derived from the secret, one for connections in the network and one for those inside a host, so that no message of the one is
//! any use in the other.
//!
//! A caller whose hello has a wrong MAC reads one fixed answer that says no. Only a caller that knows the secret reads why it is
//! refused: because of its version, its job or its run; that answer has a MAC, too.
//!
//! Without a secret every process can derive the key: then handshakes protect against mistakes only. That happens at a
//! `tcp://` store alone; ranks have a secret before they listen.
//!
//! Pure: bytes in, bytes out.

use std::io::{Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::DialError;
use crate::types::Rank;

/// Changes with every change of what goes over sockets or through shared memory.
pub(crate) const VERSION: u16 = 7 + cfg!(kolo_next_version) as u16;

const MAGIC: [u8; 4] = *b"kolo";
pub(super) const NONCE: usize = 16;
const MAC: usize = 32;
/// The hello without its MAC, and with it.
const CLAIMS: usize = 80;
const HELLO: usize = CLAIMS + MAC;
/// Status, a zero, the version; then the nonce or the listener's job, filled up with zeros; then the MAC.
const DETAILS: usize = 48;
const REPLY: usize = 4 + DETAILS + MAC;

/// No message of a handshake is longer.
pub(crate) const LONGEST: usize = HELLO;

/// Tells the runs of a job apart. A store's server, which outlives runs, has zeros.
pub(crate) type Run = [u8; 16];

/// What makes a process part of a run of a job.
#[derive(Clone)]
pub(crate) struct Identity {
    job: String,
    digest: [u8; 16],
    run: Run,
    secret: Option<[u8; 32]>,
    /// Ranks agreed on the secret through a store where others could write.
    is_agreed: bool,
    insecure: bool,
}

/// How two processes are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    Network,
    /// Inside one host, where nothing from outside reaches.
    Local,
}

impl Identity {
    pub(crate) fn new(job: &str, secret: Option<[u8; 32]>) -> Identity {
        let mut digest = [0; 16];
        digest.copy_from_slice(&Sha256::digest(job.as_bytes())[..16]);
        Identity { job: job.to_owned(), digest, run: [0; 16], secret, is_agreed: false, insecure: false }
    }

    /// Whether a process without a secret may listen to other machines.
    pub(crate) fn insecure(self, insecure: bool) -> Identity {
        Identity { insecure, ..self }
    }

    /// The same in one run of the job, whose ranks share this secret.
    pub(crate) fn of_run(self, run: Run, secret: [u8; 32]) -> Identity {
        Identity { run, secret: Some(secret), ..self }
    }

    /// The same where ranks agreed on their secret through a store where others could write.
    pub(crate) fn agreed(self) -> Identity {
        Identity { is_agreed: true, ..self }
    }

    /// Whether processes of other users of this host are strangers even if they know the secret: it may have been told them.
    pub(crate) fn is_of_one_user(&self) -> bool {
        self.secret.is_none() || self.is_agreed
    }

    pub(crate) fn run(&self) -> Run {
        self.run
    }

    pub(crate) fn secret(&self) -> Option<[u8; 32]> {
        self.secret
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Whether this process may listen where other machines reach it.
    pub(crate) fn may_listen(&self) -> bool {
        if self.secret.is_none() && self.insecure {
            tracing::warn!("without a secret, every process that reaches this one can join or disturb the job (KOLO_INSECURE)");
        }
        self.secret.is_some() || self.insecure
    }

    pub(crate) fn job(&self) -> &str {
        &self.job
    }

    /// The key for what ranks put into a store.
    pub(crate) fn store_key(&self) -> Key {
        Key::derive(self.secret.as_ref(), "kolo store")
    }

    fn key(&self, medium: Medium) -> Key {
        let label = match medium {
            Medium::Network => "kolo handshake in the network",
            Medium::Local => "kolo handshake inside a host",
        };
        Key::derive(self.secret.as_ref(), label)
    }
}

/// A key for one purpose, derived from the secret: what is computed with it says nothing about the keys for other purposes.
#[derive(Clone)]
pub(crate) struct Key([u8; MAC]);

impl Key {
    pub(crate) fn derive(secret: Option<&[u8; 32]>, purpose: &str) -> Key {
        let secret = secret.map_or(&[][..], |secret| secret);
        Key(mac(secret, &[purpose.as_bytes()]).finalize().into_bytes().into())
    }

    /// Parts that are laid end to end: all but one have a fixed length, or say their own.
    pub(crate) fn sign(&self, parts: &[&[u8]]) -> [u8; MAC] {
        mac(&self.0, parts).finalize().into_bytes().into()
    }

    /// Whether it is theirs, in constant time.
    pub(crate) fn is_signed(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        mac(&self.0, parts).verify_slice(signature).is_ok()
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// 16 unpredictable bytes.
pub(crate) fn random() -> [u8; NONCE] {
    let mut bytes = [0; NONCE];
    getrandom::fill(&mut bytes).expect("the system has random numbers");
    bytes
}

/// A secret for a run whose ranks were given none.
pub(crate) fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).expect("the system has random numbers");
    secret
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
    /// To ask one question about a communicator, which the listener answers.
    Ask = 6,
    /// To map a segment of memory that the listener's rank lends.
    Segment = 7,
}

/// What a caller says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// Which connection of a link this is, of how many.
    pub(crate) lane: u8,
    pub(crate) lanes: u8,
    /// The communicator, or the segment.
    pub(crate) comm_id: u64,
    /// The caller, and who it wants; ranks of the job.
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Why a listener refuses a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The other end does not speak the protocol.
    Foreign,
    Version {
        theirs: u16,
    },
    /// It belongs to another job; its name if both know the secret.
    Job {
        theirs: Option<String>,
    },
    /// It belongs to another run of the job.
    Run,
    /// The two do not share a secret.
    Secret,
}

const CHALLENGES: u8 = 0;
const REFUSES: u8 = 1;
const REFUSES_VERSION: u8 = 2;
const REFUSES_JOB: u8 = 3;
const REFUSES_RUN: u8 = 4;
const WELCOMES: u8 = 5;

impl Hello {
    /// A connection that is not one of several.
    pub(crate) fn new(purpose: Purpose, comm_id: u64, from: Rank, to: Rank) -> Hello {
        Hello { purpose, lane: 0, lanes: 1, comm_id, from: from as u32, to: to as u32 }
    }

    fn encode(&self, identity: &Identity, key: &Key, nonce: [u8; NONCE]) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..9].copy_from_slice(&[self.purpose as u8, self.lane, self.lanes]);
        bytes[16..32].copy_from_slice(&identity.digest);
        bytes[32..48].copy_from_slice(&identity.run);
        bytes[48..56].copy_from_slice(&self.comm_id.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.from.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.to.to_le_bytes());
        bytes[64..CLAIMS].copy_from_slice(&nonce);
        let signature = key.sign(&[b"hello", &bytes[..CLAIMS]]);
        bytes[CLAIMS..].copy_from_slice(&signature);
        bytes
    }

    fn decode(bytes: &[u8; HELLO], identity: &Identity, key: &Key) -> Result<Hello, Refusal> {
        let number = |at: usize, len: usize| bytes[at..at + len].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        if bytes[..4] != MAGIC {
            return Err(Refusal::Foreign);
        }
        if !key.is_signed(&[b"hello", &bytes[..CLAIMS]], &bytes[CLAIMS..]) {
            return Err(Refusal::Secret);
        }
        let theirs = number(4, 2) as u16;
        if theirs != VERSION {
            return Err(Refusal::Version { theirs });
        }
        if bytes[16..32] != identity.digest {
            return Err(Refusal::Job { theirs: None });
        }
        if bytes[32..48] != identity.run {
            return Err(Refusal::Run);
        }
        let purposes =
            [Purpose::Link, Purpose::Window, Purpose::Apart, Purpose::Store, Purpose::Probe, Purpose::Ask, Purpose::Segment];
        let purpose = purposes.into_iter().find(|&purpose| purpose as u8 == bytes[6]).ok_or(Refusal::Foreign)?;
        let [lane, lanes] = [bytes[7], bytes[8]];
        if lane >= lanes || bytes[9..16] != [0; 7] {
            return Err(Refusal::Foreign);
        }
        Ok(Hello { purpose, lane, lanes, comm_id: number(48, 8), from: number(56, 4) as u32, to: number(60, 4) as u32 })
    }
}

/// The listener's side of one handshake.
pub(super) struct Acceptor {
    medium: Medium,
    heard: Vec<u8>,
    /// The hello as it came, as it was understood, and the nonce that was sent back.
    challenged: Option<([u8; HELLO], Hello, [u8; NONCE])>,
}

/// What the listener does after it has heard something.
pub(super) struct Answer {
    pub(super) reply: Option<Vec<u8>>,
    pub(super) outcome: Option<Result<Hello, Refusal>>,
}

impl Acceptor {
    pub(super) fn new(medium: Medium) -> Acceptor {
        Acceptor { medium, heard: Vec::new(), challenged: None }
    }

    /// How many bytes are still missing of the message that the caller sends now.
    pub(super) fn wanted(&self) -> usize {
        let whole = if self.challenged.is_none() { HELLO } else { MAC };
        whole - self.heard.len()
    }

    /// The nonce of the caller's hello, once there is one that was made by a process that knows the secret. A stranger can only
    /// repeat one that it overheard.
    pub(super) fn challenged(&self) -> Option<[u8; NONCE]> {
        let (hello, ..) = self.challenged.as_ref()?;
        hello[CLAIMS - NONCE..CLAIMS].try_into().ok()
    }

    /// Hears at most `wanted` bytes.
    pub(super) fn hear(&mut self, identity: &Identity, bytes: &[u8]) -> Answer {
        self.heard.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return Answer { reply: None, outcome: None };
        }
        let heard = std::mem::take(&mut self.heard);
        let key = identity.key(self.medium);
        match self.challenged.take() {
            None => {
                let mut hello = [0; HELLO];
                hello.copy_from_slice(&heard);
                self.challenge(identity, &key, hello)
            }
            Some((bytes, hello, nonce)) => match key.is_signed(&[b"caller", &bytes, &nonce], &heard) {
                true => Answer { reply: Some(vec![WELCOMES]), outcome: Some(Ok(hello)) },
                false => Answer { reply: None, outcome: Some(Err(Refusal::Secret)) },
            },
        }
    }

    fn challenge(&mut self, identity: &Identity, key: &Key, bytes: [u8; HELLO]) -> Answer {
        match Hello::decode(&bytes, identity, key) {
            Ok(hello) => {
                let nonce = random();
                self.challenged = Some((bytes, hello, nonce));
                Answer { reply: Some(reply(key, CHALLENGES, &nonce, &bytes)), outcome: None }
            }
            Err(refusal) => {
                let reply = match &refusal {
                    Refusal::Foreign => None,
                    // Not even the version: this is all that a stranger learns.
                    Refusal::Secret => Some([&[REFUSES][..], &[0; REPLY - 1]].concat()),
                    Refusal::Version { .. } => Some(reply(key, REFUSES_VERSION, &[], &bytes)),
                    Refusal::Job { .. } => {
                        // Without a secret, every process could read it.
                        let job = if identity.has_secret() { identity.job.as_bytes() } else { &[] };
                        Some(reply(key, REFUSES_JOB, &job[..job.len().min(DETAILS)], &bytes))
                    }
                    Refusal::Run => Some(reply(key, REFUSES_RUN, &[], &bytes)),
                };
                Answer { reply, outcome: Some(Err(refusal)) }
            }
        }
    }
}

/// An answer to a hello, which only a process with the key can make.
fn reply(key: &Key, status: u8, details: &[u8], hello: &[u8; HELLO]) -> Vec<u8> {
    let mut reply = vec![0; REPLY - MAC];
    reply[0] = status;
    reply[2..4].copy_from_slice(&VERSION.to_le_bytes());
    reply[4..4 + details.len()].copy_from_slice(details);
    reply.extend(key.sign(&[b"listener", hello, &reply]));
    reply
}

/// The caller's side.
pub(crate) struct Introduction {
    key: Key,
    hello: [u8; HELLO],
    heard: Vec<u8>,
    /// The proof has been said.
    has_proved: bool,
}

/// What the caller does after it has heard something.
pub(crate) enum Step {
    /// There is more to hear.
    Hear,
    /// It says this, then hears more.
    Say(Vec<u8>),
    Done(Result<(), Refusal>),
}

impl Introduction {
    pub(crate) fn new(identity: &Identity, medium: Medium, hello: &Hello) -> Introduction {
        let key = identity.key(medium);
        let hello = hello.encode(identity, &key, random());
        Introduction { key, hello, heard: Vec::new(), has_proved: false }
    }

    /// What the caller says first.
    pub(crate) fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// How many bytes are still missing of the message that the listener sends now.
    pub(crate) fn wanted(&self) -> usize {
        let whole = if self.has_proved { 1 } else { REPLY };
        whole - self.heard.len()
    }

    /// Hears at most `wanted` bytes.
    pub(crate) fn hear(&mut self, bytes: &[u8]) -> Step {
        self.heard.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return Step::Hear;
        }
        let heard = std::mem::take(&mut self.heard);
        if self.has_proved {
            return Step::Done(if heard[0] == WELCOMES { Ok(()) } else { Err(Refusal::Foreign) });
        }
        let (said, signature) = heard.split_at(REPLY - MAC);
        if !self.key.is_signed(&[b"listener", &self.hello, said], signature) {
            // Only a listener of another secret says no like this, or one that wants to be taken for it.
            return Step::Done(Err(if said[0] == REFUSES { Refusal::Secret } else { Refusal::Foreign }));
        }
        let (version, details) = (u16::from_le_bytes([said[2], said[3]]), &said[4..]);
        match said[0] {
            CHALLENGES if version == VERSION => {
                self.has_proved = true;
                Step::Say(self.key.sign(&[b"caller", &self.hello, &details[..NONCE]]).to_vec())
            }
            REFUSES_VERSION => Step::Done(Err(Refusal::Version { theirs: version })),
            REFUSES_JOB => {
                let job = details.split(|&byte| byte == 0).next().filter(|job| !job.is_empty());
                Step::Done(Err(Refusal::Job { theirs: job.map(|job| String::from_utf8_lossy(job).into_owned()) }))
            }
            REFUSES_RUN => Step::Done(Err(Refusal::Run)),
            _ => Step::Done(Err(Refusal::Foreign)),
        }
    }
}

/// The caller's side on a stream that waits.
pub(super) fn introduce(
    stream: &mut (impl Read + Write),
    identity: &Identity,
    medium: Medium,
    hello: &Hello,
) -> Result<(), DialError> {
    let mut introduction = Introduction::new(identity, medium, hello);
    stream.write_all(introduction.hello())?;
    loop {
        let mut bytes = [0; LONGEST];
        let bytes = &mut bytes[..introduction.wanted()];
        stream.read_exact(bytes)?;
        match introduction.hear(bytes) {
            Step::Hear => {}
            Step::Say(message) => stream.write_all(&message)?,
            Step::Done(outcome) => return outcome.map_err(DialError::Refused),
        }
    }
}

/// Whatever a stranger says to a listener, in portions of so many bytes: no panic, no entry, and no answer without end.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_door(said: &[u8], portion: usize) {
    let identity = Identity::new("job", Some([1; 32]));
    let mut acceptor = Acceptor::new(Medium::Network);
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

/// Whatever a listener answers that does not know the secret: no rank takes it for one of its job.
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
    assert!(introduce(&mut Answers(answers), &identity, Medium::Network, &hello).is_err(), "a stranger's listener is trusted");
}

/// What a caller with the secret says first, and what such a listener answers.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> [Vec<u8>; 2] {
    let identity = Identity::new("job", Some([1; 32]));
    let key = identity.key(Medium::Network);
    let hello = Hello::new(Purpose::Link, 1, 1, 0).encode(&identity, &key, random());
    let answer = Acceptor::new(Medium::Network).hear(&identity, &hello).reply.unwrap_or_default();
    [hello.to_vec(), answer]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIVEN: [u8; 32] = [1; 32];
    const SECRET: Option<[u8; 32]> = Some(GIVEN);

    fn hello() -> Hello {
        Hello::new(Purpose::Link, 1, 1, 0)
    }

    /// What the caller and the listener learn.
    type Learned = (Option<Result<(), Refusal>>, Option<Result<Hello, Refusal>>);

    /// What the two ends learn, each by the medium that it takes the other for.
    fn meet(caller: (&Identity, Medium), listener: (&Identity, Medium)) -> Learned {
        let mut introduction = Introduction::new(caller.0, caller.1, &hello());
        let mut acceptor = Acceptor::new(listener.1);
        let mut said = introduction.hello().to_vec();
        let mut learned = None;
        loop {
            let Answer { reply, outcome } = acceptor.hear(listener.0, &said);
            learned = learned.or(outcome);
            let Some(reply) = reply else { return (None, learned) };
            match introduction.hear(&reply) {
                Step::Hear => panic!("a reply is not whole"),
                Step::Say(message) => said = message,
                Step::Done(outcome) => return (Some(outcome), learned),
            }
        }
    }

    #[test]
    fn processes_of_one_run_meet() {
        let identity = Identity::new("job", SECRET).of_run([3; 16], GIVEN);
        for medium in [Medium::Network, Medium::Local] {
            assert_eq!(meet((&identity, medium), (&identity, medium)), (Some(Ok(())), Some(Ok(hello()))));
        }
    }

    #[test]
    fn a_process_of_another_run_is_refused_and_told_so() {
        let job = Identity::new("job", SECRET);
        let (now, before) = (job.clone().of_run([3; 16], GIVEN), job.of_run([2; 16], GIVEN));
        let network = Medium::Network;
        assert_eq!(meet((&before, network), (&now, network)), (Some(Err(Refusal::Run)), Some(Err(Refusal::Run))));
    }

    #[test]
    fn a_job_is_named_to_those_who_know_the_secret_only() {
        let network = Medium::Network;
        let refused = |secret, theirs: Option<&str>| {
            let (mine, other) = (Identity::new("mine", secret), Identity::new("other", secret));
            let theirs = theirs.map(str::to_owned);
            assert_eq!(meet((&other, network), (&mine, network)).0, Some(Err(Refusal::Job { theirs })));
        };
        refused(SECRET, Some("mine"));
        refused(None, None);
    }

    #[test]
    fn strangers_learn_nothing_but_that_they_are_refused() {
        let mine = Identity::new("mine", SECRET).of_run([3; 16], GIVEN);
        let mut replies = Vec::new();
        for (job, secret, run) in [("mine", None, 3), ("mine", Some([2; 32]), 3), ("other", None, 0)] {
            let stranger = Identity { run: [run; 16], ..Identity::new(job, secret) };
            let introduction = Introduction::new(&stranger, Medium::Network, &hello());
            let answer = Acceptor::new(Medium::Network).hear(&mine, introduction.hello());
            assert_eq!(answer.outcome, Some(Err(Refusal::Secret)));
            replies.push(answer.reply);
            let network = Medium::Network;
            assert_eq!(meet((&stranger, network), (&mine, network)).0, Some(Err(Refusal::Secret)));
        }
        assert!(replies.iter().all(|reply| reply.as_deref() == Some(&[&[REFUSES][..], &[0; REPLY - 1]].concat()[..])));
    }

    /// What is said inside a host is no use in the network, and the other way round.
    #[test]
    fn a_handshake_cannot_be_moved_to_another_medium() {
        let identity = Identity::new("job", SECRET);
        let moved = meet((&identity, Medium::Local), (&identity, Medium::Network));
        assert_eq!(moved, (Some(Err(Refusal::Secret)), Some(Err(Refusal::Secret))));
    }

    /// A stranger that repeats what a rank said reads another challenge, for which the rank's proof is wrong.
    #[test]
    fn what_was_overheard_leads_nowhere() {
        let identity = Identity::new("job", SECRET);
        let mut introduction = Introduction::new(&identity, Medium::Network, &hello());
        let mut first = Acceptor::new(Medium::Network);
        let challenge = first.hear(&identity, introduction.hello()).reply.unwrap();
        let Step::Say(proof) = introduction.hear(&challenge) else { panic!("it is not taken for a challenge") };
        assert!(matches!(first.hear(&identity, &proof).outcome, Some(Ok(_))));
        let mut second = Acceptor::new(Medium::Network);
        assert!(second.hear(&identity, introduction.hello()).outcome.is_none());
        let answer = second.hear(&identity, &proof);
        assert_eq!((answer.reply, answer.outcome), (None, Some(Err(Refusal::Secret))));
    }

    proptest! {
        /// Whatever a stranger says, in whatever portions: no panic, no entry, and nothing is asked for without end.
        #[test]
        fn strangers_are_not_let_in(bytes in proptest::collection::vec(any::<u8>(), 0..400), start in 0usize..=HELLO) {
            let identity = Identity::new("job", SECRET);
            let real = Introduction::new(&identity, Medium::Network, &hello()).hello;
            // As far as `start` it looks like a real one.
            let said: Vec<u8> = real[..start].iter().copied().chain(bytes).collect();
            let mut acceptor = Acceptor::new(Medium::Network);
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

    /// Both know the secret: each learns the other's version.
    #[test]
    fn another_version_is_refused_with_both() {
        let identity = Identity::new("job", SECRET);
        let introduction = Introduction::new(&identity, Medium::Network, &hello());
        let mut bytes = introduction.hello;
        bytes[4] = 9;
        let signature = introduction.key.sign(&[b"hello", &bytes[..CLAIMS]]);
        bytes[CLAIMS..].copy_from_slice(&signature);
        let answer = Acceptor::new(Medium::Network).hear(&identity, &bytes);
        assert_eq!(answer.outcome, Some(Err(Refusal::Version { theirs: 9 })));
        let mut caller = Introduction { hello: bytes, ..introduction };
        let Step::Done(outcome) = caller.hear(&answer.reply.unwrap()) else { panic!("it is no answer") };
        assert_eq!(outcome, Err(Refusal::Version { theirs: VERSION }));
    }

    /// An answer that was not made for this hello by a process with the secret says nothing.
    #[test]
    fn refusals_cannot_be_made_up() {
        let identity = Identity::new("job", SECRET);
        let stranger = Key::derive(None, "kolo handshake in the network");
        for status in [CHALLENGES, REFUSES_VERSION, REFUSES_JOB, REFUSES_RUN] {
            let mut caller = Introduction::new(&identity, Medium::Network, &hello());
            let made_up = reply(&stranger, status, b"evil", &caller.hello);
            assert!(matches!(caller.hear(&made_up), Step::Done(Err(Refusal::Foreign))));
        }
    }
}

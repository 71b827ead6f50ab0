//! How two processes find out that they belong to the same run of the same job, without either
//! telling a stranger anything.
//!
//! ```text
//! initiator                                                acceptor (the listener)
//! Hello: version, purpose, job, run, ranks, nonce,
//!        HMAC(key, "hello" + all this)               --->
//!                                                    <---  Challenge: nonce,
//!                                                          HMAC(key, "listener" + Hello + nonce)
//! Proof: HMAC(key, "caller" + Hello + nonce)         --->
//!                                                    <---  Welcome
//! ```
//!
//! The MACs are HMAC-SHA256 and are compared in constant time. They cover the version, the job, the
//! run and the ranks. The key is derived from the secret: one key for connections in the network
//! and one for connections inside a host, so that a message of one medium is useless in the other.
//!
//! An initiator whose hello has a wrong MAC reads one fixed answer, which only refuses. Only an
//! initiator that knows the secret reads the reason: its version, its job or its run differs. That
//! answer has a MAC, too.
//!
//! Without a secret, every process can derive the key, and handshakes protect against mistakes
//! only. That happens only at a `tcp://` store: ranks have a secret before they listen.
//!
//! Pure: bytes in, bytes out.

use crate::network::identity::{Identity, Key, MAC, Medium, random};
use crate::types::{Op, Rank};

/// Changes with every change of what goes over sockets or through shared memory.
const FORMAT: u16 = 7;

/// Two ranks of one version understand each other. A rank of an older version does not know the numbers
/// of later operations.
pub(crate) const VERSION: u16 = FORMAT + Op::ALL.len() as u16 + cfg!(kolo_next_version) as u16;

const MAGIC: [u8; 4] = *b"kolo";
pub(super) const NONCE: usize = 16;
/// The hello without its MAC, and with it.
const CLAIMS: usize = 80;
pub(crate) const HELLO: usize = CLAIMS + MAC;
/// Status, a zero, the version; then the nonce or the listener's job, padded with zeros; then the
/// MAC.
const DETAILS: usize = 48;
const REPLY: usize = 4 + DETAILS + MAC;

/// The length of the longest message of a handshake, in bytes.
pub(crate) const LONGEST: usize = HELLO;

/// What a process connects for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// The connection becomes a link between two ranks of a communicator, or a lane of one.
    Link = 1,
    /// The rank joins the host group of its host.
    HostGroup = 2,
    /// The rank reports that it cannot join the host group.
    NoHostGroup = 3,
    /// A rank uses the store.
    Store = 4,
    /// A rank tests whether the listener still exists.
    Probe = 5,
    /// A rank sends one query about a communicator, which the listener answers.
    Query = 6,
    /// A rank maps a region of memory that the listener's rank exports.
    Region = 7,
    /// A process that is no rank, such as `kolo top`, asks what the listener's rank does.
    Observe = 8,
}

impl Purpose {
    pub(super) const ALL: [Purpose; 8] = [
        Purpose::Link,
        Purpose::HostGroup,
        Purpose::NoHostGroup,
        Purpose::Store,
        Purpose::Probe,
        Purpose::Query,
        Purpose::Region,
        Purpose::Observe,
    ];
}

/// The first message: what the initiator is and what it connects for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// The number of this connection among the `lanes` of a link.
    pub(crate) lane: u8,
    pub(crate) lanes: u8,
    /// The communicator, or the region.
    pub(crate) comm_id: u64,
    /// The initiator's rank and the listener's, as ranks of the job.
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Why one end refuses the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The other end does not speak the protocol.
    Foreign,
    /// The other end speaks another version of the protocol.
    Version { theirs: u16 },
    /// The other end belongs to another job. The name is there if both know the secret.
    Job { theirs: Option<String> },
    /// The other end belongs to another run of the job.
    Run,
    /// The two ends do not share a secret.
    Secret,
}

const CHALLENGES: u8 = 0;
const REFUSES: u8 = 1;
const REFUSES_VERSION: u8 = 2;
const REFUSES_JOB: u8 = 3;
const REFUSES_RUN: u8 = 4;
const WELCOMES: u8 = 5;

impl Hello {
    /// Describes a connection that is not one of several.
    pub(crate) fn new(purpose: Purpose, comm_id: u64, from: Rank, to: Rank) -> Hello {
        Hello { purpose, lane: 0, lanes: 1, comm_id, from: from as u32, to: to as u32 }
    }

    fn encode(&self, identity: &Identity, key: &Key, nonce: [u8; NONCE]) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..9].copy_from_slice(&[self.purpose as u8, self.lane, self.lanes]);
        bytes[16..32].copy_from_slice(&identity.digest());
        bytes[32..48].copy_from_slice(&identity.run());
        bytes[48..56].copy_from_slice(&self.comm_id.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.from.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.to.to_le_bytes());
        bytes[64..CLAIMS].copy_from_slice(&nonce);
        let signature = key.sign(&[b"hello", &bytes[..CLAIMS]]);
        bytes[CLAIMS..].copy_from_slice(&signature);
        bytes
    }

    fn decode(bytes: &[u8; HELLO], identity: &Identity, key: &Key) -> Result<Hello, Refusal> {
        if bytes[..4] != MAGIC {
            return Err(Refusal::Foreign);
        }
        if !key.is_signed(&[b"hello", &bytes[..CLAIMS]], &bytes[CLAIMS..]) {
            return Err(Refusal::Secret);
        }
        let theirs = u16::from_le_bytes(array(bytes, 4));
        if theirs != VERSION {
            return Err(Refusal::Version { theirs });
        }
        if bytes[16..32] != identity.digest() {
            return Err(Refusal::Job { theirs: None });
        }
        if bytes[32..48] != identity.run() {
            return Err(Refusal::Run);
        }
        let purpose = Purpose::ALL.into_iter().find(|&purpose| purpose as u8 == bytes[6]).ok_or(Refusal::Foreign)?;
        let [lane, lanes] = [bytes[7], bytes[8]];
        if lane >= lanes || bytes[9..16] != [0; 7] {
            return Err(Refusal::Foreign);
        }
        let comm_id = u64::from_le_bytes(array(bytes, 48));
        let [from, to] = [56, 60].map(|at| u32::from_le_bytes(array(bytes, at)));
        Ok(Hello { purpose, lane, lanes, comm_id, from, to })
    }
}

/// Returns the `LEN` bytes of a hello from `at` on.
fn array<const LEN: usize>(bytes: &[u8; HELLO], at: usize) -> [u8; LEN] {
    std::array::from_fn(|i| bytes[at + i])
}

/// The listener's side of one handshake.
pub(super) struct Acceptor {
    medium: Medium,
    received: Vec<u8>,
    /// The hello as it came, the hello as it was decoded, and the nonce that was sent back.
    challenged: Option<([u8; HELLO], Hello, [u8; NONCE])>,
}

/// What the listener does after it has received something.
pub(super) struct Answer {
    pub(super) reply: Option<Vec<u8>>,
    pub(super) outcome: Option<Result<Hello, Refusal>>,
}

impl Acceptor {
    pub(super) fn new(medium: Medium) -> Acceptor {
        Acceptor { medium, received: Vec::new(), challenged: None }
    }

    /// Returns how many bytes are missing of the message that the initiator is sending.
    pub(super) fn wanted(&self) -> usize {
        let whole = if self.challenged.is_none() { HELLO } else { MAC };
        whole - self.received.len()
    }

    /// Returns the nonce of the initiator's hello, once a hello has come that a process with the
    /// secret made. A stranger can only repeat a hello that it overheard.
    pub(super) fn challenged(&self) -> Option<[u8; NONCE]> {
        let (hello, ..) = self.challenged.as_ref()?;
        hello[CLAIMS - NONCE..CLAIMS].try_into().ok()
    }

    /// Takes in bytes from the peer, at most `wanted` of them.
    pub(super) fn receive(&mut self, identity: &Identity, bytes: &[u8]) -> Answer {
        self.received.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return Answer { reply: None, outcome: None };
        }
        let received = std::mem::take(&mut self.received);
        let key = identity.handshake_key(self.medium);
        match self.challenged.take() {
            None => {
                let mut hello = [0; HELLO];
                hello.copy_from_slice(&received);
                self.challenge(identity, &key, hello)
            }
            Some((bytes, hello, nonce)) => match key.is_signed(&[b"caller", &bytes, &nonce], &received) {
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
                    // This is all that a stranger learns, not even the version.
                    Refusal::Secret => Some([&[REFUSES][..], &[0; REPLY - 1]].concat()),
                    Refusal::Version { .. } => Some(reply(key, REFUSES_VERSION, &[], &bytes)),
                    Refusal::Job { .. } => {
                        // Without a secret, every process could read the name.
                        let job = if identity.has_secret() { identity.job().as_bytes() } else { &[] };
                        Some(reply(key, REFUSES_JOB, &job[..job.len().min(DETAILS)], &bytes))
                    }
                    Refusal::Run => Some(reply(key, REFUSES_RUN, &[], &bytes)),
                };
                Answer { reply, outcome: Some(Err(refusal)) }
            }
        }
    }
}

/// Encodes an answer to a hello, which only a process with the key can make.
fn reply(key: &Key, status: u8, details: &[u8], hello: &[u8; HELLO]) -> Vec<u8> {
    let mut reply = vec![0; REPLY - MAC];
    reply[0] = status;
    reply[2..4].copy_from_slice(&VERSION.to_le_bytes());
    reply[4..4 + details.len()].copy_from_slice(details);
    reply.extend(key.sign(&[b"listener", hello, &reply]));
    reply
}

/// The initiator's side of one handshake.
pub(crate) struct Initiator {
    key: Key,
    hello: [u8; HELLO],
    received: Vec<u8>,
    /// The proof has been sent.
    has_proved: bool,
}

/// What the initiator does after it has received something.
pub(crate) enum Step {
    /// Receive more.
    Receive,
    /// Send this, then receive more.
    Send(Vec<u8>),
    Done(Result<(), Refusal>),
}

impl Initiator {
    pub(crate) fn new(identity: &Identity, medium: Medium, hello: &Hello) -> Initiator {
        let key = identity.handshake_key(medium);
        let hello = hello.encode(identity, &key, random());
        Initiator { key, hello, received: Vec::new(), has_proved: false }
    }

    /// Returns the first message.
    pub(crate) fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// Returns how many bytes are missing of the message that the listener is sending.
    pub(crate) fn wanted(&self) -> usize {
        let whole = if self.has_proved { 1 } else { REPLY };
        whole - self.received.len()
    }

    /// Takes in bytes from the peer, at most `wanted` of them.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Step {
        self.received.extend_from_slice(bytes);
        if self.wanted() > 0 {
            return Step::Receive;
        }
        let received = std::mem::take(&mut self.received);
        if self.has_proved {
            return Step::Done(if received[0] == WELCOMES { Ok(()) } else { Err(Refusal::Foreign) });
        }
        let (message, signature) = received.split_at(REPLY - MAC);
        if !self.key.is_signed(&[b"listener", &self.hello, message], signature) {
            // A listener with another secret refuses like this, or a stranger that pretends to be
            // one.
            return Step::Done(Err(if message[0] == REFUSES { Refusal::Secret } else { Refusal::Foreign }));
        }
        let (version, details) = (u16::from_le_bytes([message[2], message[3]]), &message[4..]);
        match message[0] {
            CHALLENGES if version == VERSION => {
                self.has_proved = true;
                Step::Send(self.key.sign(&[b"caller", &self.hello, &details[..NONCE]]).to_vec())
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

/// Feeds a listener what a stranger sends, in portions of `portion` bytes: it must not panic, admit
/// the stranger, or answer without a bound.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz_acceptor(sent: &[u8], portion: usize) {
    let identity = Identity::new("job", Some([1; 32]));
    let mut acceptor = Acceptor::new(Medium::Network);
    let (mut rest, mut replied) = (sent, 0);
    while !rest.is_empty() {
        let wanted = acceptor.wanted();
        assert!((1..=LONGEST).contains(&wanted), "{wanted} bytes are wanted");
        let (now, later) = rest.split_at(wanted.min(rest.len()).min(portion.max(1)));
        rest = later;
        let Answer { reply, outcome } = acceptor.receive(&identity, now);
        replied += reply.map_or(0, |reply| reply.len());
        assert!(!matches!(outcome, Some(Ok(_))), "the listener admits a stranger");
        assert!(replied <= 2 * LONGEST, "the listener answers a stranger with {replied} bytes");
        if outcome.is_some() {
            return;
        }
    }
}

/// Returns the hello of an initiator with the secret, and the answer of a listener with it.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> [Vec<u8>; 2] {
    let identity = Identity::new("job", Some([1; 32]));
    let key = identity.handshake_key(Medium::Network);
    let hello = Hello::new(Purpose::Link, 1, 1, 0).encode(&identity, &key, random());
    let answer = Acceptor::new(Medium::Network).receive(&identity, &hello).reply.unwrap_or_default();
    [hello.to_vec(), answer]
}

/// The reply of a listener of another version to a hello that came over the network.
#[cfg(test)]
pub(crate) fn refuse_for_version(identity: &Identity, hello: &[u8]) -> Vec<u8> {
    reply(&identity.handshake_key(Medium::Network), REFUSES_VERSION, &[], hello.try_into().expect("a whole hello"))
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

    /// What the initiator and the listener learn.
    type Learned = (Option<Result<(), Refusal>>, Option<Result<Hello, Refusal>>);

    /// Returns what the two ends learn when each assumes the medium given.
    fn shake_hands(initiator: (&Identity, Medium), listener: (&Identity, Medium)) -> Learned {
        let mut initiator = Initiator::new(initiator.0, initiator.1, &hello());
        let mut acceptor = Acceptor::new(listener.1);
        let mut sent = initiator.hello().to_vec();
        let mut learned = None;
        loop {
            let Answer { reply, outcome } = acceptor.receive(listener.0, &sent);
            learned = learned.or(outcome);
            let Some(reply) = reply else { return (None, learned) };
            match initiator.receive(&reply) {
                Step::Receive => panic!("a reply is incomplete"),
                Step::Send(message) => sent = message,
                Step::Done(outcome) => return (Some(outcome), learned),
            }
        }
    }

    #[test]
    fn processes_of_one_run_meet() {
        let identity = Identity::new("job", SECRET).of_run([3; 16], GIVEN);
        for medium in [Medium::Network, Medium::Local] {
            assert_eq!(shake_hands((&identity, medium), (&identity, medium)), (Some(Ok(())), Some(Ok(hello()))));
        }
    }

    #[test]
    fn a_process_of_another_run_is_refused_and_told_so() {
        let job = Identity::new("job", SECRET);
        let (now, before) = (job.clone().of_run([3; 16], GIVEN), job.of_run([2; 16], GIVEN));
        let network = Medium::Network;
        assert_eq!(shake_hands((&before, network), (&now, network)), (Some(Err(Refusal::Run)), Some(Err(Refusal::Run))));
    }

    #[test]
    fn only_a_process_with_the_secret_reads_the_name_of_the_job() {
        let network = Medium::Network;
        let refused = |secret, theirs: Option<&str>| {
            let (mine, other) = (Identity::new("mine", secret), Identity::new("other", secret));
            let theirs = theirs.map(str::to_owned);
            assert_eq!(shake_hands((&other, network), (&mine, network)).0, Some(Err(Refusal::Job { theirs })));
        };
        refused(SECRET, Some("mine"));
        refused(None, None);
    }

    #[test]
    fn strangers_learn_only_that_they_are_refused() {
        let mine = Identity::new("mine", SECRET).of_run([3; 16], GIVEN);
        let mut replies = Vec::new();
        for (job, secret, run) in [("mine", None, 3), ("mine", Some([2; 32]), 3), ("other", None, 0)] {
            let stranger = Identity::new(job, secret).in_run([run; 16]);
            let initiator = Initiator::new(&stranger, Medium::Network, &hello());
            let answer = Acceptor::new(Medium::Network).receive(&mine, initiator.hello());
            assert_eq!(answer.outcome, Some(Err(Refusal::Secret)));
            replies.push(answer.reply);
            let network = Medium::Network;
            assert_eq!(shake_hands((&stranger, network), (&mine, network)).0, Some(Err(Refusal::Secret)));
        }
        assert!(replies.iter().all(|reply| reply.as_deref() == Some(&[&[REFUSES][..], &[0; REPLY - 1]].concat()[..])));
    }

    /// A message of one medium is useless in the other.
    #[test]
    fn a_handshake_cannot_be_moved_to_another_medium() {
        let identity = Identity::new("job", SECRET);
        let moved = shake_hands((&identity, Medium::Local), (&identity, Medium::Network));
        assert_eq!(moved, (Some(Err(Refusal::Secret)), Some(Err(Refusal::Secret))));
    }

    /// A stranger that repeats a rank's messages reads another challenge, for which the rank's
    /// proof is wrong.
    #[test]
    fn an_overheard_handshake_cannot_be_replayed() {
        let identity = Identity::new("job", SECRET);
        let mut initiator = Initiator::new(&identity, Medium::Network, &hello());
        let mut first = Acceptor::new(Medium::Network);
        let challenge = first.receive(&identity, initiator.hello()).reply.unwrap();
        let Step::Send(proof) = initiator.receive(&challenge) else { panic!("the challenge is not understood") };
        assert!(matches!(first.receive(&identity, &proof).outcome, Some(Ok(_))));
        let mut second = Acceptor::new(Medium::Network);
        assert!(second.receive(&identity, initiator.hello()).outcome.is_none());
        let answer = second.receive(&identity, &proof);
        assert_eq!((answer.reply, answer.outcome), (None, Some(Err(Refusal::Secret))));
    }

    proptest! {
        /// A stranger's bytes, in any portions, cause no panic and no entry, and the answers are
        /// bounded.
        #[test]
        fn strangers_are_not_admitted(bytes in proptest::collection::vec(any::<u8>(), 0..400), start in 0usize..=HELLO) {
            let identity = Identity::new("job", SECRET);
            let real = Initiator::new(&identity, Medium::Network, &hello()).hello;
            // The first `start` bytes are those of a real hello.
            let sent: Vec<u8> = real[..start].iter().copied().chain(bytes).collect();
            let mut acceptor = Acceptor::new(Medium::Network);
            let mut rest = &sent[..];
            let mut replied = 0;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(acceptor.wanted().min(rest.len()).min(7));
                rest = later;
                let answer = acceptor.receive(&identity, now);
                replied += answer.reply.map_or(0, |reply| reply.len());
                prop_assert!(!matches!(answer.outcome, Some(Ok(_))));
                prop_assert!(replied <= 128);
                if answer.outcome.is_some() {
                    break;
                }
            }
        }
    }

    /// Both ends know the secret, so each learns the other's version.
    #[test]
    fn another_version_is_refused_with_both() {
        let identity = Identity::new("job", SECRET);
        let initiator = Initiator::new(&identity, Medium::Network, &hello());
        let mut bytes = initiator.hello;
        let other = VERSION + 1;
        bytes[4] = other as u8;
        let signature = initiator.key.sign(&[b"hello", &bytes[..CLAIMS]]);
        bytes[CLAIMS..].copy_from_slice(&signature);
        let answer = Acceptor::new(Medium::Network).receive(&identity, &bytes);
        assert_eq!(answer.outcome, Some(Err(Refusal::Version { theirs: other })));
        let mut initiator = Initiator { hello: bytes, ..initiator };
        let Step::Done(outcome) = initiator.receive(&answer.reply.unwrap()) else { panic!("the answer is not understood") };
        assert_eq!(outcome, Err(Refusal::Version { theirs: VERSION }));
    }

    /// The initiator ignores the reason in an answer that no process with the secret made for this
    /// hello.
    #[test]
    fn refusals_cannot_be_made_up() {
        let identity = Identity::new("job", SECRET);
        let stranger = Key::derive(None, "kolo handshake in the network");
        for status in [CHALLENGES, REFUSES_VERSION, REFUSES_JOB, REFUSES_RUN] {
            let mut initiator = Initiator::new(&identity, Medium::Network, &hello());
            let made_up = reply(&stranger, status, b"evil", &initiator.hello);
            assert!(matches!(initiator.receive(&made_up), Step::Done(Err(Refusal::Foreign))));
        }
    }
}

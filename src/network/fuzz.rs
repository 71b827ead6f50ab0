//! Fuzzes the listener of a rank, with its identity and its mailbox. Many peers connect to it at
//! once: members of the job, strangers with a secret of their own, and strangers that do not speak
//! the protocol.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::identity::{Identity, Medium};
use super::listener::handshake::{Hello, Initiator, Purpose, Step};
use super::listener::{self, Listener, random_name};
use super::{Dispatcher, Mailbox};
use crate::failure::{Query, Reply, StatusBoard};
use crate::sys::{LocalListener, LocalStream};

/// The rank that listens, and the world size.
const RANK: usize = 1;
const WORLD: usize = 4;

/// The most peers at once. So few do not keep each other out.
const MOST_PEERS: usize = 32;

/// How long a reply that must come may take, far longer than it does.
const PATIENCE: Duration = Duration::from_secs(10);

/// The comm ids that peers name.
const COMM_IDS: u64 = 2;

struct Peer {
    stream: LocalStream,
    /// The state of its handshake, and its hello; `None` if it speaks no protocol, or has been
    /// admitted.
    handshake: Option<(Initiator, Hello)>,
    is_member: bool,
}

/// Runs a script. Each step begins with a byte for its kind. Most name a peer, and the rest of a
/// step is what the peer sends.
pub(crate) fn listener(script: &[u8]) {
    if cfg!(miri) {
        return;
    }
    let name = random_name();
    // On other platforms nothing listens inside a host.
    let Ok(socket) = LocalListener::bind(&name) else { return };
    let member = Identity::new("job", Some([1; 32]));
    let stranger = Identity::new("job", Some([2; 32]));
    let mailbox = Arc::new(Mailbox::default());
    let handler = Dispatcher { rank: RANK, world: WORLD, mailbox: mailbox.clone(), board: Arc::new(StatusBoard::default()) };
    let _listener = Listener::open(None, Some((name.clone(), socket)), member.clone(), handler).expect("a listener opens");

    let connect = || LocalStream::connect(&name, Instant::now() + PATIENCE).expect("the listener accepts connections");
    let mut peers: Vec<Peer> = Vec::new();
    // How many connections of members have sent a proof, and may wait in the mailbox.
    let mut admitted = 0;
    let mut rest = Script(script);
    while let Some(step) = rest.byte() {
        match step % 6 {
            kind @ (0 | 1) if peers.len() < MOST_PEERS => {
                let is_member = kind == 0;
                let (identity, hello) = (if is_member { &member } else { &stranger }, rest.hello());
                let initiator = Initiator::new(identity, Medium::Local, &hello);
                let stream = connect();
                let _ = (&stream).write_all(initiator.hello());
                peers.push(Peer { stream, handshake: Some((initiator, hello)), is_member });
            }
            2 if peers.len() < MOST_PEERS => {
                let stream = connect();
                let _ = (&stream).write_all(rest.some());
                peers.push(Peer { stream, handshake: None, is_member: false });
            }
            3 => {
                let Some(peer) = rest.one_of(&mut peers) else { continue };
                admitted += usize::from(peer.continue_handshake());
            }
            // A peer sends what it should not, or a query.
            4 => {
                let Some(peer) = rest.one_of(&mut peers) else { continue };
                let _ = (&peer.stream).write_all(rest.some());
            }
            _ => {
                let at = usize::from(rest.byte().unwrap_or_default());
                if let Some(at) = at.checked_rem(peers.len()) {
                    peers.swap_remove(at);
                }
            }
        }
    }

    // The listener still answers a member. By then it has handled all that came before.
    let (hello, query) = (Hello::new(Purpose::Query, 0, 0, RANK), Query::Doing(None).encode());
    let reply = listener::query_local(&name, &member, &hello, &query, Instant::now() + PATIENCE);
    assert!(reply.is_ok_and(|reply| Reply::decode(&reply).is_some()), "the listener does not answer a member");
    check_mailbox(&mailbox, admitted);
}

/// Checks that the mailbox holds only connections that were admitted, and forgets them.
fn check_mailbox(mailbox: &Mailbox, admitted: usize) {
    assert!(mailbox.waiting() <= admitted, "more connections wait than were admitted");
    for (comm_id, from) in (0..COMM_IDS).flat_map(|comm_id| (0..WORLD).map(move |from| (comm_id, from))) {
        let before = mailbox.waiting();
        if let Some(streams) = mailbox.link_streams(comm_id, from, None) {
            assert!(
                !streams.is_empty() && mailbox.waiting() + streams.len() <= before,
                "a link has connections that did not come"
            );
        }
        mailbox.forget(comm_id);
    }
    assert_eq!(mailbox.waiting(), 0, "the mailbox keeps connections of communicators that have ended");
}

impl Peer {
    /// Reads the listener's message and answers it. Returns whether the peer has sent a proof that
    /// puts it into the mailbox.
    fn continue_handshake(&mut self) -> bool {
        let Some((initiator, hello)) = &mut self.handshake else { return false };
        let mut message = vec![0; initiator.wanted()];
        if self.stream.until(Instant::now() + PATIENCE).read_exact(&mut message).is_err() {
            // The peer has sent something else meanwhile, or is no member.
            self.handshake = None;
            return false;
        }
        match initiator.receive(&message) {
            Step::Receive => false,
            Step::Send(proof) => {
                let is_admitted = self.is_member && hello.purpose != Purpose::Query;
                let _ = (&self.stream).write_all(&proof);
                is_admitted
            }
            Step::Done(outcome) => {
                assert!(outcome.is_err() || self.is_member, "the listener admits a stranger");
                self.handshake = None;
                false
            }
        }
    }
}

/// The rest of the script.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// Takes some bytes; the first byte is their number.
    fn some(&mut self) -> &'a [u8] {
        let len = usize::from(self.byte().unwrap_or_default()).min(self.0.len());
        let (some, rest) = self.0.split_at(len);
        self.0 = rest;
        some
    }

    fn hello(&mut self) -> Hello {
        let purposes = [Purpose::Link, Purpose::HostGroup, Purpose::NoHostGroup, Purpose::Store, Purpose::Probe, Purpose::Query];
        let mut below = |bound: u8| self.byte().unwrap_or_default() % bound;
        let purpose = purposes[usize::from(below(purposes.len() as u8))];
        let lanes = 1 + below(3);
        let (comm_id, from, to) = (below(COMM_IDS as u8), below(WORLD as u8 + 1), below(3));
        Hello { lane: below(lanes), lanes, ..Hello::new(purpose, comm_id.into(), from.into(), to.into()) }
    }

    fn one_of<'p>(&mut self, peers: &'p mut [Peer]) -> Option<&'p mut Peer> {
        let number = usize::from(self.byte()?).checked_rem(peers.len())?;
        peers.get_mut(number)
    }
}

/// Returns scripts: members whose handshakes overlap, one with a link of two connections; and a
/// member, a stranger and noise.
pub(crate) fn samples() -> Vec<Vec<u8>> {
    vec![
        vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1, 3, 0, 3, 1, 3, 1, 3, 0],
        vec![0, 5, 0, 1, 2, 1, 0, 1, 0, 0, 0, 3, 1, 0, 2, 3, 107, 111, 108, 3, 1, 3, 0, 3, 0, 4, 0, 5, 1, 0, 0, 0, 0],
    ]
}

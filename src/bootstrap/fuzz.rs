//! The listener of a rank, with its identity and its mailbox, against any number of callers at once: members of the job, strangers
//! with a secret of their own, and such as speak no protocol at all.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::network::{Arrivals, Mailbox};
use crate::bootstrap::listener::handshake::{Hello, Identity, Introduction, Medium, Purpose, Step};
use crate::bootstrap::listener::{self, Listener, random_name};
use crate::failure::{Query, Reply, StatusBoard};
use crate::sys::{LocalListener, LocalStream};

/// The rank that listens, and of how many.
const RANK: usize = 1;
const WORLD: usize = 4;

/// As many callers at once as keep each other from nothing.
const MOST_CALLERS: usize = 32;

/// How long an answer may take that must come: far longer than it does.
const PATIENCE: Duration = Duration::from_secs(10);

struct Caller {
    stream: LocalStream,
    /// How far its handshake is, and what it wants; `None` if it speaks no protocol, or has been let in.
    introduction: Option<(Introduction, Hello)>,
    is_member: bool,
}

/// The bytes are a script: each step begins with what is done, most name a caller, and the rest of a step is what is said.
pub(crate) fn listener(script: &[u8]) {
    if cfg!(miri) {
        return;
    }
    let name = random_name();
    // Elsewhere nothing listens inside a host.
    let Ok(socket) = LocalListener::bind(&name) else { return };
    let member = Identity::new("job", Some([1; 32]));
    let stranger = Identity::new("job", Some([2; 32]));
    let mailbox = Arc::new(Mailbox::default());
    let host = Arrivals { rank: RANK, world: WORLD, mailbox: mailbox.clone(), board: Arc::new(StatusBoard::default()) };
    let _listener = Listener::open(None, Some((name.clone(), socket)), member.clone(), host).expect("a listener can be opened");

    let connect = || LocalStream::connect(&name, Instant::now() + PATIENCE).expect("the listener takes connections");
    let mut callers: Vec<Caller> = Vec::new();
    // Members of the job that have proved it, and may wait in the mailbox.
    let mut let_in = 0;
    let mut rest = Script(script);
    while let Some(step) = rest.byte() {
        match step % 6 {
            kind @ (0 | 1) if callers.len() < MOST_CALLERS => {
                let is_member = kind == 0;
                let (identity, hello) = (if is_member { &member } else { &stranger }, rest.hello());
                let introduction = Introduction::new(identity, Medium::Local, &hello);
                let stream = connect();
                let _ = (&stream).write_all(introduction.hello());
                callers.push(Caller { stream, introduction: Some((introduction, hello)), is_member });
            }
            2 if callers.len() < MOST_CALLERS => {
                let stream = connect();
                let _ = (&stream).write_all(rest.some());
                callers.push(Caller { stream, introduction: None, is_member: false });
            }
            // Its handshake goes on.
            3 => {
                let Some(caller) = rest.one_of(&mut callers) else { continue };
                let Some((introduction, hello)) = &mut caller.introduction else { continue };
                let mut reply = vec![0; introduction.wanted()];
                let heard = caller.stream.until(Instant::now() + PATIENCE).read_exact(&mut reply);
                if heard.is_err() {
                    // It has said something else meanwhile, or is no member.
                    caller.introduction = None;
                    continue;
                }
                match introduction.hear(&reply) {
                    Step::Hear => {}
                    Step::Say(proof) => {
                        let_in += usize::from(caller.is_member && hello.purpose != Purpose::Ask);
                        let _ = (&caller.stream).write_all(&proof);
                    }
                    Step::Done(outcome) => {
                        assert!(outcome.is_err() || caller.is_member, "a stranger is let in");
                        caller.introduction = None;
                    }
                }
            }
            // It says something that it should not, or asks a question.
            4 => {
                let Some(caller) = rest.one_of(&mut callers) else { continue };
                let _ = (&caller.stream).write_all(rest.some());
            }
            _ => {
                let at = usize::from(rest.byte().unwrap_or_default());
                if let Some(at) = at.checked_rem(callers.len()) {
                    callers.swap_remove(at);
                }
            }
        }
    }

    // A member is heard all the same, and what came before has been dealt with by then.
    let (hello, query) = (Hello::new(Purpose::Ask, 0, 0, RANK), Query::Doing(None).encode());
    let answer = listener::ask_local(&name, &member, &hello, &query, Instant::now() + PATIENCE);
    assert!(answer.is_ok_and(|answer| Reply::decode(&answer).is_some()), "a member is not answered");
    assert!(mailbox.waiting() <= let_in, "more wait than were let in");
    for (comm_id, from) in (0..COMM_IDS).flat_map(|comm_id| (0..WORLD).map(move |from| (comm_id, from))) {
        let before = mailbox.waiting();
        if let Some(streams) = mailbox.link_streams(comm_id, from) {
            assert!(
                !streams.is_empty() && mailbox.waiting() + streams.len() <= before,
                "a link of connections that did not come"
            );
        }
        mailbox.forget(comm_id);
    }
    assert_eq!(mailbox.waiting(), 0, "connections are kept of communicators that are gone");
}

/// Communicators that callers name.
const COMM_IDS: u64 = 2;

/// What is left of the bytes.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// Some bytes, of which the first says how many.
    fn some(&mut self) -> &'a [u8] {
        let len = usize::from(self.byte().unwrap_or_default()).min(self.0.len());
        let (some, rest) = self.0.split_at(len);
        self.0 = rest;
        some
    }

    fn hello(&mut self) -> Hello {
        let purposes = [Purpose::Link, Purpose::Window, Purpose::Apart, Purpose::Store, Purpose::Probe, Purpose::Ask];
        let mut below = |bound: u8| self.byte().unwrap_or_default() % bound;
        let purpose = purposes[usize::from(below(purposes.len() as u8))];
        let lanes = 1 + below(3);
        let (comm_id, from, to) = (below(COMM_IDS as u8), below(WORLD as u8 + 1), below(3));
        Hello { lane: below(lanes), lanes, ..Hello::new(purpose, comm_id.into(), from.into(), to.into()) }
    }

    fn one_of<'c>(&mut self, callers: &'c mut [Caller]) -> Option<&'c mut Caller> {
        let number = usize::from(self.byte()?).checked_rem(callers.len())?;
        callers.get_mut(number)
    }
}

/// Members whose handshakes cross, one with a link of two connections; and a member, a stranger and noise.
pub(crate) fn samples() -> Vec<Vec<u8>> {
    vec![
        vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1, 3, 0, 3, 1, 3, 1, 3, 0],
        vec![0, 5, 0, 1, 2, 1, 0, 1, 0, 0, 0, 3, 1, 0, 2, 3, 107, 111, 108, 3, 1, 3, 0, 3, 0, 4, 0, 5, 1, 0, 0, 0, 0],
    ]
}

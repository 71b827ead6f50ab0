use std::io::{self, Read, Write};
use std::net::{TcpListener as StdListener, TcpStream as StdStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token};

use super::accept::{LOG_INTERVAL, REMEMBERED, RecentNonces, STRANGERS, is_due};
use super::handshake::{Hello, Initiator, Purpose, Refusal, Step};
use super::query::LONGEST_QUERY;
use super::{Connector, DialError, Handler, Listener, Stream, Target, dial, query};
use crate::network::identity::{Identity, Medium};
use crate::timeouts::{ACCEPT_PAUSE, HANDSHAKE};

fn listener(identity: Identity) -> (Listener, mpsc::Receiver<Hello>) {
    let (send, receive) = mpsc::channel();
    // With the backlog of a rank: beyond that of the standard library, a connection takes a second longer.
    let listener = crate::sys::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener =
        Listener::open(Some(listener), None, identity, move |hello: Hello, _: Stream| send.send(hello).unwrap()).unwrap();
    (listener, receive)
}

fn hello() -> Hello {
    Hello::new(Purpose::Link, 77, 3, 0)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn a_peer_that_shares_job_and_secret_is_admitted() {
    let identity = Identity::new("job", Some([7; 32]));
    let (listener, admitted) = listener(identity.clone());
    dial(listener.address().unwrap(), &identity, &hello(), soon()).unwrap();
    assert_eq!(admitted.recv().unwrap(), hello());
}

#[test]
fn a_peer_that_does_not_is_refused_with_the_reason() {
    let (listener, admitted) = listener(Identity::new("job", Some([7; 32])));
    let dial = |identity| dial(listener.address().unwrap(), &identity, &hello(), soon()).map(drop);
    match dial(Identity::new("other", Some([7; 32]))) {
        Err(DialError::Refused(Refusal::Job { theirs })) => assert_eq!(theirs.as_deref(), Some("job")),
        other => panic!("{other:?}"),
    }
    for secret in [None, Some([8; 32])] {
        assert!(matches!(dial(Identity::new("job", secret)), Err(DialError::Refused(Refusal::Secret))));
    }
    assert!(admitted.try_recv().is_err());
}

/// A process of an earlier run connects to a port that has been used again.
#[test]
fn processes_of_an_earlier_run_have_no_effect() {
    let job = Identity::new("job", None);
    let (earlier, now) = (job.clone().of_run([1; 16], [7; 32]), job.of_run([2; 16], [7; 32]));
    let (listener, admitted) = listener(now.clone());
    let dial = |identity| dial(listener.address().unwrap(), identity, &hello(), soon()).map(drop);
    assert!(matches!(dial(&earlier), Err(DialError::Refused(Refusal::Run))));
    dial(&now).unwrap();
    assert_eq!(admitted.recv().unwrap(), hello());
    assert!(admitted.try_recv().is_err());
}

/// Ranks that agreed on a secret through a store to which others can write accept no other user of
/// the machine, even with the secret.
#[test]
#[cfg(all(target_os = "linux", not(kolo_posix)))]
fn another_user_is_a_stranger_unless_the_secret_was_given() {
    // SAFETY: geteuid has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("NOT RUN: another user connects to a local socket; only root can become another user");
        return;
    }
    for (is_agreed, is_admitted) in [(false, true), (true, false)] {
        let identity = Identity::new("job", None).of_run([1; 16], [7; 32]);
        let identity = if is_agreed { identity.agreed() } else { identity };
        let name = super::random_name();
        let local = (name.clone(), crate::sys::LocalListener::bind(&name).unwrap());
        let (send, admitted) = mpsc::channel();
        let _listener =
            Listener::open(None, Some(local), identity.clone(), move |hello: Hello, _: Stream| send.send(hello).unwrap());
        super::dial_local(&name, &identity, &hello(), soon()).unwrap();
        assert_eq!(admitted.recv().unwrap(), hello());
        let (another, stranger) = (name.clone(), identity.clone());
        let connected = std::thread::spawn(move || {
            // The raw call changes the user of this thread only; the C library's function would
            // change all threads. SAFETY: the arguments are numbers, and nothing on this thread
            // needs root.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            // A stranger gets no reason, and tries again until the deadline.
            let deadline = if is_admitted { soon() } else { Instant::now() + HANDSHAKE };
            super::dial_local(&another, &stranger, &hello(), deadline).is_ok()
        });
        assert_eq!(connected.join().unwrap(), is_admitted, "agreed: {is_agreed}");
        // The peer learns that it is admitted a little before the handler does.
        let patience = if is_admitted { Duration::from_secs(60) } else { Duration::ZERO };
        assert_eq!(admitted.recv_timeout(patience).is_ok(), is_admitted);
    }
}

/// Replies with the query, twice.
struct Echo;

impl Handler for Echo {
    fn admit(&mut self, _: Hello, _: Stream) {
        panic!("no connection is for the handler");
    }

    fn answer(&mut self, hello: &Hello, query: &[u8]) -> Vec<u8> {
        assert_eq!(hello.purpose, Purpose::Query);
        query.repeat(2)
    }
}

#[test]
fn queries_of_members_are_answered() {
    let identity = Identity::new("job", Some([7; 32]));
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let listener = Listener::open(Some(listener), None, identity.clone(), Echo).unwrap();
    let ask = |identity: &Identity, text: &[u8]| {
        query(listener.address().unwrap(), identity, &Hello::new(Purpose::Query, 77, 3, 0), text, soon())
    };
    for len in [0, 1, 63, 64, 5000, LONGEST_QUERY] {
        let text: Vec<u8> = (0..len).map(|i| i as u8).collect();
        assert_eq!(ask(&identity, &text).unwrap(), text.repeat(2));
    }
    assert!(matches!(ask(&identity, &[0; LONGEST_QUERY + 1]), Err(DialError::Io(_))));
    let stranger = Identity::new("job", Some([8; 32]));
    assert!(matches!(ask(&stranger, b"?"), Err(DialError::Refused(Refusal::Secret))));
}

/// A reply that is longer than what a socket takes at once.
struct Long;

const LONG: usize = (1 << 20) - 1;

impl Handler for Long {
    fn admit(&mut self, _: Hello, _: Stream) {
        panic!("no connection is for the handler");
    }

    fn answer(&mut self, hello: &Hello, _: &[u8]) -> Vec<u8> {
        assert_eq!(hello.purpose, Purpose::Observe);
        (0..LONG).map(|i| (i % 251) as u8).collect()
    }
}

#[test]
fn a_long_reply_arrives_whole_at_a_peer_that_reads_late() {
    let identity = Identity::new("job", Some([7; 32]));
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let listener = Listener::open(Some(listener), None, identity.clone(), Long).unwrap();
    let address = listener.address().unwrap();
    let observe = Hello::new(Purpose::Observe, 0, u32::MAX as usize, 0);
    let reply = query(address, &identity, &observe, b"?", soon()).unwrap();
    assert!(reply.len() == LONG && reply.iter().enumerate().all(|(i, &byte)| byte == (i % 251) as u8));
    // A peer that reads nothing does not keep others waiting.
    let deadline = soon();
    let silent = Initiator::new(&identity, Medium::Network, &observe);
    let mut stream = StdStream::connect(address).unwrap();
    stream.write_all(silent.hello()).unwrap();
    assert_eq!(query(address, &identity, &observe, b"?", deadline).unwrap().len(), LONG);
}

/// More members than there may be strangers shake hands at once.
#[test]
fn all_members_are_admitted_at_once() {
    const AT_ONCE: usize = 200;
    let identity = Identity::new("job", Some([7; 32]));
    let (listener, admitted) = listener(identity.clone());
    let address = listener.address().unwrap();
    let deadline = soon();
    loop {
        let began = Instant::now();
        let mut members: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                let member = Initiator::new(&identity, Medium::Network, &hello());
                let mut stream = StdStream::connect(address).unwrap();
                stream.write_all(member.hello()).unwrap();
                (member, stream)
            })
            .collect();
        let proofs: io::Result<Vec<Vec<u8>>> = members
            .iter_mut()
            .map(|(member, stream)| {
                let mut challenge = vec![0; member.wanted()];
                stream.read_exact(&mut challenge)?;
                let Step::Send(proof) = member.receive(&challenge) else { panic!("the answer is no challenge") };
                Ok(proof)
            })
            .collect();
        let sent = proofs.and_then(|proofs| members.iter_mut().zip(&proofs).try_for_each(|((_, s), p)| s.write_all(p)));
        // The listener also drops members that take too long, as these may on a slow machine.
        if began.elapsed() >= HANDSHAKE / 2 {
            assert!(Instant::now() < deadline, "the handshakes did not end before the deadline");
            drop(members);
            while admitted.recv_timeout(HANDSHAKE).is_ok() {}
            continue;
        }
        sent.expect("the listener dropped a member for another");
        assert_eq!((0..AT_ONCE).map_while(|_| admitted.recv_timeout(Duration::from_secs(60)).ok()).count(), AT_ONCE);
        return;
    }
}

/// A peer that has sent a valid hello is a member. The listener drops it for no number of
/// strangers.
#[test]
fn members_do_not_make_room_for_strangers() {
    let identity = Identity::new("job", Some([7; 32]));
    let (listener, admitted) = listener(identity.clone());
    let address = listener.address().unwrap();
    let deadline = soon();
    loop {
        let mut member = Initiator::new(&identity, Medium::Network, &hello());
        let mut stream = StdStream::connect(address).unwrap();
        stream.write_all(member.hello()).unwrap();
        let mut challenge = vec![0; member.wanted()];
        stream.read_exact(&mut challenge).unwrap();
        let began = Instant::now();
        let mut strangers: Vec<StdStream> = (0..3 * STRANGERS).map(|_| StdStream::connect(address).unwrap()).collect();
        // When strangers that came after the member have been dropped, the member would have been,
        // too.
        strangers[STRANGERS].set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(matches!(strangers[STRANGERS].read(&mut [0]), Ok(0) | Err(_)));
        let Step::Send(proof) = member.receive(&challenge) else { panic!("the answer is no challenge") };
        let sent = stream.write_all(&proof);
        // The listener also drops a member that takes too long, as this one may on a slow machine.
        if began.elapsed() >= HANDSHAKE / 2 {
            assert!(Instant::now() < deadline, "this machine is too slow for a handshake");
            let _ = admitted.recv_timeout(HANDSHAKE);
            continue;
        }
        sent.unwrap();
        assert_eq!(admitted.recv_timeout(Duration::from_secs(60)).unwrap(), hello());
        return;
    }
}

/// A process that repeats an overheard hello takes no more places than other strangers.
#[test]
fn a_process_that_repeats_a_hello_is_a_stranger() {
    let identity = Identity::new("job", Some([7; 32]));
    let (listener, admitted) = listener(identity.clone());
    let address = listener.address().unwrap();
    let overheard = Initiator::new(&identity, Medium::Network, &hello());
    let challenged = (0..3 * STRANGERS).filter(|_| {
        let mut stream = StdStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(overheard.hello()).unwrap();
        // A member reads a challenge; a stranger the end.
        stream.read(&mut [0]).is_ok_and(|count| count > 0)
    });
    assert_eq!(challenged.count(), 1);
    dial(address, &identity, &hello(), soon()).unwrap();
    assert_eq!(admitted.recv().unwrap(), hello());
}

#[test]
fn the_last_hellos_are_remembered() {
    let mut recent = RecentNonces::default();
    let nonce = |number: usize| (number as u128).to_le_bytes();
    assert!((0..=REMEMBERED).all(|number| recent.is_new(nonce(number))));
    assert!((1..=REMEMBERED).all(|number| !recent.is_new(nonce(number))));
    assert!(recent.is_new(nonce(0)), "the oldest is forgotten");
    assert_eq!((recent.nonces.len(), recent.order.len()), (REMEMBERED, REMEMBERED));
}

/// The listener drops a connection in the middle of the handshake. The peer connects again, whether
/// it waits or not.
#[test]
fn handshakes_that_end_early_are_tried_again() {
    let identity = Identity::new("job", Some([7; 32]));
    let (listener, admitted) = listener(identity.clone());
    let address = listener.address().unwrap();
    // Between the two is a relay that closes the first three connections.
    let between = StdListener::bind("127.0.0.1:0").unwrap();
    let target = between.local_addr().unwrap();
    std::thread::spawn(move || {
        for number in 0u32.. {
            let Ok((peer, _)) = between.accept() else { return };
            if number % 4 == 3 {
                let listener = StdStream::connect(address).unwrap();
                for (mut from, mut to) in [(peer.try_clone().unwrap(), listener.try_clone().unwrap()), (listener, peer)] {
                    std::thread::spawn(move || io::copy(&mut from, &mut to));
                }
            }
        }
    });
    dial(target, &identity, &hello(), soon()).unwrap();
    assert_eq!(admitted.recv().unwrap(), hello());

    let mut poll = Poll::new().unwrap();
    let mut events = Events::with_capacity(8);
    let mut connector = Connector::new(Target::Network(target), hello());
    while connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none() {
        poll.poll(&mut events, connector.left()).unwrap();
    }
    assert_eq!(admitted.recv().unwrap(), hello());
}

/// While a listener is paused, a connector returns at once. When the listener continues, it admits
/// the peer.
#[test]
fn a_connector_never_waits() {
    let identity = Identity::new("job", Some([7; 32]));
    let (resume, paused) = mpsc::channel::<()>();
    let (send, admitted) = mpsc::channel();
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let handler = move |hello: Hello, _: Stream| {
        let _ = paused.recv();
        let _ = send.send(hello);
    };
    let listener = Listener::open(Some(listener), None, identity.clone(), handler).unwrap();
    dial(address, &identity, &hello(), soon()).unwrap();
    let mut poll = Poll::new().unwrap();
    let mut events = Events::with_capacity(8);
    let mut connector = Connector::new(Target::Network(address), hello());
    for _ in 0..100 {
        assert!(connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none());
        poll.poll(&mut events, Some(Duration::from_millis(1))).unwrap();
    }
    drop(resume);
    while connector.advance(&identity, poll.registry(), Token(0)).unwrap().is_none() {
        poll.poll(&mut events, connector.left()).unwrap();
    }
    assert_eq!(admitted.iter().take(2).count(), 2);
    drop(listener);
}

#[test]
fn a_repeated_failure_is_logged_seldom() {
    let (mut logged, start) = (None, Instant::now());
    let times = (0..1000).filter(|&i| is_due(&mut logged, start + i * ACCEPT_PAUSE)).count();
    assert_eq!(times, (1000 * ACCEPT_PAUSE.as_millis() / LOG_INTERVAL.as_millis()) as usize);
}

#[test]
fn garbage_silence_and_crowds_do_not_keep_others_out() {
    let identity = Identity::new("job", None);
    let (listener, admitted) = listener(identity.clone());
    let address = listener.address().unwrap();
    let mut strangers = Vec::new();
    for i in 0..300u32 {
        let mut stranger = StdStream::connect(address).unwrap();
        if i % 2 == 0 {
            let _ = stranger.write_all(&[i as u8; 200]);
        }
        strangers.push(stranger);
    }
    // The listener drops the silent ones after a second; until then there may be no room.
    let deadline = soon();
    while dial(address, &identity, &hello(), deadline).is_err() {
        assert!(Instant::now() < deadline, "strangers keep ranks out");
    }
    assert_eq!(admitted.recv().unwrap(), hello());
}

/// A program closes descriptors that are not its own while a rank asks another, and opens a file under
/// the number of the connection.
#[test]
#[cfg(target_os = "linux")]
fn a_number_that_the_program_has_taken_is_not_closed() {
    use std::os::fd::AsRawFd;
    let port_of = |number: i32| {
        // SAFETY: all zeros are a valid address, and the length is its size.
        unsafe {
            let mut address: libc::sockaddr_in = std::mem::zeroed();
            let mut len = size_of::<libc::sockaddr_in>() as u32;
            let is_there = libc::getsockname(number, (&raw mut address).cast(), &mut len) == 0;
            (is_there && address.sin_family == libc::AF_INET as u16).then(|| u16::from_be(address.sin_port))
        }
    };
    let silent = StdListener::bind("127.0.0.1:0").unwrap();
    let (address, identity) = (silent.local_addr().unwrap(), Identity::new("job", Some([7; 32])));
    let theirs = std::fs::File::open("/proc/self/maps").unwrap();
    let asking = std::thread::spawn(move || query(address, &identity, &hello(), b"?", soon()).is_err());
    let (near, from) = silent.accept().unwrap();
    let number = (3..100_000).find(|&number| port_of(number) == Some(from.port())).unwrap();
    // SAFETY: nothing but the connection has the number.
    assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), number) }, number);
    drop(silent);
    drop(near);
    assert!(asking.join().unwrap());
    // SAFETY: closes what was made above.
    assert_eq!(unsafe { libc::close(number) }, 0, "the file was closed");
}

//! Tests of an engine whose peer does not do its part.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Registry, Token};
use parking_lot::Mutex;

use super::frame::{Frame, HEADER, Kind};
use super::{Engine, Job};
use crate::buffer::{RawSlice, RawSliceMut, Source};
use crate::call::Call;
use crate::config::CopyMode;
use crate::error::{Cause, Error, Result};
use crate::failure::{CommInfo, OpContext};
use crate::schedule::{Algorithm, Blocks, Problem, Racks, steps};
use crate::sys::{Patience, Waker};
use crate::transport::memory::{Hub, MemoryOpener};
use crate::transport::{ALIGN, Link, MOST_WAITING, Mesh, NoLink, Opener};
use crate::types::{DType, Descriptor, Member, Op, Rank};

fn info(rank: usize, timeout: Duration) -> CommInfo {
    let members = vec![Member { host: "here".into(), pid: 1 }; 2];
    CommInfo { rank, members, timeout, start_timeout: timeout, cancel: Arc::default() }
}

/// Rank 0's engine, and the raw link of rank 1.
fn engine_and_peer() -> (Engine, Box<dyn Link>) {
    let hub = Arc::new(Hub::default());
    let opener = |rank| MemoryOpener { hub: hub.clone(), comm_id: 0, rank, copy_mode: CopyMode::Auto };
    let mesh = Mesh::new(2, Box::new(opener(0))).unwrap();
    (Engine::new(mesh, 2, Arc::new(Patience::new(1))), opener(1).link(0))
}

/// Returns the engines of two ranks. Their links are rings of `capacity` bytes.
fn engines(capacity: usize) -> [Engine; 2] {
    let hub = Arc::new(Hub::with_rings(capacity));
    [0, 1].map(|rank| {
        let mesh =
            Mesh::new(2, Box::new(MemoryOpener { hub: hub.clone(), comm_id: 0, rank, copy_mode: CopyMode::Auto })).unwrap();
        Engine::new(mesh, 2, Arc::new(Patience::new(1)))
    })
}

fn descriptor(count: u64) -> Descriptor {
    Descriptor { op: Op::Send, dtype: DType::U8, count, seq: 1, ..Descriptor::nothing() }
}

/// Returns the job of `rank` that sends `bytes`, its `seq`-th message to the other rank.
fn sends<'a>(info: &'a CommInfo, seq: u64, bytes: &'a [u8]) -> Job<'a> {
    let count = bytes.len() as u64;
    job(info, Descriptor { seq, ..descriptor(count) }, Op::Send, RawSlice::of(bytes), RawSliceMut::EMPTY, None)
}

/// Returns the job of `rank` that receives from the other rank, or from any rank if it is given
/// where to store the sender.
fn receives<'a>(info: &'a CommInfo, into: &mut [u8], source: Option<Source>) -> Job<'a> {
    let message = Descriptor { seq: 0, ..descriptor(into.len() as u64) };
    job(info, message, Op::Recv, RawSlice::EMPTY, RawSliceMut::of(into), source)
}

fn job<'a>(
    info: &'a CommInfo,
    message: Descriptor,
    op: Op,
    send: RawSlice,
    recv: RawSliceMut,
    source: Option<Source>,
) -> Job<'a> {
    let call = Call { count: message.count as usize, root: 1 - info.rank, send, recv, source, ..Call::of(op, DType::U8) };
    job_of(OpContext::new(message, info), call, 2)
}

/// Returns the job of a message, of one of `world` ranks.
fn job_of(context: OpContext<'_>, call: Call, world: usize) -> Job<'_> {
    let (rank, none) = (context.info.rank, Blocks::Even(0));
    let Call { op, root, count, .. } = call;
    let problem = Problem { op, rank, world, root, count, sends: none, recvs: none, segment: 1, racks: Racks::ONE };
    let steps = steps(Algorithm::Direct, problem);
    Job { context, call: Cow::Owned(call), steps, ranks: None, rank, world, kernel: None, packing: None }
}

/// Rank 0 receives four bytes from rank 1.
fn receive(engine: &mut Engine, timeout: Duration) -> Result<[u8; 4]> {
    let info = info(0, timeout);
    let mut got = [9; 4];
    let job = job(&info, descriptor(4), Op::Recv, RawSlice::EMPTY, RawSliceMut::of(&mut got), None);
    // SAFETY: `got` is borrowed for the call.
    let result = unsafe { engine.run(job) };
    if result.is_err() {
        assert_eq!(got, [9; 4], "memory was written");
    }
    result.map(|()| got)
}

fn cause(result: Result<[u8; 4]>) -> Cause {
    match result {
        Err(Error::Peer { rank: 1, op: Op::Send, cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

const SOON: Duration = Duration::from_millis(50);
const LATE: Duration = Duration::from_secs(60);

#[test]
fn a_message_arrives_bytewise() {
    let (mut engine, mut peer) = engine_and_peer();
    let mut bytes = Frame { kind: Kind::Data, len: 4, descriptor: descriptor(4).encode() }.encode().to_vec();
    bytes.extend([1, 2, 3, 4]);
    bytes.extend([0; 12]);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for byte in bytes.chunks(1) {
                // SAFETY: `byte` is borrowed for the call.
                assert_eq!(unsafe { peer.send(&[RawSlice::of(byte)]) }, Ok(1));
                std::thread::yield_now();
            }
            peer
        });
        assert_eq!(receive(&mut engine, LATE).unwrap(), [1, 2, 3, 4]);
    });
}

#[test]
fn silence_ends_at_the_deadline() {
    let (mut engine, _peer) = engine_and_peer();
    assert_eq!(cause(receive(&mut engine, SOON)), Cause::Silent { deadline: SOON });
}

#[test]
fn other_operations_lengths_and_garbage_are_told_apart() {
    let send = |bytes: &[u8]| {
        let (mut engine, mut peer) = engine_and_peer();
        // SAFETY: `bytes` is borrowed for the call.
        assert_eq!(unsafe { peer.send(&[RawSlice::of(bytes)]) }, Ok(bytes.len()));
        receive(&mut engine, LATE)
    };
    let frame = |kind, len, descriptor: Descriptor| Frame { kind, len, descriptor: descriptor.encode() }.encode();

    match send(&frame(Kind::Data, 4, descriptor(5))) {
        Err(Error::Mismatch { rank: 0, peer: 1, mine, theirs, .. }) => assert_eq!((mine.count, theirs.count), (4, 5)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(send(&frame(Kind::Data, 3, descriptor(4))), Err(Error::Counts { sent: 3, expected: 4, .. })));
    let left = Descriptor { seq: 11, ..Descriptor::nothing() };
    assert_eq!(cause(send(&frame(Kind::Goodbye, 0, left))), Cause::Left { last_seq: 11 });
    assert_eq!(cause(send(&frame(Kind::Revoked, 0, left))), Cause::Revoked);
    assert!(matches!(cause(send(&[0x55; HEADER])), Cause::Corrupt(_)));
    let mut unknown = frame(Kind::Data, 4, descriptor(4));
    unknown[16] = 250;
    assert!(matches!(cause(send(&unknown)), Cause::Corrupt(_)));
}

#[test]
fn the_end_of_a_peer_is_noticed() {
    let (mut engine, peer) = engine_and_peer();
    std::thread::scope(|scope| {
        scope.spawn(move || drop(peer));
        // The peer may have left before it knew of the link.
        assert_eq!(cause(receive(&mut engine, LATE)), Cause::Gone);
    });
    let (mut engine, mut peer) = engine_and_peer();
    let message = Frame { kind: Kind::Data, len: 4, descriptor: descriptor(4).encode() }.encode();
    // SAFETY: `message` is borrowed for the call.
    assert_eq!(unsafe { peer.send(&[RawSlice::of(&message)]) }, Ok(HEADER));
    std::thread::scope(|scope| {
        scope.spawn(move || drop(peer));
        assert_eq!(cause(receive(&mut engine, LATE)), Cause::Closed);
    });
}

#[test]
fn after_a_message_that_was_cut_off_nothing_follows() {
    let (mut engine, mut peer) = engine_and_peer();
    let info = info(0, SOON);
    // More than the link holds, to a peer that receives nothing.
    let payload = vec![7u8; 4 << 20];
    let job = sends(&info, 1, &payload);
    // SAFETY: `payload` is borrowed for the call.
    match unsafe { engine.run(job) } {
        Err(Error::Peer { rank: 1, cause: Cause::Silent { .. }, .. }) => {}
        other => panic!("{other:?}"),
    }
    engine.leave(0, true, &[]);

    let (mut taken, mut block) = (0, [0u8; 4096]);
    let end = loop {
        // SAFETY: `block` is borrowed for the call.
        match unsafe { peer.receive(RawSliceMut::of(&mut block)) } {
            Ok(count) => {
                let payload = &block[(HEADER.saturating_sub(taken)).min(count)..count];
                assert!(payload.iter().all(|&byte| byte == 7), "something else in the payload, at {taken}");
                taken += count;
            }
            Err(cause) => break cause,
        }
    };
    assert_eq!(end, Cause::Closed);
    assert!(taken > HEADER && taken < payload.len());
}

/// Returns the bytes of the `number`-th message. Lengths are odd, so headers start at every offset.
fn message(number: u64) -> Vec<u8> {
    vec![number as u8; 1 + (number * 37 % 90) as usize]
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll")]
fn a_header_in_two_parts_is_read_as_one() {
    const MESSAGES: u64 = 600;
    let info = [0, 1].map(|rank| info(rank, LATE));
    let [mut sender, mut receiver] = engines(512);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=MESSAGES {
                let bytes = message(number);
                // SAFETY: `bytes` is borrowed for the call; so are all buffers below.
                unsafe { sender.run(sends(&info[0], number, &bytes)) }.unwrap();
            }
        });
        for number in 1..=MESSAGES {
            let expected = message(number);
            let mut got = vec![0; expected.len()];
            let mut from = [usize::MAX];
            let source = (number % 3 > 0).then_some(Source::Rank(from.as_mut_ptr()));
            // SAFETY: as above.
            let received = unsafe { receiver.run(receives(&info[1], &mut got, source)) };
            assert!(received.is_ok(), "message {number}: {received:?}");
            assert_eq!(got, expected, "message {number}");
            assert!(source.is_none() || from == [0]);
        }
    });
}

/// Rank 1 learns that rank 0 has left, wherever the header of the goodbye lies in the ring.
fn farewells(learn: impl Fn(&mut Engine, &CommInfo) -> Result<()>) {
    const CAPACITY: usize = 256;
    let info = [0, 1].map(|rank| info(rank, LATE));
    for before in 0..2 * CAPACITY as u64 / 64 {
        let [mut leaver, mut other] = engines(CAPACITY);
        for number in 1..=before {
            let (bytes, mut got) = ([3u8; 7], [0u8; 7]);
            // SAFETY: `bytes` is borrowed for the call.
            unsafe { leaver.run(sends(&info[0], number, &bytes)) }.unwrap();
            // SAFETY: `got` is borrowed for the call.
            unsafe { other.run(receives(&info[1], &mut got, None)) }.unwrap();
        }
        // SAFETY: nothing is read.
        unsafe { leaver.run(sends(&info[0], before + 1, &[])) }.unwrap();
        // SAFETY: nothing is written.
        unsafe { other.run(receives(&info[1], &mut [], None)) }.unwrap();
        leaver.leave(before, false, &[]);
        drop(leaver);
        match learn(&mut other, &info[1]) {
            Err(Error::Peer { rank: 0, cause: Cause::Left { last_seq }, .. }) => assert_eq!(last_seq, before),
            other => panic!("after {before} messages: {other:?}"),
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll")]
fn a_goodbye_in_two_parts_is_read_by_whoever_receives_or_sends() {
    // SAFETY: the buffer is borrowed for the call.
    farewells(|engine, info| unsafe { engine.run(receives(info, &mut [0; 4], None)) });
    let mut from = [usize::MAX];
    let source = Source::Rank(from.as_mut_ptr());
    // SAFETY: the buffer is borrowed for the call, and `from` lives longer.
    farewells(|engine, info| unsafe { engine.run(receives(info, &mut [0; 4], Some(source))) });
    // SAFETY: the buffer is borrowed for the call.
    farewells(|engine, info| unsafe { engine.run(sends(info, 1, &[1; 4 << 10])) });
}

/// A link from which more of a message can be received whenever the engine looks.
struct Busy(Vec<u8>);

impl Link for Busy {
    unsafe fn send(&mut self, _: &[RawSlice]) -> Result<usize, Cause> {
        Ok(0)
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        Ok(RawSlice::of(&self.0).take(want))
    }

    fn consume(&mut self, count: usize) {
        self.0.drain(..count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let count = self.0.len().min(into.len);
        if count == 0 {
            return Ok(into.len.min(1000));
        }
        // SAFETY: the caller vouches for the memory.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), into.ptr, count) };
        self.consume(count);
        Ok(count)
    }

    fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        Ok(())
    }
}

impl Opener for Busy {
    fn open(&mut self, _: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        Ok(Some(Box::new(Busy(self.0.clone()))))
    }

    fn attach(&mut self, _: Arc<Waker>) {}
}

/// It never has to wait. The deadline holds all the same, and another thread gets the engine.
#[test]
fn a_message_that_moves_all_the_time_has_a_deadline_and_is_interrupted() {
    const LEN: usize = 1 << 50;
    let message = descriptor(LEN as u64);
    let header = Frame { kind: Kind::Data, len: LEN as u64, descriptor: message.encode() }.encode();
    let new = || Engine::new(Mesh::new(2, Box::new(Busy(header.to_vec()))).unwrap(), 2, Arc::new(Patience::new(1)));
    let info = info(0, SOON);
    let output = RawSliceMut { ptr: RawSliceMut::EMPTY.ptr, len: LEN };
    let receives = || job(&info, Descriptor { seq: 0, ..message }, Op::Recv, RawSlice::EMPTY, output, None);
    let mut engine = new();
    // SAFETY: the link writes nothing but the header, which the engine receives into its own memory.
    let error = unsafe { engine.run(receives()) }.unwrap_err();
    assert!(matches!(error, Error::Peer { rank: 1, cause: Cause::Silent { .. }, .. }), "{error:?}");
    let mut engine = new();
    let mut job = Some((receives(), None));
    // SAFETY: as above.
    let paused = unsafe { engine.run_together(|| job.take(), |_| {}, || true) };
    assert_eq!(paused.unwrap().len(), 1);
}

/// A link that sends several messages at once, and of each call as many bytes as it likes.
#[derive(Clone, Default)]
struct Taking {
    taken: Arc<Mutex<Vec<u8>>>,
    calls: usize,
}

impl Link for Taking {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        assert!((1..=7).contains(&parts.len()) && parts.iter().all(|part| part.len > 0), "{} parts", parts.len());
        self.calls += 1;
        let most = [usize::MAX, 0, 1, 100, 3_000, usize::MAX, 32, 20_000][self.calls % 8];
        let mut taken = self.taken.lock();
        let before = taken.len();
        for part in parts {
            let count = part.len.min(most - (taken.len() - before));
            // SAFETY: the caller vouches for the part.
            taken.extend_from_slice(unsafe { std::slice::from_raw_parts(part.ptr, count) });
        }
        Ok(taken.len() - before)
    }

    fn most_parts(&self) -> usize {
        7
    }

    fn peek(&mut self, _: usize) -> Result<RawSlice, Cause> {
        Ok(RawSlice::EMPTY)
    }

    fn consume(&mut self, _: usize) {}

    unsafe fn receive(&mut self, _: RawSliceMut) -> Result<usize, Cause> {
        Ok(0)
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        false
    }

    fn register(&mut self, _: &Registry, _: Token) -> io::Result<()> {
        Ok(())
    }
}

impl Opener for Taking {
    fn open(&mut self, _: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        Ok(Some(Box::new(self.clone())))
    }

    fn attach(&mut self, _: Arc<Waker>) {}
}

#[test]
fn messages_that_are_sent_at_once_are_whole_and_in_order() {
    let (link, info) = (Taking::default(), info(0, LATE));
    let mut engine = Engine::new(Mesh::new(2, Box::new(link.clone())).unwrap(), 2, Arc::new(Patience::new(1)));
    let lens = [0, 1, 16, 100, 8 << 10, (8 << 10) + 1, 40_000, 7, 1_000, 1_024].into_iter().cycle().take(300);
    let payloads: Vec<Vec<u8>> = lens.enumerate().map(|(number, len)| vec![number as u8; len]).collect();
    let mut jobs = (1..).zip(&payloads).map(|(seq, payload)| (sends(&info, seq, payload), None));
    let mut ended = Vec::new();
    // SAFETY: the payloads live until all jobs have ended.
    unsafe { engine.run_together(|| jobs.next(), |key| ended.push(key), || false) }.unwrap();
    ended.sort_unstable();
    assert!(ended.iter().copied().eq(0..300), "{ended:?}");
    let taken = link.taken.lock();
    let mut rest = &taken[..];
    for (seq, payload) in (1..).zip(&payloads) {
        let frame = Frame::decode(rest[..HEADER].try_into().unwrap()).unwrap();
        assert_eq!(Descriptor::decode(frame.descriptor).unwrap().seq, seq);
        assert!(rest[HEADER..].starts_with(payload), "message {seq} of {} bytes", payload.len());
        rest = &rest[HEADER + payload.len().next_multiple_of(ALIGN)..];
    }
    assert!(rest.is_empty());
}

/// How often two ranks look at jobs and messages while `count` messages are in flight, all of which the
/// first sends before the second receives any.
fn looks(count: usize) -> u64 {
    let infos = [0, 1].map(|rank| info(rank, LATE));
    let [mut sender, mut receiver] = engines(1 << 12);
    let payloads: Vec<[u8; 100]> = (0..count).map(|number| [number as u8; 100]).collect();
    let mut received = vec![[0u8; 100]; count];
    let sends = (1..).zip(&payloads).map(|(seq, payload)| sends(&infos[0], seq, payload));
    // SAFETY: the payloads live until all jobs have ended.
    let mut sending = unsafe { sender.begin_stepped(sends) };
    while sender.step(&mut sending).unwrap() == Some(true) {}
    // SAFETY: as above.
    let mut receiving = unsafe { receiver.begin_stepped(received.iter_mut().map(|into| receives(&infos[1], into, None))) };
    while receiver.step(&mut receiving).unwrap().is_some() {
        sender.step(&mut sending).unwrap();
    }
    assert!(received == payloads);
    sender.looks + receiver.looks
}

#[test]
fn what_messages_in_flight_cost_grows_with_their_number() {
    let [few, many] = [500, 5000].map(looks);
    assert!(many < 12 * few, "{few} looks at 500 messages in flight, {many} at 5,000");
}

fn info_of_three(timeout: Duration) -> CommInfo {
    CommInfo { members: vec![Member { host: "here".into(), pid: 1 }; 3], ..info(0, timeout) }
}

/// Rank 0's engine of three, and what opens links for a rank.
fn engine_of_three() -> (Engine, impl Fn(Rank) -> MemoryOpener) {
    let hub = Arc::new(Hub::default());
    let opener = move |rank| MemoryOpener { hub: hub.clone(), comm_id: 0, rank, copy_mode: CopyMode::Auto };
    (Engine::new(Mesh::new(3, Box::new(opener(0))).unwrap(), 3, Arc::new(Patience::new(1))), opener)
}

/// Returns the job of rank 0 of three that receives 16 bytes from `peer`, or from any rank if it is
/// given where to store the sender.
fn receives_from<'a>(info: &'a CommInfo, peer: Rank, into: &mut [u8; 16], from: Option<&mut Rank>) -> Job<'a> {
    let message = Descriptor { seq: 0, ..descriptor(into.len() as u64) };
    let call = Call {
        root: peer,
        source: from.map(|from| Source::Rank(from)),
        ..Call::in_place(Op::Recv, DType::U8, RawSliceMut::of(into))
    };
    job_of(OpContext::new(message, info), call, 3)
}

/// A sleeping engine is woken by what moves after it has tried a link. So it must not sleep when a
/// receive may take a message that another one had to be offered first.
#[test]
fn a_sender_that_is_found_lets_the_receives_behind_it_look() {
    let (mut engine, opener) = engine_of_three();
    let (mut one, mut two) = (opener(1).link(0), opener(2).link(0));
    let info = info_of_three(LATE);
    let (mut any, mut named, mut from) = ([0; 16], [0; 16], usize::MAX);
    let jobs = [receives_from(&info, 0, &mut any, Some(&mut from)), receives_from(&info, 2, &mut named, None)];
    // SAFETY: the buffers live until the end.
    let mut stepped = unsafe { engine.begin_stepped(jobs) };
    while engine.step(&mut stepped).unwrap() == Some(true) {}
    let header = Frame { kind: Kind::Data, len: 16, descriptor: descriptor(16).encode() }.encode();
    // The header of rank 1, without its payload, and all of rank 2's message.
    // SAFETY: all are borrowed for the calls.
    unsafe {
        assert_eq!(one.send(&[RawSlice::of(&header)]), Ok(HEADER));
        assert_eq!(two.send(&[RawSlice::of(&header), RawSlice::of(&[2u8; 16])]), Ok(HEADER + 16));
    }
    while engine.step(&mut stepped).unwrap() == Some(true) {}
    assert_eq!((from, named), (1, [2; 16]));
}

/// While a message does not fit, an engine does not sleep on its link, which is always ready.
#[test]
fn a_link_is_slept_on_again_after_a_message_that_did_not_fit() {
    let (mut engine, mut peer) = engine_and_peer();
    let info = info(0, LATE);
    let (mut other, mut large) = ([0; 1], vec![0; MOST_WAITING]);
    let mut tagged = receives(&info, &mut other, None);
    tagged.call.to_mut().tag = 9;
    let len = large.len() as u64;
    let header = Frame { kind: Kind::Data, len, descriptor: descriptor(len).encode() }.encode();
    // SAFETY: it is borrowed for the call.
    assert_eq!(unsafe { peer.send(&[RawSlice::of(&header)]) }, Ok(HEADER));
    for (job, is_full) in [(tagged, true), (receives(&info, &mut large, None), false)] {
        // SAFETY: the buffers live until the end.
        let mut stepped = unsafe { engine.begin_stepped([job]) };
        while engine.step(&mut stepped).unwrap() == Some(true) {}
        assert_eq!(engine.unexpected.is_full(1), is_full);
        engine.receivers.clear();
    }
}

/// The link of a rank that is ahead, in a collective, is always ready: a receive from any rank would not sleep.
#[test]
fn a_receive_from_any_rank_does_not_sleep_on_the_link_of_a_rank_that_is_ahead() {
    let (mut engine, opener) = engine_of_three();
    let mut ahead = opener(1).link(0);
    let info = info_of_three(LATE);
    let barrier = Descriptor { op: Op::Barrier, seq: 1, ..Descriptor::nothing() };
    let header = Frame { kind: Kind::Data, len: 0, descriptor: barrier.encode() }.encode();
    // SAFETY: it is borrowed for the call.
    assert_eq!(unsafe { ahead.send(&[RawSlice::of(&header)]) }, Ok(HEADER));
    let (mut into, mut from) = ([0; 16], usize::MAX);
    let mut jobs = [receives_from(&info, 0, &mut into, Some(&mut from))].into_iter();
    // SAFETY: the buffers live until the end.
    let paused = unsafe { engine.run_together(|| Some((jobs.next()?, None)), |_| {}, || !info.cancel.waits().is_empty()) };
    assert_eq!(paused.unwrap().len(), 1);
    assert_eq!(engine.waits.iter().map(|(peer, ..)| *peer).collect::<Vec<_>>(), [2]);
}

/// The failure detector asks only ranks of which a wait is noted.
#[test]
fn a_receive_behind_one_from_any_rank_is_seen_to_wait() {
    let (mut engine, _opener) = engine_of_three();
    let info = info_of_three(LATE);
    let (mut any, mut named, mut from) = ([0; 16], [0; 16], usize::MAX);
    let mut jobs = [receives_from(&info, 0, &mut any, Some(&mut from)), receives_from(&info, 2, &mut named, None)].into_iter();
    let waits = || info.cancel.waits().iter().any(|wait| wait.peer == 2 && !wait.is_for_any);
    // SAFETY: the buffers live until the end.
    let paused = unsafe { engine.run_together(|| Some((jobs.next()?, None)), |_| {}, waits) };
    assert_eq!(paused.unwrap().len(), 2);
}

/// The engine sleeps no longer than until the first deadline, however many jobs it is behind.
#[test]
fn a_deadline_behind_many_is_kept() {
    let (mut engine, _peer) = engine_and_peer();
    let (late, soon) = (info(0, LATE), info(0, SOON));
    let mut buffers = [[0u8; 4]; 1001];
    let jobs = buffers.iter_mut().enumerate().map(|(at, into)| receives(if at < 1000 { &late } else { &soon }, into, None));
    // SAFETY: the buffers live until the end.
    let _stepped = unsafe { engine.begin_stepped(jobs) };
    assert!(engine.soonest.is_some_and(|soonest| soonest <= Instant::now() + SOON));

    // The second deadline is the first to pass, or that of a job which was alone at first; it looks after the
    // receive with the lower tag.
    for (infos, tags) in [([&late, &soon], [0, 0]), ([&soon, &late], [9, 1])] {
        let mut jobs = buffers[999..].iter_mut().zip(infos).zip(tags).map(|((into, info), tag)| {
            let mut job = receives(info, into, None);
            job.call.to_mut().tag = tag;
            job
        });
        // SAFETY: the buffers live until the end.
        let result = unsafe { engine.run_together(|| Some((jobs.next()?, None)), |_| {}, || false) };
        assert!(matches!(result, Err(Error::Peer { rank: 1, cause: Cause::Silent { deadline: SOON }, .. })));
    }
}

/// Rank 1 has sent its message and has left. Rank 2 keeps two receives waiting, of which the second has
/// the first deadline.
#[test]
fn a_deadline_behind_a_receive_from_any_rank_names_the_rank_that_is_there() {
    let (mut engine, opener) = engine_of_three();
    let (mut one, _two) = (opener(1).link(0), opener(2).link(0));
    let header = Frame { kind: Kind::Data, len: 16, descriptor: descriptor(16).encode() }.encode();
    let goodbye = Frame { kind: Kind::Goodbye, len: 0, descriptor: Descriptor::nothing().encode() }.encode();
    // SAFETY: all are borrowed for the call.
    let sent = unsafe { one.send(&[RawSlice::of(&header), RawSlice::of(&[1u8; 16]), RawSlice::of(&goodbye)]) };
    assert_eq!(sent, Ok(2 * HEADER + 16));
    let (late, soon) = (info_of_three(LATE), info_of_three(SOON));
    let (mut into, mut from) = ([[0; 16]; 3], [usize::MAX; 3]);
    let mut jobs = into.iter_mut().zip(&mut from).zip([&late, &late, &soon]);
    let mut next = || jobs.next().map(|((into, from), info)| receives_from(info, 0, into, Some(from)));
    // SAFETY: the buffers live until the end.
    unsafe { engine.run(next().unwrap()) }.unwrap();
    // SAFETY: as above.
    match unsafe { engine.run_together(|| Some((next()?, None)), |_| {}, || false) } {
        Err(Error::Peer { rank, cause, .. }) => assert_eq!((rank, cause), (2, Cause::Silent { deadline: SOON })),
        _ => panic!("the deadline has not passed"),
    }
}

/// The peer ends while it takes the first of two messages. The second one notices.
#[test]
fn an_error_is_of_the_message_that_was_cut_off() {
    let (mut engine, peer) = engine_and_peer();
    let info = info(0, LATE);
    let payload = vec![7u8; 4 << 20];
    let (mut calls, mut peer) = (0, Some(peer));
    let next = || {
        calls += 1;
        match calls {
            1 => Some((sends(&info, 1, &payload), None)),
            3 => {
                peer.take();
                Some((sends(&info, 2, &payload), None))
            }
            _ => None,
        }
    };
    // SAFETY: the payload lives until the end.
    match unsafe { engine.run_together(next, |_| {}, || false) } {
        Err(Error::Peer { rank: 1, seq, cause, .. }) => assert_eq!(seq, 1, "{cause:?}"),
        _ => panic!("the peer has ended"),
    }
}

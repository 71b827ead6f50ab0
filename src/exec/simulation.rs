//! Collectives over links that delay, break, fall silent and lose their ranks at random: engines, bulletins and verdicts as they
//! are, but on one thread and under a seed, which replays.
//!
//! `KOLO_TEST_SEEDS=10000` runs as many seeds, `KOLO_TEST_SEED=7` that one.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Registry, Token, Waker};
use parking_lot::Mutex;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::engine::{Engine, Job};
use crate::error::{Cause, Error};
use crate::failure::{CommInfo, OpContext};
use crate::failure::{CommStatus, ControlChannel, Query, QueryError, Reply, StatusBoard, agree_on_report};
use crate::reduce::Kernel;
use crate::schedule::{Algorithm, Blocks, Problem, steps};
use crate::sys::Patience;
use crate::trace::{RankOfJob, Recorder};
use crate::transport::memory::{Hub, MemoryOpener};
use crate::transport::{Link, Mesh, NoLink, Opener};
use crate::types::{DType, Descriptor, Member, Op, Rank, ReduceOp, mix};

const CHANNEL: u64 = 9;

/// What goes wrong in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    /// A rank ends.
    Killed(Rank),
    /// The link between two ranks ends.
    Broken(Rank, Rank),
    /// Nothing comes through between two ranks any more.
    Cut(Rank, Rank),
    /// A rank does not make the call.
    Absent(Rank),
    /// A rank makes another.
    Differs(Rank),
}

/// What links and contacts have in common.
#[derive(Default)]
struct World {
    random: u64,
    killed: HashSet<Rank>,
    broken: HashSet<[Rank; 2]>,
    cut: HashSet<[Rank; 2]>,
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.random = mix(self.random, 1);
        (self.random >> 8) % below
    }
}

fn pair(a: Rank, b: Rank) -> [Rank; 2] {
    [a.min(b), a.max(b)]
}

/// A link that moves some bytes now and others later, or none any more.
struct Faulty {
    link: Box<dyn Link>,
    world: Arc<Mutex<World>>,
    me: Rank,
    peer: Rank,
}

impl Faulty {
    /// How many bytes may move now.
    fn allowed(&self) -> Result<usize, Cause> {
        let mut world = self.world.lock();
        if world.killed.contains(&self.peer) || world.broken.contains(&pair(self.me, self.peer)) {
            return Err(Cause::Closed);
        }
        let is_delayed = world.cut.contains(&pair(self.me, self.peer)) || world.random(3) == 0;
        Ok(if is_delayed { 0 } else { 16 + world.random(3000) as usize })
    }
}

impl Link for Faulty {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        let mut left = self.allowed()?;
        let mut some = Vec::new();
        for part in parts {
            some.push(part.take(left.min(part.len)));
            left -= left.min(part.len);
        }
        // SAFETY: passed on.
        unsafe { self.link.send(&some) }
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        let allowed = self.allowed()?;
        self.link.peek(want.min(allowed))
    }

    fn consume(&mut self, count: usize) {
        self.link.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let allowed = self.allowed()?;
        // SAFETY: passed on.
        unsafe { self.link.receive(into.take(into.len.min(allowed))) }
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        unreachable!("nobody sleeps here")
    }

    fn disarm(&mut self, _: bool) {}

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.link.register(registry, token)
    }
}

struct FaultyOpener {
    opener: MemoryOpener,
    world: Arc<Mutex<World>>,
}

impl Opener for FaultyOpener {
    fn open(&mut self, peer: Rank, _: &Registry, _: Token) -> Result<Option<Box<dyn Link>>, NoLink> {
        let (world, me) = (self.world.clone(), self.opener.rank);
        Ok(Some(Box::new(Faulty { link: self.opener.link(peer), world, me, peer })))
    }

    fn attach(&mut self, waker: Arc<Waker>) {
        self.opener.attach(waker);
    }
}

struct FaultyContact {
    board: Arc<StatusBoard>,
    world: Arc<Mutex<World>>,
    me: Rank,
}

impl ControlChannel for FaultyContact {
    fn ask(&self, peer: Rank, query: &Query, _: Duration) -> Result<Reply, QueryError> {
        {
            let world = self.world.lock();
            if world.killed.contains(&peer) {
                return Err(QueryError::Gone);
            }
            if world.cut.contains(&pair(self.me, peer)) {
                return Err(QueryError::Unreachable { address: "cut off".to_owned(), kind: io::ErrorKind::TimedOut });
            }
        }
        Ok(self.board.answer(CHANNEL, self.me, peer, query.clone()))
    }
}

/// What one rank brings to a run.
struct Part {
    info: CommInfo,
    status: Arc<CommStatus>,
    engine: Engine,
    call: Descriptor,
    /// What goes in and what comes out, in place.
    buf: Vec<u64>,
}

#[derive(Debug)]
enum End {
    Completed,
    Failed(Error),
    Killed,
}

struct Run {
    fault: Fault,
    ranks: usize,
    algorithm: Algorithm,
    ends: Vec<End>,
}

/// Carries out one all-reduce under a seed, and checks what everybody got.
fn run(seed: u64) -> Run {
    let world = Arc::new(Mutex::new(World { random: mix(0x5eed, seed), ..World::default() }));
    let random = |below: usize| world.lock().random(below as u64) as usize;
    let ranks = 2 + random(5);
    let algorithms = Algorithm::for_op(Op::AllReduce, ranks);
    let algorithm = algorithms[random(algorithms.len())];
    let count = 1 + random([4, 300, 20_000][random(3)]);
    let (a, b) = (random(ranks), random(ranks - 1));
    let b = if b < a { b } else { b + 1 };
    // Breaks are few: each takes real time, in which the other end might explain itself.
    let fault = match random(64) {
        0 => Fault::Broken(a, b),
        1..10 => Fault::Nothing,
        10..30 => Fault::Killed(a),
        30..40 => Fault::Cut(a, b),
        40..52 => Fault::Absent(a),
        _ => Fault::Differs(a),
    };
    let strikes_at = random(60 * ranks);

    let (hub, board) = (Arc::new(Hub::default()), Arc::new(StatusBoard::default()));
    let everybody: Arc<[Rank]> = (0..ranks).collect();
    let members = vec![Member { host: "here".into(), pid: 1 }; ranks];
    let mut parts: Vec<Part> = (0..ranks)
        .map(|rank| {
            let who = RankOfJob { job: "simulated".to_owned(), run: seed, rank, members: members.clone() };
            let recording = Recorder::new(who, None).open(CHANNEL, rank, everybody.clone());
            let status = Arc::new(CommStatus::new(rank, everybody.clone(), recording));
            status.reach(Arc::new(FaultyContact { board: board.clone(), world: world.clone(), me: rank }));
            board.post_unwatched(CHANNEL, rank, status.clone());
            let timeout = Duration::from_secs(3600);
            let cancel = status.cancel.clone();
            let info = CommInfo { rank, members: members.clone(), timeout, start_timeout: timeout, cancel };
            let opener = MemoryOpener { hub: hub.clone(), comm_id: CHANNEL, rank };
            let mesh = Mesh::new(ranks, Box::new(FaultyOpener { opener, world: world.clone() })).unwrap();
            let engine = Engine::new(mesh, ranks, Arc::new(Patience::new(1)));
            let redop = if fault == Fault::Differs(rank) { ReduceOp::Max } else { ReduceOp::Sum };
            let call = Descriptor {
                op: Op::AllReduce,
                dtype: DType::U64,
                redop: Some(redop),
                count: count as u64,
                seq: 1,
                ..Descriptor::nothing()
            };
            let buf = (0..count as u64).map(|i| mix(seed, i) ^ rank as u64).collect();
            Part { info, status, engine, call, buf }
        })
        .collect();

    let mut ends: Vec<Option<End>> = (0..ranks).map(|_| None).collect();
    let mut under_way: Vec<_> = parts
        .iter_mut()
        .map(|part| {
            let Part { info, status, engine, call, buf } = part;
            let info: &CommInfo = info;
            if fault == Fault::Absent(info.rank) {
                return (info, status, engine, call, None);
            }
            _ = status.recording.history.begin(call.encode(), 0, 0);
            let (none, memory) = (Blocks::Even(0), RawSliceMut::of(buf));
            let (op, rank, root) = (Op::AllReduce, info.rank, 0);
            let problem = Problem { op, rank, world: ranks, root, count, sends: none, recvs: none, piece: 1000 };
            let job = Job {
                context: OpContext::new(*call, info),
                steps: steps(algorithm, problem),
                ranks: None,
                rank,
                world: ranks,
                input: memory.as_const(),
                output: memory,
                element: 8,
                kernel: Kernel::new(DType::U64, call.redop.unwrap()),
                parts: ranks,
                source: None,
            };
            // SAFETY: the buffers live as long as the run, and nobody else touches them.
            let stepped = unsafe { engine.begin_stepped(job) };
            (info, status, engine, call, Some(stepped))
        })
        .collect();

    let is_cut = |a, b| world.lock().cut.contains(&pair(a, b));
    let (mut turns, mut still) = (0, 0);
    loop {
        if turns == strikes_at {
            let mut world = world.lock();
            match fault {
                Fault::Killed(rank) if ends[rank].is_none() => {
                    world.killed.insert(rank);
                    ends[rank] = Some(End::Killed);
                }
                Fault::Broken(a, b) => _ = world.broken.insert(pair(a, b)),
                Fault::Cut(a, b) => _ = world.cut.insert(pair(a, b)),
                _ => {}
            }
        }
        turns += 1;
        let waiting: Vec<Rank> = (0..ranks).filter(|&rank| ends[rank].is_none() && fault != Fault::Absent(rank)).collect();
        if waiting.is_empty() {
            break;
        }
        assert!(turns < 1_000_000, "it does not end");
        let rank = waiting[random(waiting.len())];
        let (info, status, engine, call, Some(stepped)) = &mut under_way[rank] else { unreachable!("it made the call") };
        let context = OpContext::new(**call, info);
        let result =
            if info.cancel.is_cancelled() { Err(Error::Aborted { op: call.op, seq: call.seq }) } else { engine.step(stepped) };
        let result = match result {
            // Nobody moves any more: who waits for a rank that is cut off from it finds that out, as its watch would.
            Ok(Some(false)) if still > 400 * ranks && engine.stuck_to(stepped).is_some_and(|peer| is_cut(rank, peer)) => {
                let peer = engine.stuck_to(stepped).expect("it is stuck to a rank");
                let (address, kind) = ("cut off".to_owned(), io::ErrorKind::TimedOut);
                Err(context.failed(peer, Cause::Unreachable { address, kind }))
            }
            Ok(Some(false)) if still > 4000 * ranks => {
                // Then a deadline passes.
                let peer = engine.stuck_to(stepped).expect("who does not move waits for somebody");
                Err(context.failed(peer, Cause::Silent { deadline: info.timeout }))
            }
            other => other,
        };
        match result {
            Ok(Some(moved)) => {
                // What others may know of it, as if it slept.
                if let Some(peer) = engine.stuck_to(stepped).filter(|_| !moved) {
                    let _ = context.patience_with(peer);
                }
                still = if moved { 0 } else { still + 1 };
            }
            Ok(None) => {
                context.rest();
                (ends[rank], still) = (Some(End::Completed), 0);
            }
            Err(error) => {
                context.rest();
                let error = agree_on_report(status, info, error);
                engine.part(0, true, &[]);
                (ends[rank], still) = (Some(End::Failed(error)), 0);
            }
        }
    }
    drop(under_way);
    let ends: Vec<End> = ends.into_iter().map(|end| end.unwrap_or(End::Killed)).collect();
    for (rank, end) in ends.iter().enumerate() {
        if let End::Completed = end {
            let expected = |i: usize| (0..ranks as u64).fold(0u64, |sum, other| sum.wrapping_add(mix(seed, i as u64) ^ other));
            let is_right = parts[rank].buf.iter().enumerate().all(|(i, &got)| got == expected(i));
            assert!(is_right, "rank {rank} completed with a wrong result");
        }
        board.take_down(CHANNEL, rank);
    }
    Run { fault, ranks, algorithm, ends }
}

fn check(run: &Run) -> Result<(), &'static str> {
    let ensure = |holds: bool, what| if holds { Ok(()) } else { Err(what) };
    let Run { fault, ends, ranks, .. } = run;
    let errors: Vec<&Error> =
        ends.iter().filter_map(|end| if let End::Failed(error) = end { Some(error) } else { None }).collect();
    if *fault == Fault::Nothing {
        ensure(errors.is_empty(), "an error without a fault")?;
    }
    let at_fault: &[Rank] = match fault {
        Fault::Nothing => &[],
        Fault::Killed(a) | Fault::Absent(a) => &[*a],
        Fault::Broken(a, b) | Fault::Cut(a, b) => &[*a, *b],
        Fault::Differs(_) => {
            let shows_both = |error: &&Error| match error {
                Error::Mismatch { mine, theirs, .. } => mine != theirs,
                Error::Peer { cause: Cause::Mismatch(differs), .. } => differs.mine != differs.theirs,
                _ => false,
            };
            ensure(errors.iter().all(shows_both), "not all show both sides")?;
            return ensure(errors.len() == *ranks, "somebody noticed nothing");
        }
    };
    let culprits: Vec<Rank> = errors.iter().filter_map(|error| error.culprit()).collect();
    ensure(culprits.len() == errors.len(), "an error that names nobody")?;
    ensure(culprits.iter().all(|rank| at_fault.contains(rank)), "somebody innocent is named")?;
    // Two that cannot talk to each other name each other; of all others both hear the same.
    let are_alike = culprits.iter().all(|rank| *rank == culprits[0]);
    ensure(are_alike || matches!(fault, Fault::Cut(..)), "not all name the same")
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll")]
fn whatever_fails_nobody_hangs_and_all_name_the_same() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("KOLO_TEST_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("KOLO_TEST_SEEDS").unwrap_or(1000),
    };
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| {
            let run = run(seed);
            let Run { fault, ranks, algorithm, ends } = &run;
            check(&run).map_err(|what| format!("{what}; {fault:?} over {ranks} ranks by {algorithm}: {ends:#?}"))
        });
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(what)) => panic!("seed {seed} (KOLO_TEST_SEED={seed} replays it): {what}"),
            Err(_) => panic!("seed {seed} (KOLO_TEST_SEED={seed} replays it)"),
        }
    }
}

//! Collectives over links that delay, break, fall silent and lose their ranks at random. The
//! engines, failure reports and agreements are the real ones, but on one thread and under a seed,
//! which replays a run.
//!
//! `KOLO_TEST_SEEDS=10000` runs that many seeds, `KOLO_TEST_SEED=7` runs seed 7.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mio::{Registry, Token};
use parking_lot::Mutex;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::config::CopyMode;
use crate::engine::{Engine, Job, Stepped};
use crate::error::{Cause, Error};
use crate::failure::{CommInfo, OpContext};
use crate::failure::{CommStatus, ControlChannel, Query, QueryError, Reply, StatusBoard, agree_on_report};
use crate::schedule::{Algorithm, Blocks, Problem, Racks, steps};
use crate::sys::{Patience, Waker};
use crate::trace::{RankOfJob, Recorder};
use crate::transport::memory::{Hub, MemoryOpener};
use crate::transport::{Link, Mesh, NoLink, Opener};
use crate::types::{DType, Descriptor, Member, Op, Rank, ReduceOp, mix};

const CHANNEL: u64 = 9;

/// The fault of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Nothing,
    /// A rank ends.
    Killed(Rank),
    /// The link between two ranks ends.
    Broken(Rank, Rank),
    /// Nothing passes between two ranks any more.
    Cut(Rank, Rank),
    /// A rank does not make the call.
    Absent(Rank),
    /// A rank makes another call.
    Differs(Rank),
}

/// The state that all links and contacts share.
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

/// A link that moves some bytes now and others later, or stops.
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
        unreachable!("no engine sleeps in a simulation")
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

/// One rank of a run.
struct Part {
    info: CommInfo,
    status: Arc<CommStatus>,
    engine: Engine,
    call: Descriptor,
    /// The input, and then the result.
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

/// What a seed decides.
struct Plan {
    seed: u64,
    ranks: usize,
    algorithm: Algorithm,
    count: usize,
    fault: Fault,
    /// The turn in which the fault strikes.
    strikes_at: usize,
}

impl Plan {
    fn new(seed: u64, random: impl Fn(usize) -> usize) -> Plan {
        let ranks = 2 + random(5);
        let algorithms = Algorithm::for_op(Op::AllReduce, ranks);
        let algorithm = algorithms[random(algorithms.len())];
        let count = 1 + random([4, 300, 20_000][random(3)]);
        let (a, b) = (random(ranks), random(ranks - 1));
        let b = if b < a { b } else { b + 1 };
        // Few links break: each takes real time, in which the other end could report why.
        let fault = match random(64) {
            0 => Fault::Broken(a, b),
            1..10 => Fault::Nothing,
            10..30 => Fault::Killed(a),
            30..40 => Fault::Cut(a, b),
            40..52 => Fault::Absent(a),
            _ => Fault::Differs(a),
        };
        let strikes_at = random(60 * ranks);
        Plan { seed, ranks, algorithm, count, fault, strikes_at }
    }

    /// The ranks with their engines and inputs, known to `board`.
    fn parts(&self, world: &Arc<Mutex<World>>, board: &Arc<StatusBoard>) -> Vec<Part> {
        let hub = Arc::new(Hub::default());
        let all: Arc<[Rank]> = (0..self.ranks).collect();
        let members = vec![Member { host: "here".into(), pid: 1 }; self.ranks];
        let part = |rank: Rank| {
            let of_job = RankOfJob { job: "simulated".to_owned(), run: self.seed, rank, members: members.clone() };
            let recording = Recorder::new(of_job, None, None).open(CHANNEL, rank, all.clone());
            let status = Arc::new(CommStatus::new(rank, all.clone(), recording));
            status.reach(Arc::new(FaultyContact { board: board.clone(), world: world.clone(), me: rank }));
            board.post_unwatched(CHANNEL, rank, status.clone());
            let timeout = Duration::from_secs(3600);
            let cancel = status.cancel.clone();
            let info = CommInfo { rank, members: members.clone(), timeout, start_timeout: timeout, cancel };
            let opener = MemoryOpener { hub: hub.clone(), comm_id: CHANNEL, rank, copy_mode: CopyMode::Auto };
            let mesh = Mesh::new(self.ranks, Box::new(FaultyOpener { opener, world: world.clone() })).unwrap();
            let engine = Engine::new(mesh, self.ranks, Arc::new(Patience::new(1)));
            let redop = if self.fault == Fault::Differs(rank) { ReduceOp::Max } else { ReduceOp::Sum };
            let (op, dtype, count) = (Op::AllReduce, DType::U64, self.count as u64);
            let call = Descriptor { op, dtype, redop: Some(redop), count, seq: 1, ..Descriptor::nothing() };
            let buf = (0..count).map(|i| mix(self.seed, i) ^ rank as u64).collect();
            Part { info, status, engine, call, buf }
        };
        (0..self.ranks).map(part).collect()
    }

    /// Begins the call of a rank; `None` if it makes none.
    fn begin<'p>(&self, part: &'p mut Part) -> Operation<'p> {
        let Part { info, status, engine, call, buf } = part;
        let (info, rank): (&CommInfo, Rank) = (info, info.rank);
        if self.fault == Fault::Absent(rank) {
            return Operation { info, status, engine, call, stepped: None };
        }
        _ = status.recording.history.begin(&call.encode(), 0, 0);
        let world = self.ranks;
        let (none, op) = (Blocks::Even(0), Op::AllReduce);
        let problem =
            Problem { op, rank, world, root: 0, count: self.count, sends: none, recvs: none, segment: 1000, racks: Racks::ONE };
        let of_buf = Call { redop: call.redop, ..Call::in_place(op, DType::U64, RawSliceMut::of(buf)) };
        let job = Job {
            context: OpContext::new(*call, info),
            kernel: of_buf.kernel(),
            call: Cow::Owned(of_buf),
            steps: steps(self.algorithm, problem),
            ranks: None,
            rank,
            world,
            packing: None,
        };
        // SAFETY: the buffers live as long as the run, and nothing else touches them.
        let stepped = unsafe { engine.begin_stepped([job]) };
        Operation { info, status, engine, call, stepped: Some(stepped) }
    }

    /// The element of a right result.
    fn expected(&self, i: usize) -> u64 {
        (0..self.ranks as u64).fold(0, |sum, rank| sum.wrapping_add(mix(self.seed, i as u64) ^ rank))
    }
}

/// The call of one rank while it runs.
struct Operation<'p> {
    info: &'p CommInfo,
    status: &'p Arc<CommStatus>,
    engine: &'p mut Engine,
    call: &'p Descriptor,
    stepped: Option<Stepped<'p>>,
}

impl Operation<'_> {
    /// Runs one step. `still` is for how many turns no rank has moved. Returns whether this rank
    /// moved; or how its call ended.
    fn step(&mut self, plan: &Plan, still: usize, is_cut: impl Fn(Rank, Rank) -> bool) -> Result<bool, End> {
        let Operation { info, status, engine, call, stepped: Some(stepped) } = self else { unreachable!("it made the call") };
        let context = OpContext::new(**call, info);
        let result =
            if info.cancel.is_cancelled() { Err(Error::Aborted { op: call.op, seq: call.seq }) } else { engine.step(stepped) };
        let is_cut_off = |peer| still > 400 * plan.ranks && is_cut(info.rank, peer);
        let result = match result {
            // No rank moves any more: a rank that waits for one that is cut off notices it, as its
            // failure detector would.
            Ok(Some(false)) if engine.stuck_to(stepped).is_some_and(is_cut_off) => {
                let peer = engine.stuck_to(stepped).expect("it is stuck to a rank");
                let (address, kind) = ("cut off".to_owned(), io::ErrorKind::TimedOut);
                Err(context.failed(peer, Cause::Unreachable { address, kind }))
            }
            Ok(Some(false)) if still > 4000 * plan.ranks => {
                // A deadline passes.
                let peer = engine.stuck_to(stepped).expect("a rank that does not move waits for another");
                Err(context.failed(peer, Cause::Silent { deadline: info.timeout }))
            }
            other => other,
        };
        match result {
            Ok(Some(moved)) => {
                // What peers may know of it, as if it slept.
                if let Some(peer) = engine.stuck_to(stepped).filter(|_| !moved) {
                    let _ = context.patience_with(peer, None);
                }
                Ok(moved)
            }
            Ok(None) => {
                context.rest();
                Err(End::Completed)
            }
            Err(error) => {
                context.rest();
                let error = agree_on_report(status, info, error);
                engine.leave(0, true, &[]);
                Err(End::Failed(error))
            }
        }
    }
}

/// Has the fault of a plan strike.
fn strike(fault: Fault, world: &Mutex<World>, ends: &mut [Option<End>]) {
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

/// Runs one all-reduce under a seed, and checks the results of the ranks that completed it.
fn run(seed: u64) -> Run {
    let world = Arc::new(Mutex::new(World { random: mix(0x5eed, seed), ..World::default() }));
    let random = |below: usize| world.lock().random(below as u64) as usize;
    let plan = Plan::new(seed, random);
    let board = Arc::new(StatusBoard::default());
    let mut parts = plan.parts(&world, &board);
    let mut ends: Vec<Option<End>> = (0..plan.ranks).map(|_| None).collect();
    let mut operations: Vec<Operation<'_>> = parts.iter_mut().map(|part| plan.begin(part)).collect();

    let is_cut = |a, b| world.lock().cut.contains(&pair(a, b));
    let (mut turns, mut still) = (0, 0);
    loop {
        if turns == plan.strikes_at {
            strike(plan.fault, &world, &mut ends);
        }
        turns += 1;
        let is_waiting = |rank: &Rank| ends[*rank].is_none() && plan.fault != Fault::Absent(*rank);
        let waiting: Vec<Rank> = (0..plan.ranks).filter(is_waiting).collect();
        if waiting.is_empty() {
            break;
        }
        assert!(turns < 1_000_000, "it does not end");
        let rank = waiting[random(waiting.len())];
        match operations[rank].step(&plan, still, is_cut) {
            Ok(moved) => still = if moved { 0 } else { still + 1 },
            Err(end) => (ends[rank], still) = (Some(end), 0),
        }
    }
    drop(operations);
    let ends: Vec<End> = ends.into_iter().map(|end| end.unwrap_or(End::Killed)).collect();
    for (rank, end) in ends.iter().enumerate() {
        if let End::Completed = end {
            let is_right = parts[rank].buf.iter().enumerate().all(|(i, &got)| got == plan.expected(i));
            assert!(is_right, "rank {rank} completed with a wrong result");
        }
        board.take_down(CHANNEL, rank);
    }
    Run { fault: plan.fault, ranks: plan.ranks, algorithm: plan.algorithm, ends }
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
        Fault::Differs(odd) => {
            let named = if *ranks > 2 { *odd } else { 1 };
            ensure(errors.iter().all(|error| error.culprit() == Some(named)), "not all name the rank that differs")?;
            let shows_both = |error: &&Error| match error {
                Error::Mismatch { mine, theirs, .. } => mine != theirs,
                Error::Peer { cause: Cause::Mismatch(differs), .. } => differs.mine != differs.theirs,
                _ => false,
            };
            ensure(errors.iter().all(shows_both), "not all show both sides")?;
            return ensure(errors.len() == *ranks, "a rank noticed nothing");
        }
    };
    let culprits: Vec<Rank> = errors.iter().filter_map(|error| error.culprit()).collect();
    ensure(culprits.len() == errors.len(), "an error that names no rank")?;
    ensure(culprits.iter().all(|rank| at_fault.contains(rank)), "a rank that is not at fault is named")?;
    // Two ranks that are cut off from each other name each other. All others report the same.
    let are_alike = culprits.iter().all(|rank| *rank == culprits[0]);
    ensure(are_alike || matches!(fault, Fault::Cut(..)), "not all name the same")
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll")]
fn no_rank_hangs_and_all_name_the_same_for_every_fault() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("KOLO_TEST_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("KOLO_TEST_SEEDS").unwrap_or(if crate::sys::every_case() { 1000 } else { 250 }),
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

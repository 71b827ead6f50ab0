//! Runs the schedules of all ranks without a network: words instead of bytes, queues instead of
//! sockets, and a seeded choice of the rank that runs next instead of time.
//!
//! Every element starts as a random word and sums wrap, so a result is right only if every
//! contribution went in exactly once. Buffers that were not written yet hold other random words.
//! The promises of [`Step`] hold here as in the engine: sends drain lazily through links
//! that hold only a few words, and nothing overwrites what is still to be sent.

use std::collections::{HashMap, VecDeque};

use crate::schedule::algorithm::Algorithm;
use crate::schedule::generate::steps;
use crate::schedule::problem::{Blocks, Problem, Racks, elements};
use crate::schedule::step::{BufferRef, Span, Step};
use crate::types::{Op, Rank, mix};

/// The factor with which `finish` multiplies a word, so that a range that was finished twice or
/// never is noticed.
const FINISH: u64 = 0x9e37_79b9_7f4a_7c15;

/// What can be wrong with a set of schedules.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// No rank can continue.
    Deadlock { waiting: Vec<Rank> },
    /// A rank expected a message of another length.
    Length { rank: Rank, from: Rank, expected: usize, sent: usize },
    /// A message was sent that no rank received.
    Leftover { from: Rank, to: Rank },
    /// A step reaches beyond its buffer or the world.
    Bounds { rank: Rank, step: Step },
    /// A result is wrong.
    Wrong { rank: Rank, element: usize },
}

/// A collective to simulate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    pub(super) algorithm: Algorithm,
    pub(super) op: Op,
    pub(super) world: usize,
    pub(super) root: Rank,
    /// Elements of the buffer, or of one block.
    pub(super) count: usize,
    /// The blocks' offsets, for the forms with a count for each rank.
    pub(super) offsets: Option<&'a [usize]>,
    pub(super) racks: Racks<'a>,
    pub(super) segment: usize,
    pub(super) in_place: bool,
    /// Words that one link holds.
    pub(super) capacity: usize,
    pub(super) seed: u64,
}

impl<'a> Case<'a> {
    fn blocks(&self) -> Blocks<'a> {
        self.offsets.map_or(Blocks::Even(self.count), Blocks::Listed)
    }

    pub(super) fn problem(&self, rank: Rank) -> Problem<'a> {
        let Case { op, world, root, count, segment, racks, .. } = *self;
        // Two ranks of the world send and receive; the root decides which.
        let (op, root) = match op {
            Op::Send if rank == root => (Op::Send, (root + 1) % world),
            Op::Send => (Op::Recv, root),
            op => (op, root),
        };
        Problem { op, rank, world, root, count, sends: self.blocks(), recvs: self.blocks(), segment, racks }
    }

    fn random(&self, rank: Rank, what: u64, element: usize) -> u64 {
        mix(mix(mix(self.seed, rank as u64), what), element as u64)
    }

    fn word(&self, rank: Rank, element: usize) -> u64 {
        self.random(rank, 1, element)
    }

    /// Returns the elements of a rank's input and output, and where the input lies within the
    /// output (or the output within the input) if they are the same memory.
    fn buffers(&self, rank: Rank) -> (usize, usize, [usize; 2]) {
        // A rank sends, and the next one receives.
        if self.op == Op::Send {
            return (self.count, self.count, [0, 0]);
        }
        elements(self.op, rank, self.root, self.world, self.count, &self.blocks())
    }

    /// Returns the reduction of all inputs.
    fn reduced(&self) -> Vec<u64> {
        let finish = if self.world == 1 { 1 } else { FINISH };
        let sum = |element| (0..self.world).fold(0u64, |sum, rank| sum.wrapping_add(self.word(rank, element)));
        let len = if self.op.reduces() { self.buffers(self.root).0 } else { 0 };
        (0..len).map(|element| sum(element).wrapping_mul(finish)).collect()
    }

    /// Returns the word that must be at `element` of a rank's output, if the operation defines it.
    fn expected(&self, rank: Rank, element: usize, reduced: &[u64]) -> Option<u64> {
        let block = |element: usize| (0..self.world).find(|&block| self.blocks().range(block).contains(&element));
        match self.op {
            Op::AllReduce | Op::Reduce => Some(reduced[element]),
            Op::Broadcast => Some(self.word(self.root, element)),
            Op::AllGather | Op::AllGatherV | Op::Gather => {
                block(element).map(|from| self.word(from, element - self.blocks().range(from).start))
            }
            Op::ReduceScatter | Op::ReduceScatterV => Some(reduced[self.blocks().range(rank).start + element]),
            Op::AllToAll => Some(self.word(element / self.count, rank * self.count + element % self.count)),
            Op::Scatter => Some(self.word(self.root, rank * self.count + element)),
            Op::Send if rank == (self.root + 1) % self.world => Some(self.word(self.root, element)),
            _ => None,
        }
    }

    /// Returns the steps of every rank.
    pub(super) fn schedules(&self) -> Vec<Vec<Step>> {
        (0..self.world).map(|rank| self.generate(rank).collect()).collect()
    }

    fn generate(&self, rank: Rank) -> Box<dyn Iterator<Item = Step> + 'a> {
        if self.op == Op::Send && rank != self.root && rank != (self.root + 1) % self.world {
            return Box::new(std::iter::empty());
        }
        steps(self.algorithm, self.problem(rank))
    }

    /// Runs the algorithm.
    pub(super) fn run(&self) -> Result<(), Fault> {
        self.run_steps((0..self.world).map(|rank| self.generate(rank)).collect())
    }

    /// Runs these steps instead of the algorithm's.
    pub(super) fn run_steps(&self, steps: Vec<Box<dyn Iterator<Item = Step> + '_>>) -> Result<(), Fault> {
        let mut network = Network { links: HashMap::new(), capacity: self.capacity };
        let mut ranks: Vec<Simulated<'_>> = steps.into_iter().enumerate().map(|(rank, steps)| self.start(rank, steps)).collect();
        let mut runnable: Vec<Rank> = (0..self.world).collect();
        let mut waiting = vec![false; self.world];
        let mut random = self.seed;
        while !runnable.is_empty() {
            random = mix(random, 0);
            let rank = runnable.swap_remove(random as usize % runnable.len());
            waiting[rank] = true;
            ranks[rank].run(&mut network, |peer| {
                if std::mem::take(&mut waiting[peer]) {
                    runnable.push(peer);
                }
            })?;
        }
        let stuck: Vec<Rank> = ranks.iter().filter(|rank| !rank.is_done()).map(|rank| rank.rank).collect();
        if !stuck.is_empty() {
            return Err(Fault::Deadlock { waiting: stuck });
        }
        if let Some((&(from, to), _)) = network.links.iter().find(|(_, link)| !link.lengths.is_empty() || !link.words.is_empty())
        {
            return Err(Fault::Leftover { from, to });
        }
        let reduced = self.reduced();
        ranks.iter().try_for_each(|rank| self.check(rank, &reduced))
    }

    fn start<'s>(&self, rank: Rank, steps: Box<dyn Iterator<Item = Step> + 's>) -> Simulated<'s> {
        let (input, output, [input_at, output_at]) = self.buffers(rank);
        // Scratch is last and grows on demand, filled with noise.
        let (input_at, output_at) = if self.in_place { (input_at, output_at) } else { (0, input) };
        let size = (input_at + input).max(output_at + output);
        let mut memory: Vec<u64> = (0..size).map(|at| self.random(rank, 2, at)).collect();
        for element in 0..input {
            memory[input_at + element] = self.word(rank, element);
        }
        Simulated {
            rank,
            world: self.world,
            memory,
            places: [(input_at, input), (output_at, output), (size, usize::MAX - size)],
            steps,
            step: None,
            done: None,
            outgoing: Vec::new(),
        }
    }

    fn check(&self, rank: &Simulated<'_>, reduced: &[u64]) -> Result<(), Fault> {
        let (at, len) = rank.places[1];
        let wrong = (0..len)
            .find(|&element| self.expected(rank.rank, element, reduced).is_some_and(|word| word != rank.memory[at + element]));
        wrong.map_or(Ok(()), |element| Err(Fault::Wrong { rank: rank.rank, element }))
    }
}

/// All links. A link holds the lengths of the messages that were begun, and at most `capacity`
/// words.
struct Network {
    links: HashMap<(Rank, Rank), Link>,
    capacity: usize,
}

#[derive(Default)]
struct Link {
    lengths: VecDeque<usize>,
    words: VecDeque<u64>,
}

/// A send that has not drained yet. `at` is an address in the rank's memory.
struct Outgoing {
    to: Rank,
    at: usize,
    len: usize,
    /// Words that may be sent: fewer than `len` while the step that forwards them still receives.
    ready: usize,
    sent: usize,
    begun: bool,
}

struct Simulated<'s> {
    rank: Rank,
    world: usize,
    memory: Vec<u64>,
    /// Address and length of input, output and scratch.
    places: [(usize, usize); 3],
    steps: Box<dyn Iterator<Item = Step> + 's>,
    /// The current step, which waits for a message or for memory to be free.
    step: Option<Step>,
    /// Words of the step's message that have been received; `None` before its first.
    done: Option<usize>,
    outgoing: Vec<Outgoing>,
}

impl Simulated<'_> {
    fn is_done(&self) -> bool {
        self.step.is_none() && self.outgoing.is_empty()
    }

    /// Runs until nothing can move. Calls `touched` with every peer that may be able to continue
    /// because of it.
    fn run(&mut self, network: &mut Network, mut touched: impl FnMut(Rank)) -> Result<(), Fault> {
        loop {
            let drained = self.drain(network, &mut touched);
            if self.step.is_none() {
                self.step = self.steps.next();
                if let Some(step) = self.step {
                    self.begin(step)?;
                }
            }
            let moved = match self.step {
                Some(step) => self.advance(step, network, &mut touched)?,
                None => false,
            };
            if !drained && !moved {
                return Ok(());
            }
        }
    }

    /// Moves words from memory into links.
    fn drain(&mut self, network: &mut Network, touched: &mut impl FnMut(Rank)) -> bool {
        let mut moved = false;
        for i in 0..self.outgoing.len() {
            if self.outgoing[..i].iter().any(|earlier| earlier.to == self.outgoing[i].to) {
                continue;
            }
            let out = &mut self.outgoing[i];
            let link = network.links.entry((self.rank, out.to)).or_default();
            if !std::mem::replace(&mut out.begun, true) {
                link.lengths.push_back(out.len);
                moved = true;
            }
            while out.sent < out.ready && link.words.len() < network.capacity {
                link.words.push_back(self.memory[out.at + out.sent]);
                out.sent += 1;
                moved = true;
            }
            if moved {
                touched(out.to);
            }
        }
        self.outgoing.retain(|out| out.sent < out.len || !out.begun);
        moved
    }

    /// Checks a step's bounds, and queues what it sends.
    fn begin(&mut self, step: Step) -> Result<(), Fault> {
        let (spans, peers): ([Option<Span>; 2], [Option<Rank>; 2]) = match step {
            Step::Send { to, src } => ([Some(src), None], [Some(to), None]),
            Step::Recv { from, dst } => ([Some(dst), None], [Some(from), None]),
            Step::RecvSend { from, dst, to } => ([Some(dst), None], [Some(from), Some(to)]),
            Step::RecvReduce { from, own, dst, .. } => ([Some(own), Some(dst)], [Some(from), None]),
            Step::RecvReduceSend { from, own, dst, to, .. } => ([Some(own), Some(dst)], [Some(from), Some(to)]),
            Step::Copy { src, dst } => ([Some(src), Some(dst)], [None, None]),
            // Words stay as they are.
            Step::Convert { src, dst } => ([Some(src), Some(dst)], [None, None]),
            Step::Fold { own, dst, .. } => ([Some(own), Some(dst)], [None, None]),
        };
        let fits = |span: Span| span.at.checked_add(span.len).is_some_and(|end| end <= self.places[span.place as usize].1);
        if !spans.into_iter().flatten().all(fits) || !peers.into_iter().flatten().all(|peer| peer < self.world) {
            return Err(Fault::Bounds { rank: self.rank, step });
        }
        let scratch = self.places[2].0 + step.scratch(self.world);
        let noise = mix(self.rank as u64, scratch as u64);
        if self.memory.len() < scratch {
            self.memory.resize(scratch, noise);
        }
        let sends = match step {
            Step::Send { to, src } => Some((to, src, src.len)),
            Step::RecvSend { to, dst, .. } | Step::RecvReduceSend { to, dst, .. } => Some((to, dst, 0)),
            _ => None,
        };
        if let Some((to, span, ready)) = sends {
            self.outgoing.push(Outgoing { to, at: self.address(span), len: span.len, ready, sent: 0, begun: false });
        }
        self.done = None;
        Ok(())
    }

    fn address(&self, span: Span) -> usize {
        self.places[span.place as usize].0 + span.at
    }

    /// Takes a step as far as it gets. Returns whether anything moved.
    fn advance(&mut self, step: Step, network: &mut Network, touched: &mut impl FnMut(Rank)) -> Result<bool, Fault> {
        let (from, own, dst, finish, forwards) = match step {
            Step::Send { .. } => {
                self.step = None;
                return Ok(true);
            }
            Step::Copy { src, dst } => {
                let (src, same) = (self.address(src), src.place != dst.place && self.address(src) == self.address(dst));
                return Ok(same && self.step.take().is_some() || self.local(dst, |memory, i| memory[src + i]));
            }
            Step::Convert { src, dst } => {
                let src = self.address(src);
                return Ok(self.local(dst, |memory, i| memory[src + i]));
            }
            Step::Fold { own, parts, stride, dst } => {
                let parts = self.address(BufferRef::Scratch.span(parts..parts));
                let (own_at, others) = (self.address(own), self.world - 1);
                return Ok(self.local(dst, |memory, i| {
                    let parts = (0..others).map(|k| memory[parts + k * stride + i]);
                    parts.fold(memory[own_at + i], u64::wrapping_add).wrapping_mul(FINISH)
                }));
            }
            Step::Recv { from, dst } => (from, None, dst, false, false),
            Step::RecvSend { from, dst, .. } => (from, None, dst, false, true),
            Step::RecvReduce { from, own, dst, finish } => (from, Some(own), dst, finish, false),
            Step::RecvReduceSend { from, own, dst, finish, .. } => (from, Some(own), dst, finish, true),
        };
        let Some(link) = network.links.get_mut(&(from, self.rank)) else { return Ok(false) };
        let mut moved = false;
        let mut done = match self.done {
            Some(done) => done,
            None => {
                let Some(sent) = link.lengths.pop_front() else { return Ok(false) };
                if sent != dst.len {
                    return Err(Fault::Length { rank: self.rank, from, expected: dst.len, sent });
                }
                moved = true;
                0
            }
        };
        let (at, own) = (self.address(dst), own.map(|own| self.address(own)));
        // What the step itself forwards is sent after it is written.
        let earlier = self.outgoing.len() - usize::from(forwards);
        while done < dst.len && self.is_free(at + done, 1, earlier) {
            let Some(mut word) = link.words.pop_front() else { break };
            if let Some(own) = own {
                word = word.wrapping_add(self.memory[own + done]);
            }
            self.memory[at + done] = if finish { word.wrapping_mul(FINISH) } else { word };
            done += 1;
            moved = true;
        }
        if let Some(out) = self.outgoing.last_mut().filter(|_| forwards) {
            out.ready = done;
        }
        self.done = Some(done);
        if moved {
            touched(from);
        }
        if done == dst.len {
            self.step = None;
        }
        Ok(moved)
    }

    /// Executes a step within this rank's memory, once its destination is free.
    fn local(&mut self, dst: Span, word: impl Fn(&[u64], usize) -> u64) -> bool {
        let at = self.address(dst);
        if !self.is_free(at, dst.len, self.outgoing.len()) {
            return false;
        }
        for i in 0..dst.len {
            self.memory[at + i] = word(&self.memory, i);
        }
        self.step = None;
        true
    }

    /// Whether the first `earlier` sends have read all of a range.
    fn is_free(&self, at: usize, len: usize, earlier: usize) -> bool {
        self.outgoing[..earlier].iter().all(|out| at + len <= out.at + out.sent || out.at + out.len <= at)
    }
}

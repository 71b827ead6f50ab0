//! Times of one operation at one size.
//!
//! As in nccl-tests, a sample is a loop of bare calls on the same buffers after a barrier, and its
//! time the mean of the calls on the slowest rank. Nothing but the calls is in the loop: with more
//! ranks than processors, whatever a rank does between two calls delays the others. Results are
//! checked in calls of their own.

use std::time::{Duration, Instant};

use kolo::{ArgumentError, Communicator, Error, Op, ReduceOp, Registered, Result};

use super::arguments::Args;
use super::device::{OnDevice, Place};
use super::operation::Operation;
use super::pattern::{self, Pattern, STALE, Tolerance, reduced, small};

/// A sample has as many calls as move this many bytes, within these limits. The fewest still
/// outweigh the time in which the ranks leave the barrier.
const SAMPLE: usize = 16 << 20;
const FEWEST: usize = 4;
const MOST: usize = 200;
/// Without `--iters`, as many samples are measured as take this long, within these limits.
const ENOUGH: Duration = Duration::from_millis(500);
const FEWEST_SAMPLES: u32 = 5;
const MOST_SAMPLES: u32 = 20;
/// Without `--warmup`, as many samples come before them as a quarter of their number, and at most these.
const MOST_WARM_UPS: u32 = 5;
/// How many calls are checked: the second finds the buffers that the first has used.
const CHECKED: u32 = 2;

/// The measurement of one size.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) bytes: u64,
    /// Elements of the whole buffer.
    pub(crate) elements: usize,
    /// Elements that one rank sends and receives in one call.
    send: usize,
    recv: usize,
    /// Calls of one sample.
    pub(crate) calls: usize,
}

impl Plan {
    pub(crate) fn new<T: Pattern>(args: &Args, ranks: usize, bytes: u64) -> Plan {
        let elements = args.op.elements(bytes, size_of::<T>(), ranks);
        let (send, recv) = args.op.shares(elements, ranks);
        let whole = elements * size_of::<T>();
        let calls = SAMPLE.checked_div(whole).unwrap_or(MOST).clamp(FEWEST, MOST);
        Plan { bytes: whole as u64, elements, send, recv, calls }
    }

    /// Returns the plan of a single call.
    pub(crate) fn once<T: Pattern>(op: Operation, ranks: usize, bytes: u64) -> Plan {
        let elements = op.elements(bytes, size_of::<T>(), ranks);
        let (send, recv) = op.shares(elements, ranks);
        Plan { bytes: (elements * size_of::<T>()) as u64, elements, send, recv, calls: 1 }
    }

    /// Elements that one rank sends and receives in one call.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        (self.send, self.recv)
    }
}

/// The times of one form of an operation, in seconds, and how many elements were wrong.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// Of each sample, sorted.
    samples: Vec<f64>,
    /// `None` if the result was not checked.
    pub(crate) wrong: Option<u64>,
}

/// Both forms of an operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) out_of_place: Option<Measured>,
    pub(crate) in_place: Option<Measured>,
}

impl Measured {
    /// See [`percentile`].
    pub(crate) fn percentile(&self, share: f64) -> f64 {
        percentile(&self.samples, share)
    }

    pub(crate) fn mean(&self) -> f64 {
        self.samples.iter().sum::<f64>() / self.samples.len() as f64
    }

    pub(crate) fn min(&self) -> f64 {
        self.samples[0]
    }

    pub(crate) fn iterations(&self) -> usize {
        self.samples.len()
    }
}

/// Returns the percentile of sorted numbers by nearest rank; `share` is from 0 to 1.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted[at.clamp(1, sorted.len()) - 1]
}

/// A buffer of either kind.
enum Buffer<T: Pattern> {
    Private(Vec<T>),
    Registered(Registered<T>),
}

impl<T: Pattern> Buffer<T> {
    fn new(comm: &Communicator, len: usize, registered: bool) -> Result<Buffer<T>> {
        Ok(match registered {
            true => Buffer::Registered(comm.alloc(len)?),
            false => {
                let mut vec = Vec::new();
                vec.try_reserve_exact(len)
                    .map_err(|_| Error::Argument { op: Op::Alloc, problem: ArgumentError::TooMany { count: len } })?;
                vec.resize(len, T::from_small(0));
                Buffer::Private(vec)
            }
        })
    }

    fn slice(&mut self, len: usize) -> &mut [T] {
        match self {
            Buffer::Private(vec) => &mut vec[..len],
            Buffer::Registered(registered) => &mut registered[..len],
        }
    }
}

/// The buffers of all sizes.
pub(crate) struct Memory<T: Pattern> {
    send: Buffer<T>,
    recv: Buffer<T>,
    /// The buffers on the GPU, if the operation is measured there.
    device: Option<OnDevice<T>>,
}

impl<T: Pattern> Memory<T> {
    pub(crate) fn new(comm: &Communicator, plans: &[Plan], args: &Args) -> Result<Memory<T>> {
        let most = |of: fn(&Plan) -> usize| plans.iter().map(of).max().unwrap_or(0);
        // In place, the receive buffer holds the whole buffer.
        let (sends, recvs) = (most(|plan| plan.send), most(|plan| plan.elements));
        if args.device == Place::Cuda {
            let device = Some(OnDevice::new(comm, sends, recvs, args.registered)?);
            return Ok(Memory { send: Buffer::new(comm, sends, false)?, recv: Buffer::new(comm, recvs, false)?, device });
        }
        let send = Buffer::new(comm, sends, args.registered)?;
        Ok(Memory { send, recv: Buffer::new(comm, recvs, args.registered)?, device: None })
    }

    /// Writes this rank's numbers, by position, into the buffer that one call sends, and `rest`
    /// into the other one. Without a buffer to send, the call is in place.
    fn fill(&mut self, lens: (usize, usize), number: impl Fn(usize) -> u32, rest: u32) -> Result<()> {
        let (send, recv) = (self.send.slice(lens.0), self.recv.slice(lens.1));
        let filled = if send.is_empty() {
            &mut *recv
        } else {
            recv.fill(T::from_small(rest));
            &mut *send
        };
        pattern::fill(filled, number);
        self.device.as_mut().map_or(Ok(()), |device| device.take(send, recv))
    }

    /// Calls the operation several times on the same buffers.
    fn call(&mut self, comm: &Communicator, args: &Args, lens: (usize, usize), in_place: bool, calls: usize) -> Result<()> {
        let how = (args.redop, args.root);
        if let Some(device) = &mut self.device {
            for _ in 0..calls {
                device.call(args.op, comm, how, 0..lens.0, 0..lens.1, in_place)?;
            }
            return device.finish();
        }
        let (send, recv) = (self.send.slice(lens.0), self.recv.slice(lens.1));
        for _ in 0..calls {
            args.op.call(comm, how, send, recv, in_place)?;
        }
        Ok(())
    }

    /// Returns what the last call has received.
    fn result(&mut self, len: usize) -> Result<&[T]> {
        let recv = self.recv.slice(len);
        if let Some(device) = &self.device {
            device.give(recv)?;
        }
        Ok(recv)
    }
}

/// Measures one form of an operation at one size.
pub(crate) fn measure<T: Pattern>(
    comm: &Communicator,
    args: &Args,
    plan: &Plan,
    memory: &mut Memory<T>,
    in_place: bool,
) -> Result<Measured> {
    let lens = if in_place { (0, plan.elements) } else { (plan.send, plan.recv) };
    // However often zeros are reduced in place, they stay zeros.
    memory.fill(lens, |_| 0, 0)?;
    let mut sample = || -> Result<f64> {
        comm.barrier()?;
        let began = Instant::now();
        memory.call(comm, args, lens, in_place, plan.calls)?;
        Ok(began.elapsed().as_secs_f64())
    };
    let mut warmed = 0;
    let iters = match args.iters {
        Some(iters) => iters,
        // All ranks take the number that the slowest one would.
        None => {
            let mut took = [sample()?];
            warmed = 1;
            comm.all_reduce(&mut took, ReduceOp::Max)?;
            ((ENOUGH.as_secs_f64() / took[0]) as u32).clamp(FEWEST_SAMPLES, MOST_SAMPLES)
        }
    };
    for _ in warmed..args.warmup.unwrap_or(iters.div_ceil(4).min(MOST_WARM_UPS)) {
        sample()?;
    }
    let mut samples = (0..iters).map(|_| Ok(sample()? / plan.calls as f64)).collect::<Result<Vec<f64>>>()?;
    comm.all_reduce(&mut samples, ReduceOp::Max)?;
    samples.sort_by(f64::total_cmp);
    let wrong = if args.check { Some(check(comm, args, plan, memory, in_place, lens)?) } else { None };
    Ok(Measured { samples, wrong })
}

/// Counts the wrong elements that all ranks get. `lens` are the elements that one call sends and
/// receives.
fn check<T: Pattern>(
    comm: &Communicator,
    args: &Args,
    plan: &Plan,
    memory: &mut Memory<T>,
    in_place: bool,
    lens: (usize, usize),
) -> Result<u64> {
    let redop = args.op.reduces().then_some(args.redop);
    let mut wrong = [0];
    for iteration in 0..CHECKED {
        let number = |place| small(redop, comm.rank(), place, iteration, comm.world_size());
        memory.fill(lens, number, STALE)?;
        memory.call(comm, args, lens, in_place, 1)?;
        let got = memory.result(lens.1)?;
        wrong[0] += count_wrong(args.op, redop, comm, got, plan, iteration, in_place, args.root);
    }
    comm.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0])
}

/// Counts the wrong elements in the result of one call.
#[expect(clippy::too_many_arguments, reason = "the result depends on all of them")]
pub(crate) fn count_wrong<T: Pattern>(
    op: Operation,
    redop: Option<ReduceOp>,
    comm: &Communicator,
    got: &[T],
    plan: &Plan,
    iteration: u32,
    in_place: bool,
    root: usize,
) -> u64 {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let block = plan.elements / ranks;
    let own = rank * block;
    // Where these two leave their result.
    let scattered =
        if in_place && matches!(op, Operation::ReduceScatter | Operation::Scatter) { &got[own..own + block] } else { got };
    let tolerance = Tolerance::of::<T>(comm, redop);
    // The numbers of one rank, and what all of them are reduced to, from a position on.
    let of = |rank: usize, got: &[T], start: usize| {
        pattern::count_wrong(got, start, |place| small(redop, rank, place, iteration, ranks).into(), tolerance)
    };
    let of_all = |got: &[T], start: usize| {
        let expected = |place| redop.map_or(0.0, |redop| reduced(redop, place, iteration, ranks));
        pattern::count_wrong(got, start, expected, tolerance)
    };
    let of_each = |start: usize, step: usize| {
        got.chunks(block.max(1)).enumerate().map(|(rank, chunk)| of(rank, chunk, start + rank * step)).sum()
    };
    match op {
        Operation::Barrier => 0,
        Operation::Reduce | Operation::Gather if rank != root => 0,
        Operation::AllReduce | Operation::Reduce => of_all(got, 0),
        Operation::Broadcast => of(root, got, 0),
        Operation::ReduceScatter => of_all(scattered, own),
        Operation::Scatter => of(root, scattered, own),
        // In place, a number depends on its position in the whole buffer; out of place, on the position in
        // the chunk of its rank.
        Operation::AllGather | Operation::Gather => of_each(0, if in_place { block } else { 0 }),
        Operation::AllToAll => of_each(own, 0),
        Operation::SendRecv => of((rank + ranks - 1) % ranks, got, 0),
    }
}

//! Times of one operation at one size.
//!
//! Each sample starts with rewritten buffers, so that it does not find its data in the cache where
//! the last one left it. A sample of a small operation is the mean of several calls, each on
//! buffers of its own: a single call takes less time than the clock and the barrier before it. The
//! time of a sample is that of the slowest rank.

use std::time::Instant;

use kolo::{ArgumentError, Communicator, Error, Op, ReduceOp, Registered, Result};

use super::arguments::Args;
use super::device::{OnDevice, Place};
use super::operation::Operation;
use super::pattern::{Pattern, STALE, is_right, reduced, small};

/// A sample has as many calls as fit into this many bytes.
const SAMPLE: usize = 64 << 10;
/// The most calls of one sample.
const CALLS: usize = 64;

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
        let calls = SAMPLE.checked_div(whole).unwrap_or(CALLS).clamp(1, CALLS);
        Plan { bytes: whole as u64, elements, send, recv, calls }
    }

    /// Returns the plan of a single call.
    #[cfg(unix)]
    pub(crate) fn once<T: Pattern>(op: Operation, ranks: usize, bytes: u64) -> Plan {
        let elements = op.elements(bytes, size_of::<T>(), ranks);
        let (send, recv) = op.shares(elements, ranks);
        Plan { bytes: (elements * size_of::<T>()) as u64, elements, send, recv, calls: 1 }
    }

    /// Elements that one rank sends and receives in one call.
    #[cfg(unix)]
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
        let most = |of: fn(&Plan) -> usize| plans.iter().map(|plan| plan.calls * of(plan)).max().unwrap_or(0);
        // In place, the receive buffer holds the whole buffer.
        let (sends, recvs) = (most(|plan| plan.send), most(|plan| plan.elements));
        if args.device == Place::Cuda {
            let device = Some(OnDevice::new(comm, sends, recvs, args.registered)?);
            return Ok(Memory { send: Buffer::new(comm, sends, false)?, recv: Buffer::new(comm, recvs, false)?, device });
        }
        let send = Buffer::new(comm, sends, args.registered)?;
        Ok(Memory { send, recv: Buffer::new(comm, recvs, args.registered)?, device: None })
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
    let mut samples = Vec::with_capacity(args.iters as usize);
    let mut wrong = None;
    for iteration in 0..args.warmup + args.iters {
        fill(comm, args, plan, memory, iteration, in_place, lens)?;
        comm.barrier()?;
        let began = Instant::now();
        call(comm, args, plan.calls, memory, in_place, lens)?;
        let seconds = began.elapsed().as_secs_f64() / plan.calls as f64;
        if iteration >= args.warmup {
            samples.push(seconds);
        }
        let recv = memory.recv.slice(plan.calls * lens.1);
        if let Some(device) = &memory.device
            && args.check
        {
            device.give(recv)?;
        }
        if args.check && iteration + 1 == args.warmup + args.iters {
            let redop = args.op.reduces().then_some(args.redop);
            let mut count = [0u64];
            for call in 0..plan.calls {
                let got = &recv[call * lens.1..(call + 1) * lens.1];
                count[0] += count_wrong(args.op, redop, comm, got, plan, call, iteration, in_place, args.root);
            }
            comm.all_reduce(&mut count, ReduceOp::Sum)?;
            wrong = Some(count[0]);
        }
    }
    comm.all_reduce(&mut samples, ReduceOp::Max)?;
    samples.sort_by(f64::total_cmp);
    Ok(Measured { samples, wrong })
}

/// Writes this rank's numbers into the buffers of one sample. `lens` are the elements that one call
/// sends and receives.
fn fill<T: Pattern>(
    comm: &Communicator,
    args: &Args,
    plan: &Plan,
    memory: &mut Memory<T>,
    iteration: u32,
    in_place: bool,
    lens: (usize, usize),
) -> Result<()> {
    let redop = args.op.reduces().then_some(args.redop);
    let (send, recv) = (memory.send.slice(plan.calls * lens.0), memory.recv.slice(plan.calls * lens.1));
    let filled = if in_place {
        &mut *recv
    } else {
        recv.fill(T::from_small(STALE));
        &mut *send
    };
    for (place, element) in filled.iter_mut().enumerate() {
        *element = T::from_small(small(redop, comm.rank(), place, iteration, comm.world_size()));
    }
    match &mut memory.device {
        Some(device) => device.take(send, recv),
        None => Ok(()),
    }
}

/// Makes the calls of one sample, each on buffers of its own.
fn call<T: Pattern>(
    comm: &Communicator,
    args: &Args,
    calls: usize,
    memory: &mut Memory<T>,
    in_place: bool,
    (send_len, recv_len): (usize, usize),
) -> Result<()> {
    let how = (args.redop, args.root);
    let (send, recv) = (memory.send.slice(calls * send_len), memory.recv.slice(calls * recv_len));
    for call in 0..calls {
        let (sends, recvs) = (call * send_len..(call + 1) * send_len, call * recv_len..(call + 1) * recv_len);
        match &mut memory.device {
            None => args.op.call(comm, how, &send[sends], &mut recv[recvs], in_place)?,
            Some(device) => device.call(args.op, comm, how, sends, recvs, in_place)?,
        }
    }
    match &memory.device {
        Some(device) => device.finish(),
        None => Ok(()),
    }
}

/// Counts the wrong elements in the result of one call.
#[expect(clippy::too_many_arguments, reason = "the result depends on all of them")]
pub(crate) fn count_wrong<T: Pattern>(
    op: Operation,
    redop: Option<ReduceOp>,
    comm: &Communicator,
    got: &[T],
    plan: &Plan,
    call: usize,
    iteration: u32,
    in_place: bool,
    root: usize,
) -> u64 {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let is_root = rank == root;
    let Plan { elements, send, .. } = *plan;
    let block = elements / ranks;
    // In place, the number depends on the position in the whole buffer; out of place, on the
    // position in the rank's own chunk.
    let stride = if in_place { elements } else { send };
    let from = |rank: usize, place: usize| f64::from(small(redop, rank, call * stride + place, iteration, ranks));
    let sum = |place: usize| redop.map_or(0.0, |redop| reduced(redop, call * stride + place, iteration, ranks));
    let of_rank = |place: usize| if in_place { place } else { place % block.max(1) };
    let (own, has_result) = match op {
        Operation::Barrier => (0..0, false),
        Operation::Reduce | Operation::Gather => (0..elements, is_root),
        Operation::ReduceScatter | Operation::Scatter if in_place => (rank * block..(rank + 1) * block, true),
        _ => (0..got.len(), true),
    };
    if !has_result {
        return 0;
    }
    let start = own.start;
    let wrong = own.filter(|&i| {
        let expected = match op {
            Operation::AllReduce | Operation::Reduce => sum(i),
            Operation::Broadcast => from(root, i),
            Operation::ReduceScatter => sum(rank * block + i - start),
            Operation::AllGather | Operation::Gather => from(i / block, of_rank(i)),
            Operation::AllToAll => from(i / block, rank * block + i % block),
            Operation::Scatter => from(root, rank * block + i - start),
            Operation::SendRecv => from((rank + ranks - 1) % ranks, i),
            Operation::Barrier => 0.0,
        };
        !is_right(got[i], expected)
    });
    wrong.count() as u64
}

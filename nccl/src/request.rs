//! A collective, a send or a receive: what the caller asked, and how a list of them is executed.

use std::ffi::c_void;
use std::sync::Arc;

use kolo::plan::{CostModel, Layout, candidates};
use kolo::raw::{PreparedCall, RawCall, RawWork};
use kolo::{Communicator, DType, Op, Rank};

use crate::comm::Comm;
use crate::driver;
use crate::fault::Fault;
use crate::scalar::{Reduction, divide, multiply};

/// What the caller asked.
pub(crate) struct Request {
    pub(crate) comm: Arc<Comm>,
    pub(crate) op: Op,
    pub(crate) dtype: DType,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) send: *const c_void,
    pub(crate) recv: *mut c_void,
    /// Elements of the buffer, or of one rank's block.
    pub(crate) count: usize,
    /// The root or the peer.
    pub(crate) root: Rank,
    pub(crate) stream: *mut c_void,
}

/// The buffers of a call that the host computes.
struct Staged {
    /// In words, so that they are aligned to every element.
    send: Vec<u64>,
    recv: Vec<u64>,
    bytes: usize,
}

impl Staged {
    fn of_words(words: &mut [u64], bytes: usize) -> &mut [u8] {
        // SAFETY: the words are at least as many bytes, all of which are initialised.
        unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), bytes) }
    }
}

impl Request {
    /// Checks what this rank can check alone.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        let comm = self.comm.for_calls()?;
        if let Some(Reduction::Scaled(factor)) = self.reduction
            && factor.dtype != self.dtype
        {
            let problem = format!("op was made for {}, and datatype is {}", factor.dtype, self.dtype);
            return Err(Fault::Argument(problem));
        }
        let (send, recv) = (self.send.cast(), self.recv.cast());
        // SAFETY: the caller's stream lives until the call has been executed, as nccl.h says.
        _ = unsafe { self.call(send, recv, self.stream) }.prepare(&comm)?;
        Ok(())
    }

    /// # Safety
    ///
    /// The stream is null, or lives until the call has been executed.
    unsafe fn call(&self, send: *const u8, recv: *mut u8, stream: *mut c_void) -> RawCall {
        let mut call = RawCall::new(self.op, self.dtype);
        call.buffers(send, recv, self.count).root(self.root);
        // SAFETY: passed on.
        unsafe { call.stream(stream) };
        match self.reduction {
            Some(Reduction::Plain(redop)) => _ = call.reduce(redop),
            Some(_) => _ = call.reduce(kolo::ReduceOp::Sum),
            None => {}
        }
        call
    }

    /// Returns the bytes of the buffer, or of all blocks together.
    fn bytes(&self, ranks: usize) -> usize {
        let blocks = match self.op {
            Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter => ranks,
            _ => 1,
        };
        self.count.saturating_mul(self.dtype.size()).saturating_mul(blocks)
    }

    /// Predicts seconds by kolo's price of a collective on hosts; a message costs a latency and its
    /// transfer. Nothing is executed.
    pub(crate) fn price(&self) -> Result<f64, Fault> {
        let comm = self.comm.for_calls()?;
        let (ranks, bytes) = (comm.world_size(), self.bytes(comm.world_size()) as u64);
        let layout = Layout::even(ranks, comm.host_count());
        let op = match self.op {
            // As much as the transfer of a broadcast between two ranks.
            Op::Send | Op::Recv => Op::Broadcast,
            op => op,
        };
        let layout = if op == self.op { layout } else { Layout::even(2, comm.host_count().min(2)) };
        Ok(candidates(op, bytes, layout, &CostModel::default()).first().map_or(0.0, |candidate| candidate.seconds))
    }

    pub(crate) fn is_message(&self) -> bool {
        matches!(self.op, Op::Send | Op::Recv)
    }

    /// Copies what is sent to the host and multiplies it, if the host has to compute for this call.
    fn stage(&self, comm: &Communicator) -> Result<Option<Staged>, Fault> {
        let Some(reduction @ (Reduction::AverageOfIntegers | Reduction::Scaled(_))) = self.reduction else { return Ok(None) };
        if let Reduction::AverageOfIntegers = reduction
            && !driver::is_on_device(self.send)
            && !driver::is_on_device(self.recv)
            && self.stream.is_null()
        {
            // The result is divided where it is.
            return Ok(None);
        }
        // SAFETY: the caller's stream lives until the call has been executed.
        unsafe { driver::synchronize(self.stream)? };
        let [sent, received] = self.lengths(comm);
        let mut staged = Staged { send: vec![0; sent.div_ceil(8)], recv: vec![0; received.div_ceil(8)], bytes: received };
        let send = Staged::of_words(&mut staged.send, sent);
        // SAFETY: the caller's buffer has as many bytes, and belongs to the call.
        unsafe { driver::read(send, self.send)? };
        if let Reduction::Scaled(factor) = reduction {
            // SAFETY: the caller's scalar is valid until the call has been executed.
            multiply(send, self.dtype, unsafe { factor.bytes()? });
        }
        Ok(Some(staged))
    }

    /// The bytes that a reduction reads and writes on this rank.
    fn lengths(&self, comm: &Communicator) -> [usize; 2] {
        let block = self.count * self.dtype.size();
        match self.op {
            Op::ReduceScatter => [block * comm.world_size(), block],
            Op::Reduce if comm.rank() != self.root => [block, 0],
            _ => [block, block],
        }
    }

    /// Divides the result, and copies it to where the caller wants it.
    fn finish(&self, comm: &Communicator, staged: Option<Staged>) -> Result<(), Fault> {
        let is_average = matches!(self.reduction, Some(Reduction::AverageOfIntegers));
        let Some(mut staged) = staged else {
            if is_average {
                let len = self.lengths(comm)[1];
                let mut result = vec![0; len];
                // SAFETY: the operation has ended, and the buffer is the caller's result.
                unsafe { driver::read(&mut result, self.recv)? };
                divide(&mut result, self.dtype, comm.world_size());
                // SAFETY: the operation has ended, so nothing else writes to the caller's result.
                unsafe { driver::write(self.recv, &result)? };
            }
            return Ok(());
        };
        let result = Staged::of_words(&mut staged.recv, staged.bytes);
        if is_average {
            divide(result, self.dtype, comm.world_size());
        }
        // SAFETY: the operation has ended, and the buffer is the caller's result.
        unsafe { driver::write(self.recv, result) }
    }
}

/// Executes one call: enqueues it on its stream, or runs it if its memory is the host's.
pub(crate) fn run_one(request: Request) -> Result<(), Fault> {
    let comm = request.comm.for_calls()?;
    if comm.has_devices() || !matches!(request.reduction, None | Some(Reduction::Plain(_))) {
        return run(vec![request]);
    }
    // SAFETY: the caller's stream and buffers are valid until this returns.
    let result = unsafe { request.call(request.send.cast(), request.recv.cast(), request.stream).run(&comm) };
    Ok(result?)
}

/// A call that was started.
struct Started {
    request: Request,
    comm: Arc<Communicator>,
    staged: Option<Staged>,
    work: Option<RawWork>,
}

/// Executes the calls of a group. All are started before the first is waited for. Of one communicator,
/// collectives come first, as in NCCL: messages then wait for no collective of a peer that comes after
/// its messages.
pub(crate) fn run(requests: Vec<Request>) -> Result<(), Fault> {
    let (messages, collectives): (Vec<Request>, Vec<Request>) = requests.into_iter().partition(Request::is_message);
    let mut prepared: Vec<(Request, Arc<Communicator>, Option<Staged>, PreparedCall)> = Vec::new();
    for request in collectives.into_iter().chain(messages) {
        let comm = request.comm.for_calls()?;
        let mut staged = request.stage(&comm)?;
        let (send, recv, stream) = match &mut staged {
            Some(staged) => (staged.send.as_ptr().cast(), staged.recv.as_mut_ptr().cast(), std::ptr::null_mut()),
            None => (request.send.cast(), request.recv.cast(), request.stream),
        };
        // SAFETY: the caller's stream lives until the call has been executed.
        let call = unsafe { request.call(send, recv, stream) }.prepare(&comm)?;
        prepared.push((request, comm, staged, call));
    }
    let mut result = Ok(());
    let mut started = Vec::with_capacity(prepared.len());
    for (request, comm, staged, call) in prepared {
        // SAFETY: the buffers are the caller's until the stream has passed the call, or until this
        // returns, which waits; those of a staged call live until it has ended.
        let work = unsafe { call.start(&comm) };
        let work = work.map_err(|error| fail(&mut result, &request, error.into())).ok();
        started.push(Started { request, comm, staged, work });
    }
    for Started { request, comm, staged, work } in started {
        let Some(work) = work else { continue };
        let is_held = match staged {
            // SAFETY: the caller's stream lives until this returns.
            None => unsafe { work.hold_stream(request.stream) },
            Some(_) => Ok(false),
        };
        match is_held {
            Ok(true) => request.comm.keep(work),
            Ok(false) => {
                let outcome = work.outcome(None).expect("without a deadline it waits until the end");
                let outcome = outcome.map_err(Fault::from).and_then(|()| request.finish(&comm, staged));
                outcome.unwrap_or_else(|fault| fail(&mut result, &request, fault));
            }
            Err(error) => {
                request.comm.keep(work);
                fail(&mut result, &request, error.into());
            }
        }
    }
    result
}

/// Keeps the first failure, which the call returns. Communicators remember theirs.
fn fail(result: &mut Result<(), Fault>, request: &Request, fault: Fault) {
    if result.is_err() {
        request.comm.remember(&fault.to_string());
        return;
    }
    request.comm.note(&fault.to_string());
    *result = Err(fault);
}

//! A rank of kolo or of a bound of the machine, in a comparison.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use kolo::{Communicator, ReduceOp, Registered, Transport, bf16};

use super::bounds::{Result, SharedLine, exchange, pair, stream_copy};
use super::contestant::Contestant;
use super::system;
use super::task::{IN_FLIGHT, MESSAGES, Subject};
use crate::bench::operation::Operation;

/// Arguments of a rank that `kolo compare` starts.
#[derive(ClapArgs)]
pub(crate) struct Args {
    contestant: String,
    /// The socket that questions come from. Without it, the rank calls one barrier and ends.
    socket: Option<PathBuf>,
}

pub(crate) fn compete(args: &Args) -> Result<(), String> {
    let contestant = Contestant::from_name(&args.contestant).ok_or_else(|| format!("{} is unknown", args.contestant))?;
    let result = match &args.socket {
        Some(socket) => Rank::new(contestant, socket).and_then(|mut rank| rank.answer(socket, contestant.name())),
        None => connect(contestant).and_then(|comm| Ok(comm.barrier()?)),
    };
    result.map_err(|error| error.to_string())
}

fn connect(contestant: Contestant) -> Result<Communicator> {
    let builder = Communicator::builder();
    let builder = if contestant == Contestant::KoloTcp { builder.transport(Transport::Tcp) } else { builder };
    Ok(builder.connect()?)
}

struct Rank {
    comm: Communicator,
    send: Vec<f32>,
    recv: Vec<f32>,
    registered: Option<Registered<f32>>,
    /// The buffers of operations that are in flight at once.
    many: Vec<Vec<f32>>,
    /// The buffer of `kolo-bf16`, with as many bytes as the others have.
    bf16: Vec<bf16>,
    contestant: Contestant,
    /// The connection to the other rank of the pair.
    stream: Option<TcpStream>,
    line: Option<SharedLine>,
}

impl Rank {
    fn new(contestant: Contestant, socket: &Path) -> Result<Rank> {
        let comm = connect(contestant)?;
        let stream = if contestant == Contestant::Exchange { pair(&comm)? } else { None };
        let line = match contestant {
            Contestant::RoundTrip if comm.rank() < 2 => Some(SharedLine::open(socket, contestant.name())?),
            Contestant::Futex => Some(SharedLine::open(socket, contestant.name())?),
            _ => None,
        };
        Ok(Rank {
            comm,
            send: Vec::new(),
            recv: Vec::new(),
            registered: None,
            many: Vec::new(),
            bf16: Vec::new(),
            contestant,
            stream,
            line,
        })
    }

    fn answer(&mut self, socket: &Path, name: &str) -> Result<()> {
        let mut stream = system::connect(socket)?;
        writeln!(stream, "{name} {}", self.comm.rank())?;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let line = line?;
            let words: Vec<&str> = line.split(' ').collect();
            let &[op, bytes, warmup, iters, calls] = &words[..] else { return Err(format!("{line:?} is no question").into()) };
            let (count, warmup, iters) = (bytes.parse::<usize>()? / 4, warmup.parse::<u32>()?, iters.parse::<u32>()?);
            let subject = Subject::from_name(op).ok_or_else(|| format!("{op} is unknown"))?;
            let times = self.measure(subject, count, warmup, iters, calls.parse()?)?;
            let times: Vec<String> = times.iter().map(u128::to_string).collect();
            writeln!(stream, "{}", times.join(" "))?;
        }
        Ok(())
    }

    /// Returns the nanoseconds of one operation, for each iteration.
    fn measure(&mut self, subject: Subject, count: usize, warmup: u32, iters: u32, calls: u32) -> Result<Vec<u128>> {
        if self.contestant == Contestant::KoloRegistered && self.registered.as_ref().is_none_or(|memory| memory.len() < count) {
            self.registered = Some(self.comm.alloc(count)?);
        }
        if self.contestant == Contestant::KoloBf16 && self.bf16.len() < 2 * count {
            self.bf16.resize(2 * count, bf16::ZERO);
            same_bits(&self.comm, &mut self.bf16)?;
        }
        grow(&mut self.send, count)?;
        grow(&mut self.recv, count)?;
        // However often zeros are reduced in place, they stay zeros.
        match &mut self.registered {
            Some(memory) => memory[..count].fill(0.0),
            None if self.contestant == Contestant::KoloBf16 => self.bf16[..2 * count].fill(bf16::ZERO),
            None => {
                self.send[..count].fill(0.0);
                self.recv[..count].fill(0.0);
            }
        }
        let many = if subject == Subject::InFlight { IN_FLIGHT as usize } else { 1 };
        self.many.resize_with(many, Vec::new);
        for buffer in &mut self.many {
            buffer.clear();
            grow(buffer, count)?;
        }
        let steps = if subject == Subject::Overlap { self.steps_as_long_as_a_call(count, warmup, calls)? } else { 0 };
        let alone = if subject == Subject::Overlap { self.time_of_steps(calls, steps)? } else { Duration::ZERO };
        let operations = if self.contestant.is_kolo() { subject.operations() } else { 1 };
        let mut times = Vec::with_capacity(iters as usize);
        for iteration in 0..warmup + iters {
            let took = self.time(calls, |rank| rank.call(subject, count, steps))?;
            if iteration >= warmup {
                times.push(took.saturating_sub(alone).as_nanos() / u128::from(calls * operations));
            }
        }
        Ok(times)
    }

    /// Returns how long these calls take, after a barrier.
    fn time(&mut self, calls: u32, mut call: impl FnMut(&mut Rank) -> Result<()>) -> Result<Duration> {
        self.comm.barrier()?;
        let began = Instant::now();
        for _ in 0..calls {
            call(self)?;
        }
        Ok(began.elapsed())
    }

    /// Returns how long these computations take, after a barrier.
    fn time_of_steps(&mut self, calls: u32, steps: u64) -> Result<Duration> {
        self.time(calls, |_| {
            compute(steps);
            Ok(())
        })
    }

    /// Returns the steps of a computation that takes as long as a nonblocking all-reduce on the
    /// slowest rank.
    fn steps_as_long_as_a_call(&mut self, count: usize, warmup: u32, calls: u32) -> Result<u64> {
        const STEPS: u64 = 1 << 16;
        self.time(calls * warmup, |rank| rank.call(Subject::Overlap, count, 0))?;
        let call = self.time(calls, |rank| rank.call(Subject::Overlap, count, 0))?.as_secs_f64() / f64::from(calls);
        let step = self.time_of_steps(4, STEPS)?.as_secs_f64() / (4 * STEPS) as f64;
        let mut steps = [(call / step) as u64];
        self.comm.all_reduce(&mut steps, ReduceOp::Max)?;
        Ok(steps[0])
    }

    fn call(&mut self, subject: Subject, count: usize, steps: u64) -> Result<()> {
        let Rank { comm, send, recv, registered, many, bf16, contestant, stream, line } = self;
        let (send, recv) = (&mut send[..count], &mut recv[..count]);
        let block = count / comm.world_size();
        match contestant {
            Contestant::Copy => recv.copy_from_slice(std::hint::black_box(send)),
            Contestant::Stream => stream_copy(send, recv),
            Contestant::Scale => recv.iter_mut().for_each(|x| *x *= 1.5),
            Contestant::Exchange => {
                if let Some(stream) = stream {
                    exchange(stream, send, recv)?;
                }
            }
            Contestant::RoundTrip => {
                if let Some(line) = line {
                    line.round_trip(comm.rank());
                }
            }
            Contestant::Futex => {
                if let Some(line) = line {
                    line.barrier(comm.world_size())?;
                }
            }
            Contestant::KoloBf16 => comm.all_reduce(&mut bf16[..2 * count], ReduceOp::Sum)?,
            _ => match subject {
                Subject::Operation(Operation::AllReduce) => match registered {
                    Some(memory) => comm.all_reduce(&mut memory[..count], ReduceOp::Sum)?,
                    None => comm.all_reduce(recv, ReduceOp::Sum)?,
                },
                Subject::Operation(Operation::Barrier) => comm.barrier()?,
                Subject::Operation(Operation::Broadcast) => comm.broadcast(send, 0)?,
                Subject::Operation(Operation::AllGather) => comm.all_gather(&send[..block], recv)?,
                Subject::Operation(Operation::ReduceScatter) => comm.reduce_scatter(send, &mut recv[..block], ReduceOp::Sum)?,
                Subject::Operation(Operation::AllToAll) => comm.all_to_all(send, recv)?,
                Subject::Operation(op) => return Err(format!("{} is not compared", op.name()).into()),
                Subject::InFlight | Subject::Overlap => {
                    let start = |buffer| comm.start_all_reduce(buffer, ReduceOp::Sum).map_err(kolo::Error::from);
                    let works = many.drain(..).map(start).collect::<kolo::Result<Vec<_>>>()?;
                    compute(steps);
                    for work in works {
                        many.push(work.wait().map_err(kolo::Error::from)?);
                    }
                }
                Subject::PingPong if comm.rank() == 0 => {
                    comm.send(send, 1)?;
                    comm.recv(recv, 1)?;
                }
                Subject::PingPong => {
                    comm.recv(recv, 0)?;
                    comm.send(send, 0)?;
                }
                Subject::Bandwidth if comm.rank() == 0 => {
                    for _ in 0..MESSAGES {
                        comm.send(send, 1)?;
                    }
                    comm.recv(&mut [0.0f32], 1)?;
                }
                Subject::Bandwidth => {
                    for _ in 0..MESSAGES {
                        comm.recv(recv, 0)?;
                    }
                    comm.send(&[0.0f32], 0)?;
                }
            },
        }
        std::hint::black_box(recv);
        Ok(())
    }
}

/// Appends zeros up to a length, if the system has the memory.
fn grow(buffer: &mut Vec<f32>, len: usize) -> Result<()> {
    let more = len.saturating_sub(buffer.len());
    let no_memory = |_| format!("there is no memory for {} bytes; compare smaller sizes", size_of::<f32>() * len);
    buffer.try_reserve_exact(more).map_err(no_memory)?;
    buffer.resize(buffer.len() + more, 0.0);
    Ok(())
}

/// Computes for a time in proportion to `steps`: each needs the result of the one before.
fn compute(steps: u64) {
    let mut x = 1.0f32;
    for _ in 0..steps {
        x = std::hint::black_box(x.mul_add(0.5, 1.0));
    }
}

/// Returns an error unless all ranks get the same bits of sums that depend on the order of
/// rounding.
fn same_bits(comm: &Communicator, buffer: &mut [bf16]) -> Result<()> {
    let rank = comm.rank() as f32;
    for (i, x) in (0u32..).zip(buffer.iter_mut()) {
        *x = bf16::from_f32((i % 8191) as f32 / 7.0 - 100.0 * rank);
    }
    comm.all_reduce(buffer, ReduceOp::Sum)?;
    let digest = buffer.iter().fold(0u64, |digest, x| digest.wrapping_mul(31).wrapping_add(x.to_bits().into()));
    let mut digests = vec![0; comm.world_size()];
    comm.all_gather(&[digest], &mut digests)?;
    let is_same = digests.iter().all(|&other| other == digest);
    if is_same { Ok(()) } else { Err(format!("the ranks have different bits of {} bf16", buffer.len()).into()) }
}

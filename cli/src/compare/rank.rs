//! A rank of kolo or of a bound of the machine, in a comparison.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args as ClapArgs;
use kolo::{Communicator, ReduceOp, Registered, Transport, bf16};

use super::bounds::{Result, SharedLine, exchange, pair, stream_copy};
use super::contestant::Contestant;

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
        Ok(Rank { comm, send: Vec::new(), recv: Vec::new(), registered: None, bf16: Vec::new(), contestant, stream, line })
    }

    fn answer(&mut self, socket: &Path, name: &str) -> Result<()> {
        let mut stream = UnixStream::connect(socket)?;
        writeln!(stream, "{name} {}", self.comm.rank())?;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let line = line?;
            let words: Vec<&str> = line.split(' ').collect();
            let &[op, bytes, warmup, iters, calls] = &words[..] else { return Err(format!("{line:?} is no question").into()) };
            let (count, warmup, iters) = (bytes.parse::<usize>()? / 4, warmup.parse::<u32>()?, iters.parse::<u32>()?);
            let times = self.measure(op, count, warmup, iters, calls.parse()?)?;
            let times: Vec<String> = times.iter().map(u128::to_string).collect();
            writeln!(stream, "{}", times.join(" "))?;
        }
        Ok(())
    }

    /// Returns the nanoseconds of one call, for each iteration.
    fn measure(&mut self, op: &str, count: usize, warmup: u32, iters: u32, calls: u32) -> Result<Vec<u128>> {
        if self.contestant == Contestant::KoloRegistered && self.registered.as_ref().is_none_or(|memory| memory.len() < count) {
            self.registered = Some(self.comm.alloc(count)?);
        }
        if self.contestant == Contestant::KoloBf16 && self.bf16.len() < 2 * count {
            self.bf16.resize(2 * count, bf16::ZERO);
            same_bits(&self.comm, &mut self.bf16)?;
        }
        self.send.resize(self.send.len().max(count), 0.0);
        self.recv.resize(self.recv.len().max(count), 0.0);
        // However often zeros are reduced in place, they stay zeros.
        match &mut self.registered {
            Some(memory) => memory[..count].fill(0.0),
            None if self.contestant == Contestant::KoloBf16 => self.bf16[..2 * count].fill(bf16::ZERO),
            None => {
                self.send[..count].fill(0.0);
                self.recv[..count].fill(0.0);
            }
        }
        let mut times = Vec::with_capacity(iters as usize);
        for iteration in 0..warmup + iters {
            self.comm.barrier()?;
            let began = Instant::now();
            for _ in 0..calls {
                self.call(op, count)?;
            }
            if iteration >= warmup {
                times.push(began.elapsed().as_nanos() / u128::from(calls));
            }
        }
        Ok(times)
    }

    fn call(&mut self, op: &str, count: usize) -> Result<()> {
        let Rank { comm, send, recv, registered, bf16, contestant, stream, line } = self;
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
            _ => match (op, registered) {
                ("all_reduce", Some(memory)) => comm.all_reduce(&mut memory[..count], ReduceOp::Sum)?,
                ("all_reduce", None) => comm.all_reduce(recv, ReduceOp::Sum)?,
                ("barrier", _) => comm.barrier()?,
                ("broadcast", _) => comm.broadcast(send, 0)?,
                ("all_gather", _) => comm.all_gather(&send[..block], recv)?,
                ("reduce_scatter", _) => comm.reduce_scatter(send, &mut recv[..block], ReduceOp::Sum)?,
                ("all_to_all", _) => comm.all_to_all(send, recv)?,
                (op, _) => return Err(format!("{op} is unknown").into()),
            },
        }
        std::hint::black_box(recv);
        Ok(())
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

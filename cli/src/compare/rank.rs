//! A rank of kolo, or of a bound of the machine, in a comparison.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use clap::Args as ClapArgs;
use kolo::{Communicator, ReduceOp, Registered, Transport, bf16};

use super::contestant::Contestant;

/// Arguments of a rank that `kolo compare` starts.
#[derive(ClapArgs)]
pub(crate) struct Args {
    contestant: String,
    /// Where questions come from. Without it, the rank waits for the others in one barrier and ends.
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

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

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
    /// Of `kolo-bf16`, which has as many bytes as the others.
    bf16: Vec<bf16>,
    contestant: Contestant,
    /// To the rank with which this one makes a pair.
    stream: Option<TcpStream>,
    line: Option<SharedLine>,
}

impl Rank {
    fn new(contestant: Contestant, socket: &Path) -> Result<Rank> {
        let comm = connect(contestant)?;
        let stream = if contestant == Contestant::Exchange { pair(&comm)? } else { None };
        let line = if contestant == Contestant::RoundTrip && comm.rank() < 2 { Some(SharedLine::open(socket)?) } else { None };
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

    /// Nanoseconds of one call, of each iteration.
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
        let mut times = Vec::with_capacity(iters as usize);
        for iteration in 0..warmup + iters {
            // Written anew, so that no call finds its data where the last one left it.
            match &mut self.registered {
                Some(memory) => memory[..count].fill(0.0),
                None if self.contestant == Contestant::KoloBf16 => self.bf16[..2 * count].fill(bf16::ZERO),
                None if op == "all_reduce" => self.recv[..count].fill(0.0),
                None => self.send[..count].fill(0.0),
            }
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

/// Fails unless all ranks get the same bits of sums that depend on the order in which they are rounded.
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

/// A copy past the caches, where the processor has instructions for it.
fn stream_copy(from: &[f32], to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().addr().is_multiple_of(16) {
        use std::arch::x86_64::{_mm_loadu_ps, _mm_sfence, _mm_stream_ps};
        let (fours, rest) = to.as_chunks_mut::<4>();
        let (from_fours, from_rest) = from.as_chunks::<4>();
        for (to, from) in fours.iter_mut().zip(from_fours) {
            // SAFETY: four elements of each; where all begin is a multiple of 16, so this is one.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
        }
        rest.copy_from_slice(from_rest);
        // SAFETY: every processor of this kind has it.
        unsafe { _mm_sfence() };
        return;
    }
    to.copy_from_slice(from);
}

/// A TCP connection between ranks 0 and 1, 2 and 3, and so on. The last of an odd number has none.
fn pair(comm: &Communicator) -> Result<Option<TcpStream>> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut ports = vec![0; ranks];
    comm.all_gather(&[listener.local_addr()?.port()], &mut ports)?;
    let peer = rank ^ 1;
    if peer >= ranks {
        return Ok(None);
    }
    let stream = if rank < peer { listener.accept()?.0 } else { TcpStream::connect((Ipv4Addr::LOCALHOST, ports[peer]))? };
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let socket = socket2::SockRef::from(&stream);
    // What is quickest inside a machine: a queue that stays in the caches, and no pacing.
    socket.set_send_buffer_size(1 << 20)?;
    socket.set_recv_buffer_size(1 << 20)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_congestion(b"reno")?;
    comm.barrier()?;
    Ok(Some(stream))
}

/// Sends all of one and receives all of the other, spinning.
fn exchange(stream: &mut TcpStream, send: &[f32], recv: &mut [f32]) -> Result<()> {
    // SAFETY: floats are bytes, of any value.
    let (send, recv) = unsafe { (send.align_to::<u8>().1, recv.align_to_mut::<u8>().1) };
    let (mut sent, mut received) = (0, 0);
    let done = |result: std::io::Result<usize>| match result {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
        result => result,
    };
    while sent < send.len() || received < recv.len() {
        if sent < send.len() {
            sent += done(stream.write(&send[sent..]))?;
        }
        if received < recv.len() {
            received += done(stream.read(&mut recv[received..]))?;
        }
    }
    Ok(())
}

/// A cache line that two processes share.
struct SharedLine {
    turn: &'static AtomicU32,
}

impl SharedLine {
    fn open(socket: &Path) -> Result<SharedLine> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let path = socket.with_file_name("line");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(4096)?;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing. It stays until the process ends, and is
        // touched only through the atomic.
        let turn = unsafe {
            let base = mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?;
            &*base.cast::<AtomicU32>()
        };
        Ok(SharedLine { turn })
    }

    /// There and back.
    fn round_trip(&self, rank: usize) {
        let mine = rank as u32;
        while self.turn.load(Ordering::Acquire) != mine {
            std::hint::spin_loop();
        }
        self.turn.store(1 - mine, Ordering::Release);
    }
}

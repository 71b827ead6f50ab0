//! Bounds of the machine, such as a copy of memory. A comparison measures them beside the
//! libraries.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use kolo::Communicator;

use super::system;

pub(super) type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Copies with non-temporal stores, where the processor has them.
pub(super) fn stream_copy(from: &[f32], to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().addr().is_multiple_of(16) {
        use std::arch::x86_64::{_mm_loadu_ps, _mm_sfence, _mm_stream_ps};
        let (fours, rest) = to.as_chunks_mut::<4>();
        let (from_fours, from_rest) = from.as_chunks::<4>();
        for (to, from) in fours.iter_mut().zip(from_fours) {
            // SAFETY: both slices have the four elements. The destination is aligned to 16 bytes:
            // the buffer's start is, and each step advances by 16 bytes.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
        }
        rest.copy_from_slice(from_rest);
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() };
        return;
    }
    to.copy_from_slice(from);
}

/// Opens a TCP connection between ranks 0 and 1, 2 and 3, and so on. With an odd number of ranks,
/// the last has none.
pub(super) fn pair(comm: &Communicator) -> Result<Option<TcpStream>> {
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
    // The quickest settings inside a machine: a queue that stays in the caches, and no pacing.
    socket.set_send_buffer_size(1 << 20)?;
    socket.set_recv_buffer_size(1 << 20)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_congestion(b"reno")?;
    comm.barrier()?;
    Ok(Some(stream))
}

/// Sends all of `send` and receives all of `recv` at the same time, spinning.
pub(super) fn exchange(stream: &mut TcpStream, send: &[f32], recv: &mut [f32]) -> Result<()> {
    // SAFETY: every bit pattern is a valid float and valid bytes, and the length is that of the
    // slice.
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
pub(super) struct SharedLine {
    words: &'static [AtomicU32; 2],
}

impl SharedLine {
    /// Maps the cache line of that name. All processes that open it share it, and open it before one
    /// of them uses it.
    pub(super) fn open(socket: &Path, name: &str) -> Result<SharedLine> {
        const LEN: usize = 4096;
        let path = socket.with_file_name(format!("{name}-line"));
        let open = || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            // The file gets its memory or its place on the disk here. If there is none, an access to
            // the mapping would end the process.
            file.write_all(&[0; LEN])?;
            system::map(&file, LEN)
        };
        let base = open().map_err(|error| format!("{}: {error}", path.display()))?;
        // SAFETY: the mapping has more bytes than the words, at the start of a page. It stays until
        // the process ends, and only the atomics access it.
        Ok(SharedLine { words: unsafe { &*base.cast() } })
    }

    /// Moves the line from rank 0 to rank 1 and back.
    pub(super) fn round_trip(&self, rank: usize) {
        let [turn, _] = self.words;
        let mine = rank as u32;
        while turn.load(Ordering::Acquire) != mine {
            std::hint::spin_loop();
        }
        turn.store(1 - mine, Ordering::Release);
    }

    /// Returns when all ranks have called it. Until then they sleep: no rank spins or yields.
    pub(super) fn barrier(&self, ranks: usize) -> Result<()> {
        let [arrived, passed] = self.words;
        let before = passed.load(Ordering::Acquire);
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == ranks as u32 {
            arrived.store(0, Ordering::Relaxed);
            passed.fetch_add(1, Ordering::Release);
            system::wake_all(passed)?;
            return Ok(());
        }
        while passed.load(Ordering::Acquire) == before {
            system::sleep_on(passed, before)?;
        }
        Ok(())
    }
}

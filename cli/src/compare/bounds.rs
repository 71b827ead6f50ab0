//! What the machine can do at best, and what kolo is measured against beside other libraries.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use kolo::Communicator;

use super::rank::Result;

/// A copy past the caches, where the processor has instructions for it.
pub(super) fn stream_copy(from: &[f32], to: &mut [f32]) {
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
    // What is quickest inside a machine: a queue that stays in the caches, and no pacing.
    socket.set_send_buffer_size(1 << 20)?;
    socket.set_recv_buffer_size(1 << 20)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_congestion(b"reno")?;
    comm.barrier()?;
    Ok(Some(stream))
}

/// Sends all of one and receives all of the other, spinning.
pub(super) fn exchange(stream: &mut TcpStream, send: &[f32], recv: &mut [f32]) -> Result<()> {
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
pub(super) struct SharedLine {
    words: &'static [AtomicU32; 2],
}

impl SharedLine {
    /// The one of that name, for whoever opens it.
    pub(super) fn open(socket: &Path, name: &str) -> Result<SharedLine> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let path = socket.with_file_name(format!("{name}-line"));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(4096)?;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing. It stays until the process ends, and is
        // touched only through the atomics.
        let words = unsafe {
            let base = mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?;
            &*base.cast::<[AtomicU32; 2]>()
        };
        Ok(SharedLine { words })
    }

    /// Ranks 0 and 1 hand the line to each other: there and back.
    pub(super) fn round_trip(&self, rank: usize) {
        let [turn, _] = self.words;
        let mine = rank as u32;
        while turn.load(Ordering::Acquire) != mine {
            std::hint::spin_loop();
        }
        turn.store(1 - mine, Ordering::Release);
    }

    /// Returns when all ranks have called it. They sleep meanwhile: none spins, none yields.
    #[cfg(target_os = "linux")]
    pub(super) fn barrier(&self, ranks: usize) -> Result<()> {
        use rustix::io::Errno;
        use rustix::thread::futex::{Flags, wait, wake};
        let [arrived, passed] = self.words;
        let before = passed.load(Ordering::Acquire);
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == ranks as u32 {
            arrived.store(0, Ordering::Relaxed);
            passed.fetch_add(1, Ordering::Release);
            wake(passed, Flags::empty(), ranks as u32)?;
            return Ok(());
        }
        while passed.load(Ordering::Acquire) == before {
            match wait(passed, Flags::empty(), before, None) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn barrier(&self, _ranks: usize) -> Result<()> {
        Err("a futex is Linux's".into())
    }
}

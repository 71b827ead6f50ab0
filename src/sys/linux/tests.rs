use std::io;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::{LocalListener, LocalStream, Mapping, page_size};
use crate::sys::unix::mapping::{MOST_RESERVED, map_pages_private, reserve_in_pieces, write_every_page};

/// Returns two mappings of the same memory, as two processes have them.
fn twice(len: usize) -> [Mapping; 2] {
    let one = Mapping::create(len, len).unwrap();
    let other = one.again().unwrap();
    [one, other]
}

fn read(mapping: &Mapping, at: usize) -> u8 {
    assert!(at < mapping.len);
    // SAFETY: the byte is within the mapping, which no other thread uses.
    unsafe { mapping.base.as_ptr().add(at).read_volatile() }
}

fn write(mapping: &Mapping, at: usize, value: u8) {
    assert!(at < mapping.len);
    // SAFETY: as above.
    unsafe { mapping.base.as_ptr().add(at).write_volatile(value) }
}

/// A process that connects to a listener with a full queue gives up in time.
#[test]
fn a_full_queue_keeps_no_process_waiting_for_long() {
    let name = format!("kolo-queue-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match LocalStream::connect(&name, Instant::now() + Duration::from_millis(50)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100, "the queue is never full");
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    let absent = LocalStream::connect(&format!("{name}-other"), Instant::now() + Duration::from_secs(60));
    assert_eq!(absent.err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn writing_every_page_copies_it_where_populating_cannot() {
    let page = page_size();
    let [mine, theirs] = twice(2 * page);
    write(&theirs, page, 7);
    // SAFETY: as in `make_private`.
    unsafe {
        map_pages_private(mine.file().unwrap().as_fd(), mine.base, 2 * page, 0).unwrap();
        write_every_page(mine.base, 2 * page);
    }
    (0..2).for_each(|n| write(&theirs, n * page, 9));
    assert_eq!([0, 1].map(|n| read(&mine, n * page)), [0, 7]);
}

/// A thread loses no write, and reads only its own values.
#[test]
fn other_threads_use_memory_while_it_is_made_private() {
    let page = page_size();
    let len = 512 * page;
    let [mine, _theirs] = twice(len);
    // SAFETY: the slice is within the mapping, which outlives the scope. Only the bystander
    // accesses it.
    let memory = unsafe { std::slice::from_raw_parts(mine.base.as_ptr().cast::<AtomicU64>(), len / 8) };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let bystander = scope.spawn(|| {
            let (mut wrong, mut rounds) = (0, 0);
            while !is_over.load(Ordering::Relaxed) || rounds < 2 {
                rounds += 1;
                memory.iter().for_each(|word| word.store(rounds, Ordering::Relaxed));
                wrong += memory.iter().filter(|word| word.load(Ordering::Relaxed) != rounds).count();
            }
            wrong
        });
        (0..len).step_by(page).for_each(|at| mine.make_private(at..at + page).unwrap());
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(bystander.join().unwrap(), 0);
    });
}

/// Before Linux 6.10, a call that a signal interrupts has reserved nothing.
#[test]
fn reserving_goes_on_when_signals_interrupt_and_ends_at_the_deadline() {
    let (page, late) = (page_size(), Instant::now() + Duration::from_secs(600));
    let range = 3 * page..MOST_RESERVED * 5 / 2 + 7;
    for longest in [page, 10 * page, usize::MAX] {
        let mut end = range.start;
        let reserved = reserve_in_pieces(range.clone(), late, |piece| {
            assert!(piece.start == end && piece.len() <= MOST_RESERVED);
            if piece.len() > longest {
                return Err(Errno::INTR);
            }
            end = piece.end;
            Ok(())
        });
        assert!(reserved.is_ok() && end == range.end, "{reserved:?}, {end}");
    }
    let mut calls = 0;
    let mut now = |outcome: rustix::io::Result<()>| {
        reserve_in_pieces(range.clone(), Instant::now(), |_| {
            calls += 1;
            outcome
        })
    };
    assert_eq!(now(Err(Errno::INTR)).unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert_eq!(now(Ok(())).unwrap_err().kind(), io::ErrorKind::TimedOut);
    assert_eq!(now(Err(Errno::NOSPC)).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(calls, 3);
}

/// The listener's thread hands memory over. If it waited for the reservation, the rank would answer
/// no peer meanwhile.
#[test]
fn memory_is_handed_over_while_it_is_reserved() {
    const LEN: usize = 256 << 20;
    let name = format!("kolo-test-{}-handed-over", std::process::id());
    let listener = LocalListener::bind(&name).unwrap();
    let deadline = Instant::now() + Duration::from_secs(600);
    let peer = LocalStream::connect(&name, deadline).unwrap();
    let stream = listener.accept().unwrap();
    struct Shared(Mapping);
    // SAFETY: the test calls only methods that touch no memory, and `Region` shares mappings in the
    // same way.
    unsafe impl Sync for Shared {}
    let shared = Shared(Mapping::create(LEN, LEN).unwrap());
    let (shared, mapping) = (&shared, &shared.0);
    let reserved = || fstat(mapping.file().unwrap().as_fd()).unwrap().st_blocks as usize * 512;
    // On a busy machine, this thread may not run before the memory is reserved.
    let was_done_meanwhile = (0..50).any(|_| {
        mapping.release(0..LEN);
        let seen = std::thread::scope(|scope| {
            scope.spawn(move || {
                let Shared(mapping) = shared;
                mapping.reserve(0..LEN, deadline).unwrap();
            });
            while reserved() == 0 {}
            mapping.hand_over(&stream).unwrap();
            reserved()
        });
        Mapping::take_over(&peer, LEN, deadline).unwrap();
        seen < LEN
    });
    assert!(was_done_meanwhile, "the memory was handed over only after all of it was reserved");
}

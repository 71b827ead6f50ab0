//! Every link carries every byte, in order, in both directions at once, however the calls cut the
//! stream.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use super::memory::{Hub, MemoryOpener};
#[cfg(all(target_os = "linux", not(miri)))]
use super::rail_link::RailLink;
use super::{ALIGN, Link, Mesh, tcp};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::config::CopyMode;
use crate::error::Cause;
use crate::types::mix;

fn memory_pair() -> [Box<dyn Link>; 2] {
    let hub = Arc::new(Hub::default());
    [0, 1].map(|rank| MemoryOpener { hub: hub.clone(), comm_id: 7, rank, copy_mode: CopyMode::Auto }.link(1 - rank))
}

fn tcp_pair(lanes: usize) -> [Box<dyn Link>; 2] {
    connections(lanes).map(tcp::link)
}

/// Returns both ends of some connections.
fn connections(lanes: usize) -> [Vec<crate::sys::TcpStream>; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pairs = (0..lanes).map(|_| {
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        [connected, accepted].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            let stream = crate::sys::TcpStream::from_std(stream);
            tcp::prepare(&stream).unwrap();
            stream
        })
    });
    let (connected, accepted) = pairs.map(|[connected, accepted]| (connected, accepted)).unzip();
    [connected, accepted]
}

#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
fn shm_pair(copy_mode: CopyMode) -> [Box<dyn Link>; 2] {
    use crate::sys::{LocalListener, LocalStream};
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("kolo-test-{}-{number}", std::process::id());
    let listener = LocalListener::bind(&name).unwrap();
    let stream = LocalStream::connect(&name, std::time::Instant::now() + Duration::from_secs(60)).unwrap();
    let offered = super::shm::offer(stream, copy_mode).unwrap();
    let accepted = listener.accept().unwrap();
    let region = super::shm::offered(&accepted).unwrap().expect("the memory was handed over before");
    [offered, super::shm::accept(accepted, region, copy_mode)]
}

/// Returns the length of a message, and whether it is read in place.
fn message(seed: u64, number: u64) -> (usize, bool) {
    let random = mix(seed, number);
    let most = if cfg!(miri) { 100 } else { [40, 1 << 10, 1 << 16, 1 << 20][random as usize % 4] };
    (1 + (random >> 8) as usize % most, random >> 7 & 1 == 0)
}

/// Returns bytes of the endless stream of a seed. It repeats after a prime number of words, so that
/// nothing which is out of place has the bytes of its place.
fn stream(seed: u64, from: u64, len: usize) -> Vec<u8> {
    const WORDS: u64 = 4093;
    thread_local!(static PERIODS: RefCell<BTreeMap<u64, Vec<u8>>> = const { RefCell::new(BTreeMap::new()) });
    PERIODS.with_borrow_mut(|periods| {
        let period = periods.entry(seed).or_insert_with(|| (0..WORDS).flat_map(|word| mix(seed, word).to_le_bytes()).collect());
        let mut bytes = Vec::with_capacity(len);
        let mut at = (from % period.len() as u64) as usize;
        while bytes.len() < len {
            let count = (period.len() - at).min(len - bytes.len());
            bytes.extend_from_slice(&period[at..at + count]);
            at = 0;
        }
        bytes
    })
}

/// Sends and receives `messages` messages at once, padded as in the engine, until all have been
/// sent and checked.
fn converse(link: &mut dyn Link, send_seed: u64, receive_seed: u64, messages: u64) {
    // The other end may have failed.
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    let padded = |len: usize| len.next_multiple_of(ALIGN);
    let (mut sending, mut sent_bytes) = (0, 0u64);
    let mut out: Vec<u8> = Vec::new();
    let mut offered = 0;
    let (mut receiving, mut received_bytes) = (0, 0u64);
    let mut into: Vec<u8> = Vec::new();
    let mut filled = 0;
    while sending < messages || receiving < messages {
        let is_late = std::time::Instant::now() >= deadline;
        assert!(!is_late, "{sending} messages sent, {receiving} received, of {messages}; {filled} bytes of the next one");
        if sending < messages {
            if out.is_empty() {
                let len = padded(message(send_seed, sending).0);
                out = stream(send_seed, sent_bytes, len);
            }
            let rest = RawSlice::of(&out[offered..]);
            let cut = mix(offered as u64, sending) as usize % (rest.len + 1);
            // SAFETY: `out` is borrowed for the call.
            offered += unsafe { link.send(&[rest.take(cut), rest.skip(cut)]) }.unwrap();
            if offered == out.len() {
                sent_bytes += out.len() as u64;
                (sending, offered) = (sending + 1, 0);
                out.clear();
            }
        }
        if receiving < messages {
            let (len, in_place) = message(receive_seed, receiving);
            if into.len() != padded(len) {
                into = vec![0; padded(len)];
            }
            let part = if in_place { link.peek(into.len() - filled).unwrap() } else { RawSlice::of::<u8>(&[]) };
            if part.len > 0 {
                assert_eq!(part.ptr as usize % ALIGN, (received_bytes as usize + filled) % ALIGN);
                let used = part.len - mix(part.len as u64, filled as u64) as usize % (part.len + 1) / 2;
                // SAFETY: the `part.len` bytes are valid until they are consumed.
                into[filled..filled + used].copy_from_slice(unsafe { std::slice::from_raw_parts(part.ptr, used) });
                link.consume(used);
                filled += used;
            } else {
                // SAFETY: `into` is borrowed for the call.
                filled += unsafe { link.receive(RawSliceMut::of(&mut into[filled..])) }.unwrap();
            }
            if filled == into.len() {
                let expected = stream(receive_seed, received_bytes, into.len());
                let wrong = || std::iter::zip(&into, &expected).position(|(got, expected)| got != expected);
                assert!(into == expected, "message {receiving}, byte {:?} of {len}", wrong());
                received_bytes += into.len() as u64;
                (receiving, filled) = (receiving + 1, 0);
            }
        }
        std::thread::yield_now();
    }
}

fn both_ways([mut a, mut b]: [Box<dyn Link>; 2]) {
    let messages = if cfg!(miri) { 6 } else { 200 };
    std::thread::scope(|scope| {
        scope.spawn(|| converse(&mut *a, 1, 2, messages));
        scope.spawn(|| converse(&mut *b, 2, 1, messages));
    });
}

/// A receiver reads the bytes that were sent before the end of a link, and then sees the end.
fn ends([mut a, mut b]: [Box<dyn Link>; 2]) {
    let words = [7u8; 64];
    // SAFETY: `words` is borrowed for the call.
    assert_eq!(unsafe { a.send(&[RawSlice::of(&words)]) }, Ok(64));
    drop(a);
    let mut got = [0u8; 64];
    let mut filled = 0;
    while filled < 64 {
        // SAFETY: `got` is borrowed for the call.
        filled += unsafe { b.receive(RawSliceMut::of(&mut got[filled..])) }.unwrap();
    }
    assert_eq!(got, words);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let end = loop {
        // SAFETY: `got` is borrowed for the call.
        match unsafe { b.receive(RawSliceMut::of(&mut got)) } {
            Ok(0) if std::time::Instant::now() < deadline => {
                b.disarm(true);
                std::thread::yield_now();
            }
            end => break end,
        }
    };
    assert_eq!(end, Err(Cause::Closed));
}

#[test]
fn memory_links() {
    both_ways(memory_pair());
    ends(memory_pair());
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no sockets")]
fn tcp_links() {
    both_ways(tcp_pair(1));
    ends(tcp_pair(1));
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no sockets")]
fn striped_links() {
    for lanes in [2, 3, 7] {
        both_ways(tcp_pair(lanes));
    }
    ends(tcp_pair(3));
}

#[test]
#[cfg(all(any(target_os = "linux", target_os = "macos"), not(miri)))]
fn shm_links() {
    for copy_mode in [CopyMode::Auto, CopyMode::Staged, CopyMode::Streamed] {
        both_ways(shm_pair(copy_mode));
        ends(shm_pair(copy_mode));
    }
}

/// A mesh of two ranks in which one sleeps until the other sends.
#[test]
#[cfg_attr(miri, ignore = "Miri has no poll")]
fn a_sleeper_is_woken_by_bytes_and_by_room() {
    let hub = Arc::new(Hub::default());
    let mesh =
        |rank| Mesh::new(2, Box::new(MemoryOpener { hub: hub.clone(), comm_id: 1, rank, copy_mode: CopyMode::Auto })).unwrap();
    let (mut a, mut b) = (mesh(0), mesh(1));
    let rounds = 2000u64;
    let long = std::time::Duration::from_secs(60);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // This is far more than the ring holds, so that both sides have to sleep.
            let block = vec![5u8; 10_000];
            for _ in 0..rounds {
                let mut rest = RawSlice::of(&block);
                while rest.len > 0 {
                    let link = a.link(1).unwrap().unwrap();
                    // SAFETY: `rest` is in a vector that outlives the call.
                    let count = unsafe { link.send(&[rest]) }.unwrap();
                    rest = rest.skip(count);
                    if count == 0 {
                        a.sleep([(1, true, false)].into_iter(), long).unwrap();
                    }
                }
            }
        });
        scope.spawn(|| {
            let mut total = 0;
            let mut block = vec![0u8; 7000];
            while total < rounds as usize * 10_000 {
                let link = b.link(0).unwrap().unwrap();
                // SAFETY: `block` is borrowed for the call.
                let count = unsafe { link.receive(RawSliceMut::of(&mut block)) }.unwrap();
                assert!(block[..count].iter().all(|&byte| byte == 5));
                total += count;
                if count == 0 {
                    b.sleep([(0, false, true)].into_iter(), long).unwrap();
                }
            }
        });
    });
}

#[test]
fn garbage_in_a_ring_is_an_error() {
    use super::ring;
    use crate::sys::Region;
    for (offset, garbage) in [(0, u64::MAX), (0, 1 << 40), (8, 1 << 40), (128, 1 << 40)] {
        let region = Arc::new(Region::heap(ring::pair_size(ring::GROWN)));
        let (mut producer, mut consumer) = ring::pair(region.clone(), 0, CopyMode::Auto);
        for ring in [0, region.len() / 2] {
            // SAFETY: the counter is within the region and aligned.
            unsafe { region.at(ring + offset).cast::<u64>().write(garbage) };
        }
        let read = consumer.peek(1).err();
        let written = (0..40).find_map(|_| producer.push(&[RawSlice::of(&[0u8; 8000])]).err());
        let found = read.or(written);
        assert!(matches!(found, Some(Cause::Corrupt(_))), "{garbage} at {offset}: {found:?}");
    }
}

/// A device between the ranks closes one connection of a link while the others live: the bytes on
/// it will not come.
#[test]
#[cfg_attr(miri, ignore = "Miri has no sockets")]
fn a_link_of_which_one_connection_is_cut_is_broken() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut others = Vec::new();
    let lanes = (0..2).map(|_| {
        let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        others.push(listener.accept().unwrap().0);
        connected.set_nonblocking(true).unwrap();
        crate::sys::TcpStream::from_std(connected)
    });
    let mut link = tcp::link(lanes.collect());
    others[0].shutdown(std::net::Shutdown::Both).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let mut byte = [0u8];
    let cause = loop {
        // SAFETY: the byte is borrowed for the call.
        match unsafe { link.receive(RawSliceMut::of(&mut byte)) } {
            Ok(count) => assert_eq!(count, 0),
            Err(cause) => break cause,
        }
        assert!(std::time::Instant::now() < deadline, "the link waits for ever");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(matches!(cause, Cause::Broken(_)), "{cause:?}");
}

/// Both ends of a link over rails, and for each rail what cuts it at either end.
#[cfg(all(target_os = "linux", not(miri)))]
fn rail_pair(rails: usize) -> ([RailLink; 2], Vec<[TcpStream; 2]>) {
    use std::os::fd::AsFd;
    let ends = connections(rails);
    let handle = |stream: &crate::sys::TcpStream| TcpStream::from(stream.as_fd().try_clone_to_owned().unwrap());
    let cuts = std::iter::zip(&ends[0], &ends[1]).map(|(a, b)| [handle(a), handle(b)]).collect();
    let [a, b] = ends;
    ([RailLink::new(a, 0, 1), RailLink::new(b, 0, 0)], cuts)
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn rail_links() {
    for rails in [1, 2, 3] {
        both_ways(rail_pair(rails).0.map(|link| Box::new(link) as Box<dyn Link>));
        let (links, cuts) = rail_pair(rails);
        // The handles would keep the connections open.
        drop(cuts);
        ends(links.map(|link| Box::new(link) as Box<dyn Link>));
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
proptest::proptest! {
    // The moments of the cuts differ each time, so a smaller case shows nothing.
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 24, max_shrink_iters: 0, ..Default::default() })]

    /// Whichever rails are cut, at whichever end and moment, the streams arrive as long as one is left.
    #[test]
    fn streams_survive_cut_rails(
        rails in 2usize..5,
        seed: u64,
        cuts in proptest::collection::vec((0usize..4, 0usize..2, 0u64..60), 1..4),
    ) {
        // The links live until all is cut: one that was dropped sends nothing again.
        let ([mut a, mut b], handles) = rail_pair(rails);
        let (there, back) = (mix(seed, 1), mix(seed, 2));
        std::thread::scope(|scope| {
            scope.spawn(|| converse(&mut a, there, back, 100));
            scope.spawn(|| converse(&mut b, back, there, 100));
            let mut cut = std::collections::BTreeSet::new();
            for (rail, end, after) in cuts {
                let rail = rail % rails;
                if cut.len() + 1 < rails || cut.contains(&rail) {
                    cut.insert(rail);
                    std::thread::sleep(Duration::from_millis(after));
                    // It may be cut at the other end already.
                    let _ = handles[rail][end].shutdown(std::net::Shutdown::Both);
                }
            }
        });
        // Each end waits until the other's system has what it sent again.
        std::thread::scope(|scope| {
            scope.spawn(|| drop(a));
            scope.spawn(|| drop(b));
        });
    }
}

/// Sends until the rails hold all they can; returns how much that is. The bytes are those of `byte`.
#[cfg(all(target_os = "linux", not(miri)))]
fn fill(link: &mut RailLink, sent: u64) -> u64 {
    let mut total = 0;
    loop {
        let block = stream(9, sent + total, 1 << 20);
        // SAFETY: the block is borrowed for the call.
        let count = unsafe { link.send(&[RawSlice::of(&block)]) }.unwrap();
        if count == 0 {
            return total;
        }
        total += count as u64;
    }
}

/// The sender is not in the library when a rail fails.
#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn what_a_cut_rail_held_arrives_without_another_call_of_the_sender() {
    let ([mut a, mut b], cuts) = rail_pair(2);
    let total = fill(&mut a, 0);
    cuts[1][0].shutdown(std::net::Shutdown::Both).unwrap();
    // The peer's system acknowledges no more bytes of this connection.
    cuts[1][1].shutdown(std::net::Shutdown::Both).unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let (mut got, mut arrived) = (vec![0u8; total as usize], 0);
    while arrived < got.len() {
        // SAFETY: `got` is borrowed for the call.
        let count = unsafe { b.receive(RawSliceMut::of(&mut got[arrived..])) }.unwrap();
        arrived += count;
        assert!(std::time::Instant::now() < deadline, "{arrived} of {total} bytes arrived");
        if count == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(got == stream(9, 0, got.len()));
    // The receiver may notice later than its last byte.
    while (a.lost(), b.lost()) != (1, 1) {
        assert!(std::time::Instant::now() < deadline, "lost {} and {}", a.lost(), b.lost());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What is sent again may have arrived before. The receiver may have left the library then, and reads
/// none of it.
#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_sender_does_not_wait_for_what_it_sends_again() {
    let [sending, receiving] = connections(4);
    // The last rail takes little of what the others held.
    socket2::SockRef::from(&receiving[3]).set_recv_buffer_size(64 << 10).unwrap();
    let (mut a, mut b) = (RailLink::new(sending, 0, 1), RailLink::new(receiving, 0, 0));
    let mut sent = fill(&mut a, 0);
    let all = a.assigned();
    (0..3).for_each(|at| a.lose(at, super::rail::Loss::Failed(Cause::Closed)));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let (mut got, mut arrived) = (vec![0u8; all as usize], 0);
    while arrived < got.len() || sent < all {
        if arrived < got.len() {
            // SAFETY: `got` is borrowed for the call.
            arrived += unsafe { b.receive(RawSliceMut::of(&mut got[arrived..])) }.unwrap();
        } else {
            let rest = stream(9, sent, (all - sent) as usize);
            // SAFETY: `rest` is borrowed for the call.
            sent += unsafe { a.send(&[RawSlice::of(&rest)]) }.unwrap() as u64;
        }
        assert!(std::time::Instant::now() < deadline, "{sent} bytes sent and {arrived} received of {all}");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(got == stream(9, 0, got.len()));
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_link_without_rails_is_broken() {
    let ([mut a, mut b], cuts) = rail_pair(2);
    for cut in &cuts {
        cut.iter().for_each(|end| end.shutdown(std::net::Shutdown::Both).unwrap());
    }
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let mut bytes = [0u8; 64];
    // SAFETY: the bytes are borrowed for the calls.
    while unsafe { a.send(&[RawSlice::of(&bytes)]) }.is_ok() || unsafe { b.receive(RawSliceMut::of(&mut bytes)) }.is_ok() {
        assert!(std::time::Instant::now() < deadline, "the link lives");
    }
}

/// The ends of a link may have been opened at different times, with different rails.
#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn what_goes_to_a_rail_that_the_peer_does_not_have_arrives() {
    let [sending, mut receiving] = connections(2);
    let _unread = receiving.pop();
    let (mut a, mut b) = (RailLink::new(sending, 0, 1), RailLink::new(receiving, 1, 0));
    let data = stream(9, 0, 4 << 20);
    let (mut sent, mut got, mut arrived) = (0, vec![0; data.len()], 0);
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while arrived < data.len() {
        // SAFETY: `data` and `got` are borrowed for the calls.
        sent += unsafe { a.send(&[RawSlice::of(&data[sent..])]) }.unwrap();
        // SAFETY: as above.
        arrived += unsafe { b.receive(RawSliceMut::of(&mut got[arrived..])) }.unwrap();
        assert!(std::time::Instant::now() < deadline, "{sent} bytes sent and {arrived} received of {}", data.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(got == data && (a.lost(), b.lost()) == (1, 0));
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_link_fails_for_the_reason_of_its_last_rail() {
    let ([mut a, b], cuts) = rail_pair(2);
    a.lose(1, super::rail::Loss::Failed(Cause::Broken(std::io::ErrorKind::TimedOut)));
    // The handles would keep the connections open.
    drop((b, cuts));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let cause = loop {
        // SAFETY: the bytes are borrowed for the call.
        match unsafe { a.send(&[RawSlice::of(&[0u8; 64])]) } {
            Ok(_) => assert!(std::time::Instant::now() < deadline, "the link lives"),
            Err(cause) => break cause,
        }
    };
    assert_eq!(cause, Cause::Closed);
}

/// The receiver sets aside what is ahead of a stripe that a silent rail has. If the sender went on
/// for ever, that stripe would come behind more than the receiver takes.
#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_sender_does_not_run_far_ahead_of_a_silent_rail() {
    const CHUNK: usize = 1 << 20;
    let ([mut sending, mut receiving], [silent, ends]) = (connections(1), connections(2));
    // The first end takes less than a stripe. Nothing comes from the other one.
    socket2::SockRef::from(&ends[0]).set_recv_buffer_size(4096).unwrap();
    let [to_nowhere, from_nowhere] = <[_; 2]>::try_from(silent).unwrap();
    sending.push(to_nowhere);
    receiving.push(from_nowhere);
    let (mut a, mut b) = (RailLink::new(sending, 0, 1), RailLink::new(receiving, 0, 0));
    let data: Vec<u8> = (0..(96u64 << 20) / 8).flat_map(|word| mix(9, word).to_le_bytes()).collect();
    let (mut sent, mut chunk, mut filled, mut arrived, mut pauses) = (0, vec![0; CHUNK], 0, 0, 0);
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    while arrived < data.len() {
        let before = (a.assigned(), filled);
        // SAFETY: `data` and `chunk` are borrowed for the calls.
        sent += unsafe { a.send(&[RawSlice::of(&data[sent..])]) }.unwrap();
        // SAFETY: as above.
        filled += unsafe { b.receive(RawSliceMut::of(&mut chunk[filled..])) }.unwrap();
        if filled == CHUNK {
            assert!(chunk == data[arrived..arrived + CHUNK], "wrong bytes after {arrived}");
            (arrived, filled, pauses) = (arrived + CHUNK, 0, 0);
        } else if (a.assigned(), filled) == before {
            std::thread::sleep(Duration::from_millis(1));
            pauses += 1;
        } else {
            pauses = 0;
        }
        if a.lost() == 0 {
            assert!(a.assigned() <= (64 << 20) + (256 << 10), "{} bytes while {arrived} had arrived", a.assigned());
            if a.assigned() >= 63 << 20 && pauses > 200 {
                a.lose(1, super::rail::Loss::Silent);
            }
        }
        assert!(std::time::Instant::now() < deadline, "{arrived} bytes arrived, {} were sent", a.assigned());
    }
    assert_eq!((sent, a.lost()), (data.len(), 1));
}

/// A rank closes a rail on which bytes lie that it has not read, right after it has sent. The other
/// rank has not read what it sent.
#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_link_that_lost_a_rail_delivers_before_it_closes() {
    let [first, second] = connections(2);
    first.iter().for_each(|stream| socket2::SockRef::from(stream).set_recv_buffer_size(64 << 10).unwrap());
    let (mut a, mut b) = (RailLink::new(first, 0, 1), RailLink::new(second, 0, 0));
    assert!(fill(&mut a, 0) > 0);
    b.lose(1, super::rail::Loss::Silent);
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let data = stream(9, 0, 32 << 20);
    let total = fill(&mut b, 0) as usize;
    // The link takes the rest of the stripe that it has begun.
    let (mut given, mut got, mut arrived) = (total, vec![0; data.len()], 0);
    while given < b.assigned() as usize {
        let rest = RawSlice::of(&data[given..b.assigned() as usize]);
        // SAFETY: the data and `got` are borrowed for the calls.
        given += unsafe { b.send(&[rest]) }.unwrap();
        // SAFETY: as above.
        arrived += unsafe { a.receive(RawSliceMut::of(&mut got[arrived..])) }.unwrap();
        assert!(std::time::Instant::now() < deadline, "{given} bytes were taken");
    }
    std::thread::scope(|scope| {
        scope.spawn(|| drop(b));
        // A link that does not wait is closed by now, and this resets it.
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: the data is borrowed for the call.
        let _ = unsafe { a.send(&[RawSlice::of(&data[..1 << 20])]) };
        while arrived < given {
            // SAFETY: `got` is borrowed for the call.
            arrived += unsafe { a.receive(RawSliceMut::of(&mut got[arrived..])) }.unwrap();
            assert!(std::time::Instant::now() < deadline, "{arrived} of {given} bytes arrived");
        }
    });
    assert!(got[..given] == data[..given], "wrong bytes");
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn rails_that_did_not_connect_are_counted() {
    let [streams, _others] = connections(1);
    let table = crate::trace::LinkTable::default();
    let (kind, traffic) = RailLink::new(streams, 2, 1).traffic().unwrap();
    table.opened(1, kind, traffic);
    assert_eq!(table.read(9)[0].lost_rails, 2);
}

//! Tests of memory that processes share and of the sockets through which they hand it over: of those of
//! the system, and on Linux also of those that macOS has.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::mm::munmap;

use super::{Mapping, ends, late};
use crate::sys::available_memory;
use crate::sys::platform::page_size;

fn read(mapping: &Mapping, at: usize) -> u8 {
    // SAFETY: tests read within the mapping, which no other thread uses.
    unsafe { mapping.base().add(at).read_volatile() }
}

fn write(mapping: &Mapping, at: usize, value: u8) {
    // SAFETY: as above.
    unsafe { mapping.base().add(at).write_volatile(value) }
}

#[test]
fn a_socket_carries_bytes_and_ends() {
    let [one, other] = ends("bytes");
    #[cfg(unix)]
    assert!(one.is_of_this_user() && other.is_of_this_user());
    one.until(late()).write_all(b"hello").unwrap();
    let mut bytes = [0; 5];
    other.until(late()).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(other.until(soon).read(&mut bytes).unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(one);
    let left = other.until(late()).read(&mut bytes);
    if cfg!(windows) {
        assert!(left.map_or(true, |count| count == 0));
    } else {
        assert_eq!(left.unwrap(), 0);
    }
    // Without SIGPIPE, which would end the test. (Rust ignores it; a host in C need not.)
    #[cfg(unix)]
    assert_eq!((&other).write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn memory_that_was_handed_over_is_the_same() {
    let [one, other] = ends("memory");
    let page = page_size();
    let mine = Mapping::create(3 * page, 3 * page).unwrap();
    mine.hand_over(&one).unwrap();
    // The receiver has a descriptor or a handle of its own, however late it takes the memory over.
    mine.close();
    let theirs = Mapping::take_over(&other, 3 * page, late()).unwrap();
    write(&mine, 2 * page + 5, 9);
    assert_eq!((read(&theirs, 2 * page + 5), read(&theirs, 0)), (9, 0));
    theirs.release(2 * page..3 * page);
    assert_eq!(read(&mine, 2 * page + 5), 0);
}

#[test]
fn missing_and_short_memory_are_told_apart() {
    let [one, other] = ends("missing");
    let page = page_size();
    one.until(late()).write_all(&[0]).unwrap();
    let error = Mapping::take_over(&other, page, late()).err().expect("no memory came");
    assert_eq!(error.to_string(), "the leader of the host has no memory to share");
    Mapping::create(page, page).unwrap().hand_over(&one).unwrap();
    let error = Mapping::take_over(&other, 1 << 20, late()).err().expect("the memory is too short");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let now = Instant::now();
    assert_eq!(Mapping::take_over(&other, page, now).err().unwrap().kind(), io::ErrorKind::TimedOut);
}

#[test]
fn an_extension_outlives_the_process_that_made_it() {
    const STEP: usize = 1 << 20;
    let one = Mapping::create(STEP, 8 * STEP).unwrap();
    let other = one.again().unwrap();
    let [near, far] = [STEP..2 * STEP, 3 * STEP..4 * STEP];
    assert_eq!(other.extension(far.clone()).err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
    let made = one.extend(far.clone(), late()).unwrap();
    write(&made, 7, 1);
    drop((one, made));
    let found = other.extension(far.clone()).unwrap();
    assert_eq!(read(&found, 7), 1);
    // A range before it does not change it.
    let before = other.extend(near, late()).unwrap();
    write(&before, 7, 2);
    assert_eq!((read(&found, 7), read(&other.extension(far).unwrap(), 7)), (1, 1));
    // Beyond the end of the memory.
    assert_eq!(other.extension(1 << 40..(1 << 40) + STEP).err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
}

#[test]
fn more_memory_than_there_is_is_refused() {
    assert!(available_memory().unwrap() > 1 << 20);
    let error = Mapping::create(1 << 50, 1 << 50).err().expect("no machine has a pebibyte");
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    let page = page_size();
    let memory = Mapping::create(4 * page, 4 * page).unwrap();
    memory.reserve(0..page, Instant::now()).unwrap();
    memory.reserve(page..4 * page, late()).unwrap();
    assert_eq!(read(&memory, 3 * page), 0);
}

#[test]
#[cfg(unix)]
fn private_memory_keeps_its_content_and_others_do_not_write_to_it() {
    let page = page_size();
    let mine = Mapping::create(3 * page, 3 * page).unwrap();
    let theirs = mine.again().unwrap();
    (0..3).for_each(|n| write(&theirs, n * page, 1));
    mine.make_private(page..2 * page).unwrap();
    assert_eq!([0, 1, 2].map(|n| read(&mine, n * page)), [1; 3]);
    (0..3).for_each(|n| write(&theirs, n * page, 2));
    assert_eq!([0, 1, 2].map(|n| read(&mine, n * page)), [2, 1, 2]);
    write(&mine, page, 3);
    assert_eq!(read(&theirs, page), 2);
    // Again, as after a second failure.
    mine.make_private(page..2 * page).unwrap();
    assert_eq!([0, 2].map(|n| read(&mine, n * page)), [2; 2]);
}

/// A copy of the value in another process, as after a fork, neither clears the memory nor unmaps
/// it.
#[test]
#[cfg(unix)]
fn only_the_process_that_mapped_memory_gives_it_back() {
    let page = page_size();
    let mine = Mapping::create(page, page).unwrap();
    write(&mine, 0, 5);
    let mut of_a_child = mine.again().unwrap();
    of_a_child.owner += 1;
    let at = of_a_child.base;
    of_a_child.release(0..page);
    drop(of_a_child);
    assert_eq!(read(&mine, 0), 5);
    // SAFETY: the memory is still mapped, as the test shows, and is unmapped once.
    unsafe {
        assert_eq!(at.read_volatile(), 5);
        munmap(at.as_ptr().cast(), page).unwrap();
    }
    mine.release(0..page);
    assert_eq!(read(&mine, 0), 0);
}

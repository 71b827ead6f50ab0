use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use windows_sys::Win32::System::LibraryLoader::{GetModuleHandleA, GetProcAddress};

use super::local_socket::{LocalListener, LocalStream};
use super::mapping::Mapping;
use super::memory::{available_memory, page_size};
use super::sleep::{sleep_on, wake_all};
use super::{ProcessWatch, boot_identity, hostname, port_holder};
use crate::sys::Process;

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn read(mapping: &Mapping, at: usize) -> u8 {
    // SAFETY: tests read within the mapping, which no other thread uses.
    unsafe { mapping.base().as_ptr().add(at).read_volatile() }
}

fn write(mapping: &Mapping, at: usize, value: u8) {
    // SAFETY: as above.
    unsafe { mapping.base().as_ptr().add(at).write_volatile(value) }
}

fn word(mapping: &Mapping, at: usize) -> &AtomicU32 {
    // SAFETY: the word is within the mapping and is accessed through atomics only.
    unsafe { mapping.base().add(at).cast().as_ref() }
}

fn name(test: &str) -> String {
    format!("kolo-test-{}-{test}", std::process::id())
}

/// Returns the two ends of a connection.
fn ends(test: &str) -> [LocalStream; 2] {
    let listener = LocalListener::bind(&name(test)).unwrap();
    let peer = LocalStream::connect(&name(test), late()).unwrap();
    loop {
        match listener.accept() {
            Ok(stream) => return [peer, stream],
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bytes_follow_the_greeting() {
    let [one, other] = ends("bytes");
    one.until(late()).write_all(b"hello").unwrap();
    let mut bytes = [0; 5];
    other.until(late()).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(other.until(soon).read(&mut bytes).unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(one);
    assert!(other.until(late()).read(&mut bytes).map_or(true, |count| count == 0));
}

#[test]
fn a_name_has_one_listener_and_ends_with_it() {
    let name = name("one");
    let listener = LocalListener::bind(&name).unwrap();
    assert_eq!(LocalListener::bind(&name).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    drop(listener);
    assert_eq!(LocalStream::connect(&name, late()).err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
}

/// A process of another user reaches the port, too, but does not know the key.
#[test]
fn a_connection_without_the_key_is_refused() {
    let listener = LocalListener::bind(&name("key")).unwrap();
    let mut stranger = std::net::TcpStream::connect(("127.0.0.1", listener.port())).unwrap();
    stranger.write_all(&[7; 64]).unwrap();
    let stream = loop {
        if let Ok(stream) = listener.accept() {
            break stream;
        }
    };
    let error = stream.until(late()).read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn memory_that_was_handed_over_is_the_same() {
    let [one, other] = ends("memory");
    let page = page_size();
    let mine = Mapping::create(3 * page, 3 * page).unwrap();
    mine.hand_over(&one).unwrap();
    // The receiver has a handle of its own, however late it takes the memory over.
    mine.close();
    let theirs = Mapping::take_over(&other, 3 * page, late()).unwrap();
    write(&mine, 2 * page + 5, 9);
    assert_eq!(read(&theirs, 2 * page + 5), 9);
    assert_eq!(read(&theirs, 0), 0);
    theirs.release(2 * page..3 * page);
    assert_eq!(read(&mine, 2 * page + 5), 0);
}

#[test]
fn missing_and_short_memory_are_told_apart() {
    let [one, other] = ends("missing");
    one.until(late()).write_all(&[0]).unwrap();
    let error = Mapping::take_over(&other, 4096, late()).err().expect("no memory came");
    assert_eq!(error.to_string(), "the leader of the host has no memory to share");
    Mapping::create(4096, 4096).unwrap().hand_over(&one).unwrap();
    let error = Mapping::take_over(&other, 1 << 20, late()).err().expect("the memory is too short");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let now = Instant::now();
    assert_eq!(Mapping::take_over(&other, 4096, now).err().unwrap().kind(), io::ErrorKind::TimedOut);
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
    let before = other.extend(near, late()).unwrap();
    write(&before, 7, 2);
    assert_eq!((read(&found, 7), read(&other.extension(far).unwrap(), 7)), (1, 1));
    // Beyond the end of the section.
    assert_eq!(other.extension(1 << 40..(1 << 40) + STEP).err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
}

#[test]
fn more_memory_than_there_is_is_refused() {
    assert!(available_memory().unwrap() > 1 << 20);
    let error = Mapping::create(1 << 50, 1 << 50).err().expect("no machine has a pebibyte");
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
}

/// Two mappings of a section, as two processes have them.
#[test]
fn sleepers_are_woken_through_another_mapping() {
    let page = page_size();
    let one = Mapping::create(2 * page, 2 * page).unwrap();
    let other = one.again().unwrap();
    let (here, there) = (word(&one, page + 64), word(&other, page + 64));
    let began = Instant::now();
    sleep_on(here, 1, Duration::from_secs(60));
    sleep_on(here, 0, Duration::from_millis(20));
    assert!(began.elapsed() < Duration::from_secs(30), "a word that has changed is not slept on");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let began = Instant::now();
                for value in 0..100 {
                    while here.load(Ordering::SeqCst) == value {
                        sleep_on(here, value, Duration::from_secs(60));
                    }
                }
                assert!(began.elapsed() < Duration::from_secs(50), "a wake was lost");
            });
        }
        for value in 1..=100 {
            std::thread::sleep(Duration::from_millis(1));
            there.store(value, Ordering::SeqCst);
            wake_all(there);
        }
    });
}

/// Memory of one process has no section.
#[test]
fn sleepers_on_other_memory_are_woken() {
    let word = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            while word.load(Ordering::SeqCst) == 0 {
                sleep_on(&word, 0, Duration::from_secs(60));
            }
            assert!(began.elapsed() < Duration::from_secs(50), "a wake was lost");
        });
        std::thread::sleep(Duration::from_millis(10));
        word.store(1, Ordering::SeqCst);
        wake_all(&word);
    });
}

#[test]
fn more_threads_than_slots_can_sleep() {
    let memory = Mapping::create(page_size(), page_size()).unwrap();
    let word = word(&memory, 0);
    memory.fill_table_of_sleepers();
    let began = Instant::now();
    sleep_on(word, 0, Duration::from_secs(60));
    assert!(began.elapsed() < Duration::from_secs(50));
    wake_all(word);
}

#[test]
fn the_end_of_a_process_is_noticed() {
    use std::process::{Command, Stdio};
    let mut child = Command::new("cmd").args(["/c", "pause"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let process = Process::with_id(child.id());
    let watch = ProcessWatch::open(process).unwrap().unwrap();
    let earlier = Process { created: 1, ..process };
    assert!(ProcessWatch::open(earlier).unwrap().is_none(), "an earlier process with the same id has ended");
    assert!(!watch.has_ended());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(watch.has_ended());
}

#[test]
fn the_machine_has_one_identity() {
    let first = boot_identity().unwrap();
    assert_eq!(boot_identity().as_ref(), Some(&first));
    assert!(!first.contains(' ') && !first.ends_with("0000000000000000"), "{first}");
    assert!(!hostname().is_empty());
}

#[test]
fn the_holder_of_a_port_is_found_with_its_program() {
    let holds = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = holds.local_addr().unwrap();
    // SAFETY: the names end with a zero, and the module is never unloaded.
    let is_wine = unsafe { GetProcAddress(GetModuleHandleA(c"ntdll.dll".as_ptr().cast()), c"wine_get_version".as_ptr().cast()) };
    if is_wine.is_some() {
        assert_eq!(port_holder(&[address]), None);
        let said = b"NOT RUN: the holder of a port; Wine does not say which process holds a port\n";
        return std::io::Write::write_all(&mut std::io::stderr(), said).unwrap();
    }
    let process = format!("process {} (", std::process::id());
    for ip in ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"] {
        address.set_ip(ip.parse().unwrap());
        let holder = port_holder(&[address]);
        assert!(holder.as_ref().is_some_and(|holder| holder.starts_with(&process)), "{ip}: {holder:?}");
    }
    address.set_ip("::1".parse().unwrap());
    assert_eq!(port_holder(&[address]), None);
}

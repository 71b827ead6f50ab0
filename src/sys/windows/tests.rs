use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use windows_sys::Win32::System::LibraryLoader::{GetModuleHandleA, GetProcAddress};

use super::local_socket::LocalListener;
use super::mapping::Mapping;
use super::memory::page_size;
use super::port_holder;
use super::sleep::{sleep_on, wake_all};

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn word(mapping: &Mapping, at: usize) -> &AtomicU32 {
    // SAFETY: the word is within the mapping and is accessed through atomics only.
    unsafe { mapping.base().add(at).cast().as_ref() }
}

fn name(test: &str) -> String {
    format!("kolo-test-{}-{test}", std::process::id())
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

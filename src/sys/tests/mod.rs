//! Tests of what all systems have in common, each on the system that it runs on.

#[allow(clippy::duplicate_mod, reason = "as in `unix`")]
mod sharing;

use std::io;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::platform::{
    LocalListener, LocalStream, Mapping, ProcessWatch, available_memory, boot_identity, hostname, is_stopped, page_size,
    sleep_on, wake_all,
};
use super::{Process, has_ended, wait_until};

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn name(test: &str) -> String {
    format!("kolo-test-{}-{test}", std::process::id())
}

/// Returns the two ends of a connection.
fn ends(test: &str) -> [LocalStream; 2] {
    let listener = LocalListener::bind(&name(test)).unwrap();
    let peer = LocalStream::connect(&name(test), late()).unwrap();
    let mut accepted = None;
    wait_until("no connection arrives", || {
        match listener.accept() {
            Ok(stream) => accepted = Some(stream),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
        accepted.is_some()
    });
    [peer, accepted.unwrap()]
}

#[test]
fn a_name_has_one_listener_and_ends_with_it() {
    let name = name("one");
    let listener = LocalListener::bind(&name).unwrap();
    assert_eq!(LocalListener::bind(&name).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    drop(listener);
    assert_eq!(LocalStream::connect(&name, late()).err().unwrap().kind(), io::ErrorKind::ConnectionRefused);
}

/// Two mappings of the same memory, as two processes have them.
#[test]
fn sleepers_are_woken_through_another_mapping() {
    let page = page_size();
    let one = Mapping::create(2 * page, 2 * page).unwrap();
    let other = one.again().unwrap();
    // SAFETY: the words are within the mappings, and are accessed through atomics only.
    let word = |mapping: &Mapping| unsafe { mapping.base().add(page + 64).cast::<AtomicU32>().as_ptr() };
    // SAFETY: as above; the mappings outlive the words.
    let [here, there] = unsafe { [&*word(&one), &*word(&other)] };
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

#[test]
fn the_end_of_a_process_is_noticed_and_that_it_is_stopped() {
    let mut program = if cfg!(windows) { Command::new("cmd") } else { Command::new("cat") };
    let arguments: &[&str] = if cfg!(windows) { &["/c", "pause"] } else { &[] };
    let mut child = program.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let process = Process::with_id(child.id());
    let watch = ProcessWatch::open(process).unwrap().unwrap();
    // Linux gives an id to another process only after all others, so it tells no times.
    let tells_creation = !cfg!(target_os = "linux");
    let earlier = Process { created: 1, ..process };
    let is_seen = ProcessWatch::open(earlier).unwrap().is_some();
    assert!(!tells_creation || !is_seen, "an earlier process with the same id has ended");
    assert!(!watch.has_ended() && !is_stopped(process));
    #[cfg(unix)]
    {
        // SAFETY: the child was not waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) }, 0);
        wait_until("the process is not stopped", || is_stopped(process));
    }
    child.kill().unwrap();
    wait_until("the process does not end", || watch.has_ended());
    // On Unix, the process remains as a zombie until it is waited for.
    wait_until("the process does not end", || has_ended(process));
    child.wait().unwrap();
    assert!(watch.has_ended() && has_ended(process));
    let own = Process::own();
    assert!((own.created > 0) == tells_creation && !has_ended(own));
}

#[test]
fn the_machine_has_one_identity() {
    let first = boot_identity().unwrap();
    assert_eq!(boot_identity().as_ref(), Some(&first));
    assert!(!cfg!(windows) || (!first.contains(' ') && !first.ends_with("0000000000000000")), "{first}");
    assert!(!hostname().is_empty() && available_memory().is_some());
}

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Mapping, ProcessWatch, available_memory, boot_identity, hostname, is_stopped, page_size, sleep_on, wake_all};
use crate::sys::Process;

/// Waits for an event that only a defect delays for so long.
fn wait_until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two mappings of an object, as two processes have them.
#[test]
fn sleepers_are_woken_through_another_mapping() {
    let one = Mapping::create(page_size(), page_size()).unwrap();
    let other = one.again().unwrap();
    // SAFETY: the words are within the mappings, and are accessed through atomics only.
    let [here, there]: [&AtomicU32; 2] = [&one, &other].map(|mapping| unsafe { mapping.base().add(64).cast().as_ref() });
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
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let process = Process::with_id(child.id());
    let watch = ProcessWatch::open(process).unwrap().unwrap();
    let earlier = Process { created: 1, ..process };
    assert!(ProcessWatch::open(earlier).unwrap().is_none(), "an earlier process with the same id has ended");
    assert!(!watch.has_ended() && !is_stopped(process));
    let pid = child.id() as i32;
    // SAFETY: the child was not waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    wait_until(|| is_stopped(process));
    child.kill().unwrap();
    wait_until(|| watch.has_ended());
    // The process remains as a zombie until it is waited for.
    wait_until(|| crate::sys::has_ended(process));
    child.wait().unwrap();
    assert!(watch.has_ended() && crate::sys::has_ended(process));
    let own = Process::own();
    assert!(own.created > 0 && !crate::sys::has_ended(own));
}

#[test]
fn the_machine_has_one_identity() {
    let first = boot_identity().unwrap();
    assert_eq!(boot_identity(), Some(first));
    assert!(!hostname().is_empty() && available_memory().is_some());
}

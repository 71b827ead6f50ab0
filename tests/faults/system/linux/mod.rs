//! Linux: signals, what `/proc` says about processes, and faults by limits, forks and network
//! namespaces.

mod descriptors;
mod forks;
mod leftovers;
mod limits;
mod network;
mod privilege;
mod refusals;
mod sockets;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kolo::Communicator;

use crate::job::{Job, wait_until};
use crate::processes::on_every_transport;
use crate::rank::{Calls, Task, collectives, say};
use crate::runner::Outcome::{self, Passed};

pub(crate) use descriptors::{close_all, closed_standard};
pub(crate) use forks::{forked, killed_with_a_child};
pub(crate) use leftovers::{Belongings, nothing_left_over, sockets};
pub(crate) use limits::{
    connecting, few_descriptors, no_descriptors, no_descriptors_for_the_store, no_memory_in_time, no_memory_on_one_rank,
    no_shared_memory, no_thread,
};
pub(crate) use network::{
    different_calls as different_calls_between_hosts, file_store, ipv6_only,
    killed_with_a_child as killed_with_a_child_elsewhere, own_name_on_loopback, partition, reset, slow_and_lossy,
};
pub(crate) use privilege::{be_privileged, setuid};
pub(crate) use refusals::refused_calls;
pub(crate) use sockets::{another_user, be_a_stranger, connect_locally, listeners, replayed};

/// Most tests wait most of the time.
pub(crate) const TESTS_AT_ONCE: usize = 8;

/// The causes that peers report for a stopped process, what their message says, and what the log
/// says before.
pub(crate) const STOPPED: [&str; 1] = ["Stopped"];
pub(crate) const SAYS_STOPPED: &str = "is stopped";
pub(crate) const WARNS_OF_STOPPED: &str = "waits for a rank that is stopped";

/// Why a test cannot run that continues a stopped process in the middle of a write.
pub(crate) fn shares_private_pages() -> Option<&'static str> {
    None
}

/// Why a test cannot run that looks for the listeners of a process.
pub(crate) fn hides_listeners() -> Option<&'static str> {
    None
}

/// A process keeps nothing for all communicators.
pub(crate) fn warm_up() {}

fn signal(pid: u32, signal: i32) {
    // SAFETY: the process is this one, or a child of it that was not waited for.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

/// Ends a process at once.
pub(crate) fn kill(pid: u32) {
    signal(pid, libc::SIGKILL);
}

/// Stops a process until [`go_on`]. Until its last thread has stopped, it may still answer.
pub(crate) fn stop(pid: u32) {
    signal(pid, libc::SIGSTOP);
    // The thread that looks would run whenever it looks.
    if pid == std::process::id() {
        return;
    }
    let runs = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // A thread that has ended is not there any more.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['T', 't', 'Z', 'X']))
    };
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    wait_until("the process runs", || !tasks().any(runs));
}

/// Continues a stopped process.
pub(crate) fn go_on(pid: u32) {
    signal(pid, libc::SIGCONT);
}

/// Returns the microseconds of the clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

/// Returns the name of this machine.
pub(crate) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned()
}

/// Whether a process of this machine has ended. It may be a zombie.
pub(crate) fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Returns the resident memory of a process, in KiB.
pub(crate) fn memory(pid: u32) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Prepares the process for its task before it connects.
pub(crate) fn prepare(task: &str) {
    limits::prepare(task);
    match task {
        "closed" => descriptors::close_standard(),
        "refused" => refusals::prepare(),
        "signals" => be_interrupted(),
        // SAFETY: the default action calls no code of this program.
        "pipe" => _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) },
        _ => {}
    }
}

/// Runs the tasks that only this system has.
pub(crate) fn run_task(task: &str, comm: &Communicator) -> Task {
    match task {
        "closed" => descriptors::print_into_nothing(comm),
        "closefrom" => descriptors::close_from(comm),
        "fork" => forks::fork(comm),
        "parent" => forks::be_a_parent(comm),
        "no descriptors" => limits::without_descriptors(comm),
        "slow memory" => limits::slow_memory(comm),
        "no thread" => limits::without_threads(comm),
        "no address space" => limits::without_address_space(comm),
        "refused" => refusals::work(comm),
        "signals" => work_under_signals(comm),
        "no shared memory" | "little room" | "no memory files" | "no memory" => {
            collectives(Calls::of(comm), Duration::MAX, usize::MAX)
        }
        other => panic!("there is no task {other:?}"),
    }
}

/// The number of signals that arrived.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

/// Lets a signal arrive every half millisecond.
fn be_interrupted() {
    extern "C" fn handler(_: i32) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }
    let every = libc::timeval { tv_sec: 0, tv_usec: 500 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: the handler only counts. Without SA_RESTART it interrupts system calls. SIGPIPE gets
    // its default action, which ends the process.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(i32) as usize;
        assert_eq!(libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()), 0);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()), 0);
    }
}

fn work_under_signals(comm: &Communicator) -> Task {
    drop(comm.alloc::<u64>(4 << 20)?);
    // The barrier and the agreement of an allocation have sequence numbers too.
    let calls = Calls { comm, seq: 2 };
    collectives(calls, Duration::from_secs(1), usize::MAX)?;
    say(&format!("signals {}", SIGNALS.load(Ordering::Relaxed)));
    Ok(())
}

/// A signal every half millisecond, without SA_RESTART, and SIGPIPE with its default action, as in
/// row 1.
pub(crate) fn signals() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("signals", 3, 600_000, more);
        for said in job.all_say("signals") {
            assert!(said.parse::<u32>().unwrap() > 50, "{name}: only {said} signals arrived");
        }
        job.all_say("done");
    });
    Passed(String::new())
}

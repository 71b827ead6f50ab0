//! System calls that a container refuses (seccomp): row 74.

use std::sync::atomic::{AtomicUsize, Ordering};

use kolo::{Communicator, Error, ReduceOp};

use super::limits::{forbid, hear_one};
use crate::failure::Failure;
use crate::job::{Job, fresh};
use crate::rank::{Task, say};
use crate::runner;
use crate::runner::Outcome::{self, Passed};
use crate::wait::free_port;

/// Makes the table of calls from their names.
macro_rules! calls {
    ($($(#[$attribute:meta])* $name:ident $number:ident),* $(,)?) => {
        &[$($(#[$attribute])* (stringify!($name), libc::$number)),*]
    };
}

/// The calls that kolo makes, but those without which Rust's library ends the process: it waits, sleeps,
/// makes threads and draws random numbers by them. `read` and `write` are the test's own, too.
const CALLS: &[(&str, libc::c_long)] = calls![
    accept4 SYS_accept4,
    bind SYS_bind,
    clone3 SYS_clone3,
    connect SYS_connect,
    epoll_create1 SYS_epoll_create1,
    epoll_ctl SYS_epoll_ctl,
    eventfd2 SYS_eventfd2,
    faccessat SYS_faccessat,
    fallocate SYS_fallocate,
    fcntl SYS_fcntl,
    flock SYS_flock,
    fstat SYS_fstat,
    ftruncate SYS_ftruncate,
    getdents64 SYS_getdents64,
    getpeername SYS_getpeername,
    getsockname SYS_getsockname,
    getsockopt SYS_getsockopt,
    ioctl SYS_ioctl,
    listen SYS_listen,
    lseek SYS_lseek,
    madvise SYS_madvise,
    memfd_create SYS_memfd_create,
    newfstatat SYS_newfstatat,
    openat SYS_openat,
    pidfd_open SYS_pidfd_open,
    ppoll SYS_ppoll,
    prctl SYS_prctl,
    prlimit64 SYS_prlimit64,
    process_vm_readv SYS_process_vm_readv,
    recvfrom SYS_recvfrom,
    recvmsg SYS_recvmsg,
    sched_getaffinity SYS_sched_getaffinity,
    sched_setaffinity SYS_sched_setaffinity,
    sched_yield SYS_sched_yield,
    sendmsg SYS_sendmsg,
    sendto SYS_sendto,
    setsockopt SYS_setsockopt,
    shutdown SYS_shutdown,
    socket SYS_socket,
    socketpair SYS_socketpair,
    statfs SYS_statfs,
    statx SYS_statx,
    uname SYS_uname,
    unlinkat SYS_unlinkat,
    // Other processors have later calls only.
    #[cfg(target_arch = "x86_64")]
    epoll_wait SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    poll SYS_poll,
];

/// The variables that name a call and its error: it is refused before the start, or after it.
const FROM_THE_START: &str = "KOLO_TEST_REFUSED";
const LATER: &str = "KOLO_TEST_REFUSED_LATER";

/// One system call is refused to one of two ranks. The rank says at once which, or does without it.
#[derive(Debug)]
struct Case {
    call: &'static str,
    error: i32,
    lacks: usize,
    transport: &'static str,
    has_server: bool,
    when: &'static str,
}

/// Each call with each error, in each place. By default each call in two of them.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (number, &(call, _)) in CALLS.iter().enumerate() {
        for bits in 0..32 {
            let bit = |place: usize| bits >> place & 1;
            let when = [FROM_THE_START, LATER][bit(0)];
            // Both times, with the other choices by turns.
            let is_chosen = bits >> 1 == (5 * number + 7 * bit(0)) % 16;
            if runner::all() || is_chosen {
                let (error, transport) = ([libc::EPERM, libc::ENOSYS][bit(1)], ["auto", "tcp"][bit(2)]);
                cases.push(Case { call, error, transport, lacks: bit(3), has_server: bit(4) == 1, when });
            }
        }
    }
    cases
}

pub(crate) fn refused_calls() -> Outcome {
    let (cases, next, named) = (cases(), AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            named.fetch_add(usize::from(is_named(case)), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| _ = scope.spawn(work)));
    no_store_is_looked_for();
    Passed(format!("{} of {} refusals were named", named.into_inner(), cases.len()))
}

/// Runs two ranks. Returns whether the rank without the call named it; otherwise it went on without.
fn is_named(case: &Case) -> bool {
    let &Case { call, error, lacks, transport, has_server, when } = case;
    let store = if has_server { format!("tcp://127.0.0.1:{}", free_port()) } else { fresh().0 };
    let mut job = Job::start("refused", 2, 600_000, |rank, command| {
        command.env("KOLO_STORE", &store).env("KOLO_START_TIMEOUT", "300s").env("KOLO_TRANSPORT", transport);
        if rank == lacks {
            command.env(when, format!("{call} {error}"));
        }
    });
    let (end, text) = hear_one(&mut job, lacks, &["refused", "failed", "done"]);
    assert!(!job.has_said(lacks, "log WARN cannot accept connections at the moment"), "{case:?}: it tries again");
    if end == "done" {
        job.hear(1 - lacks, "done");
        let has_substitute = matches!(call, "memfd_create" | "prlimit64");
        assert!(!has_substitute || transport == "tcp" || job.all_say("via") == ["shm", "shm"], "{case:?}: no shared memory");
        return false;
    }
    assert!(text.contains(&format!("the call {call} (")), "{case:?}: {text}");
    if end == "failed" {
        // The last barrier may have let the other rank go.
        if let ("failed", text) = hear_one(&mut job, 1 - lacks, &["failed", "done"]) {
            assert_eq!(Failure::parse(&text).culprit, Some(lacks), "{case:?}: {text}");
        }
    }
    true
}

/// No server need run there: the rank would look for it until the deadline.
fn no_store_is_looked_for() {
    for call in ["socket", "connect", "setsockopt"].into_iter().filter(|_| cfg!(feature = "redis")) {
        let mut job = Job::start("refused", 1, 60_000, |_, command| {
            command.env("KOLO_STORE", "redis://127.0.0.1:9").env("KOLO_START_TIMEOUT", "300s");
            command.env("KOLO_WORLD_SIZE", "2").env(FROM_THE_START, format!("{call} {}", libc::EPERM));
        });
        let text = job.hear(0, "refused");
        assert!(text.contains(&format!("the call {call} (")), "{call}: {text}");
    }
}

/// Refuses the call to this process that a variable names.
fn refuse(variable: &str) {
    if let Ok(refused) = std::env::var(variable) {
        let (call, error) = refused.split_once(' ').unwrap();
        let &(_, number) = CALLS.iter().find(|(name, _)| *name == call).unwrap();
        forbid(number, error.parse().unwrap());
    }
}

/// Prepares the process before it connects.
pub(super) fn prepare() {
    refuse(FROM_THE_START);
}

/// Runs operations of several sizes on the caller's thread and another one, and opens links.
pub(super) fn work(comm: &Communicator) -> Task {
    comm.barrier()?;
    say(&format!("via {}", comm.transport_name()));
    refuse(LATER);
    let (rank, world) = (comm.rank(), comm.world_size());
    for count in [1, 1_000, 40_000] {
        let mut buf = vec![1u64; count];
        comm.all_reduce(&mut buf, ReduceOp::Sum)?;
        let buf = comm.start_all_reduce(buf, ReduceOp::Sum).map_err(Error::from)?.wait()?;
        assert!(buf.iter().all(|&sum| sum == (world * world) as u64));
        comm.send_recv(&buf, (rank + 1) % world, &mut vec![0u64; count], (rank + world - 1) % world)?;
    }
    Ok(comm.barrier()?)
}

//! Limits of a process and system calls that fail: rows 28, 29, 53, 54, 67 and 68.

use std::cell::Cell;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kolo::{Communicator, Error, Op, ReduceOp, Result};

use crate::failure::{Failure, kind};
use crate::job::{Job, LATE, fresh, in_time, rank, wait_until};
use crate::processes::GONE;
use crate::rank::{Calls, DEADLINE, End, Failed, Task, say};
use crate::runner;
use crate::runner::Outcome::{self, Passed};
use crate::system::now;
use crate::wait::free_port;

/// Rank 1 reserves registered memory and is interrupted each time. Its peers have a longer
/// deadline, a shorter one or the same.
pub(crate) fn no_memory_in_time() -> Outcome {
    for (own, others, causes) in [(2, 600, &["Failed"][..]), (4, 2, &["Silent"]), (2, 2, &["Failed", "Silent"])] {
        let mut job = Job::start("slow memory", 3, others * 1000, |rank, command| {
            if rank == 1 {
                command.env(DEADLINE, (own * 1000).to_string());
            }
        });
        let Failure { kind, culprit, text, .. } = job.failure(1);
        assert_eq!((kind.as_str(), culprit), ("Os", Some(1)), "{own} s, others {others} s: {text}");
        let what = format!("alloc seq=2: rank 1 has not reserved 8388608 bytes of shared memory within its deadline of {own}.0s");
        assert_eq!(text, format!("{what}; allocate less, or set a longer timeout: timed out"));
        job.lives_on(1);
        job.all_name(&[0, 2], 1, causes, now());
    }
    Passed(String::new())
}

/// The system refuses rank 1 the thread that runs a queued call, which its peers make too.
pub(crate) fn no_thread() -> Outcome {
    for call in ["nonblocking", "message", "group"] {
        let mut job = Job::start("no thread", 3, 600_000, |_, command| _ = command.env("KOLO_TEST_LACKS", call));
        let Failure { kind, culprit, text, .. } = job.failure(1);
        assert_eq!((kind.as_str(), culprit), ("Os", Some(1)), "{call}: {text}");
        assert!(text.starts_with("starting the progress thread; "), "{call}: {text}");
        job.lives_on(1);
        job.all_name(&[0, 2], 1, &["Failed"], now());
    }
    Passed(String::new())
}

/// What one rank has no address space for.
const TOO_LARGE: usize = 128 << 20;

/// One rank has no address space for registered memory, shared or not. All ranks name it and go on.
pub(crate) fn no_memory_on_one_rank() -> Outcome {
    for lacks in [0, 1, 2] {
        for transport in ["auto", "tcp"] {
            let mut job = Job::start("no address space", 3, 600_000, |_, command| {
                command.env("KOLO_TEST_LACKS", lacks.to_string()).env("KOLO_TRANSPORT", transport);
            });
            for text in job.all_say("lacks") {
                let named = format!("NoMemory: alloc: rank {lacks} (");
                assert!(
                    text.starts_with(&named) && text.contains(&format!("has no memory for {TOO_LARGE} bytes")),
                    "{lacks}: {text}"
                );
            }
            for rank in 0..3 {
                job.hear(rank, "done");
            }
        }
    }
    Passed(String::new())
}

/// A rank has no descriptor for a link that it opens or accepts, or for its first message, and its peers wait
/// for both ranks of that link.
pub(crate) fn no_descriptors() -> Outcome {
    // The first two are for what a first message needs beside its link. With three, the link has a connection, and
    // the memory that comes through it finds no descriptor, unless another thread closes one in time.
    let cases = [
        (0, "tcp", "blocking", 0),
        (2, "tcp", "nonblocking", 0),
        (0, "shm", "blocking", 0),
        (5, "shm", "nonblocking", 0),
        (5, "shm", "blocking", 2),
        (5, "shm", "blocking", 3),
    ];
    let mut fitted = 0;
    for (lacks, transport, call, spare) in cases {
        let mut job = Job::start("no descriptors", 6, 600_000, |_, command| {
            command.env("KOLO_TRANSPORT", transport).env("KOLO_TEST_LACKS", lacks.to_string());
            command.env("KOLO_TEST_CALL", call).env("KOLO_TEST_SPARE", spare.to_string());
        });
        let (said, text) = hear_one(&mut job, lacks, &["failed", "done"]);
        if said == "done" && spare > 0 {
            fitted += 1;
            continue;
        }
        assert_eq!(said, "failed", "rank {lacks}, {transport}");
        let Failure { kind, culprit, text, .. } = Failure::parse(&text);
        assert_eq!((kind.as_str(), culprit), ("Os", Some(lacks)), "rank {lacks}: {text}");
        assert!(text.contains("Too many open files"), "rank {lacks}: {text}");
        job.lives_on(lacks);
        let others: Vec<usize> = (0..6).filter(|rank| *rank != lacks).collect();
        job.all_name(&others, lacks, &["Failed"], now());
    }
    // Without descriptors before the start. The other rank waits for rank 0, which cannot report.
    let mut job = Job::start("few descriptors", 2, 60_000, |_, command| _ = command.env("KOLO_START_TIMEOUT", "3s"));
    let [first, second] = [0, 1].map(|rank| job.hear(rank, "refused"));
    let is_own = |text: &str| (text.starts_with("Os: ") || text.starts_with("Store: ")) && text.contains("Too many open files");
    assert!(is_own(&first), "{first}");
    assert!(is_own(&second) || second.starts_with("Missing: ") && second.contains("missing 0;"), "{second}");
    Passed(format!("few descriptors were enough {fitted} times of 2"))
}

/// One of three ranks has a few descriptors only, which run out somewhere in the start. That rank
/// reports its own error, and no rank names another one.
pub(crate) fn few_descriptors() -> Outcome {
    const MOST: u64 = 14;
    let mut own = 0;
    let stores: [fn() -> String; 2] = [|| fresh().0, || format!("tcp://127.0.0.1:{}", free_port())];
    let cases = (6..=MOST).flat_map(|most| [(most, 0, 0), (most, 0, 1), (most, 2, 0), (most, 2, 1)]);
    // Each number with each rank, and with one of the stores.
    let cases = cases.filter(|&(most, lacks, store)| runner::all() || (most + lacks as u64 / 2) % 2 == store as u64);
    // All at once: where rank 0 cannot tell the others, they wait until their deadline.
    let mut jobs: Vec<(u64, usize, Job)> = Vec::new();
    for (most, lacks, store) in cases {
        let mut job = Job::empty();
        let (store, (_, name)) = (stores[store](), fresh());
        for number in 0..3 {
            let mut command = rank("once", number, 3, &store, &name);
            command.env("KOLO_START_TIMEOUT", "20s").env_remove("KOLO_SECRET");
            if number == lacks {
                command.env("KOLO_TEST_DESCRIPTORS", most.to_string());
            }
            job.add(command);
        }
        jobs.push((most, lacks, job));
    }
    for (most, lacks, mut job) in jobs {
        for number in 0..3 {
            let (what, text) = hear_one(&mut job, number, &["refused", "failed", "done"]);
            let about = format!("rank {lacks} has {most} descriptors, rank {number}: {text}");
            match what {
                "done" => {}
                _ if number == lacks => {
                    assert!(text.contains("Too many open files"), "{about}");
                    own += 1;
                }
                "failed" => assert_eq!(Failure::parse(&text).culprit, Some(lacks), "{about}"),
                _ => {
                    let is_named = text.contains(&format!("rank {lacks} (")) || text.contains(&format!("missing {lacks};"));
                    // Rank 0 has not served its store.
                    assert!(is_named || lacks == 0 && text.starts_with("Store: "), "{about}");
                }
            }
        }
    }
    assert!(own > 4, "the descriptors ran out {own} times");
    Passed(format!("the descriptors ran out {own} times"))
}

/// Waits until a rank writes a line that begins with one of `starts`. Returns which, and the rest
/// of the line.
pub(super) fn hear_one<'a>(job: &mut Job, rank: usize, starts: &[&'a str]) -> (&'a str, String) {
    let deadline = Instant::now() + LATE;
    loop {
        if let Some(start) = starts.iter().find(|start| job.has_said(rank, start)) {
            return (start, job.hear(rank, start));
        }
        assert!(Instant::now() < deadline, "rank {rank} wrote no line with {starts:?}");
    }
}

/// Rank 0 serves the store, and has no descriptor for the connections of the others.
pub(crate) fn no_descriptors_for_the_store() -> Outcome {
    let port = free_port();
    let (store, (_, name)) = (format!("tcp://127.0.0.1:{port}"), fresh());
    let of = |number| {
        let mut command = rank("once", number, 3, &store, &name);
        // The others cannot know that rank 0 has given up.
        command.env("KOLO_START_TIMEOUT", if number == 0 { "120s" } else { "10s" });
        command
    };
    let mut job = Job::empty();
    job.add(of(0));
    wait_until("rank 0 does not serve the store", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    // When their number does not change any more, rank 0 has what it needs for itself. If it is
    // interrupted before that, it fails with the same error in another place.
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", job.pid(0))).map_or(0, Iterator::count);
    let (last, since) = (Cell::new(0), Cell::new(Instant::now()));
    wait_until("rank 0 opens more and more", || {
        if last.replace(descriptors()) != last.get() {
            since.set(Instant::now());
        }
        since.get().elapsed() > Duration::from_millis(500)
    });
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is valid during the call.
    assert_eq!(unsafe { libc::prlimit(job.pid(0) as i32, libc::RLIMIT_NOFILE, &none, std::ptr::null_mut()) }, 0);
    let began = Instant::now();
    (1..3).for_each(|number| job.add(of(number)));
    let text = job.hear(0, "refused");
    assert!(text.starts_with("Store: ") && text.contains("accepting the connections of the other ranks"), "{text}");
    assert!(text.contains("Too many open files"), "{text}");
    in_time("rank 0 knows before the deadline of the start", began.elapsed(), Duration::from_secs(6));
    for number in 1..3 {
        let text = job.hear(number, "refused");
        assert!(text.starts_with("Store: "), "{text}");
    }
    Passed(String::new())
}

/// Ranks that cannot have shared memory use TCP, and log that.
pub(crate) fn no_shared_memory() -> Outcome {
    for (task, ranks, why) in [
        // A limit on the size of files also applies to shared memory.
        ("no shared memory", &[0][..], "File too large"),
        // A limit on one rank must not stop it from staging data for several communicators.
        ("little room", &[1], "File too large"),
        // The system may forbid shared memory, named or not.
        ("no memory files", &[0], "Operation not permitted"),
        // There may be no memory left.
        ("no memory", &[0], "No space left"),
    ] {
        let mut job = Job::start(task, 3, 600_000, |_, _| {});
        for said in job.all_say("connected") {
            // A small region of shared memory has room for the messages of two ranks.
            let is_right = said == "tcp 0" || task == "little room" && said.starts_with("tcp ");
            assert!(is_right, "{task}: wrong transport or number of shared-memory regions: {said}");
        }
        job.all_work();
        for &rank in ranks {
            job.hear_log(rank, &["WARN", "cannot share memory with the ranks of this host", why]);
        }
        for rank in 0..3 {
            job.hear_log(rank, &["WARN", "ranks of a host cannot share memory; they exchange messages instead"]);
        }
        job.kill(0);
        job.all_name(&[1, 2], 0, &GONE, now());
    }
    Passed(String::new())
}

/// Prepares the process for its task before it connects.
pub(super) fn prepare(task: &str) {
    match task {
        "few descriptors" => limit(libc::RLIMIT_NOFILE, 8),
        "no descriptors" => limit(libc::RLIMIT_NOFILE, 64),
        // A process that exceeds the limit gets SIGXFSZ, which ends it.
        "no shared memory" => limit(libc::RLIMIT_FSIZE, 64 << 10),
        // The limit is enough for the first stages of 3 ranks.
        "little room" if std::env::var("KOLO_RANK").as_deref() == Ok("1") => limit(libc::RLIMIT_FSIZE, 8 << 20),
        // A container may forbid the call, and the system may have no memory left. Both show as
        // errors of these calls.
        "no memory files" => {
            forbid(libc::SYS_memfd_create, libc::EPERM);
            forbid(libc::SYS_fallocate, libc::EPERM);
        }
        "no memory" => forbid(libc::SYS_fallocate, libc::ENOSPC),
        _ => {}
    }
}

/// Runs `connect` with as many descriptors as `KOLO_TEST_DESCRIPTORS` says.
pub(crate) fn connecting<T>(connect: impl FnOnce() -> T) -> T {
    let most = std::env::var("KOLO_TEST_DESCRIPTORS").ok().and_then(|most| most.parse().ok());
    let usual = most.map(limit_descriptors);
    let connected = connect();
    usual.map(limit_descriptors);
    connected
}

/// The rank that `KOLO_TEST_LACKS` names has `KOLO_TEST_SPARE` descriptors left, and needs more for a link to or
/// from a rank with which it has none. Six ranks connect at distances of 1, 2 and 4, so ranks 0 and
/// 3 have no link.
pub(super) fn without_descriptors(comm: &Communicator) -> Task {
    let mut calls = Calls::of(comm);
    calls.call(Op::Barrier, |comm| comm.barrier())?;
    let (rank, world) = (comm.rank(), comm.world_size());
    let lacks: usize = std::env::var("KOLO_TEST_LACKS").unwrap().parse().unwrap();
    // The barrier has opened no link between these two ranks.
    let other = (lacks + 3) % world;
    let mut held = Vec::new();
    if rank == lacks {
        while let Ok(file) = std::fs::File::open("/dev/null") {
            held.push(file);
        }
        let spare: usize = std::env::var("KOLO_TEST_SPARE").unwrap().parse().unwrap();
        held.truncate(held.len() - spare);
    }
    let message = |op, result: Result<()>| result.map_err(|error| End::Failed(Failed { error, call: Some((op, 1)) }));
    match rank {
        _ if rank == lacks && std::env::var("KOLO_TEST_CALL").unwrap() == "nonblocking" => {
            let sent = comm.start_send(vec![1u8; 8], other).map_err(Error::from).and_then(|work| Ok(work.wait()?));
            message(Op::Send, sent.map(drop))
        }
        _ if rank == lacks => message(Op::Send, comm.send(&[1u8; 8], other)),
        _ if rank == other => message(Op::Recv, comm.recv(&mut [1u8; 8], lacks)),
        _ => calls.call(Op::Barrier, |comm| comm.barrier()),
    }
}

/// All ranks make the call that `KOLO_TEST_LACKS` names. Rank 1 is refused a thread for it.
pub(super) fn without_threads(comm: &Communicator) -> Task {
    let mut calls = Calls::of(comm);
    calls.call(Op::Barrier, |comm| comm.barrier())?;
    let (rank, world) = (comm.rank(), comm.world_size());
    if rank == 1 {
        [libc::SYS_clone3, libc::SYS_clone].into_iter().for_each(|call| forbid(call, libc::EAGAIN));
    }
    let last = (rank + world - 1) % world;
    let (mut to, mut from) = ([0u8; 8], [0u8; 8]);
    match std::env::var("KOLO_TEST_LACKS").unwrap().as_str() {
        "nonblocking" => calls.call(Op::AllReduce, |comm| {
            comm.start_all_reduce(vec![1u64; 8], ReduceOp::Sum).map_err(Error::from)?.wait()?;
            Ok(())
        }),
        "message" => {
            let received = comm.start_recv(vec![0u8; 8], last).map_err(Error::from).and_then(|work| Ok(work.wait()?));
            // No rank sends.
            received.map(drop).map_err(|error| End::Failed(Failed { error, call: None }))
        }
        _ => {
            let both = comm.scope(|scope| {
                scope.all_reduce(&mut to, ReduceOp::Sum)?;
                scope.broadcast(&mut from, 0)
            });
            both.map_err(|error| End::Failed(Failed { error, call: None }))
        }
    }
}

/// Allocates registered memory, for which the rank that `KOLO_TEST_LACKS` names has no address space.
/// Then all ranks go on.
pub(super) fn without_address_space(comm: &Communicator) -> Task {
    let lacks: usize = std::env::var("KOLO_TEST_LACKS").unwrap().parse().unwrap();
    let mut calls = Calls::of(comm);
    calls.call(Op::Barrier, |comm| comm.barrier())?;
    if comm.rank() == lacks {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let used = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
        limit(libc::RLIMIT_AS, used + (64 << 20));
    }
    for _ in 0..2 {
        match comm.alloc::<u8>(TOO_LARGE) {
            Err(error) if error.leaves_communicator_usable() => say(&format!("lacks {}: {error}", kind(&error))),
            other => panic!("{other:?}"),
        }
    }
    // What fits is found, and the communicator has lost nothing.
    let mut small = comm.alloc::<u64>(1 << 10)?;
    small.fill(1);
    comm.all_reduce(&mut small, ReduceOp::Sum)?;
    assert!(small.iter().all(|&word| word == comm.world_size() as u64));
    Ok(comm.barrier()?)
}

/// Allocates registered memory. On rank 1 every attempt to reserve its part is interrupted.
pub(super) fn slow_memory(comm: &Communicator) -> Task {
    if comm.rank() == 1 {
        forbid(libc::SYS_fallocate, libc::EINTR);
    }
    // The barrier of an allocation has a sequence number too.
    let failed = |error| End::Failed(Failed { error, call: Some((Op::Alloc, 2)) });
    comm.alloc::<u64>(1 << 20).map(drop).map_err(failed)
}

/// Sets a limit of this process.
fn limit(resource: libc::__rlimit_resource_t, value: u64) {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: the pointer is to a valid limit.
    assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
}

/// Sets how many descriptors this process may have. Returns the former limit.
fn limit_descriptors(most: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointers are to a valid limit.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        let former = std::mem::replace(&mut limit.rlim_cur, most);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
        former
    }
}

/// Makes a system call fail with `error` in all threads of this process from now on.
pub(super) fn forbid(call: libc::c_long, error: i32) {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    // Loads the number of the call. Returns the error for `call`, and allows every other call.
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program is valid during the call, and the system keeps a copy.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        assert_eq!(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program), 0);
    }
}

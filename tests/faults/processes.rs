//! Faults of processes: rows 1 to 3, 13 to 15, 24 to 30, 40.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::job::{ASKED, AT_ONCE, Job, Told, at_most, fresh, in_time, rank, wait_until};
use crate::rank::{DEADLINE, REGISTERED, now};
use crate::runner::Outcome::{self, Passed};
use crate::starts::free_port;

/// Runs a test on every transport, with the name of the transport and the environment of its ranks.
fn on_every_transport(mut test: impl FnMut(&str, &dyn Fn(usize, &mut Command))) {
    test("shm", &|_, _| {});
    test("tcp", &|_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    test("shm+tcp", &|rank, command| _ = command.env("KOLO_HOST", format!("host{}", rank % 2)));
}

/// The causes that peers report for a process that has ended.
pub(crate) const GONE: [&str; 3] = ["Died", "Closed", "Gone"];

pub(crate) fn killed() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("pipe", 4, 600_000, more);
        job.all_work();
        let since = now();
        job.signal(2, libc::SIGKILL);
        let told = job.all_name(&[0, 1, 3], 2, &GONE, since);
        in_time(&format!("{name}: all ranks know"), told.after, AT_ONCE);
        measured.push(format!("{name}: {:.0?}", told.after));
    });
    Passed(measured.join(", "))
}

pub(crate) fn stopped() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let deadline = Duration::from_secs(3);
        let mut job = Job::start("work", 4, deadline.as_millis() as u64, more);
        job.all_work();
        let since = now();
        job.signal(1, libc::SIGSTOP);
        // A rank that waits for the stopped rank logs a warning before the deadline.
        let is_warned = [0, 2, 3].map(|rank| job.hears_log_before_failing(rank, &["WARN", "waits for a rank that is stopped"]));
        assert!(is_warned.contains(&true), "{name}: no rank logs a warning");
        let told = job.all_name(&[0, 2, 3], 1, &["Stopped"], since);
        assert!(told.text.contains("is stopped"), "{}", told.text);
        is_at_deadline(name, told.after, deadline);
        // When the rank continues, it learns that its peers have not waited.
        job.signal(1, libc::SIGCONT);
        let failure = job.failure(1);
        assert!(failure.culprit.is_some(), "{}", failure.text);
        job.lives_on(1);
        measured.push(format!("{name}: {:.1?}", told.after));
    });
    Passed(format!("deadline 3 s; {}", measured.join(", ")))
}

/// A rank is killed, or its peer's deadline passes, while the system copies a message from one to the
/// other.
pub(crate) fn ended_in_a_message() -> Outcome {
    for (culprit, other) in [(0, 1), (1, 0)] {
        for _ in 0..5 {
            let mut job = Job::start("messages", 2, 600_000, |_, _| {});
            job.all_work();
            let since = now();
            job.signal(culprit, libc::SIGKILL);
            let told = job.all_name(&[other], culprit, &GONE, since);
            in_time("the other rank knows", told.after, AT_ONCE);
        }
    }
    for _ in 0..3 {
        let mut job = Job::start("messages", 2, 1_000, |_, _| {});
        job.all_work();
        job.signal(0, libc::SIGSTOP);
        let since = now();
        job.all_name(&[1], 0, &["Stopped"], since);
        // Rank 1 has changed its buffer. Rank 0 must not take that for the message.
        job.signal(0, libc::SIGCONT);
        let failure = job.failure(0);
        assert_eq!(failure.culprit, Some(1), "{}", failure.text);
        job.lives_on(0);
    }
    Passed(String::new())
}

/// Checks that something happened at the deadline of an operation that may have begun a little
/// before the fault.
fn is_at_deadline(name: &str, after: Duration, deadline: Duration) {
    assert!(after >= deadline / 2, "{name}: already after {after:?}");
    let late = deadline + at_most(ASKED);
    assert!(after < late, "{name}: after {after:?}; {late:?} is late");
}

/// Rank 0 sends to a rank that is stopped and with which it has no link yet. The system accepts the
/// connection, but the rank does not answer.
pub(crate) fn stopped_without_a_link() -> Outcome {
    let deadline = Duration::from_secs(6);
    let mut measured = Vec::new();
    let mut test = |name: &str, world: usize, more: &dyn Fn(usize, &mut Command)| {
        let mut job = Job::start("unlinked", world, deadline.as_millis() as u64, more);
        job.all_work();
        job.signal(world - 1, libc::SIGSTOP);
        let since = now();
        job.signal(0, libc::SIGUSR1);
        for ended in ["unlinked aborted", "unlinked dropped"] {
            let line = job.hear(0, ended);
            let (micros, text) = line.split_once(' ').unwrap();
            assert!(text.contains("abort"), "{name}: {ended}: {text}");
            let took = Duration::from_micros(micros.parse().unwrap());
            in_time(&format!("{name}: {ended}"), took, ASKED);
            measured.push(format!("{name}: {ended} after {took:.0?}"));
        }
        let told = job.all_name(&[0], world - 1, &["Stopped"], since);
        assert!(told.after >= deadline, "{name}: already after {:?}", told.after);
        is_at_deadline(name, told.after, deadline);
    };
    test("shm", 2, &|_, _| {});
    // Rank 0 exchanges messages with ranks 1 and 2 when they start.
    test("shm+tcp", 4, &|rank, command| _ = command.env("KOLO_HOST", format!("host{}", rank % 2)));
    Passed(format!("deadline {deadline:?}; {}", measured.join(", ")))
}

/// Ranks 0 and 3 wait for rank 2, which waits for rank 1 in a part of the ranks.
pub(crate) fn stopped_in_a_part() -> Outcome {
    on_every_transport(|name, more| {
        let deadline = Duration::from_secs(2);
        let mut job = Job::start("parts", 4, deadline.as_millis() as u64, |rank, command| {
            more(rank, command);
            if rank == 2 {
                command.env(DEADLINE, "600000");
            }
        });
        job.hear(1, "ready");
        let since = now();
        job.signal(1, libc::SIGSTOP);
        let told = job.all_name(&[0, 3], 1, &["Stopped"], since);
        is_at_deadline(name, told.after, deadline);
    });
    Passed(String::new())
}

pub(crate) fn left_early() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("leave", 3, 600_000, more);
        job.hear(2, "dropped");
        let since = now();
        // Twenty rounds of two all-reduces each.
        let Told { cause, text, after } = job.all_name(&[0, 1], 2, &["Left"], since);
        assert_eq!(cause, "Left { last_seq: 40 }", "{name}");
        assert!(text.contains("has left; its last operation was seq 40"), "{name}: {text}");
        in_time(&format!("{name}: all ranks know"), after, ASKED);
        job.ends_clean(2);
    });
    Passed(String::new())
}

/// What a rank has sent before it left counts, also on communicators where no peer has read it yet.
pub(crate) fn left_in_good_order() -> Outcome {
    on_every_transport(|_, more| {
        let mut job = Job::start("last words", 2, 600_000, more);
        job.all_say("done");
    });
    Passed(String::new())
}

/// Rank 1 calls another operation, or the same with another count, element type, reduction or root
/// than ranks 0 and 2.
pub(crate) fn different_calls() -> Outcome {
    on_every_transport(|name, more| show_both_sides(name, &mut Job::start("differ", 3, 600_000, more)));
    Passed(String::new())
}

/// Checks the errors of all ranks of a job whose rank 1 makes other calls.
pub(crate) fn show_both_sides(name: &str, job: &mut Job) {
    let ways = [
        ("operation", ["broadcast seq=1 i32 x 1000 root=1", "all_reduce seq=1 i32 x 1000 sum"]),
        ("count", ["all_reduce seq=1 i32 x 999 sum", "all_reduce seq=1 i32 x 1000 sum"]),
        ("element", ["all_reduce seq=1 u32 x 1000 sum", "all_reduce seq=1 i32 x 1000 sum"]),
        ("reduction", ["all_reduce seq=1 i32 x 1000 max", "all_reduce seq=1 i32 x 1000 sum"]),
        ("root", ["broadcast seq=1 i32 x 1000 root=0", "broadcast seq=1 i32 x 1000 root=2"]),
    ];
    for (way, [odd, others]) in ways {
        for rank in 0..3 {
            let line = job.hear(rank, way);
            let (memory, failure) = line.split_once(' ').unwrap();
            let Failure { kind, culprit, pair, text, .. } = Failure::parse(failure);
            assert_eq!(memory, "kept", "{name}, {way}, rank {rank}: {text}");
            // A rank that has received nothing from another one notices at its next call.
            let sides = [odd, others, "barrier seq=2"].into_iter().filter(|side| text.contains(&format!("[{side}]")));
            assert_eq!(sides.count(), 2, "{name}, {way}, rank {rank}: {text}");
            // The odd rank is one of the pair, and at fault.
            assert!(pair.len() == 2 && pair.contains(&1), "{name}, {way}, rank {rank}: {text}");
            assert_eq!(culprit, Some(1), "{name}, {way}, rank {rank}: {text}");
            assert_eq!(kind == "Mismatch", pair.contains(&rank) && kind != "Peer", "{name}, {way}, rank {rank}: {text}");
            job.hear(rank, "revoked");
        }
    }
    (0..3).for_each(|rank| job.ends_clean(rank));
}

/// Rank 1 drops its communicator while its operation waits for rank 3, as do those of ranks 0 and
/// 2.
pub(crate) fn dropped_with_work() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("drop", 4, 600_000, more);
        let took = Duration::from_micros(job.hear(1, "dropped").parse().unwrap());
        let since = now();
        job.hear(1, "given up");
        job.ends_clean(1);
        let told = job.all_name(&[0, 2], 1, &["Aborted"], since);
        in_time(&format!("{name}: the drop"), took, ASKED);
        in_time(&format!("{name}: all ranks know"), told.after, ASKED);
    });
    Passed(String::new())
}

pub(crate) fn forked() -> Outcome {
    on_every_transport(|_, more| _ = Job::start("fork", 2, 600_000, more).all_say("done"));
    Passed(String::new())
}

/// A child keeps open everything that its killed parent had open.
pub(crate) fn killed_with_a_child() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("parent", 3, 600_000, more);
        let child: i32 = job.hear(1, "child").parse().unwrap();
        job.all_work();
        let since = now();
        job.signal(1, libc::SIGKILL);
        let told = job.all_name(&[0, 2], 1, &["Died"], since);
        // SAFETY: the child lives until this call, because it only waits for signals.
        unsafe { libc::kill(child, libc::SIGKILL) };
        in_time(&format!("{name}: all ranks know"), told.after, ASKED);
        measured.push(format!("{name}: {:.0?}", told.after));
    });
    Passed(measured.join(", "))
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

/// Rank 1 reserves registered memory and is interrupted each time. Its peers have a longer
/// deadline, a shorter one or the same.
pub(crate) fn no_memory_in_time() -> Outcome {
    for (own, others, causes) in [(1, 600, &["Failed"][..]), (4, 1, &["Silent"]), (1, 1, &["Failed", "Silent"])] {
        let mut job = Job::start("slow memory", 3, others * 1000, |rank, command| {
            if rank == 1 {
                command.env(DEADLINE, (own * 1000).to_string());
            }
        });
        let Failure { kind, culprit, text, .. } = job.failure(1);
        assert_eq!((kind.as_str(), culprit), ("Os", None), "{own} s, others {others} s: {text}");
        let what = format!("alloc seq=2: rank 1 has not reserved 8388608 bytes of shared memory within its deadline of {own}s");
        assert_eq!(text, format!("{what}; allocate less, or set a longer timeout: timed out"));
        job.lives_on(1);
        job.all_name(&[0, 2], 1, causes, now());
    }
    Passed(String::new())
}

/// A rank has no descriptor for a link that it opens, and its peers wait for both ranks of that
/// link. (A rank that accepts a link may get a descriptor that another thread closes in time. Then
/// nothing fails.)
pub(crate) fn no_descriptors() -> Outcome {
    for lacks in [0, 2] {
        let mut job = Job::start("no descriptors", 6, 4_000, |_, command| {
            command.env("KOLO_TRANSPORT", "tcp").env("KOLO_TEST_LACKS", lacks.to_string());
        });
        let Failure { kind, culprit, text, .. } = job.failure(lacks);
        assert_eq!((kind.as_str(), culprit), ("Os", None), "rank {lacks}: {text}");
        assert!(text.contains("Too many open files"), "rank {lacks}: {text}");
        job.lives_on(lacks);
        let others: Vec<usize> = (0..6).filter(|rank| *rank != lacks).collect();
        // The rank cannot tell its peers why, and ends soon.
        job.all_name(&others, lacks, &[&GONE[..], &["Failed", "Revoked", "Unresponsive", "Left"]].concat(), now());
    }
    // Without descriptors before the start. The other rank waits for rank 0, which cannot report.
    let mut job = Job::start("few descriptors", 2, 60_000, |_, command| _ = command.env("KOLO_START_TIMEOUT", "3s"));
    let [first, second] = [0, 1].map(|rank| job.hear(rank, "refused"));
    let is_own = |text: &str| (text.starts_with("Os: ") || text.starts_with("Store: ")) && text.contains("Too many open files");
    assert!(is_own(&first), "{first}");
    assert!(is_own(&second) || second.starts_with("Missing: ") && second.contains("missing 0;"), "{second}");
    Passed(String::new())
}

/// One of three ranks has a few descriptors only, which run out somewhere in the start. That rank
/// reports its own error, and no rank names another one.
pub(crate) fn few_descriptors() -> Outcome {
    const MOST: u64 = 14;
    let mut own = 0;
    for lacks in [0, 2] {
        let stores: [fn() -> String; 2] = [|| fresh().0, || format!("tcp://127.0.0.1:{}", free_port())];
        // All at once: where rank 0 cannot tell the others, they wait until their deadline.
        let mut jobs: Vec<(u64, Job)> = Vec::new();
        for (most, store) in (6..=MOST).flat_map(|most| stores.map(|store| (most, store()))) {
            let mut job = Job::empty();
            let (_, name) = fresh();
            for number in 0..3 {
                let mut command = rank("once", number, 3, &store, &name);
                command.env("KOLO_START_TIMEOUT", "20s").env_remove("KOLO_SECRET");
                if number == lacks {
                    command.env("KOLO_TEST_DESCRIPTORS", most.to_string());
                }
                job.add(command);
            }
            jobs.push((most, job));
        }
        for (most, mut job) in jobs {
            for number in 0..3 {
                let (what, text) = job.hear_one(number, &["refused", "failed", "done"]);
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
    }
    assert!(own > 4, "the descriptors ran out {own} times");
    Passed(format!("the descriptors ran out {own} times"))
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
        // The system may forbid shared memory.
        ("no memfd", &[0], "Operation not permitted"),
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
        job.signal(0, libc::SIGKILL);
        job.all_name(&[1, 2], 0, &GONE, now());
    }
    Passed(String::new())
}

/// Returns the inodes of the shared memory that processes have mapped or open.
fn regions(pids: impl Iterator<Item = u32>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for pid in pids {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let mapped = maps.lines().filter(|line| line.contains("memfd:kolo"));
        found.extend(mapped.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)));
        for file in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let is_region = std::fs::read_link(file.path()).is_ok_and(|name| name.to_string_lossy().contains("memfd:kolo"));
            let number = std::fs::metadata(file.path()).map(|file| std::os::unix::fs::MetadataExt::ino(&file));
            found.extend(number.ok().filter(|_| is_region).map(|number| number.to_string()));
        }
    }
    found
}

/// Returns all processes of this machine.
fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the shared memory in use on this machine, in bytes.
fn shared_memory() -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("Shmem:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

/// Returns the names of kolo's sockets and files.
fn names() -> BTreeSet<String> {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let sockets = sockets.lines().filter_map(|line| line.split_whitespace().last()).filter(|name| name.starts_with("@kolo"));
    let list = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
    };
    let files = [list("/dev/shm".as_ref()), list(&std::env::temp_dir())].concat();
    sockets.map(str::to_owned).chain(files.into_iter().filter(|name| name.contains("kolo"))).collect()
}

pub(crate) fn nothing_left_over() -> Outcome {
    let before = names();
    let mut job = Job::start("registered", 4, 600_000, |_, _| {});
    job.all_work();
    let pids = [0, 1, 2, 3].map(|rank| job.pid(rank));
    let held = regions(pids.into_iter());
    assert!(!held.is_empty(), "the four ranks of a host share no memory");
    let of_job: BTreeSet<String> = names().difference(&before).cloned().collect();
    assert!(of_job.iter().any(|name| name.starts_with('@')), "the ranks have no listener: {of_job:?}");
    let full = shared_memory();
    let large = 4 * REGISTERED * size_of::<u64>();
    assert!(full >= large, "the registered buffers of four ranks have {large} bytes, shared memory in use {full}");
    (0..4).for_each(|rank| job.signal(rank, libc::SIGKILL));
    job.all_say("end");
    drop(job);
    wait_until("regions of shared memory are left", || regions(processes()).is_disjoint(&held));
    wait_until("sockets or files are left", || names().is_disjoint(&of_job));
    // Other programs also use shared memory, but less.
    wait_until("shared memory is left", || shared_memory() + large / 4 * 3 < full);
    Passed(format!("{} regions of shared memory, {} MiB", held.len(), large >> 20))
}

/// Ranks 0 and 2 make a call that rank 1 does not make.
pub(crate) fn uneven() -> Outcome {
    on_every_transport(|name, more| {
        let deadline = Duration::from_secs(4);
        let mut job = Job::start("late", 3, deadline.as_millis() as u64, more);
        job.hear(1, "late");
        let since = now();
        let warned = ["WARN", "all_reduce waits for a rank that is alive, but did not make this call yet", "rank=1"];
        let is_warned = [0, 2].map(|rank| job.hears_log_before_failing(rank, &warned));
        assert!(is_warned.contains(&true), "{name}: no rank logs a warning");
        let told = job.all_name(&[0, 2], 1, &["Absent"], since);
        assert!(told.cause.contains("last_seq: 40"), "{name}: {}", told.cause);
        assert!(told.text.contains("is alive, but did not make this call"), "{name}: {}", told.text);
        is_at_deadline(name, told.after, deadline);
    });
    Passed(String::new())
}

pub(crate) fn survivors_go_on() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("shrink", 8, 600_000, more);
        job.all_work();
        let since = now();
        job.signal(3, libc::SIGKILL);
        let left = [0, 1, 2, 4, 5, 6, 7];
        let mut slowest = Duration::ZERO;
        for rank in left {
            let said = job.hear(rank, "shrunk");
            let (size, took) = said.split_once(' ').unwrap();
            assert_eq!(size, "7");
            slowest = slowest.max(Duration::from_micros(took.parse().unwrap()));
        }
        job.all_name(&left, 3, &GONE, since);
        in_time(&format!("{name}: the survivors continue"), slowest, ASKED);
        measured.push(format!("{name}: {slowest:.0?}"));
    });
    Passed(format!("8 ranks, slowest shrink: {}", measured.join(", ")))
}

/// A rank in a split does not wait for a rank that has ended, or that has learnt of the failure
/// elsewhere.
pub(crate) fn killed_while_splitting() -> Outcome {
    let mut slowest = Duration::ZERO;
    on_every_transport(|_, more| {
        for _ in 0..8 {
            let mut job = Job::start("split", 4, 600_000, |rank, command| {
                command.env("KOLO_START_TIMEOUT", "600s");
                more(rank, command);
            });
            job.all_work();
            let since = now();
            job.signal(2, libc::SIGKILL);
            // Some ranks may still be in a split that others have completed.
            for rank in [0, 1, 3] {
                let Failure { at, culprit, cause, text, .. } = job.failure(rank);
                assert_eq!(culprit, Some(2), "rank {rank}: {text}");
                assert!(!cause.is_empty(), "rank {rank}: {text}");
                slowest = slowest.max(Duration::from_micros(at.saturating_sub(since)));
            }
            (0..4).filter(|rank| *rank != 2).for_each(|rank| job.ends_clean(rank));
        }
    });
    in_time("all ranks know", slowest, ASKED);
    Passed(format!("slowest: {slowest:.0?}"))
}

/// Each rank notices one of two ends first, and all name the same rank.
pub(crate) fn two_killed() -> Outcome {
    on_every_transport(|_, more| {
        let mut job = Job::start("work", 6, 600_000, more);
        job.all_work();
        let since = now();
        job.signal(4, libc::SIGKILL);
        job.signal(1, libc::SIGKILL);
        let first = job.peek_failure(0).culprit.unwrap();
        assert!([1, 4].contains(&first), "rank {first} is named");
        job.all_name(&[0, 2, 3, 5], first, &GONE, since);
    });
    Passed(String::new())
}

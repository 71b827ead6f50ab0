//! Faults of processes: rows 1 to 3, 13 to 15, 24, 40 and 61.

use std::process::Command;
use std::time::Duration;

use crate::failure::Failure;
use crate::job::{ASKED, AT_ONCE, Job, Told, at_most, in_time, pace};
use crate::rank::DEADLINE;
use crate::runner::Outcome::{self, Passed};
use crate::system::{SAYS_STOPPED, STOPPED, WARNS_OF_STOPPED, now};

/// Runs a test on every transport, with the name of the transport and the environment of its ranks.
pub(crate) fn on_every_transport(mut test: impl FnMut(&str, &dyn Fn(usize, &mut Command))) {
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
        job.kill(2);
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
        job.stop(1);
        // A rank that waits for the stopped rank logs a warning before the deadline.
        let is_warned = [0, 2, 3].map(|rank| job.hears_log_before_failing(rank, &["WARN", WARNS_OF_STOPPED]));
        assert!(is_warned.contains(&true), "{name}: no rank logs a warning");
        let told = job.all_name(&[0, 2, 3], 1, &STOPPED, since);
        assert!(told.text.contains(SAYS_STOPPED), "{}", told.text);
        is_at_deadline(name, told.after, deadline);
        // When the rank continues, it learns that its peers have not waited.
        job.go_on(1);
        let failure = job.failure(1);
        assert!(failure.culprit.is_some(), "{}", failure.text);
        job.lives_on(1);
        measured.push(format!("{name}: {:.1?}", told.after));
    });
    Passed(format!("deadline 3 s; {}", measured.join(", ")))
}

/// A rank is killed, or its peer's deadline passes, in the middle of a message from one to the other.
pub(crate) fn ended_in_a_message() -> Outcome {
    for (culprit, other) in [(0, 1), (1, 0)] {
        for _ in 0..5 {
            let mut job = Job::start("messages", 2, 600_000, |_, _| {});
            job.all_work();
            let since = now();
            job.kill(culprit);
            let told = job.all_name(&[other], culprit, &GONE, since);
            in_time("the other rank knows", told.after, AT_ONCE);
        }
    }
    // The ranks do not begin at the same time, and messages that end take a small part of it, also on a
    // busy machine.
    let deadline = Duration::from_secs(10).max(20 * pace());
    let pass = || {
        let mut job = Job::start("messages", 2, deadline.as_millis() as u64, |_, _| {});
        job.all_work();
        job.stop(0);
        let since = now();
        job.all_name(&[1], 0, &STOPPED, since);
        // Rank 1 has changed its buffer, and rank 0 has a part of the message.
        job.go_on(0);
        let failure = job.failure(0);
        assert_eq!(failure.culprit, Some(1), "{}", failure.text);
        job.lives_on(0);
    };
    std::thread::scope(|scope| (0..3).for_each(|_| _ = scope.spawn(pass)));
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
        job.stop(world - 1);
        let since = now();
        job.tell(0);
        for ended in ["unlinked aborted", "unlinked dropped"] {
            let line = job.hear(0, ended);
            let (micros, text) = line.split_once(' ').unwrap();
            assert!(text.contains("abort"), "{name}: {ended}: {text}");
            let took = Duration::from_micros(micros.parse().unwrap());
            in_time(&format!("{name}: {ended}"), took, ASKED);
            measured.push(format!("{name}: {ended} after {took:.0?}"));
        }
        let told = job.all_name(&[0], world - 1, &STOPPED, since);
        assert!(told.after >= deadline, "{name}: already after {:?}", told.after);
        is_at_deadline(name, told.after, deadline);
    };
    test("shm", 2, &|_, _| {});
    // Rank 0 exchanges messages with ranks 1 and 2 when they start.
    // With measured costs, the choice of algorithms may link these ranks before.
    let on_two_hosts = |rank, command: &mut Command| {
        _ = command.env("KOLO_HOST", format!("host{}", rank % 2)).env("KOLO_NETWORK_LATENCY", "25us");
    };
    test("shm+tcp", 4, &on_two_hosts);
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
        job.stop(1);
        let told = job.all_name(&[0, 3], 1, &STOPPED, since);
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
        job.kill(3);
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

/// A rank that learns of a failure in a part shrinks the whole, where the others wait. All name the
/// rank that was killed, and not the one that shrinks.
pub(crate) fn part_fails() -> Outcome {
    on_every_transport(|name, more| {
        for drops_first in ["yes", "no"] {
            let mut job = Job::start("part fails", 4, 600_000, |rank, command| {
                command.env("KOLO_TEST_DROPS", drops_first);
                more(rank, command);
            });
            job.all_work();
            job.kill(1);
            for rank in [0, 2, 3] {
                assert_eq!(job.hear(rank, "culprit"), "Some(1)", "{name}: rank {rank}");
                assert!(job.hear(rank, "shrunk").starts_with("3 "), "{name}: rank {rank}");
                job.ends_clean(rank);
            }
        }
    });
    Passed(String::new())
}

/// A receive from any rank fails soon if a rank was killed, although another one may still send.
pub(crate) fn any_fails_with_the_killed() -> Outcome {
    // Two hosts cannot tell a rank that was killed from one that left, unless they have a link.
    for transport in ["auto", "tcp"] {
        for killed in [1, 3] {
            let mut job = Job::start("any of some", 4, 600_000, |_, command| {
                command.env("KOLO_TEST_KILLED", killed.to_string()).env("KOLO_TRANSPORT", transport);
            });
            [0, killed].into_iter().for_each(|rank| _ = job.hear(rank, "ready"));
            job.kill(killed);
            let since = now();
            job.tell(0);
            let told = job.all_name(&[0], killed, &GONE, since);
            in_time("rank 0 knows", told.after, ASKED);
            (1..4).filter(|&rank| rank != killed).for_each(|rank| job.tell(rank));
        }
    }
    Passed(String::new())
}

/// A rank is killed for which none waits. The others wait for each other in different calls.
pub(crate) fn killed_while_calls_cross() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("crossed", 4, 600_000, more);
        job.all_work();
        job.kill(3);
        let since = now();
        for rank in 0..3 {
            let Failure { at, culprit, cause, text, .. } = job.failure(rank);
            assert_eq!(culprit, Some(3), "{name}: rank {rank}: {text}");
            assert!(GONE.contains(&cause.split([' ', '(']).next().unwrap()), "{name}: rank {rank}: {text}");
            in_time(&format!("{name}: rank {rank} knows"), Duration::from_micros(at.saturating_sub(since)), 2 * ASKED);
        }
        for rank in 0..3 {
            job.tell(rank);
            job.ends_clean(rank);
        }
    });
    Passed(String::new())
}

/// A rank that has left and whose process has ended has left, and has not died.
pub(crate) fn left_and_ended() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("ended", 2, 600_000, more);
        job.hear(1, "dropped");
        let since = now();
        let Told { after, .. } = job.all_name(&[0], 1, &["Left"], since);
        in_time(&format!("{name}: rank 0 knows"), after, ASKED);
    });
    Passed(String::new())
}

/// A rank is killed whose messages wait for their receives. A receive of another tag names it.
pub(crate) fn killed_with_a_message() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("tags", 2, 600_000, more);
        [0, 1].into_iter().for_each(|rank| _ = job.hear(rank, "ready"));
        job.kill(0);
        let since = now();
        job.tell(1);
        let failure = job.failure(1);
        assert_eq!(failure.culprit, Some(0), "{name}: {}", failure.text);
        assert!(GONE.contains(&failure.cause.split([' ', '(']).next().unwrap()), "{name}: {}", failure.text);
        in_time(&format!("{name}: the receiver knows"), Duration::from_micros(now() - since), ASKED);
        job.lives_on(1);
    });
    Passed(String::new())
}

/// The messages before the one that is awaited do not fit into the queue: at the deadline, the error lists
/// those that wait.
pub(crate) fn messages_that_do_not_fit() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("many tags", 2, 3000, |rank, command| {
            more(rank, command);
            if rank == 0 {
                command.env(DEADLINE, "600000");
            }
        });
        [0, 1].into_iter().for_each(|rank| _ = job.hear(rank, "ready"));
        job.tell(1);
        let failure = job.failure(1);
        assert_eq!(failure.culprit, Some(0), "{name}: {}", failure.text);
        let says = "sent no message with tag 4 within the deadline of 3.0s; 3 messages of other tags wait: 5, 6, 7; the next one, with tag 8, does not fit";
        assert!(failure.text.contains(says), "{name}: {}", failure.text);
        job.lives_on(1);
    });
    Passed(String::new())
}

/// A rank leaves without having received messages: it names their sender and their tags.
pub(crate) fn never_received() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("tags at the end", 2, 600_000, more);
        [0, 1].into_iter().for_each(|rank| _ = job.hear(rank, "ready"));
        job.tell(1);
        let said = job.hear_log(1, &["WARN", "leaves without having received these messages"]);
        assert!(said.contains("rank=0") && said.contains("messages=3") && said.contains("5, 7"), "{name}: {said}");
        job.ends_clean(1);
        job.tell(0);
        job.ends_clean(0);
    });
    Passed(String::new())
}

/// A receive from any rank fails when no rank is left that might send. It names the one that was killed,
/// and not one that left.
pub(crate) fn any_names_the_killed() -> Outcome {
    on_every_transport(|name, more| {
        for killed in [1, 3] {
            let mut job = Job::start("any", 4, 600_000, |rank, command| {
                command.env("KOLO_TEST_KILLED", killed.to_string());
                more(rank, command);
            });
            [0, killed].into_iter().for_each(|rank| _ = job.hear(rank, "ready"));
            job.kill(killed);
            job.tell(0);
            for rank in (1..4).filter(|&rank| rank != killed) {
                job.tell(rank);
                job.ends_clean(rank);
            }
            let Failure { culprit, cause, operation, text, .. } = job.failure(0);
            assert_eq!((culprit, operation.as_str()), (Some(killed), "recv seq=0"), "{name}: {text}");
            assert!(GONE.contains(&cause.split([' ', '(']).next().unwrap()), "{name}: {text}");
            job.lives_on(0);
        }
    });
    Passed(String::new())
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
            job.kill(2);
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

/// As above, where the rank that ends is in no part of the others. Those name it wherever they learn of
/// its end: in the split, or in a part that a rank has given up because of it.
pub(crate) fn killed_while_splitting_apart() -> Outcome {
    let mut in_parts = 0;
    on_every_transport(|name, more| {
        for _ in 0..8 {
            let mut job = Job::start("split apart", 4, 600_000, more);
            job.all_work();
            let killed = format!("pid {})", job.pid(2));
            job.kill(2);
            for rank in [0, 1, 3] {
                let Failure { cause, text, .. } = job.failure(rank);
                assert!(text.contains(&killed), "{name}: rank {rank}: {text}");
                in_parts += u32::from(cause.starts_with("Failed"));
            }
            for rank in [0, 1, 3] {
                job.tell(rank);
                job.ends_clean(rank);
            }
        }
    });
    Passed(format!("{in_parts} ranks learnt it in a part"))
}

/// Each rank notices one of two ends first, and all name the same rank.
pub(crate) fn two_killed() -> Outcome {
    on_every_transport(|_, more| {
        let mut job = Job::start("work", 6, 600_000, more);
        job.all_work();
        let since = now();
        job.kill(4);
        job.kill(1);
        let first = job.peek_failure(0).culprit.unwrap();
        assert!([1, 4].contains(&first), "rank {first} is named");
        job.all_name(&[0, 2, 3, 5], first, &GONE, since);
    });
    Passed(String::new())
}

/// Communicators end while a link for them arrives at a rank that opens none itself.
pub(crate) fn ended_with_a_link() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("arrivals", 2, 60_000, more);
        for left in job.all_say("sockets") {
            assert_eq!(left, "0 more", "{name}");
        }
        job.all_say("done");
    });
    Passed(String::new())
}

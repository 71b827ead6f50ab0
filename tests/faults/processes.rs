//! Faults of processes: rows 1 to 3, 13 to 15, 25 to 30.

use std::process::Command;
use std::time::Duration;

use crate::job::{Failure, Job, LATE};
use crate::rank::{DEADLINE, now};
use crate::runner::Outcome::{self, Passed};

/// How ranks can be connected, and what their environment is then.
fn on_every_transport(mut test: impl FnMut(&str, &dyn Fn(usize, &mut Command))) {
    test("shm", &|_, _| {});
    test("tcp", &|_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    test("shm+tcp", &|rank, command| _ = command.env("KOLO_HOST", format!("host{}", rank % 2)));
}

pub(crate) fn killed() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("pipe", 4, 120_000, more);
        job.all_work();
        let since = now();
        job.signal(2, libc::SIGKILL);
        let (texts, after) = job.all_name(&[0, 1, 3], 2, since);
        assert!(texts.iter().all(|text| text.contains("rank 2 (")), "{texts:?}");
        assert!(after < LATE / 2, "{name}: {after:?}");
        measured.push(format!("{name}: {after:.0?}"));
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
        let (texts, after) = job.all_name(&[0, 2, 3], 1, since);
        assert!(texts.iter().all(|text| text.contains("is stopped")), "{texts:?}");
        // The operation may have begun a little before.
        assert!(after >= deadline / 2 && after < deadline + LATE / 2, "{name}: {after:?}");
        // When it goes on, it learns that the others have not waited.
        job.signal(1, libc::SIGCONT);
        let failure = job.failure(1);
        assert!(failure.culprit >= 0, "{}", failure.text);
        job.hear(1, "clean");
        measured.push(format!("{name}: {after:.1?}"));
    });
    Passed(format!("deadline 3 s; {}", measured.join(", ")))
}

/// Ranks 0 and 3 wait for rank 2, which waits among some of the ranks for rank 1.
pub(crate) fn stopped_in_a_part() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("parts", 4, 2000, |rank, command| {
            more(rank, command);
            if rank == 2 {
                command.env(DEADLINE, "600000");
            }
        });
        job.hear(1, "ready");
        job.signal(1, libc::SIGSTOP);
        let (texts, _) = job.all_name(&[0, 3], 1, now());
        assert!(texts.iter().all(|text| text.contains("is stopped")), "{name}: {texts:?}");
    });
    Passed(String::new())
}

pub(crate) fn left_early() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("leave", 3, 60_000, more);
        let (texts, _) = job.all_name(&[0, 1], 2, now());
        assert!(texts.iter().all(|text| text.contains("has left") && text.contains("seq")), "{name}: {texts:?}");
        job.hear(2, "clean");
    });
    Passed(String::new())
}

pub(crate) fn different_calls() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("differ", 3, 60_000, more);
        for rank in 0..3 {
            let Failure { text, .. } = job.failure(rank);
            assert!(text.contains(" sum") && text.contains(" max"), "{name}, rank {rank}: {text}");
            job.hear(rank, "clean");
        }
    });
    Passed(String::new())
}

pub(crate) fn forked() -> Outcome {
    let mut job = Job::start("fork", 2, 60_000, |_, _| {});
    job.all_say("done");
    Passed(String::new())
}

/// A child holds all that its parent had open when that was killed.
pub(crate) fn killed_with_a_child() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("parent", 3, 120_000, more);
        let child: i32 = job.hear(1, "child").parse().unwrap();
        job.all_work();
        let since = now();
        job.signal(1, libc::SIGKILL);
        let (_, after) = job.all_name(&[0, 2], 1, since);
        // SAFETY: it is there until it is ended here: it does nothing else.
        unsafe { libc::kill(child, libc::SIGKILL) };
        assert!(after < LATE / 2, "{name}: {after:?}");
        measured.push(format!("{name}: {after:.0?}"));
    });
    Passed(measured.join(", "))
}

/// A signal every half millisecond, without SA_RESTART; and of row 1, SIGPIPE by default.
pub(crate) fn signals() -> Outcome {
    on_every_transport(|_, more| {
        let mut job = Job::start("signals", 3, 60_000, more);
        job.all_say("done");
    });
    Passed(String::new())
}

pub(crate) fn no_descriptors() -> Outcome {
    // Before anything is connected.
    let mut job = Job::start("few descriptors", 2, 60_000, |_, command| _ = command.env("KOLO_START_TIMEOUT", "3s"));
    for text in job.all_say("refused") {
        assert!(text.to_lowercase().contains("too many open files") || text.contains("did not join"), "{text}");
    }
    // And while work goes on.
    let mut job = Job::start("threads", 2, 5_000, |_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    let mut is_said = false;
    for rank in 0..2 {
        let text = job.failure(rank).text;
        // Who lacks something says so; to the other it has failed. Nobody says that it cannot be reached.
        let is_own = text.to_lowercase().contains("too many open files");
        let is_told = ["has revoked", "closed its connection", "did not take part"].iter().any(|what| text.contains(what));
        assert!(is_own || is_told, "{text}");
        is_said |= is_own;
    }
    assert!(is_said, "nobody says that descriptors are lacking");
    job.all_say("clean");
    Passed(String::new())
}

/// With a limit on the size of files, which counts for shared memory, too, there is none; ranks talk over TCP.
pub(crate) fn no_shared_memory() -> Outcome {
    let mut job = Job::start("no shared memory", 3, 60_000, |_, _| {});
    job.all_work();
    job.signal(0, libc::SIGKILL);
    job.all_name(&[1, 2], 0, now());
    Passed(String::new())
}

pub(crate) fn nothing_left_over() -> Outcome {
    let files = || {
        let list = |folder: &str| -> Vec<_> {
            std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        };
        let mut files = list("/dev/shm");
        files.extend(list(std::env::temp_dir().to_str().unwrap()).into_iter().filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(&format!("kolo-faults-{}", std::process::id())))
        }));
        files.sort();
        files
    };
    let before = files();
    let mut job = Job::start("work", 4, 60_000, |_, _| {});
    job.all_work();
    (0..4).for_each(|rank| job.signal(rank, libc::SIGKILL));
    job.all_say("end");
    assert_eq!(files(), before);
    Passed(String::new())
}

pub(crate) fn survivors_go_on() -> Outcome {
    let mut measured = Vec::new();
    on_every_transport(|name, more| {
        let mut job = Job::start("shrink", 8, 60_000, more);
        job.all_work();
        let since = now();
        job.signal(3, libc::SIGKILL);
        let left = [0, 1, 2, 4, 5, 6, 7];
        let mut slowest = 0;
        for rank in left {
            let said = job.hear(rank, "shrunk");
            let (size, took) = said.split_once(' ').unwrap();
            assert_eq!(size, "7");
            slowest = slowest.max(took.parse().unwrap());
        }
        job.all_name(&left, 3, since);
        let slowest = Duration::from_micros(slowest);
        assert!(slowest < LATE / 2, "{name}: {slowest:?}");
        measured.push(format!("{name}: {slowest:.0?}"));
    });
    Passed(format!("8 ranks, slowest shrink: {}", measured.join(", ")))
}

/// Whoever makes a part of the ranks does not wait for one that has ended, or has learnt of it elsewhere.
pub(crate) fn killed_while_splitting() -> Outcome {
    let mut slowest = Duration::ZERO;
    on_every_transport(|_, more| {
        for _ in 0..8 {
            let mut job = Job::start("split", 4, 120_000, |rank, command| {
                command.env("KOLO_START_TIMEOUT", "120s");
                more(rank, command);
            });
            job.all_work();
            let since = now();
            job.signal(2, libc::SIGKILL);
            let (_, after) = job.all_name(&[0, 1, 3], 2, since);
            slowest = slowest.max(after);
        }
    });
    assert!(slowest < LATE / 2, "{slowest:?}");
    Passed(format!("slowest: {slowest:.0?}"))
}

/// Different ranks notice one or the other first; all name the same.
pub(crate) fn two_killed() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("work", 6, 60_000, more);
        job.all_work();
        job.signal(4, libc::SIGKILL);
        job.signal(1, libc::SIGKILL);
        let culprits: Vec<i64> = [0, 2, 3, 5].map(|rank| job.failure(rank).culprit).into();
        assert!(culprits.iter().all(|culprit| *culprit == culprits[0] && [1, 4].contains(culprit)), "{name}: {culprits:?}");
    });
    Passed(String::new())
}

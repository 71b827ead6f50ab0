//! What the ranks do. They write lines: what happens to them, and when, on the clock that all processes of a machine share.

use std::io::Write;
use std::time::{Duration, Instant};

use kolo::{Communicator, Error, ReduceOp};

/// What a rank is told to do.
pub(crate) const WORKER: &str = "KOLO_TEST_WORKER";

/// The deadline of its operations, in milliseconds.
pub(crate) const DEADLINE: &str = "KOLO_TEST_DEADLINE";

pub(crate) fn work(task: &str) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let rank = number("KOLO_RANK").unwrap();
    let deadline = Duration::from_millis(number(DEADLINE).unwrap_or(60_000));
    let before = Belongings::count();
    prepare(task);
    let connected = Communicator::builder().timeout(deadline).connect();
    let comm = match connected {
        Ok(comm) => comm,
        Err(error) => {
            say(&format!("refused {error}"));
            return;
        }
    };
    match task {
        "threads" => {
            // More of what takes descriptors than there are.
            let mut parts = Vec::new();
            let error = loop {
                match comm.split(0, 0) {
                    Ok(part) => match part.send_recv(&[1u8], (comm.rank() + 1) % 2, &mut [0u8], (comm.rank() + 1) % 2) {
                        Ok(()) => parts.push(part),
                        Err(error) => break error,
                    },
                    Err(error) => break error,
                }
            };
            failed(&error);
        }
        "split" => {
            let mut is_ready = false;
            // Ranks count the same in the parts.
            let error = loop {
                match comm.split(0, 0) {
                    Ok(part) => drop(part),
                    Err(error) => break error,
                }
                if !std::mem::replace(&mut is_ready, true) {
                    say("ready");
                }
            };
            failed(&error);
            comm.abort();
        }
        "parts" => {
            let part = comm.split([0, 1, 1, 2][rank as usize], 0).unwrap();
            match rank {
                1 => {
                    say("ready");
                    loop {
                        std::thread::park();
                    }
                }
                2 => failed(&part.barrier().unwrap_err()),
                _ => failed(&comm.broadcast(&mut [0u8; 8], 2).unwrap_err()),
            }
        }
        "fork" => fork(&comm),
        // Says nothing more, and lives.
        "late" if rank == 1 => {
            assert!(collectives(&comm, u64::MAX, 20).is_none());
            say("late");
            loop {
                std::thread::park();
            }
        }
        "differ" => {
            let mut buf = vec![1i32; 1000];
            let error = match rank {
                1 => comm.all_reduce(&mut buf, ReduceOp::Max),
                _ => comm.all_reduce(&mut buf, ReduceOp::Sum),
            };
            // Between hosts, what came from ranks that agreed may be there already.
            assert!(comm.transport_name() != "shm" || buf.iter().all(|&x| x == 1), "memory was written");
            failed(&error.unwrap_err());
        }
        "once" => {
            comm.barrier().unwrap();
            say("done");
        }
        "leave" if rank == 2 => {
            assert!(collectives(&comm, u64::MAX, 20).is_none());
            drop(comm);
            return leftovers(&before);
        }
        _ => {
            if task == "parent" && rank == 1 {
                leave_a_child();
            }
            let error = collectives(&comm, if task == "signals" { 3000 } else { u64::MAX }, usize::MAX);
            let Some(error) = error else { return say("done") };
            failed(&error);
        }
    }
    if !matches!(comm.barrier(), Err(Error::Revoked { .. })) {
        say("usable");
    }
    if task == "shrink" {
        let began = Instant::now();
        let fewer = comm.shrink().unwrap();
        let took = began.elapsed();
        let mut sum = vec![1u64; 100_000];
        fewer.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert!(sum.iter().all(|&sum| sum == fewer.world_size() as u64));
        say(&format!("shrunk {} {}", fewer.world_size(), took.as_micros()));
        fewer.barrier().unwrap();
    }
    drop(comm);
    leftovers(&before);
}

/// All-reduces of changing sizes until one fails, or for so many milliseconds; this rank leaves after so many rounds.
fn collectives(comm: &Communicator, milliseconds: u64, rounds: usize) -> Option<Error> {
    let began = Instant::now();
    let world = comm.world_size() as u64;
    for round in 0..rounds {
        let len = [1, 1000, 300_000][round % 3];
        let mut buf = vec![comm.rank() as u64 + round as u64; len];
        if let Err(error) = comm.all_reduce(&mut buf, ReduceOp::Sum) {
            return Some(error);
        }
        let expected = world * (world - 1) / 2 + world * round as u64;
        assert!(buf.iter().all(|&x| x == expected), "a wrong result in round {round}");
        if round % 16 == 5 {
            say(&format!("ready {round}"));
        }
        // All end with the same round.
        let mut is_over = [u8::from(began.elapsed() >= Duration::from_millis(milliseconds))];
        match comm.all_reduce(&mut is_over, ReduceOp::Max) {
            Err(error) => return Some(error),
            Ok(()) if is_over[0] != 0 => return None,
            Ok(()) => {}
        }
    }
    None
}

fn failed(error: &Error) {
    say(&format!("failed {} {} {error}", now(), error.culprit().map_or(-1, |rank| rank as i64)));
}

/// What a process may leak.
#[derive(Debug, PartialEq)]
struct Belongings {
    threads: usize,
    descriptors: usize,
    segments: usize,
}

impl Belongings {
    fn count() -> Belongings {
        let entries = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Belongings {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            segments: maps.lines().filter(|line| line.contains("memfd:kolo")).count(),
        }
    }
}

/// Says whether this process has what it had before.
fn leftovers(before: &Belongings) {
    // A thread that was joined may take a moment to vanish from the list.
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut after = Belongings::count();
    while after != *before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        after = Belongings::count();
    }
    say(&if after == *before { "clean".to_owned() } else { format!("leaks: {after:?} after {before:?}") });
}

/// Microseconds on the clock that all processes share.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

fn say(line: &str) {
    // In one piece, whatever a signal does; and nobody may listen any more.
    let _ = std::io::stdout().write_all(format!("{line}\n").as_bytes());
    let _ = std::io::stdout().flush();
}

/// What makes the process unlike others, before it connects.
fn prepare(task: &str) {
    let limit = |resource, value: u64| {
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: the pointer is to a valid limit.
        assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
    };
    match task {
        "few descriptors" => limit(libc::RLIMIT_NOFILE, 8),
        "threads" => limit(libc::RLIMIT_NOFILE, 64),
        "no shared memory" => {
            // SAFETY: to ignore a signal calls nothing.
            unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
            limit(libc::RLIMIT_FSIZE, 64 << 10);
        }
        "signals" => {
            extern "C" fn handler(_: i32) {}
            let every = libc::timeval { tv_sec: 0, tv_usec: 500 };
            let timer = libc::itimerval { it_interval: every, it_value: every };
            // SAFETY: the handler does nothing; without SA_RESTART, system calls are interrupted. SIGPIPE would end the process.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handler as extern "C" fn(i32) as usize;
                assert_eq!(libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut()), 0);
                libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                assert_eq!(libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()), 0);
            }
        }
        // SAFETY: to handle a signal by default calls nothing of this program.
        "pipe" => _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) },
        _ => {}
    }
}

/// A process that keeps open what this one has open now, and does nothing.
fn leave_a_child() {
    // SAFETY: the child makes system calls only.
    match unsafe { libc::fork() } {
        // SAFETY: system calls with numbers.
        0 => unsafe {
            // But nobody shall wait for what it might say.
            (0..3).for_each(|file| _ = libc::close(file));
            libc::alarm(120);
            loop {
                libc::pause();
            }
        },
        child => say(&format!("child {child}")),
    }
}

/// A child that uses the communicator gets an error, and its parent and the peers go on.
fn fork(comm: &Communicator) {
    comm.barrier().unwrap();
    // SAFETY: the child calls what it may break its teeth on, and ends without running destructors of others.
    match unsafe { libc::fork() } {
        0 => {
            let error = comm.barrier().unwrap_err().to_string();
            let is_told = error.contains("fork");
            // SAFETY: ends this process.
            unsafe { libc::_exit(if is_told { 0 } else { 1 }) };
        }
        child => {
            let mut status = 0;
            // SAFETY: the pointer is to a valid number.
            unsafe { libc::waitpid(child, &mut status, 0) };
            comm.barrier().unwrap();
            say(if status == 0 { "done" } else { "the child was not told" });
        }
    }
    comm.abort();
}

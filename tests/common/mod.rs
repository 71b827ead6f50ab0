//! What the tests of the library have in common: random cases with a sequential reference, and
//! ranks that are threads.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test uses a part of it")]

mod barrier;
mod check;
pub(crate) mod gradients;
mod pattern;
mod value;
mod wait;

use std::process::Command;
use std::time::Duration;

use kolo::{Communicator, Transport};

pub(crate) use barrier::Barrier;
pub(crate) use check::{Case, check, ops};
pub(crate) use value::Value;
pub(crate) use wait::{PATIENCE, free_port, fresh, wait_until};

/// The deadline of the start. Programs under valgrind on a busy machine take minutes to connect.
pub(crate) const START: Duration = Duration::from_secs(900);

/// A deadline that a test waits for. Operations that should succeed before it take far less time,
/// even on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Gives the ranks that a command starts as much time to connect as a busy machine may need.
pub(crate) fn patient(command: &mut Command) -> &mut Command {
    command.env("KOLO_START_TIMEOUT", START.as_secs().to_string())
}

/// Whether a test tries every case of a matrix, and not only one of each kind: `KOLO_TEST_ALL=1`.
/// Stages of `.ci/long` set it.
pub(crate) fn all() -> bool {
    std::env::var_os("KOLO_TEST_ALL").is_some()
}

/// Returns the `what`-th random number of a seed (SplitMix64).
pub(crate) fn random(seed: u64, what: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ what.wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Prints what cannot run here, and why. The output of passing tests is not shown, but this is.
pub(crate) fn not_run(why: &str) {
    use std::io::Write;
    std::io::stderr().write_all(format!("NOT RUN: {why}\n").as_bytes()).unwrap();
}

/// Connects `world` ranks through a new store, each on its own thread, and runs `body` on each when all
/// have connected: a failure ends the start of a rank that is late.
pub(crate) fn run(
    world: usize,
    options: impl Fn(usize, kolo::Builder) -> kolo::Builder + Sync,
    body: impl Fn(Communicator) + Sync,
) {
    static STORES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = STORES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let all_are_there = Barrier::new(world);
    std::thread::scope(|scope| {
        for rank in 0..world {
            let (options, body, all_are_there) = (&options, &body, &all_are_there);
            scope.spawn(move || {
                let builder = Communicator::builder().rank(rank).world_size(world).store(format!("hash://test-{number}"));
                let comm = options(rank, builder.start_timeout(START)).connect().unwrap();
                all_are_there.wait();
                body(comm);
            });
        }
    });
}

/// Runs a test of this program in a process of its own, which has this variable.
pub(crate) fn in_a_process(test: &str, variable: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = patient(&mut command).args(["--exact", test]).env(variable, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{}: {said}{errors}", output.status);
    errors.lines().filter_map(|line| line.strip_prefix("NOT RUN: ")).for_each(not_run);
}

/// Starts a call on a thread of its own, and returns when the thread sleeps in it, or the call has
/// ended. Where the system does not say which threads sleep, some time later.
pub(crate) fn begin<'scope, T: Send + 'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    call: impl FnOnce() -> T + Send + 'scope,
) -> std::thread::ScopedJoinHandle<'scope, T> {
    let (begins, begun) = std::sync::mpsc::channel();
    let thread = scope.spawn(move || {
        begins.send(std::fs::read_link("/proc/thread-self").ok()).unwrap();
        call()
    });
    match begun.recv().unwrap() {
        Some(thread) => {
            let stat = std::path::Path::new("/proc").join(thread).join("stat");
            let sleeps = || {
                let said = std::fs::read_to_string(&stat).unwrap_or_default();
                // The state follows the name, which is in parentheses.
                said.rsplit_once(')').is_none_or(|(_, fields)| fields.starts_with(" S"))
            };
            wait_until("the call neither waits nor ends", sleeps);
        }
        None => std::thread::sleep(Duration::from_millis(20)),
    }
    thread
}

/// Runs the cases of a test that waits, each on a thread of its own.
pub(crate) fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, body: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let body = &body;
            scope.spawn(move || body(case));
        }
    });
}

/// Runs `body` on `world` ranks over every transport that threads of one process can use.
pub(crate) fn on_every_transport(world: usize, body: impl Fn(Communicator) + Sync) {
    run(world, |_, builder| builder, &body);
    run(world, |_, builder| builder.transport(Transport::Tcp), &body);
    run(world, |rank, builder| builder.host(format!("host{}", rank % 2)), &body);
    std::thread::scope(|scope| {
        for comm in Communicator::in_process(world).unwrap() {
            scope.spawn(|| body(comm));
        }
    });
}

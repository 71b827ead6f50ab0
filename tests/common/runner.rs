//! A test runner for programs that start themselves as ranks. It prints and counts the tests that
//! cannot run.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The outcome of a test that did not panic.
pub(crate) enum Outcome {
    /// The test passed, with its measurements.
    Passed(String),
    /// The test cannot run here, for this reason.
    NotRun(String),
    /// The test takes long, and runs with `KOLO_TEST_ALL=1`.
    #[allow(dead_code, reason = "not every program has such a test")]
    Left,
}

pub(crate) type Test = (&'static str, fn() -> Outcome);

/// Whether all tests run, and every case of a matrix.
pub(crate) fn all() -> bool {
    std::env::var_os("KOLO_TEST_ALL").is_some()
}

/// Runs the tests that the arguments select, `at_once` at a time, and prints their results in the
/// form of cargo's runner.
pub(crate) fn run(tests: &[Test], at_once: usize) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let chosen: Vec<&Test> = tests.iter().filter(|(name, _)| chosen(name)).collect();
    let [next, passed, failed, not_run] = [0; 4].map(AtomicUsize::new);
    let work = || {
        while let Some((name, test)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let began = Instant::now();
            match std::panic::catch_unwind(test) {
                Ok(Outcome::Passed(measured)) => {
                    passed.fetch_add(1, Ordering::Relaxed);
                    println!("test {name} ... ok ({:.1} s) {measured}", began.elapsed().as_secs_f64());
                }
                Ok(Outcome::NotRun(why)) => {
                    not_run.fetch_add(1, Ordering::Relaxed);
                    println!("test {name} ... NOT RUN: {why}");
                }
                Ok(Outcome::Left) => {
                    not_run.fetch_add(1, Ordering::Relaxed);
                    println!("test {name} ... left to KOLO_TEST_ALL=1");
                }
                Err(_) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    println!("test {name} ... FAILED");
                }
            }
        }
    };
    std::thread::scope(|scope| (0..at_once).for_each(|_| _ = scope.spawn(work)));
    let [passed, failed, not_run] = [passed, failed, not_run].map(AtomicUsize::into_inner);
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; {not_run} ignored; 0 measured; 0 filtered out\n");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

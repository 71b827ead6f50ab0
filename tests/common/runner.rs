//! A runner for tests that start their own program as the ranks they need. What cannot run is
//! printed and counted.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// How a test ended, unless it panicked.
pub(crate) enum Outcome {
    /// With what it measured, if anything.
    Passed(String),
    /// Why it cannot run here.
    NotRun(String),
}

pub(crate) type Test = (&'static str, fn() -> Outcome);

/// Runs those tests that the arguments ask for, so many at a time, and says how they ended as
/// cargo's own runner would.
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
                Err(_) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    println!("test {name} ... FAILED");
                }
            }
        }
    };
    std::thread::scope(|scope| (0..at_once).for_each(|_| _ = scope.spawn(work)));
    let [passed, failed, not_run] = [passed, failed, not_run].map(AtomicUsize::into_inner);
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed; {not_run} ignored; 0 measured; 0 filtered out\n");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

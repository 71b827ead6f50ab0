//! Collectives over several hosts, which `bed.sh` makes of network namespaces of this machine: their
//! results, the bytes that cross each host's link, the connections of links with a long round trip, and
//! ranks that other hosts cannot reach.
//!
//! Without `KOLO_TEST_WORKER` this program is a test runner, which starts itself with that variable
//! as the ranks.

#[cfg(target_os = "linux")]
mod link;
#[cfg(target_os = "linux")]
mod loopback;
#[cfg(target_os = "linux")]
#[path = "../common/pattern.rs"]
mod pattern;
#[cfg(target_os = "linux")]
mod rails;
#[cfg(target_os = "linux")]
#[path = "../common/runner.rs"]
mod runner;
#[cfg(target_os = "linux")]
mod slow;
#[cfg(target_os = "linux")]
mod tests;

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("NOT RUN: hosts are network namespaces of Linux");
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    match std::env::var("KOLO_TEST_WORKER") {
        Ok(worker) if worker == "far" => link::far_rank(),
        Ok(worker) if worker == "sums" => link::summing_rank(),
        Ok(worker) if worker == "links" => link::measuring_rank(),
        Ok(worker) if worker == "loopback" => loopback::rank(),
        Ok(worker) if worker == "rails" => rails::rank(),
        Ok(worker) if worker == "slow" => slow::rank(),
        Ok(worker) if worker == "avoiding" => slow::avoiding_rank(),
        Ok(_) => link::rank(),
        Err(_) => runner::run(tests::TESTS, tests::AT_ONCE),
    }
}

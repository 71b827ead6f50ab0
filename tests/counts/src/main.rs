//! Counts what operations cost on one rank: system calls, locked instructions (of the shortest
//! operations all instructions), readings of the clock, cache lines and bytes. Compares the counts
//! with `table.md`, so that a regression shows without a clock.
//!
//! One rank of a job executes its call step by step (ptrace), and each instruction is decoded. Its
//! peers run at full speed, and are as far ahead as they can be whenever the rank looks at what
//! they have published. A count in which the rank waited is discarded. Two of up to twelve counts
//! must equal the table; instructions must not exceed it.
//!
//! The counts are those of a build without optimisation across crates, as `.ci/run counts` makes:
//!
//! ```sh
//! export CARGO_PROFILE_RELEASE_LTO=off
//! cargo build --release -p kolo -p kolo-capi -p kolo-cli -p kolo-counts
//! target/release/kolo-counts
//! target/release/kolo-counts "all_reduce | 2 | 8 B"   # the rows that contain this
//! ```

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod cases;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod counter;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod job;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod rank;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod run;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod table;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod traced;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() -> std::process::ExitCode {
    run::main()
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() {
    println!("NOT RUN: the counts of operations are taken on Linux with processors of x86-64 only");
}

//! Ranks as processes: this program starts itself. One is killed.

#![allow(missing_docs)]
#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use common::*;

const RANK: &str = "KOLO_NCCL_TEST_RANK";
const RANKS: usize = 3;

/// Returns this program, to run one test as a rank.
fn as_rank(test: &str, rank: usize) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args([test, "--exact", "--nocapture"]).env(RANK, rank.to_string());
    program
}

fn start(rank: usize) -> Child {
    let mut program = as_rank("a_killed_rank_is_a_remote_error_on_all_survivors", rank);
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Reads the id from standard input, and calls until a call fails.
fn rank(rank: usize) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let bytes: Vec<u8> = line.trim().split(' ').map(|byte| byte.parse().unwrap()).collect();
    let comm = init(Id(bytes.try_into().unwrap()), RANKS, rank);
    assert_eq!(sum(comm, 1), Ok(RANKS as i32));
    println!("\nready");
    if rank == 1 {
        loop {
            std::thread::park();
        }
    }
    let code = sum(comm, 1).unwrap_err();
    println!("\nresult {code} {}", last_error(comm));
    assert_eq!(state(comm), code);
    ok(ncclCommAbort(comm));
}

#[test]
fn a_killed_rank_is_a_remote_error_on_all_survivors() {
    if let Ok(own) = std::env::var(RANK) {
        return rank(own.parse().unwrap());
    }
    // This process serves the store of the id, and is no rank.
    let id = unique_id().0.map(|byte| byte.to_string()).join(" ");
    let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let mut outputs = Vec::new();
    for child in &mut ranks {
        child.stdin.take().unwrap().write_all(format!("{id}\n").as_bytes()).unwrap();
        outputs.push(BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap));
    }
    for output in &mut outputs {
        assert!(output.any(|line| line == "ready"));
    }
    ranks[1].kill().unwrap();
    for survivor in [0, 2] {
        let told = outputs[survivor].find(|line| line.starts_with("result ")).expect("a survivor tells its result");
        assert!(told.starts_with(&format!("result {REMOTE_ERROR} ")), "{told}");
        let pid = ranks[1].id().to_string();
        assert!(told.contains("all_reduce") && told.contains("rank 1 (") && told.contains(&pid), "{told}");
        assert!(ranks[survivor].wait().unwrap().success());
    }
    ranks[1].wait().unwrap();
}

/// As under a launcher that has died: what is printed goes nowhere.
#[test]
fn no_call_fails_where_standard_error_is_closed() {
    if std::env::var_os(RANK).is_none() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut program = as_rank("no_call_fails_where_standard_error_is_closed", 0);
        let child = program.envs([("NCCL_DEBUG", "INFO"), ("NCCL_ALGO", "ring")]).stderr(writer).output().unwrap();
        assert!(child.status.success(), "{:?}: {}", child.status, String::from_utf8_lossy(&child.stdout));
        return;
    }
    let mut comm = null_mut();
    assert_eq!(ncclCommInitRankConfig(&mut comm, 1, unique_id(), 0, &Config::blocking(0)), IN_PROGRESS);
    let deadline = Instant::now() + Duration::from_secs(60);
    while state(comm) == IN_PROGRESS && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(state(comm), SUCCESS, "{}", last_error(comm));
    assert_eq!(ncclCommDestroy(std::ptr::dangling_mut()), INVALID_ARGUMENT);
    dump_parameters();
    assert!(!last_error(null_mut()).contains("panic"), "{}", last_error(null_mut()));
    ok(ncclCommDestroy(comm));
}

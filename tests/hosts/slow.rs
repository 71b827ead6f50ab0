//! A rank of a job in which one link becomes slow, and recovers.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp};

use crate::link::counters;

/// Elements of a sum: a good part of a second over the link.
const LEN: usize = 1 << 20;

/// Bytes that rank 0 sends before its link becomes slow: more than a second.
const BEFORE: u64 = 30 << 20;

/// How long to wait for what has to happen.
const PATIENCE: Duration = Duration::from_secs(120);

/// The rate of the link before, and while it is slow.
pub(crate) const RATE: &str = "200mbit";
const SLOW: &str = "20mbit";

/// What all ranks wait for next.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Fast,
    Slow,
    Recovering,
    Done,
}

pub(crate) fn rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let (mut phase, mut named) = (Phase::Fast, String::new());
    let began = Instant::now();
    while phase != Phase::Done {
        comm.all_reduce(&mut vec![1f32; LEN], ReduceOp::Sum).unwrap();
        if comm.rank() == 0 {
            assert!(began.elapsed() < PATIENCE, "{}", metrics());
            let slow: Vec<String> = slow_links();
            match phase {
                Phase::Fast if counters("eth0")[0] > BEFORE => {
                    limit(SLOW);
                    phase = Phase::Slow;
                }
                Phase::Slow if !slow.is_empty() => {
                    named = slow.join("\n");
                    limit(RATE);
                    phase = Phase::Recovering;
                }
                Phase::Recovering if slow.is_empty() => phase = Phase::Done,
                _ => {}
            }
        }
        let mut done = [u64::from(phase == Phase::Done)];
        comm.broadcast(&mut done, 0).unwrap();
        if done[0] == 1 {
            break;
        }
    }
    print!("{named}");
    ExitCode::SUCCESS
}

/// Limits what this host sends.
fn limit(rate: &str) {
    let qdisc = ["qdisc", "change", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb", "limit", "1mb"];
    assert!(Command::new("tc").args(qdisc).status().unwrap().success(), "cannot limit eth0 to {rate}");
}

/// Returns the metrics of this rank.
fn metrics() -> String {
    let path = std::env::var("KOLO_METRICS").unwrap().replace("{rank}", "0");
    let mut stream = UnixStream::connect(path.strip_prefix("unix:").unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Returns the samples of links of this rank that are slow.
fn slow_links() -> Vec<String> {
    let text = metrics();
    let mut samples = text.lines().filter(|line| line.starts_with("kolo_link_slowdown{")).peekable();
    assert!(samples.peek().is_some(), "{text}");
    samples.filter(|line| !line.ends_with(" 1")).map(str::to_owned).collect()
}

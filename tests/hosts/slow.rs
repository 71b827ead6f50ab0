//! Ranks of jobs in which one link becomes slow.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp};

use crate::link::counters;

/// Elements of a sum, and its bytes: a good part of a second over the link.
const LEN: usize = 1 << 20;
const SUM: u64 = 4 * LEN as u64;

/// Bytes that pass the link before it becomes slow: some seconds.
const BEFORE: u64 = 80 << 20;

/// How long to wait for what has to happen.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The rate of the link before, and while it is slow.
pub(crate) const RATE: &str = "200mbit";
const SLOW: &str = "20mbit";

/// The rate of a pair of hosts, while it is slow.
const SLOW_PAIR: &str = "40mbit";

/// After how many slow sums the message is received: the ranks have noticed the slow link by then.
const RECEIVED_AFTER: u32 = 8;

/// What all ranks wait for next.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Fast,
    Slow,
    Recovering,
    Done,
}

/// A rank of which a link becomes slow, and recovers.
pub(crate) fn rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let (mut stage, mut named) = (Stage::Fast, String::new());
    let began = Instant::now();
    while stage != Stage::Done {
        sum(&comm);
        if comm.rank() == 0 {
            assert!(began.elapsed() < TIMEOUT, "{}", metrics());
            let slow: Vec<String> = slow_links();
            match stage {
                Stage::Fast if counters("eth0")[0] > BEFORE => {
                    limit(SLOW);
                    stage = Stage::Slow;
                }
                Stage::Slow if !slow.is_empty() => {
                    named = slow.join("\n");
                    limit(RATE);
                    stage = Stage::Recovering;
                }
                Stage::Recovering if slow.is_empty() => stage = Stage::Done,
                _ => {}
            }
        }
        let mut done = [u64::from(stage == Stage::Done)];
        comm.broadcast(&mut done, 0).unwrap();
        if done[0] == 1 {
            break;
        }
    }
    print!("{named}");
    ExitCode::SUCCESS
}

/// A rank of four. The link between ranks 1 and 2 becomes slow, and then the sums go around it, until it carries
/// again what it did. Meanwhile a message waits for its receive on a link that the sums do not use.
pub(crate) fn avoiding_rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let neighbour = [None, Some(2), Some(1), None][comm.rank()];
    let (mut stage, mut before, mut slow_sums) = (Stage::Fast, 0, 0);
    let began = Instant::now();
    if comm.rank() == 0 {
        comm.send(&[7u8; 16], 2).unwrap();
    }
    while stage != Stage::Done {
        assert!(began.elapsed() < TIMEOUT, "the sums {} the link", if stage == Stage::Slow { "use" } else { "avoid" });
        sum(&comm);
        // Of a ring, one of the two sends to the other.
        let mut passed = [neighbour.map_or(0, sent_to)];
        comm.all_reduce(&mut passed, ReduceOp::Sum).unwrap();
        let uses_it = passed[0] - before > SUM / 2;
        let next = match stage {
            Stage::Fast if passed[0] > BEFORE => Some((Stage::Slow, SLOW_PAIR)),
            Stage::Slow if !uses_it => Some((Stage::Recovering, RATE)),
            Stage::Recovering if uses_it => Some((Stage::Done, RATE)),
            _ => None,
        };
        if let Some((next, rate)) = next {
            stage = next;
            neighbour.inspect(|&host| limit_pair(host, rate));
        }
        before = passed[0];
        slow_sums += u32::from(stage == Stage::Slow);
        if comm.rank() == 2 && slow_sums == RECEIVED_AFTER {
            slow_sums += 1;
            comm.recv(&mut [0u8; 16], 0).unwrap();
        }
    }
    assert!(slow_sums >= RECEIVED_AFTER, "the hosts measured while a message waited");
    ExitCode::SUCCESS
}

fn sum(comm: &Communicator) {
    let mut sum = vec![1f32; LEN];
    comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert!(sum.iter().all(|&sum| sum == comm.world_size() as f32));
}

/// The class of what this host sends to another one; see `bed.sh`.
fn class(host: usize) -> String {
    format!("1:{}", host + 2)
}

/// Limits what this host sends to another one.
fn limit_pair(host: usize, rate: &str) {
    let class = ["class", "change", "dev", "eth0", "parent", "1:", "classid", &class(host), "htb", "rate", rate];
    let changed = Command::new("tc").args(class).args(["burst", "128kb", "quantum", "60000"]).status().unwrap();
    assert!(changed.success(), "cannot limit what goes to host {host} to {rate}");
}

/// Returns the bytes that this host has sent to another one.
fn sent_to(host: usize) -> u64 {
    let shown = Command::new("tc").args(["-s", "class", "show", "dev", "eth0", "classid", &class(host)]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let sent = shown.lines().find_map(|line| line.trim().strip_prefix("Sent ")?.split(' ').next());
    sent.and_then(|sent| sent.parse().ok()).unwrap_or_else(|| panic!("{shown}"))
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

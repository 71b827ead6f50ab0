//! Strangers at the ports of a running job: rows 37 and 38.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::job::{Job, fresh, rank};
use crate::linux::Outcome::{self, Passed};
use crate::rank::now;

/// How many connections; CI makes do with fewer.
const COUNT: &str = "KOLO_TEST_GARBAGE";

/// The ports on which a process listens.
fn ports(pid: u32) -> Vec<u16> {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|file| {
            std::fs::read_link(file.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default());
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_its = fields.get(3) == Some(&"0A") && sockets.iter().any(|inode| fields.get(9) == Some(&inode.as_str()));
        is_its.then(|| u16::from_str_radix(fields[1].rsplit(':').next()?, 16).ok()).flatten()
    };
    tables.iter().flat_map(|table| table.lines().skip(1).filter_map(listens)).collect()
}

/// The memory that a process holds, in KiB.
fn memory(pid: u32) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

pub(crate) fn garbage() -> Outcome {
    let count: u32 = std::env::var(COUNT).ok().and_then(|text| text.parse().ok()).unwrap_or(2000);
    // No operation takes longer than 10 s.
    let mut job = Job::start("work", 2, 10_000, |_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    job.all_work();
    let ports = ports(job.pid(0));
    assert!(!ports.is_empty(), "rank 0 listens nowhere");
    // What is said first warms up what is kept.
    strangers(&ports, 200);
    let before = memory(job.pid(0));
    let began = Instant::now();
    strangers(&ports, count);
    let took = began.elapsed();
    let grown = memory(job.pid(0)) - before;
    assert!(grown < 8 << 10, "rank 0 has grown by {grown} KiB");
    for _ in 0..3 {
        job.all_work();
    }
    // And it still lets in whom it should: the peer asks at the door who has failed.
    job.signal(1, libc::SIGKILL);
    job.all_name(&[0], 1, now());
    Passed(format!("{count} connections in {took:.1?}, grown by {grown} KiB"))
}

fn strangers(ports: &[u16], count: u32) {
    // Silent ones, and those who drip, stay for a while.
    let mut staying: std::collections::VecDeque<TcpStream> = Default::default();
    for i in 0..count {
        let port = ports[i as usize % ports.len()];
        let Ok(mut stream) = TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(30)) else {
            continue;
        };
        let random = |at: u32| (i.wrapping_mul(0x9e37_79b9) ^ at.wrapping_mul(0x85eb_ca6b)).to_le_bytes()[at as usize % 4];
        match i % 4 {
            // Random bytes, of any length.
            0 => {
                let bytes: Vec<u8> = (0..i % 400).map(random).collect();
                let _ = stream.write_all(&bytes);
            }
            1 => staying.push_back(stream),
            2 => {
                let _ = stream.write_all(b"kolo");
                staying.push_back(stream);
            }
            // A true beginning, and then no proof.
            _ => {
                let mut hello = [0u8; 64];
                hello[..4].copy_from_slice(b"kolo");
                hello[4] = 3;
                hello[6..9].copy_from_slice(&[1, 0, 1]);
                let _ = stream.write_all(&hello);
                let _ = stream.set_read_timeout(Some(Duration::from_millis(1)));
                let _ = stream.read(&mut [0; 64]);
                let _ = stream.write_all(&[7; 32]);
            }
        }
        if staying.len() > 100 {
            staying.pop_front();
        }
    }
}

/// A rank with another secret learns so, and nobody else is kept from starting.
pub(crate) fn wrong_secret() -> Outcome {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (_, name) = fresh();
    let store = format!("tcp://127.0.0.1:{port}");
    let mut job = Job::empty();
    job.add(rank("once", 0, 2, &store, &name));
    let mut wrong = rank("once", 1, 2, &store, &name);
    wrong.env("KOLO_SECRET", "ff".repeat(32));
    job.add(wrong);
    let text = job.hear(1, "refused");
    assert!(text.contains("secret") && text.contains("KOLO_SECRET"), "{text}");
    job.add(rank("once", 1, 2, &store, &name));
    job.hear(0, "done");
    job.hear(2, "done");
    Passed(String::new())
}

//! Strangers at the ports of a running job: rows 37 and 38.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::job::{Job, fresh, rank};
use crate::rank::now;
use crate::runner::Outcome::{self, Passed};

/// The protocol's version, the length of what a listener answers to a hello, and its answer to a stranger.
const VERSION: u8 = 7;
const REPLY: usize = 84;
const REFUSES: u8 = 1;

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// What a rank says first to the next at its port, if this is the secret, and in no run in particular.
fn hello(job: &str, secret: &[u8]) -> Vec<u8> {
    let mut hello = vec![0; 80];
    hello[..4].copy_from_slice(b"kolo");
    hello[4] = VERSION;
    hello[6..9].copy_from_slice(&[1, 0, 1]);
    hello[16..32].copy_from_slice(&Sha256::digest(job.as_bytes())[..16]);
    // From rank 1.
    hello[56] = 1;
    let signature = mac(&mac(secret, &[b"kolo handshake in the network"]), &[b"hello", &hello]);
    [hello, signature.to_vec()].concat()
}

/// How many connections; CI makes do with fewer.
const COUNT: &str = "KOLO_TEST_GARBAGE";

/// Where a process listens.
fn doors(pid: u32) -> Vec<SocketAddr> {
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
        is_its.then(|| address(fields[1])).flatten()
    };
    tables.iter().flat_map(|table| table.lines().skip(1).filter_map(listens)).collect()
}

/// An address as the system's tables have it: words of four bytes as a little-endian machine reads them, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let words = host.as_bytes().chunks(8).map(|word| u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<u32>>>()?.into_iter().flat_map(u32::to_le_bytes).collect();
    let host = match *bytes.as_slice() {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    // Who listens everywhere listens here.
    let host = if host.is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { host };
    Some(SocketAddr::new(host, u16::from_str_radix(port, 16).ok()?))
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
    let mut job = Job::start("work", 2, 10_000, |_, command| {
        command.env("KOLO_TRANSPORT", "tcp").env("KOLO_JOB_ID", JOB);
    });
    job.all_work();
    let doors = doors(job.pid(0));
    assert!(!doors.is_empty(), "rank 0 listens nowhere");
    // What is said first warms up what is kept.
    strangers(&doors, 200);
    let before = memory(job.pid(0));
    let began = Instant::now();
    let came = strangers(&doors, count);
    assert!(came >= count / 10 * 9, "only {came} of {count} strangers got through");
    let took = began.elapsed();
    let grown = memory(job.pid(0)) - before;
    // Less than 1 KiB each, if none were ever forgotten.
    assert!(grown < i64::from(came), "rank 0 has grown by {grown} KiB");
    for _ in 0..3 {
        job.all_work();
    }
    // And it still lets in whom it should: the peer asks at the door who has failed.
    job.signal(1, libc::SIGKILL);
    job.all_name(&[0], 1, now());
    Passed(format!("{came} connections in {took:.1?}, grown by {grown} KiB"))
}

/// The job whose name the strangers know.
const JOB: &str = "no secret";

/// Returns how many got through.
fn strangers(doors: &[SocketAddr], count: u32) -> u32 {
    let (mut came, mut refused) = (0, 0);
    // Silent ones, and those who drip, stay for a while.
    let mut staying: std::collections::VecDeque<TcpStream> = Default::default();
    for i in 0..count {
        let door = &doors[i as usize % doors.len()];
        let Ok(mut stream) = TcpStream::connect_timeout(door, Duration::from_secs(30)) else { continue };
        came += 1;
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
            // A hello like a rank's, with a key that is none.
            _ => {
                let _ = stream.write_all(&hello(JOB, &[]));
                let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
                let mut reply = [0; REPLY];
                if stream.read_exact(&mut reply).is_ok() {
                    assert_eq!(reply[1..], [0; REPLY - 1], "a stranger is told something");
                    refused += u32::from(reply[0] == REFUSES);
                }
            }
        }
        // One that stays says a little more.
        let speaker = i as usize % staying.len().max(1);
        if let Some(stream) = staying.get_mut(speaker) {
            let _ = stream.write_all(b"k");
        }
        if staying.len() > 100 {
            staying.pop_front();
        }
    }
    assert!(refused > 0, "no stranger came as far as to be refused");
    came
}

/// Strangers who say nothing do not make a rank that is merely late look dead, however many they are.
pub(crate) fn silent() -> Outcome {
    let mut job = Job::start("late", 2, 6_000, |_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    job.hear(1, "late");
    let doors: Vec<SocketAddr> = (0..2).flat_map(|rank| doors(job.pid(rank))).collect();
    assert_eq!(doors.len(), 2, "a rank has one door");
    let since = now();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let (text, count) = std::thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            let mut staying: std::collections::VecDeque<TcpStream> = Default::default();
            let mut count = 0;
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                for door in &doors {
                    let stranger = TcpStream::connect_timeout(door, Duration::from_secs(1));
                    count += usize::from(stranger.is_ok());
                    staying.extend(stranger.ok());
                }
                // More at each port than are let in at once.
                if staying.len() > 400 {
                    staying.pop_front();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        });
        let failure = job.failure(0);
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(failure.culprit, 1, "{}", failure.text);
        (failure.text, strangers.join().unwrap())
    });
    assert!(text.contains("is there, but did not make this call"), "{text}");
    assert!(count > 500, "only {count} strangers got through");
    Passed(format!("{count} strangers in {:.1?}", Duration::from_micros(now() - since)))
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

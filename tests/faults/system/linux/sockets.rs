//! The listeners of processes, and strangers of other hosts and users.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::time::Duration;

use super::network::{PAIR, V4, between_hosts};
use crate::job::Job;
use crate::processes::GONE;
use crate::rank::{WORKER, say};
use crate::runner::Outcome::{self, NotRun, Passed};
use crate::strangers::{Address, JOB, Stream, hello, speak};
use crate::system::now;

impl Stream for UnixStream {
    fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(patience))
    }
}

/// Connects to a local socket.
pub(crate) fn connect_locally(name: &str) -> io::Result<Box<dyn Stream>> {
    Ok(Box::new(UnixStream::connect_addr(&LocalAddr::from_abstract_name(name)?)?))
}

/// Returns the addresses of a process's listeners.
pub(crate) fn listeners(pid: u32) -> Vec<Address> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<String> = files
        .filter_map(|file| {
            std::fs::read_link(file.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned)
        })
        .collect();
    let is_its = |inode: Option<&&str>| inode.is_some_and(|inode| sockets.iter().any(|socket| socket == inode));
    let table = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let mut places = Vec::new();
    for line in [table("tcp"), table("tcp6")].iter().flat_map(|table| table.lines().skip(1)) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if fields.get(3) == Some(&"0A") && is_its(fields.get(9)) {
            places.extend(address(fields[1]).map(Address::Network));
        }
    }
    // Listeners have a flag. An abstract name begins with `@`, which stands for a zero byte.
    for line in table("unix").lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let (Some(&"00010000"), Some(name)) = (fields.get(3), fields.get(7).and_then(|name| name.strip_prefix('@')))
            && is_its(fields.get(6))
        {
            places.push(Address::Local(name.to_owned()));
        }
    }
    places
}

/// Parses an address of the system's tables: words of four bytes as a little-endian machine reads
/// them, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let words = host.as_bytes().chunks(8).map(|word| u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<u32>>>()?.into_iter().flat_map(u32::to_le_bytes).collect();
    let host = match *bytes.as_slice() {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    // A listener on all addresses listens on loopback too.
    let host = if host.is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { host };
    Some(SocketAddr::new(host, u16::from_str_radix(port, 16).ok()?))
}

/// A recorded handshake of a rank is useless, at the same listener and at others.
pub(crate) fn replayed() -> Outcome {
    between_hosts(V4, |hosts| {
        let mut job = hosts.start("work", PAIR, 600_000);
        job.all_work();
        let overheard = hosts.wire.overheard();
        let calls = overheard.iter().filter(|said| said.bytes.starts_with(b"kolo") && said.bytes.len() == hello("", &[]).len());
        let mut replayed = 0;
        for call in calls {
            let proof = overheard.iter().find(|said| (said.from, said.to) == (call.from, call.to) && said.bytes.len() == 32);
            let Some(proof) = proof else { continue };
            let IpAddr::V4(target) = call.to.ip() else { continue };
            // The listener of the store is closed by now.
            if call.to.port() == 29778 {
                continue;
            }
            hosts.within(V4.iter().position(|ip| *ip == target.to_string()).unwrap(), || {
                let mut stream = Address::Network(call.to).connect().unwrap();
                // The hello belongs to this run, but was used before. The listener may close the
                // connection before the proof is written.
                stream.write_all(&call.bytes).unwrap();
                let _ = stream.write_all(&proof.bytes);
                let mut heard = Vec::new();
                if let Err(error) = stream.read_to_end(&mut heard) {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "a replayed handshake is not rejected");
                }
                assert!(heard.is_empty(), "a replayed handshake gets the reply {heard:?}");
            });
            replayed += 1;
        }
        assert!(replayed > 0, "no handshake was recorded");
        job.all_go_on();
        job.kill(1);
        job.all_name(&[0, 2], 1, &GONE, now());
        Passed(format!("{replayed} handshakes repeated"))
    })
}

/// The variable with the addresses to which the stranger of another user connects.
const PLACES: &str = "KOLO_TEST_PLACES";

/// The user `nobody`.
const ANOTHER_USER: u32 = 65534;

/// Another user of the machine connects to all listeners of the ranks.
pub(crate) fn another_user() -> Outcome {
    let mut job = Job::start("work", 2, 600_000, |_, command| _ = command.env("KOLO_JOB_ID", JOB));
    job.all_work();
    let places: Vec<String> = [0, 1].iter().flat_map(|&rank| listeners(job.pid(rank))).map(|place| place.to_string()).collect();
    let mut stranger = std::process::Command::new(std::env::current_exe().unwrap());
    stranger.env(WORKER, "stranger").env(PLACES, places.join(" ")).uid(ANOTHER_USER).gid(ANOTHER_USER);
    match stranger.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.trim() == "refused 4", "{said}{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(error) => return NotRun(format!("a process of another user: {error}")),
    }
    job.all_go_on();
    job.kill(1);
    job.all_name(&[0], 1, &GONE, now());
    Passed(String::new())
}

/// Runs as that stranger: connects to each listener, which closes the connection or sends the
/// refusal that all strangers get.
pub(crate) fn be_a_stranger() {
    let places: Vec<Address> = std::env::var(PLACES).unwrap().split_whitespace().map(Address::parse).collect();
    for (i, place) in (0..).zip(&places) {
        speak(&mut *place.connect().unwrap(), true, i);
        let mut stream = place.connect().unwrap();
        speak(&mut *stream, false, i);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{place} says {rest:?}");
    }
    say(&format!("refused {}", places.len()));
}

//! Strangers at the listeners of a running job: rows 31, 37 and 38.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::job::{ASKED, Job, LATE, configured, fresh, in_time, rank, secret};
use crate::processes::GONE;
use crate::runner::Outcome::{self, NotRun, Passed};
use crate::system::{self, listeners, memory, now};

/// The version of the protocol, the length of a listener's reply to a hello, and the kinds of
/// refusals.
const VERSION: u16 = 7 + kolo::Op::ALL.len() as u16;
const REPLY: usize = 84;
const REFUSES: u8 = 1;
const REFUSES_VERSION: u8 = 2;
const REFUSES_RUN: u8 = 4;

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// Returns the hello of rank 1 to a listener, for a job and a secret, without a run.
pub(crate) fn hello(job: &str, secret: &[u8]) -> Vec<u8> {
    let mut hello = vec![0; 80];
    hello[..4].copy_from_slice(b"kolo");
    hello[4..6].copy_from_slice(&VERSION.to_le_bytes());
    hello[6..9].copy_from_slice(&[1, 0, 1]);
    hello[16..32].copy_from_slice(&Sha256::digest(job.as_bytes())[..16]);
    // The hello is from rank 1.
    hello[56] = 1;
    let signature = mac(&mac(secret, &[b"kolo handshake in the network"]), &[b"hello", &hello]);
    [hello, signature.to_vec()].concat()
}

/// The variable with the number of connections. CI uses fewer than the default.
const COUNT: &str = "KOLO_TEST_GARBAGE";

/// The address of a listener.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Address {
    Network(SocketAddr),
    /// The name of a local socket.
    Local(String),
}

/// A connection to a listener.
pub(crate) trait Stream: Read + Write + Send {
    fn set_patience(&self, patience: Duration) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(patience))
    }
}

impl Address {
    /// Connects, with a timeout of 20 s for each read.
    pub(crate) fn connect(&self) -> io::Result<Box<dyn Stream>> {
        let stream: Box<dyn Stream> = match self {
            Address::Network(address) => Box::new(TcpStream::connect_timeout(address, Duration::from_secs(20))?),
            Address::Local(name) => system::connect_locally(name)?,
        };
        stream.set_patience(Duration::from_secs(20))?;
        Ok(stream)
    }

    pub(crate) fn parse(text: &str) -> Address {
        match text.strip_prefix('@') {
            Some(name) => Address::Local(name.to_owned()),
            None => Address::Network(text.parse().unwrap()),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Network(address) => address.fmt(f),
            Address::Local(name) => write!(f, "@{name}"),
        }
    }
}

pub(crate) fn garbage() -> Outcome {
    if let Some(why) = system::hides_listeners() {
        return NotRun(why.to_owned());
    }
    let count: u32 = std::env::var(COUNT).ok().and_then(|text| text.parse().ok()).unwrap_or(2000);
    let mut job = Job::start("work", 2, 600_000, |_, command| _ = command.env("KOLO_JOB_ID", JOB));
    job.all_work();
    let places = listeners(job.pid(0));
    let [network, local] =
        [0, 1].map(|local| places.iter().filter(|place| matches!(place, Address::Local(_)) == (local == 1)).count());
    assert!(places.len() == 2 && network >= 1 && local <= 1, "the listeners of rank 0: {places:?}");
    // The first strangers warm up caches.
    strangers(&places, 200);
    let before = memory(job.pid(0));
    let began = Instant::now();
    let came = strangers(&places, count);
    assert!(came >= count / 10 * 9, "only {came} of {count} strangers connected");
    let took = began.elapsed();
    let grown = memory(job.pid(0)) - before;
    // If the listener never forgot a stranger, each might take less than 1 KiB.
    assert!(grown < i64::from(came), "rank 0 has grown by {grown} KiB");
    job.all_go_on();
    // The listener still accepts ranks.
    job.kill(1);
    job.all_name(&[0], 1, &GONE, now());
    Passed(format!("{came} connections in {took:.1?}, grown by {grown} KiB"))
}

/// The job whose name the strangers know.
pub(crate) const JOB: &str = "no secret";

/// Connects strangers, and returns how many could connect.
fn strangers(places: &[Address], count: u32) -> u32 {
    let (mut came, mut refused) = (0, 0);
    // Silent and slow strangers stay for a while.
    let mut staying: VecDeque<Box<dyn Stream>> = VecDeque::new();
    for i in 0..count {
        // Every kind of stranger connects to every listener.
        let place = &places[(i / 4) as usize % places.len()];
        let Ok(mut stream) = place.connect() else { continue };
        came += 1;
        match i % 4 {
            1 => staying.push_back(stream),
            2 => {
                let _ = stream.write_all(b"kolo");
                staying.push_back(stream);
            }
            kind => refused += u32::from(speak(&mut *stream, kind == 0, i)),
        }
        // A stranger that stays writes one more byte.
        let speaker = i as usize % staying.len().max(1);
        if let Some(stream) = staying.get_mut(speaker) {
            let _ = stream.write_all(b"k");
        }
        if staying.len() > 100 {
            staying.pop_front();
        }
    }
    assert!(refused > 0, "no stranger was refused");
    came
}

/// A stranger writes random bytes, or a hello with a wrong key. Returns whether it got a refusal,
/// which is always the same.
pub(crate) fn speak(stream: &mut dyn Stream, is_noise: bool, i: u32) -> bool {
    if is_noise {
        let random = |at: u32| (i.wrapping_mul(0x9e37_79b9) ^ at.wrapping_mul(0x85eb_ca6b)).to_le_bytes()[at as usize % 4];
        let bytes: Vec<u8> = (0..i % 400).map(random).collect();
        let _ = stream.write_all(&bytes);
        return false;
    }
    let _ = stream.write_all(&hello(JOB, &[]));
    let mut reply = [0; REPLY];
    if stream.read_exact(&mut reply).is_err() {
        return false;
    }
    assert_eq!(reply[1..], [0; REPLY - 1], "a refusal tells a stranger something");
    assert_eq!(reply[0], REFUSES, "a stranger was not refused");
    true
}

/// Strangers connect from the beginning, before there is a secret: rank 0, which creates it, comes
/// last.
pub(crate) fn garbage_before_the_secret() -> Outcome {
    if let Some(why) = system::hides_listeners() {
        return NotRun(why.to_owned());
    }
    let (store, _) = fresh();
    let mut job = Job::empty();
    let add = |job: &mut Job, number| {
        let mut command = rank("work", number, 3, &store, JOB);
        command.env_remove("KOLO_SECRET");
        job.add(command);
    };
    add(&mut job, 1);
    add(&mut job, 2);
    let is_over = AtomicBool::new(false);
    let pids = [job.pid(0), job.pid(1)];
    let came = std::thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            let mut came = 0;
            while !is_over.load(Ordering::Relaxed) {
                for place in pids.iter().flat_map(|&pid| listeners(pid)) {
                    let Ok(mut stream) = place.connect() else { continue };
                    speak(&mut *stream, came % 2 == 0, came);
                    came += 1;
                }
                std::thread::yield_now();
            }
            came
        });
        // A rank that does not know the secret has no listener.
        for (process, &pid) in pids.iter().enumerate() {
            job.hear_log(process, &["INFO", "chose the advertised address"]);
            let places = listeners(pid);
            assert!(places.is_empty(), "process {process} has listeners before there is a secret: {places:?}");
        }
        add(&mut job, 0);
        job.all_go_on();
        is_over.store(true, Ordering::Relaxed);
        strangers.join().unwrap()
    });
    assert!(came > 0, "no stranger connected");
    // Process 2 is rank 0.
    job.kill(2);
    for process in [0, 1] {
        let failure = job.failure(process);
        assert_eq!(failure.culprit, Some(0), "{failure}");
        job.lives_on(process);
    }
    Passed(format!("{came} strangers"))
}

/// Until a rank knows the secret it has no listener, because it could not authenticate a caller.
pub(crate) fn before_the_secret() -> Outcome {
    if let Some(why) = system::hides_listeners() {
        return NotRun(why.to_owned());
    }
    let (store, _) = fresh();
    let mut job = Job::empty();
    // Rank 0, which creates the secret, does not start.
    let mut command = rank("once", 1, 2, &store, JOB);
    command.env_remove("KOLO_SECRET").env("KOLO_START_TIMEOUT", "2s");
    job.add(command);
    let mut looks = 0;
    while !job.has_said(0, "refused") {
        let found = listeners(job.pid(0));
        assert!(found.is_empty(), "the rank has listeners: {found:?}");
        looks += 1;
    }
    assert!(looks > 1, "the rank did not wait");
    Passed(format!("{looks} looks"))
}

/// A process of an earlier run, which knows the secret, connects to a port that is used again.
pub(crate) fn earlier_run() -> Outcome {
    if let Some(why) = system::hides_listeners() {
        return NotRun(why.to_owned());
    }
    let mut job = Job::start("work", 2, 600_000, |_, command| {
        command.env("KOLO_JOB_ID", JOB).env("KOLO_TRANSPORT", "tcp");
    });
    job.all_work();
    let places: Vec<Address> = (0..2).flat_map(|rank| listeners(job.pid(rank))).collect();
    // On Windows the local listener is a socket, too: on loopback, where the network's is not.
    let is_of_network = |place: &&Address| match place {
        Address::Network(at) => !(cfg!(windows) && at.ip().is_loopback()),
        _ => false,
    };
    let network = places.iter().filter(is_of_network);
    let mut refused = 0;
    for place in network {
        let mut stream = place.connect().unwrap();
        stream.write_all(&hello(JOB, &secret())).unwrap();
        let mut reply = [0; REPLY];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[0], REFUSES_RUN, "the process of an earlier run is accepted");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "{rest:?}");
        refused += 1;
    }
    assert_eq!(refused, 2, "{places:?}");
    job.all_go_on();
    Passed(String::new())
}

/// Many silent strangers do not make a late rank look dead.
pub(crate) fn silent() -> Outcome {
    if let Some(why) = system::hides_listeners() {
        return NotRun(why.to_owned());
    }
    let mut job = Job::start("late", 2, 6_000, |_, command| _ = command.env("KOLO_TRANSPORT", "tcp"));
    job.hear(1, "late");
    let places: Vec<Address> = (0..2).flat_map(|rank| listeners(job.pid(rank))).collect();
    assert_eq!(places.len(), 4, "a rank has two listeners");
    let since = now();
    let is_over = AtomicBool::new(false);
    let (failure, count) = std::thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            let mut staying = VecDeque::new();
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                for place in &places {
                    let stranger = place.connect();
                    count += usize::from(stranger.is_ok());
                    staying.extend(stranger.ok());
                }
                // More strangers at each listener than it holds at once.
                if staying.len() > 400 {
                    staying.pop_front();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        });
        let failure = job.failure(0);
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(failure.culprit, Some(1), "{}", failure.text);
        (failure, strangers.join().unwrap())
    });
    assert!(failure.cause.starts_with("Absent "), "{failure}");
    job.lives_on(0);
    assert!(count > 500, "only {count} strangers connected");
    Passed(format!("{count} strangers in {:.1?}", Duration::from_micros(now() - since)))
}

/// A rank with another secret gets an error, and the other ranks start.
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

/// A process of another version gets a refusal with both versions, and a rank that meets another
/// version reports both.
pub(crate) fn other_version() -> Outcome {
    // The number of this version in the other byte order is another version.
    for version in [VERSION + 1, VERSION.swap_bytes()] {
        connect_to_a_store(version);
        connect_a_rank_to_a_store(version);
    }
    Passed(String::new())
}

/// The variable with the path of a `kolo` that was built with `--cfg kolo_next_version`.
const OTHER_BUILD: &str = "KOLO_TEST_OTHER_BUILD";

/// Ranks of two builds refuse each other and name both versions, with a store that has a protocol
/// and with one that has none.
pub(crate) fn two_builds() -> Outcome {
    let Ok(other) = std::env::var(OTHER_BUILD) else {
        return NotRun(format!("{OTHER_BUILD} names no `kolo` that was built with --cfg kolo_next_version"));
    };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for store in [fresh().0, format!("tcp://127.0.0.1:{port}")] {
        let (_, name) = fresh();
        let mut job = Job::empty();
        let mut command = rank("once", 0, 2, &store, &name);
        // A store with a protocol refuses the other rank, so this one reports it as missing.
        command.env("KOLO_START_TIMEOUT", "10s");
        job.add(command);
        let mut command = std::process::Command::new(&other);
        command.args(["bench", "barrier"]);
        let output = configured(command, "bench", 1, 2, &store, &name).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let next = VERSION + 1;
        // Either rank may find out first.
        let has_both = |text: &str, theirs: u16, mine: u16| {
            text.contains(&format!("speaks version {theirs} of kolo's protocol, this process speaks {mine};"))
        };
        assert!(!output.status.success() && (has_both(&said, VERSION, next) || has_both(&said, next, VERSION)), "{said}");
        let text = job.hear(0, "refused");
        let is_named = text.starts_with("Version: ") && has_both(&text, next, VERSION);
        assert!(is_named || store.starts_with("tcp") && text.starts_with("Missing: "), "{text}");
    }
    Passed(String::new())
}

/// A process of another version connects to the store of rank 0, which still starts when its own
/// ranks come.
fn connect_to_a_store(version: u16) {
    let key = mac(&secret(), &[b"kolo handshake in the network"]);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (store, (_, name)) = (format!("tcp://127.0.0.1:{port}"), fresh());
    let mut job = Job::empty();
    job.add(rank("once", 0, 2, &store, &name));
    let deadline = Instant::now() + LATE;
    let mut stream = loop {
        match Address::parse(&format!("127.0.0.1:{port}")).connect() {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "rank 0 does not serve the store: {error}"),
        }
    };
    let mut hello = hello(&name, &secret());
    hello[4..6].copy_from_slice(&version.to_le_bytes());
    let claims = hello.len() - 32;
    let signature = mac(&key, &[b"hello", &hello[..claims]]);
    hello[claims..].copy_from_slice(&signature);
    stream.write_all(&hello).unwrap();
    let mut reply = [0; REPLY];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[0], REFUSES_VERSION, "{reply:?}");
    assert_eq!(reply[2..4], VERSION.to_le_bytes(), "{reply:?}");
    job.add(rank("once", 1, 2, &store, &name));
    job.all_say("done");
}

/// A rank connects to a store of another version.
fn connect_a_rank_to_a_store(version: u16) {
    let key = mac(&secret(), &[b"kolo handshake in the network"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let store = format!("tcp://{}", listener.local_addr().unwrap());
    let mut command = rank("once", 1, 2, &store, JOB);
    command.env("KOLO_START_TIMEOUT", "10m");
    let mut job = Job::empty();
    let began = Instant::now();
    job.add(command);
    let (mut stream, _) = listener.accept().unwrap();
    let mut heard = vec![0; hello("", &[]).len()];
    stream.read_exact(&mut heard).unwrap();
    let mut reply = vec![0; REPLY - 32];
    reply[0] = REFUSES_VERSION;
    reply[2..4].copy_from_slice(&version.to_le_bytes());
    let signature = mac(&key, &[b"listener", &heard, &reply]);
    stream.write_all(&[reply, signature.to_vec()].concat()).unwrap();
    let text = job.hear(0, "refused");
    assert!(text.contains(&format!("speaks version {version} of")) && text.contains(&format!("speaks {VERSION};")), "{text}");
    in_time("to be rejected", began.elapsed(), ASKED);
}

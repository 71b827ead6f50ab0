//! All stores keep the same promises.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::{Place, Store, open};
use crate::door::handshake::Identity;
use crate::error::{Error, StoreProblem};

const LATE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(60);

fn late() -> Instant {
    Instant::now() + LATE
}

/// A path for one test, in a folder for temporary files.
fn temporary() -> std::path::PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("kolo-store-test-{}-{number}", std::process::id()))
}

fn file_place() -> Place {
    Place::File(temporary())
}

fn identity() -> Identity {
    Identity::new("job", None)
}

/// What every store promises, with one end opened by rank 0 and one by another.
fn promises(zero: &dyn Store, other: &dyn Store) {
    assert_eq!(other.get("absent", SOON).unwrap(), None);
    zero.set("a", b"1", LATE).unwrap();
    assert_eq!(other.get("a", LATE).unwrap().unwrap(), b"1");
    other.set("a", b"22", LATE).unwrap();
    assert_eq!(zero.get("a", LATE).unwrap().unwrap(), b"22");

    assert_eq!(zero.claim("b", b"zero", LATE).unwrap(), b"zero");
    assert_eq!(other.claim("b", b"other", LATE).unwrap(), b"zero");

    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(other.get("later", LATE).unwrap().unwrap(), b""));
        zero.set("later", b"", LATE).unwrap();
    });

    let long = "k".repeat(257);
    assert!(matches!(zero.set(&long, b"", LATE), Err(StoreProblem::TooLarge { .. })));
    let large: Vec<u8> = (0..1 << 20).map(|i| i as u8).collect();
    zero.set("large", &large, LATE).unwrap();
    assert_eq!(other.get("large", LATE).unwrap().unwrap(), large);
}

#[test]
fn hash_stores() {
    let place = Place::Hash("hash_stores".to_owned());
    let open = || open(&place, false, &identity(), late()).unwrap();
    promises(&*open(), &*open());
    let (first, _keeps_it) = (open(), open());
    first.set("a", b"1", LATE).unwrap();
}

#[test]
fn file_stores() {
    let place = file_place();
    let zero = open(&place, true, &identity(), late()).unwrap();
    let other = open(&place, false, &identity(), late()).unwrap();
    promises(&*zero, &*other);
    drop(zero);
    let Place::File(path) = place else { unreachable!() };
    assert!(!path.exists(), "the file is removed when rank 0 is done");
}

#[test]
fn tcp_stores() {
    let zero = open(&Place::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let other = open(&Place::parse(&zero.url()).unwrap(), false, &identity(), late()).unwrap();
    promises(&*zero, &*other);
}

#[cfg(feature = "redis")]
#[test]
fn redis_stores() {
    let Ok(url) = std::env::var("KOLO_TEST_REDIS") else {
        // What passing tests print is not shown; this is.
        std::io::Write::write_all(&mut std::io::stderr(), b"NOT RUN: redis_stores; KOLO_TEST_REDIS names no server\n").unwrap();
        return;
    };
    let identity = Identity::new(&format!("test-{}-{:?}", std::process::id(), Instant::now()), None);
    let open = || open(&Place::parse(&url).unwrap(), false, &identity, late()).unwrap();
    promises(&*open(), &*open());
}

#[test]
fn what_a_crashed_run_left_in_a_file_is_replaced() {
    let place = file_place();
    let crashed = open(&place, true, &identity(), late()).unwrap();
    crashed.set("book", b"stale", LATE).unwrap();
    let Place::File(path) = &place else { unreachable!() };
    let left = std::fs::read(path).unwrap();
    drop(crashed);
    std::fs::write(path, left).unwrap();

    let zero = open(&place, true, &identity(), late()).unwrap();
    assert_eq!(zero.get("book", SOON).unwrap(), None);
}

#[test]
fn two_jobs_with_one_file_are_told() {
    let place = file_place();
    let _zero = open(&place, true, &identity(), late()).unwrap();
    let problem = |result: Result<_, Error>| match result {
        Err(Error::Store { problem, .. }) => problem,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("opened"),
    };
    let second = Identity::new("second", None);
    match problem(open(&place, true, &second, late())) {
        StoreProblem::InUse { job } => assert_eq!(job, "job"),
        other => panic!("{other}"),
    }
    let stray = open(&place, false, &second, late()).unwrap();
    match stray.get("a", SOON) {
        Err(StoreProblem::OtherJob { theirs, mine }) => assert_eq!((&*theirs, &*mine), ("job", "second")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_with_other_contents_is_left_alone() {
    let path = temporary();
    std::fs::write(&path, "my thesis").unwrap();
    let result = open(&Place::File(path.clone()), true, &identity(), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Foreign(_), .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"my thesis");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_taken_port_and_another_job_are_told_apart() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let place = Place::Tcp { host: "127.0.0.1".to_owned(), port };
    match open(&place, true, &identity(), late()).err() {
        Some(Error::Store { problem: StoreProblem::PortTaken { port: taken, holder }, .. }) => {
            assert_eq!(taken, port);
            if cfg!(target_os = "linux") {
                assert!(holder.unwrap().contains(&std::process::id().to_string()));
            }
        }
        other => panic!("{other:?}"),
    }
    // Its job is named to those who know the secret: without any, that would be everybody.
    for (secret, name) in [(Some([1; 32]), "job"), (None, "")] {
        let place = Place::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
        let zero = open(&place, true, &Identity::new("job", secret), late()).unwrap();
        let place = Place::parse(&zero.url()).unwrap();
        for owner in [false, true] {
            let result = open(&place, owner, &Identity::new("second", secret), late());
            match result.err() {
                Some(Error::Store { problem: StoreProblem::OtherJob { theirs, .. }, .. }) => assert_eq!(theirs, name),
                other => panic!("{other:?}"),
            }
        }
    }
    let zero = open(&Place::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let place = Place::parse(&zero.url()).unwrap();
    let result = open(&place, false, &Identity::new("job", Some([1; 32])), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Secret, .. })));
}

#[test]
fn nobody_there_is_said_at_the_deadline() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = Place::Tcp { host: "127.0.0.1".to_owned(), port };
    let result = open(&place, false, &identity(), Instant::now() + SOON);
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Unreachable { .. }, .. })));
}

#[test]
fn urls() {
    let tcp = |host: &str, port| Place::Tcp { host: host.to_owned(), port };
    for (url, place) in [
        ("tcp://10.0.0.1:29500", tcp("10.0.0.1", 29500)),
        ("tcp://[::1]:1", tcp("::1", 1)),
        ("tcp://node7:0", tcp("node7", 0)),
        ("env://", Place::Env),
        ("hash://a", Place::Hash("a".to_owned())),
        ("redis://localhost:6379/1", Place::Redis("redis://localhost:6379/1".to_owned())),
        ("file:///tmp/pg", Place::File("/tmp/pg".into())),
        ("file:///D:/pg", Place::File(if cfg!(windows) { "D:/pg" } else { "/D:/pg" }.into())),
    ] {
        assert_eq!(Place::parse(url).unwrap(), place, "{url}");
    }
    for url in [
        "",
        "pg",
        "http://x:1",
        "tcp://",
        "tcp://x",
        "tcp://x:99999",
        "tcp://:1",
        "tcp://::1:5",
        "file://",
        "file://a/b",
        "env://x",
        "hash://",
        "redis://",
        "file:///x/",
    ] {
        let error = Place::parse(url).unwrap_err().to_string();
        assert!(error.contains("file:///path"), "{url}: {error}");
    }
}

/// Whatever authenticated clients send, the server goes on serving the others.
#[test]
fn garbage_requests_end_their_own_connection_only() {
    use std::io::{Read, Write};

    use crate::door::dial;
    use crate::door::handshake::{Hello, Purpose};

    let zero = open(&Place::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let address = zero.url().trim_start_matches("tcp://").parse().unwrap();
    let hello = Hello::new(Purpose::Store, 0, 0, 0);
    for garbage in [[0xff; 64], [1; 64]] {
        let mut stream = std::net::TcpStream::from(dial(address, &identity(), &hello, late()).unwrap());
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LATE)).unwrap();
        stream.write_all(&garbage).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    }
    zero.set("a", b"1", LATE).unwrap();
}

//! All stores keep the same promises.

mod file;
#[cfg(feature = "redis")]
mod redis;
mod relay;
mod tcp;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::url::{RedisUrl, masked};
use super::{Store, StoreUrl, open};
use crate::error::StoreError;
use crate::network::identity::Identity;
use crate::sys;

const LATE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(60);

fn late() -> Instant {
    Instant::now() + LATE
}

/// Returns a path for one test, in a folder for temporary files.
fn temporary() -> std::path::PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("kolo-store-test-{}-{number}", std::process::id()))
}

fn identity() -> Identity {
    Identity::new("job", None)
}

/// Checks what every store promises, with one end opened by rank 0 and one by another rank.
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
    assert!(matches!(zero.set(&long, b"", LATE), Err(StoreError::TooLarge { .. })));
    let large: Vec<u8> = (0..1 << 20).map(|i| i as u8).collect();
    zero.set("large", &large, LATE).unwrap();
    assert_eq!(other.get("large", LATE).unwrap().unwrap(), large);
}

/// Prints that a test did not run. Unlike the output of passing tests, this is always shown.
#[cfg(any(unix, feature = "redis"))]
fn not_run(why: &str) {
    std::io::Write::write_all(&mut std::io::stderr(), format!("NOT RUN: {why}\n").as_bytes()).unwrap();
}

#[test]
fn hash_stores() {
    let url = StoreUrl::Hash("hash_stores".to_owned());
    let open = || open(&url, false, &identity(), late()).unwrap();
    promises(&*open(), &*open());
    let (first, _keeps_it) = (open(), open());
    first.set("a", b"1", LATE).unwrap();
}

#[test]
fn no_password_is_shown() {
    for (url, shown) in [
        ("redis://:open-sesame@host:1/2", "redis://***@host:1/2"),
        ("rediss://me:open-sesame@host", "rediss://***@host"),
        ("redis://me:open-@sesame@host?password=open-sesame", "redis://***@host?***"),
        ("http://me:open-sesame@host", "http://***@host"),
        ("tcp://me:open-sesame@host", "tcp://***@host"),
        ("me:open-sesame@host", "***@host"),
        ("file:///home/me@here", "file:///home/me@here"),
        ("/home/me@here", "/home/me@here"),
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
    ] {
        assert_eq!(masked(url), shown);
        let parsed = StoreUrl::parse(url);
        let texts = [format!("{parsed:?}"), parsed.map_or_else(|error| error.to_string(), |_| String::new())];
        assert!(texts.iter().all(|text| !text.contains("sesame")), "{texts:?}");
    }
}

#[test]
fn urls_and_paths_of_stores() {
    let tcp = |host: &str, port| StoreUrl::Tcp { host: host.to_owned(), port };
    for (url, parsed) in [
        ("tcp://10.0.0.1:29500", tcp("10.0.0.1", 29500)),
        ("tcp://[::1]:1", tcp("::1", 1)),
        ("tcp://node7:0", tcp("node7", 0)),
        ("env://", StoreUrl::Env),
        ("hash://a", StoreUrl::Hash("a".to_owned())),
        ("redis://localhost:6379/1", StoreUrl::Redis(RedisUrl("redis://localhost:6379/1".to_owned()))),
        ("file:///tmp/pg", StoreUrl::File("/tmp/pg".into())),
        ("/tmp/pg", StoreUrl::File("/tmp/pg".into())),
        ("file:///D:/pg", StoreUrl::File(if sys::has_drive_letters() { "D:/pg" } else { "/D:/pg" }.into())),
    ] {
        assert_eq!(StoreUrl::parse(url).unwrap(), parsed, "{url}");
    }
    // The spellings that programs for Windows use.
    for (url, path) in [
        ("file:///D:\\a\\pg", "D:\\a\\pg"),
        ("file://D:/a/pg", "D:/a/pg"),
        ("file://D:\\a\\pg", "D:\\a\\pg"),
        ("file://localhost/D:/a/pg", "D:/a/pg"),
        ("D:\\a\\pg", "D:\\a\\pg"),
        ("d:/a/pg", "d:/a/pg"),
    ] {
        let found = StoreUrl::parse(url).ok().filter(|_| sys::has_drive_letters());
        assert_eq!(found, sys::has_drive_letters().then(|| StoreUrl::File(path.into())), "{url}");
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
        "etcd://a",
        "file:///x/",
        "D:pg",
        "file://D:pg",
        "x://y",
    ] {
        let error = StoreUrl::parse(url).unwrap_err().to_string();
        assert!(error.contains("file:///path"), "{url}: {error}");
    }
}

/// In a process that [`client_of_ended`] has started, asks a server that ends. SIGPIPE has its default
/// action, as in a program in C.
#[cfg(feature = "redis")]
fn is_client_of_ended() -> bool {
    let Ok(url) = std::env::var("KOLO_TEST_ENDS") else { return false };
    crate::sys::end_by_sigpipe();
    let store = open(&StoreUrl::parse(&url).unwrap(), true, &identity(), late()).unwrap();
    store.set("key", b"value", LATE).unwrap();
    println!("has asked");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    for _ in 0..4 {
        // The server may have been started again.
        _ = store.set("key", b"value", LATE);
    }
    println!("lives on");
    true
}

/// Runs the test `name` as a process that asks a server, which `end` ends. The process lives on.
#[cfg(feature = "redis")]
fn client_of_ended(name: &str, url: &str, authority: &std::path::Path, end: impl FnOnce()) {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    let mut client = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("rendezvous::store::tests::{name}"), "--nocapture"])
        .env("KOLO_TEST_ENDS", url)
        .env("SSL_CERT_FILE", authority)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines().map_while(std::result::Result::ok);
    assert!(lines.any(|line| line.contains("has asked")), "the client does not reach the server");
    end();
    client.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let lives = lines.any(|line| line.contains("lives on"));
    let status = client.wait().unwrap();
    assert!(lives && status.success(), "the client: {status}");
}

//! All stores keep the same promises.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::url::{RedisUrl, masked};
use super::{Store, StoreUrl, open};
use crate::bootstrap::identity::Identity;
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

fn file_place() -> StoreUrl {
    StoreUrl::File(temporary())
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
    let place = StoreUrl::Hash("hash_stores".to_owned());
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
    let StoreUrl::File(path) = place else { unreachable!() };
    assert!(!path.exists(), "the file is removed when rank 0 is done");
}

/// A guest that has come first, and what it gets: it looks before rank 0 does.
#[cfg(unix)]
fn refused(path: &std::path::Path) -> [String; 2] {
    let place = StoreUrl::File(path.to_owned());
    let guest = open(&place, false, &identity(), late()).unwrap().get("a", SOON).unwrap_err();
    assert!(matches!(guest, StoreProblem::Untrusted(_)), "{guest}");
    let zero = open(&place, true, &identity(), late()).err().expect("rank 0 refuses the file");
    assert!(matches!(zero, Error::Store { problem: StoreProblem::Untrusted(_), .. }), "{zero}");
    assert!(path.symlink_metadata().is_ok(), "it is left as it is");
    [guest.to_string(), zero.to_string()]
}

#[cfg(unix)]
#[test]
fn a_file_that_others_may_have_written_is_refused() {
    use std::os::unix::fs::PermissionsExt;

    let path = temporary();
    let former = || {
        std::fs::write(&path, super::file::sample()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    former();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
    for text in refused(&path) {
        assert!(
            text.contains("users other than its owner") && text.contains("mode 0622") && text.contains("remove it"),
            "{text}"
        );
    }
    if rustix::process::geteuid().is_root() {
        former();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        for text in refused(&path) {
            assert!(text.contains("belongs to user 65534 (mode 0600), and this process runs as user 0"), "{text}");
        }
    } else {
        not_run("a store's file of another user; only root can give files away");
    }
    former();
    let link = temporary();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    refused(&link).iter().for_each(|text| assert!(text.contains("symbolic link"), "{text}"));
    std::fs::remove_file(&link).unwrap();
    // So is a lock that another user may have made.
    let lock = std::path::PathBuf::from(format!("{}.lock", path.display()));
    std::os::unix::fs::symlink(&path, &lock).unwrap();
    let result = open(&StoreUrl::File(path.clone()), true, &identity(), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Untrusted(_), .. })));
    std::fs::remove_file(&lock).unwrap();
    std::fs::remove_file(&path).unwrap();
    // A pipe has no writer, and is not waited for.
    let pipe = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    refused(&path).iter().for_each(|text| assert!(text.contains("not a regular file"), "{text}"));
    std::fs::remove_file(&path).unwrap();
}

#[cfg(unix)]
#[test]
fn only_its_user_can_open_a_file_store() {
    use std::os::unix::fs::PermissionsExt;

    let path = temporary();
    // What others could read, and may have opened, is not written to.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let former = std::fs::File::open(&path).unwrap();
    let zero = open(&StoreUrl::File(path.clone()), true, &identity(), late()).unwrap();
    assert!(zero.is_private());
    zero.set("secret", b"1", LATE).unwrap();
    for path in [path.clone(), format!("{}.lock", path.display()).into()] {
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
    }
    assert_eq!(former.metadata().unwrap().len(), 0);
}

/// A writer that was killed in the middle of a record, at any byte of it.
#[test]
fn the_next_writer_overwrites_a_torn_record() {
    let place = file_place();
    let StoreUrl::File(path) = &place else { unreachable!() };
    let zero = open(&place, true, &identity(), late()).unwrap();
    zero.set("first", &[1; 100], LATE).unwrap();
    let whole = std::fs::read(path).unwrap();
    zero.set("second", &[2; 100], LATE).unwrap();
    let torn = std::fs::read(path).unwrap()[whole.len()..].to_vec();
    for cut in (1..torn.len()).step_by(7) {
        std::fs::write(path, [&whole[..], &torn[..cut]].concat()).unwrap();
        let [reader, writer] = [0; 2].map(|_| open(&place, false, &identity(), late()).unwrap());
        assert_eq!(reader.get("first", LATE).unwrap().unwrap(), [1; 100]);
        assert_eq!(reader.get("second", Duration::ZERO).unwrap(), None);
        writer.set("third", &[cut as u8], LATE).unwrap();
        let late_reader = open(&place, false, &identity(), late()).unwrap();
        for store in [reader, writer, late_reader] {
            assert_eq!(store.get("third", LATE).unwrap().unwrap(), [cut as u8], "cut at {cut}");
        }
    }
}

/// A process that is stopped in the middle of a record holds the lock.
#[test]
fn a_locked_file_is_read_and_writers_say_that_it_is_locked() {
    let place = file_place();
    let StoreUrl::File(path) = &place else { unreachable!() };
    let zero = open(&place, true, &identity(), late()).unwrap();
    let other = open(&place, false, &identity(), late()).unwrap();
    zero.set("a", b"1", LATE).unwrap();
    let lock = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    lock.lock().unwrap();
    if !cfg!(windows) {
        assert_eq!(other.get("a", LATE).unwrap().unwrap(), b"1");
    }
    let error = other.set("b", b"2", SOON).unwrap_err().to_string();
    assert!(error.contains("its lock, which another process holds"), "{error}");
    drop(lock);
    other.set("b", b"2", LATE).unwrap();
}

#[test]
fn many_writers_and_readers_of_one_file_lose_nothing() {
    const RANKS: usize = 64;
    let place = file_place();
    let zero = open(&place, true, &identity(), late()).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let place = &place;
            scope.spawn(move || {
                let store = open(place, false, &identity(), late()).unwrap();
                let mine = rank.to_le_bytes();
                assert_eq!(store.claim(&format!("rank/{rank}"), &mine, LATE).unwrap(), mine);
                assert_eq!(store.claim("first", &mine, LATE).unwrap().len(), mine.len());
                assert_eq!(store.get("book", LATE).unwrap().unwrap(), b"all");
            });
        }
        for rank in 0..RANKS {
            assert_eq!(zero.get(&format!("rank/{rank}"), LATE).unwrap().unwrap(), rank.to_le_bytes());
        }
        zero.set("book", b"all", LATE).unwrap();
    });
    let first = zero.get("first", LATE).unwrap();
    assert_eq!(zero.claim("first", b"too late", LATE).unwrap(), first.unwrap());
}

/// What passing tests print is not shown; this is.
#[cfg(any(unix, feature = "redis"))]
fn not_run(why: &str) {
    std::io::Write::write_all(&mut std::io::stderr(), format!("NOT RUN: {why}\n").as_bytes()).unwrap();
}

#[test]
fn tcp_stores() {
    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let other = open(&StoreUrl::parse(&zero.url()).unwrap(), false, &identity(), late()).unwrap();
    promises(&*zero, &*other);
}

/// Stands before a server, and can hold back what a client says, as if the server were paused.
struct Relay {
    port: u16,
    gate: Arc<Mutex<()>>,
}

impl Relay {
    /// For one client.
    fn to(server: u16) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let gate = Arc::<Mutex<()>>::default();
        let passes = gate.clone();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(("127.0.0.1", server)).unwrap();
            let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = client.read(&mut bytes) {
                drop(passes.lock().unwrap());
                (&server).write_all(&bytes[..count]).unwrap();
            }
        });
        Relay { port, gate }
    }

    /// Pauses the server of a store that waits for an answer for longer than it would wait after the deadline.
    fn pause(&self, store: &dyn Store) {
        let paused = self.gate.lock().unwrap();
        std::thread::scope(|scope| {
            let (answered, answer) = mpsc::channel();
            scope.spawn(move || answered.send(store.get("absent", SOON)).unwrap());
            let early = answer.recv_timeout(Duration::from_secs(6));
            drop(paused);
            assert!(early.is_err(), "while the server was paused: {early:?}");
            assert_eq!(answer.recv().unwrap().unwrap(), None);
        });
    }
}

/// As one is whose process, that of rank 0, is paused while ranks connect.
#[test]
fn a_server_that_pauses_is_waited_for_until_the_deadline() {
    let server = super::TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "job", None).unwrap();
    let relay = Relay::to(server.address().port());
    let place = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: relay.port };
    relay.pause(&*open(&place, false, &identity(), late()).unwrap());
}

#[cfg(feature = "redis")]
#[test]
fn a_redis_server_that_pauses_is_waited_for_until_the_deadline() {
    let Some(server) = RedisServer::start() else {
        return not_run("a_redis_server_that_pauses_is_waited_for_until_the_deadline; it needs redis-server and openssl");
    };
    let relay = Relay::to(server.port);
    let place = StoreUrl::parse(&format!("redis://:{}@127.0.0.1:{}", RedisServer::PASSWORD, relay.port)).unwrap();
    relay.pause(&*open(&place, false, &identity(), late()).unwrap());
}

#[cfg(feature = "redis")]
#[test]
fn redis_stores() {
    let Ok(url) = std::env::var("KOLO_TEST_REDIS") else {
        return not_run("redis_stores; KOLO_TEST_REDIS names no server");
    };
    let identity = Identity::new(&format!("test-{}-{:?}", std::process::id(), Instant::now()), None);
    let open = || open(&StoreUrl::parse(&url).unwrap(), false, &identity, late()).unwrap();
    promises(&*open(), &*open());
    // Of a URL with a password, nothing shows it.
    let Some((password, _)) = url.rsplit_once('@').and_then(|(user, host)| Some((user.rsplit_once(':')?.1, host))) else {
        return;
    };
    assert!(!open().url().contains(password), "{}", open().url());
    let wrong = url.replace(password, "not-that-one");
    let error = super::open(&StoreUrl::parse(&wrong).unwrap(), false, &identity, late()).err().expect("refused").to_string();
    assert!(error.contains("***@") && !error.contains("not-that-one"), "{error}");
}

/// A server of Redis, which ends with the test.
#[cfg(feature = "redis")]
struct RedisServer {
    process: std::process::Child,
    folder: std::path::PathBuf,
    port: u16,
    tls_port: u16,
}

#[cfg(feature = "redis")]
impl RedisServer {
    const PASSWORD: &'static str = "open-sesame";

    /// With a password, and with certificates for `localhost`; `None` without the programs for it.
    fn start() -> Option<RedisServer> {
        use std::process::{Command, Stdio};

        let folder = temporary();
        std::fs::create_dir(&folder).unwrap();
        let make_certificates = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem && \
             openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr && \
             printf subjectAltName=DNS:localhost > server.ext && \
             openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile server.ext -out server.pem";
        let openssl = Command::new("sh").args(["-c", make_certificates]).current_dir(&folder).stderr(Stdio::null()).status();
        if !openssl.is_ok_and(|status| status.success()) {
            return None;
        }
        let listeners = [0; 2].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [port, tls_port] = listeners.map(|listener| listener.local_addr().unwrap().port());
        let process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--requirepass", RedisServer::PASSWORD, "--tls-auth-clients", "no"])
            .args(["--tls-cert-file", "server.pem", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.pem"])
            .args(["--port", &port.to_string(), "--tls-port", &tls_port.to_string()])
            .current_dir(&folder)
            .stdout(Stdio::null())
            .spawn();
        let server = RedisServer { process: process.ok()?, folder, port, tls_port };
        let deadline = late();
        while std::net::TcpStream::connect(("127.0.0.1", tls_port)).is_err() {
            assert!(Instant::now() < deadline, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(server)
    }
}

#[cfg(feature = "redis")]
impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[cfg(feature = "redis")]
#[test]
fn redis_stores_with_a_password_and_by_tls() {
    let Some(server) = RedisServer::start() else {
        return not_run("redis_stores_with_a_password_and_by_tls; it needs redis-server and openssl");
    };
    let RedisServer { port, tls_port, folder, .. } = &server;
    for url in [
        format!("redis://:{}@127.0.0.1:{port}", RedisServer::PASSWORD),
        format!("rediss://:{}@localhost:{tls_port}", RedisServer::PASSWORD),
    ] {
        // The authorities that a process trusts are read from its environment.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "bootstrap::store::tests::redis_stores", "--nocapture"])
            .env("KOLO_TEST_REDIS", &url)
            .env("SSL_CERT_FILE", folder.join("ca.pem"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{url}: {said}");
        assert!(!said.contains(RedisServer::PASSWORD), "{said}");
    }
    // A server whose certificate no authority has signed that this process trusts.
    let place = StoreUrl::parse(&format!("rediss://:{}@localhost:{tls_port}", RedisServer::PASSWORD)).unwrap();
    let error = open(&place, false, &identity(), Instant::now() + Duration::from_secs(5)).err().expect("refused").to_string();
    assert!(error.contains("certificate") && !error.contains(RedisServer::PASSWORD), "{error}");
}

/// A server that takes connections and says nothing.
#[cfg(feature = "redis")]
#[test]
fn a_silent_redis_server_is_given_up_at_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for scheme in ["redis", "rediss"] {
        let place = StoreUrl::parse(&format!("{scheme}://:pass-word@127.0.0.1:{port}")).unwrap();
        let result = open(&place, false, &identity(), Instant::now() + SOON);
        let Some(Error::Store { store, problem: StoreProblem::Unreachable { last, .. } }) = result.err() else {
            panic!("opened")
        };
        assert!(store == format!("{scheme}://***@127.0.0.1:{port}"), "{store}");
        assert!(!last.contains("pass-word"), "{last}");
    }
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
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
    ] {
        assert_eq!(masked(url), shown);
        let place = StoreUrl::parse(url);
        let texts = [format!("{place:?}"), place.map_or_else(|error| error.to_string(), |_| String::new())];
        assert!(texts.iter().all(|text| !text.contains("sesame")), "{texts:?}");
    }
}

#[test]
fn what_a_crashed_run_left_in_a_file_is_replaced() {
    let place = file_place();
    let crashed = open(&place, true, &identity(), late()).unwrap();
    crashed.set("book", b"stale", LATE).unwrap();
    let StoreUrl::File(path) = &place else { unreachable!() };
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
        StoreProblem::InUse { theirs, mine } => assert_eq!((&*theirs, &*mine), ("job", "second")),
        other => panic!("{other}"),
    }
    let stray = open(&place, false, &second, late()).unwrap();
    let deadline = late();
    loop {
        match stray.get("a", SOON) {
            // At first it may be what a former run left.
            Err(StoreProblem::OtherJob { theirs, mine }) if Instant::now() < deadline => {
                assert_eq!((&*theirs, &*mine), ("job", "second"));
            }
            Err(problem @ StoreProblem::InUse { .. }) => {
                let text = problem.to_string();
                assert!(text.contains("job \"job\" is starting with it") && text.contains("belongs to job \"second\""), "{text}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Ranks that look at the lock of a former run of another job do not stop their rank 0.
#[test]
fn what_a_former_job_left_in_a_file_is_replaced_while_ranks_look_at_it() {
    let place = file_place();
    let StoreUrl::File(path) = &place else { unreachable!() };
    let zero = open(&place, true, &identity(), late()).unwrap();
    let left = std::fs::read(path).unwrap();
    drop(zero);
    let lock = format!("{}.lock", path.display());
    for file in [path.to_str().unwrap(), &lock] {
        std::fs::write(file, if file == lock { &[] } else { &left[..] }).unwrap();
        #[cfg(unix)]
        std::fs::set_permissions(file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let second = Identity::new("second", None);
    // It is there until all have read what it writes.
    let zero = std::thread::scope(|scope| {
        let (looked, has_looked) = mpsc::channel();
        for _ in 0..8 {
            let (stray, looked) = (open(&place, false, &second, late()).unwrap(), looked.clone());
            scope.spawn(move || {
                let began = Instant::now();
                // More than twice as long as it is until the second look.
                while began.elapsed() < Duration::from_millis(2500) {
                    let found = stray.get("a", SOON);
                    assert!(matches!(found, Err(StoreProblem::OtherJob { .. })), "{found:?}");
                }
                looked.send(()).unwrap();
                let deadline = late();
                let mut found = stray.get("a", SOON);
                while matches!(found, Err(StoreProblem::OtherJob { .. }) | Ok(None)) && Instant::now() < deadline {
                    found = stray.get("a", SOON);
                }
                assert_eq!(found.unwrap().unwrap(), b"1");
            });
        }
        (0..8).for_each(|_| has_looked.recv_timeout(LATE).unwrap());
        let zero = open(&place, true, &second, late()).unwrap();
        zero.set("a", b"1", LATE).unwrap();
        zero
    });
    drop(zero);
    assert!(!path.exists() && !std::path::Path::new(&lock).exists());
}

#[test]
fn a_file_with_other_contents_is_left_alone() {
    let path = temporary();
    std::fs::write(&path, "my thesis").unwrap();
    let result = open(&StoreUrl::File(path.clone()), true, &identity(), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Foreign(_), .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"my thesis");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_taken_port_and_another_job_are_told_apart() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let place = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port };
    match open(&place, true, &identity(), late()).err() {
        Some(Error::Store { problem: StoreProblem::PortTaken { address, holder }, .. }) => {
            assert_eq!(address, listener.local_addr().unwrap());
            if cfg!(target_os = "linux") {
                assert!(holder.unwrap().contains(&std::process::id().to_string()));
            }
        }
        other => panic!("{other:?}"),
    }
    // Its job is named to those who know the secret: without any, that would be everybody.
    for (secret, name) in [(Some([1; 32]), "job"), (None, "")] {
        let place = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
        let zero = open(&place, true, &Identity::new("job", secret), late()).unwrap();
        let place = StoreUrl::parse(&zero.url()).unwrap();
        for owner in [false, true] {
            let result = open(&place, owner, &Identity::new("second", secret), late());
            match result.err() {
                Some(Error::Store { problem: StoreProblem::OtherJob { theirs, .. }, .. }) => assert_eq!(theirs, name),
                other => panic!("{other:?}"),
            }
        }
    }
    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let place = StoreUrl::parse(&zero.url()).unwrap();
    let result = open(&place, false, &Identity::new("job", Some([1; 32])), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Secret, .. })));
}

#[test]
fn nobody_there_is_said_at_the_deadline() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let place = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port };
    let result = open(&place, false, &identity(), Instant::now() + SOON);
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreProblem::Unreachable { .. }, .. })));
}

#[test]
fn urls() {
    let tcp = |host: &str, port| StoreUrl::Tcp { host: host.to_owned(), port };
    for (url, place) in [
        ("tcp://10.0.0.1:29500", tcp("10.0.0.1", 29500)),
        ("tcp://[::1]:1", tcp("::1", 1)),
        ("tcp://node7:0", tcp("node7", 0)),
        ("env://", StoreUrl::Env),
        ("hash://a", StoreUrl::Hash("a".to_owned())),
        ("redis://localhost:6379/1", StoreUrl::Redis(RedisUrl("redis://localhost:6379/1".to_owned()))),
        ("file:///tmp/pg", StoreUrl::File("/tmp/pg".into())),
        ("file:///D:/pg", StoreUrl::File(if cfg!(windows) { "D:/pg" } else { "/D:/pg" }.into())),
    ] {
        assert_eq!(StoreUrl::parse(url).unwrap(), place, "{url}");
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
        let error = StoreUrl::parse(url).unwrap_err().to_string();
        assert!(error.contains("file:///path"), "{url}: {error}");
    }
}

/// Whatever authenticated clients send, the server goes on serving the others.
#[test]
fn garbage_requests_end_their_own_connection_only() {
    use std::io::{Read, Write};

    use crate::bootstrap::listener::dial;
    use crate::bootstrap::listener::handshake::{Hello, Purpose};

    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
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

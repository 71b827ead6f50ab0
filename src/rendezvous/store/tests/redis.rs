use std::time::{Duration, Instant};

use super::relay::Relay;
use super::{client_of_ended, identity, is_client_of_ended, late, not_run, promises, temporary};
use crate::error::{Error, StoreError};
use crate::network::identity::Identity;
use crate::rendezvous::store::{StoreUrl, open};

#[test]
fn a_redis_server_that_pauses_is_waited_for_until_the_deadline() {
    let Some(server) = RedisServer::start() else {
        return not_run("a_redis_server_that_pauses_is_waited_for_until_the_deadline; it needs redis-server and openssl");
    };
    let relay = Relay::to(server.port);
    let url = StoreUrl::parse(&format!("redis://:{}@127.0.0.1:{}", RedisServer::PASSWORD, relay.port)).unwrap();
    relay.pause(&*open(&url, false, &identity(), late()).unwrap());
}

#[test]
fn redis_stores() {
    let Ok(url) = std::env::var("KOLO_TEST_REDIS") else {
        return not_run("redis_stores; KOLO_TEST_REDIS names no server");
    };
    let identity = Identity::new(&format!("test-{}-{:?}", std::process::id(), Instant::now()), None);
    let opened = || open(&StoreUrl::parse(&url).unwrap(), false, &identity, late()).unwrap();
    promises(&*opened(), &*opened());
    // No message shows the password of a URL.
    let Some((password, _)) = url.rsplit_once('@').and_then(|(user, host)| Some((user.rsplit_once(':')?.1, host))) else {
        return;
    };
    assert!(!opened().url().contains(password), "{}", opened().url());
    let wrong = url.replace(password, "not-that-one");
    let error = open(&StoreUrl::parse(&wrong).unwrap(), false, &identity, late()).err().expect("refused").to_string();
    assert!(error.contains("***@") && !error.contains("not-that-one"), "{error}");
}

/// A Redis server that ends with the test.
struct RedisServer {
    process: std::process::Child,
    folder: std::path::PathBuf,
    port: u16,
    tls_port: u16,
}

impl RedisServer {
    const PASSWORD: &'static str = "open-sesame";

    /// Starts a server with a password and with certificates for `localhost`; `None` if the
    /// programs for it are missing.
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

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

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
        // A process reads the authorities that it trusts from its environment.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rendezvous::store::tests::redis::redis_stores", "--nocapture"])
            .env("KOLO_TEST_REDIS", &url)
            .env("SSL_CERT_FILE", folder.join("ca.pem"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{url}: {said}");
        assert!(!said.contains(RedisServer::PASSWORD), "{said}");
    }
    // This process trusts no authority that has signed the server's certificate.
    let url = StoreUrl::parse(&format!("rediss://:{}@localhost:{tls_port}", RedisServer::PASSWORD)).unwrap();
    let began = Instant::now();
    let within = Duration::from_secs(60);
    let error = open(&url, false, &identity(), began + within).err().expect("refused").to_string();
    assert!(error.contains("certificate") && !error.contains(RedisServer::PASSWORD), "{error}");
    assert!(began.elapsed() < within, "said when the server answered, not at the deadline");
}

#[test]
fn a_redis_server_that_ends_does_not_end_its_client() {
    const NAME: &str = "redis::a_redis_server_that_ends_does_not_end_its_client";
    if is_client_of_ended() {
        return;
    }
    let Some(server) = RedisServer::start() else {
        return not_run("a_redis_server_that_ends_does_not_end_its_client; it needs redis-server and openssl");
    };
    let url = format!("rediss://:{}@localhost:{}", RedisServer::PASSWORD, server.tls_port);
    let authority = server.folder.join("ca.pem");
    client_of_ended(NAME, &url, &authority, || drop(server));
}

/// The server accepts connections and sends nothing.
#[test]
fn a_silent_redis_server_is_given_up_at_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The certificates of the system are read in the second one.
    for (scheme, seconds) in [("redis", 2), ("rediss", 5)] {
        let url = StoreUrl::parse(&format!("{scheme}://:pass-word@127.0.0.1:{port}")).unwrap();
        let result = open(&url, false, &identity(), Instant::now() + Duration::from_secs(seconds));
        let Some(Error::Store { store, problem: StoreError::Unreachable { last, .. } }) = result.err() else { panic!("opened") };
        assert!(store == format!("{scheme}://***@127.0.0.1:{port}"), "{store}");
        assert!(!last.contains("pass-word"), "{last}");
    }
}

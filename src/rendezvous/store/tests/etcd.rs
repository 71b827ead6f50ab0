use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::relay::Relay;
use super::{LATE, client_of_ended, identity, is_client_of_ended, late, not_run, promises, temporary};
use crate::error::{Error, Result, StoreError};
use crate::network::identity::Identity;
use crate::rendezvous::store::{Store, StoreUrl, open};

fn opened(url: &str) -> Result<Box<dyn Store>> {
    opened_by(url, late())
}

fn opened_by(url: &str, deadline: Instant) -> Result<Box<dyn Store>> {
    open(&StoreUrl::parse(url).unwrap(), false, &identity(), deadline)
}

fn refusal(url: &str, deadline: Instant) -> String {
    let error = opened_by(url, deadline).err().unwrap_or_else(|| panic!("{url} was opened")).to_string();
    assert!(!error.contains("sesame"), "{error}");
    error
}

#[test]
fn etcd_stores() {
    let Ok(url) = std::env::var("KOLO_TEST_ETCD") else {
        return not_run("etcd_stores; KOLO_TEST_ETCD names no server");
    };
    let identity = Identity::new(&format!("test-{}-{:?}", std::process::id(), Instant::now()), None);
    let opened = || open(&StoreUrl::parse(&url).unwrap(), false, &identity, late()).unwrap();
    promises(&*opened(), &*opened());
}

#[test]
fn an_etcd_server_that_ends_does_not_end_its_client() {
    const NAME: &str = "etcd::an_etcd_server_that_ends_does_not_end_its_client";
    if is_client_of_ended() {
        return;
    }
    let Some(mut server) = Server::start() else {
        return not_run("an_etcd_server_that_ends_does_not_end_its_client; it needs etcd and openssl");
    };
    let (url, authority) = (format!("etcds://localhost:{}", server.ports[1]), server.folder.join("ca.pem"));
    client_of_ended(NAME, &url, &authority, || server.restart());
}

/// An etcd server that ends with the test.
struct Server {
    process: Child,
    folder: PathBuf,
    ports: [u16; 3],
}

impl Server {
    const LOGIN: &str = "root:open-sesame";

    /// Starts a server with a port for HTTP and one for TLS, with a certificate for `localhost`;
    /// `None` if the programs for it are missing.
    fn start() -> Option<Server> {
        let folder = temporary();
        std::fs::create_dir(&folder).unwrap();
        let make_certificates = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem && \
             openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr && \
             printf subjectAltName=DNS:localhost > server.ext && \
             openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile server.ext -out server.pem";
        let openssl = Command::new("sh").args(["-c", make_certificates]).current_dir(&folder).stderr(Stdio::null()).status();
        let listeners = [0; 3].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
        let process = openssl.ok().filter(|status| status.success()).and_then(|_| Server::run(&folder, ports));
        let Some(process) = process else {
            std::fs::remove_dir_all(&folder).unwrap();
            return None;
        };
        Some(Server { process, folder, ports })
    }

    /// Starts the server's process, and waits until the server answers.
    fn run(folder: &std::path::Path, [port, tls_port, peer_port]: [u16; 3]) -> Option<Child> {
        let clients = format!("http://127.0.0.1:{port},https://localhost:{tls_port}");
        let peers = format!("http://127.0.0.1:{peer_port}");
        let mut process = Command::new("etcd")
            .args(["--name", "one", "--data-dir", "data", "--cert-file", "server.pem", "--key-file", "server.key"])
            .args(["--listen-client-urls", &clients.replace("localhost", "127.0.0.1"), "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("one={peers}"), "--unsafe-no-fsync"])
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let deadline = late();
        while request(port, "/version", "").is_none() {
            assert!(Instant::now() < deadline, "etcd does not answer");
            // It may be a version without one of these options.
            if process.try_wait().unwrap().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(process)
    }

    /// Has the server ask for a password.
    fn set_password(&self) {
        let (name, password) = Server::LOGIN.split_once(':').unwrap();
        for (path, body) in [
            ("/v3/auth/user/add", format!(r#"{{"name": "{name}", "password": "{password}"}}"#)),
            ("/v3/auth/user/add", r#"{"name": "other", "password": "p%@:/"}"#.to_owned()),
            ("/v3/auth/user/grant", format!(r#"{{"user": "{name}", "role": "root"}}"#)),
            ("/v3/auth/enable", "{}".to_owned()),
        ] {
            let answer = request(self.ports[0], path, &body).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
    }

    fn restart(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process = Server::run(&self.folder, self.ports).unwrap();
    }

    fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.ports[0])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Sends a request to a server without the store; returns the answer, `None` if there is none.
fn request(port: u16, path: &str, body: &str) -> Option<String> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let mut connection = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let head = format!("{method} {path} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    connection.write_all(format!("{head}{body}").as_bytes()).ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).ok()?;
    answer.starts_with("HTTP/").then_some(answer)
}

/// Starts a server; without the programs for it, prints that a test did not run.
fn server_for(test: &str) -> Option<Server> {
    let server = Server::start();
    if server.is_none() {
        not_run(&format!("{test}; it needs etcd and openssl"));
    }
    server
}

#[test]
fn an_etcd_server_that_pauses_is_waited_for_until_the_deadline() {
    let Some(server) = server_for("an_etcd_server_that_pauses_is_waited_for_until_the_deadline") else { return };
    let relay = Relay::to(server.ports[0]);
    relay.pause(&*opened(&format!("etcd://127.0.0.1:{}", relay.port)).unwrap());
}

#[test]
fn etcd_stores_with_a_password_and_by_tls() {
    let Some(server) = server_for("etcd_stores_with_a_password_and_by_tls") else { return };
    let (url, [port, tls_port, _]) = (server.url(), server.ports);
    server.set_password();
    for url in [
        format!("etcd://{}@127.0.0.1:{port}", Server::LOGIN),
        // The first server does not exist.
        format!("etcd://{}@127.0.0.1:1,127.0.0.1:{port}/some/prefix", Server::LOGIN),
        format!("etcds://{}@localhost:{tls_port}/", Server::LOGIN),
    ] {
        // A process reads the authorities that it trusts from its environment.
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rendezvous::store::tests::etcd::etcd_stores", "--nocapture"])
            .env("KOLO_TEST_ETCD", &url)
            .env("SSL_CERT_FILE", server.folder.join("ca.pem"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{url}: {said}");
    }

    let error = refusal(&url, late());
    assert!(error.contains("user name is empty; give a user"), "{error}");
    let error = refusal(&url.replace("etcd://", "etcd://root:not-sesame@"), late());
    assert!(error.contains("://***@") && error.contains("check the user and the password"), "{error}");
    let error = refusal(&url.replace("etcd://", "etcd://other:p%25%40%3a%2F@"), late() - LATE + Duration::from_secs(30));
    assert!(error.contains("permission denied; give the user a role"), "{error}");
    // This process trusts no authority that has signed the server's certificate.
    let soon = || Instant::now() + Duration::from_secs(30);
    let error = refusal(&format!("etcds://localhost:{tls_port}"), soon());
    assert!(error.contains("certificate"), "{error}");
    let error = refusal(&format!("etcd://127.0.0.1:{tls_port}"), soon());
    assert!(error.contains("write etcds://") || error.contains("HTTPS server"), "{error}");
}

/// The server forgets the tokens of its clients when it ends, and closes their connections.
#[test]
fn an_etcd_server_may_be_restarted() {
    let Some(mut server) = server_for("an_etcd_server_may_be_restarted") else { return };
    server.set_password();
    let store = opened(&server.url().replace("://", &format!("://{}@", Server::LOGIN))).unwrap();
    store.set("a", b"1", LATE).unwrap();
    server.restart();
    assert_eq!(store.get("a", LATE).unwrap().unwrap(), b"1");
    assert_eq!(store.claim("a", b"2", LATE).unwrap(), b"1");
}

/// All keys belong to the lease of their process.
#[test]
fn keys_of_an_etcd_store_do_not_stay() {
    let Some(server) = server_for("keys_of_an_etcd_store_do_not_stay") else { return };
    let store = opened(&server.url()).unwrap();
    store.set("a", b"1", LATE).unwrap();
    store.claim("b", b"2", LATE).unwrap();
    // From "a" on, to the end.
    let all = request(server.ports[0], "/v3/kv/range", r#"{"key": "AA==", "range_end": "AA=="}"#).unwrap();
    assert_eq!((all.matches(r#""key""#).count(), all.matches(r#""lease""#).count()), (2, 2), "{all}");
    let leases = request(server.ports[0], "/v3/lease/leases", "{}").unwrap();
    let id: String = leases.split_once(r#""ID":""#).unwrap().1.chars().take_while(char::is_ascii_digit).collect();
    let lease = request(server.ports[0], "/v3/lease/timetolive", &format!(r#"{{"ID": "{id}"}}"#)).unwrap();
    let granted: u64 = lease.split_once(r#""grantedTTL":""#).unwrap().1.split('"').next().unwrap().parse().unwrap();
    assert!((3600..=3660).contains(&granted), "{granted} s");
}

/// A server that sends nothing, and one that is none.
#[test]
fn a_silent_etcd_server_is_given_up_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let soon = || Instant::now() + Duration::from_secs(2);
    // The certificates of the system are read in the second one.
    for (scheme, until) in [("etcd", soon()), ("etcds", soon() + Duration::from_secs(5))] {
        let url = StoreUrl::parse(&format!("{scheme}://me:open-sesame@127.0.0.1:{port}")).unwrap();
        let result = open(&url, false, &identity(), until);
        let Some(Error::Store { store, problem: StoreError::Unreachable { last, .. } }) = result.err() else { panic!("opened") };
        assert_eq!(store, format!("{scheme}://***@127.0.0.1:{port}/kolo"));
        assert!(!last.contains("sesame"), "{last}");
    }
    drop(listener);
    let error = refusal(&format!("etcd://127.0.0.1:{port}"), soon());
    assert!(error.contains("refused"), "{error}");
}

/// A server with TLS that gets a request without it ends the connection: with a reset if it has not
/// read the whole request.
#[test]
fn a_server_that_ends_connections_may_speak_tls() {
    for reads in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let mut bytes = [0; 4096];
                // The end of a connection is a reset if something was not read.
                let _ = client.peek(&mut bytes);
                while reads && client.read(&mut bytes).is_ok_and(|count| count > 0 && !bytes.contains(&b'}')) {}
            }
        });
        let error = refusal(&format!("etcd://127.0.0.1:{port}"), Instant::now() + Duration::from_secs(2));
        assert!(error.contains("write etcds://"), "{error}");
    }
}

/// Answers of a server that is no etcd: each is named, and none is read without a bound.
#[test]
fn what_is_no_etcd_server_is_named() {
    let endless = || std::iter::repeat_n("x".repeat(1 << 20), 64);
    let answers: [(Vec<String>, &str); 4] = [
        (vec!["HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot\x07found".to_owned()], "status 404 (not found)"),
        (vec!["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]".to_owned()], "status 200 ([])"),
        (vec!["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}".to_owned()], "grants no lease"),
        (std::iter::once("HTTP/1.1 200 OK\r\n\r\n".to_owned()).chain(endless()).collect(), "longer than"),
    ];
    for (answer, expected) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut bytes = [0; 4096];
            // The request is one write of its head and one of its body.
            while !bytes.ends_with(b"}") {
                let count = client.read(&mut bytes).unwrap();
                if bytes[..count].ends_with(b"}") {
                    break;
                }
            }
            for part in answer {
                if client.write_all(part.as_bytes()).is_err() {
                    break;
                }
            }
        });
        let error = refusal(&format!("etcd://127.0.0.1:{port}"), late());
        assert!(error.contains(expected) && error.contains("is not etcd"), "{expected}: {error}");
    }
}

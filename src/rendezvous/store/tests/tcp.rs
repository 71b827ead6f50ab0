use std::time::Instant;

use super::relay::Relay;
use super::{LATE, SOON, identity, late, promises};
use crate::error::{Error, StoreError};
use crate::network::identity::Identity;
use crate::rendezvous::store::{StoreUrl, TcpStoreServer, open};

#[test]
fn tcp_stores() {
    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let other = open(&StoreUrl::parse(&zero.url()).unwrap(), false, &identity(), late()).unwrap();
    promises(&*zero, &*other);
}

/// Rank 0 closes the store of a start, and serves that of the next.
#[test]
fn a_store_that_is_served_again_is_connected_to_again() {
    let bind = |address: std::net::SocketAddr| TcpStoreServer::bind(address, "job", None).unwrap();
    let first = bind("127.0.0.1:0".parse().unwrap());
    let address = first.address();
    let store = open(&StoreUrl::parse(&first.url()).unwrap(), false, &identity(), late()).unwrap();
    store.set("a", b"1", LATE).unwrap();
    drop(first);
    store.get("a", SOON).unwrap_err();
    assert!(matches!(store.reconnect(SOON), Err(StoreError::Unreachable { .. })));
    let _second = bind(address);
    assert!(store.reconnect(LATE).unwrap());
    assert_eq!(store.get("a", SOON).unwrap(), None);
    // Rank 0 serves the store itself.
    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    assert!(!zero.reconnect(LATE).unwrap());
}

/// The server pauses if the process of rank 0 is paused while ranks connect.
#[test]
fn a_server_that_pauses_is_waited_for_until_the_deadline() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "job", None).unwrap();
    let relay = Relay::to(server.address().port());
    let url = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: relay.port };
    relay.pause(&*open(&url, false, &identity(), late()).unwrap());
}

/// A second process of a rank may ask while rank 0 has started and closes its store.
#[test]
fn a_server_that_ends_with_a_request_unread_says_what_to_check() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "job", None).unwrap();
    let relay = Relay::to(server.address().port());
    let store = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: relay.port }, false, &identity(), late()).unwrap();
    relay.end();
    let problem = store.get("absent", SOON).unwrap_err().to_string();
    assert!(problem.contains("check that rank 0 runs, that this rank was started once"), "{problem}");
    if cfg!(unix) {
        assert!(problem.contains("reset"), "{problem}");
    }
}

#[test]
fn a_taken_port_and_another_job_are_told_apart() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port };
    match open(&url, true, &identity(), late()).err() {
        Some(Error::Store { problem: StoreError::PortTaken { address, holder }, .. }) => {
            assert_eq!(address, listener.local_addr().unwrap());
            if cfg!(target_os = "linux") {
                assert!(holder.unwrap().contains(&std::process::id().to_string()));
            }
        }
        other => panic!("{other:?}"),
    }
    // A peer learns the name of the job only if it knows the secret. Without a secret, every
    // process would learn it.
    for (secret, name) in [(Some([1; 32]), "job"), (None, "")] {
        let url = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
        let zero = open(&url, true, &Identity::new("job", secret), late()).unwrap();
        let url = StoreUrl::parse(&zero.url()).unwrap();
        for owner in [false, true] {
            let result = open(&url, owner, &Identity::new("second", secret), late());
            match result.err() {
                Some(Error::Store { problem: StoreError::OtherJob { theirs, .. }, .. }) => assert_eq!(theirs, name),
                other => panic!("{other:?}"),
            }
        }
    }
    // The rank 0 of another job that has the same name, or another secret.
    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let url = StoreUrl::parse(&zero.url()).unwrap();
    let others =
        [(identity(), "the store of a job with the same name, \"job\""), (Identity::new("job", Some([1; 32])), "another secret")];
    for (identity, what) in others {
        match open(&url, true, &identity, late()).err() {
            Some(Error::Store { problem: StoreError::PortTaken { holder: Some(holder), .. }, .. }) => {
                assert!(holder.contains(what), "{holder}");
            }
            other => panic!("{other:?}"),
        }
    }
    let result = open(&url, false, &Identity::new("job", Some([1; 32])), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreError::Secret, .. })));
}

#[test]
fn an_absent_server_is_reported_at_the_deadline() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port };
    let result = open(&url, false, &identity(), Instant::now() + SOON);
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreError::Unreachable { .. }, .. })));
}

/// Whatever authenticated clients send, the server continues to serve the others.
#[test]
fn garbage_requests_end_their_own_connection_only() {
    use std::io::{Read, Write};

    use crate::network::listener::dial;
    use crate::network::listener::handshake::{Hello, Purpose};

    let zero = open(&StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, true, &identity(), late()).unwrap();
    let address = zero.url().trim_start_matches("tcp://").parse().unwrap();
    let hello = Hello::new(Purpose::Store, 0, 0, 0);
    for garbage in [[0xff; 64], [1; 64]] {
        let mut stream = dial(address, &identity(), &hello, late()).unwrap().map(std::net::TcpStream::from);
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LATE)).unwrap();
        stream.write_all(&garbage).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    }
    zero.set("a", b"1", LATE).unwrap();
}

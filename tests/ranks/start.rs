//! How ranks connect, and what their errors say if they cannot.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{self, DEADLINE, at_once, fresh, wait_until};
use kolo::plan::{CostModel, LinkCost};
use kolo::{Algorithm, Communicator, Error, ReduceOp, Store, StoreError, TcpStoreServer, Transport};

fn temporary() -> PathBuf {
    std::env::temp_dir().join(fresh())
}

fn file_url(path: &std::path::Path) -> String {
    format!("file://{}", path.display())
}

/// Connects ranks, each on its own thread and with options by position. Returns the result of each.
fn connect(count: usize, options: impl Fn(usize, kolo::Builder) -> kolo::Builder + Sync) -> Vec<kolo::Result<Communicator>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|i| {
                let options = &options;
                scope.spawn(move || {
                    let result = options(i, Communicator::builder().rank(i).world_size(count)).connect();
                    // All ranks stay connected until all have tried.
                    if let Ok(comm) = &result {
                        comm.barrier().unwrap();
                    }
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns a store of each kind, the first one in this file.
fn stores(path: &std::path::Path) -> Vec<String> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut urls =
        vec![file_url(path), format!("tcp://127.0.0.1:{port}"), format!("tcp://localhost:{port}"), format!("hash://{}", fresh())];
    if cfg!(feature = "redis") {
        match std::env::var("KOLO_TEST_REDIS") {
            Ok(url) => urls.push(url),
            Err(_) => common::not_run("a redis:// store; KOLO_TEST_REDIS names no server"),
        }
    }
    urls
}

#[test]
fn every_store_connects_ranks() {
    let path = temporary();
    for url in stores(&path) {
        for result in connect(3, |_, builder| builder.store(&url).job(fresh_job(&url))) {
            assert_eq!(result.unwrap().world_size(), 3, "{url}");
        }
    }
    assert!(!path.exists(), "the file of the store is left");
    // A store of the program.
    let guest: Arc<dyn Store> = Arc::new(Memory::default());
    for result in connect(2, |_, builder| builder.store_object(guest.clone())) {
        result.unwrap();
    }
}

/// A rank that starts again at once meets the store of the former start, which still has its own
/// values or is about to close.
#[test]
fn ranks_start_again_and_again_with_one_store() {
    let path = temporary();
    for url in stores(&path) {
        for secret in [None, Some([7; 32])] {
            let start = |rank: usize| {
                let builder = Communicator::builder().rank(rank).world_size(2).store(&url).job(fresh_job(&url));
                let builder = builder.start_timeout(common::START);
                let builder = secret.map_or(builder.clone(), |secret| builder.secret(secret));
                builder.connect().unwrap_or_else(|error| panic!("{url}, rank {rank}: {error}"))
            };
            std::thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || (0..20).for_each(|_| drop(start(rank))));
                }
            });
        }
    }
    assert!(!path.exists(), "the file of the store is left");
}

/// Returns the first of `count` ports, one after the other, that are free.
fn free_ports(count: u16) -> u16 {
    let first = |port: u16| {
        let listen = |port| std::net::TcpListener::bind(("127.0.0.1", port)).ok();
        (port..port + count).map(listen).collect::<Option<Vec<_>>>().map(|_| port)
    };
    (0..100).find_map(|i| first(15_000 + (std::process::id() as u16 % 100) * 100 + i * count)).expect("free ports")
}

/// Ranks listen within their range of ports, and say so if all of its ports are taken.
#[test]
fn a_range_of_ports_is_kept() {
    let first = free_ports(3);
    let taken = std::net::TcpListener::bind(("127.0.0.1", first)).unwrap();
    let connected = |last: u16| {
        let url = format!("hash://{}", fresh());
        connect(2, |_, builder| {
            let builder = builder.store(&url).interface("127.0.0.1").transport(Transport::Tcp).ports(first..=last);
            builder.start_timeout(Duration::from_secs(if last == first + 1 { 2 } else { 60 }))
        })
    };
    // Two ports are free.
    for result in connected(first + 2) {
        result.unwrap();
    }
    // One port is free: the other rank waits for this one.
    let errors: Vec<String> = connected(first + 1).into_iter().map(|result| result.unwrap_err().to_string()).collect();
    let range = format!("KOLO_PORTS=\"{first}-{}\"", first + 1);
    assert!(errors.iter().any(|error| error.contains(&range) && error.contains("all 2 are taken")), "{errors:?}");
    drop(taken);

    let error = connect(2, |_, builder| builder.store(format!("hash://{}", fresh())).ports(0..=5)).remove(0).unwrap_err();
    assert!(matches!(error, Error::Setting { .. }) && error.to_string().contains("20000-20100"), "{error}");
}

/// Rank 0 serves a store whose port it picks within its range of ports.
#[test]
fn the_store_is_served_within_the_range_of_ports() {
    let first = free_ports(3);
    let url = |port: u16| format!("tcp://127.0.0.1:{port}");
    // Rank 1 does not know the port. Rank 0 takes the first one, and listens at the last one.
    let results = connect(2, |rank, builder| {
        let builder = builder.store(url(if rank == 0 { 0 } else { first })).job(fresh_job("ports"));
        builder.interface("127.0.0.1").ports(first..=first + 2)
    });
    for result in results {
        result.unwrap();
    }
}

/// A launcher that serves the store of the environment does not serve a store that the program
/// names: rank 0 does.
#[test]
fn a_store_that_the_program_names_is_not_the_launchers() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "start::every_store_connects_ranks"])
        .env("KOLO_STORE_SERVED", "1")
        .env("KOLO_STORE", "tcp://127.0.0.1:1")
        .env("KOLO_START_TIMEOUT", "60")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns a job name that is the same for all ranks and different for every run of the test.
fn fresh_job(url: &str) -> String {
    format!("{url} {}", std::process::id())
}

/// The threads of a server, and of the host group behind a buffer, are the parent's.
#[cfg(target_os = "linux")]
#[test]
fn a_forked_child_may_drop_what_outlives_a_communicator() {
    let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into(), &fresh(), None).unwrap();
    let url = file_url(&temporary());
    let comms = connect(2, |_, builder| builder.store(&url));
    let buffers: Vec<_> = comms.into_iter().map(|comm| comm.unwrap().alloc_pooled::<f32>(1 << 16).unwrap()).collect();
    // SAFETY: the child drops values and ends. The C library lets a child of several threads
    // allocate and free memory.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop((server, buffers))));
        // SAFETY: the child ends without the handlers of its parent.
        unsafe { libc::_exit(i32::from(dropped.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the call writes one number.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child panicked");
}

#[test]
fn settings_of_rank_0_hold_for_all_ranks() {
    let url = format!("hash://{}", fresh());
    let results = connect(2, |rank, builder| {
        let builder = builder.store(&url);
        if rank == 0 {
            builder.transport(Transport::Tcp).algorithm(Algorithm::Ring)
        } else {
            builder.algorithm(Algorithm::Direct)
        }
    });
    for comm in results {
        let comm = comm.unwrap();
        assert_eq!((comm.transport_name(), comm.host_count()), ("tcp", 1));
        assert_eq!(comm.algorithm(kolo::Op::AllReduce, 8).algorithm, Algorithm::Ring);
    }
}

#[test]
fn missing_ranks_are_listed_on_all_others() {
    let path = temporary();
    at_once([format!("hash://{}", fresh()), file_url(&path)], |url| {
        let began = Instant::now();
        let results = connect(2, |i, builder| builder.rank([0, 3][i]).world_size(5).store(&url).start_timeout(DEADLINE));
        for result in results {
            match result.unwrap_err() {
                Error::Missing { ranks, world_size: 5, .. } => assert_eq!(ranks, [1, 2, 4]),
                other => panic!("{other}"),
            }
        }
        assert!(began.elapsed() >= DEADLINE);
    });
    assert!(!path.exists(), "the file of the store is left");
}

#[test]
fn without_rank_0_the_others_name_it() {
    let url = format!("hash://{}", fresh());
    let result = Communicator::builder().rank(1).world_size(2).store(url).start_timeout(Duration::from_millis(200)).connect();
    match result.unwrap_err() {
        Error::Missing { ranks, .. } => assert_eq!(ranks, [0]),
        other => panic!("{other}"),
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("tcp://127.0.0.1:{port}");
    let result = Communicator::builder().rank(1).world_size(2).store(&url).start_timeout(Duration::from_millis(200)).connect();
    let text = result.unwrap_err().to_string();
    assert!(text.contains(&url) && text.contains("check that rank 0 is running"), "{text}");
}

#[test]
fn different_world_sizes_are_named_by_all_ranks() {
    let url = format!("hash://{}", fresh());
    let began = Instant::now();
    let results = connect(3, |i, builder| builder.world_size([3, 3, 4][i]).store(&url));
    for result in results {
        match result.unwrap_err() {
            Error::WorldSize { rank: 2, theirs: 4, my_rank: 0, mine: 3, .. } => {}
            other => panic!("{other}"),
        }
    }
    assert!(began.elapsed() < Duration::from_secs(20), "the ranks waited for their deadline");

    // Rank 0 expects one rank less, so its world is complete.
    let url = format!("hash://{}", fresh());
    let results = connect(2, |i, builder| {
        let (rank, world) = [(0, 1), (1, 2)][i];
        builder.rank(rank).world_size(world).store(&url).start_timeout(Duration::from_millis(300))
    });
    assert!(results[0].is_ok(), "a world of one does not wait");
    assert!(matches!(results[1].as_ref().unwrap_err(), Error::Missing { .. }));
}

#[test]
fn a_rank_that_was_started_twice_is_named() {
    let url = format!("hash://{}", fresh());
    let began = Instant::now();
    let results =
        connect(3, |i, builder| builder.rank([0, 1, 1][i]).world_size(3).store(&url).start_timeout(Duration::from_secs(4)));
    let twice = results.iter().filter(|result| matches!(result, Err(Error::RankTaken { rank: 1, .. }))).count();
    assert_eq!(twice, 1, "{results:?}");
    let twice = results.iter().filter_map(|result| result.as_ref().err()).map(Error::to_string);
    // One process is not named as two.
    let once = format!("started twice: as process {} on ", std::process::id());
    let is_right = |text: &str| {
        text.contains("missing 2") || text.contains(&once) && text.contains(" and as another start in that process;")
    };
    twice.for_each(|text| assert!(is_right(&text), "{text}"));
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn two_ranks_0_are_named() {
    let url = format!("hash://{}", fresh());
    let results = connect(2, |_, builder| builder.rank(0).world_size(2).store(&url).start_timeout(Duration::from_secs(3)));
    assert!(results.iter().any(|result| matches!(result, Err(Error::RankTaken { rank: 0, .. }))), "{results:?}");
}

#[test]
fn values_of_a_crashed_run_in_a_store_do_no_harm() {
    // All keys of an earlier run: a generation, the peer infos of all ranks and the peer table.
    type Log = Mutex<Vec<(String, Vec<u8>)>>;
    struct Recording(Arc<dyn Store>, Arc<Log>);
    impl Store for Recording {
        fn url(&self) -> String {
            self.0.url()
        }
        fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
            self.1.lock().unwrap().push((key.to_owned(), value.to_vec()));
            self.0.set(key, value, timeout)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
            self.0.get(key, timeout)
        }
        fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
            self.1.lock().unwrap().push((key.to_owned(), value.to_vec()));
            self.0.claim(key, value, timeout)
        }
    }
    let log = Arc::new(Mutex::new(Vec::new()));
    let first: Arc<dyn Store> = Arc::new(Memory::default());
    let results = connect(2, |_, builder| builder.store_object(Arc::new(Recording(first.clone(), log.clone()))));
    assert!(results.into_iter().all(|result| result.is_ok()));

    // A new run finds all of these keys. Its rank 1 comes first.
    let second = Arc::new(Memory::default());
    for (key, value) in log.lock().unwrap().iter() {
        second.set(key, value, Duration::ZERO).unwrap();
    }
    let results = connect(2, |rank, builder| {
        if rank == 0 {
            // Rank 0 comes after rank 1 has read the earlier run's keys many times, for longer than
            // it takes to find a living rank.
            wait_until("rank 1 does not read", || second.gets.load(Ordering::Relaxed) >= 150);
        }
        builder.store_object(second.clone()).start_timeout(Duration::from_secs(90))
    });
    for result in results {
        result.unwrap();
    }
    assert!(second.gets.load(Ordering::Relaxed) >= 150, "rank 1 did not wait for rank 0");
}

/// A change by a process that can write to the store and does not know the secret is noticed.
#[test]
fn a_changed_value_in_a_store_is_noticed() {
    /// Changes the values of keys that end with `end`.
    struct Relaying {
        store: Memory,
        end: &'static str,
        change: fn(&Memory, &str, Vec<u8>) -> Vec<u8>,
    }
    impl Store for Relaying {
        fn url(&self) -> String {
            "relaying".to_owned()
        }
        fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
            self.store.set(key, value, timeout)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
            let change = |value| if key.ends_with(self.end) { (self.change)(&self.store, key, value) } else { value };
            Ok(self.store.get(key, timeout)?.map(change))
        }
        fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
            self.store.claim(key, value, timeout)
        }
    }
    // Replaces the address of a rank, as a relay would.
    fn address(_: &Memory, _: &str, mut value: Vec<u8>) -> Vec<u8> {
        let at =
            value.windows(9).position(|text| text == b"127.0.0.1").or_else(|| value.windows(3).position(|text| text == b"10."));
        value[at.unwrap_or(40)] ^= 1;
        value
    }
    // Returns the value of another rank.
    fn of_another(store: &Memory, key: &str, _: Vec<u8>) -> Vec<u8> {
        let other = key.replace("rank/1", "rank/0");
        store.get(&other, Duration::ZERO).unwrap().unwrap()
    }
    fn nothing(_: &Memory, _: &str, _: Vec<u8>) -> Vec<u8> {
        Vec::new()
    }
    // Some values are read by rank 0, some by the other ranks, some by all.
    type Change = fn(&Memory, &str, Vec<u8>) -> Vec<u8>;
    let cases: [(&'static str, Change); 5] =
        [("/rank/1", address), ("/rank/1", of_another), ("/rank/1", nothing), ("/table", address), ("/hosts", address)];
    for (end, change) in cases {
        let store = Arc::new(Relaying { store: Memory::default(), end, change });
        let results = connect(3, |rank, builder| {
            let builder = builder.store_object(store.clone()).secret([7; 32]).host(["a", "b", "a"][rank]);
            builder.start_timeout(Duration::from_secs(5))
        });
        let mut noticed = 0;
        for result in results {
            match result {
                Err(Error::Store { problem: StoreError::Forged { key }, store }) => {
                    assert!(key.ends_with(end) && store == "relaying", "{key}");
                    noticed += 1;
                }
                // Rank 0 does not read its own peer table and list of hosts. It notices the ranks
                // that do not continue.
                Err(Error::Peer { .. }) if end != "/rank/1" => {}
                other => panic!("{end}: {other:?}"),
            }
        }
        assert!(noticed >= if end == "/rank/1" { 3 } else { 2 }, "{end} was noticed by {noticed}");
    }
}

/// Ranks of one job with different secrets, or some of them without one, do not connect, and say so
/// at their deadline.
#[test]
fn ranks_with_different_secrets_say_so() {
    for (secrets, others_say) in [
        ([Some([7; 32]), Some([8; 32])], "has no valid signature"),
        ([Some([7; 32]), None], "not the same"),
        ([None, Some([8; 32])], "not the same"),
    ] {
        let store = Arc::new(Memory::default());
        let results = connect(2, |rank, builder| {
            if rank == 1 {
                wait_until("rank 0 announces no run", || !store.values.lock().unwrap().is_empty());
            }
            let builder = builder.store_object(store.clone()).start_timeout(Duration::from_millis(500));
            match secrets[rank] {
                Some(secret) => builder.secret(secret),
                None => builder,
            }
        });
        match &results[0] {
            Err(Error::Missing { ranks, .. }) => assert_eq!(ranks, &[1]),
            other => panic!("{other:?}"),
        }
        let text = results[1].as_ref().unwrap_err().to_string();
        assert!(text.contains(others_say) && text.contains("KOLO_SECRET"), "{text}");
    }
}

/// A minimal store in memory.
#[derive(Default)]
struct Memory {
    values: Mutex<std::collections::BTreeMap<String, Vec<u8>>>,
    gets: AtomicUsize,
}

impl Store for Memory {
    fn url(&self) -> String {
        "memory".to_owned()
    }

    fn set(&self, key: &str, value: &[u8], _: Duration) -> Result<(), StoreError> {
        self.values.lock().unwrap().insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        let deadline = Instant::now() + timeout;
        loop {
            let value = self.values.lock().unwrap().get(key).cloned();
            if value.is_some() || Instant::now() >= deadline {
                return Ok(value);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn claim(&self, key: &str, value: &[u8], _: Duration) -> Result<Vec<u8>, StoreError> {
        Ok(self.values.lock().unwrap().entry(key.to_owned()).or_insert_with(|| value.to_vec()).clone())
    }
}

#[test]
fn wrong_settings_are_rejected_at_once() {
    let began = Instant::now();
    let start = |url: &str| Communicator::builder().rank(0).world_size(2).store(url).connect().unwrap_err();
    for (url, hint) in [("http://x:1", "file:///path"), ("tcp://host", "it has no port"), ("file://relative/x", "three slashes")]
    {
        let text = start(url).to_string();
        assert!(text.contains(url) && text.contains(hint), "{text}");
    }
    let text = start("file:///no/such/folder/pg").to_string();
    assert!(text.contains("/no/such/folder/pg") && text.contains(MISSING), "{text}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = start(&format!("tcp://127.0.0.1:{port}")).to_string();
    assert!(text.contains(&format!("port {port} is taken")) && text.contains("port 0"), "{text}");
    // Wine accepts every address.
    if std::net::UdpSocket::bind("198.51.100.7:0").is_ok() {
        common::not_run("a store at another machine's address; this system listens there");
    } else {
        let text = start("tcp://198.51.100.7:29500").to_string();
        assert!(text.contains("not an address of this machine"), "{text}");
    }

    let error = Communicator::builder().rank(2).world_size(2).connect().unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    let error = Communicator::builder().rank(0).world_size(4_000_000_000).connect().unwrap_err();
    assert!(error.to_string().contains("world_size=\"4000000000\": at most 65536"), "{error}");
    let error = Communicator::builder().rank(0).world_size(2).connect().unwrap_err();
    assert!(matches!(&error, Error::NoLauncher { found, .. } if found.contains("KOLO_STORE")), "{error}");
    let error = Communicator::builder().rank(0).connect().unwrap_err();
    assert!(matches!(error, Error::NoLauncher { .. }), "{error}");
    let error = Communicator::builder().rank(0).world_size(2).store("hash://x").secret_file("").connect().unwrap_err();
    assert!(error.to_string().contains("secret_file=\"\": it is set but empty"), "{error}");
    let error = Communicator::builder().sockets(0).connect().unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
    let error = Communicator::builder().timeout(Duration::ZERO).connect().unwrap_err();
    assert!(matches!(&error, Error::Setting { name, .. } if name == "timeout"), "{error}");
    let error = Communicator::builder().start_timeout(Duration::ZERO).connect().unwrap_err();
    assert!(matches!(&error, Error::Setting { name, .. } if name == "start_timeout"), "{error}");
    let error = Communicator::builder().rank(0).world_size(2).store("hash://x").interface("=nonesuch").connect().unwrap_err();
    assert!(error.to_string().contains("there are lo"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn ranks_of_another_job_or_without_the_secret_stay_out() {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "first", Some([7; 32])).unwrap();
    let start = |job: &str, secret| {
        let builder = Communicator::builder().rank(1).world_size(2).store(server.url()).job(job);
        builder.secret(secret).start_timeout(Duration::from_secs(5)).connect().unwrap_err()
    };
    let error = start("second", [7; 32]);
    assert!(matches!(&error, Error::Store { problem: StoreError::OtherJob { theirs, .. }, .. } if theirs == "first"), "{error}");
    assert!(matches!(start("first", [8; 32]), Error::Store { problem: StoreError::Secret, .. }));
}

#[test]
fn hosts_are_ranks_that_share_memory_or_declare_the_same_host() {
    if !cfg!(any(target_os = "linux", target_os = "macos", windows)) {
        common::not_run("kolo has no shared memory between processes on this system");
        return;
    }
    let url = format!("hash://{}", fresh());
    for comm in connect(3, |_, builder| builder.store(&url)) {
        let comm = comm.unwrap();
        assert_eq!((comm.host_count(), comm.transport_name()), (1, "shm"));
    }
    let url = format!("hash://{}", fresh());
    for comm in connect(3, |rank, builder| builder.store(&url).host(["a", "b", "a"][rank])) {
        let comm = comm.unwrap();
        assert_eq!((comm.host_count(), comm.transport_name()), (2, "shm+tcp"));
    }
    let url = format!("hash://{}", fresh());
    for result in connect(2, |rank, builder| builder.store(&url).host(["a", "b"][rank]).transport(Transport::Shm)) {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("rank 1 (b) cannot share memory with rank 0 (a)"), "{text}");
    }
}

#[test]
fn a_large_world_starts() {
    let url = format!("hash://{}", fresh());
    for comm in connect(40, |rank, builder| builder.store(&url).host(format!("host{}", rank / 10))) {
        let comm = comm.unwrap();
        assert_eq!((comm.world_size(), comm.host_count()), (40, 4));
        drop(comm);
    }
    common::run(
        32,
        |_, builder| builder.transport(Transport::Tcp),
        |comm| {
            let mut word = [comm.rank() as u64];
            comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
            assert_eq!(word, [31 * 16]);
        },
    );
}

/// Whether this process is root, which some tests need.
#[cfg(target_os = "linux")]
fn is_root() -> bool {
    // SAFETY: the call has no requirements.
    unsafe { libc::geteuid() == 0 }
}

/// A file system that never answers: every call waits for its server, which is this test.
#[cfg(target_os = "linux")]
struct SilentFiles {
    path: PathBuf,
    _mount: Mount,
    _server: std::fs::File,
}

#[cfg(target_os = "linux")]
impl SilentFiles {
    fn mount() -> Option<SilentFiles> {
        SilentFiles::mount_at(temporary())
    }

    fn mount_at(path: PathBuf) -> Option<SilentFiles> {
        use std::os::fd::AsRawFd;

        let server = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        // When the server is closed, waiting calls return an error.
        Some(SilentFiles { _mount: Mount::new(&path, "fuse", 0, &options)?, path, _server: server })
    }
}

/// A file system that is mounted for one test.
#[cfg(target_os = "linux")]
struct Mount(std::ffi::CString);

#[cfg(target_os = "linux")]
impl Mount {
    fn new(path: &std::path::Path, kind: &str, flags: libc::c_ulong, options: &str) -> Option<Mount> {
        std::fs::create_dir_all(path).unwrap();
        let [kind, target, options] = [kind, path.to_str().unwrap(), options].map(|text| std::ffi::CString::new(text).unwrap());
        // SAFETY: all texts end with a zero and live until the call returns.
        let result = unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast()) };
        if result != 0 {
            std::fs::remove_dir(path).unwrap();
            return None;
        }
        Some(Mount(target))
    }
}

#[cfg(target_os = "linux")]
impl Drop for Mount {
    fn drop(&mut self) {
        // SAFETY: the path ends with a zero.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
        let _ = std::fs::remove_dir(self.0.to_str().unwrap());
    }
}

/// What the system says about a folder that is missing.
const MISSING: &str = if cfg!(windows) { "(os error " } else { "No such file" };

/// Rank 0 creates the file of a store, and the other ranks wait for it. No rank waits if the file
/// cannot be created.
#[test]
fn a_folder_in_which_the_stores_file_cannot_be_created_is_named_at_once() {
    let began = Instant::now();
    let refused = |folder: &std::path::Path, why: &str| {
        for rank in [1, 0] {
            let store = file_url(&folder.join("store"));
            let builder = Communicator::builder().rank(rank).world_size(2).store(store).start_timeout(Duration::from_secs(100));
            let error = builder.connect().unwrap_err();
            assert!(matches!(&error, Error::Store { problem: StoreError::Folder { .. }, .. }), "{error}");
            let text = error.to_string();
            let place = format!("in the folder {}: ", folder.display());
            assert!(text.contains(&place) && text.contains(why) && text.contains("choose another path"), "{text}");
        }
    };
    refused(&temporary(), MISSING);
    #[cfg(target_os = "linux")]
    if is_root() {
        let path = temporary();
        match Mount::new(&path, "tmpfs", libc::MS_RDONLY, "") {
            Some(_mount) => refused(&path, "Read-only"),
            None => common::not_run("a store in a folder that is read-only: this process may not mount"),
        }
        if let Some(_mount) = Mount::new(&path, "tmpfs", 0, "size=4k") {
            std::fs::write(path.join("all"), [7; 4096]).unwrap();
            refused(&path, "No space left");
        }
    } else {
        use std::os::unix::fs::PermissionsExt;
        let path = temporary();
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o500)).unwrap();
        refused(&path, "Permission denied");
        std::fs::remove_dir(&path).unwrap();
        common::not_run("a store in a folder that is read-only or full; it needs root");
    }
    assert!(began.elapsed() < Duration::from_secs(100), "a rank waited for its deadline");
}

/// A virus scanner or another program may have opened the file of a store so that no other process
/// can.
#[cfg(windows)]
#[test]
fn a_file_that_a_process_has_opened_for_itself_alone_is_named_at_once() {
    use std::os::windows::fs::OpenOptionsExt;
    let path = temporary();
    let _held = std::fs::OpenOptions::new().write(true).create(true).truncate(false).share_mode(0).open(&path).unwrap();
    let began = Instant::now();
    for rank in [1, 0] {
        let builder = Communicator::builder().rank(rank).world_size(2).store(file_url(&path));
        let text = builder.start_timeout(Duration::from_secs(100)).connect().unwrap_err().to_string();
        assert!(text.contains(&path.display().to_string()) && text.contains("(os error 32)"), "{text}");
    }
    assert!(began.elapsed() < Duration::from_secs(100), "a rank waited for its deadline");
}

#[test]
fn costs_that_cannot_be_compared_are_refused() {
    for cost in [f64::NAN, f64::INFINITY, -1.0] {
        let mut model = CostModel::default();
        model.local = LinkCost::new(cost, 0.0, 0.0);
        let error = Communicator::builder().transport(Transport::Tcp).cost_model(model).connect_in_process(2).unwrap_err();
        assert!(matches!(&error, Error::Setting { name, .. } if name == "cost_model"), "{error}");
        assert!(error.to_string().contains("local.latency"), "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_hung_file_system_ends_the_start_at_its_deadline() {
    let Some(files) = SilentFiles::mount().filter(|_| is_root()) else {
        return common::not_run("a_hung_file_system_ends_the_start_at_its_deadline; it needs root and /dev/fuse");
    };
    let builder = |rank| Communicator::builder().rank(rank).world_size(2).start_timeout(Duration::from_millis(300));
    for rank in [0, 1] {
        match builder(rank).store(file_url(&files.path.join("store"))).connect().unwrap_err() {
            Error::Store { problem: StoreError::Hung { .. }, store } => assert!(store.ends_with("/store"), "{store}"),
            other => panic!("{other}"),
        }
    }
    let error =
        builder(1).store(format!("hash://{}", fresh())).trace_dir(files.path.join("traces")).connect().unwrap_err().to_string();
    assert!(error.contains("KOLO_TRACE_DIR") && error.contains("did not answer in time"), "{error}");
    let error =
        builder(1).store(format!("hash://{}", fresh())).secret_file(files.path.join("secret")).connect().unwrap_err().to_string();
    assert!(error.contains("secret_file") && error.contains("did not answer in time"), "{error}");
    // A start that needs no file does not wait for one that hangs.
    let error = builder(1).store(format!("hash://{}", fresh())).secret([7; 32]).connect().unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    let error = builder(1).store(format!("hash://{}", fresh())).connect().unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    if cfg!(feature = "tls") {
        let [ca, certificate, key] = ["ca.pem", "rank.pem", "rank.key"].map(|name| files.path.join(name));
        let error = builder(1).store(format!("hash://{}", fresh())).tls(ca, certificate, key).connect().unwrap_err().to_string();
        assert!(error.contains("KOLO_TLS_") && error.contains("did not answer in time"), "{error}");
    }
}

/// The folder for the records of an operation stops answering before the operation fails.
#[cfg(target_os = "linux")]
#[test]
fn a_failure_does_not_wait_for_a_hung_file_system() {
    let folder = temporary();
    let url = format!("hash://{}", fresh());
    let options = |_, builder: kolo::Builder| {
        // `kolo top` finds the job by a file there, which its rank removes at the end.
        builder.store(&url).trace_dir(&folder).top_dir(&folder).timeout(common::DEADLINE)
    };
    let mut comms: Vec<_> = connect(2, options).into_iter().map(Result::unwrap).collect();
    let is_attached = || std::fs::read_dir(&folder).unwrap().count() == 1;
    assert!(is_attached(), "there is no file for kolo top");
    let Some(files) = SilentFiles::mount_at(folder.clone()).filter(|_| is_root()) else {
        drop(comms);
        _ = std::fs::remove_dir(&folder);
        return common::not_run("a_failure_does_not_wait_for_a_hung_file_system; it needs root and /dev/fuse");
    };
    let (sender, ended) = std::sync::mpsc::channel();
    let (survivor, there) = (comms.remove(0), folder.clone());
    std::thread::spawn(move || {
        let error = survivor.barrier().unwrap_err();
        assert_eq!(error.culprit(), Some(1), "{error}");
        let error = survivor.dump_trace(there.join("trace.json"));
        drop(survivor);
        sender.send(error.map_err(|error| error.to_string())).unwrap();
    });
    drop(comms);
    let dumped = ended.recv_timeout(common::PATIENCE).expect("the failure waits for the file system");
    let error = dumped.expect_err("nothing answers");
    assert!(error.contains("did not answer in time"), "{error}");
    drop(files);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Tests how `kolo run` and `kolo doctor` read a secret file that hangs, in another process with
/// that environment.
#[cfg(target_os = "linux")]
#[test]
fn a_secret_file_on_a_hung_file_system_is_given_up() {
    const NAME: &str = "a_secret_file_on_a_hung_file_system_is_given_up";
    const INSIDE: &str = "KOLO_START_TEST_HUNG_SECRET";
    if std::env::var_os(INSIDE).is_some() {
        let error = kolo::settings::secret_of_environment().unwrap_err().to_string();
        assert!(error.contains("KOLO_SECRET_FILE=") && error.contains("did not answer in time"), "{error}");
        let findings = kolo::doctor::examine();
        assert!(
            findings.iter().any(|it| it.subject == "settings" && it.found.contains("did not answer in time")),
            "{findings:?}"
        );
        return;
    }
    let Some(files) = SilentFiles::mount().filter(|_| is_root()) else {
        return common::not_run(&format!("{NAME}; it needs root and /dev/fuse"));
    };
    let mut inside = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("start::{NAME}")])
        .envs([(INSIDE, "1"), ("KOLO_START_TIMEOUT", "300ms")])
        .env("KOLO_SECRET_FILE", files.path.join("secret"))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(100);
    while inside.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    // The process must end before the file system does.
    let has_ended = inside.try_wait().unwrap().is_some();
    drop(files);
    let output = inside.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(has_ended && output.status.success() && said.contains("1 passed"), "{said}");
}

/// Set in the process of the test in which the name server is silent.
#[cfg(target_os = "linux")]
const SILENT_NAMES: &str = "KOLO_START_TEST_SILENT_NAMES";

#[cfg(target_os = "linux")]
#[test]
fn a_silent_name_server_ends_the_start_at_its_deadline() {
    if std::env::var_os(SILENT_NAMES).is_some() {
        return resolve_in_silence();
    }
    if !is_root() {
        return common::not_run("a_silent_name_server_ends_the_start_at_its_deadline; it needs root");
    }
    let configuration = temporary();
    // By itself the resolver would give up after two and a half minutes.
    std::fs::write(&configuration, "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n").unwrap();
    let script = "ip link set lo up && mount --bind \"$1\" /etc/resolv.conf && exec \"$0\" --exact \
                  start::a_silent_name_server_ends_the_start_at_its_deadline --nocapture";
    let output = std::process::Command::new("unshare")
        .args(["--mount", "--net", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg(&configuration)
        .env(SILENT_NAMES, "1")
        // The settings that `kolo doctor` examines.
        .envs([("KOLO_RANK", "0"), ("KOLO_WORLD_SIZE", "2"), ("KOLO_STORE", SILENT_STORE), ("KOLO_START_TIMEOUT", "1s")])
        .output();
    std::fs::remove_file(&configuration).unwrap();
    let output = match output {
        Ok(output) => output,
        Err(error) => return common::not_run(&format!("a_silent_name_server_ends_the_start_at_its_deadline; unshare: {error}")),
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare failed") || said.contains("mount:") || said.contains("ip: not found") {
        return common::not_run(&format!("a_silent_name_server_ends_the_start_at_its_deadline; {said}"));
    }
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[cfg(target_os = "linux")]
const SILENT_STORE: &str = "tcp://nowhere.invalid-name.example:29500";

#[cfg(target_os = "linux")]
fn resolve_in_silence() {
    let server = std::net::UdpSocket::bind("127.0.0.1:53").unwrap();
    let began = Instant::now();
    let findings = kolo::doctor::examine();
    assert!(findings.iter().any(|it| it.subject == "store" && it.found.contains("no name server answered")), "{findings:?}");
    assert!(began.elapsed() < Duration::from_secs(100), "the resolver gave up by itself");
    for rank in [0, 1] {
        let began = Instant::now();
        let builder = Communicator::builder().rank(rank).world_size(2).start_timeout(Duration::from_secs(1));
        let error = builder.store(SILENT_STORE).connect().unwrap_err().to_string();
        assert!(error.contains("no name server answered in time"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(100), "the resolver gave up by itself");
    }
    server.set_nonblocking(true).unwrap();
    server.recv(&mut [0; 512]).expect("the resolver sent a query");
}

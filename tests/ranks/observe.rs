//! What ranks tell processes that watch the job: snapshots for `kolo top`, and metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kolo::observer::{Observer, Silence, Snapshot};
use kolo::{Communicator, Op, ReduceOp, Transport};

use crate::common::PATIENCE;

/// A folder of a test, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kolo-observe-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Connects two ranks, which are threads with listeners of their own.
fn pair(name: &str, options: impl Fn(usize, kolo::Builder) -> kolo::Builder + Sync) -> Vec<kolo::Result<Communicator>> {
    let store = format!("hash://observe-{name}-{}", std::process::id());
    std::thread::scope(|scope| {
        let connect = |rank| {
            let builder = Communicator::builder().rank(rank).world_size(2).store(store.clone()).start_timeout(PATIENCE);
            options(rank, builder).connect()
        };
        let threads = [0, 1].map(|rank| scope.spawn(move || connect(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn ask(job: &Observer, rank: usize) -> Snapshot {
    job.ask(rank, soon()).unwrap()
}

#[test]
fn a_snapshot_says_what_a_rank_does() {
    let folder = Folder::new("snapshot");
    let comms = pair("snapshot", |_, builder| builder.job("a job").top_dir(&folder.0).transport(Transport::Tcp));
    let [first, second] = <[_; 2]>::try_from(comms.into_iter().map(Result::unwrap).collect::<Vec<_>>()).unwrap();
    let (path, job) = Observer::of_folder(&folder.0).unwrap().pop().unwrap();
    assert_eq!((job.job(), job.peers().len(), job.peers()[1].pid), ("a job", 2, std::process::id()));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| second.all_reduce(&mut [1.0f32; 5000], ReduceOp::Sum).unwrap());
        first.all_reduce(&mut [1.0f32; 5000], ReduceOp::Sum).unwrap();
        other.join().unwrap();
        // Rank 1 waits for rank 0.
        let waiting = scope.spawn(|| second.all_reduce(&mut [1u64; 7], ReduceOp::Max).unwrap());
        let deadline = soon();
        let late = loop {
            let snapshot = ask(&job, 1);
            if snapshot.communicators[0].running.first().is_some_and(|running| running.op == Op::AllReduce && running.count == 7)
                && !snapshot.communicators[0].waits.is_empty()
            {
                break snapshot;
            }
            assert!(Instant::now() < deadline, "{snapshot:?}");
            std::thread::yield_now();
        };
        let of_rank_1 = &late.communicators[0];
        let running = &of_rank_1.running[0];
        assert_eq!((running.bytes, running.seq), (56, of_rank_1.begun));
        assert_eq!((of_rank_1.waits[0].peer, of_rank_1.waits[0].seq), (0, running.seq));
        assert_eq!((of_rank_1.members.clone(), of_rank_1.completed + 1), (vec![0, 1], of_rank_1.begun));
        let of_rank_0 = &ask(&job, 0).communicators[0];
        assert_eq!((of_rank_0.begun, of_rank_0.running.len()), (of_rank_1.begun - 1, 0));
        assert!(of_rank_0.idle.is_some());
        let total = of_rank_0.totals.iter().find(|total| total.op == Op::AllReduce).unwrap();
        assert_eq!((total.begun, total.bytes, total.failed), (1, 20_000, 0));
        assert!(total.time > Duration::ZERO && total.time < PATIENCE);
        let link = &of_rank_0.links[0];
        assert!(link.peer == 1 && link.kind == "tcp" && link.sent >= 10_000 && link.received >= 10_000, "{link:?}");
        assert_eq!(link.tcp.is_some(), cfg!(target_os = "linux"), "{link:?}");
        first.all_reduce(&mut [1u64; 7], ReduceOp::Max).unwrap();
        waiting.join().unwrap();
    });
    second.abort();
    assert!(first.barrier().is_err());
    let failure = ask(&job, 0).communicators[0].failure.clone().unwrap();
    assert_eq!(failure.rank, Some(1), "{failure:?}");
    drop((first, second));
    assert!(!path.exists(), "the file of a job that has ended is still there");
    assert_eq!(job.ask(0, soon()), Err(Silence::Gone));
}

/// The name and the labels of a sample.
type Series = (String, BTreeMap<String, String>);

/// Parses the text format of Prometheus 0.0.4 as strictly as promtool does.
fn parse(text: &str) -> BTreeMap<Series, f64> {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|letter: char| letter.is_ascii_digit())
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
    };
    let (mut kinds, mut helped, mut samples) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
    let mut family = String::new();
    let mut closed = BTreeSet::new();
    assert!(text.ends_with('\n') && !text.contains('\r'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(is_name(name) && !words.is_empty() && helped.insert(name.to_owned()), "{line}");
            continue;
        }
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(helped.contains(name) && ["counter", "gauge"].contains(&kind), "{line}");
            assert!(kind != "counter" || name.ends_with("_total"), "a counter ends in _total: {line}");
            assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {line}");
            closed.insert(std::mem::replace(&mut family, name.to_owned()));
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap_or_else(|| panic!("{line}"));
        assert!(name == family && kinds.contains_key(name) && !closed.contains(name), "out of its family: {line}");
        let (mut labels, mut rest) = (BTreeMap::new(), rest);
        loop {
            let (label, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            assert!(is_name(label), "{line}");
            let (mut text, mut letters) = (String::new(), value.char_indices());
            let end = loop {
                match letters.next().unwrap_or_else(|| panic!("{line}")) {
                    (at, '"') => break at,
                    (_, '\\') => match letters.next().map(|(_, letter)| letter) {
                        Some('n') => text.push('\n'),
                        Some(letter @ ('\\' | '"')) => text.push(letter),
                        other => panic!("{other:?} is escaped: {line}"),
                    },
                    (_, letter) => text.push(letter),
                }
            };
            assert!(labels.insert(label.to_owned(), text).is_none(), "{line}");
            match value[end + 1..].split_at(1) {
                (",", more) => rest = more,
                ("}", more) => {
                    rest = more.strip_prefix(' ').unwrap_or_else(|| panic!("{line}"));
                    break;
                }
                _ => panic!("{line}"),
            }
        }
        let value: f64 = rest.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(value >= 0.0, "{line}");
        assert!(samples.insert((name.to_owned(), labels), value).is_none(), "twice: {line}");
    }
    assert!(!samples.is_empty());
    samples
}

fn get(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kolo\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    body.to_owned()
}

/// Returns a port so that it and the next one are free.
fn two_ports() -> u16 {
    loop {
        let first = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = first.local_addr().unwrap().port();
        if port < u16::MAX && TcpListener::bind((Ipv4Addr::LOCALHOST, port + 1)).is_ok() {
            return port;
        }
    }
}

fn value(samples: &BTreeMap<Series, f64>, name: &str, labels: &[(&str, &str)]) -> f64 {
    let has = |of: &BTreeMap<String, String>| labels.iter().all(|(label, text)| of.get(*label).is_some_and(|its| its == text));
    let found: Vec<f64> = samples.iter().filter(|((other, of), _)| other == name && has(of)).map(|(_, value)| *value).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?} in {samples:#?}");
    found[0]
}

#[test]
fn ranks_serve_metrics_that_prometheus_reads() {
    // Another process may take the ports in between.
    let (port, comms) = loop {
        let port = two_ports();
        let options = |_, builder: kolo::Builder| builder.job("a \"job\"").metrics(format!("127.0.0.1:{port}"));
        let comms: Vec<_> = pair(&format!("metrics-{port}"), |rank, builder| options(rank, builder).timeout(PATIENCE));
        if comms.iter().all(Result::is_ok) {
            break (port, comms.into_iter().map(Result::unwrap).collect::<Vec<_>>());
        }
    };
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(|| {
                for _ in 0..3 {
                    comm.all_reduce(&mut [1.0f32; 3000], ReduceOp::Sum).unwrap();
                }
                comm.send_recv(&[7u8; 100], 1 - comm.rank(), &mut [0u8; 100], 1 - comm.rank()).unwrap();
            });
        }
    });
    for rank in 0..2u16 {
        let text = get(TcpStream::connect((Ipv4Addr::LOCALHOST, port + rank)).unwrap());
        let samples = parse(&text);
        let of_rank = rank.to_string();
        assert!(samples.keys().all(|(_, labels)| labels["rank"] == of_rank), "{text}");
        assert_eq!(value(&samples, "target_info", &[("service_namespace", "a \"job\""), ("service_instance_id", &of_rank)]), 1.0);
        assert_eq!(value(&samples, "kolo_operations_total", &[("comm", "0"), ("op", "all_reduce")]), 3.0);
        assert_eq!(value(&samples, "kolo_operation_bytes_total", &[("op", "all_reduce")]), 36_000.0);
        assert!(value(&samples, "kolo_operation_seconds_total", &[("op", "all_reduce")]) > 0.0);
        assert_eq!(value(&samples, "kolo_communicator_failed", &[("comm", "0")]), 0.0);
        let peer = (1 - rank).to_string();
        assert!(value(&samples, "kolo_link_sent_bytes_total", &[("peer", &peer)]) >= 100.0, "{text}");
        assert!(value(&samples, "kolo_link_received_bytes_total", &[("peer", &peer)]) >= 100.0, "{text}");
    }
    drop(comms);
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), "a rank that has left serves metrics");
}

/// Set in the process of the next test.
#[cfg(unix)]
const ALONE: &str = "KOLO_TEST_ALONE";

#[test]
#[cfg(unix)]
fn metrics_at_a_unix_socket_are_for_one_user() {
    // It changes what a signal does to its process.
    if std::env::var_os(ALONE).is_none() {
        return crate::common::in_a_process("observe::metrics_at_a_unix_socket_are_for_one_user", ALONE);
    }
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    let folder = Folder::new("socket");
    let path = |rank: usize| folder.0.join(format!("{rank}.sock"));
    // A killed rank has left its socket.
    drop(UnixListener::bind(path(1)).unwrap());
    let address = format!("unix:{}", path(0).display()).replace("0.sock", "{rank}.sock");
    let comms: Vec<_> = pair("socket", |_, builder| builder.metrics(&address)).into_iter().map(Result::unwrap).collect();
    for rank in 0..2 {
        assert_eq!(path(rank).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        parse(&get(UnixStream::connect(path(rank)).unwrap()));
    }
    // One that is in use is not taken.
    let taken = pair("taken", |_, builder| builder.metrics(&address));
    let error = taken.into_iter().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("KOLO_METRICS") && error.contains("end the process that listens there"), "{error}");
    let nowhere = pair("nowhere", |_, builder| builder.metrics("unix:/nowhere/{rank}.sock"));
    let error = nowhere.into_iter().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("/nowhere/") && !error.contains("end the process"), "{error}");
    for rank in 0..2 {
        std::fs::write(folder.0.join(format!("{rank}.txt")), "kept").unwrap();
    }
    let text = pair("text", |_, builder| builder.metrics(address.replace(".sock", ".txt")));
    let error = text.into_iter().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("a file that is no socket is there; give another address"), "{error}");
    assert_eq!(std::fs::read_to_string(folder.0.join("0.txt")).unwrap(), "kept");
    // Clients that hang up end no rank, although the program does not ignore the signal.
    // SAFETY: no test of this program expects the signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    for _ in 0..20 {
        UnixStream::connect(path(0)).unwrap().write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    }
    parse(&get(UnixStream::connect(path(0)).unwrap()));
    drop(comms);
    assert!(!path(0).exists() && !path(1).exists());
}

/// The other ranks do not wait for the deadline of the start.
#[test]
fn all_ranks_learn_whose_address_is_taken() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let options = |rank, builder: kolo::Builder| if rank == 0 { builder.metrics(&address) } else { builder };
    let errors: Vec<String> =
        pair("taken-address", options).into_iter().map(|result| result.map(drop).unwrap_err().to_string()).collect();
    assert!(errors[0].contains("KOLO_METRICS") && errors[0].contains(&address), "{errors:?}");
    assert!(errors[1].contains("rank 0"), "{errors:?}");
}

#[test]
fn a_wrong_address_is_refused_with_what_it_may_be() {
    for wrong in ["9400", "unix:/tmp/x.sock", "localhost:9400"] {
        let error = Communicator::builder().rank(0).world_size(2).metrics(wrong).connect().unwrap_err().to_string();
        assert!(error.contains("metrics") && error.contains(wrong) && error.contains("{rank}"), "{error}");
    }
}

//! A rank: runs every collective, checks its result, and counts the bytes on its host's link.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::process::ExitCode;

use kolo::{Communicator, Op, ReduceOp};

/// Elements of a block, so that a buffer has some MiB.
const BLOCK: usize = 96 << 10;

/// The collectives that move data.
const OPS: [Op; 8] =
    [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter];

/// How many of them are counted.
pub(crate) const COUNTED: usize = OPS.len();

/// The most bytes on any link, as a multiple of the fewest with which the collective is possible.
/// The rest is for headers of TCP, acknowledgements and barriers.
const MOST: f64 = 1.05;

/// Where ranks are.
struct Hosts {
    /// The number of ranks on each host.
    ranks: Vec<usize>,
}

impl Hosts {
    fn of(comm: &Communicator) -> Hosts {
        // The place of a rank on its host; a host begins where it is 0.
        let local: usize = std::env::var("KOLO_LOCAL_RANK").unwrap().parse().unwrap();
        let mut all = vec![0u64; comm.world_size()];
        comm.all_gather(&[local as u64], &mut all).unwrap();
        let mut ranks = Vec::new();
        for local in all {
            if local == 0 {
                ranks.push(0);
            }
            *ranks.last_mut().unwrap() += 1;
        }
        assert_eq!(ranks.len(), comm.host_count(), "namespaces count as hosts");
        Hosts { ranks }
    }

    /// Returns the fewest bytes that the busiest link has to carry one way.
    fn fewest(&self, op: Op) -> f64 {
        let (hosts, world) = (self.ranks.len() as f64, self.ranks.iter().sum::<usize>() as f64);
        let least = *self.ranks.iter().min().unwrap() as f64;
        let block = (BLOCK * size_of::<f32>()) as f64;
        let all = world * block;
        match op {
            Op::AllReduce => 2.0 * (hosts - 1.0) / hosts * all,
            Op::Broadcast | Op::Reduce => all,
            // The host with the fewest blocks of its own.
            Op::AllGather | Op::ReduceScatter => (world - least) * block,
            Op::AllToAll => self.ranks.iter().map(|&own| own as f64 * (world - own as f64)).fold(0.0, f64::max) * block,
            // The root's host.
            _ => (world - self.ranks[0] as f64) * block,
        }
    }
}

/// Bytes that this host has sent and received.
fn counters() -> [u64; 2] {
    ["tx", "rx"].map(|way| {
        let path = format!("/sys/class/net/eth0/statistics/{way}_bytes");
        std::fs::read_to_string(&path).unwrap().trim().parse().unwrap()
    })
}

/// How often an operation is counted at most. TCP sends data again that it believes lost, which it
/// does on a busy machine without any loss; that only adds, so the lowest count is the schedule's.
const COUNTS: usize = 8;

/// Runs an operation once, and returns the bytes on the busiest link.
fn count(comm: &Communicator, op: Op) -> u64 {
    comm.barrier().unwrap();
    let before = counters();
    // All ranks have read the counters before the call.
    comm.barrier().unwrap();
    run(comm, op);
    comm.barrier().unwrap();
    let after = counters();
    let mut most = [(after[0] - before[0]).max(after[1] - before[1])];
    comm.all_reduce(&mut most, ReduceOp::Max).unwrap();
    most[0]
}

pub(crate) fn rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let hosts = Hosts::of(&comm);
    let mut is_too_much = false;
    for op in OPS {
        // The first call opens links and takes memory.
        run(&comm, op);
        let (mut bytes, mut counted) = (u64::MAX, 0);
        let ratio = loop {
            bytes = bytes.min(count(&comm, op));
            counted += 1;
            let ratio = bytes as f64 / hosts.fewest(op);
            // All ranks see the same number.
            if ratio < MOST || counted == COUNTS {
                break ratio;
            }
        };
        if comm.rank() == 0 {
            let algorithm = comm.algorithm(op, (comm.world_size() * BLOCK * size_of::<f32>()) as u64);
            println!("{op:15} {bytes:>10} B on the busiest link, {ratio:.3} of the minimum ({counted} counted); {algorithm}");
            is_too_much |= !(0.9..MOST).contains(&ratio);
        }
    }
    if is_too_much { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs every collective over a wire that delays and loses packets. Rank 0 prints the congestion control
/// of each of its connections with other hosts.
pub(crate) fn far_rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    OPS.into_iter().for_each(|op| run(&comm, op));
    // Ranks also connect for a moment, to ask whether a peer that is late still lives.
    let mut lasting = connections();
    for _ in 0..3 {
        run(&comm, Op::AllReduce);
        let now = connections();
        lasting.retain(|ends, _| now.contains_key(ends));
    }
    if comm.rank() == 0 {
        println!("connections: {}", lasting.into_values().collect::<Vec<_>>().join(" "));
    }
    // The other ranks keep their connections until then.
    comm.barrier().unwrap();
    ExitCode::SUCCESS
}

/// Returns the congestion control of each connection with another host, by the addresses of its ends.
fn connections() -> BTreeMap<[SocketAddr; 2], String> {
    let mut found = BTreeMap::new();
    for file in std::fs::read_dir("/proc/self/fd").unwrap() {
        let file: i32 = file.unwrap().file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: the calls on the socket fail if the descriptor is closed or that of another file.
        let socket = unsafe { BorrowedFd::borrow_raw(file) };
        let socket = socket2::SockRef::from(&socket);
        let addresses = [socket.local_addr(), socket.peer_addr()].map(|address| address.ok()?.as_socket());
        if let [Some(here), Some(there)] = addresses
            && here.ip() != there.ip()
        {
            // The connection may end meanwhile.
            let Ok(name) = socket.tcp_congestion() else { continue };
            found.insert([here, there], String::from_utf8(name).unwrap().trim_end_matches('\0').to_owned());
        }
    }
    found
}

/// What rank `rank` gives as element `i`. Sums of these are exact.
fn element(rank: usize, i: usize) -> f32 {
    ((rank * 31 + i) % 1021) as f32
}

fn elements(rank: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    range.map(|i| element(rank, i)).collect()
}

/// Runs one collective and checks its result.
fn run(comm: &Communicator, op: Op) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let all = world * BLOCK;
    let block = |of: usize| of * BLOCK..(of + 1) * BLOCK;
    let sums =
        |range: std::ops::Range<usize>| -> Vec<f32> { range.map(|i| (0..world).map(|rank| element(rank, i)).sum()).collect() };
    let mine = elements(rank, 0..all);
    let root = 0;
    match op {
        Op::AllReduce => {
            let mut buf = mine;
            comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            assert!(buf == sums(0..all), "{op}");
        }
        Op::Broadcast => {
            let mut buf = mine;
            comm.broadcast(&mut buf, root).unwrap();
            assert!(buf == elements(root, 0..all), "{op}");
        }
        Op::Reduce => {
            let mut buf = mine;
            comm.reduce(&mut buf, ReduceOp::Sum, root).unwrap();
            assert!(rank != root || buf == sums(0..all), "{op}");
        }
        Op::AllGather => {
            let mut buf = vec![0.0; all];
            comm.all_gather(&mine[block(rank)], &mut buf).unwrap();
            assert!((0..world).all(|of| buf[block(of)] == elements(of, block(of))), "{op}");
        }
        Op::ReduceScatter => {
            let mut buf = vec![0.0; BLOCK];
            comm.reduce_scatter(&mine, &mut buf, ReduceOp::Sum).unwrap();
            assert!(buf == sums(block(rank)), "{op}");
        }
        Op::AllToAll => {
            let mut buf = vec![0.0; all];
            comm.all_to_all(&mine, &mut buf).unwrap();
            assert!((0..world).all(|from| buf[block(from)] == elements(from, block(rank))), "{op}");
        }
        Op::Gather => {
            let mut buf = vec![0.0; if rank == root { all } else { 0 }];
            let into = (rank == root).then_some(&mut buf[..]);
            comm.gather(&mine[block(rank)], into, root).unwrap();
            assert!(rank != root || (0..world).all(|of| buf[block(of)] == elements(of, block(of))), "{op}");
        }
        Op::Scatter => {
            let mut buf = vec![0.0; BLOCK];
            comm.scatter((rank == root).then_some(&mine[..]), &mut buf, root).unwrap();
            assert!(buf == elements(root, block(rank)), "{op}");
        }
        op => unreachable!("{op} moves no data"),
    }
}

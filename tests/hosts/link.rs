//! A rank: runs every collective, checks its result, and counts the bytes on its host's link and on the
//! uplink of its rack.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::process::{Command, ExitCode};

use kolo::{Communicator, Op, ReduceOp, WireDType};

use crate::pattern::{PERIOD, repeated};

/// Elements of a block, so that a buffer has some MiB.
const BLOCK: usize = 96 << 10;

/// The collectives that move data.
pub(crate) const OPS: [Op; 8] =
    [Op::AllReduce, Op::Broadcast, Op::Reduce, Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Gather, Op::Scatter];

/// How many of them are counted.
pub(crate) const COUNTED: usize = OPS.len();

/// The most bytes on any link, as a multiple of the fewest with which the collective is possible.
/// The rest is for headers of TCP, acknowledgements and barriers.
const MOST: f64 = 1.05;

/// The collectives whose messages may have 8 bits for each element of f32, and the most bytes then, as
/// such a multiple: a quarter, a scale of four bytes for each 128 elements, and the same rest.
pub(crate) const PACKED: [Op; 2] = [Op::AllReduce, Op::ReduceScatter];
const MOST_PACKED: f64 = 0.27;

/// Where ranks are.
struct Hosts {
    /// The number of ranks on each host.
    ranks: Vec<usize>,
    /// The racks to which hosts were dealt in turns. With several, all hosts have the same number of
    /// ranks, and all racks the same number of hosts.
    racks: usize,
    /// The rack whose uplink this rank counts.
    counts: Option<usize>,
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
        let racks = std::env::var("RACKS").map_or(1, |racks| racks.parse().unwrap());
        // The first rank of the first host of each rack.
        let (host, place) = (comm.rank() / ranks[0], comm.rank() % ranks[0]);
        let counts = (racks > 1 && place == 0 && host < racks).then_some(host);
        Hosts { ranks, racks, counts }
    }

    /// Returns the fewest bytes that the busiest uplink has to carry one way.
    fn fewest_on_uplink(&self, op: Op) -> f64 {
        let (racks, world) = (self.racks as f64, self.ranks.iter().sum::<usize>() as f64);
        let block = (BLOCK * size_of::<f32>()) as f64;
        let (all, of_rack) = (world * block, world / racks);
        match op {
            Op::AllReduce => 2.0 * (racks - 1.0) / racks * all,
            Op::Broadcast | Op::Reduce => all,
            Op::AllToAll => of_rack * (world - of_rack) * block,
            _ => (world - of_rack) * block,
        }
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

/// Bytes that this host has sent and received through an interface.
pub(crate) fn counters(interface: &str) -> [u64; 2] {
    ["tx", "rx"].map(|way| {
        let path = format!("/sys/class/net/{interface}/statistics/{way}_bytes");
        std::fs::read_to_string(&path).unwrap().trim().parse().unwrap()
    })
}

/// Bytes that a rack has sent and received.
fn uplink(rack: usize) -> [u64; 2] {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/bed.sh");
    let output = Command::new("bash").arg(script).args(["uplink", &rack.to_string()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let counted: Vec<u64> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
    counted.try_into().unwrap_or_else(|counted| panic!("{counted:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// How often an operation is counted at most. TCP sends data again that it believes lost, which it
/// does on a busy machine without any loss; that only adds, so the lowest count is the schedule's.
const COUNTS: usize = 8;

/// Runs an operation once, and returns the bytes on the busiest link of a host, and on the busiest uplink.
fn count(comm: &Communicator, op: Op, hosts: &Hosts) -> [u64; 2] {
    let counters = || [counters("eth0"), hosts.counts.map_or([0; 2], uplink)];
    comm.barrier().unwrap();
    let before = counters();
    // All ranks have read the counters before the call.
    comm.barrier().unwrap();
    run(comm, op);
    comm.barrier().unwrap();
    let after = counters();
    let mut most = [0, 1].map(|link| [0, 1].map(|way| after[link][way] - before[link][way]).into_iter().max().unwrap());
    comm.all_reduce(&mut most, ReduceOp::Max).unwrap();
    most
}

pub(crate) fn rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let hosts = Hosts::of(&comm);
    let mut is_too_much = false;
    let is_packed = comm.wire_dtype() != WireDType::F32;
    let (ops, allowed) = if is_packed { (&PACKED[..], 0.25..MOST_PACKED) } else { (&OPS[..], 0.9..MOST) };
    for &op in ops {
        // The first call opens links and takes memory.
        run(&comm, op);
        let (mut bytes, mut counted) = ([u64::MAX; 2], 0);
        let fewest = [hosts.fewest(op), if hosts.racks > 1 { hosts.fewest_on_uplink(op) } else { f64::INFINITY }];
        let [ratio, on_uplink] = loop {
            let found = count(&comm, op, &hosts);
            bytes = [0, 1].map(|link| bytes[link].min(found[link]));
            counted += 1;
            let ratios = [0, 1].map(|link| bytes[link] as f64 / fewest[link]);
            // All ranks see the same numbers.
            if ratios.iter().all(|&ratio| ratio < allowed.end) || counted == COUNTS {
                break ratios;
            }
        };
        if comm.rank() == 0 {
            let algorithm = comm.algorithm(op, (comm.world_size() * BLOCK * size_of::<f32>()) as u64);
            let [bytes, of_uplink] = bytes;
            let uplink = match hosts.racks {
                1 => String::new(),
                _ => format!("; {of_uplink} B, {on_uplink:.3} of the minimum on the busiest uplink"),
            };
            println!(
                "{op:15} {bytes:>10} B on the busiest link, {ratio:.3} of the minimum{uplink} ({counted} counted); {algorithm}"
            );
            is_too_much |= !allowed.contains(&ratio) || hosts.racks > 1 && !allowed.contains(&on_uplink);
        }
    }
    if is_too_much { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// How many bytes [`summing_rank`] reduces.
pub(crate) const SUMMED: usize = 6 << 20;

/// A rank that measures the links between hosts. Rank 0 says which are slow.
pub(crate) fn measuring_rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let links = kolo::doctor::host_links(&comm).unwrap().expect("the hosts are near each other");
    assert_eq!((links.hosts.len(), links.links.len()), (4, 6));
    if comm.rank() == 0 {
        links.findings.iter().for_each(|finding| println!("{}", finding.found));
    }
    ExitCode::SUCCESS
}

/// Reduces on the communicator, and on a part of the same ranks in the reverse order.
pub(crate) fn summing_rank() -> ExitCode {
    let comm = Communicator::from_env().unwrap();
    let part = comm.split(0, comm.world_size() - comm.rank()).unwrap();
    for comm in [&comm, &part] {
        let mut buf = vec![1.0f32; SUMMED / 2 / size_of::<f32>()];
        comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
        assert!(buf.iter().all(|&sum| sum == comm.world_size() as f32));
    }
    ExitCode::SUCCESS
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
    ((rank * 31 + i) % PERIOD) as f32
}

pub(crate) fn elements(rank: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    repeated(range, |i| element(rank, i))
}

pub(crate) fn sums(world: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    repeated(range, |i| (0..world).map(|rank| element(rank, i)).sum())
}

/// Runs one collective and checks its result.
pub(crate) fn run(comm: &Communicator, op: Op) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let all = world * BLOCK;
    let block = |of: usize| of * BLOCK..(of + 1) * BLOCK;
    let sums = |range| sums(world, range);
    let mine = elements(rank, 0..all);
    let root = 0;
    // Each host's sum and the result are rounded to 1/127 of the largest of their blocks.
    let most = (world * 1020) as f32 / 127.0;
    let is_exact = comm.wire_dtype() == WireDType::F32;
    let right = |got: &[f32], expected: &[f32]| {
        if is_exact { got == expected } else { got.iter().zip(expected).all(|(got, sum)| (got - sum).abs() <= most) }
    };
    match op {
        Op::AllReduce => {
            let mut buf = mine;
            comm.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            assert!(right(&buf, &sums(0..all)), "{op}");
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
            assert!(right(&buf, &sums(block(rank))), "{op}");
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

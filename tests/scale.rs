//! The descriptors and the shared memory that communicators need, counted in the processes that
//! hold them.
#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use kolo::doctor::{Cost, cost};
use kolo::{Communicator, ReduceOp};

const RANKS: usize = 8;
const SPLITS: usize = 1000;

/// The variable that makes this program a rank. It has the number of the rank.
const RANK: &str = "KOLO_TEST_SCALE_RANK";
const STORE: &str = "KOLO_TEST_SCALE_STORE";

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    // Less the descriptor with which they are listed.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Returns the memory files of this process by inode: the length, and the allocated bytes if the
/// file is open.
fn regions() -> BTreeMap<u64, (u64, Option<u64>)> {
    let mut found = BTreeMap::new();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains("/memfd:kolo")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (from, to) = fields[0].split_once('-').unwrap();
        let address = |text| u64::from_str_radix(text, 16).unwrap();
        let entry = found.entry(fields[4].parse().unwrap()).or_insert((0, None));
        entry.0 += address(to) - address(from);
    }
    for file in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_ours = std::fs::read_link(file.path()).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:kolo"));
        if let (true, Ok(data)) = (is_ours, std::fs::metadata(file.path())) {
            found.entry(data.ino()).or_insert((data.len(), None)).1 = Some(data.blocks() * 512);
        }
    }
    found
}

/// Ends communicators whose peers have just been told of the memory of a pool.
fn use_pools(comm: &Communicator) {
    let before = descriptors();
    for _ in 0..20 {
        let part = comm.split(0, comm.rank()).unwrap();
        let mut data = part.alloc_pooled::<f32>(1 << 20).unwrap();
        data.fill(1.0);
        part.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|&sum| sum == RANKS as f32));
    }
    comm.barrier().unwrap();
    let after = descriptors();
    assert!(after < before + 10, "{after} descriptors, before 20 communicators with pools {before}");
}

/// Runs as one rank: creates the communicators, uses each of them, and prints what they need.
fn be_a_rank(rank: usize) {
    let builder = Communicator::builder().rank(rank).world_size(RANKS).store(std::env::var(STORE).unwrap());
    let comm = builder.start_timeout(Duration::from_secs(120)).timeout(Duration::from_secs(600)).connect().unwrap();
    // Integers, which are compared without a look at each.
    let given = vec![rank as u32 + 1; 1 << 18];
    let sums = vec![(RANKS * (RANKS + 1) / 2) as u32; given.len()];
    let mut data = given.clone();
    // Every seventh communicator with a large operation, unless every case is tried: ranks take turns as
    // the first one there as well.
    let (all, mut used) = (std::env::var_os("KOLO_TEST_ALL").is_some(), 0);
    let mut use_it = |comm: &Communicator| {
        let mut word = [comm.rank() as u64];
        comm.all_reduce(&mut word, ReduceOp::Sum).unwrap();
        assert_eq!(word[0], (RANKS * (RANKS - 1) / 2) as u64);
        used += 1;
        let len = if all || used % 7 == 1 { given.len() } else { 1 << 12 };
        data[..len].copy_from_slice(&given[..len]);
        comm.all_reduce(&mut data[..len], ReduceOp::Sum).unwrap();
        assert!(data[..len] == sums[..len]);
    };
    use_it(&comm);
    use_pools(&comm);
    let before = descriptors();
    let mut parts = Vec::new();
    for number in 0..SPLITS {
        // The ranks take turns as the first rank of a part.
        let part = comm.split(0, (rank + number) % RANKS).unwrap();
        use_it(&part);
        parts.push(part);
    }
    // All communicators still work.
    parts.iter().rev().step_by(SPLITS / 10).for_each(use_it);
    comm.barrier().unwrap();
    println!("DESCRIPTORS {before} {}", descriptors());
    for (inode, (len, taken)) in regions() {
        println!("REGION {inode} {len} {}", taken.map_or(-1, |taken| taken as i64));
    }
    comm.barrier().unwrap();
}

/// Not a test: the ranks of the test below run it.
#[test]
fn rank() {
    if let Ok(rank) = std::env::var(RANK) {
        be_a_rank(rank.parse().unwrap());
    }
}

#[test]
fn a_thousand_communicators_of_eight_ranks_fit_1024_descriptors_and_256_mebibytes() {
    let store = std::env::temp_dir().join(format!("kolo-scale-{}", std::process::id()));
    let start = |rank: usize| {
        Command::new("sh")
            .args(["-c", "ulimit -n 1024; exec \"$0\" --exact rank --nocapture --test-threads 1"])
            .arg(std::env::current_exe().unwrap())
            .env(RANK, rank.to_string())
            .env(STORE, format!("file://{}", store.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..RANKS).map(start).collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    _ = std::fs::remove_file(&store);

    let Cost { descriptors, shared_memory, .. } = cost(RANKS, SPLITS + 1);
    let mut regions: BTreeMap<u64, (u64, Option<u64>)> = BTreeMap::new();
    for (rank, output) in outputs.iter().enumerate() {
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "rank {rank}: {said}");
        let words = |name: &'static str| {
            let lines = said.lines().filter_map(move |line| line.split_once(name).map(|(_, rest)| rest.to_owned()));
            lines.map(|rest| rest.split_whitespace().map(|word| word.parse::<i64>().unwrap()).collect::<Vec<_>>())
        };
        let counted = words("DESCRIPTORS ").next().unwrap();
        println!("rank {rank}: {counted:?} descriptors");
        let grown = (counted[1] - counted[0]) as u64;
        assert!(grown <= descriptors, "rank {rank} has {grown} more descriptors, of at most {descriptors}");
        for words in words("REGION ") {
            let entry = regions.entry(words[0] as u64).or_insert((words[1] as u64, None));
            entry.1 = entry.1.or(u64::try_from(words[2]).ok());
        }
    }
    // A memory file takes at most its length. Where a rank has the file open, the allocated bytes
    // are known.
    let most: u64 = regions.values().map(|(len, _)| len).sum();
    let taken: u64 = regions.values().map(|(len, taken)| taken.unwrap_or(*len)).sum();
    println!("{} regions of {most} bytes take {taken} of at most {shared_memory}", regions.len());
    assert!(most <= 256 << 20, "{most} bytes");
    assert!(taken <= shared_memory && taken >= (SPLITS * RANKS * 4096) as u64, "{taken} of {shared_memory} bytes");
}

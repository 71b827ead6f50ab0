//! What processes have, and what they leave behind.

use std::collections::BTreeSet;

use crate::job::{Job, wait_until};
use crate::rank::REGISTERED;
use crate::runner::Outcome::{self, Passed};

/// The resources that a process may leak.
#[derive(Debug, PartialEq)]
pub(crate) struct Belongings {
    threads: usize,
    descriptors: usize,
    /// Regions of shared memory that are mapped or open.
    pub(crate) regions: usize,
}

impl Belongings {
    pub(crate) fn count() -> Belongings {
        let entries = |folder: &str| std::fs::read_dir(folder).into_iter().flatten().flatten();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let is_region = |name: &str| name.contains("memfd:kolo");
        let names = entries("/proc/self/fd").filter_map(|file| std::fs::read_link(file.path()).ok());
        let open = names.filter(|name| name.to_str().is_some_and(is_region)).count();
        Belongings {
            threads: entries("/proc/self/task").count(),
            descriptors: entries("/proc/self/fd").count(),
            regions: maps.lines().filter(|line| is_region(line)).count() + open,
        }
    }
}

/// Counts the sockets of this process.
pub(crate) fn sockets() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    names.filter(|name| name.to_string_lossy().starts_with("socket:")).count()
}

/// Returns the inodes of the shared memory that processes have mapped or open.
fn regions(pids: impl Iterator<Item = u32>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for pid in pids {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let mapped = maps.lines().filter(|line| line.contains("memfd:kolo"));
        found.extend(mapped.filter_map(|line| line.split_whitespace().nth(4).map(str::to_owned)));
        for file in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let is_region = std::fs::read_link(file.path()).is_ok_and(|name| name.to_string_lossy().contains("memfd:kolo"));
            let number = std::fs::metadata(file.path()).map(|file| std::os::unix::fs::MetadataExt::ino(&file));
            found.extend(number.ok().filter(|_| is_region).map(|number| number.to_string()));
        }
    }
    found
}

/// Returns all processes of this machine.
fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the shared memory in use on this machine, in bytes.
fn shared_memory() -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("Shmem:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

/// Returns the names of kolo's sockets and files.
fn names() -> BTreeSet<String> {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let sockets = sockets.lines().filter_map(|line| line.split_whitespace().last()).filter(|name| name.starts_with("@kolo"));
    let list = |folder: &std::path::Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
    };
    let files = [list("/dev/shm".as_ref()), list(&std::env::temp_dir())].concat();
    sockets.map(str::to_owned).chain(files.into_iter().filter(|name| name.contains("kolo"))).collect()
}

pub(crate) fn nothing_left_over() -> Outcome {
    let before = names();
    let mut job = Job::start("registered", 4, 600_000, |_, _| {});
    job.all_work();
    let pids = [0, 1, 2, 3].map(|rank| job.pid(rank));
    let held = regions(pids.into_iter());
    assert!(!held.is_empty(), "the four ranks of a host share no memory");
    let of_job: BTreeSet<String> = names().difference(&before).cloned().collect();
    assert!(of_job.iter().any(|name| name.starts_with('@')), "the ranks have no listener: {of_job:?}");
    let full = shared_memory();
    let large = 4 * REGISTERED * size_of::<u64>();
    assert!(full >= large, "the registered buffers of four ranks have {large} bytes, shared memory in use {full}");
    (0..4).for_each(|rank| job.kill(rank));
    job.all_say("end");
    drop(job);
    wait_until("regions of shared memory are left", || regions(processes()).is_disjoint(&held));
    wait_until("sockets or files are left", || names().is_disjoint(&of_job));
    // Other programs also use shared memory, but less.
    wait_until("shared memory is left", || shared_memory() + large / 4 * 3 < full);
    Passed(format!("{} regions of shared memory, {} MiB", held.len(), large >> 20))
}

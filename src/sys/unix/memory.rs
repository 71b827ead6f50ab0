//! How much memory there is, and in which units.

use std::io;

use rustix::io::Errno;

use crate::sys::limits::{Resource, limit};

/// Fails if there is less memory than this: the system might kill processes instead of refusing.
pub(super) fn check_memory(bytes: usize) -> io::Result<()> {
    if available_memory().is_some_and(|available| bytes as u64 > available) { Err(Errno::NOMEM.into()) } else { Ok(()) }
}

/// Fails if this process may not make a file of this size: SIGXFSZ would end it.
pub(in crate::sys) fn check_file_size(bytes: usize) -> io::Result<()> {
    let is_beyond = |[limit, _]: [u64; 2]| bytes as u64 > limit;
    if limit(Resource::FileSize).is_some_and(is_beyond) { Err(Errno::FBIG.into()) } else { Ok(()) }
}

/// Returns the bytes of a page of the system.
pub(in crate::sys) fn page_size() -> usize {
    // SAFETY: sysconf takes a number and touches no memory of this process.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("every system has pages")
}

/// Returns the bytes that could be allocated now, by the system and the limits of this process's
/// control group.
#[cfg(target_os = "linux")]
pub(crate) fn available_memory() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let of_system = kibibytes.map_or(u64::MAX, |kibibytes| kibibytes << 10);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    // Limits of all groups above count as well. These two are the ones that containers have.
    let of_group = group.into_iter().flat_map(|group| [group, ""]).filter_map(|group| {
        let folder = format!("/sys/fs/cgroup{group}");
        Some(number(&format!("{folder}/memory.max"))?.saturating_sub(number(&format!("{folder}/memory.current"))?))
    });
    Some(of_group.fold(of_system, u64::min)).filter(|&bytes| bytes < u64::MAX)
}

/// Returns the bytes that are neither wired nor compressed, which the system can provide without
/// writing to a disk.
#[cfg(not(target_os = "linux"))]
pub(crate) fn available_memory() -> Option<u64> {
    let percent = super::sysctl::number(c"kern.memorystatus_level")?;
    Some(super::sysctl::number(c"hw.memsize")? / 100 * percent)
}

//! What distinguishes this machine, and what listens on it.

use std::fs;

/// Returns the name of this machine, for messages.
pub(crate) fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the running kernel and the network namespace. Processes with the same ones may be able
/// to share memory: abstract sockets belong to a network namespace.
pub(crate) fn boot_identity() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = fs::read_link("/proc/self/ns/net").ok()?;
    Some(format!("{} {}", boot.trim(), network.display()))
}

/// Returns the process that listens on a TCP port of this machine, if this process can see it.
pub(crate) fn port_holder(port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let table = fs::read_to_string(table).ok()?;
        table.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = fields.get(1)?.rsplit(':').next()?;
            let is_it = u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTEN);
            is_it.then(|| fields.get(9).map(|inode| format!("socket:[{inode}]"))).flatten()
        })
    })?;
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let holds = fs::read_dir(process.path().join("fd"))
            .ok()?
            .flatten()
            .any(|file| fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == inode.as_str()));
        let name = holds.then(|| fs::read_to_string(process.path().join("comm")).ok()).flatten()?;
        Some(format!("process {pid} ({})", name.trim()))
    })
}

//! What distinguishes this machine, and what listens on it.

use std::fs;
use std::net::{IpAddr, SocketAddr};

/// Returns the running kernel and the network namespace. Processes with the same ones may be able
/// to share memory: abstract sockets belong to a network namespace.
pub(crate) fn boot_identity() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = fs::read_link("/proc/self/ns/net").ok()?;
    let identity = format!("{} {}", boot.trim(), network.display());
    // As on macOS, peers find each other's sockets in a folder.
    #[cfg(kolo_posix)]
    let identity = format!("{identity} {}", crate::sys::unix::path_socket::folder_of_listeners().display());
    Some(identity)
}

/// Returns the process because of which this machine cannot listen at one of these addresses, if
/// this process can see it.
pub(crate) fn port_holder(addresses: &[SocketAddr]) -> Option<String> {
    const LISTEN: &str = "0A";
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let table = fs::read_to_string(table).ok()?;
        table.lines().skip(1).find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let local = socket_address(fields.get(1)?)?;
            let is_it = fields.get(3) == Some(&LISTEN) && addresses.iter().any(|address| excludes(local, *address));
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

/// Whether a socket that listens at `one` prevents another one from listening at `other`. Sockets
/// at different addresses may share a port.
fn excludes(one: SocketAddr, other: SocketAddr) -> bool {
    let [one_ip, other_ip] = [one, other].map(|address| address.ip().to_canonical());
    one.port() == other.port() && (one_ip == other_ip || one_ip.is_unspecified() || other_ip.is_unspecified())
}

/// Reads an address of the kernel's tables: the words of the address as this machine stores them,
/// in hexadecimal digits, and the port.
fn socket_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<[u8; 4]>> = (0..address.len() / 8)
        .map(|word| Some(u32::from_str_radix(address.get(8 * word..8 * word + 8)?, 16).ok()?.to_ne_bytes()))
        .collect();
    let bytes = words?.concat();
    let ip = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(bytes) => IpAddr::from(bytes),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(&bytes[..]).ok()?),
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::port_holder;

    #[test]
    fn the_holder_of_an_address_is_not_the_one_of_its_port_elsewhere() {
        let elsewhere = TcpListener::bind("127.0.0.3:0").unwrap();
        let [mut held, mut free] = [elsewhere.local_addr().unwrap(); 2];
        free.set_ip([127, 0, 0, 4].into());
        assert_eq!(port_holder(&[free]), None);
        let process = format!("process {} ", std::process::id());
        for ip in ["127.0.0.3", "0.0.0.0", "::", "::ffff:127.0.0.3"] {
            held.set_ip(ip.parse().unwrap());
            let holder = port_holder(&[free, held]);
            assert!(holder.as_ref().is_some_and(|holder| holder.starts_with(&process)), "{ip}: {holder:?}");
        }
        held.set_ip("::1".parse().unwrap());
        assert_eq!(port_holder(&[held]), None);
    }
}

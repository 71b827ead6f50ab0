//! The listeners of processes.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use windows_sys::Win32::Foundation::ERROR_INSUFFICIENT_BUFFER;
use windows_sys::Win32::NetworkManagement::IpHelper::{
    GetExtendedTcpTable, MIB_TCP6ROW_OWNER_PID, MIB_TCPROW_OWNER_PID, TCP_TABLE_OWNER_PID_LISTENER,
};
use windows_sys::Win32::Networking::WinSock::{AF_INET, AF_INET6};

use crate::strangers::Address;

/// Returns the addresses of a process's listeners: of that in the network and of the local one,
/// which is a socket on loopback.
pub(crate) fn listeners(pid: u32) -> Vec<Address> {
    let mut found = Vec::new();
    for row in rows::<MIB_TCPROW_OWNER_PID>(AF_INET.into()).into_iter().filter(|row| row.dwOwningPid == pid) {
        let ip = Ipv4Addr::from(row.dwLocalAddr.to_ne_bytes());
        // A listener on all addresses listens on loopback too.
        let ip = if ip.is_unspecified() { Ipv4Addr::LOCALHOST } else { ip };
        found.push(Address::Network(SocketAddr::new(ip.into(), port(row.dwLocalPort))));
    }
    for row in rows::<MIB_TCP6ROW_OWNER_PID>(AF_INET6.into()).into_iter().filter(|row| row.dwOwningPid == pid) {
        let ip = Ipv6Addr::from(row.ucLocalAddr);
        let ip = if ip.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { ip.into() };
        found.push(Address::Network(SocketAddr::new(ip, port(row.dwLocalPort))));
    }
    found
}

/// Reads a port, which is in network byte order.
fn port(word: u32) -> u16 {
    u16::from_be(word as u16)
}

/// Returns the rows of the machine's table of listeners.
fn rows<R: Copy>(family: u32) -> Vec<R> {
    let mut table = vec![0u32; 1 << 10];
    loop {
        let mut len = size_of_val(&*table) as u32;
        // SAFETY: the call writes at most `len` bytes.
        let status =
            unsafe { GetExtendedTcpTable(table.as_mut_ptr().cast(), &mut len, 0, family, TCP_TABLE_OWNER_PID_LISTENER, 0) };
        match status {
            0 => break,
            ERROR_INSUFFICIENT_BUFFER => table.resize(len as usize / 2, 0),
            other => panic!("the table of listeners: error {other}"),
        }
    }
    let count = table[0] as usize;
    // SAFETY: the system has written `table[0]` rows of words after that number.
    (0..count).map(|i| unsafe { table.as_ptr().add(1).cast::<R>().add(i).read_unaligned() }).collect()
}

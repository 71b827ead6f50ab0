//! What distinguishes this machine, and what listens on it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::windows::io::AsRawHandle;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use windows_sys::Win32::Foundation::ERROR_INSUFFICIENT_BUFFER;
use windows_sys::Win32::NetworkManagement::IpHelper::{
    GetExtendedTcpTable, MIB_TCP6ROW_OWNER_PID, MIB_TCPROW_OWNER_PID, TCP_TABLE_OWNER_PID_LISTENER,
};
use windows_sys::Win32::Networking::WinSock::{ADDRESS_FAMILY, AF_INET, AF_INET6};
use windows_sys::Win32::System::RemoteDesktop::ProcessIdToSessionId;
use windows_sys::Win32::System::SystemInformation::{ComputerNamePhysicalDnsHostname, GetComputerNameExW};
use windows_sys::Win32::System::Threading::QueryFullProcessImageNameW;

use super::process::open;
use super::security::User;
use super::view::NamedPage;
use crate::sys::{Process, variable};

/// Returns the name of this machine, for messages.
pub(crate) fn hostname() -> String {
    let mut name = [0u16; 256];
    let mut len = name.len() as u32;
    // SAFETY: the call writes at most `len` units.
    let is_known = unsafe { GetComputerNameExW(ComputerNamePhysicalDnsHostname, name.as_mut_ptr(), &mut len) } != 0;
    match name.get(..len as usize).filter(|name| is_known && !name.is_empty()) {
        Some(name) => String::from_utf16_lossy(name),
        None => variable("COMPUTERNAME").and_then(|name| name.into_string().ok()).unwrap_or_else(|| "localhost".to_owned()),
    }
}

/// Returns a text that is equal for processes that can share memory: those of one user, in one
/// session of one machine.
///
/// It is a random number in memory that the first of these processes makes and the others open. The
/// number lasts as long as one of them runs. (The system's own number of a machine is the same on
/// the clones of a machine, and it has none for a boot.)
pub(crate) fn boot_identity() -> Option<String> {
    static PAGE: LazyLock<Option<NamedPage>> = LazyLock::new(|| {
        let made = User::current().and_then(|user| NamedPage::create_or_open(&format!("kolo-machine-{}", user.text())));
        made.inspect_err(|error| crate::log::info!(%error, "this rank cannot tell which ranks are on its machine"))
            .ok()
            .map(|(page, _)| page)
    });
    let page = PAGE.as_ref()?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).ok()?;
    // SAFETY: the word is within the page, which is never unmapped and is accessed through atomics
    // only. It starts as zero.
    let word = unsafe { page.view.base().cast::<AtomicU64>().as_ref() };
    // One of the processes writes the number.
    let mine = u64::from_le_bytes(random) | 1;
    let number = word.compare_exchange(0, mine, Ordering::AcqRel, Ordering::Acquire).map_or_else(|theirs| theirs, |_| mine);
    let mut session = 0;
    // SAFETY: the call writes a number.
    unsafe { ProcessIdToSessionId(std::process::id(), &mut session) };
    Some(format!("windows-{session}-{number:016x}"))
}

/// Returns the process that holds one of these addresses, or the same port on all addresses, if the
/// system says which it is. Wine does not.
pub(crate) fn port_holder(addresses: &[SocketAddr]) -> Option<String> {
    let excludes = |one: SocketAddr, other: &SocketAddr| {
        let [one_ip, other_ip] = [one.ip(), other.ip()].map(|ip| ip.to_canonical());
        one.port() == other.port() && (one_ip == other_ip || one_ip.is_unspecified() || other_ip.is_unspecified())
    };
    let v4 = listeners::<MIB_TCPROW_OWNER_PID>(AF_INET).into_iter().map(|row| {
        let ip = Ipv4Addr::from(row.dwLocalAddr.to_ne_bytes());
        (SocketAddr::new(ip.into(), u16::from_be(row.dwLocalPort as u16)), row.dwOwningPid)
    });
    let v6 = listeners::<MIB_TCP6ROW_OWNER_PID>(AF_INET6).into_iter().map(|row| {
        let ip = Ipv6Addr::from(row.ucLocalAddr);
        (SocketAddr::new(ip.into(), u16::from_be(row.dwLocalPort as u16)), row.dwOwningPid)
    });
    let (_, pid) = v4.chain(v6).find(|(local, pid)| *pid != 0 && addresses.iter().any(|address| excludes(*local, address)))?;
    match program(pid) {
        Some(name) => Some(format!("process {pid} ({name})")),
        None => Some(format!("process {pid}")),
    }
}

/// Returns the rows of the system's table of listeners, of one family of addresses; none if the
/// system does not say.
fn listeners<Row: Copy>(family: ADDRESS_FAMILY) -> Vec<Row> {
    let mut table = vec![0u32; 1 << 10];
    // The table may grow between two calls.
    for _ in 0..8 {
        let mut len = size_of_val(&*table) as u32;
        let to = table.as_mut_ptr().cast();
        // SAFETY: the call writes at most `len` bytes.
        match unsafe { GetExtendedTcpTable(to, &mut len, 0, family.into(), TCP_TABLE_OWNER_PID_LISTENER, 0) } {
            0 => {
                // The number of rows comes first.
                let rows = table[1..].as_ptr().cast::<Row>();
                let count = (table[0] as usize).min(size_of_val(&table[1..]) / size_of::<Row>());
                // SAFETY: the rows lie within the table, and are numbers.
                return (0..count).map(|i| unsafe { rows.add(i).read_unaligned() }).collect();
            }
            ERROR_INSUFFICIENT_BUFFER => table.resize(len as usize / 2 + 1, 0),
            _ => break,
        }
    }
    Vec::new()
}

/// Returns the name of the program that a process runs, if the system says it.
fn program(pid: u32) -> Option<String> {
    let process = open(Process { id: pid, created: 0 }, 0).ok()??;
    let mut path = [0u16; 1024];
    let mut len = path.len() as u32;
    // SAFETY: the handle is open, and the call writes at most `len` units.
    if unsafe { QueryFullProcessImageNameW(process.as_raw_handle(), 0, path.as_mut_ptr(), &mut len) } == 0 {
        return None;
    }
    let path = String::from_utf16_lossy(path.get(..len as usize)?);
    Some(path.rsplit('\\').next()?.to_owned())
}

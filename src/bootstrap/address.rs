//! Chooses the advertised address of this machine.
//!
//! Other ranks can most likely reach the address from which this machine reaches the store. The
//! system knows it from the route to the store. Resolving the machine's own name would yield
//! 127.0.1.1 on many systems.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use if_addrs::Interface;

use crate::bootstrap::store::StoreUrl;
use crate::config::{Env, Settings, process_env};
use crate::error::{Error, Result};
use crate::sys;

/// An address, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) ip: IpAddr,
    pub(crate) why: String,
}

/// Chooses the address for ranks that meet at `store`, or the one that a filter for interfaces
/// admits. Waits for a name server until the deadline.
pub(crate) fn choose(store: Option<&StoreUrl>, filter: Option<&str>, deadline: Instant) -> Result<Chosen> {
    if let Some(filter) = filter {
        let interfaces = if_addrs::get_if_addrs().map_err(Error::os("listing network interfaces"))?;
        return filtered(filter, &interfaces);
    }
    if let Some(StoreUrl::Tcp { host, port }) = store
        && let Some(chosen) = towards(host, *port, deadline)
    {
        return Ok(chosen);
    }
    // This sends no packet. It asks for the route to an address that is reserved for documentation.
    let default = SocketAddr::from(([192, 0, 2, 1], 9));
    if let Some(ip) = route(default).filter(|ip| !ip.is_loopback()) {
        return Ok(Chosen { ip, why: "source of the default route".to_owned() });
    }
    let interfaces = if_addrs::get_if_addrs().map_err(Error::os("listing network interfaces"))?;
    let usable = interfaces.iter().find(|interface| !interface.is_loopback() && !is_link_local(interface.ip()));
    Ok(match usable {
        Some(interface) => {
            Chosen { ip: interface.ip(), why: format!("address of interface {}, as there is no default route", interface.name) }
        }
        None => Chosen { ip: Ipv4Addr::LOCALHOST.into(), why: "the only interface is loopback".to_owned() },
    })
}

/// Returns loopback if the launcher says that all ranks are on this machine, on systems that ask
/// the user about a program that listens elsewhere.
pub(crate) fn of_one_machine(world_size: usize, filter: Option<&str>, env: Env<'_>) -> Option<Chosen> {
    let local = ["KOLO_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE"].into_iter().find_map(env)?;
    let is_one = filter.is_none() && local.trim().parse() == Ok(world_size);
    let why = || "the launcher started all ranks on this machine".to_owned();
    (is_one && sys::asks_about_listeners()).then(|| Chosen { ip: Ipv4Addr::LOCALHOST.into(), why: why() })
}

/// Returns the address from which this machine reaches a store.
fn towards(host: &str, port: u16, deadline: Instant) -> Option<Chosen> {
    let is_literal = host.parse::<IpAddr>().is_ok() || host == "localhost";
    let target = sys::resolve(host, if port == 0 { 9 } else { port }, deadline).ok()?.into_iter().next()?;
    if target.ip().is_loopback() && !is_literal {
        // The name is most likely this machine's own. Other machines resolve it to another address.
        return None;
    }
    if target.ip().is_unspecified() {
        return None;
    }
    let ip = route(target)?;
    Some(Chosen { ip, why: format!("source of the route to the store at {host}") })
}

/// Returns the source address of the route to a target.
fn route(target: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr =
        if target.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (std::net::Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(target).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Returns the first address that a filter admits. A filter lists, separated by commas, beginnings
/// of names (`eth`), exact names (`=eth0`), addresses (`10.0.0.7`) and networks (`10.0.0.0/8`).
/// With a leading `^`, it admits all others.
fn filtered(filter: &str, interfaces: &[Interface]) -> Result<Chosen> {
    let (patterns, admits) = match filter.strip_prefix('^') {
        Some(patterns) => (patterns, false),
        None => (filter, true),
    };
    let matches = |interface: &Interface| patterns.split(',').map(str::trim).any(|pattern| is_match(pattern, interface));
    let admitted =
        |interface: &&Interface| matches(interface) == admits && !(is_link_local(interface.ip()) && interface.ip().is_ipv6());
    // Loopback interfaces count only if the filter names them, or if there are no others.
    let ordinary = |interface: &&Interface| admits || !interface.is_loopback();
    let chosen = interfaces.iter().filter(admitted).find(ordinary).or_else(|| interfaces.iter().find(admitted));
    let chosen = chosen.map(|interface| Chosen {
        ip: interface.ip(),
        why: format!("address of interface {}, which {filter:?} admits", interface.name),
    });
    chosen.ok_or_else(|| {
        let there: Vec<String> = interfaces.iter().map(|interface| format!("{} ({})", interface.name, interface.ip())).collect();
        Error::setting("KOLO_INTERFACE", filter, format!("no interface is admitted; there are {}", there.join(", ")))
    })
}

fn is_match(pattern: &str, interface: &Interface) -> bool {
    if let Some(name) = pattern.strip_prefix('=') {
        return interface.name == name;
    }
    if let Ok(ip) = pattern.parse::<IpAddr>() {
        return interface.ip() == ip;
    }
    if let Some((network, bits)) = pattern.split_once('/')
        && let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>())
    {
        return is_within(interface.ip(), network, bits);
    }
    !pattern.is_empty() && interface.name.starts_with(pattern)
}

fn is_within(ip: IpAddr, network: IpAddr, bits: u32) -> bool {
    let number = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => (u128::from(ip.to_bits()), 32u32),
        IpAddr::V6(ip) => (ip.to_bits(), 128),
    };
    let ((ip, width), (network, network_width)) = (number(ip), number(network));
    let Some(host_bits) = width.checked_sub(bits).filter(|_| width == network_width) else { return false };
    ip.checked_shr(host_bits).unwrap_or(0) == network.checked_shr(host_bits).unwrap_or(0)
}

/// Returns the address that this process advertises to other hosts.
pub(crate) fn own() -> Result<IpAddr> {
    let settings = Settings::from_env(&process_env)?;
    choose(None, settings.interface.as_deref(), Instant::now()).map(|chosen| chosen.ip)
}

/// Returns the address of this machine that a host most likely reaches: that of the route to the
/// host, or the one that `KOLO_INTERFACE` admits. Waits for a name server for `patience` at most.
pub fn address_for(host: &str, patience: Duration) -> Result<IpAddr> {
    let settings = Settings::from_env(&process_env)?;
    let target = StoreUrl::Tcp { host: host.to_owned(), port: 0 };
    choose(Some(&target), settings.interface.as_deref(), Instant::now() + patience).map(|chosen| chosen.ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, ip: [u8; 4]) -> Interface {
        let address = if_addrs::Ifv4Addr { ip: ip.into(), netmask: [255, 255, 255, 0].into(), prefixlen: 24, broadcast: None };
        Interface {
            name: name.to_owned(),
            addr: if_addrs::IfAddr::V4(address),
            index: None,
            oper_status: if_addrs::IfOperStatus::Up,
            is_p2p: false,
            #[cfg(windows)]
            adapter_name: String::new(),
        }
    }

    #[test]
    fn filters() {
        let there = [
            interface("lo", [127, 0, 0, 1]),
            interface("docker0", [172, 17, 0, 1]),
            interface("eth0", [10, 1, 2, 3]),
            interface("eth01", [10, 9, 2, 3]),
        ];
        for (filter, ip) in [
            ("eth", Some([10, 1, 2, 3])),
            ("=eth01", Some([10, 9, 2, 3])),
            ("^lo,docker", Some([10, 1, 2, 3])),
            ("^docker,eth", Some([127, 0, 0, 1])),
            ("10.9.0.0/16", Some([10, 9, 2, 3])),
            ("172.17.0.1", Some([172, 17, 0, 1])),
            ("lo", Some([127, 0, 0, 1])),
            ("ib", None),
            ("192.168.0.0/99", None),
        ] {
            let chosen = filtered(filter, &there);
            assert_eq!(chosen.as_ref().ok().map(|chosen| chosen.ip), ip.map(IpAddr::from), "{filter}: {chosen:?}");
        }
        let error = filtered("ib", &there).unwrap_err().to_string();
        assert!(error.contains("eth0 (10.1.2.3)"), "{error}");
    }

    #[test]
    fn ranks_of_one_machine_listen_on_loopback_where_the_system_asks_about_others() {
        let env = |size: &'static str| move |name: &str| (name == "LOCAL_WORLD_SIZE").then(|| size.to_owned());
        let chosen = of_one_machine(4, None, &env("4")).map(|chosen| chosen.ip.is_loopback());
        assert_eq!(chosen, sys::asks_about_listeners().then_some(true));
        assert_eq!(of_one_machine(4, None, &env("2")), None);
        assert_eq!(of_one_machine(4, Some("eth"), &env("4")), None);
        assert_eq!(of_one_machine(4, None, &|_| None), None);
    }

    #[test]
    fn a_store_on_loopback_is_reached_from_loopback() {
        let url = StoreUrl::Tcp { host: "127.0.0.1".to_owned(), port: 1 };
        assert_eq!(choose(Some(&url), None, Instant::now()).unwrap().ip, IpAddr::from([127, 0, 0, 1]));
    }
}

//! Chooses the advertised address of this machine.
//!
//! Other ranks can most likely reach the address from which this machine reaches the store. The
//! system knows it from the route to the store. Resolving the machine's own name would yield
//! 127.0.1.1 on many systems.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use if_addrs::Interface;

use crate::config::{Env, Settings, process_env};
use crate::error::{Error, Result};
use crate::network::peer_info::MOST_RAILS;
use crate::sys;

/// An address, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) ip: IpAddr,
    pub(crate) why: String,
}

/// Chooses the address for ranks whose `store` has this host and port, or the one that a filter for
/// interfaces admits, or that of the first rail. Waits for a name server until the deadline.
pub(crate) fn choose(
    store: Option<(&str, u16)>,
    filter: Option<&str>,
    rails_filter: Option<&str>,
    deadline: Instant,
) -> Result<Chosen> {
    if let Some(filter) = rails_filter {
        return Ok(rails_among(filter, &interfaces()?)?.swap_remove(0));
    }
    if let Some(filter) = filter {
        return filtered(filter, &interfaces()?);
    }
    if let Some((host, port)) = store
        && let Some(chosen) = towards(host, port, deadline)
    {
        return Ok(chosen);
    }
    // This sends no packet. It asks for the route to an address that is reserved for documentation.
    let default = SocketAddr::from(([192, 0, 2, 1], 9));
    if let Some(ip) = route(default).filter(|ip| !ip.is_loopback()) {
        return Ok(Chosen { ip, why: "source of the default route".to_owned() });
    }
    let interfaces = interfaces()?;
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
    let socket = sys::above_standard(|| UdpSocket::bind(any)).ok()?;
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
    chosen.ok_or_else(|| none_admitted("KOLO_INTERFACE", filter, interfaces))
}

fn interfaces() -> Result<Vec<Interface>> {
    sys::above_standard(if_addrs::get_if_addrs).map_err(Error::os("listing network interfaces"))
}

/// Returns the addresses of the rails that a filter admits, one for each interface. They are at least
/// one and at most [`MOST_RAILS`].
pub(crate) fn rails(filter: &str) -> Result<Vec<Chosen>> {
    let interfaces = interfaces()?;
    let mut rails = rails_among(filter, &interfaces)?;
    for pattern in without_interface(filter, &interfaces) {
        crate::log::warn!(pattern, rails = rails.len(), "no interface of this host matches a part of KOLO_RAILS");
    }
    if rails.len() > MOST_RAILS {
        crate::log::warn!(
            admitted = rails.len(),
            used = MOST_RAILS,
            "KOLO_RAILS admits too many interfaces; the first ones are used"
        );
        rails.truncate(MOST_RAILS);
    }
    Ok(rails)
}

/// Returns the first address of each interface that a filter admits, in the order of its patterns.
/// All are of the family of the first one.
fn rails_among(filter: &str, interfaces: &[Interface]) -> Result<Vec<Chosen>> {
    let pattern =
        |pattern: &str| interfaces.iter().filter(move |interface| is_match(pattern.trim(), interface)).collect::<Vec<_>>();
    let admitted: Vec<&Interface> = match filter.strip_prefix('^') {
        None => filter.split(',').flat_map(pattern).collect(),
        Some(patterns) => {
            let is_out = |interface: &&Interface| patterns.split(',').any(|pattern| is_match(pattern.trim(), interface));
            interfaces.iter().filter(|interface| !interface.is_loopback() && !is_out(interface)).collect()
        }
    };
    let mut rails: Vec<&Interface> = Vec::new();
    for interface in admitted {
        let is_usable = !(is_link_local(interface.ip()) && interface.ip().is_ipv6());
        let is_alike = rails.first().is_none_or(|first| first.ip().is_ipv4() == interface.ip().is_ipv4());
        if is_usable && is_alike && rails.iter().all(|rail| rail.name != interface.name) {
            rails.push(interface);
        }
    }
    if rails.is_empty() {
        return Err(none_admitted("KOLO_RAILS", filter, interfaces));
    }
    let chosen =
        |interface: &&Interface| Chosen { ip: interface.ip(), why: format!("rail {}, which {filter:?} admits", interface.name) };
    Ok(rails.iter().map(chosen).collect())
}

/// Returns the parts of a list of interfaces that no interface matches.
fn without_interface<'a>(filter: &'a str, interfaces: &[Interface]) -> Vec<&'a str> {
    if filter.starts_with('^') {
        return Vec::new();
    }
    let is_missing = |pattern: &&str| !interfaces.iter().any(|interface| is_match(pattern, interface));
    filter.split(',').map(str::trim).filter(is_missing).collect()
}

/// Returns the length of the prefix of the network in which an address of this machine is, for each
/// address.
pub(crate) fn networks() -> Vec<(IpAddr, u32)> {
    let of = |interface: &Interface| match &interface.addr {
        if_addrs::IfAddr::V4(address) => (address.ip.into(), address.prefixlen.into()),
        if_addrs::IfAddr::V6(address) => (address.ip.into(), address.prefixlen.into()),
    };
    sys::above_standard(if_addrs::get_if_addrs).map_or_else(|_| Vec::new(), |interfaces| interfaces.iter().map(of).collect())
}

fn none_admitted(setting: &str, filter: &str, interfaces: &[Interface]) -> Error {
    let there: Vec<String> = interfaces.iter().map(|interface| format!("{} ({})", interface.name, interface.ip())).collect();
    Error::setting(setting, filter, format!("no interface is admitted; there are {}", there.join(", ")))
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

pub(super) fn is_within(ip: IpAddr, network: IpAddr, bits: u32) -> bool {
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
    choose(None, settings.interface.as_deref(), settings.rails.as_deref(), Instant::now()).map(|chosen| chosen.ip)
}

/// Returns the address of this machine that a host most likely reaches: that of the route to the
/// host, or the one that `KOLO_INTERFACE` admits. Waits for a name server for `patience` at most.
pub fn address_for(host: &str, patience: Duration) -> Result<IpAddr> {
    let settings = Settings::from_env(&process_env)?;
    let (filter, rails) = (settings.interface.as_deref(), settings.rails.as_deref());
    choose(Some((host, 0)), filter, rails, Instant::now() + patience).map(|chosen| chosen.ip)
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
    fn rails() {
        let there = [
            interface("lo", [127, 0, 0, 1]),
            interface("docker0", [172, 17, 0, 1]),
            interface("eth0", [10, 1, 2, 3]),
            interface("eth0", [10, 1, 2, 4]),
            interface("eth1", [10, 9, 2, 3]),
        ];
        for (filter, ips) in [
            ("eth0,eth1", &[[10, 1, 2, 3], [10, 9, 2, 3]][..]),
            ("=eth1, eth", &[[10, 9, 2, 3], [10, 1, 2, 3]]),
            ("10.0.0.0/8", &[[10, 1, 2, 3], [10, 9, 2, 3]]),
            ("^docker", &[[10, 1, 2, 3], [10, 9, 2, 3]]),
            ("10.9.2.3", &[[10, 9, 2, 3]]),
            ("ib", &[]),
        ] {
            let rails = rails_among(filter, &there);
            let ips: Vec<IpAddr> = ips.iter().map(|&ip| ip.into()).collect();
            let found: Vec<IpAddr> = rails.iter().flatten().map(|chosen| chosen.ip).collect();
            assert_eq!((found, rails.is_err()), (ips.clone(), ips.is_empty()), "{filter}");
        }
        assert!(rails_among("ib", &there).unwrap_err().to_string().contains("KOLO_RAILS"));
        assert_eq!(without_interface("eth0, eth7,10.9.2.3,192.168.0.0/16", &there), ["eth7", "192.168.0.0/16"]);
        assert!(without_interface("^eth7", &there).is_empty());
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
        assert_eq!(choose(Some(("127.0.0.1", 1)), None, None, Instant::now()).unwrap().ip, IpAddr::from([127, 0, 0, 1]));
    }
}

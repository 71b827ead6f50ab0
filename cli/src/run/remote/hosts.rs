//! The hosts of a job and their slots.

use std::fmt;
use std::ops::Range;

use super::super::arguments::{Count, MOST_RANKS};

/// A host, and how many ranks it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) struct Host {
    /// The name for ssh: `host`, `user@host`, or an address.
    pub(super) name: String,
    pub(super) slots: u32,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_address = self.name.contains(':');
        if is_address { write!(f, "[{}]:{}", self.name, self.slots) } else { write!(f, "{}:{}", self.name, self.slots) }
    }
}

/// A host with its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) host: String,
    pub(super) ranks: Range<usize>,
}

/// Parses the value of `--hosts`: `a:4,user@b,[fd00::1]:2`. A host that is repeated adds slots.
pub(super) fn parse(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for item in text.split(',').map(str::trim) {
        let host = parse_one(item).map_err(|problem| format!("--hosts {text}: {problem}"))?;
        add(&mut hosts, host).map_err(|problem| format!("--hosts {text}: {problem}"))?;
    }
    Ok(hosts)
}

/// Returns a list of hosts, as `--hosts` has it, with one slot for each.
pub(crate) fn once_each(list: &str) -> Result<String, String> {
    let hosts = parse(list)?;
    Ok(hosts.into_iter().map(|host| Host { slots: 1, ..host }.to_string()).collect::<Vec<_>>().join(","))
}

fn parse_one(item: &str) -> Result<Host, String> {
    if item.is_empty() {
        return Err("a host has no name; write a:4,b:4".to_owned());
    }
    let is_address = item.parse::<std::net::Ipv6Addr>().is_ok();
    let (name, slots) = match item.rsplit_once(':') {
        // The colons of an address are inside its brackets, or `name_of` asks for these.
        Some((name, slots)) if !is_address && !slots.ends_with(']') => (name, Some(slots)),
        _ => (item, None),
    };
    let name = name_of(name).map_err(|problem| format!("{item:?}: {problem}"))?;
    let slots = slots.map_or(Ok(1), |text| slots_of(text).map_err(|problem| format!("{item:?}: {problem}")))?;
    Ok(Host { name, slots })
}

/// Checks the name of a host, and removes the brackets of an address.
pub(super) fn name_of(text: &str) -> Result<String, String> {
    let (user, host) = text.rsplit_once('@').map_or(("", text), |(user, host)| (user, host));
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(address) => {
            let ip = address.split('%').next().unwrap_or_default();
            ip.parse::<std::net::Ipv6Addr>().map_err(|_| format!("{address} is not an IPv6 address"))?;
            address
        }
        None if host.parse::<std::net::Ipv6Addr>().is_ok() => {
            return Err(format!("write the address in brackets: [{host}]"));
        }
        None if host.contains(':') => return Err(format!("{host:?} is not the name of a host")),
        None => host,
    };
    let is_allowed = |letter: char| letter.is_alphanumeric() || "-_.:%".contains(letter);
    // ssh would take it for an option.
    let is_option = host.starts_with('-') || user.starts_with('-');
    if host.is_empty() || is_option || !host.chars().all(is_allowed) {
        return Err(format!("{host:?} is not the name of a host"));
    }
    if text.contains('@')
        && (user.is_empty() || !user.chars().all(|letter| letter.is_alphanumeric() || "-_.+@\\".contains(letter)))
    {
        return Err(format!("{user:?} is not the name of a user"));
    }
    Ok(if user.is_empty() { host.to_owned() } else { format!("{user}@{host}") })
}

pub(super) fn slots_of(text: &str) -> Result<u32, String> {
    let slots = text.parse().ok().filter(|slots| (1..=MOST_RANKS).contains(slots));
    slots.ok_or_else(|| format!("{text:?} is not a number of slots; give 1 to {MOST_RANKS}"))
}

/// Adds a host, or slots to a host that is there.
pub(super) fn add(hosts: &mut Vec<Host>, new: Host) -> Result<(), String> {
    let all: u32 = hosts.iter().map(|host| host.slots).sum();
    if all + new.slots > MOST_RANKS {
        return Err(format!("the hosts have more than {MOST_RANKS} slots together, which is the most"));
    }
    match hosts.iter_mut().find(|host| host.name == new.name) {
        Some(host) => host.slots += new.slots,
        None => hosts.push(new),
    }
    Ok(())
}

/// Places ranks on hosts: each host is filled before the next one. Without a number, all slots have
/// a rank.
pub(super) fn place(hosts: &[Host], ranks: Option<Count>) -> Result<Vec<Placed>, String> {
    let slots: u32 = hosts.iter().map(|host| host.slots).sum();
    let Count { least, most } = ranks.unwrap_or(Count { least: slots, most: slots });
    let ranks = most.min(slots.max(least));
    if ranks > slots {
        let list: Vec<String> = hosts.iter().map(Host::to_string).collect();
        let list = list.join(",");
        return Err(format!(
            "{ranks} ranks do not fit into {slots} slots ({list}); start {slots} ranks (-n {slots}), or give the hosts more slots"
        ));
    }
    let mut placed = Vec::new();
    let mut next = 0;
    for host in hosts {
        let end = ranks.min(next + host.slots);
        if next < end {
            placed.push(Placed { host: host.name.clone(), ranks: next as usize..end as usize });
        }
        next = end;
    }
    Ok(placed)
}

/// Returns whether ranks on the host can be started without ssh.
pub(super) fn is_this_machine(name: &str) -> bool {
    let loopback = ["localhost", "127.0.0.1", "::1"].contains(&name);
    loopback || own_name().is_some_and(|own| is_own(name, &own))
}

/// Returns whether a name is that of this machine, with or without its domain.
fn is_own(name: &str, own: &str) -> bool {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let is_whole = name.eq_ignore_ascii_case(own);
    is_whole || (name.contains('.') != own.contains('.') && short(name) == short(own))
}

#[cfg(unix)]
fn own_name() -> Option<String> {
    rustix::system::uname().nodename().to_str().ok().map(str::to_owned)
}

#[cfg(windows)]
fn own_name() -> Option<String> {
    std::env::var("COMPUTERNAME").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, slots: u32) -> Host {
        Host { name: name.to_owned(), slots }
    }

    #[test]
    fn each_host_can_have_one_slot() {
        assert_eq!(once_each("a:4,user@b, [fd00::1]:2,a").unwrap(), "a:1,user@b:1,[fd00::1]:1");
        assert!(once_each("a,,b").is_err());
    }

    #[test]
    fn lists_of_hosts() {
        let both = |text: &str| parse(text).map(|hosts| hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(" "));
        for (text, hosts) in [
            ("a", "a:1"),
            ("a:4,b:4", "a:4 b:4"),
            (" a:4 , b ", "a:4 b:1"),
            ("a,b,a", "a:2 b:1"),
            ("user@a.example:2", "user@a.example:2"),
            ("[fd00::1]:2,[::1]", "[fd00::1]:2 [::1]:1"),
            ("me@[fe80::1%eth0]:3", "[me@fe80::1%eth0]:3"),
            ("10.0.0.1:8", "10.0.0.1:8"),
        ] {
            assert_eq!(both(text).as_deref(), Ok(hosts), "{text}");
        }
        for (text, hint) in [
            ("", "no name"),
            ("a,,b", "no name"),
            ("a:", "not a number of slots"),
            ("a:x", "not a number of slots"),
            ("a:0", "1 to 4096"),
            ("a:-1", "not a number of slots"),
            ("a:4097", "1 to 4096"),
            ("a:4096,b", "more than 4096"),
            (":4", "not the name of a host"),
            ("fd00::1", "in brackets: [fd00::1]"),
            ("fd00:213:79::1", "in brackets: [fd00:213:79::1]"),
            ("a:1:2", "\"a:1\" is not the name of a host"),
            ("[fd00::x]:1", "not an IPv6 address"),
            ("-oProxyCommand=x:1", "not the name of a host"),
            ("-o@a", "not the name of a host"),
            ("a b", "not the name of a host"),
            ("a;b", "not the name of a host"),
            ("@a", "not the name of a user"),
        ] {
            let problem = both(text).unwrap_err();
            assert!(problem.contains(hint) && problem.starts_with("--hosts "), "{text}: {problem}");
        }
    }

    #[test]
    fn hosts_are_filled_in_order() {
        let hosts = [host("a", 4), host("b", 2), host("c", 1)];
        let placed = |ranks: Option<(u32, u32)>| {
            let placed = place(&hosts, ranks.map(|(least, most)| Count { least, most }))?;
            Ok(placed.into_iter().map(|placed| (placed.host, placed.ranks)).collect::<Vec<_>>())
        };
        let named =
            |list: &[(&str, Range<usize>)]| Ok(list.iter().map(|(a, b)| ((*a).to_owned(), b.clone())).collect::<Vec<_>>());
        assert_eq!(placed(None), named(&[("a", 0..4), ("b", 4..6), ("c", 6..7)]));
        assert_eq!(placed(Some((5, 5))), named(&[("a", 0..4), ("b", 4..5)]));
        assert_eq!(placed(Some((1, 1))), named(&[("a", 0..1)]));
        assert_eq!(placed(Some((2, 5))), named(&[("a", 0..4), ("b", 4..5)]));
        assert_eq!(placed(Some((5, 9))), placed(None));
        let problem: Result<_, String> = placed(Some((8, 9)));
        assert_eq!(
            problem.unwrap_err(),
            "8 ranks do not fit into 7 slots (a:4,b:2,c:1); start 7 ranks (-n 7), or give the hosts more slots"
        );
    }

    #[test]
    fn this_machine() {
        for name in ["localhost", "::1", "127.0.0.1"] {
            assert!(is_this_machine(name), "{name}");
        }
        assert!(!is_this_machine("user@localhost"), "it may be another user");
        for (name, own, is) in [
            ("node1", "node1", true),
            ("NODE1", "node1", true),
            ("node1", "node1.example", true),
            ("node1.example", "node1", true),
            ("node1.other", "node1.example", false),
            ("node2", "node1", false),
        ] {
            assert_eq!(is_own(name, own), is, "{name} {own}");
        }
    }
}

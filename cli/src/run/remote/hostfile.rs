//! Files with the hosts of a job, in the format of Open MPI.
//!
//! Each line has a host and, if it has more than one slot, `slots=N`. A host that is repeated adds
//! slots. Open MPI takes the number of cores for a line without slots; kolo takes `max_slots` if the
//! line has it, and otherwise 1.

use std::io::Read;
use std::path::Path;

use super::hosts::{Host, add, name_of, slots_of};

/// The largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// Other words for `slots` and for `max_slots`.
const SLOTS: [&str; 3] = ["slots", "cpus", "count"];
const MOST_SLOTS: [&str; 4] = ["max_slots", "max-slots", "slots_max", "slots-max"];
const USER: [&str; 3] = ["username", "user_name", "user-name"];

/// Reads the hosts of a file.
pub(super) fn read(path: &Path) -> Result<Vec<Host>, String> {
    let name = path.display();
    let mut text = String::new();
    let file = std::fs::File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_string(&mut text));
    file.map_err(|error| format!("--hostfile {name}: it cannot be read: {error}"))?;
    if text.len() as u64 > LARGEST {
        return Err(format!("--hostfile {name}: it has more than {} MiB, which is the most", LARGEST >> 20));
    }
    let hosts = parse(&text).map_err(|(line, problem)| format!("{name}:{line}: {problem}"))?;
    if hosts.is_empty() {
        return Err(format!("--hostfile {name}: it has no host; write one in each line: HOST slots=4"));
    }
    Ok(hosts)
}

/// Parses the text of a file. An error has the number of its line.
fn parse(text: &str) -> Result<Vec<Host>, (usize, String)> {
    let mut hosts = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let parsed = parse_line(line).and_then(|host| host.map_or(Ok(()), |host| add(&mut hosts, host)));
        parsed.map_err(|problem| (at + 1, problem))?;
    }
    Ok(hosts)
}

fn parse_line(line: &str) -> Result<Option<Host>, String> {
    // There may be blanks around the sign.
    let line = line.split('#').next().unwrap_or_default().replace('=', " = ");
    let mut words = line.split_whitespace();
    let Some(name) = words.next() else { return Ok(None) };
    if name.starts_with(['^', '+']) {
        return Err(format!("{name}: kolo does not exclude hosts or choose them by number; name the hosts of the job"));
    }
    // An address may have no brackets here, because no slots follow it.
    let is_address = name.parse::<std::net::Ipv6Addr>().is_ok();
    if let Some((host, slots)) = name.split_once(':')
        && slots_of(slots).is_ok()
    {
        return Err(format!("{name}: write {host} slots={slots}"));
    }
    let mut name = if is_address { name.to_owned() } else { name_of(name)? };
    let (mut slots, mut most) = (None, None);
    while let Some(key) = words.next() {
        let (sign, value) = (words.next(), words.next());
        let (Some("="), Some(value)) = (sign, value) else {
            return Err(format!("{key:?} has no value; write HOST slots=4 max_slots=8"));
        };
        match key {
            _ if SLOTS.contains(&key) => slots = Some(slots_of(value)?),
            _ if MOST_SLOTS.contains(&key) => most = Some(slots_of(value)?),
            _ if USER.contains(&key) && !name.contains('@') => {
                let bracketed = if name.contains(':') { format!("[{name}]") } else { name };
                name = name_of(&format!("{}@{bracketed}", value.trim_matches('"')))?;
            }
            _ => return Err(format!("{key:?} is unknown; write HOST slots=4 max_slots=8")),
        }
    }
    if let (Some(slots), Some(most)) = (slots, most)
        && slots > most
    {
        return Err(format!("slots={slots} is more than max_slots={most}"));
    }
    Ok(Some(Host { name, slots: slots.or(most).unwrap_or(1) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files() {
        let hosts = |text: &str| parse(text).map(|hosts| hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(" "));
        for (text, expected) in [
            ("", ""),
            ("# nothing\n\n   \n", ""),
            ("a slots=4 max_slots=8\nb slots=4\n", "a:4 b:4"),
            ("a\r\nb # the second\r\n", "a:1 b:1"),
            ("a slots=2\nb\na slots=3\na", "a:6 b:1"),
            ("\ta slots = 4 max-slots= 4", "a:4"),
            ("a max_slots=4", "a:4"),
            ("me@a count=2\nb username=\"you\" cpus=3", "me@a:2 you@b:3"),
            ("fd00::1 slots=2\n[fd00::2]", "[fd00::1]:2 [fd00::2]:1"),
            ("10.0.0.1 slots=2#x", "10.0.0.1:2"),
        ] {
            assert_eq!(hosts(text).as_deref(), Ok(expected), "{text:?}");
        }
        for (text, line, hint) in [
            ("a\nb slots=x", 2, "\"x\" is not a number of slots"),
            ("a slots=0", 1, "1 to 4096"),
            ("a slots", 1, "\"slots\" has no value"),
            ("a slots=", 1, "\"slots\" has no value"),
            ("a\n\n# c\nb 4", 4, "\"4\" has no value"),
            ("a rack=4", 1, "\"rack\" is unknown"),
            ("a slots=8 max_slots=4", 1, "slots=8 is more than max_slots=4"),
            ("a:4", 1, "write a slots=4"),
            ("^a", 1, "does not exclude hosts"),
            ("a slots=4096\nb", 2, "more than 4096 slots"),
            ("-oX slots=1", 1, "not the name of a host"),
            ("a user-name=-x", 1, "not the name of a host"),
        ] {
            let (at, problem) = hosts(text).unwrap_err();
            assert!(at == line && problem.contains(hint), "{text:?}: {at}: {problem}");
        }
    }

    /// Any text is parsed or refused; what is parsed has the slots that are in it.
    #[test]
    fn any_text() {
        let mut seed = 7u64;
        let mut next = |most: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % most
        };
        const PARTS: [&str; 14] =
            ["a", "b", " slots", "=", "4", "max_slots=8", "\n", " ", "#", "[::1]", "@", "username=", "\u{fffd}", "\t"];
        for _ in 0..20_000 {
            let text: String = (0..next(12)).map(|_| PARTS[next(PARTS.len())]).collect();
            let lines = text.lines().count();
            match parse(&text) {
                Ok(hosts) => {
                    assert!(hosts.len() <= lines && hosts.iter().all(|host| (1..=4096).contains(&host.slots)), "{text:?}")
                }
                Err((line, _)) => assert!((1..=lines).contains(&line), "{text:?}"),
            }
        }
    }
}

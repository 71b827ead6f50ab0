//! The tests, which start ranks on hosts.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::runner::Outcome::{self, Left, NotRun, Passed};
use crate::runner::{Test, all};

/// How many run at once: they wait for slow links, and for each other's ends.
pub(crate) const AT_ONCE: usize = 4;

pub(crate) const TESTS: &[Test] = &[
    // Those that take longest begin.
    ("the_second_rail_fails", || a_rail_fails("eth1")),
    ("a_long_round_trip_with_losses_without_bbr", || long_round_trip("3", "1,2,1", "system")),
    ("two_hosts", || collectives("2", "2", "f32")),
    ("four_hosts", || collectives("4", "2", "f32")),
    ("three_hosts_with_one_two_and_three_ranks", || collectives("3", "1,2,3", "f32")),
    ("messages_of_8_bits", || collectives("3", "2", "int8")),
    ("ipv6_only", ipv6_only),
    ("a_long_round_trip_with_losses", || long_round_trip("2", "1", "auto")),
    ("a_long_round_trip_over_ipv6", long_round_trip_over_ipv6),
    ("four_hosts_in_two_racks", || racks("4", "1", &[("RACKS", "2")])),
    ("four_hosts_of_two_ranks_in_two_racks", || if all() { racks("4", "2", &[("RACKS", "2")]) } else { Left }),
    ("six_hosts_in_three_racks", || racks("6", "1", &[("RACKS", "3")])),
    ("the_first_rail_fails", || if all() { a_rail_fails("eth0") } else { Left }),
    ("a_slow_link_between_two_hosts", a_slow_link),
    ("a_link_that_becomes_slow", a_link_becomes_slow),
    ("hosts_that_go_around_a_link_that_becomes_slow", hosts_go_around),
    ("a_rail_is_down_from_the_start", a_rail_is_down),
    ("rails_share_by_speed", || if all() { rails_share_by_speed() } else { Left }),
    ("a_stranger_listens_at_the_loopback_address_of_a_rank", || loopback("1", "1")),
    ("all_ranks_advertise_loopback", || loopback("1", "all")),
    ("a_message_comes_although_another_rank_advertises_loopback", || loopback("1,2", "2")),
];

/// Hosts that exist until this is dropped.
struct Bed {
    name: String,
    /// What the script and the ranks find in their environment.
    variables: Vec<(&'static str, String)>,
    /// Whether ranks measure what messages cost.
    is_measured: bool,
}

/// A wire between the hosts that delays and loses packets.
const FAR: &[(&str, &str)] = &[("DELAY", "5ms"), ("LOSS", "1%"), ("KOLO_TEST_WORKER", "far")];
const FAR_IPV6: &[(&str, &str)] = &[("DELAY", "5ms"), ("LOSS", "1%"), ("KOLO_TEST_WORKER", "far"), ("IPV6", "1")];

impl Bed {
    fn new(hosts: &str, variables: &[(&'static str, &str)]) -> Result<Bed, String> {
        let variables = variables.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("kolo-hosts-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let bed = Bed { name, variables, is_measured: false };
        let up = bed.run(&["up", hosts]);
        if up.status.success() { Ok(bed) } else { Err(String::from_utf8_lossy(&up.stderr).trim().to_owned()) }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/bed.sh");
        let mut command = Command::new("bash");
        command.arg(script).args(arguments).env("BED", &self.name).env("RATE", "none").env("KOLO_TEST_WORKER", "1");
        // Otherwise the choices are those for a network of 1 Gb/s, however fast this machine is.
        if !self.is_measured {
            command.env("KOLO_NETWORK_LATENCY", "50us").env("KOLO_NETWORK_BANDWIDTH", "0.125");
        }
        command.env("KOLO_START_TIMEOUT", "5m");
        command.envs(self.variables.iter().map(|(name, value)| (*name, &**value)).chain(variables.iter().copied()));
        command.output().unwrap()
    }

    /// Runs ranks, this number on each host, and returns what rank 0 says.
    fn start(&self, each: &str, variables: &[(&str, &str)]) -> String {
        let this = std::env::current_exe().unwrap();
        let output = self.run_with(&["start", each, this.to_str().unwrap()], variables);
        let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}\n{why}");
        said.into_owned()
    }
}

/// Makes hosts with interfaces of these rates.
fn with_rails(hosts: &str, rates: &[&str], role: &str) -> Result<Bed, String> {
    let (count, rate) = (rates.len().to_string(), rates.join(","));
    let rails = (0..rates.len()).map(|rail| format!("eth{rail}")).collect::<Vec<_>>().join(",");
    let of_ranks = [("KOLO_TEST_WORKER", "rails"), ("KOLO_TEST_ROLE", role), ("KOLO_RAILS", &*rails)];
    let of_bed = [("RAILS", &*count), ("RATE", &*rate), ("NETWORK", "10.213.180")];
    Bed::new(hosts, &[&of_ranks[..], &of_bed].concat())
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

/// Each collective computes what it should, and moves few bytes between hosts: `link::rank` checks
/// both.
fn collectives(hosts: &str, each: &str, wire: &str) -> Outcome {
    match Bed::new(hosts, &[]) {
        Ok(bed) => {
            let said = bed.start(each, &[("KOLO_WIRE_DTYPE", wire)]);
            let counted = if wire == "f32" { crate::link::COUNTED } else { crate::link::PACKED.len() };
            assert_eq!(said.lines().filter(|line| line.contains("of the minimum")).count(), counted, "{said}");
            Passed(format!("\n{}", said.trim_end()))
        }
        Err(why) => NotRun(why),
    }
}

/// As [`collectives`], with few bytes on the uplinks of racks as well, although neighbouring ranks are in
/// different racks.
fn racks(hosts: &str, each: &str, racks: &'static [(&str, &str)]) -> Outcome {
    match Bed::new(hosts, racks) {
        Ok(bed) => {
            let said = bed.start(each, &[]);
            let counted = said.lines().filter(|line| line.contains("of the minimum on the busiest uplink")).count();
            assert_eq!(counted, crate::link::COUNTED, "{said}");
            Passed(format!("\n{}", said.trim_end()))
        }
        Err(why) => NotRun(why),
    }
}

/// Schedules visit another host between the two, also those of parts, and the log names the two. The next job
/// knows it, and the doctor finds it.
fn a_slow_link() -> Outcome {
    let of_bed = [("SLOW", "1-2:5mbit"), ("RATE", "1gbit"), ("NETWORK", "10.213.190"), ("KOLO_LOG", "info")];
    let mut bed = match Bed::new("4", &of_bed) {
        Ok(bed) => bed,
        Err(why) => return NotRun(why),
    };
    bed.is_measured = true;
    let cache = std::env::temp_dir().join(&bed.name);
    let job = |role| bed.start("1", &[("KOLO_TEST_WORKER", role), ("KOLO_CACHE_DIR", cache.to_str().unwrap())]);
    let measured = |said: &str| {
        let line = said.lines().find(|line| line.contains("measured each pair of hosts"));
        line.expect("rank 0 says it").to_owned()
    };
    let names_it = |said: &str| {
        let mut slow = said.lines().filter(|line| line.contains("a link is slower than those of the other hosts"));
        slow.any(|line| line.contains(".190.2 and ") && line.contains(".190.3\""))
    };
    let order = |line: &str| {
        let order = line.split('"').nth(1).unwrap().to_owned();
        let place = |host: usize| order.split(", ").position(|name| name.ends_with(&format!(".190.{}", host + 1)));
        assert_eq!(place(1).unwrap().abs_diff(place(2).unwrap()), 2, "{line}");
        order
    };
    let one_way = |from, to| {
        let counted = bed.run(&["between", from, to]);
        String::from_utf8(counted.stdout).unwrap().trim().parse::<usize>().unwrap()
    };
    let between = || one_way("1", "2") + one_way("2", "1");
    let mut tries = 0..100;
    let (first, again, bytes) = loop {
        tries.next().expect("the slow link is named, and the file of costs found");
        _ = std::fs::remove_dir_all(&cache);
        let said = job("far");
        let first = measured(&said);
        assert!(first.contains("is_cached=false"), "{first}");
        // A machine may be too busy to measure all pairs in time, and so busy that many links seem slow.
        if !first.contains(" unconfirmed=0") || !names_it(&said) {
            continue;
        }
        let before = between();
        let said = job("sums");
        let again = measured(&said);
        // A thread writes the file. The job may end before.
        if again.contains("is_cached=true") {
            assert!(names_it(&said), "{said}");
            let found = (order(&first), order(&again), between() - before);
            if job("links").lines().any(|line| line.contains(".190.2 to ") && line.contains(".190.3: 0.00")) {
                break found;
            }
        }
    };
    _ = std::fs::remove_dir_all(cache);
    assert_eq!(first, again);
    assert!(bytes < crate::link::SUMMED / 10, "{bytes} B passed the slow link");
    Passed(format!("{first}; {bytes} B on the slow link"))
}

/// A link becomes slow while a job runs: the log and the metrics name it until it carries again what it did.
fn a_link_becomes_slow() -> Outcome {
    let folder = std::env::temp_dir().join(format!("kolo-slow-{}", std::process::id()));
    let metrics = format!("unix:{}/{{rank}}", folder.display());
    let of_ranks = [("KOLO_TEST_WORKER", "slow"), ("KOLO_METRICS", &*metrics), ("KOLO_LOG", "info")];
    let of_bed = [("RATE", crate::slow::RATE), ("NETWORK", "10.213.200")];
    match Bed::new("3", &[&of_ranks[..], &of_bed].concat()) {
        Ok(bed) => {
            std::fs::create_dir(&folder).unwrap();
            let said = bed.start("1", &[]);
            std::fs::remove_dir_all(folder).unwrap();
            let (named, logged) = (said.lines().last().unwrap(), |what| said.lines().any(|line| line.contains(what)));
            assert!(named.contains(r#"comm="0",peer="1",kind="tcp""#), "{said}");
            assert!(logged("a link carries much less than before: check its cable"), "{said}");
            assert!(logged("a link carries again what it did"), "{said}");
            Passed(named.to_owned())
        }
        Err(why) => NotRun(why),
    }
}

/// The link of two hosts becomes slow while a job runs: schedules visit the hosts in another order until it
/// carries again what it did.
fn hosts_go_around() -> Outcome {
    let pair = format!("1-2:{}", crate::slow::RATE);
    let of_ranks = [("KOLO_TEST_WORKER", "avoiding"), ("KOLO_ALGORITHM", "ring"), ("KOLO_LOG", "info")];
    let of_bed = [("RATE", crate::slow::RATE), ("SLOW", &*pair), ("NETWORK", "10.213.220")];
    let mut bed = match Bed::new("4", &[&of_ranks[..], &of_bed].concat()) {
        Ok(bed) => bed,
        Err(why) => return NotRun(why),
    };
    bed.is_measured = true;
    let cache = std::env::temp_dir().join(&bed.name);
    let said = bed.start("1", &[("KOLO_CACHE_DIR", cache.to_str().unwrap())]);
    _ = std::fs::remove_dir_all(cache);
    let measured: Vec<&str> = said.lines().filter(|line| line.contains("measured each pair of hosts")).collect();
    let [_, _, .., last] = measured[..] else { panic!("the hosts measure at the start and twice more: {said}") };
    assert!(last.contains("that of ranks"), "{last}");
    Passed(format!("measured {} times", measured.len()))
}

/// Hosts that have no IPv4 address.
fn ipv6_only() -> Outcome {
    match Bed::new("2", &[("IPV6", "1")]) {
        Ok(bed) => {
            bed.start("2", &[]);
            Passed(String::new())
        }
        Err(why) => NotRun(why),
    }
}

/// Every collective is right although packets come late and some are lost. A link has BBR if the
/// system allows it, otherwise several connections.
fn long_round_trip(hosts: &str, each: &str, control: &str) -> Outcome {
    match Bed::new(hosts, FAR) {
        Ok(bed) => {
            // Every system has it, and nothing but kolo chooses another one then.
            for host in 0..hosts.parse::<usize>().unwrap() {
                let set = bed.run(&["on", &format!("{host}"), "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"]);
                if !set.status.success() {
                    return NotRun(String::from_utf8_lossy(&set.stderr).trim().to_owned());
                }
            }
            let said = bed.start(each, &[("KOLO_CONGESTION_CONTROL", control)]);
            let connections = said.lines().find_map(|line| line.strip_prefix("connections: ")).expect("rank 0 says it");
            let connections: Vec<&str> = connections.split(' ').collect();
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            if control == "auto" && socket.set_tcp_congestion(b"bbr").is_ok() {
                assert_eq!(connections, ["bbr"], "one link of one connection");
            } else {
                assert!(connections.len().is_multiple_of(4), "links of four connections each: {connections:?}");
                assert!(connections.iter().all(|of| *of == "reno"), "{connections:?}");
            }
            Passed(format!("{connections:?}"))
        }
        Err(why) => NotRun(why),
    }
}

fn long_round_trip_over_ipv6() -> Outcome {
    match Bed::new("2", FAR_IPV6) {
        Ok(bed) => {
            bed.start("1", &[]);
            Passed(String::new())
        }
        Err(why) => NotRun(why),
    }
}

/// An interface fails in the middle of an operation, which goes on over the other one.
fn a_rail_fails(interface: &str) -> Outcome {
    match with_rails("2", &["200mbit", "200mbit"], interface) {
        Ok(bed) => Passed(format!("\n{}", bed.start("2", &[]).trim_end())),
        Err(why) => NotRun(why),
    }
}

/// A link opens without a rail that does not connect.
fn a_rail_is_down() -> Outcome {
    match with_rails("2", &["none", "none"], "down") {
        Ok(bed) => {
            bed.start("1", &[]);
            Passed(String::new())
        }
        Err(why) => NotRun(why),
    }
}

/// Two rails carry as much as both can. The times are for people: a machine that is busy with other
/// things has others. How the rails share the bytes depends little on that.
fn rails_share_by_speed() -> Outcome {
    let mut said = String::new();
    let cases: [(&[&str], _); 4] = [
        (&["200mbit"], 0.0..0.001),
        (&["200mbit", "200mbit"], 0.2..0.8),
        (&["200mbit", "20mbit"], 0.001..0.4),
        (&["20mbit", "200mbit"], 0.6..0.999),
    ];
    for (rates, parts) in cases {
        match with_rails("2", rates, "time") {
            Ok(bed) => {
                let line = bed.start("1", &[]);
                let part: f64 = line.trim_end().rsplit(' ').next().and_then(|part| part.parse().ok()).expect("the part of eth1");
                assert!(parts.contains(&part), "{rates:?}: eth1 carried {part}, not {parts:?}\n{line}");
                said += &format!("\n{}: {}", rates.join(" and "), line.trim_end());
            }
            Err(why) => return NotRun(why),
        }
    }
    Passed(said)
}

/// A rank that advertises loopback to another host is named, whatever listens at its address there.
fn loopback(each: &str, role: &str) -> Outcome {
    match Bed::new("2", &[("KOLO_TEST_WORKER", "loopback"), ("KOLO_TEST_ROLE", role)]) {
        Ok(bed) => Passed(format!("\n{}", bed.start(each, &[]).trim_end())),
        Err(why) => NotRun(why),
    }
}

//! The tests, which start ranks on hosts.

use std::path::Path;
use std::process::{Command, Output};

use crate::runner::Outcome::{self, NotRun, Passed};
use crate::runner::Test;

pub(crate) const TESTS: &[Test] = &[
    ("two_hosts", || collectives("2", "2")),
    ("four_hosts", || collectives("4", "2")),
    ("three_hosts_with_one_two_and_three_ranks", || collectives("3", "1,2,3")),
    ("ipv6_only", ipv6_only),
];

/// Hosts that exist until this is dropped.
struct Bed {
    name: String,
    is_ipv6: bool,
}

impl Bed {
    fn new(hosts: &str, is_ipv6: bool) -> Result<Bed, String> {
        let bed = Bed { name: format!("kolo-hosts-{}", std::process::id()), is_ipv6 };
        let up = bed.run(&["up", hosts]);
        if up.status.success() { Ok(bed) } else { Err(String::from_utf8_lossy(&up.stderr).trim().to_owned()) }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts/bed.sh");
        let mut command = Command::new("bash");
        command.arg(script).args(arguments).env("BED", &self.name).env("RATE", "none").env("KOLO_TEST_WORKER", "1");
        // The choices are those for a network of 1 Gb/s, however fast this machine is.
        command.env("KOLO_NETWORK_LATENCY", "50us").env("KOLO_NETWORK_BANDWIDTH", "0.125");
        command.env("KOLO_START_TIMEOUT", "5m");
        if self.is_ipv6 {
            command.env("IPV6", "1");
        }
        command.output().unwrap()
    }

    /// Runs ranks, this number on each host, and returns what rank 0 says.
    fn start(&self, each: &str) -> String {
        let this = std::env::current_exe().unwrap();
        let output = self.run(&["start", each, this.to_str().unwrap()]);
        let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}\n{why}");
        said.into_owned()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

/// Each collective computes what it should, and moves few bytes between hosts: `link::rank` checks
/// both.
fn collectives(hosts: &str, each: &str) -> Outcome {
    match Bed::new(hosts, false) {
        Ok(bed) => {
            let said = bed.start(each);
            assert_eq!(said.lines().filter(|line| line.contains("of the minimum")).count(), crate::link::COUNTED, "{said}");
            Passed(format!("\n{}", said.trim_end()))
        }
        Err(why) => NotRun(why),
    }
}

/// Hosts that have no IPv4 address.
fn ipv6_only() -> Outcome {
    match Bed::new("2", true) {
        Ok(bed) => {
            bed.start("2");
            Passed(String::new())
        }
        Err(why) => NotRun(why),
    }
}

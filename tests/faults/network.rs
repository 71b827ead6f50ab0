//! Faults of the network, between network namespaces of this machine: rows 4 to 6.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::job::{Job, LATE, configured, fresh};
use crate::rank::{DEADLINE, now};
use crate::runner::Outcome::{self, NotRun, Passed};

/// Two hosts on one machine, each a namespace with an address of its own, with a wire between them.
struct Hosts {
    names: [String; 2],
}

fn run(program: &str, arguments: &str) -> Result<String, String> {
    let output = Command::new(program).args(arguments.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(said(&output.stdout))
    } else {
        Err(format!("{program} {arguments}: {}", said(&output.stderr)))
    }
}

impl Hosts {
    fn new() -> Result<Hosts, String> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let id = format!("kf{}x{}", std::process::id() % 10_000, COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let hosts = Hosts { names: [0, 1].map(|host| format!("{id}n{host}")) };
        let [a, b] = &hosts.names;
        run("ip", &format!("netns add {a}"))?;
        run("ip", &format!("netns add {b}"))?;
        run("ip", &format!("link add eth0 netns {a} type veth peer name eth0 netns {b}"))?;
        for (host, name) in hosts.names.iter().enumerate() {
            run("ip", &format!("-n {name} addr add {} dev eth0", Hosts::address(host) + "/24"))?;
            run("ip", &format!("-n {name} link set eth0 up"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
        }
        Ok(hosts)
    }

    fn address(host: usize) -> String {
        format!("10.213.78.{}", host + 1)
    }

    /// Runs a program on a host.
    fn on(&self, host: usize, arguments: &str) -> Result<String, String> {
        run("ip", &format!("netns exec {} {arguments}", self.names[host]))
    }

    /// Ranks 0 and 1 on the first host, 2 on the second.
    fn start(&self, deadline: u64) -> Job {
        let mut job = Job::empty();
        let (_, name) = fresh();
        for (rank, host) in [0, 0, 1].into_iter().enumerate() {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.names[host]]).arg(std::env::current_exe().unwrap());
            let store = format!("tcp://{}:29778", Hosts::address(0));
            let mut command = configured(command, "work", rank, 3, &store, &name);
            command.env(DEADLINE, deadline.to_string());
            job.add(command);
        }
        job
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run("ip", &format!("netns del {name}"));
        }
    }
}

/// The wire is cut: no packet comes through any more, and nobody is told.
pub(crate) fn partition() -> Outcome {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(why) => return NotRun(why),
    };
    let mut job = hosts.start(120_000);
    job.all_work();
    if let Err(why) = hosts.on(1, "tc qdisc add dev eth0 root netem loss 100%") {
        // Silence in one direction is silence all the same: what comes goes nowhere.
        if let Err(other) = hosts.on(1, "ip route add blackhole 10.213.78.1/32") {
            return NotRun(format!("{why}; {other}"));
        }
    }
    let since = now();
    let (texts, after) = job.all_name(&[0, 1], 2, since);
    assert!(after < LATE / 2, "{after:?}");
    assert!(texts.iter().all(|text| text.contains("rank 2 (")), "{texts:?}");
    // The other side notices as well, of whomever it waits for.
    assert!([0, 1].contains(&job.failure(2).culprit));
    Passed(format!("{after:.1?}: {}", texts[0]))
}

/// The system closes a connection under both ends, which live on.
pub(crate) fn reset() -> Outcome {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(why) => return NotRun(why),
    };
    let mut job = hosts.start(120_000);
    job.all_work();
    let since = now();
    match hosts.on(0, &format!("ss -K dst {}", Hosts::address(1))) {
        Ok(killed) if killed.contains(&Hosts::address(1)) => {}
        Ok(_) => return NotRun("this kernel does not let connections be closed from outside (ss -K)".to_owned()),
        Err(why) => return NotRun(why),
    }
    let failures = [0, 1, 2].map(|rank| job.failure(rank));
    let culprit = failures[0].culprit;
    let after = Duration::from_micros(failures.iter().map(|failure| failure.at).max().unwrap().saturating_sub(since));
    assert!(failures.iter().all(|failure| failure.culprit == culprit), "{failures:?}");
    assert!(failures[0].text.contains("connection"), "{failures:?}");
    assert!(after < LATE / 2, "{after:?}");
    job.all_say("clean");
    Passed(format!("{after:.0?}: {}", failures[0].text))
}

pub(crate) fn slow_and_lossy() -> Outcome {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(why) => return NotRun(why),
    };
    if let Err(why) = hosts.on(1, "tc qdisc add dev eth0 root netem delay 5ms loss 1%") {
        return NotRun(why);
    }
    let mut job = hosts.start(60_000);
    for _ in 0..2 {
        job.all_work();
    }
    Passed(String::new())
}

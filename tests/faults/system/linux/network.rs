//! Faults between hosts, which are network namespaces of this machine: rows 4 to 6, and the parts
//! of rows 13 to 15, 25 and 34 that need hosts.

use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::wire::{Weather, Wire};
use crate::job::{ASKED, AT_ONCE, Job, at_most, configured, fresh, in_time};
use crate::processes::show_both_sides;
use crate::rank::DEADLINE;
use crate::runner::Outcome::{self, NotRun, Passed};
use crate::system::now;

/// Two hosts on one machine: namespaces with their own addresses and a wire between them.
pub(crate) struct Hosts {
    names: [String; 2],
    addresses: [&'static str; 2],
    pub(crate) wire: Wire,
}

pub(crate) const V4: [&str; 2] = ["10.213.78.1", "10.213.78.2"];
const V6: [&str; 2] = ["fd00:213::1", "fd00:213::2"];

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

/// The hosts of ranks 0, 1 and 2.
pub(crate) type Layout = [usize; 3];

impl Hosts {
    pub(crate) fn new(addresses: [&'static str; 2]) -> Result<Hosts, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("kf{}x{}", std::process::id() % 100_000, COUNT.fetch_add(1, Ordering::Relaxed));
        let names = [0, 1].map(|host| format!("{id}n{host}"));
        let wire = Wire::new([&names[0], &names[1]])?;
        let hosts = Hosts { names, addresses, wire };
        let bits = if addresses == V4 { 24 } else { 64 };
        for (name, address) in hosts.names.iter().zip(addresses) {
            run("ip", &format!("netns add {name}"))?;
            run("ip", &format!("link set {name} netns {name} name eth0"))?;
            run("ip", &format!("-n {name} addr add {address}/{bits} dev eth0 nodad"))?;
            run("ip", &format!("-n {name} link set eth0 up mtu 16000"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
        }
        Ok(hosts)
    }

    /// Returns a command that runs a program on a host.
    fn command(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]);
        command
    }

    /// Runs `work` on the host at the other end of the wire of host `called`.
    pub(crate) fn within<T: Send>(&self, called: usize, work: impl FnOnce() -> T + Send) -> T {
        let namespace = std::fs::File::open(format!("/run/netns/{}", self.names[1 - called])).unwrap();
        // A thread may have another namespace than its process.
        let work = move || {
            // SAFETY: the file is open and belongs to a namespace.
            assert_eq!(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
            work()
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    /// Starts ranks on these hosts, with a store on the host of rank 0.
    pub(crate) fn start(&self, task: &str, layout: Layout, deadline: u64) -> Job {
        let address = self.addresses[layout[0]];
        self.start_at(&format!("tcp://{address}:29778"), task, layout, deadline, |host| {
            let mut command = self.command(host);
            command.arg(std::env::current_exe().unwrap());
            command
        })
    }

    fn start_at(&self, store: &str, task: &str, layout: Layout, deadline: u64, command: impl Fn(usize) -> Command) -> Job {
        let mut job = Job::empty();
        let (_, name) = fresh();
        for (rank, host) in layout.into_iter().enumerate() {
            let mut command = configured(command(host), task, rank, 3, store, &name);
            command.env(DEADLINE, deadline.to_string());
            job.add(command);
        }
        job
    }
}

/// Runs a test on two hosts, if this machine can have them.
pub(crate) fn between_hosts(addresses: [&'static str; 2], test: impl FnOnce(&Hosts) -> Outcome) -> Outcome {
    match Hosts::new(addresses) {
        Ok(hosts) => test(&hosts),
        Err(why) => NotRun(why),
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run("ip", &format!("netns del {name}"));
        }
    }
}

/// Ranks 0 and 1 share a host.
pub(crate) const PAIR: Layout = [0, 0, 1];
/// Rank 1 is on another host than ranks 0 and 2.
const APART: Layout = [0, 1, 0];

/// Ranks on two hosts that have no secret connect through a file that both hosts reach.
pub(crate) fn file_store() -> Outcome {
    between_hosts(V4, |hosts| {
        let mut job = Job::empty();
        let (store, name) = fresh();
        for (rank, host) in PAIR.into_iter().enumerate() {
            let mut command = hosts.command(host);
            command.arg(std::env::current_exe().unwrap());
            let mut command = configured(command, "once", rank, 3, &store, &name);
            command.env_remove("KOLO_SECRET");
            job.add(command);
        }
        job.all_say("done");
        Passed(String::new())
    })
}

/// The wire is cut: all packets are lost, without an error. Then each side continues by itself.
pub(crate) fn partition() -> Outcome {
    between_hosts(V4, |hosts| {
        let mut job = hosts.start("shrink", PAIR, 600_000);
        job.all_work();
        hosts.wire.set(Weather::Cut);
        let since = now();
        // The other side notices as well, and names the rank for which it waits.
        let other = job.failure(2);
        assert!(matches!(other.culprit, Some(0 | 1)) && other.cause.starts_with("Unreachable"), "{other}");
        assert_eq!(other.operation, other.called, "{other}");
        let said = [0, 1, 2].map(|rank| job.hear(rank, "shrunk"));
        let sizes = said.map(|said| said.split_once(' ').unwrap().0.to_owned());
        assert_eq!(sizes, ["2", "2", "1"], "the world size after the shrink");
        let told = job.all_name(&[0, 1], 2, &["Unreachable"], since);
        job.lives_on(2);
        let last = told.after.max(Duration::from_micros(other.at.saturating_sub(since)));
        let late = Duration::from_secs(5) + at_most(ASKED);
        assert!(last < late, "after {last:?}; {late:?} is late");
        Passed(format!("{last:.1?}: {}", told.text))
    })
}

/// Connections are reset while the ranks on both ends live.
pub(crate) fn reset() -> Outcome {
    between_hosts(V4, |hosts| {
        let mut job = hosts.start("work", PAIR, 600_000);
        job.all_work();
        hosts.wire.set(Weather::Resetting);
        let since = now();
        // Each end may name the other one first; then all ranks agree on one.
        let culprit = job.peek_failure(0).culprit.unwrap();
        let others: Vec<usize> = (0..3).filter(|rank| *rank != culprit).collect();
        let told = job.all_name(&others, culprit, &["Broken"], since);
        let own = job.failure(culprit);
        assert_eq!((own.culprit, &own.cause), (Some(culprit), &told.cause), "{own}");
        job.lives_on(culprit);
        assert!(told.text.contains("lost its connection"), "{}", told.text);
        in_time("all ranks know", told.after, AT_ONCE);
        Passed(format!("{:.0?}: {}", told.after, told.text))
    })
}

pub(crate) fn slow_and_lossy() -> Outcome {
    between_hosts(V4, |hosts| {
        let mut job = hosts.start("work", PAIR, 600_000);
        job.all_work();
        hosts.wire.set(Weather::Bad);
        let (_, before) = hosts.wire.counts();
        while hosts.wire.counts().1 < before + 10 {
            job.all_work();
        }
        job.all_work();
        let (carried, lost) = hosts.wire.counts();
        Passed(format!("{carried} packets carried, {lost} lost"))
    })
}

/// As [`crate::processes::different_calls`], with only a network between the odd rank and the
/// others.
pub(crate) fn different_calls() -> Outcome {
    between_hosts(V4, |hosts| {
        for layout in [APART, PAIR] {
            show_both_sides("hosts", &mut hosts.start("differ", layout, 600_000));
        }
        Passed(String::new())
    })
}

/// A child of a killed rank keeps the connections of the rank open, so ranks on other hosts do not
/// notice its end.
pub(crate) fn killed_with_a_child() -> Outcome {
    between_hosts(V4, |hosts| {
        let deadline = Duration::from_secs(6);
        let mut job = hosts.start("parent", APART, deadline.as_millis() as u64);
        let child: i32 = job.hear(1, "child").parse().unwrap();
        job.all_work();
        let since = now();
        job.kill(1);
        let told = job.all_name(&[0, 2], 1, &["Unresponsive"], since);
        // SAFETY: the child lives until this call, because it only waits for signals.
        unsafe { libc::kill(child, libc::SIGKILL) };
        let late = deadline + at_most(ASKED);
        assert!(told.after >= deadline / 2 && told.after < late, "after {:?}; {late:?} is late", told.after);
        Passed(format!("deadline 6 s; {:.1?}", told.after))
    })
}

/// The name of rank 0's host resolves to 127.0.1.1 there, as on Debian, and to its address
/// elsewhere.
pub(crate) fn own_name_on_loopback() -> Outcome {
    between_hosts(V4, |hosts| {
        let folder = std::env::temp_dir().join(format!("kolo-faults-{}-hosts", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for host in 0..2 {
            let lines = (0..2).map(|other| match other == host {
                true => format!("127.0.1.1 kolo-host{other}\n"),
                false => format!("{} kolo-host{other}\n", V4[other]),
            });
            std::fs::write(folder.join(host.to_string()), lines.collect::<String>()).unwrap();
        }
        let mut job = hosts.start_at("tcp://kolo-host0:29778", "work", PAIR, 600_000, |host| {
            let mut command = hosts.command(host);
            let own = format!("hostname kolo-host{host} && mount --bind {}/{host} /etc/hosts && exec \"$0\"", folder.display());
            command.args(["unshare", "--uts", "--mount", "sh", "-c", &own]).arg(std::env::current_exe().unwrap());
            command
        });
        job.all_work();
        check_addresses(&mut job, PAIR, V4);
        drop(job);
        std::fs::remove_dir_all(&folder).unwrap();
        Passed(String::new())
    })
}

/// Checks that every rank logs its address and the reason for it.
fn check_addresses(job: &mut Job, layout: Layout, addresses: [&str; 2]) {
    for (rank, host) in layout.into_iter().enumerate() {
        let said = job.hear_log(rank, &["INFO", "chose the advertised address", "why="]);
        assert!(said.contains(&format!("address={} ", addresses[host])), "rank {rank}: {said}");
    }
}

/// The hosts have no IPv4 address but loopback.
pub(crate) fn ipv6_only() -> Outcome {
    between_hosts(V6, |hosts| {
        let mut job = hosts.start_at(&format!("tcp://[{}]:29778", V6[0]), "work", PAIR, 600_000, |host| {
            let mut command = hosts.command(host);
            command.arg(std::env::current_exe().unwrap());
            command
        });
        job.all_work();
        check_addresses(&mut job, PAIR, V6);
        for said in job.all_say("connected") {
            assert!(said.starts_with("shm+tcp "), "{said}");
        }
        Passed(String::new())
    })
}

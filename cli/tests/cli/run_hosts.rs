//! `kolo run --hosts`: ranks on several hosts.
//!
//! Most tests have a stand-in for ssh, which runs the command on this machine with an environment of
//! its own, as ssh does. Where sshd can run, a job also starts over it, and, as root, between network
//! namespaces. The ranks are shell scripts or this program again, with the test [`be_a_rank`].

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kolo::Communicator;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::common::{PATIENCE, free_port, wait_until};
use crate::namespaces::Namespaces;
use crate::program::{text, write_program};

/// The variable that tells a rank what to do.
const TASK: &str = "KOLO_TEST_TASK";

/// Runs the command of `ssh [OPTION]... HOST COMMAND` on this machine. The name of the host says what
/// goes wrong.
const STAND_IN: &str = r#"#!/bin/sh
[ "$1" = -G ] && exit 1
while [ $# -gt 2 ]; do shift; done
case $1 in
refused)
    echo "ssh: connect to host refused port 22: Connection refused" >&2
    exit 255 ;;
silent) exec sleep 600 ;;
greets) echo "Welcome to this host"; printf 'and more: ' ;;
endless) exec yes ;;
back) [ -e is-back ] || { echo "ssh: connect to host back port 22: No route to host" >&2; exit 255; } ;;
esac
exec env -i PATH="$PATH" HOME="$HOME" TEST_HOST="$1" sh -c "$2"
"#;

/// A folder with the stand-in, where ranks also leave their process ids.
struct Bed(PathBuf);

impl Bed {
    fn new(test: &str) -> Bed {
        let path = std::env::temp_dir().join(format!("kolo-run-hosts-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        write_program(&path.join("ssh"), STAND_IN.as_bytes());
        Bed(path)
    }

    /// Returns the launcher, in the folder.
    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.args(["run", "--connect-timeout", "240s"]).args(arguments).current_dir(&self.0).env_remove("PWD");
        command.env("KOLO_RUN_SSH", self.0.join("ssh")).env("KOLO_START_TIMEOUT", "15m").stdin(Stdio::null());
        command
    }

    fn sh(&self, hosts: &str, script: &str) -> Command {
        self.run(&["--hosts", hosts, "--", "sh", "-c", script])
    }

    fn output(&self, hosts: &str, script: &str) -> Output {
        self.sh(hosts, script).output().unwrap()
    }

    /// Waits until ranks have written files of a kind, and returns the numbers in them.
    fn numbers(&self, kind: &str, ranks: usize) -> Vec<u32> {
        let read = |rank: usize| fs::read_to_string(self.0.join(format!("{kind}{rank}"))).ok()?.trim().parse().ok();
        wait_until("ranks do not start", || (0..ranks).all(|rank| read(rank).is_some()));
        (0..ranks).map(|rank| read(rank).unwrap()).collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a rank does first to leave the ids of its process, and of the agent.
const LEAVE_IDS: &str = "echo $PPID > agent$KOLO_RANK; echo $$ > pid$KOLO_RANK; ";

fn last(output: &Output) -> String {
    text(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

/// All hosts are told one address, of the first of them, for PyTorch's store.
#[test]
fn ranks_on_all_hosts_have_the_variables_of_pytorch() {
    let bed = Bed::new("pytorch");
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TORCHELASTIC_USE_AGENT_STORE";
    let output = bed.sh("a:2,b", script).env("TORCHELASTIC_USE_AGENT_STORE", "True").output().unwrap();
    let lines = text(&output.stdout);
    let mut told: Vec<Vec<&str>> = lines.lines().map(|line| line.split(' ').filter(|word| !word.is_empty()).collect()).collect();
    told.sort_unstable();
    let masters: BTreeSet<_> = told.iter().map(|words| &words[words.len() - 2..]).collect();
    assert!(masters.len() == 1 && told.len() == 3, "{lines}{}", text(&output.stderr));
    let places: Vec<String> = told.iter().map(|words| words[words.len() - 6..words.len() - 2].join(" ")).collect();
    assert_eq!(places, ["0 3 0 2", "1 3 1 2", "2 3 0 1"], "{lines}");
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether a process runs. One that has ended and whose parent does not wait for it does not.
fn lives(pid: u32) -> bool {
    let is_zombie = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    test_kill_process(Pid::from_raw(pid as i32).unwrap()).is_ok() && !is_zombie()
}

fn assert_ended(pids: &[u32]) {
    wait_until("a process outlives the job", || !pids.iter().any(|pid| lives(*pid)));
}

/// Waits for the end of a launcher, which must not take long.
fn end_of(launcher: Child) -> Output {
    let pid = launcher.id();
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(launcher.wait_with_output()));
    ended
        .recv_timeout(PATIENCE)
        .unwrap_or_else(|_| {
            send(pid, Signal::KILL);
            panic!("the launcher does not end");
        })
        .unwrap()
}

fn piped(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Says that something was not tested, past the capture of the test runner.
fn not_run(why: &str) {
    let _ = std::io::stderr().write_all(format!("NOT RUN: {why}\n").as_bytes());
}

#[test]
fn be_a_rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let comm = Communicator::builder().timeout(PATIENCE).start_timeout(PATIENCE).connect().unwrap();
    let mut ranks = vec![0u64; comm.world_size()];
    comm.all_gather(&[comm.rank() as u64], &mut ranks).unwrap();
    assert!(ranks.into_iter().eq(0..comm.world_size() as u64));
    match &*task {
        "gathers" => println!("rank {} of {} on {} hosts", comm.rank(), comm.world_size(), comm.host_count()),
        // It ends without an error, and the others name it.
        "leaves" if comm.rank() == 1 => {}
        "leaves" => {
            let error = comm.barrier().unwrap_err();
            assert_eq!(error.culprit(), Some(1));
            eprintln!("{error}");
            std::process::exit(1);
        }
        // It is killed, with its host or alone, and the others continue without it.
        "goes-on" if comm.rank() == 1 => {
            fs::write("pid1", std::process::id().to_string()).unwrap();
            fs::write("agent1", std::os::unix::process::parent_id().to_string()).unwrap();
            std::thread::sleep(PATIENCE);
        }
        "goes-on" => {
            assert_eq!(comm.barrier().unwrap_err().culprit(), Some(1));
            let comm = comm.shrink().unwrap();
            comm.barrier().unwrap();
            println!("went on with {}", comm.world_size());
        }
        other => panic!("{other}"),
    }
}

/// Adds this program as the ranks.
fn with_ranks<'a>(command: &'a mut Command, task: &str) -> &'a mut Command {
    command
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "run_hosts::be_a_rank", "--nocapture"])
        .env(TASK, task)
}

#[test]
fn ranks_know_their_place_and_their_output_is_prefixed() {
    let bed = Bed::new("place");
    let script = "echo $TEST_HOST $KOLO_RANK $KOLO_WORLD_SIZE $KOLO_LOCAL_RANK $KOLO_LOCAL_WORLD_SIZE; echo err >&2";
    let output = bed.run(&["-n", "4", "--hosts", "a:2,b:3,c", "--", "sh", "-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] a 0 4 0 2", "[1] a 1 4 1 2", "[2] b 2 4 0 2", "[3] b 3 4 1 2"]);
    let err = text(&output.stderr);
    assert_eq!(err.lines().collect::<BTreeSet<_>>(), ["[0] err", "[1] err", "[2] err", "[3] err"].into());
}

#[test]
fn a_hostfile_names_the_hosts() {
    let bed = Bed::new("hostfile");
    fs::write(bed.0.join("hosts"), "# two\nb slots=2\n\na max_slots=4 # four\nb\n").unwrap();
    let output = bed.run(&["--hostfile", "hosts", "--", "sh", "-c", "echo $TEST_HOST"]).output().unwrap();
    let out = text(&output.stdout);
    let count = |host: &str| out.lines().filter(|line| line.ends_with(host)).count();
    assert_eq!((count("] b"), count("] a")), (3, 4), "{out}{}", text(&output.stderr));
    fs::write(bed.0.join("wrong"), "a\nb slots=many\n").unwrap();
    for (file, hint) in [
        ("wrong", "kolo run: wrong:2: \"many\" is not a number of slots"),
        ("missing", "kolo run: --hostfile missing: it cannot be read: No such file"),
        ("/dev/null", "it has no host"),
    ] {
        let output = bed.run(&["--hostfile", file, "--", "true"]).output().unwrap();
        assert!(last(&output).contains(hint) && output.status.code() == Some(125), "{}", text(&output.stderr));
    }
}

#[test]
fn more_ranks_than_slots_are_refused() {
    let bed = Bed::new("slots");
    let output = bed.run(&["-n", "4", "--hosts", "a:2,b", "--", "true"]).output().unwrap();
    assert!(last(&output).contains("4 ranks do not fit into 3 slots (a:2,b:1)"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(125));
}

/// A host gets no variable of the launcher but these.
#[test]
fn variables_are_forwarded() {
    let bed = Bed::new("variables");
    let script = "echo \"$MINE,$GIVEN,$OTHER,$KOLO_TIMEOUT,$KOLO_RUN_SSH,$KOLO_HOST,$PWD\"";
    let mut command = bed.run(&["--hosts", "a", "-x", "MINE", "-x", "GIVEN=a b", "-x", "KOLO_HOST=h", "--", "sh", "-c", script]);
    let output = command.envs([("MINE", "m"), ("OTHER", "o"), ("KOLO_TIMEOUT", "7m"), ("KOLO_HOST", "g")]).output().unwrap();
    let directory = bed.0.canonicalize().unwrap();
    assert_eq!(text(&output.stdout), format!("[0] m,a b,,7m,,h,{}\n", directory.display()), "{}", text(&output.stderr));
    let output = bed.run(&["--hosts", "a", "-x", "NO_SUCH", "--", "true"]).output().unwrap();
    assert!(last(&output).contains("-x NO_SUCH: this environment has no such variable"), "{}", text(&output.stderr));
    let output = bed.run(&["--hosts", "a", "-x", "KOLO_RANK=7", "--", "true"]).output().unwrap();
    assert!(last(&output).contains("-x KOLO_RANK: kolo run gives each rank a value of its own"), "{}", text(&output.stderr));
}

#[test]
fn rank_0_reads_what_the_launcher_reads() {
    let bed = Bed::new("input");
    let mut child = piped(bed.sh("a,b", "wc -c | tr -d ' '").stdin(Stdio::piped()));
    // More than what may be under way.
    child.stdin.take().unwrap().write_all(&vec![b'x'; 3 << 20]).unwrap();
    let output = end_of(child);
    let out = text(&output.stdout);
    assert_eq!(out.lines().collect::<BTreeSet<_>>(), ["[0] 3145728", "[1] 0"].into(), "{}", text(&output.stderr));
}

#[test]
fn a_rank_that_fails_is_named_with_its_host() {
    let bed = Bed::new("fails");
    let script = format!("{LEAVE_IDS} [ $KOLO_RANK = 2 ] || exec sleep 600; until [ -s pid0 -a -s pid1 ]; do :; done; ");
    for (ends, how, code) in [("exit 3", "exited with status 3", 3), ("kill -9 $$", "was ended by SIGKILL", 137)] {
        let output = bed.output("a:2,b", &format!("{script}{ends}"));
        let said = last(&output);
        let pids = bed.numbers("pid", 3);
        assert!(said.starts_with(&format!("kolo run: rank 2 on b (pid {}) {how} after ", pids[2])), "{}", text(&output.stderr));
        assert!(said.ends_with("s; the other ranks were stopped"), "{said}");
        assert_eq!(output.status.code(), Some(code));
        assert_ended(&pids);
        (0..3).for_each(|rank| fs::remove_file(bed.0.join(format!("pid{rank}"))).unwrap());
    }
}

/// Another rank of the host is among the survivors, unless the host was lost.
#[test]
fn survivors_on_all_hosts_go_on_if_they_may() {
    for (killed, hosts, hint) in [
        ("pid1", "a,b:2", ") was ended by SIGKILL after "),
        ("agent1", "a,b,c", " was lost after "),
        ("pid1", "a,b,c", "SIGKILL"),
    ] {
        let bed = Bed::new("goes-on");
        let child = piped(with_ranks(&mut bed.run(&["--hosts", hosts, "--keep-going"]), "goes-on"));
        let pid = || fs::read_to_string(bed.0.join(killed)).ok()?.parse().ok();
        wait_until("rank 1 does not start", || pid().is_some());
        send(pid().unwrap(), Signal::KILL);
        let output = end_of(child);
        let (said, out) = (last(&output), text(&output.stdout));
        assert!(said.starts_with("kolo run: rank 1 on b ") && said.contains(hint), "{}", text(&output.stderr));
        assert!(said.ends_with("; 2 ranks ended with status 0"), "{said}");
        assert_eq!((out.matches("went on with 2").count(), output.status.code()), (2, Some(0)), "{out}{said}");
    }
}

/// As in a job without a failure, what a rank with status 0 has left running remains. What the rank
/// that died has started does not.
#[test]
fn what_survivors_leave_running_remains() {
    for place in [&["-n", "3"][..], &["--hosts", "a,b:2"]] {
        let bed = Bed::new("remains");
        // Rank 2 starts its program when the system has forgotten rank 1.
        let script = format!(
            "{LEAVE_IDS} [ $KOLO_RANK = 0 ] && exit; \
             [ $KOLO_RANK = 1 ] && {{ sleep 600 & echo $! > child1; kill -KILL $$; }}; \
             until [ -s child1 ] && ! kill -0 $(cat pid1) 2>/dev/null; do :; done; \
             sleep 600 >/dev/null 2>&1 & echo $! > child2"
        );
        let output = bed.run(place).args(["--keep-going", "--", "sh", "-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let child = |rank: usize| fs::read_to_string(bed.0.join(format!("child{rank}"))).unwrap().trim().parse().unwrap();
        assert_ended(&[child(1)]);
        assert!(lives(child(2)), "{place:?}: {}", text(&output.stderr));
        send(child(2), Signal::KILL);
    }
}

/// The files in which ranks report their failures are on their hosts.
#[test]
fn the_rank_that_an_error_names_is_reported() {
    let bed = Bed::new("names");
    let output = with_ranks(&mut bed.run(&["--hosts", "a,b:2", "--grace", "240s"]), "leaves").output().unwrap();
    let said = last(&output);
    assert!(
        said.contains("exited with status 1 after") && said.contains("; its error names rank 1;"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_program_that_cannot_be_started_is_named_with_the_host() {
    let bed = Bed::new("program");
    let output = bed.run(&["--hosts", "a", "--", "./no-such-program"]).output().unwrap();
    let said = last(&output);
    assert!(said.contains("./no-such-program cannot be started: No such file") && said.ends_with("on host a"), "{said}");
    assert_eq!(output.status.code(), Some(127));
}

#[test]
fn hosts_that_cannot_start_ranks_are_named() {
    let bed = Bed::new("hosts");
    let not_kolo = bed.0.join("not-kolo");
    write_program(&not_kolo, b"#!/bin/sh\necho \"error: unrecognized subcommand 'agent'\" >&2; exit 2\n");
    let not_kolo = not_kolo.to_str().unwrap();
    for (arguments, hints) in [
        (
            &["--hosts", "a,refused"][..],
            &[
                "cannot start ranks on host refused: ssh: connect to host refused port 22: Connection refused; check `",
                "refused true`",
            ][..],
        ),
        (&["--hosts", "silent", "--connect-timeout", "1s"], &["host silent: no answer within 1 s"]),
        (&["--hosts", "endless"], &["host endless: the shell there writes more than 65536 bytes"]),
        (&["--hosts", "a", "--ssh", "/no/ssh"], &["host a: /no/ssh cannot be started: No such file", "--ssh"]),
        (&["--hosts", "a", "--remote-program", "/no/kolo"], &["host a: ", "/no/kolo", "not found; install kolo there"]),
        (&["--hosts", "a", "--remote-program", not_kolo], &["unrecognized subcommand 'agent'; is kolo there the same version"]),
        (
            &["--hosts", "a", "--directory", "/no/folder"],
            &["host a: the working directory /no/folder is not there", "--directory"],
        ),
        (&["--hosts", "a", "--address", "0.0.0.0"], &["give the address that the hosts connect to"]),
        (&["--hosts", "a", "--address", "192.0.2.1"], &["--address 192.0.2.1: ", "give an address of this machine"]),
        (&["-n", "1", "--address", "127.0.0.1"], &["--address needs --hosts or --hostfile"]),
    ] {
        // A job never starts in part: the rank would leave a file.
        let mut command = bed.run(&[]);
        // The last value of an option would be refused as the second one.
        if arguments.contains(&"--connect-timeout") {
            command = Command::new(env!("CARGO_BIN_EXE_kolo"));
            command.arg("run").current_dir(&bed.0).env("KOLO_RUN_SSH", bed.0.join("ssh")).stdin(Stdio::null());
        }
        let output = end_of(piped(command.args(arguments).args(["--", "touch", "started"])));
        let said = text(&output.stderr);
        assert!(hints.iter().all(|hint| said.contains(hint)), "{arguments:?}: {said}");
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {said}");
        assert!(!bed.0.join("started").exists(), "{arguments:?}");
    }
}

/// A job goes on without a host that does not answer, and with it after the next start when it is back.
#[test]
fn a_job_starts_with_the_hosts_that_answer() {
    let bed = Bed::new("elastic");
    let script = "echo start $TORCHELASTIC_RESTART_COUNT of $WORLD_SIZE; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; : > is-back; exit 7";
    let job = |ranks: &str| {
        let arguments = ["-n", ranks, "--hosts", "a,back", "--max-restarts", "1", "--", "sh", "-c", script];
        end_of(piped(&mut bed.run(&arguments)))
    };
    let output = job("2:3");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("host back: ") && said.contains("No route") && !bed.0.join("is-back").exists(), "{said}");
    let output = job("1:2");
    let said = text(&output.stderr);
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] start 0 of 1", "[0] start 1 of 2", "[1] start 1 of 2"], "{said}");
    assert!(said.contains("No route to host") && said.contains("the other hosts start without it"), "{said}");
    assert!(output.status.success() && said.contains("(1 of 1 restart)"), "{said}");
}

/// The starts that came before are in the table, although the last one was refused.
#[test]
fn a_host_that_is_gone_at_a_restart_ends_the_job() {
    let bed = Bed::new("gone");
    fs::write(bed.0.join("is-back"), "").unwrap();
    let script = "rm -f is-back; exit 7";
    let arguments = ["--hosts", "a,back", "--max-restarts", "3", "--", "sh", "-c", script];
    let output = end_of(piped(&mut bed.run(&arguments)));
    let said = text(&output.stderr);
    let rows: Vec<Vec<&str>> = said.lines().rev().take(2).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows[1][2], rows[1][4], rows[0][2], rows[0][4]), ("1", "7", "2", "-"), "{said}");
    assert!(rows[0].contains(&"back:") && output.status.code() == Some(125), "{said}");
}

/// Each host places its own ranks.
#[test]
#[cfg(target_os = "linux")]
fn bindings_are_reported_by_each_host() {
    let bed = Bed::new("bound");
    let said = |options: &[&str]| {
        let output = bed.run(&[options, &["--hosts", "a,b", "--report-bindings", "--", "true"]].concat()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        text(&output.stderr)
    };
    let bound = said(&["--bind-to", "core"]);
    for (rank, host) in ["a", "b"].iter().enumerate() {
        assert!(bound.contains(&format!("kolo run: host {host}: rank {rank} is bound to core 0 (processors ")), "{bound}");
    }
    assert!(said(&[]).contains("kolo run: host b: rank 1 is not bound"));
}

#[test]
fn what_a_shell_writes_before_the_agent_is_passed_on() {
    let bed = Bed::new("greets");
    let output = bed.output("greets", "echo out");
    assert_eq!(text(&output.stdout), "[0] out\n");
    assert!(text(&output.stderr).contains("kolo run: host greets: Welcome to this host"), "{}", text(&output.stderr));
}

/// The ranks end, and what they have started, too.
const WITH_A_CHILD: &str = "sleep 600 & echo $! > child$KOLO_RANK; wait";

#[test]
fn an_agent_that_is_killed_ends_the_job() {
    let bed = Bed::new("agent");
    let child = piped(&mut bed.sh("a,b", &format!("{LEAVE_IDS}{WITH_A_CHILD}")));
    let pids = [bed.numbers("pid", 2), bed.numbers("child", 2)].concat();
    send(bed.numbers("agent", 2)[1], Signal::KILL);
    let output = end_of(child);
    let said = last(&output);
    assert!(said.starts_with("kolo run: rank 1 on b was lost after "), "{}", text(&output.stderr));
    assert!(said.contains("the connection to the agent of host b ended: ssh "), "{said}");
    assert_eq!(output.status.code(), Some(125));
    assert_ended(&pids);
}

#[test]
fn a_launcher_that_is_killed_leaves_no_rank() {
    let bed = Bed::new("killed");
    let mut child = piped(&mut bed.sh("a,localhost", &format!("{LEAVE_IDS}trap '' TERM; {WITH_A_CHILD}")));
    let pids = [bed.numbers("pid", 2), bed.numbers("child", 2), bed.numbers("agent", 2)].concat();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_ended(&pids);
}

#[test]
fn an_interrupt_ends_all_ranks() {
    let bed = Bed::new("interrupt");
    let child = piped(&mut bed.sh("a,b", &format!("{LEAVE_IDS}trap 'echo interrupted; exit 5' INT; {WITH_A_CHILD}")));
    let pids = [bed.numbers("pid", 2), bed.numbers("child", 2)].concat();
    send(child.id(), Signal::INT);
    let output = end_of(child);
    assert_eq!(last(&output), "kolo run: stopped by SIGINT");
    assert_eq!(output.status.code(), Some(130));
    assert_ended(&pids);
}

#[test]
fn a_second_interrupt_kills_ranks_that_do_not_end() {
    let bed = Bed::new("second");
    // A rank says when it has got the first one. The shell does so between two sleeps: one that begins
    // with the signal may miss it.
    let script = format!("trap 'echo > got$KOLO_RANK' INT; trap '' TERM; {LEAVE_IDS} while :; do sleep 0.05; done");
    let child = piped(&mut bed.sh("a,b", &script));
    let pids = bed.numbers("pid", 2);
    send(child.id(), Signal::INT);
    wait_until("a rank gets no signal", || [0, 1].iter().all(|rank| bed.0.join(format!("got{rank}")).exists()));
    send(child.id(), Signal::INT);
    let output = end_of(child);
    assert_eq!(last(&output), "kolo run: stopped by SIGINT");
    assert_ended(&pids);
}

/// A signal that does not end the job reaches the ranks.
#[test]
fn other_signals_are_forwarded() {
    let bed = Bed::new("signal");
    let script = format!("trap 'echo got; exit 0' USR1; {LEAVE_IDS} while :; do sleep 0.05; done");
    let child = piped(&mut bed.sh("a,b", &script));
    bed.numbers("pid", 2);
    send(child.id(), Signal::USR1);
    let output = end_of(child);
    assert_eq!(text(&output.stdout).lines().collect::<BTreeSet<_>>(), ["[0] got", "[1] got"].into());
    assert!(output.status.success());
}

/// The end of a rank does not wait behind output that nothing reads.
#[test]
fn a_failure_is_noticed_while_output_waits() {
    let bed = Bed::new("waits");
    let script = format!("{LEAVE_IDS} [ $KOLO_RANK = 0 ] && exec yes; until [ -e go ]; do sleep 0.05; done; exit 3");
    let mut child = piped(&mut bed.sh("a:2", &script));
    let pids = bed.numbers("pid", 2);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "[0] y\n");
    fs::write(bed.0.join("go"), "").unwrap();
    assert_ended(&pids);
    std::io::copy(&mut out, &mut std::io::sink()).unwrap();
    let output = end_of(child);
    assert!(last(&output).starts_with("kolo run: rank 1 on a ") && output.status.code() == Some(3), "{}", text(&output.stderr));
}

#[test]
fn a_job_ends_when_nothing_reads_its_output() {
    let bed = Bed::new("unread");
    let mut child = piped(&mut bed.sh("a,b", "exec yes"));
    let mut part = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut part).unwrap();
    let output = end_of(child);
    assert!(last(&output).contains("was ended by SIGPIPE"), "{}", text(&output.stderr));
}

/// Returns the processes whose command line or environment has a text.
#[cfg(target_os = "linux")]
fn processes_with(file: &str, wanted: &str) -> BTreeSet<u32> {
    let has = |pid: &u32| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        bytes.windows(wanted.len()).any(|part| part == wanted.as_bytes())
    };
    let pid = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    fs::read_dir("/proc").unwrap().filter_map(pid).filter(has).collect()
}

/// Neither a command line nor the environment of ssh, the agents or their guards has the secret.
#[cfg(target_os = "linux")]
fn the_secret_is_hidden(bed: &Bed, command: &mut Command) {
    // Tests of this process run side by side, and each looks for its own.
    static SECRETS: AtomicU32 = AtomicU32::new(0);
    let number = SECRETS.fetch_add(1, Ordering::Relaxed);
    let secret = format!("{:08x}{number:08x}", std::process::id()).repeat(4);
    let child = piped(command.args(["--", "sh", "-c", &format!("{LEAVE_IDS} exec sleep 600")]).env("KOLO_SECRET", &secret));
    let mut known: BTreeSet<u32> = bed.numbers("pid", 2).into_iter().collect();
    // A rank writes its id before it becomes `sleep`.
    let sleep = || processes_with("cmdline", "sleep\x00600").intersection(&known).count() == 2;
    wait_until("a rank does not become `sleep`", sleep);
    assert_eq!(processes_with("cmdline", &secret), BTreeSet::new());
    // The user has given it to the launcher in this way.
    known.insert(child.id());
    assert_eq!(processes_with("environ", &secret), known);
    send(child.id(), Signal::TERM);
    assert_eq!(end_of(child).status.code(), Some(128 + 15));
    for kind in ["pid", "agent"] {
        (0..2).for_each(|rank| fs::remove_file(bed.0.join(format!("{kind}{rank}"))).unwrap());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_secret_is_neither_in_a_command_line_nor_in_the_environment_of_ssh() {
    let bed = Bed::new("secret");
    the_secret_is_hidden(&bed, &mut bed.run(&["--hosts", "a,localhost"]));
}

// ---- A real sshd ----

/// A server of ssh in the folder of a bed, with a key of its own.
struct Sshd(Child);

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program that prepares something.
fn prepared(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{name}: {}{}", text(&output.stdout), text(&output.stderr)).trim().to_owned())
    }
}

/// Makes keys in a folder.
fn make_keys(folder: &Path) -> Result<(), String> {
    for key in ["host", "user"] {
        prepared(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key)))?;
    }
    // Debian's sshd does not start as root without it.
    if rustix::process::geteuid().is_root() {
        let _ = fs::create_dir("/run/sshd");
    }
    Ok(())
}

/// Starts sshd at an address, inside a network namespace if one is given.
fn start_sshd(folder: &Path, address: &str, port: u16, namespace: Option<&str>) -> Result<Sshd, String> {
    let program = ["/usr/sbin/sshd", "/usr/bin/sshd"].into_iter().find(|path| Path::new(path).exists());
    let program = program.ok_or("sshd is not installed")?;
    let config = folder.join(format!("sshd-{address}"));
    let path = folder.display();
    let lines = format!(
        "ListenAddress {address}\nPort {port}\nHostKey {path}/host\nAuthorizedKeysFile {path}/user.pub\nStrictModes no\nUsePAM no\n\
         PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nPrintMotd no\n"
    );
    fs::write(&config, lines).map_err(|error| error.to_string())?;
    let mut command = match namespace {
        Some(name) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", name, program]);
            command
        }
        None => Command::new(program),
    };
    let log = fs::File::create(folder.join(format!("log-{address}"))).map_err(|error| error.to_string())?;
    command.args(["-D", "-e", "-f"]).arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut sshd = Sshd(command.spawn().map_err(|error| format!("{program}: {error}"))?);
    let target: std::net::SocketAddr = format!("{address}:{port}").parse().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while std::net::TcpStream::connect_timeout(&target, Duration::from_secs(1)).is_err() {
        let log = || fs::read_to_string(folder.join(format!("log-{address}"))).unwrap_or_default();
        if sshd.0.try_wait().is_ok_and(|ended| ended.is_some()) {
            return Err(format!("sshd does not start: {}", log().trim()));
        }
        assert!(Instant::now() < deadline, "sshd does not listen: {}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(sshd)
}

/// Writes a configuration of ssh with hosts at addresses, and returns the command.
fn ssh_with(folder: &Path, hosts: &[(&str, &str, u16)]) -> String {
    let path = folder.display();
    let host = |(name, address, port): &(&str, &str, u16)| format!("Host {name}\n    HostName {address}\n    Port {port}\n");
    let mut config: String = hosts.iter().map(host).collect();
    config += &format!(
        "Host *\n    IdentityFile {path}/user\n    IdentitiesOnly yes\n    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n"
    );
    fs::write(folder.join("config"), config).unwrap();
    format!("ssh -F {path}/config")
}

/// Two hosts that are this machine, over sshd. `None`, and said so, where sshd cannot run.
fn over_sshd(bed: &Bed) -> Option<(Sshd, String)> {
    let port = free_port();
    let started = make_keys(&bed.0).and_then(|()| start_sshd(&bed.0, "127.0.0.1", port, None));
    let sshd = match started {
        Ok(sshd) => sshd,
        Err(why) => {
            not_run(&why);
            return None;
        }
    };
    let ssh = ssh_with(&bed.0, &[("a", "127.0.0.1", port), ("b", "127.0.0.1", port), ("closed", "127.0.0.1", 1)]);
    let check = prepared(Command::new("ssh").args(["-F"]).arg(bed.0.join("config")).args(["-o", "BatchMode=yes", "a", "true"]));
    if let Err(why) = check {
        let log = fs::read_to_string(bed.0.join("log-127.0.0.1")).unwrap_or_default();
        not_run(&format!("sshd lets this user not in: {why}: {log}"));
        return None;
    }
    Some((sshd, ssh))
}

#[test]
fn a_job_over_sshd() {
    let bed = Bed::new("sshd");
    let Some((_sshd, ssh)) = over_sshd(&bed) else { return };
    let output = with_ranks(&mut bed.run(&["--hosts", "a:2,b", "--ssh", &ssh]), "gathers").output().unwrap();
    let out = text(&output.stdout);
    for rank in 0..3 {
        assert!(out.contains(&format!("[{rank}] rank {rank} of 3 on 1 hosts")), "{out}{}", text(&output.stderr));
    }
    assert!(output.status.success());

    let output = bed.run(&["--hosts", "a,closed", "--ssh", &ssh, "--", "true"]).output().unwrap();
    let said = last(&output);
    assert!(said.contains("host closed: ssh: connect to host 127.0.0.1 port 1: Connection refused; check `ssh -F "), "{said}");

    // The guard of the agent, or the agent itself, ends what the ranks have started.
    let script = format!("{LEAVE_IDS}{WITH_A_CHILD}");
    let mut child = piped(&mut bed.run(&["--hosts", "a,b", "--ssh", &ssh, "--", "sh", "-c", &script]));
    let pids = [bed.numbers("pid", 2), bed.numbers("child", 2), bed.numbers("agent", 2)].concat();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_ended(&pids);
    for kind in ["pid", "child", "agent"] {
        (0..2).for_each(|rank| fs::remove_file(bed.0.join(format!("{kind}{rank}"))).unwrap());
    }

    #[cfg(target_os = "linux")]
    the_secret_is_hidden(&bed, &mut bed.run(&["--hosts", "a,b", "--ssh", &ssh]));
}

#[test]
fn there_are_no_links_to_measure_on_one_host() {
    let bed = Bed::new("links");
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_kolo"));
    let output = doctor.args(["doctor", "--hosts", "a,b"]).env("KOLO_RUN_SSH", bed.0.join("ssh")).output().unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("kolo: all ranks are on one host, which has no links to measure"), "{said}");
    assert!(!output.status.success() && output.stdout.is_empty());
}

#[test]
fn a_job_between_network_namespaces() {
    let bed = Bed::new("namespaces");
    // The launcher is outside of them.
    let made = Namespaces::new("10.213.78", 2).and_then(|made| made.join().map(|()| made));
    let namespaces = match made {
        Ok(namespaces) => namespaces,
        Err(why) => return not_run(&format!("network namespaces cannot be made: {why}")),
    };
    let addresses = [0, 1].map(|host| namespaces.address(host));
    let started = make_keys(&bed.0).and_then(|()| {
        let start = |i: usize| start_sshd(&bed.0, &addresses[i], 2222, Some(&namespaces.names[i]));
        Ok([start(0)?, start(1)?])
    });
    let _sshd = match started {
        Ok(sshd) => sshd,
        Err(why) => return not_run(&why),
    };
    let ssh = ssh_with(&bed.0, &[("a", &addresses[0], 2222), ("b", &addresses[1], 2222)]);
    let output = with_ranks(&mut bed.run(&["--hosts", "a:2,b:2", "--ssh", &ssh]), "gathers").output().unwrap();
    let out = text(&output.stdout);
    for rank in 0..4 {
        assert!(out.contains(&format!("[{rank}] rank {rank} of 4 on 2 hosts")), "{out}{}", text(&output.stderr));
    }
    assert!(output.status.success());
    // Rank 0 of the built-in command has no prefix.
    let mut bench = bed.run(&["--hosts", "a,b", "--ssh", &ssh, "--", "bench", "all_reduce", "--sizes", "1K", "--check"]);
    let output = bench.output().unwrap();
    let out = text(&output.stdout);
    assert!(out.contains("2 ranks on 2 hosts") && !out.contains("[0]"), "{out}{}", text(&output.stderr));
    let doctor = |json: &[&str]| {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_kolo"));
        doctor.args(["doctor", "--hosts", "a:4,b"]).args(json).env("KOLO_RUN_SSH", &ssh).env("KOLO_CACHE_DIR", &bed.0);
        let output = doctor.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let said = doctor(&[]);
    assert!(said.contains("\nok       links              at least ") && !said.contains("schedules visit"), "{said}");
    let all: serde_json::Value = serde_json::from_str(&doctor(&["--json"])).unwrap();
    let links = all["links"].as_array().unwrap();
    assert!(links.len() == 1 && links[0]["bytes_per_s"].as_f64().unwrap() > 0.0, "{all}");
    // An address that the hosts do not reach.
    let output = bed.run(&["--hosts", "a,b", "--ssh", &ssh, "--address", "127.0.0.1", "--", "true"]).output().unwrap();
    let said = text(&output.stderr);
    for host in ["a", "b"] {
        let problem = format!("kolo run: cannot start ranks on host {host}: it cannot reach the launcher's store at 127.0.0.1:");
        assert!(said.contains(&problem) && said.contains("give --address"), "{said}");
    }
}

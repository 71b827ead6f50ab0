//! `kolo run` on this machine: output, signals, secrets, and that nothing outlives a job.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::wait_until;
use crate::program::{Folder, failed, kolo, program, said, text};

#[test]
fn a_full_disk_is_named_and_ends_no_rank() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for lines in ["1", "100000"] {
        let mut command = program();
        command.args(["run", "-n", "2", "--", "seq", lines]).stdin(Stdio::null()).stdout(full());
        let ended = command.output().unwrap();
        let said = text(&ended.stderr);
        assert!(said.contains("standard output cannot be written: No space left on device"), "{said}");
        assert!(!said.contains("SIGPIPE") && ended.status.code() == Some(1), "{said}");
    }
}

#[test]
fn output_is_prefixed_by_rank() {
    let output = kolo(&["run", "-n", "3", "--", "sh", "-c", "echo out $KOLO_RANK of $KOLO_WORLD_SIZE; echo err >&2"]);
    assert!(output.status.success());
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] out 0 of 3", "[1] out 1 of 3", "[2] out 2 of 3"]);
    assert_eq!(err.lines().count(), 3);
    let plain = said(&["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "printf 'no newline'"]);
    assert_eq!(plain, "no newline\n");
}

/// A slow reader, such as `less`, gets all output that the ranks wrote before they ended.
#[test]
fn output_is_whole_however_slowly_it_is_read() {
    // More than a pipe holds, less than two.
    let mut child = start(&["run", "-n", "1", "--", "sh", "-c", "echo $$; exec seq 15000"]);
    let mut out = lines(child.stdout.take().unwrap());
    let pid = out.next().unwrap().replace("[0] ", "");
    assert_eq!(out.next().unwrap(), "[0] 1");
    ends(&pid);
    assert_eq!(out.last().unwrap(), "[0] 15000");
    assert!(child.wait().unwrap().success());
}

/// A process that a rank has started keeps the output open. The job ends with its ranks all the
/// same.
#[test]
fn a_job_ends_with_its_ranks_whatever_they_leave_running() {
    let out = said(&["run", "-n", "2", "--", "sh", "-c", "sleep 600 & echo $!"]);
    for pid in out.lines().map(|line| line.split(' ').nth(1).unwrap()) {
        assert!(Command::new("kill").arg(pid).status().unwrap().success());
    }
}

#[test]
fn every_job_has_its_own_name_and_secret() {
    let job = || said(&["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "echo $KOLO_JOB_ID $KOLO_SECRET"]);
    let (first, second) = (job(), job());
    assert_ne!(first, second);
    assert_eq!(first.trim().len(), 16 + 1 + 64);
}

/// The ranks get the name of the file, but not its content.
#[test]
fn a_secret_in_a_file_holds_for_the_job() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("kolo-run-secret-{}", std::process::id()));
    std::fs::write(&path, "0f".repeat(32)).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.arg("run").args(arguments).env("KOLO_SECRET_FILE", &path).env_remove("KOLO_SECRET");
        command.stdin(Stdio::null()).output().unwrap()
    };
    let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let refused = run(&["-n", "1", "--", "true"]);
    let err = text(&refused.stderr);
    assert!(!refused.status.success() && err.contains("KOLO_SECRET_FILE") && err.contains("chmod 600"), "{err}");
    mode(0o600);
    let told = run(&["-n", "1", "--no-prefix", "--", "sh", "-c", "echo $KOLO_SECRET_FILE [$KOLO_SECRET]"]);
    assert_eq!(text(&told.stdout), format!("{} []\n", path.display()), "{}", text(&told.stderr));
    // The ranks find each other with it.
    let bench = run(&["-n", "2", "--", "bench", "barrier", "--sizes", "8", "--warmup", "1"]);
    assert!(bench.status.success(), "{}{}", text(&bench.stdout), text(&bench.stderr));
    std::fs::remove_file(&path).unwrap();
}

/// The user believes that the job has a secret.
#[test]
fn a_secret_that_is_set_but_empty_starts_no_job() {
    for name in ["KOLO_SECRET", "KOLO_SECRET_FILE"] {
        let alone: &[&str] = &["bench", "barrier", "--sizes", "8", "--warmup", "1"];
        for arguments in [&["run", "-n", "1", "--", "true"], alone] {
            let mut command = program();
            command.args(arguments).env_remove("KOLO_SECRET").env(name, "").stdin(Stdio::null());
            let output = command.output().unwrap();
            let err = text(&output.stderr);
            assert!(!output.status.success(), "{arguments:?} with an empty {name}");
            assert!(err.contains(&format!("{name}=\"\": it is set but empty")), "{err}");
            assert!(err.contains(&format!("`unset {name}`")), "{err}");
        }
    }
}

#[test]
fn what_ranks_have_started_ends_with_the_job() {
    // Each rank is a shell that waits for another program.
    let script = "echo $$; sleep 600 & echo $!; if [ $KOLO_RANK = 1 ]; then exit 7; fi; wait";
    let output = kolo(&["run", "-n", "2", "--no-prefix", "--grace", "100ms", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7));
    let out = text(&output.stdout);
    assert_eq!(out.lines().count(), 4, "{out}");
    out.lines().for_each(ends);
}

#[test]
fn the_first_failure_ends_all_and_is_the_outcome() {
    let began = Instant::now();
    let script = "if [ $KOLO_RANK = 1 ]; then exit 7; fi; exec sleep 600";
    let (code, err) = failed(&["run", "-n", "3", "--grace", "0.1", "--", "sh", "-c", script]);
    assert_eq!(code, 7);
    assert!(
        err.contains("rank 1 (pid ") && err.contains("exited with status 7") && err.contains("the other ranks were stopped"),
        "{err}"
    );
    let script = "if [ $KOLO_RANK = 2 ]; then kill -9 $$; fi; exec sleep 600";
    let (code, err) = failed(&["run", "-n", "3", "--grace", "0.1", "--", "sh", "-c", script]);
    assert_eq!(code, 128 + 9);
    assert!(err.contains("rank 2") && err.contains("SIGKILL"), "{err}");
    assert!(began.elapsed() < Duration::from_secs(300));
}

#[test]
fn ranks_that_ignore_the_request_are_killed() {
    let script = "if [ $KOLO_RANK = 0 ]; then exit 1; fi; trap '' TERM; while true; do sleep 0.1; done";
    let (code, _) = failed(&["run", "-n", "2", "--grace", "0", "--", "sh", "-c", script]);
    assert_eq!(code, 1);
}

#[test]
fn signals_are_passed_on() {
    let script = "trap 'echo got it; exit 0' USR1; echo ready; while true; do sleep 0.05; done";
    let mut child = start(&["run", "-n", "2", "--", "sh", "-c", script]);
    let mut lines = lines(child.stdout.take().unwrap());
    assert!(lines.by_ref().take(2).all(|line| line.ends_with("ready")));
    assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(lines.filter(|line| line.ends_with("got it")).count(), 2);
    assert!(child.wait().unwrap().success());
}

/// The ranks of the built-in command end together, after a size.
#[test]
fn a_bench_that_is_interrupted_writes_what_it_has_measured() {
    let folder = Folder::new("bench");
    let json = folder.0.join("a.json");
    let sizes = ["8"; 10_000].join(",");
    let arguments = ["run", "-n", "2", "--", "bench", "all_reduce", "--iters", "1", "--sizes", &sizes, "--json"];
    let mut child = start(&[&arguments[..], &[json.to_str().unwrap()]].concat());
    let mut rows = lines(child.stdout.take().unwrap()).filter(|line| !line.starts_with('#'));
    assert_eq!(rows.by_ref().take(3).count(), 3);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let shown = 3 + rows.count();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(report["rows"].as_array().unwrap().len(), shown);
    assert!(shown < 10_000);
}

#[test]
fn a_bench_ends_at_a_signal_however_long_it_would_measure() {
    let mut child = start(&["bench", "all_reduce", "--sizes", "1M", "--iters", "1000000000"]);
    assert!(lines(child.stdout.take().unwrap()).any(|line| line.contains("(GB/s)")));
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    let told = "kolo: SIGTERM: a measurement still runs; another signal ends it at once\nkolo: stopped by SIGTERM\n";
    assert_eq!(err, told);
}

#[test]
fn a_launcher_that_is_told_to_stop_stops_its_ranks() {
    let (child, pids) = sleeping_ranks();
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15));
    assert!(text(&output.stderr).contains("stopped by SIGTERM"));
    for pid in pids {
        assert!(!Command::new("kill").args(["-0", &pid]).stderr(Stdio::null()).status().unwrap().success(), "{pid} lives");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let (mut child, pids) = sleeping_ranks();
    child.kill().unwrap();
    child.wait().unwrap();
    pids.iter().for_each(|pid| ends(pid));
}

/// The system ends the shells with the launcher, but not what they have started.
#[test]
fn what_ranks_have_started_does_not_outlive_a_launcher_that_is_killed() {
    let script = "trap '' USR1; sleep 600 & started=$!; trap 'echo ready' USR1; echo $started; while :; do wait; done";
    let mut child = start(&["run", "-n", "2", "--no-prefix", "--", "sh", "-c", script]);
    let mut out = lines(child.stdout.take().unwrap());
    let pids: Vec<String> = out.by_ref().take(2).collect();
    // A launcher that forwards signals has started all that it needs.
    assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    assert!(out.by_ref().take(2).all(|line| line == "ready"));
    child.kill().unwrap();
    child.wait().unwrap();
    pids.iter().for_each(|pid| ends(pid));
}

/// Returns the guard of a launcher, once it ignores signals.
#[cfg(target_os = "linux")]
fn guard_of(launcher: u32) -> String {
    let is_guard = |pid: &String| {
        let read = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let status = text(&read("status"));
        let field = |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
        // The signals with handlers.
        let caught = field("SigCgt:").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or_default();
        let all = [1, 2, 3, 15].iter().all(|signal| caught >> (signal - 1) & 1 == 1);
        all && field("PPid:") == Some(launcher.to_string()) && text(&read("cmdline")).contains("\0guard\0")
    };
    let deadline = Instant::now() + Duration::from_secs(240);
    loop {
        let processes = std::fs::read_dir("/proc").unwrap();
        let mut pids = processes.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        if let Some(guard) = pids.find(is_guard) {
            return guard;
        }
        assert!(Instant::now() < deadline, "no guard");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn signals_do_not_end_the_guard() {
    let folder = Folder::new("guard");
    let mut command = program();
    command.args(["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "sleep 600 & echo $!; wait"]);
    command.env("TMPDIR", &folder.0).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = lines(child.stdout.take().unwrap()).next().unwrap();
    let guard = guard_of(child.id());
    for signal in ["-HUP", "-INT", "-QUIT", "-TERM"] {
        assert!(Command::new("kill").args([signal, &guard]).status().unwrap().success());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    ends(&pid);
    becomes_empty(&folder);
}

/// Waits until the folder of a job has been removed.
#[cfg(target_os = "linux")]
fn becomes_empty(folder: &Folder) {
    wait_until("the folder is left", || folder.entries().is_empty());
}

/// Rank 9 kills the launcher, which is still starting ranks.
#[cfg(target_os = "linux")]
#[test]
fn nothing_outlives_a_launcher_that_is_killed_while_it_starts_ranks() {
    let (folder, started) = (Folder::new("starts"), Folder::new("started"));
    let script = "cd \"$1\"; [ $KOLO_RANK = 0 ] && { sleep 600 & echo $! > new; mv new pid; }; \
                  [ $KOLO_RANK = 9 ] && { until [ -e pid ]; do :; done; kill -KILL $PPID; }; exec sleep 600";
    let mut command = program();
    command.args(["run", "-n", "400", "--", "sh", "-c", script, "sh"]).arg(&started.0).env("TMPDIR", &folder.0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(!command.status().unwrap().success());
    ends(std::fs::read_to_string(started.0.join("pid")).unwrap().trim());
    becomes_empty(&folder);
}

/// A running command.
fn start(arguments: &[&str]) -> Child {
    let mut command = program();
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn lines(pipe: impl Read) -> impl Iterator<Item = String> {
    BufReader::new(pipe).lines().map(Result::unwrap)
}

/// A launcher with two ranks that sleep, and their processes.
fn sleeping_ranks() -> (Child, Vec<String>) {
    let mut child = start(&["run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep 600"]);
    let pids = lines(child.stdout.take().unwrap()).take(2);
    let pids = pids.map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect();
    (child, pids)
}

/// Waits until a process has ended.
fn ends(pid: &str) {
    wait_until(&format!("{pid} lives"), || {
        // A killed process may remain as a zombie until its new parent waits for it.
        std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default().contains(") Z ")
            || !Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status().unwrap().success()
    });
}

#[test]
fn rank_0_reads_what_is_piped_in() {
    let mut child = program().args(["run", "-n", "2", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"words\n").unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap().stdout), "[0] words\n");
}

#[test]
fn what_cannot_be_started_is_said() {
    let (code, err) = failed(&["run", "-n", "2", "--", "no-such-program"]);
    assert_eq!(code, 127);
    assert!(err.contains("no-such-program cannot be started"), "{err}");
    for arguments in [&["run", "-n", "2"][..], &["run", "-n", "0", "true"], &["run", "true"], &["run", "-n", "x", "true"]] {
        assert_eq!(failed(arguments).0, 2, "{arguments:?}");
    }
}

/// A script's name alone, and a script that may not be executed.
#[test]
fn how_a_script_is_started_is_said() {
    let folder = Folder::new("script");
    std::fs::write(folder.0.join("train.py"), "print(1)").unwrap();
    for (name, advice) in [("train.py", "write ./train.py"), ("./train.py", "make it executable")] {
        let output = program().current_dir(&folder.0).args(["run", "-n", "1", "--", name]).output().unwrap();
        let said = text(&output.stderr);
        assert!(said.contains(advice) && said.contains(&format!("python3 {name}")), "{said}");
    }
}

/// Rank 0 fails because rank 1 was killed, and the launcher learns of rank 0 first. The report
/// is the same in the other order.
#[test]
fn who_was_killed_counts_as_the_cause() {
    let script = "[ $KOLO_RANK = 0 ] && exit 1; sleep 0.3; kill -KILL $$";
    let (code, err) = failed(&["run", "-n", "2", "--grace", "240", "--", "sh", "-c", script]);
    assert_eq!(code, 137);
    assert!(err.contains("rank 1"), "{err}");
}

/// A rank is killed in the middle of a collective, and the survivors name it.
#[test]
fn survivors_name_the_culprit() {
    for (transport, copy_mode) in [("auto", "staged"), ("auto", "cma"), ("tcp", "auto")] {
        let bench = format!(
            "echo $$ >&2; KOLO_COPY_MODE={copy_mode} exec {} bench all_reduce --sizes 1M --iters 1000000 --transport {transport}",
            env!("CARGO_BIN_EXE_kolo")
        );
        let mut child = start(&["run", "-n", "3", "--grace", "60", "--", "sh", "-c", &bench]);
        // All ranks have connected when the head of the table appears.
        let mut out = lines(child.stdout.take().unwrap());
        assert!(out.next().unwrap().contains("3 ranks"));
        let mut err = lines(child.stderr.take().unwrap());
        let started: Vec<String> = err.by_ref().take(3).collect();
        let victim = started.iter().find_map(|line| line.strip_prefix("[2] ")).unwrap();
        assert!(Command::new("kill").args(["-KILL", victim]).status().unwrap().success());
        let rest: Vec<String> = err.collect();
        let named = rest.iter().filter(|line| line.contains("failed after") && line.contains(&format!("pid {victim}) "))).count();
        assert!(named >= 1, "{transport}: {rest:?}");
        assert!(rest.last().unwrap().contains("rank 2") && rest.last().unwrap().contains("SIGKILL"), "{rest:?}");
        assert_eq!(child.wait().unwrap().code(), Some(137));
    }
}

/// In a prefix, as packages install it. What the user preloads comes before it, unless that is NCCL, and a choice of
/// the user stays.
#[cfg(target_os = "linux")]
#[test]
fn ranks_load_the_library_in_place_of_nccl_that_is_installed_with_the_program() {
    let prefix = Folder::new("prefix");
    let program = prefix.0.join("bin/kolo");
    std::fs::create_dir(prefix.0.join("bin")).unwrap();
    crate::program::write_program(&program, &std::fs::read(env!("CARGO_BIN_EXE_kolo")).unwrap());
    let library = prefix.0.join("lib64/kolo/libnccl.so.2");
    // The loader complains about a file that is no library.
    let script = "echo \"$LD_PRELOAD $VLLM_NCCL_SO_PATH\"";
    let run = |more: &[&str]| {
        let arguments = [&["run", "-n", "2", "--no-prefix", "--nccl"], more, &["--", "sh", "-c", script]].concat();
        let output = Command::new(&program).args(arguments).env_remove("LD_PRELOAD").output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, err) = run(&[]);
    let none = format!("kolo run: --nccl: there is no libnccl.so.2 of kolo under {}/lib; ", prefix.0.display());
    assert!(code == Some(125) && out.is_empty() && err.starts_with(&none), "{code:?} {out} {err}");
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::write(&library, "").unwrap();
    let library = library.display();
    assert_eq!(run(&[]).1, format!("{library} {library}\n").repeat(2));
    let given = ["-x", "LD_PRELOAD=/other.so", "-x", "VLLM_NCCL_SO_PATH=/its.so"];
    assert_eq!(run(&given).1, format!("/other.so:{library} /its.so\n").repeat(2));
    let out = run(&["-x", "LD_PRELOAD=/its/libnccl.so.2"]).1;
    assert_eq!(out, format!("{library}:/its/libnccl.so.2 {library}\n").repeat(2));
}

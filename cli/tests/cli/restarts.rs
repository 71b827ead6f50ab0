//! Jobs that start again, files of what ranks write, and time to end.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use crate::program::{Folder, kolo, program, text};

/// Rank 1 fails until the restart of this number.
fn fails_until(restart: u32) -> String {
    format!(
        "echo start $TORCHELASTIC_RESTART_COUNT; [ $KOLO_RANK = 0 ] || [ $TORCHELASTIC_RESTART_COUNT -ge {restart} ] || exit 7"
    )
}

fn run(options: &[&str], script: &str) -> Output {
    kolo(&[&["run", "-n", "2"], options, &["--", "sh", "-c", script]].concat())
}

#[test]
fn all_ranks_start_again_until_they_succeed() {
    let output = run(&["--max-restarts", "3"], &fails_until(2));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    for restart in 0..3 {
        assert_eq!(out.matches(&format!("start {restart}")).count(), 2, "{out}");
    }
    assert!(err.contains("rank 1") && err.contains("all ranks start again (2 of 3 restarts)"), "{err}");
    let rows: Vec<Vec<&str>> = err.lines().rev().take(3).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.iter().rev().map(|row| (row[2], row[4])).collect::<Vec<_>>(), [("1", "7"), ("2", "7"), ("3", "0")], "{err}");
    assert!(rows[0][5..] == ["all", "ranks", "ended", "with", "status", "0"], "{err}");
}

#[test]
fn the_last_failure_is_that_of_the_job() {
    let output = run(&["--max-restarts", "1"], &fails_until(9));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{err}");
    assert_eq!(err.matches("start again").count(), 1, "{err}");
    // Without the option nothing starts again, and ranks are told nothing of it.
    let output = run(&[], "echo ${TORCHELASTIC_RESTART_COUNT-none}; exit 7");
    assert!(output.status.code() == Some(7) && text(&output.stdout).contains("none"), "{output:?}");
    assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
}

/// Starts a job whose ranks run until they are asked to end.
fn waiting(options: &[&str], script: &str) -> (Child, String) {
    let mut command = program();
    command.args(["run", "-n", "2"]).args(options).args(["--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Both ranks run.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.by_ref().take(2).all(|line| line.contains("runs")));
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    (child, rest.join("\n"))
}

#[test]
fn a_job_that_is_asked_to_end_does_not_start_again() {
    let script = "trap 'exit 3' TERM; echo runs; while :; do sleep 0.01; done";
    let (child, _) = waiting(&["--max-restarts", "9"], script);
    let output = child.wait_with_output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.code() == Some(143) && err.contains("stopped by SIGTERM") && !err.contains("again"), "{err}");
}

/// Ranks save what they have, each once, before they end.
#[test]
fn ranks_have_time_to_save_what_they_have() {
    let script = "trap 'sleep 4; echo saved; exit 0' TERM; echo runs; while :; do sleep 0.01; done";
    let (child, saved) = waiting(&["--kill-after", "4m"], script);
    assert_eq!(saved.matches("saved").count(), 2, "{saved}");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
}

#[test]
fn what_ranks_write_goes_into_files() {
    let folder = Folder::new("logs");
    let logs = folder.0.join("logs");
    let options = ["--log-dir", logs.to_str().unwrap(), "--max-restarts", "1"];
    let script = format!("echo err $KOLO_RANK >&2; {}", fails_until(1));
    let read = |name: &str| fs::read_to_string(logs.join(name)).unwrap();
    let output = run(&options, &script);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), String::new()), "{output:?}");
    assert!(!text(&output.stderr).contains("err "), "{output:?}");
    for rank in 0..2 {
        // A restart adds to the files.
        assert_eq!(read(&format!("rank-{rank}.out")), "start 0\nstart 1\n");
        assert_eq!(read(&format!("rank-{rank}.err")), format!("err {rank}\nerr {rank}\n"));
    }
    // The next job begins anew, and writes everything here, too.
    let output = run(&[&options[..2], &["--tee"]].concat(), "echo again $KOLO_RANK");
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] again 0", "[1] again 1"]);
    assert_eq!((read("rank-1.out"), read("rank-1.err")), ("again 1\n".to_owned(), String::new()));
    // The report of a built-in command is output of rank 0.
    let bench = ["run", "-n", "2", options[0], options[1], "--", "bench", "barrier", "--iters", "1"];
    assert!(kolo(&bench).status.success());
    assert!(read("rank-0.out").contains("2 ranks"), "{}", read("rank-0.out"));
    // A folder that cannot be made, and a full disk.
    let file = folder.0.join("file");
    fs::write(&file, "").unwrap();
    let output = run(&["--log-dir", file.to_str().unwrap()], "true");
    assert!(output.status.code() == Some(125) && text(&output.stderr).contains("--log-dir"), "{output:?}");
    let limited = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
    let script = "[ $KOLO_RANK -lt 2 ] || printf %9999s; echo line";
    let output = Command::new("sh")
        .args([
            "-c",
            limited,
            "sh",
            env!("CARGO_BIN_EXE_kolo"),
            "run",
            "-n",
            "3",
            options[0],
            options[1],
            "--",
            "sh",
            "-c",
            script,
        ])
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert!(err.contains("the file of rank 2's standard output cannot be written: File too large"), "{err}");
    assert_eq!(output.status.code(), Some(1));
}

/// Not one line of an earlier job is lost to a job that does not start, and nothing else to a job at all:
/// others may have put a link or a pipe where a file will be.
#[test]
fn what_is_in_files_stays_until_ranks_start() {
    let folder = Folder::new("logs-kept");
    let [victim, log, pipe] = ["victim", "rank-0.out", "rank-1.err"].map(|name| folder.0.join(name));
    let logs = ["--log-dir", folder.0.to_str().unwrap()];
    fs::write(&log, "of before\n").unwrap();
    let no_program = kolo(&[&["run", "-n", "2"], &logs[..], &["--", "/absent/program"]].concat());
    assert_eq!(no_program.status.code(), Some(127), "{no_program:?}");
    assert_eq!(fs::read_to_string(&log).unwrap(), "of before\n");
    fs::remove_file(&pipe).unwrap();
    fs::write(&victim, "theirs").unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let refused = |name: &str| {
        let output = run(&logs, "echo mine");
        let said = format!("{name} cannot be written: it is not a regular file");
        assert!(output.status.code() == Some(125) && text(&output.stderr).contains(&said), "{output:?}");
    };
    refused("rank-1.err");
    assert_eq!(fs::read_to_string(&log).unwrap(), "of before\n");
    fs::remove_file(&log).unwrap();
    std::os::unix::fs::symlink(&victim, &log).unwrap();
    refused("rank-0.out");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "theirs");
}

/// A later start would get what the first had left.
#[test]
fn only_the_first_start_reads_input() {
    let folder = Folder::new("input");
    fs::write(folder.0.join("input"), "line\n").unwrap();
    let input = fs::File::open(folder.0.join("input")).unwrap();
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 7; cat; echo end";
    let mut command = program();
    command.args(["run", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", script]).stdin(input);
    assert_eq!(text(&command.output().unwrap().stdout), "[0] end\n");
}

/// The folder is that of the launcher's working directory, before and after a restart.
#[test]
fn files_of_all_starts_are_in_one_folder() {
    let folder = Folder::new("logs-elsewhere");
    fs::create_dir(folder.0.join("work")).unwrap();
    let options = ["run", "-n", "2", "--log-dir", "logs", "--directory", "work", "--max-restarts", "1"];
    let mut command = program();
    command.current_dir(&folder.0).args(options).args(["--", "sh", "-c", &fails_until(1)]).stdin(Stdio::null());
    assert!(command.status().unwrap().success());
    assert_eq!(fs::read_to_string(folder.0.join("logs/rank-1.out")).unwrap(), "start 0\nstart 1\n");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    for (options, hint) in
        [(&["--tee"][..], "--log-dir"), (&["--max-restarts", "1", "--keep-going"], "--keep-going"), (&["-n", "3:2"], "as in 2:4")]
    {
        let output = kolo(&[&["run"], options, &["--", "true"]].concat());
        assert!(output.status.code() == Some(2) && text(&output.stderr).contains(hint), "{options:?}: {output:?}");
    }
}

//! `kolo run` on Windows: exit codes, and no process that outlives the launcher.
//!
//! The ranks are this program again: `kolo run` starts it with one test, [`be_a_rank`], which does
//! nothing otherwise.

use std::fs::OpenOptions;
use std::os::windows::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::wait_until;

/// The variables that tell a rank what to do, and with which file.
const TASK: &str = "KOLO_TEST_TASK";
const FILE: &str = "KOLO_TEST_FILE";

/// Returns this program as a rank.
fn rank(task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["run_windows::be_a_rank", "--exact", "--nocapture"]).env(TASK, task);
    command
}

fn launch(ranks: usize, task: &str) -> Command {
    let rank = rank(task);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["run", "-n", &ranks.to_string(), "--"]).arg(rank.get_program()).args(rank.get_args());
    command.env(TASK, task).stdin(Stdio::null());
    command
}

fn file(test: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kolo-{test}-{}", std::process::id()))
}

/// Opens a file alone; fails as long as another process has it open.
fn open_alone(path: &Path) -> std::io::Result<std::fs::File> {
    OpenOptions::new().write(true).create(true).truncate(false).share_mode(0).open(path)
}

#[test]
fn be_a_rank() {
    let is_rank = |number: &str| std::env::var("KOLO_RANK").is_ok_and(|rank| rank == number);
    let path = || PathBuf::from(std::env::var_os(FILE).unwrap());
    match std::env::var(TASK).as_deref() {
        Ok("holds") => {
            let _held = open_alone(&path()).unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
        // Rank 0 starts a program and waits for it.
        Ok("starts a program") if is_rank("0") => _ = rank("holds").status(),
        Ok("starts a program") => std::thread::sleep(Duration::from_secs(600)),
        Ok("fails beside a program") if is_rank("0") => _ = rank("holds").status(),
        Ok("fails beside a program") => {
            wait_until("the program has not started", || path().exists() && open_alone(&path()).is_err());
            std::process::exit(7);
        }
        Ok("large status") => std::process::exit(if is_rank("1") { 0x1234_5678 } else { 0 }),
        Ok("violation") if is_rank("1") => std::process::exit(0xc000_0005_u32 as i32),
        _ => {}
    }
}

#[test]
fn the_status_of_a_rank_is_that_of_the_launcher() {
    assert_eq!(launch(2, "nothing").status().unwrap().code(), Some(0));
    assert_eq!(launch(2, "large status").status().unwrap().code(), Some(0x1234_5678));
    let output = launch(2, "violation").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0xc000_0005_u32 as i32), "{text}");
    assert!(text.contains("was ended by an access violation (status 0xc0000005)"), "{text}");
}

/// The other rank is ended, and the program that it has started.
#[test]
fn a_failure_ends_the_programs_of_all_ranks() {
    let path = file("failure");
    let output = launch(2, "fails beside a program").env(FILE, &path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{text}");
    assert!(text.contains("kolo run: rank 1 (pid ") && text.contains("exited with status 7"), "{text}");
    wait_until("a program outlives the launcher", || open_alone(&path).is_ok());
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_launcher_that_is_killed_leaves_no_program() {
    let path = file("killed");
    let mut launcher = launch(2, "starts a program").env(FILE, &path).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the program has not started", || path.exists() && open_alone(&path).is_err());
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    wait_until("a program outlives the launcher", || open_alone(&path).is_ok());
    std::fs::remove_file(&path).unwrap();
}

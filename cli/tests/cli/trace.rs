//! `kolo trace` on what real processes leave behind when one of them is late, calls something else,
//! or is killed.
//!
//! The ranks are this program again: `kolo run` starts it with one test, [`be_a_rank`], which does
//! nothing otherwise.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp};

use crate::common::{PATIENCE, wait_until};
use crate::program::{Folder, everything};

/// The variable that tells a rank what to do.
const TASK: &str = "KOLO_TEST_TASK";

#[test]
fn be_a_rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    // The operations before the late rank must succeed within the same deadline.
    let timeout = if task == "late" { Duration::from_secs(5) } else { PATIENCE };
    let began = Instant::now();
    let builder = Communicator::builder().timeout(timeout).start_timeout(PATIENCE);
    let comm = if task == "tcp" { builder.transport(kolo::Transport::Tcp) } else { builder }.connect().unwrap();
    let folder = PathBuf::from(std::env::var_os("KOLO_TRACE_DIR").unwrap());
    let mut buf = vec![1.0f32; 1000];
    for _ in 0..5 {
        comm.all_reduce(&mut buf, ReduceOp::Max).unwrap();
    }
    let row = comm.split(comm.rank() % 2, 0).unwrap();
    row.barrier().unwrap();
    let rank = comm.rank();
    match &*task {
        "together" | "tcp" => {
            // Be later than any other delay of the machine, before and after this.
            if rank == 1 {
                std::thread::sleep(Duration::from_millis(700).max(2 * began.elapsed()));
            }
            comm.all_reduce(&mut [1u64], ReduceOp::Sum).unwrap();
            comm.send_recv(&[rank as u32], (rank + 1) % 3, &mut [0u32], (rank + 2) % 3).unwrap();
            comm.dump_trace(folder.join(format!("by-call-{rank}.json"))).unwrap();
            comm.barrier().unwrap();
        }
        "another" => {
            let result = match rank {
                2 => comm.broadcast(&mut buf, 0),
                _ => comm.all_reduce(&mut buf, ReduceOp::Max),
            };
            result.unwrap_err();
        }
        "late" => {
            if rank == 2 {
                // Call when the other ranks have given up.
                wait_until("a rank leaves no file", || ranks_files(&folder).len() >= 2);
            }
            comm.all_reduce(&mut buf, ReduceOp::Max).unwrap_err();
        }
        #[cfg(unix)]
        "killed" => {
            if rank == 2 {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
            }
            comm.all_reduce(&mut buf, ReduceOp::Max).unwrap_err();
        }
        "signal" => {
            if rank == 0 {
                // The other ranks wait in an operation, and write their operations so far.
                wait_until("a rank leaves no file", || ranks_files(&folder).len() == 3);
            }
            comm.barrier().unwrap();
        }
        other => panic!("{other}"),
    }
}

/// Returns the files that ranks have left.
pub(crate) fn ranks_files(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect();
    files.sort();
    files
}

/// Runs three ranks.
pub(crate) fn job(task: &str, folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["run", "-n", "3", "--grace", "240s", "--"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "trace::be_a_rank", "--nocapture"]).env(TASK, task).env("KOLO_TRACE_DIR", folder);
    command.stdin(Stdio::null());
    command
}

fn trace(files: &[PathBuf], more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kolo")).arg("trace").args(files).args(more).output().unwrap()
}

/// Returns the output of `kolo trace` for good files.
pub(crate) fn said(files: &[PathBuf]) -> String {
    let output = trace(files, &[]);
    assert!(output.status.success(), "{}", everything(&output));
    everything(&output)
}

#[test]
fn nothing_is_wrong_with_a_job_in_which_one_rank_is_late() {
    for task in ["together", "tcp"] {
        let folder = Folder::new(task);
        let output = job(task, &folder.0).output().unwrap();
        assert!(output.status.success(), "{}", everything(&output));
        let files = ranks_files(&folder.0);
        // Nothing failed, so only the requested files exist.
        assert_eq!(files.len(), 3, "{files:?}");
        let chrome = folder.0.join("chrome");
        let output = trace(std::slice::from_ref(&folder.0), &["--chrome", chrome.to_str().unwrap()]);
        let said = everything(&output);
        assert!(output.status.success() && said.contains("no disagreement"), "{said}");
        // No operation was on the memory of a device.
        assert!(!said.contains("device"), "{said}");
        // World: the connection, five all-reduces, the split, which takes two where ranks share
        // memory, one more all-reduce. The row of ranks 0 and 2: connection, barrier.
        let split = if task == "tcp" { 1 } else { 2 };
        assert!(said.contains(&format!("over {} collectives", 9 + split)), "{said}");
        let worst = said.lines().find(|line| line.contains("rank 1:")).unwrap();
        let late = format!("(world, seq {}, all_reduce u64 x 1 sum)", 6 + split);
        assert!(worst.contains(&late), "{said}");
        check_chrome(&chrome, split);
    }
}

/// `split` is the number of collectives of the split.
fn check_chrome(file: &Path, split: usize) {
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    for rank in 0..3 {
        let name = |event: &&&serde_json::Value| event["name"] == "process_name" && event["pid"] == rank;
        assert!(of("M").iter().find(name).unwrap()["args"]["name"].as_str().unwrap().starts_with(&format!("rank {rank} (")));
        let complete = of("X").into_iter().filter(|event| event["pid"] == rank).count();
        // Rank 1 is alone in its row and connects to no peer.
        assert_eq!(complete, if rank == 1 { 8 } else { 9 } + split, "rank {rank}");
    }
    assert!(of("X").iter().all(|event| event["ts"].as_f64().unwrap() >= 0.0 && event["dur"].as_f64().unwrap() >= 0.0));
    // The report shows that the other ranks waited for rank 1.
    let waited = |event: &&&serde_json::Value| event["args"]["seq"] == 6 + split && event["dur"].as_f64().unwrap() > 500e3;
    assert!(of("X").iter().filter(waited).count() >= 1, "{trace}");
    assert_eq!((of("b").len(), of("e").len()), (6, 6));
}

#[test]
fn a_rank_that_calls_another_thing_is_named() {
    let folder = Folder::new("another");
    let output = job("another", &folder.0).output().unwrap();
    assert!(output.status.success(), "{}", everything(&output));
    let files = ranks_files(&folder.0);
    assert_eq!(files.len(), 3, "{files:?}");
    let said = said(&files);
    assert!(said.contains("first disagreement: world, seq 8"), "{said}");
    assert!(said.contains("  ranks 0, 1: all_reduce f32 x 1000 max, failed after"), "{said}");
    assert!(said.contains("  rank 2: broadcast f32 x 1000 root=0, failed after"), "{said}");
    // Each file names the cause.
    assert!(said.contains(" on world: ") && said.contains("ranks disagree"), "{said}");
}

/// Windows does not say that one process was ended by another.
#[cfg(unix)]
#[test]
fn a_rank_that_was_killed_is_named_by_the_others() {
    let folder = Folder::new("killed");
    let output = job("killed", &folder.0).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9), "{}", everything(&output));
    let files = ranks_files(&folder.0);
    assert_eq!(files.len(), 2, "{files:?}");
    let said = said(&files);
    assert!(said.contains("files of ranks 0, 1") && said.contains("no file of rank 2"), "{said}");
    assert!(said.contains("names it: it was killed") && said.contains("has died"), "{said}");
    assert!(said.contains("first failure: world, seq 8") && said.contains("  rank 2 left no file"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_signal_has_files_written_and_interrupts_nothing() {
    let folder = Folder::new("signal");
    let mut command = job("signal", &folder.0);
    let launcher = command.env("KOLO_TRACE_SIGNAL", "1").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A rank without a handler would end at the signal. So send the signal when the rank has
    // connected, which shows in its mapped shared memory.
    let ranks = || children(launcher.id()).into_iter().filter(|pid| has_connected(*pid)).collect::<Vec<_>>();
    wait_until("a rank does not connect", || ranks().len() == 3);
    wait_until("a rank leaves no file", || {
        for pid in ranks() {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::USR1);
        }
        std::thread::sleep(Duration::from_millis(50));
        ranks_files(&folder.0).len() == 3
    });
    let output = launcher.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", everything(&output));
    let said = said(&ranks_files(&folder.0));
    assert!(said.contains("files of ranks 0 to 2"), "{said}");
}

#[cfg(unix)]
fn children(of: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let lists = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()).collect()
}

#[cfg(unix)]
fn has_connected(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("memfd:kolo"))
}

/// Ranks whose sentences differ in their times only share one.
#[test]
fn equal_sentences_are_said_once() {
    let folder = Folder::new("equal");
    std::fs::create_dir_all(&folder.0).unwrap();
    let mut comms = Communicator::in_process(4).unwrap();
    // It leaves.
    drop(comms.pop());
    let path = |rank: usize| folder.0.join(format!("rank{rank}.json"));
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || {
                assert_eq!(comm.barrier().unwrap_err().culprit(), Some(3));
                comm.dump_trace(path(comm.rank())).unwrap();
            });
        }
    });
    let said = said(&[0, 1, 2].map(path));
    let sentences: Vec<&str> = said.lines().filter(|line| line.contains(" on world: ")).collect();
    let [sentence] = sentences[..] else { panic!("{said}") };
    assert!(sentence.starts_with("ranks 0 to 2 on world: barrier seq=1 failed after "), "{said}");
    assert_eq!(said.matches("failed after").count(), 2, "{said}");
    // A terminal breaks no word of them.
    #[cfg(unix)]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.arg("trace").arg(&folder.0);
        let mut terminal = crate::top::Pty::start_in(command, (40, 80));
        assert!(terminal.program.wait().unwrap().success());
        let shown = terminal.all();
        // A time such as 29.3µs has more bytes than columns.
        let columns = |line: &str| line.trim_end().chars().count();
        assert!(said.lines().any(|line| columns(line) > 80) && shown.lines().all(|line| columns(line) <= 80), "{shown}");
        assert!(shown.split_whitespace().eq(said.split_whitespace()), "{shown}");
    }
}

#[test]
fn the_paths_on_devices_are_said() {
    let folder = Folder::new("devices");
    std::fs::create_dir_all(&folder.0).unwrap();
    let mut files = Vec::new();
    for comm in Communicator::in_process(4).unwrap() {
        let path = folder.0.join(format!("rank{}.json", comm.rank()));
        comm.dump_trace(&path).unwrap();
        // No device is here, so the counts of all ranks are 0. Rank 3 has taken another path than
        // ranks 0 and 1, and rank 2 has none.
        let none = r#""devices": {"whole": 0, "staged": 0, "in_place": 0, "through_areas": 0, "one_shot": 0, "copied": 0}"#;
        let counts = match comm.rank() {
            2 => none.to_owned(),
            3 => none.replace(r#""staged": 0"#, r#""staged": 8"#),
            _ => none.replace(r#""in_place": 0"#, r#""in_place": 6"#).replace(r#""through_areas": 0"#, r#""through_areas": 2"#),
        };
        let whole = std::fs::read_to_string(&path).unwrap();
        assert_eq!(whole.matches(none).count(), 1, "{whole}");
        std::fs::write(&path, whole.replace(none, &counts)).unwrap();
        files.push(path);
    }
    let said = said(&files);
    let section = "paths of operations on the memory of devices:\n  \
        world, ranks 0, 1: 6 in place, 2 through areas\n  \
        world, rank 3: 8 staged\n";
    assert!(said.ends_with(section), "{said}");
    let chrome = folder.0.join("chrome");
    assert!(trace(&files, &["--chrome", chrome.to_str().unwrap()]).status.success());
    let chrome = std::fs::read_to_string(chrome).unwrap();
    let output = trace(&files, &["--chrome", "-"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), chrome);
    assert!(String::from_utf8_lossy(&output.stderr).ends_with(section), "{}", everything(&output));
    assert!(chrome.contains("world, rank 0 of 4 (on devices: 6 in place, 2 through areas)"), "{chrome}");
    assert!(chrome.contains(r#""world, rank 2 of 4""#), "{chrome}");
}

#[test]
fn a_signal_needs_a_folder() {
    let builder = || Communicator::builder().rank(0).world_size(1).trace_signal(true);
    let error = builder().connect().unwrap_err().to_string();
    assert!(error.contains("KOLO_TRACE_DIR"), "{error}");
    let error = Communicator::builder().rank(0).world_size(1).trace_dir("/dev/null/x").connect().unwrap_err().to_string();
    assert!(error.contains("KOLO_TRACE_DIR") && error.contains("/dev/null/x"), "{error}");
}

/// A message that cannot be written must not end the analysis.
#[cfg(unix)]
#[test]
fn a_standard_error_that_cannot_be_written_ends_nothing() {
    let folder = Folder::new("silent");
    std::fs::create_dir_all(&folder.0).unwrap();
    let good = folder.0.join("good.json");
    for comm in Communicator::in_process(1).unwrap() {
        comm.dump_trace(&good).unwrap();
    }
    // A pipe whose reader has gone, and a full disk.
    let broken = || Stdio::from(std::io::pipe().unwrap().1);
    let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    for stderr in [broken(), full()] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        let output = command.arg("trace").arg(folder.0.join("absent.json")).arg(&good).stderr(stderr).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", everything(&output));
        assert!(everything(&output).contains("files of rank 0"), "{}", everything(&output));
    }
}

#[test]
fn files_that_cannot_be_used_are_said() {
    let folder = Folder::new("files");
    std::fs::create_dir_all(&folder.0).unwrap();
    let write = |name: &str, content: &str| {
        let path = folder.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let mut good = Vec::new();
    for comm in Communicator::in_process(2).unwrap() {
        let path = folder.0.join(format!("good{}.json", comm.rank()));
        comm.dump_trace(&path).unwrap();
        good.push(path);
    }
    let whole = std::fs::read_to_string(&good[0]).unwrap();
    let half = write("half.json", &whole[..whole.len() / 2]);
    for (file, hint) in [
        (half.clone(), "it was cut off"),
        (write("empty.json", ""), "it is empty"),
        (write("other.json", "{\"a\": 1}"), "no trace of kolo"),
        (write("newer.json", &whole.replace("\"kolo_trace\": 1", "\"kolo_trace\": 9")), "format 9"),
        (write("noise.json", "\u{1}\u{2}"), "damaged"),
        (folder.0.join("absent.json"), "cannot be read"),
    ] {
        let output = trace(std::slice::from_ref(&file), &[]);
        let said = everything(&output);
        assert!(!output.status.success() && said.contains(hint) && said.contains("no file that can be read"), "{hint}: {said}");
        assert!(said.contains(file.file_name().unwrap().to_str().unwrap()), "{said}");
    }
    // The usable files are analysed.
    let output = trace(&[half, good[1].clone()], &[]);
    let said = everything(&output);
    assert!(!output.status.success() && said.contains("files of rank 1") && said.contains("1 file could not be used"), "{said}");
    let other = write("run.json", &whole.replace("\"run\": \"", "\"run\": \"f"));
    let output = trace(&[other, good[1].clone()], &[]);
    assert!(everything(&output).contains("several runs"), "{}", everything(&output));
}

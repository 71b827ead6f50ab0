//! `kolo run` with programs that fail: which rank it names as the cause.
//!
//! The ranks are this program again: `kolo run` starts it with one test, [`be_a_rank`], which does
//! nothing otherwise.

use std::ffi::OsStr;
use std::io::BufRead;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use kolo::Communicator;

use crate::common::PATIENCE;
use crate::program::{Folder, text};

/// The variable that tells a rank what to do.
const TASK: &str = "KOLO_TEST_TASK";

/// The rank that is at fault.
const CULPRIT: usize = 1;

/// Processes whose end is awaited when this is dropped, so that the rank that drops it ends last.
#[derive(Default)]
struct EndsAfter(Vec<u32>);

impl Drop for EndsAfter {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        // The launcher waits for its ranks: none of them stays as a zombie.
        while self.0.iter().any(|pid| lives(*pid)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(unix)]
fn lives(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid as i32);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

#[cfg(windows)]
fn lives(pid: u32) -> bool {
    use windows_sys::Win32::Foundation::{CloseHandle, WAIT_TIMEOUT};
    use windows_sys::Win32::System::Threading::{OpenProcess, PROCESS_SYNCHRONIZE, WaitForSingleObject};

    // SAFETY: the call takes numbers.
    let process = unsafe { OpenProcess(PROCESS_SYNCHRONIZE, 0, pid) };
    if process.is_null() {
        return false;
    }
    // SAFETY: the handle was opened above, and nothing else has it.
    unsafe {
        let lives = WaitForSingleObject(process, 0) == WAIT_TIMEOUT;
        CloseHandle(process);
        lives
    }
}

/// The variable with the folder for temporary files.
const TEMPORARY: &str = if cfg!(windows) { "TMP" } else { "TMPDIR" };

fn connect() -> Communicator {
    Communicator::builder().timeout(PATIENCE).start_timeout(PATIENCE).connect().unwrap()
}

/// Returns the communicator with which a job continues after rank 0 has aborted the first one;
/// `None` for a rank that leaves the job.
fn recovered(comm: Communicator, task: &str) -> Option<Communicator> {
    if comm.rank() == 0 {
        comm.abort();
    } else {
        assert_eq!(comm.barrier().unwrap_err().culprit(), Some(0));
        if task == "shrinks" {
            return Some(comm.shrink().unwrap());
        }
    }
    drop(comm);
    (task == "reconnects").then(connect)
}

/// Runs three ranks in processes that inherit the variables of this rank.
fn run_an_inner_job() {
    let folder = Folder::new("inside");
    let ranks = [0, 1, 2].map(|rank| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "run::be_a_rank", "--nocapture"]).env(TASK, "inside").env("KOLO_RANK", rank.to_string());
        command.env("KOLO_STORE", format!("file://{}", folder.0.join("store").display())).env_remove("KOLO_STORE_SERVED");
        command.stdin(Stdio::null()).spawn().unwrap()
    });
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
}

/// One rank ends, and the others continue without it, as docs/failures.md advises.
fn go_on(comm: Communicator) {
    if comm.rank() == CULPRIT {
        std::process::exit(3);
    }
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit(), Some(CULPRIT));
    let comm = comm.shrink().unwrap();
    let mut ranks = vec![0; comm.world_size()];
    comm.all_gather(&[comm.rank() as u64], &mut ranks).unwrap();
    assert_eq!(ranks, [0, 1]);
    println!("went on");
}

/// One rank makes the call when the test has seen that the others warn.
fn be_late(comm: &Communicator) {
    let go = std::env::temp_dir().join("go");
    let deadline = Instant::now() + PATIENCE;
    while comm.rank() == CULPRIT && !go.exists() {
        assert!(Instant::now() < deadline, "nothing warns");
        std::thread::sleep(Duration::from_millis(5));
    }
    comm.barrier().unwrap();
    // The other ranks may not see it any more.
    let _ = std::fs::remove_file(go);
}

/// Installs a subscriber after kolo has logged by itself.
fn subscribe(first: Communicator) {
    drop(first);
    tracing::subscriber::set_global_default(Subscriber).unwrap();
    println!("subscribed");
    drop(connect());
}

/// Writes the message of each event.
struct Subscriber;

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Message;
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    println!("subscriber: {value:?}");
                }
            }
        }
        event.record(&mut Message);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn be_a_rank_of_an_inner_job(comm: &Communicator) {
    if comm.rank() != 2 {
        assert_eq!(comm.barrier().unwrap_err().culprit(), Some(2));
    }
}

/// Rank 0 listens where PyTorch's rank 0 serves its store, and all others connect to it.
fn meet_at_the_master() {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
        assert_eq!(number(name), number(&format!("KOLO_{name}")));
    }
    let address = format!("{}:{}", std::env::var("MASTER_ADDR").unwrap(), number("MASTER_PORT"));
    if number("RANK") == 0 {
        let listener = TcpListener::bind(address).unwrap();
        for _ in 1..number("WORLD_SIZE") {
            listener.accept().unwrap();
        }
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = TcpStream::connect(&address) {
        assert!(Instant::now() < deadline, "{address}: {error}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn be_a_rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    if task == "meets" {
        return meet_at_the_master();
    }
    std::env::set_current_dir("/").unwrap();
    // Dropped after the communicator: the other ranks fail and end before this one ends.
    let mut end = EndsAfter::default();
    let mut comm = connect();
    if task == "inside" {
        return be_a_rank_of_an_inner_job(&comm);
    }
    match &*task {
        "goes-on" => return go_on(comm),
        "one-is-late" => return be_late(&comm),
        "subscribes" => return subscribe(comm),
        "barrier" => return comm.barrier().unwrap(),
        _ => {}
    }
    if matches!(&*task, "reconnects" | "shrinks") {
        let Some(next) = recovered(comm, &task) else { return };
        comm = next;
    }
    let culprit = if task == "shrinks" { CULPRIT - 1 } else { CULPRIT };
    let mut pids = vec![0; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut pids).unwrap();
    if comm.rank() == culprit {
        pids.remove(culprit);
        end.0 = pids;
        match &*task {
            "holds-a-job" => {
                run_an_inner_job();
                drop(comm);
                drop(end);
                std::process::exit(3);
            }
            "panics" => panic!("the data of this rank is wrong"),
            "fails" | "reconnects" | "shrinks" => {
                drop(comm);
                drop(end);
                std::process::exit(3);
            }
            "leaves" => return,
            other => panic!("{other}"),
        }
    }
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit(), Some(culprit));
    // As a program whose `main` returns the error, or as one that unwraps it.
    if task == "fails" {
        panic!("{error}");
    }
    eprintln!("{error}");
    std::process::exit(1);
}

/// Has the launcher wait for what the ranks report.
const PATIENT: [&str; 2] = ["--grace", "240s"];

/// Runs three ranks, and returns what the launcher prints last.
fn job(task: &str) -> (Output, String) {
    job_with(&PATIENT, task)
}

fn job_with(options: &[&str], task: &str) -> (Output, String) {
    let folder = Folder::new(task);
    job_in(&folder.0, folder.0.as_os_str(), options, task)
}

/// Returns the command that runs three ranks in a working directory, with a folder for temporary
/// files.
fn command_in(directory: &Path, temporary: &OsStr, options: &[&str], task: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["run", "-n", "3"]).args(options).arg("--").arg(std::env::current_exe().unwrap());
    command.args(["--exact", "run::be_a_rank", "--nocapture"]).env(TASK, task).env(TEMPORARY, temporary).current_dir(directory);
    command.env_remove("KOLO_LOG").stdin(Stdio::null());
    command
}

/// Runs three ranks, and returns what the launcher prints last.
fn job_in(directory: &Path, temporary: &OsStr, options: &[&str], task: &str) -> (Output, String) {
    let output = command_in(directory, temporary, options, task).output().unwrap();
    let last = text(&output.stderr).lines().last().unwrap_or_default().to_owned();
    let left = std::fs::read_dir(directory.join(temporary)).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    assert!(left.is_empty(), "{left:?}");
    (output, last)
}

#[test]
fn survivors_go_on_if_they_may() {
    let (output, last) = job_with(&["--keep-going"], "goes-on");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!(text(&output.stdout).matches("went on").count(), 2, "{err}");
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains(") exited with status 3 after "), "{err}");
    assert!(last.ends_with(" s; 2 ranks ended with status 0"), "{err}");
    // All fail: none of them shrinks. The status is that of the last, and not of the rank at fault.
    let (output, last) = job_with(&["--keep-going"], "fails");
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{err}");
    assert!(last.contains("exited with status 101 after ") && last.contains("; rank 1 (pid "), "{err}");
    assert!(last.ends_with(" s; no rank ended with status 0"), "{err}");
}

/// They had the time to end.
#[test]
fn only_ranks_that_were_stopped_are_said_to_be_stopped() {
    let (output, last) = job("goes-on");
    assert!(last.starts_with("kolo run: rank 1 (pid ") && output.status.code() == Some(3), "{}", text(&output.stderr));
    assert!(last.ends_with(" s; the other ranks ended by themselves"), "{last}");
}

/// By the launcher, or by the first rank if the launcher does not have it. The ranks here are Rust
/// programs without a subscriber of `tracing`.
#[test]
fn a_misspelt_variable_is_told_once_for_each_job() {
    let folder = Folder::new("misspelt");
    let told = |log: &str, is_launchers: bool| {
        let exported = [&PATIENT[..], &["-x", "KOLO_TIMEUOT=3s"]].concat();
        let mut command = command_in(&folder.0, folder.0.as_os_str(), if is_launchers { &PATIENT } else { &exported }, "barrier");
        if is_launchers {
            command.env("KOLO_TIMEUOT", "3s");
        }
        let output = command.env("KOLO_LOG", log).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr).lines().filter(|line| line.contains("KOLO_TIMEUOT")).map(str::to_owned).collect::<Vec<_>>()
    };
    for (is_launchers, start, named) in [(true, "20", "WARN "), (false, "[0] ", "]: ")] {
        let lines = told("", is_launchers);
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with(start) && line.contains("  WARN kolo"), "{line}");
        let warning = format!("{named}kolo does not read KOLO_TIMEUOT (the nearest that it reads is KOLO_TIMEOUT); correct");
        assert!(line.contains(&warning), "{line}");
        assert_eq!(told("off", is_launchers), [""; 0]);
        assert_eq!(told("error", is_launchers), [""; 0]);
    }
}

#[test]
fn a_late_rank_is_logged_without_a_subscriber() {
    let folder = Folder::new("late");
    let mut command = command_in(&folder.0, folder.0.as_os_str(), &PATIENT, "one-is-late");
    let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufReader::new(launcher.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut said = String::new();
    for line in lines {
        said += &format!("{line}\n");
        if line.contains("WARN kolo[") && line.contains("]: barrier waits for a rank that ") && line.contains(" rank=1 ") {
            std::fs::write(folder.0.join("go"), "").unwrap();
        }
    }
    assert!(launcher.wait().unwrap().success() && said.contains("]: barrier waits"), "{said}");
}

#[test]
fn a_subscriber_that_is_installed_later_gets_the_events() {
    let folder = Folder::new("subscribes");
    let output = command_in(&folder.0, folder.0.as_os_str(), &PATIENT, "subscribes").env("KOLO_LOG", "info").output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    // Once before, by kolo, and once after, by the subscriber.
    assert_eq!(err.matches("INFO kolo[").count(), err.lines().count(), "{err}");
    assert_eq!(err.matches("]: connected all ranks rank=").count(), 3, "{err}");
    assert_eq!(out.matches("subscriber: connected all ranks").count(), 3, "{out}");
    let output = command_in(&folder.0, folder.0.as_os_str(), &PATIENT, "barrier").env("KOLO_LOG", "loud").output().unwrap();
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("KOLO_LOG=\"loud\": off, error, warn, info, debug or trace"), "{err}");
}

/// Programs for PyTorch start without torchrun, also where it starts `kolo run`.
#[test]
fn ranks_have_the_variables_of_pytorch() {
    let (output, _) = job("meets");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_rank_that_panics_is_named_although_it_ends_last() {
    let (output, last) = job("panics");
    let err = text(&output.stderr);
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains("exited with status 101"), "{err}");
    assert!(!last.contains("its error names"), "{last}");
    assert_eq!(output.status.code(), Some(101));
    assert_eq!(err.matches("panicked; its own output says where").count(), 2, "{err}");
}

/// The others unwrap their error. So a panic does not make a rank the cause.
#[test]
fn a_rank_that_fails_is_named_although_others_panic_before_it_ends() {
    let (output, last) = job("fails");
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains("exited with status 3"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_rank_that_fails_because_another_has_left_names_it() {
    let (output, last) = job("leaves");
    assert!(
        last.contains("exited with status 1 after") && last.contains("; its error names rank 1;"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(output.status.code(), Some(1));
}

/// Rank 0 aborts the first communicator, so the error of rank 1 names rank 0. In the second one, the
/// error of rank 0 names rank 1.
#[test]
fn an_error_from_before_a_reconnection_does_not_count() {
    let (output, last) = job("reconnects");
    let err = text(&output.stderr);
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains("exited with status 3"), "{err}");
    assert!(!last.contains("its error names"), "{last}");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn an_error_from_before_a_shrink_does_not_count() {
    let (output, last) = job("shrinks");
    let err = text(&output.stderr);
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains("exited with status 3"), "{err}");
    assert!(!last.contains("its error names"), "{last}");
    assert_eq!(output.status.code(), Some(3));
}

/// The error of rank 1 of the inner job names rank 2, and the error of rank 2 of the launcher's job
/// names rank 1.
#[test]
fn a_job_inside_a_rank_names_no_rank_of_the_launcher() {
    let (output, last) = job("holds-a-job");
    let err = text(&output.stderr);
    assert!(last.starts_with("kolo run: rank 1 (pid ") && last.contains("exited with status 3"), "{err}");
    assert!(!last.contains("its error names"), "{last}");
    assert_eq!(output.status.code(), Some(3));
}

/// The ranks change their working directory.
#[cfg(unix)]
#[test]
fn ranks_find_the_folder_for_temporary_files() {
    use std::os::unix::ffi::OsStrExt;

    let folder = Folder::new("temporary");
    for temporary in [&b""[..], b"relative", b"no-utf-8-\xff"].map(OsStr::from_bytes) {
        let absolute = folder.0.join(temporary);
        std::fs::create_dir_all(&absolute).unwrap();
        let temporary = if temporary.as_bytes().contains(&0xff) { absolute.as_os_str() } else { temporary };
        let (output, last) = job_in(&folder.0, temporary, &PATIENT, "fails");
        assert!(last.starts_with("kolo run: rank 1 (pid "), "{temporary:?}: {}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(3), "{temporary:?}");
    }
}

//! `kolo top` beside real jobs: in a terminal, and as an object of JSON.
//!
//! The ranks are this program again: `kolo run` starts it with one test, [`be_a_rank`], which does
//! nothing otherwise.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kolo::{Communicator, ReduceOp, Transport};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{PATIENCE, wait_until};

/// The variable that tells a rank what to do.
const TASK: &str = "KOLO_TEST_TASK";

/// The variable with the folder of a test.
const FOLDER: &str = "KOLO_TEST_FOLDER";

const RANKS: usize = 3;

/// The rank that is late or stopped.
const LATE: usize = 1;

/// Runs all-reduces until the test ends the job.
#[test]
fn be_a_rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let transport = if task == "tcp" { Transport::Tcp } else { Transport::Auto };
    let comm = Communicator::builder().timeout(PATIENCE).start_timeout(PATIENCE).transport(transport).connect().unwrap();
    if comm.rank() == 0 {
        let variables = ["KOLO_STORE", "KOLO_JOB_ID", "KOLO_SECRET"].map(|name| std::env::var(name).unwrap_or_default());
        write_whole(&folder.join("job"), &variables.join("\n"));
    }
    loop {
        if task == "late" && comm.rank() == LATE {
            wait_until("the test does not end", || folder.join("end").exists());
        }
        let mut ends = vec![u32::from(folder.join("end").exists()); 1000];
        comm.all_reduce(&mut ends, ReduceOp::Max).unwrap();
        if ends[0] == 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_whole(path: &Path, text: &str) {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    std::fs::write(&part, text).unwrap();
    std::fs::rename(part, path).unwrap();
}

/// A job of `kolo run`, which ends when this is dropped. Its folder is that for temporary files.
struct Job {
    launcher: Child,
    folder: PathBuf,
}

impl Job {
    fn start(name: &str, task: &str) -> Job {
        Job::start_in(&Job::folder(name), task)
    }

    fn folder(name: &str) -> PathBuf {
        // Paths of Unix sockets are short.
        let folder = std::env::temp_dir().join(format!("kt-{name}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    fn start_in(folder: &Path, task: &str) -> Job {
        Job { launcher: Job::launch(folder, task), folder: folder.to_owned() }
    }

    fn launch(folder: &Path, task: &str) -> Child {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.args(["run", "-n", &RANKS.to_string(), "--"]).arg(this).args(["--exact", "top::be_a_rank", "--nocapture"]);
        command.env(TASK, task).env(FOLDER, folder).env("TMPDIR", folder).stdout(Stdio::null()).stdin(Stdio::null());
        for name in ["KOLO_TOP_DIR", "KOLO_SECRET", "KOLO_SECRET_FILE", "KOLO_STORE", "KOLO_JOB_ID"] {
            command.env_remove(name);
        }
        command.spawn().unwrap()
    }

    /// Returns the store, the name of the job, and its secret.
    fn variables(&self) -> [String; 3] {
        let file = self.folder.join("job");
        wait_until("rank 0 does not write the variables", || file.exists());
        let text = std::fs::read_to_string(file).unwrap();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.try_into().unwrap()
    }

    /// Returns `kolo top` as the user of the job would start it.
    fn top(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.arg("top").args(arguments).env("TMPDIR", &self.folder).stdin(Stdio::null());
        for name in ["KOLO_TOP_DIR", "KOLO_SECRET", "KOLO_SECRET_FILE", "KOLO_STORE", "KOLO_JOB_ID"] {
            command.env_remove(name);
        }
        command
    }

    /// Looks until the view is as expected.
    fn wait_for_view(&self, arguments: &[&str], is_expected: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.top(&[&["--once", "--json"], arguments].concat()).output().unwrap();
            let view = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
            if is_expected(&view) {
                return view;
            }
            assert!(Instant::now() < deadline, "{view:#}\n{}", String::from_utf8_lossy(&output.stderr));
        }
    }

    fn end(&self) {
        std::fs::write(self.folder.join("end"), "").unwrap();
    }

    /// Ends the job, which succeeds.
    fn finish(mut self) {
        self.end();
        assert!(self.launcher.wait().unwrap().success(), "the job failed");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The guard of the launcher ends its ranks, whatever state they are in.
            let _ = self.launcher.kill();
        }
        let _ = self.launcher.wait();
        if self.folder.exists() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

fn says(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn signal(pid: u64, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// A program in a terminal of its own.
pub(crate) struct Pty {
    pub(crate) program: Child,
    screen: Arc<Mutex<vt100::Parser>>,
    written: Arc<Mutex<Vec<u8>>>,
    keyboard: File,
    terminal: rustix::fd::OwnedFd,
}

const SIZE: (u16, u16) = (30, 120);

impl Pty {
    fn start(command: Command) -> Pty {
        Pty::start_in(command, SIZE)
    }

    /// Starts a program in a terminal with a number of lines and of columns.
    pub(crate) fn start_in(mut command: Command, (lines, columns): (u16, u16)) -> Pty {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        // macOS cannot set this at once.
        rustix::io::fcntl_setfd(&keyboard, rustix::io::FdFlags::CLOEXEC).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let path = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal =
            rustix::fs::open(&path, rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY, rustix::fs::Mode::empty()).unwrap();
        let size = rustix::termios::Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&terminal, size).unwrap();
        let end = || Stdio::from(terminal.try_clone().unwrap());
        let program = command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm-256color").spawn().unwrap();
        let keyboard = File::from(keyboard);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(lines, if columns == 0 { 80 } else { columns }, 0)));
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to, all) = (keyboard.try_clone().unwrap(), screen.clone(), written.clone());
        // The thread ends with the test's process at the latest.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = from.read(&mut bytes) {
                if count == 0 {
                    break;
                }
                to.lock().unwrap().process(&bytes[..count]);
                all.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Pty { program, screen, written, keyboard, terminal }
    }

    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Returns all that the program has written. It has ended.
    pub(crate) fn all(&self) -> String {
        // What it wrote is read after its end: until nothing more comes, with a mark that comes last.
        rustix::io::write(&self.terminal, b"END OF OUTPUT").unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let all = String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned();
            if let Some((all, _)) = all.split_once("END OF OUTPUT") {
                return all.to_owned();
            }
            assert!(Instant::now() < deadline, "{all}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the screen shows this, and returns what it shows then.
    pub(crate) fn wait_for(&mut self, shown: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.text();
            if shown(&text) {
                return text;
            }
            assert!(Instant::now() < deadline, "the screen shows\n{text}");
            assert!(self.program.try_wait().unwrap().is_none() || shown(&self.text()), "the program ended with\n{text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn press(&mut self, key: &str) {
        self.keyboard.write_all(key.as_bytes()).unwrap();
    }
}

/// Returns the seconds before ` s, in `, for which `kolo top` says that a rank is waited for.
fn waited(screen: &str) -> f64 {
    let before = screen.split(" s, in ").next().unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// The promise is two seconds, by the clock of the ranks that wait. A busy machine may delay `kolo
/// top` itself, so one of several attempts has to keep it.
#[test]
fn a_stopped_rank_is_the_one_waited_for_within_two_seconds() {
    const ATTEMPTS: usize = 8;
    let job = Job::start("stop", "shm");
    let all_run = |view: &Value| view["ranks"].as_array().is_some_and(|ranks| ranks.iter().all(|rank| rank["silence"].is_null()));
    let view = job.wait_for_view(&[], all_run);
    let pid = view["ranks"][LATE]["pid"].as_u64().unwrap();
    let mut top = Pty::start(job.top(&[]));
    let settings = rustix::termios::tcgetattr(&top.terminal).unwrap();
    let mut best = f64::INFINITY;
    for _ in 0..ATTEMPTS {
        let screen = top.wait_for(|screen| screen.contains("no rank is waited for"));
        assert!(screen.contains("3 ranks on 1 host"), "{screen}");
        signal(pid, Signal::STOP);
        // The ranks answer one after the other, and the screen is drawn line by line.
        let screen = top.wait_for(|screen| {
            let row = screen.lines().find(|line| line.split_whitespace().nth(2) == Some("stopped"));
            ["rank 1 is waited for (", "its process is stopped", "by ranks 0, 2 for"].iter().all(|part| screen.contains(part))
                && row.is_some_and(|row| row.split_whitespace().next() == Some("1"))
        });
        best = best.min(waited(&screen));
        signal(pid, Signal::CONT);
        if best < 2.0 {
            break;
        }
    }
    assert!(best < 2.0, "the stopped rank was shown after {best} s");
    top.wait_for(|screen| screen.contains("no rank is waited for"));
    println!("the stopped rank was shown after {best} s");
    // It takes the keys, and gives the terminal back as it was.
    top.press("q");
    assert!(top.program.wait().unwrap().success());
    let after = rustix::termios::tcgetattr(&top.terminal).unwrap();
    assert_eq!(after.local_modes, settings.local_modes);
    wait_until("the screen does not begin", || top.written.lock().unwrap().windows(8).any(|bytes| bytes == b"\x1b[?1049l"));
    job.finish();
}

#[test]
fn the_terminal_is_given_back_at_a_signal_and_at_the_end_of_the_job() {
    let job = Job::start("end", "shm");
    job.variables();
    for ends in ["signal", "key", "job"] {
        let mut top = Pty::start(job.top(&["--interval", "100ms"]));
        top.wait_for(|screen| screen.contains("no rank is waited for"));
        match ends {
            "signal" => signal(top.program.id().into(), Signal::TERM),
            "key" => top.press("\x03"),
            _ => job.end(),
        }
        assert!(top.program.wait().unwrap().success(), "{ends}");
        wait_until("the screen does not begin", || top.written.lock().unwrap().windows(8).any(|bytes| bytes == b"\x1b[?1049l"));
        if ends == "job" {
            wait_until("the job does not end", || top.text().contains("has ended"));
        }
    }
    job.finish();
}

#[test]
fn a_script_reads_who_is_late() {
    let job = Job::start("late", "late");
    let both = serde_json::json!([0, 2]);
    let view = job.wait_for_view(&[], |view| {
        view["waited_for"].as_array().is_some_and(|waited| waited.len() == 1 && waited[0]["by"] == both)
    });
    assert_eq!((&view["kolo_top"], &view["world_size"]), (&Value::from(1), &Value::from(RANKS)));
    let waited = &view["waited_for"][0];
    assert_eq!(waited["rank"], LATE);
    assert_eq!((&waited["op"], &waited["comm"]), (&Value::from("all_reduce"), &Value::from("0")));
    assert!(
        waited["why"].as_str().unwrap().starts_with("it has not called the operation")
            || waited["why"].as_str().unwrap().starts_with("it has called no"),
        "{waited}"
    );
    let (first, late) = (&view["ranks"][0], &view["ranks"][LATE]);
    assert_eq!((&first["state"], &first["waits_for"]), (&Value::from("waiting"), &serde_json::json!([LATE])));
    let comm = &first["communicators"][0];
    assert_eq!(comm["running"][0]["bytes"], Value::from(4000), "{comm:#}");
    assert!(comm["running"][0]["age_s"].as_f64().unwrap() >= 0.1);
    assert_eq!(comm["begun"], comm["running"][0]["seq"]);
    assert!(comm["operations_per_s"].is_number() && comm["totals"][0]["begun"].is_number(), "{comm:#}");
    assert_eq!((&late["state"], &late["waits_for"]), (&Value::from("idle"), &serde_json::json!([])));
    assert!(late["communicators"][0]["begun"].as_u64() < comm["begun"].as_u64());
    // The same without JSON, and without a terminal.
    wait_until("no rank is waited for", || {
        let text = says(&job.top(&["--once"]).output().unwrap());
        assert!(!text.contains('\x1b'), "{text}");
        text.contains("rank 1 is waited for")
    });
    crate::manners::fits(&|| job.top(&["--once"]));
    let wide = says(&job.top(&["--once", "--wide"]).output().unwrap());
    assert!(wide.contains("byte/s") && wide.contains(" pid "), "{wide}");
    job.finish();
}

#[test]
fn links_show_their_bytes() {
    let job = Job::start("tcp", "tcp");
    let has_bytes = |link: &Value| link["sent_per_s"].as_f64().is_some_and(|rate| rate > 0.0) && link["kind"] == "tcp";
    let has_links = |view: &Value| {
        let ranks = view["ranks"].as_array().map(Vec::as_slice).unwrap_or_default();
        ranks.len() == RANKS && ranks.iter().all(|rank| rank["links"].as_array().is_some_and(|links| links.iter().any(has_bytes)))
    };
    let view = job.wait_for_view(&[], has_links);
    if cfg!(target_os = "linux") {
        let link = &view["ranks"][0]["links"][0];
        assert!(link["retransmits"].is_u64() && link["round_trip_s"].as_f64().unwrap() > 0.0, "{link:#}");
    }
    crate::manners::fits(&|| job.top(&["--once"]));
    job.finish();
}

/// Through the store, as a rank of the job would find it.
#[test]
fn the_secret_of_the_job_is_needed() {
    let job = Job::start("secret", "shm");
    let [store, name, secret] = job.variables();
    let arguments = ["--once", "--json", "--store", &store, "--job", &name];
    // A rank on a busy machine may answer too late.
    wait_until("a rank does not answer", || {
        let output = job.top(&arguments).env("KOLO_SECRET", &secret).output().unwrap();
        let view: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", says(&output)));
        assert_eq!((&view["job"], &view["world_size"]), (&Value::from(name.as_str()), &Value::from(RANKS)));
        view["ranks"][2]["silence"].is_null()
    });
    let wrong = "ab".repeat(32);
    for given in [Some(&wrong), None] {
        let mut command = job.top(&arguments);
        if let Some(secret) = given {
            command.env("KOLO_SECRET", secret);
        }
        let output = command.output().unwrap();
        let text = says(&output);
        assert!(!output.status.success() && output.stdout.is_empty(), "{text}");
        assert!(text.contains("secret") && !text.contains(&secret), "{text}");
    }
    job.finish();
}

#[test]
fn jobs_are_found_and_told_apart() {
    let folder = Job::folder("jobs");
    let mut one = Job::start_in(&folder, "shm");
    let files = |count: usize| {
        let is_file = |path: &Path| path.extension().is_some_and(|extension| extension == "attach");
        let mut found: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(&folder).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
            found.extend(std::fs::read_dir(entry.path()).into_iter().flatten().flatten().map(|file| file.path()));
        }
        found.retain(|path| is_file(path));
        (found.len() == count).then_some(found)
    };
    wait_until("the job has no file", || files(1).is_some());
    let first = files(1).unwrap().remove(0);
    // A file that a killed job left.
    let left = folder.join("kolo-run-left");
    std::fs::create_dir(&left).unwrap();
    let kept = left.join("kept.attach");
    std::fs::copy(&first, &kept).unwrap();
    let other = Job { launcher: Job::launch(&folder, "shm"), folder: folder.join("none") };
    wait_until("the other job has no file", || files(3).is_some());
    let output = one.top(&["--once", "--json"]).output().unwrap();
    let text = says(&output);
    assert!(!output.status.success() && text.contains("several jobs run here") && text.matches("run ").count() >= 2, "{text}");
    let name = text.lines().nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let view = one.wait_for_view(&["--job", &name], |view| view["job"] == name.as_str());
    assert_eq!(view["world_size"], Value::from(RANKS));
    let unknown = one.top(&["--once", "--job", "nonesuch"]).output().unwrap();
    assert!(!unknown.status.success() && says(&unknown).contains("no job \"nonesuch\""), "{}", says(&unknown));
    // Both end, and remove their files. The one that is left is of no job.
    one.end();
    wait_until("files of the jobs are left", || files(1).is_some_and(|files| files == [kept.clone()]));
    drop(other);
    assert!(one.launcher.wait().unwrap().success(), "the job failed");
    let none = one.top(&["--once"]).output().unwrap();
    assert!(!none.status.success() && says(&none).contains("no job of this user"), "{}", says(&none));
    one.finish();
}

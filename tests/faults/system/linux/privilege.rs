//! A program with rights that the user who started it does not have: row 71.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use kolo::Communicator;

use crate::job::{Job, configured, fresh};
use crate::log;
use crate::rank::say;
use crate::runner::Outcome::{self, NotRun, Passed};

/// The user of the process that the test starts: `nobody` on most systems.
const USER: u32 = 65534;

/// Connects alone. Which other options there are, the program says and not its environment.
pub(crate) fn be_privileged() {
    log::say_all();
    let user = std::fs::read_to_string("/proc/self/status").unwrap();
    let user = user.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    say(&format!("user {}", user.split_whitespace().nth(1).unwrap()));
    let alone = Communicator::builder().rank(0).world_size(1).connect();
    say(&format!("connected {:?}", alone.map(|comm| comm.world_size())));
    // Without variables of a launcher it is alone.
    let unnamed = Communicator::from_env();
    say(&format!("unnamed {:?}", unnamed.map(|comm| comm.world_size())));
}

/// A folder that is removed at the end of its test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program that belongs to root and is setuid makes no folder where the user who started it says.
pub(crate) fn setuid() -> Outcome {
    // SAFETY: the call has no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return NotRun("only root can make a program of root".to_owned());
    }
    let (store, name) = fresh();
    let folder = Folder(std::env::temp_dir().join(&name));
    std::fs::create_dir(&folder.0).unwrap();
    // The user can reach the program, and can write to the folder.
    std::fs::set_permissions(&folder.0, PermissionsExt::from_mode(0o777)).unwrap();
    let (program, traces) = (folder.0.join("program"), folder.0.join("traces"));
    // By another process: one that is started beside this test would hold the copy open for writing, and Linux starts
    // no such file.
    let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap();
    assert!(copied.success(), "the program cannot be copied");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    let mut command = configured(Command::new(&program), "privileged", 0, 2, &store, &name);
    command.uid(USER).gid(USER).env("KOLO_TRACE_DIR", &traces).env("KOLO_TOP_DIR", &traces).stderr(Stdio::inherit());
    let mut job = Job::empty();
    job.add(command);
    if job.hear(0, "user") != "0" {
        return NotRun("no program is setuid in the folder for temporary files".to_owned());
    }
    job.hear_log(0, &["WARN", "KOLO_TRACE_DIR is ignored", "setuid", "set the option in the program"]);
    assert_eq!(job.hear(0, "connected"), "Ok(1)");
    assert_eq!(job.hear(0, "unnamed"), "Ok(1)");
    job.hear(0, "end");
    assert!(!traces.exists(), "the program has made a folder where the user said");
    Passed(String::new())
}

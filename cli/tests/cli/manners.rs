//! What all commands have in common: output that cannot be written, signals, widths, and wrong command
//! lines.

use std::process::Stdio;

use crate::program::{Folder, program, text};

/// The command fails, says why, and leaves nothing behind.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_under_standard_output_is_told() {
    let folder = Folder::new("full");
    let bench = ["bench", "all_reduce", "--sizes", "8,16", "--iters", "1", "--warmup", "0"];
    for arguments in [
        &["--help"][..],
        &["plan", "all_reduce", "--ranks", "4"],
        &["plan", "all_reduce", "--ranks", "4", "--json"],
        &bench,
        &[&bench[..], &["--json", "-"]].concat(),
        &[&["run", "-n", "2", "--"], &bench[..]].concat(),
        &["compare", "--rounds", "1000000", "--sizes", "8", "--with", "copy"],
        &["compare", "barrier", "--rounds", "1", "--with", "roundtrip", "--plot", "-"],
        &["soak", "--minutes", "100000", "--seed", "1"],
        &["doctor"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = program();
        command.args(arguments).env("TMPDIR", &folder.0).env("PATH", "/nowhere").stdin(Stdio::null()).stdout(full);
        let output = command.output().unwrap();
        let err = text(&output.stderr);
        let expected = "kolo: standard output cannot be written: No space left on device (os error 28)";
        assert!(output.status.code() == Some(1) && err.lines().any(|line| line == expected), "{arguments:?}: {err}");
        assert_eq!(err.matches("cannot be written").count(), 1, "{arguments:?}: {err}");
        assert!(!err.contains("has died"), "{arguments:?}: {err}");
        assert!(folder.entries().is_empty(), "{arguments:?}: {:?}", folder.entries());
    }
}

/// A contestant that takes long to start is asked to end.
#[cfg(unix)]
#[test]
fn a_comparison_ends_while_a_contestant_starts() {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    let wait_for = |path: &Path| {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(240);
        while !path.exists() {
            assert!(std::time::Instant::now() < deadline, "{}", path.display());
            std::thread::yield_now();
        }
    };
    for (blocked, task) in [("-c", "barrier"), ("ranks", "barrier"), ("ranks", "start")] {
        let folder = Folder::new("start");
        let (temporary, programs) = (folder.0.join("temporary"), folder.0.join("bin"));
        std::fs::create_dir(&temporary).unwrap();
        std::fs::create_dir(&programs).unwrap();
        let script = "#!/bin/sh\n[ \"$1\" = -c ] && [ \"$BLOCKED\" != -c ] && exit\n\
                      trap 'echo > \"$FOLDER/told\"; exit 0' TERM\necho > \"$FOLDER/started\"\nwhile :; do sleep 0.05; done\n";
        let python = programs.join("python3");
        std::fs::write(&python, script).unwrap();
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o700)).unwrap();
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = program();
        command.args(["compare", task, "--with", "gloo"]).env("TMPDIR", &temporary).env("PATH", path);
        command.env("BLOCKED", blocked).env("FOLDER", &folder.0);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&folder.0.join("started"));
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(143), "kolo: stopped by SIGTERM\n".to_owned()));
        assert!(folder.0.join("told").exists(), "{blocked} {task}: it was killed");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{blocked} {task}");
    }
}

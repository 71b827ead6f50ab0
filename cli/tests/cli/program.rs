//! How the tests start the program, and what it says.

use std::process::{Command, Output, Stdio};

/// Returns the program. Its ranks have time to connect on a busy machine.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.env("KOLO_START_TIMEOUT", "15m");
    command
}

pub(crate) fn kolo(arguments: &[&str]) -> Output {
    program().args(arguments).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a command that succeeds.
pub(crate) fn said(arguments: &[&str]) -> String {
    let output = kolo(arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Exit status and standard error of a command that fails.
pub(crate) fn failed(arguments: &[&str]) -> (i32, String) {
    let output = kolo(arguments);
    assert!(!output.status.success(), "{arguments:?}: {}", text(&output.stdout));
    (output.status.code().unwrap(), text(&output.stderr))
}

/// A folder that is removed when this is dropped.
pub(crate) struct Folder(pub(crate) std::path::PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kolo-program-test-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn entries(&self) -> Vec<std::path::PathBuf> {
        std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

//! How the tests start the program, and what it says.

use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns the program. Its ranks have time to connect on a busy machine.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.env("KOLO_START_TIMEOUT", "15m");
    command
}

pub(crate) fn kolo(arguments: &[&str]) -> Output {
    program().args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// What a program has written, to both outputs.
pub(crate) fn everything(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
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

/// Writes a program for a test to start. Another process writes it: a process that is started beside this test holds
/// a copy of each open descriptor for a moment, and Linux starts no file that is open for writing ("Text file busy").
#[cfg(unix)]
pub(crate) fn write_program(path: &std::path::Path, content: &[u8]) {
    use std::io::Write;
    let mut writer = Command::new("sh");
    writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut writer = writer.spawn().unwrap();
    writer.stdin.take().unwrap().write_all(content).unwrap();
    assert!(writer.wait().unwrap().success(), "{} cannot be written", path.display());
}

/// The folder of a test, which remains only if the test fails.
pub(crate) struct Folder(pub(crate) std::path::PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Folder {
        // Tests that run at the same time may choose one name.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kolo-test-{test}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn entries(&self) -> Vec<std::path::PathBuf> {
        std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

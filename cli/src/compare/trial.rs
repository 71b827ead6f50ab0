//! What a comparison tries before a contestant starts, and the files that it writes for that.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::run::process::{Process, Signal, become_independent};

/// Runs a command to its end, or until the comparison is over.
pub(super) fn output(command: &mut Command, is_over: &dyn Fn() -> bool) -> std::io::Result<Output> {
    become_independent(command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let process = Process::new(&child);
    let reader = std::thread::spawn(move || child.wait_with_output());
    let mut is_stopped = false;
    while !reader.is_finished() {
        if is_over() && !std::mem::replace(&mut is_stopped, true) {
            process.signal(Signal::TERMINATE);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    reader.join().unwrap_or_else(|_| Err(std::io::Error::other("its output could not be read")))
}

/// Runs a program, and returns its output; an error is the last line of what it complains.
pub(super) fn said(command: &mut Command, is_over: &dyn Fn() -> bool) -> Result<String, String> {
    let output = output(command, is_over).map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(complaint.trim_end().lines().last().map_or_else(|| output.status.to_string(), str::to_owned))
}

/// Runs a trial, and returns the last line of its output.
pub(super) fn tried(command: &mut Command, is_over: &dyn Fn() -> bool) -> Result<String, String> {
    said(command, is_over).map(|said| said.trim_end().lines().last().unwrap_or_default().to_owned())
}

/// Writes the program of a contestant to the folder of the comparison.
pub(super) fn write_peer(path: &Path, source: &str) -> Result<(), String> {
    std::fs::write(path, source).map_err(|error| format!("{}: {error}", path.display()))
}

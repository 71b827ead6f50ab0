//! The files that commands write.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use crate::{HAS_FIGURES, print};

/// Returns whether a file is standard output.
fn is_output(file: &Path) -> bool {
    file == Path::new("-")
}

/// Checks before a measurement that its files can probably be written after it. If one of them is
/// standard output, lines for people go to standard error from now on.
pub(crate) fn check(json: Option<&Path>, plot: Option<&Path>) -> Result<(), String> {
    match [json, plot].into_iter().flatten().filter(|file| is_output(file)).count() {
        0 => {}
        1 => HAS_FIGURES.store(true, Relaxed),
        _ => return Err("only one file can be standard output (-)".to_owned()),
    }
    for file in [json, plot].into_iter().flatten().filter(|file| !is_output(file)) {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        if file.is_dir() {
            return Err(format!("{} cannot be written: it is a folder", file.display()));
        }
        if folder.is_some_and(|folder| !folder.is_dir()) {
            return Err(format!("{} cannot be written: there is no such folder", file.display()));
        }
    }
    if plot.is_some_and(|file| !is_output(file) && !file.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("svg"))) {
        return Err("plots are drawn as SVG; give a file name that ends in .svg".to_owned());
    }
    Ok(())
}

/// Writes figures as JSON.
pub(crate) fn write_json(file: &Path, figures: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_string_pretty(figures).map_err(|error| error.to_string())?;
    write(file, &(text + "\n"))
}

/// Writes a file, which may be standard output.
pub(crate) fn write(file: &Path, text: &str) -> Result<(), String> {
    if is_output(file) {
        print(text.as_bytes());
        return Ok(());
    }
    kolo::write_file_or_device(file, text.as_bytes()).map_err(|error| format!("{} cannot be written: {error}", file.display()))
}

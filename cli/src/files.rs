//! The files that commands write.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use kolo::Destination;
use serde::Serialize;

use crate::{Failure, HAS_FIGURES, print};

/// Returns whether a file is standard output.
fn is_output(file: &Path) -> bool {
    file == Path::new("-")
}

/// Checks before a measurement that its files can probably be written after it. If one of them is
/// standard output, lines for people go to standard error from now on.
pub(crate) fn check(json: Option<&Path>, plot: Option<&Path>) -> Result<(), Failure> {
    match [json, plot].into_iter().flatten().filter(|file| is_output(file)).count() {
        0 => {}
        1 => HAS_FIGURES.store(true, Relaxed),
        _ => return Err(Failure::Usage("only one file can be standard output (-)".to_owned())),
    }
    for file in [json, plot].into_iter().flatten().filter(|file| !is_output(file)) {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        if file.is_dir() {
            return Err(format!("{} cannot be written: it is a folder", file.display()).into());
        }
        if folder.is_some_and(|folder| !folder.is_dir()) {
            return Err(format!("{} cannot be written: there is no such folder", file.display()).into());
        }
    }
    if plot.is_some_and(|file| !is_output(file) && !file.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("svg"))) {
        return Err(Failure::Usage("plots are drawn as SVG; give a file name that ends in .svg".to_owned()));
    }
    Ok(())
}

/// Where a command writes what it has found out, at its end.
pub(crate) struct Output {
    file: PathBuf,
    /// `None` is standard output.
    destination: Option<Destination>,
}

impl Output {
    /// Opens a file, if one is asked for, before the work whose result it is to hold.
    pub(crate) fn open(file: Option<&Path>) -> Result<Option<Output>, String> {
        let open = |file: &Path| {
            let destination = (!is_output(file)).then(|| Destination::open(file)).transpose();
            destination.map(|destination| Output { file: file.to_owned(), destination }).map_err(|error| unwritten(file, &error))
        };
        file.map(open).transpose()
    }

    /// Writes figures as JSON.
    pub(crate) fn write_json(self, figures: &impl Serialize) -> Result<(), String> {
        let text = serde_json::to_string_pretty(figures).map_err(|error| error.to_string())?;
        self.write(&(text + "\n"))
    }

    pub(crate) fn write(self, text: &str) -> Result<(), String> {
        match self.destination {
            None => print(text.as_bytes()),
            Some(destination) => destination.write(text.as_bytes()).map_err(|error| unwritten(&self.file, &error))?,
        }
        Ok(())
    }
}

fn unwritten(file: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be written: {error}", file.display())
}

//! The files that commands write.

use std::path::Path;

use serde::Serialize;

/// Checks before a measurement that its files can probably be written after it.
pub(crate) fn check(json: Option<&Path>, plot: Option<&Path>) -> Result<(), String> {
    for file in [json, plot].into_iter().flatten() {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        if file.is_dir() {
            return Err(format!("{} cannot be written: it is a folder", file.display()));
        }
        if folder.is_some_and(|folder| !folder.is_dir()) {
            return Err(format!("{} cannot be written: there is no such folder", file.display()));
        }
    }
    if plot.is_some_and(|file| !file.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("svg"))) {
        return Err("plots are drawn as SVG; give a file name that ends in .svg".to_owned());
    }
    Ok(())
}

/// Writes figures as JSON.
pub(crate) fn write_json(file: &Path, figures: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_string_pretty(figures).map_err(|error| error.to_string())?;
    kolo::write_file_or_device(file, (text + "\n").as_bytes())
        .map_err(|error| format!("{} cannot be written: {error}", file.display()))
}

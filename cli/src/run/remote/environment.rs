//! What ranks on other hosts get of the launcher's environment.

use std::ffi::OsString;
use std::path::PathBuf;

use super::super::program::OF_RANK;

/// Variables that belong to the launcher or to one host. The secret is not among what is forwarded: the
/// agent gets it apart.
const NOT_FORWARDED: [&str; 6] =
    ["KOLO_FAILURE_FILE", "KOLO_RUN_REMOTE", "KOLO_RUN_SSH", "KOLO_SECRET", "KOLO_SECRET_FILE", "KOLO_TOPOLOGY"];

/// Returns the variables of this process that begin with `KOLO_`, and then those that were asked for.
pub(super) fn forwarded(exported: Vec<(OsString, OsString)>) -> Vec<(OsString, OsString)> {
    let is_forwarded = |name: &str| name.starts_with("KOLO_") && !NOT_FORWARDED.contains(&name) && !OF_RANK.contains(&name);
    let mut all: Vec<_> = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_forwarded)).collect();
    all.extend(exported);
    all
}

/// Returns the working directory, by the name that the user knows: on other hosts, a symbolic link
/// may lead elsewhere.
pub(super) fn directory() -> std::io::Result<PathBuf> {
    let here = std::env::current_dir()?;
    let named = std::env::var_os("PWD").map(PathBuf::from).filter(|path| path.is_absolute());
    Ok(named.filter(|path| path.canonicalize().is_ok_and(|path| path == here)).unwrap_or(here))
}

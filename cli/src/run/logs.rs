//! The files of `--log-dir`: of each rank one for its standard output, and one for its standard error.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// The files of the ranks.
pub(super) struct Logs {
    files: Vec<[File; 2]>,
    /// Whether the lines are also written where the launcher writes.
    pub(super) tee: bool,
}

impl Logs {
    /// Makes the files. They go on after a restart.
    pub(super) fn new(folder: &Path, ranks: usize, tee: bool, is_restart: bool) -> Result<Logs, String> {
        let open = |name: String| {
            let path = folder.join(name);
            let opened = if is_restart { File::options().append(true).create(true).open(&path) } else { File::create(&path) };
            opened.map_err(|error| format!("--log-dir: {} cannot be written: {error}", path.display()))
        };
        fs::create_dir_all(folder).map_err(|error| format!("--log-dir {}: {error}", folder.display()))?;
        let both = |rank| Ok([open(format!("rank-{rank}.out"))?, open(format!("rank-{rank}.err"))?]);
        Ok(Logs { files: (0..ranks).map(both).collect::<Result<_, String>>()?, tee })
    }

    pub(super) fn write(&self, rank: usize, is_error: bool, line: &[u8]) -> Result<(), String> {
        let mut file = &self.files[rank][usize::from(is_error)];
        file.write_all(line).map_err(|error| {
            let of = if is_error { "standard error" } else { "standard output" };
            format!("the file of rank {rank}'s {of} cannot be written: {error}")
        })
    }
}

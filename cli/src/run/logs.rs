//! The files of `--log-dir`: of each rank one for its standard output, and one for its standard error.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::OnceLock;

/// The files of the ranks.
pub(super) struct Logs {
    files: Vec<[File; 2]>,
    /// Whether the files go on after those of an earlier start.
    is_restart: bool,
    /// Whether the files could begin, once that was tried.
    begun: OnceLock<Result<(), String>>,
    /// Whether the lines are also written where the launcher writes.
    pub(super) tee: bool,
}

impl Logs {
    /// Opens the files. They still have what an earlier job has written.
    pub(super) fn new(folder: &Path, ranks: usize, tee: bool, is_restart: bool) -> Result<Logs, String> {
        let open = |name: String| {
            let path = folder.join(name);
            open(&path).map_err(|error| format!("--log-dir: {} cannot be written: {error}", path.display()))
        };
        fs::create_dir_all(folder).map_err(|error| format!("--log-dir {}: {error}", folder.display()))?;
        let both = |rank| Ok([open(format!("rank-{rank}.out"))?, open(format!("rank-{rank}.err"))?]);
        let files = (0..ranks).map(both).collect::<Result<_, String>>()?;
        Ok(Logs { files, is_restart, begun: OnceLock::new(), tee })
    }

    /// Has the files begin anew when ranks have started or the first line is written, or go on after those
    /// of an earlier start.
    pub(super) fn begin(&self) -> Result<(), String> {
        let begin = |mut file: &File| if self.is_restart { file.seek(SeekFrom::End(0)).map(drop) } else { file.set_len(0) };
        let begin = || self.files.iter().flatten().try_for_each(begin).map_err(|error| format!("--log-dir: {error}"));
        self.begun.get_or_init(begin).clone()
    }

    pub(super) fn write(&self, rank: usize, is_error: bool, line: &[u8]) -> Result<(), String> {
        self.begin()?;
        let mut file = &self.files[rank][usize::from(is_error)];
        file.write_all(line).map_err(|error| {
            let of = if is_error { "standard error" } else { "standard output" };
            format!("the file of rank {rank}'s {of} cannot be written: {error}")
        })
    }
}

/// Opens a file for writing, and makes it if there is none. Refuses a link, through which another user of
/// the folder could have the launcher overwrite a file, and a pipe, whose reader it would wait for.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    }
    let file = options.open(path).map_err(|error| match path.symlink_metadata() {
        Ok(there) if !there.is_file() => not_regular(),
        _ => error,
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_regular()) }
}

fn not_regular() -> io::Error {
    io::Error::other("it is not a regular file")
}

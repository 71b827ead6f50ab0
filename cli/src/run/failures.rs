//! What the ranks of a job report of their failures, in files of the launcher.
//!
//! The launcher names a file for each rank. There every kolo job of the rank's process, and of the
//! processes that it starts, adds a line when it opens a communicator and when one fails: the run,
//! its rank and the number of ranks, and the rank that the failure names. A job of the launcher's
//! ranks has lines in the files of several ranks. A job inside one rank has lines in the file of that
//! rank only.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::process::{self, temporary};

/// The folder with the file of each rank. It is removed when it is dropped.
pub(crate) struct FailureFolder(PathBuf);

/// Which other rank the last failure of a rank names, by the rank that failed.
pub(super) type Names = HashMap<usize, Name>;

/// The rank that a failure names.
pub(super) struct Name {
    pub(super) rank: usize,
    pub(super) written: SystemTime,
}

/// The file of a rank, and when it was written.
pub(super) struct Report {
    pub(super) text: String,
    pub(super) written: SystemTime,
}

/// One line of a file. The ranks are those of the run.
struct Entry {
    run: u64,
    rank: usize,
    /// The number of ranks of the run. Older versions of kolo do not write it.
    size: Option<usize>,
    culprit: Option<usize>,
}

impl Entry {
    fn parse(line: &str) -> Option<Entry> {
        let mut words = line.split(' ');
        let run = u64::from_str_radix(words.next()?, 16).ok()?;
        let rank = words.next()?;
        let (rank, size) = rank.split_once('/').map_or((rank, None), |(rank, size)| (rank, Some(size)));
        let (rank, size) = (rank.parse().ok()?, size.map(str::parse).transpose().ok()?);
        let culprit = words.next().map(str::parse).transpose().ok()?;
        Some(Entry { run, rank, size, culprit })
    }
}

impl FailureFolder {
    /// Returns the folder that a launcher has made for a job.
    pub(super) fn of(job: &str) -> io::Result<FailureFolder> {
        FailureFolder::path_of(job).map(FailureFolder)
    }

    /// Returns an absolute path, because ranks may change their working directory.
    fn path_of(job: &str) -> io::Result<PathBuf> {
        Ok(std::path::absolute(temporary())?.join(format!("kolo-run-{job}")))
    }

    /// Makes the folder. Without it, the rank that ends first counts as the cause of a failure.
    pub(super) fn new(job: &str) -> Option<FailureFolder> {
        let made = FailureFolder::path_of(job).and_then(|path| process::make_private_folder(&path).map(|()| path));
        if let Err(error) = &made {
            let folder = temporary();
            tracing::info!(%error, folder = %folder.display(), "ranks cannot report which rank their failures name");
        }
        made.ok().map(FailureFolder)
    }

    /// Returns the folders of the jobs that run on this machine, as far as this user can see them.
    pub(crate) fn of_all_jobs() -> io::Result<Vec<PathBuf>> {
        let sample = FailureFolder::path_of("")?;
        let (Some(parent), Some(prefix)) = (sample.parent(), sample.file_name()) else { return Ok(Vec::new()) };
        let mut folders = Vec::new();
        for entry in std::fs::read_dir(parent)? {
            let path = entry?.path();
            let is_of_job = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes()));
            if is_of_job && path.is_dir() {
                folders.push(path);
            }
        }
        folders.sort();
        Ok(folders)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the file of a rank.
    pub(super) fn file(&self, rank: usize) -> PathBuf {
        self.0.join(rank.to_string())
    }

    /// Reads the file of a rank.
    pub(super) fn report(&self, rank: usize) -> Option<Report> {
        let text = std::fs::read_to_string(self.file(rank)).ok()?;
        let written = std::fs::metadata(self.file(rank)).and_then(|file| file.modified()).ok()?;
        Some(Report { text, written })
    }
}

/// Returns, for each rank that has failed, the rank that its last error names. The last line of its file
/// counts. `ranks` is how many ranks the launcher has started.
pub(super) fn names(reports: &BTreeMap<usize, Report>, ranks: usize) -> Names {
    let mut last = Vec::new();
    let mut launched = HashMap::new();
    for (&rank, report) in reports {
        let entries: Vec<Entry> = report.text.lines().filter_map(Entry::parse).collect();
        launched.extend(entries.iter().map(|entry| ((entry.run, entry.rank), rank)));
        last.extend(entries.into_iter().last().map(|entry| (rank, entry, report.written)));
    }
    // If a rank has no file, its host may be gone. Then its number counts, if the run has the launcher's ranks.
    let is_launchers = |run: u64| launched.iter().filter(|((other, _), _)| *other == run).all(|((_, rank), by)| rank == by);
    let name = |(by, entry, written): (usize, Entry, SystemTime)| {
        let culprit = entry.culprit?;
        let without_file = || {
            let is_job = entry.size == Some(ranks) && culprit < ranks && is_launchers(entry.run);
            (is_job && !reports.contains_key(&culprit)).then_some(culprit)
        };
        let rank = launched.get(&(entry.run, culprit)).copied().or_else(without_file)?;
        (rank != by).then_some((by, Name { rank, written }))
    };
    last.into_iter().filter_map(name).collect()
}

impl Drop for FailureFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rank that each rank names, by the contents of the files.
    fn named<const RANKS: usize>(test: &str, files: [&str; RANKS]) -> [Option<usize>; RANKS] {
        let folder = FailureFolder::new(&format!("test-{test}-{}", std::process::id())).unwrap();
        files.iter().enumerate().for_each(|(rank, text)| std::fs::write(folder.file(rank), text).unwrap());
        let reports = (0..RANKS).filter_map(|rank| Some((rank, folder.report(rank)?))).collect();
        let names = super::names(&reports, RANKS);
        std::array::from_fn(|rank| names.get(&rank).map(|name| name.rank))
    }

    #[test]
    fn the_last_line_counts() {
        let files = ["a 0\na 0 1\na 0\na 0 2\n", "a 1\na 1 2\na 1\n", "a 2\n", ""];
        assert_eq!(named("last", files), [Some(2), None, None, None]);
    }

    #[test]
    fn ranks_of_another_run_are_those_of_the_launcher() {
        let files = ["a 0\nb 2\nb 2 1\n", "a 1\n", "a 2\nb 1\n"];
        assert_eq!(named("other", files), [Some(2), None, None]);
    }

    #[test]
    fn a_job_inside_a_rank_names_no_rank_of_the_launcher() {
        let files = ["a 0\nc 0\nc 1\nc 2\nc 0 2\nc 1 2\n", "a 1\n", "a 2\na 2 0\n"];
        assert_eq!(named("inside", files), [None, None, Some(0)]);
    }

    #[test]
    fn a_rank_without_a_file_is_named_if_the_run_has_the_launchers_ranks() {
        let reports = |files: &[(usize, &str)]| {
            let report = |text: &str| Report { text: text.to_owned(), written: SystemTime::UNIX_EPOCH };
            let reports = files.iter().map(|&(rank, text)| (rank, report(text))).collect();
            let mut names: Vec<_> = super::names(&reports, 3).into_iter().map(|(by, name)| (by, name.rank)).collect();
            names.sort_unstable();
            names
        };
        assert_eq!(reports(&[(0, "a 0/3\na 0/3 1\n"), (2, "a 2/3\na 2/3 1\n")]), [(0, 1), (2, 1)]);
        assert_eq!(reports(&[(0, "a 0/3\na 0/3 1\n")]), [(0, 1)]);
        // A run with other numbers, one inside rank 0, of two of the ranks, of others too, and of unknown size.
        assert_eq!(reports(&[(0, "a 2/3\na 2/3 1\n"), (2, "a 0/3\n")]), []);
        assert_eq!(reports(&[(0, "b 0/3\nb 1/3\nb 0/3 2\n")]), []);
        assert_eq!(reports(&[(0, "a 0/2\na 0/2 1\n")]), []);
        assert_eq!(reports(&[(0, "a 0/8\na 0/8 5\n"), (1, "a 1/8\n")]), []);
        assert_eq!(reports(&[(0, "a 0\na 0 1\n")]), []);
        assert_eq!(reports(&[(0, "a 0/3\na 0/3 3\n")]), []);
    }

    #[test]
    fn other_text_is_no_entry() {
        assert_eq!(named("text", ["a 0\na 0 1\nx y\n\n7\na 0 -1\n", "a 1\n"]), [Some(1), None]);
    }
}

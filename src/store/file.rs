//! A store in one file that all ranks reach: a header, then records, appended under a lock.
//!
//! ```text
//! header   "kolo-store 1\n", generation (16 bytes), the job's name, hash of all this
//! record   hash of the rest, key, value; the name, keys and values each preceded by their length
//! ```
//!
//! Rank 0 starts a new generation, so what a former run left is gone. Beside the file there is a lock that rank 0 holds while
//! the ranks connect: two jobs that start with one file at the same time are told so. When the ranks have connected, both
//! files are removed; a crash before that leaves them, and the next run replaces them.
//!
//! Nobody but the user can read the file, where the system has such permissions: ranks share their secret through it.
//!
//! A record that was cut off by a crash fails its hash: readers stop there, and the next writer overwrites it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Store, check, poll};
use crate::door::handshake::random;
use crate::error::StoreProblem;
use crate::sys;
use crate::types::mix;
use crate::wire::{Reader, Writer};

const MAGIC: &[u8] = b"kolo-store 1\n";

/// How long a file may be locked by another rank: locks last for one append, but file systems across hosts are slow.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The path in `file://<rest>`.
pub(super) fn path(rest: &str) -> Result<PathBuf, String> {
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    if !path.starts_with('/') {
        return Err("a file's URL has three slashes: file:///path".to_owned());
    }
    let mut letters = path[1..].chars();
    let has_drive = letters.next().is_some_and(|letter| letter.is_ascii_alphabetic()) && letters.next() == Some(':');
    let path = if has_drive && cfg!(windows) { &path[1..] } else { path };
    if path.ends_with('/') {
        return Err("it names a folder, not a file".to_owned());
    }
    Ok(PathBuf::from(path))
}

pub(super) struct FileStore {
    path: PathBuf,
    job: String,
    /// Held by rank 0 while the ranks connect.
    owner: Option<Ownership>,
    /// Nobody but this user can read the file.
    is_private: bool,
}

struct Ownership {
    path: PathBuf,
    /// The store's file is this job's, to be removed in the end.
    has_started: bool,
    // Closing it unlocks it.
    _lock: File,
}

impl FileStore {
    pub(super) fn open(path: &Path, owner: bool, job: &str, deadline: Instant) -> Result<FileStore, StoreProblem> {
        let mut store = FileStore { path: path.to_owned(), job: job.to_owned(), owner: None, is_private: false };
        if owner {
            store.owner = Some(store.own(deadline)?);
            let mut file = store.lock(true, deadline)?;
            let mut old = Vec::new();
            file.read_to_end(&mut old).map_err(StoreProblem::io("reading it"))?;
            if !old.is_empty() && !old.starts_with(MAGIC) {
                return Err(StoreProblem::Foreign("the file holds something else, which is left as it is".to_owned()));
            }
            if let Some(left) = Contents::parse(&old) {
                tracing::info!(path = %path.display(), job = left.job, "what a former run left in the store is replaced");
            }
            if sys::is_open_to_others(&file) {
                // Somebody may have opened it before, and would read on.
                std::fs::remove_file(path).map_err(StoreProblem::io("replacing it"))?;
                file = store.lock(true, deadline)?;
            }
            store.is_private = sys::make_private(&file);
            let header = header(random(), job);
            replace(&mut file, 0, &header).map_err(StoreProblem::io("starting it"))?;
            if let Some(owner) = &mut store.owner {
                owner.has_started = true;
            }
        }
        Ok(store)
    }

    /// Makes sure that no other rank 0 is starting a job with this file.
    fn own(&self, deadline: Instant) -> Result<Ownership, StoreProblem> {
        let mut path = self.path.clone().into_os_string();
        path.push(".lock");
        let path = PathBuf::from(path);
        loop {
            let file = sys::private(OpenOptions::new().read(true).write(true).create(true).truncate(false)).open(&path);
            let file = file.map_err(StoreProblem::io("creating its lock"))?;
            match file.try_lock() {
                // Whoever held it before may have removed it meanwhile; then it is nobody's lock any more.
                Ok(()) if sys::is_still_at(&file, &path) => {
                    return Ok(Ownership { path, has_started: false, _lock: file });
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let theirs = self.read(deadline).ok().flatten().map_or_else(|| "?".to_owned(), |contents| contents.job);
                    return Err(StoreProblem::InUse { job: theirs });
                }
                Err(TryLockError::Error(error)) => return Err(StoreProblem::io("locking it")(error)),
            }
        }
    }

    /// Opens and locks the file; for the owner, creates it.
    fn lock(&self, exclusively: bool, deadline: Instant) -> Result<File, StoreProblem> {
        let is_owner = self.owner.is_some();
        let file = sys::private(OpenOptions::new().read(true).write(true).create(is_owner).truncate(false)).open(&self.path);
        let file = file.map_err(StoreProblem::io("opening it"))?;
        let patience = LOCK_PATIENCE.max(deadline.saturating_duration_since(Instant::now()));
        let locked = poll(patience, || {
            let result = if exclusively { file.try_lock() } else { file.try_lock_shared() };
            match result {
                Ok(()) => Ok(Some(())),
                Err(TryLockError::WouldBlock) => Ok(None),
                Err(TryLockError::Error(error)) => Err(StoreProblem::io("locking it")(error)),
            }
        })?;
        locked.map(|()| file).ok_or_else(|| StoreProblem::io("locking it")(io::ErrorKind::TimedOut.into()))
    }

    /// What the file holds now, if it is a store at all yet.
    fn read(&self, deadline: Instant) -> Result<Option<Contents>, StoreProblem> {
        let mut file = match self.lock(false, deadline) {
            Ok(file) => file,
            Err(StoreProblem::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(problem) => return Err(problem),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(StoreProblem::io("reading it"))?;
        if !bytes.is_empty() && !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(StoreProblem::Foreign("the file holds something else".to_owned()));
        }
        Ok(Contents::parse(&bytes))
    }

    /// Waits until the file belongs to this job, and there is an answer in it.
    fn ask<T>(&self, timeout: Duration, answer: impl Fn(Contents) -> Option<T>) -> Result<Option<T>, StoreProblem> {
        let deadline = Instant::now() + timeout;
        let mut theirs = None;
        let found = poll(timeout, || {
            let Some(contents) = self.read(deadline)? else { return Ok(None) };
            if contents.job == self.job {
                theirs = None;
                return Ok(answer(contents));
            }
            // Perhaps a former run's, which rank 0 will replace.
            theirs = Some(contents.job);
            Ok(None)
        })?;
        match theirs {
            Some(theirs) => Err(StoreProblem::OtherJob { theirs, mine: self.job.clone() }),
            None => Ok(found),
        }
    }

    /// Appends a record, unless `keep` and the key is there; returns the key's value afterwards.
    fn append(&self, key: &str, value: &[u8], keep: bool, timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        check(key, value)?;
        // Rank 0 starts the file; until then there is nothing to append to.
        let started = self.ask(timeout, Some)?;
        if started.is_none() {
            return Err(StoreProblem::Unreachable { waited: timeout, last: "rank 0 has not started the file".to_owned() });
        }
        let mut file = self.lock(true, Instant::now() + timeout)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(StoreProblem::io("reading it"))?;
        let contents = Contents::parse(&bytes).filter(|contents| contents.job == self.job);
        let Some(contents) = contents else {
            return Err(StoreProblem::Foreign("another job took the file while this one used it".to_owned()));
        };
        if let Some(there) = contents.values.get(key).filter(|_| keep) {
            return Ok(there.clone());
        }
        replace(&mut file, contents.end as u64, &record(key, value)).map_err(StoreProblem::io("writing to it"))?;
        Ok(value.to_vec())
    }
}

impl Store for FileStore {
    fn is_private(&self) -> bool {
        self.is_private
    }

    fn url(&self) -> String {
        format!("file://{}", self.path.display())
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
        self.append(key, value, false, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        self.ask(timeout, |mut contents| contents.values.remove(key))
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        self.append(key, value, true, timeout)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if let Some(owner) = &self.owner {
            for path in [&self.path, &owner.path].into_iter().skip(usize::from(!owner.has_started)) {
                if let Err(error) = std::fs::remove_file(path) {
                    tracing::debug!(%error, path = %path.display(), "a store's file is left over");
                }
            }
        }
    }
}

/// Writes at an offset, cuts off the rest, and makes sure that other hosts can see it.
fn replace(file: &mut File, at: u64, bytes: &[u8]) -> io::Result<()> {
    file.set_len(at)?;
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(bytes.len() as u64, |hash, &byte| mix(hash, byte.into()))
}

fn header(generation: [u8; 16], job: &str) -> Vec<u8> {
    let mut writer = Writer([MAGIC, &generation].concat());
    writer.text(job);
    let hash = hash(&writer.0);
    writer.number(hash);
    writer.0
}

fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let mut payload = Writer::default();
    payload.text(key).bytes(value);
    let mut record = Writer::default();
    record.number(hash(&payload.0));
    record.0.extend(payload.0);
    record.0
}

/// What a file holds.
struct Contents {
    job: String,
    values: HashMap<String, Vec<u8>>,
    /// Where the last whole record ends.
    end: usize,
}

impl Contents {
    /// `None` without a whole header. A record that is not whole ends the rest.
    fn parse(bytes: &[u8]) -> Option<Contents> {
        let mut reader = Reader::new(bytes);
        reader.take(MAGIC.len()).filter(|&magic| magic == MAGIC)?;
        reader.take(16)?;
        let job = reader.text()?;
        let hashed = hash(&bytes[..reader.at()]);
        if reader.number()? != hashed {
            return None;
        }
        let mut contents = Contents { job, values: HashMap::new(), end: reader.at() };
        while let Some((key, value)) = next_record(bytes, &mut reader) {
            contents.values.insert(key, value);
            contents.end = reader.at();
        }
        Some(contents)
    }
}

fn next_record(bytes: &[u8], reader: &mut Reader<'_>) -> Option<(String, Vec<u8>)> {
    let expected = reader.number()?;
    let start = reader.at();
    let (key, value) = (reader.text()?, reader.bytes()?);
    (hash(&bytes[start..reader.at()]) == expected).then(|| (key, value.to_vec()))
}

/// Whatever a file holds: what is read of it is in it.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some(contents) = Contents::parse(bytes) else { return };
    assert!(contents.end <= bytes.len(), "a record reaches beyond the file");
    let held: usize = contents.values.iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(held + contents.job.len() <= bytes.len(), "more is read than there is");
}

/// A store with a record.
#[cfg(any(fuzzing, test))]
pub(crate) fn sample() -> Vec<u8> {
    [header([3; 16], "job"), record("generation", b"12"), record("12/rank/0", &[7; 40])].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_survive_a_crash_in_the_middle_of_the_next() {
        let mut bytes = header([3; 16], "job");
        bytes.extend(record("a", b"1"));
        let whole = bytes.len();
        bytes.extend(record("b", b"22"));
        for cut in whole..bytes.len() {
            let contents = Contents::parse(&bytes[..cut]).unwrap();
            assert_eq!((contents.end, contents.values.len()), (whole, 1), "cut at {cut}");
        }
        assert_eq!(Contents::parse(&bytes).unwrap().values["b"], b"22");
    }

    proptest! {
        #[test]
        fn damaged_files_are_read_without_harm(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
            real in any::<bool>(),
            flip in any::<(usize, u8)>(),
        ) {
            if real {
                let mut whole = header([1; 16], "job");
                whole.extend(record("key", &bytes));
                let at = flip.0 % whole.len();
                whole[at] ^= flip.1;
                bytes = whole;
            }
            if let Some(contents) = Contents::parse(&bytes) {
                prop_assert!(contents.end <= bytes.len());
            }
        }
    }
}

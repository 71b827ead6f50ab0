//! A store in one file that all ranks reach: a header, then records, each appended under a lock.
//!
//! ```text
//! header   "kolo-store 1\n", generation (16 bytes), the job's name, hash of all this
//! record   hash of the rest, key, value; the name, keys and values each preceded by their length
//! ```
//!
//! Readers take no lock: records are only appended, and a hash tells whole records from others. A reader keeps what it has read
//! and reads only what was appended since. A writer that is killed leaves a torn record at the end, where readers stop; the next
//! writer, which has the lock, overwrites it.
//!
//! Rank 0 replaces what a former run left by a new file with a new generation. Beside the file there is a lock, which rank 0 holds
//! while the ranks connect, and in which it writes the job's name. So every rank of two jobs that start with one file at the same
//! time returns an error. When the ranks have connected, rank 0 removes both files; a crash before that leaves them for the next run
//! to replace.
//!
//! Ranks share their secret through the file. So only its owner can read and write it, and ranks believe a file only if its owner
//! is the user that they run as.
//!
//! A file system may be on a network and may not answer. Therefore a helper thread makes all calls to it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Store, check};
use crate::bootstrap::listener::handshake::random;
use crate::error::StoreProblem;
use crate::sys::{self, Helper, NotOpened};
use crate::types::mix;
use crate::wire::{Reader, Writer};

const MAGIC: &[u8] = b"kolo-store 1\n";

/// The largest file that is read, in bytes.
const LARGEST_FILE: u64 = 256 << 20;

/// How long a call to a file system may take in any case: those across hosts are slow.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often a rank looks whether the lock of another job's file is held.
const LOCK_PAUSE: Duration = Duration::from_secs(1);

/// Bytes of a job's name that are read from a lock.
const LONGEST_NAME: u64 = 4096;

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

/// How long a rank waits before it looks into the file again: longer each time, so that many ranks that wait for rank 0 do not
/// take its processor. Rank 0, for which all wait, looks more often.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE_OF_RANK_0: Duration = Duration::from_millis(10);

/// A rank's access to the file. Its thread waits and counts the time; the helper calls the file system.
pub(super) struct FileStore {
    url: String,
    is_owner: bool,
    log: Arc<Mutex<Log>>,
    helper: Arc<Helper>,
    /// When the start ends: until then the file system may be silent.
    deadline: Instant,
    /// The file system has let a deadline pass: later calls do not wait for it again.
    is_hung: AtomicBool,
    pause: Mutex<Duration>,
}

/// What a look into the file brings.
enum Look<T> {
    Found(T),
    /// Nothing yet, and what to report if that stays so.
    NotYet(Option<StoreProblem>),
}

impl FileStore {
    pub(super) fn open(path: &Path, owner: bool, job: &str, deadline: Instant) -> Result<FileStore, StoreProblem> {
        let url = format!("file://{}", path.display());
        let helper = Helper::of(&url).map_err(StoreProblem::io("starting a helper thread"))?;
        let log = Log { path: path.to_owned(), job: job.to_owned(), view: View::default(), ownership: None, rival: None };
        let store = FileStore {
            url,
            is_owner: owner,
            log: Arc::new(Mutex::new(log)),
            helper,
            deadline,
            is_hung: AtomicBool::new(false),
            pause: Mutex::new(SHORTEST_PAUSE),
        };
        if owner {
            store.ask(deadline.saturating_duration_since(Instant::now()), Log::start)?;
        }
        Ok(store)
    }

    /// Calls the file system.
    fn call<T: Send + 'static>(
        &self,
        timeout: Duration,
        call: impl FnOnce(&mut Log) -> Result<T, StoreProblem> + Send + 'static,
    ) -> Result<T, StoreProblem> {
        let began = Instant::now();
        let deadline = match self.is_hung.load(Ordering::Relaxed) {
            true => began,
            false => self.deadline.max(began + timeout.max(PATIENCE)),
        };
        let log = self.log.clone();
        let result = self.helper.call(deadline, move || call(&mut log.lock()));
        self.is_hung.store(result.is_none(), Ordering::Relaxed);
        result.unwrap_or_else(|| Err(StoreProblem::Hung { waited: began.elapsed() }))
    }

    /// Looks until there is an answer or the timeout is over; less often the longer it takes.
    fn ask<T: Send + 'static>(
        &self,
        timeout: Duration,
        look: impl Fn(&mut Log) -> Result<Look<T>, StoreProblem> + Clone + Send + 'static,
    ) -> Result<Option<T>, StoreProblem> {
        let deadline = Instant::now() + timeout;
        let mut has_waited = false;
        loop {
            let problem = match self.call(timeout, look.clone())? {
                Look::Found(answer) => {
                    if has_waited {
                        *self.pause.lock() = SHORTEST_PAUSE;
                    }
                    return Ok(Some(answer));
                }
                Look::NotYet(problem) => problem,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return problem.map_or(Ok(None), Err);
            }
            let mut pause = self.pause.lock();
            // Ranks that were started together do not come back together.
            std::thread::sleep(pause.mul_f64(0.5 + f64::from(random()[0]) / 256.0).min(left));
            *pause = (*pause * 3 / 2).min(if self.is_owner { LONGEST_PAUSE_OF_RANK_0 } else { LONGEST_PAUSE });
            has_waited = true;
        }
    }

    /// Appends a record, unless `keep` and the key is there; returns the key's value afterwards.
    fn append(&self, key: &str, value: &[u8], keep: bool, timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        check(key, value)?;
        let (key, value): (Arc<str>, Arc<[u8]>) = (key.into(), value.into());
        let appended = self.ask(timeout, move |log| log.append(&key, &value, keep))?;
        appended.ok_or_else(|| StoreProblem::Unreachable { waited: timeout, last: "rank 0 has not started the file".to_owned() })
    }
}

impl Store for FileStore {
    /// Only the user that the ranks run as can read it, where the system has permissions of files.
    fn is_private(&self) -> bool {
        sys::has_file_permissions()
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreProblem> {
        self.append(key, value, false, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreProblem> {
        let key: Arc<str> = key.into();
        self.ask(timeout, move |log| log.value(&key))
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreProblem> {
        self.append(key, value, true, timeout)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if !self.is_owner {
            return;
        }
        let log = self.log.clone();
        let patience = if self.is_hung.load(Ordering::Relaxed) { Duration::ZERO } else { PATIENCE };
        if self.helper.call(Instant::now() + patience, move || log.lock().finish()).is_none() {
            tracing::warn!(store = self.url, "the file system does not answer; the store's file may be left over");
        }
    }
}

/// The file, as the helper's thread sees it.
struct Log {
    path: PathBuf,
    job: String,
    view: View,
    /// Of rank 0, while the ranks connect.
    ownership: Option<Ownership>,
    /// When this rank last looked whether the lock of another job's file is held, and the header of the file if it was.
    rival: Option<(Instant, Option<Vec<u8>>)>,
}

/// No other rank 0 starts a job with the file.
struct Ownership {
    path: PathBuf,
    /// The store's file is this job's, to be removed in the end.
    has_started: bool,
    // Closing it unlocks it.
    _lock: File,
}

impl Log {
    /// Replaces what a former run left by a file of this job.
    fn start(&mut self) -> Result<Look<()>, StoreProblem> {
        self.check_folder()?;
        let ownership = match self.own()? {
            Look::Found(ownership) => ownership,
            Look::NotYet(problem) => return Ok(Look::NotYet(problem)),
        };
        // From now on `finish` removes the lock.
        self.ownership = Some(ownership);
        if let Some(mut file) = open(OpenOptions::new().read(true), &self.path)? {
            let mut former = View::default();
            former.read(&mut file)?;
            tracing::info!(path = %self.path.display(), job = former.job, "what a former run left in the store is replaced");
            std::fs::remove_file(&self.path).map_err(StoreProblem::io("removing what a former run left"))?;
        }
        let created = sys::open_own(OpenOptions::new().write(true).create_new(true), &self.path);
        let is_kept = created.as_ref().is_ok_and(|file| sys::is_open_to_others(file).is_ok_and(|open| !open));
        let mut file = match created {
            Ok(file) if is_kept => file,
            Err(why @ NotOpened::System(_)) => return Err(not_opened("creating it")(why)),
            _ => {
                _ = std::fs::remove_file(&self.path);
                let why = "its file system does not keep permissions, so other users could read the secret of the job";
                return Err(StoreProblem::Untrusted(why.to_owned()));
            }
        };
        if let Some(ownership) = &mut self.ownership {
            ownership.has_started = true;
        }
        let written = file.write_all(&header(random(), &self.job)).and_then(|()| sys::close(file));
        written.map_err(StoreProblem::io("starting it"))?;
        Ok(Look::Found(()))
    }

    /// Makes sure that no other rank 0 is starting a job with this file. `NotYet` while other ranks look at the lock.
    fn own(&mut self) -> Result<Look<Ownership>, StoreProblem> {
        let path = self.lock_path();
        loop {
            let file = sys::open_own(OpenOptions::new().read(true).write(true).create(true).truncate(false), &path);
            let file = file.map_err(not_opened("creating its lock"))?;
            match file.try_lock() {
                // The rank 0 that held it before may have removed it meanwhile; then it locks nothing any more.
                Ok(()) if sys::is_still_at(&file, &path) => {
                    write_name(&file, &self.job).map_err(StoreProblem::io("writing to its lock"))?;
                    return Ok(Look::Found(Ownership { path, has_started: false, _lock: file }));
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => break self.why_locked(&file),
                Err(TryLockError::Error(error)) => return Err(StoreProblem::io("locking it")(error)),
            }
        }
    }

    /// Why rank 0 cannot lock the file: another rank 0 has locked it, or other ranks look at the lock, each for a moment.
    fn why_locked(&mut self, lock: &File) -> Result<Look<Ownership>, StoreProblem> {
        match lock.try_lock_shared() {
            Ok(()) => {
                let doing = "waiting for its lock, which other ranks look at; is a rank stopped?";
                Ok(Look::NotYet(Some(StoreProblem::io(doing)(io::ErrorKind::TimedOut.into()))))
            }
            Err(TryLockError::WouldBlock) => {
                let known = self.look().is_ok() && self.view.is_started();
                let theirs = if known { self.view.job.clone() } else { String::new() };
                Err(StoreProblem::InUse { theirs, mine: self.job.clone() })
            }
            Err(TryLockError::Error(error)) => Err(StoreProblem::io("locking it")(error)),
        }
    }

    fn lock_path(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".lock");
        path.into()
    }

    /// Rank 0 creates the file, not its folder: where the folder cannot take a file, no rank needs to wait for one.
    fn check_folder(&self) -> Result<(), StoreProblem> {
        let Some(folder) = self.path.parent() else { return Ok(()) };
        let problem = |source| StoreProblem::Folder { folder: folder.display().to_string(), source: Arc::new(source) };
        sys::check_folder(folder).map_err(problem)
    }

    /// Brings the view up to date. The file is opened anew each time: that is when network file systems ask their server.
    fn look(&mut self) -> Result<(), StoreProblem> {
        match open(OpenOptions::new().read(true), &self.path)? {
            Some(mut file) => match self.view.read(&mut file) {
                // On some systems the lock of a writer keeps readers out for a moment.
                Err(StoreProblem::Io { source, .. }) if sys::is_locked_out(&source) => Ok(()),
                result => result,
            },
            None => {
                self.view = View::default();
                self.check_folder()
            }
        }
    }

    /// Why the view is not of use, if so: there is no file yet, or it is another job's, perhaps a former run's that rank 0 will
    /// replace.
    ///
    /// # Errors
    ///
    /// The other job is starting with the file.
    fn not_ours<T>(&mut self) -> Result<Option<Look<T>>, StoreProblem> {
        if !self.view.is_started() {
            return Ok(Some(Look::NotYet(None)));
        }
        if self.view.job == self.job {
            return Ok(None);
        }
        let mine = self.job.clone();
        if let Some(theirs) = self.starting() {
            return Err(StoreProblem::InUse { theirs, mine });
        }
        Ok(Some(Look::NotYet(Some(StoreProblem::OtherJob { theirs: self.view.job.clone(), mine }))))
    }

    /// The other job whose rank 0 holds the lock of its file, if there is one. This job's rank 0 replaces the file when it has locked it, which
    /// may take long. So the lock is another's if it is held at two looks with the same file between them, and does not name this job.
    fn starting(&mut self) -> Option<String> {
        if self.ownership.is_some() || self.rival.as_ref().is_some_and(|(looked, _)| looked.elapsed() < LOCK_PAUSE) {
            return None;
        }
        let lock = sys::open_own(OpenOptions::new().read(true), &self.lock_path()).ok();
        // Read afterwards: the rank 0 that holds it writes its job's name when it has locked it.
        let locked = lock.filter(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)));
        let other = locked.and_then(|file| names_another(&file, &self.job));
        let held = other.is_some().then(|| self.view.header.clone());
        let (_, before) = self.rival.replace((Instant::now(), held.clone())).unwrap_or((Instant::now(), None));
        // On some systems the lock keeps readers out: then the file's job is the one that is known.
        other.filter(|_| held == before).map(|name| if name.is_empty() { self.view.job.clone() } else { name })
    }

    fn value(&mut self, key: &str) -> Result<Look<Vec<u8>>, StoreProblem> {
        self.look()?;
        let not_ours = self.not_ours()?;
        let found = || self.view.values.get(key).map_or(Look::NotYet(None), |value| Look::Found(value.clone()));
        Ok(not_ours.unwrap_or_else(found))
    }

    fn append(&mut self, key: &str, value: &[u8], keep: bool) -> Result<Look<Vec<u8>>, StoreProblem> {
        let Some(mut file) = open(OpenOptions::new().read(true).write(true), &self.path)? else {
            return self.check_folder().map(|()| Look::NotYet(None));
        };
        // Only a store of this job is locked, and most of it is read before.
        self.view.read(&mut file)?;
        if let Some(not_ours) = self.not_ours()? {
            return Ok(not_ours);
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let doing = "waiting for its lock, which another process holds; is a rank stopped?";
                return Ok(Look::NotYet(Some(StoreProblem::io(doing)(io::ErrorKind::TimedOut.into()))));
            }
            Err(TryLockError::Error(error)) => return Err(StoreProblem::io("locking it")(error)),
        }
        if !sys::is_still_at(&file, &self.path) {
            return Ok(Look::NotYet(None));
        }
        self.view.read(&mut file)?;
        if let Some(there) = self.view.values.get(key).filter(|_| keep) {
            return Ok(Look::Found(there.clone()));
        }
        let record = record(key, value);
        let written = write(&mut file, self.view.end, &record).and_then(|()| sys::close(file));
        written.map_err(StoreProblem::io("writing to it"))?;
        self.view.take_in(&record);
        Ok(Look::Found(value.to_vec()))
    }

    /// Removes what rank 0 has made.
    fn finish(&mut self) {
        let Some(ownership) = self.ownership.take() else { return };
        for path in [&self.path, &ownership.path].into_iter().skip(usize::from(!ownership.has_started)) {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::debug!(%error, path = %path.display(), "a store's file is left over");
            }
        }
    }
}

/// Opens a file that no other user can have written; `None` if there is none, or if another host is about to give it up.
fn open(options: &mut OpenOptions, path: &Path) -> Result<Option<File>, StoreProblem> {
    match sys::open_own(options, path) {
        Ok(file) => Ok(Some(file)),
        Err(NotOpened::System(error)) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::WouldBlock) => Ok(None),
        Err(why) => Err(not_opened("opening it")(why)),
    }
}

/// Writes the name of the job that holds a lock. Network file systems write it back when a descriptor is closed.
fn write_name(mut lock: &File, job: &str) -> io::Result<()> {
    lock.set_len(0)?;
    lock.write_all(job.as_bytes())?;
    sys::close(lock.try_clone()?)
}

/// The job that a lock names, if that is another than `job`; empty if it cannot be read. A lock that names none has just been taken,
/// or was left by a run that crashed.
fn names_another(lock: &File, job: &str) -> Option<String> {
    let mut name = Vec::new();
    match lock.take(LONGEST_NAME).read_to_end(&mut name) {
        Ok(_) if name.is_empty() || name == job.as_bytes() => None,
        Ok(_) => Some(String::from_utf8_lossy(&name).into_owned()),
        Err(_) => Some(String::new()),
    }
}

fn not_opened(doing: &'static str) -> impl FnOnce(NotOpened) -> StoreProblem {
    move |why| match why {
        NotOpened::System(error) => StoreProblem::io(doing)(error),
        NotOpened::Untrusted(why) => StoreProblem::Untrusted(why),
    }
}

/// Writes a record at the end of the last whole one, in place of a torn one that may follow. Not synchronised with a disk: no
/// run needs what a crashed one has written, and network file systems write back when the file is closed.
fn write(file: &mut File, at: u64, record: &[u8]) -> io::Result<()> {
    if file.metadata()?.len() > at {
        file.set_len(at)?;
    }
    file.seek(SeekFrom::Start(at))?;
    file.write_all(record).inspect_err(|_| _ = file.set_len(at))
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

/// What has been read of a file.
#[derive(Debug, Default, PartialEq)]
struct View {
    /// Its bytes tell this file from one that replaces it; empty until it has been read.
    header: Vec<u8>,
    job: String,
    values: HashMap<String, Vec<u8>>,
    /// Where the last whole record ends.
    end: u64,
}

impl View {
    fn is_started(&self) -> bool {
        !self.header.is_empty()
    }

    /// Reads what was appended since the last time; everything, if this is another file now.
    fn read(&mut self, file: &mut File) -> Result<(), StoreProblem> {
        let failed = || StoreProblem::io("reading it");
        let len = file.metadata().map_err(failed())?.len();
        if len > LARGEST_FILE {
            return Err(StoreProblem::Foreign(format!("the file has {len} bytes")));
        }
        // What others could read is no store of kolo's yet: rank 0 replaces it.
        let is_open = sys::is_open_to_others(file).map_err(failed())?;
        if is_open || len < self.end || !self.is_of(file).map_err(failed())? {
            *self = View::default();
        }
        if is_open && len == 0 {
            return Ok(());
        }
        let mut bytes = Vec::new();
        let appended = file.seek(SeekFrom::Start(self.end)).and_then(|_| file.take(LARGEST_FILE).read_to_end(&mut bytes));
        appended.map_err(failed())?;
        if !self.is_started() && !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(StoreProblem::Foreign("the file holds something else, which is left as it is".to_owned()));
        }
        if !is_open {
            self.take_in(&bytes);
        }
        Ok(())
    }

    /// Whether a file begins with the header that was read before.
    fn is_of(&self, file: &mut File) -> io::Result<bool> {
        let mut header = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(self.header.len() as u64).read_to_end(&mut header)?;
        Ok(header == self.header)
    }

    /// Takes in what follows [`View::end`]. Something that is not whole ends it.
    fn take_in(&mut self, bytes: &[u8]) {
        let mut reader = Reader::new(bytes);
        if !self.is_started() {
            let Some(job) = next_header(bytes, &mut reader) else { return };
            (self.job, self.header) = (job, bytes[..reader.at()].to_vec());
        }
        let mut whole = reader.at();
        while let Some((key, value)) = next_record(bytes, &mut reader) {
            self.values.insert(key, value);
            whole = reader.at();
        }
        self.end += whole as u64;
    }
}

fn next_header(bytes: &[u8], reader: &mut Reader<'_>) -> Option<String> {
    reader.take(MAGIC.len()).filter(|&magic| magic == MAGIC)?;
    reader.take(16)?;
    let job = reader.text()?;
    let hashed = hash(&bytes[..reader.at()]);
    (reader.number()? == hashed).then_some(job)
}

fn next_record(bytes: &[u8], reader: &mut Reader<'_>) -> Option<(String, Vec<u8>)> {
    let expected = reader.number()?;
    let start = reader.at();
    let (key, value) = (reader.text()?, reader.bytes()?);
    (hash(&bytes[start..reader.at()]) == expected).then(|| (key, value.to_vec()))
}

/// Whatever a file holds, and however much of it is read at first: what is read of it is in it, and is the same in the end.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut view = View::default();
    view.take_in(bytes);
    assert!(view.end <= bytes.len() as u64, "a record reaches beyond the file");
    let held: usize = view.values.iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(held + view.job.len() <= bytes.len(), "more is read than there is");
    let mut in_two = View::default();
    in_two.take_in(&bytes[..bytes.len() / 2]);
    in_two.take_in(&bytes[in_two.end as usize..]);
    assert_eq!(in_two, view, "what is read depends on when it is read");
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

    /// Is removed with all that is in it.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// What a former run of another job left, which rank 0 and another rank of this job find.
    fn left_behind(name: &str) -> (Folder, [Log; 2]) {
        let folder = Folder(std::env::temp_dir().join(format!("kolo-{name}-{}", std::process::id())));
        std::fs::create_dir(&folder.0).unwrap();
        let path = folder.0.join("store");
        let log = || Log { path: path.clone(), job: "second".to_owned(), view: View::default(), ownership: None, rival: None };
        let logs = [log(), log()];
        for (path, bytes) in [(&path, header([3; 16], "first")), (&logs[0].lock_path(), Vec::new())] {
            let file = sys::open_own(OpenOptions::new().write(true).create_new(true), path);
            file.ok().unwrap().write_all(&bytes).unwrap();
        }
        (folder, logs)
    }

    #[test]
    #[cfg_attr(windows, ignore = "a lock keeps readers out, so they do not learn its job")]
    fn a_rank_waits_while_its_rank_0_is_slow_to_replace_the_file() {
        let (_folder, [mut zero, mut other]) = left_behind("slow-rank-0");
        let began = Instant::now();
        let held = zero.own().unwrap();
        while began.elapsed() < 3 * LOCK_PAUSE {
            let found = other.value("key");
            assert!(matches!(&found, Ok(Look::NotYet(Some(StoreProblem::OtherJob { .. })))), "{:?}", found.err());
            std::thread::sleep(LONGEST_PAUSE);
        }
        drop(held);
    }

    /// The file is a former run's of one job, while another starts with it.
    #[test]
    #[cfg_attr(windows, ignore = "a lock keeps readers out, so they do not learn its job")]
    fn the_job_that_starts_is_named_and_not_the_one_before() {
        let (_folder, [mut third, mut other]) = left_behind("third-job");
        third.job = "third".to_owned();
        let held = third.own().unwrap();
        let began = Instant::now();
        loop {
            match other.value("key") {
                Err(StoreProblem::InUse { theirs, mine }) => break assert_eq!([theirs, mine], ["third", "second"]),
                Ok(Look::NotYet(Some(StoreProblem::OtherJob { .. }))) => {}
                found => panic!("{:?}", found.err()),
            }
            assert!(began.elapsed() < Duration::from_secs(60), "it is not noticed");
            std::thread::sleep(LONGEST_PAUSE);
        }
        drop(held);
    }

    #[test]
    fn rank_0_waits_while_another_rank_looks_at_the_lock() {
        let (_folder, [zero, _]) = left_behind("looked-at");
        let lock = File::open(zero.lock_path()).unwrap();
        lock.try_lock_shared().unwrap();
        let looks = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            drop(lock);
        });
        let late = Instant::now() + Duration::from_secs(60);
        if let Err(problem) = FileStore::open(&zero.path, true, "second", late) {
            panic!("{problem}");
        }
        looks.join().unwrap();
    }

    #[test]
    fn records_survive_a_crash_in_the_middle_of_the_next() {
        let mut bytes = header([3; 16], "job");
        bytes.extend(record("a", b"1"));
        let whole = bytes.len();
        bytes.extend(record("b", b"22"));
        for cut in whole..bytes.len() {
            let mut view = View::default();
            view.take_in(&bytes[..cut]);
            assert_eq!((view.end, view.values.len()), (whole as u64, 1), "cut at {cut}");
            view.take_in(&bytes[whole..]);
            assert_eq!(view.values["b"], b"22", "cut at {cut}");
        }
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
            fuzz(&bytes);
        }
    }
}

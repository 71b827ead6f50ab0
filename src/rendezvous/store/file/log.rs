//! The file and its lock, through calls that may block.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::format::{View, header, record};
use crate::error::StoreError;
use crate::network::identity::random;
use crate::sys::{self, NotOpened};
use crate::timeouts::FILE_LOCK_CHECK;

/// Bytes of the names of a job and a process that are read from a lock.
const LONGEST_NAME: u64 = 4096;

/// The result of a look into the file.
#[derive(Debug)]
pub(super) enum Look<T> {
    Found(T),
    /// Nothing yet. If that does not change, the problem is the error to report.
    NotYet(Option<StoreError>),
}

/// The file, as the helper thread sees it.
pub(super) struct Log {
    pub(super) path: PathBuf,
    pub(super) job: String,
    view: View,
    /// Rank 0's, while the ranks connect.
    ownership: Option<Ownership>,
    /// When this rank last checked whether the lock of another job's file is held, and the header
    /// of the file if it was.
    rival: Option<(Instant, Option<Vec<u8>>)>,
}

/// Keeps every other rank 0 from starting a job with the file.
pub(super) struct Ownership {
    path: PathBuf,
    /// The store's file is this job's, and is removed at the end.
    has_started: bool,
    // Closing it unlocks it.
    _lock: File,
}

impl Log {
    pub(super) fn new(path: &Path, job: &str) -> Log {
        Log { path: path.to_owned(), job: job.to_owned(), view: View::default(), ownership: None, rival: None }
    }

    /// Replaces the file of a former run by a file of this job.
    pub(super) fn start(&mut self) -> Result<Look<()>, StoreError> {
        self.check_folder()?;
        let ownership = match self.own()? {
            Look::Found(ownership) => ownership,
            Look::NotYet(problem) => return Ok(Look::NotYet(problem)),
        };
        // From now on `finish` removes the lock.
        self.ownership = Some(ownership);
        self.remove_former()?;
        let mut file = self.create()?;
        if let Some(ownership) = &mut self.ownership {
            ownership.has_started = true;
        }
        let written = file.write_all(&header(random(), &self.job)).and_then(|()| sys::close(file));
        written.map_err(StoreError::io("starting it"))?;
        Ok(Look::Found(()))
    }

    /// Removes the file of a former run, if there is one.
    fn remove_former(&self) -> Result<(), StoreError> {
        let Some(mut file) = open(OpenOptions::new().read(true), &self.path)? else { return Ok(()) };
        let mut former = View::default();
        former.read(&mut file)?;
        // An empty file is of no run.
        if former.is_started() {
            crate::log::warn!(path = %self.path.display(), job = former.job, "replacing the store's file, which a former run has left behind");
        }
        sys::remove(&self.path).map_err(StoreError::io("removing the file of a former run"))
    }

    /// Creates a file that other users cannot read.
    fn create(&self) -> Result<File, StoreError> {
        let created = sys::open_own(OpenOptions::new().write(true).create_new(true), &self.path);
        let is_private = created.as_ref().is_ok_and(|file| sys::is_open_to_others(file).is_ok_and(|open| !open));
        match created {
            Ok(file) if is_private => Ok(file),
            Err(why @ NotOpened::System(_)) => Err(not_opened("creating it")(why)),
            _ => {
                _ = sys::remove(&self.path);
                let why = "its file system does not keep permissions, so other users could read the secret of the job";
                Err(StoreError::Untrusted(why.to_owned()))
            }
        }
    }

    /// Takes the lock, so that no other rank 0 starts a job with this file. `NotYet` while other
    /// ranks check the lock.
    pub(super) fn own(&mut self) -> Result<Look<Ownership>, StoreError> {
        let path = self.lock_path();
        loop {
            let file = sys::open_own(OpenOptions::new().read(true).write(true).create(true).truncate(false), &path);
            let file = file.map_err(not_opened("creating its lock"))?;
            match sys::try_lock(&file) {
                // The rank 0 that held the lock may have removed its file meanwhile. Then this lock
                // protects nothing.
                Ok(()) if sys::is_still_at(&file, &path) => {
                    write_name(&file, &self.job).map_err(StoreError::io("writing to its lock"))?;
                    return Ok(Look::Found(Ownership { path, has_started: false, _lock: file }));
                }
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => break self.why_locked(&file),
                Err(TryLockError::Error(error)) => return Err(StoreError::io("locking it")(error)),
            }
        }
    }

    /// Returns why rank 0 cannot take the lock: another rank 0 has it, or other ranks check it,
    /// each for a moment.
    fn why_locked(&mut self, lock: &File) -> Result<Look<Ownership>, StoreError> {
        match sys::try_lock_shared(lock) {
            Ok(()) => {
                let doing = "waiting for its lock, which other ranks check; is a rank stopped?";
                Ok(Look::NotYet(Some(StoreError::io(doing)(io::ErrorKind::TimedOut.into()))))
            }
            Err(TryLockError::WouldBlock) => {
                let known = self.look().is_ok() && self.view.is_started();
                let theirs = if known { self.view.job.clone() } else { String::new() };
                let LockHolder { job, process } = LockHolder::of(lock).unwrap_or_default();
                let theirs = if theirs.is_empty() { job } else { theirs };
                Err(StoreError::InUse { theirs, mine: self.job.clone(), process })
            }
            Err(TryLockError::Error(error)) => Err(StoreError::io("locking it")(error)),
        }
    }

    pub(super) fn lock_path(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".lock");
        path.into()
    }

    /// Checks that a file can be created in the folder, so that no rank waits for one in vain. Rank
    /// 0 does not create folders.
    fn check_folder(&self) -> Result<(), StoreError> {
        let Some(folder) = self.path.parent() else { return Ok(()) };
        let problem = |source| StoreError::Folder { folder: folder.display().to_string(), source: Arc::new(source) };
        sys::check_folder(folder).map_err(problem)
    }

    /// Brings the view up to date. It opens the file each time, because that is when network file
    /// systems ask their server.
    fn look(&mut self) -> Result<(), StoreError> {
        match open(OpenOptions::new().read(true), &self.path)? {
            Some(mut file) => self.view.read(&mut file),
            None => {
                self.view = View::default();
                self.check_folder()
            }
        }
    }

    /// Returns why the view cannot be used, if so: there is no file yet, or it belongs to another
    /// job. That may be a former run, whose file rank 0 will replace.
    ///
    /// # Errors
    ///
    /// The other job is starting with the file.
    fn not_ours<T>(&mut self) -> Result<Option<Look<T>>, StoreError> {
        if !self.view.is_started() {
            return Ok(Some(Look::NotYet(None)));
        }
        if self.view.job == self.job {
            return Ok(None);
        }
        let mine = self.job.clone();
        if let Some(LockHolder { job: theirs, process }) = self.starting() {
            return Err(StoreError::InUse { theirs, mine, process });
        }
        Ok(Some(Look::NotYet(Some(StoreError::OtherJob { theirs: self.view.job.clone(), mine }))))
    }

    /// Returns the other job whose rank 0 holds the lock of the file, if there is one. This job's
    /// rank 0 replaces the file after it has taken the lock, which may take long. So the lock
    /// belongs to another job if it is held at two checks with the same file between them, and does
    /// not name this job.
    fn starting(&mut self) -> Option<LockHolder> {
        if self.ownership.is_some() || self.rival.as_ref().is_some_and(|(looked, _)| looked.elapsed() < FILE_LOCK_CHECK) {
            return None;
        }
        let lock = sys::open_own(OpenOptions::new().read(true), &self.lock_path()).ok();
        // Read after the check: the rank 0 that takes the lock then writes its job's name.
        let locked = lock.filter(|file| matches!(sys::try_lock_shared(file), Err(TryLockError::WouldBlock)));
        let other = locked.and_then(|file| other_holder(&file, &self.job));
        let held = other.is_some().then(|| self.view.header.clone());
        let (_, before) = self.rival.replace((Instant::now(), held.clone())).unwrap_or((Instant::now(), None));
        // If the lock could not be read, only the job of the file is known.
        let mut other = other.filter(|_| held == before)?;
        if other.job.is_empty() {
            other.job.clone_from(&self.view.job);
        }
        Some(other)
    }

    /// Returns the value of a key.
    pub(super) fn value(&mut self, key: &str) -> Result<Look<Vec<u8>>, StoreError> {
        self.look()?;
        let not_ours = self.not_ours()?;
        let found = || self.view.values.get(key).map_or(Look::NotYet(None), |value| Look::Found(value.clone()));
        Ok(not_ours.unwrap_or_else(found))
    }

    /// Appends a record, unless `keep` is set and the key exists; returns the value that the key
    /// then has.
    pub(super) fn append(&mut self, key: &str, value: &[u8], keep: bool) -> Result<Look<Vec<u8>>, StoreError> {
        let Some(mut file) = open(OpenOptions::new().read(true).write(true), &self.path)? else {
            return self.check_folder().map(|()| Look::NotYet(None));
        };
        // Read before locking: only a file of this job is locked, and the lock is held for the last
        // records only.
        self.view.read(&mut file)?;
        if let Some(not_ours) = self.not_ours()? {
            return Ok(not_ours);
        }
        match sys::try_lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let doing = "waiting for its lock, which another process holds; is a rank stopped?";
                return Ok(Look::NotYet(Some(StoreError::io(doing)(io::ErrorKind::TimedOut.into()))));
            }
            Err(TryLockError::Error(error)) => return Err(StoreError::io("locking it")(error)),
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
        written.map_err(StoreError::io("writing to it"))?;
        self.view.take_in(&record);
        Ok(Look::Found(value.to_vec()))
    }

    /// Removes the files that rank 0 has created.
    pub(super) fn finish(&mut self) {
        let Some(ownership) = self.ownership.take() else { return };
        for path in [&self.path, &ownership.path].into_iter().skip(usize::from(!ownership.has_started)) {
            if let Err(error) = sys::remove(path) {
                crate::log::debug!(%error, path = %path.display(), "cannot remove a file of the store");
            }
        }
    }
}

/// Opens a file that no other user can have written; `None` if there is none, or if another host
/// still has it for a moment.
fn open(options: &mut OpenOptions, path: &Path) -> Result<Option<File>, StoreError> {
    match sys::open_own(options, path) {
        Ok(file) => Ok(Some(file)),
        Err(NotOpened::System(error)) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::WouldBlock) => Ok(None),
        Err(why) => Err(not_opened("opening it")(why)),
    }
}

/// What the rank 0 that holds the lock writes to it.
#[derive(Default)]
struct LockHolder {
    job: String,
    /// Empty if it is not known.
    process: String,
}

/// Between the name of the job and that of the process.
const SEPARATOR: char = '\0';

impl LockHolder {
    /// Returns what a lock holds; `None` if it cannot be read.
    fn of(mut lock: &File) -> Option<LockHolder> {
        let mut text = Vec::new();
        lock.seek(SeekFrom::Start(0)).ok()?;
        lock.take(LONGEST_NAME).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let (job, process) = text.split_once(SEPARATOR).unwrap_or((&text, ""));
        Some(LockHolder { job: job.to_owned(), process: process.to_owned() })
    }
}

/// Writes the name of the job that holds the lock, and this process. Network file systems write it
/// back when a descriptor is closed.
fn write_name(mut lock: &File, job: &str) -> io::Result<()> {
    lock.set_len(0)?;
    write!(lock, "{job}{SEPARATOR}process {} on {}", std::process::id(), sys::hostname())?;
    sys::close(sys::above_standard(|| lock.try_clone())?)
}

/// Returns the holder that a lock names, if it is not of `job`; without a name if it cannot be
/// read. A lock that names no job has just been taken, or was left by a run that crashed.
fn other_holder(lock: &File, job: &str) -> Option<LockHolder> {
    match LockHolder::of(lock) {
        Some(holder) if holder.job.is_empty() || holder.job == job => None,
        Some(holder) => Some(holder),
        None => Some(LockHolder::default()),
    }
}

fn not_opened(doing: &'static str) -> impl FnOnce(NotOpened) -> StoreError {
    move |why| match why {
        NotOpened::System(error) => StoreError::io(doing)(error),
        NotOpened::Untrusted(why) => StoreError::Untrusted(why),
    }
}

/// Writes a record after the last complete one, over a torn one that may follow. The record is not
/// synchronised with a disk: no run needs what a crashed run has written, and network file systems
/// write back when the file is closed.
fn write(file: &mut File, at: u64, record: &[u8]) -> io::Result<()> {
    if file.metadata()?.len() > at {
        file.set_len(at)?;
    }
    file.seek(SeekFrom::Start(at))?;
    file.write_all(record).inspect_err(|_| _ = file.set_len(at))
}

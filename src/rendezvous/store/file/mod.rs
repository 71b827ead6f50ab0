//! A store in one file that all ranks reach: a header, then records, each appended under a lock.
//!
//! ```text
//! header   "kolo-store 1\n", generation (16 bytes), the job's name, hash of all this
//! record   hash of the rest, key, value; the name, keys and values each preceded by their length
//! ```
//!
//! Readers take no lock: records are only appended, and a hash shows whether a record is complete.
//! A reader keeps what it has read, and reads only what was appended since. A writer that is killed
//! leaves a torn record at the end, where readers stop. The next writer, which has the lock,
//! overwrites it.
//!
//! Rank 0 replaces the file of a former run by a new file with a new generation. Beside the file is
//! a lock file, which rank 0 keeps locked while the ranks connect, and into which it writes the
//! job's name. So if two jobs start with one file at the same time, every rank of both returns an
//! error. When the ranks have connected, rank 0 removes both files. After a crash, the next run
//! replaces them.
//!
//! Ranks share their secret through the file. So only its owner can read and write it, and ranks
//! trust a file only if its owner is the user that they run as.
//!
//! A file system may be on a network and may not answer. Therefore a helper thread makes all calls
//! to it.
//!
//! `store` is the store, whose calls wait. `log` calls the file system. `format` encodes and
//! decodes.

mod format;
mod log;
mod store;
#[cfg(test)]
mod tests;

#[cfg(any(fuzzing, test))]
pub(crate) use format::{fuzz, sample};
pub(super) use store::FileStore;

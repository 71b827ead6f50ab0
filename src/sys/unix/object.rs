//! Objects of POSIX's `shm_open`, without a name.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::Mode;
use rustix::shm::{self, OFlags};

use crate::sys::above_standard;

/// Returns a name of at most 31 bytes, the most on macOS.
fn random_name() -> io::Result<String> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(format!("/kolo-{:016x}", u64::from_le_bytes(random)))
}

/// Creates an empty object that only this user can open. The system closes it in programs that this
/// process starts.
///
/// A process that is killed between the two calls leaves the name of an object without memory.
pub(in crate::sys) fn create_without_name() -> io::Result<OwnedFd> {
    let name = random_name()?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    let file = above_standard(|| shm::open(name.as_str(), flags, Mode::RUSR | Mode::WUSR))?;
    shm::unlink(name.as_str())?;
    Ok(file)
}

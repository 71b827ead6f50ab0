//! Compiled programs on disk: compiling takes seconds, and every process would do it.
//!
//! A file is named by all that its content depends on, so that it never goes stale, and begins with a checksum of the rest, so
//! that a damaged one is compiled anew. It is written beside its place and then renamed: ranks that start at once each write the
//! same, and none reads half of it. A folder that cannot be written costs a warning and the seconds.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

use crate::wire::hexadecimal;

/// Bytes of the checksum.
const SUM: usize = 32;

/// The folder: `KOLO_CACHE_DIR`, or `kolo` in the one that the system has for such files.
pub(super) fn folder(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("KOLO_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("kolo")))
        .or_else(|| set("LOCALAPPDATA").map(|folder| folder.join("kolo")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("kolo")))
}

/// The name of what comes of these parts.
pub(super) fn name(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // With its length, so that no part can pass for the end of another.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{}.cubin", hexadecimal(&hash.finalize()))
}

/// The content of a file, if it is there and whole.
pub(super) fn load(path: &Path) -> Option<Vec<u8>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!("{}: {error}; the kernels are compiled anew", path.display());
            return None;
        }
    };
    let (sum, content) = bytes.split_at_checked(SUM)?;
    if sum != &Sha256::digest(content)[..] {
        tracing::warn!("{} is damaged; the kernels are compiled anew", path.display());
        return None;
    }
    Some(content.to_vec())
}

/// Leaves content for the next process.
pub(super) fn store(path: &Path, content: &[u8]) {
    if let Err(error) = try_store(path, content) {
        tracing::warn!("{}: {error}; every process compiles the kernels. KOLO_CACHE_DIR may name another folder", path.display());
    }
}

fn try_store(path: &Path, content: &[u8]) -> io::Result<()> {
    // Of this process and thread alone, wherever processes have the same number: no two name spaces start at the same time.
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let beside = path.with_extension(format!("{}-{number}-{:08x}.new", std::process::id(), random()?));
    let written = fs::write(&beside, [&Sha256::digest(content)[..], content].concat()).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // What is left of it; there may be nothing.
        _ = fs::remove_file(&beside);
    }
    written
}

fn random() -> io::Result<u32> {
    getrandom::u32().map_err(io::Error::other)
}

//! The cache of compiled kernels on disk. Without it, every process would compile each kernel that it
//! uses, which takes a fraction of a second.
//!
//! The name of a file is a digest of everything that its content depends on, so a file is never
//! stale. The file begins with a checksum of the rest, so a damaged file is compiled again. Ranks that
//! start at once each write the same file, and none reads half of it. If the folder cannot be written, a process logs a warning and
//! compiles.

use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::sys;
use crate::wire::hexadecimal;

/// Bytes of the checksum.
const SUM: usize = 32;

/// Returns the name of the file that depends on these parts.
pub(super) fn name(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length keeps apart lists of parts that would read the same side by side.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{}.cubin", hexadecimal(&hash.finalize()))
}

/// Returns the content of a file, if the file exists and is intact.
pub(super) fn load(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    match sys::open_regular(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            crate::log::warn!("cannot read {}: {error}; the kernels are compiled again", path.display());
            return None;
        }
    }
    let (sum, content) = bytes.split_at_checked(SUM)?;
    if sum != &Sha256::digest(content)[..] {
        crate::log::warn!("{} is damaged; the kernels are compiled again", path.display());
        return None;
    }
    Some(content.to_vec())
}

/// Writes content to a file for later processes.
pub(super) fn store(path: &Path, content: &[u8]) {
    if let Err(error) = try_store(path, content) {
        crate::log::warn!(
            "cannot write {}: {error}; every process compiles the kernels; set KOLO_CACHE_DIR to a folder that can be written",
            path.display()
        );
    }
}

fn try_store(path: &Path, content: &[u8]) -> io::Result<()> {
    sys::make_folder(path.parent().unwrap_or(Path::new(".")))?;
    sys::write_file(path, &[&Sha256::digest(content)[..], content].concat())
}

//! Files that hold a secret.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::Path;

/// The longest file with a secret, in bytes.
const LONGEST: u64 = 4096;

/// Reads a file that holds a secret.
///
/// # Errors
///
/// An error of the system. Or the file is not a regular file, belongs to a user other than this one
/// and root, or other users may open it.
pub(crate) fn read_secret_file(path: &Path) -> io::Result<String> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Without this flag, opening a pipe would wait for its other end.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = super::above_standard(|| options.open(path))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        // SAFETY: geteuid has no arguments and cannot fail.
        let user = unsafe { libc::geteuid() };
        check_owner(metadata.uid(), metadata.mode(), user)?;
    }
    let mut text = String::new();
    file.take(LONGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("it has more than {LONGEST} bytes")));
    }
    Ok(text)
}

/// Checks that only `user` and root can read a file. A file of root may be readable by its group,
/// as in a pod.
#[cfg(unix)]
fn check_owner(owner: u32, mode: u32, user: u32) -> io::Result<()> {
    if owner != user && owner != 0 {
        return Err(io::Error::other(format!("it belongs to user {owner}, and this process runs as user {user}; chown it")));
    }
    let forbidden = if owner == user { 0o077 } else { 0o027 };
    if mode & forbidden != 0 {
        let mode = mode & 0o777;
        return Err(io::Error::other(format!("other users may open it (mode {mode:03o}); chmod 600 keeps them out")));
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn files_that_others_may_open_are_refused() {
        for (owner, mode, user, why) in [
            (7, 0o600, 7, None),
            (7, 0o400, 7, None),
            (0, 0o600, 0, None),
            (0, 0o440, 7, None),
            (7, 0o640, 7, Some("mode 640")),
            (7, 0o604, 7, Some("mode 604")),
            (0, 0o644, 7, Some("mode 644")),
            (0, 0o440, 0, Some("mode 440")),
            (0, 0o660, 7, Some("mode 660")),
            (8, 0o600, 7, Some("belongs to user 8")),
            (7, 0o600, 0, Some("belongs to user 7")),
        ] {
            let checked = check_owner(owner, mode, user).map_err(|error| error.to_string());
            match (checked, why) {
                (Ok(()), None) => {}
                (Err(text), Some(why)) => assert!(text.contains(why), "{text}"),
                other => panic!("{owner} {mode:o} {user}: {other:?}"),
            }
        }
    }
}

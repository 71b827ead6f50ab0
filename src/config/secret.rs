//! The secret of a job: from a variable, a file or an option.

use std::path::Path;
use std::time::Instant;

use super::environment::{Env, empty};
use crate::error::{Error, Result};
use crate::sys;

const SECRET: &str = "64 hexadecimal digits";

/// Parses the hexadecimal digits of a secret.
fn secret(text: &str) -> Option<[u8; 32]> {
    let mut secret = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (i, byte) in secret.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(secret)
}

/// Returns the secret that an environment holds or names.
pub(crate) fn secret_of(env: Env<'_>, deadline: Instant) -> Result<Option<[u8; 32]>> {
    if let Some(text) = env("KOLO_SECRET") {
        return secret_given("KOLO_SECRET", &text).map(Some);
    }
    env("KOLO_SECRET_FILE").map(|path| secret_in("KOLO_SECRET_FILE", Path::new(&path), deadline)).transpose()
}

/// Parses a secret of 64 hexadecimal digits, which the setting of that name holds.
///
/// # Errors
///
/// [`Error::Setting`] without the text, which may be nearly right.
pub fn secret_given(setting: &str, text: &str) -> Result<[u8; 32]> {
    if text.is_empty() {
        return Err(empty(setting, SECRET, "a secret"));
    }
    secret(text.trim())
        .ok_or_else(|| Error::setting(setting, "(not shown)", format!("it is not {SECRET}; make one by `openssl rand -hex 32`")))
}

/// Returns the secret in a file that a setting names.
///
/// # Errors
///
/// The file holds no secret, cannot be read by the deadline, or may be read by others.
pub fn secret_in(setting: &'static str, path: &Path, deadline: Instant) -> Result<[u8; 32]> {
    if path.as_os_str().is_empty() {
        return Err(empty(setting, "the path of a file with the secret", "a secret"));
    }
    let path = path.to_owned();
    let name = path.display().to_string();
    let wrong = move |why: String| Error::setting(setting, name, format!("a file with {SECRET}: {why}"));
    // Each file has a helper of its own, so that a start with another file, or with none, does not
    // wait for this one.
    let kind = format!("read {}", path.display());
    let read = sys::by_deadline(kind, deadline, sys::SILENT_FILE, move || sys::read_secret_file(&path), |error| error);
    match read {
        Err(error) => Err(wrong(error.to_string())),
        Ok(text) if text.trim().is_empty() => Err(wrong("it is empty; write one there (openssl rand -hex 32)".to_owned())),
        Ok(text) => secret(text.trim()).ok_or_else(|| wrong("its content is something else".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no files")]
    fn secrets_in_files() {
        let path = std::env::temp_dir().join(format!("kolo-secret-{}", std::process::id()));
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let file = path.display().to_string();
            secret_of(&|name| (name == "KOLO_SECRET_FILE").then(|| file.clone()), late()).map_err(|error| error.to_string())
        };
        // Other users may read a file that is created with default permissions.
        if sys::has_file_permissions() {
            let refused = read(&"0f".repeat(32)).unwrap_err();
            assert!(
                refused.contains("KOLO_SECRET_FILE") && refused.contains("chmod 600") && !refused.contains("0f0f"),
                "{refused}"
            );
        }
        #[cfg(unix)]
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(read(&format!("{}\n", "0f".repeat(32))), Ok(Some([15; 32])));
        let wrong = read("swordfish").unwrap_err();
        assert!(wrong.contains("64 hexadecimal digits") && !wrong.contains("swordfish"), "{wrong}");
        for nothing in ["", "\n"] {
            let empty = read(nothing).unwrap_err();
            assert!(empty.contains("KOLO_SECRET_FILE") && empty.contains("it is empty; write one there"), "{empty}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(secret_in("secret_file", &path, late()).unwrap_err().to_string().contains("secret_file"));
        assert!(secret_in("secret_file", &std::env::temp_dir(), late()).is_err());
    }

    /// A job that was meant to have a secret does not start without one.
    #[test]
    fn a_secret_that_is_set_but_empty_is_refused() {
        let set = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned());
            secret_of(&value, late()).map_err(|error| error.to_string())
        };
        assert_eq!(set(&[]), Ok(None));
        for name in ["KOLO_SECRET", "KOLO_SECRET_FILE"] {
            let refused = set(&[(name, "")]).unwrap_err();
            assert!(refused.starts_with(&format!("{name}=\"\": it is set but empty; give ")), "{refused}");
            assert!(refused.contains(&sys::how_to_remove(name)), "{refused}");
        }
        // KOLO_SECRET takes precedence, even if it is wrong.
        assert!(set(&[("KOLO_SECRET", ""), ("KOLO_SECRET_FILE", "/secret")]).unwrap_err().starts_with("KOLO_SECRET="));
        assert_eq!(set(&[("KOLO_SECRET", &"0f".repeat(32)), ("KOLO_SECRET_FILE", "")]), Ok(Some([15; 32])));
        for error in [secret_given("secret", "").unwrap_err(), secret_in("secret_file", Path::new(""), late()).unwrap_err()] {
            let error = error.to_string();
            assert!(error.starts_with("secret") && error.contains("it is set but empty") && error.contains("NULL"), "{error}");
        }
    }

    #[test]
    fn secrets() {
        assert_eq!(secret(&"0f".repeat(32)), Some([15; 32]));
        assert_eq!(secret("0f"), None);
        assert_eq!(secret(&"zz".repeat(32)), None);
        assert_eq!(secret(&"é".repeat(32)), None);
        let error = secret_of(&|name| (name == "KOLO_SECRET").then(|| "ab".repeat(31)), late()).unwrap_err().to_string();
        assert!(error.contains("KOLO_SECRET") && !error.contains("abab"), "{error}");
    }
}

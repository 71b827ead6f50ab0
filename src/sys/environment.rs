//! The environment of this process.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::sync::LazyLock;

use parking_lot::Mutex;

use super::between_forks;

/// Returns a variable of the environment. In a program with rights that the user who started it need
/// not have (setuid, setgid, file capabilities), no variable counts: it would let that user choose
/// where the program writes and connects. The log names those of kolo and of launchers that are set.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    if !*IS_PRIVILEGED {
        return Some(value);
    }
    if is_told(name) {
        warn(name);
    }
    None
}

/// Whether a program notices that a variable does not count: it would be a world of one without those of
/// its launcher.
fn is_told(name: &str) -> bool {
    ["RANK", "WORLD_SIZE"].contains(&name) || ["KOLO_", "OMPI_", "PMI", "PALS_", "SLURM_"].iter().any(|own| name.starts_with(own))
}

/// Returns the names of all variables, whether they count or not.
pub(crate) fn variable_names() -> impl Iterator<Item = String> {
    std::env::vars_os().filter_map(|(name, _)| name.into_string().ok())
}

/// Returns whether a variable is set that does not count, and that a library used by kolo would read.
pub(crate) fn is_overruled(name: &str) -> bool {
    *IS_PRIVILEGED && std::env::var_os(name).is_some()
}

static IS_PRIVILEGED: LazyLock<bool> = LazyLock::new(is_privileged);

/// Warns once of each variable.
fn warn(name: &str) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if between_forks(|| WARNED.lock().insert(name.to_owned())) {
        crate::log::warn!(
            "{name} is ignored: this program has rights that the user who started it need not have (setuid, setgid or \
             capabilities); set the option in the program"
        );
    }
}

/// Returns whether the system gave this program rights that the user who started it need not have.
fn is_privileged() -> bool {
    #[cfg(all(any(target_os = "linux", target_os = "android"), not(miri)))]
    // SAFETY: the call looks a number up in what the system gave the process.
    return unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    #[cfg(all(target_vendor = "apple", not(miri)))]
    // SAFETY: the call has no arguments and cannot fail.
    return unsafe { libc::issetugid() } != 0;
    #[cfg(all(unix, not(any(target_os = "linux", target_os = "android", target_vendor = "apple", miri))))]
    {
        use rustix::process::{getegid, geteuid, getgid, getuid};
        return (getuid(), getgid()) != (geteuid(), getegid());
    }
    #[cfg(any(not(unix), miri))]
    false
}

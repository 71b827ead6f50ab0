//! What distinguishes this machine, and what listens on it.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use windows_sys::Win32::System::RemoteDesktop::ProcessIdToSessionId;
use windows_sys::Win32::System::SystemInformation::{ComputerNamePhysicalDnsHostname, GetComputerNameExW};

use super::security::User;
use super::view::NamedPage;

/// Returns the name of this machine, for messages.
pub(crate) fn hostname() -> String {
    let mut name = [0u16; 256];
    let mut len = name.len() as u32;
    // SAFETY: the call writes at most `len` units.
    let is_known = unsafe { GetComputerNameExW(ComputerNamePhysicalDnsHostname, name.as_mut_ptr(), &mut len) } != 0;
    match name.get(..len as usize).filter(|name| is_known && !name.is_empty()) {
        Some(name) => String::from_utf16_lossy(name),
        None => std::env::var("COMPUTERNAME").unwrap_or_else(|_| "localhost".to_owned()),
    }
}

/// Returns a text that is equal for processes that can share memory: those of one user, in one
/// session of one machine.
///
/// It is a random number in memory that the first of these processes makes and the others open. The
/// number lasts as long as one of them runs. (The system's own number of a machine is the same on
/// the clones of a machine, and it has none for a boot.)
pub(crate) fn boot_identity() -> Option<String> {
    static PAGE: LazyLock<Option<NamedPage>> = LazyLock::new(|| {
        let made = User::current().and_then(|user| NamedPage::create_or_open(&format!("kolo-machine-{}", user.text())));
        made.inspect_err(|error| tracing::info!(%error, "this rank cannot tell which ranks are on its machine"))
            .ok()
            .map(|(page, _)| page)
    });
    let page = PAGE.as_ref()?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).ok()?;
    // SAFETY: the word is within the page, which is never unmapped and is accessed through atomics
    // only. It starts as zero.
    let word = unsafe { page.view.base().cast::<AtomicU64>().as_ref() };
    // One of the processes writes the number.
    let mine = u64::from_le_bytes(random) | 1;
    let number = word.compare_exchange(0, mine, Ordering::AcqRel, Ordering::Acquire).map_or_else(|theirs| theirs, |_| mine);
    let mut session = 0;
    // SAFETY: the call writes a number.
    unsafe { ProcessIdToSessionId(std::process::id(), &mut session) };
    Some(format!("windows-{session}-{number:016x}"))
}

/// Returns `None`: kolo does not look for the process here.
pub(crate) fn port_holder(_: &[SocketAddr]) -> Option<String> {
    None
}

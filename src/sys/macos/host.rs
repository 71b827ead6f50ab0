//! What distinguishes this machine.

use std::net::SocketAddr;

use crate::sys::unix::path_socket::folder_of_listeners;
use crate::sys::unix::sysctl;

/// Returns a text that is equal for processes that can share memory: those that look for each
/// other's listeners in the same folder, which belongs to a user, since the same start of the
/// machine.
pub(crate) fn boot_identity() -> Option<String> {
    let boot = sysctl::text(c"kern.bootsessionuuid")?;
    Some(format!("{boot} {}", folder_of_listeners().display()))
}

/// Returns `None`: kolo does not look for the process here.
pub(crate) fn port_holder(_: &[SocketAddr]) -> Option<String> {
    None
}

//! A stranger's call, for `kolo soak` to make and to see refused. Not part of the API.

use std::io::{Read, Write};

use super::DialError;
use super::handshake::{Hello, Identity, Medium, Purpose, Refusal, introduce};
use crate::types::Rank;

/// Calls at the listener of rank `to` as rank `from` of the job, with no secret, in the network or inside the host. A number says
/// for which of the purposes. Returns whether the listener takes the stranger for one that knows the secret.
pub fn is_believed(stream: &mut (impl Read + Write), is_local: bool, job: &str, from: Rank, to: Rank, purpose: u8) -> bool {
    let purposes = [Purpose::Link, Purpose::Window, Purpose::Apart, Purpose::Store, Purpose::Probe, Purpose::Ask];
    let purpose = purposes[usize::from(purpose) % purposes.len()];
    let medium = if is_local { Medium::Local } else { Medium::Network };
    match introduce(stream, &Identity::new(job, None), medium, &Hello::new(purpose, 0, from, to)) {
        Ok(()) => true,
        Err(DialError::Refused(Refusal::Foreign | Refusal::Secret)) => false,
        // Only one that knows the secret reads such a reason.
        Err(DialError::Refused(Refusal::Version { .. } | Refusal::Job { .. } | Refusal::Run)) => true,
        Err(_) => false,
    }
}

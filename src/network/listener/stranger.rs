//! Connects without the secret, for `kolo soak` to check that the listener refuses. Not part of the
//! API.

use std::io::{Read, Write};

use super::dial::{DialError, shake_hands};
use super::handshake::{Hello, Purpose, Refusal};
use crate::network::identity::{Identity, Medium};
use crate::types::Rank;

/// Shakes hands with the listener of rank `to` as rank `from` of the job, with no secret. The
/// connection is inside the host or in the network; `purpose` is a number from which one of the
/// purposes is taken. Returns whether the listener believes that the stranger knows the secret.
pub fn is_believed(stream: &mut (impl Read + Write), is_local: bool, job: &str, from: Rank, to: Rank, purpose: u8) -> bool {
    let purpose = Purpose::ALL[usize::from(purpose) % Purpose::ALL.len()];
    let medium = if is_local { Medium::Local } else { Medium::Network };
    match shake_hands(stream, &Identity::new(job, None), medium, &Hello::new(purpose, 0, from, to)) {
        Ok(()) => true,
        Err(DialError::Refused(Refusal::Foreign | Refusal::Secret)) => false,
        // Only a peer that knows the secret reads such a reason.
        Err(DialError::Refused(Refusal::Version { .. } | Refusal::Job { .. } | Refusal::Run)) => true,
        Err(_) => false,
    }
}

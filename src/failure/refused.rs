//! Names the system call that the system refuses to this process, where an operation failed for it.

use std::io::ErrorKind;
use std::sync::Arc;

use crate::error::{Cause, Error, StoreError};
use crate::sys;

/// Returns the error that this rank reports instead of `error`, if that came of a call that the system
/// refuses to this process. The rank at fault is then this one, and not the peer that it was about.
pub(crate) fn name_refused_call(error: Error) -> Error {
    match error {
        Error::Os { doing, source, rank } => {
            let source = sys::refusal_behind(&source).map_or(source, Arc::new);
            Error::Os { doing, source, rank }
        }
        Error::Store { store, problem: StoreError::Io { doing, source } } => {
            let source = sys::refusal_behind(&source).map_or(source, Arc::new);
            StoreError::Io { doing, source }.at(store)
        }
        Error::Store { store, problem: StoreError::Folder { folder, source } } => match sys::refusal_behind(&source) {
            Some(refusal) => StoreError::io("looking at its folder")(refusal).at(store),
            None => StoreError::Folder { folder, source }.at(store),
        },
        Error::Peer { rank, ref cause, .. } => match refusal_behind(cause) {
            Some(refusal) => Error::os(format!("communicating with rank {rank}"))(refusal),
            None => error,
        },
        error => error,
    }
}

/// Returns the error of the refused call that made a peer seem to fail.
fn refusal_behind(cause: &Cause) -> Option<std::io::Error> {
    match cause {
        Cause::Broken(ErrorKind::PermissionDenied | ErrorKind::Unsupported)
        | Cause::Unreachable { kind: ErrorKind::PermissionDenied | ErrorKind::Unsupported, .. } => sys::refusal(),
        // The start has made these calls. If the system refuses one now, peers cannot reach this rank.
        Cause::Broken(_) | Cause::Unreachable { .. } | Cause::Closed | Cause::Gone | Cause::Silent { .. } | Cause::Revoked => {
            sys::try_out().err()
        }
        _ => None,
    }
}

/// Returns the error of the refused call for which peers lost this rank: they may report it before the
/// thread of this rank that made the call.
pub(super) fn refusal_that_peers_saw(cause: &Cause) -> Option<std::io::Error> {
    match cause {
        Cause::Broken(_) | Cause::Unreachable { .. } | Cause::Closed | Cause::Gone | Cause::Silent { .. } => sys::refusal(),
        _ => None,
    }
}

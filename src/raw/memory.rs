//! Memory of a communicator's pool, for bindings that do not need it cleared.

use crate::communicator::{Communicator, Pooled};
use crate::error::Result;

/// Takes bytes as [`Communicator::alloc_pooled`] does, but does not clear them: they are zeros or
/// what earlier holders have left.
///
/// # Errors
///
/// As for [`Communicator::alloc_pooled`].
pub fn alloc_uncleared(comm: &Communicator, bytes: usize) -> Result<Pooled<u8>> {
    comm.alloc_uncleared(bytes)
}

//! The side of a thread that calls: it prepares for calls on devices, and enqueues them.

use super::operation::DeviceOperation;
use super::state::DeviceState;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::progress::CommState;
use crate::progress::state::Exclusively;

/// A thread that calls. Each driver call is made here, before a stream waits for anything.
pub(super) struct Caller<'a> {
    pub(super) state: &'a CommState,
    pub(super) devices: &'a DeviceState,
    pub(super) exclusively: &'a Exclusively<'a>,
}

impl Caller<'_> {
    /// Runs a part of a call that concerns the other ranks before the call is enqueued.
    pub(super) fn in_turn<R>(&self, call: &Call, part: impl FnOnce(&mut DeviceOperation<'_>) -> Result<R>) -> Result<R> {
        let Caller { state, devices, .. } = *self;
        let (mut part, mut outcome) = (Some(part), None);
        (self.exclusively)(call, &mut |core| {
            let Some(part) = part.take() else { return Ok(()) };
            let first = state.failure.get().map(|first| Error::Revoked { first: first.clone() });
            let result = first.map_or_else(|| part(&mut DeviceOperation::new(state, devices, core, call)), Err);
            outcome = Some(result.map_err(|error| state.fail(core, error))?);
            Ok(())
        })?;
        Ok(outcome.expect("a part that has ended well has an outcome"))
    }
}

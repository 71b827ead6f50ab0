//! From a submitted call to the path on which it runs, and to the end of its communicator if it fails.

use std::borrow::Cow;
use std::cell::RefCell;

use smallvec::SmallVec;

use super::state::CommState;
use crate::call::Call;
use crate::error::Result;
use crate::exec::Core;
use crate::exec::messages::{Interrupted, Message};

impl CommState {
    /// Runs a call on this thread. Refuses it if the communicator is revoked, and revokes the
    /// communicator if it fails.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    #[inline(always)]
    pub(super) unsafe fn dispatch(&self, core: &mut Core, call: &Call) -> Result<()> {
        if call.op.is_point_to_point() {
            // SAFETY: passed on.
            return unsafe { self.dispatch_together(core, std::slice::from_ref(call), || false) }.map(drop);
        }
        self.run_collective(core, call, |core| {
            // SAFETY: passed on.
            unsafe {
                match self.concerns_devices(call) {
                    true => self.devices.run(self, core, call),
                    false => core.run_on_host(&self.info, &self.recording.history, call),
                }
            }
        })
    }

    /// As [`CommState::dispatch`], for a call that equals the one that the core keeps of its operation: `call`
    /// itself need not be checked.
    ///
    /// # Safety
    ///
    /// The core keeps a call with the arguments of `call`. Its buffers are valid until this returns, and
    /// nothing else uses them.
    #[inline(always)]
    pub(super) unsafe fn dispatch_again(&self, core: &mut Core, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        self.run_collective(core, call, |core| unsafe { core.run_again(&self.info, &self.recording.history, call) })
    }

    #[inline(always)]
    fn run_collective(&self, core: &mut Core, call: &Call, run: impl FnOnce(&mut Core) -> Result<()>) -> Result<()> {
        self.check_not_revoked(core, call)?;
        let result = self.unless_it_panics(core, call.op, run);
        result.map_err(|error| self.fail(core, error))
    }

    /// Runs sends and receives side by side on this thread, as [`CommState::dispatch`] runs a
    /// collective. Returns those that have not ended when `is_wanted` says that another thread has a
    /// call: see [`Core::run_point_to_point`].
    ///
    /// # Safety
    ///
    /// As for [`CommState::dispatch`], for all calls. The buffers of those that are returned are
    /// valid until they have ended.
    pub(super) unsafe fn dispatch_together(
        &self,
        core: &mut Core,
        calls: &[Call],
        is_wanted: impl Fn() -> bool,
    ) -> Result<Vec<(Call, Interrupted)>> {
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        let op = first.op;
        self.check_not_revoked(core, first)?;
        if let [call] = calls {
            // SAFETY: passed on.
            let run = |core: &mut Core| unsafe { core.run_message_now(&self.info, call, &is_wanted) };
            if self.unless_it_panics(core, op, run) {
                return Ok(Vec::new());
            }
        }
        let mut indices = 0..calls.len();
        let ended: RefCell<SmallVec<[bool; 2]>> = RefCell::default();
        let next = || {
            let index = indices.next()?;
            ended.borrow_mut().push(false);
            Some(Message { call: Cow::Borrowed(&calls[index]), interrupted: None })
        };
        let finished = |key: u64| ended.borrow_mut()[key as usize] = true;
        let run = |core: &mut Core| {
            // SAFETY: passed on.
            unsafe { core.run_point_to_point(&self.info, next, finished, is_wanted) }
        };
        match self.unless_it_panics(core, op, run) {
            Ok(interrupted) => {
                let ended = ended.into_inner();
                let left = calls.iter().zip(ended).filter(|(_, ended)| !ended).map(|(call, _)| call.clone());
                Ok(left.zip(interrupted).collect())
            }
            Err(error) => Err(self.fail(core, error)),
        }
    }
}

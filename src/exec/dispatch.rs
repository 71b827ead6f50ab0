//! From a call on host memory to the path on which it runs: shared memory, messages, or both
//! ("hierarchical").

use super::core::Core;
use crate::call::Call;
use crate::error::Result;
use crate::failure::{CommInfo, OpContext};
use crate::reduce::normalise_bools;
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::trace::{self, LogEntry, OpLog};
use crate::types::DType;

impl Core {
    /// Runs a collective on host memory: gives it its sequence number, chooses its path, and
    /// records it in `history`.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    #[inline(always)]
    pub(crate) unsafe fn run_on_host(&mut self, info: &CommInfo, history: &OpLog, call: &Call) -> Result<()> {
        self.seq += 1;
        let world = self.layout.ranks;
        let (descriptor, bytes) = (call.descriptor(self.seq), call.bytes(world));
        let choice = (world > 1 && !call.is_empty(world)).then(|| self.choose_for(call, bytes));
        let note = LogEntry::new(history, bytes, trace::path(choice));
        let context = OpContext::noted(descriptor, info, call.timeout, &note);
        // A window records a short call itself, when no peer waits for this rank any more.
        if note.is_large() || choice.is_none_or(|choice| choice.algorithm != Algorithm::Window) {
            context.note();
        }
        // An error is large, so only a call that fails moves one.
        // SAFETY: passed on.
        match unsafe { self.run_on_path(choice, &context, call) } {
            Ok(()) => {
                note.end(&context.words, true);
                Ok(())
            }
            Err(error) => {
                note.end(&context.words, false);
                Err(error)
            }
        }
    }

    /// Runs a collective on its path. Without a choice it exchanges nothing with other ranks.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_on_host`].
    #[inline(always)]
    pub(super) unsafe fn run_on_path(&mut self, choice: Option<Choice>, context: &OpContext<'_>, call: &Call) -> Result<()> {
        let Some(choice) = choice else {
            self.count_in_window(context);
            if call.send.ptr != call.recv.ptr {
                // SAFETY: the caller vouches for both. On a single rank they are equally long, and
                // apart unless they are the same; on several ranks they are empty.
                unsafe { std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.recv.len) };
            }
            return Ok(());
        };
        // SAFETY: passed on.
        unsafe {
            match call.dtype {
                DType::Bool => self.run_on_bools(choice, context, call),
                _ => self.run_chosen(choice, context, call),
            }
        }
    }

    /// Adds a call that does not use shared memory to those that the next one there compares.
    #[inline]
    fn count_in_window(&mut self, context: &OpContext<'_>) {
        if let Some(window) = &mut self.window {
            window.skip(context);
        }
    }

    /// Runs a collective in the chosen way.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_on_host`].
    #[inline(always)]
    unsafe fn run_chosen(&mut self, choice: Choice, context: &OpContext<'_>, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match (choice.algorithm, choice.between) {
                (Algorithm::Window, _) => self.run_in_shared_memory(context, call),
                (Algorithm::Hierarchical, Some(between)) => self.run_hierarchical(context, call, between),
                (algorithm, _) => {
                    // No later call may read its messages, and notice that the ranks of this host differ.
                    self.count_in_window(context);
                    self.run_by_messages(context.clone(), call, algorithm)
                }
            }
        }
    }

    /// As [`Core::run_chosen`], on bools, which are 0 or 1 whatever the peers have sent.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_on_host`].
    #[inline(never)]
    unsafe fn run_on_bools(&mut self, choice: Choice, context: &OpContext<'_>, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            let result = self.run_chosen(choice, context, call);
            // All that may have been written, also after a failure: in place, the other ranks'
            // blocks are scratch memory.
            let (send, recv) = (call.send, call.recv);
            normalise_bools(recv.ptr, recv.len);
            if send.ptr.addr() <= recv.ptr.addr() && recv.ptr.addr() < send.ptr.addr() + send.len {
                normalise_bools(send.ptr.cast_mut(), send.len);
            }
            result
        }
    }

    /// Runs a collective of ranks that are all on this host.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_on_host`].
    #[inline(always)]
    unsafe fn run_in_shared_memory(&mut self, context: &OpContext<'_>, call: &Call) -> Result<()> {
        let window = self.window.as_mut().expect("a layout with windows has one");
        // SAFETY: passed on.
        unsafe { window.run(context, call) }
    }
}

//! From a call on host memory to the path on which it runs: shared memory, messages, or both
//! ("hierarchical").

use super::core::Core;
use super::repeated::CallKey;
use crate::call::Call;
use crate::error::Result;
use crate::failure::{CommInfo, OpContext};
use crate::reduce::normalise_bools;
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::trace::{self, LogEntry, OpLog};
use crate::types::{DType, Descriptor, Op};

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
        let choice = (world > 1 && !call.is_empty(bytes)).then(|| self.choose_for(call, bytes));
        let note = LogEntry::new(history, bytes, trace::path(choice));
        let context = OpContext::noted(descriptor, descriptor.encode(), info, call.timeout, &note);
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
        let Some(Choice { algorithm, between }) = choice else {
            self.count_in_window(context);
            if call.send.ptr != call.recv.ptr {
                // SAFETY: the caller vouches for both. On a single rank they are equally long, and
                // apart unless they are the same; on several ranks they are empty.
                unsafe { std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.recv.len) };
            }
            return Ok(());
        };
        if algorithm != Algorithm::Window && self.inquiry.is_some() {
            self.inquire(context, call, Choice { algorithm, between })?;
        }
        // SAFETY: passed on.
        unsafe {
            let result = match (algorithm, between) {
                (Algorithm::Window, _) => self.window.as_mut().expect("a layout with windows has one").run(context, call),
                (Algorithm::Hierarchical, Some(between)) => self.run_hierarchical(context, call, between),
                (algorithm, _) => {
                    // No later call may read its messages, and notice that the ranks of this host differ.
                    self.count_in_window(context);
                    self.run_by_messages(context.clone(), call, algorithm)
                }
            };
            if call.dtype == DType::Bool {
                normalise_written(call);
            }
            result
        }
    }

    /// Adds a call that does not use shared memory to those that the next one there compares.
    #[inline]
    fn count_in_window(&mut self, context: &OpContext<'_>) {
        if let Some(window) = &mut self.window {
            window.skip(context);
        }
    }
}

impl Core {
    /// Returns whether a call equals the one that is kept of its operation.
    #[inline(always)]
    pub(crate) fn is_repeated(&self, op: Op, key: &CallKey) -> bool {
        self.last_calls.has(op, key)
    }

    /// Keeps a checked call if [`Core::run_again`] can run it. Returns whether it was kept.
    #[inline]
    pub(crate) fn keep(&mut self, key: CallKey, call: &Call) -> bool {
        let world = self.layout.ranks;
        let bytes = call.bytes(world);
        // What was found out about a long call is little beside what it moves.
        if trace::is_large(bytes) || world == 1 || call.is_empty(bytes) || call.dtype == DType::Bool || self.settings.devices {
            return false;
        }
        let choice = self.choose_for(call, bytes);
        let is_kept = choice.algorithm == Algorithm::Window;
        if is_kept {
            self.last_calls.keep(key, call, bytes, trace::path(Some(choice)));
        }
        is_kept
    }

    /// Runs a call that equals the one that is kept of its operation, as [`Core::run_on_host`] does.
    ///
    /// # Safety
    ///
    /// For `call`, [`Core::is_repeated`] or [`Core::keep`] has returned true, and no other was kept since. Its
    /// buffers are valid until this returns, and nothing else uses them.
    #[inline(always)]
    pub(crate) unsafe fn run_again(&mut self, info: &CommInfo, history: &OpLog, call: &Call) -> Result<()> {
        self.seq += 1;
        let (Some(last), Some(window)) = (self.last_calls.again(call), &mut self.window) else {
            unreachable!("only calls in shared memory are kept");
        };
        let note = LogEntry::new(history, last.bytes, last.path);
        let descriptor = Descriptor { seq: self.seq, ..last.descriptor };
        let mut words = last.words;
        words[Descriptor::SEQ] = self.seq;
        let context = OpContext::noted(descriptor, words, info, None, &note);
        // SAFETY: an equal call was checked before it was kept, and the buffers are those of `call`, for which the
        // caller vouches.
        let result = unsafe { window.run(&context, &last.call) };
        note.end(&context.words, result.is_ok());
        result
    }
}

/// Makes bools 0 or 1, whatever the peers have sent: all that may have been written, also after a
/// failure. In place, the other ranks' blocks are scratch memory.
///
/// # Safety
///
/// As for [`Core::run_on_host`].
#[cold]
unsafe fn normalise_written(call: &Call) {
    let (send, recv) = (call.send, call.recv);
    // SAFETY: passed on.
    unsafe {
        normalise_bools(recv.ptr, recv.len);
        if send.ptr.addr() <= recv.ptr.addr() && recv.ptr.addr() < send.ptr.addr() + send.len {
            normalise_bools(send.ptr.cast_mut(), send.len);
        }
    }
}

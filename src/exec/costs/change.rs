//! Orders the hosts anew when a link becomes slow while a job runs, or carries again what it did.
//!
//! Each rank notices that of its own links ([`Recording`](crate::trace::Recording)). At times all ranks ask each
//! other whether one of them has noticed anything ([`Inquiry`](crate::exec::inquiry::Inquiry)), and measure the
//! pairs of hosts again if so. As long as a link carries less than at the start, they go on to measure: it may be
//! one that nothing uses any more.

use std::time::Duration;

use super::pairs::{ALL_ROUNDS, most_time};
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::Result;
use crate::exec::core::Core;
use crate::exec::inquiry::Inquiry;
use crate::failure::OpContext;
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::types::{DType, Op, ReduceOp};

impl Core {
    /// Counts a collective that uses links, before it runs, and asks the other ranks if it is time.
    #[cold]
    pub(in crate::exec) fn inquire(&mut self, context: &OpContext<'_>, call: &Call, choice: Choice) -> Result<()> {
        let bytes = call.bytes(self.layout.ranks);
        let Some(inquiry) = &mut self.inquiry else { return Ok(()) };
        // The question is an all-reduce, and takes the links of one, or of another ring.
        let is_ring = choice.algorithm == Algorithm::Ring && matches!(call.op, Op::AllGather | Op::ReduceScatter);
        let can_ask = call.op == Op::AllReduce || is_ring;
        // Of an operation with counts, ranks know different bytes.
        if call.op.has_counts() || !inquiry.is_due(bytes, can_ask) {
            return Ok(());
        }
        // The call and what comes before it share one deadline.
        context.begin();
        let has_changed = inquiry.take_open() | self.recording.take_change();
        let left = u64::try_from(context.left().as_nanos()).unwrap_or(u64::MAX);
        let words = [u64::from(has_changed), u64::MAX - left];
        let [has_changed, rest] = self.ask(context, choice, ReduceOp::Max, words)?;
        if has_changed == 0 {
            return Ok(());
        }
        // On a link that the call does not use, a message without a tag may wait for its receive.
        let messages = [self.messages_in_flight(), 0];
        let [messages, _] = self.ask(context, choice, ReduceOp::Sum, messages)?;
        if messages > 0 {
            self.inquiry.iter_mut().for_each(Inquiry::postpone);
            return Ok(());
        }
        if context.info.rank == 0 {
            crate::log::info!("a link has changed: each pair of hosts is measured again");
        }
        let most = most_time(ALL_ROUNDS, Duration::from_nanos(u64::MAX - rest));
        // Other work may disturb the links: later jobs do not get these costs.
        let again = self.measure_pairs_again(context, most, false)?;
        let is_as_before = again.is_some_and(|again| again.measured.unconfirmed == 0 && !again.is_slower);
        if is_as_before {
            self.recording.links_recovered();
        }
        self.inquiry.iter_mut().for_each(|inquiry| inquiry.answered(is_as_before));
        Ok(())
    }

    /// Reduces two words of each rank over the links that a call with this choice uses.
    fn ask(&mut self, context: &OpContext<'_>, choice: Choice, redop: ReduceOp, words: [u64; 2]) -> Result<[u64; 2]> {
        let mut words = words;
        let question = Call::in_place(Op::AllReduce, DType::U64, RawSliceMut::of(&mut words));
        let question = Call { redop: Some(redop), ..question };
        // SAFETY: `words` is borrowed for the call.
        unsafe {
            match choice.between {
                Some(between) => self.run_hierarchical(context, &question, between)?,
                None => self.run_by_messages(context.clone(), &question, choice.algorithm)?,
            }
        }
        Ok(words)
    }
}

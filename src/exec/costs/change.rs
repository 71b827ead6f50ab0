//! Orders the hosts anew when a link becomes slow while a job runs, or carries again what it did.
//!
//! Each rank notices that of its own links ([`Recording`](crate::trace::Recording)). At times all ranks ask each
//! other whether one of them has noticed anything ([`Inquiry`](crate::exec::inquiry::Inquiry)), and measure the
//! pairs of hosts again if so.

use std::time::Duration;

use super::pairs::{ALL_ROUNDS, most_time};
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::Result;
use crate::exec::core::Core;
use crate::failure::OpContext;
use crate::schedule::Algorithm;
use crate::types::{DType, Op, ReduceOp};

impl Core {
    /// Counts a collective that uses links, before it runs, and asks the other ranks if it is time.
    #[cold]
    pub(in crate::exec) fn inquire(&mut self, context: &OpContext<'_>, call: &Call) -> Result<()> {
        let bytes = call.bytes(self.layout.ranks);
        let Some(inquiry) = &mut self.inquiry else { return Ok(()) };
        // Of an operation with counts, ranks know different bytes.
        if call.op.has_counts() || !inquiry.is_due(bytes) {
            return Ok(());
        }
        let has_changed = inquiry.take_open() | self.recording.take_change();
        let mut words = [u64::from(has_changed), u64::MAX - context.timeout().as_nanos() as u64];
        let question = Call::in_place(Op::AllReduce, DType::U64, RawSliceMut::of(&mut words));
        let question = Call { redop: Some(ReduceOp::Max), ..question };
        // SAFETY: `words` is borrowed for the call.
        unsafe { self.run_in_order_of_ranks(context.clone(), &question, Algorithm::RecursiveDoubling, None)? };
        let [has_changed, rest] = words;
        if has_changed > 0 {
            if context.info.rank == 0 {
                crate::log::info!("a link has changed: each pair of hosts is measured again");
            }
            let most = most_time(ALL_ROUNDS, Duration::from_nanos(u64::MAX - rest));
            let measured = self.measure_pairs_again(context, most)?;
            if let Some(inquiry) = &mut self.inquiry {
                inquiry.answered(measured.is_some_and(|(_, measured)| measured.unconfirmed == 0));
            }
        }
        Ok(())
    }
}

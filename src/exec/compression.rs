//! Which reductions exchange elements of 16 bits between hosts (`wire_dtype`).

use super::call::Call;
use super::core::Core;
use crate::reduce::Kernel;
use crate::schedule::Algorithm;
use crate::schedule::select::Choice;
use crate::types::{DType, Op, ReduceOp};

/// Bytes of the smallest reduction that is compressed. The time of a smaller one is latency, and it
/// may be a loss or a number of samples, which should stay exact.
const LEAST: u64 = 16 << 10;

/// How a reduction is compressed.
#[derive(Clone, Copy)]
pub(super) struct Compression {
    /// The type of the elements of messages.
    pub(super) dtype: DType,
    /// Reduces elements of this type, accumulated in f32.
    pub(super) kernel: Kernel,
}

impl Core {
    /// Returns how messages between hosts are compressed in this call: sums and averages of f32, on
    /// all ranks alike. `None` if they are not.
    #[inline]
    pub(super) fn compression(&self, call: &Call) -> Option<Compression> {
        let dtype = self.settings.wire_dtype.narrowed()?;
        self.compression_to(dtype, call)
    }

    #[inline(never)]
    fn compression_to(&self, dtype: DType, call: &Call) -> Option<Compression> {
        let redop = call.redop.filter(|redop| matches!(redop, ReduceOp::Sum | ReduceOp::Average))?;
        let reduces = matches!(call.op, Op::AllReduce | Op::Reduce | Op::ReduceScatter | Op::ReduceScatterV);
        // Reproducible results do not depend on the layout, and so not on what a host rounds.
        let may_round = call.dtype == DType::F32 && reduces && !self.settings.reproducible;
        let pays = self.layout.hosts > 1 && call.bytes(self.layout.ranks) >= LEAST;
        if !may_round || !pays {
            return None;
        }
        Some(Compression { dtype, kernel: Kernel::new(dtype, redop)? })
    }

    /// As [`Core::choose`], for a call. A compressed call has one form: exact inside each host, and
    /// direct between hosts, where its elements are rounded once.
    #[inline]
    pub(super) fn choose_for(&mut self, call: &Call, bytes: u64) -> Choice {
        if self.compression(call).is_none() {
            return self.choose(call.op, bytes);
        }
        match self.layout.windows {
            true => Choice { algorithm: Algorithm::Hierarchical, between: Some(Algorithm::Direct) },
            false => Choice { algorithm: Algorithm::Direct, between: None },
        }
    }
}

//! Which reductions exchange elements of fewer bits between hosts (`wire_dtype`).

use super::core::{Core, choose};
use crate::call::Call;
use crate::config::SharedSettings;
use crate::reduce::Packing;
use crate::schedule::Algorithm;
use crate::schedule::select::{Choice, Layout};
use crate::types::{DType, Op, ReduceOp};

/// Bytes of the smallest reduction that is compressed. The time of a smaller one is latency, and it
/// may be a loss or a number of samples, which should stay exact.
const LEAST: u64 = 16 << 10;

/// What decides whether a collective is compressed: its operation, element type and reduction, and
/// bytes as [`Call::bytes`] counts them.
pub(crate) type What = (Op, DType, Option<ReduceOp>, u64);

/// Returns how messages between hosts are packed, if they are: sums and averages of f32, and of f16 and
/// bf16 in blocks of bytes.
#[inline]
pub(crate) fn compression(settings: &SharedSettings, layout: Layout, what: impl FnOnce() -> What) -> Option<Packing> {
    let messages = settings.wire_dtype.packed()?;
    // Reproducible results do not depend on the layout, and so not on what a host rounds.
    if settings.reproducible || layout.hosts < 2 {
        return None;
    }
    let (op, of_buffers, redop, bytes) = what();
    let is_compressed = op.reduces() && matches!(redop, Some(ReduceOp::Sum | ReduceOp::Average)) && bytes >= LEAST;
    let packing = is_compressed.then(|| Packing::new(messages, of_buffers)).flatten()?;
    Some(if settings.wire_seed == 0 { packing } else { packing.at_random(settings.wire_seed.into()) })
}

/// The form of a compressed call: exact inside each host, and direct between hosts, where elements are
/// rounded once.
fn form(layout: Layout) -> Choice {
    match layout.windows {
        true => Choice { algorithm: Algorithm::Hierarchical, between: Some(Algorithm::Direct) },
        false => Choice { algorithm: Algorithm::Direct, between: None },
    }
}

impl Core {
    /// Returns how messages between hosts are packed in a call, which all ranks decide alike; `None` if
    /// they are not.
    #[inline]
    pub(super) fn compression(&self, call: &Call) -> Option<Packing> {
        compression(&self.settings, self.layout, || (call.op, call.dtype, call.redop, call.bytes(self.layout.ranks)))
    }

    /// As [`Core::choose`], for a call.
    #[inline]
    pub(super) fn choose_for(&mut self, call: &Call, bytes: u64) -> Choice {
        match self.compression(call) {
            Some(_) => form(self.layout),
            None => self.choose(call.op, bytes),
        }
    }
}

/// As [`Core::choose_for`], without the core.
pub(crate) fn choose_for(settings: &SharedSettings, layout: Layout, what: What) -> Choice {
    match compression(settings, layout, || what) {
        Some(_) => form(layout),
        None => choose(settings, layout, what.0, what.3),
    }
}

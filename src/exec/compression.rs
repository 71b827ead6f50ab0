//! Which reductions exchange elements of 16 bits between hosts (`wire_dtype`).

use super::core::{Core, choose};
use crate::call::Call;
use crate::config::SharedSettings;
use crate::reduce::Kernel;
use crate::schedule::Algorithm;
use crate::schedule::select::{Choice, Layout};
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

/// What decides whether a collective is compressed: its operation, element type and reduction, and
/// bytes as [`Call::bytes`] counts them.
pub(crate) type What = (Op, DType, Option<ReduceOp>, u64);

/// Returns how messages between hosts are compressed, if they are: sums and averages of f32.
#[inline]
fn compression(settings: &SharedSettings, layout: Layout, what: impl FnOnce() -> What) -> Option<Compression> {
    let dtype = settings.wire_dtype.narrowed()?;
    // Reproducible results do not depend on the layout, and so not on what a host rounds.
    if settings.reproducible || layout.hosts < 2 {
        return None;
    }
    let (op, of_buffers, redop, bytes) = what();
    let redop = redop.filter(|redop| matches!(redop, ReduceOp::Sum | ReduceOp::Average))?;
    let is_compressed = op.reduces() && of_buffers == DType::F32 && bytes >= LEAST;
    is_compressed.then(|| Kernel::new(dtype, redop)).flatten().map(|kernel| Compression { dtype, kernel })
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
    /// Returns how messages between hosts are compressed in a call, which all ranks decide alike;
    /// `None` if they are not.
    #[inline]
    pub(super) fn compression(&self, call: &Call) -> Option<Compression> {
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

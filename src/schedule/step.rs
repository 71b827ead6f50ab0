//! One step of a schedule, and the memory that it uses.

use std::ops::Range;

use crate::types::Rank;

/// One of a call's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRef {
    /// The send buffer. Never written, unless it is also the output (in place).
    Input,
    /// The receive buffer.
    Output,
    /// The engine's memory.
    Scratch,
}

/// A range of elements of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) place: BufferRef,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl BufferRef {
    pub(crate) fn span(self, range: Range<usize>) -> Span {
        Span { place: self, at: range.start, len: range.len() }
    }
}

/// One step of a rank. The spans of a step have the same length, except for `Fold`'s parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Queues `src` for `to`.
    Send { to: Rank, src: Span },
    /// Waits for a message, and stores it in `dst`.
    Recv { from: Rank, dst: Span },
    /// As `Recv`, and forwards what arrives.
    RecvSend { from: Rank, dst: Span, to: Rank },
    /// Waits for a message, and stores its reduction with `own` in `dst`.
    RecvReduce { from: Rank, own: Span, dst: Span, finish: bool },
    /// As `RecvReduce`, and forwards the result.
    RecvReduceSend { from: Rank, own: Span, dst: Span, to: Rank, finish: bool },
    /// Copies, unless both are the same memory.
    Copy { src: Span, dst: Span },
    /// Converts between a buffer and scratch. The engine's job says how elements are packed in its
    /// messages and in scratch.
    Convert { src: Span, dst: Span },
    /// Stores in `dst` the reduction of `own` and the other ranks' parts, in the order of ranks.
    /// The parts begin every `stride` elements in scratch, from `parts` on. Always finishes.
    Fold { own: Span, parts: usize, stride: usize, dst: Span },
}

impl Step {
    /// Returns how many elements the step moves.
    pub(crate) fn len(&self) -> usize {
        match self {
            Step::Send { src, .. } => src.len,
            Step::Recv { dst, .. }
            | Step::RecvSend { dst, .. }
            | Step::RecvReduce { dst, .. }
            | Step::RecvReduceSend { dst, .. }
            | Step::Copy { dst, .. }
            | Step::Convert { dst, .. }
            | Step::Fold { dst, .. } => dst.len,
        }
    }

    /// Returns how many elements of scratch the step needs.
    pub(crate) fn scratch(&self, world: usize) -> usize {
        let end = |span: &Span| if span.place == BufferRef::Scratch { span.at + span.len } else { 0 };
        match self {
            Step::Send { src, .. } => end(src),
            Step::Recv { dst, .. } | Step::RecvSend { dst, .. } => end(dst),
            Step::RecvReduce { own, dst, .. } | Step::RecvReduceSend { own, dst, .. } => end(own).max(end(dst)),
            Step::Copy { src, dst } | Step::Convert { src, dst } => end(src).max(end(dst)),
            Step::Fold { own, parts, stride, dst } => end(own).max(end(dst)).max(parts + (world - 1) * stride),
        }
    }
}

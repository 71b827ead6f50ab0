//! One step of a schedule, and the memory that it uses.

use std::ops::Range;

use crate::types::Rank;

/// Which of a call's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferRef {
    /// The send buffer. Never written, unless it is the output as well (in place).
    Input,
    /// The receive buffer.
    Output,
    /// Memory of the engine.
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

/// One thing that a rank does. The spans of one step have the same length, but for `Fold`'s parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Queue `src` for `to`.
    Send { to: Rank, src: Span },
    /// Wait for a message and put it to `dst`.
    Recv { from: Rank, dst: Span },
    /// `Recv`, forwarding what arrives.
    RecvSend { from: Rank, dst: Span, to: Rank },
    /// Wait for a message, and put its reduction with `own` to `dst`.
    RecvReduce { from: Rank, own: Span, dst: Span, finish: bool },
    /// `RecvReduce`, forwarding the result.
    RecvReduceSend { from: Rank, own: Span, dst: Span, to: Rank, finish: bool },
    /// Copy, unless both are the same memory.
    Copy { src: Span, dst: Span },
    /// Put to `dst` the reduction, in the order of ranks, of `own` and of the other ranks' parts, which lie one after the
    /// other in scratch from `parts` on. Always finishes.
    Fold { own: Span, parts: usize, dst: Span },
}

impl Step {
    /// Elements that the step moves.
    pub(crate) fn len(&self) -> usize {
        match self {
            Step::Send { src, .. } => src.len,
            Step::Recv { dst, .. }
            | Step::RecvSend { dst, .. }
            | Step::RecvReduce { dst, .. }
            | Step::RecvReduceSend { dst, .. }
            | Step::Copy { dst, .. }
            | Step::Fold { dst, .. } => dst.len,
        }
    }

    /// Elements of scratch that the step needs to be there.
    pub(crate) fn scratch(&self, world: usize) -> usize {
        let end = |span: &Span| if span.place == BufferRef::Scratch { span.at + span.len } else { 0 };
        match self {
            Step::Send { src, .. } => end(src),
            Step::Recv { dst, .. } | Step::RecvSend { dst, .. } => end(dst),
            Step::RecvReduce { own, dst, .. } | Step::RecvReduceSend { own, dst, .. } => end(own).max(end(dst)),
            Step::Copy { src, dst } => end(src).max(end(dst)),
            Step::Fold { own, parts, dst } => end(own).max(end(dst)).max(parts + (world - 1) * own.len),
        }
    }
}

//! What a step cost.

use std::time::Duration;

use crate::types::DType;

/// What the reduction of one step took; times are counted from the step's begin.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StepStatistics {
    /// The buckets, in the order in which they were launched.
    pub buckets: Vec<BucketStatistics>,
    /// When `finish()` was called: how long forward and backward took. Where gradients are on a device: when the last was there.
    pub computed: Duration,
    /// How long after that `finish()` returned.
    pub waited: Duration,
}

/// What one bucket took.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BucketStatistics {
    /// Bytes of gradients.
    pub bytes: usize,
    /// The type of its elements.
    pub dtype: DType,
    /// How many parameters it has.
    pub parameters: usize,
    /// When its last gradient was made ready.
    pub ready: Duration,
    /// When its reduction started.
    pub started: Duration,
    /// When it had been reduced.
    pub ended: Duration,
}

impl BucketStatistics {
    /// How long it took to reduce.
    pub fn took(&self) -> Duration {
        self.ended.saturating_sub(self.started)
    }

    /// How long it was ready before its reduction started, behind those before it.
    pub fn queued(&self) -> Duration {
        self.started.saturating_sub(self.ready)
    }
}

impl StepStatistics {
    /// Bytes of all buckets.
    pub fn bytes(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.bytes).sum()
    }

    /// How long buckets were being reduced, in sum.
    pub fn communicated(&self) -> Duration {
        self.buckets.iter().map(BucketStatistics::took).sum()
    }

    /// How much of that was before `finish()` was called, hidden behind the computation.
    pub fn overlapped(&self) -> Duration {
        let hidden = |bucket: &BucketStatistics| bucket.ended.min(self.computed).saturating_sub(bucket.started);
        self.buckets.iter().map(hidden).sum()
    }

    /// The share of communication that was hidden, from 0 to 1; 0 if there was none.
    pub fn overlap(&self) -> f64 {
        let all = self.communicated().as_secs_f64();
        if all > 0.0 { self.overlapped().as_secs_f64() / all } else { 0.0 }
    }
}

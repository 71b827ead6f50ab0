//! Timings of a step.

use std::time::Duration;

use crate::types::DType;

/// Timings of the reduction of one step, counted from the start of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepStatistics {
    /// The buckets, in the order in which they were launched.
    pub buckets: Vec<BucketStatistics>,
    /// When `finish()` was called, that is how long forward and backward took. With gradients on a
    /// device: when the last was complete.
    pub computed: Duration,
    /// The time from then until `finish()` returned.
    pub waited: Duration,
}

/// Timings of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStatistics {
    /// The bytes of its gradients.
    pub bytes: usize,
    /// The type of its elements.
    pub dtype: DType,
    /// The number of its parameters.
    pub parameters: usize,
    /// When its last gradient was made ready.
    pub ready: Duration,
    /// When its reduction started.
    pub started: Duration,
    /// When its reduction ended.
    pub ended: Duration,
}

impl BucketStatistics {
    /// Returns how long its reduction took.
    pub fn took(&self) -> Duration {
        self.ended.saturating_sub(self.started)
    }

    /// Returns how long it was ready before its reduction started.
    pub fn queued(&self) -> Duration {
        self.started.saturating_sub(self.ready)
    }
}

impl StepStatistics {
    /// Returns the bytes of all buckets.
    pub fn bytes(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.bytes).sum()
    }

    /// Returns the sum of the times that the buckets' reductions took.
    pub fn communicated(&self) -> Duration {
        self.buckets.iter().map(BucketStatistics::took).sum()
    }

    /// Returns how much of that was before `finish()` was called, and so hidden behind the
    /// computation.
    pub fn overlapped(&self) -> Duration {
        let hidden = |bucket: &BucketStatistics| bucket.ended.min(self.computed).saturating_sub(bucket.started);
        self.buckets.iter().map(hidden).sum()
    }

    /// Returns the share of communication that was hidden, from 0 to 1; 0 if there was none.
    pub fn overlap(&self) -> f64 {
        let all = self.communicated().as_secs_f64();
        if all > 0.0 { self.overlapped().as_secs_f64() / all } else { 0.0 }
    }
}

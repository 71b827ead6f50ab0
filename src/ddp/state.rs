//! The state of the current step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::buckets::Buckets;
use super::layout::BucketLayout;
use super::statistics::{BucketStatistics, StepStatistics};
use crate::error::{Error, Result};

/// Where the reducer is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Between steps: nothing is in flight, and gradients may be read.
    Between,
    /// Within a step: gradients are written and made ready.
    Open {
        /// Whether they are reduced, or only accumulated.
        syncs: bool,
    },
    /// In `finish()`.
    Ending,
}

/// The state of a parameter's gradient in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gradient {
    /// Not written yet.
    Awaited,
    /// A view of it exists, which writes it.
    InView,
    Ready,
    /// There is none: it counts as zeros.
    Unused,
}

/// A job for the reducer's thread.
pub(super) enum Job {
    /// Tells the other ranks that this one makes a step, and learns which ranks do.
    Announce,
    Bucket(usize),
    /// Exchanges which parameters any rank used.
    Used(Vec<bool>),
}

/// A job and its context.
pub(super) struct Task {
    pub(super) job: Job,
    pub(super) buckets: Arc<Buckets>,
    /// The number of steps reduced before.
    pub(super) step: u64,
    /// How many ranks make this step.
    pub(super) active: usize,
}

pub(super) struct State {
    pub(super) buckets: Arc<Buckets>,
    pub(super) phase: Phase,
    pub(super) gradients: Vec<Gradient>,
    /// For each bucket, how many of its gradients are awaited.
    pub(super) awaited: Vec<usize>,
    /// How many buckets have been queued; they are queued in order.
    pub(super) launched: usize,
    /// Whether the gradients hold the sums of steps that were not reduced.
    pub(super) accumulated: bool,
    /// The parameters in the order in which they became ready.
    pub(super) arrivals: Vec<usize>,
    /// With [`Unused::Static`](super::Unused): the parameters that the first step did not use.
    pub(super) idle: Option<Vec<bool>>,
    /// Parameters that this rank used since gradients were last reduced.
    pub(super) used: Vec<bool>,
    /// The parameters that any rank used, if ranks exchange that.
    pub(super) used_by_any: Option<Vec<bool>>,
    /// The ranks that make this step, or made the last.
    pub(super) active: Vec<bool>,
    /// The number of steps reduced so far.
    pub(super) steps: u64,
    pub(super) jobs: VecDeque<Job>,
    pub(super) is_working: bool,
    pub(super) is_closed: bool,
    pub(super) failure: Option<Error>,
    pub(super) began: Instant,
    pub(super) statistics: StepStatistics,
}

impl State {
    pub(super) fn new(parameters: usize, world: usize, buckets: Buckets) -> State {
        State {
            buckets: Arc::new(buckets),
            phase: Phase::Between,
            gradients: vec![Gradient::Awaited; parameters],
            awaited: Vec::new(),
            launched: 0,
            accumulated: false,
            arrivals: Vec::new(),
            idle: None,
            used: vec![false; parameters],
            used_by_any: None,
            active: vec![true; world],
            steps: 0,
            jobs: VecDeque::new(),
            is_working: false,
            is_closed: false,
            failure: None,
            began: Instant::now(),
            statistics: StepStatistics::default(),
        }
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, syncs: bool) {
        let buckets = &self.buckets.layout.buckets;
        self.phase = Phase::Open { syncs };
        self.began = Instant::now();
        self.gradients.fill(Gradient::Awaited);
        self.awaited = buckets.iter().map(|bucket| bucket.members.len()).collect();
        self.launched = 0;
        self.arrivals.clear();
        if !self.accumulated {
            self.used.fill(false);
        }
        if syncs {
            self.statistics = StepStatistics { buckets: buckets.iter().map(unstarted).collect(), ..StepStatistics::default() };
        }
    }

    /// Notes that a gradient is ready, or that there is none.
    ///
    /// After an error of its device the state is unchanged.
    pub(super) fn mark(&mut self, index: usize, gradient: Gradient) -> Result<()> {
        let bucket = self.buckets.layout.places[index].0;
        if gradient == Gradient::Unused && !self.accumulated {
            // SAFETY: the gradient was awaited, so no view of it exists, and its bucket has not
            // been launched.
            unsafe { self.buckets.zero(index)? };
        }
        self.buckets.mark(bucket)?;
        if gradient == Gradient::Ready {
            self.used[index] = true;
            self.arrivals.push(index);
        }
        self.gradients[index] = gradient;
        self.awaited[bucket] -= 1;
        if self.awaited[bucket] == 0 && self.phase == (Phase::Open { syncs: true }) {
            self.statistics.buckets[bucket].ready = self.began.elapsed();
        }
        Ok(())
    }

    pub(super) fn bucket_ended(&mut self, index: usize) {
        self.statistics.buckets[index].ended = self.began.elapsed();
    }
}

fn unstarted(bucket: &BucketLayout) -> BucketStatistics {
    let (bytes, dtype, parameters) = (bucket.bytes.len(), bucket.dtype, bucket.members.len());
    BucketStatistics { bytes, dtype, parameters, ready: Duration::ZERO, started: Duration::ZERO, ended: Duration::ZERO }
}

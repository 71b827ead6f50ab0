//! What the threads that make gradients and the thread that reduces them share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::buckets::Buckets;
use super::builder::{Uneven, Unused};
use super::layout::Place;
use super::parameter::Parameter;
use super::statistics::{BucketStatistics, StepStatistics};
use crate::comm::Communicator;
use crate::error::{Error, ReducerProblem, Result};
use crate::types::Element;

pub(super) struct Core {
    /// The reducer's own. Whoever calls a collective on it is either the reducer's thread, carrying out a job, or a caller of
    /// the reducer while there is no job.
    pub(super) comm: Communicator,
    pub(super) parameters: Vec<Parameter>,
    pub(super) unused: Unused,
    pub(super) uneven: Uneven,
    pub(super) overlap: bool,
    state: Mutex<State>,
    /// A job was queued, or has ended, or something failed.
    changed: Condvar,
}

/// Where the reducer is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Between steps: nothing is in flight, and gradients may be read.
    Between,
    /// Within one: gradients are written and made ready.
    Open {
        /// Whether they are reduced, or only accumulated.
        syncs: bool,
    },
    /// In `finish()`.
    Ending,
}

/// Where a parameter's gradient is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gradient {
    /// Not there yet.
    Awaited,
    /// Somebody is writing it.
    Lent,
    Ready,
    /// There will be none: it counts as zeros.
    Unused,
}

/// What the reducer's thread does.
pub(super) enum Job {
    /// Tells the other ranks that this one makes a step, and hears who does.
    Announce,
    Bucket(usize),
    /// Finds out which parameters any rank used.
    Used(Vec<bool>),
}

/// A job, and what it needs.
pub(super) struct Task {
    pub(super) job: Job,
    pub(super) buckets: Arc<Buckets>,
    /// Steps that were reduced before.
    pub(super) step: u64,
    /// How many ranks make this one.
    pub(super) active: usize,
}

pub(super) struct State {
    pub(super) buckets: Arc<Buckets>,
    pub(super) phase: Phase,
    pub(super) gradients: Vec<Gradient>,
    /// For each bucket, how many of its gradients are awaited.
    awaited: Vec<usize>,
    /// How many buckets have been given to the thread: only in their order.
    launched: usize,
    /// Whether the gradients hold what steps that were not synchronised left there.
    pub(super) accumulated: bool,
    /// The parameters in the order in which they became ready.
    pub(super) arrivals: Vec<usize>,
    /// Parameters that the first step did not use, where all steps are alike.
    idle: Option<Vec<bool>>,
    /// Parameters that this rank used since gradients were last reduced.
    used: Vec<bool>,
    /// Those that any rank used, where ranks tell each other.
    pub(super) used_by_any: Option<Vec<bool>>,
    /// Which ranks make this step, or made the last.
    pub(super) active: Vec<bool>,
    /// Steps that were reduced.
    pub(super) steps: u64,
    jobs: VecDeque<Job>,
    is_working: bool,
    is_closed: bool,
    failure: Option<Error>,
    began: Instant,
    pub(super) statistics: StepStatistics,
}

impl Core {
    pub(super) fn new(
        comm: Communicator,
        parameters: Vec<Parameter>,
        (unused, uneven, overlap): (Unused, Uneven, bool),
        buckets: Buckets,
    ) -> Core {
        let (count, world) = (parameters.len(), comm.world_size());
        let state = State {
            buckets: Arc::new(buckets),
            phase: Phase::Between,
            gradients: vec![Gradient::Awaited; count],
            awaited: Vec::new(),
            launched: 0,
            accumulated: false,
            arrivals: Vec::new(),
            idle: None,
            used: vec![false; count],
            used_by_any: None,
            active: vec![true; world],
            steps: 0,
            jobs: VecDeque::new(),
            is_working: false,
            is_closed: false,
            failure: None,
            began: Instant::now(),
            statistics: StepStatistics::default(),
        };
        Core { comm, parameters, unused, uneven, overlap, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn parameter(&self, index: usize) -> Result<&Parameter> {
        let count = self.parameters.len();
        self.parameters.get(index).ok_or_else(|| ReducerProblem::NoParameter { index, count }.into())
    }

    /// The state between two steps, if nothing has failed.
    pub(super) fn between(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        let state = self.state.lock();
        if let Some(first) = &state.failure {
            return Err(Error::Revoked { first: Arc::new(first.clone()) });
        }
        if state.phase != Phase::Between {
            return Err(ReducerProblem::Moment { call, why: "a step is under way; finish it first" }.into());
        }
        Ok(state)
    }

    /// The state within a step, if nothing has failed, and whether the step synchronises.
    fn within(&self, call: &'static str) -> Result<(MutexGuard<'_, State>, bool)> {
        let state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        match state.phase {
            Phase::Open { syncs } => Ok((state, syncs)),
            _ => Err(ReducerProblem::Moment { call, why: "no step is under way; begin one first" }.into()),
        }
    }

    /// Opens a step. The other ranks are told, or `active` says which make it.
    pub(super) fn open(&self, syncs: bool, active: Option<Vec<bool>>) -> Result<()> {
        let mut state = self.between("begin")?;
        let state = &mut *state;
        state.phase = Phase::Open { syncs };
        state.began = Instant::now();
        state.gradients.fill(Gradient::Awaited);
        state.awaited = state.buckets.layout.buckets.iter().map(|bucket| bucket.members.len()).collect();
        state.launched = 0;
        state.arrivals.clear();
        if !state.accumulated {
            state.used.fill(false);
        }
        let unstarted = |bucket: &Place| BucketStatistics {
            bytes: bucket.bytes.len(),
            dtype: bucket.dtype,
            parameters: bucket.members.len(),
            ready: Duration::ZERO,
            started: Duration::ZERO,
            ended: Duration::ZERO,
        };
        state.statistics = StepStatistics::default();
        if syncs {
            state.statistics.buckets = state.buckets.layout.buckets.iter().map(unstarted).collect();
        }
        match active {
            Some(active) => state.active = active,
            None if syncs && self.uneven != Uneven::No => state.jobs.push_back(Job::Announce),
            None => {}
        }
        if let Some(idle) = state.idle.clone() {
            for index in (0..idle.len()).filter(|&index| idle[index]) {
                state.settle(index, Gradient::Unused);
            }
        }
        self.launch(state, syncs && self.overlap);
        Ok(())
    }

    /// Lends a gradient to be written. Returns its memory, and whether to add to what is there.
    pub(super) fn lend<T: Element>(&self, index: usize) -> Result<(Arc<Buckets>, bool)> {
        let parameter = self.parameter(index)?;
        parameter.expect(T::DTYPE)?;
        let (mut state, _) = self.within("view")?;
        match state.gradients[index] {
            Gradient::Awaited => state.gradients[index] = Gradient::Lent,
            Gradient::Lent => return Err(ReducerProblem::Lent { name: parameter.name.clone() }.into()),
            Gradient::Ready | Gradient::Unused => return Err(self.came_twice(&state, index)),
        }
        Ok((state.buckets.clone(), state.accumulated))
    }

    /// Takes a gradient back that was lent.
    pub(super) fn take_back(&self, index: usize) {
        let mut state = self.state.lock();
        if state.gradients[index] == Gradient::Lent {
            state.gradients[index] = Gradient::Awaited;
        }
    }

    /// A gradient is there, or there will be none. With `was_lent`, it is whoever it was lent to that says so.
    pub(super) fn settle(&self, index: usize, gradient: Gradient, was_lent: bool) -> Result<()> {
        let parameter = self.parameter(index)?;
        let (mut state, syncs) = self.within(if gradient == Gradient::Ready { "ready" } else { "unused" })?;
        match state.gradients[index] {
            Gradient::Awaited => {}
            Gradient::Lent if was_lent => {}
            Gradient::Lent => return Err(ReducerProblem::Lent { name: parameter.name.clone() }.into()),
            Gradient::Ready | Gradient::Unused => return Err(self.came_twice(&state, index)),
        }
        state.settle(index, gradient);
        self.launch(&mut state, syncs && self.overlap);
        Ok(())
    }

    /// This rank has nothing to give in the step under way.
    pub(super) fn settle_nothing(&self) {
        let mut state = self.state.lock();
        for index in 0..self.parameters.len() {
            if state.gradients[index] == Gradient::Awaited {
                state.settle(index, Gradient::Unused);
            }
        }
    }

    fn came_twice(&self, state: &State, index: usize) -> Error {
        let name = self.parameters[index].name.clone();
        match &state.idle {
            Some(idle) if idle[index] => ReducerProblem::NotStatic { name }.into(),
            _ => ReducerProblem::Twice { name }.into(),
        }
    }

    pub(super) fn accumulates(&self) -> bool {
        self.state.lock().accumulated
    }

    pub(super) fn is_used(&self, index: usize) -> bool {
        let state = self.state.lock();
        state.used_by_any.as_ref().unwrap_or(&state.used).get(index).is_some_and(|&used| used)
    }

    pub(super) fn statistics(&self) -> StepStatistics {
        self.state.lock().statistics.clone()
    }

    /// Gives the thread the buckets that are full and whose turn it is.
    fn launch(&self, state: &mut State, launches: bool) {
        while launches && state.awaited.get(state.launched) == Some(&0) {
            state.jobs.push_back(Job::Bucket(state.launched));
            state.launched += 1;
        }
        if !state.jobs.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Ends a step: waits until all buckets have been reduced, if it synchronises.
    pub(super) fn close(&self) -> Result<()> {
        let (mut state, syncs) = self.within("finish")?;
        state.phase = Phase::Ending;
        let is_missing = |gradient: &Gradient| matches!(gradient, Gradient::Awaited | Gradient::Lent);
        let missing: Vec<usize> = (0..self.parameters.len()).filter(|&index| is_missing(&state.gradients[index])).collect();
        let is_first = self.unused == Unused::Static && state.idle.is_none();
        let may_miss = self.unused == Unused::Find || is_first;
        if let Some(&first) = missing.first()
            && (!may_miss || missing.iter().any(|&index| state.gradients[index] == Gradient::Lent))
        {
            let problem = ReducerProblem::NotReady { name: self.parameters[first].name.clone(), others: missing.len() - 1 };
            return Err(self.fail_with(&mut state, problem.into()));
        }
        missing.into_iter().for_each(|index| state.settle(index, Gradient::Unused));
        if !syncs {
            state.accumulated = true;
            state.phase = Phase::Between;
            return Ok(());
        }
        state.statistics.computed = state.began.elapsed();
        self.launch(&mut state, true);
        if self.unused == Unused::Find || self.unused == Unused::Static && state.steps == 0 {
            let used = state.used.clone();
            state.jobs.push_back(Job::Used(used));
        }
        self.changed.notify_all();
        while state.failure.is_none() && (state.is_working || !state.jobs.is_empty()) {
            self.changed.wait(&mut state);
        }
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.statistics.waited = state.began.elapsed().saturating_sub(state.statistics.computed);
        if is_first && state.active[self.comm.rank()] {
            state.idle = Some(state.gradients.iter().map(|&gradient| gradient == Gradient::Unused).collect());
        }
        state.accumulated = false;
        state.steps += 1;
        state.phase = Phase::Between;
        Ok(())
    }

    /// Ends the reducer, and the other ranks' steps.
    pub(super) fn fail(&self, error: Error) {
        self.fail_with(&mut self.state.lock(), error);
    }

    fn fail_with(&self, state: &mut State, error: Error) -> Error {
        let first = state.failure.get_or_insert(error).clone();
        state.jobs.clear();
        self.comm.abort();
        self.changed.notify_all();
        first
    }

    /// Whether a step has begun and not been finished.
    pub(super) fn is_open(&self) -> bool {
        let state = self.state.lock();
        state.failure.is_none() && matches!(state.phase, Phase::Open { .. })
    }

    /// Ends the thread, when it has ended what it does.
    pub(super) fn shut(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.jobs.clear();
        if state.is_working {
            self.comm.abort();
        }
        self.changed.notify_all();
    }

    /// The thread's next job; `None` if there will be no more.
    pub(super) fn next_job(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                state.is_working = true;
                if let Job::Bucket(index) = job {
                    state.statistics.buckets[index].started = state.began.elapsed();
                }
                let active = state.active.iter().filter(|&&active| active).count();
                return Some(Task { job, buckets: state.buckets.clone(), step: state.steps, active });
            }
            self.changed.wait(&mut state);
        }
    }

    /// The job has ended; `record` notes what came of it.
    pub(super) fn job_ended<T>(&self, result: Result<T>, record: impl FnOnce(&mut State, T)) {
        let mut state = self.state.lock();
        state.is_working = false;
        match result {
            Ok(value) => record(&mut state, value),
            Err(error) => _ = self.fail_with(&mut state, error),
        }
        self.changed.notify_all();
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

impl State {
    fn settle(&mut self, index: usize, gradient: Gradient) {
        if gradient == Gradient::Unused {
            if !self.accumulated {
                // SAFETY: it was awaited, so nobody has a view of it, and its bucket has not been launched.
                unsafe { self.buckets.zero(index) };
            }
        } else {
            self.used[index] = true;
            self.arrivals.push(index);
        }
        self.gradients[index] = gradient;
        let bucket = self.buckets.layout.places[index].0;
        self.awaited[bucket] -= 1;
        if self.awaited[bucket] == 0
            && let Some(statistics) = self.statistics.buckets.get_mut(bucket)
        {
            statistics.ready = self.began.elapsed();
        }
    }

    pub(super) fn bucket_ended(&mut self, index: usize) {
        self.statistics.buckets[index].ended = self.began.elapsed();
    }
}

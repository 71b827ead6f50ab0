//! The state that the threads which make gradients share with the thread that reduces them.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::buckets::Buckets;
use super::builder::{Uneven, Unused};
use super::parameter::Parameter;
use super::state::{Gradient, Job, Phase, State, Task};
use super::statistics::StepStatistics;
use crate::communicator::Communicator;
use crate::error::{Error, ReducerError, Result};
use crate::types::{DType, Op};

pub(super) struct Core {
    /// The reducer's own communicator. Only the reducer's thread calls collectives on it, or a
    /// caller of the reducer while that thread has no job.
    pub(super) comm: Communicator,
    pub(super) parameters: Vec<Parameter>,
    pub(super) unused: Unused,
    pub(super) uneven: Uneven,
    pub(super) overlap: bool,
    state: Mutex<State>,
    /// Notified when a job is queued or ends, and when something fails.
    changed: Condvar,
}

impl Core {
    pub(super) fn new(
        comm: Communicator,
        parameters: Vec<Parameter>,
        (unused, uneven, overlap): (Unused, Uneven, bool),
        buckets: Buckets,
    ) -> Core {
        let state = State::new(parameters.len(), comm.world_size(), buckets);
        Core { comm, parameters, unused, uneven, overlap, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn parameter(&self, index: usize) -> Result<&Parameter> {
        let count = self.parameters.len();
        self.parameters.get(index).ok_or_else(|| ReducerError::NoParameter { index, count }.into())
    }

    /// Fails in a forked child: it has none of its parent's threads, and one of them may have held
    /// the state at the fork.
    pub(super) fn check_process(&self) -> Result<()> {
        self.comm.check_process(Op::AllReduce)
    }

    /// Returns the state between two steps, if nothing has failed.
    pub(super) fn between(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        self.check_process()?;
        let state = self.state.lock();
        if let Some(first) = &state.failure {
            return Err(Error::Revoked { first: Arc::new(first.clone()) });
        }
        if state.phase != Phase::Between {
            return Err(ReducerError::Moment { call, why: "a step is in progress; finish it first" }.into());
        }
        Ok(state)
    }

    /// Returns the state within a step, if nothing has failed, and whether the step is reduced.
    fn within(&self, call: &'static str) -> Result<(MutexGuard<'_, State>, bool)> {
        self.check_process()?;
        let state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        match state.phase {
            Phase::Open { syncs } => Ok((state, syncs)),
            _ => Err(ReducerError::Moment { call, why: "no step is in progress; begin one first" }.into()),
        }
    }

    /// Opens a step. Either the other ranks are told of it, or `active` says which ranks make it.
    pub(super) fn open(&self, syncs: bool, active: Option<Vec<bool>>) -> Result<()> {
        let mut state = self.between("begin")?;
        let state = &mut *state;
        state.begin(syncs);
        match active {
            Some(active) => state.active = active,
            None if syncs && self.uneven != Uneven::No => state.jobs.push_back(Job::Announce),
            None => {}
        }
        if let Some(idle) = state.idle.clone() {
            for index in (0..idle.len()).filter(|&index| idle[index]) {
                state.mark(index, Gradient::Unused).map_err(|error| self.fail_with(state, error))?;
            }
        }
        self.launch(state, syncs && self.overlap);
        Ok(())
    }

    /// Opens a view of a gradient in host or device memory, to be written. Returns its memory, and whether to
    /// add to what is there.
    pub(super) fn open_view(&self, index: usize, dtype: DType, on_device: bool) -> Result<(Arc<Buckets>, bool)> {
        let parameter = self.parameter(index)?;
        parameter.expect(dtype)?;
        parameter.expect_place(on_device)?;
        let (mut state, _) = self.within("view")?;
        match state.gradients[index] {
            Gradient::Awaited => state.gradients[index] = Gradient::InView,
            Gradient::InView => return Err(ReducerError::InView { name: parameter.name.clone() }.into()),
            Gradient::Ready | Gradient::Unused => return Err(self.came_twice(&state, index)),
        }
        Ok((state.buckets.clone(), state.accumulated))
    }

    /// Takes back a gradient from its view.
    pub(super) fn take_back(&self, index: usize) {
        let mut state = self.state.lock();
        if state.gradients[index] == Gradient::InView {
            state.gradients[index] = Gradient::Awaited;
        }
    }

    /// Notes that a gradient is ready, or that there is none. With `was_in_view`, the call comes from
    /// the view of the gradient.
    pub(super) fn mark(&self, index: usize, gradient: Gradient, was_in_view: bool) -> Result<()> {
        let parameter = self.parameter(index)?;
        let (mut state, syncs) = self.within(if gradient == Gradient::Ready { "ready" } else { "unused" })?;
        match state.gradients[index] {
            Gradient::Awaited => {}
            Gradient::InView if was_in_view => {}
            Gradient::InView => return Err(ReducerError::InView { name: parameter.name.clone() }.into()),
            Gradient::Ready | Gradient::Unused => return Err(self.came_twice(&state, index)),
        }
        state.mark(index, gradient)?;
        self.launch(&mut state, syncs && self.overlap);
        Ok(())
    }

    /// Notes that this rank has no gradients in the current step.
    pub(super) fn mark_all_unused(&self) -> Result<()> {
        let mut state = self.state.lock();
        for index in 0..self.parameters.len() {
            if state.gradients[index] == Gradient::Awaited {
                state.mark(index, Gradient::Unused).map_err(|error| self.fail_with(&mut state, error))?;
            }
        }
        if self.unused == Unused::Error {
            // The ranks with input have a gradient for each parameter.
            state.used.fill(true);
        }
        Ok(())
    }

    fn came_twice(&self, state: &State, index: usize) -> Error {
        let name = self.parameters[index].name.clone();
        match &state.idle {
            Some(idle) if idle[index] => ReducerError::NotStatic { name }.into(),
            _ => ReducerError::Twice { name }.into(),
        }
    }

    pub(super) fn address(&self, index: usize) -> *mut u8 {
        self.state.lock().buckets.gradient(index).0
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

    /// Queues the full buckets whose turn it is, for the reducer's thread.
    fn launch(&self, state: &mut State, launches: bool) {
        while launches && state.awaited.get(state.launched) == Some(&0) {
            state.jobs.push_back(Job::Bucket(state.launched));
            state.launched += 1;
        }
        if !state.jobs.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Ends a step, and waits until all buckets are reduced, if the step is reduced.
    pub(super) fn close(&self) -> Result<()> {
        let (mut state, syncs) = self.within("finish")?;
        let is_missing = |gradient: &Gradient| matches!(gradient, Gradient::Awaited | Gradient::InView);
        let missing: Vec<usize> = (0..self.parameters.len()).filter(|&index| is_missing(&state.gradients[index])).collect();
        let is_first = self.unused == Unused::Static && state.idle.is_none();
        let may_miss = self.unused == Unused::Find || is_first;
        if let Some(&first) = missing.first()
            && (!may_miss || missing.iter().any(|&index| state.gradients[index] == Gradient::InView))
        {
            let problem = ReducerError::NotReady { name: self.parameters[first].name.clone(), others: missing.len() - 1 };
            return Err(self.fail_with(&mut state, problem.into()));
        }
        for index in missing {
            state.mark(index, Gradient::Unused).map_err(|error| self.fail_with(&mut state, error))?;
        }
        state.phase = Phase::Ending;
        if !syncs {
            state.accumulated = true;
            state.phase = Phase::Between;
            return Ok(());
        }
        state.statistics.computed = state.began.elapsed().max(state.statistics.computed);
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

    /// Ends the reducer with an error, and makes the other ranks' steps fail.
    pub(super) fn fail(&self, error: Error) {
        self.fail_with(&mut self.state.lock(), error);
    }

    fn fail_with(&self, state: &mut State, error: Error) -> Error {
        let first = state.failure.get_or_insert(error).clone();
        state.jobs.clear();
        state.buckets.abandon();
        self.comm.abort();
        self.changed.notify_all();
        first
    }

    /// Whether a step has begun and is not finished.
    pub(super) fn is_open(&self) -> bool {
        let state = self.state.lock();
        state.failure.is_none() && matches!(state.phase, Phase::Open { .. })
    }

    /// Ends the thread after its current job.
    pub(super) fn shut(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.jobs.clear();
        if state.is_working {
            state.buckets.abandon();
            self.comm.abort();
        }
        self.changed.notify_all();
    }

    /// Waits for the thread's next job. Returns `None` if there will be no more.
    pub(super) fn next_job(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                state.is_working = true;
                let active = state.active.iter().filter(|&&active| active).count();
                return Some(Task { job, buckets: state.buckets.clone(), step: state.steps, active });
            }
            self.changed.wait(&mut state);
        }
    }

    /// Notes that all gradients of a bucket are complete and its reduction starts.
    pub(super) fn bucket_starts(&self, index: usize, on_device: bool) {
        let mut state = self.state.lock();
        let now = state.began.elapsed();
        state.statistics.buckets[index].started = now;
        if on_device {
            state.statistics.computed = state.statistics.computed.max(now);
        }
    }

    /// Notes that a job has ended. `record` stores its result.
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

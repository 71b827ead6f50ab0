//! An epoch: steps, reports, checkpoints, and the test at its end.

use std::time::{Duration, Instant};

use super::{Failure, Run};
use crate::checkpoint::{self, State};
use crate::data::loader::{Loader, Source};
use crate::data::sampler::Sampler;
use crate::engine::Engine;
use crate::loss::Outcome;
use crate::metrics::{Epoch, Event, Step};
use crate::model::Batch;

/// How a rank spent its time, in seconds.
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    all: f64,
    /// Waiting for images.
    loading: f64,
    /// Waiting for gradients, with no computation left.
    waiting: f64,
    /// The reducer reduced gradients, whether the rank waited or not.
    communicated: f64,
    /// The part of it that overlapped with computation.
    overlapped: f64,
}

/// The loss and the times of one rank or of all, since the last report.
#[derive(Default)]
pub(super) struct Window {
    pub(super) outcome: Outcome,
    times: Times,
}

/// The same as numbers, which ranks exchange.
pub(super) const FIELDS: usize = 8;

impl Window {
    pub(super) fn fields(&self) -> [f64; FIELDS] {
        let Window { outcome: o, times: t } = self;
        [o.loss, o.correct, o.images, t.all, t.loading, t.waiting, t.communicated, t.overlapped]
    }

    pub(super) fn of(fields: &[f64]) -> Window {
        Window {
            outcome: Outcome { loss: fields[0], correct: fields[1], images: fields[2] },
            times: Times {
                all: fields[3],
                loading: fields[4],
                waiting: fields[5],
                communicated: fields[6],
                overlapped: fields[7],
            },
        }
    }

    fn add(&mut self, other: &Window) {
        let sum: Vec<f64> = self.fields().iter().zip(other.fields()).map(|(a, b)| a + b).collect();
        *self = Window::of(&sum);
    }
}

/// The figures of an epoch before its end.
#[derive(Default)]
pub(super) struct SoFar {
    pub(super) whole: Window,
    pub(super) seconds: f64,
    cpu: Option<Duration>,
}

impl<E: Engine> Run<'_, E> {
    /// Makes the remaining steps of the epoch.
    pub(super) fn steps(&mut self) -> Result<(), Failure> {
        let (began, cpu) = (Instant::now(), cpu_time());
        let result = self.steps_that_are_left();
        // Also after a failure: if ranks were lost, the survivors continue with the epoch.
        self.so_far.seconds += began.elapsed().as_secs_f64();
        self.so_far.cpu = cpu.zip(cpu_time()).map(|(before, after)| after - before + self.so_far.cpu.unwrap_or_default());
        result
    }

    fn steps_that_are_left(&mut self) -> Result<(), Failure> {
        let place = [self.comm.rank(), self.comm.world_size()];
        let (epoch, done) = (self.state.epoch, self.state.seen);
        if done >= self.train.len() {
            return Ok(());
        }
        let sampler = Sampler::new(self.train.len(), self.state.seed, epoch, done, place, self.batch);
        let steps = sampler.steps();
        // The steps before this part, if all were as large.
        let made = done / (self.batch * place[1]);
        if let Some(output) = &mut self.output {
            output.progress.begin(epoch, made + steps, made);
        }
        let variation = Some((self.state.seed, epoch));
        let source = Source { dataset: self.train.clone(), transform: self.transform, variation };
        let mut loader = Loader::start(&source, (0..steps).map(|step| sampler.step(step)).collect(), self.workers)?;
        for step in 0..steps {
            let asked = Instant::now();
            let batch = loader.next().ok_or("images ended early".to_owned())??;
            let loading = asked.elapsed().as_secs_f64();
            let rate = self.rate.at(self.epochs_passed());
            let mut times = self.step(batch, rate as f32)?;
            (times.loading, times.all) = (loading, asked.elapsed().as_secs_f64());
            self.window.add(&Window { outcome: Outcome::default(), times });
            self.state.seen = done + sampler.seen(step);
            self.state.step += 1;
            let is_last = step + 1 == steps;
            let saves = !is_last && self.args.checkpoint_every.is_some_and(|every| self.state.step.is_multiple_of(every as u64));
            // Report at each checkpoint, so that a run that resumes from it reports the same.
            if is_last || saves || self.state.step.is_multiple_of(self.args.print_freq as u64) {
                self.report(rate, [made + step + 1, made + steps])?;
            }
            if saves {
                self.save(&self.state.clone())?;
            }
        }
        Ok(())
    }

    /// Tests and writes a checkpoint. The epoch ends with the checkpoint: if ranks are lost before,
    /// the survivors repeat this.
    pub(super) fn finish_epoch(&mut self) -> Result<(), Failure> {
        let test = self.evaluate()?;
        let SoFar { whole, seconds, cpu } = &self.so_far;
        let best = self.state.best.max(test.accuracy());
        let state = State { epoch: self.state.epoch + 1, seen: 0, best, ..self.state.clone() };
        let seconds = seconds.max(1e-9);
        let event = Epoch {
            epoch: state.epoch,
            step: state.step,
            seconds,
            images_per_s: whole.outcome.images / seconds,
            train_loss: whole.outcome.mean_loss(),
            train_accuracy: whole.outcome.accuracy(),
            test_loss: test.mean_loss(),
            test_accuracy: test.accuracy(),
            waiting: whole.times.waiting / whole.times.all.max(1e-9),
            cores: cpu.map(|cpu| cpu.as_secs_f64() / seconds),
        };
        let is_best = test.accuracy() > self.state.best;
        if let Some(output) = &mut self.output {
            output.progress.epoch(&event);
            output.metrics.write(&Event::Epoch(event))?;
            if is_best {
                checkpoint::export(&self.folder.join("best.safetensors"), &self.model)?;
            }
        }
        self.save(&state)?;
        (self.state, self.so_far) = (state, SoFar::default());
        Ok(())
    }

    /// Returns the epochs that have passed, as a fraction.
    fn epochs_passed(&self) -> f64 {
        self.state.epoch as f64 + (self.state.seen as f64 / self.train.len() as f64).min(1.0)
    }

    /// Makes one step: forward, backward while gradients are averaged, and the optimiser.
    pub(super) fn step(&mut self, batch: Batch, rate: f32) -> Result<Times, Failure> {
        let step = self.reducer.begin()?;
        let outcome = self.model.train(batch, |number, gradient| gradient.put(&step, number))?;
        step.finish()?;
        self.optimizer.step(rate, &self.reducer, &mut self.model)?;
        self.model.engine().add_outcomes(&mut self.outcomes, outcome);
        let statistics = self.reducer.statistics();
        Ok(Times {
            waiting: statistics.waited.as_secs_f64(),
            communicated: statistics.communicated().as_secs_f64(),
            overlapped: statistics.overlapped().as_secs_f64(),
            ..Times::default()
        })
    }

    /// Takes this rank's outcomes since the last report.
    pub(super) fn outcome(&mut self) -> Outcome {
        let engine = self.model.engine();
        engine.outcome(&std::mem::replace(&mut self.outcomes, engine.no_outcomes()))
    }

    /// Gathers the figures of all ranks since the last report, and reports them.
    fn report(&mut self, lr: f64, [made, steps]: [usize; 2]) -> Result<(), Failure> {
        let world = self.comm.world_size();
        let outcome = self.outcome();
        self.window.outcome.add(outcome);
        let mut fields = vec![0.0; FIELDS * world];
        self.comm.all_gather(&self.window.fields(), &mut fields)?;
        self.window = Window::default();
        let ranks: Vec<Window> = fields.chunks_exact(FIELDS).map(Window::of).collect();
        let mut all = Window::default();
        ranks.iter().for_each(|rank| all.add(rank));
        let step = self.state.step;
        if !all.outcome.loss.is_finite() {
            return Err(format!("the loss is {} at step {step}: a lower --lr may help", all.outcome.loss).into());
        }
        let computed = |rank: &Window| rank.times.all - rank.times.waiting - rank.times.loading;
        let mean = ranks.iter().map(computed).sum::<f64>() / world as f64;
        let slowest = (0..world).max_by(|&a, &b| computed(&ranks[a]).total_cmp(&computed(&ranks[b]))).unwrap_or(0);
        let event = Step {
            step,
            epoch: self.epochs_passed(),
            loss: all.outcome.mean_loss(),
            accuracy: all.outcome.accuracy(),
            lr,
            images_per_s: all.outcome.images * world as f64 / all.times.all,
            waiting: all.times.waiting / all.times.all,
            overlap: if all.times.communicated > 0.0 { all.times.overlapped / all.times.communicated } else { 0.0 },
            loading: all.times.loading / all.times.all,
            slowest,
            slower: computed(&ranks[slowest]) / mean.max(1e-9) - 1.0,
        };
        if let Some(output) = &mut self.output {
            output.progress.step(made, steps, &event);
            output.metrics.write(&Event::Step(event))?;
        }
        self.so_far.whole.add(&all);
        Ok(())
    }

    /// Tests on all test images. Each rank takes a part, and no image is tested twice.
    pub(super) fn evaluate(&mut self) -> Result<Outcome, Failure> {
        self.sync_buffers()?;
        let images: Vec<usize> = (self.comm.rank()..self.test.len()).step_by(self.comm.world_size()).collect();
        let source = Source { dataset: self.test.clone(), transform: self.transform, variation: None };
        let batches = images.chunks(self.batch).map(<[usize]>::to_vec).collect();
        let engine = self.model.engine();
        let mut outcomes = engine.no_outcomes();
        for batch in Loader::start(&source, batches, self.workers)? {
            engine.add_outcomes(&mut outcomes, self.model.test(batch?));
        }
        engine.all_reduce(&self.comm, &mut outcomes)?;
        let outcome = engine.outcome(&outcomes);
        // An operation on a device reports its failure in the next one.
        self.comm.barrier()?;
        if !outcome.loss.is_finite() {
            return Err(format!("the loss is {} in the test", outcome.loss).into());
        }
        Ok(outcome)
    }
}

/// Returns the time that all cores have spent on this process.
fn cpu_time() -> Option<Duration> {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Some(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
    #[cfg(not(unix))]
    None
}

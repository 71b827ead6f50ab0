//! `--elastic`: when ranks are lost, the survivors continue, and processes may join.

use super::epoch::{FIELDS, Window};
use super::{Failure, Output, Run, setup};
use crate::engine::Engine;
use crate::metrics::{self, Event};
use crate::progress::{Progress, complain};

impl<E: Engine> Run<'_, E> {
    /// Continues after communication has failed: the survivors shrink the communicator and take the
    /// state of its rank 0. They repeat the step in flight, and divide the remaining images among
    /// fewer ranks; each keeps its number of images in a step. Further ranks may be lost meanwhile.
    ///
    /// # Errors
    ///
    /// The failure itself if no rank was lost, because it would come again.
    pub(super) fn go_on(&mut self, mut failure: kolo::Error) -> Result<(), Failure> {
        let before = self.comm.world_size();
        loop {
            let world = self.comm.world_size();
            self.comm = self.comm.shrink()?;
            if self.comm.world_size() == world {
                return Err(failure.into());
            }
            match self.agree() {
                Err(Failure::Communication(next)) => failure = next,
                Err(problem) => return Err(problem),
                Ok(()) => break,
            }
        }
        let world = self.comm.world_size();
        self.rate.factor = self.args.lr_scale.factor(self.batch * world);
        let (step, epoch) = (self.state.step, self.state.epoch);
        if self.comm.rank() == 0 {
            // The rank that wrote may be lost, or it has written the end of an epoch that is
            // repeated.
            // This closes the file: Windows does not replace one that is open.
            let progress = self.output.take().map_or_else(|| Progress::new(self.args.epochs), |output| output.progress);
            let metrics = metrics::Writer::open(&self.folder, step, epoch)?;
            let mut output = Output { metrics, progress };
            let reason = failure.to_string();
            output.progress.say(&format!("{world} of {before} ranks continue after step {step}: {reason}"));
            output.metrics.write(&Event::Shrink { step, ranks: world, reason })?;
            self.output = Some(output);
        }
        Ok(())
    }

    /// Admits the processes that wait to join the run, at the start of an epoch. The images are
    /// divided among all ranks; each keeps its number of images in a step.
    pub(super) fn admit(&mut self) -> Result<(), Failure> {
        // After the loss of a rank, the survivors continue in the middle of an epoch. After processes
        // have joined, the ranks look again, because those processes begin with a look.
        while self.args.elastic && self.state.seen == 0 && self.grow()? {}
        Ok(())
    }

    /// Admits the processes that wait now. Returns whether there are more ranks.
    fn grow(&mut self) -> Result<bool, Failure> {
        let larger = match self.comm.grow() {
            Ok(Some(larger)) => larger,
            // A communicator of threads does not grow.
            Ok(None) | Err(kolo::Error::Unsupported { .. }) => return Ok(false),
            // All ranks try again at the next epoch.
            Err(kolo::Error::NotGrown { why }) => {
                self.refuse(format!("no process can join: {why}"));
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        let fewer = std::mem::replace(&mut self.comm, larger);
        match self.welcome() {
            // All ranks have found that a newcomer does not fit.
            Err(Failure::Here(problem)) => {
                self.comm = fewer;
                self.refuse(format!("a process cannot join: {problem}"));
                return Ok(false);
            }
            other => other?,
        }
        let (step, world) = (self.state.step, self.comm.world_size());
        self.rate.factor = self.args.lr_scale.factor(self.batch * world);
        if let Some(output) = &mut self.output {
            let joined = world - fewer.world_size();
            output.progress.say(&format!("{world} ranks continue after step {step}: {joined} joined"));
            output.metrics.write(&Event::Grow { step, ranks: world })?;
        }
        self.refusal = None;
        Ok(true)
    }

    /// Reports why a process did not join, unless the last report was the same: the reason may come
    /// again at each epoch.
    fn refuse(&mut self, problem: String) {
        if self.output.is_some() && self.refusal.as_ref() != Some(&problem) {
            complain(&problem);
            self.refusal = Some(problem);
        }
    }

    /// Copies the whole state of rank 0 to all ranks: one rank may have made a step that another has
    /// not, or may have just joined. If a rank is lost meanwhile, no rank changes its state.
    pub(super) fn agree(&mut self) -> Result<(), Failure> {
        let mut reducer = setup::reducer(self.args, &self.comm, &self.model)?;
        let velocities = self.model.of_rank_0(&mut reducer, &self.optimizer.velocities)?;
        let buffers = self.model.buffers_of_rank_0(&mut reducer)?;
        let state = &self.state;
        let mut numbers = [state.epoch as u64, state.seen as u64, state.step, state.best.to_bits()];
        self.comm.broadcast(&mut numbers, 0)?;
        let mut so_far = [0.0; FIELDS + 1];
        so_far[..FIELDS].copy_from_slice(&self.so_far.whole.fields());
        so_far[FIELDS] = self.so_far.seconds;
        self.comm.broadcast(&mut so_far, 0)?;
        // The last collective: the model changes when it has completed.
        setup::broadcast(&mut reducer, &mut self.model)?;

        self.optimizer.velocities = velocities;
        self.model.take_buffers(buffers);
        let state = &mut self.state;
        (state.epoch, state.seen, state.step) = (numbers[0] as usize, numbers[1] as usize, numbers[2]);
        state.best = f64::from_bits(numbers[3]);
        (self.so_far.whole, self.so_far.seconds) = (Window::of(&so_far[..FIELDS]), so_far[FIELDS]);
        self.reducer = reducer;
        Ok(())
    }
}

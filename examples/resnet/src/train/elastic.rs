//! `--elastic`: when ranks are lost, the survivors continue.

use super::epoch::{FIELDS, Window};
use super::{Failure, Output, Run, setup};
use crate::engine::Engine;
use crate::metrics::{self, Event};
use crate::progress::Progress;

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

    /// Copies the whole state of rank 0 to all ranks, because one rank may have made a step that
    /// another has not. If a rank is lost meanwhile, no rank changes its state.
    fn agree(&mut self) -> Result<(), Failure> {
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

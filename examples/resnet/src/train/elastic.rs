//! `--elastic`: when ranks are lost, those that are left go on.

use super::{Failure, Output, Run, setup};
use crate::engine::Engine;
use crate::metrics::{self, Event};
use crate::progress::Progress;

impl<E: Engine> Run<'_, E> {
    /// After communication failed: the ranks that are left find each other, and go on where the first of them was. A step that
    /// was under way is made again, with the images that are left divided among fewer ranks; each keeps its number of images a step.
    ///
    /// # Errors
    ///
    /// The failure itself, if nobody was lost: it would come again.
    pub(super) fn go_on(&mut self, failure: kolo::Error) -> Result<(), Failure> {
        let before = self.comm.world_size();
        let comm = self.comm.shrink()?;
        let world = comm.world_size();
        if world == before {
            return Err(failure.into());
        }
        self.reducer = setup::reducer(self.args, &comm, &self.model)?;
        self.comm = comm;
        self.agree()?;
        self.rate.factor = self.args.lr_scale.factor(self.batch * world);
        let step = self.state.step;
        if self.comm.rank() == 0 && self.output.is_none() {
            // The rank that wrote is gone.
            let metrics = metrics::Writer::open(&self.folder, step)?;
            self.output = Some(Output { metrics, progress: Progress::new(self.args.epochs) });
        }
        if let Some(output) = &mut self.output {
            let reason = failure.to_string();
            output.progress.say(&format!("{world} of {before} ranks go on after step {step}: {reason}"));
            output.metrics.write(&Event::Shrink { step, ranks: world, reason })?;
        }
        Ok(())
    }

    /// One rank may have made a step that another has not: all get everything from the first.
    fn agree(&mut self) -> Result<(), Failure> {
        setup::broadcast(&mut self.reducer, &mut self.model)?;
        for values in self.optimizer.velocities.iter_mut().chain(self.model.buffers_mut()) {
            self.comm.broadcast(values, 0)?;
        }
        let state = &mut self.state;
        let mut numbers = [state.epoch as u64, state.seen as u64, state.step, state.best.to_bits()];
        self.comm.broadcast(&mut numbers, 0)?;
        (state.epoch, state.seen, state.step) = (numbers[0] as usize, numbers[1] as usize, numbers[2]);
        state.best = f64::from_bits(numbers[3]);
        Ok(())
    }
}

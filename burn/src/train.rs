//! A strategy for burn's `SupervisedTraining`.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_core::data::dataloader::DataLoader;
use burn_core::tensor::Device;
use burn_optim::GradientsAccumulator;
use burn_train::train::WorkerFailure;
use burn_train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearnerModel, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingError, TrainingItem, ValidLoader,
};
use kolo::ddp::{BufferSync, Reducer, ReducerBuilder};
use kolo::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::parallel::DataParallel;

/// Trains burn's `Learner` on one device in each rank.
///
/// Every rank is a process that builds the same `SupervisedTraining`, with a folder of its own for
/// metrics and checkpoints. Rank 0's parameters are those with which all ranks start. Each rank
/// trains with its part of the training data: of `n` items in a world of `w` ranks, the items from
/// `rank * (n / w)` to `(rank + 1) * (n / w)`. So all ranks make the same number of steps, and at
/// most `w - 1` items are left out. Every rank validates with all of the validation data, after the
/// ranks' running statistics were averaged.
///
/// Training stops on all ranks after the same step if a rank's `Interrupter` was asked to stop, and
/// after the same epoch if rank 0's early stopping decides so.
///
/// ```no_run
/// # use std::sync::Arc;
/// use burn_train::{Learner, LearnerModel, SupervisedTraining, TrainLoader, TrainingStrategy, ValidLoader};
/// use kolo_burn::Strategy;
///
/// fn train<M: LearnerModel>(
///     learner: Learner<M>,
///     train: TrainLoader<M>,
///     valid: ValidLoader<M>,
/// ) -> Result<M, Box<dyn std::error::Error>> {
///     let comm = kolo::Communicator::from_env()?;
///     let folder = format!("run/rank{}", comm.rank());
///     let strategy = Arc::new(Strategy::new(comm, burn::tensor::Device::flex().autodiff()));
///     let result = SupervisedTraining::new(&folder, train, valid)
///         .num_epochs(10)
///         .with_training_strategy(TrainingStrategy::Custom(strategy.clone()))
///         .launch(learner);
///     match strategy.take_error() {
///         // It names the rank that failed.
///         Some(error) => Err(error.into()),
///         None => Ok(result.model),
///     }
/// }
/// ```
pub struct Strategy {
    comm: Communicator,
    device: Device,
    options: Mutex<Option<ReducerBuilder>>,
    error: Mutex<Option<Error>>,
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Strategy").field("comm", &self.comm).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Strategy {
    /// Makes a strategy that trains on a device, with default options.
    pub fn new(comm: Communicator, device: Device) -> Strategy {
        Strategy { comm, device, options: Mutex::new(None), error: Mutex::new(None) }
    }

    /// Sets options of the reducer, for the next training.
    pub fn options(self, options: ReducerBuilder) -> Strategy {
        *lock(&self.options) = Some(options);
        self
    }

    /// Returns the communicator.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Takes the error that ended the last training. burn's `LearningResult` has its text.
    pub fn take_error(&self) -> Option<Error> {
        lock(&self.error).take()
    }

    fn run<M: LearnerModel>(
        &self,
        components: &mut TrainingComponents<M>,
        learner: &mut Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<()> {
        let TrainingComponents { interrupter, event_processor: processor, num_epochs, .. } = components;
        let options = lock(&self.options).take().unwrap_or_else(Reducer::builder);
        learner.fork(&self.device);
        let (mut parallel, model) = DataParallel::with(options, &self.comm, learner.model())?;
        learner.load_model(model.into_record());

        let train = share(&train, self.comm.rank(), self.comm.world_size()).to_device(&self.device);
        let valid = valid.to_device(&self.device.clone().inner());
        for epoch in starting_epoch..=*num_epochs {
            interrupter.fail_on_error(processor.process_train(start(epoch, train.num_items())));
            let goes_on = self.train(&mut parallel, learner, &*train, processor, components.grad_accumulation, interrupter)?;
            interrupter.fail_on_error(processor.process_train(LearnerEvent::EndSplit(epoch)));
            if !goes_on {
                break;
            }

            let model = parallel.sync_buffers(learner.model(), BufferSync::Average)?;
            learner.load_model(model.into_record());
            interrupter.fail_on_error(processor.process_valid(start(epoch, valid.num_items())));
            validate(learner, &*valid, processor, interrupter);
            interrupter.fail_on_error(processor.process_valid(LearnerEvent::EndSplit(epoch)));
            interrupter.fail_on_error(processor.process_train(LearnerEvent::EndEpoch(epoch)));
            interrupter.fail_on_error(processor.flush());
            if self.any(interrupter.should_stop())? {
                break;
            }

            if let Some(checkpointer) = &mut components.checkpointer {
                checkpointer.checkpoint(learner, epoch, &components.event_store);
            }
            let stops = components.early_stopping.as_mut().map(|early| early.should_stop(epoch, &components.event_store));
            let mut decision = [u8::from(stops == Some(true))];
            self.comm.broadcast(&mut decision, 0)?;
            if decision[0] == 1 {
                break;
            }
        }
        Ok(())
    }

    /// Trains for an epoch. Returns false if training is to stop.
    fn train<M: LearnerModel>(
        &self,
        parallel: &mut DataParallel,
        learner: &mut Learner<M>,
        data: &dyn DataLoader<<M as burn_train::TrainStep>::Input>,
        processor: &mut SupervisedTrainingEventProcessor<M>,
        accumulation: Option<usize>,
        interrupter: &burn_train::Interrupter,
    ) -> Result<bool> {
        let mut items = data.iter();
        let mut accumulator = GradientsAccumulator::new();
        let mut accumulated = 0;
        let mut iteration = 0;
        while let Some(item) = items.next() {
            let item = match item {
                Ok(item) => item,
                Err(error) => {
                    // The other ranks learn that this one has left.
                    interrupter.fail(error);
                    return Ok(false);
                }
            };
            iteration += 1;
            let progress = items.progress();
            let output = learner.train_step(item);
            let gradients = match accumulation {
                None => Some(output.grads),
                Some(steps) => {
                    accumulator.accumulate(&learner.model(), output.grads);
                    accumulated += 1;
                    (accumulated >= steps || progress.is_completed()).then(|| {
                        accumulated = 0;
                        accumulator.grads()
                    })
                }
            };
            if let Some(gradients) = gradients {
                let averages = parallel.average(gradients)?;
                learner.lr_step();
                learner.optimizer_step(averages);
            }
            let item = TrainingItem::new(output.item, progress, Some(iteration), Some(learner.lr_current()));
            interrupter.fail_on_error(processor.process_train(LearnerEvent::ProcessedItem(item)));
            if self.any(interrupter.should_stop())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns whether it is true on any rank.
    fn any(&self, here: bool) -> Result<bool> {
        let mut anywhere = [u8::from(here)];
        self.comm.all_reduce(&mut anywhere, ReduceOp::Max)?;
        Ok(anywhere[0] == 1)
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Strategy {
    fn fit(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        if let Err(error) = self.run(&mut components, &mut learner, train, valid, starting_epoch) {
            let failure = WorkerFailure { device_id: self.comm.rank(), message: error.to_string() };
            components.interrupter.fail(TrainingError::Workers(vec![failure]));
            *lock(&self.error) = Some(error);
        }
        (learner.model(), components.event_processor)
    }
}

fn validate<M: LearnerModel>(
    learner: &Learner<M>,
    data: &dyn DataLoader<<M as InferenceStep>::Input>,
    processor: &mut SupervisedTrainingEventProcessor<M>,
    interrupter: &burn_train::Interrupter,
) {
    let model = learner.model().valid();
    let mut items = data.iter();
    let mut iteration = 0;
    while let Some(item) = items.next() {
        let item = match item {
            Ok(item) => item,
            Err(error) => return interrupter.fail(error),
        };
        iteration += 1;
        let progress = items.progress();
        let item = TrainingItem::new(InferenceStep::step(&model, item), progress, Some(iteration), None);
        interrupter.fail_on_error(processor.process_valid(LearnerEvent::ProcessedItem(item)));
        if interrupter.should_stop() {
            return;
        }
    }
}

fn start<T>(epoch_number: usize, total_items: usize) -> LearnerEvent<T> {
    LearnerEvent::StartSplit { epoch_number, total_items }
}

/// Returns this rank's part of the items. All ranks have equally many.
fn share<I>(data: &Arc<dyn DataLoader<I>>, rank: usize, world_size: usize) -> Arc<dyn DataLoader<I>> {
    let each = data.num_items() / world_size;
    data.slice(rank * each, (rank + 1) * each)
}

/// The values are replaced as a whole: a thread that panicked leaves none half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

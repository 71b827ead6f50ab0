//! burn's `Learner` on several ranks.
#![cfg(feature = "train")]

use std::sync::Arc;

use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn_train::logger::InMemoryMetricLogger;
use burn_train::{
    InferenceStep, Interrupter, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use kolo::Communicator;
use kolo_burn::Strategy;

#[derive(Module, Debug)]
struct Model {
    norm: BatchNorm,
    linear: Linear,
}

#[derive(Clone, Debug)]
struct Numbers {
    points: Tensor<2>,
}

struct Batches;

impl Batcher<f32, Numbers> for Batches {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Numbers {
        let count = items.len();
        Numbers { points: Tensor::from_data(TensorData::new(items, [count, 1]), device) }
    }
}

impl Model {
    fn new(device: &Device) -> Model {
        Model { norm: BatchNormConfig::new(1).init(device), linear: LinearConfig::new(1, 1).init(device) }
    }

    fn forward(&self, item: Numbers) -> RegressionOutput {
        let found = self.linear.forward(self.norm.forward(item.points.clone()));
        let expected = item.points * 2.0;
        let loss = (found.clone() - expected.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, found, expected)
    }

    fn values(&self) -> Vec<f32> {
        let tensors = [
            self.linear.weight.val().reshape([1]),
            self.norm.running_mean.value(),
            self.norm.running_var.value(),
            self.norm.gamma.val(),
        ];
        tensors.into_iter().flat_map(|tensor| tensor.into_data().as_slice::<f32>().unwrap().to_vec()).collect()
    }
}

impl TrainStep for Model {
    type Input = Numbers;
    type Output = RegressionOutput;

    fn step(&self, item: Numbers) -> TrainOutput<RegressionOutput> {
        let output = self.forward(item);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Numbers;
    type Output = RegressionOutput;

    fn step(&self, item: Numbers) -> RegressionOutput {
        self.forward(item)
    }
}

fn train(strategy: Arc<Strategy>, epochs: usize, interrupter: Interrupter) -> LearningResult<Model> {
    let rank = strategy.communicator().rank();
    let folder = std::env::temp_dir().join(format!("kolo-burn-learner-{}-{rank}", std::process::id()));
    let loader = || {
        let numbers = (0..41).map(|i| i as f32 / 20.0 - 1.0).collect();
        DataLoaderBuilder::new(Batches).batch_size(5).build(InMemDataset::new(numbers))
    };
    let model = Model::new(&Device::flex().autodiff());
    let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1));
    let result = SupervisedTraining::new(&folder, loader(), loader())
        .num_epochs(epochs)
        .with_interrupter(interrupter)
        .with_training_strategy(TrainingStrategy::Custom(strategy))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_application_logger(None)
        .launch(learner);
    let _ = std::fs::remove_dir_all(folder);
    result
}

fn on_ranks<R: Send>(world_size: usize, rank: impl Fn(Arc<Strategy>) -> R + Sync) -> Vec<R> {
    let comms = Communicator::in_process(world_size).unwrap();
    std::thread::scope(|scope| {
        let start = |comm| scope.spawn(|| rank(Arc::new(Strategy::new(comm, Device::flex().autodiff()))));
        let threads: Vec<_> = comms.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_learner_trains_on_all_ranks_and_they_have_the_same_model() {
    let ranks = on_ranks(2, |strategy| {
        let result = train(strategy.clone(), 5, Interrupter::new());
        assert!(result.error.is_none() && result.interrupted.is_none() && strategy.take_error().is_none());
        result.model.values()
    });
    assert_eq!(ranks[0], ranks[1]);
    // The first half of the numbers is negative, the second half positive: the average is about 0.
    assert!(ranks[0][1].abs() < 0.2, "{:?}", ranks[0]);
}

#[test]
fn all_ranks_stop_after_the_same_step() {
    let ranks = on_ranks(2, |strategy| {
        let interrupter = Interrupter::new();
        if strategy.communicator().rank() == 1 {
            interrupter.stop(Some("a test"));
        }
        let result = train(strategy.clone(), 1000, interrupter);
        assert!(strategy.take_error().is_none() && result.error.is_none());
        result.model.linear.weight.val().into_data()
    });
    ranks[0].assert_eq(&ranks[1], true);
}

#[test]
fn a_rank_that_leaves_is_named() {
    on_ranks(3, |strategy| {
        if strategy.communicator().rank() == 2 {
            return;
        }
        let result = train(strategy.clone(), 1000, Interrupter::new());
        let told = result.error.unwrap().to_string();
        let error = strategy.take_error().unwrap().to_string();
        assert!(error.contains("rank 2") && told.contains(&error), "{told}");
    });
}

//! One rank's training.

mod agree;
mod elastic;
mod epoch;
mod host;
mod setup;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use kolo::Communicator;
use kolo::ddp::Reducer;

use crate::arguments::TrainArgs;
use crate::checkpoint::{self, State};
use crate::data::Dataset;
use crate::data::transform::Transform;
#[cfg(feature = "tch")]
use crate::engine::Torch;
use crate::engine::{Engine, Flex, Kind};
use crate::metrics;
use crate::model::Model;
use crate::optimizer::{Rate, Sgd};
use crate::progress::Progress;

/// Why a rank cannot continue.
pub(crate) enum Failure {
    /// Communication failed: a peer or the network is lost.
    Communication(kolo::Error),
    /// An error on this rank.
    Here(String),
}

impl From<kolo::Error> for Failure {
    fn from(error: kolo::Error) -> Failure {
        Failure::Communication(error)
    }
}

impl From<String> for Failure {
    fn from(problem: String) -> Failure {
        Failure::Here(problem)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Communication(error) => error.fmt(f),
            Failure::Here(problem) => problem.fmt(f),
        }
    }
}

/// One rank of a run.
struct Run<'a, E: Engine> {
    args: &'a TrainArgs,
    comm: Communicator,
    reducer: Reducer,
    model: Model<E>,
    optimizer: Sgd<E>,
    rate: Rate,
    state: State,
    /// Images in a step of this rank.
    batch: usize,
    /// Threads of this rank that read images.
    workers: usize,
    train: Arc<dyn Dataset>,
    test: Arc<dyn Dataset>,
    transform: Transform,
    /// The folder of the run.
    folder: PathBuf,
    output: Option<Output>,
    /// Why a process did not join, as rank 0 has reported it.
    refusal: Option<String>,
    /// Figures of the epoch.
    so_far: epoch::SoFar,
    /// Outcomes since the last report.
    outcomes: E::Outcomes,
    /// Times since the last report.
    window: epoch::Window,
}

/// The output of rank 0.
struct Output {
    metrics: metrics::Writer,
    progress: Progress,
}

/// Connects to the other ranks and trains, or tests.
pub(crate) fn run(args: &TrainArgs) -> Result<(), String> {
    let comm = setup::connect(args)?;
    let rank = comm.rank();
    let here = host::Here::find(&comm).map_err(|error| error.to_string())?;
    let threads = args.threads.unwrap_or_else(|| (crate::cores() / here.ranks).max(1));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    pool.map_err(|error| format!("{threads} threads cannot be started: {error}"))?;
    let is_alone = comm.world_size() == 1;
    let describe = |failure| if is_alone { format!("{failure}") } else { format!("rank {rank}: {failure}") };
    match args.engine {
        Kind::Flex => train(args, comm, Flex),
        #[cfg(feature = "tch")]
        Kind::Torch => train(args, comm, Torch::new(None, threads)?),
        #[cfg(feature = "tch")]
        Kind::TorchCuda => train(args, comm, Torch::new(Some(here.place), threads)?),
    }
    .map_err(describe)
}

fn train<E: Engine>(args: &TrainArgs, comm: Communicator, engine: E) -> Result<(), Failure> {
    let run = if crate::launch::joins() { Run::join(args, comm, engine) } else { Run::prepare(args, comm, engine) };
    run?.all()
}

impl<E: Engine> Run<'_, E> {
    /// Tests, or trains all remaining epochs.
    fn all(&mut self) -> Result<(), Failure> {
        if self.args.evaluate {
            let outcome = self.evaluate()?;
            if self.comm.rank() == 0 {
                let (loss, accuracy) = (outcome.mean_loss(), 100.0 * outcome.accuracy());
                crate::progress::say(&format!("{} images: loss {loss:.4}, accuracy {accuracy:.2} %", outcome.images));
            }
            return Ok(());
        }
        while self.state.epoch < self.args.epochs {
            match self.admit().and_then(|()| self.steps()).and_then(|()| self.finish_epoch()) {
                Err(Failure::Communication(failure)) if self.args.elastic => self.go_on(failure)?,
                other => other?,
            }
        }
        if let (Some(_), Some(plot)) = (&self.output, &self.args.plot) {
            crate::plot::draw(std::slice::from_ref(&self.folder), plot)?;
            crate::progress::say(&format!("drawn: {}", plot.display()));
        }
        Ok(())
    }

    /// Averages the running statistics and writes a checkpoint on rank 0. The other ranks wait for
    /// the checkpoint.
    fn save(&mut self, state: &State) -> Result<(), Failure> {
        self.sync_buffers()?;
        if self.output.is_some() {
            checkpoint::save(&checkpoint::place(&self.folder), state, &self.model, &self.optimizer)?;
        }
        Ok(self.comm.barrier()?)
    }

    /// Averages the running statistics, because those of a rank cover its own images only.
    fn sync_buffers(&mut self) -> Result<(), Failure> {
        Ok(self.model.average_buffers(&mut self.reducer)?)
    }
}

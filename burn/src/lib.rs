//! Data-parallel training with [burn](https://burn.dev) in several processes.
//!
//! Every rank is a process with the whole model and its own samples. [`DataParallel`] gives all
//! ranks the parameters of rank 0, and in each step the average of their gradients. The rest of the
//! program stays as it is: models, optimizers and devices are burn's.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::LinearConfig;
//! use burn::optim::{GradientsParams, SgdConfig};
//! use burn::tensor::{Device, Tensor};
//! use kolo::Communicator;
//! use kolo_burn::DataParallel;
//!
//! # fn main() -> Result<(), kolo_burn::Error> {
//! let comm = Communicator::from_env()?; // all ranks that the launcher started
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = SgdConfig::new().init();
//!
//! let (mut parallel, mut model) = DataParallel::new(&comm, model)?; // the parameters of rank 0
//! for _ in 0..10 {
//!     let samples = Tensor::<2>::ones([8, 4], &device); // those of this rank
//!     let loss = model.forward(samples).powi_scalar(2).mean();
//!     let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!     let gradients = parallel.average(gradients)?;
//!     model = optimizer.step(0.01, model, gradients);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! `kolo run -n 4 -- target/release/program` starts this program on four ranks; torchrun, srun and
//! mpirun start it as well.
//!
//! # What is averaged
//!
//! Gradients are copied to buckets of [`kolo::ddp`], and a bucket is reduced while the next one is
//! filled. The options of the reducer, such as the size of the buckets, compression and
//! [what happens with parameters that get no gradient](kolo::ddp::Unused), are those of
//! [`kolo::ddp::ReducerBuilder`], which [`DataParallel::with`] takes.
//!
//! A parameter is identified by the place at which the module's visitor finds it, because its
//! [`ParamId`](burn_core::module::ParamId) differs between processes. All ranks must make the same
//! model. A parameter that occurs several times in a module counts once.
//!
//! # Overlap
//!
//! burn calls no code of the program while a backward pass runs: the hook for gradients in its
//! autodiff calls `DistributedOps` of the backend, which burn implements for its GPU backends, and
//! a program cannot replace. So [`DataParallel::average`] starts when the backward pass has ended.
//! To communicate earlier, run the backward pass in segments and give each segment's gradients to
//! [`DataParallel::step`].
//!
//! # When a rank fails
//!
//! No call waits for ever. If a rank dies, stops or makes another call, all ranks get an
//! [`Error`] that names it, within kolo's
//! [time limits](https://github.com/kolo-rs/kolo/blob/main/docs/failures.md). The model and the
//! optimizer of the caller do not change.

mod error;
mod exchange;
mod parallel;
#[cfg(feature = "train")]
mod train;
mod walk;

pub use error::{Error, Result};
pub use parallel::{DataParallel, Step};
#[cfg(feature = "train")]
pub use train::Strategy;

//! Data-parallel training: averages gradients over all ranks while the backward pass still computes
//! others.
//!
//! A [`Reducer`] gets a model's parameters in forward order. It groups their gradients into
//! *buckets*, memory that the ranks of a host share. The order in the buckets is reversed: the
//! backward pass makes the last parameter's gradient first. When all gradients of a bucket are
//! ready, a thread of the reducer averages it while the backward pass continues. All ranks reduce
//! the buckets in the same order, in whatever order gradients become ready. The module depends on
//! no tensor library.
//!
//! ```
//! use kolo::DType;
//! use kolo::ddp::{Parameter, Reducer, TensorMut};
//!
//! # fn main() -> kolo::Result<()> {
//! let comm = kolo::Communicator::from_env()?;
//! let (mut weight, mut bias) = (vec![0.5f32; 6], vec![0.0f32; 2]);
//! let parameters = [Parameter::new("weight", [2, 3], DType::F32), Parameter::new("bias", [2], DType::F32)];
//! let mut reducer = Reducer::builder().parameters(parameters).build(&comm)?;
//!
//! // All ranks start with the parameters of rank 0.
//! reducer.broadcast_parameters(&mut [TensorMut::from(&mut weight), TensorMut::from(&mut bias)])?;
//! for _ in 0..10 {
//!     let step = reducer.begin()?;
//!     // The backward pass makes gradients ready, last parameter first: written in place,
//!     let mut gradient = step.view::<f32>(1)?;
//!     gradient.fill(1.0);
//!     gradient.ready()?;
//!     // or copied.
//!     step.put(0, &[1.0f32; 6])?;
//!     step.finish()?;
//!     for (value, gradient) in weight.iter_mut().zip(reducer.gradient::<f32>(0)?) {
//!         *value -= 0.1 * gradient;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What may be done with gradients, and when:
//!
//! | moment | gradients |
//! |---|---|
//! | from [`begin`](Reducer::begin) to `ready` | each is written by one thread, through its [`View`] |
//! | from `ready` to the end of [`finish`](Step::finish) | the reducer owns them: peers read and write them |
//! | until the next `begin` | are read, or changed (as by clipping), through [`gradient`](Reducer::gradient) |
//!
//! Parameters in the memory of a GPU have their gradients there too: declare them with
//! [`Parameter::on_device`], and use the methods of the feature `cuda`. Gradients are then written
//! and read in the order of the reducer's stream.
//!
//! If one rank makes a mistake (another model, a missing gradient, a step that is dropped), all
//! ranks get an error that names it. The communicator from which the reducer was built stays
//! usable, but the reducer does not.

mod agree;
mod buckets;
mod build;
mod builder;
mod compress;
mod core;
mod error_feedback;
mod exchange;
mod float;
mod gather;
mod hook;
mod intent;
mod layout;
mod local_sgd;
#[cfg_attr(not(feature = "cuda"), path = "no_device.rs")]
mod on_device;
#[cfg(feature = "cuda")]
mod on_stream;
mod parameter;
mod power_sgd;
pub(crate) mod raw;
mod reducer;
mod state;
mod statistics;
mod step;
mod view;
mod worker;

pub use builder::{ReducerBuilder, Uneven, Unused};
pub use compress::Compress;
pub use error_feedback::ErrorFeedback;
pub(crate) use hook::with_float;
pub use hook::{Average, Bucket, Hook};
pub use local_sgd::LocalSgd;
#[cfg(feature = "cuda")]
pub use on_stream::{DeviceGradient, DeviceGradientMut, DeviceGradientView};
pub use parameter::{Parameter, TensorMut};
pub use power_sgd::PowerSgd;
pub use reducer::{BufferSync, Joined, Reducer};
pub use statistics::{BucketStatistics, StepStatistics};
pub use step::Step;
pub use view::View;

//! Data-parallel training: gradients are averaged over all ranks while others are still being computed.
//!
//! A [`Reducer`] is given a model's parameters in forward order. It puts their gradients into *buckets*, flat pieces of memory
//! that the ranks of a host share, in reverse order: the backward pass makes the last parameter's gradient first. When all
//! gradients of a bucket are ready, a thread of the reducer averages it, while the backward pass goes on; buckets are reduced in
//! the same order on all ranks, whatever the order in which gradients come. It knows no tensor library.
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
//! // Everybody starts with rank 0's values.
//! reducer.broadcast_parameters(&mut [TensorMut::from(&mut weight), TensorMut::from(&mut bias)])?;
//! for _ in 0..10 {
//!     let step = reducer.begin()?;
//!     // The backward pass hands over what it has, last parameter first: written in place,
//!     let mut gradient = step.view::<f32>(1)?;
//!     gradient.fill(1.0);
//!     gradient.ready()?;
//!     // or copied from where it is.
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
//! What comes when:
//!
//! | moment | gradients |
//! |---|---|
//! | between [`begin`](Reducer::begin) and `ready` | are written, each by one thread, through its [`View`] |
//! | from `ready` to the end of [`finish`](Step::finish) | belong to the reducer: peers read and write them |
//! | until the next `begin` | are read, and changed (as by clipping), through [`gradient`](Reducer::gradient) |
//!
//! Parameters that are in the memory of a GPU have their gradients there; [`Parameter::on_device`] says so, and the feature `cuda` has the
//! calls for them. "Written" and "read" then mean by the stream that the reducer was given.
//!
//! Whatever a rank does wrong (another model, a gradient that does not come, a step that is given up) is an error on all ranks
//! that names it. It leaves the communicator that the reducer was made from usable, but not the reducer.

mod agree;
mod buckets;
mod build;
mod builder;
mod compress;
mod core;
mod exchange;
mod float;
mod gather;
mod hook;
mod intent;
mod layout;
mod local_sgd;
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

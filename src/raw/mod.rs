//! The untyped layer: calls on raw pointers, for bindings to other languages.
//!
//! A binding has addresses, numbers of elements and numbers of types, but no Rust slices. This
//! module takes those. The C library (the crate `kolo-capi`) uses it and otherwise the public API
//! alone. A Rust program has no use for it.
//!
//! - [`RawCall`] describes a collective, a send or a receive. [`RawCall::prepare`] checks
//!   everything that one rank can check alone. The [`PreparedCall`] is then run, started, or held
//!   back for [`run_together`]. [`RawCall::run`] checks and runs in one.
//! - [`RawWork`] is an operation in flight, whose buffers belong to the caller.
//! - [`RawReducer`] is a [`ddp::Reducer`](crate::ddp::Reducer) without guards: gradients are
//!   addresses.
//! - [`alloc_uncleared`] takes shared memory without the time to clear it.
//! - [`set_wait_check`] lets a thread that waits run the signal handlers of its language.
//! - [`forks`] and [`between_forks`] keep the binding's own tables usable in a forked child.
//!
//! What no check finds is the caller's duty: that a pointer is valid for its elements, and for how
//! long. Each unsafe function says what it requires.
//!
//! ```
//! use kolo::raw::RawCall;
//! use kolo::{Communicator, DType, Op, ReduceOp};
//!
//! # fn main() -> kolo::Result<()> {
//! let comm = Communicator::from_env()?;
//! let mut values = [1.0f32; 8];
//! let address = values.as_mut_ptr().cast::<u8>();
//! let mut call = RawCall::new(Op::AllReduce, DType::F32);
//! call.buffers(address, address, values.len()).reduce(ReduceOp::Sum);
//! let call = call.prepare(&comm)?;
//! // SAFETY: the array has eight elements, and nothing else uses it until the call returns. The call was prepared for `comm`.
//! unsafe { call.run(&comm)? };
//! assert_eq!(values, [comm.world_size() as f32; 8]);
//!
//! let call = RawCall::new(Op::Broadcast, DType::F32).buffers(address, address, values.len()).root(0).prepare(&comm)?;
//! // SAFETY: as above; the array outlives the operation, which has ended when its outcome is known.
//! let work = unsafe { call.start(&comm)? };
//! work.outcome(None).expect("without a deadline it waits until the end")?;
//! # Ok(())
//! # }
//! ```

mod address;
mod call;
mod fork;
mod memory;
mod reducer;
mod work;

pub use crate::ddp::raw::Stopper;
pub use crate::failure::wait_check::{asks_wait_check, has_wait_check, is_in_wait_check, set_wait_check};
pub use address::advertised_address;
pub use call::{PreparedCall, RawCall, run_together};
pub use fork::{between_forks, forks};
pub use memory::alloc_uncleared;
pub use reducer::{RawReducer, bucket_address, on_device, tensor};
pub use work::RawWork;

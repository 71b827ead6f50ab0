//! A stand-in for NVIDIA's `libnccl.so.2`: programs written for NCCL run on kolo, unchanged.
//!
//! It stands on the crate `kolo` with the feature `cuda`, by [`kolo::raw`] as the C library does, not
//! on the C ABI: a call of NCCL becomes a [`kolo::raw::RawCall`] with its stream, and kolo finds out
//! where its buffers are. CUDA is looked for at run time. What is the same as in the C library are the
//! same files: handles ([`registry`]), pointers ([`pointers`]), unique ids ([`id`]).
//!
//! - [`exports`] is the one table of functions. It also makes their twins, `pnccl*`.
//! - [`request`]: outside a group, a call on host memory runs on the caller's thread. All others are
//!   started, and their streams wait for them. In a group, all are started before one is waited for.
//! - [`jobs`]: calls that make a communicator wait for other ranks. Those of a group run on a thread
//!   each; those of nonblocking communicators go on when the call has returned.
//! - [`scalar`]: kolo has no PreMulSum and no average of integers. The host computes them, also for
//!   memory of a GPU, whose stream the call then waits for.
//!
//! Nothing unwinds out of a function ([`boundary`]). What no check can find is that a pointer is valid
//! for as many elements as the count says. That makes the functions unsafe.

// C's names; every function is exported, although no Rust path leads to it; and what a caller must
// guarantee is said in `nccl.h`.
#![allow(non_camel_case_types, non_snake_case, unreachable_pub, clippy::missing_safety_doc)]

mod boundary;
mod calls;
mod codes;
mod comm;
mod config;
mod device_api;
mod driver;
mod environment;
mod exports;
mod fault;
mod held;
mod jobs;
mod last;
mod manage;
mod memory;
mod parameters;
mod request;
mod scalar;
mod structs;

#[cfg(all(test, unix, not(miri)))]
#[path = "../../capi/src/child.rs"]
mod child;
#[path = "../../capi/src/id.rs"]
mod id;
#[path = "../../capi/src/pointers.rs"]
mod pointers;
#[path = "../../capi/src/registry.rs"]
#[allow(dead_code, reason = "the C library has more kinds of handles, and ends them otherwise")]
mod registry;

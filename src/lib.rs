//! Collective communication for processes: all-reduce, broadcast, barrier and the rest, over TCP
//! between hosts and over shared memory inside one.
//!
//! Every process of a job is a *rank*, from 0 to the *world size* less one. All ranks make the same
//! calls in the same order; each call combines their buffers.
//!
//! ```
//! use kolo::{Communicator, ReduceOp};
//!
//! fn main() -> kolo::Result<()> {
//!     // The ranks that kolo run, torchrun, srun or mpirun started; otherwise this process alone.
//!     let comm = Communicator::from_env()?;
//!
//!     // In place: every rank's gradients become the average of all ranks'.
//!     let mut gradients = vec![comm.rank() as f32; 1000];
//!     comm.all_reduce(&mut gradients, ReduceOp::Average)?;
//!
//!     // Out of place: one block of each rank, in the order of ranks.
//!     let mut names = vec![0u32; comm.world_size()];
//!     comm.all_gather(&[std::process::id()], &mut names)?;
//!     assert_eq!(names[comm.rank()], std::process::id());
//!
//!     // Nonblocking: an operation owns its buffer, and returns it when it has ended.
//!     let work = comm.start_all_reduce(gradients, ReduceOp::Sum)?;
//!     let gradients = work.wait()?;
//!     assert_eq!(gradients.len(), 1000);
//!     Ok(())
//! }
//! ```
//!
//! An overview:
//!
//! - [`Communicator`] has every operation in blocking form (`all_reduce`) and in nonblocking form,
//!   which returns a [`Work`] (`start_all_reduce`); [`scope`](Communicator::scope) for nonblocking
//!   calls on borrowed buffers; [`split`](Communicator::split) for groups of ranks; and
//!   [`alloc`](Communicator::alloc) for registered buffers, which the ranks of a host share.
//! - Elements are those of [`DType`], reductions those of [`ReduceOp`]. Counts may be zero, and
//!   need not be divisible by the world size. Types of 16 and 8 bits accumulate in f32, and round once
//!   for each local reduction; integers wrap; minimum and maximum propagate NaN. All
//!   ranks get the same bits.
//! - Every wait has a deadline. An [`Error`] names what happened, the rank at fault, and what to
//!   do. If an operation fails on one rank, this operation or the next one fails on all ranks, and
//!   all errors name the same rank; the communicator is revoked. [`Communicator::shrink`] makes a
//!   new communicator of the survivors. Calls that do not match return [`Error::Mismatch`] with both calls.
//! - For data-parallel training, [`ddp`] averages gradients while later ones are still computed.
//! - How ranks find each other, which algorithm and transport they use and how long they wait are
//!   [`settings`].
//!
//! # Inside
//!
//! There are two kinds of path. Between hosts a rank can only send and receive: an algorithm is a
//! *schedule*, a pure list of steps, which an engine executes over links. Inside a host, ranks
//! share memory, and an algorithm works on that memory: a *window*, which all ranks of the host
//! map. A communicator over several hosts composes both.
//!
//! [The architecture](https://github.com/kolo-rs/kolo/blob/main/docs/architecture.md) lists the
//! modules, from the public API down to the operating system.
//!
//! # Features
//!
//! - `redis`: `redis://` and `rediss://` as stores where ranks find each other.
//! - `tls`: links between hosts encrypted by TLS 1.3; see [`settings`].
//! - `cuda`: buffers in the memory of NVIDIA's GPUs; see `Communicator::on`. CUDA is loaded at run
//!   time.

// docs.rs marks what needs a feature.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod buffer;
mod call;
mod communicator;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
pub mod ddp;
#[cfg(feature = "cuda")]
mod device;
pub mod doctor;
mod engine;
mod error;
mod exec;
mod failure;
mod float8;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
mod host_group;
mod log;
mod network;
mod observe;
mod progress;
pub mod raw;
mod reduce;
mod rendezvous;
mod schedule;
mod shm;
mod sync;
mod sys;
mod timeouts;
mod trace;
mod transport;
mod types;
mod wire;

#[doc(hidden)]
pub use network::listener::stranger;
#[doc(hidden)]
pub use rendezvous::observer;

pub use communicator::{Builder, Communicator, Pooled, Registered, Scope};
#[cfg(feature = "cuda")]
pub use communicator::{DeviceBuffer, DeviceView, DeviceViewMut, OnStream};
pub use config::choices::*;
#[cfg(feature = "cuda")]
pub use cudarc;
pub use error::{ArgumentError, CallMismatch, Cause, Elsewhere, Error, ReducerError, Result, StoreError, Unmatched};
pub use float8::{f8e4m3, f8e5m2};
pub use half::{bf16, f16};
pub use progress::work::{Waited, Work, WorkError};
pub use rendezvous::store::{Store, TcpStoreServer};
// For the benchmark of the reduction kernels.
#[doc(hidden)]
pub use reduce::reduce_local;
pub use schedule::Algorithm;
pub use trace::{DeviceStats, Stats};
pub use types::{DType, Descriptor, Element, Op, Rank, ReduceOp, Tag, UnknownNameError};

/// The cost model with which kolo chooses its algorithms.
pub mod plan {
    pub use crate::exec::costs::cache::{MeasuredCosts, MeasuredHosts, PairClass, measured, measured_hosts};
    pub use crate::schedule::select::{Candidate, Choice, CostModel, Layout, LinkCost, candidates};
    // For the program `kolo`, which simulates schedules.
    #[doc(hidden)]
    pub use crate::schedule::moves::{Move, Moves};
    #[doc(hidden)]
    pub use crate::schedule::problem::{chunk, part_of};
    #[doc(hidden)]
    pub use crate::types::mix;
}

// For the program `kolo`, which writes reports where other users may write, too.
#[doc(hidden)]
pub use sys::{Destination, write_file, write_file_or_device};

/// [security]: crate::security
///
// The page has its own definition of this link, to a file. The first definition counts.
#[doc = include_str!("../docs/settings.md")]
pub mod settings {
    // For the program `kolo`, which reads variables as a job does, and whose options have values as
    // the variables have them.
    #[doc(hidden)]
    pub use crate::config::{
        BANDWIDTH, TOLD, UNKNOWN_VARIABLES, bandwidth, describe_unknown, duration, nearest_of, secret_in,
        selection_of_environment, unknown_variables, variable,
    };
    pub use crate::config::{VARIABLES, ports_given as parse_ports, secret_given as parse_secret, secret_of_environment};
    #[doc(hidden)]
    pub use crate::log::{LEVEL as LOG_LEVEL, level as log_level};
    #[doc(hidden)]
    pub use crate::network::address::address_for;
    #[doc(hidden)]
    pub use crate::network::topology::topology_of_environment;
    #[doc(hidden)]
    pub use crate::sys::{Domain, cores, domains};
}

/// [encrypted links]: crate::settings#encrypted-links
///
#[doc = include_str!("../docs/security.md")]
pub mod security {}

// The programs in the README and in the documents compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/getting-started.md")]
struct GettingStarted;

#[cfg(doctest)]
#[doc = include_str!("../docs/training.md")]
struct Training;

#[cfg(doctest)]
#[doc = include_str!("../docs/failures.md")]
struct Failures;

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../docs/devices.md")]
struct Devices;

//! Communicators of ranks that are threads of one program, and of processes that it starts of itself.
//! What counts something of its process, or has ranks of its own kind, is a program of its own.

#[path = "../common/mod.rs"]
mod common;

mod behaviour;
mod bounds;
mod collectives;
mod compression;
mod ddp;
mod ddp_hooks;
mod eight_bits;
mod failures;
mod join;
mod mismatches;
mod observe;
mod shrink;
mod start;
mod tags;
mod threads;
#[cfg(feature = "tls")]
mod tls;

//! The C library of kolo: `include/kolo.h`, which is generated from the sources of this crate, and
//! the functions that it declares. A thin layer over the public API of [`kolo`], with [`kolo::raw`]
//! for what has no types in C.
//!
//! What holds for all functions: nothing unwinds out of them ([`boundary`]); handles are looked up
//! and never followed ([`registry`]); numbers that stand for something, and pointers that may be
//! null, are checked ([`pointers`]). What no check can find is that a pointer is valid for as many
//! elements as the count says. That makes the functions unsafe.

// C's names; every public function is exported, although no Rust path leads to it; and what a
// caller must guarantee is said once, above, and to C in the words of the header.
#![allow(non_camel_case_types, unreachable_pub, clippy::missing_safety_doc)]

mod arguments;
mod boundary;
mod codes;
mod collectives;
mod communicator;
mod config;
mod error;
mod fault;
mod group;
mod held;
mod id;
mod last;
mod last_error;
mod memory;
mod nonblocking;
mod pointers;
mod reducer;
mod reducer_config;
mod registry;
mod sized;
mod statistics;
mod store;
mod unique_id;
mod version;
mod wait_check;
mod work;

#[cfg(all(test, unix, not(miri)))]
mod child;

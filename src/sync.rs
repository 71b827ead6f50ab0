//! Atomics, so that loom and production share the code of the protocols.

#[cfg(not(kolo_loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(kolo_loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

//! What the tests do to processes and know about them, where systems differ, and the tests of
//! faults that only one system has.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
use linux as platform;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as platform;

pub(crate) use platform::*;

//! Stands in where processes cannot sleep on memory that they share, and threads are not bound.

use std::io;
use std::sync::atomic::AtomicU32;

pub(in crate::compare) fn check_futex() -> Result<(), String> {
    Err("it is a bound of Linux: processes of this system cannot sleep on memory that they share".to_owned())
}

pub(in crate::compare) fn sleep_on(_: &AtomicU32, _: u32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(in crate::compare) fn wake_all(_: &AtomicU32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(in crate::compare) fn bind_thread(_: u32) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

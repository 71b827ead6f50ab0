//! Stands in where processes cannot hand files over. No value of these types can be made.

use std::convert::Infallible;
use std::io;
use std::time::Instant;

use super::Ticket;

pub(crate) struct ExportedFile(Infallible);

pub(crate) struct ImportedFile(Infallible);

impl ExportedFile {
    /// # Safety
    ///
    /// None is needed here.
    pub(crate) unsafe fn new(_: i32) -> io::Result<ExportedFile> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn ticket(&self) -> Ticket {
        match self.0 {}
    }
}

impl ImportedFile {
    pub(crate) fn fetch(_: &Ticket, _: Instant) -> io::Result<ImportedFile> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn number(&self) -> i32 {
        match self.0 {}
    }
}

pub(crate) fn can_export_files() -> bool {
    false
}

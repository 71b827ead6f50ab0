//! Replaces encrypted links where the feature `tls` is off: a rank that requires them gets an
//! error, and no other links.

use std::convert::Infallible;
use std::path::Path;

use super::Link;
use crate::error::{Cause, Error, Result};
use crate::sys::TcpStream;
use crate::types::Rank;

pub(crate) struct Tls(Infallible);

#[derive(Clone, Copy)]
pub(crate) enum End {
    Initiator,
    Acceptor,
}

impl Tls {
    pub(crate) fn load(_: &Path, _: &Path, _: &Path) -> Result<Tls> {
        let why = "kolo was built without the feature `tls`; build it with --features tls, or unset KOLO_TLS_CA, KOLO_TLS_CERT and KOLO_TLS_KEY";
        Err(Error::Unsupported { what: "TLS", why: why.to_owned() })
    }

    pub(crate) fn link(&self, _: TcpStream, _: End, _: [Rank; 2]) -> std::result::Result<Box<dyn Link>, Cause> {
        match self.0 {}
    }
}

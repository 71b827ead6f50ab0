//! In the place of encrypted links, where the feature `tls` is off: whoever asks for them is told so, and gets no others.

use std::convert::Infallible;
use std::path::Path;

use mio::net::TcpStream;

use super::Link;
use crate::error::{Cause, Error, Result};
use crate::types::Rank;

pub(crate) struct Tls(Infallible);

#[derive(Clone, Copy)]
pub(crate) enum End {
    Caller,
    Called,
}

impl Tls {
    pub(crate) fn load(_: &Path, _: &Path, _: &Path) -> Result<Tls> {
        let why = "this program was built without kolo's feature `tls`; build it with, or unset KOLO_TLS_CA, KOLO_TLS_CERT and KOLO_TLS_KEY";
        Err(Error::Unsupported { what: "TLS", why: why.to_owned() })
    }

    pub(crate) fn link(&self, _: TcpStream, _: End, _: [Rank; 2]) -> std::result::Result<Box<dyn Link>, Cause> {
        match self.0 {}
    }
}

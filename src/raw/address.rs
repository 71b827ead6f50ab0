//! The address of this host.

use std::net::IpAddr;

use crate::error::Result;
use crate::network::address;

/// Returns the address at which other hosts reach this process: that of the interface that
/// `KOLO_INTERFACE` names, or the one that kolo would choose. A process that serves a
/// [`TcpStoreServer`](crate::TcpStoreServer) tells the ranks this address.
///
/// # Errors
///
/// [`Error::Setting`](crate::Error::Setting) if no interface fits.
pub fn advertised_address() -> Result<IpAddr> {
    address::own()
}

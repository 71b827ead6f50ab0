//! What a unique id contains: the address of a store that one process serves, the job and its secret.
//! The C ABI and that of NCCL, in `nccl/`, pass it on in a struct of their own.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;

use kolo::raw::advertised_address;
use kolo::{Builder, Error, TcpStoreServer};

/// `kolo`, a version, zero, the port (2), the address as IPv6 (16), the job (16), the secret (32),
/// zeros.
pub(crate) type Id = [u8; 128];

const MAGIC: [u8; 6] = *b"kolo\x01\0";

/// The stores that this process serves. Each ends when a rank of this process has connected through
/// it: then all ranks have connected.
static SERVED: Mutex<Vec<Served>> = Mutex::new(Vec::new());

#[derive(Clone)]
struct Served {
    job: String,
    /// The process that serves it. A forked child does not have the thread.
    process: u32,
    // The store is served until the last clone is dropped.
    _server: Arc<TcpStoreServer>,
}

/// Keeps a store while one rank of this process connects.
pub(crate) struct Held(Option<Served>);

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(Served { job, .. }) = &self.0 {
            let ended: Vec<Served> = SERVED.lock().extract_if(.., |served| served.job == *job).collect();
            drop(ended);
        }
    }
}

/// Makes an id, and serves the store of the start until all ranks have connected.
pub(crate) fn make() -> kolo::Result<Id> {
    let mut random = [0; 48];
    let fill = getrandom::fill(&mut random);
    fill.map_err(|error| Error::Os {
        doing: "reading random numbers".to_owned(),
        source: Arc::new(io::Error::other(error)),
        rank: None,
    })?;
    let (job, secret) = (hexadecimal(&random[..16]), secret(&random[16..]));
    let address = SocketAddr::new(advertised_address()?, 0);
    let server = Arc::new(TcpStoreServer::bind(address, &job, Some(secret))?);
    let address = server.address();
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut id = [0; 128];
    id[..6].copy_from_slice(&MAGIC);
    id[6..8].copy_from_slice(&address.port().to_be_bytes());
    id[8..24].copy_from_slice(&ip.octets());
    id[24..72].copy_from_slice(&random);
    SERVED.lock().push(Served { job, process: std::process::id(), _server: server });
    Ok(id)
}

/// Makes a rank connect at the store that an id names. `None` if [`make`] did not make the id.
pub(crate) fn rendezvous(builder: Builder, id: &Id) -> Option<(Builder, Held)> {
    if id[..6] != MAGIC || id[72..].iter().any(|&byte| byte != 0) {
        return None;
    }
    let port = u16::from_be_bytes([id[6], id[7]]);
    let ip = Ipv6Addr::from(<[u8; 16]>::try_from(&id[8..24]).expect("16 bytes")).to_canonical();
    let job = hexadecimal(&id[24..40]);
    let held = SERVED.lock().iter().find(|served| served.job == job && served.process == std::process::id()).cloned();
    let store = format!("tcp://{}", SocketAddr::new(ip, port));
    Some((builder.store(store).store_is_served().job(job).secret(secret(&id[40..72])), Held(held)))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn secret(bytes: &[u8]) -> [u8; 32] {
    bytes.try_into().expect("32 bytes")
}

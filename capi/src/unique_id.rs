//! Unique ids: the address of a store that one process serves, in a struct that a program passes to
//! its ranks.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;

use kolo::raw::advertised_address;
use kolo::{Builder, Communicator, Error, TcpStoreServer};

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::fault::Fault;
use crate::pointers::{place, pointer};

/// What all ranks of kolo_comm_init_rank share. It contains the secret of the job: pass it to ranks
/// only. It can be copied, and is valid for one communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_unique_id_t {
    pub internal: [u8; 128],
}

/// Its content in bytes: `kolo`, a version, zero, the port (2), the address as IPv6 (16), the job
/// (16), the secret (32), zeros.
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

/// Makes an id for the ranks of one communicator. One process calls this, usually that of rank 0,
/// and passes the id to the other ranks. This process serves the store of the start until all ranks
/// have connected.
///
/// The id contains the address of this host; `KOLO_INTERFACE` chooses the interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_get_unique_id(id: *mut kolo_unique_id_t) -> kolo_result_t {
    boundary(|| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let id = unsafe { place(id, "id")? };
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
        let mut internal = [0; 128];
        internal[..6].copy_from_slice(&MAGIC);
        internal[6..8].copy_from_slice(&address.port().to_be_bytes());
        internal[8..24].copy_from_slice(&ip.octets());
        internal[24..72].copy_from_slice(&random);
        SERVED.lock().push(Served { job, process: std::process::id(), _server: server });
        id.write(kolo_unique_id_t { internal });
        Ok(())
    })
}

/// Stops serving the store of an id that this process has made and that no communicator will use.
/// Any other id has no effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_discard_unique_id(id: *const kolo_unique_id_t) -> kolo_result_t {
    boundary(|| {
        pointer(id, "id")?;
        // SAFETY: the caller's pointer is valid, as the header says, and neither null nor misaligned.
        let (_, held) = rendezvous(Communicator::builder(), unsafe { &*id })?;
        drop(held);
        Ok(())
    })
}

/// Makes a rank connect at the store that an id names.
pub(crate) fn rendezvous(builder: Builder, id: &kolo_unique_id_t) -> Result<(Builder, Held), Fault> {
    let internal = &id.internal;
    if internal[..6] != MAGIC || internal[72..].iter().any(|&byte| byte != 0) {
        return Err(Fault::setting("id", "(not shown)", "what kolo_get_unique_id of this version of kolo made"));
    }
    let port = u16::from_be_bytes([internal[6], internal[7]]);
    let ip = Ipv6Addr::from(<[u8; 16]>::try_from(&internal[8..24]).expect("16 bytes")).to_canonical();
    let job = hexadecimal(&internal[24..40]);
    let held = SERVED.lock().iter().find(|served| served.job == job && served.process == std::process::id()).cloned();
    let store = format!("tcp://{}", SocketAddr::new(ip, port));
    Ok((builder.store(store).store_is_served().job(job).secret(secret(&internal[40..72])), Held(held)))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn secret(bytes: &[u8]) -> [u8; 32] {
    bytes.try_into().expect("32 bytes")
}

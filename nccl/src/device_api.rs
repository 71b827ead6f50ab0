//! What kernels of the program would use to communicate themselves. kolo has no such interface.

use std::ffi::c_int;
use std::mem::offset_of;

use crate::codes::*;
use crate::comm::{enter, ncclComm_t};
use crate::config::copy_sized;
use crate::fault::Fault;
use crate::structs::{ncclCommProperties_t, ncclEncryptionConfig_t, ncclTeam_t};

/// The team of a communicator that cannot be asked.
pub(crate) const NO_TEAM: ncclTeam_t = ncclTeam_t { nRanks: 0, rank: 0, stride: 1 };

/// The ranks whose memory kernels reach by an address: this one.
const ALONE: ncclTeam_t = ncclTeam_t { nRanks: 1, rank: 0, stride: 1 };

pub(crate) fn refuse(name: &str) -> Result<ncclResult_t, Fault> {
    Err(Fault::unavailable(name, "kernels cannot communicate by themselves; call collectives, ncclSend and ncclRecv on the host"))
}

pub(crate) fn refuse_one_sided(comm: ncclComm_t, name: &str) -> Result<ncclResult_t, Fault> {
    enter(comm)?;
    Err(Fault::unavailable(name, "it has no one-sided operations; use ncclSend and ncclRecv"))
}

/// Tells what the communicator has. All that kernels would need is absent.
///
/// # Safety
///
/// `to` is null, misaligned, or valid for as many bytes as it says.
pub(crate) unsafe fn properties(comm: ncclComm_t, to: *mut ncclCommProperties_t) -> Result<ncclResult_t, Fault> {
    let this = enter(comm)?;
    let made = this.ready()?;
    let mut known = ncclCommProperties_t {
        size: 0,
        magic: API_MAGIC,
        version: VERSION as u32,
        rank: made.rank() as c_int,
        nRanks: made.world_size() as c_int,
        cudaDev: this.device,
        nvmlDev: this.device,
        deviceApiSupport: false,
        multimemSupport: false,
        ginType: 0,
        nLsaTeams: made.world_size() as c_int,
        hostRmaSupport: false,
        railedGinType: 0,
        commHash: comm.addr() as u64,
        ginMinStride: 0,
        ginConnectionType: 0,
        ginSupport: [false; 64],
        devCommRuntimeVersionSize: 0,
        cftSupport: false,
        cftMulticastSupport: false,
        cftCountedSupport: false,
    };
    let least = offset_of!(ncclCommProperties_t, rank);
    /// The fields that the caller has set.
    #[repr(C)]
    struct Head {
        size: usize,
        magic: u32,
        version: u32,
    }
    // SAFETY: passed on. All fields are numbers.
    let head = unsafe { copy_sized(to.cast::<Head>(), Head { size: 0, magic: 0, version: 0 }, API_MAGIC, least, "props")? };
    (known.size, known.version) = (head.size, head.version);
    let len = head.size.min(size_of::<ncclCommProperties_t>());
    // SAFETY: the caller's struct has as many bytes.
    unsafe { std::ptr::copy_nonoverlapping((&raw const known).cast::<u8>(), to.cast(), len) };
    Ok(SUCCESS)
}

/// All ranks.
pub(crate) fn world(comm: ncclComm_t) -> Result<ncclTeam_t, Fault> {
    let comm = enter(comm)?.ready()?;
    Ok(ncclTeam_t { nRanks: comm.world_size() as c_int, rank: comm.rank() as c_int, stride: 1 })
}

/// This rank: kernels reach no other one's memory.
pub(crate) fn alone(comm: ncclComm_t) -> Result<ncclTeam_t, Fault> {
    enter(comm)?.ready()?;
    Ok(ALONE)
}

/// Returns the rank of a team's member in the communicator.
pub(crate) fn to_world(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> Result<c_int, Fault> {
    let own = enter(comm)?.ready()?.rank() as c_int;
    Ok(own.wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride)))
}

/// Returns the rank of a team's member among those that kernels reach: 0 for this one, otherwise -1.
pub(crate) fn to_alone(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> Result<c_int, Fault> {
    let own = enter(comm)?.ready()?.rank() as c_int;
    Ok(if to_world(comm, team, rank)? == own { 0 } else { -1 })
}

/// # Safety
///
/// `config` is null, misaligned, or valid for as many bytes as it says.
pub(crate) unsafe fn set_encryption(config: *const ncclEncryptionConfig_t) -> Result<ncclResult_t, Fault> {
    let unset = ncclEncryptionConfig_t {
        size: size_of::<ncclEncryptionConfig_t>(),
        magic: API_MAGIC,
        version: VERSION as u32,
        mode: 0,
        psk: std::ptr::null(),
    };
    let least = offset_of!(ncclEncryptionConfig_t, psk);
    // SAFETY: passed on. All fields are numbers and pointers.
    match unsafe { copy_sized(config, unset, API_MAGIC, least, "config")? }.mode {
        0 => Ok(SUCCESS),
        1 => Err(Fault::unavailable("encryption by a pre-shared key", "links are encrypted by certificates; see KOLO_TLS_CA")),
        mode => Err(Fault::argument(format!(
            "config->mode is {mode}; it must be NCCL_ENCRYPTION_MODE_NONE or NCCL_ENCRYPTION_MODE_PSK"
        ))),
    }
}

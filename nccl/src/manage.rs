//! How communicators begin, change and end.

use std::ffi::c_int;
use std::sync::Arc;

use kolo::{Builder, Communicator, Tag};

use crate::codes::*;
use crate::comm::{Comm, enter, ncclComm_t, take};
use crate::config::{self, Config};
use crate::driver;
use crate::environment::{self, introduce};
use crate::fault::Fault;
use crate::held;
use crate::id;
use crate::jobs::{self, Job, Place};
use crate::pointers::{place, pointer, slice_of};
use crate::structs::{ncclConfig_t, ncclUniqueId};

/// The tag of what the ranks of a shrink tell each other. Messages of programs have tag 0.
const SHRINK: Tag = 0x6e63_636c;

/// What an id begins with that stands for NCCL_COMM_ID. Its address follows, as text.
const FIXED: [u8; 6] = *b"kolo\x02\0";

/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn unique_id(to: *mut ncclUniqueId) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let to = unsafe { place(to, "uniqueId")? };
    introduce();
    let internal = match environment::variable("NCCL_COMM_ID") {
        Some(address) => {
            let mut id = [0; 128];
            let text = id.get_mut(6..6 + address.len()).filter(|_| address.contains(':') && address.len() < 122);
            let text =
                text.ok_or_else(|| Fault::argument(format!("NCCL_COMM_ID is {address:?}; it must be <address>:<port>")))?;
            text.copy_from_slice(address.as_bytes());
            id[..6].copy_from_slice(&FIXED);
            id
        }
        None => id::make()?,
    };
    to.write(ncclUniqueId { internal });
    Ok(SUCCESS)
}

/// Connects a rank with those that have the same id.
fn connect(builder: Builder, id: &id::Id) -> Result<Communicator, Fault> {
    if id[..6] == FIXED {
        // Rank 0 serves the store at the address. All ranks of the variable are one job.
        let address = String::from_utf8_lossy(&id[6..]).trim_end_matches('\0').to_owned();
        return Ok(builder.store(format!("tcp://{address}")).job(format!("nccl-{address}")).connect()?);
    }
    let made = id::rendezvous(builder, id);
    let (builder, held) =
        made.ok_or_else(|| Fault::argument("commId was not made by ncclGetUniqueId of kolo; load one library on all ranks"))?;
    let comm = builder.connect();
    drop(held);
    Ok(comm?)
}

/// Executes a call that makes or ends a communicator, or holds it back if a group is open.
fn submit(job: Job) -> Result<ncclResult_t, Fault> {
    if held::is_open() {
        held::hold_job(job);
        return Ok(SUCCESS);
    }
    jobs::run(vec![job])
}

/// Makes a communicator by `make`, and writes its handle at once. The call waits until it is made
/// if `blocking`: as in NCCL, the parent decides it for a split and a shrink, not the new one.
///
/// # Safety
///
/// `to` is null, or valid for writing until the call or its group has ended.
unsafe fn begin(
    name: &'static str,
    to: *mut ncclComm_t,
    config: Config,
    blocking: bool,
    parent: Option<Arc<Comm>>,
    make: impl FnOnce() -> Result<Option<Communicator>, Fault> + Send + 'static,
) -> Result<ncclResult_t, Fault> {
    pointer(to, "newcomm")?;
    introduce();
    let device = parent.as_ref().map_or_else(driver::current_device, |parent| parent.device);
    let (comm, handle) = Comm::starting(config, device)?;
    // SAFETY: passed on, and the pointer is aligned and not null.
    unsafe { to.write(handle) };
    submit(Job { name, new: Some((comm, Place(to, handle))), parent, blocking, make: Box::new(make) })
}

fn ranks(nranks: c_int, rank: c_int) -> Result<(usize, usize), Fault> {
    let world = usize::try_from(nranks).ok().filter(|&world| world > 0);
    let world = world.ok_or_else(|| Fault::argument(format!("nranks is {nranks}; it must be at least 1")))?;
    let own = usize::try_from(rank).ok().filter(|&rank| rank < world);
    Ok((world, own.ok_or_else(|| Fault::argument(format!("rank is {rank}; it must be from 0 to {}", world - 1)))?))
}

/// # Safety
///
/// `comm` is null, or valid for writing until the call or its group has ended. `config` is null or valid.
pub(crate) unsafe fn init_rank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *const ncclConfig_t,
) -> Result<ncclResult_t, Fault> {
    let (world, rank) = ranks(nranks, rank)?;
    // SAFETY: passed on.
    let config = unsafe { config::read(config, &Config::default())? };
    let blocking = config.blocking;
    let make = move || connect(environment::builder().world_size(world).rank(rank), &id.internal).map(Some);
    // SAFETY: passed on.
    unsafe { begin("ncclCommInitRank", comm, config, blocking, None, make) }
}

/// # Safety
///
/// As for [`init_rank`], and `ids` is null or valid for `count` ids.
pub(crate) unsafe fn init_scalable(
    comm: *mut ncclComm_t,
    nranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *const ncclUniqueId,
    config: *const ncclConfig_t,
) -> Result<ncclResult_t, Fault> {
    let count = usize::try_from(count).ok().filter(|&count| count > 0 && count <= nranks.max(0) as usize);
    let count = count.ok_or_else(|| Fault::argument("nId must be from 1 to nranks"))?;
    // SAFETY: passed on.
    let ids = unsafe { slice_of(ids, count, "commIds")? };
    // One store is enough for all ranks of kolo.
    // SAFETY: passed on.
    unsafe { init_rank(comm, nranks, ids[0], rank, config) }
}

/// # Safety
///
/// `comms` is null or has room for `ndev` handles; `devices` is null or has as many numbers.
pub(crate) unsafe fn init_all(comms: *mut ncclComm_t, ndev: c_int, devices: *const c_int) -> Result<ncclResult_t, Fault> {
    pointer(comms, "comm")?;
    let (world, _) = ranks(ndev, 0)?;
    let devices: Vec<c_int> = match devices.is_null() {
        true => (0..ndev).collect(),
        // SAFETY: passed on.
        false => unsafe { slice_of(devices, world, "devlist")? }.to_vec(),
    };
    let has_driver = driver::is_there();
    let count = driver::device_count();
    if let Some(wrong) = devices.iter().find(|device| has_driver && !(0..count).contains(*device)) {
        return Err(Fault::argument(format!("there is no device {wrong}; this process sees {count}")));
    }
    introduce();
    let made = environment::builder().connect_in_process(world)?;
    for (rank, (made, device)) in made.into_iter().zip(devices).enumerate() {
        let (comm, handle) = Comm::starting(Config { blocking: true, name: None }, if has_driver { device } else { -1 })?;
        comm.started(Ok((made, world > 1)));
        // SAFETY: the caller has room for that many handles.
        unsafe { comms.add(rank).write(handle) };
    }
    Ok(SUCCESS)
}

/// # Safety
///
/// As for [`init_rank`].
pub(crate) unsafe fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<ncclResult_t, Fault> {
    let parent = enter(comm)?;
    let whole = parent.ready()?;
    pointer(newcomm, "newcomm")?;
    // SAFETY: passed on.
    let config = unsafe { config::read(config, &parent.config)? };
    if color < SPLIT_NOCOLOR {
        return Err(Fault::argument(format!("color is {color}; it must be at least 0, or NCCL_SPLIT_NOCOLOR")));
    }
    // Shifts the numbers so that the smallest is 0, and keeps their order.
    let key = (key as u32 ^ 1 << 31) as usize;
    let (color, blocking) = (usize::try_from(color).ok(), parent.config.blocking);
    let make = move || Ok(whole.split_or_leave(color, key)?);
    if color.is_some() {
        // SAFETY: passed on.
        return unsafe { begin("ncclCommSplit", newcomm, config, blocking, Some(parent), make) };
    }
    // SAFETY: passed on, and the pointer is aligned and not null.
    unsafe { newcomm.write(std::ptr::null_mut()) };
    submit(Job { name: "ncclCommSplit", new: None, parent: Some(parent), blocking, make: Box::new(make) })
}

/// # Safety
///
/// As for [`init_rank`], and `excluded` is null or valid for `count` ranks.
pub(crate) unsafe fn shrink(
    comm: ncclComm_t,
    excluded: *const c_int,
    count: c_int,
    newcomm: *mut ncclComm_t,
    config: *const ncclConfig_t,
    flags: c_int,
) -> Result<ncclResult_t, Fault> {
    let parent = enter(comm)?;
    let whole = parent.ready()?;
    let (world, own) = (whole.world_size(), whole.rank());
    let count = usize::try_from(count).map_err(|_| Fault::argument(format!("excludeRanksCount is {count}")))?;
    // SAFETY: passed on.
    let excluded = unsafe { slice_of(excluded, count, "excludeRanksList")? };
    if let Some(wrong) = excluded.iter().find(|&&rank| rank < 0 || rank as usize >= world || rank as usize == own) {
        return Err(Fault::argument(format!(
            "excludeRanksList has {wrong}; it has ranks 0 to {} without this one, {own}",
            world - 1
        )));
    }
    if ![SHRINK_DEFAULT, SHRINK_ABORT].contains(&flags) {
        return Err(Fault::argument(format!("shrinkFlags is {flags}; it must be NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT")));
    }
    let survivors: Vec<usize> = (0..world).filter(|&rank| !excluded.contains(&(rank as c_int))).collect();
    // SAFETY: passed on.
    let config = unsafe { config::read(config, &parent.config)? };
    let make = move || {
        // A communicator that has failed carries no messages.
        if flags == SHRINK_DEFAULT && whole.failure().is_none() {
            return meet(&whole, &survivors).map(Some);
        }
        let made = whole.shrink()?;
        match made.world_size() == survivors.len() {
            true => Ok(Some(made)),
            false => {
                let (here, asked) = (made.world_size(), survivors.len());
                Err(Fault::Remote(format!(
                    "{here} ranks have survived, and {asked} are not in excludeRanksList: a further rank failed, or an excluded one called"
                )))
            }
        }
    };
    let blocking = parent.config.blocking;
    // SAFETY: passed on.
    unsafe { begin("ncclCommShrink", newcomm, config, blocking, Some(parent), make) }
}

/// Connects some ranks of a communicator anew. The others take no part.
fn meet(whole: &Communicator, survivors: &[usize]) -> Result<Communicator, Fault> {
    let own = survivors.iter().position(|&rank| rank == whole.rank()).expect("this rank is one of them");
    let mut id = [0; 128];
    if own == 0 {
        id = id::make()?;
        for &rank in &survivors[1..] {
            whole.send_tagged(&id, rank, SHRINK)?;
        }
    } else {
        whole.recv_tagged(&mut id, survivors[0], SHRINK)?;
    }
    connect(environment::builder().world_size(survivors.len()).rank(own), &id)
}

/// # Safety
///
/// `id` is null or valid for writing.
pub(crate) unsafe fn unique_id_to_grow(comm: ncclComm_t, id: *mut ncclUniqueId) -> Result<ncclResult_t, Fault> {
    enter(comm)?.ready()?;
    // SAFETY: passed on.
    unsafe { place(id, "uniqueId")? }.write(ncclUniqueId { internal: id::make()? });
    Ok(SUCCESS)
}

/// # Safety
///
/// As for [`init_rank`], and `id` is null or valid.
pub(crate) unsafe fn grow(
    comm: ncclComm_t,
    nranks: c_int,
    id: *const ncclUniqueId,
    rank: c_int,
    newcomm: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let given = (!id.is_null()).then(|| unsafe { *id }.internal);
    if comm.is_null() {
        let (world, rank) = ranks(nranks, rank)?;
        let id = given.ok_or(Fault::Null { what: "uniqueId" })?;
        // SAFETY: passed on.
        let config = unsafe { config::read(config, &Config::default())? };
        let blocking = config.blocking;
        let make = move || connect(environment::builder().world_size(world).rank(rank), &id).map(Some);
        // SAFETY: passed on.
        return unsafe { begin("ncclCommGrow", newcomm, config, blocking, None, make) };
    }
    let parent = enter(comm)?;
    let before = parent.ready()?;
    let world = usize::try_from(nranks).ok().filter(|&world| world > before.world_size());
    let world =
        world.ok_or_else(|| Fault::argument(format!("nRanks is {nranks}; the communicator has {}", before.world_size())))?;
    if rank != -1 {
        return Err(Fault::argument(format!("rank is {rank}; a rank of the communicator keeps its number, and gives -1")));
    }
    // SAFETY: passed on.
    let config = unsafe { config::read(config, &parent.config)? };
    let blocking = config.blocking;
    let make = move || {
        // The root alone has the id, and the others do not know which rank is the root.
        let mut mine = [0u8; 129];
        if let Some(id) = given {
            mine[0] = 1;
            mine[1..].copy_from_slice(&id);
        }
        let mut all = vec![0; mine.len() * before.world_size()];
        before.all_gather(&mine, &mut all)?;
        let roots: Vec<&[u8]> = all.chunks_exact(mine.len()).filter(|one| one[0] == 1).collect();
        let [root] = roots[..] else {
            return Err(Fault::argument(format!("{} ranks gave a uniqueId; the root alone gives it", roots.len())));
        };
        let id = root[1..].try_into().expect("an id is as long");
        connect(environment::builder().world_size(world).rank(before.rank()), &id).map(Some)
    };
    // SAFETY: passed on.
    unsafe { begin("ncclCommGrow", newcomm, config, blocking, Some(parent), make) }
}

pub(crate) fn finalize(comm: ncclComm_t) -> Result<ncclResult_t, Fault> {
    if comm.is_null() {
        return Ok(SUCCESS);
    }
    let this = enter(comm)?;
    this.ready()?;
    if this.is_aborted() {
        return Err(Fault::usage("the communicator was revoked; destroy it without ncclCommFinalize"));
    }
    let (parent, blocking) = (this.clone(), this.config.blocking);
    // A group that fails changes nothing.
    let make = move || match this.finalize() {
        true => this.flush().map(|()| None),
        false => Err(Fault::argument("the communicator was finalized before")),
    };
    submit(Job { name: "ncclCommFinalize", new: None, parent: Some(parent), blocking, make: Box::new(make) })
}

pub(crate) fn destroy(comm: ncclComm_t) -> Result<ncclResult_t, Fault> {
    if comm.is_null() {
        return Ok(SUCCESS);
    }
    if let Some(this) = take(comm)? {
        this.abandon();
        // How an operation ended is for its caller's ncclCommGetAsyncError.
        _ = this.flush();
    }
    Ok(SUCCESS)
}

pub(crate) fn abort(comm: ncclComm_t) -> Result<ncclResult_t, Fault> {
    if comm.is_null() {
        return Ok(SUCCESS);
    }
    if let Some(this) = take(comm)? {
        this.abort();
        _ = this.flush();
    }
    Ok(SUCCESS)
}

pub(crate) fn revoke(comm: ncclComm_t, flags: c_int) -> Result<ncclResult_t, Fault> {
    if comm.is_null() {
        return Ok(SUCCESS);
    }
    let this = enter(comm)?;
    if flags != 0 {
        return Err(Fault::argument(format!("revokeFlags is {flags}; it must be NCCL_REVOKE_DEFAULT, 0")));
    }
    this.ready()?;
    this.abort();
    _ = this.flush();
    Ok(SUCCESS)
}

/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn async_error(comm: ncclComm_t, to: *mut ncclResult_t) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    unsafe { place(to, "asyncError")? }.write(enter(comm)?.state());
    Ok(SUCCESS)
}

/// Writes a number of a communicator.
///
/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn tell(
    comm: ncclComm_t,
    to: *mut c_int,
    what: &'static str,
    get: impl FnOnce(&Communicator) -> usize,
) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let to = unsafe { place(to, what)? };
    to.write(get(&*enter(comm)?.ready()?) as c_int);
    Ok(SUCCESS)
}

/// # Safety
///
/// `to` is null or valid for writing.
pub(crate) unsafe fn device(comm: ncclComm_t, to: *mut c_int) -> Result<ncclResult_t, Fault> {
    // SAFETY: passed on.
    let to = unsafe { place(to, "device")? };
    let device = enter(comm)?.device;
    if device < 0 {
        return Err(Fault::Cuda { doing: "naming the device", problem: "this machine has no CUDA driver".to_owned() });
    }
    to.write(device);
    Ok(SUCCESS)
}

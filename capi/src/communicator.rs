//! Communicators: how they are made, their properties, and how they end.

use std::ffi::c_char;
use std::sync::Arc;

use kolo::raw::is_in_wait_check;
use kolo::{Builder, Communicator, Error};

use crate::arguments::rank;
use crate::boundary::boundary;
use crate::codes::{KOLO_OK, kolo_result_t};
use crate::config::{builder, kolo_config_t};
use crate::error;
use crate::fault::Fault;
use crate::held;
use crate::last::Last;
use crate::pointers::{place, pointer, text};
use crate::registry::{Guard, Kind, Registry};
use crate::store::{Callbacks, kolo_store_t};
use crate::unique_id::{kolo_unique_id_t, rendezvous};
use crate::wait_check;

/// A communicator: one rank's membership in a group of ranks. It is a handle, a number and not an
/// address, and may be copied.
pub struct kolo_comm {
    _opaque: [u8; 0],
}
pub type kolo_comm_t = *mut kolo_comm;

/// The color of a rank that becomes a member of no communicator in kolo_comm_split.
pub const KOLO_NO_COLOR: i32 = -1;

/// What a handle stands for.
pub(crate) struct Comm {
    pub(crate) comm: Communicator,
    pub(crate) last: Last,
}

static COMMUNICATORS: Registry<Comm> = Registry::new(Kind::Communicator);

/// Returns the communicator that a handle stands for. It lives at least as long as the guard.
#[inline(always)]
pub(crate) fn enter(comm: kolo_comm_t) -> Result<Guard<'static, Comm>, Fault> {
    COMMUNICATORS.get(comm.addr()).ok_or_else(|| unknown(comm))
}

#[cold]
fn unknown(comm: kolo_comm_t) -> Fault {
    Fault::Handle { what: "comm", is_null: comm.is_null() }
}

/// Runs a call on a communicator, which remembers the error and ends if the call panics.
#[inline(always)]
pub(crate) fn on(comm: kolo_comm_t, call: impl FnOnce(&Comm) -> Result<(), Fault>) -> kolo_result_t {
    boundary(|| {
        wait_check::refuse("a function of a communicator")?;
        let guard = enter(comm)?;
        let unwound = AbortOnUnwind(&guard);
        // A fault is large, so only a call that fails moves one.
        match call(&guard) {
            Ok(()) => {
                std::mem::forget(unwound);
                Ok(())
            }
            Err(fault) => {
                std::mem::forget(unwound);
                guard.last.set(&fault.describe());
                Err(fault)
            }
        }
    })
}

struct AbortOnUnwind<'a>(&'a Comm);

impl Drop for AbortOnUnwind<'_> {
    fn drop(&mut self) {
        self.0.comm.abort();
    }
}

fn register(comm: Communicator) -> Result<kolo_comm_t, Fault> {
    let handle = COMMUNICATORS.insert(Comm { comm, last: Last::default() });
    let handle = handle.map_err(|_| Fault::Unsupported { what: "a communicator", why: "there are too many; destroy some" })?;
    Ok(std::ptr::without_provenance_mut(handle))
}

/// Connects and writes the handle.
///
/// # Safety
///
/// `comm` is null or valid for writing.
unsafe fn connect(comm: *mut kolo_comm_t, options: impl FnOnce() -> Result<Builder, Fault>) -> kolo_result_t {
    boundary(|| {
        // SAFETY: passed on.
        let comm = unsafe { place(comm, "comm")? };
        comm.write(std::ptr::null_mut());
        held::refuse("connecting")?;
        wait_check::refuse("connecting")?;
        comm.write(register(options()?.connect()?)?);
        Ok(())
    })
}

fn ranks(builder: Builder, nranks: i32, my_rank: i32) -> Result<Builder, Fault> {
    if nranks < 1 {
        return Err(Fault::value("nranks", nranks, "it must be at least 1"));
    }
    Ok(builder.world_size(nranks as usize).rank(rank(my_rank, "rank")?))
}

/// Connects with all ranks that a launcher started (kolo run, torchrun, srun, mpirun and others).
/// Without a launcher, it makes a communicator of this process alone. A collective call: it returns
/// when all ranks have connected, or at the start deadline.
///
/// `config` may be NULL. The caller passes `*comm` to kolo_comm_destroy; it is NULL if this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_env(comm: *mut kolo_comm_t, config: *const kolo_config_t) -> kolo_result_t {
    // SAFETY: the caller's pointers are valid, as the header says.
    unsafe { connect(comm, || builder(config)) }
}

/// As kolo_comm_init_env, for `nranks` ranks that share a unique id. One process made the id with
/// kolo_get_unique_id, and the program passed it to all ranks. That process must live until all
/// ranks have connected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_rank(
    comm: *mut kolo_comm_t,
    nranks: i32,
    id: kolo_unique_id_t,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // If this process made the id, its store is held until this rank has connected.
    let mut held = None;
    // SAFETY: the caller's pointers are valid, as the header says.
    unsafe {
        connect(comm, || {
            let builder = ranks(builder(config)?, nranks, rank)?;
            let (builder, served) = rendezvous(builder, &id)?;
            held = Some(served);
            Ok(builder)
        })
    }
}

/// As kolo_comm_init_env, for `nranks` ranks that find each other at a store: `file:///path`,
/// `tcp://host:port` (which rank 0 serves), `redis://host:port` (if kolo was built with it) or
/// `env://`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_store(
    comm: *mut kolo_comm_t,
    nranks: i32,
    url: *const c_char,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // SAFETY: the caller's pointers are valid, as the header says.
    unsafe {
        connect(comm, || {
            let url = text(url, "url")?.ok_or(Fault::Null { what: "url" })?;
            Ok(ranks(builder(config)?, nranks, rank)?.store(url))
        })
    }
}

/// As kolo_comm_init_store, with a store that consists of the caller's functions. Only this thread
/// calls them, and only until this returns: the store may be freed then. So the communicator does not
/// grow: kolo_comm_grow returns KOLO_ERR_UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_callbacks(
    comm: *mut kolo_comm_t,
    nranks: i32,
    store: *const kolo_store_t,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // SAFETY: the caller's pointers are valid, and the functions behave as the header says.
    unsafe {
        connect(comm, || {
            let store = Callbacks::new(store)?;
            Ok(ranks(builder(config)?, nranks, rank)?.store_object(Arc::new(store)).store_for_start_only())
        })
    }
}

/// Makes the `nranks` ranks of one group inside this process: `comms[i]` is rank i, for a thread of
/// its own. For tests, and for programs with a thread for each rank. `comms` has room for `nranks`
/// handles, at most 4096.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_all(comms: *mut kolo_comm_t, nranks: i32, config: *const kolo_config_t) -> kolo_result_t {
    boundary(|| {
        pointer(comms, "comms")?;
        held::refuse("connecting")?;
        if nranks < 1 {
            return Err(Fault::value("nranks", nranks, "it must be at least 1"));
        }
        // SAFETY: the caller's pointers are valid, as the header says.
        let connected = unsafe { builder(config)? }.connect_in_process(nranks as usize)?;
        for (rank, comm) in connected.into_iter().enumerate() {
            // SAFETY: the caller has room for that many handles.
            unsafe { comms.add(rank).write(register(comm)?) };
        }
        Ok(())
    })
}

/// Divides the ranks. All ranks with the same `color` (from 0) become members of one new
/// communicator, in the order of their `key`s, and of their ranks where keys are equal. A rank with
/// KOLO_NO_COLOR becomes a member of none: its `*newcomm` becomes NULL.
///
/// A collective call of all ranks of `comm`. The new communicator is independent of `comm` and has
/// the same settings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_split(comm: kolo_comm_t, color: i32, key: i32, newcomm: *mut kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let newcomm = unsafe { place(newcomm, "newcomm")? };
        newcomm.write(std::ptr::null_mut());
        held::refuse("kolo_comm_split")?;
        let color = match color {
            KOLO_NO_COLOR => None,
            color => Some(
                usize::try_from(color).map_err(|_| Fault::value("color", color, "it must be at least 0, or KOLO_NO_COLOR"))?,
            ),
        };
        // Shifts the numbers so that the smallest is 0, and keeps their order.
        let key = (key as u32 ^ 1 << 31) as usize;
        if let Some(part) = this.comm.split_or_leave(color, key)? {
            newcomm.write(register(part)?);
        }
        Ok(())
    })
}

/// After a failure, makes a communicator of the surviving ranks: `*newcomm` has them in the order
/// of `comm` and with the same settings. It is NULL if this fails. `comm` ends if it has not failed
/// already; the caller still passes it to kolo_comm_destroy.
///
/// Operations in flight on `comm` fail; kolo_work_wait tells when their buffers belong to the
/// caller again. The last operation that succeeded may differ between ranks: the ranks must agree
/// on where to continue. Memory of kolo_mem_alloc stays valid and usable. Reducers, and
/// communicators split from `comm`, are independent of it. They fail if the failed rank is a
/// member: make them anew with `*newcomm`.
///
/// A collective call of all ranks that continue. It does not wait for ranks whose process has
/// ended. A rank that is alive but does not call this has until the start deadline; the rank at
/// fault has one second. KOLO_ERR_EXCLUDED if this rank called too late, and the others continued
/// without it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_shrink(comm: kolo_comm_t, newcomm: *mut kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let newcomm = unsafe { place(newcomm, "newcomm")? };
        newcomm.write(std::ptr::null_mut());
        held::refuse("kolo_comm_shrink")?;
        newcomm.write(register(this.comm.shrink()?)?);
        Ok(())
    })
}

/// Admits the processes that wait to join the job (`join` in kolo_config_t): `*newcomm` has the ranks
/// of `comm` with their numbers and then the newcomers. It is NULL if no process waits, or if this
/// fails. `comm` stays usable; the caller passes it to kolo_comm_destroy when it continues with
/// `*newcomm`.
///
/// A collective call. If no process waits, it costs a look into the store on rank 0 and a small
/// broadcast, so a program can call it every few steps. Newcomers know nothing of the program's
/// state: send it with kolo_broadcast. KOLO_ERR_NOT_GROWN on all ranks if the store or a newcomer
/// fails: `comm` stays usable. KOLO_ERR_UNSUPPORTED if `comm` was split from another communicator, or
/// comes from kolo_comm_init_callbacks or kolo_comm_init_all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_grow(comm: kolo_comm_t, newcomm: *mut kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let newcomm = unsafe { place(newcomm, "newcomm")? };
        newcomm.write(std::ptr::null_mut());
        held::refuse("kolo_comm_grow")?;
        if let Some(larger) = this.comm.grow()? {
            newcomm.write(register(larger)?);
        }
        Ok(())
    })
}

/// Cancels all operations in flight on this communicator, and ends it. Calls of other threads and
/// nonblocking operations fail with KOLO_ERR_ABORTED, later ones with KOLO_ERR_REVOKED, and those
/// of the other ranks fail, too. Any thread may call it, but no signal handler: it is not
/// async-signal-safe. It returns at once. An operation in flight notices within half a second. The
/// handle stays valid; the caller still passes it to kolo_comm_destroy.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_comm_abort(comm: kolo_comm_t) -> kolo_result_t {
    boundary(|| {
        enter(comm)?.comm.abort();
        Ok(())
    })
}

/// Tells the other ranks that this rank has left, and frees the communicator: its handle is invalid
/// afterwards. It cancels operations in flight as kolo_comm_abort does, so wait for them first.
/// When this returns, no operation uses its buffers any more. Communicators split from it, and
/// memory of kolo_mem_alloc, stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_comm_destroy(comm: kolo_comm_t) -> kolo_result_t {
    boundary(|| {
        if is_in_wait_check() {
            return end_later(comm);
        }
        end(comm.addr()).ok_or_else(|| unknown(comm))
    })
}

fn end(handle: usize) -> Option<()> {
    COMMUNICATORS.end(handle, |held| held.comm.abort()).map(drop)
}

/// Ends a communicator while a call of this thread may use it, and frees it when that has returned.
fn end_later(comm: kolo_comm_t) -> Result<(), Fault> {
    enter(comm)?.comm.abort();
    let handle = comm.addr();
    let ends = std::thread::Builder::new().name("kolo-destroy".to_owned()).spawn(move || _ = end(handle));
    let doing = "starting a thread that frees a communicator".to_owned();
    ends.map(drop).map_err(|error| Error::Os { doing, source: Arc::new(error), rank: None }.into())
}

/// Writes the last operations of this rank to a file, for `kolo trace`: up to 1024 of each
/// communicator that comes from the same first one by splitting. Any thread may call it, also while
/// operations are in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_dump_trace(comm: kolo_comm_t, path: *const c_char) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's text ends with a zero, as the header says.
        let path = unsafe { text(path, "path")? }.ok_or(Fault::Null { what: "path" })?;
        Ok(this.comm.dump_trace(path)?)
    })
}

/// Writes the number of ranks to `*count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_count(comm: kolo_comm_t, count: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, count, "count", |comm| comm.world_size() as i32) }
}

/// Writes this rank to `*rank`: 0 to the number of ranks less one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_rank(comm: kolo_comm_t, rank: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, rank, "rank", |comm| comm.rank() as i32) }
}

/// Writes the number of hosts of the ranks to `*count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_host_count(comm: kolo_comm_t, count: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, count, "count", |comm| comm.host_count() as i32) }
}

/// Writes the transport to `*name`: "none" (one rank alone), "shm", "tcp" or "shm+tcp". The text is
/// static.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_transport(comm: kolo_comm_t, name: *mut *const c_char) -> kolo_result_t {
    let text = |comm: &Communicator| match comm.transport_name() {
        "none" => c"none".as_ptr(),
        "shm" => c"shm".as_ptr(),
        "tcp" => c"tcp".as_ptr(),
        _ => c"shm+tcp".as_ptr(),
    };
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, name, "name", text) }
}

/// Sets `*has` to 1 if this rank's buffers may be in the memory of GPUs, otherwise to 0. They may
/// if rank 0's `KOLO_DEVICES` permits it, every rank's kolo was built with the feature `cuda`, and the
/// host has a driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_has_devices(comm: kolo_comm_t, has: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, has, "has", |comm| comm.has_devices().into()) }
}

/// Sets `*result` to KOLO_OK if the communicator works, otherwise to the result of the operation
/// that ended it. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_get_async_error(comm: kolo_comm_t, result: *mut kolo_result_t) -> kolo_result_t {
    // SAFETY: the caller's pointer is null or valid, as the header says.
    unsafe { tell(comm, result, "result", |comm| comm.failure().map_or(KOLO_OK, error::code)) }
}

/// # Safety
///
/// `to` is null or valid for writing.
unsafe fn tell<T>(comm: kolo_comm_t, to: *mut T, what: &'static str, get: impl FnOnce(&Communicator) -> T) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: passed on.
        unsafe { place(to, what)? }.write(get(&this.comm));
        Ok(())
    })
}

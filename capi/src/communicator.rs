//! Communicators: how they begin, what they know of themselves, and how they end.

use std::ffi::c_char;
use std::sync::Arc;

use kolo::{Builder, Communicator};

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
use crate::unique_id::{kolo_unique_id_t, meeting_place};

/// A communicator: a group of ranks, seen from one of them. A handle: it is a number and no address, and may be copied.
pub struct kolo_comm {
    _opaque: [u8; 0],
}
pub type kolo_comm_t = *mut kolo_comm;

/// The color of a rank that takes part in none of the communicators that kolo_comm_split makes.
pub const KOLO_NO_COLOR: i32 = -1;

/// What a handle stands for.
pub(crate) struct Comm {
    pub(crate) comm: Communicator,
    pub(crate) last: Last,
}

static COMMUNICATORS: Registry<Comm> = Registry::new(Kind::Communicator);

/// The communicator that a handle stands for. It lives at least as long as the guard.
#[inline]
pub(crate) fn enter(comm: kolo_comm_t) -> Result<Guard<'static, Comm>, Fault> {
    COMMUNICATORS.get(comm.addr()).ok_or_else(|| unknown(comm))
}

#[cold]
fn unknown(comm: kolo_comm_t) -> Fault {
    Fault::Handle { what: "comm", is_null: comm.is_null() }
}

/// A call on a communicator, which remembers how it failed, and ends if it panics.
#[inline]
pub(crate) fn on(comm: kolo_comm_t, call: impl FnOnce(&Comm) -> Result<(), Fault>) -> kolo_result_t {
    boundary(|| {
        let guard = enter(comm)?;
        let unwound = AbortOnUnwind(&guard);
        let result = call(&guard);
        std::mem::forget(unwound);
        result.inspect_err(|fault| guard.last.set(&fault.describe()))
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
    let handle = handle.map_err(|_| Fault::Unsupported { what: "a communicator", why: "there are too many already" })?;
    Ok(std::ptr::without_provenance_mut(handle))
}

/// Connects, and gives out the handle.
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
        comm.write(register(options()?.connect()?)?);
        Ok(())
    })
}

fn ranks(builder: Builder, nranks: i32, my_rank: i32) -> Result<Builder, Fault> {
    if nranks < 1 {
        return Err(Fault::value("nranks", nranks, "there is at least one rank"));
    }
    Ok(builder.world_size(nranks as usize).rank(rank(my_rank, "rank")?))
}

/// Connects with all ranks that a launcher started (kolo run, torchrun, srun, mpirun and others), or makes a communicator of this
/// process alone if none did. A collective call: returns when all have connected, or by the start deadline.
///
/// `config` may be NULL. `*comm` is to be given to kolo_comm_destroy; it is NULL if this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_env(comm: *mut kolo_comm_t, config: *const kolo_config_t) -> kolo_result_t {
    // SAFETY: the caller's pointers.
    unsafe { connect(comm, || builder(config)) }
}

/// As kolo_comm_init_env, for `nranks` ranks that share a unique id: one process made it with kolo_get_unique_id, and handed it to
/// the others in a way of its own. That process must live until all have connected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_rank(
    comm: *mut kolo_comm_t,
    nranks: i32,
    id: kolo_unique_id_t,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // Held until this rank has connected, if it is in this process that the id was made.
    let mut held = None;
    // SAFETY: the caller's pointers.
    unsafe {
        connect(comm, || {
            let builder = ranks(builder(config)?, nranks, rank)?;
            let (builder, served) = meeting_place(builder, &id)?;
            held = Some(served);
            Ok(builder)
        })
    }
}

/// As kolo_comm_init_env, for `nranks` ranks that find each other at a store: `file:///path`, `tcp://host:port` (which rank 0 serves),
/// `redis://host:port` (if kolo was built with it) or `env://`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_store(
    comm: *mut kolo_comm_t,
    nranks: i32,
    url: *const c_char,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // SAFETY: the caller's pointers.
    unsafe {
        connect(comm, || {
            let url = text(url, "url")?.ok_or(Fault::Null { what: "url" })?;
            Ok(ranks(builder(config)?, nranks, rank)?.store(url))
        })
    }
}

/// As kolo_comm_init_store, at a store of the caller's own. Its functions are called by this thread, before this returns, and not
/// afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_callbacks(
    comm: *mut kolo_comm_t,
    nranks: i32,
    store: *const kolo_store_t,
    rank: i32,
    config: *const kolo_config_t,
) -> kolo_result_t {
    // SAFETY: the caller's pointers and functions.
    unsafe {
        connect(comm, || {
            let store = Callbacks::new(store)?;
            Ok(ranks(builder(config)?, nranks, rank)?.store_object(Arc::new(store)))
        })
    }
}

/// Makes `nranks` communicators that are ranks of one group inside this process, one for each of as many threads: `comms[i]` is
/// rank i. For tests, and for programs with a thread for each rank. `comms` has room for `nranks` handles,
/// of at most 4096.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_init_all(comms: *mut kolo_comm_t, nranks: i32, config: *const kolo_config_t) -> kolo_result_t {
    boundary(|| {
        pointer(comms, "comms")?;
        held::refuse("connecting")?;
        if nranks < 1 {
            return Err(Fault::value("nranks", nranks, "there is at least one rank"));
        }
        // SAFETY: the caller's pointers.
        let connected = unsafe { builder(config)? }.connect_in_process(nranks as usize)?;
        for (rank, comm) in connected.into_iter().enumerate() {
            // SAFETY: the caller has room for as many.
            unsafe { comms.add(rank).write(register(comm)?) };
        }
        Ok(())
    })
}

/// Divides the ranks: those that give the same `color` (from 0) become a communicator of their own, in the order of their `key`s,
/// and of their ranks where these are equal. With KOLO_NO_COLOR a rank takes part in none, and `*newcomm` becomes NULL.
///
/// A collective call of all ranks of `comm`. The new communicator is independent of it, and has the same settings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_split(comm: kolo_comm_t, color: i32, key: i32, newcomm: *mut kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer.
        let newcomm = unsafe { place(newcomm, "newcomm")? };
        newcomm.write(std::ptr::null_mut());
        held::refuse("kolo_comm_split")?;
        let color = match color {
            KOLO_NO_COLOR => None,
            color => Some(usize::try_from(color).map_err(|_| Fault::value("color", color, "it is from 0, or KOLO_NO_COLOR"))?),
        };
        // In the same order, and not negative.
        let key = (key as u32 ^ 1 << 31) as usize;
        if let Some(part) = this.comm.split_or_leave(color, key)? {
            newcomm.write(register(part)?);
        }
        Ok(())
    })
}

/// After a failure: `*newcomm` becomes a communicator of the ranks that are left, in the order in which they are in `comm` and with the
/// same settings. It is NULL if this fails. `comm` ends, if it has not failed already, and is still to be given to kolo_comm_destroy.
///
/// Operations that were started on `comm` fail, and kolo_work_wait says when their buffers are the caller's again. Which operations
/// were the last that succeeded may differ between ranks: let them agree on where to go on. Memory of kolo_mem_alloc lives on, and can
/// be used. Reducers, and what was split from `comm`, have communicators of their own, and end by themselves if the failed rank is one of
/// theirs: make them anew with `*newcomm`.
///
/// A collective call of all ranks that want to go on. Ranks that are gone are not waited for; those that are there but do not call
/// this have until the start deadline, except that the one whose fault the failure is has a second. KOLO_ERR_EXCLUDED if this rank
/// came too late, and the others went on without it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_shrink(comm: kolo_comm_t, newcomm: *mut kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointer.
        let newcomm = unsafe { place(newcomm, "newcomm")? };
        newcomm.write(std::ptr::null_mut());
        held::refuse("kolo_comm_shrink")?;
        newcomm.write(register(this.comm.shrink()?)?);
        Ok(())
    })
}

/// Gives up what is under way on this communicator, and ends it: calls of other threads and operations that were started fail
/// with KOLO_ERR_ABORTED, later ones with KOLO_ERR_REVOKED, and those of the other ranks fail, too. From any thread; returns at once.
/// What is under way looks at least every half second. The handle stays valid, to be given to kolo_comm_destroy.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_comm_abort(comm: kolo_comm_t) -> kolo_result_t {
    on(comm, |this| {
        this.comm.abort();
        Ok(())
    })
}

/// Tells the other ranks that this one has left, and frees the communicator: its handle is dead afterwards. Operations that are
/// still under way are given up, as by kolo_comm_abort, so wait for them first; when this returns nothing uses their buffers any more.
/// What was split from it, and memory of kolo_mem_alloc, live on.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_comm_destroy(comm: kolo_comm_t) -> kolo_result_t {
    boundary(|| COMMUNICATORS.end(comm.addr(), |held| held.comm.abort()).map(drop).ok_or_else(|| unknown(comm)))
}

/// Writes the last operations of this rank to a file, for `kolo trace`: those of this communicator and of all that are split from the
/// same first one, up to 1024 of each. From any thread, also while operations are under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_dump_trace(comm: kolo_comm_t, path: *const c_char) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's text.
        let path = unsafe { text(path, "path")? }.ok_or(Fault::Null { what: "path" })?;
        Ok(this.comm.dump_trace(path)?)
    })
}

/// How many ranks there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_count(comm: kolo_comm_t, count: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer.
    unsafe { tell(comm, count, "count", |comm| comm.world_size() as i32) }
}

/// This rank, from 0 to the number of ranks less one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_rank(comm: kolo_comm_t, rank: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer.
    unsafe { tell(comm, rank, "rank", |comm| comm.rank() as i32) }
}

/// How many hosts the ranks are on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_host_count(comm: kolo_comm_t, count: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer.
    unsafe { tell(comm, count, "count", |comm| comm.host_count() as i32) }
}

/// Through what ranks exchange data: "none" (alone), "shm", "tcp" or "shm+tcp". The text is static.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_transport(comm: kolo_comm_t, name: *mut *const c_char) -> kolo_result_t {
    let text = |comm: &Communicator| match comm.transport_name() {
        "none" => c"none".as_ptr(),
        "shm" => c"shm".as_ptr(),
        "tcp" => c"tcp".as_ptr(),
        _ => c"shm+tcp".as_ptr(),
    };
    // SAFETY: the caller's pointer.
    unsafe { tell(comm, name, "name", text) }
}

/// Whether this rank's buffers may be in the memory of GPUs: `*has` is 1 or 0. They may if rank 0's `KOLO_DEVICES` says so, this kolo was
/// built with the feature `cuda`, and there is a driver here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_has_devices(comm: kolo_comm_t, has: *mut i32) -> kolo_result_t {
    // SAFETY: the caller's pointer.
    unsafe { tell(comm, has, "has", |comm| comm.has_devices().into()) }
}

/// Whether the communicator still works: `*result` is KOLO_OK, or the result of the operation that ended it. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_comm_get_async_error(comm: kolo_comm_t, result: *mut kolo_result_t) -> kolo_result_t {
    // SAFETY: the caller's pointer.
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

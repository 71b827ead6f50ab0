//! Handles on operations in flight.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use kolo::raw::{RawWork, asks_wait_check, has_wait_check};

use crate::arguments::kolo_stream_t;
use crate::boundary::{boundary, boundary_of};
use crate::codes::{KOLO_IN_PROGRESS, KOLO_OK, kolo_result_t};
use crate::communicator::{enter, kolo_comm_t};
use crate::fault::Fault;
use crate::pointers::{place, slice_of};
use crate::registry::{Guard, Kind, Registry};
use crate::wait_check;

/// An operation in flight. It is a handle, which the caller passes to kolo_work_destroy.
pub struct kolo_work {
    _opaque: [u8; 0],
}
pub type kolo_work_t = *mut kolo_work;

/// What a handle stands for.
struct Entry {
    work: RawWork,
    /// The handle of the communicator, which may be invalid by now.
    comm: usize,
}

static WORKS: Registry<Entry> = Registry::new(Kind::Work);

pub(crate) fn register(work: RawWork, comm: kolo_comm_t) -> Result<kolo_work_t, RawWork> {
    let handle = WORKS.insert(Entry { work, comm: comm.addr() }).map_err(|entry| entry.work)?;
    Ok(std::ptr::without_provenance_mut(handle))
}

fn find(work: kolo_work_t) -> Result<Guard<'static, Entry>, Fault> {
    WORKS.get(work.addr()).ok_or_else(|| unknown(work))
}

fn unknown(work: kolo_work_t) -> Fault {
    Fault::Handle { what: "work", is_null: work.is_null() }
}

impl Entry {
    fn comm(&self) -> kolo_comm_t {
        std::ptr::without_provenance_mut(self.comm)
    }

    /// Returns how the operation ended, or that it has not ended by the deadline.
    fn outcome(&self, deadline: Option<Instant>) -> Result<kolo_result_t, Fault> {
        // A wait in pieces helps no operation by itself, and to wake the progress thread takes much
        // longer than a small collective.
        if deadline.is_none() && has_wait_check() {
            self.work.help();
        }
        match in_pieces(deadline, |deadline| self.work.outcome(deadline)) {
            None => Ok(KOLO_IN_PROGRESS),
            Some(Ok(())) => Ok(KOLO_OK),
            Some(Err(error)) => {
                let fault = Fault::from(error);
                if let Ok(comm) = enter(self.comm()) {
                    comm.last.set(&fault.describe());
                }
                Err(fault)
            }
        }
    }
}

/// Waits until a deadline by `wait`, which returns `None` if it has waited in vain. If this thread has
/// a wait check, it asks that one from time to time, and waits no longer if the check says so.
fn in_pieces<T>(deadline: Option<Instant>, wait: impl Fn(Option<Instant>) -> Option<T>) -> Option<T> {
    if !has_wait_check() {
        return wait(deadline);
    }
    loop {
        let until = Instant::now() + PIECE;
        if let Some(deadline) = deadline.filter(|&deadline| deadline <= until) {
            return wait(Some(deadline));
        }
        if let Some(found) = wait(Some(until)) {
            return Some(found);
        }
        if !asks_wait_check() {
            return None;
        }
    }
}

/// How long a thread with a wait check waits before it asks.
const PIECE: Duration = Duration::from_millis(50);

/// Waits until an operation has ended, and returns its result: KOLO_OK, or why it failed. Every
/// operation has a deadline, so this returns. Afterwards the buffers belong to the caller again. It
/// may be called several times, and by several threads. A thread that waits may run collectives that
/// have been started and have not begun: that is faster than to wake the progress thread.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_work_wait(work: kolo_work_t) -> kolo_result_t {
    boundary_of(|| {
        wait_check::refuse("kolo_work_wait")?;
        find(work)?.outcome(None)
    })
}

/// As kolo_work_wait, but waits at most `timeout_ms` milliseconds. KOLO_IN_PROGRESS if the
/// operation has not ended by then.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_work_wait_timeout(work: kolo_work_t, timeout_ms: u64) -> kolo_result_t {
    boundary_of(|| {
        wait_check::refuse("kolo_work_wait_timeout")?;
        let entry = find(work)?;
        // A timeout beyond the range of the clock is none.
        entry.outcome(Instant::now().checked_add(Duration::from_millis(timeout_ms)))
    })
}

/// Waits until one of `n` operations has ended, and writes its place in `works` to `*index`: the
/// lowest, if several have ended. Waits at most `timeout_ms` milliseconds; KOLO_IN_PROGRESS if none
/// has ended by then. KOLO_OK says that one has ended, and kolo_work_wait how.
///
/// KOLO_ERR_ARGUMENT if `n` is 0 or a pointer is NULL, KOLO_ERR_HANDLE if one of the handles is no
/// operation. Either leaves `*index` as it is, and the operations go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_work_wait_any(
    works: *const kolo_work_t,
    n: usize,
    index: *mut usize,
    timeout_ms: u64,
) -> kolo_result_t {
    boundary_of(|| {
        // SAFETY: the caller's pointers are null or valid, as the header says.
        let (works, index) = unsafe { (slice_of(works, n, "works")?, place(index, "index")?) };
        let entries = works.iter().map(|&work| find(work)).collect::<Result<Vec<_>, _>>()?;
        let in_flight: Vec<&RawWork> = entries.iter().map(|entry| &entry.work).collect();
        if in_flight.is_empty() {
            return Err(Fault::value("n", 0, "it must be at least 1"));
        }
        wait_check::refuse("kolo_work_wait_any")?;
        // A timeout beyond the range of the clock is none.
        let deadline = Instant::now().checked_add(Duration::from_millis(timeout_ms));
        match in_pieces(deadline, |deadline| RawWork::wait_any(&in_flight, deadline)) {
            None => Ok(KOLO_IN_PROGRESS),
            Some(found) => {
                index.write(found);
                Ok(KOLO_OK)
            }
        }
    })
}

/// A function for kolo_work_on_done. `result`: how the operation ended, as kolo_work_wait returns
/// it. kolo_last_error tells more, on this thread.
pub type kolo_done_function_t = Option<unsafe extern "C" fn(context: *mut c_void, result: kolo_result_t)>;

/// Calls `function(context, result)` once when an operation has ended, on a thread of its own; soon,
/// if it has ended already. The buffers belong to the caller then. The function may call kolo, also
/// to wait for other operations. The handle may be destroyed before the end. What `context` points
/// to must live until the function has returned.
///
/// Not called in a forked child, nor if the system cannot start a thread, which is in the log.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_work_on_done(
    work: kolo_work_t,
    function: kolo_done_function_t,
    context: *mut c_void,
) -> kolo_result_t {
    boundary(|| {
        let function = function.ok_or(Fault::Null { what: "function" })?;
        let context = Context(context);
        let call = move |outcome: kolo::Result<()>| {
            let context = context.pointer();
            let result = boundary(|| Ok(outcome?));
            // SAFETY: the caller vouches for the function and for its argument, as the header says.
            unsafe { function(context, result) };
        };
        Ok(find(work)?.work.on_done(call)?)
    })
}

/// The argument of a function of the caller.
struct Context(*mut c_void);

impl Context {
    /// A method, so that a closure captures all of `self`, not the pointer alone, which may not move
    /// to another thread.
    fn pointer(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: kolo only passes the pointer on. The caller's function is called on another thread, as
// the header says, and the caller vouches for it.
unsafe impl Send for Context {}

/// Makes a CUDA stream wait until an operation has ended, and returns KOLO_OK at once. Later work
/// of the stream finds the result. If the operation fails, the stream continues, too, with
/// undefined content in the buffers; kolo_work_test and kolo_work_wait return the error. For an
/// operation on host memory without a stream, and where streams cannot wait for the host, this is
/// kolo_work_wait.
///
/// An operation that a CUDA graph captures counts as ended at once. This call orders streams in the
/// capture, which cannot end before a stream of the capture waits for the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_work_wait_on(work: kolo_work_t, stream: kolo_stream_t) -> kolo_result_t {
    boundary_of(|| {
        wait_check::refuse("kolo_work_wait_on")?;
        let entry = find(work)?;
        if entry.work.is_finished() && !entry.work.is_captured() {
            return entry.outcome(None);
        }
        // SAFETY: the caller's stream is null or lives, as the header says.
        match unsafe { entry.work.hold_stream(stream)? } {
            true => Ok(KOLO_OK),
            false => entry.outcome(None),
        }
    })
}

/// Sets `*done` to 1 if an operation has ended, otherwise to 0. Returns KOLO_OK, or why the
/// operation or this call failed. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_work_test(work: kolo_work_t, done: *mut i32) -> kolo_result_t {
    boundary_of(|| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let done = unsafe { place(done, "done")? };
        let entry = find(work)?;
        if !entry.work.is_finished() {
            done.write(0);
            return Ok(KOLO_OK);
        }
        done.write(1);
        entry.outcome(None)
    })
}

/// Writes how many nanoseconds an operation took to `*nanoseconds`: from its beginning, after the
/// operations that were started before it, to its end. This includes the time in which this rank
/// waited for the other ranks. KOLO_IN_PROGRESS if the operation has not ended; 0 ns if it failed
/// before it began. Returns KOLO_OK also for an operation that failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_work_duration(work: kolo_work_t, nanoseconds: *mut u64) -> kolo_result_t {
    boundary_of(|| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let nanoseconds = unsafe { place(nanoseconds, "nanoseconds")? };
        Ok(match find(work)?.work.duration() {
            None => KOLO_IN_PROGRESS,
            Some(duration) => {
                nanoseconds.write(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
                KOLO_OK
            }
        })
    })
}

/// Cancels an operation, unless it has ended. The other ranks wait for it, so this ends the
/// communicator, as kolo_comm_abort does. Returns at once; kolo_work_wait tells when the buffers
/// belong to the caller again.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_work_cancel(work: kolo_work_t) -> kolo_result_t {
    boundary(|| {
        let entry = find(work)?;
        if !entry.work.is_finished()
            && let Ok(comm) = enter(entry.comm())
        {
            comm.comm.abort();
        }
        Ok(())
    })
}

/// Frees the handle, which is invalid afterwards. An operation that has not ended continues and
/// uses its buffers until it ends: wait for it first.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_work_destroy(work: kolo_work_t) -> kolo_result_t {
    boundary(|| WORKS.take(work.addr()).map(drop).ok_or_else(|| unknown(work)))
}

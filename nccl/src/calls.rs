//! The collectives, sends and receives, and the groups that hold them back.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicI32, Ordering};

use kolo::{Op, Rank};

use crate::codes::*;
use crate::comm::{Comm, enter, ncclComm_t};
use crate::config::{self, copy_sized};
use crate::fault::Fault;
use crate::held;
use crate::jobs;
use crate::request::{self, Request};
use crate::scalar::{Factor, Reduction, Value, built_in, dtype};
use crate::structs::{ncclCollConfig_t, ncclSimInfo_t};

/// The arguments of one call, as C gives them.
pub(crate) struct Arguments {
    op: Op,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    redop: Option<c_int>,
    root: Option<(c_int, &'static str)>,
    config: *const ncclCollConfig_t,
}

impl Arguments {
    pub(crate) fn of(op: Op, send: *const c_void, recv: *mut c_void, count: usize, dtype: c_int) -> Arguments {
        Arguments { op, send, recv, count, dtype, redop: None, root: None, config: std::ptr::null() }
    }

    pub(crate) fn reduced(self, redop: c_int) -> Arguments {
        Arguments { redop: Some(redop), ..self }
    }

    pub(crate) fn root(self, root: c_int) -> Arguments {
        Arguments { root: Some((root, "root")), ..self }
    }

    pub(crate) fn peer(self, peer: c_int) -> Arguments {
        Arguments { root: Some((peer, "peer")), ..self }
    }

    pub(crate) fn config(self, config: *const ncclCollConfig_t) -> Arguments {
        Arguments { config, ..self }
    }

    /// Executes the call, or holds it back if a group is open.
    ///
    /// # Safety
    ///
    /// The buffers are valid for the elements that the operation has, and the stream is null or lives:
    /// until this returns or the group ends, and until the stream has passed the call. The
    /// configuration is null or valid.
    pub(crate) unsafe fn run(self, comm: ncclComm_t, stream: *mut c_void) -> Result<ncclResult_t, Fault> {
        let this = held::counted(enter(comm))?;
        let result = (|| {
            // SAFETY: passed on.
            unsafe { config::check_call(self.config)? };
            let dtype = dtype(self.dtype)?;
            let world = this.for_calls()?.world_size();
            let reduction = match self.redop {
                None => None,
                Some(number) => Some(match built_in(number, dtype)? {
                    Some(built_in) => built_in,
                    None => Reduction::Scaled(operator(&this, number)?),
                }),
            };
            let root = self.root.map_or(Ok(0), |(number, what)| rank(number, world, what))?;
            let Arguments { op, send, recv, count, .. } = self;
            this.check_memory([send, recv])?;
            let request = Request { comm: this.clone(), op, dtype, reduction, send, recv, count, root, stream };
            if held::is_open() {
                request.check()?;
                held::hold(request);
                return Ok(());
            }
            // The host reads the buffers before kolo sees the call.
            if !matches!(reduction, None | Some(Reduction::Plain(_))) {
                request.check()?;
            }
            request::run_one(request)
        })();
        held::counted(result.inspect_err(|fault: &Fault| _ = this.note(&fault.to_string())))?;
        Ok(SUCCESS)
    }
}

/// Returns a rank of the communicator.
fn rank(number: c_int, world: usize, what: &str) -> Result<Rank, Fault> {
    let rank = usize::try_from(number).ok().filter(|&rank| rank < world);
    rank.ok_or_else(|| Fault::argument(format!("{what} is {number}; the communicator has ranks 0 to {}", world - 1)))
}

/// Returns the operator of a number of ncclRedOpCreatePreMulSum.
fn operator(comm: &Comm, number: c_int) -> Result<Factor, Fault> {
    let found = comm.operators.lock().get(&number).copied();
    found.ok_or_else(|| Fault::argument(format!("op is {number}, which is no operator of this communicator")))
}

/// # Safety
///
/// `op` is null or valid for writing; `scalar` is valid for one element, if it is in device memory until
/// the last call with the operator has been executed.
pub(crate) unsafe fn create_operator(
    op: *mut c_int,
    scalar: *mut c_void,
    number: c_int,
    residence: c_int,
    comm: ncclComm_t,
) -> Result<ncclResult_t, Fault> {
    let this = enter(comm)?;
    this.ready()?;
    // SAFETY: passed on.
    let op = unsafe { crate::pointers::place(op, "op")? };
    let dtype = dtype(number)?;
    if scalar.is_null() {
        return Err(Fault::Null { what: "scalar" });
    }
    let at = Value::At(scalar.expose_provenance());
    let value = match residence {
        0 => at,
        // SAFETY: passed on.
        1 => Value::Known(unsafe { Factor { dtype, value: at }.bytes()? }),
        _ => {
            return Err(Fault::argument(format!(
                "residence is {residence}; it must be ncclScalarDevice or ncclScalarHostImmediate"
            )));
        }
    };
    // No other communicator has the number, and none had it.
    static NEXT: AtomicI32 = AtomicI32::new(NUM_OPS);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    this.operators.lock().insert(number, Factor { dtype, value });
    op.write(number);
    Ok(SUCCESS)
}

pub(crate) fn destroy_operator(op: c_int, comm: ncclComm_t) -> Result<ncclResult_t, Fault> {
    let this = enter(comm)?;
    if (0..NUM_OPS).contains(&op) {
        return Err(Fault::argument(format!("op is {op}, a built-in reduction, which cannot be destroyed")));
    }
    operator(&this, op)?;
    this.operators.lock().remove(&op);
    Ok(SUCCESS)
}

pub(crate) fn group_start() -> Result<ncclResult_t, Fault> {
    held::open();
    Ok(SUCCESS)
}

pub(crate) fn group_end() -> Result<ncclResult_t, Fault> {
    let Some((held, failed)) = held::close("ncclGroupEnd")? else { return Ok(SUCCESS) };
    if failed != SUCCESS {
        held.jobs.into_iter().for_each(jobs::Job::forget);
        // The sentence of the call that failed stays the last one.
        return Ok(failed);
    }
    let result = jobs::run(held.jobs)?;
    request::run(held.requests)?;
    Ok(result)
}

/// Predicts how long the calls of the group take, and drops them.
///
/// # Safety
///
/// `info` is null, misaligned or valid for as many bytes as it says.
pub(crate) unsafe fn group_simulate_end(info: *mut ncclSimInfo_t) -> Result<ncclResult_t, Fault> {
    let Some((held, failed)) = held::close("ncclGroupSimulateEnd")? else { return Ok(SUCCESS) };
    held.jobs.into_iter().for_each(jobs::Job::forget);
    if failed != SUCCESS {
        return Ok(failed);
    }
    if info.is_null() {
        return Ok(SUCCESS);
    }
    let known =
        ncclSimInfo_t { size: size_of::<ncclSimInfo_t>(), magic: SIM_MAGIC, version: VERSION as u32, estimatedTime: -1.0 };
    let least = offset_of!(ncclSimInfo_t, estimatedTime) + size_of::<f32>();
    // SAFETY: passed on. All fields are numbers.
    unsafe { copy_sized(info, known, SIM_MAGIC, least, "simInfo")? };
    let mut seconds = 0.0;
    for request in &held.requests {
        seconds += request.price()?;
    }
    // SAFETY: passed on; the size was checked, and the pointer is aligned.
    unsafe { (&raw mut (*info).estimatedTime).write((seconds * 1e6) as f32) };
    Ok(SUCCESS)
}

//! The gradient reducer.

use std::ffi::c_void;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use kolo::ReducerError;
use kolo::ddp::{BufferSync, Parameter, TensorMut};
use kolo::raw::{RawReducer, Stopper, tensor};

use crate::arguments::{kolo_dtype_t, rank};
use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::communicator::{kolo_comm_t, on};
use crate::fault::Fault;
use crate::held;
use crate::pointers::{place, slice_of};
use crate::reducer_config::{builder, kolo_reducer_config_t, kolo_tensor_t, refuse_in_hook, tensors};
use crate::registry::{Guard, Kind, Registry};
use crate::sized::{self, Grows, end_of};

/// A gradient reducer, for data-parallel training. It is a handle, a number and not an address, and
/// may be copied.
pub struct kolo_reducer {
    _opaque: [u8; 0],
}
pub type kolo_reducer_t = *mut kolo_reducer;

/// For kolo_reducer_sync_buffers: floating-point buffers become their average over all ranks.
pub const KOLO_SYNC_AVERAGE: i32 = -1;

/// What a handle stands for. Calls within a step take the lock for reading. Calls that begin a
/// step, or communicate on the caller's thread, take it for writing.
struct Held {
    reducer: RwLock<RawReducer>,
    stopper: Stopper,
}

static REDUCERS: Registry<Held> = Registry::new(Kind::Reducer);

fn find(reducer: kolo_reducer_t) -> Result<Guard<'static, Held>, Fault> {
    REDUCERS.get(reducer.addr()).ok_or_else(|| unknown(reducer))
}

fn unknown(reducer: kolo_reducer_t) -> Fault {
    Fault::Handle { what: "reducer", is_null: reducer.is_null() }
}

/// Runs a call that other calls may run beside.
fn within(reducer: kolo_reducer_t, call: impl FnOnce(RwLockReadGuard<'_, RawReducer>) -> Result<(), Fault>) -> kolo_result_t {
    guarded(reducer, |held| call(held.reducer.read()))
}

/// Runs a call that excludes all others.
fn alone(reducer: kolo_reducer_t, call: impl FnOnce(RwLockWriteGuard<'_, RawReducer>) -> Result<(), Fault>) -> kolo_result_t {
    guarded(reducer, |held| {
        held::refuse("a reducer")?;
        call(held.reducer.write())
    })
}

fn guarded(reducer: kolo_reducer_t, call: impl FnOnce(&Held) -> Result<(), Fault>) -> kolo_result_t {
    struct StopOnUnwind<'a>(&'a Held);
    impl Drop for StopOnUnwind<'_> {
        fn drop(&mut self) {
            self.0.stopper.stop();
        }
    }
    boundary(|| {
        refuse_in_hook()?;
        let held = find(reducer)?;
        held.stopper.check_process()?;
        let unwound = StopOnUnwind(&held);
        let result = call(&held);
        std::mem::forget(unwound);
        result
    })
}

/// Makes a reducer of all ranks of `comm`, for the `nparameters` parameters of a model, in the
/// order in which its forward pass uses them, and its `nbuffers` buffers. If ranks give different
/// parameters or buffers, all ranks get KOLO_ERR_REDUCER with the first difference. `config` may be
/// NULL.
///
/// A collective call. The reducer has its own communicator and a thread; `comm` may be destroyed
/// before it. The caller may free all arguments when this returns, except `config->stream` and what
/// `config->hook_context` points to: every step uses them, until kolo_reducer_destroy has returned.
/// The caller passes `*reducer` to kolo_reducer_destroy; it is NULL if this fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_create(
    reducer: *mut kolo_reducer_t,
    parameters: *const kolo_tensor_t,
    nparameters: usize,
    buffers: *const kolo_tensor_t,
    nbuffers: usize,
    config: *const kolo_reducer_config_t,
    comm: kolo_comm_t,
) -> kolo_result_t {
    on(comm, |this| {
        // SAFETY: the caller's pointers are valid, as the header says.
        let (to, builder, parameters, buffers) = unsafe {
            let to = place(reducer, "reducer")?;
            to.write(std::ptr::null_mut());
            (to, builder(config)?, tensors(parameters, nparameters, "parameters")?, tensors(buffers, nbuffers, "buffers")?)
        };
        refuse_in_hook()?;
        held::refuse("kolo_reducer_create")?;
        let made = RawReducer::from(builder.parameters(parameters).buffers(buffers).build(&this.comm)?);
        let held = Held { stopper: made.stopper(), reducer: RwLock::new(made) };
        let handle = REDUCERS.insert(held);
        let handle = handle.map_err(|_| Fault::Unsupported { what: "a reducer", why: "there are too many; destroy some" })?;
        to.write(std::ptr::without_provenance_mut(handle));
        Ok(())
    })
}

/// Frees a reducer and the memory of its gradients. It cancels a step in progress, which then fails
/// on the other ranks.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_destroy(reducer: kolo_reducer_t) -> kolo_result_t {
    boundary(|| {
        refuse_in_hook()?;
        REDUCERS.end(reducer.addr(), |held| held.stopper.stop()).map(drop).ok_or_else(|| unknown(reducer))
    })
}

/// Begins a step. At its end all ranks have the average of their gradients. The second call is
/// collective: it rebuilds the buckets, and gradients move to other addresses.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_begin(reducer: kolo_reducer_t) -> kolo_result_t {
    alone(reducer, |mut this| Ok(this.begin()?))
}

/// Begins a step that is not reduced. Its gradients are kept, and the gradients of the next steps
/// are added to them. The next step that kolo_reducer_begin begins averages the sum. Not a
/// collective call.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_accumulate(reducer: kolo_reducer_t) -> kolo_result_t {
    alone(reducer, |mut this| Ok(this.accumulate()?))
}

/// Sets `*gradient` to the address of a parameter's gradient, in memory that the ranks of the host
/// share. The address is valid until the second kolo_reducer_begin of any rank rebuilds the buckets
/// (on a rank that has joined, kolo_reducer_join). An address from after that is valid as long as
/// the reducer lives.
///
/// For a parameter on the reducer's device it is an address there, for use in the order of
/// `config->stream`. The average includes what the stream writes before kolo_reducer_ready. Work
/// that the stream gets after kolo_reducer_finish has returned finds the average.
///
/// The caller may write the gradient from the start of a step until kolo_reducer_ready, and read
/// and write it from the end of the step until the next step begins. In between it belongs to the
/// reducer. Unless `accumulates` is NULL, `*accumulates` becomes 1 if the caller must add the
/// step's gradient to the elements in place, otherwise 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_gradient(
    reducer: kolo_reducer_t,
    parameter: usize,
    gradient: *mut *mut c_void,
    accumulates: *mut i32,
) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        unsafe { place(gradient, "gradient")? }.write(this.gradient(parameter)?.cast());
        if !accumulates.is_null() {
            // SAFETY: the caller's pointer is null or valid, as the header says.
            unsafe { place(accumulates, "accumulates")? }.write(this.accumulates().into());
        }
        Ok(())
    })
}

/// Marks a gradient as ready that was written to its address. Any thread may call it. If this fills
/// a bucket, its reduction starts when all earlier buckets have started.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_ready(reducer: kolo_reducer_t, parameter: usize) -> kolo_result_t {
    within(reducer, |this| Ok(this.ready(parameter)?))
}

/// Declares that this step gives a parameter no gradient. The gradient counts as zeros.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_unused(reducer: kolo_reducer_t, parameter: usize) -> kolo_result_t {
    within(reducer, |this| Ok(this.unused(parameter)?))
}

/// Copies a gradient to its address, or adds it if the step accumulates, and marks it as ready. Any
/// thread may call it. `gradient` must not overlap that address: a gradient that is in place takes
/// kolo_reducer_ready.
///
/// For a parameter on the reducer's device, the copy is work of `config->stream`, and `gradient`
/// must stay valid until the stream has executed it. The elements are contiguous: `strides` must be
/// NULL.
///
/// `strides` has an entry for each dimension, in elements: the element of index `[i, j, ...]` is
/// `gradient[i * strides[0] + j * strides[1] + ...]`. NULL: the elements are contiguous and
/// row-major.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_put(
    reducer: kolo_reducer_t,
    parameter: usize,
    gradient: *const c_void,
    strides: *const usize,
) -> kolo_result_t {
    within(reducer, |this| {
        let own = this.gradient(parameter)?;
        let described @ Parameter { shape, dtype, .. } = &this.get().parameters()[parameter];
        let strides = match strides.is_null() {
            true => None,
            // SAFETY: the caller has a stride for each dimension, as the header says.
            false => Some(unsafe { slice_of(strides, shape.len(), "strides")? }),
        };
        let span = reach(shape, strides);
        check_gradient(gradient, span, described)?;
        if overlaps((gradient.addr(), span), (own.addr(), described.count()), dtype.size()) {
            let why = "gradient overlaps the address of kolo_reducer_gradient; write it there and call kolo_reducer_ready";
            return Err(ReducerError::Moment { call: "kolo_reducer_put", why }.into());
        }
        if described.on_device {
            if strides.is_some() {
                let why = "copy it to the address of kolo_reducer_gradient with a function of the device's library";
                return Err(Fault::Unsupported { what: "a gradient on a device with strides", why });
            }
            // SAFETY: the parameter's elements are there until the stream has passed the copy, as
            // the header says.
            unsafe { this.put_on_device(parameter, gradient.addr() as u64)? };
            return Ok(());
        }
        // SAFETY: the caller's gradient has all elements that its shape and strides reach, as the
        // header says. It is aligned and does not overlap the place of the gradient, as checked
        // above.
        unsafe { this.put(parameter, gradient.cast(), span, strides)? };
        Ok(())
    })
}

/// Returns how many elements lie between the first and the last element of a gradient, both
/// included.
fn reach(shape: &[usize], strides: Option<&[usize]>) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    let Some(strides) = strides else { return shape.iter().product() };
    let to_last = |(&extent, &stride): (&usize, &usize)| (extent - 1).saturating_mul(stride);
    shape.iter().zip(strides).map(to_last).fold(1, usize::saturating_add)
}

/// Refuses a gradient whose address cannot hold its elements.
fn check_gradient(gradient: *const c_void, span: usize, described: &Parameter) -> Result<(), Fault> {
    if gradient.is_null() && !described.shape.contains(&0) {
        return Err(Fault::Null { what: "gradient" });
    }
    let size = described.dtype.size();
    if span > isize::MAX as usize / size || !gradient.addr().is_multiple_of(size) {
        let expected = "it must be aligned to its elements, and they must fit into memory";
        return Err(Fault::value("gradient", gradient.addr() as i64, expected));
    }
    Ok(())
}

/// Returns whether two runs of elements have a byte in common: the address and the number of each.
fn overlaps(one: (usize, usize), other: (usize, usize), size: usize) -> bool {
    one.0 < other.0 + other.1 * size && other.0 < one.0 + one.1 * size
}

/// Ends the step: starts the remaining buckets, and waits until all are reduced. A step of
/// kolo_reducer_accumulate is not reduced. If a gradient is missing that must not be,
/// KOLO_ERR_REDUCER names the first one, and the step fails on the other ranks, too.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_finish(reducer: kolo_reducer_t) -> kolo_result_t {
    within(reducer, |this| Ok(this.finish()?))
}

/// Takes part in one step of the ranks that have input, with zeros. It is for ranks that have no
/// more input; `config->uneven` must allow that. `*more` is 1 after such a step: the caller may
/// read gradients, and calls this again. `*more` is 0 when no rank has input any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_join(reducer: kolo_reducer_t, more: *mut i32) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let more = unsafe { place(more, "more")? };
        more.write(0);
        more.write(this.join_step()?.into());
        Ok(())
    })
}

/// Sets `*rank` to the rank that made the last step, the lowest of several. When no rank has input
/// any more, that rank has the latest buffers; kolo_reducer_sync_buffers copies them to all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_last(reducer: kolo_reducer_t, rank: *mut i32) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        unsafe { place(rank, "rank")? }.write(this.last()? as i32);
        Ok(())
    })
}

/// Copies rank 0's values of all parameters to all ranks. `values` has an address for each
/// parameter, in their order. It overwrites the gradients. A collective call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_broadcast_parameters(reducer: kolo_reducer_t, values: *const *mut c_void) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller has an address for each tensor, valid for its elements, as the header
        // says.
        let mut values = unsafe { self::values(values, this.get().parameters())? };
        Ok(this.get_mut().broadcast_parameters(&mut values)?)
    })
}

/// As kolo_reducer_broadcast_parameters, but all ranks get the average of their values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_average_parameters(reducer: kolo_reducer_t, values: *const *mut c_void) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller has an address for each tensor, valid for its elements, as the header
        // says.
        let mut values = unsafe { self::values(values, this.get().parameters())? };
        Ok(this.get_mut().average_parameters(&mut values)?)
    })
}

/// Copies the buffers of rank `from` to all ranks, or their average if `from` is KOLO_SYNC_AVERAGE.
/// `values` has an address for each buffer, in their order. A collective call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_sync_buffers(
    reducer: kolo_reducer_t,
    values: *const *mut c_void,
    from: i32,
) -> kolo_result_t {
    alone(reducer, |mut this| {
        let how = match from {
            KOLO_SYNC_AVERAGE => BufferSync::Average,
            root => BufferSync::Broadcast(rank(root, "from")?),
        };
        // SAFETY: the caller has an address for each tensor, valid for its elements, as the header
        // says.
        let mut values = unsafe { self::values(values, this.get().buffers())? };
        Ok(this.get_mut().sync_buffers(&mut values, how)?)
    })
}

/// Sets `*used` to 1 if a parameter got a gradient in the last step on any rank (with
/// KOLO_UNUSED_ERROR, on this rank), otherwise to 0. KOLO_ERR_REDUCER if there is no such
/// parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_is_used(reducer: kolo_reducer_t, parameter: usize, used: *mut i32) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        unsafe { place(used, "used")? }.write(this.is_used(parameter)?.into());
        Ok(())
    })
}

/// The costs of the last step that was reduced. Set `size` to `sizeof(kolo_step_stats_t)` before
/// kolo_reducer_stats.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_step_stats_t {
    /// In: the `sizeof` of this struct in the caller's header.
    pub size: usize,
    /// The number of buckets.
    pub buckets: usize,
    /// Bytes of gradients in all buckets.
    pub bytes: u64,
    /// Time from the start of the step to kolo_reducer_finish; if gradients are on a device, to the
    /// last gradient. In microseconds.
    pub computed_us: u64,
    /// How long kolo_reducer_finish waited, in microseconds.
    pub waited_us: u64,
    /// The sum of the times in which buckets were reduced, in microseconds.
    pub communicated_us: u64,
    /// The part of that before kolo_reducer_finish was called, in microseconds.
    pub overlapped_us: u64,
}

// SAFETY: the struct begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_step_stats_t {
    const NAMES: (&'static str, &'static str) = ("stats", "stats->size");
    const FIRST: usize = end_of!(kolo_step_stats_t, overlapped_us: u64);
}

/// Fills in the costs of the last step that was reduced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_stats(reducer: kolo_reducer_t, stats: *mut kolo_step_stats_t) -> kolo_result_t {
    within(reducer, |this| {
        let step = this.get().statistics();
        let described = kolo_step_stats_t {
            size: size_of::<kolo_step_stats_t>(),
            buckets: step.buckets.len(),
            bytes: step.bytes() as u64,
            computed_us: micros(step.computed),
            waited_us: micros(step.waited),
            communicated_us: micros(step.communicated()),
            overlapped_us: micros(step.overlapped()),
        };
        // SAFETY: the caller has set the size of the struct.
        unsafe { sized::write(stats, &described) }
    })
}

/// The costs of one bucket of the last step that was reduced. Times are in microseconds from the
/// begin of the step. Set `size` to `sizeof(kolo_bucket_stats_t)` before kolo_reducer_bucket_stats.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_bucket_stats_t {
    /// In: the `sizeof` of this struct in the caller's header.
    pub size: usize,
    /// Bytes of gradients in the bucket.
    pub bytes: u64,
    /// The number of parameters in the bucket.
    pub parameters: usize,
    /// When the last gradient was ready.
    pub ready_us: u64,
    /// When the reduction started.
    pub started_us: u64,
    /// When the reduction ended.
    pub ended_us: u64,
    /// The type of the elements: a KOLO_FLOAT... constant.
    pub dtype: kolo_dtype_t,
}

// SAFETY: the struct begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_bucket_stats_t {
    const NAMES: (&'static str, &'static str) = ("stats", "stats->size");
    const FIRST: usize = end_of!(kolo_bucket_stats_t, dtype: kolo_dtype_t);
}

/// Fills in the costs of one bucket of the last step that was reduced. `bucket` is its index in the
/// order in which buckets were started, less than `buckets` of kolo_reducer_stats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_bucket_stats(
    reducer: kolo_reducer_t,
    bucket: usize,
    stats: *mut kolo_bucket_stats_t,
) -> kolo_result_t {
    within(reducer, |this| {
        let step = this.get().statistics();
        let Some(one) = step.buckets.get(bucket) else {
            return Err(Fault::value(
                "bucket",
                bucket as i64,
                format!("the last step that was reduced had {}", step.buckets.len()),
            ));
        };
        let described = kolo_bucket_stats_t {
            size: size_of::<kolo_bucket_stats_t>(),
            bytes: one.bytes as u64,
            parameters: one.parameters,
            ready_us: micros(one.ready),
            started_us: micros(one.started),
            ended_us: micros(one.ended),
            dtype: one.dtype as i32,
        };
        // SAFETY: the caller has set the size of the struct.
        unsafe { sized::write(stats, &described) }
    })
}

fn micros(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the values at the caller's addresses.
///
/// # Safety
///
/// `values` has an address for each parameter described, valid for its elements as long as the
/// result is used.
unsafe fn values<'a>(values: *const *mut c_void, described: &[Parameter]) -> Result<Vec<TensorMut<'a>>, Fault> {
    // SAFETY: passed on.
    let addresses = unsafe { slice_of(values, described.len(), "values")? };
    let tensor = |(&address, parameter): (&*mut c_void, &Parameter)| {
        if parameter.count() == 0 {
            // SAFETY: no element is read or written there.
            return Ok(unsafe { self::tensor(std::ptr::NonNull::dangling().as_ptr(), parameter) });
        }
        if address.is_null() {
            return Err(Fault::Null { what: "an address of values" });
        }
        if !address.addr().is_multiple_of(parameter.dtype.size()) {
            return Err(Fault::Misaligned { what: "an address of values" });
        }
        // SAFETY: passed on.
        Ok(unsafe { self::tensor(address.cast(), parameter) })
    };
    addresses.iter().zip(described).map(tensor).collect()
}

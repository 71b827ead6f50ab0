//! The gradient reducer.

use std::ffi::c_void;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use kolo::ReducerProblem;
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

/// A gradient reducer, for data-parallel training. A handle: it is a number and no address, and may be copied.
pub struct kolo_reducer {
    _opaque: [u8; 0],
}
pub type kolo_reducer_t = *mut kolo_reducer;

/// With kolo_reducer_sync_buffers: floating-point buffers become their average over all ranks.
pub const KOLO_SYNC_AVERAGE: i32 = -1;

/// What a handle stands for. What threads do within a step reads; what begins one or communicates on the caller's thread writes.
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

/// A call within a step, or between two.
fn within(reducer: kolo_reducer_t, call: impl FnOnce(RwLockReadGuard<'_, RawReducer>) -> Result<(), Fault>) -> kolo_result_t {
    guarded(reducer, |held| call(held.reducer.read()))
}

/// A call that nobody else's may meet.
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

/// Makes a reducer of all ranks of `comm`, for the `nparameters` parameters of a model in the order in which its forward pass uses
/// them, and its `nbuffers` buffers. Compares them with those of the other ranks: if they differ, all ranks get KOLO_ERR_REDUCER with
/// the first difference. `config` may be NULL.
///
/// A collective call. The reducer has a communicator of its own and a thread; `comm` may be destroyed before it. All that the arguments
/// point to may be freed when this returns, but for `config->stream`, and what `config->hook_context` points to: they are used in every
/// step, until kolo_reducer_destroy has returned. `*reducer` is to be given to kolo_reducer_destroy; it is NULL if this fails.
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
        // SAFETY: the caller's pointers.
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
        let handle = handle.map_err(|_| Fault::Unsupported { what: "a reducer", why: "there are too many already" })?;
        to.write(std::ptr::without_provenance_mut(handle));
        Ok(())
    })
}

/// Frees a reducer, and the gradients' memory with it. A step that is under way is given up, which fails those of the other ranks.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_destroy(reducer: kolo_reducer_t) -> kolo_result_t {
    boundary(|| {
        refuse_in_hook()?;
        REDUCERS.end(reducer.addr(), |held| held.stopper.stop()).map(drop).ok_or_else(|| unknown(reducer))
    })
}

/// Begins a step, at whose end all ranks have the average of their gradients. A collective call the second time, when buckets are made
/// anew and gradients move to other addresses.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_begin(reducer: kolo_reducer_t) -> kolo_result_t {
    alone(reducer, |mut this| Ok(this.begin()?))
}

/// Begins a step that is not reduced: its gradients are kept, and the next steps' are to be added to them, until one that
/// kolo_reducer_begin began has been finished, which averages the sum. Not a collective call.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_accumulate(reducer: kolo_reducer_t) -> kolo_result_t {
    alone(reducer, |mut this| Ok(this.accumulate()?))
}

/// Where the gradient of a parameter is: `*gradient` points to its elements, in memory that the ranks of the host share, until the
/// second kolo_reducer_begin of any rank makes the buckets anew (on a rank that has joined, kolo_reducer_join); from then on for as
/// long as the reducer lives.
///
/// Of a parameter on the reducer's device it is an address there, for the configuration's stream: what that is given before
/// kolo_reducer_ready is in the average, and what it is given after kolo_reducer_finish has returned finds the average.
///
/// It may be written between the begin of a step and kolo_reducer_ready, and read, and changed, from the end of the step to the next
/// begin. In between it is the reducer's. `*accumulates`, if that is not NULL, becomes 1 if the step's gradient is to be added to
/// what is there, else 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_gradient(
    reducer: kolo_reducer_t,
    parameter: usize,
    gradient: *mut *mut c_void,
    accumulates: *mut i32,
) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer.
        unsafe { place(gradient, "gradient")? }.write(this.gradient(parameter)?.cast());
        if !accumulates.is_null() {
            // SAFETY: the caller's pointer.
            unsafe { place(accumulates, "accumulates")? }.write(this.accumulates().into());
        }
        Ok(())
    })
}

/// Says that a gradient is where kolo_reducer_gradient said. From any thread; the bucket that it fills is reduced at once, if it is
/// its turn.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_ready(reducer: kolo_reducer_t, parameter: usize) -> kolo_result_t {
    within(reducer, |this| Ok(this.ready(parameter)?))
}

/// Says that this step gives a parameter no gradient: it counts as zeros.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_unused(reducer: kolo_reducer_t, parameter: usize) -> kolo_result_t {
    within(reducer, |this| Ok(this.unused(parameter)?))
}

/// Copies a gradient that lies elsewhere to its place (or adds it to what is there, if the step accumulates), and makes it ready. From
/// any thread. `gradient` lies elsewhere: what is in its place already takes kolo_reducer_ready.
///
/// A gradient of a parameter on the reducer's device is copied in the order of the configuration's stream, after what that was given
/// before, and must stay until the stream has come to it. Its elements are one after the other: `strides` must be NULL.
///
/// With `strides`, one for each dimension, in elements, the element of index `[i, j, ...]` is `gradient[i * strides[0] +
/// j * strides[1] + ...]`. NULL: the elements are one after the other, row-major.
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
            // SAFETY: the caller's strides, one for each dimension.
            false => Some(unsafe { slice_of(strides, shape.len(), "strides")? }),
        };
        let span = reach(shape, strides);
        check_gradient(gradient, span, described)?;
        if overlaps((gradient.addr(), span), (own.addr(), described.count()), dtype.size()) {
            let why = "gradient lies where kolo_reducer_gradient says; call kolo_reducer_ready for it";
            return Err(ReducerProblem::Moment { call: "kolo_reducer_put", why }.into());
        }
        if described.on_device {
            if strides.is_some() {
                let why = "copy it to where kolo_reducer_gradient says, with what the device's library has for that";
                return Err(Fault::Unsupported { what: "a gradient on a device with strides", why });
            }
            // SAFETY: the caller's memory, of the parameter's elements, until the stream has come to it.
            unsafe { this.put_on_device(parameter, gradient.addr() as u64)? };
            return Ok(());
        }
        // SAFETY: the caller's memory, of as many elements as the shape and the strides reach over.
        unsafe { this.put(parameter, gradient.cast(), span, strides)? };
        Ok(())
    })
}

/// Returns how many elements lie between the first and the last element of a gradient, both included.
fn reach(shape: &[usize], strides: Option<&[usize]>) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    let Some(strides) = strides else { return shape.iter().product() };
    let to_last = |(&extent, &stride): (&usize, &usize)| (extent - 1).saturating_mul(stride);
    shape.iter().zip(strides).map(to_last).fold(1, usize::saturating_add)
}

/// Refuses a gradient of so many elements that cannot be at that address.
fn check_gradient(gradient: *const c_void, span: usize, described: &Parameter) -> Result<(), Fault> {
    if gradient.is_null() && !described.shape.contains(&0) {
        return Err(Fault::Null { what: "gradient" });
    }
    let size = described.dtype.size();
    if span > isize::MAX as usize / size || !gradient.addr().is_multiple_of(size) {
        let expected = "it is aligned to its elements, and they fit into memory";
        return Err(Fault::value("gradient", gradient.addr() as i64, expected));
    }
    Ok(())
}

/// Returns whether two runs of elements have a byte in common: the address and the number of each.
fn overlaps(one: (usize, usize), other: (usize, usize), size: usize) -> bool {
    one.0 < other.0 + other.1 * size && other.0 < one.0 + one.1 * size
}

/// Ends the step: starts the buckets that have not been, and waits until all are reduced. After kolo_reducer_accumulate nothing is
/// reduced. KOLO_ERR_REDUCER names the first gradient that is missing and may not be; the other ranks' steps fail, too.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_reducer_finish(reducer: kolo_reducer_t) -> kolo_result_t {
    within(reducer, |this| Ok(this.finish()?))
}

/// Takes part in one step of ranks that have input, with zeros: for ranks that have no more, where the configuration's `uneven` says that
/// there may be such. `*more` is 1 after such a step, when gradients may be read, and this is to be called again; 0 when no rank has
/// input any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_join(reducer: kolo_reducer_t, more: *mut i32) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller's pointer.
        let more = unsafe { place(more, "more")? };
        more.write(0);
        more.write(this.join_step()?.into());
        Ok(())
    })
}

/// Which rank made the last step, the lowest of several: `*rank`. When kolo_reducer_join has said that no rank has input any more, its
/// buffers are the latest; kolo_reducer_sync_buffers gives them to all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_last(reducer: kolo_reducer_t, rank: *mut i32) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer.
        unsafe { place(rank, "rank")? }.write(this.last()? as i32);
        Ok(())
    })
}

/// Gives all ranks rank 0's values of all parameters: `values` has an address for each, in their order. It overwrites the gradients. A
/// collective call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_broadcast_parameters(reducer: kolo_reducer_t, values: *const *mut c_void) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller's addresses and values.
        let mut values = unsafe { self::values(values, this.get().parameters())? };
        Ok(this.get_mut().broadcast_parameters(&mut values)?)
    })
}

/// The same, but all get the average of their values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_average_parameters(reducer: kolo_reducer_t, values: *const *mut c_void) -> kolo_result_t {
    alone(reducer, |mut this| {
        // SAFETY: the caller's addresses and values.
        let mut values = unsafe { self::values(values, this.get().parameters())? };
        Ok(this.get_mut().average_parameters(&mut values)?)
    })
}

/// Makes all ranks' buffers those of rank `from`, or their average if that is KOLO_SYNC_AVERAGE. `values` has an address for each,
/// in their order. A collective call.
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
        // SAFETY: the caller's addresses and values.
        let mut values = unsafe { self::values(values, this.get().buffers())? };
        Ok(this.get_mut().sync_buffers(&mut values, how)?)
    })
}

/// Whether a parameter got a gradient in the last step, on any rank (with KOLO_UNUSED_ERROR, on this one): `*used` is 1 or 0.
/// KOLO_ERR_REDUCER if there is no such parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_reducer_is_used(reducer: kolo_reducer_t, parameter: usize, used: *mut i32) -> kolo_result_t {
    within(reducer, |this| {
        // SAFETY: the caller's pointer.
        unsafe { place(used, "used")? }.write(this.is_used(parameter)?.into());
        Ok(())
    })
}

/// What the last step that was reduced cost. Set `size` to `sizeof(kolo_step_stats_t)` before kolo_reducer_stats.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_step_stats_t {
    /// In: the size of this struct as the caller knows it.
    pub size: usize,
    /// How many buckets there were.
    pub buckets: usize,
    /// Bytes of gradients in them.
    pub bytes: u64,
    /// From the begin of the step to kolo_reducer_finish, or, where gradients are on a device, to when the last was there; in
    /// microseconds.
    pub computed_us: u64,
    /// How long kolo_reducer_finish waited.
    pub waited_us: u64,
    /// How long buckets were being reduced, in sum.
    pub communicated_us: u64,
    /// How much of that was before kolo_reducer_finish was called.
    pub overlapped_us: u64,
}

// SAFETY: it begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_step_stats_t {
    const NAMES: (&'static str, &'static str) = ("stats", "stats->size");
    const FIRST: usize = end_of!(kolo_step_stats_t, overlapped_us: u64);
}

/// What the last step that was reduced cost.
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
        // SAFETY: the caller's struct, whose size the caller has set.
        unsafe { sized::write(stats, &described) }
    })
}

/// What one bucket of the last step that was reduced cost. Times are counted from the begin of the step, in microseconds. Set `size` to
/// `sizeof(kolo_bucket_stats_t)` before kolo_reducer_bucket_stats.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_bucket_stats_t {
    /// In: the size of this struct as the caller knows it.
    pub size: usize,
    /// Bytes of gradients in it.
    pub bytes: u64,
    /// How many parameters it has.
    pub parameters: usize,
    /// When its last gradient was ready.
    pub ready_us: u64,
    /// When its reduction started.
    pub started_us: u64,
    /// When it had been reduced.
    pub ended_us: u64,
    /// The type of its elements: a KOLO_FLOAT... constant.
    pub dtype: kolo_dtype_t,
}

// SAFETY: it begins with its size, and all its fields are numbers.
unsafe impl Grows for kolo_bucket_stats_t {
    const NAMES: (&'static str, &'static str) = ("stats", "stats->size");
    const FIRST: usize = end_of!(kolo_bucket_stats_t, dtype: kolo_dtype_t);
}

/// What one bucket of the last step that was reduced cost: `bucket` is less than `buckets` of kolo_reducer_stats, in the order in
/// which they were started.
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
        // SAFETY: the caller's struct, whose size the caller has set.
        unsafe { sized::write(stats, &described) }
    })
}

fn micros(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Values by their addresses.
///
/// # Safety
///
/// `values` has an address for each of those described, valid for its elements for as long as the result is used.
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

//! The description of a reducer: its structs in C.

use std::cell::Cell;
use std::ffi::{c_char, c_void};

use kolo::ddp::{Bucket, Compress, ErrorFeedback, Hook, LocalSgd, Parameter, PowerSgd, Reducer, ReducerBuilder, Uneven, Unused};
use kolo::raw::{bucket_address, on_device};
use kolo::{Communicator, ReducerError};

use crate::arguments::{dtype, kolo_dtype_t, kolo_stream_t};
use crate::codes::meaning;
use crate::fault::Fault;
use crate::pointers::{slice_of, text};
use crate::sized::{self, Grows, end_of};

/// A parameter or buffer of a model.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_tensor_t {
    /// Its name in errors.
    pub name: *const c_char,
    /// Its dimensions, row-major; may be NULL if there are none.
    pub shape: *const usize,
    /// How many dimensions it has.
    pub ndim: usize,
    /// The type of its elements.
    pub dtype: kolo_dtype_t,
    /// 1: it and its gradient are in the memory of the reducer's device. 0: they are in host
    /// memory.
    pub on_device: i32,
}

/// How a step treats parameters without a gradient.
pub type kolo_unused_t = i32;

/// kolo_reducer_finish fails and names the first such parameter, unless kolo_reducer_unused was
/// called for it.
pub const KOLO_UNUSED_ERROR: kolo_unused_t = 0;
/// Gradients that are not ready at kolo_reducer_finish count as zeros. Ranks tell each other which
/// parameters no rank used.
pub const KOLO_UNUSED_FIND: kolo_unused_t = 1;
/// As KOLO_UNUSED_FIND in the first step. Later steps use the same parameters.
pub const KOLO_UNUSED_STATIC: kolo_unused_t = 2;

/// Whether ranks may have different numbers of steps, and the divisor of averages when some ranks
/// have no more.
pub type kolo_uneven_t = i32;

/// They may not.
pub const KOLO_UNEVEN_NO: kolo_uneven_t = 0;
/// They may. Averages are divided by the number of all ranks.
pub const KOLO_UNEVEN_BY_ALL: kolo_uneven_t = 1;
/// They may. Averages are divided by the number of ranks that made the step.
pub const KOLO_UNEVEN_BY_ACTIVE: kolo_uneven_t = 2;

/// How a bucket is reduced.
pub type kolo_hook_t = i32;

/// By averaging it.
pub const KOLO_HOOK_AVERAGE: kolo_hook_t = 0;
/// By averaging it in KOLO_FLOAT16.
pub const KOLO_HOOK_FLOAT16: kolo_hook_t = 1;
/// By averaging it in KOLO_BFLOAT16.
pub const KOLO_HOOK_BFLOAT16: kolo_hook_t = 2;
/// By PowerSGD of rank `hook_rank` (Vogels et al. 2019), after `hook_start_after` steps.
pub const KOLO_HOOK_POWER_SGD: kolo_hook_t = 3;
/// By local SGD: it is not reduced after `hook_start_after` steps. The caller calls
/// kolo_reducer_average_parameters every few steps.
pub const KOLO_HOOK_LOCAL_SGD: kolo_hook_t = 4;
/// By `hook_function`.
pub const KOLO_HOOK_CUSTOM: kolo_hook_t = 5;
/// By averaging it in messages of fewer bits between hosts (`wire_dtype`), with what they left out
/// added in the next step.
pub const KOLO_HOOK_ERROR_FEEDBACK: kolo_hook_t = 6;

/// A bucket in flight. Only the hook reads and writes it.
#[repr(C)]
pub struct kolo_bucket_t {
    /// Its index in the order in which buckets are started.
    pub index: usize,
    /// The number of steps that were reduced before this one.
    pub step: u64,
    /// Its elements, in memory that the ranks of the host share, or on the device.
    pub data: *mut c_void,
    /// The number of elements.
    pub count: usize,
    /// The type of the elements.
    pub dtype: kolo_dtype_t,
    /// 1: the elements are in the memory of the reducer's device; 0: on the host. On the device,
    /// all earlier writes have ended, and the hook must wait for its own work before it returns.
    pub on_device: i32,
}

/// Replaces a bucket's elements by their average over all ranks, or an approximation of it. It
/// returns 0 on success. Any other number, such as the result of a collective, fails the step and
/// is part of the error. The reducer's thread calls it for the same buckets in the same order on
/// all ranks. It may call collectives on a communicator that no other thread uses meanwhile, such
/// as one made for it by kolo_comm_split. It must not call reducers, or wait for a thread that
/// does: kolo_reducer_... functions return KOLO_ERR_REDUCER there.
pub type kolo_hook_function_t = Option<unsafe extern "C" fn(context: *mut c_void, bucket: *const kolo_bucket_t) -> i32>;

/// The version of kolo_reducer_config_t in this header.
pub const KOLO_REDUCER_CONFIG_VERSION: u32 = 1;

/// Options of a reducer, the same on all ranks. Initialize it with KOLO_REDUCER_CONFIG_INITIALIZER,
/// or with zeros, `size` and `version`. A field that is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_reducer_config_t {
    /// `sizeof(kolo_reducer_config_t)`.
    pub size: usize,
    /// KOLO_REDUCER_CONFIG_VERSION.
    pub version: u32,
    /// How a step treats parameters without a gradient. Default: KOLO_UNUSED_ERROR.
    pub unused: kolo_unused_t,
    /// Whether ranks may have different numbers of steps. Default: KOLO_UNEVEN_NO.
    pub uneven: kolo_uneven_t,
    /// 1: buckets start in kolo_reducer_finish, and not as soon as they are full. Ranks may have
    /// different values.
    pub no_overlap: i32,
    /// 1: buckets are not rebuilt after the first step.
    pub no_rebuild: i32,
    /// How a bucket is reduced. Default: KOLO_HOOK_AVERAGE.
    pub hook: kolo_hook_t,
    /// The least number of bytes of a bucket. Default: 25 MiB.
    pub bucket_bytes: usize,
    /// The least number of bytes of the first bucket. Default: 1 MiB.
    pub first_bucket_bytes: usize,
    /// The number of steps after which the hook begins, for the hooks that have it.
    pub hook_start_after: u64,
    /// The rank of KOLO_HOOK_POWER_SGD. Default: 1.
    pub hook_rank: u32,
    /// The device of the tensors that are on a device: its number in this process, as for
    /// `cudaSetDevice`.
    pub device: i32,
    /// The function of KOLO_HOOK_CUSTOM.
    pub hook_function: kolo_hook_function_t,
    /// The first argument of `hook_function`. What it points to must live until
    /// kolo_reducer_destroy has returned.
    pub hook_context: *mut c_void,
    /// The stream of that device in whose order gradients are written and read. It must live until
    /// kolo_reducer_destroy has returned. NULL: the default stream.
    pub stream: kolo_stream_t,
}

// SAFETY: the struct begins with its size; numbers may be zero, and the function, its context and
// the stream null.
unsafe impl Grows for kolo_reducer_config_t {
    const NAMES: (&'static str, &'static str) = ("config", "config->size");
    const FIRST: usize = end_of!(kolo_reducer_config_t, hook_context: *mut c_void);
}

/// A function of the caller as a hook.
struct Custom {
    function: unsafe extern "C" fn(*mut c_void, *const kolo_bucket_t) -> i32,
    context: *mut c_void,
}

// SAFETY: the header says that another thread calls the function.
unsafe impl Send for Custom {}

thread_local! {
    /// Whether this thread is in a hook of the caller.
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
}

/// Refuses a call of a reducer inside a hook. Reducers wait for their hooks, so such a hook could
/// wait for itself.
pub(crate) fn refuse_in_hook() -> Result<(), Fault> {
    let why = "its reducer waits for it, so it must not call reducers";
    match IN_HOOK.get() {
        true => Err(ReducerError::Moment { call: "in hook_function", why }.into()),
        false => Ok(()),
    }
}

impl Hook for Custom {
    fn name(&self) -> String {
        "of the caller".to_owned()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, _: &Communicator) -> kolo::Result<()> {
        let (index, step, count, dtype) = (bucket.index(), bucket.step(), bucket.count(), bucket.dtype() as u8 as kolo_dtype_t);
        let on_device = bucket.is_on_device().into();
        let described = kolo_bucket_t { index, step, data: bucket_address(bucket).cast(), count, dtype, on_device };
        IN_HOOK.set(true);
        // SAFETY: the function and its context outlive the reducer, as the header says.
        let returned = unsafe { (self.function)(self.context, &raw const described) };
        IN_HOOK.set(false);
        match returned {
            0 => Ok(()),
            returned => Err(ReducerError::Hook { bucket: index, returned, meaning: meaning(returned) }.into()),
        }
    }
}

/// Returns the options that a configuration stands for.
///
/// # Safety
///
/// `config` is null or points to as many bytes as its first field says.
pub(crate) unsafe fn builder(config: *const kolo_reducer_config_t) -> Result<ReducerBuilder, Fault> {
    if config.is_null() {
        // The default stream of the first device.
        // SAFETY: the stream is null.
        return Ok(unsafe { on_device(Reducer::builder(), 0, std::ptr::null_mut()) });
    }
    // SAFETY: passed on.
    let config = unsafe { sized::read(config)? };
    if config.version != KOLO_REDUCER_CONFIG_VERSION {
        return Err(Fault::value("config->version", config.version, "set it to KOLO_REDUCER_CONFIG_VERSION"));
    }
    let ordinal = usize::try_from(config.device)
        .map_err(|_| Fault::value("config->device", config.device, "devices are numbered from 0"))?;
    let mut builder = Reducer::builder()
        .unused(unused(config.unused)?)
        .uneven(uneven(config.uneven)?)
        .overlap(config.no_overlap == 0)
        .rebuild(config.no_rebuild == 0);
    // SAFETY: the caller's stream is null or outlives the reducer, as the header says.
    builder = unsafe { on_device(builder, ordinal, config.stream) };
    if config.bucket_bytes > 0 {
        builder = builder.bucket_bytes(config.bucket_bytes);
    }
    if config.first_bucket_bytes > 0 {
        builder = builder.first_bucket_bytes(config.first_bucket_bytes);
    }
    hook(builder, &config)
}

fn unused(number: kolo_unused_t) -> Result<Unused, Fault> {
    match number {
        KOLO_UNUSED_ERROR => Ok(Unused::Error),
        KOLO_UNUSED_FIND => Ok(Unused::Find),
        KOLO_UNUSED_STATIC => Ok(Unused::Static),
        other => {
            let expected = "it must be one of KOLO_UNUSED_ERROR to KOLO_UNUSED_STATIC, 0 to 2";
            Err(Fault::value("config->unused", other, expected))
        }
    }
}

fn uneven(number: kolo_uneven_t) -> Result<Uneven, Fault> {
    match number {
        KOLO_UNEVEN_NO => Ok(Uneven::No),
        KOLO_UNEVEN_BY_ALL => Ok(Uneven::ByWorldSize),
        KOLO_UNEVEN_BY_ACTIVE => Ok(Uneven::ByRanksWithInput),
        other => {
            let expected = "it must be one of KOLO_UNEVEN_NO to KOLO_UNEVEN_BY_ACTIVE, 0 to 2";
            Err(Fault::value("config->uneven", other, expected))
        }
    }
}

fn hook(builder: ReducerBuilder, config: &kolo_reducer_config_t) -> Result<ReducerBuilder, Fault> {
    let after = config.hook_start_after;
    Ok(match config.hook {
        KOLO_HOOK_AVERAGE => builder,
        KOLO_HOOK_FLOAT16 => builder.hook(Compress::f16()),
        KOLO_HOOK_BFLOAT16 => builder.hook(Compress::bf16()),
        KOLO_HOOK_POWER_SGD => builder.hook(PowerSgd::new(config.hook_rank as usize).start_after(after)),
        KOLO_HOOK_LOCAL_SGD => builder.hook(LocalSgd::new(1).warm_up(after).hook()),
        KOLO_HOOK_ERROR_FEEDBACK => builder.hook(ErrorFeedback::new()),
        KOLO_HOOK_CUSTOM => {
            let function = config.hook_function.ok_or(Fault::Null { what: "config->hook_function" })?;
            builder.hook(Custom { function, context: config.hook_context })
        }
        other => {
            return Err(Fault::value(
                "config->hook",
                other,
                "it must be one of KOLO_HOOK_AVERAGE to KOLO_HOOK_ERROR_FEEDBACK, 0 to 6",
            ));
        }
    })
}

/// Returns the parameters that C describes.
///
/// # Safety
///
/// `tensors` is valid for `count` structs, and so are their names and shapes.
pub(crate) unsafe fn tensors(tensors: *const kolo_tensor_t, count: usize, what: &'static str) -> Result<Vec<Parameter>, Fault> {
    // SAFETY: passed on.
    let tensors = unsafe { slice_of(tensors, count, what)? };
    let describe = |tensor: &kolo_tensor_t| {
        // SAFETY: passed on.
        let name = unsafe { text(tensor.name, "name")? }.ok_or(Fault::Null { what: "name" })?;
        // SAFETY: passed on.
        let shape = unsafe { slice_of(tensor.shape, tensor.ndim, "shape")? };
        let parameter = Parameter::new(name, shape, dtype(tensor.dtype)?);
        match tensor.on_device {
            0 => Ok(parameter),
            1 => Ok(parameter.on_device()),
            other => Err(Fault::value("on_device of a tensor", other, "it must be 0 or 1")),
        }
    };
    tensors.iter().map(describe).collect()
}

//! NVIDIA's GPUs, through the CUDA driver.
//!
//! Buffers, streams and contexts belong to the user. kolo works in each device's primary context,
//! which the CUDA runtime and PyTorch also use. It makes that context current during a call, and
//! restores the previous one afterwards.

mod mapped;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self as cu, CUresult};
use parking_lot::Mutex;

use self::mapped::AllMapped;
use super::device::{
    Address, Device, DeviceId, Driver, EventId, Extension, Extent, Handle, MovesAt, Reduction, Scaling, StreamId,
};
use super::held::Held;
use super::kernels::{self, Kernel};
use super::moves::Move;
use crate::error::{Error, Result};
use crate::sys::Region;
use crate::types::{DType, ReduceOp};

/// Returns the driver, if its library is installed. Does not initialise it: that takes a tenth of a
/// second, and a process without device memory does not need it.
pub(crate) fn driver() -> Option<Arc<dyn Driver>> {
    NVIDIA.as_ref().map(|driver| driver.clone() as Arc<dyn Driver>)
}

static NVIDIA: LazyLock<Option<Arc<Nvidia>>> = LazyLock::new(|| {
    // SAFETY: the library's initialisers run, as in every program that uses it. If the library is
    // not there, no other call is made.
    let is_there = unsafe { cu::is_culib_present() };
    // cudarc panics at a call that the library does not have.
    if is_there && let Some(symbol) = NEWEST.into_iter().find(|symbol| !has_call(symbol)) {
        let symbol = String::from_utf8_lossy(symbol);
        crate::log::warn!(%symbol, "the CUDA driver is too old or incomplete, so device memory is not supported; update it");
        return None;
    }
    is_there.then(|| Arc::new(Nvidia { devices: Mutex::default() }))
});

/// Whether the driver's library, which is there, has a call.
fn has_call(symbol: &[u8]) -> bool {
    // SAFETY: the symbol is only looked up.
    unsafe { cu::culib().get::<*const c_void>(symbol) }.is_ok()
}

/// The calls that old drivers do not have.
const NEWEST: [&[u8]; 7] = [
    b"cuPointerGetAttribute\0",
    b"cuStreamWaitValue32_v2\0",
    b"cuStreamWriteValue32_v2\0",
    b"cuMemHostRegister_v2\0",
    b"cuThreadExchangeStreamCaptureMode\0",
    b"cuDeviceGetUuid_v2\0",
    b"cuIpcOpenMemHandle_v2\0",
];

/// Whether the driver tells which graph captures a stream, and when a graph is destroyed.
static HAS_GRAPHS: LazyLock<bool> = LazyLock::new(|| {
    let symbols =
        [&b"cuStreamGetCaptureInfo_v2\0"[..], b"cuUserObjectCreate\0", b"cuUserObjectRelease\0", b"cuGraphRetainUserObject\0"];
    symbols.into_iter().all(has_call)
});

/// A graph has been destroyed, with all that was instantiated from it. Must not call the driver.
unsafe extern "C" fn graph_is_gone(flag: *mut c_void) {
    // SAFETY: `watch_graph` gave the reference to the object that is destroyed now.
    unsafe { Arc::from_raw(flag.cast::<AtomicBool>()) }.store(true, Ordering::Release);
}

struct Nvidia {
    /// The devices in use, by ordinal. They are never closed, because users' streams may wait for
    /// their words.
    devices: Mutex<HashMap<c_int, Arc<Gpu>>>,
}

/// Turns the result of a driver call into a [`Result`].
fn check(device: &str, doing: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { device: device.to_owned(), doing, problem: describe(result) })
}

fn describe(result: CUresult) -> String {
    let text = |of: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the call writes one pointer, to a static text or null.
        let is_known = unsafe { of(result, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: the text is static and ends with a zero.
        if is_known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { format!("error {}", result as u32) }
    };
    format!("{} ({})", text(cu::cuGetErrorString), text(cu::cuGetErrorName))
}

const DRIVER: &str = "the CUDA driver";

/// The oldest driver that has all calls used here, as 1000 * major + 10 * minor.
const OLDEST_DRIVER: c_int = 12_010;

impl Nvidia {
    /// Returns a device by the number under which this process sees it.
    fn open(&self, ordinal: c_int) -> Result<Arc<Gpu>> {
        let mut devices = self.devices.lock();
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Arc::new(Gpu::new(ordinal)?);
        crate::log::debug!(device = device.name, "opened a device");
        devices.insert(ordinal, device.clone());
        Ok(device)
    }
}

impl Driver for Nvidia {
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        let mut kind = 0u32;
        let kind_of = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the attribute has the size of `kind`. The driver looks the address up and does
        // not access it.
        let result = unsafe { cu::cuPointerGetAttribute((&raw mut kind).cast(), kind_of, address.addr() as u64) };
        // The driver does not know the memory, the process has not used the driver yet, or the
        // driver does not work. None of that may fail an operation on host memory.
        if result != CUresult::CUDA_SUCCESS {
            if result != CUresult::CUDA_ERROR_INVALID_VALUE {
                crate::log::debug!(problem = describe(result), "the driver does not know a buffer; it counts as host memory");
            }
            return Ok(None);
        }
        if kind != cu::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            return Ok(None);
        }
        let mut ordinal: c_int = 0;
        let which = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: as above.
        let result = unsafe { cu::cuPointerGetAttribute((&raw mut ordinal).cast(), which, address.addr() as u64) };
        check(DRIVER, "looking up on which device a buffer is", result)?;
        Ok(Some(self.open(ordinal)?))
    }

    fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        let problem = || Error::Device {
            device: DRIVER.to_owned(),
            doing: "opening a device",
            problem: "there is no device with this number".to_owned(),
        };
        Ok(self.open(c_int::try_from(ordinal).map_err(|_| problem())?)?)
    }

    fn count(&self) -> usize {
        let mut count: c_int = 0;
        // SAFETY: the call writes one number.
        let result = unsafe { cu::cuDeviceGetCount(&mut count) };
        if result == CUresult::CUDA_SUCCESS { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    fn device_of(&self, stream: StreamId) -> Result<Arc<dyn Device>> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the stream belongs to the caller; the call writes one context.
        let result = unsafe { cu::cuStreamGetCtx(raw(stream), &mut context) };
        check(DRIVER, "looking up the device of a stream", result)?;
        let mut ordinal = 0;
        // SAFETY: the context of the stream is alive.
        unsafe {
            check(DRIVER, "looking up the device of a stream", cu::cuCtxPushCurrent_v2(context))?;
            let result = cu::cuCtxGetDevice(&mut ordinal);
            cu::cuCtxPopCurrent_v2(&mut context);
            check(DRIVER, "looking up the device of a stream", result)?;
        }
        Ok(self.open(ordinal)?)
    }
}

fn raw(stream: StreamId) -> cu::CUstream {
    std::ptr::without_provenance_mut(stream.0)
}

fn raw_event(event: EventId) -> cu::CUevent {
    std::ptr::without_provenance_mut(event.0)
}

/// One GPU.
struct Gpu {
    /// The number under which this process sees it. Other processes may number devices differently.
    ordinal: c_int,
    name: String,
    id: DeviceId,
    context: Context,
    /// The compute capability, as major and minor.
    architecture: (u32, u32),
    multiprocessors: u32,
    /// Whether it ends kernels that run for some seconds.
    limits_kernels: bool,
    /// The kernels that were used so far.
    kernels: Mutex<HashMap<Kernel, Entry>>,
    /// Handles of allocations by their id: making one takes microseconds.
    handles: Mutex<HashMap<u64, Handle>>,
    /// By its first byte.
    mapped: Mutex<AllMapped>,
    has_mapped_memory: OnceLock<bool>,
    /// Whether streams can wait for words and write them.
    has_words: OnceLock<bool>,
    held: Arc<Held>,
    extension: Extension,
}

/// A device's primary context. It is never released, so it stays valid.
struct Context(cu::CUcontext);

// SAFETY: any thread may use a context.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A function of a module that is never unloaded.
#[derive(Clone, Copy)]
struct Entry(cu::CUfunction);

// SAFETY: any thread may use a function.
unsafe impl Send for Entry {}

/// The number of handles that are kept. Making one again takes microseconds.
const MOST_HANDLES: usize = 4096;

impl Gpu {
    fn new(ordinal: c_int) -> Result<Gpu> {
        let doing = "opening a device";
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        let mut name = [0 as c_char; 128];
        let mut uuid = cu::CUuuid { bytes: [0; 16] };
        // SAFETY: each call writes only to the variable that it gets.
        unsafe {
            check(DRIVER, "initialising CUDA", cu::cuInit(0))?;
            let mut version = 0;
            check(DRIVER, "querying the version of the driver", cu::cuDriverGetVersion(&mut version))?;
            if version < OLDEST_DRIVER {
                let why =
                    format!("the driver is for CUDA {}.{}; update it to 12.1 or newer", version / 1000, version % 1000 / 10);
                return Err(Error::Unsupported { what: "device memory", why });
            }
            check(DRIVER, doing, cu::cuDeviceGet(&mut device, ordinal))?;
            check(DRIVER, doing, cu::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            check(DRIVER, doing, cu::cuDeviceGetUuid_v2(&mut uuid, device))?;
            check(DRIVER, doing, cu::cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the call writes one number.
            check(DRIVER, doing, unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) }).map(|()| value as u32)
        };
        use cu::CUdevice_attribute::*;
        // SAFETY: the array was zeros, and its last byte still is.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
        Ok(Gpu {
            ordinal: device,
            name: format!("CUDA device {ordinal} ({name})"),
            id: uuid.bytes.map(|byte| byte.to_ne_bytes()[0]),
            context: Context(context),
            architecture: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            limits_kernels: attribute(CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT)? != 0,
            kernels: Mutex::default(),
            handles: Mutex::default(),
            mapped: Mutex::default(),
            has_mapped_memory: OnceLock::new(),
            has_words: OnceLock::new(),
            held: Arc::default(),
            extension: Extension::new(),
        })
    }

    /// Calls the driver in the device's context, and turns its result into a [`Result`].
    fn within(&self, doing: &'static str, call: impl FnOnce() -> CUresult) -> Result<()> {
        self.check(doing, self.in_context(call))
    }

    /// The capture that a stream's work goes to: its number, and the graph.
    fn capture_of(&self, stream: StreamId) -> Result<Option<(u64, cu::CUgraph)>> {
        let doing = "querying whether a stream is being captured";
        let (mut status, mut number, mut graph) =
            (cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0, std::ptr::null_mut());
        if !*HAS_GRAPHS {
            // SAFETY: the stream belongs to the caller; the call writes its status.
            self.within(doing, || unsafe { cu::cuStreamIsCapturing(raw(stream), &mut status) })?;
            let is_captured = status != cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            let why = "the CUDA driver does not tell when a graph is destroyed".to_owned();
            return if is_captured { Err(Error::Unsupported { what: "a call in a CUDA graph", why }) } else { Ok(None) };
        }
        // SAFETY: as above. What is null is not written.
        self.within(doing, || unsafe {
            let (nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut());
            cu::cuStreamGetCaptureInfo_v2(raw(stream), &mut status, &mut number, &mut graph, nodes, count)
        })?;
        use cu::CUstreamCaptureStatus::*;
        match status {
            CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some((number, graph))),
            CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
                self.check(doing, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED).map(|()| None)
            }
        }
    }

    fn in_context(&self, call: impl FnOnce() -> CUresult) -> CUresult {
        // SAFETY: the context lives as long as the process.
        let pushed = unsafe { cu::cuCtxPushCurrent_v2(self.context.0) };
        if pushed != CUresult::CUDA_SUCCESS {
            return pushed;
        }
        // The calls of this thread must not disturb a graph that another thread is capturing.
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut context = std::ptr::null_mut();
        // SAFETY: the mode belongs to this thread and is restored; the context that was pushed
        // above is popped.
        unsafe {
            cu::cuThreadExchangeStreamCaptureMode(&mut mode);
            let result = call();
            cu::cuThreadExchangeStreamCaptureMode(&mut mode);
            cu::cuCtxPopCurrent_v2(&mut context);
            result
        }
    }

    fn check(&self, doing: &'static str, result: CUresult) -> Result<()> {
        check(&self.name, doing, result)
    }

    /// Returns the entry of a kernel, and loads it if necessary.
    fn entry(&self, kernel: Kernel) -> Result<Entry> {
        let mut kernels = self.kernels.lock();
        if let Some(&entry) = kernels.get(&kernel) {
            return Ok(entry);
        }
        let name = CString::new(kernel.name()).expect("a name has no zeros");
        let function = kernels::load(self.architecture, kernel, |image| {
            let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the image is a cubin, or PTX that ends with a zero. It has the kernel, whose name ends
            // with a zero.
            self.within("loading a kernel", || unsafe {
                match cu::cuModuleLoadData(&mut module, image.code.as_ptr().cast::<c_void>()) {
                    CUresult::CUDA_SUCCESS => cu::cuModuleGetFunction(&mut function, module, name.as_ptr()),
                    result => result,
                }
            })?;
            crate::log::info!(device = self.name, ?kernel, origin = ?image.origin, "loaded a kernel");
            Ok(function)
        })?;
        match kernel {
            Kernel::Reduce(..) => self.load(Entry(function), kernels::Parameter::of(Move::new(&[0], &[0], 0, 1)))?,
            Kernel::Scale(..) => {
                let nothing = Scaling { dtypes: (DType::F32, DType::F32), source: 0, target: 0, count: 0, factor: 1.0 };
                self.load(Entry(function), kernels::ScaleParameter::of(&nothing))?;
            }
            Kernel::TakeMoves => self.load(Entry(function), kernels::TakeParameter::NOTHING)?,
        }
        kernels.insert(kernel, Entry(function));
        Ok(Entry(function))
    }

    /// Runs an entry on no elements, because the driver loads an entry at its first launch and may
    /// then wait for all streams. `nothing` is a parameter of the entry with no elements.
    fn load<P: DeviceRepr>(&self, entry: Entry, mut nothing: P) -> Result<()> {
        let mut parameters: [*mut c_void; 1] = [(&raw mut nothing).cast()];
        let stream = self.new_stream()?;
        // SAFETY: the entry takes one such parameter, and accesses no memory for no elements.
        let result = self.within("loading a kernel", || unsafe {
            let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
            match cu::cuLaunchKernel(entry.0, 1, 1, 1, 1, 1, 1, 0, raw(stream), parameters, none) {
                CUresult::CUDA_SUCCESS => cu::cuStreamSynchronize(raw(stream)),
                result => result,
            }
        });
        self.end_stream(stream);
        result
    }

    /// Has a stream write a word and wait for it. No attribute of a device says whether it can.
    fn try_words(&self) -> Result<()> {
        // Not freed: if the driver is out of order, it may still use it.
        let page = Box::leak(Box::new(Region::create(4096).map_err(Error::os("allocating a word for a device"))?));
        // SAFETY: the page is never freed.
        let word = unsafe { self.pin(page.at(0), page.len())? };
        let stream = self.new_stream()?;
        // SAFETY: as above.
        let tried = unsafe { self.write_word(stream, word, 1).and_then(|()| self.wait_for_word(stream, word, 1)) };
        self.end_stream(stream);
        tried
    }

    /// Launches a kernel on a stream.
    ///
    /// # Safety
    ///
    /// The parameter is that of the kernel. The memory that it names is valid until the kernel is done.
    unsafe fn launch<P: DeviceRepr>(
        &self,
        stream: StreamId,
        kernel: Kernel,
        mut parameter: P,
        kernels::Grid { blocks, threads }: kernels::Grid,
    ) -> Result<()> {
        let entry = self.entry(kernel)?;
        let mut parameters: [*mut c_void; 1] = [(&raw mut parameter).cast()];
        let none = std::ptr::null_mut();
        // SAFETY: the entry takes one such parameter, which the call copies; the caller vouches for
        // the memory.
        self.within("launching a kernel", || unsafe {
            cu::cuLaunchKernel(entry.0, blocks, 1, 1, threads, 1, 1, 0, raw(stream), parameters.as_mut_ptr(), none)
        })
    }
}

/// The flags for pinned host memory that the device can access, in all contexts.
const PORTABLE_AND_MAPPED: u32 = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;

impl Device for Gpu {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn extent(&self, address: Address) -> Result<Extent> {
        const DOING: &str = "looking up the allocation of a buffer";
        if let Some(extent) = self.mapped_extent(address) {
            return Ok(extent);
        }
        let (mut base, mut size, mut id) = (0, 0, 0u64);
        // SAFETY: the call writes two numbers.
        self.within(DOING, || unsafe { cu::cuMemGetAddressRange_v2(&mut base, &mut size, address) })?;
        let number = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        // SAFETY: the attribute has the size of the variable.
        self.within(DOING, || unsafe { cu::cuPointerGetAttribute((&raw mut id).cast(), number, address) })?;
        Ok(Extent { base, size: size as u64, id })
    }

    /// Creates a stream of the highest priority. Streams of one priority may share a queue of the
    /// device, and a stream of kolo must not queue behind a user's stream that waits at a gate for
    /// it.
    fn new_stream(&self) -> Result<StreamId> {
        let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the calls write two numbers and a stream.
        self.within("creating a stream", || unsafe {
            match cu::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) {
                CUresult::CUDA_SUCCESS => cu::cuStreamCreateWithPriority(&mut stream, flags, greatest),
                result => result,
            }
        })?;
        Ok(StreamId(stream.addr()))
    }

    fn end_stream(&self, stream: StreamId) {
        // SAFETY: `new_stream` created it, and it is no longer used. The device still does its
        // work.
        if let Err(error) = self.within("destroying a stream", || unsafe { cu::cuStreamDestroy_v2(raw(stream)) }) {
            crate::log::debug!(%error);
        }
    }

    fn new_event(&self) -> Result<EventId> {
        let mut event = std::ptr::null_mut();
        let flags = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the call writes an event.
        self.within("creating an event", || unsafe { cu::cuEventCreate(&mut event, flags) })?;
        Ok(EventId(event.addr()))
    }

    fn end_event(&self, event: EventId) {
        // SAFETY: `new_event` created it, and it is no longer used.
        if let Err(error) = self.within("destroying an event", || unsafe { cu::cuEventDestroy_v2(raw_event(event)) }) {
            crate::log::debug!(%error);
        }
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        // SAFETY: the event and the stream are alive.
        self.within("recording an event", || unsafe { cu::cuEventRecord(raw_event(event), raw(stream)) })
    }

    fn is_done(&self, event: EventId) -> Result<bool> {
        // SAFETY: the event is alive.
        match self.in_context(|| unsafe { cu::cuEventQuery(raw_event(event)) }) {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.check("running the work of a stream", result).map(|()| true),
        }
    }

    fn wait_for_event(&self, stream: StreamId, event: EventId) -> Result<()> {
        // SAFETY: the event and the stream are alive.
        self.within("enqueueing a wait for a stream", || unsafe { cu::cuStreamWaitEvent(raw(stream), raw_event(event), 0) })
    }

    fn capture(&self, stream: StreamId) -> Result<Option<u64>> {
        Ok(self.capture_of(stream)?.map(|(number, _)| number))
    }

    fn watch_graph(&self, stream: StreamId, is_gone: Arc<AtomicBool>) -> Result<()> {
        let doing = "watching a graph";
        let not_captured =
            || Error::Device { device: self.name.clone(), doing, problem: "the stream is not captured".to_owned() };
        let (_, graph) = self.capture_of(stream)?.ok_or_else(not_captured)?;
        let own = Arc::into_raw(is_gone);
        let mut object = std::ptr::null_mut();
        let flags = cu::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: the call writes one pointer. The object owns a reference, which its destructor drops.
        let made = self.within(doing, || unsafe {
            cu::cuUserObjectCreate(&mut object, own.cast_mut().cast(), Some(graph_is_gone), 1, flags)
        });
        if let Err(error) = made {
            // SAFETY: nothing has taken the reference over.
            drop(unsafe { Arc::from_raw(own) });
            return Err(error);
        }
        let moved = cu::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: the capture has the graph, and takes over the reference to the object.
        self.within(doing, || unsafe { cu::cuGraphRetainUserObject(graph, object, 1, moved) }).inspect_err(|_| {
            // SAFETY: the graph did not take over the only reference.
            _ = self.in_context(|| unsafe { cu::cuUserObjectRelease(object, 1) });
        })
    }

    fn held(&self) -> &Arc<Held> {
        &self.held
    }

    fn extension(&self) -> &Extension {
        &self.extension
    }

    fn has_words(&self) -> Result<bool> {
        let tried = || {
            let tried = self.try_words();
            tried
                .inspect_err(|error| crate::log::info!(%error, "streams of this device cannot wait for the host: calls wait"))
                .is_ok()
        };
        Ok(*self.has_words.get_or_init(tried))
    }

    unsafe fn wait_for_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()> {
        let flags = cu::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the caller keeps the word pinned.
        self.within("enqueueing a wait for the host", || unsafe { cu::cuStreamWaitValue32_v2(raw(stream), word, value, flags) })
    }

    unsafe fn write_word(&self, stream: StreamId, word: Address, value: u32) -> Result<()> {
        // The default has a barrier: a thread that sees the word also sees what was written before.
        let flags = cu::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: as above.
        self.within("enqueueing a word for the host", || unsafe { cu::cuStreamWriteValue32_v2(raw(stream), word, value, flags) })
    }

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both addresses.
        self.within("copying from the device", || unsafe { cu::cuMemcpyDtoHAsync_v2(to.cast(), from, len, raw(stream)) })
    }

    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both addresses.
        self.within("copying to the device", || unsafe { cu::cuMemcpyHtoDAsync_v2(to, from.cast(), len, raw(stream)) })
    }

    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both addresses.
        self.within("copying between devices", || unsafe { cu::cuMemcpyAsync(to, from, len, raw(stream)) })
    }

    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()> {
        // SAFETY: the caller keeps the same contract.
        self.within("clearing device memory", || unsafe { cu::cuMemsetD8Async(address, 0, len, raw(stream)) })
    }

    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()> {
        let Reduction { dtype, redop, sources, targets, count, divisor } = *reduction;
        let parameter = kernels::Parameter::of(Move::new(sources, targets, count, divisor as u32));
        let grid = kernels::grid((count * dtype.size()) as u64, self.multiprocessors);
        // SAFETY: the caller vouches for the memory.
        unsafe { self.launch(stream, Kernel::Reduce(dtype, redop), parameter, grid) }
    }

    unsafe fn scale(&self, stream: StreamId, scaling: &Scaling) -> Result<()> {
        let (from, to) = scaling.dtypes;
        let bytes = (scaling.count * from.size().max(to.size())) as u64;
        let grid = kernels::grid(bytes, self.multiprocessors);
        // SAFETY: the caller vouches for the memory.
        unsafe { self.launch(stream, Kernel::Scale(from, to), kernels::ScaleParameter::of(scaling), grid) }
    }

    unsafe fn run_moves(
        &self,
        stream: StreamId,
        (dtype, redop): (DType, ReduceOp),
        moves: MovesAt,
        most: u64,
        may_wait: bool,
    ) -> Result<()> {
        let grid = kernels::grid(most, self.multiprocessors);
        let grid = if may_wait { grid.at_most(kernels::most_waiting(self.multiprocessors)) } else { grid };
        // SAFETY: the caller vouches for the memory.
        unsafe {
            self.launch(stream, Kernel::TakeMoves, kernels::TakeParameter::of(moves), grid.at_most(1))?;
            self.launch(stream, Kernel::Reduce(dtype, redop), kernels::Parameter::at(moves), grid)
        }
    }

    fn limits_kernels(&self) -> bool {
        self.limits_kernels
    }

    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()> {
        let Some(redop) = redop else { return Ok(()) };
        self.entry(Kernel::TakeMoves).and_then(|_| self.entry(Kernel::Reduce(dtype, redop))).map(drop)
    }

    fn prepare_to_scale(&self, (from, to): (DType, DType)) -> Result<()> {
        self.entry(Kernel::Scale(from, to)).map(drop)
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<Address> {
        const DOING: &str = "pinning host memory";
        let mut address = 0;
        // SAFETY: the caller vouches for the memory until it is unpinned.
        self.within(DOING, || unsafe { cu::cuMemHostRegister_v2(memory.cast(), len, PORTABLE_AND_MAPPED) })?;
        // SAFETY: the memory is pinned.
        let found = self.within(DOING, || unsafe { cu::cuMemHostGetDevicePointer_v2(&mut address, memory.cast(), 0) });
        found.inspect_err(|_| {
            // SAFETY: the memory was pinned above.
            unsafe { self.unpin(memory) };
        })?;
        Ok(address)
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        // SAFETY: the memory is pinned.
        if let Err(error) = self.within("unpinning host memory", || unsafe { cu::cuMemHostUnregister(memory.cast()) }) {
            crate::log::debug!(%error);
        }
    }

    fn allocate(&self, len: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: the call writes an address.
        self.within("allocating device memory", || unsafe { cu::cuMemAlloc_v2(&mut address, len) })?;
        Ok(address)
    }

    fn allocate_for_peers(&self, len: usize) -> Result<Address> {
        if self.has_mapped_memory() {
            match self.allocate_mapped(len) {
                Ok(address) => return Ok(address),
                Err(error) => crate::log::warn!(%error, "memory is allocated for CUDA IPC instead: free it when no peer uses it"),
            }
        }
        self.allocate(len)
    }

    unsafe fn free(&self, address: Address) {
        if self.free_mapped(address) {
            return;
        }
        // SAFETY: `allocate` returned this memory, and it is no longer used.
        if let Err(error) = self.within("freeing device memory", || unsafe { cu::cuMemFree_v2(address) }) {
            crate::log::debug!(%error);
        }
    }

    fn export(&self, extent: &Extent) -> Result<Handle> {
        if let Some(handle) = self.mapped_handle(extent) {
            return Ok(handle);
        }
        let mut handles = self.handles.lock();
        if let Some(handle) = handles.get(&extent.id) {
            return Ok(*handle);
        }
        let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the call writes a handle.
        self.within("exporting memory to other processes", || unsafe { cu::cuIpcGetMemHandle(&mut handle, extent.base) })?;
        if handles.len() >= MOST_HANDLES {
            handles.clear();
        }
        let handle = Handle::Ipc(handle.reserved.map(|byte| byte.to_ne_bytes()[0]));
        handles.insert(extent.id, handle);
        Ok(handle)
    }

    fn import(&self, handle: &Handle) -> Result<Address> {
        let handle = match handle {
            Handle::Ipc(handle) => cu::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) },
            Handle::File { ticket, size } => return self.import_mapped(ticket, *size),
        };
        let mut address = 0;
        let flags = cu::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the call writes an address. The driver refuses an invalid handle.
        self.within("opening another process's memory", || unsafe { cu::cuIpcOpenMemHandle_v2(&mut address, handle, flags) })?;
        Ok(address)
    }

    unsafe fn close(&self, address: Address) {
        if self.free_mapped(address) {
            return;
        }
        // SAFETY: the memory was imported, and is no longer used.
        if let Err(error) = self.within("closing another process's memory", || unsafe { cu::cuIpcCloseMemHandle(address) }) {
            crate::log::debug!(%error);
        }
    }

    fn reach(&self, address: Address) -> Result<()> {
        let mut context: cu::CUcontext = std::ptr::null_mut();
        let whose = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        const DOING: &str = "reaching memory of another device";
        // SAFETY: the attribute has the size of the variable.
        self.within(DOING, || unsafe { cu::cuPointerGetAttribute((&raw mut context).cast(), whose, address) })?;
        if context == self.context.0 {
            return Ok(());
        }
        // SAFETY: the context is that of an allocation that is alive.
        match self.in_context(|| unsafe { cu::cuCtxEnablePeerAccess(context, 0) }) {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => self.check(DOING, result),
        }
    }
}

#[cfg(test)]
mod on_a_gpu_tests;

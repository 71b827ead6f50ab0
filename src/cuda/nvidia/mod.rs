//! NVIDIA's GPUs, through CUDA's driver.
//!
//! Buffers, streams and contexts are the user's and stay so. kolo works in each device's primary context, which is that of CUDA's
//! runtime and of PyTorch; it is made current for the length of a call, and what was current before is so again afterwards.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, LazyLock};

use cudarc::driver::sys::{self as cu, CUresult};
use parking_lot::Mutex;

use super::device::{Address, Device, DeviceId, Driver, EventId, Extent, Gates, Handle, Reduction, StreamId};
use super::kernels;
use crate::error::{Error, Result};
use crate::types::{DType, ReduceOp};

/// The driver, if its library is there. Nothing is initialised: that takes a tenth of a second, and who has no device memory yet
/// needs none.
pub(super) fn driver() -> Option<Arc<dyn Driver>> {
    NVIDIA.as_ref().map(|driver| driver.clone() as Arc<dyn Driver>)
}

static NVIDIA: LazyLock<Option<Arc<Nvidia>>> = LazyLock::new(|| {
    // SAFETY: the library's initialisers run, as they do in every program that uses it. Without it, no other call may be made.
    let is_there = unsafe { cu::is_culib_present() };
    // A call that is not there would panic.
    let has = |symbol: &&[u8]| {
        // SAFETY: it is only looked up.
        unsafe { cu::culib().get::<*const c_void>(*symbol) }.is_ok()
    };
    if is_there && let Some(symbol) = NEWEST.iter().find(|symbol| !has(symbol)) {
        let symbol = String::from_utf8_lossy(symbol);
        tracing::warn!(%symbol, "the CUDA driver is too old or incomplete: device memory cannot be had");
        return None;
    }
    is_there.then(|| Arc::new(Nvidia { devices: Mutex::default() }))
});

/// Calls that not every driver has.
const NEWEST: [&[u8]; 6] = [
    b"cuPointerGetAttribute\0",
    b"cuStreamWaitValue32_v2\0",
    b"cuMemHostRegister_v2\0",
    b"cuThreadExchangeStreamCaptureMode\0",
    b"cuDeviceGetUuid_v2\0",
    b"cuIpcOpenMemHandle_v2\0",
];

struct Nvidia {
    /// By ordinal, as they are needed. They stay: streams of users may wait at their gates.
    devices: Mutex<HashMap<c_int, Arc<Gpu>>>,
}

/// What a call to the driver says.
fn check(device: &str, doing: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { device: device.to_owned(), doing, problem: describe(result) })
}

fn describe(result: CUresult) -> String {
    let text = |of: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: it writes one pointer, to a static text, or null.
        let is_known = unsafe { of(result, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: the text is static and ends with a zero.
        if is_known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { format!("error {}", result as u32) }
    };
    format!("{} ({})", text(cu::cuGetErrorString), text(cu::cuGetErrorName))
}

const DRIVER: &str = "the CUDA driver";

/// The oldest driver that has all that is called here, as 1000 major + 10 minor.
const OLDEST_DRIVER: c_int = 12_010;

impl Nvidia {
    /// A device, by the number under which this process sees it.
    fn open(&self, ordinal: c_int) -> Result<Arc<Gpu>> {
        let mut devices = self.devices.lock();
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Arc::new(Gpu::new(ordinal)?);
        tracing::debug!(device = device.name, "a device is used");
        devices.insert(ordinal, device.clone());
        Ok(device)
    }
}

impl Driver for Nvidia {
    fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        let mut kind = 0u32;
        let kind_of = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the attribute is as large as what is written to. The driver looks the address up, and follows it nowhere.
        let result = unsafe { cu::cuPointerGetAttribute((&raw mut kind).cast(), kind_of, address.addr() as u64) };
        // Memory that the driver does not know, a process that has not used it yet, or a driver that does not work: what is on the
        // host is not to suffer from that.
        if result != CUresult::CUDA_SUCCESS {
            if result != CUresult::CUDA_ERROR_INVALID_VALUE {
                tracing::debug!(problem = describe(result), "a buffer counts as host memory");
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
        let problem =
            || Error::Device { device: DRIVER.to_owned(), doing: "opening a device", problem: "no such number".to_owned() };
        Ok(self.open(c_int::try_from(ordinal).map_err(|_| problem())?)?)
    }

    fn device_of(&self, stream: StreamId) -> Result<Arc<dyn Device>> {
        let mut context = std::ptr::null_mut();
        // SAFETY: a stream of the caller's; one context is written.
        let result = unsafe { cu::cuStreamGetCtx(raw(stream), &mut context) };
        check(DRIVER, "looking up the device of a stream", result)?;
        let mut ordinal = 0;
        // SAFETY: the stream's context lives.
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
    name: String,
    id: DeviceId,
    context: Context,
    /// Its compute capability.
    architecture: (u32, u32),
    multiprocessors: u32,
    kernels: Mutex<Kernels>,
    /// Handles of allocations, by number: making one takes microseconds.
    handles: Mutex<HashMap<u64, Handle>>,
    gates: Mutex<Option<Option<Arc<Gates>>>>,
}

/// A device's primary context, which is never released: the process may use it as long as it likes.
struct Context(cu::CUcontext);

// SAFETY: contexts may be used by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The reductions, as far as they have been needed.
#[derive(Default)]
struct Kernels {
    module: Option<Module>,
    entries: HashMap<(DType, ReduceOp), Entry>,
}

struct Module(cu::CUmodule);

// SAFETY: modules may be used by any thread.
unsafe impl Send for Module {}

#[derive(Clone, Copy)]
struct Entry(cu::CUfunction);

// SAFETY: functions may be used by any thread.
unsafe impl Send for Entry {}

/// So many handles are kept. What is made anew is made in microseconds.
const MOST_HANDLES: usize = 4096;

impl Gpu {
    fn new(ordinal: c_int) -> Result<Gpu> {
        let doing = "opening a device";
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        let mut name = [0 as c_char; 128];
        let mut uuid = cu::CUuuid { bytes: [0; 16] };
        // SAFETY: each call writes what it is given room for.
        unsafe {
            check(DRIVER, "initialising CUDA", cu::cuInit(0))?;
            let mut version = 0;
            check(DRIVER, "asking for its version", cu::cuDriverGetVersion(&mut version))?;
            if version < OLDEST_DRIVER {
                let why =
                    format!("its driver is for CUDA {}.{}; update it to 12.1 or newer", version / 1000, version % 1000 / 10);
                return Err(Error::Unsupported { what: "device memory", why });
            }
            check(DRIVER, doing, cu::cuDeviceGet(&mut device, ordinal))?;
            check(DRIVER, doing, cu::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            check(DRIVER, doing, cu::cuDeviceGetUuid_v2(&mut uuid, device))?;
            check(DRIVER, doing, cu::cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: one number is written.
            check(DRIVER, doing, unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) }).map(|()| value as u32)
        };
        use cu::CUdevice_attribute::*;
        // SAFETY: it was zeros, and the last is still one.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
        Ok(Gpu {
            name: format!("CUDA device {ordinal} ({name})"),
            id: uuid.bytes.map(|byte| byte as u8),
            context: Context(context),
            architecture: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            kernels: Mutex::default(),
            handles: Mutex::default(),
            gates: Mutex::new(None),
        })
    }

    /// Calls the driver in the device's context.
    fn within(&self, doing: &'static str, call: impl FnOnce() -> CUresult) -> Result<()> {
        self.check(doing, self.in_context(call))
    }

    fn in_context(&self, call: impl FnOnce() -> CUresult) -> CUresult {
        // SAFETY: the context lives as long as the process.
        let pushed = unsafe { cu::cuCtxPushCurrent_v2(self.context.0) };
        if pushed != CUresult::CUDA_SUCCESS {
            return pushed;
        }
        // A graph that another thread is capturing is none of this one's business.
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let mut context = std::ptr::null_mut();
        // SAFETY: the mode is this thread's, and is put back; what was pushed above is popped.
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

    /// The kernel of a reduction.
    fn entry(&self, dtype: DType, redop: ReduceOp) -> Result<Entry> {
        let mut kernels = self.kernels.lock();
        if let Some(&entry) = kernels.entries.get(&(dtype, redop)) {
            return Ok(entry);
        }
        let module = match &kernels.module {
            Some(module) => module.0,
            None => {
                let module = kernels::load(self.architecture, |image| {
                    let mut module = std::ptr::null_mut();
                    // SAFETY: the image is a cubin, or PTX that ends with a zero.
                    self.within("loading the kernels", || unsafe {
                        cu::cuModuleLoadData(&mut module, image.code.as_ptr().cast::<c_void>())
                    })?;
                    tracing::info!(device = self.name, origin = ?image.origin, "the kernels are loaded");
                    Ok(module)
                })?;
                kernels.module.insert(Module(module)).0
            }
        };
        let name = kernels::entry(dtype, redop).and_then(|name| CString::new(name).ok());
        let name = name.expect("reductions that do not apply are refused before, and names have no zeros");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module stays loaded, and the name ends with a zero.
        self.within("looking up a kernel", || unsafe { cu::cuModuleGetFunction(&mut function, module, name.as_ptr()) })?;
        self.load(Entry(function))?;
        kernels.entries.insert((dtype, redop), Entry(function));
        Ok(Entry(function))
    }

    /// Runs an entry on nothing: the driver loads it at its first launch, and may wait for all streams then.
    fn load(&self, entry: Entry) -> Result<()> {
        let mut told = kernels::Reduction::new(&[0], &[0], 0, 1);
        let mut parameters: [*mut c_void; 1] = [(&raw mut told).cast()];
        let stream = self.new_stream()?;
        // SAFETY: the entry takes one such parameter, and touches no memory for no elements.
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

    /// Gates, if a stream of this device can wait at one, which is tried.
    fn make_gates(&self) -> Result<Option<Arc<Gates>>> {
        // SAFETY: the page of the gates is never freed.
        let gates = match Gates::new(|page, len| unsafe { self.pin(page, len) }) {
            Ok(gates) => gates,
            Err(error) => {
                tracing::info!(%error, "streams of this device cannot wait for the host: calls do");
                return Ok(None);
            }
        };
        let stream = StreamId(self.new_stream()?.0);
        let tried = gates.take().map(|gate| {
            gate.open();
            gate.close(self, stream)
        });
        self.end_stream(stream);
        match tried {
            Some(Ok(())) => Ok(Some(gates)),
            Some(Err(error)) => {
                tracing::info!(%error, "streams of this device cannot wait for the host: calls do");
                Ok(None)
            }
            None => Ok(None),
        }
    }
}

/// Where registered host memory is seen by the device, with the flag of memory that all contexts know.
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
        let (mut base, mut size, mut id) = (0, 0, 0u64);
        // SAFETY: two numbers are written.
        self.within(DOING, || unsafe { cu::cuMemGetAddressRange_v2(&mut base, &mut size, address) })?;
        let number = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        // SAFETY: the attribute is as large as what is written to.
        self.within(DOING, || unsafe { cu::cuPointerGetAttribute((&raw mut id).cast(), number, address) })?;
        Ok(Extent { base, size: size as u64, id })
    }

    /// Of the highest priority: streams of one priority may share a queue of the device, and kolo's must not come behind one that
    /// waits at a gate for what they do.
    fn new_stream(&self) -> Result<StreamId> {
        let (mut least, mut greatest, mut stream) = (0, 0, std::ptr::null_mut());
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: numbers and a stream are written.
        self.within("making a stream", || unsafe {
            match cu::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) {
                CUresult::CUDA_SUCCESS => cu::cuStreamCreateWithPriority(&mut stream, flags, greatest),
                result => result,
            }
        })?;
        Ok(StreamId(stream.addr()))
    }

    fn end_stream(&self, stream: StreamId) {
        // SAFETY: it was made by `new_stream`, and is used no more. What it was given is done all the same.
        if let Err(error) = self.within("ending a stream", || unsafe { cu::cuStreamDestroy_v2(raw(stream)) }) {
            tracing::debug!(%error);
        }
    }

    fn new_event(&self) -> Result<EventId> {
        let mut event = std::ptr::null_mut();
        let flags = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: an event is written.
        self.within("making an event", || unsafe { cu::cuEventCreate(&mut event, flags) })?;
        Ok(EventId(event.addr()))
    }

    fn end_event(&self, event: EventId) {
        // SAFETY: it was made by `new_event`, and is used no more.
        if let Err(error) = self.within("ending an event", || unsafe { cu::cuEventDestroy_v2(raw_event(event)) }) {
            tracing::debug!(%error);
        }
    }

    fn record(&self, event: EventId, stream: StreamId) -> Result<()> {
        // SAFETY: both live.
        self.within("recording an event", || unsafe { cu::cuEventRecord(raw_event(event), raw(stream)) })
    }

    fn is_done(&self, event: EventId) -> Result<bool> {
        // SAFETY: it lives.
        match self.in_context(|| unsafe { cu::cuEventQuery(raw_event(event)) }) {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.check("carrying out what a stream was given", result).map(|()| true),
        }
    }

    fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        let mut status = cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a stream of the caller's; its status is written.
        let result = self.in_context(|| unsafe { cu::cuStreamIsCapturing(raw(stream), &mut status) });
        match result {
            // The default stream, while another one is being captured.
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
            result => {
                self.check("asking whether a stream is being captured", result)?;
                Ok(status != cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
            }
        }
    }

    fn gates(&self) -> Result<Option<Arc<Gates>>> {
        let mut gates = self.gates.lock();
        match &*gates {
            Some(gates) => Ok(gates.clone()),
            None => Ok(gates.insert(self.make_gates()?).clone()),
        }
    }

    unsafe fn wait_for_word(&self, stream: StreamId, word: *const AtomicU32, value: u32) -> Result<()> {
        let flags = cu::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let mut address = 0;
        // SAFETY: the word is in memory that was registered for all contexts, and stays.
        self.within("having a stream wait for the host", || unsafe {
            match cu::cuMemHostGetDevicePointer_v2(&mut address, word.cast_mut().cast(), 0) {
                CUresult::CUDA_SUCCESS => cu::cuStreamWaitValue32_v2(raw(stream), address, value, flags),
                result => result,
            }
        })
    }

    unsafe fn copy_out(&self, stream: StreamId, from: Address, to: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both.
        self.within("copying from the device", || unsafe { cu::cuMemcpyDtoHAsync_v2(to.cast(), from, len, raw(stream)) })
    }

    unsafe fn copy_in(&self, stream: StreamId, from: *const u8, to: Address, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both.
        self.within("copying to the device", || unsafe { cu::cuMemcpyHtoDAsync_v2(to, from.cast(), len, raw(stream)) })
    }

    unsafe fn copy(&self, stream: StreamId, from: Address, to: Address, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for both.
        self.within("copying between devices", || unsafe { cu::cuMemcpyAsync(to, from, len, raw(stream)) })
    }

    unsafe fn zero(&self, stream: StreamId, address: Address, len: usize) -> Result<()> {
        // SAFETY: passed on.
        self.within("clearing device memory", || unsafe { cu::cuMemsetD8Async(address, 0, len, raw(stream)) })
    }

    unsafe fn reduce(&self, stream: StreamId, reduction: &Reduction<'_>) -> Result<()> {
        let Reduction { dtype, redop, sources, targets, count, divisor } = *reduction;
        let entry = self.entry(dtype, redop)?;
        let mut told = kernels::Reduction::new(sources, targets, count, divisor as u32);
        let kernels::Grid { blocks, threads } = kernels::grid((count * dtype.size()) as u64, self.multiprocessors);
        let mut parameters: [*mut c_void; 1] = [(&raw mut told).cast()];
        let none = std::ptr::null_mut();
        // SAFETY: the entry takes one such parameter, which is copied before the call returns; the caller vouches for the memory.
        self.within("starting a reduction", || unsafe {
            cu::cuLaunchKernel(entry.0, blocks, 1, 1, threads, 1, 1, 0, raw(stream), parameters.as_mut_ptr(), none)
        })
    }

    fn prepare(&self, dtype: DType, redop: Option<ReduceOp>) -> Result<()> {
        redop.map_or(Ok(()), |redop| self.entry(dtype, redop).map(drop))
    }

    unsafe fn pin(&self, memory: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the memory until it is unpinned.
        self.within("pinning host memory", || unsafe { cu::cuMemHostRegister_v2(memory.cast(), len, PORTABLE_AND_MAPPED) })
    }

    unsafe fn unpin(&self, memory: *mut u8) {
        // SAFETY: it was pinned.
        if let Err(error) = self.within("unpinning host memory", || unsafe { cu::cuMemHostUnregister(memory.cast()) }) {
            tracing::debug!(%error);
        }
    }

    fn allocate(&self, len: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: an address is written.
        self.within("allocating device memory", || unsafe { cu::cuMemAlloc_v2(&mut address, len) })?;
        Ok(address)
    }

    unsafe fn free(&self, address: Address) {
        // SAFETY: it was allocated by `allocate`, and is used no more.
        if let Err(error) = self.within("freeing device memory", || unsafe { cu::cuMemFree_v2(address) }) {
            tracing::debug!(%error);
        }
    }

    fn export(&self, extent: &Extent) -> Result<Handle> {
        let mut handles = self.handles.lock();
        if let Some(handle) = handles.get(&extent.id) {
            return Ok(*handle);
        }
        let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a handle is written.
        self.within("making memory known to other processes", || unsafe { cu::cuIpcGetMemHandle(&mut handle, extent.base) })?;
        if handles.len() >= MOST_HANDLES {
            handles.clear();
        }
        let handle = handle.reserved.map(|byte| byte as u8);
        handles.insert(extent.id, handle);
        Ok(handle)
    }

    fn import(&self, handle: &Handle) -> Result<Address> {
        let handle = cu::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
        let mut address = 0;
        let flags = cu::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: an address is written. What is no handle is refused.
        self.within("opening another process's memory", || unsafe { cu::cuIpcOpenMemHandle_v2(&mut address, handle, flags) })?;
        Ok(address)
    }

    unsafe fn close(&self, address: Address) {
        // SAFETY: it was imported, and is used no more.
        if let Err(error) = self.within("closing another process's memory", || unsafe { cu::cuIpcCloseMemHandle(address) }) {
            tracing::debug!(%error);
        }
    }

    fn reach(&self, address: Address) -> Result<()> {
        let mut context: cu::CUcontext = std::ptr::null_mut();
        let whose = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        const DOING: &str = "reaching memory of another device";
        // SAFETY: the attribute is as large as what is written to.
        self.within(DOING, || unsafe { cu::cuPointerGetAttribute((&raw mut context).cast(), whose, address) })?;
        if context == self.context.0 {
            return Ok(());
        }
        // SAFETY: the context of an allocation that lives.
        match self.in_context(|| unsafe { cu::cuCtxEnablePeerAccess(context, 0) }) {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => self.check(DOING, result),
        }
    }
}

#[cfg(test)]
mod on_a_gpu;

//! The calls of CUDA's driver. Handles are numbers: of contexts, one more than their GPUs' ordinals.

#![allow(non_snake_case, reason = "the names are CUDA's")]

use std::ffi::{CStr, c_char, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::code::*;
use crate::kernel::{Kernel, Parameter};
use crate::memory::{GRAIN, Handle, Physical};
use crate::stream::{Access, Mode};
use crate::{Answer, CURRENT, MODE, UserObject, current, next, process};

/// Defines calls. Their bodies know the process as `$process`.
macro_rules! calls {
    ($process:ident: $($(#[$comment:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$comment])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> i32 {
            let $process = process();
            let call = || -> Answer { $body };
            // Not all calls need it.
            _ = $process;
            call().err().map_or(0, |code| code.0)
        }
    )*};
}

/// Writes a result of a call.
fn put<T>(to: *mut T, value: T) -> Answer {
    // SAFETY: a caller of the driver has memory for what the call returns.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads what a call is given by its address.
fn get<T: Copy>(from: *const T) -> T {
    // SAFETY: a caller of the driver gives valid addresses.
    unsafe { from.read() }
}

fn mode(number: i32) -> Mode {
    match number {
        0 => Mode::Global,
        1 => Mode::ThreadLocal,
        _ => Mode::Relaxed,
    }
}

// ---- Devices and contexts ----

#[rustfmt::skip]
calls! {
    p:
    fn cuGetErrorName(code: i32, name: *mut *const c_char) { put(name, describe(code)[0]) }
    fn cuGetErrorString(code: i32, text: *mut *const c_char) { put(text, describe(code)[1]) }
    fn cuInit(_flags: u32) { if p.gpus.is_empty() { Err(NO_DEVICE) } else { Ok(()) } }
    fn cuDriverGetVersion(version: *mut i32) { put(version, 13000) }
    fn cuDeviceGetCount(count: *mut i32) { put(count, p.gpus.len() as i32) }

    fn cuDeviceGet(device: *mut i32, ordinal: i32) {
        gpu(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, len: i32, ordinal: i32) {
        let text = format!("fake GPU {}\0", gpu(ordinal)?);
        let text = &text.as_bytes()[..text.len().min(len as usize)];
        // SAFETY: the caller has memory for `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
        Ok(())
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], ordinal: i32) {
        let mut bytes = [0xfa; 16];
        bytes[15] = gpu(ordinal)? as u8;
        put(uuid, bytes)
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], ordinal: i32) {
        let result = cuDeviceGetUuid_v2(uuid, ordinal);
        if result == 0 { Ok(()) } else { Err(Code(result)) }
    }

    /// NVRTC asks for tables that CUDA does not document, and ends by a null pointer where this call is
    /// missing.
    fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) { Err(NOT_FOUND) }

    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, _device: i32) {
        let of = match attribute {
            // Multiprocessors.
            16 => 4,
            // Whether kernels that run for some seconds are ended.
            17 => std::env::var_os("KOLO_FAKE_LIMIT").is_some().into(),
            // Compute capability.
            75 => 9,
            // Clock and width of the memory, in kHz and bits.
            36 | 37 => 1000,
            // Virtual memory, file descriptors for it, and pools.
            102 | 103 | 115 => 1,
            _ => 0,
        };
        put(value, of)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) { put(bytes, 1 << 34) }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, 1 << 34)?;
        put(total, 1 << 34)
    }

    fn cuDeviceCanAccessPeer(can: *mut i32, _device: i32, _peer: i32) { put(can, 1) }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, ordinal: i32) {
        gpu(ordinal)?;
        put(context, ordinal as usize + 1)
    }

    fn cuDevicePrimaryCtxRelease_v2(_device: i32) { Ok(()) }

    fn cuCtxSetCurrent(context: usize) {
        CURRENT.with_borrow_mut(|current| {
            current.pop();
            current.extend(context.checked_sub(1));
        });
        Ok(())
    }

    fn cuCtxGetCurrent(context: *mut usize) { put(context, current().map_or(0, |ordinal| ordinal + 1)) }

    fn cuCtxPushCurrent_v2(context: usize) {
        let ordinal = context.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        CURRENT.with_borrow_mut(|current| current.push(ordinal));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) {
        let ordinal = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        put(context, ordinal + 1)
    }

    fn cuCtxGetDevice(device: *mut i32) { put(device, current()? as i32) }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        put(least, 0)?;
        put(greatest, -5)
    }

    fn cuCtxEnablePeerAccess(peer: usize, _flags: u32) {
        p.share(|| {
            let is_new = p.peers.lock().insert((current()?, peer));
            if is_new { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
        })
    }

    fn cuCtxSynchronize() {
        p.streams.until_idle();
        p.check()
    }
}

/// Returns the GPU of an ordinal.
fn gpu(ordinal: i32) -> Answer<usize> {
    let gpu = usize::try_from(ordinal).ok().and_then(|ordinal| process().gpus.get(ordinal));
    gpu.copied().ok_or(INVALID_DEVICE)
}

// ---- Streams and events ----

/// How long a call waits before it looks again.
const PAUSE: Duration = Duration::from_micros(20);

#[rustfmt::skip]
calls! {
    p:
    fn cuStreamCreateWithPriority(stream: *mut usize, _flags: u32, _priority: i32) {
        p.alone(|| put(stream, p.new_stream(current()?)))
    }

    fn cuStreamCreate(stream: *mut usize, _flags: u32) { p.alone(|| put(stream, p.new_stream(current()?))) }

    fn cuStreamDestroy_v2(stream: usize) {
        p.alone(|| {
            p.of_streams.remove(stream)?;
            p.streams.end(stream);
            Ok(())
        })
    }

    fn cuStreamSynchronize(stream: usize) {
        p.refuse_in_capture()?;
        p.synchronise(stream)
    }

    fn cuStreamGetCtx(stream: usize, context: *mut usize) { put(context, p.of_streams.get(p.find(stream)?)? + 1) }
    fn cuEventCreate(event: *mut usize, _flags: u32) { p.alone(|| put(event, p.events.add(Arc::default()))) }
    fn cuEventDestroy_v2(event: usize) { p.alone(|| p.events.remove(event).map(drop)) }

    fn cuEventRecord(event: usize, stream: usize) {
        p.share(|| Ok(p.streams.record(&*p.events.get(event)?, p.find(stream)?)?))
    }

    fn cuEventQuery(event: usize) {
        p.refuse_in_capture()?;
        p.share(|| if p.events.get(event)?.is_done()? { Ok(()) } else { Err(NOT_READY) })
    }

    fn cuEventSynchronize(event: usize) {
        loop {
            match cuEventQuery(event) {
                0 => return Ok(()),
                other if other != NOT_READY.0 => return Err(Code(other)),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        p.share(|| Ok(p.streams.wait_for(p.find(stream)?, &*p.events.get(event)?)?))
    }

    fn cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        p.share(|| {
            p.enqueue(stream, move |access| {
                let word = word(access, address);
                access.until(|| word.load(Ordering::SeqCst).wrapping_sub(value) as i32 >= 0);
            })
        })
    }

    fn cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, _flags: u32) {
        p.share(|| p.enqueue(stream, move |access| word(access, address).store(value, Ordering::SeqCst)))
    }
}

/// Returns a word in memory that a stream uses.
fn word<'a>(access: &'a Access<'_>, address: u64) -> &'a AtomicU32 {
    // SAFETY: the memory is there until the program frees it, which it does after this work.
    unsafe { &*access.resolve(address, 4).cast() }
}

// ---- Graphs ----

#[rustfmt::skip]
calls! {
    p:
    fn cuThreadExchangeStreamCaptureMode(own: *mut i32) {
        let before = MODE.replace(mode(get(own)));
        put(own, before as i32)
    }

    fn cuStreamBeginCapture_v2(stream: usize, own: i32) {
        if stream <= 2 {
            return Err(INVALID_VALUE);
        }
        p.streams.begin_capture(p.find(stream)?, mode(own), next() as u64).map_err(|_| INVALID_VALUE)
    }

    fn cuStreamEndCapture(stream: usize, graph: *mut usize) {
        put(graph, 0)?;
        let stream = p.find(stream)?;
        let number = p.streams.capture(stream).map_or(0, |capturing| capturing.number as usize);
        let ended = p.streams.end_capture(stream)?;
        p.graphs.0.lock().insert(number, Arc::new(ended));
        put(graph, number)
    }

    fn cuStreamIsCapturing(stream: usize, status: *mut i32) {
        p.share(|| {
            let capture = p.streams.capture(p.find(stream)?);
            if stream <= 2 && p.streams.is_capturing() {
                return Err(STREAM_CAPTURE_IMPLICIT);
            }
            put(status, capture.map_or(0, |capturing| if capturing.is_invalid() { 2 } else { 1 }))
        })
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: *mut i32,
        number: *mut u64,
        graph: *mut usize,
        _dependencies: *mut *const c_void,
        _count: *mut usize,
    ) {
        let result = cuStreamIsCapturing(stream, status);
        if result != 0 {
            return Err(Code(result));
        }
        if let Some(capturing) = p.streams.capture(p.find(stream)?).filter(|capturing| !capturing.is_invalid()) {
            put(number, capturing.number)?;
            put(graph, capturing.number as usize)?;
        }
        Ok(())
    }

    fn cuUserObjectCreate(object: *mut usize, pointer: usize, destroy: extern "C" fn(usize), references: u32, flags: u32) {
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        let number = next();
        p.objects.lock().insert(number, (Arc::new(UserObject { pointer, destroy }), references));
        put(object, number)
    }

    fn cuUserObjectRelease(object: usize, count: u32) { take_reference(object, count).map(drop) }

    fn cuGraphRetainUserObject(graph: usize, object: usize, count: u32, flags: u32) {
        if count != 1 {
            return Err(INVALID_VALUE);
        }
        // With the flag, the graph takes over a reference of the program.
        let object = take_reference(object, if flags == 1 { 1 } else { 0 })?;
        if p.streams.keep(graph as u64, Box::new(object)) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuGraphInstantiateWithFlags(replayed: *mut usize, graph: usize, _flags: u64) {
        put(replayed, p.graphs.add(p.graphs.get(graph)?))
    }

    fn cuGraphLaunch(replayed: usize, stream: usize) {
        p.share(|| Ok(p.streams.launch(&p.graphs.get(replayed)?, p.find(stream)?)?))
    }

    fn cuGraphExecDestroy(replayed: usize) { p.graphs.remove(replayed).map(drop) }
    fn cuGraphDestroy(graph: usize) { p.graphs.remove(graph).map(drop) }
}

/// Takes references of the program to an object, which ends with the last one of all.
fn take_reference(object: usize, count: u32) -> Answer<Arc<UserObject>> {
    let mut objects = process().objects.lock();
    let (one, references) = objects.get_mut(&object).ok_or(INVALID_VALUE)?;
    let one = one.clone();
    *references = references.checked_sub(count).ok_or(INVALID_VALUE)?;
    if *references == 0 {
        objects.remove(&object);
    }
    Ok(one)
}

// ---- Memory ----

#[rustfmt::skip]
calls! {
    p:
    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        p.refuse_in_capture()?;
        p.share(|| put(address, p.memory.allocate(current()?, size, false)?))
    }

    fn cuMemFree_v2(address: u64) {
        p.refuse_in_capture()?;
        // That of any device.
        _ = current()?;
        p.alone(|| p.memory.free(address))
    }

    /// Memory of a pool, which other processes cannot open.
    fn cuMemAllocAsync(address: *mut u64, size: usize, _stream: usize) {
        p.share(|| put(address, p.memory.allocate(current()?, size, true)?))
    }

    fn cuMemFreeAsync(address: u64, stream: usize) {
        p.share(|| p.enqueue(stream, move |_| _ = p.memory.free(address)))
    }

    fn cuMemHostRegister_v2(memory: *mut u8, len: usize, _flags: u32) { pin(memory, len) }
    fn cuMemHostUnregister(memory: *mut u8) { unpin(memory) }

    fn cuMemHostGetDevicePointer_v2(address: *mut u64, memory: *const u8, _flags: u32) {
        p.share(|| put(address, p.streams.address_of_pinned(memory).ok_or(INVALID_VALUE)?))
    }

    fn cuMemHostAlloc(memory: *mut *mut u8, len: usize, _flags: u32) {
        let allocated = p.memory.allocate_of_host(len)?;
        put(memory, allocated)?;
        pin(allocated, len)
    }

    fn cuMemFreeHost(memory: *mut u8) {
        let result = unpin(memory);
        p.memory.free_of_host(memory);
        result
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) {
        p.share(|| {
            let facts = p.memory.facts(address).ok_or(NOT_FOUND)?;
            put(base, facts.base)?;
            put(size, facts.size)
        })
    }

    fn cuPointerGetAttribute(value: *mut c_void, attribute: i32, address: u64) {
        p.share(|| match (p.memory.facts(address), attribute) {
            // The context, the kind of memory (a device's), the number of the allocation, and the device.
            (Some(facts), 1) => put(value.cast(), facts.ordinal + 1),
            (Some(_), 2) => put(value.cast(), 2u32),
            (Some(facts), 7) => put(value.cast(), facts.id),
            (Some(facts), 9) => put(value.cast(), facts.ordinal as i32),
            // Memory of the host, if it is pinned.
            (None, 2) if p.streams.address_of_pinned(std::ptr::with_exposed_provenance(address as usize)).is_some() => {
                put(value.cast(), 1u32)
            }
            _ => Err(INVALID_VALUE),
        })
    }

    fn cuIpcGetMemHandle(handle: *mut Handle, address: u64) { p.share(|| put(handle, p.memory.export(address)?)) }

    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Handle, _flags: u32) {
        p.refuse_in_capture()?;
        p.share(|| put(address, p.memory.open(current()?, &handle)?))
    }

    fn cuIpcCloseMemHandle(address: u64) {
        p.refuse_in_capture()?;
        p.alone(|| p.memory.close(address))
    }
}

fn pin(memory: *mut u8, len: usize) -> Answer {
    let p = process();
    p.refuse_in_capture()?;
    p.share(|| p.streams.pin(memory, len).map(drop).ok_or(HOST_MEMORY_ALREADY_REGISTERED))
}

fn unpin(memory: *mut u8) -> Answer {
    let p = process();
    p.refuse_in_capture()?;
    p.alone(|| if p.streams.unpin(memory) { Ok(()) } else { Err(HOST_MEMORY_NOT_REGISTERED) })
}

// ---- Virtual memory ----

/// What physical memory is to be, as in CUDA's header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Properties {
    kind: i32,
    handles: i32,
    location: i32,
    device: i32,
}

/// A file descriptor, for which CUDA has this number.
const FILE: i32 = 1;

#[rustfmt::skip]
calls! {
    p:
    fn cuMemGetAllocationGranularity(grain: *mut usize, _properties: *const Properties, _option: i32) { put(grain, GRAIN) }

    fn cuMemCreate(handle: *mut usize, size: usize, properties: *const Properties, _flags: u64) {
        let Properties { kind, handles, location, .. } = get(properties);
        if size == 0 || !size.is_multiple_of(GRAIN) || (kind, handles, location) != (1, FILE, 1) {
            return Err(INVALID_VALUE);
        }
        p.share(|| put(handle, p.physical.add(Arc::new(Physical::new(size)?))))
    }

    fn cuMemExportToShareableHandle(file: *mut i32, handle: usize, kind: i32, _flags: u64) {
        p.share(|| {
            let physical = p.physical.get(handle)?;
            let copy = physical.0.try_clone().ok().filter(|_| kind == FILE).ok_or(INVALID_VALUE)?;
            put(file, copy.into_raw_fd())
        })
    }

    fn cuMemImportFromShareableHandle(handle: *mut usize, file: usize, kind: i32) {
        p.share(|| {
            // SAFETY: the caller has the file open.
            let file = unsafe { BorrowedFd::borrow_raw(file as i32) };
            let copy = file.try_clone_to_owned().ok().filter(|_| kind == FILE).ok_or(INVALID_VALUE)?;
            put(handle, p.physical.add(Arc::new(Physical(copy.into()))))
        })
    }

    fn cuMemRelease(handle: usize) { p.share(|| p.physical.remove(handle).map(drop)) }

    fn cuMemAddressReserve(address: *mut u64, size: usize, _alignment: usize, _at: u64, _flags: u64) {
        p.share(|| put(address, p.memory.reserve(size)?))
    }

    fn cuMemAddressFree(address: u64, _size: usize) { p.share(|| p.memory.end_range(address)) }

    /// Without access until `cuMemSetAccess`.
    fn cuMemMap(address: u64, size: usize, _offset: usize, handle: usize, _flags: u64) {
        p.alone(|| p.memory.map(current()?, address, size, &*p.physical.get(handle)?))
    }

    fn cuMemSetAccess(address: u64, size: usize, _devices: *const c_void, count: usize) {
        p.alone(|| if count == 0 { Err(INVALID_VALUE) } else { p.memory.give_access(address, size) })
    }

    fn cuMemUnmap(address: u64, _size: usize) { p.alone(|| p.memory.unmap(address)) }
}

// ---- Copies ----

/// One end of a copy.
#[derive(Clone)]
enum End {
    OnDevice(u64),
    /// An address of the host.
    OnHost(usize),
    /// What the host's memory had when the copy was enqueued.
    Read(Arc<[u8]>),
}

impl End {
    fn of_host(memory: *const u8) -> End {
        End::OnHost(memory.expose_provenance())
    }

    fn resolve(&self, access: &Access<'_>, len: usize) -> *mut u8 {
        match self {
            End::OnDevice(address) => access.resolve(*address, len),
            End::OnHost(address) => std::ptr::with_exposed_provenance_mut(*address),
            End::Read(bytes) => bytes.as_ptr().cast_mut(),
        }
    }
}

fn copy(stream: usize, to: End, from: End, len: usize) -> Answer {
    let p = process();
    p.share(|| {
        p.enqueue(stream, move |access| {
            let (to, from) = (to.resolve(access, len), from.resolve(access, len));
            // SAFETY: device memory is resolved, and the program vouches for that of the host. Nothing is
            // written to what was read.
            unsafe { std::ptr::copy(from, to, len) };
        })
    })
}

fn is_pinned(memory: *const u8) -> bool {
    process().streams.address_of_pinned(memory).is_some()
}

/// A copy to memory that is not pinned has ended when the call returns.
fn copy_out(to: *mut u8, from: u64, len: usize, stream: usize) -> Answer {
    copy(stream, End::of_host(to), End::OnDevice(from), len)?;
    if is_pinned(to) { Ok(()) } else { process().synchronise(stream) }
}

/// What is copied from memory that is not pinned has been read when the call returns.
fn copy_in(to: u64, from: *const u8, len: usize, stream: usize) -> Answer {
    let source = if is_pinned(from) {
        End::of_host(from)
    } else {
        // SAFETY: the caller's memory has as many bytes.
        End::Read(unsafe { std::slice::from_raw_parts(from, len) }.into())
    };
    copy(stream, End::OnDevice(to), source, len)
}

fn copy_within(to: u64, from: u64, len: usize, stream: usize) -> Answer {
    copy(stream, End::OnDevice(to), End::OnDevice(from), len)
}

fn set(address: u64, value: u8, len: usize, stream: usize) -> Answer {
    let p = process();
    p.share(|| {
        p.enqueue(stream, move |access| {
            // SAFETY: the address is resolved for as many bytes.
            unsafe { access.resolve(address, len).write_bytes(value, len) };
        })
    })
}

#[rustfmt::skip]
calls! {
    p:
    fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) { copy_within(to, from, len, stream) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) { copy_within(to, from, len, stream) }
    fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, len: usize, stream: usize) { copy_out(to, from, len, stream) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, len: usize, stream: usize) { copy_in(to, from, len, stream) }

    fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, len: usize) {
        copy_out(to, from, len, 0)?;
        p.synchronise(0)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const u8, len: usize) {
        copy_in(to, from, len, 0)?;
        p.synchronise(0)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy_within(to, from, len, 0)?;
        p.synchronise(0)
    }

    fn cuMemsetD8Async(address: u64, value: u8, len: usize, stream: usize) { set(address, value, len, stream) }

    fn cuMemsetD8_v2(address: u64, value: u8, len: usize) {
        set(address, value, len, 0)?;
        p.synchronise(0)
    }
}

// ---- Kernels ----

/// The only module.
const MODULE: usize = 1;

#[rustfmt::skip]
calls! {
    p:
    fn cuModuleLoadData(module: *mut usize, image: *const [u8; 2]) {
        // PTX begins with a comment, and machine code is an ELF file.
        let is_image = matches!(&get(image), b"//" | b"\x7fE");
        p.share(|| if is_image { put(module, MODULE) } else { Err(INVALID_IMAGE) })
    }

    fn cuModuleUnload(_module: usize) { Ok(()) }

    fn cuModuleGetFunction(function: *mut usize, _module: usize, name: *const c_char) {
        // SAFETY: the caller gives a text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) };
        p.share(|| put(function, p.kernels.find(name).ok_or(NOT_FOUND)?.0))
    }

    fn cuLaunchKernel(
        function: usize,
        blocks: u32,
        _blocks_y: u32,
        _blocks_z: u32,
        threads: u32,
        _threads_y: u32,
        _threads_z: u32,
        _shared: u32,
        stream: usize,
        parameters: *const *const c_void,
        _extra: *const c_void,
    ) {
        if blocks == 0 || !(1..=1024).contains(&threads) {
            return Err(INVALID_VALUE);
        }
        let kernel = Kernel(function);
        let parameter = Parameter::read(kernel, get(parameters));
        if p.kernels.is_first_launch(kernel) {
            p.alone(|| Ok(()))?;
        }
        p.share(|| {
            let gpu = p.gpus[p.of_streams.get(p.find(stream)?)?];
            let lock = p.kernels.lock_of(gpu);
            p.enqueue(stream, move |access| {
                lock.lock().expect("the lock of a GPU");
                kernel.run(&parameter, access);
                lock.unlock().expect("the lock of a GPU");
            })
        })
    }
}

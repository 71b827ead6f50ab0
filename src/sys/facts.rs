//! Facts about the machine for `kolo doctor`: limits, permissions, libraries.

/// Returns how many files this process may have open: the current limit, and the highest that it
/// may set. `None` where there is no such limit.
pub(crate) fn descriptor_limit() -> Option<[u64; 2]> {
    #[cfg(unix)]
    return super::limits::limit(super::limits::Resource::Descriptors);
    #[cfg(not(unix))]
    None
}

/// Returns the limit on this process's address space, if there is one.
pub(crate) fn address_space_limit() -> Option<u64> {
    #[cfg(unix)]
    return super::limits::limit(super::limits::Resource::AddressSpace).map(|[now, _]| now).filter(|&now| now < u64::MAX);
    #[cfg(not(unix))]
    None
}

/// Returns why the system may keep processes of one user from reading each other's memory, as far
/// as it says.
pub(crate) fn reading_policy() -> Option<&'static str> {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    Some(match scope.trim() {
        "0" => "kernel.yama.ptrace_scope is 0, which allows it; a container's seccomp profile or user may not",
        "1" => "kernel.yama.ptrace_scope is 1, which allows it to ancestors only",
        "2" => "kernel.yama.ptrace_scope is 2, which allows it to administrators only",
        _ => "kernel.yama.ptrace_scope is 3, which allows it to no process",
    })
}

/// Returns the source of the system's clock, where the system names it.
pub(crate) fn clock_source() -> Option<String> {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns whether kolo was built for devices and this machine seems to have some. Loads no
/// library: that would take a tenth of a second, also in programs that use no device.
pub(crate) fn may_have_devices() -> bool {
    use std::path::Path;

    let on_windows = || super::variable("SystemRoot").is_some_and(|root| Path::new(&root).join("System32/nvcuda.dll").exists());
    // The device files of NVIDIA's driver for Linux, and of the driver for Linux inside Windows.
    let on_linux = || ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    cfg!(feature = "cuda") && if cfg!(windows) { on_windows() } else { on_linux() }
}

/// What is known about CUDA without using a device.
#[cfg_attr(not(unix), expect(dead_code, reason = "kolo looks for the library on Unix only"))]
pub(crate) enum Cuda {
    /// The driver's library cannot be loaded, for this reason.
    NoLibrary(String),
    /// The library was loaded, but a call failed: its name, and what it returned.
    Refuses(&'static str, i32),
    /// The number of devices, and the newest version of CUDA that the driver supports, as 1000
    /// major + 10 minor.
    Devices(i32, i32),
}

/// Returns the files of this process's libraries. Empty where the system does not list them under
/// `/proc`.
#[cfg(feature = "cuda")]
pub(crate) fn loaded_libraries() -> Vec<std::path::PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    let mut paths: Vec<_> = paths.filter(|path| path.contains(".so")).map(std::path::PathBuf::from).collect();
    paths.dedup();
    paths
}

/// Asks the driver's library how many devices there are. The library stays loaded, because
/// unloading it is not safe.
#[cfg(unix)]
pub(crate) fn probe_cuda() -> Cuda {
    use std::ffi::{CStr, c_int, c_uint, c_void};

    const LIBRARY: &CStr = if cfg!(target_vendor = "apple") { c"libcuda.dylib" } else { c"libcuda.so.1" };
    // SAFETY: loading runs the library's initialisers, as in every program that uses CUDA.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the message is valid on this thread until the next such call.
        let message = unsafe { libc::dlerror() };
        let message = if message.is_null() {
            "the loader gave no reason".to_owned()
        } else {
            // SAFETY: dlerror returns a text that ends with a zero.
            unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
        };
        return Cuda::NoLibrary(message);
    }
    let symbol = |name: &CStr| -> Option<*mut c_void> {
        // SAFETY: the library is loaded, and the name ends with a zero.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    };
    let (Some(init), Some(version), Some(count)) =
        (symbol(c"cuInit"), symbol(c"cuDriverGetVersion"), symbol(c"cuDeviceGetCount"))
    else {
        return Cuda::Refuses("looking up cuInit", 0);
    };
    // SAFETY: these are the functions' types in every version of CUDA's driver interface.
    let (init, version, count) = unsafe {
        let init: unsafe extern "C" fn(c_uint) -> c_int = std::mem::transmute(init);
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(version);
        let count: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(count);
        (init, version, count)
    };
    let (mut devices, mut newest) = (0, 0);
    // SAFETY: the last two write one number each, and cuInit is called first, as the interface
    // requires.
    let outcomes =
        unsafe { [("cuInit", init(0)), ("cuDriverGetVersion", version(&mut newest)), ("cuDeviceGetCount", count(&mut devices))] };
    match outcomes.into_iter().find(|(_, result)| *result != 0) {
        Some((call, result)) => Cuda::Refuses(call, result),
        None => Cuda::Devices(devices, newest),
    }
}

/// Reports that kolo looks for the library on Unix only.
#[cfg(not(unix))]
pub(crate) fn probe_cuda() -> Cuda {
    Cuda::NoLibrary("kolo looks for it on Unix only".to_owned())
}

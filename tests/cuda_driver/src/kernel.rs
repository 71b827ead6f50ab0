//! The kernels, which `kernels.cpp` runs.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_void};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, LazyLock};

use libloading::Library;
use parking_lot::Mutex;

use crate::stream::Access;

type Resolve = extern "C" fn(*const c_void, u64, usize) -> *mut u8;

/// The functions of `kernels.cpp`.
struct Functions {
    find: extern "C" fn(*const c_char) -> usize,
    parameter: extern "C" fn(usize) -> usize,
    run: extern "C" fn(usize, *const c_void, Resolve, *const c_void),
}

static FUNCTIONS: LazyLock<Functions> = LazyLock::new(|| {
    // SAFETY: the library has no initialisers that matter, and its functions have these types. It is
    // never unloaded.
    unsafe {
        let library = Library::new("libkolo_fake_kernels.so").expect("the kernels are where the driver is");
        let library: &'static Library = Box::leak(Box::new(library));
        Functions {
            find: *library.get(b"kolo_fake_kernel\0").expect("kernels.cpp has it"),
            parameter: *library.get(b"kolo_fake_parameter\0").expect("kernels.cpp has it"),
            run: *library.get(b"kolo_fake_run\0").expect("kernels.cpp has it"),
        }
    }
});

/// A kernel, by its address in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel(pub(crate) usize);

#[derive(Default)]
pub(crate) struct Kernels {
    known: Mutex<HashMap<Box<CStr>, Kernel>>,
    /// Those that were launched before.
    loaded: Mutex<HashSet<Kernel>>,
    /// The locks of the GPUs, for which all processes wait.
    locks: Mutex<HashMap<usize, Arc<File>>>,
}

impl Kernels {
    /// Returns a kernel by its name.
    pub(crate) fn find(&self, name: &CStr) -> Option<Kernel> {
        let mut known = self.known.lock();
        if !known.contains_key(name) {
            let kernel = (FUNCTIONS.find)(name.as_ptr());
            known.insert(name.into(), Kernel((kernel != 0).then_some(kernel)?));
        }
        known.get(name).copied()
    }

    /// Returns whether a kernel has not been launched before.
    pub(crate) fn is_first_launch(&self, kernel: Kernel) -> bool {
        self.loaded.lock().insert(kernel)
    }

    /// Returns what a process locks while it runs a kernel on a GPU.
    pub(crate) fn lock_of(&self, gpu: usize) -> Arc<File> {
        let open = || {
            let name = format!("kolo-fake-gpu-{}-{gpu}", rustix::process::getuid().as_raw());
            let path = std::env::temp_dir().join(name);
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
            Arc::new(file.unwrap_or_else(|error| panic!("fake CUDA driver: the lock of a GPU, {}: {error}", path.display())))
        };
        self.locks.lock().entry(gpu).or_insert_with(open).clone()
    }
}

/// The parameter of a launch.
pub(crate) struct Parameter(Vec<u64>);

impl Parameter {
    /// Copies the parameter of a kernel.
    pub(crate) fn read(kernel: Kernel, from: *const c_void) -> Parameter {
        let bytes = (FUNCTIONS.parameter)(kernel.0);
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: a caller of the driver gives the parameter that the kernel has, and there is room for it.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), words.as_mut_ptr().cast(), bytes) };
        Parameter(words)
    }
}

impl Kernel {
    /// Runs the kernel as the work of a stream.
    pub(crate) fn run(self, parameter: &Parameter, access: &Access<'_>) {
        (FUNCTIONS.run)(self.0, parameter.0.as_ptr().cast(), resolve, (&raw const *access).cast());
    }
}

extern "C" fn resolve(access: *const c_void, address: u64, len: usize) -> *mut u8 {
    // SAFETY: `run` passes this pointer, and the kernel asks only while it runs.
    let access = unsafe { &*access.cast::<Access<'_>>() };
    access.find(address, len).unwrap_or(std::ptr::null_mut())
}

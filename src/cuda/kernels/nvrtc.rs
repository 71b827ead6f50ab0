//! NVRTC, NVIDIA's run-time compiler. It needs no GPU.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;

use crate::sys;

/// A compiler of code for a GPU.
pub(super) trait Compiler {
    /// The version of the compiler. Other versions may make other code.
    fn version(&self) -> (i32, i32);

    /// Compiles a program. The options include the architecture: a real one (`sm_90`) gives a
    /// cubin, a virtual one (`compute_80`) gives PTX. The error is the log of the compiler, for
    /// users.
    fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String>;
}

/// The oldest version that supports everything that the kernels use.
const OLDEST: (i32, i32) = (12, 0);

/// What NVRTC calls a program.
type Handle = *mut c_void;

/// What NVRTC's functions return. Zero is success.
type Status = c_int;

pub(super) struct Nvrtc {
    version: (i32, i32),
    functions: Functions,
}

/// NVRTC's functions, which all versions have.
struct Functions {
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    log: Output,
    ptx: Output,
    cubin: Output,
    error: unsafe extern "C" fn(Status) -> *const c_char,
}

/// Two functions: one returns the length of an output, the other writes as many bytes.
#[derive(Clone, Copy)]
struct Output {
    size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    write: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
}

/// The file names of NVRTC. PyTorch's packages have only one with a number.
const NAMES: [&str; 6] =
    ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "libnvrtc.dylib"];

/// Where NVRTC may be. The system looks for a name alone in its own folders. PyTorch has its own
/// libraries of CUDA, of which this process may have loaded one.
fn places(loaded: &[PathBuf]) -> Vec<OsString> {
    let is_of_cuda = |path: &&PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libcudart"));
    let beside = loaded.iter().filter(is_of_cuda).filter_map(|path| path.parent());
    // In PyTorch's packages for CUDA 12, each library has a folder of its own.
    let folders = beside.flat_map(|folder| [folder.to_owned(), folder.join("../../cuda_nvrtc/lib")]);
    let in_folder = |folder: PathBuf| NAMES.into_iter().map(move |name| folder.join(name)).filter(|path| path.exists());
    let found = folders.flat_map(in_folder).map(PathBuf::into_os_string);
    NAMES.into_iter().map(OsString::from).chain(found).collect()
}

impl Nvrtc {
    /// Returns the installed NVRTC, or why there is none. Looks for it once.
    pub(super) fn find() -> Result<&'static Nvrtc, String> {
        static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        FOUND.get_or_init(Nvrtc::look).as_ref().map_err(Clone::clone)
    }

    fn look() -> Result<Nvrtc, String> {
        let mut problems = Vec::new();
        for place in places(&sys::loaded_libraries()) {
            match Nvrtc::load(Path::new(&place)) {
                Some(Ok(nvrtc)) => return Ok(nvrtc),
                Some(Err(problem)) => problems.push(problem),
                None => {}
            }
        }
        let none = || "NVRTC (libnvrtc) is not found; install CUDA, or set LD_LIBRARY_PATH to its folder".to_owned();
        Err(problems.into_iter().next().unwrap_or_else(none))
    }

    /// Loads a library; `None` if there is none.
    fn load(path: &Path) -> Option<Result<Nvrtc, String>> {
        // SAFETY: the library's initialisers are NVIDIA's.
        let library = unsafe { Library::new(path) }.ok()?;
        Some(Nvrtc::of(library).map_err(|problem| format!("{}: {problem}", path.display())))
    }

    fn of(library: Library) -> Result<Nvrtc, String> {
        // Never closed: its functions are used as long as the process runs.
        let library: &'static Library = Box::leak(Box::new(library));
        /// A function of the library.
        fn get<F: Copy>(library: &'static Library, name: &str) -> Result<F, String> {
            // SAFETY: all versions declare the function of this name with this type.
            unsafe { library.get::<F>(name) }.map(|found| *found).map_err(|_| format!("it has no {name}"))
        }
        let output = |size: &str, write: &str| Ok::<_, String>(Output { size: get(library, size)?, write: get(library, write)? });
        let functions = Functions {
            create: get(library, "nvrtcCreateProgram")?,
            destroy: get(library, "nvrtcDestroyProgram")?,
            compile: get(library, "nvrtcCompileProgram")?,
            log: output("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?,
            ptx: output("nvrtcGetPTXSize", "nvrtcGetPTX")?,
            cubin: output("nvrtcGetCUBINSize", "nvrtcGetCUBIN")?,
            error: get(library, "nvrtcGetErrorString")?,
        };
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status = get(library, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two integers.
        functions.check(unsafe { version(&raw mut major, &raw mut minor) })?;
        if (major, minor) < OLDEST {
            return Err(format!("NVRTC {major}.{minor} is too old; install {}.{} or newer", OLDEST.0, OLDEST.1));
        }
        Ok(Nvrtc { version: (major, minor), functions })
    }
}

impl Functions {
    fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the call returns a static text for any number.
        let text = unsafe { (self.error)(status) };
        // SAFETY: the text is static and ends with a zero.
        let text = if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
        Err(format!("NVRTC failed: {text} ({status})"))
    }
}

impl Compiler for Nvrtc {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let c_string = |text: &str| CString::new(text).map_err(|_| "the program has a zero byte".to_owned());
        let source = c_string(source)?;
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
        let is_virtual = options.iter().any(|option| option.to_bytes().starts_with(b"--gpu-architecture=compute_"));
        let program = Program::new(&self.functions, &source)?;
        if let Err(error) = program.compile(&options) {
            return Err(format!("{error}: {}", program.log()));
        }
        if is_virtual { program.ptx() } else { program.cubin() }
    }
}

/// A program that NVRTC holds, and the text that it may refer to.
struct Program<'a> {
    functions: &'a Functions,
    handle: Handle,
    _source: &'a CStr,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` made the program, and it is destroyed only here.
        unsafe { (self.functions.destroy)(&raw mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn new(functions: &'a Functions, source: &'a CStr) -> Result<Program<'a>, String> {
        let mut handle = std::ptr::null_mut();
        let (name, none) = (c"kolo.cu".as_ptr(), std::ptr::null());
        // SAFETY: the source outlives the program, and there are no headers.
        functions.check(unsafe { (functions.create)(&raw mut handle, source.as_ptr(), name, 0, none, none) })?;
        Ok(Program { functions, handle, _source: source })
    }

    fn compile(&self, options: &[CString]) -> Result<(), String> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program and the strings are alive.
        self.functions.check(unsafe { (self.functions.compile)(self.handle, options.len() as c_int, options.as_ptr()) })
    }

    fn log(&self) -> String {
        let log = self.output(self.functions.log).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }

    fn ptx(&self) -> Result<Vec<u8>, String> {
        self.output(self.functions.ptx)
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        self.output(self.functions.cubin)
    }

    /// Returns one output of a program.
    fn output(&self, Output { size, write }: Output) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program is alive.
        self.functions.check(unsafe { size(self.handle, &raw mut bytes) })?;
        let mut output = vec![0; bytes];
        // SAFETY: the program is alive, and `output` has the length that NVRTC returned.
        self.functions.check(unsafe { write(self.handle, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pytorchs_libraries_are_found_beside_those_that_are_loaded() {
        let folder = std::env::temp_dir().join(format!("kolo-nvrtc-{}", std::process::id()));
        for (loaded, there) in [
            ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib/libnvrtc.so.13"),
            ("nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        ] {
            let there = folder.join(there);
            std::fs::create_dir_all(there.parent().unwrap()).unwrap();
            std::fs::create_dir_all(folder.join(loaded).parent().unwrap()).unwrap();
            std::fs::write(&there, "").unwrap();
            let places = places(&[PathBuf::from("/lib/libc.so.6"), folder.join(loaded)]);
            let is_it = |place: &OsString| std::fs::canonicalize(place).is_ok_and(|place| place == there.canonicalize().unwrap());
            assert!(places.iter().any(is_it), "{places:?}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

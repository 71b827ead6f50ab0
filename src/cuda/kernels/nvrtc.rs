//! NVRTC, NVIDIA's run-time compiler. It needs no GPU.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

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

#[derive(Debug)]
pub(super) struct Nvrtc {
    version: (i32, i32),
}

impl Nvrtc {
    /// Returns the installed NVRTC, or why there is none. Looks for it once.
    pub(super) fn find() -> Result<&'static Nvrtc, String> {
        static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        FOUND.get_or_init(Nvrtc::look).as_ref().map_err(Clone::clone)
    }

    fn look() -> Result<Nvrtc, String> {
        // cudarc panics if it calls into a library that does not exist.
        // SAFETY: this loads the library, whose initialisers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err("NVRTC (libnvrtc) is not found; install CUDA, or set LD_LIBRARY_PATH to its folder".to_owned());
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two integers, and all versions have it.
        check(unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        if (major, minor) < OLDEST {
            return Err(format!("NVRTC {major}.{minor} is too old; install {}.{} or newer", OLDEST.0, OLDEST.1));
        }
        Ok(Nvrtc { version: (major, minor) })
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
        let program = Program::new(&source)?;
        if let Err(error) = program.compile(&options) {
            return Err(format!("{error}: {}", program.log()));
        }
        if is_virtual { program.ptx() } else { program.cubin() }
    }
}

/// A program that NVRTC holds, and the text that it may refer to.
struct Program<'a> {
    handle: sys::nvrtcProgram,
    _source: &'a CStr,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: nvrtcCreateProgram made the program, and it is destroyed only here.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn new(source: &'a CStr) -> Result<Program<'a>, String> {
        let mut handle = std::ptr::null_mut();
        let (name, none) = (c"kolo.cu".as_ptr(), std::ptr::null());
        // SAFETY: the source outlives the program, and there are no headers.
        check(unsafe { sys::nvrtcCreateProgram(&raw mut handle, source.as_ptr(), name, 0, none, none) })?;
        Ok(Program { handle, _source: source })
    }

    fn compile(&self, options: &[CString]) -> Result<(), String> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program and the strings are alive.
        check(unsafe { sys::nvrtcCompileProgram(self.handle, options.len() as c_int, options.as_ptr()) })
    }

    fn log(&self) -> String {
        let log = self.output(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }

    fn ptx(&self) -> Result<Vec<u8>, String> {
        self.output(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        self.output(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)
    }

    /// Returns one output of a program: `size` returns its length, `write` writes as many bytes.
    fn output(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        write: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program is alive.
        check(unsafe { size(self.handle, &raw mut bytes) })?;
        let mut output = vec![0; bytes];
        // SAFETY: the program is alive, and `output` has the length that NVRTC returned.
        check(unsafe { write(self.handle, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }
}

fn check(result: sys::nvrtcResult) -> Result<(), String> {
    result.result().map_err(|error| format!("NVRTC failed: {error}"))
}

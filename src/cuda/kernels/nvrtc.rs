//! NVIDIA's run-time compiler. It needs no GPU.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

/// What makes code for a GPU.
pub(super) trait Compiler {
    /// Its version: another one may make other code.
    fn version(&self) -> (i32, i32);

    /// Compiles a program with these options, among which is the architecture: a real one (`sm_90`) gives a cubin, a virtual one
    /// (`compute_80`) PTX. An error is what the compiler says, for people.
    fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String>;
}

/// The oldest version that knows all that the kernels use.
const OLDEST: (i32, i32) = (12, 0);

#[derive(Debug)]
pub(super) struct Nvrtc {
    version: (i32, i32),
}

impl Nvrtc {
    /// The one that is installed, looked for once; or why there is none.
    pub(super) fn find() -> Result<&'static Nvrtc, String> {
        static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        FOUND.get_or_init(Nvrtc::look).as_ref().map_err(Clone::clone)
    }

    fn look() -> Result<Nvrtc, String> {
        // cudarc panics if it calls into a library that is not there.
        // SAFETY: loads the library, whose initialisers are NVIDIA's.
        if !unsafe { sys::is_culib_present() } {
            return Err("NVRTC (libnvrtc) is not found; it comes with CUDA, and LD_LIBRARY_PATH may name its folder".to_owned());
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers. All versions have this function.
        check(unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
        if (major, minor) < OLDEST {
            return Err(format!("NVRTC {major}.{minor} is too old, {}.{} is the oldest that will do", OLDEST.0, OLDEST.1));
        }
        Ok(Nvrtc { version: (major, minor) })
    }
}

impl Compiler for Nvrtc {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        let c_string = |text: &str| CString::new(text).map_err(|_| "a NUL in a program".to_owned());
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

/// A program that NVRTC holds, with the text that it may refer to.
struct Program<'a> {
    handle: sys::nvrtcProgram,
    _source: &'a CStr,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram, and destroyed only here.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn new(source: &'a CStr) -> Result<Program<'a>, String> {
        let mut handle = std::ptr::null_mut();
        let (name, none) = (c"kolo.cu".as_ptr(), std::ptr::null());
        // SAFETY: the source outlives the program; there are no headers.
        check(unsafe { sys::nvrtcCreateProgram(&raw mut handle, source.as_ptr(), name, 0, none, none) })?;
        Ok(Program { handle, _source: source })
    }

    fn compile(&self, options: &[CString]) -> Result<(), String> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and so are the strings.
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

    /// One of what NVRTC has to say of a program: it tells the size, then writes so many bytes.
    fn output(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        write: unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program is alive.
        check(unsafe { size(self.handle, &raw mut bytes) })?;
        let mut output = vec![0; bytes];
        // SAFETY: as above, and there is room for what it said.
        check(unsafe { write(self.handle, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }
}

fn check(result: sys::nvrtcResult) -> Result<(), String> {
    result.result().map_err(|error| format!("NVRTC says {error}"))
}

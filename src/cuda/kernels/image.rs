//! The code for one GPU: compiled for its architecture, or the PTX that is part of this crate.

use std::borrow::Cow;
use std::path::Path;

use super::cache;
use super::nvrtc::{Compiler, Nvrtc};
use crate::config;
use crate::error::{Error, Result};

/// The sources in `cuda-kernels`, as one program.
pub(super) const SOURCE: &str = concat!(
    "#line 1 \"elements.cu\"\n",
    include_str!("../../../cuda-kernels/elements.cu"),
    "#line 1 \"barrier.cu\"\n",
    include_str!("../../../cuda-kernels/barrier.cu"),
    "#line 1 \"reduce.cu\"\n",
    include_str!("../../../cuda-kernels/reduce.cu"),
    "#line 1 \"scale.cu\"\n",
    include_str!("../../../cuda-kernels/scale.cu"),
);

/// The options that give the arithmetic of the host: see `elements.cu`.
pub(super) const OPTIONS: [&str; 5] = ["--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

/// The program as PTX, which the driver compiles for any GPU from [`PREBUILT_FOR`] on. A zero ends
/// it.
const PREBUILT: &str = concat!(include_str!("../../../cuda-kernels/kolo.sm_80.ptx"), "\0");

pub(super) const PREBUILT_FOR: (u32, u32) = (8, 0);

/// Code for `cuModuleLoadData`.
#[derive(Debug)]
pub(in crate::cuda) struct Image {
    /// A cubin, or PTX that ends with a zero.
    pub(in crate::cuda) code: Cow<'static, [u8]>,
    pub(in crate::cuda) origin: Origin,
}

/// The origin of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Origin {
    /// Compiled by this process.
    Compiled,
    /// Compiled by an earlier process and kept on disk.
    Cached,
    /// PTX that is part of this crate.
    Prebuilt {
        /// Why the program was not compiled for the GPU.
        why: String,
    },
}

/// Loads the code for GPUs of this compute capability. Returns the result of `load` for the
/// [`image`], or for the prebuilt code if the driver refuses compiled code, as a driver that is
/// older than NVRTC does.
///
/// # Errors
///
/// Those of [`image`], and that of `load` if the driver refuses both.
pub(in crate::cuda) fn load<T>(architecture: (u32, u32), load: impl Fn(&Image) -> Result<T>) -> Result<T> {
    load_or_prebuilt(image(architecture)?, architecture, load)
}

pub(super) fn load_or_prebuilt<T>(image: Image, architecture: (u32, u32), load: impl Fn(&Image) -> Result<T>) -> Result<T> {
    load(&image).or_else(|error| match image.origin {
        Origin::Prebuilt { .. } => Err(error),
        Origin::Compiled | Origin::Cached => {
            load(&prebuilt(format!("the driver refuses the compiled kernels: {error}"), architecture)?)
        }
    })
}

/// Returns the version of the compiler that [`image`] uses, or why there is none, as text for
/// users.
pub(in crate::cuda) fn compiler() -> Result<String, String> {
    Nvrtc::find().map(|nvrtc| name_of(nvrtc))
}

/// Returns the code for GPUs of this compute capability. The first call on a machine takes some
/// seconds.
///
/// # Errors
///
/// [`Error::Unsupported`] where NVRTC cannot compile it and the GPU is older than the prebuilt
/// code.
pub(super) fn image(architecture: (u32, u32)) -> Result<Image> {
    let compiler = Nvrtc::find().map(|nvrtc| nvrtc as &dyn Compiler);
    image_by(compiler, config::cache_folder(|name| std::env::var_os(name)).as_deref(), architecture)
}

/// Returns the same by a given compiler, or the reason why there is none, and with a folder for
/// compiled code.
pub(super) fn image_by(
    compiler: Result<&dyn Compiler, String>,
    folder: Option<&Path>,
    architecture: (u32, u32),
) -> Result<Image> {
    compiler.and_then(|compiler| compiled(compiler, folder, architecture)).or_else(|why| prebuilt(why, architecture))
}

/// Returns the options of NVRTC for a real architecture (`sm_90`) or a virtual one (`compute_80`).
pub(super) fn options(architecture: &str) -> Vec<String> {
    let architecture = format!("--gpu-architecture={architecture}");
    OPTIONS.iter().map(|option| (*option).to_owned()).chain([architecture]).collect()
}

fn compiled(compiler: &dyn Compiler, folder: Option<&Path>, (major, minor): (u32, u32)) -> Result<Image, String> {
    let options = options(&format!("sm_{major}{minor}"));
    let version = name_of(compiler);
    let parts: Vec<&str> = [SOURCE, &version].into_iter().chain(options.iter().map(String::as_str)).collect();
    let path = folder.map(|folder| folder.join(cache::name(&parts)));
    if let Some(code) = path.as_deref().and_then(cache::load) {
        return Ok(Image { code: code.into(), origin: Origin::Cached });
    }
    let code = compiler.compile(SOURCE, &options).map_err(|log| format!("{version} for sm_{major}{minor}: {log}"))?;
    if let Some(path) = path {
        cache::store(&path, &code);
    }
    Ok(Image { code: code.into(), origin: Origin::Compiled })
}

fn name_of(compiler: &dyn Compiler) -> String {
    let (major, minor) = compiler.version();
    format!("NVRTC {major}.{minor}")
}

fn prebuilt(why: String, (major, minor): (u32, u32)) -> Result<Image> {
    if (major, minor) < PREBUILT_FOR {
        return Err(Error::Unsupported {
            what: "reductions on this GPU",
            why: format!("its compute capability is {major}.{minor}, the prebuilt kernels are for 8.0 and later, and {why}"),
        });
    }
    tracing::warn!("the driver compiles the prebuilt kernels: {why}");
    Ok(Image { code: PREBUILT.as_bytes().into(), origin: Origin::Prebuilt { why } })
}

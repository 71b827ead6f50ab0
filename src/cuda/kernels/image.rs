//! The code for one GPU: compiled for its architecture, or the PTX that is part of this crate.

use std::path::Path;
use std::sync::Once;

use super::nvrtc::{Compiler, Nvrtc};
use super::{Kernel, cache};
use crate::config;
use crate::error::{Error, Result};
use crate::sys;

/// The sources in `cuda-kernels`, without the list of entries.
pub(super) const WITHOUT_ENTRIES: &str = concat!(
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

/// The list of all entries.
#[cfg(all(test, unix))]
pub(super) const ENTRIES: &str = concat!("#line 1 \"entries.cu\"\n", include_str!("../../../cuda-kernels/entries.cu"));

/// All entries as PTX, which the driver compiles for any GPU from [`PREBUILT_FOR`] on.
const PREBUILT: &str = include_str!("../../../cuda-kernels/kolo.sm_80.ptx");

pub(super) const PREBUILT_FOR: (u32, u32) = (8, 0);

/// Code of one kernel for `cuModuleLoadData`.
#[derive(Debug)]
pub(in crate::cuda) struct Image {
    /// A cubin, or PTX that ends with a zero.
    pub(in crate::cuda) code: Vec<u8>,
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

/// Loads the code of a kernel for GPUs of this compute capability. Returns the result of `load` for
/// the [`image`], or for the prebuilt code if the driver refuses compiled code, as a driver that is
/// older than NVRTC does.
///
/// # Errors
///
/// Those of [`image`], and that of `load` if the driver refuses both.
pub(in crate::cuda) fn load<T>(architecture: (u32, u32), kernel: Kernel, load: impl Fn(&Image) -> Result<T>) -> Result<T> {
    load_or_prebuilt(image(architecture, kernel)?, architecture, kernel, load)
}

pub(super) fn load_or_prebuilt<T>(
    image: Image,
    architecture: (u32, u32),
    kernel: Kernel,
    load: impl Fn(&Image) -> Result<T>,
) -> Result<T> {
    load(&image).or_else(|error| match image.origin {
        Origin::Prebuilt { .. } => Err(error),
        Origin::Compiled | Origin::Cached => {
            load(&prebuilt(format!("the driver refuses the compiled kernel: {error}"), architecture, kernel)?)
        }
    })
}

/// Returns the version of the compiler that [`image`] uses, or why there is none, as text for
/// users.
pub(crate) fn compiler() -> Result<String, String> {
    Nvrtc::find().map(|nvrtc| name_of(nvrtc))
}

/// Returns the code of a kernel for GPUs of this compute capability. The first call for it on a machine
/// takes a fraction of a second.
///
/// # Errors
///
/// [`Error::Unsupported`] where NVRTC cannot compile it and the GPU is older than the prebuilt
/// code.
pub(super) fn image(architecture: (u32, u32), kernel: Kernel) -> Result<Image> {
    let compiler = Nvrtc::find().map(|nvrtc| nvrtc as &dyn Compiler);
    image_by(compiler, config::cache_folder(sys::variable).as_deref(), architecture, kernel)
}

/// Returns the same by a given compiler, or the reason why there is none, and with a folder for
/// compiled code.
pub(super) fn image_by(
    compiler: Result<&dyn Compiler, String>,
    folder: Option<&Path>,
    architecture: (u32, u32),
    kernel: Kernel,
) -> Result<Image> {
    let image = compiler.and_then(|compiler| compiled(compiler, folder, architecture, kernel));
    image.or_else(|why| prebuilt(why, architecture, kernel))
}

/// Returns the options of NVRTC for a real architecture (`sm_90`) or a virtual one (`compute_80`).
pub(super) fn options(architecture: &str) -> Vec<String> {
    let architecture = format!("--gpu-architecture={architecture}");
    OPTIONS.iter().map(|option| (*option).to_owned()).chain([architecture]).collect()
}

fn compiled(compiler: &dyn Compiler, folder: Option<&Path>, (major, minor): (u32, u32), kernel: Kernel) -> Result<Image, String> {
    let options = options(&format!("sm_{major}{minor}"));
    let (version, source) = (name_of(compiler), [WITHOUT_ENTRIES, &kernel.line()].concat());
    let parts: Vec<&str> = [&*source, &version].into_iter().chain(options.iter().map(String::as_str)).collect();
    let path = folder.map(|folder| folder.join(cache::name(&parts)));
    if let Some(code) = path.as_deref().and_then(cache::load) {
        return Ok(Image { code, origin: Origin::Cached });
    }
    let code = compiler.compile(&source, &options).map_err(|log| format!("{version} for sm_{major}{minor}: {log}"))?;
    if let Some(path) = path {
        cache::store(&path, &code);
    }
    Ok(Image { code, origin: Origin::Compiled })
}

fn name_of(compiler: &dyn Compiler) -> String {
    let (major, minor) = compiler.version();
    format!("NVRTC {major}.{minor}")
}

fn prebuilt(why: String, (major, minor): (u32, u32), kernel: Kernel) -> Result<Image> {
    if (major, minor) < PREBUILT_FOR {
        return Err(Error::Unsupported {
            what: "reductions on this GPU",
            why: format!("its compute capability is {major}.{minor}, the prebuilt kernels are for 8.0 and later, and {why}"),
        });
    }
    // Once, and not for each kernel.
    static WARNING: Once = Once::new();
    WARNING.call_once(|| crate::log::warn!("the driver compiles the prebuilt kernels: {why}"));
    let ptx = only(PREBUILT, &kernel.name()).expect("the prebuilt code has all kernels");
    Ok(Image { code: ptx.into_bytes(), origin: Origin::Prebuilt { why } })
}

/// Returns the PTX of one entry, with a zero behind it. The driver compiles one much sooner than all.
fn only(ptx: &str, name: &str) -> Option<String> {
    const ENTRY: &str = ".visible .entry ";
    let (declarations, _) = ptx.split_once(ENTRY)?;
    let is_it = |part: &&str| part.strip_prefix(name).is_some_and(|rest| rest.starts_with('('));
    let entry = ptx.split(ENTRY).skip(1).find(is_it)?;
    Some([declarations, ENTRY, entry, "\0"].concat())
}

//! `kolo run --nccl`: the ranks load kolo where they would load NVIDIA's NCCL.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library's name for the loader, which is that of NVIDIA's.
const NAME: &str = "libnccl.so.2";

/// kolo's library with the functions of NCCL.
pub(super) struct Nccl(PathBuf);

impl Nccl {
    /// Finds the library where it is installed with this program, or where cargo has built both.
    pub(super) fn find() -> Result<Nccl, String> {
        if !cfg!(target_os = "linux") {
            return Err("--nccl is for Linux: NCCL has no programs elsewhere".to_owned());
        }
        let this = std::env::current_exe().and_then(|this| this.canonicalize());
        let this = this.map_err(|error| format!("cannot find this program: {error}"))?;
        let folder = this.parent().unwrap_or(Path::new("/"));
        let found = places(folder).into_iter().find(|place| place.is_file()).ok_or_else(|| {
            let prefix = folder.parent().unwrap_or(folder).display();
            format!(
                "--nccl: there is no {NAME} of kolo under {prefix}/lib; install pykolo or the package kolo, or build both with \
                 scripts/install.sh"
            )
        })?;
        // The loader ends a path at either.
        if found.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
            return Err(format!("--nccl: no program can load {}: move it to a path without spaces and colons", found.display()));
        }
        Ok(Nccl(found))
    }

    /// Has a rank load the library before any that needs NCCL.
    pub(super) fn apply(&self, command: &mut Command) {
        let of_rank = |name: &str| {
            let exported = command.get_envs().find(|(exported, _)| *exported == name);
            exported
                .map_or_else(|| std::env::var_os(name), |(_, value)| value.map(OsStr::to_owned))
                .filter(|value| !value.is_empty())
        };
        let joined = |first: &OsStr, then: &OsStr| [first, then].join(OsStr::new(":"));
        let own = self.0.as_os_str();
        let preloaded = match of_rank("LD_PRELOAD") {
            // Tools wrap the functions of what comes after them; sanitizers must come first.
            Some(others) if !others.to_string_lossy().contains("libnccl") => joined(&others, own),
            Some(others) => joined(own, &others),
            None => own.to_owned(),
        };
        // musl's loader knows a library by the path that it was loaded from, and not by the name in it.
        let folder = self.0.parent().filter(|_| cfg!(target_env = "musl"));
        let folders = folder.map(|folder| match of_rank("LD_LIBRARY_PATH") {
            Some(others) => joined(folder.as_os_str(), &others),
            None => folder.as_os_str().to_owned(),
        });
        // It loads a library by its path.
        let vllm = of_rank("VLLM_NCCL_SO_PATH").unwrap_or_else(|| own.to_owned());
        command.env("LD_PRELOAD", preloaded).env("VLLM_NCCL_SO_PATH", vllm);
        command.envs(folders.map(|folders| ("LD_LIBRARY_PATH", folders)));
    }
}

/// Returns where the library may be if this program is in `folder`: in the same prefix, or in the folder where cargo
/// builds.
fn places(folder: &Path) -> Vec<PathBuf> {
    let prefix = folder.parent().unwrap_or(folder);
    let of_architecture = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let libs = ["lib", "lib64", &of_architecture].map(|lib| prefix.join(lib).join("kolo").join(NAME));
    libs.into_iter().chain([folder.join("libkolo_nccl.so")]).collect()
}

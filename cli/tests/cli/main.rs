//! The program `kolo` and the C library as users run them.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[cfg(unix)]
#[path = "../common/namespaces.rs"]
mod namespaces;

mod bench;
#[cfg(unix)]
mod bindings;
mod c;
mod compare;
mod completions;
#[cfg(all(feature = "cuda", target_os = "linux"))]
mod cuda;
mod deadlines;
mod doctor;
mod manners;
mod pages;
mod plan;
mod program;
#[cfg(unix)]
mod restarts;
mod run;
#[cfg(unix)]
mod run_hosts;
#[cfg(unix)]
mod run_ranks;
#[cfg(windows)]
mod run_windows;
mod soak;
#[cfg(unix)]
mod top;
mod trace;

/// Takes from a command that calls cargo what cargo tells a test of its package. Build scripts look at these variables
/// (ring's does), so that their crates, and kolo, would be built again, here and by the next cargo outside.
fn without_package(command: &mut std::process::Command) -> &mut std::process::Command {
    let is_of_package = |name: &str| name == "OUT_DIR" || name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_package)) {
        command.env_remove(name);
    }
    command
}

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

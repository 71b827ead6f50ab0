//! Names the shared library as NVIDIA's. A loader that has it loaded, by LD_PRELOAD or under any file
//! name, then loads no other library of this name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    }
}

//! Has kolo's files make what only models need.

fn main() {
    println!("cargo:rustc-cfg=kolo_loom");
}

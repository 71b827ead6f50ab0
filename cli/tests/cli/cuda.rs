//! Benchmarks on the memory of GPUs, on a library with the name of NVIDIA's driver whose GPUs are in
//! host memory (`tests/cuda_driver`). Each rank is a process. All of kolo's calls of the driver run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use crate::common::all;

/// Returns the folder of the library; `None`, said loudly, if no compiler makes it.
fn driver() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if Command::new("g++").arg("--version").stdout(Stdio::null()).status().is_err() {
            use std::io::Write;
            std::io::stderr().write_all(b"NOT RUN: benchmarks on a fake CUDA driver: there is no g++\n").unwrap();
            return None;
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cuda_driver");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cuda_driver/build.sh");
        let built = crate::without_package(Command::new("bash").args([&script, &folder])).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

/// Runs a benchmark of `ranks` ranks on a machine with `gpus` GPUs.
fn bench(folder: &Path, (ranks, gpus): (usize, usize), arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    let kolo = env!("CARGO_BIN_EXE_kolo");
    let ranks = ranks.to_string();
    let mut command = Command::new(kolo);
    command.args([
        "run", "-n", &ranks, "--", kolo, "bench", "--device", "cuda", "--check", "--wide", "--iters", "2", "--warmup", "1",
    ]);
    command.args(arguments).envs(settings.iter().copied()).stdin(Stdio::null());
    command.env("LD_LIBRARY_PATH", folder).env("KOLO_FAKE_GPUS", gpus.to_string()).env("KOLO_START_TIMEOUT", "15m");
    command.output().unwrap()
}

/// Returns how many operations took a path, by the report of a benchmark without wrong elements.
fn taken(output: &Output, path: &str) -> usize {
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("values : 0 OK"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let (_, paths) = said.split_once("# Paths on devices     : ").unwrap_or_else(|| panic!("no paths: {said}"));
    let paths = paths.lines().next().unwrap();
    let count = paths.split(", ").find_map(|one| one.strip_suffix(path)).map(|count| count.trim().parse().unwrap());
    count.unwrap_or(0)
}

const LARGE: [&str; 2] = ["--sizes", "256K,1M"];

/// Memory of `alloc_device` is used where it is, and that of pools through areas, on one GPU and on two.
#[test]
fn buffers_are_reached_by_other_processes() {
    let Some(folder) = driver() else { return };
    for (layout, (ranks, gpus)) in [(2, 1), (3, 1), (4, 2)].into_iter().enumerate() {
        let ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"];
        // In turns, unless every case is tried.
        for (_, op) in ops.into_iter().enumerate().filter(|(i, _)| all() || i % 3 == layout) {
            let registered = bench(folder, (ranks, gpus), &[op, "--registered", LARGE[0], LARGE[1]], &[]);
            assert!(taken(&registered, "in place") > 0, "{op} of {ranks} ranks on {gpus}");
            assert_eq!(taken(&registered, "staged"), 0, "{op} of {ranks} ranks on {gpus}");
        }
        let pool = bench(folder, (ranks, gpus), &["all_reduce", LARGE[0], LARGE[1]], &[]);
        assert!(taken(&pool, "through areas") > 0 && taken(&pool, "in place") + taken(&pool, "staged") == 0);
    }
}

/// Has the fake driver say that its GPUs end kernels which run for some seconds.
const LIMIT: (&str, &str) = ("KOLO_FAKE_LIMIT", "1");

/// Where each rank has a GPU, kernels wait for those of other ranks, unless KOLO_DEVICE_WAITS is `host`,
/// or a GPU limits the time of kernels.
#[test]
fn kernels_of_several_gpus_wait_for_each_other() {
    let Some(folder) = driver() else { return };
    for ranks in [2, 3] {
        for (i, op) in ["all_reduce", "all_gather", "reduce_scatter"].into_iter().enumerate() {
            let many = ["--registered", "--sizes", "128K,256K,1M", "--dtype", "bf16"];
            let arguments: Vec<&str> = std::iter::once(op).chain(many).collect();
            let ways = [("kernels", ("KOLO_LOG", "debug")), ("host", ("KOLO_DEVICE_WAITS", "host")), ("host", LIMIT)];
            // In turns, unless every case is tried.
            let ways = ways.into_iter().enumerate().filter(|(way, _)| all() || *way == (ranks + i) % 3);
            for (_, (waits, setting)) in ways {
                let output = bench(folder, (ranks, ranks), &arguments, &[("KOLO_LOG", "debug"), setting]);
                let is_one_shot = op == "all_reduce" && waits == "kernels";
                assert_eq!(taken(&output, "one-shot") > 0, is_one_shot, "{op} of {ranks}, {setting:?}");
                assert!(taken(&output, "in place") > 0, "{op} of {ranks}, {setting:?}");
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(said.contains(&format!("waits={waits}")), "{said}");
            }
        }
    }
}

/// Short operations pass as a whole, and large ones in rounds if they shall.
#[test]
fn data_passes_through_the_host() {
    let Some(folder) = driver() else { return };
    let short = bench(folder, (2, 1), &["all_reduce", "--sizes", "8,64K"], &[]);
    assert!(taken(&short, "whole") > 0 && taken(&short, "in place") + taken(&short, "through areas") == 0);
    // Of more than two segments.
    let staged = bench(folder, (2, 2), &["all_reduce", "--sizes", "256K,5M"], &[("KOLO_DEVICE_PATH", "staged")]);
    assert!(taken(&staged, "staged") > 0 && taken(&staged, "in place") + taken(&staged, "through areas") == 0);
}

/// `kolo doctor` finds the driver and its GPUs.
#[test]
fn doctor_finds_the_gpus() {
    let Some(folder) = driver() else { return };
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_kolo"));
    let output = doctor.arg("doctor").env("LD_LIBRARY_PATH", folder).env("KOLO_FAKE_GPUS", "3").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("3 devices, driver for CUDA 13.0"), "{said}");
}

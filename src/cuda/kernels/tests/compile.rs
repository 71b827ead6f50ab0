//! Compilation by NVRTC, where it is installed, for several architectures, and the resources that
//! the machine code needs. The cache and the prebuilt code are tested with a fake compiler.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::image::{self, Image, OPTIONS, Origin, PREBUILT_FOR, image_by, load_or_prebuilt, options};
use super::super::nvrtc::{Compiler, Nvrtc};
use super::super::{BLOCKS, Grid, Kernel, THREADS, cache, entry, grid, scale_entry};
use super::{every_reduction, not_run, source};
use crate::error::Error;
use crate::types::{DType, ReduceOp};

fn all_kernels() -> impl Iterator<Item = Kernel> {
    let reductions = every_reduction().map(|(dtype, redop)| Kernel::Reduce(dtype, redop));
    let pairs = DType::ALL.iter().flat_map(|&from| DType::ALL.iter().map(move |&to| (from, to)));
    let scalings = pairs.filter(|&(from, to)| scale_entry(from, to).is_some()).map(|(from, to)| Kernel::Scale(from, to));
    reductions.chain(scalings).chain([Kernel::TakeMoves])
}

/// The names of all entries.
fn entries() -> BTreeSet<String> {
    all_kernels().map(Kernel::name).collect()
}

const SUM: Kernel = Kernel::Reduce(DType::F32, ReduceOp::Sum);

#[test]
fn what_does_not_apply_has_no_entry() {
    assert_eq!(entry(DType::BF16, ReduceOp::Average).as_deref(), Some("kolo_reduce_average_bf16"));
    assert_eq!(entry(DType::I32, ReduceOp::Average), None);
    assert_eq!(entry(DType::F32, ReduceOp::BitXor), None);
    assert_eq!(scale_entry(DType::F64, DType::F16).as_deref(), Some("kolo_scale_f64_f16"));
    assert_eq!(scale_entry(DType::F16, DType::BF16), None);
    assert_eq!(scale_entry(DType::I32, DType::I32), None);
    assert_eq!(entries().len(), 8 * 7 + 6 * 5 + 5 + 12 + 1);
}

#[test]
fn a_grid_is_no_larger_than_the_gpu_or_the_buffer() {
    assert_eq!(grid(0, 132), Grid { blocks: 1, threads: THREADS });
    assert_eq!(grid(u64::from(THREADS) * 16, 132).blocks, 1);
    assert_eq!(grid(u64::from(THREADS) * 16 + 1, 132).blocks, 2);
    assert_eq!(grid(u64::MAX, 132).blocks, 132 * BLOCKS);
    assert_eq!(grid(8, 0).blocks, 1);
    assert!(source().contains(&format!("THREADS = {THREADS};")) && source().contains(&format!("BLOCKS = {BLOCKS};")));
}

// ---- NVRTC ----

fn nvrtc(what: &str) -> Option<&'static Nvrtc> {
    Nvrtc::find().map_err(|why| not_run(&format!("{what}: {why}"))).ok()
}

/// The resources that the machine code of one entry needs.
#[derive(Debug, PartialEq, Eq)]
struct Needs {
    registers: u32,
    /// Bytes of local memory per thread: spilled registers, and arrays that are not in registers.
    frame: u32,
}

/// Returns the entries of a cubin, which is a little-endian ELF file of 64 bits. The section
/// `.nv.info` lists properties: a byte for the form, a byte for the kind, two for the length of the
/// value, and the value. The values read here are pairs of a symbol and a number.
fn needs(cubin: &[u8]) -> BTreeMap<String, Needs> {
    const VALUE_OF_SYMBOL: u8 = 4;
    const FRAME_SIZE: u8 = 0x11;
    const REGISTERS: u8 = 0x2f;
    let number = |at: usize, bytes: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&cubin[at..at + bytes]);
        u64::from_le_bytes(word) as usize
    };
    let text = |at: usize| String::from_utf8(cubin[at..].iter().copied().take_while(|&byte| byte != 0).collect()).unwrap();
    assert_eq!(&cubin[..6], b"\x7fELF\x02\x01");
    let (headers, header_size, sections, names) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2), number(0x3e, 2));
    // The offsets of a section's name and content, and its length.
    let section = |i: usize| {
        let at = headers + i * header_size;
        (number(at, 4), number(at + 0x18, 8), number(at + 0x20, 8))
    };
    let find = |name: &str| {
        let found = (0..sections).map(section).find(|&(at, ..)| text(section(names).1 + at) == name);
        found.unwrap_or_else(|| panic!("a cubin has no section {name}"))
    };
    let (symbols, strings) = (find(".symtab").1, find(".strtab").1);
    let (_, start, length) = find(".nv.info");
    let mut found: BTreeMap<String, Needs> = BTreeMap::new();
    let mut at = start;
    while at < start + length {
        let (form, kind) = (cubin[at], cubin[at + 1]);
        if form == VALUE_OF_SYMBOL {
            // A symbol has 24 bytes. The first four are the offset of its name.
            let name = |at| text(strings + number(symbols + number(at, 4) * 24, 4));
            let value = || number(at + 8, 4) as u32;
            if kind == FRAME_SIZE || kind == REGISTERS {
                let needs = found.entry(name(at + 4)).or_insert(Needs { registers: 0, frame: 0 });
                *(if kind == REGISTERS { &mut needs.registers } else { &mut needs.frame }) = value();
            }
            at += 4 + number(at + 2, 2);
        } else {
            at += 4;
        }
    }
    found
}

#[test]
fn every_kernel_compiles_and_keeps_to_its_registers() {
    let Some(nvrtc) = nvrtc("registers and spills of the kernels") else { return };
    let architectures = if nvrtc.version() < (12, 8) {
        not_run("registers and spills of the kernels for sm_100: NVRTC is older than 12.8");
        &["sm_80", "sm_90"][..]
    } else {
        &["sm_80", "sm_90", "sm_100"]
    };
    for architecture in architectures {
        let started = std::time::Instant::now();
        let cubin = nvrtc.compile(&source(), &options(architecture)).unwrap_or_else(|log| panic!("{architecture}: {log}"));
        let needs = needs(&cubin);
        // A function that an entry calls (`$entry$part`) uses the registers of the entry.
        let (parts, whole): (BTreeMap<_, _>, BTreeMap<_, _>) = needs.iter().partition(|(name, _)| name.starts_with('$'));
        assert_eq!(whole.keys().map(|name| (*name).clone()).collect::<BTreeSet<_>>(), entries(), "{architecture}");
        for (entry, needs) in &whole {
            // The grid expects this many blocks to fit on a multiprocessor, which has 65536
            // registers.
            assert!((8..=65536 / (THREADS * BLOCKS)).contains(&needs.registers), "{architecture}: {entry} needs {needs:?}");
        }
        for (name, needs) in whole.iter().chain(&parts) {
            assert_eq!(needs.frame, 0, "{architecture}: {name} needs {needs:?}");
        }
        let registers = |word: &str| whole.iter().filter(|(name, _)| name.contains(word)).map(|(_, needs)| needs.registers).max();
        let most = ["_f32", "_f16", "_bf16", ""].map(registers);
        let (bytes, took) = (cubin.len(), started.elapsed());
        println!("{architecture}: {bytes} bytes in {took:.1?}; most registers of f32, f16, bf16, all: {most:?}");
    }
}

#[test]
fn a_kernel_that_spills_is_seen() {
    let Some(nvrtc) = nvrtc("a kernel that spills") else { return };
    let spills = "extern \"C\" __global__ void __launch_bounds__(1024, 2) spills(float *all, int n) {
        float held[64];
        for (int i = 0; i < 64; i++) held[i] = all[i * n];
        __syncthreads();
        for (int round = 0; round < n; round++)
            for (int i = 0; i < 64; i++) held[i] = held[i] * held[(i + 1) % 64] + all[round];
        for (int i = 0; i < 64; i++) all[i * n] = held[i];
    }";
    let needs = needs(&nvrtc.compile(spills, &options("sm_90")).unwrap());
    assert!(needs["spills"].frame > 0 && needs["spills"].registers == 32, "{needs:?}");
}

#[test]
fn the_log_says_why_a_program_does_not_compile() {
    let Some(nvrtc) = nvrtc("the log of a program that does not compile") else { return };
    let log = nvrtc.compile("#line 7 \"here.cu\"\nint f() { return there; }", &options("sm_90")).unwrap_err();
    assert!(log.contains("here.cu(7)") && log.contains("\"there\" is undefined"), "{log}");
    let log = nvrtc.compile("", &options("sm_1")).unwrap_err();
    assert!(log.contains("gpu-architecture"), "{log}");
}

// ---- The prebuilt code ----

fn prebuilt_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda-kernels/kolo.sm_80.ptx")
}

/// The digest of the sources, which the first line of the prebuilt code has.
fn source_hash() -> String {
    cache::name(&[&[&*source()], &OPTIONS[..]].concat()).trim_end_matches(".cubin").to_owned()
}

/// After a change of the kernels, run `KOLO_WRITE_PTX=1 cargo test --features cuda --lib --
/// prebuilt` with NVRTC 12.1 (the package `nvidia-cuda-nvrtc-cu12==12.1.*`; set `LD_LIBRARY_PATH`
/// to its folder). A driver refuses PTX of an NVRTC that is newer than the driver.
#[test]
fn the_prebuilt_code_is_that_of_the_source() {
    let first = format!("// {}: cuda-kernels for sm_80 by NVRTC 12.1. {HOW}\n", source_hash());
    if std::env::var_os("KOLO_WRITE_PTX").is_some() {
        let nvrtc = Nvrtc::find().unwrap();
        assert_eq!(nvrtc.version(), (12, 1), "older drivers refuse the PTX of a newer NVRTC");
        let ptx = String::from_utf8(nvrtc.compile(&source(), &options("compute_80")).unwrap()).unwrap();
        std::fs::write(prebuilt_path(), first.clone() + ptx.trim_end_matches('\0')).unwrap();
    }
    let ptx = std::fs::read_to_string(prebuilt_path()).unwrap();
    assert!(ptx.starts_with(&first), "cuda-kernels/kolo.sm_80.ptx is not made from these sources. {HOW}");
    assert!(ptx.contains("\n.version 8.1\n.target sm_80\n"));
    let names = ptx.match_indices(".entry ").map(|(at, word)| ptx[at + word.len()..].split('(').next().unwrap().to_owned());
    assert_eq!(names.collect::<BTreeSet<_>>(), entries());
    assert!(ptx.len() < 4_000_000);
    // The arithmetic is that of the host: no fused multiply-add, no flushed denormals, nothing
    // approximate, and no instruction that chooses the other of two zeros. Memory moves in lines.
    for wrong in ["fma.rn", ".ftz", ".approx", "div.full", "max.f", "min.f", "max.NaN", "min.NaN", ".local"] {
        assert!(!ptx.contains(wrong), "{wrong}");
    }
    for right in ["div.rn.f32", "div.rn.f64", "cvt.rn.f16.f32", "cvt.rn.f32.f64", "ld.global.v4", "st.global.v4.u32"] {
        assert!(ptx.contains(right), "{right}");
    }
}

const HOW: &str = "To make it: see the test the_prebuilt_code_is_that_of_the_source.";

#[test]
fn without_a_compiler_the_prebuilt_code_is_used() {
    for kernel in all_kernels() {
        let image = image_by(Err("NVRTC is not found".to_owned()), None, (9, 0), kernel).unwrap();
        assert_eq!(image.origin, Origin::Prebuilt { why: "NVRTC is not found".to_owned() });
        // This kernel, and no other.
        let ptx = str::from_utf8(&image.code).unwrap();
        assert!(ptx.ends_with('\0') && ptx.matches('\0').count() == 1 && ptx.starts_with("// "));
        assert!(ptx.contains(".target sm_80") && ptx.matches(".entry ").count() == 1);
        assert!(ptx.contains(&format!(".entry {}(", kernel.name())) && ptx.matches("\n}\n").count() == 1);
    }
    let error = image_by(Err("NVRTC is not found".to_owned()), None, (7, 5), SUM).unwrap_err();
    let Error::Unsupported { why, .. } = &error else { panic!("{error}") };
    assert!(why.contains("7.5") && why.contains("NVRTC is not found"), "{why}");
    assert_eq!(PREBUILT_FOR, (8, 0));
}

#[test]
fn code_that_the_driver_refuses_is_replaced_by_the_prebuilt_code() {
    let refused = || Error::Unsupported { what: "a program", why: "the driver is too old".to_owned() };
    let by_driver = |takes_cubin: bool, takes_ptx: bool| {
        let image = image_by(Ok(&FakeCompiler::new((12, 9))), None, (9, 0), SUM).unwrap();
        load_or_prebuilt(image, (9, 0), SUM, |image: &Image| {
            let takes = if image.origin == Origin::Compiled { takes_cubin } else { takes_ptx };
            if takes { Ok(image.origin.clone()) } else { Err(refused()) }
        })
    };
    assert_eq!(by_driver(true, true).unwrap(), Origin::Compiled);
    let Origin::Prebuilt { why } = by_driver(false, true).unwrap() else {
        panic!("the driver got compiled code that it refuses")
    };
    assert!(why.contains("too old"), "{why}");
    assert!(by_driver(false, false).unwrap_err().to_string().contains("too old"));
}

// ---- The cache ----

/// A fake compiler, which counts its calls.
struct FakeCompiler {
    version: (i32, i32),
    calls: AtomicUsize,
}

impl FakeCompiler {
    fn new(version: (i32, i32)) -> FakeCompiler {
        FakeCompiler { version, calls: AtomicUsize::new(0) }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Compiler for FakeCompiler {
    fn version(&self) -> (i32, i32) {
        self.version
    }

    fn compile(&self, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
        assert!(source.ends_with("}\nREDUCE(sum, Sum, f32, F32)\n"), "{}", &source[source.len() - 100..]);
        self.calls.fetch_add(1, Ordering::Relaxed);
        if self.version == (0, 0) { Err("it is broken".to_owned()) } else { Ok(options.join(" ").into_bytes()) }
    }
}

/// A folder for one test, which is removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kolo-cache-{name}-{}", std::process::id()));
        _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).map(|entries| entries.map(|entry| entry.unwrap().path()).collect());
        entries.unwrap_or_default()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_compiled_program_is_not_compiled_again() {
    let folder = Folder::new("again");
    let (compiler, newer) = (FakeCompiler::new((12, 1)), FakeCompiler::new((12, 9)));
    let get =
        |compiler: &FakeCompiler, architecture| image_by(Ok(compiler), Some(&folder.0.join("kolo")), architecture, SUM).unwrap();
    let (first, second) = (get(&compiler, (9, 0)), get(&compiler, (9, 0)));
    assert_eq!((first.origin, second.origin), (Origin::Compiled, Origin::Cached));
    assert_eq!(first.code, second.code);
    assert!(String::from_utf8_lossy(&first.code).ends_with("--gpu-architecture=sm_90"));
    // Another architecture and another compiler have their own files.
    assert_eq!(get(&compiler, (8, 0)).origin, Origin::Compiled);
    assert_eq!(get(&newer, (9, 0)).origin, Origin::Compiled);
    assert_eq!((compiler.calls(), newer.calls()), (2, 1));
    // Without a folder nothing is cached.
    assert_eq!(image_by(Ok(&compiler), None, (9, 0), SUM).unwrap().origin, Origin::Compiled);
}

#[test]
fn damaged_files_are_replaced() {
    let folder = Folder::new("damaged");
    let compiler = FakeCompiler::new((12, 1));
    let get = || image_by(Ok(&compiler), Some(&folder.0), (9, 0), SUM).unwrap();
    let good = get().code;
    let path = folder.files().remove(0);
    let whole = std::fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for damaged in [&[][..], &whole[..20], &whole[..whole.len() - 1], &flipped] {
        std::fs::write(&path, damaged).unwrap();
        let image = get();
        assert_eq!((image.origin, &image.code), (Origin::Compiled, &good));
        assert_eq!(get().origin, Origin::Cached, "the damaged file was not replaced");
    }
    assert_eq!(folder.files(), [path]);
}

#[test]
fn a_folder_that_cannot_be_written_costs_only_time() {
    let folder = Folder::new("file");
    std::fs::write(&folder.0, "not a folder").unwrap();
    let compiler = FakeCompiler::new((12, 1));
    for _ in 0..2 {
        assert_eq!(image_by(Ok(&compiler), Some(&folder.0), (9, 0), SUM).unwrap().origin, Origin::Compiled);
    }
    assert_eq!(compiler.calls(), 2);
    std::fs::remove_file(&folder.0).unwrap();
}

#[test]
fn many_ranks_at_once_get_the_same() {
    let folder = Folder::new("many");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for architecture in [(8, 0), (9, 0), (10, 0)].into_iter().cycle().take(60) {
                    // For the cache, each call is that of another process.
                    let image = image_by(Ok(&FakeCompiler::new((12, 1))), Some(&folder.0), architecture, SUM).unwrap();
                    assert!(image.code.ends_with(format!("sm_{}{}", architecture.0, architecture.1).as_bytes()));
                }
            });
        }
    });
    let left = folder.files();
    assert_eq!(left.iter().filter(|path| path.extension().is_some_and(|extension| extension == "cubin")).count(), 3, "{left:?}");
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn if_the_compiler_fails_the_prebuilt_code_is_used() {
    let folder = Folder::new("fails");
    let image = image_by(Ok(&FakeCompiler::new((0, 0))), Some(&folder.0), (9, 0), SUM).unwrap();
    assert_eq!(image.origin, Origin::Prebuilt { why: "NVRTC 0.0 for sm_90: it is broken".to_owned() });
    assert!(folder.files().is_empty());
}

/// NVRTC itself, with an empty folder. Each kernel is a program of its own.
#[test]
fn nvrtc_fills_the_cache() {
    let Some(nvrtc) = nvrtc("the cache of programs that NVRTC compiles") else { return };
    let folder = Folder::new("nvrtc");
    for kernel in all_kernels() {
        let get = || image_by(Ok(nvrtc), Some(&folder.0), (9, 0), kernel).unwrap();
        let (first, second) = (get(), get());
        assert_eq!((first.origin, second.origin), (Origin::Compiled, Origin::Cached), "{kernel:?}");
        // A part of an entry is named `$entry$part`.
        let entries = needs(&first.code).into_keys().filter(|name| !name.starts_with('$'));
        assert!(first.code == second.code && entries.eq([kernel.name()]), "{kernel:?}");
    }
    assert_eq!(folder.files().len(), all_kernels().count());
    assert!(image::compiler().is_ok_and(|name| name.starts_with("NVRTC 1")));
}

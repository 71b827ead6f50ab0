//! The arithmetic of the kernels without a GPU: g++ compiles them as C++, an entry does the work of
//! one thread after the other, and the results are compared bit by bit with those of `reduce`. The
//! tests of NVIDIA's compiler are in `compile`.

mod compile;
mod scale;

use std::ffi::{CString, c_void};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::image::{ENTRIES, WITHOUT_ENTRIES};
use super::{LINE, Parameter, TakeParameter, entry};
use crate::cuda::device::{MOST_PARTS as MOST, MovesAt};
use crate::cuda::moves::{KernelTask, Move, Moves};
use crate::float8::{f8e4m3, f8e5m2};
use crate::reduce::Kernel;
use crate::types::{DType, ReduceOp, mix};

/// The program with all entries.
fn source() -> String {
    [WITHOUT_ENTRIES, ENTRIES].concat()
}

/// The program with these reductions alone: all of them take long to compile.
fn source_of(reductions: impl IntoIterator<Item = (DType, ReduceOp)>) -> String {
    let kernels = reductions.into_iter().map(|(dtype, redop)| super::Kernel::Reduce(dtype, redop));
    let entries: String = [super::Kernel::TakeMoves].into_iter().chain(kernels).map(super::Kernel::line).collect();
    [WITHOUT_ENTRIES, &entries].concat()
}

/// Prints what was not tested, also where the output of passing tests is not shown. With
/// `KOLO_TEST_NVRTC` set, this fails.
fn not_run(what: &str) {
    assert!(std::env::var_os("KOLO_TEST_NVRTC").is_none(), "not tested although KOLO_TEST_NVRTC is set: {what}");
    std::io::Write::write_all(&mut std::io::stderr(), format!("NOT RUN: {what}\n").as_bytes()).unwrap();
}

// ---- The kernels as a shared library ----

/// The library. The addresses of its entries' parameters are pointers of this process.
struct Host {
    library: *mut c_void,
    place: extern "C" fn(u32, u32, u32, u32),
}

// SAFETY: the handle is never closed, and the function writes only thread-local variables.
unsafe impl Send for Host {}
// SAFETY: as for `Send`.
unsafe impl Sync for Host {}

/// Entries of this test alone, which convert between f32 and the halves as the reductions do.
const CONVERSIONS: &str = r#"
extern "C" void kolo_test_widen(const u16 *from, float *of_f16, float *of_bf16, u64 count) {
    for (u64 i = 0; i < count; i++) {
        of_f16[i] = F16::widen(from[i]);
        of_bf16[i] = BF16::widen(from[i]);
    }
}
extern "C" void kolo_test_narrow(const float *from, u16 *to_f16, u16 *to_bf16, u64 count) {
    for (u64 i = 0; i < count; i++) {
        to_f16[i] = F16::narrow(from[i]);
        to_bf16[i] = BF16::narrow(from[i]);
    }
}
"#;

/// A small grid, for which short buffers are long.
const BLOCKS: u32 = 2;
const THREADS: u32 = 5;

impl Host {
    fn get() -> Option<&'static Host> {
        static HOST: OnceLock<Option<Host>> = OnceLock::new();
        let host = HOST.get_or_init(|| Host::build(&[&*source(), CONVERSIONS].concat()));
        if host.is_none() {
            not_run("the kernels' arithmetic: there is no g++");
        }
        host.as_ref()
    }

    fn build(source: &str) -> Option<Host> {
        Command::new("g++").arg("--version").stdout(Stdio::null()).status().ok()?;
        static BUILT: AtomicUsize = AtomicUsize::new(0);
        let number = BUILT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("kolo-kernels-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (program, library) = (folder.join("kernels.cc"), folder.join("kernels.so"));
        std::fs::write(&program, source).unwrap();
        let header = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda-kernels/host.h");
        let options = "-std=c++17 -O1 -shared -fPIC -ffp-contract=off -fno-strict-aliasing -Wall -Wno-unknown-pragmas";
        // The sanitizer ends the tests with a signal at an overflow of signed integers, and at an
        // access that is not aligned: a GPU fails there, but this processor may not.
        let sanitizer = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"];
        let mut compiler = Command::new("g++");
        compiler.args(options.split(' ')).args(sanitizer).arg("-include").args([&header, &program]).arg("-o").arg(&library);
        let output = compiler.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        std::fs::remove_dir_all(&folder).unwrap();
        // SAFETY: the function is in `host.h` and has this type.
        let place =
            unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u32, u32, u32, u32)>(symbol(library, "kolo_host_place")) };
        Some(Host { library, place })
    }

    /// Runs an entry on a small grid, the threads in order or backwards: no thread may depend on
    /// another.
    fn run<P: Copy>(&self, name: &str, parameter: P, is_backwards: bool) {
        // SAFETY: an entry takes one parameter by value, and the caller passes the type that this
        // entry takes.
        let entry = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(P)>(symbol(self.library, name)) };
        for i in 0..BLOCKS * THREADS {
            let i = if is_backwards { BLOCKS * THREADS - 1 - i } else { i };
            (self.place)(i % THREADS, THREADS, i / THREADS, BLOCKS);
            entry(parameter);
        }
    }
}

impl Host {
    /// Converts elements by an entry of [`CONVERSIONS`]. Returns the results for f16 and for bf16.
    fn convert<F: Copy, T: Copy + Default>(&self, name: &str, from: &[F]) -> [Vec<T>; 2] {
        type Conversion<F, T> = extern "C" fn(*const F, *mut T, *mut T, u64);
        // SAFETY: the entry of this name has this type.
        let convert = unsafe { std::mem::transmute::<*mut c_void, Conversion<F, T>>(symbol(self.library, name)) };
        let [mut f16, mut bf16] = [vec![T::default(); from.len()], vec![T::default(); from.len()]];
        convert(from.as_ptr(), f16.as_mut_ptr(), bf16.as_mut_ptr(), from.len() as u64);
        [f16, bf16]
    }
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let c_name = CString::new(name).unwrap();
    // SAFETY: the library is open.
    let symbol = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    assert!(!symbol.is_null(), "the library has no {name}");
    symbol
}

// ---- Buffers ----

/// Memory that begins at a line, with room before and after the part that is used.
#[derive(Clone)]
struct Buffer {
    lines: Vec<u128>,
    /// Bytes before the part that is used.
    offset: usize,
}

const ROOM: usize = 64;
const UNTOUCHED: u128 = u128::from_ne_bytes([0xa5; 16]);

impl Buffer {
    fn new(offset: usize, bytes: usize) -> Buffer {
        Buffer { lines: vec![UNTOUCHED; (2 * ROOM + offset + bytes).div_ceil(16)], offset: ROOM + offset }
    }

    fn address(&mut self) -> u64 {
        self.lines.as_mut_ptr().addr() as u64 + self.offset as u64
    }

    fn pointer(&mut self) -> *mut u8 {
        // SAFETY: the offset is within the vector.
        unsafe { self.lines.as_mut_ptr().cast::<u8>().add(self.offset) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: these are the bytes of the vector, all initialised.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }

    /// Fills the buffer with random elements. Many are special: NaN with payloads, infinities,
    /// zeros of both signs, denormals.
    fn fill(&mut self, dtype: DType, count: usize, seed: u64) {
        let offset = self.offset;
        for (i, element) in self.bytes()[offset..][..count * dtype.size()].chunks_exact_mut(dtype.size()).enumerate() {
            let word = mix(seed, i as u64);
            let bits = (word >> 8) & (u64::MAX >> (64 - 8 * dtype.size()));
            let number = ((word >> 8) as i16) as f64 / 256.0;
            let ordinary = |special: u64, number: u64| if word.is_multiple_of(4) { special } else { number };
            let bits = match dtype {
                DType::Bool => bits & 1,
                DType::F16 => ordinary(bits, f16::from_f64(number).to_bits().into()),
                DType::BF16 => ordinary(bits, bf16::from_f64(number).to_bits().into()),
                DType::F32 => ordinary(special(word, bits, 23, 0xff), (number as f32).to_bits().into()),
                DType::F64 => ordinary(special(word, bits, 52, 0x7ff), number.to_bits()),
                _ => bits,
            };
            element.copy_from_slice(&bits.to_le_bytes()[..dtype.size()]);
        }
    }

    /// Returns the elements as bytes, and the bytes around them. With `merges_nan` all NaN have the
    /// same bits: a computed NaN keeps the payload of one operand, and the compiler chooses which.
    fn content(&mut self, dtype: DType, count: usize, merges_nan: bool) -> Vec<u8> {
        let offset = self.offset;
        let mut content = self.bytes().to_vec();
        if merges_nan && dtype.is_float() {
            for element in content[offset..][..count * dtype.size()].chunks_exact_mut(dtype.size()) {
                let mut bits = [0; 8];
                bits[..dtype.size()].copy_from_slice(element);
                let bits = u64::from_le_bytes(bits);
                let is_nan = match dtype {
                    DType::F16 => f16::from_bits(bits as u16).is_nan(),
                    DType::BF16 => bf16::from_bits(bits as u16).is_nan(),
                    DType::F8E4M3 => f8e4m3::from_bits(bits as u8).is_nan(),
                    DType::F8E5M2 => f8e5m2::from_bits(bits as u8).is_nan(),
                    DType::F32 => f32::from_bits(bits as u32).is_nan(),
                    _ => f64::from_bits(bits).is_nan(),
                };
                if is_nan {
                    element.fill(0xff);
                }
            }
        }
        content
    }
}

/// Returns the bits of a special number: random bits hardly ever have the largest or the smallest
/// exponent.
fn special(word: u64, bits: u64, mantissa: u32, exponent: u64) -> u64 {
    match word >> 2 & 7 {
        0 => bits | exponent << mantissa,
        1 => bits & !(exponent << mantissa),
        2 => exponent << mantissa | (bits & 1) << (mantissa + exponent.count_ones()),
        3 => (bits & 1) << (mantissa + exponent.count_ones()),
        _ => bits,
    }
}

// ---- Reductions ----

/// Where a reduction writes its results.
#[derive(Clone, Copy, Debug)]
enum Targets {
    /// Into one buffer that is not a source: one-shot.
    Apart,
    /// Into the first source.
    First,
    /// Into all sources and one more: two-shot.
    All,
}

/// Runs one reduction with the kernel and on the host, and returns the first difference. Buffers
/// begin `offset` elements after a line, one of them `shift` elements later.
fn difference(
    host: &Host,
    (dtype, redop): (DType, ReduceOp),
    (parts, count): (usize, usize),
    (offset, shift): (usize, usize),
    to: Targets,
) -> Option<String> {
    let seed = mix(mix(parts as u64, count as u64), dtype as u64 * 64 + redop as u64);
    let size = dtype.size();
    let buffers: Vec<Buffer> = (0..parts + 1)
        .map(|part| {
            let mut buffer = Buffer::new((offset + if part + 1 == parts { shift } else { 0 }) * size, count * size);
            buffer.fill(dtype, count, mix(seed, part as u64));
            buffer
        })
        .collect();
    let mut expected = buffers.clone();
    let pointers: Vec<*const u8> = expected[..parts].iter_mut().map(|part| part.pointer().cast_const()).collect();
    let kernel = Kernel::new(dtype, redop).unwrap();
    let into = if matches!(to, Targets::First) { 0 } else { parts };
    // SAFETY: all are buffers of `count` elements. The target is one of them or overlaps none.
    unsafe { kernel.fold(&pointers, expected[into].pointer(), count, Some(parts)) };
    if matches!(to, Targets::All) {
        for i in 0..parts {
            let result = expected[parts].pointer();
            // SAFETY: as above, and the buffers do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(result, expected[i].pointer(), count * size) };
        }
    }
    // Reductions that choose an operand keep its bits. The others compute.
    let chooses = parts == 1 || matches!(redop, ReduceOp::Max | ReduceOp::Min);
    let merges_nan = !(chooses && matches!(dtype, DType::F32 | DType::F64));
    for is_backwards in [false, true] {
        let mut buffers = buffers.clone();
        let addresses: Vec<u64> = buffers.iter_mut().map(Buffer::address).collect();
        let targets = match to {
            Targets::Apart => &addresses[parts..],
            Targets::First => &addresses[..1],
            Targets::All => &addresses[..],
        };
        let only = Move::new(&addresses[..parts], targets, count, parts as u32).beginning_with(shift + count);
        // Backwards, as the second of a list whose first moves nothing.
        let mut list = vec![0u64; Moves::bytes(2) / 8];
        let nothing = Move::new(&addresses[..1], &addresses[..1], 0, 1);
        // SAFETY: there is room for two.
        unsafe { Moves::write(list.as_mut_ptr().cast(), KernelTask::of(vec![nothing, only])) };
        let mut copy = vec![0u64; list.len()];
        let [on_device, on_host] = [copy.as_mut_ptr(), list.as_mut_ptr()].map(|at| at.expose_provenance() as u64);
        let moves = MovesAt { on_device, on_host };
        host.run("kolo_take_moves", TakeParameter::of(moves), false);
        let listed = Parameter::at(moves);
        host.run(&entry(dtype, redop).unwrap(), if is_backwards { listed } else { Parameter::of(only) }, is_backwards);
        for (i, (buffer, expected)) in buffers.iter_mut().zip(&mut expected).enumerate() {
            let (got, expected) = (buffer.content(dtype, count, merges_nan), expected.content(dtype, count, merges_nan));
            if let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) {
                let what =
                    format!("{redop} of {parts} x {count} {dtype} at {offset}, one {shift} later, into {to:?}, buffer {i}");
                let element = (at as isize - buffer.offset as isize) / size as isize;
                return Some(format!("{what}: backwards {is_backwards}, first different at element {element}"));
            }
        }
    }
    None
}

fn every_reduction() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = DType::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&redop| (dtype, redop)));
    all.filter(|&(dtype, redop)| redop.applies_to(dtype))
}

#[test]
fn entries_compute_the_same_as_the_host() {
    let Some(host) = Host::get() else { return };
    let mut compared = 0;
    for (dtype, redop) in every_reduction() {
        let lanes = LINE as usize / dtype.size();
        // No elements, less than a head, lines and a rest, and several rounds of all threads.
        for count in [0, 1, lanes - 1, lanes, 5 * lanes + 3, 130 * lanes + 1] {
            for (parts, to) in
                [(1, Targets::Apart), (2, Targets::Apart), (2, Targets::All), (3, Targets::First), (5, Targets::All)]
            {
                // Buffers on lines, congruent beside lines, and not congruent.
                for (offset, shift) in [(0, 0), (lanes - 1, 0), (1, lanes), (0, 1)] {
                    assert_eq!(difference(host, (dtype, redop), (parts, count), (offset, shift), to), None);
                    compared += 1;
                }
            }
        }
        assert_eq!(difference(host, (dtype, redop), (MOST, 40 * lanes + 1), (1, 0), Targets::Apart), None);
    }
    assert!(compared > 9000, "{compared}");
}

#[test]
fn wrong_kernels_are_noticed() {
    if Host::get().is_none() {
        return;
    }
    let mutations = [
        ("a < b || a != a ?", "a < b ?", DType::F32, ReduceOp::Min),
        ("0xfff + (magnitude >> 13 & 1)", "0x1000", DType::F16, ReduceOp::Sum),
        ("r.divisor > 1", "r.divisor > 3", DType::F64, ReduceOp::Average),
        ("bits + 0x7fff + (bits >> 16 & 1)", "bits + 0x8000", DType::BF16, ReduceOp::Product),
        ("(1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1)", "(1u << (DROPPED - 1))", DType::F8E4M3, ReduceOp::Sum),
        ("float_of((120u + 127) << 23)", "float_of((121u + 127) << 23)", DType::F8E4M3, ReduceOp::Product),
        ("return a ^ b;", "return a ^ b ^ (threads() > 1);", DType::U16, ReduceOp::BitXor),
    ];
    let unchanged = (DType::I64, ReduceOp::Sum);
    let reductions = mutations.iter().map(|&(_, _, dtype, redop)| (dtype, redop)).chain([unchanged]);
    let mutant = mutations.iter().fold(source_of(reductions), |source, (right, wrong, ..)| {
        assert!(source.contains(right), "{right}");
        source.replace(right, wrong)
    });
    let host = Host::build(&mutant).unwrap();
    for (right, _, dtype, redop) in mutations {
        assert!(
            difference(&host, (dtype, redop), (2, 2000), (1, 0), Targets::Apart).is_some(),
            "no test notices a change of {right}"
        );
    }
    // Kernels that were not changed are still right.
    assert_eq!(difference(&host, unchanged, (2, 2000), (1, 0), Targets::Apart), None);
    // Here the kernels do not reach the elements after the last line.
    let of_max = (DType::U32, ReduceOp::Max);
    let (source, right) = (source_of([of_max]), "i < inner.head ? i : i + inside");
    assert!(source.contains(right), "{right}");
    let host = Host::build(&source.replace(right, "i")).unwrap();
    assert!(difference(&host, of_max, (2, 2004), (1, 0), Targets::Apart).is_some());
}

#[test]
fn any_byte_but_zero_is_true() {
    let Some(host) = Host::get() else { return };
    for (redop, expected) in [(ReduceOp::Max, [0, 1, 1, 1]), (ReduceOp::BitAnd, [0, 0, 0, 1]), (ReduceOp::BitXor, [0, 1, 1, 0])] {
        let (left, right, mut into) = ([0u8, 0, 255, 4], [0u8, 2, 0, 8], [9u8; 4]);
        let address = |bytes: &[u8; 4]| bytes.as_ptr().expose_provenance() as u64;
        let target = into.as_mut_ptr().expose_provenance() as u64;
        let both = Move::new(&[address(&left), address(&right)], &[target], 4, 1);
        host.run(&entry(DType::Bool, redop).unwrap(), Parameter::of(both), false);
        assert_eq!(into, expected, "{redop}");
    }
}

#[test]
fn an_average_that_is_not_finished_is_a_sum() {
    let Some(host) = Host::get() else { return };
    let (left, right, mut into) = ([1f32, 2.0], [2f32, 5.0], [0f32; 2]);
    let address = |numbers: &[f32; 2]| numbers.as_ptr().expose_provenance() as u64;
    let sources = [address(&left), address(&right)];
    let targets = [into.as_mut_ptr().expose_provenance() as u64];
    let average = |divisor| {
        let both = Move::new(&sources, &targets, 2, divisor);
        host.run(&entry(DType::F32, ReduceOp::Average).unwrap(), Parameter::of(both), false);
    };
    average(1);
    assert_eq!(into, [3.0, 7.0]);
    average(3);
    assert_eq!(into, [1.0, 7.0 / 3.0]);
}

#[test]
fn halves_convert_as_on_the_host() {
    let Some(host) = Host::get() else { return };
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let [widened, widened_bf] = host.convert::<u16, f32>("kolo_test_widen", &every);
    for &half in &every {
        let (f16, bf16) = (f16::from_bits(half).to_f32(), bf16::from_bits(half).to_f32());
        let (got, got_bf) = (widened[usize::from(half)], widened_bf[usize::from(half)]);
        assert!(got.to_bits() == f16.to_bits() || got.is_nan() && f16.is_nan(), "f16 {half:#x}: {got}");
        assert!(got_bf.to_bits() == bf16.to_bits() || got_bf.is_nan() && bf16.is_nan(), "bf16 {half:#x}: {got_bf}");
    }
    // Every sign, exponent and upper part of a fraction, with lower parts on both sides of a tie
    // and on it.
    let mut numbers: Vec<u32> =
        (0..1 << 19).flat_map(|upper| [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(|lower| upper << 13 | lower)).collect();
    numbers.extend((0..1 << 16).flat_map(|upper| [0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| upper << 16 | lower)));
    // Ties between two denormal halves, and their neighbours.
    let ties = (0..1024).map(|place| ((place as f32 + 0.5) / 16_777_216.0).to_bits());
    numbers.extend(ties.flat_map(|tie| [tie - 1, tie, tie + 1].into_iter().flat_map(|bits| [bits, bits | 1 << 31])));
    let numbers: Vec<f32> = numbers.into_iter().map(f32::from_bits).collect();
    let [narrowed, narrowed_bf] = host.convert::<f32, u16>("kolo_test_narrow", &numbers);
    for (i, &number) in numbers.iter().enumerate() {
        let (f16, bf16) = (f16::from_f32(number).to_bits(), bf16::from_f32(number).to_bits());
        assert_eq!(narrowed[i], f16, "{number} ({:#x}) to f16", number.to_bits());
        assert_eq!(narrowed_bf[i], bf16, "{number} ({:#x}) to bf16", number.to_bits());
    }
}

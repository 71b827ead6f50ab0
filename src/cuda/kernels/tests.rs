//! The kernels' arithmetic without a GPU: g++ compiles them as C++, each entry does the work of one thread after the other, and
//! the results are compared with those of `reduce`, bit by bit. What only NVIDIA's compiler sees is in `compile`.

mod compile;
mod map;

use std::ffi::{CString, c_void};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::image::SOURCE;
use super::{LINE, MOST, Reduction, entry};
use crate::reduce::Kernel;
use crate::types::{DType, ReduceOp, mix};

/// Says that something was not tested, also where what passing tests print is not shown. Where it must be, this fails.
fn not_run(what: &str) {
    assert!(std::env::var_os("KOLO_TEST_NVRTC").is_none(), "{what}, though KOLO_TEST_NVRTC says that it must be");
    std::io::Write::write_all(&mut std::io::stderr(), format!("NOT RUN: {what}\n").as_bytes()).unwrap();
}

// ---- The kernels as a shared library ----

/// Addresses are pointers here.
struct Host {
    library: *mut c_void,
    place: extern "C" fn(u32, u32, u32, u32),
}

// SAFETY: a handle that is never closed, and a function that writes what is the thread's own.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// Few threads, so that short buffers are long for them.
const BLOCKS: u32 = 2;
const THREADS: u32 = 5;

impl Host {
    fn get() -> Option<&'static Host> {
        static HOST: OnceLock<Option<Host>> = OnceLock::new();
        let host = HOST.get_or_init(|| Host::build(SOURCE));
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
        // An access that is not aligned, at which a GPU fails and this processor may not, ends the tests with a signal, as does an
        // overflow of signed integers.
        let sanitizer = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"];
        let mut compiler = Command::new("g++");
        compiler.args(options.split(' ')).args(sanitizer).arg("-include").args([&header, &program]).arg("-o").arg(&library);
        let output = compiler.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a library of ours, without initialisers.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null());
        std::fs::remove_dir_all(&folder).unwrap();
        // SAFETY: a function of `host.h`, which has this type.
        let place =
            unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u32, u32, u32, u32)>(symbol(library, "kolo_host_place")) };
        Some(Host { library, place })
    }

    /// Runs the entry of this name as a small grid, backwards if asked to: no thread may depend on another.
    fn run<P: Copy>(&self, name: &str, parameter: P, is_backwards: bool) {
        // SAFETY: the entries take one parameter by value, and the caller gives the one that this entry takes.
        let entry = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(P)>(symbol(self.library, name)) };
        for i in 0..BLOCKS * THREADS {
            let i = if is_backwards { BLOCKS * THREADS - 1 - i } else { i };
            (self.place)(i % THREADS, THREADS, i / THREADS, BLOCKS);
            entry(parameter);
        }
    }
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let c_name = CString::new(name).unwrap();
    // SAFETY: the library is open.
    let symbol = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    assert!(!symbol.is_null(), "{name} is not there");
    symbol
}

// ---- Buffers ----

/// Memory whose first byte begins a line, with room around what is used.
#[derive(Clone)]
struct Buffer {
    lines: Vec<u128>,
    /// Bytes before what is used.
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
        // SAFETY: within the vector.
        unsafe { self.lines.as_mut_ptr().cast::<u8>().add(self.offset) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: all of the vector, whose every byte is one.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }

    /// Random elements, many of them special: NaN with payloads, infinities, zeros of both signs, denormals.
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

    /// The elements as bits, and what is around them. If asked to, all NaN are the same: those that were computed keep one
    /// operand's payload, and the compiler chooses which is the first operand.
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

/// Bits of a number that is seldom met: random ones have hardly ever the largest exponent or the smallest.
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

/// Where the results go.
#[derive(Clone, Copy, Debug)]
enum Targets {
    /// Into one buffer that is no source: one-shot.
    Apart,
    /// Into the first source.
    First,
    /// Into all sources and one more: two-shot.
    All,
}

/// One reduction on both sides, and where they differ. Buffers begin `offset` elements after a line, one of them `shift` elements
/// later.
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
    // SAFETY: all are buffers of `count` elements; the target is one of them or apart.
    unsafe { kernel.fold(&pointers, expected[into].pointer(), count, Some(parts)) };
    if matches!(to, Targets::All) {
        for i in 0..parts {
            let result = expected[parts].pointer();
            // SAFETY: as above, and the buffers are apart.
            unsafe { std::ptr::copy_nonoverlapping(result, expected[i].pointer(), count * size) };
        }
    }
    // Choosing keeps bits; all else computes.
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
        let reduction = Reduction::new(&addresses[..parts], targets, count, parts as u32);
        host.run(&entry(dtype, redop).unwrap(), reduction, is_backwards);
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
fn entries_compute_what_the_host_does() {
    let Some(host) = Host::get() else { return };
    let mut compared = 0;
    for (dtype, redop) in every_reduction() {
        let lanes = LINE as usize / dtype.size();
        // Nothing, less than a head, lines and a rest, and several rounds of all threads.
        for count in [0, 1, lanes - 1, lanes, 5 * lanes + 3, 130 * lanes + 1] {
            for (parts, to) in
                [(1, Targets::Apart), (2, Targets::Apart), (2, Targets::All), (3, Targets::First), (5, Targets::All)]
            {
                // On lines; in the same way beside them; each in its own way.
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
fn wrong_kernels_are_seen() {
    if Host::get().is_none() {
        return;
    }
    let mutations = [
        ("a < b || a != a ?", "a < b ?", DType::F32, ReduceOp::Min),
        ("0xfff + (magnitude >> 13 & 1)", "0x1000", DType::F16, ReduceOp::Sum),
        ("r.divisor > 1", "r.divisor > 3", DType::F64, ReduceOp::Average),
        ("bits + 0x7fff + (bits >> 16 & 1)", "bits + 0x8000", DType::BF16, ReduceOp::Product),
        ("return a ^ b;", "return a ^ b ^ (threads() > 1);", DType::U16, ReduceOp::BitXor),
    ];
    let mutant = mutations.iter().fold(SOURCE.to_owned(), |source, (right, wrong, ..)| {
        assert!(source.contains(right), "{right}");
        source.replace(right, wrong)
    });
    let host = Host::build(&mutant).unwrap();
    for (right, _, dtype, redop) in mutations {
        assert!(
            difference(&host, (dtype, redop), (2, 2000), (1, 0), Targets::Apart).is_some(),
            "without {right} nothing changes"
        );
    }
    // What was not changed is as right as before.
    assert_eq!(difference(&host, (DType::I64, ReduceOp::Sum), (2, 2000), (1, 0), Targets::Apart), None);
    // Elements after the last line are not reached.
    let host = Host::build(&SOURCE.replace("i < inner.head ? i : i + inside", "i")).unwrap();
    assert!(difference(&host, (DType::U32, ReduceOp::Max), (2, 2004), (1, 0), Targets::Apart).is_some());
}

#[test]
fn any_byte_but_zero_is_true() {
    let Some(host) = Host::get() else { return };
    for (redop, expected) in [(ReduceOp::Max, [0, 1, 1, 1]), (ReduceOp::BitAnd, [0, 0, 0, 1]), (ReduceOp::BitXor, [0, 1, 1, 0])] {
        let (left, right, mut into) = ([0u8, 0, 255, 4], [0u8, 2, 0, 8], [9u8; 4]);
        let address = |bytes: &[u8; 4]| bytes.as_ptr().expose_provenance() as u64;
        let target = into.as_mut_ptr().expose_provenance() as u64;
        host.run(&entry(DType::Bool, redop).unwrap(), Reduction::new(&[address(&left), address(&right)], &[target], 4, 1), false);
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
    host.run(&entry(DType::F32, ReduceOp::Average).unwrap(), Reduction::new(&sources, &targets, 2, 1), false);
    assert_eq!(into, [3.0, 7.0]);
    host.run(&entry(DType::F32, ReduceOp::Average).unwrap(), Reduction::new(&sources, &targets, 2, 3), false);
    assert_eq!(into, [1.0, 7.0 / 3.0]);
}

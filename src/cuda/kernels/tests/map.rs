//! Scaling and conversion, as in the tests of reductions.

use half::{bf16, f16};

use super::super::{Mapping, cast_entry, scale_entry};
use super::{Buffer, Host};
use crate::types::{DType, mix};

/// Where a source and a target begin, in elements after a line: on lines, with a head before them, and in different ways.
const PLACES: [(usize, usize); 3] = [(0, 0), (3, 3), (1, 0)];

/// Runs an entry from a buffer to another, or in place.
fn mapped<F: Copy, T: Copy + Default>(
    host: &Host,
    name: &str,
    values: &[F],
    (source, target): (usize, usize),
    factor: f64,
) -> Vec<T> {
    let mut from = Buffer::new(source * size_of::<F>(), size_of_val(values));
    let mut to = Buffer::new(target * size_of::<T>(), values.len() * size_of::<T>());
    let in_place = name.starts_with("kolo_scale");
    // SAFETY: there is room for them, and they are numbers.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), from.pointer().cast(), values.len()) };
    let target = if in_place { from.address() } else { to.address() };
    host.run(name, Mapping::new(from.address(), target, values.len(), factor), false);
    let mut results = vec![T::default(); values.len()];
    let buffer = if in_place { &mut from } else { &mut to };
    // SAFETY: as above; every pattern of bits is a number.
    unsafe { std::ptr::copy_nonoverlapping(buffer.pointer().cast(), results.as_mut_ptr(), values.len()) };
    let (before, after) = (buffer.offset, buffer.offset + values.len() * size_of::<T>());
    let bytes = buffer.bytes();
    assert!(bytes[..before].iter().chain(&bytes[after..]).all(|&byte| byte == 0xa5), "{name} writes beside its target");
    results
}

#[test]
fn halves_convert_as_on_the_host() {
    let Some(host) = Host::get() else { return };
    let every: Vec<u16> = (0..=u16::MAX).collect();
    // Every sign, exponent and upper part of a fraction, with lower parts on both sides of a tie and on it.
    let mut numbers: Vec<u32> =
        (0..1 << 19).flat_map(|upper| [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(|lower| upper << 13 | lower)).collect();
    numbers.extend((0..1 << 16).flat_map(|upper| [0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| upper << 16 | lower)));
    // Ties between two denormal halves, and their neighbours.
    let ties = (0..1024).map(|place| ((place as f32 + 0.5) / 16_777_216.0).to_bits());
    numbers.extend(ties.flat_map(|tie| [tie - 1, tie, tie + 1].into_iter().flat_map(|bits| [bits, bits | 1 << 31])));
    let numbers: Vec<f32> = numbers.into_iter().map(f32::from_bits).collect();
    for place in PLACES {
        let [widened, widened_bf] = [DType::F16, DType::BF16]
            .map(|half| mapped::<u16, f32>(host, &cast_entry(half, DType::F32).unwrap(), &every, place, 1.0));
        for &half in &every {
            let (f16, bf16) = (f16::from_bits(half).to_f32(), bf16::from_bits(half).to_f32());
            let (got, got_bf) = (widened[usize::from(half)], widened_bf[usize::from(half)]);
            assert!(got.to_bits() == f16.to_bits() || got.is_nan() && f16.is_nan(), "f16 {half:#x}: {got}");
            assert!(got_bf.to_bits() == bf16.to_bits() || got_bf.is_nan() && bf16.is_nan(), "bf16 {half:#x}: {got_bf}");
        }
        let [narrowed, narrowed_bf] = [DType::F16, DType::BF16]
            .map(|half| mapped::<f32, u16>(host, &cast_entry(DType::F32, half).unwrap(), &numbers, place, 1.0));
        for (i, &number) in numbers.iter().enumerate() {
            let (f16, bf16) = (f16::from_f32(number).to_bits(), bf16::from_f32(number).to_bits());
            assert_eq!(narrowed[i], f16, "{number} ({:#x}) to f16", number.to_bits());
            assert_eq!(narrowed_bf[i], bf16, "{number} ({:#x}) to bf16", number.to_bits());
        }
    }
}

#[test]
fn scaling_multiplies_in_the_accumulator() {
    let Some(host) = Host::get() else { return };
    let numbers: Vec<f64> = (0..1000).map(|i| (mix(7, i) as i32) as f64 / 65536.0).collect();
    let factor = 1.0 / 3.0;
    for place in PLACES {
        let got: Vec<f64> = mapped(host, &scale_entry(DType::F64).unwrap(), &numbers, place, factor);
        assert!(got.iter().zip(&numbers).all(|(&got, &number)| got == number * factor));
        let singles: Vec<f32> = numbers.iter().map(|&number| number as f32).collect();
        let got: Vec<f32> = mapped(host, &scale_entry(DType::F32).unwrap(), &singles, place, factor);
        assert!(got.iter().zip(&singles).all(|(&got, &number)| got == number * factor as f32));
        let halves: Vec<f16> = singles.iter().map(|&number| f16::from_f32(number)).collect();
        let got: Vec<f16> = mapped(host, &scale_entry(DType::F16).unwrap(), &halves, place, factor);
        assert!(got.iter().zip(&halves).all(|(&got, half)| got == f16::from_f32(half.to_f32() * factor as f32)));
        let halves: Vec<bf16> = singles.iter().map(|&number| bf16::from_f32(number)).collect();
        let got: Vec<bf16> = mapped(host, &scale_entry(DType::BF16).unwrap(), &halves, place, factor);
        assert!(got.iter().zip(&halves).all(|(&got, half)| got == bf16::from_f32(half.to_f32() * factor as f32)));
        // A gradient is divided by the world size as it is converted.
        let got: Vec<f16> = mapped(host, &cast_entry(DType::F32, DType::F16).unwrap(), &singles, place, factor);
        assert!(got.iter().zip(&singles).all(|(&got, &number)| got == f16::from_f32(number * factor as f32)));
    }
}

//! Every kernel, for every set of instructions that this processor has, against one element at a
//! time in the obvious arithmetic.

use half::{bf16, f16};
use proptest::prelude::*;

use super::level::Level;
use super::{Kernel, copy, normalise_bools, reduce_local};
use crate::error::{ArgumentError, Error};
use crate::float8::{f8e4m3, f8e5m2};
use crate::sys::every_case;
use crate::types::{DType, Element, ReduceOp};

/// One element of the result, in the obvious arithmetic.
trait Obvious: Element {
    fn from_bits(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn fold(parts: &[Self], redop: ReduceOp) -> Self;
}

macro_rules! obvious_integers {
    ($($type:ty),*) => {$(
        impl Obvious for $type {
            fn from_bits(bits: u64) -> Self { bits as $type }
            fn bits(self) -> u64 { self as u64 }
            fn fold(parts: &[Self], redop: ReduceOp) -> Self {
                // 128 bits hold any sum of two; truncation is what wrapping means.
                parts[1..].iter().fold(parts[0], |a, &b| match redop {
                    ReduceOp::Sum => (a as i128 + b as i128) as $type,
                    ReduceOp::Product => (a as i128).wrapping_mul(b as i128) as $type,
                    ReduceOp::Max => if a > b { a } else { b },
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                    ReduceOp::Average => unreachable!(),
                })
            }
        }
    )*};
}

obvious_integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! obvious_floats {
    ($($type:ty, $bits:ty, $sum:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Obvious for $type {
            // Mostly numbers of ordinary size, sometimes NaN, infinities and zeros of either sign.
            fn from_bits(bits: u64) -> Self {
                match bits % 16 {
                    0 => <$type>::from_bits((bits >> 8) as $bits),
                    1 => <$type>::NAN,
                    2 => <$type>::NEG_INFINITY,
                    _ => $narrow(((bits >> 8) as i16) as $sum / 256.0),
                }
            }
            fn bits(self) -> u64 { if self.is_nan() { u64::MAX } else { self.to_bits() as u64 } }
            fn fold(parts: &[Self], redop: ReduceOp) -> Self {
                let sums = parts.iter().map(|&part| $widen(part));
                let result = match redop {
                    ReduceOp::Sum => sums.reduce(|a, b| a + b),
                    ReduceOp::Average => sums.reduce(|a, b| a + b).map(|sum| sum / parts.len() as $sum),
                    ReduceOp::Product => sums.reduce(|a, b| a * b),
                    ReduceOp::Max | ReduceOp::Min if parts.iter().any(|part| part.is_nan()) => Some(<$sum>::NAN),
                    ReduceOp::Max => sums.reduce(|a, b| if a > b { a } else { b }),
                    ReduceOp::Min => sums.reduce(|a, b| if a < b { a } else { b }),
                    _ => unreachable!(),
                };
                $narrow(result.unwrap())
            }
        }
    )*};
}

obvious_floats! {
    f32, u32, f32, |x| x, |x| x;
    f64, u64, f64, |x| x, |x| x;
    f16, u16, f32, f16::to_f32, f16::from_f32;
    bf16, u16, f32, bf16::to_f32, bf16::from_f32;
}

macro_rules! obvious_bytes {
    ($($type:ty),*) => {$(
        impl Obvious for $type {
            // Every value is among them, NaN and infinities as well.
            fn from_bits(bits: u64) -> Self { <$type>::from_bits(bits as u8) }
            fn bits(self) -> u64 { if self.is_nan() { u64::MAX } else { self.to_bits().into() } }
            fn fold(parts: &[Self], redop: ReduceOp) -> Self {
                let numbers = parts.iter().map(|part| part.to_f32());
                let result = match redop {
                    ReduceOp::Sum => numbers.reduce(|a, b| a + b),
                    ReduceOp::Average => numbers.reduce(|a, b| a + b).map(|sum| sum / parts.len() as f32),
                    ReduceOp::Product => numbers.reduce(|a, b| a * b),
                    ReduceOp::Max | ReduceOp::Min if parts.iter().any(|part| part.is_nan()) => Some(f32::NAN),
                    ReduceOp::Max => numbers.reduce(|a, b| if a > b { a } else { b }),
                    ReduceOp::Min => numbers.reduce(|a, b| if a < b { a } else { b }),
                    _ => unreachable!(),
                };
                Self::from_f32(result.unwrap())
            }
        }
    )*};
}

obvious_bytes!(f8e4m3, f8e5m2);

fn compare<T: Obvious>(seed: u64, parts: usize, count: usize, in_place: Option<usize>) {
    let word = |part: usize, i: usize| crate::types::mix(crate::types::mix(seed, part as u64), i as u64);
    let inputs: Vec<Vec<T>> = (0..parts).map(|part| (0..count).map(|i| T::from_bits(word(part, i))).collect()).collect();
    for &redop in ReduceOp::ALL.iter().filter(|redop| redop.applies_to(T::DTYPE)) {
        let expected: Vec<u64> =
            (0..count).map(|i| T::fold(&inputs.iter().map(|part| part[i]).collect::<Vec<_>>(), redop).bits()).collect();
        for level in Level::available() {
            for streams in [false, true] {
                let kernel = Kernel::of_level(level, T::DTYPE, redop).unwrap();
                let mut inputs = inputs.clone();
                let mut apart = vec![T::from_bits(3); count];
                let dst = in_place.map_or(apart.as_mut_ptr(), |part| inputs[part % parts].as_mut_ptr());
                let is_dst = |part| in_place.map(|in_place| in_place % parts) == Some(part);
                let pointers: Vec<*const u8> =
                    (0..parts).map(|part| if is_dst(part) { dst.cast_const() } else { inputs[part].as_ptr() }.cast()).collect();
                // SAFETY: all are vectors of `count` elements; `dst` is one of them or apart.
                let got: Vec<u64> = unsafe {
                    match streams {
                        false => kernel.fold(&pointers, dst.cast(), count, Some(parts)),
                        true => kernel.fold_streaming(&pointers, dst.cast(), count, Some(parts)),
                    }
                    (0..count).map(|i| (*dst.add(i)).bits()).collect()
                };
                let what = format!("{redop} of {parts} x {count} {}, in place {in_place:?}", T::DTYPE);
                assert_eq!(got, expected, "{what}, {level:?}, streaming {streams}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else if every_case() { 64 } else { 32 }))]

    #[test]
    fn kernels_compute_what_one_would(
        seed: u64,
        parts in 1usize..6,
        count in prop_oneof![4 => 0usize..70, 4 => 500usize..540, 1 => Just(if cfg!(miri) { 1 } else { 5000 })],
        in_place in proptest::option::of(0usize..6),
    ) {
        compare::<i8>(seed, parts, count, in_place);
        compare::<u8>(seed, parts, count, in_place);
        compare::<i16>(seed, parts, count, in_place);
        compare::<u16>(seed, parts, count, in_place);
        compare::<i32>(seed, parts, count, in_place);
        compare::<u32>(seed, parts, count, in_place);
        compare::<i64>(seed, parts, count, in_place);
        compare::<u64>(seed, parts, count, in_place);
        compare::<f16>(seed, parts, count, in_place);
        compare::<bf16>(seed, parts, count, in_place);
        compare::<f8e4m3>(seed, parts, count, in_place);
        compare::<f8e5m2>(seed, parts, count, in_place);
        compare::<f32>(seed, parts, count, in_place);
        compare::<f64>(seed, parts, count, in_place);
    }
}

#[test]
fn halves_round_once() {
    // 2048 + 1 rounds to 2048 in f16 each time; in f32 the ones add up first.
    let (big, one) = ([f16::from_f32(2048.0)], [f16::ONE]);
    let mut sum = [f16::ZERO];
    let parts = [big.as_ptr().cast(), one.as_ptr().cast(), one.as_ptr().cast()];
    // SAFETY: arrays of one element.
    unsafe { Kernel::new(DType::F16, ReduceOp::Sum).unwrap().fold(&parts, sum.as_mut_ptr().cast(), 1, None) };
    assert_eq!(sum[0].to_f32(), 2050.0);
}

/// Every half plus some others: denormals, ties and their neighbours, overflow, infinities, NaN.
#[test]
#[cfg_attr(miri, ignore = "too many numbers")]
fn halves_of_every_value() {
    fn check<T: Obvious>(every: &[T], others: &[f64], from: impl Fn(f64) -> T) {
        for level in Level::available() {
            let kernel = Kernel::of_level(level, T::DTYPE, ReduceOp::Sum).unwrap();
            for &other in others {
                let other = from(other);
                let (others, mut sums) = (vec![other; every.len()], vec![other; every.len()]);
                let parts = [every.as_ptr().cast(), others.as_ptr().cast()];
                // SAFETY: all are as long as `every`.
                unsafe { kernel.fold(&parts, sums.as_mut_ptr().cast(), every.len(), None) };
                for (&one, sum) in every.iter().zip(sums) {
                    let expected = T::fold(&[one, other], ReduceOp::Sum);
                    assert_eq!(sum.bits(), expected.bits(), "{level:?}: {:#x} + {:#x}", one.bits(), other.bits());
                }
            }
        }
    }
    let others = [0.0, 6e-8, -6e-8, 3e-5, 1e-3, 0.1, -0.3, 1.0, 1.001, 77.0, -4096.0, 65504.0, 3e38, f64::INFINITY, f64::NAN];
    check(&(0..=u16::MAX).map(f16::from_bits).collect::<Vec<_>>(), &others, f16::from_f64);
    check(&(0..=u16::MAX).map(bf16::from_bits).collect::<Vec<_>>(), &others, bf16::from_f64);
}

/// Every pair of numbers of eight bits, in every reduction of every kernel.
#[test]
#[cfg_attr(miri, ignore = "too many numbers")]
fn bytes_of_every_value() {
    fn check<T: Obvious>() {
        let every: Vec<T> = (0..=255).map(T::from_bits).collect();
        for &redop in ReduceOp::ALL.iter().filter(|redop| redop.applies_to(T::DTYPE)) {
            for level in Level::available() {
                let kernel = Kernel::of_level(level, T::DTYPE, redop).unwrap();
                for &other in &every {
                    let (others, mut results) = (vec![other; every.len()], vec![other; every.len()]);
                    let parts = [every.as_ptr().cast(), others.as_ptr().cast()];
                    // SAFETY: all are as long as `every`.
                    unsafe { kernel.fold(&parts, results.as_mut_ptr().cast(), every.len(), Some(2)) };
                    for (&one, result) in every.iter().zip(results) {
                        let expected = T::fold(&[one, other], redop);
                        assert_eq!(
                            result.bits(),
                            expected.bits(),
                            "{level:?}: {redop} of {:#x} and {:#x}",
                            one.bits(),
                            other.bits()
                        );
                    }
                }
            }
        }
    }
    check::<f8e4m3>();
    check::<f8e5m2>();
}

#[test]
fn an_average_is_divided_only_when_it_is_finished() {
    let kernel = Kernel::new(DType::F32, ReduceOp::Average).unwrap();
    let (a, b, mut dst) = ([3f32], [5f32], [0f32]);
    let parts = [a.as_ptr().cast(), b.as_ptr().cast()];
    // SAFETY: arrays of one element.
    unsafe { kernel.fold(&parts, dst.as_mut_ptr().cast(), 1, None) };
    assert_eq!(dst, [8.0]);
    // SAFETY: as above.
    unsafe { kernel.fold(&parts, dst.as_mut_ptr().cast(), 1, Some(4)) };
    assert_eq!(dst, [2.0]);
}

#[test]
fn what_means_nothing_has_no_kernel() {
    assert!(Kernel::new(DType::I32, ReduceOp::Average).is_none());
    assert!(Kernel::new(DType::F32, ReduceOp::BitXor).is_none());
    assert!(Kernel::new(DType::Bool, ReduceOp::Sum).is_none());
}

#[test]
fn bools_are_normalised() {
    let mut bytes = [0, 1, 2, 255];
    // SAFETY: an array of four bytes.
    unsafe { normalise_bools(bytes.as_mut_ptr(), 4) };
    assert_eq!(bytes, [0, 1, 1, 1]);
}

#[test]
fn local_reduction_refuses_what_does_not_fit() {
    let refused = |result: crate::error::Result<()>| match result {
        Err(Error::Argument { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    let mut into = [0.0f32; 2];
    let length = |buffer, given| ArgumentError::Length { buffer, expected: 2, given };
    assert_eq!(refused(reduce_local(&[], &mut into, ReduceOp::Sum)), length("first", 0));
    assert_eq!(refused(reduce_local(&[&[1.0; 2], &[1.0; 3]], &mut into, ReduceOp::Sum)), length("send", 3));
    let undefined = ArgumentError::ReduceOp { redop: ReduceOp::BitAnd, dtype: DType::F32 };
    assert_eq!(refused(reduce_local(&[&[1.0; 2]], &mut into, ReduceOp::BitAnd)), undefined);
    assert_eq!(into, [0.0; 2]);
}

/// Copies of every way in which the two may lie in their pages: one way goes by vectors, because
/// `rep movsb` is slow for it.
#[test]
fn copies_arrive_wherever_buffers_lie_in_their_pages() {
    const PAGE: usize = 4096;
    let source: Vec<u8> = (0..6 * PAGE).map(|i| (i % 251) as u8).collect();
    let mut target = vec![0u8; 6 * PAGE];
    for distance in [0, 1, 16, 31, 32, 64, PAGE - 16] {
        for len in [0, 1, 100, PAGE, PAGE + 1, 2 * PAGE + 77, 4 * PAGE] {
            target.fill(255);
            let at = (source.as_ptr().addr().wrapping_sub(target.as_ptr().addr()) + distance) % PAGE;
            // SAFETY: `at` is less than a page, and both vectors have two pages more than the
            // longest copy.
            unsafe { copy(source.as_ptr(), target.as_mut_ptr().add(at), len) };
            assert!(target[at..at + len] == source[..len], "{len} bytes, {distance} after the source");
            assert!(target[..at].iter().chain(&target[at + len..]).all(|&byte| byte == 255), "beyond the {len} bytes");
        }
    }
}

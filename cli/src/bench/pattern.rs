//! The contents of buffers and the expected results: small numbers, so that reductions are exact in
//! every element type.

#[cfg(feature = "cuda")]
use kolo::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use kolo::{Communicator, DType, Element, ReduceOp, WireDType, bf16, f16};

/// Element types that can be copied to a GPU.
#[cfg(feature = "cuda")]
pub(crate) trait Copied: DeviceRepr + ValidAsZeroBits {}

#[cfg(feature = "cuda")]
impl<T: DeviceRepr + ValidAsZeroBits> Copied for T {}

/// Without support for GPUs, all element types.
#[cfg(not(feature = "cuda"))]
pub(crate) trait Copied {}

#[cfg(not(feature = "cuda"))]
impl<T> Copied for T {}

/// Element types that can hold small whole numbers.
pub(crate) trait Pattern: Element + Copied + PartialEq {
    fn from_small(number: u32) -> Self;
    fn to_f64(self) -> f64;
    /// The relative error of one rounding.
    const ROUNDING: f64;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Pattern for $type {
            fn from_small(number: u32) -> Self { number as $type }
            fn to_f64(self) -> f64 { self as f64 }
            const ROUNDING: f64 = 0.0;
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty, $from:expr, $to:expr, $rounding:expr;)*) => {$(
        impl Pattern for $type {
            fn from_small(number: u32) -> Self { $from(number as f32) }
            fn to_f64(self) -> f64 { $to(self) }
            const ROUNDING: f64 = $rounding;
        }
    )*};
}

floats! {
    f32, |x| x, |x: f32| x as f64, f32::EPSILON as f64;
    f64, |x: f32| x as f64, |x: f64| x, f64::EPSILON;
    f16, f16::from_f32, f16::to_f64, 1.0 / 1024.0;
    bf16, bf16::from_f32, bf16::to_f64, 1.0 / 128.0;
}

/// After how many positions the numbers begin again, so that a large buffer needs few of them computed. It is a
/// prime, of which the lengths of chunks, segments and pages are no multiples: what lands in the place of another is
/// noticed.
const PERIOD: usize = 4093;

/// Writes the numbers of the positions from 0 on.
pub(crate) fn fill<T: Pattern>(buffer: &mut [T], number: impl Fn(usize) -> u32) {
    let (first, later) = buffer.split_at_mut(buffer.len().min(PERIOD));
    for (place, element) in first.iter_mut().enumerate() {
        *element = T::from_small(number(place));
    }
    later.chunks_mut(PERIOD).for_each(|period| period.copy_from_slice(&first[..period.len()]));
}

/// Counts the elements that are not what is expected at their positions, of which the first is `start`.
pub(crate) fn count_wrong<T: Pattern>(got: &[T], start: usize, expected: impl Fn(usize) -> f64, tolerance: Tolerance) -> u64 {
    let (first, later) = got.split_at(got.len().min(PERIOD));
    let expected: Vec<f64> = (start..start + first.len()).map(expected).collect();
    let count =
        |part: &[T]| part.iter().zip(&expected).filter(|&(&got, &expected)| !is_right(got, expected, tolerance)).count() as u64;
    let wrong = count(first);
    // What is the same as a part that is right needs no second look.
    let is_same = |period: &[T]| wrong == 0 && *period == first[..period.len()];
    wrong + later.chunks(PERIOD).filter(|period| !is_same(period)).map(count).sum::<u64>()
}

/// Returns the number that a rank contributes at a position in an iteration: 0 to 3; for products
/// 1, and seldom 2.
pub(crate) fn small(redop: Option<ReduceOp>, rank: usize, place: usize, iteration: u32, ranks: usize) -> u32 {
    let place = place % PERIOD;
    match redop {
        // At most one rank contributes a 2.
        Some(ReduceOp::Product) => {
            let multipliers = ranks.min(7);
            1 + u32::from(rank < multipliers && (place + iteration as usize) % (multipliers + 1) == rank)
        }
        _ => {
            // No arithmetic progression, so that the sum over ranks depends on the position and the
            // iteration.
            let word = (place as u64) << 32 ^ (rank as u64) << 20 ^ u64::from(iteration);
            let mixed = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((mixed ^ mixed >> 32).wrapping_mul(0x94d0_49bb_1331_11eb) >> 62) as u32
        }
    }
}

/// The contents of a receive buffer before the call: seldom an expected result.
pub(crate) const STALE: u32 = 101;

/// Returns the expected reduction of all ranks' numbers at a position.
pub(crate) fn reduced(redop: ReduceOp, place: usize, iteration: u32, ranks: usize) -> f64 {
    let numbers = (0..ranks).map(|rank| small(Some(redop), rank, place, iteration, ranks));
    match redop {
        ReduceOp::Sum => numbers.sum::<u32>().into(),
        ReduceOp::Average => f64::from(numbers.sum::<u32>()) / ranks as f64,
        ReduceOp::Product => numbers.product::<u32>().into(),
        ReduceOp::Max => numbers.max().unwrap_or(0).into(),
        ReduceOp::Min => numbers.min().unwrap_or(0).into(),
        ReduceOp::BitAnd => numbers.reduce(|a, b| a & b).unwrap_or(0).into(),
        ReduceOp::BitOr => numbers.fold(0, |a, b| a | b).into(),
        ReduceOp::BitXor => numbers.fold(0, |a, b| a ^ b).into(),
        other => unreachable!("{other} has no expected result"),
    }
}

/// Whether a communicator's messages between hosts have fewer bits than these elements, in large sums
/// and averages.
pub(crate) fn packs(comm: &Communicator, dtype: DType, redop: Option<ReduceOp>) -> bool {
    matches!(redop, Some(ReduceOp::Sum | ReduceOp::Average))
        && match comm.wire_dtype() {
            WireDType::F32 => false,
            WireDType::F16 | WireDType::BF16 => dtype == DType::F32,
            _ => matches!(dtype, DType::F32 | DType::F16 | DType::BF16),
        }
}

/// By how much an element may be off.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tolerance {
    /// As a part of the expected result.
    relative: f64,
    absolute: f64,
}

impl Tolerance {
    /// Returns what the roundings of elements and messages allow.
    pub(crate) fn of<T: Pattern>(comm: &Communicator, redop: Option<ReduceOp>) -> Tolerance {
        let largest = redop.map_or(0.0, |redop| if redop == ReduceOp::Average { 3.0 } else { 3.0 * comm.world_size() as f64 });
        // Two roundings in messages; those of all hosts add up to one of the sum.
        let (of_messages, absolute) = match comm.wire_dtype() {
            _ if !packs(comm, T::DTYPE, redop) => (0.0, 0.0),
            WireDType::F16 => (f16::ROUNDING, 0.0),
            WireDType::BF16 => (bf16::ROUNDING, 0.0),
            WireDType::Int8 => (0.0, largest / 127.0),
            // Of four significant bits, and near zero in steps of 1/512 of 1/448 of the largest.
            _ => (1.0 / 15.0, largest / 448.0 / 512.0),
        };
        Tolerance { relative: 2.0 * T::ROUNDING.max(of_messages), absolute }
    }
}

/// Returns whether an element is right up to rounding. Sums of 8-bit integers wrap.
fn is_right<T: Pattern>(got: T, expected: f64, tolerance: Tolerance) -> bool {
    let expected = if T::ROUNDING == 0.0 { T::from_small(expected as u32).to_f64() } else { expected };
    (got.to_f64() - expected).abs() <= tolerance.relative * expected.abs() + tolerance.absolute
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_results_are_noticed() {
        for &redop in ReduceOp::ALL {
            for place in 0..40 {
                let right = reduced(redop, place, 3, 5);
                let exact = Tolerance::default();
                assert!(is_right(right, right, exact) && !is_right(right + 1.0, right, exact), "{redop}: {right}");
                let rounded = Tolerance { relative: 2.0 * f16::ROUNDING, absolute: 0.0 };
                assert!(
                    is_right(f16::from_f64(right), right, rounded) && !is_right(f16::from_f64(right + 0.25), right, rounded),
                    "{redop}: {right}"
                );
                if redop != ReduceOp::Average {
                    assert!(is_right(right as u8, right, exact) && !is_right(right as u8 + 1, right, exact), "{redop}: {right}");
                }
            }
        }
    }

    #[test]
    fn every_wrong_element_is_counted() {
        let len = 3 * PERIOD + 5;
        for (start, tolerance) in [(0, Tolerance::default()), (1000, Tolerance { relative: 0.1, absolute: 0.0 })] {
            let number = |place| small(None, 1, place, 3, 5);
            let mut numbers = vec![0.0; start + len];
            fill(&mut numbers, number);
            let got: &mut [f32] = &mut numbers[start..];
            let count = |got: &[f32]| count_wrong(got, start, |place| number(place).into(), tolerance);
            assert_eq!(count(got), 0);
            // In a later period only, in the first, and in both.
            let places = [len - 1, 2 * PERIOD, 7, PERIOD + 7];
            for (wrong, place) in (1..).zip(places) {
                got[place] += 1.0;
                assert_eq!(count(got), wrong, "{place}");
            }
            got[len / 2] = f32::NAN;
            assert_eq!(count(got), 1 + places.len() as u64);
        }
    }

    #[test]
    fn ranks_and_iterations_contribute_differently() {
        let numbers = |redop, rank, iteration| (0..50).map(|place| small(redop, rank, place, iteration, 4)).collect::<Vec<_>>();
        for redop in [None, Some(ReduceOp::Sum), Some(ReduceOp::Product)] {
            assert_ne!(numbers(redop, 0, 0), numbers(redop, 1, 0));
            assert_ne!(numbers(redop, 0, 0), numbers(redop, 0, 1));
        }
        assert!((0..50).all(|place| reduced(ReduceOp::Product, place, 0, 100) <= 2.0), "products stay small");
    }

    #[test]
    fn results_depend_on_place_and_iteration() {
        for redop in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::BitXor, ReduceOp::Product] {
            for ranks in [2, 3, 4, 8] {
                let results = |iteration| (0..100).map(|place| reduced(redop, place, iteration, ranks)).collect::<Vec<_>>();
                let (first, second) = (results(0), results(1));
                assert_ne!(first, second, "{redop} of {ranks}");
                assert!(first.iter().any(|result| *result != first[0]), "{redop} of {ranks}");
            }
        }
    }
}

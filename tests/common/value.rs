//! Element types and their reductions, computed sequentially.

use kolo::{Element, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

/// An element type as the reference computes with it.
pub(crate) trait Value: Element + PartialEq + std::fmt::Debug {
    /// Returns a random value, of a size with which floating-point sums and products of a few
    /// values stay exact where possible.
    fn random(seed: u64) -> Self;
    /// Reduces the values of all ranks, in the order of ranks.
    fn reduce(values: &[Self], op: ReduceOp) -> Self;
    /// Whether a result is right if the operands were combined in another order than the
    /// reference's.
    fn is_close(self, expected: Self, ranks: usize) -> bool;
    /// The bits of the value, with which ranks compare their results.
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn random(seed: u64) -> Self { seed as $type }
            fn reduce(values: &[Self], op: ReduceOp) -> Self {
                values.iter().copied().reduce(|a, b| match op {
                    ReduceOp::Sum => a.wrapping_add(b),
                    ReduceOp::Product => a.wrapping_mul(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::BitAnd => a & b,
                    ReduceOp::BitOr => a | b,
                    ReduceOp::BitXor => a ^ b,
                    _ => unreachable!("the library refuses it"),
                }).unwrap()
            }
            fn is_close(self, expected: Self, _: usize) -> bool { self == expected }
            fn bits(self) -> u64 { self as u64 }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty, $epsilon:expr, $widen:expr, $narrow:expr;)*) => {$(
        impl Value for $type {
            fn random(seed: u64) -> Self { $narrow(((seed % 4001) as f64 - 2000.0) / 1000.0) }
            fn reduce(values: &[Self], op: ReduceOp) -> Self {
                let wide = values.iter().map(|&value| -> f64 { $widen(value) });
                let all = values.len() as f64;
                $narrow(match op {
                    ReduceOp::Sum => wide.sum(),
                    ReduceOp::Average => wide.sum::<f64>() / all,
                    ReduceOp::Product => wide.product(),
                    ReduceOp::Max => wide.reduce(f64::max).unwrap(),
                    ReduceOp::Min => wide.reduce(f64::min).unwrap(),
                    _ => unreachable!("the library refuses it"),
                })
            }
            // Each operation rounds once. Partial results are at most 2^ranks (products) or 2 *
            // ranks (sums).
            fn is_close(self, expected: Self, ranks: usize) -> bool {
                let (got, expected): (f64, f64) = ($widen(self), $widen(expected));
                (got - expected).abs() <= $epsilon * ranks as f64 * (2.0 * ranks as f64 + expected.abs())
            }
            fn bits(self) -> u64 { self.to_bits() as u64 }
        }
    )*};
}

floats! {
    f32, f32::EPSILON as f64, |x: f32| x as f64, |x: f64| x as f32;
    f64, f64::EPSILON, |x: f64| x, |x: f64| x;
    f16, f16::EPSILON.to_f64(), f16::to_f64, f16::from_f64;
    bf16, bf16::EPSILON.to_f64(), bf16::to_f64, bf16::from_f64;
    f8e4m3, 0.125, f8e4m3::to_f64, f8e4m3::from_f64;
    f8e5m2, 0.25, f8e5m2::to_f64, f8e5m2::from_f64;
}

impl Value for bool {
    fn random(seed: u64) -> Self {
        seed % 2 == 1
    }

    fn reduce(values: &[Self], op: ReduceOp) -> Self {
        match op {
            ReduceOp::Max | ReduceOp::BitOr => values.iter().any(|&value| value),
            ReduceOp::Min | ReduceOp::BitAnd => values.iter().all(|&value| value),
            ReduceOp::BitXor => values.iter().fold(false, |a, &b| a ^ b),
            _ => unreachable!("the library refuses it"),
        }
    }

    fn is_close(self, expected: Self, _: usize) -> bool {
        self == expected
    }

    fn bits(self) -> u64 {
        self.into()
    }
}

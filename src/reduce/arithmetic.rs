//! Reductions of two elements.

/// A type in which elements are accumulated.
pub(super) trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn largest(self, other: Self) -> Self;
    fn smallest(self, other: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

pub(super) trait Real: Number {}

pub(super) trait Integer:
    Number + std::ops::BitAnd<Output = Self> + std::ops::BitOr<Output = Self> + std::ops::BitXor<Output = Self>
{
}

macro_rules! reals {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self * other }
            // A NaN on either side is the result: on the left by the second test, on the right
            // because no comparison with it holds.
            #[inline(always)]
            fn largest(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { self / by as $type }
        }

        impl Real for $type {}
    )*};
}

reals!(f32, f64);

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn largest(self, other: Self) -> Self { self.max(other) }
            #[inline(always)]
            fn smallest(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn divide(self, _: usize) -> Self { unreachable!("averages of integers are refused") }
        }

        impl Integer for $type {}
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// A reduction of two accumulators.
pub(super) trait Combine<S> {
    fn combine(a: S, b: S) -> S;
}

macro_rules! combine {
    ($($name:ident, $bound:path, |$a:ident, $b:ident| $result:expr;)*) => {$(
        pub(super) struct $name;

        impl<S: $bound> Combine<S> for $name {
            #[inline(always)]
            fn combine($a: S, $b: S) -> S { $result }
        }
    )*};
}

combine! {
    Add, Number, |a, b| a.add(b);
    Multiply, Number, |a, b| a.multiply(b);
    Largest, Number, |a, b| a.largest(b);
    Smallest, Number, |a, b| a.smallest(b);
    And, Integer, |a, b| a & b;
    Or, Integer, |a, b| a | b;
    ExclusiveOr, Integer, |a, b| a ^ b;
}

//! Arithmetic that kolo's reductions do not have: the factor of a PreMulSum, and the average of
//! integers. The host does it.

use std::ffi::{c_int, c_void};

use kolo::{DType, ReduceOp, bf16, f8e4m3, f8e5m2, f16};

use crate::codes::NUM_OPS;
use crate::driver;
use crate::fault::Fault;

/// Returns the type of an element.
pub(crate) fn dtype(number: c_int) -> Result<DType, Fault> {
    // The order is that of `ncclDataType_t`.
    const TYPES: [DType; 12] = [
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
    ];
    let known = usize::try_from(number).ok().and_then(|number| TYPES.get(number));
    known
        .copied()
        .ok_or_else(|| Fault::argument(format!("datatype is {number}; it must be from ncclInt8 to ncclFloat8e5m2, 0 to 11")))
}

/// A reduction in NCCL's sense.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction {
    Plain(ReduceOp),
    /// The sum, divided by the number of ranks and truncated.
    AverageOfIntegers,
    /// The sum of what each rank has multiplied by its factor.
    Scaled(Factor),
}

/// The factor of a PreMulSum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factor {
    pub(crate) dtype: DType,
    pub(crate) value: Value,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Known([u8; 8]),
    /// An address that is read when the operation runs.
    At(usize),
}

impl Factor {
    /// Reads the factor.
    ///
    /// # Safety
    ///
    /// An address of the caller is valid for one element.
    pub(crate) unsafe fn bytes(&self) -> Result<[u8; 8], Fault> {
        match self.value {
            Value::Known(bytes) => Ok(bytes),
            Value::At(address) => {
                let mut bytes = [0; 8];
                let from: *const c_void = std::ptr::with_exposed_provenance(address);
                // SAFETY: passed on.
                unsafe { driver::read(&mut bytes[..self.dtype.size()], from)? };
                Ok(bytes)
            }
        }
    }
}

/// Returns a built-in reduction on elements of a type; `None` for the number of a PreMulSum.
pub(crate) fn built_in(number: c_int, dtype: DType) -> Result<Option<Reduction>, Fault> {
    Ok(Some(match number {
        0 => Reduction::Plain(ReduceOp::Sum),
        1 => Reduction::Plain(ReduceOp::Product),
        2 => Reduction::Plain(ReduceOp::Max),
        3 => Reduction::Plain(ReduceOp::Min),
        4 if dtype.is_float() => Reduction::Plain(ReduceOp::Average),
        4 => Reduction::AverageOfIntegers,
        NUM_OPS.. => return Ok(None),
        _ => {
            return Err(Fault::argument(format!(
                "op is {number}; it must be from ncclSum to ncclAvg, 0 to 4, or made by ncclRedOpCreatePreMulSum"
            )));
        }
    }))
}

/// Applies a function to each element of a type in bytes.
macro_rules! each {
    ($type:ty, $bytes:expr, |$element:ident| $result:expr) => {
        for bytes in $bytes.chunks_exact_mut(size_of::<$type>()) {
            let $element = <$type>::from_ne_bytes(bytes.try_into().expect("a chunk of this size"));
            let result: $type = $result;
            bytes.copy_from_slice(&result.to_ne_bytes());
        }
    };
}

/// Multiplies all elements by a factor. Integers wrap; types of 16 and 8 bits round once.
pub(crate) fn multiply(bytes: &mut [u8], dtype: DType, factor: [u8; 8]) {
    macro_rules! integers {
        ($type:ty) => {{
            let factor = <$type>::from_ne_bytes(factor[..size_of::<$type>()].try_into().expect("as long as the type"));
            each!($type, bytes, |x| x.wrapping_mul(factor))
        }};
    }
    macro_rules! small {
        ($bits:ty, $type:ty) => {{
            let widen = |bits: $bits| <$type>::from_bits(bits).to_f32();
            let factor = widen(<$bits>::from_ne_bytes(factor[..size_of::<$bits>()].try_into().expect("as long as the type")));
            each!($bits, bytes, |x| <$type>::from_f32(widen(x) * factor).to_bits())
        }};
    }
    macro_rules! floats {
        ($type:ty) => {{
            let factor = <$type>::from_ne_bytes(factor[..size_of::<$type>()].try_into().expect("as long as the type"));
            each!($type, bytes, |x| x * factor)
        }};
    }
    match dtype {
        DType::I8 => integers!(i8),
        DType::U8 => integers!(u8),
        DType::I32 => integers!(i32),
        DType::U32 => integers!(u32),
        DType::I64 => integers!(i64),
        DType::U64 => integers!(u64),
        DType::F16 => small!(u16, f16),
        DType::BF16 => small!(u16, bf16),
        DType::F8E4M3 => small!(u8, f8e4m3),
        DType::F8E5M2 => small!(u8, f8e5m2),
        DType::F32 => floats!(f32),
        DType::F64 => floats!(f64),
        _ => unreachable!("NCCL has no such type"),
    }
}

/// Divides all elements, which are integers, by a number of ranks, and truncates towards zero.
pub(crate) fn divide(bytes: &mut [u8], dtype: DType, ranks: usize) {
    // In 64 bits, because a number of ranks need not fit in 8. A quotient fits.
    match dtype {
        DType::I8 => each!(i8, bytes, |x| (i64::from(x) / ranks as i64) as i8),
        DType::U8 => each!(u8, bytes, |x| (u64::from(x) / ranks as u64) as u8),
        DType::I32 => each!(i32, bytes, |x| (i64::from(x) / ranks as i64) as i32),
        DType::U32 => each!(u32, bytes, |x| (u64::from(x) / ranks as u64) as u32),
        DType::I64 => each!(i64, bytes, |x| x / ranks as i64),
        DType::U64 => each!(u64, bytes, |x| x / ranks as u64),
        _ => unreachable!("only integers are averaged here"),
    }
}

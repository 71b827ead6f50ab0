//! Values of any element type, as kolo takes them.

use burn_core::tensor::TensorData;
use kolo::ddp::TensorMut;

use crate::error::{Error, Result};
use crate::walk::Found;

/// Borrows values for a call of kolo.
pub(crate) fn borrow<'a>(found: &Found, values: &'a mut TensorData) -> Result<TensorMut<'a>> {
    use kolo::DType::*;
    fn of<'a, T: kolo::Element + burn_core::tensor::Element>(found: &Found, values: &'a mut TensorData) -> Result<TensorMut<'a>> {
        values.as_mut_slice::<T>().map(TensorMut::from).map_err(|error| unreadable(found, &error))
    }
    match found.described.dtype {
        F64 => of::<f64>(found, values),
        F32 => of::<f32>(found, values),
        F16 => of::<kolo::f16>(found, values),
        BF16 => of::<kolo::bf16>(found, values),
        I64 => of::<i64>(found, values),
        I32 => of::<i32>(found, values),
        I16 => of::<i16>(found, values),
        I8 => of::<i8>(found, values),
        U64 => of::<u64>(found, values),
        U32 => of::<u32>(found, values),
        U16 => of::<u16>(found, values),
        U8 => of::<u8>(found, values),
        Bool => of::<bool>(found, values),
        _ => Err(Error::Elements { name: found.described.name.clone(), dtype: found.dtype }),
    }
}

pub(crate) fn unreadable(found: &Found, why: &dyn std::fmt::Display) -> Error {
    Error::Read { name: found.described.name.clone(), why: why.to_string() }
}

/// Runs `$body` with the Rust type of a parameter's elements as `$T`.
macro_rules! with_float {
    ($found:expr, $T:ident => $body:expr) => {
        match $found.described.dtype {
            kolo::DType::F64 => {
                type $T = f64;
                $body
            }
            kolo::DType::F32 => {
                type $T = f32;
                $body
            }
            kolo::DType::F16 => {
                type $T = kolo::f16;
                $body
            }
            kolo::DType::BF16 => {
                type $T = kolo::bf16;
                $body
            }
            _ => Err($crate::Error::Elements { name: $found.described.name.clone(), dtype: $found.dtype }),
        }
    };
}

/// Runs `$body` with the number of a parameter's dimensions as the constant `$D`.
macro_rules! with_dimensions {
    ($found:expr, $D:ident => $body:expr) => {
        with_dimensions!(@ $found, $D, $body, 0 1 2 3 4 5 6 7 8)
    };
    (@ $found:expr, $D:ident, $body:expr, $($number:literal)*) => {
        match $found.described.shape.len() {
            $($number => {
                const $D: usize = $number;
                $body
            })*
            dimensions => Err($crate::Error::Dimensions { name: $found.described.name.clone(), dimensions }),
        }
    };
}

pub(crate) use {with_dimensions, with_float};

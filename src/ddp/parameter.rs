//! What a reducer is told of a model, and the memory that it is lent.

use std::marker::PhantomData;

use crate::buffer::ChunkMut;
use crate::error::{ReducerProblem, Result};
use crate::types::{DType, Element};

/// A parameter whose gradient is reduced, or a buffer (as BatchNorm's running mean): a name, a shape and a type of elements.
///
/// All ranks must have the same, in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parameter {
    /// What errors call it.
    pub name: String,
    /// Its dimensions, row-major; empty for a scalar.
    pub shape: Vec<usize>,
    /// The type of its elements, and of those of its gradient.
    pub dtype: DType,
}

impl Parameter {
    /// In host memory.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Parameter {
        Parameter { name: name.into(), shape: shape.into(), dtype }
    }

    /// How many elements it has.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its bytes, if there can be so many.
    pub(super) fn checked_bytes(&self) -> Option<usize> {
        let bytes = self.shape.iter().try_fold(self.dtype.size(), |product, &extent| product.checked_mul(extent))?;
        (bytes <= isize::MAX as usize).then_some(bytes)
    }

    pub(super) fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Refuses elements of another type.
    pub(super) fn expect(&self, given: DType) -> Result<()> {
        if self.dtype == given {
            return Ok(());
        }
        Err(ReducerProblem::Elements { name: self.name.clone(), dtype: self.dtype, given }.into())
    }

    /// Refuses another number of elements.
    pub(super) fn expect_count(&self, given: usize) -> Result<()> {
        if self.count() == given {
            return Ok(());
        }
        Err(ReducerProblem::Length { name: self.name.clone(), expected: self.count(), given }.into())
    }
}

/// As errors write it: `f32 [64, 3, 7, 7]`.
impl std::fmt::Display for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype, self.shape)
    }
}

/// The values of a parameter or buffer, of whatever type, borrowed: `TensorMut::from(&mut values[..])`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) memory: ChunkMut,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl TensorMut<'_> {
    /// The values of a parameter at an address.
    ///
    /// # Safety
    ///
    /// As for a mutable slice of as many elements; what a `bool` holds may be anything.
    pub(crate) unsafe fn at(address: *mut u8, parameter: &Parameter) -> Self {
        let memory = ChunkMut { ptr: address, len: parameter.bytes() };
        TensorMut { dtype: parameter.dtype, count: parameter.count(), memory, borrowed: PhantomData }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for TensorMut<'a> {
    fn from(values: &'a mut [T]) -> TensorMut<'a> {
        TensorMut { dtype: T::DTYPE, count: values.len(), memory: ChunkMut::of(values), borrowed: PhantomData }
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for TensorMut<'a> {
    fn from(values: &'a mut Vec<T>) -> TensorMut<'a> {
        TensorMut::from(values.as_mut_slice())
    }
}

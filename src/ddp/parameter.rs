//! Descriptions of a model's parameters, and the memory that a reducer borrows.

use std::marker::PhantomData;

use crate::buffer::RawSliceMut;
use crate::error::{ReducerError, Result};
use crate::types::{DType, Element};

/// A parameter whose gradient is reduced, or a buffer (such as the running mean of BatchNorm): its
/// name, shape and element type.
///
/// All ranks must have the same parameters in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Parameter {
    /// Its name in errors.
    pub name: String,
    /// Its dimensions, in row-major order; empty for a scalar.
    pub shape: Vec<usize>,
    /// The element type, which is also that of its gradient.
    pub dtype: DType,
    /// Whether it and its gradient are in the memory of the reducer's device.
    pub on_device: bool,
}

impl Parameter {
    /// Describes a parameter in host memory.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Parameter {
        Parameter { name: name.into(), shape: shape.into(), dtype, on_device: false }
    }

    /// Declares it to be in the memory of the reducer's device, which `ReducerBuilder::device` sets
    /// (with the feature `cuda`), or the configuration in C.
    pub fn on_device(mut self) -> Parameter {
        self.on_device = true;
        self
    }

    /// Returns how many elements it has; `usize::MAX` if they are more than that. No reducer is
    /// built for so many.
    pub fn count(&self) -> usize {
        self.shape.iter().fold(1, |product, &extent| product.saturating_mul(extent))
    }

    /// Returns its bytes, or `None` if they exceed the address space.
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
        Err(ReducerError::Elements { name: self.name.clone(), dtype: self.dtype, given }.into())
    }

    /// Refuses a tensor in the other kind of memory.
    pub(super) fn expect_place(&self, on_device: bool) -> Result<()> {
        if self.on_device == on_device {
            return Ok(());
        }
        Err(ReducerError::Place { name: self.name.clone(), on_device: self.on_device }.into())
    }

    /// Refuses another number of elements.
    pub(super) fn expect_count(&self, given: usize) -> Result<()> {
        if self.count() == given {
            return Ok(());
        }
        Err(ReducerError::Length { name: self.name.clone(), expected: self.count(), given }.into())
    }
}

/// The form in errors: `weight f32 [64, 3, 7, 7]`.
impl std::fmt::Display for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}{}", self.name, self.dtype, self.shape, if self.on_device { " on a device" } else { "" })
    }
}

/// The borrowed values of a parameter or buffer of any type: `TensorMut::from(&mut values[..])`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) memory: RawSliceMut,
    /// Whether the memory is on the reducer's device, where the host cannot read.
    pub(super) on_device: bool,
    /// The stream to which the memory belongs, if it is known.
    #[cfg(feature = "cuda")]
    stream: Option<std::sync::Arc<cudarc::driver::CudaStream>>,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl TensorMut<'_> {
    fn new(dtype: DType, count: usize, memory: RawSliceMut) -> Self {
        TensorMut {
            dtype,
            count,
            memory,
            on_device: false,
            #[cfg(feature = "cuda")]
            stream: None,
            borrowed: PhantomData,
        }
    }

    /// Borrows the values of a parameter at an address.
    ///
    /// # Safety
    ///
    /// As for a mutable slice with the parameter's elements, except that the bytes of a `bool` may
    /// have any value. If the parameter is on a device, the address is valid there, in the order of
    /// the reducer's stream.
    pub(crate) unsafe fn at(address: *mut u8, parameter: &Parameter) -> Self {
        let memory = RawSliceMut { ptr: address, len: parameter.bytes() };
        TensorMut { on_device: parameter.on_device, ..TensorMut::new(parameter.dtype, parameter.count(), memory) }
    }
}

#[cfg(feature = "cuda")]
impl TensorMut<'_> {
    /// Borrows values at an address of the reducer's device, which belong to a stream.
    pub(super) fn of_device(
        dtype: DType,
        count: usize,
        memory: RawSliceMut,
        stream: std::sync::Arc<cudarc::driver::CudaStream>,
    ) -> Self {
        TensorMut { on_device: true, stream: Some(stream), ..TensorMut::new(dtype, count, memory) }
    }

    /// The stream to which the memory belongs, if it is known.
    pub(super) fn stream(&self) -> Option<&std::sync::Arc<cudarc::driver::CudaStream>> {
        self.stream.as_ref()
    }
}

impl<'a, T: Element> From<&'a mut [T]> for TensorMut<'a> {
    fn from(values: &'a mut [T]) -> TensorMut<'a> {
        TensorMut::new(T::DTYPE, values.len(), RawSliceMut::of(values))
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for TensorMut<'a> {
    fn from(values: &'a mut [T; N]) -> TensorMut<'a> {
        TensorMut::from(values.as_mut_slice())
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for TensorMut<'a> {
    fn from(values: &'a mut Vec<T>) -> TensorMut<'a> {
        TensorMut::from(values.as_mut_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_elements_than_memory_are_counted_and_refused() {
        let parameter = |shape: &[usize]| Parameter::new("w", shape, DType::F32);
        assert_eq!(parameter(&[usize::MAX, 3]).count(), usize::MAX);
        assert_eq!(parameter(&[usize::MAX, 3]).checked_bytes(), None);
        assert_eq!(parameter(&[usize::MAX, 3, 0]).count(), 0);
        assert_eq!(parameter(&[]).count(), 1);
    }
}

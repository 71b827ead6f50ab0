//! What a reducer is told of a model, and the memory that it is lent.

use std::marker::PhantomData;

use crate::buffer::RawSliceMut;
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
    /// Whether it and its gradient are in the memory of the reducer's device.
    pub on_device: bool,
}

impl Parameter {
    /// In host memory.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Parameter {
        Parameter { name: name.into(), shape: shape.into(), dtype, on_device: false }
    }

    /// In the memory of the reducer's device, which `ReducerBuilder::device` names (with the feature `cuda`), or the
    /// configuration of C.
    pub fn on_device(mut self) -> Parameter {
        self.on_device = true;
        self
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

    /// Refuses what is in other memory.
    pub(super) fn expect_place(&self, on_device: bool) -> Result<()> {
        if self.on_device == on_device {
            return Ok(());
        }
        Err(ReducerProblem::Place { name: self.name.clone(), on_device: self.on_device }.into())
    }

    /// Refuses another number of elements.
    pub(super) fn expect_count(&self, given: usize) -> Result<()> {
        if self.count() == given {
            return Ok(());
        }
        Err(ReducerProblem::Length { name: self.name.clone(), expected: self.count(), given }.into())
    }
}

/// As errors write it: `weight f32 [64, 3, 7, 7]`.
impl std::fmt::Display for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}{}", self.name, self.dtype, self.shape, if self.on_device { " on a device" } else { "" })
    }
}

/// The values of a parameter or buffer, of whatever type, borrowed: `TensorMut::from(&mut values[..])`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) memory: RawSliceMut,
    /// Whether the memory is the reducer's device's: no host reads there.
    pub(super) on_device: bool,
    /// To which the memory belongs, if that is known.
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

    /// The values of a parameter at an address.
    ///
    /// # Safety
    ///
    /// As for a mutable slice of as many elements; what a `bool` holds may be anything. If the parameter is on a device, that is
    /// where the address is valid, in the order of the reducer's stream.
    pub(crate) unsafe fn at(address: *mut u8, parameter: &Parameter) -> Self {
        let memory = RawSliceMut { ptr: address, len: parameter.bytes() };
        TensorMut { on_device: parameter.on_device, ..TensorMut::new(parameter.dtype, parameter.count(), memory) }
    }
}

#[cfg(feature = "cuda")]
impl TensorMut<'_> {
    /// As many values at an address of the reducer's device, which belong to a stream.
    pub(super) fn of_device(
        dtype: DType,
        count: usize,
        memory: RawSliceMut,
        stream: std::sync::Arc<cudarc::driver::CudaStream>,
    ) -> Self {
        TensorMut { on_device: true, stream: Some(stream), ..TensorMut::new(dtype, count, memory) }
    }

    /// Has the reducer's stream come after the one to which the memory belongs.
    pub(super) fn wait_for_its_stream(&self, on: &super::on_device::OnDevice) -> Result<()> {
        let Some((own, stream)) = on.keeps().zip(self.stream.as_ref()) else { return Ok(()) };
        own.join(stream).map_err(|error| crate::error::Error::Device {
            device: own.context().name().unwrap_or_default(),
            doing: "having one stream wait for another",
            problem: error.to_string(),
        })
    }
}

impl<'a, T: Element> From<&'a mut [T]> for TensorMut<'a> {
    fn from(values: &'a mut [T]) -> TensorMut<'a> {
        TensorMut::new(T::DTYPE, values.len(), RawSliceMut::of(values))
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for TensorMut<'a> {
    fn from(values: &'a mut Vec<T>) -> TensorMut<'a> {
        TensorMut::from(values.as_mut_slice())
    }
}

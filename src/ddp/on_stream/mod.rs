//! Gradients in the memory of GPUs, as cudarc's slices in the order of a stream.

#[cfg(test)]
mod on_a_gpu_tests;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};

use super::buckets::Buckets;
use super::builder::ReducerBuilder;
use super::core::Core;
use super::on_device::Chosen;
use super::parameter::TensorMut;
use super::reducer::Reducer;
use super::state::Gradient;
use super::step::Step;
use crate::buffer::RawSliceMut;
use crate::communicator::in_turn;
use crate::cuda::device::{Address, StreamId};
use crate::error::{Error, Result};
use crate::types::Element;

impl ReducerBuilder {
    /// Sets the device of the parameters that are [on a device](super::Parameter::on_device): the
    /// device of this stream. Gradients are written and read in the stream's order, so pass the
    /// stream of the backward pass.
    ///
    /// The reduction of a bucket starts when the stream has passed its last gradient. When
    /// [`Step::finish`] returns, all averages are complete.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kolo::DType;
    /// use kolo::cudarc::driver::CudaContext;
    /// use kolo::ddp::{Parameter, Reducer};
    ///
    /// let comm = kolo::Communicator::from_env()?;
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let weight = Parameter::new("weight", [1000, 1000], DType::F32).on_device();
    /// let mut reducer = Reducer::builder().parameters([weight]).device(&stream).build(&comm)?;
    /// let gradient = stream.alloc_zeros::<f32>(1_000_000)?;
    /// let step = reducer.begin()?;
    /// step.put_on_device(0, &gradient)?;
    /// step.finish()?;
    /// let average = stream.clone_dtoh(&reducer.gradient_on_device::<f32>(0)?)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn device(mut self, stream: &Arc<CudaStream>) -> Self {
        let (ordinal, id) = (stream.context().ordinal(), StreamId(stream.cu_stream().addr()));
        self.device = Some(Chosen { ordinal, stream: id, keeps: Some(stream.clone()) });
        self
    }
}

impl<'a> TensorMut<'a> {
    /// Borrows the values of a parameter or buffer that is on the reducer's device.
    pub fn on_device<T: Element>(values: &'a mut impl DevicePtrMut<T>) -> TensorMut<'a> {
        let (count, stream) = (values.len(), values.stream().clone());
        // The reducer's stream waits for that one, and has finished with the values when the
        // reducer's call returns.
        let address = values.device_ptr_mut(&stream).0;
        let memory = RawSliceMut { ptr: std::ptr::without_provenance_mut(address as usize), len: count * size_of::<T>() };
        TensorMut::of_device(T::DTYPE, count, memory, stream)
    }
}

impl Step<'_> {
    /// As [`Step::put`], for a gradient on the reducer's device. It is copied in the order of the
    /// reducer's stream.
    ///
    /// # Errors
    ///
    /// Those of [`Step::put`]. [`Error::Device`] if the device fails, which leaves the gradient
    /// unset or ends the reducer. [`Error::Unsupported`] if the gradient is on another device.
    pub fn put_on_device<T: Element>(&self, parameter: usize, gradient: &impl DevicePtr<T>) -> Result<()> {
        let core = &self.reducer.core;
        let described = core.parameter(parameter)?;
        described.expect(T::DTYPE)?;
        described.expect_count(gradient.len())?;
        described.expect_place(true)?;
        let stream = self.reducer.stream()?;
        let (address, _until_given) = gradient.device_ptr(&stream);
        // SAFETY: the slice has the parameter's elements, and cudarc orders its uses by streams.
        unsafe { core.put_on_device(parameter, address) }
    }

    /// As [`Step::view`], for a gradient on the reducer's device: cudarc accepts the view like its
    /// own slices. Work enqueued on the reducer's stream before [`DeviceGradientView::ready`] is
    /// part of the average. The initial content is undefined, unless the step
    /// [accumulates](Step::accumulates): then add to it.
    ///
    /// # Errors
    ///
    /// Those of [`Step::view`].
    pub fn view_on_device<T: Element>(&self, parameter: usize) -> Result<DeviceGradientView<'_, T>> {
        let core = &*self.reducer.core;
        let stream = self.reducer.stream()?;
        let (buckets, _) = core.open_view(parameter, T::DTYPE, true)?;
        let at = At::new(&buckets, parameter, stream);
        Ok(DeviceGradientView { at, core, index: parameter, _buckets: buckets })
    }
}

impl Reducer {
    /// As [`Reducer::gradient`], for a parameter on the reducer's device.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::gradient`].
    pub fn gradient_on_device<T: Element>(&self, parameter: usize) -> Result<DeviceGradient<'_, T>> {
        Ok(DeviceGradient { at: self.reach_on_device(parameter)?, borrowed: PhantomData })
    }

    /// As [`Reducer::gradient_mut`], for a parameter on the reducer's device.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::gradient`].
    pub fn gradient_on_device_mut<T: Element>(&mut self, parameter: usize) -> Result<DeviceGradientMut<'_, T>> {
        Ok(DeviceGradientMut { at: self.reach_on_device(parameter)?, borrowed: PhantomData })
    }

    fn reach_on_device<T: Element>(&self, parameter: usize) -> Result<At<T>> {
        let described = self.core.parameter(parameter)?;
        described.expect(T::DTYPE)?;
        described.expect_place(true)?;
        let stream = self.stream()?;
        Ok(At::new(&self.core.between("gradient_on_device")?.buckets, parameter, stream))
    }

    fn stream(&self) -> Result<Arc<CudaStream>> {
        let stream = self.on.as_ref().and_then(|on| on.keeps());
        stream.cloned().ok_or_else(|| {
            let why = "no parameter of this reducer is on a device".to_owned();
            Error::Unsupported { what: "a gradient on a device", why }
        })
    }
}

/// The elements of a gradient on a device, ordered by a stream.
struct At<T: Element> {
    address: Address,
    count: usize,
    stream: Arc<CudaStream>,
    elements: PhantomData<T>,
}

impl<T: Element> At<T> {
    fn new(buckets: &Buckets, index: usize, stream: Arc<CudaStream>) -> At<T> {
        let (address, len) = buckets.gradient(index);
        At { address: address.addr() as Address, count: len / size_of::<T>(), stream, elements: PhantomData }
    }
}

/// The average of a gradient on the reducer's device; see [`Reducer::gradient_on_device`].
pub struct DeviceGradient<'a, T: Element> {
    at: At<T>,
    borrowed: PhantomData<&'a T>,
}

/// As [`DeviceGradient`], to be changed.
pub struct DeviceGradientMut<'a, T: Element> {
    at: At<T>,
    borrowed: PhantomData<&'a mut T>,
}

/// The memory of a gradient on the reducer's device, to be written; see [`Step::view_on_device`].
/// After it is dropped, the gradient can be viewed again.
pub struct DeviceGradientView<'s, T: Element> {
    at: At<T>,
    core: &'s Core,
    index: usize,
    /// Keeps the memory alive.
    _buckets: Arc<Buckets>,
}

impl<T: Element> DeviceGradientView<'_, T> {
    /// Makes the gradient ready, once the reducer's stream has come this far; see [`Step::ready`].
    ///
    /// # Errors
    ///
    /// Those of [`Step::ready`].
    pub fn ready(self) -> Result<()> {
        self.core.mark(self.index, Gradient::Ready, true)
    }
}

impl<T: Element> Drop for DeviceGradientView<'_, T> {
    fn drop(&mut self) {
        self.core.take_back(self.index);
    }
}

/// Makes cudarc accept these types like its own slices.
macro_rules! slices {
    ($($slice:ident),*; mutable $($mutable:ident),*) => {
        $(
            /// The elements' type and number; the host cannot read the elements.
            impl<T: Element> fmt::Debug for $slice<'_, T> {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    let At { count, .. } = &self.at;
                    f.debug_struct(stringify!($slice)).field("dtype", &T::DTYPE).field("count", count).finish_non_exhaustive()
                }
            }

            impl<T: Element> DeviceSlice<T> for $slice<'_, T> {
                fn len(&self) -> usize {
                    self.at.count
                }

                fn stream(&self) -> &Arc<CudaStream> {
                    &self.at.stream
                }
            }

            impl<T: Element> DevicePtr<T> for $slice<'_, T> {
                fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
                    (self.at.address, in_turn(&self.at.stream, stream))
                }
            }
        )*
        $(
            impl<T: Element> DevicePtrMut<T> for $mutable<'_, T> {
                fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (Address, SyncOnDrop<'a>) {
                    (self.at.address, in_turn(&self.at.stream, stream))
                }
            }
        )*
    };
}

slices!(DeviceGradient, DeviceGradientMut, DeviceGradientView; mutable DeviceGradientMut, DeviceGradientView);

//! The gradient reducer without guards.

use std::ffi::c_void;

use crate::ddp::raw::Stopper;
use crate::ddp::{Bucket, Parameter, Reducer, ReducerBuilder, TensorMut, with_float};
use crate::error::Result;
use crate::types::Rank;

/// A [`Reducer`] for callers that hold addresses instead of borrows. A step is no guard: the caller
/// begins it, makes each gradient ready, and finishes it.
///
/// What a gradient's address may be used for depends on the moment; see [`RawReducer::gradient`].
#[derive(Debug)]
pub struct RawReducer(Reducer);

impl From<Reducer> for RawReducer {
    fn from(reducer: Reducer) -> RawReducer {
        RawReducer(reducer)
    }
}

impl Drop for RawReducer {
    /// Waits until no hook runs.
    fn drop(&mut self) {
        self.0.end();
    }
}

impl RawReducer {
    /// Returns the reducer.
    pub fn get(&self) -> &Reducer {
        &self.0
    }

    /// Returns the reducer, for calls that need it alone.
    pub fn get_mut(&mut self) -> &mut Reducer {
        &mut self.0
    }

    /// Begins a step; see [`Reducer::begin`].
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::begin`].
    pub fn begin(&mut self) -> Result<()> {
        self.0.start(true)
    }

    /// Begins a step that is not reduced; see [`Reducer::accumulate`].
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::accumulate`].
    pub fn accumulate(&mut self) -> Result<()> {
        self.0.start(false)
    }

    /// Returns whether the step's gradients are to be added to those in place.
    pub fn accumulates(&self) -> bool {
        self.0.accumulates()
    }

    /// Returns the address of a parameter's gradient. It stays the same until a
    /// [`RawReducer::begin`] or [`RawReducer::join_step`] rebuilds the buckets, which happens at
    /// most once.
    ///
    /// The caller may write it from the start of a step until the gradient is ready, and read and
    /// write it from the end of the step until the next step begins. In between it belongs to the
    /// reducer.
    ///
    /// # Errors
    ///
    /// [`ReducerError::NoParameter`](crate::ReducerError::NoParameter).
    pub fn gradient(&self, parameter: usize) -> Result<*mut u8> {
        self.0.address(parameter)
    }

    /// Makes a gradient ready that was written in place; see
    /// [`View::ready`](crate::ddp::View::ready). Any thread may call it.
    ///
    /// # Errors
    ///
    /// Those of [`View::ready`](crate::ddp::View::ready).
    pub fn ready(&self, parameter: usize) -> Result<()> {
        self.0.mark(parameter, true)
    }

    /// Declares that this step gives a parameter no gradient; see
    /// [`Step::unused`](crate::ddp::Step::unused).
    ///
    /// # Errors
    ///
    /// Those of [`Step::unused`](crate::ddp::Step::unused).
    pub fn unused(&self, parameter: usize) -> Result<()> {
        self.0.mark(parameter, false)
    }

    /// Copies a gradient of `len` elements into place and makes it ready; see
    /// [`Step::put`](crate::ddp::Step::put) and, for `strides`,
    /// [`Step::put_strided`](crate::ddp::Step::put_strided).
    ///
    /// # Safety
    ///
    /// `gradient` is aligned and valid for reading `len` elements of the parameter's type in host
    /// memory, and does not overlap the gradient in place. If `len` is 0, it may be anything.
    ///
    /// # Errors
    ///
    /// Those of [`Step::put_strided`](crate::ddp::Step::put_strided).
    pub unsafe fn put(&self, parameter: usize, gradient: *const u8, len: usize, strides: Option<&[usize]>) -> Result<()> {
        // For a parameter that does not exist.
        self.0.address(parameter)?;
        with_float!(self.0.parameters()[parameter].dtype, T => {
            // SAFETY: passed on.
            let elements = if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(gradient.cast::<T>(), len) } };
            match strides {
                None => self.0.put(parameter, elements),
                Some(strides) => self.0.put_strided(parameter, elements, strides),
            }
        })
    }

    /// As [`RawReducer::put`], of a gradient at an address of the reducer's device, in the order of
    /// its stream.
    ///
    /// # Safety
    ///
    /// The parameter's elements are at that address until the stream has passed the copy.
    ///
    /// # Errors
    ///
    /// Those of [`Step::put`](crate::ddp::Step::put), and [`Error::Device`](crate::Error::Device).
    pub unsafe fn put_on_device(&self, parameter: usize, gradient: u64) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.0.put_on_device(parameter, gradient) }
    }

    /// Ends the step; see [`Step::finish`](crate::ddp::Step::finish).
    ///
    /// # Errors
    ///
    /// Those of [`Step::finish`](crate::ddp::Step::finish).
    pub fn finish(&self) -> Result<()> {
        self.0.finish()
    }

    /// Takes part in one step of the ranks that have input, with zeros; see [`Reducer::join`].
    /// Returns false if no rank has input any more.
    ///
    /// # Errors
    ///
    /// Those of [`Reducer::join`].
    pub fn join_step(&mut self) -> Result<bool> {
        self.0.join_step()
    }

    /// Returns the lowest rank that made the last step.
    ///
    /// # Errors
    ///
    /// [`ReducerError::Moment`](crate::ReducerError::Moment) within a step.
    pub fn last(&self) -> Result<Rank> {
        self.0.last()
    }

    /// Returns whether a parameter got a gradient in the last step; see [`Reducer::is_used`].
    ///
    /// # Errors
    ///
    /// [`ReducerError::NoParameter`](crate::ReducerError::NoParameter).
    pub fn is_used(&self, parameter: usize) -> Result<bool> {
        self.0.was_used(parameter)
    }

    /// Returns a handle with which any thread ends the reducer while others use it.
    pub fn stopper(&self) -> Stopper {
        self.0.stopper()
    }
}

/// Sets the device of the parameters that are [on one](Parameter::on_device): its number in this
/// process, and the stream there in whose order gradients are written and read (a `cudaStream_t`;
/// null is the default stream).
///
/// # Safety
///
/// The driver dereferences the pointer. It is null, or a stream of this process that outlives the
/// builder and the reducer.
pub unsafe fn on_device(builder: ReducerBuilder, ordinal: usize, stream: *mut c_void) -> ReducerBuilder {
    builder.on_device(ordinal, stream)
}

/// Returns the address of a bucket's elements, for a hook. It is valid until the hook returns: on
/// the host, or on the device if [`Bucket::is_on_device`].
pub fn bucket_address(bucket: &mut Bucket<'_>) -> *mut u8 {
    bucket.address()
}

/// Borrows the values of a parameter or buffer at an address.
///
/// # Safety
///
/// For `'a`, the address is aligned and valid for reading and writing the parameter's elements, and
/// nothing else uses them. The elements of a [`DType::Bool`](crate::DType::Bool) may be any bytes.
/// If the parameter is on a device, the address is valid there, in the order of the reducer's
/// stream.
pub unsafe fn tensor<'a>(address: *mut u8, parameter: &Parameter) -> TensorMut<'a> {
    // SAFETY: passed on.
    unsafe { TensorMut::at(address, parameter) }
}

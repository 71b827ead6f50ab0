//! A view of a gradient that is written, and how a gradient that lies elsewhere gets to its place.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::buckets::Buckets;
use super::core::Core;
use super::gather;
use super::hook::with_float;
use super::parameter::Parameter;
use super::state::Gradient;
use crate::buffer::Address;
use crate::error::{ReducerError, Result};
use crate::types::Element;

/// What threads do in a step, through [`Step`](super::Step) or the C ABI.
impl Core {
    pub(super) fn view<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        let (buckets, accumulates) = self.open_view(index, T::DTYPE, false)?;
        let (address, len) = buckets.gradient(index);
        Ok(View { core: self, index, elements: address.cast(), count: len / size_of::<T>(), accumulates, _buckets: buckets })
    }

    pub(super) fn put<T: Element>(&self, index: usize, gradient: &[T]) -> Result<()> {
        self.parameter(index)?.expect_count(gradient.len())?;
        let mut view = self.view::<T>(index)?;
        let adds = view.accumulates;
        with_float!(T::DTYPE, F => gather::contiguous(same::<T, F>(gradient), same_mut::<T, F>(&mut view), adds));
        view.ready()
    }

    /// As [`Step::put`](super::Step::put), for a gradient on the reducer's device, in the order of
    /// its stream.
    ///
    /// # Safety
    ///
    /// `from` holds the parameter's elements until the stream has passed the copy.
    pub(super) unsafe fn put_on_device(&self, index: usize, from: Address) -> Result<()> {
        let (buckets, adds) = self.open_view(index, self.parameter(index)?.dtype, true)?;
        // SAFETY: the gradient is in view of this call alone, and the caller promises the rest.
        let put = unsafe { buckets.put(&self.comm, &self.parameters[index].name, index, from, adds) };
        if put.is_err() {
            self.take_back(index);
            return put;
        }
        // The gradient was added, and must not be added again.
        self.mark(index, Gradient::Ready, true).inspect_err(|error| self.fail(error.clone()))
    }

    pub(super) fn put_strided<T: Element>(&self, index: usize, memory: &[T], strides: &[usize]) -> Result<()> {
        let Parameter { name, shape, .. } = self.parameter(index)?;
        let refuse = |what: &str, expected, given| ReducerError::Length { name: format!("{what} of {name}"), expected, given };
        if strides.len() != shape.len() {
            return Err(refuse("the strides", shape.len(), strides.len()).into());
        }
        let span = gather::span(shape, strides);
        if span.is_none_or(|span| span > memory.len()) {
            return Err(refuse("the memory", span.unwrap_or(usize::MAX), memory.len()).into());
        }
        let mut view = self.view::<T>(index)?;
        let adds = view.accumulates;
        with_float!(T::DTYPE, F => {
            gather::strided(same::<T, F>(memory), shape, strides, same_mut::<T, F>(&mut view), adds);
        });
        view.ready()
    }
}

/// The memory of a gradient, which the ranks of the host share, as a slice of elements. After it is
/// dropped, the gradient can be viewed again.
///
/// The initial content is undefined, unless the step [accumulates](super::Step::accumulates).
#[derive(Debug)]
pub struct View<'s, T: Element> {
    core: &'s Core,
    index: usize,
    elements: *mut T,
    count: usize,
    accumulates: bool,
    /// Keeps the memory alive.
    _buckets: Arc<Buckets>,
}

// SAFETY: a view is a mutable slice of elements, which are Send, and references to Sync types.
unsafe impl<T: Element> Send for View<'_, T> {}
// SAFETY: as for `Send`; a shared view allows only reads.
unsafe impl<T: Element> Sync for View<'_, T> {}

impl<T: Element> View<'_, T> {
    /// Makes the gradient ready; see [`Step::ready`](super::Step::ready).
    ///
    /// # Errors
    ///
    /// The failure that ended the reducer.
    pub fn ready(self) -> Result<()> {
        let (core, index) = (self.core, self.index);
        // The gradient stays in view until then, and dropping the view finds it marked.
        core.mark(index, Gradient::Ready, true)
    }
}

impl<T: Element> Deref for View<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the gradient's memory has `count` elements of this type and belongs to this view
        // alone. Its bucket is not launched meanwhile, so no peer writes it.
        unsafe { std::slice::from_raw_parts(self.elements, self.count) }
    }
}

impl<T: Element> DerefMut for View<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.elements, self.count) }
    }
}

impl<T: Element> Drop for View<'_, T> {
    fn drop(&mut self) {
        self.core.take_back(self.index);
    }
}

/// Returns a slice under the other name of its type.
fn same<T: Element, F: Element>(slice: &[T]) -> &[F] {
    assert_eq!(T::DTYPE, F::DTYPE);
    // SAFETY: both names stand for the same type, since each DType has one.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) }
}

fn same_mut<T: Element, F: Element>(slice: &mut [T]) -> &mut [F] {
    assert_eq!(T::DTYPE, F::DTYPE);
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) }
}

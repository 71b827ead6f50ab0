//! Replaces `on_device` where the feature `cuda` is off: a reducer with a device is refused, so there are
//! no values of these types.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::Arc;

use super::layout::Layout;
use crate::buffer::{Address, StreamId};
use crate::communicator::{Communicator, Registered};
use crate::error::Result;
use crate::progress::state::no_devices;
use crate::types::{DType, Rank, ReduceOp};

/// What C chooses. It is refused when the reducer is built.
#[derive(Clone)]
pub(crate) struct Chosen {
    pub(crate) ordinal: usize,
}

impl Chosen {
    pub(super) fn new(ordinal: usize, _: StreamId) -> Chosen {
        Chosen { ordinal }
    }
}

pub(super) struct BucketDevice(Infallible);

pub(super) struct DeviceMemory(Infallible);

pub(super) struct DeviceElements<'a>(Infallible, PhantomData<&'a mut [u8]>);

#[derive(Default)]
pub(super) struct ConversionBuffer(());

impl BucketDevice {
    pub(super) fn new(_: &Communicator, _: Chosen, _: impl IntoIterator<Item = DType>) -> Result<BucketDevice> {
        Err(no_devices("device memory"))
    }

    pub(super) fn expect_here(&self, _: &Communicator, _: &str, _: Address) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn drain(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn catch_up(&self, _: &Communicator) -> Result<()> {
        match self.0 {}
    }
}

/// Without a value, none of these can be called.
impl BucketDevice {
    pub(super) unsafe fn copy(&self, _: Address, _: Address, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) unsafe fn zero(&self, _: Address, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) unsafe fn add(&self, _: DType, _: Address, _: Address, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) unsafe fn scale_in_turn(&self, _: &Communicator, _: DType, _: Address, _: usize, _: f64) -> Result<()> {
        match self.0 {}
    }

    pub(super) unsafe fn all_reduce(&self, _: &Communicator, _: (DType, ReduceOp), _: Address, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) unsafe fn broadcast(&self, _: &Communicator, _: DType, _: Address, _: usize, _: Rank) -> Result<()> {
        match self.0 {}
    }
}

impl DeviceMemory {
    pub(super) fn allocate(_: Option<&Arc<BucketDevice>>, _: &Layout) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }

    pub(super) fn on(&self) -> &Arc<BucketDevice> {
        match self.0 {}
    }

    pub(super) fn base(&self) -> Address {
        match self.0 {}
    }

    pub(super) fn mark(&self, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn until_there(&self, _: &Communicator, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn abandon(&self) {
        match self.0 {}
    }
}

impl<'a> DeviceElements<'a> {
    /// # Safety
    ///
    /// There is no device that it could be called with.
    pub(super) unsafe fn new(
        on: &'a BucketDevice,
        _: &'a Communicator,
        _: (Address, usize),
        _: &'a mut Option<Registered<u8>>,
    ) -> DeviceElements<'a> {
        match on.0 {}
    }

    pub(super) fn at(&self) -> Address {
        match self.0 {}
    }

    pub(super) fn bytes(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn is_fetched(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn fetch(&mut self) -> Result<&mut [u8]> {
        match self.0 {}
    }

    pub(super) fn bring_back(&mut self) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn scale(&self, _: DType, _: usize, _: f64) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn average(&self, _: &Communicator, _: DType, _: usize) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn sum_as(&self, _: &Communicator, _: (DType, DType), _: &mut ConversionBuffer, _: f64) -> Result<()> {
        match self.0 {}
    }
}

//! Collectives of which some buffers, or all, are in the memory of GPUs.
//!
//! A call finds the device of its buffers ([`bind`]), and is a [`call`] on a device from then on. The
//! [`caller`] enqueues all of its work on a stream ([`enqueue`]). The stream and the host then run the
//! call together by words in pinned memory ([`crate::cuda::words`]), and the operation
//! needs no driver call ([`operation`]). So nothing that the driver waits for can keep an operation
//! from ending, and the host can always let the stream continue.
//!
//! Short calls pass through pinned host memory as a whole. For longer ones the ranks find out in the
//! first call ([`prepare`]) whether kernels can reach the memory of all of them:
//!
//! - If they can, the call is direct: one kernel on each GPU reads and writes the buffers of all
//!   ranks where they are, or a round after the other in areas if a buffer cannot be reached. A short
//!   all-reduce may be one-shot.
//! - Otherwise it is staged: it passes in rounds through pinned host memory. While one segment is
//!   reduced there, the next one comes from the device.
//!
//! Ranks wait for each other on the host, because a stream that waits for a process which has died
//! never continues. Where each rank has a GPU of its own, kernels may wait for each other
//! ([`crate::cuda::barrier`]): for a limited time, and until the host cancels it.
//!
//! A CUDA graph may [`capture`] a call. It runs each time that the graph is replayed ([`graphs`]).

mod agree;
#[cfg(test)]
mod barrier_tests;
mod bind;
mod call;
mod caller;
mod capture;
mod direct;
#[cfg(test)]
mod driver_tests;
mod enqueue;
#[cfg(test)]
mod graph_tests;
mod graphs;
mod handshake;
mod host_area;
#[cfg(test)]
mod memory_tests;
mod message;
mod mode;
mod operation;
mod prepare;
mod staged;
mod state;
#[cfg(test)]
mod tests;
mod verify;
mod watchdog;

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use call::{DeviceCall, device_call, refused};
use caller::Caller;
use handshake::Handshake;
use operation::DeviceOperation;

use crate::buffer::StreamId;
use crate::call::Call;
#[cfg(test)]
use crate::cuda::device::Driver;
use crate::error::Result;
use crate::exec::Core;
use crate::progress::CommState;
use crate::progress::state::{DeviceMessage, Devices, Exclusively};

pub(crate) use state::{DeviceState, drain};

impl Devices for DeviceState {
    fn attach(&self, state: &Weak<CommState>) {
        _ = self.comm.set(state.clone());
    }

    fn are_there(&self, state: &CommState) -> bool {
        self.driver(state).is_some()
    }

    fn of_same_process(&self) -> Box<dyn Devices> {
        let other = DeviceState::default();
        if let Some(driver) = self.driver.get() {
            _ = other.driver.set(driver.clone());
        }
        Box::new(other)
    }

    #[inline(never)]
    fn bind(&self, state: &CommState, call: &mut Call, stream: StreamId) -> Result<()> {
        self.try_to_bind(state, call, stream).map_err(refused)
    }

    fn concerns(&self, state: &CommState, call: &Call) -> bool {
        call.on_device.is_some() || state.asks(call)
    }

    fn enqueue(
        &self,
        state: &CommState,
        exclusively: &Exclusively<'_>,
        calls: &[Call],
        is_apart: bool,
        queue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        Caller { state, devices: self, exclusively }.enqueue(calls, is_apart, queue)
    }

    unsafe fn run(&self, state: &CommState, core: &mut Core, call: &Call) -> Result<()> {
        // SAFETY: passed on.
        unsafe { DeviceOperation::new(state, self, core, call).run() }
    }

    fn can_begin(&self, call: &Call) -> bool {
        device_call(call).is_none_or(|bound| DeviceState::can_begin(self, bound))
    }

    fn begin_message(&self, state: &CommState, call: &mut Call) -> Result<Option<Box<dyn DeviceMessage>>> {
        message::begin_message(self, state, call)
    }

    fn has_graphs(&self) -> bool {
        self.graphs.is_any()
    }

    fn next_replay(&self) -> Option<Vec<Call>> {
        self.graphs.next_replay()
    }

    fn wait_to_begin(&self, state: &CommState, call: &Call, seq: Option<u64>) -> Result<Option<Vec<Call>>> {
        let Some(bound) = device_call(call).filter(|bound| !bound.has_arrived()) else { return Ok(None) };
        let replayed = RefCell::new(None);
        let is_there = |handshake: &Handshake| {
            let has_arrived = handshake.words().has_arrived(0);
            let mut replayed = replayed.borrow_mut();
            *replayed = if has_arrived { None } else { self.graphs.next_replay() };
            has_arrived || replayed.is_some()
        };
        state.until_stream(call, bound, seq, is_there)?;
        Ok(replayed.into_inner())
    }

    fn release(&self) {
        let all: Vec<Arc<DeviceCall>> = self.on_streams.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|bound| bound.release());
    }

    fn abandon(&self) {
        self.graphs.abandon();
    }

    fn abandon_memory(&self) {
        self.calling.lock().abandon();
    }
}

#[cfg(test)]
impl DeviceState {
    /// Replaces the devices of the machine.
    pub(crate) fn set_driver(&self, driver: Arc<dyn Driver>) {
        assert!(self.driver.set(Some(driver)).is_ok(), "the devices have been looked for");
    }
}

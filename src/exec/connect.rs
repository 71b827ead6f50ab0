//! How the ranks of a communicator come to share memory or links before its first operation.

use std::sync::Arc;
use std::time::Instant;

use super::core::Core;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::config::SharedSettings;
use crate::error::Result;
use crate::failure::{CommInfo, OpContext, agree_on_report};
use crate::host_group::area::Area;
use crate::network::fabric::Fabric;
use crate::rendezvous::peer_failed;
use crate::schedule::Algorithm;
use crate::shm::{self, Autotune, Window};
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp};

/// How the ranks of a part of a communicator share memory.
pub(crate) enum Agreed {
    /// By a window on each host. The area is this host's, if several ranks are on it; then comes
    /// what its ranks have measured before.
    Windows(Option<Area>, Option<u64>),
    /// Not at all: they exchange messages.
    Messages,
}

impl Core {
    /// Connects the ranks of `fabric`, all of which call this together.
    pub(crate) fn start(fabric: Fabric, settings: SharedSettings, info: &CommInfo, began: Instant) -> Result<Core> {
        let mut core = Core::new(fabric, settings);
        core.connect(info, began)?;
        Ok(core)
    }

    /// Connects the ranks of `fabric`, a part of a communicator through which they have agreed on
    /// how they share memory.
    pub(crate) fn start_part(fabric: Fabric, settings: SharedSettings, info: &CommInfo, agreed: Agreed) -> Result<Core> {
        let mut core = Core::new(fabric, settings);
        match agreed {
            Agreed::Windows(area, tuning) => {
                if let Some(area) = area {
                    core.enter(info, area, tuning);
                }
            }
            Agreed::Messages => core.leave_windows(),
        }
        // Between hosts no rank opens links before it needs them.
        if core.layout.windows && core.layout.hosts == 1 {
            core.finish_connecting(info, |core| core.first_barrier(info))?;
        }
        Ok(core)
    }

    /// Connects with the other ranks, which do the same. It comes before every operation.
    pub(crate) fn connect(&mut self, info: &CommInfo, began: Instant) -> Result<()> {
        self.finish_connecting(info, |core| core.try_to_connect(info, began))
    }

    /// Reports a failure to connect as that of an operation.
    pub(super) fn finish_connecting<T>(&mut self, info: &CommInfo, connect: impl FnOnce(&mut Core) -> Result<T>) -> Result<T> {
        connect(self).map_err(|error| {
            let error = agree_on_report(self.fabric.status(), info, error);
            self.leave(true);
            self.recording.failed(&error);
            error
        })
    }

    fn try_to_connect(&mut self, info: &CommInfo, began: Instant) -> Result<()> {
        if self.fabric.world() == 1 {
            return Ok(());
        }
        let neighbours = self.fabric.neighbours();
        self.open_window(info, &neighbours, began)?;
        self.first_barrier(info)?;
        self.measure_costs(info)
    }

    /// Waits until all ranks have connected.
    fn first_barrier(&mut self, info: &CommInfo) -> Result<()> {
        let descriptor = Descriptor { op: Op::Connect, ..Descriptor::nothing() };
        let entry = self.recording.history.begin(&descriptor.encode(), 0, 0);
        let choice = self.choose(Op::Barrier, 0);
        let context = OpContext::new(descriptor, info);
        // SAFETY: a barrier touches no buffer.
        let result = unsafe { self.run_on_path(Some(choice), &context, &Call::new::<u8>(Op::Barrier)) };
        self.recording.history.end(entry, result.is_ok());
        result
    }

    /// Shares a window with the ranks of this host, if every rank of every host can.
    fn open_window(&mut self, info: &CommInfo, neighbours: &Arc<[Rank]>, began: Instant) -> Result<()> {
        if !self.layout.windows {
            return Ok(());
        }
        let mut has_window = neighbours.len() <= shm::MOST_RANKS;
        if neighbours.len() > 1 && has_window {
            let shared = self.fabric.share(began + info.timeout);
            let area = shared.map_err(|failed| peer_failed(failed, &info.members, began))?;
            has_window = area.is_some();
            if let Some(area) = area {
                self.enter(info, area, None);
            }
        }
        if self.layout.hosts > 1 {
            // This rank cannot see the windows of other hosts.
            let mut all_have = [u8::from(has_window)];
            let memory = RawSliceMut::of(&mut all_have);
            let call = Call { redop: Some(ReduceOp::Min), ..Call::in_place(Op::AllReduce, DType::U8, memory) };
            let descriptor = Descriptor { op: Op::Connect, count: 1, ..Descriptor::nothing() };
            // SAFETY: `all_have` is borrowed for the call.
            unsafe { self.run_in_order_of_ranks(OpContext::new(descriptor, info), &call, Algorithm::RecursiveDoubling, None)? };
            has_window = all_have[0] != 0;
        }
        if !has_window {
            self.leave_windows();
        }
        Ok(())
    }

    /// Uses a window in this area from now on; `tuning` is what all its ranks have measured before.
    fn enter(&mut self, info: &CommInfo, area: Area, tuning: Option<u64>) {
        let host = self.fabric.host().expect("there is no area without a host group").clone();
        let neighbours = self.fabric.neighbours();
        let jobs = neighbours.iter().map(|&rank| self.fabric.members()[rank]).collect();
        let autotune = Autotune::with_tuning(self.settings.copy_mode, tuning);
        let window = Window::new(area, neighbours, jobs, host, self.patience.clone(), autotune, self.settings.flag_layout);
        info.cancel.attach(window.waker());
        self.fabric.status().read_written(Box::new(window.written()));
        self.window = Some(window);
    }

    /// Has all ranks exchange messages instead, because a rank has no window.
    fn leave_windows(&mut self) {
        crate::log::warn!("ranks of a host cannot share memory; they exchange messages instead");
        self.window = None;
        // This rank leaves the window without a word, and so do its peers.
        self.fabric.status().read_written(Box::new(|_| None));
        self.layout.windows = false;
        self.fabric.leave_host();
    }
}

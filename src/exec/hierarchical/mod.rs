//! Collectives over several hosts with several ranks each: shared memory inside each host, messages
//! between hosts.

mod blocks;

use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::Result;
use crate::exec::core::Core;
use crate::failure::OpContext;
use crate::schedule::{Algorithm, chunk};
use crate::shm::Window;
use crate::types::{Op, Rank};

impl Core {
    /// Runs a collective with `between` as the algorithm between hosts.
    ///
    /// # Safety
    ///
    /// The call was checked. Its buffers are valid until this returns, and nothing else uses them.
    pub(super) unsafe fn run_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        context.begin();
        // SAFETY: passed on.
        unsafe {
            match call.op {
                Op::AllReduce => self.all_reduce_hierarchical(context, call, between),
                Op::Reduce => self.reduce_hierarchical(context, call, between),
                Op::Broadcast => self.broadcast_hierarchical(context, call, between),
                Op::Barrier => self.barrier_hierarchical(context, between),
                Op::AllGather | Op::AllGatherV => self.all_gather_hierarchical(context, call, between),
                Op::ReduceScatter | Op::ReduceScatterV => self.reduce_scatter_hierarchical(context, call, between),
                Op::AllToAll => self.all_to_all_hierarchical(context, call, between),
                Op::Gather => self.gather_hierarchical(context, call, between),
                Op::Scatter => self.scatter_hierarchical(context, call, between),
                op => unreachable!("{op} is not composed"),
            }
        }
    }

    /// Each host reduce-scatters, so that each rank holds a chunk; ranks with the same index on
    /// their hosts (a "column") all-reduce their chunk; each host all-gathers.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    unsafe fn all_reduce_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let element = call.dtype.size();
        let columns = self.layout.fewest_per_host;
        let (place, neighbours) = self.place_on_host();
        // Ranks beyond the fewest of any host have no chunk of their own.
        let offset = |rank| if rank < columns { chunk(call.count, columns, rank).start } else { call.count };
        let offsets: Vec<usize> = (0..=neighbours).map(offset).collect();
        let own = call.recv.skip(offsets[place] * element).take((offsets[place + 1] - offsets[place]) * element);
        let local = |op, send, recv| call.unfinished_part(op, send, recv).divided_at(&offsets);
        // SAFETY: passed on; `own` is this rank's part of the receive buffer, and the calls are in
        // place or apart.
        unsafe {
            if let Some(window) = &mut self.window {
                window.run(context, &local(Op::ReduceScatterV, call.send, own))?;
            } else if call.send.ptr != call.recv.ptr {
                std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.send.len);
            }
            if place < columns && own.len > 0 {
                let column = self.column(place);
                let between_hosts = Call { count: own.len / element, ..call.part(Op::AllReduce, own.as_const(), own) };
                let compression = self.compression(call);
                self.run_among(context.clone(), &between_hosts, &column, between, compression)?;
            }
            match &mut self.window {
                Some(window) => window.run(context, &local(Op::AllGatherV, own.as_const(), call.recv)),
                None => Ok(()),
            }
        }
    }

    /// Each host reduces to its leader, on the root's host the root; the leaders reduce to the
    /// root.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    unsafe fn reduce_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let (leaders, root) = self.leaders(call.root);
        let is_leader = leaders.contains(&context.info.rank);
        let mut partial = std::mem::take(&mut self.partial);
        let output = if context.info.rank == call.root {
            call.recv
        } else if is_leader {
            partial.resize(call.send.len.div_ceil(size_of::<u64>()), 0);
            RawSliceMut::of(&mut partial).take(call.send.len)
        } else {
            RawSliceMut::EMPTY
        };
        let leader = self.leader_of_this_host(&leaders);
        // SAFETY: passed on; partial results are this rank's own.
        let result = unsafe {
            let reduced = match &mut self.window {
                Some(window) => {
                    let local = call.unfinished_part(Op::Reduce, call.send, output);
                    window.run(context, &Call { count: call.count, root: leader, ..local })
                }
                None => {
                    if call.send.ptr != output.ptr {
                        std::ptr::copy_nonoverlapping(call.send.ptr, output.ptr, output.len);
                    }
                    Ok(())
                }
            };
            reduced.and_then(|()| {
                if !is_leader {
                    return Ok(());
                }
                let of_leaders = Call { count: call.count, root, ..call.part(Op::Reduce, output.as_const(), output) };
                let compression = self.compression(call);
                self.run_among(context.clone(), &of_leaders, &leaders, between, compression)
            })
        };
        self.partial = partial;
        result
    }

    /// The root broadcasts to the leader of each host; each leader broadcasts inside its host.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    unsafe fn broadcast_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let (leaders, root) = self.leaders(call.root);
        let leader = self.leader_of_this_host(&leaders);
        // SAFETY: passed on.
        unsafe {
            if context.info.rank == call.root && call.send.ptr != call.recv.ptr {
                std::ptr::copy_nonoverlapping(call.send.ptr, call.recv.ptr, call.send.len);
            }
            if leaders.contains(&context.info.rank) {
                let of_leaders = Call { count: call.count, root, ..call.part(Op::Broadcast, call.recv.as_const(), call.recv) };
                self.run_among(context.clone(), &of_leaders, &leaders, between, None)?;
            }
            let Some(window) = &mut self.window else { return Ok(()) };
            let local = call.part(Op::Broadcast, call.recv.as_const(), call.recv);
            window.run(context, &Call { count: call.count, root: leader, ..local })
        }
    }

    /// Each host waits for its own ranks, the leaders wait for each other, and each host waits for
    /// its leader.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    unsafe fn barrier_hierarchical(&mut self, context: &OpContext<'_>, between: Algorithm) -> Result<()> {
        let (leaders, _) = self.leaders(0);
        let local = Call::new::<u8>(Op::Barrier);
        // SAFETY: no buffer is touched.
        unsafe {
            if let Some(window) = &mut self.window {
                window.run(context, &local)?;
            }
            if leaders.contains(&context.info.rank) {
                self.run_among(context.clone(), &local, &leaders, between, None)?;
            }
            match &mut self.window {
                Some(window) => window.run(context, &local),
                None => Ok(()),
            }
        }
    }

    /// The ranks with the same index on every host, in the order in which schedules visit hosts.
    fn column(&self, place: usize) -> Vec<Rank> {
        let hosts = self.fabric.hosts();
        let nth = |host: usize| (0..hosts.len()).filter(|&rank| hosts[rank] == host).nth(place);
        self.first_on_host.iter().copied().filter_map(nth).collect()
    }

    /// The leader of each host, which is the root on the root's host, in the order in which schedules
    /// visit hosts, and the root's index among them.
    fn leaders(&self, root: Rank) -> (Vec<Rank>, Rank) {
        let hosts = self.fabric.hosts();
        let leader = |host: usize| if hosts[root] == host { root } else { host };
        let leaders: Vec<Rank> = self.first_on_host.iter().copied().map(leader).collect();
        let index = leaders.iter().position(|&leader| leader == root).expect("the root is a leader");
        (leaders, index)
    }

    /// The index of this host's leader among the host's ranks.
    fn leader_of_this_host(&self, leaders: &[Rank]) -> usize {
        let members = self.window.as_ref().map(Window::members);
        members.and_then(|members| members.iter().position(|member| leaders.contains(member))).unwrap_or(0)
    }
}

//! Collectives of blocks over several hosts. The ranks with the same place on their hosts form a
//! column. A column carries the blocks of its own ranks, and so each byte crosses a host's link once for
//! each host that needs it. A rank whose place some host does not have uses the column of its place
//! modulo the number of columns.

use std::ops::Range;

use crate::buffer::{RawSlice, RawSliceMut};
use crate::call::Call;
use crate::error::Result;
use crate::exec::core::Core;
use crate::failure::OpContext;
use crate::schedule::{Algorithm, Blocks};
use crate::shm::Window;
use crate::types::{Op, Rank};

/// The ranks by host, and the blocks of all ranks in the order in which the columns carry them: by column,
/// then by host, then by place.
struct Columns {
    /// The ranks of each host. Hosts are in the order in which schedules visit them.
    hosts: Vec<Vec<Rank>>,
    columns: usize,
    /// This rank's host and its place there.
    host: usize,
    place: usize,
}

/// A block in the order of the columns and in that of the ranks, in elements.
struct Moved {
    packed: Range<usize>,
    ranked: Range<usize>,
}

impl Columns {
    fn of(core: &Core) -> Columns {
        let first = core.fabric().hosts();
        let mut hosts: Vec<Vec<Rank>> = vec![Vec::new(); core.layout().hosts];
        let mut index = vec![0; first.len()];
        for (host, &rank) in core.first_on_host.iter().enumerate() {
            index[rank] = host;
        }
        for rank in 0..first.len() {
            hosts[index[first[rank]]].push(rank);
        }
        let own = core.fabric().rank();
        let host = index[first[own]];
        let place = hosts[host].iter().position(|&rank| rank == own).expect("this rank is on its host");
        Columns { columns: core.layout().fewest_per_host, hosts, host, place }
    }

    /// The ranks of a column, one on each host, in the order of hosts.
    fn ranks(&self, column: usize) -> Vec<Rank> {
        self.hosts.iter().map(|host| host[column]).collect()
    }

    /// The ranks of a host that use a column.
    fn users(&self, host: usize, column: usize) -> impl Iterator<Item = Rank> + '_ {
        self.hosts[host].iter().copied().skip(column).step_by(self.columns)
    }

    /// Whether each rank of this host has a column of its own.
    fn has_column_for_each(&self) -> bool {
        self.hosts[self.host].len() == self.columns
    }

    /// Where each column's part of the packed blocks starts, and in it that of each host. Both lists end
    /// with the end.
    fn offsets(&self, blocks: Blocks<'_>) -> (Vec<usize>, Vec<Vec<usize>>) {
        let mut at = 0;
        let (mut of_columns, mut of_hosts) = (vec![0], Vec::with_capacity(self.columns));
        for column in 0..self.columns {
            let mut ends = vec![0];
            let start = at;
            for host in 0..self.hosts.len() {
                at += self.users(host, column).map(|rank| blocks.range(rank).len()).sum::<usize>();
                ends.push(at - start);
            }
            of_hosts.push(ends);
            of_columns.push(at);
        }
        (of_columns, of_hosts)
    }

    /// All blocks, in the order of the columns.
    fn moved(&self, blocks: Blocks<'_>) -> Vec<Moved> {
        let mut at = 0;
        let in_order = (0..self.columns).flat_map(|column| (0..self.hosts.len()).map(move |host| (column, host)));
        let ranks = in_order.flat_map(|(column, host)| self.users(host, column));
        let moved = ranks.map(|rank| {
            let ranked = blocks.range(rank);
            let packed = at..at + ranked.len();
            at = packed.end;
            Moved { packed, ranked }
        });
        moved.collect()
    }

    /// Whether the ranks of the hosts, one host after the other, are in the order of ranks.
    fn are_in_order(&self) -> bool {
        self.hosts.iter().flatten().copied().eq(0..)
    }
}

/// The blocks of the ranks, by host, where each host has a leader.
struct AtLeaders {
    leaders: Vec<Rank>,
    /// The root's index among them.
    root: Rank,
    /// The place of this host's leader.
    leader: usize,
    /// Where the blocks of each host start, in elements, and where the last ones end.
    ends: Vec<usize>,
    /// Bytes of this host's blocks, at its leader.
    own_host: usize,
    /// Bytes of the blocks of all hosts, at a root that has ranks in another order.
    all: usize,
    is_leader: bool,
    /// Whether this is a root whose buffer has the blocks in the order of hosts.
    is_direct: bool,
}

/// Copies elements from one buffer to another, which does not overlap it.
///
/// # Safety
///
/// Both are valid for the bytes that are copied.
unsafe fn copy(from: RawSlice, from_elements: &Range<usize>, to: RawSliceMut, to_start: usize, element: usize) {
    let bytes = from_elements.len() * element;
    let (from, to) = (from.skip(from_elements.start * element).take(bytes), to.skip(to_start * element).take(bytes));
    assert_eq!(from.len, to.len, "a block extends beyond a buffer");
    // SAFETY: passed on; both have been cut to the same length.
    unsafe { std::ptr::copy_nonoverlapping(from.ptr, to.ptr, bytes) };
}

/// A part of a buffer, in elements.
fn part(memory: RawSliceMut, elements: Range<usize>, element: usize) -> RawSliceMut {
    memory.skip(elements.start * element).take(elements.len() * element)
}

/// Memory of the communicator for the blocks of one call.
fn scratch(memory: &mut Vec<u64>, bytes: usize) -> RawSliceMut {
    memory.resize(bytes.div_ceil(size_of::<u64>()), 0);
    RawSliceMut::of(memory).take(bytes)
}

impl Core {
    /// Each column all-gathers its blocks between hosts; each host all-gathers what its columns have.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    pub(super) unsafe fn all_gather_hierarchical(
        &mut self,
        context: &OpContext<'_>,
        call: &Call,
        between: Algorithm,
    ) -> Result<()> {
        let element = call.dtype.size();
        let columns = Columns::of(self);
        let blocks = call.recv_counts.as_ref().map_or(Blocks::Even(call.count), |counts| counts.blocks());
        let (of_columns, of_hosts) = columns.offsets(blocks);
        let all = of_columns[columns.columns] * element;
        let of_host: Vec<usize> = sums(columns.hosts[columns.host].iter().map(|&rank| blocks.range(rank).len()));
        let mut partial = std::mem::take(&mut self.partial);
        let memory = scratch(&mut partial, all + of_host[of_host.len() - 1] * element);
        let (packed, own_host) = (memory.take(all), memory.skip(all));
        // SAFETY: passed on. The parts of the scratch memory are apart.
        let result = unsafe {
            (|| {
                if columns.has_column_for_each() {
                    let at = of_columns[columns.place] + of_hosts[columns.place][columns.host];
                    copy(call.send, &(0..call.send.len / element), packed, at, element);
                } else if let Some(window) = &mut self.window {
                    window.run(context, &call.part(Op::AllGatherV, call.send, own_host).divided_at(&of_host))?;
                    for column in 0..columns.columns {
                        let mut at = of_columns[column] + of_hosts[column][columns.host];
                        for place in (column..of_host.len() - 1).step_by(columns.columns) {
                            let from = of_host[place]..of_host[place + 1];
                            copy(own_host.as_const(), &from, packed, at, element);
                            at += from.len();
                        }
                    }
                }
                if columns.place < columns.columns {
                    let hosts = &of_hosts[columns.place];
                    let output = part(packed, of_columns[columns.place]..of_columns[columns.place + 1], element);
                    let input = part(output, hosts[columns.host]..hosts[columns.host + 1], element).as_const();
                    self.run_on_column(context, &columns, (Op::AllGatherV, between), (input, output), hosts, call)?;
                }
                if let Some(window) = &mut self.window {
                    let places = by_place(&of_columns, window);
                    let own = places[columns.place]..places[columns.place + 1];
                    let gather = call.part(Op::AllGatherV, part(packed, own, element).as_const(), packed);
                    window.run(context, &gather.divided_at(&places))?;
                }
                for Moved { packed: from, ranked: to } in columns.moved(blocks) {
                    copy(packed.as_const(), &from, call.recv, to.start, element);
                }
                Ok(())
            })()
        };
        self.partial = partial;
        result
    }

    /// Each host reduce-scatters, so that each column has the host's part of its blocks; each column
    /// reduce-scatters between hosts.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    pub(super) unsafe fn reduce_scatter_hierarchical(
        &mut self,
        context: &OpContext<'_>,
        call: &Call,
        between: Algorithm,
    ) -> Result<()> {
        let element = call.dtype.size();
        let columns = Columns::of(self);
        let blocks = call.send_counts.as_ref().map_or(Blocks::Even(call.count), |counts| counts.blocks());
        let (of_columns, of_hosts) = columns.offsets(blocks);
        let all = of_columns[columns.columns] * element;
        let mut partial = std::mem::take(&mut self.partial);
        // The blocks, and the results of this host's ranks in the order of the columns.
        let of_host = |column: usize| of_hosts[column][columns.host + 1] - of_hosts[column][columns.host];
        let results = sums((0..columns.columns).map(of_host));
        let memory = scratch(&mut partial, all + results[columns.columns] * element);
        let (packed, reduced) = (memory.take(all), memory.skip(all));
        // SAFETY: as above.
        let result = unsafe {
            (|| {
                for Moved { packed: to, ranked: from } in columns.moved(blocks) {
                    copy(call.send, &from, packed, to.start, element);
                }
                if let Some(window) = &mut self.window {
                    let places = by_place(&of_columns, window);
                    let own = part(packed, places[columns.place]..places[columns.place + 1], element);
                    let scatter = call.unfinished_part(Op::ReduceScatterV, packed.as_const(), own);
                    window.run(context, &scatter.divided_at(&places))?;
                }
                if columns.place < columns.columns {
                    let hosts = &of_hosts[columns.place];
                    let input = part(packed, of_columns[columns.place]..of_columns[columns.place + 1], element).as_const();
                    let output = match columns.has_column_for_each() {
                        true => call.recv,
                        false => part(reduced, results[columns.place]..results[columns.place + 1], element),
                    };
                    self.run_on_column(context, &columns, (Op::ReduceScatterV, between), (input, output), hosts, call)?;
                }
                if !columns.has_column_for_each()
                    && let Some(window) = &mut self.window
                {
                    let places = by_place(&results, window);
                    let own = part(reduced, places[columns.place]..places[columns.place + 1], element).as_const();
                    window.run(context, &call.part(Op::AllGatherV, own, reduced).divided_at(&places))?;
                    let column = columns.place % columns.columns;
                    let own = context.info.rank;
                    let before = columns.users(columns.host, column).take_while(|&rank| rank != own);
                    let at = results[column] + before.map(|rank| blocks.range(rank).len()).sum::<usize>();
                    copy(reduced.as_const(), &(at..at + blocks.range(own).len()), call.recv, 0, element);
                }
                Ok(())
            })()
        };
        self.partial = partial;
        result
    }

    /// Each host's ranks exchange what their columns carry to other hosts; each column exchanges it
    /// between hosts. All hosts have the same number of ranks.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    pub(super) unsafe fn all_to_all_hierarchical(
        &mut self,
        context: &OpContext<'_>,
        call: &Call,
        between: Algorithm,
    ) -> Result<()> {
        let (element, count) = (call.dtype.size(), call.count);
        let columns = Columns::of(self);
        let blocks = Blocks::Even(count);
        let (hosts, places) = (columns.hosts.len(), columns.columns);
        let mut partial = std::mem::take(&mut self.partial);
        let memory = scratch(&mut partial, 2 * call.send.len);
        let (one, other) = (memory.take(call.send.len), memory.skip(call.send.len));
        // SAFETY: as above.
        let result = unsafe {
            (|| {
                // By the column of the receiver, then by its host.
                for Moved { packed, ranked } in columns.moved(blocks) {
                    copy(call.send, &ranked, one, packed.start, element);
                }
                if let Some(window) = &mut self.window {
                    // What comes is by the sender's place, then by the receiver's host.
                    let exchange = call.part(Op::AllToAll, one.as_const(), other);
                    window.run(context, &Call { count: hosts * count, ..exchange })?;
                    for (place, host) in (0..places).flat_map(|place| (0..hosts).map(move |host| (place, host))) {
                        let from = (place * hosts + host) * count;
                        copy(other.as_const(), &(from..from + count), one, (host * places + place) * count, element);
                    }
                }
                let ends = sums(std::iter::repeat_n(places * count, hosts));
                let direct = columns.are_in_order();
                let output = if direct { call.recv } else { other };
                self.run_on_column(context, &columns, (Op::AllToAllV, between), (one.as_const(), output), &ends, call)?;
                if !direct {
                    for (index, rank) in columns.hosts.iter().flatten().enumerate() {
                        copy(other.as_const(), &(index * count..(index + 1) * count), call.recv, rank * count, element);
                    }
                }
                Ok(())
            })()
        };
        self.partial = partial;
        result
    }

    /// Each host gathers at its leader, on the root's host the root; the leaders gather at the root.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    pub(super) unsafe fn gather_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let (element, count) = (call.dtype.size(), call.count);
        let columns = Columns::of(self);
        let AtLeaders { leaders, root, leader, ends, own_host, all, is_leader, is_direct } = self.at_leaders(&columns, call);
        let mut partial = std::mem::take(&mut self.partial);
        let memory = scratch(&mut partial, own_host + all);
        let (gathered, packed) = (memory.take(own_host), if is_direct { call.recv } else { memory.skip(own_host) });
        // SAFETY: as above.
        let result = unsafe {
            (|| {
                match &mut self.window {
                    Some(window) => {
                        let gather = call.part(Op::Gather, call.send, gathered);
                        window.run(context, &Call { count, root: leader, ..gather })?;
                    }
                    None => copy(call.send, &(0..count), gathered, 0, element),
                }
                if !is_leader {
                    return Ok(());
                }
                let of_leaders = call.part(Op::Gather, gathered.as_const(), packed).divided_at(&ends);
                let of_leaders = Call { root, count, ..of_leaders };
                self.run_among(context.clone(), &of_leaders, &leaders, self.of_uneven(between), None)?;
                if all > 0 {
                    for (index, rank) in columns.hosts.iter().flatten().enumerate() {
                        copy(packed.as_const(), &(index * count..(index + 1) * count), call.recv, rank * count, element);
                    }
                }
                Ok(())
            })()
        };
        self.partial = partial;
        result
    }

    /// The root scatters to the leader of each host; each leader scatters inside its host.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_hierarchical`].
    pub(super) unsafe fn scatter_hierarchical(&mut self, context: &OpContext<'_>, call: &Call, between: Algorithm) -> Result<()> {
        let (element, count) = (call.dtype.size(), call.count);
        let columns = Columns::of(self);
        let AtLeaders { leaders, root, leader, ends, own_host, all, is_leader, is_direct } = self.at_leaders(&columns, call);
        let mut partial = std::mem::take(&mut self.partial);
        let memory = scratch(&mut partial, own_host + all);
        let (of_host, packed) = (memory.take(own_host), memory.skip(own_host));
        // SAFETY: as above.
        let result = unsafe {
            (|| {
                if is_leader {
                    if all > 0 {
                        for (index, rank) in columns.hosts.iter().flatten().enumerate() {
                            copy(call.send, &(rank * count..(rank + 1) * count), packed, index * count, element);
                        }
                    }
                    let input = if is_direct { call.send } else { packed.as_const() };
                    let of_leaders = Call { root, count, ..call.part(Op::Scatter, input, of_host).divided_at(&ends) };
                    self.run_among(context.clone(), &of_leaders, &leaders, self.of_uneven(between), None)?;
                }
                match &mut self.window {
                    Some(window) => {
                        let scatter = call.part(Op::Scatter, of_host.as_const(), call.recv);
                        window.run(context, &Call { count, root: leader, ..scatter })
                    }
                    None => {
                        copy(of_host.as_const(), &(0..count), call.recv, 0, element);
                        Ok(())
                    }
                }
            })()
        };
        self.partial = partial;
        result
    }

    /// What the leaders of hosts gather or scatter.
    fn at_leaders(&self, columns: &Columns, call: &Call) -> AtLeaders {
        let (leaders, root) = self.leaders(call.root);
        let leader = self.leader_of_this_host(&leaders);
        let rank = self.fabric().rank();
        let (is_leader, is_root) = (leaders.contains(&rank), rank == call.root);
        let element = call.dtype.size();
        let ends = sums(columns.hosts.iter().map(|host| host.len() * call.count));
        let own_host = if is_leader { (ends[columns.host + 1] - ends[columns.host]) * element } else { 0 };
        let is_direct = is_root && columns.are_in_order();
        let all = if is_root && !is_direct { ends[ends.len() - 1] * element } else { 0 };
        AtLeaders { leaders, root, leader, ends, own_host, all, is_leader, is_direct }
    }

    /// The algorithm for blocks of hosts. Trees need blocks of one length.
    fn of_uneven(&self, between: Algorithm) -> Algorithm {
        let layout = self.layout();
        if layout.fewest_per_host * layout.hosts == layout.ranks { between } else { Algorithm::Direct }
    }

    /// The algorithm for blocks of these hosts, which may differ in length. In a direct exchange a host
    /// sends its block to each other host; around a ring, each host sends all blocks but one. If one
    /// block is long, the ring moves fewer bytes through its host's link.
    fn for_blocks(&self, op: Op, between: Algorithm, of_hosts: &[usize], element: usize) -> Algorithm {
        if between != Algorithm::Direct || !matches!(op, Op::AllGatherV | Op::ReduceScatterV) {
            return between;
        }
        let (hosts, all) = (of_hosts.len() - 1, of_hosts[of_hosts.len() - 1]);
        let lengths = || of_hosts.windows(2).map(|ends| ends[1] - ends[0]);
        let (longest, shortest) = (lengths().max().unwrap_or(0), lengths().min().unwrap_or(0));
        let saved = ((hosts - 1) * longest).saturating_sub(all - shortest) * element;
        let network = self.settings.cost_model.model.network;
        let later = hosts.saturating_sub(2) as f64 * network.latency;
        if saved as f64 * network.per_byte > later { Algorithm::Ring } else { Algorithm::Direct }
    }

    /// Runs a collective on this rank's column. `of_hosts` says where the block of each host starts, and
    /// where the last one ends.
    ///
    /// # Safety
    ///
    /// As for [`Core::run_among`].
    unsafe fn run_on_column(
        &mut self,
        context: &OpContext<'_>,
        columns: &Columns,
        (op, between): (Op, Algorithm),
        (input, output): (RawSlice, RawSliceMut),
        of_hosts: &[usize],
        call: &Call,
    ) -> Result<()> {
        let ranks = columns.ranks(columns.place);
        let between = self.for_blocks(op, between, of_hosts, call.dtype.size());
        let of_column = call.part(op, input, output).divided_at(of_hosts);
        let compression = self.compression(call);
        // SAFETY: passed on.
        unsafe { self.run_among(context.clone(), &of_column, &ranks, between, compression) }
    }
}

/// Starts of parts of these lengths, and the end.
fn sums(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let ends = lengths.scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// The parts of columns as the parts of the ranks of a window. Those beyond the columns have none.
fn by_place(of_columns: &[usize], window: &Window) -> Vec<usize> {
    let end = of_columns[of_columns.len() - 1];
    (0..=window.members().len()).map(|place| of_columns.get(place).copied().unwrap_or(end)).collect()
}

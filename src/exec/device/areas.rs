//! All-reduce of device memory that peers cannot reach, through areas on the devices that they can.

use super::operation::OnDevices;
use crate::cuda::device::{Address, Memory, Reduction};
use crate::cuda::direct;
use crate::cuda::peers::{BufferAt, Peers, Record};
use crate::error::Result;
use crate::exec::call::Call;
use crate::exec::device_state::DeviceArea;
use crate::types::Rank;

/// Bytes of a rank's area on its device: enough that two barriers do not count.
const DEVICE_AREA: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

impl OnDevices<'_> {
    /// Where the areas of all ranks are from here, if every rank can reach all of them.
    pub(super) fn areas(&mut self) -> Result<Option<Vec<Address>>> {
        // All ranks decide alike whether there are areas, because they make them together.
        if self.core.devices.on_device.is_none() {
            let lent = self.call.lent.as_ref().expect("its buffers are on a device");
            // A rank without memory for an area reports it as hidden, like an area that peers
            // cannot reach.
            let memory = Memory::new(&lent.device, DEVICE_AREA);
            let place = memory.as_ref().ok().and_then(|memory| {
                let extent = lent.device.extent(memory.address).ok()?;
                Some(BufferAt::Open { extent, handle: lent.device.export(&extent).ok()?, offset: memory.address - extent.base })
            });
            let words = self.call.descriptor(0).encode();
            let places = [place.unwrap_or(BufferAt::Hidden), BufferAt::Nowhere];
            let records = self.exchange(Record { places, ..self.record(words) }, |_| Ok([DEVICE_AREA as u64, 0]))?;
            let is_open = |record: &Record| matches!(record.places[0], BufferAt::Open { .. });
            // Apart from those of users' memory, which is opened and closed.
            let mut peers = Peers::default();
            let mut addresses = None;
            if records.iter().all(is_open) {
                self.open(&mut peers, &records)?;
                let address = |(rank, record): (Rank, &Record)| peers.address(rank, &record.places[0]);
                addresses = records.iter().enumerate().map(address).collect();
            }
            let memory = memory.inspect_err(|error| {
                tracing::info!(%error, "no memory for an area on the device: buffers there pass through the host");
            });
            // Not used unless all ranks have one.
            let memory = memory.ok().filter(|_| addresses.is_some());
            self.core.devices.on_device = Some(DeviceArea { _peers: peers, memory, addresses });
        }
        Ok(self.core.devices.on_device.as_ref().and_then(|area| area.addresses.clone()))
    }

    /// All-reduces buffers that only their own ranks can reach, segment by segment. Each rank
    /// copies into its area the chunks that its peers reduce. It reduces its own chunk from its
    /// buffer and its peers' areas into its buffer and its area, and copies the other chunks from
    /// its peers' areas. Each byte moves twice as often as in buffers that all ranks can reach,
    /// which is the least.
    ///
    /// # Safety
    ///
    /// As for [`OnDevices::run`].
    pub(super) unsafe fn through_areas(&mut self, areas: &[Address]) -> Result<()> {
        let Call { dtype, redop, count, send, recv, .. } = *self.call;
        let (rank, world, size) = (self.rank, self.world, dtype.size());
        let (send, recv) = (send.ptr.addr() as u64, recv.ptr.addr() as u64);
        let redop = redop.expect("an all-reduce reduces");
        // Half of an area: peers still copy this rank's chunk of the previous segment from the
        // other half.
        let per_segment = DEVICE_AREA / 2 / size;
        for (i, start) in (0..count).step_by(per_segment).enumerate() {
            let half = ((i % 2) * (DEVICE_AREA / 2)) as u64;
            let area = |rank: Rank| areas[rank] + half;
            let len = per_segment.min(count - start);
            let slice = |rank: Rank| {
                let (at, len) = direct::slice(len, size, world, rank);
                ((at * size) as u64, len)
            };
            let others = || (1..world).map(|i| (rank + i) % world).filter(|&peer| slice(peer).1 > 0);
            let segment = (start * size) as u64;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: chunks are within the segment, segments within the buffer and within half
                // the area. No rank reads that half: before the last barrier of the previous
                // segment, all ranks had finished the segment before it.
                unsafe { device.copy(stream, send + segment + at, area(rank) + at, len * size)? };
            }
            lanes.finish()?;
            self.synchronise()?;
            self.check_not_cancelled()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            let (at, count) = slice(rank);
            if count > 0 {
                let own = |peer: Rank| if peer == rank { send + segment + at } else { area(peer) + at };
                let sources: Vec<Address> = (0..world).map(own).collect();
                let targets = [recv + segment + at, area(rank) + at];
                let reduction = Reduction { dtype, redop, sources: &sources, targets: &targets, count, divisor: world };
                // SAFETY: all ranks have copied what is read. No rank reads this rank's chunk of
                // its area yet.
                unsafe { device.reduce(stream, &reduction)? };
            }
            lanes.finish()?;
            self.synchronise()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: the peer has reduced it, and writes there again only after a barrier that
                // follows this copy.
                unsafe { device.copy(stream, area(peer) + at, recv + segment + at, len * size)? };
            }
        }
        let lanes = self.lanes()?;
        lanes.finish()?;
        // No rank returns, and perhaps frees its area, before all ranks have copied from it.
        self.synchronise()
    }
}

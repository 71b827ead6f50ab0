//! Memory that other ranks cannot reach, all-reduced through areas on the devices that they can.

use super::*;

/// Device memory through which passes what is in memory that others cannot reach.
pub(super) struct DeviceArea {
    /// What makes the addresses valid.
    pub(super) _peers: Peers,
    pub(super) memory: Option<Memory>,
    /// Where each rank's is from here; `None` if not all can reach all.
    pub(super) addresses: Option<Vec<Address>>,
}

impl OnDevices<'_> {
    /// Where the areas of all ranks are, if all can reach all.
    pub(super) fn areas(&mut self) -> Result<Option<Vec<Address>>> {
        // Whether there are any is the same on all ranks: they come and stay together.
        if self.core.devices.on_device.is_none() {
            let lent = self.call.lent.as_ref().expect("its buffers are on a device");
            // Who has no memory for one says so, like who has one that others cannot reach.
            let memory = Memory::new(&lent.device, DEVICE_AREA);
            let place = memory.as_ref().ok().and_then(|memory| {
                let extent = lent.device.extent(memory.address).ok()?;
                Some(BufferAt::Open { extent, handle: lent.device.export(&extent).ok()?, offset: memory.address - extent.base })
            });
            let words = self.call.descriptor(0, 0).encode();
            let places = [place.unwrap_or(BufferAt::Hidden), BufferAt::Nowhere];
            let records = self.exchange(Record { places, ..self.record(words) }, |_| Ok([DEVICE_AREA as u64, 0]))?;
            let is_open = |record: &Record| matches!(record.places[0], BufferAt::Open { .. });
            // Apart from those of users' memory, which come and go.
            let mut peers = Peers::default();
            let mut addresses = None;
            if records.iter().all(is_open) {
                self.open(&mut peers, &records)?;
                let address = |(rank, record): (Rank, &Record)| peers.address(rank, &record.places[0]);
                addresses = records.iter().enumerate().map(address).collect();
            }
            let memory = memory.inspect_err(|error| {
                tracing::info!(%error, "there is no area on the device: its memory passes through the host");
            });
            // Of no use unless all have one.
            let memory = memory.ok().filter(|_| addresses.is_some());
            self.core.devices.on_device = Some(DeviceArea { _peers: peers, memory, addresses });
        }
        Ok(self.core.devices.on_device.as_ref().and_then(|area| area.addresses.clone()))
    }

    /// An all-reduce of buffers that only their own ranks can reach. Of each piece every rank copies into its area what others
    /// reduce, reduces its own slice from its buffer and the others' areas into its buffer and its area, and copies the others'
    /// slices from theirs. Each byte of a buffer moves twice as often as where all can reach it, which is the least.
    pub(super) unsafe fn through_areas(&mut self, areas: &[Address]) -> Result<()> {
        let Call { dtype, redop, count, send, recv, .. } = *self.call;
        let (rank, world, size) = (self.rank, self.world, dtype.size());
        let (send, recv) = (send.ptr.addr() as u64, recv.ptr.addr() as u64);
        let redop = redop.expect("an all-reduce reduces");
        // Half of an area: of the piece before, others still copy this rank's slice out of the other half.
        let per_piece = DEVICE_AREA / 2 / size;
        for (i, start) in (0..count).step_by(per_piece).enumerate() {
            let half = ((i % 2) * (DEVICE_AREA / 2)) as u64;
            let area = |rank: Rank| areas[rank] + half;
            let len = per_piece.min(count - start);
            let slice = |rank: Rank| {
                let (at, len) = direct::slice(len, size, world, rank);
                ((at * size) as u64, len)
            };
            let others = || (1..world).map(|i| (rank + i) % world).filter(|&peer| slice(peer).1 > 0);
            let piece = (start * size) as u64;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: slices are within the piece, pieces within the buffer, and within half the area. Nobody reads from there:
                // before they met for the last piece, all have done with the one before.
                unsafe { device.copy(stream, send + piece + at, area(rank) + at, len * size)? };
            }
            lanes.finish()?;
            self.meet()?;
            self.check_not_given_up()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            let (at, count) = slice(rank);
            if count > 0 {
                let own = |peer: Rank| if peer == rank { send + piece + at } else { area(peer) + at };
                let sources: Vec<Address> = (0..world).map(own).collect();
                let targets = [recv + piece + at, area(rank) + at];
                let reduction = Reduction { dtype, redop, sources: &sources, targets: &targets, count, divisor: world };
                // SAFETY: all have copied what is read. This rank's slice of its area is read by nobody yet.
                unsafe { device.reduce(stream, &reduction)? };
            }
            lanes.finish()?;
            self.meet()?;
            let lanes = self.lanes()?;
            let (device, stream) = (&lanes.device, lanes.back.id);
            for peer in others() {
                let (at, len) = slice(peer);
                // SAFETY: the peer has reduced it, and writes there again when all have met after this copy is done.
                unsafe { device.copy(stream, area(peer) + at, recv + piece + at, len * size)? };
            }
        }
        let lanes = self.lanes()?;
        lanes.finish()?;
        // Nobody returns, and perhaps frees its area, before all have copied from there.
        self.meet()
    }
}

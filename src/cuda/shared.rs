//! What the communicators of this process share of one device.

use super::device::Device;
use super::imports::Imports;
use super::lanes::LanePool;
use super::pinned::PinnedPool;
use super::word_pool::WordPool;

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) words: WordPool,
    pub(crate) pinned: PinnedPool,
    pub(crate) lanes: LanePool,
    pub(crate) imports: Imports,
}

/// Returns what is shared of a device, which keeps it.
pub(crate) fn shared(device: &dyn Device) -> &Shared {
    let shared = device.extension().get_or_init(|| Box::<Shared>::default());
    shared.downcast_ref().expect("nothing else is kept there")
}

//! Memory that the ranks of a host allocate together and all map.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Core;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::{Error, Result, shown};
use crate::failure::{CommInfo, OpContext};
use crate::shm::registered::Allocation;
use crate::sys::Region;
use crate::types::{DType, Descriptor, Op, ReduceOp};

impl Core {
    /// Allocates memory with a part of `part` bytes, whole pages, for each rank of this host.
    /// Returns `None` if the ranks cannot share memory. All ranks of the host call it together.
    pub(crate) fn allocate(&mut self, info: &CommInfo, part: usize) -> Result<Option<Arc<Allocation>>> {
        self.seq += 1;
        let Some(window) = &mut self.window else { return Ok(None) };
        // Memory that all ranks have dropped is unmapped now.
        let mut dropped = window.heap().dropped();
        let redop = Some(ReduceOp::BitAnd);
        let descriptor = Descriptor { op: Op::Alloc, dtype: DType::U64, redop, seq: self.seq, ..Descriptor::nothing() };
        // One word more, so that the list is not empty before the first allocation.
        dropped.push(0);
        let memory = RawSliceMut::of(&mut dropped);
        let call = Call { redop, ..Call::in_place(Op::AllReduce, DType::U64, memory) };
        let entry = self.recording.history.begin(&descriptor.encode(), 0, 0);
        // SAFETY: `dropped` is borrowed for the call.
        let agreed = unsafe { window.run(&OpContext::new(descriptor, info), &call) };
        self.recording.history.end(entry, agreed.is_ok());
        agreed?;
        window.heap().forget(&dropped);
        let region = self.share(info, descriptor, part)?;
        let registered = region.map(|region| Arc::new(Allocation { region, part }));
        if let (Some(window), Some(registered)) = (&mut self.window, &registered) {
            window.heap().add(registered.clone());
        }
        Ok(registered)
    }

    /// Has the leader of this host make a region with a part for each rank; `None` if a rank cannot
    /// map or reserve it.
    fn share(&mut self, info: &CommInfo, descriptor: Descriptor, part: usize) -> Result<Option<Arc<Region>>> {
        let (Some(host), Some(window)) = (self.fabric.host().cloned(), &mut self.window) else { return Ok(None) };
        let (place, ranks) = (window.rank(), window.members().len());
        let context = OpContext::new(descriptor, info);
        let deadline = Instant::now() + info.timeout;
        let made = (place == 0).then(|| host.create(ranks * part)).transpose();
        let mine = made.inspect_err(no_shared_memory).ok().flatten();
        let exported = mine.as_ref().map_or(0, |region| host.export(region));
        let shared = (|| {
            let id = window.all_gather_words(&context, [exported.into(), 0, 0, 0, 0, 0])?[0][0];
            let found = match u32::try_from(id) {
                Ok(0) | Err(_) => None,
                Ok(_) if place == 0 => mine,
                Ok(id) => window.fetch(&context, 0, id, Duration::MAX)?.inspect_err(no_shared_memory).ok(),
            };
            let found = found.filter(|region| region.len() == ranks * part);
            let reserved = found.map(|region| region.reserve_by(place * part..(place + 1) * part, deadline).map(|()| region));
            let found = match reserved.transpose() {
                // The other ranks wait for this one, which reports itself.
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(not_reserved(info, descriptor, part, error)),
                found => found.inspect_err(no_shared_memory).ok().flatten(),
            };
            let have = window.all_gather_words(&context, [found.is_some().into(), 0, 0, 0, 0, 0])?;
            Ok(found.filter(|_| have.iter().all(|notes| notes[0] != 0)))
        })();
        if exported != 0 {
            host.withdraw(exported);
        }
        // The descriptor stays open: without it, memory that a peer may write after a failure could
        // not be made private.
        shared
    }
}

fn no_shared_memory(error: &io::Error) {
    crate::log::warn!(%error, "no shared memory");
}

/// The system did not find this rank's part of the memory before the deadline.
fn not_reserved(info: &CommInfo, descriptor: Descriptor, part: usize, error: io::Error) -> Error {
    let (Descriptor { op, seq, .. }, CommInfo { rank, timeout, .. }) = (descriptor, info);
    let what =
        format!("rank {rank} has not reserved {part} bytes of shared memory within its deadline of {}", shown::time(*timeout));
    Error::os(format!("{op} seq={seq}: {what}; allocate less, or set a longer timeout"))(error)
}

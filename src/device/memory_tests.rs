//! Which memory of a device is used where it is, and which passes through areas or the host.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::driver_tests::{COUNT, Process, Seat, on_each, on_seats, seats};
use crate::Communicator;
use crate::call::Call;
use crate::cuda::device::{Address, Device, DeviceId, Driver, Handle, Memory, StreamId};
use crate::cuda::fake_device::{FakeDevice, FakeGpu, Machines};
use crate::trace::DeviceStats;
use crate::types::Op;

/// All-reduces in one test of one buffer: the first of a new allocation passes through areas.
const CALLS: usize = 6;

impl Process {
    /// Sums ones of all ranks again and again, in place.
    fn sum_often(&self, memory: Address, count: usize) {
        self.device.write(self.stream, memory, 1f32.to_le_bytes().repeat(count));
        for _ in 0..CALLS {
            // SAFETY: the stream passes the call below.
            unsafe { self.comm.exec.submit_checked(&self.bound(&self.in_place(count, memory, None), self.stream)) }.unwrap();
            self.device.synchronise(self.stream);
        }
        let got = self.device.read(self.stream, memory, 4 * count);
        let sum = 2f32.powi(CALLS as i32).to_le_bytes();
        assert!(got.chunks(4).all(|value| value == sum), "rank {}: {:?}", self.rank, &got[..8]);
        // The calls have ended on the host, too.
        self.comm.barrier().unwrap();
    }

    /// The operations so far that were staged, in place, and through areas or slots beside them.
    fn paths(&self) -> [u64; 3] {
        let DeviceStats { staged, in_place, through_areas, one_shot, .. } = self.comm.stats().device;
        [staged, in_place, through_areas + one_shot]
    }

    fn handle(&self, memory: Address) -> Option<Handle> {
        self.device.export(&self.device.extent(memory).unwrap()).ok()
    }
}

/// The memory of `alloc_device`, between processes.
#[test]
fn memory_for_peers_is_used_in_place() {
    for has_mapped_memory in [true, false] {
        on_each(2, |process| {
            process.device.has_mapped_memory.store(has_mapped_memory, Ordering::SeqCst);
            let device: Arc<dyn Device> = process.device.clone();
            let memory = Memory::for_peers(&device, 4 * COUNT).unwrap();
            assert_eq!(matches!(process.handle(memory.address), Some(Handle::File { .. })), has_mapped_memory);
            process.sum_often(memory.address, COUNT);
            let [staged, in_place, through_areas] = process.paths();
            assert!(staged == 0 && in_place >= 3 && through_areas >= 1, "{:?}", process.paths());
            // A leader has the area of the other rank open, and its buffer.
            assert_eq!(process.device.open(), if process.is_leader() { 2 } else { 0 });
            process.comm.barrier().unwrap();
        });
    }
}

/// An owner frees memory that its peer has open, and gets other memory at the same address.
#[test]
fn mapped_memory_that_was_freed_is_opened_anew() {
    on_each(2, |process| {
        let kept = process.device.allocate_for_peers(4 * COUNT).unwrap();
        process.sum_often(kept, COUNT);
        let mut last = None;
        for _ in 0..4 {
            let before = process.paths();
            let memory = if process.rank == 1 { process.device.allocate_for_peers(4 * COUNT).unwrap() } else { kept };
            if process.rank == 1 {
                assert_eq!(*last.get_or_insert(memory), memory, "the address is used again");
            }
            process.sum_often(memory, COUNT);
            let after = process.paths();
            assert!(after[1] > before[1] && after[2] > before[2], "{before:?}, {after:?}");
            if process.rank == 1 {
                // SAFETY: the stream has passed its last use. The leader may have it open.
                unsafe { process.device.free(memory) };
            }
        }
        // It is closed in the end.
        for _ in 0..70 / CALLS + 1 {
            process.sum_often(kept, COUNT);
        }
        process.device.held().until_released();
        assert!(process.device.open() <= 3, "{} are open", process.device.open());
        process.comm.barrier().unwrap();
    });
}

/// Buffers in one handle of an expandable segment, and across two.
#[test]
fn expandable_segments_pass_through_areas() {
    on_each(2, |process| {
        let parts = [3 * COUNT, 2 * COUNT];
        let segment = process.device.allocate_segments(&parts);
        assert_eq!(process.device.extent(segment).unwrap().size, parts[0] as u64);
        assert_eq!(process.device.extent(segment + parts[0] as u64).unwrap().base, segment + parts[0] as u64);
        assert!(process.handle(segment).is_none());
        for (offset, count) in [(0, COUNT / 2), (parts[0], COUNT / 2), (0, COUNT), (COUNT, COUNT)] {
            process.sum_often(segment + offset as u64, count);
        }
        assert_eq!(process.paths(), [0, 0, 4 * CALLS as u64]);
    });
}

const GPUS: [DeviceId; 2] = [[1; 16], [2; 16]];

/// Two processes see the same GPUs in different order, as with `CUDA_VISIBLE_DEVICES`.
#[test]
fn devices_with_other_numbers_in_other_processes() {
    // The number of each rank's device in its process, and the GPUs that are used.
    for (numbers, gpus) in [([0, 0], 2), ([1, 1], 2), ([0, 1], 1), ([1, 0], 1)] {
        let gpu = Arc::<FakeGpu>::default();
        let seats = (0..2usize).map(|rank| {
            let first = FakeDevice::on(&gpu, GPUS[rank]);
            let second = first.beside(GPUS[1 - rank]);
            let devices = [first, second].map(Arc::new);
            let device = devices[numbers[rank]].clone();
            Seat { process: rank as u64, machine: Arc::new(Machines(devices.to_vec())), device }
        });
        on_seats(seats.collect(), |process| {
            let device = process.comm.exec.device(numbers[process.rank]).unwrap();
            assert_eq!(device.id(), process.device.id());
            for memory in [process.device.allocate(4 * COUNT), process.device.allocate_for_peers(4 * COUNT)] {
                process.sum_often(memory.unwrap(), COUNT);
            }
            let [staged, in_place, _] = process.paths();
            assert!(staged == 0 && in_place >= 6, "{:?}", process.paths());
            let launches = process.device.launches.load(Ordering::SeqCst);
            assert_eq!(launches > 0, process.rank == 0 || gpus == 2, "one rank of each GPU launches kernels");
        });
    }
}

/// Ranks that are threads of one process, on two GPUs. Peer access does not include all memory.
#[test]
fn threads_on_two_gpus() {
    let first = FakeDevice::new();
    let second = first.beside(GPUS[1]);
    let devices = [first, second].map(Arc::new);
    let machine: Arc<dyn Driver> = Arc::new(Machines(devices.to_vec()));
    let seats = devices.map(|device| Seat { process: 5, machine: machine.clone(), device });
    on_seats(seats.into(), |process| {
        let plain = process.device.allocate(4 * COUNT).unwrap();
        let hidden = process.device.allocate(4 * COUNT).unwrap();
        process.device.hide(hidden);
        let mapped = process.device.allocate_for_peers(4 * COUNT).unwrap();
        let segment = process.device.allocate_segments(&[4 * COUNT]);
        for (memory, is_in_place) in [(plain, true), (hidden, false), (mapped, true), (segment, false)] {
            let before = process.paths();
            process.sum_often(memory, COUNT);
            let after = process.paths();
            assert_eq!([after[1] - before[1], after[2] - before[2]].map(|calls| calls > 0), [is_in_place, !is_in_place]);
        }
        assert_eq!(process.device.imports(), 0);
    });
}

/// A larger communicator may have a rank whose kolo has no devices. Then no buffer may be on one.
#[test]
fn a_communicator_that_may_have_no_devices_does_not_use_those_of_its_process() {
    let seats = seats(2, true);
    let comms = Communicator::builder().devices(false).connect_in_process(2).unwrap();
    for (comm, seat) in comms.into_iter().zip(seats) {
        let comm = comm.with_driver(seat.machine);
        assert!(!comm.has_devices());
        let mut call = Call::new::<u8>(Op::Barrier);
        let refused = comm.exec.state.bind(&mut call, seat.device.user_stream()).unwrap_err();
        assert!(refused.to_string().contains("without the feature `cuda`"), "{refused}");
        comm.exec.state.bind(&mut call, StreamId::DEFAULT).unwrap();
        assert!(call.on_device.is_none());
    }
}

//! Collectives in shared memory do not allocate after their first run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kolo::{Communicator, ReduceOp};

/// The system's allocator with a count of each thread's calls.
struct Counting;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends may free memory after its counter is gone.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call goes to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller keeps the same contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Operation = fn(&Communicator, &mut [f32], &mut [f32]) -> kolo::Result<()>;

const OPERATIONS: [(&str, Operation); 12] = [
    ("barrier", |comm, _, _| comm.barrier()),
    ("all_reduce", |comm, a, _| comm.all_reduce(a, ReduceOp::Sum)),
    ("all_reduce_into", |comm, a, b| comm.all_reduce_into(&a[..b.len()], b, ReduceOp::Max)),
    ("reduce", |comm, a, _| comm.reduce(a, ReduceOp::Sum, 1)),
    ("broadcast", |comm, a, _| comm.broadcast(a, 0)),
    ("all_gather", |comm, a, b| comm.all_gather(&a[..b.len() / 2], b)),
    ("all_gather_v", |comm, a, b| comm.all_gather_v_in_place(a, &[b.len(), a.len() - b.len()])),
    ("reduce_scatter", |comm, a, b| comm.reduce_scatter(a, &mut b[..a.len() / 2], ReduceOp::Sum)),
    ("reduce_scatter_v", |comm, a, b| comm.reduce_scatter_v_in_place(a, &[b.len(), a.len() - b.len()], ReduceOp::Sum)),
    ("all_to_all", |comm, a, _| comm.all_to_all_in_place(a)),
    ("gather", |comm, a, _| comm.gather_in_place(a, 0)),
    ("scatter", |comm, a, _| comm.scatter_in_place(a, 1)),
];

#[test]
fn collectives_in_shared_memory_allocate_nothing() {
    let comms = Communicator::in_process(2).unwrap();
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || {
                for count in [2, 1000, 300_000] {
                    let (mut a, mut b) = (vec![1.0f32; count], vec![0.0f32; count]);
                    for (name, operation) in OPERATIONS {
                        operation(comm, &mut a, &mut b).unwrap();
                        let before = CALLS.get();
                        for _ in 0..10 {
                            operation(comm, &mut a, &mut b).unwrap();
                        }
                        assert_eq!(CALLS.get(), before, "{name} of {count} on rank {}", comm.rank());
                    }
                }
            });
        }
    });
    assert!(CALLS.get() > 0, "the allocator of the test does not count");
}

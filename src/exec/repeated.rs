//! Short calls that are made again with the same arguments, as programs make them in loops.
//!
//! To check a call, choose its path and describe it to peers takes as long as the shortest operations.
//! So the core keeps the last short call of each operation with the results. For a call that equals
//! it, only the arguments are compared.

use crate::call::{Call, Lengths};
use crate::types::{DType, Descriptor, Op, ReduceOp};

/// The arguments of a collective without counts for each rank, timeout or device. On one
/// communicator, the check, the path and the description depend on nothing else: inside a host, the
/// path does not depend on costs, which may be measured anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallKey {
    count: usize,
    send: (usize, usize),
    recv: (usize, usize),
    root: usize,
    dtype: DType,
    redop: Option<ReduceOp>,
}

impl CallKey {
    /// Returns `None` for a message, and for a call with other arguments: such calls are rare or long.
    #[inline(always)]
    pub(crate) fn of(call: &Call, lengths: Lengths) -> Option<CallKey> {
        let Call { dtype, redop, root, count, send, recv, .. } = *call;
        let has_more = call.on_behalf_of.is_some()
            || call.send_counts.is_some()
            || call.recv_counts.is_some()
            || call.timeout.is_some()
            || call.described.is_some()
            || call.on_device.is_some();
        if call.op.is_point_to_point() || has_more {
            return None;
        }
        // A call on pointers may have the lengths of its last check, so they count as 0. A typed call
        // with elements has a length above 0, so the two never compare equal.
        let length = |length: usize| if lengths == Lengths::Given { length } else { 0 };
        let (send, recv) = ((send.ptr.addr(), length(send.len)), (recv.ptr.addr(), length(recv.len)));
        Some(CallKey { count, send, recv, root, dtype, redop })
    }
}

/// A call in shared memory, and what was found out about it.
pub(super) struct Repeated {
    key: CallKey,
    /// The checked call.
    pub(super) call: Call,
    pub(super) bytes: u64,
    pub(super) path: u8,
    /// Numbered 0, as it is the same for each of the calls.
    pub(super) descriptor: Descriptor,
    pub(super) words: [u64; Descriptor::WORDS],
}

/// The last short call of each operation in shared memory: these have the lowest numbers.
#[derive(Default)]
pub(super) struct LastCalls([Option<Box<Repeated>>; Op::Scatter as usize + 1]);

impl LastCalls {
    /// Returns whether a call equals the one that is kept of its operation.
    #[inline(always)]
    pub(super) fn has(&self, op: Op, key: &CallKey) -> bool {
        matches!(self.0.get(op as usize), Some(Some(last)) if last.key == *key)
    }

    /// Returns what is kept of a call that equals it, on the buffers of `call`. Their addresses are those of
    /// before, but a pointer gives access only to what it was made from: the memory may have been freed and
    /// allocated again, or borrowed again.
    #[inline(always)]
    pub(super) fn again(&mut self, call: &Call) -> Option<&Repeated> {
        let last = self.0.get_mut(call.op as usize)?.as_deref_mut()?;
        // The check drops buffers that this rank does not use.
        if last.call.send.len > 0 {
            last.call.send.ptr = call.send.ptr;
        }
        if last.call.recv.len > 0 {
            last.call.recv.ptr = call.recv.ptr;
        }
        Some(last)
    }

    /// Keeps a call that was checked, of an operation in shared memory.
    pub(super) fn keep(&mut self, key: CallKey, call: &Call, bytes: u64, path: u8) {
        let descriptor = call.descriptor(0);
        let words = descriptor.encode();
        let kept = Repeated { key, call: call.clone(), bytes, path, descriptor, words };
        let place = &mut self.0[call.op as usize];
        match place {
            Some(place) => **place = kept,
            None => *place = Some(Box::new(kept)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::communicator::Communicator;
    use crate::error::{Error, Result};
    use crate::raw::RawCall;
    use crate::types::{DType, Op, ReduceOp, mix};

    fn on_ranks(ranks: usize, body: impl Fn(&Communicator) + Sync) {
        let body = &body;
        std::thread::scope(|scope| {
            for comm in Communicator::in_process(ranks).unwrap() {
                scope.spawn(move || body(&comm));
            }
        });
    }

    /// How many calls the communicator keeps.
    fn kept(comm: &Communicator) -> usize {
        comm.exec.state.core.lock().last_calls.0.iter().flatten().count()
    }

    /// What rank `rank` has at element `at` before the call of this number.
    fn element(number: u64, rank: usize, at: usize) -> i32 {
        (mix(number, (rank * 64 + at) as u64) % 1000) as i32
    }

    /// The same few calls in changing order, on the same memory, which has other values each time.
    #[test]
    fn calls_on_the_same_memory_get_new_results() {
        const RANKS: usize = 3;
        on_ranks(RANKS, |comm| {
            let rank = comm.rank();
            let (mut all, mut one) = ([0i32; RANKS * 4], [0i32; 4]);
            for number in 0..400 {
                let choice = mix(number, 0) >> 32;
                let (count, root) = (3 + usize::from(choice.is_multiple_of(3)), 2 * usize::from(choice.is_multiple_of(5)));
                let redop = if choice % 7 < 5 { ReduceOp::Sum } else { ReduceOp::Max };
                let mine = |at| element(number, rank, at);
                let reduced = |at| {
                    let each = (0..RANKS).map(|rank| element(number, rank, at));
                    if redop == ReduceOp::Sum { each.sum::<i32>() } else { each.max().unwrap() }
                };
                one.iter_mut().enumerate().for_each(|(at, to)| *to = mine(at));
                match choice % 11 {
                    0..4 => {
                        comm.all_reduce(&mut one[..count], redop).unwrap();
                        assert!((0..count).all(|at| one[at] == reduced(at)), "all_reduce {number}");
                    }
                    4..6 => {
                        comm.broadcast(&mut one[..count], root).unwrap();
                        assert!((0..count).all(|at| one[at] == element(number, root, at)), "broadcast {number}");
                    }
                    6 => comm.barrier().unwrap(),
                    7 => {
                        comm.all_gather(&one[..count], &mut all[..RANKS * count]).unwrap();
                        let expected = |at: usize| element(number, at / count, at % count);
                        assert!((0..RANKS * count).all(|at| all[at] == expected(at)), "all_gather {number}");
                    }
                    8 => {
                        all.iter_mut().enumerate().for_each(|(at, to)| *to = mine(at));
                        comm.reduce_scatter(&all[..RANKS * count], &mut one[..count], redop).unwrap();
                        assert!((0..count).all(|at| one[at] == reduced(rank * count + at)), "reduce_scatter {number}");
                    }
                    9 => {
                        comm.reduce(&mut one[..count], redop, root).unwrap();
                        assert!(rank != root || (0..count).all(|at| one[at] == reduced(at)), "reduce {number}");
                    }
                    // The same bytes as other elements.
                    _ => {
                        // SAFETY: as many elements of the same size, of which each value is valid.
                        let floats = unsafe { std::slice::from_raw_parts_mut(one.as_mut_ptr().cast::<f32>(), count) };
                        floats.iter_mut().enumerate().for_each(|(at, to)| *to = mine(at) as f32);
                        comm.all_reduce(floats, redop).unwrap();
                        assert!((0..count).all(|at| floats[at] == reduced(at) as f32), "floats {number}");
                    }
                }
            }
            assert_eq!(kept(comm), 6, "each of the operations is kept");
        });
    }

    /// Miri sees whether a call uses the pointers of an earlier one.
    #[test]
    fn memory_may_be_borrowed_and_allocated_anew() {
        on_ranks(2, |comm| {
            let mut buf = [0i32; 4];
            for number in 0..20 {
                let borrowed = &mut buf;
                borrowed.fill(number);
                comm.all_reduce(&mut borrowed[..], ReduceOp::Sum).unwrap();
                assert_eq!(*borrowed, [2 * number; 4]);
                // Allocators give the same address again.
                let mut allocated = vec![number; 2];
                comm.broadcast(&mut allocated, 0).unwrap();
                assert_eq!(allocated, [number; 2]);
            }
        });
    }

    /// A call that equals the last one but for what is wrong with it is refused, and the next right one runs.
    #[test]
    fn a_wrong_call_is_refused_after_a_right_one() {
        on_ranks(2, |comm| {
            let (mut buf, mut both) = ([1u32; 3], [0u32; 6]);
            for _ in 0..3 {
                comm.reduce(&mut buf, ReduceOp::Sum, 0).unwrap();
                comm.all_gather(&buf, &mut both).unwrap();
                let refused = |result: Result<()>| assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
                refused(comm.reduce(&mut buf, ReduceOp::Sum, 2));
                refused(comm.reduce(&mut buf, ReduceOp::Average, 0));
                refused(comm.all_gather(&buf, &mut both[..5]));
            }
            // Pointers without lengths are other arguments than an empty buffer at the same place.
            let mut call = RawCall::new(Op::AllGather, DType::U32);
            call.buffers(buf.as_ptr().cast(), both.as_mut_ptr().cast(), buf.len());
            for _ in 0..2 {
                // SAFETY: the buffers have room for the elements of both ranks, and nothing else uses them.
                unsafe { call.run(comm).unwrap() };
                refused_empty(comm, &buf, &mut both);
            }
        });
    }

    fn refused_empty(comm: &Communicator, buf: &[u32], both: &mut [u32]) {
        let result = comm.all_gather(buf, &mut both[..0]);
        assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
    }

    /// Calls that are long, empty, of bools, or with a timeout or counts for each rank are not kept.
    #[test]
    fn only_short_calls_are_kept() {
        on_ranks(2, |comm| {
            comm.all_reduce(&mut vec![0f32; 1 << 10], ReduceOp::Sum).unwrap();
            comm.all_reduce(&mut [true], ReduceOp::Max).unwrap();
            comm.broadcast(&mut [0u8; 0], 0).unwrap();
            comm.all_gather_v(&[1u8][..1 - comm.rank()], &mut [0u8], &[1, 0]).unwrap();
            let mut word = 0u64;
            let mut late = RawCall::new(Op::Broadcast, DType::U64);
            late.buffers((&raw const word).cast(), (&raw mut word).cast(), 1).timeout(Duration::from_secs(240));
            // SAFETY: the buffer has room for the element, and nothing else uses it.
            unsafe { late.run(comm).unwrap() };
            assert_eq!(kept(comm), 0);
            comm.all_reduce(&mut vec![0f32; (1 << 10) - 1], ReduceOp::Sum).unwrap();
            assert_eq!(kept(comm), 1);
        });
    }

    /// After many equal calls, another one of a peer is told from them, with the right numbers.
    #[test]
    fn another_call_after_many_equal_ones_is_described() {
        on_ranks(2, |comm| {
            let mut buf = [1f64; 2];
            for _ in 0..50 {
                comm.all_reduce(&mut buf, ReduceOp::Max).unwrap();
            }
            let (first, second) = ((Op::AllReduce, 2), (Op::Broadcast, 1));
            let (mine, peers) = if comm.rank() == 0 { (first, second) } else { (second, first) };
            let result = match comm.rank() {
                0 => comm.all_reduce(&mut buf, ReduceOp::Max),
                _ => comm.broadcast(&mut buf[..1], 0),
            };
            let said = |call: &crate::types::Descriptor| (call.op(), call.count());
            match result {
                Err(Error::Mismatch { mine: own, theirs, .. }) => {
                    assert_eq!([said(&own), said(&theirs)], [mine, peers]);
                    assert_eq!((own.seq(), theirs.seq()), (51, 51));
                }
                other => panic!("{other:?}"),
            }
            assert!(matches!(comm.all_reduce(&mut buf, ReduceOp::Max), Err(Error::Revoked { .. })));
        });
    }
}

//! What every collective should compute: the reference, computed sequentially from the inputs of
//! all ranks.

use kolo::{Communicator, DType, Op, ReduceOp, Result, bf16, f8e4m3, f8e5m2, f16};

use super::pattern::{PERIOD, repeated};
use super::random;
use super::value::Value;

/// One collective to be checked, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub op: Op,
    pub dtype: DType,
    pub redop: ReduceOp,
    /// Elements of the buffer, or of one block. In the forms with counts the blocks are of about
    /// this size.
    pub count: usize,
    pub root: usize,
    pub in_place: bool,
    pub seed: u64,
}

/// The operations that move or reduce buffers, or synchronise.
pub(crate) fn ops() -> Vec<Op> {
    let others = [Op::Split, Op::Alloc, Op::Connect, Op::Grow];
    Op::ALL.iter().copied().filter(|op| !others.contains(op)).collect()
}

impl Case {
    /// Draws the case of a seed. Buffers and blocks have at most `most` elements.
    pub(crate) fn random(seed: u64, world: usize, most: usize) -> Case {
        let pick = |what: u64, below: usize| random(seed, what) as usize % below;
        let dtype = DType::ALL[pick(2, DType::ALL.len())];
        let redops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|redop| redop.applies_to(dtype)).collect();
        let scale = [1, 10, 1000, most.max(1)][pick(5, 4)];
        Case {
            op: ops()[pick(1, ops().len())],
            dtype,
            redop: redops[pick(3, redops.len())],
            count: pick(4, scale.min(most) + 1),
            root: pick(6, world),
            in_place: pick(7, 2) == 1,
            seed,
        }
    }
}

/// Runs a case on one rank, checks the result against the reference, and checks that all ranks have
/// the same bits.
pub(crate) fn check(comm: &Communicator, case: Case) -> Result<()> {
    match case.dtype {
        DType::I8 => check_typed::<i8>(comm, case),
        DType::U8 => check_typed::<u8>(comm, case),
        DType::I16 => check_typed::<i16>(comm, case),
        DType::U16 => check_typed::<u16>(comm, case),
        DType::I32 => check_typed::<i32>(comm, case),
        DType::U32 => check_typed::<u32>(comm, case),
        DType::I64 => check_typed::<i64>(comm, case),
        DType::U64 => check_typed::<u64>(comm, case),
        DType::F16 => check_typed::<f16>(comm, case),
        DType::BF16 => check_typed::<bf16>(comm, case),
        DType::F32 => check_typed::<f32>(comm, case),
        DType::F64 => check_typed::<f64>(comm, case),
        DType::Bool => check_typed::<bool>(comm, case),
        DType::F8E4M3 => check_typed::<f8e4m3>(comm, case),
        DType::F8E5M2 => check_typed::<f8e5m2>(comm, case),
        other => unreachable!("{other} is not checked"),
    }
}

fn check_typed<T: Value>(comm: &Communicator, case: Case) -> Result<()> {
    let rank = Rank { comm, case, me: comm.rank(), world: comm.world_size() };
    let Outcome { got, expected, is_exact } = rank.run::<T>()?;
    assert_eq!(got.len(), expected.len(), "{case:?}");
    // What is equal is right, and found sooner than by a look at each element.
    if got != expected {
        for (i, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
            let is_right = if is_exact { got == expected } else { got.is_close(expected, rank.world) };
            assert!(is_right, "rank {} of {}: {got:?} instead of {expected:?} at {i} in {case:?}", rank.me, rank.world);
        }
    }
    if case.op == Op::AllReduce { rank.check_same_bits(&got) } else { Ok(()) }
}

/// What a rank has after a collective, and what it should have.
struct Outcome<T> {
    got: Vec<T>,
    expected: Vec<T>,
    /// Whether the two are equal, and not only close: nothing was reduced.
    is_exact: bool,
}

impl<T> Outcome<T> {
    fn exact(got: Vec<T>, expected: Vec<T>) -> Outcome<T> {
        Outcome { got, expected, is_exact: true }
    }

    fn reduced(got: Vec<T>, expected: Vec<T>) -> Outcome<T> {
        Outcome { got, expected, is_exact: false }
    }

    fn nothing() -> Outcome<T> {
        Outcome::exact(Vec::new(), Vec::new())
    }
}

/// One rank of a case.
struct Rank<'a> {
    comm: &'a Communicator,
    case: Case,
    me: usize,
    world: usize,
}

impl Rank<'_> {
    fn run<T: Value>(&self) -> Result<Outcome<T>> {
        match self.case.op {
            Op::AllReduce => self.all_reduce(),
            Op::Reduce => self.reduce(),
            Op::Broadcast => self.broadcast(),
            Op::Barrier => self.comm.barrier().map(|()| Outcome::nothing()),
            Op::AllGather => self.all_gather(),
            Op::Gather => self.gather(),
            Op::AllGatherV => self.all_gather_v(),
            Op::ReduceScatter => self.reduce_scatter(),
            Op::ReduceScatterV => self.reduce_scatter_v(),
            Op::AllToAll => self.all_to_all(),
            Op::AllToAllV => self.all_to_all_v(),
            Op::Scatter => self.scatter(),
            Op::Send | Op::Recv if self.world > 1 => self.send_recv(),
            Op::Send | Op::Recv => Ok(Outcome::nothing()),
            op => unreachable!("{op} is not checked"),
        }
    }

    fn is_root(&self) -> bool {
        self.me == self.case.root
    }

    /// The i-th element of a rank's input.
    fn value<T: Value>(&self, rank: usize, i: usize) -> T {
        T::random(random(random(self.case.seed, rank as u64), (i % PERIOD) as u64))
    }

    fn values<T: Value>(&self, rank: usize, len: usize) -> Vec<T> {
        repeated(0..len, |i| self.value(rank, i))
    }

    fn mine<T: Value>(&self, len: usize) -> Vec<T> {
        self.values(self.me, len)
    }

    /// The content of an output before the collective: values of no rank.
    fn garbage<T: Value>(&self, len: usize) -> Vec<T> {
        self.values(self.me + 100, len)
    }

    /// The elements `range` of the reduction of all ranks' inputs.
    fn reduction<T: Value>(&self, range: std::ops::Range<usize>) -> Vec<T> {
        let reduced = |i| T::reduce(&(0..self.world).map(|rank| self.value(rank, i)).collect::<Vec<_>>(), self.case.redop);
        repeated(range, reduced)
    }

    /// The blocks of all ranks, of `count` elements each, side by side.
    fn blocks<T: Value>(&self) -> Vec<T> {
        (0..self.world).flat_map(|rank| self.values(rank, self.case.count)).collect()
    }

    /// The size of a rank's block in the forms with counts: it differs between ranks.
    fn block(&self, rank: usize) -> usize {
        let count = self.case.count;
        if count == 0 { 0 } else { (count + rank * 7) % (2 * count) }
    }

    fn counts(&self) -> Vec<usize> {
        (0..self.world).map(|rank| self.block(rank)).collect()
    }

    /// The size of the block that one rank sends to another in an all-to-all with counts.
    fn pair(&self, from: usize, to: usize) -> usize {
        self.block(from * 3 + to)
    }

    fn assert_unchanged<T: Value>(&self, send: &[T]) {
        assert_eq!(send, self.mine::<T>(send.len()), "the send buffer has changed");
    }

    /// Checks that all ranks have the same bits.
    fn check_same_bits<T: Value>(&self, got: &[T]) -> Result<()> {
        let bits: Vec<u64> = got.iter().map(|value| value.bits()).collect();
        let (mut least, mut most) = (bits.clone(), bits);
        self.comm.all_reduce(&mut least, ReduceOp::Min)?;
        self.comm.all_reduce(&mut most, ReduceOp::Max)?;
        assert_eq!(least, most, "bits differ between ranks in {:?}", self.case);
        Ok(())
    }

    fn all_reduce<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, redop, .. } = self.case;
        let mut got = self.mine(count);
        if self.case.in_place {
            self.comm.all_reduce(&mut got, redop)?;
        } else {
            let send = std::mem::replace(&mut got, self.garbage(count));
            self.comm.all_reduce_into(&send, &mut got, redop)?;
            self.assert_unchanged(&send);
        }
        Ok(Outcome::reduced(got, self.reduction(0..count)))
    }

    fn reduce<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, redop, root, .. } = self.case;
        let is_root = self.is_root();
        let mut got: Vec<T> = self.mine(count);
        if self.case.in_place {
            self.comm.reduce(&mut got, redop, root)?;
        } else {
            let send = std::mem::replace(&mut got, self.garbage(if is_root { count } else { 0 }));
            self.comm.reduce_into(&send, is_root.then_some(&mut got[..]), redop, root)?;
            self.assert_unchanged(&send);
        }
        if is_root {
            return Ok(Outcome::reduced(got, self.reduction(0..count)));
        }
        // What the buffers of the other ranks hold is not checked.
        Ok(Outcome::exact(got.clone(), got))
    }

    fn broadcast<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, root, .. } = self.case;
        let is_root = self.is_root();
        let mut got = if is_root { self.mine(count) } else { self.garbage(count) };
        if self.case.in_place {
            self.comm.broadcast(&mut got, root)?;
        } else {
            let send = std::mem::replace(&mut got, self.garbage(count));
            self.comm.broadcast_into(is_root.then_some(&send[..]), &mut got, root)?;
        }
        Ok(Outcome::exact(got, self.values(root, count)))
    }

    /// A buffer with room for the blocks of all ranks, of which this rank has filled its own.
    fn gather_buffer<T: Value>(&self) -> Vec<T> {
        let Case { count, .. } = self.case;
        let mut buf = self.garbage(self.world * count);
        buf[self.me * count..(self.me + 1) * count].copy_from_slice(&self.mine(count));
        buf
    }

    fn all_gather<T: Value>(&self) -> Result<Outcome<T>> {
        let mut got;
        if self.case.in_place {
            got = self.gather_buffer();
            self.comm.all_gather_in_place(&mut got)?;
        } else {
            got = self.garbage(self.world * self.case.count);
            self.comm.all_gather(&self.mine(self.case.count), &mut got)?;
        }
        Ok(Outcome::exact(got, self.blocks()))
    }

    fn gather<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, root, .. } = self.case;
        let is_root = self.is_root();
        let mut got: Vec<T>;
        if self.case.in_place {
            got = self.gather_buffer();
            self.comm.gather_in_place(&mut got, root)?;
        } else {
            got = self.garbage(if is_root { self.world * count } else { 0 });
            self.comm.gather(&self.mine(count), is_root.then_some(&mut got[..]), root)?;
        }
        Ok(if is_root { Outcome::exact(got, self.blocks()) } else { Outcome::nothing() })
    }

    fn all_gather_v<T: Value>(&self) -> Result<Outcome<T>> {
        let counts = self.counts();
        let mut got: Vec<T> = self.garbage(counts.iter().sum());
        let mine: Vec<T> = self.mine(counts[self.me]);
        if self.case.in_place {
            let start: usize = counts[..self.me].iter().sum();
            got[start..start + mine.len()].copy_from_slice(&mine);
            self.comm.all_gather_v_in_place(&mut got, &counts)?;
        } else {
            self.comm.all_gather_v(&mine, &mut got, &counts)?;
        }
        Ok(Outcome::exact(got, (0..self.world).flat_map(|rank| self.values(rank, counts[rank])).collect()))
    }

    fn reduce_scatter<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, redop, .. } = self.case;
        let block = self.me * count..(self.me + 1) * count;
        let mut send: Vec<T> = self.mine(self.world * count);
        let mut got: Vec<T> = self.garbage(count);
        if self.case.in_place {
            self.comm.reduce_scatter_in_place(&mut send, redop)?;
            got.copy_from_slice(&send[block.clone()]);
        } else {
            self.comm.reduce_scatter(&send, &mut got, redop)?;
            self.assert_unchanged(&send);
        }
        Ok(Outcome::reduced(got, self.reduction(block)))
    }

    fn reduce_scatter_v<T: Value>(&self) -> Result<Outcome<T>> {
        let (counts, redop) = (self.counts(), self.case.redop);
        let start: usize = counts[..self.me].iter().sum();
        let block = start..start + counts[self.me];
        let mut send: Vec<T> = self.mine(counts.iter().sum());
        let mut got: Vec<T> = self.garbage(block.len());
        if self.case.in_place {
            self.comm.reduce_scatter_v_in_place(&mut send, &counts, redop)?;
            got.copy_from_slice(&send[block.clone()]);
        } else {
            self.comm.reduce_scatter_v(&send, &mut got, &counts, redop)?;
            self.assert_unchanged(&send);
        }
        Ok(Outcome::reduced(got, self.reduction(block)))
    }

    fn all_to_all<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, .. } = self.case;
        let all = self.world * count;
        let mut got: Vec<T> = self.mine(all);
        if self.case.in_place {
            self.comm.all_to_all_in_place(&mut got)?;
        } else {
            let send = std::mem::replace(&mut got, self.garbage(all));
            self.comm.all_to_all(&send, &mut got)?;
        }
        Ok(Outcome::exact(got, (0..all).map(|i| self.value(i / count, self.me * count + i % count)).collect()))
    }

    fn all_to_all_v<T: Value>(&self) -> Result<Outcome<T>> {
        let me = self.me;
        let sends: Vec<usize> = (0..self.world).map(|to| self.pair(me, to)).collect();
        let recvs: Vec<usize> = (0..self.world).map(|from| self.pair(from, me)).collect();
        let mut got: Vec<T> = self.garbage(recvs.iter().sum());
        self.comm.all_to_all_v(&self.mine::<T>(sends.iter().sum()), &sends, &mut got, &recvs)?;
        let mut expected = Vec::new();
        for from in 0..self.world {
            let before: usize = (0..me).map(|to| self.pair(from, to)).sum();
            expected.extend((before..before + self.pair(from, me)).map(|i| self.value::<T>(from, i)));
        }
        Ok(Outcome::exact(got, expected))
    }

    fn scatter<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, root, .. } = self.case;
        let block = self.me * count..(self.me + 1) * count;
        let all: Vec<T> = self.values(root, self.world * count);
        let mut got: Vec<T> = self.garbage(count);
        if self.case.in_place {
            let mut buf = if self.is_root() { all } else { self.garbage(self.world * count) };
            self.comm.scatter_in_place(&mut buf, root)?;
            got.copy_from_slice(&buf[block.clone()]);
        } else {
            self.comm.scatter(self.is_root().then_some(&all[..]), &mut got, root)?;
        }
        Ok(Outcome::exact(got, block.map(|i| self.value(root, i)).collect()))
    }

    /// Every rank sends to the rank `shift` after it, all at once.
    fn send_recv<T: Value>(&self) -> Result<Outcome<T>> {
        let Case { count, root, .. } = self.case;
        let shift = 1 + root % (self.world - 1);
        let (to, from) = ((self.me + shift) % self.world, (self.me + self.world - shift) % self.world);
        let (mine, mut got): (Vec<T>, Vec<T>) = (self.mine(count), self.garbage(count));
        if self.case.in_place {
            self.comm.scope(|s| {
                s.send(&mine, to)?;
                s.recv(&mut got, from)
            })?;
        } else {
            self.comm.send_recv(&mine, to, &mut got, from)?;
        }
        Ok(Outcome::exact(got, self.values(from, count)))
    }
}

//! Every operation, described once.
//!
//! [`operations`] lists them: the documentation of the blocking form, the names of the blocking and
//! the nonblocking form, the arguments, and the [`Call`](crate::call::Call) that they make. Each
//! form is a macro that makes one method of one entry: `blocking`, `nonblocking` and `scoped` on
//! host memory, `on_stream` on device memory.
//!
//! An argument is a buffer, the counts of all ranks, or a plain value of the type that is named:
//!
//! | kind | blocking | nonblocking | scoped | on a stream | in the call |
//! |---|---|---|---|---|---|
//! | `input` | `&[T]` | `S: AsRef<[T]>` | `&'scope [T]` | `&impl DevicePtr<T>` | `RawSlice` |
//! | `output`, `in_place` | `&mut [T]` | `R: AsMut<[T]>` | `&'scope mut [T]` | `&mut impl DevicePtrMut<T>` | `RawSliceMut` |
//! | `root_input` | `Option<&[T]>` | `Option<S>` | `Option<&'scope [T]>` | `Option<&S>` | `Option<RawSlice>` |
//! | `root_output` | `Option<&mut [T]>` | `Option<R>` | `Option<&'scope mut [T]>` | `Option<&mut R>` | `Option<RawSliceMut>` |
//! | `counts` | `&[usize]` | `&[usize]` | `&[usize]` | `&[usize]` | `&[usize]` |
//!
//! Two operations do not fit and are written by hand: `recv_any` returns a rank, and `send_recv` is
//! two calls.

/// Makes one form of every operation, inside an `impl` block: `operations!(blocking)`.
macro_rules! operations {
    ($form:ident) => {
        $form! {
            /// Reduces all ranks' `buf`, element by element. Every rank's `buf` then holds the
            /// result, with the same bits.
            ///
            /// All ranks give the same number of elements.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut buf = [comm.rank() as f32; 4];
            /// comm.all_reduce(&mut buf, kolo::ReduceOp::Sum)?;
            /// assert_eq!(buf[0] as usize, (0..comm.world_size()).sum::<usize>());
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_reduce, start_all_reduce |comm| (buf: in_place, op: ReduceOp) => calls::all_reduce::<T>(buf, op)
        }
        $form! {
            /// Reduces all ranks' `send`, element by element, into every rank's `recv`:
            /// [`Communicator::all_reduce`] out of place.
            ///
            /// All ranks give the same number of elements; `recv` has as many as `send`.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let (send, mut recv) = ([1u32; 4], [0; 4]);
            /// comm.all_reduce_into(&send, &mut recv, kolo::ReduceOp::Sum)?;
            /// assert_eq!(recv, [comm.world_size() as u32; 4]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_reduce_into, start_all_reduce_into |comm| (send: input, recv: output, op: ReduceOp)
                => calls::all_reduce_into::<T>(send, recv, op)
        }
        $form! {
            /// Copies the root's `buf` to every rank's `buf`.
            ///
            /// All ranks give the same number of elements.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut seed = [if comm.rank() == 0 { 42u64 } else { 0 }];
            /// comm.broadcast(&mut seed, 0)?;
            /// assert_eq!(seed, [42]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            broadcast, start_broadcast |comm| (buf: in_place, root: Rank) => calls::broadcast::<T>(buf, root)
        }
        $form! {
            /// Copies the root's `send` to every rank's `recv`: [`Communicator::broadcast`] out of
            /// place.
            ///
            /// All ranks give the same number of elements in `recv`. The root gives `send` with as
            /// many; other ranks may give `None`.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let seed = [42u64];
            /// let mut recv = [0];
            /// comm.broadcast_into((comm.rank() == 0).then_some(&seed[..]), &mut recv, 0)?;
            /// assert_eq!(recv, [42]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            broadcast_into, start_broadcast_into |comm| (send: root_input, recv: output, root: Rank)
                => calls::broadcast_into::<T>(send, recv, root, comm.rank())?
        }
        $form! {
            /// Waits until every rank has called it.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// comm.barrier()?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            barrier, start_barrier |comm| () => calls::barrier()
        }
        $form! {
            /// Reduces all ranks' `buf`, element by element, into the root's `buf`. The other
            /// ranks' `buf` stays as it is.
            ///
            /// All ranks give the same number of elements.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut losses = [0.5f64];
            /// comm.reduce(&mut losses, kolo::ReduceOp::Average, 0)?;
            /// if comm.rank() == 0 {
            ///     println!("mean loss {}", losses[0]);
            /// }
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce, start_reduce |comm| (buf: in_place, op: ReduceOp, root: Rank) => calls::reduce::<T>(buf, op, root)
        }
        $form! {
            /// Reduces all ranks' `send`, element by element, into the root's `recv`:
            /// [`Communicator::reduce`] out of place.
            ///
            /// All ranks give the same number of elements in `send`. The root gives `recv` with as
            /// many; other ranks may give `None`.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut sum = [0u32; 4];
            /// let recv = (comm.rank() == 0).then_some(&mut sum[..]);
            /// comm.reduce_into(&[1; 4], recv, kolo::ReduceOp::Sum, 0)?;
            /// # assert_eq!(sum, [1; 4]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce_into, start_reduce_into |comm| (send: input, recv: root_output, op: ReduceOp, root: Rank)
                => calls::reduce_into::<T>(send, recv, op, root, comm.rank())?
        }
        $form! {
            /// Concatenates all ranks' `send`, in the order of ranks, into every rank's `recv`.
            ///
            /// All ranks give the same number of elements in `send`; `recv` has N times as many,
            /// where N is the world size.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut ranks = vec![0; comm.world_size()];
            /// comm.all_gather(&[comm.rank() as u64], &mut ranks)?;
            /// assert_eq!(ranks[comm.rank()], comm.rank() as u64);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_gather, start_all_gather |comm| (send: input, recv: output) => calls::all_gather::<T>(send, recv)
        }
        $form! {
            /// [`Communicator::all_gather`] in place: this rank contributes block `rank` of the N
            /// equal blocks of `buf`.
            ///
            /// All ranks give the same number of elements, a multiple of the world size N.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut ranks = vec![0; comm.world_size()];
            /// ranks[comm.rank()] = comm.rank() as u64;
            /// comm.all_gather_in_place(&mut ranks)?;
            /// # assert_eq!(ranks[comm.rank()], comm.rank() as u64);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_gather_in_place, start_all_gather_in_place |comm| (buf: in_place)
                => calls::all_gather_in_place::<T>(buf, comm.rank(), comm.world_size())?
        }
        $form! {
            /// [`Communicator::all_gather`] with a count for each rank: rank `i` contributes
            /// `counts[i]` elements.
            ///
            /// `send` has `counts[rank]` elements, `recv` has the sum of all counts. All ranks give
            /// the same counts.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let counts: Vec<usize> = (1..=comm.world_size()).collect();
            /// let send = vec![comm.rank() as u64; counts[comm.rank()]];
            /// let mut recv = vec![0; counts.iter().sum()];
            /// comm.all_gather_v(&send, &mut recv, &counts)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_gather_v, start_all_gather_v |comm| (send: input, recv: output, counts: counts)
                => calls::all_gather_v::<T>(send, recv, counts, comm.world_size())?
        }
        $form! {
            /// [`Communicator::all_gather_v`] in place: this rank contributes its own block of
            /// `buf`.
            ///
            /// `buf` has the sum of all counts. All ranks give the same counts.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let counts: Vec<usize> = (1..=comm.world_size()).collect();
            /// let mut buf = vec![comm.rank() as u64; counts.iter().sum()];
            /// comm.all_gather_v_in_place(&mut buf, &counts)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_gather_v_in_place, start_all_gather_v_in_place |comm| (buf: in_place, counts: counts)
                => calls::all_gather_v_in_place::<T>(buf, counts, comm.rank(), comm.world_size())?
        }
        $form! {
            /// Reduces all ranks' `send`, element by element, and leaves block `i` of the result in
            /// rank `i`'s `recv`.
            ///
            /// The result has N equal blocks, where N is the world size: `send` has N times as many
            /// elements as `recv`. All ranks give the same number of elements.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let send = vec![1.0f32; 4 * comm.world_size()];
            /// let mut recv = [0.0; 4];
            /// comm.reduce_scatter(&send, &mut recv, kolo::ReduceOp::Average)?;
            /// assert_eq!(recv, [1.0; 4]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce_scatter, start_reduce_scatter |comm| (send: input, recv: output, op: ReduceOp)
                => calls::reduce_scatter::<T>(send, recv, op)
        }
        $form! {
            /// [`Communicator::reduce_scatter`] in place: the result replaces block `rank` of the N
            /// equal blocks of `buf`.
            ///
            /// All ranks give the same number of elements, a multiple of the world size N. The
            /// other blocks are scratch memory: their content afterwards is not specified.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut buf = vec![1u32; 4 * comm.world_size()];
            /// comm.reduce_scatter_in_place(&mut buf, kolo::ReduceOp::Sum)?;
            /// assert_eq!(buf[4 * comm.rank()], comm.world_size() as u32);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce_scatter_in_place, start_reduce_scatter_in_place |comm| (buf: in_place, op: ReduceOp)
                => calls::reduce_scatter_in_place::<T>(buf, op, comm.rank(), comm.world_size())?
        }
        $form! {
            /// [`Communicator::reduce_scatter`] with a count for each rank: block `i` of the result
            /// has `counts[i]` elements.
            ///
            /// `send` has the sum of all counts, `recv` has `counts[rank]` elements. All ranks give
            /// the same counts.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let counts: Vec<usize> = (1..=comm.world_size()).collect();
            /// let send = vec![1u64; counts.iter().sum()];
            /// let mut recv = vec![0; counts[comm.rank()]];
            /// comm.reduce_scatter_v(&send, &mut recv, &counts, kolo::ReduceOp::Sum)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce_scatter_v, start_reduce_scatter_v |comm| (send: input, recv: output, counts: counts, op: ReduceOp)
                => calls::reduce_scatter_v::<T>(send, recv, counts, op, comm.world_size())?
        }
        $form! {
            /// [`Communicator::reduce_scatter_v`] in place: the result replaces this rank's block
            /// of `buf`.
            ///
            /// `buf` has the sum of all counts. All ranks give the same counts. The other blocks
            /// are scratch memory: their content afterwards is not specified.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let counts: Vec<usize> = (1..=comm.world_size()).collect();
            /// let mut buf = vec![1u64; counts.iter().sum()];
            /// comm.reduce_scatter_v_in_place(&mut buf, &counts, kolo::ReduceOp::Sum)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            reduce_scatter_v_in_place, start_reduce_scatter_v_in_place |comm| (buf: in_place, counts: counts, op: ReduceOp)
                => calls::reduce_scatter_v_in_place::<T>(buf, counts, op, comm.rank(), comm.world_size())?
        }
        $form! {
            /// Sends block `j` of each rank's `send` to rank `j`: block `j` of rank `i`'s `send`
            /// becomes block `i` of rank `j`'s `recv`.
            ///
            /// All ranks give the same number of elements, a multiple of the world size N, in
            /// `send` and in `recv`. Both have N equal blocks.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let send = vec![comm.rank() as u64; comm.world_size()];
            /// let mut recv = vec![0; comm.world_size()];
            /// comm.all_to_all(&send, &mut recv)?;
            /// assert!(recv.iter().copied().eq(0..comm.world_size() as u64));
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_to_all, start_all_to_all |comm| (send: input, recv: output)
                => calls::of::<T>(crate::types::Op::AllToAll, send, recv, comm.world_size())?
        }
        $form! {
            /// [`Communicator::all_to_all`] in place: what this rank receives replaces what it
            /// sends.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut buf = vec![comm.rank() as u64; comm.world_size()];
            /// comm.all_to_all_in_place(&mut buf)?;
            /// assert!(buf.iter().copied().eq(0..comm.world_size() as u64));
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_to_all_in_place, start_all_to_all_in_place |comm| (buf: in_place)
                => calls::of::<T>(crate::types::Op::AllToAll, buf.as_const(), buf, comm.world_size())?
        }
        $form! {
            /// [`Communicator::all_to_all`] with a count for each pair: this rank sends
            /// `send_counts[j]` elements to rank `j` and receives `recv_counts[i]` elements from
            /// rank `i`.
            ///
            /// Each buffer has the sum of its counts. Rank `i`'s `send_counts[j]` equals rank `j`'s
            /// `recv_counts[i]`.
            ///
            /// # Errors
            ///
            /// [`Error::Counts`](crate::Error::Counts) if two ranks give different counts for what
            /// one sends to the other.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// // Rank i gets i + 1 elements of every rank.
            /// let send_counts: Vec<usize> = (1..=comm.world_size()).collect();
            /// let recv_counts = vec![comm.rank() + 1; comm.world_size()];
            /// let send = vec![comm.rank() as u64; send_counts.iter().sum()];
            /// let mut recv = vec![0; recv_counts.iter().sum()];
            /// comm.all_to_all_v(&send, &send_counts, &mut recv, &recv_counts)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            all_to_all_v, start_all_to_all_v |comm| (send: input, send_counts: counts, recv: output, recv_counts: counts)
                => calls::all_to_all_v::<T>(send, send_counts, recv, recv_counts, comm.world_size())?
        }
        $form! {
            /// Concatenates all ranks' `send`, in the order of ranks, into the root's `recv`.
            ///
            /// All ranks give the same number of elements in `send`. The root gives `recv` with N
            /// times as many, where N is the world size; other ranks may give `None`.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut losses = vec![0.0; comm.world_size()];
            /// let recv = (comm.rank() == 0).then_some(&mut losses[..]);
            /// comm.gather(&[0.5f64], recv, 0)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            gather, start_gather |comm| (send: input, recv: root_output, root: Rank)
                => calls::gather::<T>(send, recv, root, comm.rank())?
        }
        $form! {
            /// [`Communicator::gather`] in place: this rank contributes block `rank` of the N equal
            /// blocks of `buf`. Only the root's `buf` is written.
            ///
            /// All ranks give the same number of elements, a multiple of the world size N.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut losses = vec![0.0; comm.world_size()];
            /// losses[comm.rank()] = 0.5f64;
            /// comm.gather_in_place(&mut losses, 0)?;
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            gather_in_place, start_gather_in_place |comm| (buf: in_place, root: Rank)
                => calls::gather_in_place::<T>(buf, root, comm.rank(), comm.world_size())?
        }
        $form! {
            /// Copies block `i` of the root's `send` to rank `i`'s `recv`.
            ///
            /// All ranks give the same number of elements in `recv`. The root gives `send` with N
            /// times as many, where N is the world size; other ranks may give `None`.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let all: Vec<u64> = (0..comm.world_size() as u64).collect();
            /// let mut mine = [0];
            /// comm.scatter((comm.rank() == 0).then_some(&all[..]), &mut mine, 0)?;
            /// assert_eq!(mine, [comm.rank() as u64]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            scatter, start_scatter |comm| (send: root_input, recv: output, root: Rank)
                => calls::scatter::<T>(send, recv, root, comm.rank())?
        }
        $form! {
            /// [`Communicator::scatter`] in place: what this rank receives replaces block `rank` of
            /// the N equal blocks of its `buf`.
            ///
            /// All ranks give the same number of elements, a multiple of the world size N.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let mut buf: Vec<u64> = (0..comm.world_size() as u64).collect();
            /// comm.scatter_in_place(&mut buf, 0)?;
            /// assert_eq!(buf[comm.rank()], comm.rank() as u64);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            scatter_in_place, start_scatter_in_place |comm| (buf: in_place, root: Rank)
                => calls::scatter_in_place::<T>(buf, root, comm.rank(), comm.world_size())?
        }
        $form! {
            /// Sends `buf` to rank `to`, which calls [`Communicator::recv`] with as many elements
            /// of the same type.
            ///
            /// It may return before the peer receives, or wait for the peer. Two ranks that both
            /// send first may therefore wait for each other until the deadline: use
            /// [`Communicator::send_recv`] or [`Communicator::scope`] there. Nonblocking and scoped
            /// sends and receives that follow each other progress side by side.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// match comm.rank() {
            ///     0 if comm.world_size() > 1 => comm.send(&[1.0f32; 8], 1)?,
            ///     1 => comm.recv(&mut [0.0f32; 8], 0)?,
            ///     _ => {}
            /// }
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            send, start_send |comm| (buf: input, to: Rank) => calls::send::<T>(buf, to)
        }
        $form! {
            /// Receives what rank `from` sends by [`Communicator::send`], with as many elements of
            /// the same type.
            ///
            /// Messages of one peer arrive in the order in which the peer sent them. Those with a tag are
            /// for [`Communicator::recv_tagged`].
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// match comm.rank() {
            ///     0 if comm.world_size() > 1 => comm.send(&[1.0f32; 8], 1)?,
            ///     1 => comm.recv(&mut [0.0f32; 8], 0)?,
            ///     _ => {}
            /// }
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            recv, start_recv |comm| (buf: output, from: Rank) => calls::recv::<T>(buf, from)
        }
        $form! {
            /// [`Communicator::send`] with a tag: rank `to` receives the message by
            /// [`Communicator::recv_tagged`] with the same tag. Tag 0 is that of messages without a
            /// tag. The rank may be this one.
            ///
            /// A rank that waits in a receive keeps the messages that come before its own, up to 64 MiB
            /// of each sender; so does a collective by TCP. Others wait here, so a blocking send may wait
            /// for the peer, as [`Communicator::send`] says.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// let me = comm.rank();
            /// comm.send_tagged(&[1u8], me, 7)?;
            /// comm.send_tagged(&[2u8], me, 8)?;
            /// let mut got = [0u8; 2];
            /// comm.recv_tagged(&mut got[..1], me, 8)?;
            /// comm.recv_tagged(&mut got[1..], me, 7)?;
            /// assert_eq!(got, [2, 1]);
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            send_tagged, start_send_tagged |comm| (buf: input, to: Rank, tag: Tag) => calls::tagged(calls::send::<T>(buf, to), tag)
        }
        $form! {
            /// Receives what rank `from` sends by [`Communicator::send_tagged`] with the same tag, with
            /// as many elements of the same type.
            ///
            /// Messages of one peer and one tag arrive in the order in which the peer sent them. If none
            /// with this tag comes before the deadline, the error names the tags of those that wait.
            ///
            /// ```
            /// # fn main() -> kolo::Result<()> {
            /// # for comm in kolo::Communicator::in_process(1)? {
            /// match comm.rank() {
            ///     0 if comm.world_size() > 1 => comm.send_tagged(&[1.0f32; 8], 1, 7)?,
            ///     1 => comm.recv_tagged(&mut [0.0f32; 8], 0, 7)?,
            ///     _ => {}
            /// }
            /// # }
            /// # Ok(())
            /// # }
            /// ```
            recv_tagged, start_recv_tagged |comm| (buf: output, from: Rank, tag: Tag)
                => calls::tagged(calls::recv::<T>(buf, from), tag)
        }
    };
}
pub(super) use operations;

//! Error feedback: what messages of fewer bits leave out is sent with the next step.

use std::collections::HashMap;
use std::ops::Range;

use super::float::Float;
use super::hook::{Bucket, Hook, with_float};
use crate::communicator::{Communicator, Registered};
use crate::error::Result;
use crate::reduce::Packing;
use crate::types::{DType, Op, ReduceOp, mix};

/// Averages gradients by messages of fewer bits between hosts
/// ([`Builder::wire_dtype`](crate::Builder::wire_dtype)), and adds what rounding has left out, of each
/// host's sum and of the result, to the sum of the next step: over many steps nothing is lost (Tang et
/// al.: "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
/// Compression", ICML 2019).
///
/// Supports `f32`, `f16` and `bf16`, and computes in `f32`. Buckets whose messages have the bits of
/// their elements are averaged as without this hook. The lowest rank of each host exchanges the
/// messages, and keeps one `f32` for each element.
#[derive(Debug, Default)]
pub struct ErrorFeedback {
    hosts: Option<Hosts>,
    /// By the index of the parameter, because buckets are rebuilt: what was left out, on a host's lowest
    /// rank.
    left_out: HashMap<usize, Vec<f32>>,
    /// A bucket.
    sums: Option<Registered<f32>>,
    /// Messages to all hosts, and of all: in words, to which a packing is aligned.
    sent: Vec<u16>,
    received: Vec<u16>,
    /// The numbers of one message.
    part: Vec<f32>,
}

#[derive(Debug)]
struct Hosts {
    /// The ranks of this host.
    within: Communicator,
    /// The lowest rank of each host, on these ranks.
    between: Option<Communicator>,
}

impl ErrorFeedback {
    /// Nothing was left out so far.
    pub fn new() -> ErrorFeedback {
        ErrorFeedback::default()
    }

    fn average<T: Float>(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator, packing: Packing) -> Result<()> {
        if self.sums.as_ref().is_none_or(|sums| sums.len() < bucket.count()) {
            self.sums = None;
            self.sums = Some(comm.alloc(bucket.count())?);
        }
        if self.hosts.is_none() {
            let within = comm.split(comm.lowest_of_host(), comm.rank())?;
            let between = comm.split_or_leave((within.rank() == 0).then_some(0), comm.rank())?;
            self.hosts = Some(Hosts { within, between });
        }
        let (Some(hosts), Some(mut sums)) = (self.hosts.take(), self.sums.take()) else { unreachable!("both were just made") };
        let numbers = &mut sums[..bucket.count()];
        let share = 1.0 / comm.world_size() as f32;
        numbers.iter_mut().zip(bucket.elements::<T>()?).for_each(|(sum, value)| *sum = value.share(share));
        hosts.within.reduce(numbers, ReduceOp::Sum, 0)?;
        if let Some(between) = &hosts.between {
            self.exchange(bucket, numbers, between, packing)?;
        }
        hosts.within.broadcast(numbers, 0)?;
        bucket.elements::<T>()?.iter_mut().zip(numbers).for_each(|(value, sum)| *value = T::of_single(*sum));
        (self.hosts, self.sums) = (Some(hosts), Some(sums));
        Ok(())
    }

    /// Sums over hosts: each sums a part of the bucket, of all hosts' messages.
    fn exchange(&mut self, bucket: &Bucket<'_>, sums: &mut [f32], between: &Communicator, packing: Packing) -> Result<()> {
        let (hosts, me, count) = (between.world_size(), between.rank(), sums.len());
        let longest = count.div_ceil(hosts).next_multiple_of(Packing::ALIGN);
        let part = |host: usize| (host * longest).min(count)..((host + 1) * longest).min(count);
        let message = packing.bytes(longest).div_ceil(size_of::<u16>());
        let (step, index) = (bucket.step(), bucket.index() as u64);
        let run = |of: usize| mix(mix(step, index), mix(me as u64, of as u64));
        for words in [&mut self.sent, &mut self.received] {
            words.clear();
            words.resize(hosts * message, 0);
        }
        self.part.resize(longest, 0.0);

        self.add_left_out(bucket, sums);
        for host in 0..hosts {
            let (range, words) = (part(host), &mut self.sent[host * message..(host + 1) * message]);
            let rest = &mut self.part[..range.len()];
            pack(packing, &sums[range.clone()], words, run(host));
            unpack(packing, words, rest);
            rest.iter_mut().zip(&sums[range.clone()]).for_each(|(sent, sum)| *sent = sum - *sent);
            keep(&mut self.left_out, bucket, range, rest);
        }
        between.all_to_all(&self.sent, &mut self.received)?;

        let own = part(me);
        let (own_sums, numbers) = (&mut sums[own.clone()], &mut self.part[..own.len()]);
        own_sums.fill(0.0);
        for words in self.received.chunks(message) {
            unpack(packing, words, numbers);
            own_sums.iter_mut().zip(&*numbers).for_each(|(sum, number)| *sum += number);
        }
        let result = &mut self.sent[..message];
        pack(packing, own_sums, result, run(hosts));
        unpack(packing, result, numbers);
        numbers.iter_mut().zip(&*own_sums).for_each(|(sent, sum)| *sent = sum - *sent);
        keep(&mut self.left_out, bucket, own, numbers);
        between.all_gather(result, &mut self.received)?;
        for (host, words) in self.received.chunks(message).enumerate() {
            unpack(packing, words, &mut sums[part(host)]);
        }
        Ok(())
    }

    /// Takes what was left out.
    fn add_left_out(&mut self, bucket: &Bucket<'_>, sums: &mut [f32]) {
        for (index, parameter, range) in bucket.members() {
            let left_out = self.left_out.entry(index).or_insert_with(|| vec![0.0; parameter.count()]);
            sums[range].iter_mut().zip(left_out).for_each(|(sum, left_out)| *sum += std::mem::take(left_out));
        }
    }
}

/// Adds what was left out of a range of the bucket to what the next step sends.
fn keep(left_out: &mut HashMap<usize, Vec<f32>>, bucket: &Bucket<'_>, range: Range<usize>, rest: &[f32]) {
    for (index, _, members) in bucket.members() {
        let (start, end) = (members.start.max(range.start), members.end.min(range.end));
        let Some(left_out) = left_out.get_mut(&index).filter(|_| start < end) else { continue };
        let rest = &rest[start - range.start..end - range.start];
        for (left_out, rest) in left_out[start - members.start..end - members.start].iter_mut().zip(rest) {
            // An infinite gradient, which many programs skip, would stay for ever.
            *left_out = if rest.is_finite() { *left_out + rest } else { 0.0 };
        }
    }
}

/// # Panics
///
/// If the message is too short for the numbers.
fn pack(packing: Packing, numbers: &[f32], message: &mut [u16], run: u64) {
    assert!(packing.bytes(numbers.len()) <= size_of_val(message));
    // SAFETY: the message is long enough, aligned to 2, and borrowed mutably, so it is apart from the
    // numbers, which are f32, as the packing's buffers are.
    unsafe { packing.pack(numbers.as_ptr().cast(), message.as_mut_ptr().cast(), numbers.len(), run) }
}

/// # Panics
///
/// If the message is too short for the numbers.
fn unpack(packing: Packing, message: &[u16], numbers: &mut [f32]) {
    assert!(packing.bytes(numbers.len()) <= size_of_val(message));
    // SAFETY: the message is long enough and aligned to 2, and the numbers are borrowed mutably, so they
    // are apart from it; they are f32, as the packing's buffers are.
    unsafe { packing.unpack(message.as_ptr().cast(), numbers.as_mut_ptr().cast(), numbers.len()) }
}

impl Hook for ErrorFeedback {
    fn name(&self) -> String {
        "error feedback".to_owned()
    }

    fn reduce(&mut self, bucket: &mut Bucket<'_>, comm: &Communicator) -> Result<()> {
        let dtype = bucket.dtype();
        let bytes = (bucket.count() * dtype.size()) as u64;
        let is_packed = comm.packing((Op::AllReduce, dtype, Some(ReduceOp::Average), bytes)).is_some();
        // Sums of hosts are f32.
        match comm.packing((Op::AllReduce, DType::F32, Some(ReduceOp::Sum), bytes)) {
            Some(packing) if is_packed => with_float!(dtype, T => self.average::<T>(bucket, comm, packing)),
            _ => bucket.average(comm),
        }
    }
}

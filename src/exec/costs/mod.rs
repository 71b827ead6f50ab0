//! Measures what messages between hosts cost, when a job starts. Two ranks of different hosts exchange
//! messages, and one of them tells all ranks the result, so that all choose the same algorithms:
//! rank 0 and the first rank of another host, or with a topology two hosts of one rack, and then two
//! of different racks. The measuring rank keeps the result on its machine's disk ([`cache`]): the next
//! job on these hosts takes it from there, chooses the same algorithms and so gets the same bits.
//! Without a topology, each two of a few hosts measure what messages between them cost ([`pairs`]), again
//! when a link changes ([`change`]).

pub(crate) mod cache;
mod change;
mod pairs;

pub(crate) use pairs::{Again, Measured, short_names};

use std::time::{Duration, Instant};

use super::core::Core;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::error::Result;
use crate::failure::{CommInfo, OpContext};
use crate::reduce::Kernel;
use crate::schedule::Algorithm;
use crate::schedule::order::rounds;
use crate::schedule::select::{CostModel, LinkCost};
use crate::types::{DType, Descriptor, Op, Rank, ReduceOp};
use cache::{Pair, PairClass};
use pairs::most_time;

/// The sizes of the messages whose transfer is timed, in bytes. They are tried in this order until one
/// takes longer than a short message by at least [`LONG`] and by at least a round trip. So a fast
/// network is measured with long messages, and a slow one in little time.
const SIZES: [usize; 5] = [8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const LONG: Duration = Duration::from_millis(4);

/// Bytes of a short message.
const SHORT: usize = 8;

/// Short messages in a row, by which the processor time of a message is told from its latency.
const ROW: usize = 16;

/// How long short messages are repeated, and how often at least and at most. The least time counts:
/// what disturbs a measurement makes it longer.
const REPEATING: Duration = Duration::from_millis(10);
const FEWEST: usize = 3;
const MOST: usize = 20;

/// How long two hosts meet at most for `kolo doctor`.
const DOCTOR_ROUND: Duration = Duration::from_secs(1);

/// Two ranks, of which the first measures.
struct Probe<'a> {
    pair: [Rank; 2],
    class: PairClass,
    context: OpContext<'a>,
    memory: Vec<u64>,
}

impl Core {
    /// Measures the costs of messages between hosts, and uses them from now on. All ranks call this
    /// together, before the first operation.
    pub(super) fn measure_costs(&mut self, info: &CommInfo) -> Result<()> {
        // What is measured holds for the job, also in communicators that are made later.
        let measures = std::mem::take(&mut self.settings.cost_model.are_measured);
        if !measures {
            return Ok(());
        }
        // A forced algorithm needs no costs but those that decide the order of hosts.
        if self.settings.algorithm.is_none() {
            self.measure_network(info)?;
        }
        self.measure_pairs(info)
    }

    /// Measures each pair of hosts for `kolo doctor`, longer than a start may. All ranks call this together,
    /// between two operations. Returns `None` if the hosts cannot be measured. Later jobs measure what this does
    /// not.
    pub(crate) fn measure_for_doctor(&mut self, info: &CommInfo) -> Result<Option<Again>> {
        let most = most_time(DOCTOR_ROUND * rounds(self.first_on_host.len()) as u32, info.timeout);
        let again = self.finish_connecting(info, |core| core.measure_pairs_again(&connecting(info), most, true))?;
        if let Some(again) = again.as_ref().filter(|_| info.rank == 0) {
            cache::forget(again.names.clone());
        }
        Ok(again)
    }

    fn measure_network(&mut self, info: &CommInfo) -> Result<()> {
        let mut model = self.settings.cost_model.model;
        for (class, pair) in self.pairs() {
            let (network, reduce) = self.costs_between(info, class, pair)?;
            if class == PairClass::OtherRack {
                model = model.with_uplink(network);
            } else {
                model = CostModel { network, ring: None, reduce, ..model }.with_uplink(network);
            }
        }
        // The measuring rank sends what it has measured. Every rank that checks finds the same.
        if model.invalid().is_none() {
            self.settings.cost_model.model = model;
            self.forget_choice();
        }
        Ok(())
    }

    /// Returns the pairs of ranks to measure, the same on all ranks: one of each class that there is.
    fn pairs(&self) -> Vec<(PairClass, [Rank; 2])> {
        let first = &*self.first_on_host;
        if self.racks.is_empty() {
            let hosts = self.fabric.hosts();
            let partner = (0..hosts.len()).find(|&rank| hosts[rank] != hosts[0]);
            return partner.map(|partner| (PairClass::Hosts, [0, partner])).into_iter().collect();
        }
        // One rack has several hosts, and there are several racks.
        let ends = self.racks.windows(2).find(|ends| ends[1] - ends[0] > 1);
        let inside = ends.map(|ends| (PairClass::SameRack, [first[ends[0]], first[ends[0] + 1]]));
        inside.into_iter().chain([(PairClass::OtherRack, [first[0], first[self.racks[1]]])]).collect()
    }

    /// Returns the costs of messages between two ranks, and of a reduction, on all ranks: the first of
    /// the two measures.
    fn costs_between(&mut self, info: &CommInfo, class: PairClass, pair: [Rank; 2]) -> Result<(LinkCost, f64)> {
        let context = connecting(info);
        let mut probe = Probe { pair, class, context: context.clone(), memory: Vec::new() };
        let mut costs = [0u64; 4];
        if info.rank == pair[0] {
            let (network, reduce) = self.measure(&mut probe)?;
            costs = [network.latency, network.overhead, network.per_byte, reduce].map(f64::to_bits);
        } else if info.rank == pair[1] {
            self.answer(&mut probe)?;
        }
        let call = Call { root: pair[0], ..Call::in_place(Op::Broadcast, DType::U64, RawSliceMut::of(&mut costs)) };
        // SAFETY: `costs` is borrowed for the call.
        unsafe { self.run_in_order_of_ranks(context, &call, Algorithm::Binomial, None)? };
        let [latency, overhead, per_byte, reduce] = costs.map(f64::from_bits);
        Ok((LinkCost { latency, overhead, per_byte }, reduce))
    }

    /// Returns the costs between the two ranks, from the cache if they are there. Ends with the
    /// message that lets the partner go on.
    fn measure(&mut self, probe: &mut Probe<'_>) -> Result<(LinkCost, f64)> {
        let [from, to] = probe.pair.map(|rank| self.fabric.address_on_network(rank));
        let pair = from.zip(to).map(|(from, to)| Pair::new(&from, &to, self.fabric.kind_of_links(probe.pair[1]), probe.class));
        let found = cache::look_up(pair.iter().cloned().collect());
        let is_late = found.is_none();
        let known = found.into_iter().flatten().next().flatten();
        let is_cached = known.is_some();
        let (network, reduce) = match known {
            Some(known) => (known.network, known.reduce),
            None => (coarse_link(self.time_link(probe)?), coarse(time_reduction())),
        };
        if let Some(pair) = pair.filter(|_| !is_cached && !is_late) {
            cache::keep(vec![(pair, network, reduce)]);
        }
        self.say(probe, 0, [0, 0])?;
        let LinkCost { latency, per_byte, .. } = network;
        crate::log::info!(
            partner = probe.pair[1],
            class = probe.class.name(),
            latency_us = latency * 1e6,
            gigabytes_per_second = 1e-9 / per_byte,
            is_cached,
            "costs between hosts"
        );
        Ok((network, reduce))
    }

    /// Measures a link from its first rank.
    fn time_link(&mut self, probe: &mut Probe<'_>) -> Result<LinkCost> {
        let began = Instant::now();
        // The first message opens the link.
        self.time(probe, SHORT, 1)?;
        let (mut round_trip, mut row) = (f64::INFINITY, f64::INFINITY);
        for i in 0..MOST {
            if i >= FEWEST && began.elapsed() >= REPEATING {
                break;
            }
            round_trip = round_trip.min(self.time(probe, SHORT, 1)?);
            row = row.min(self.time(probe, SHORT, ROW)?);
        }
        let overhead = ((row - round_trip) / (ROW - 1) as f64).max(0.0);
        let latency = round_trip / 2.0;
        // Within a round trip, the window of the connection sets the time, and not the network.
        let long = LONG.as_secs_f64().max(round_trip);
        let (mut before, mut per_byte) = ((SHORT, round_trip), 0.0);
        for bytes in SIZES {
            // The first one fills the window of the connection.
            let mut time = f64::INFINITY;
            for _ in 0..FEWEST {
                time = time.min(self.time(probe, bytes, 1)?);
                // A slow network is not measured again.
                if time - round_trip >= 5.0 * long {
                    break;
                }
            }
            let slope = (time - before.1) / (bytes - before.0) as f64;
            per_byte = if slope > 0.0 { slope } else { time / bytes as f64 };
            before = (bytes, time);
            if time - round_trip >= long {
                break;
            }
        }
        Ok(LinkCost { latency, overhead, per_byte })
    }

    /// Sends `count` messages of `bytes` bytes, and returns the seconds until the answer.
    fn time(&mut self, probe: &mut Probe<'_>, bytes: usize, count: usize) -> Result<f64> {
        self.say(probe, 0, [bytes as u64, count as u64])?;
        let began = Instant::now();
        for _ in 0..count {
            self.pass(probe, 0, bytes)?;
        }
        self.pass(probe, 1, SHORT)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Has the other rank send a message of `bytes` bytes, and returns the seconds until it has come.
    fn time_back(&mut self, probe: &mut Probe<'_>, bytes: usize) -> Result<f64> {
        self.say(probe, 0, [bytes as u64, 0])?;
        let began = Instant::now();
        self.pass(probe, 1, bytes)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Receives and answers the messages of the measuring rank, until it has finished.
    fn answer(&mut self, probe: &mut Probe<'_>) -> Result<()> {
        loop {
            let [bytes, count] = self.say(probe, 0, [0, 0])?;
            // That rank belongs to the job, but it may be of another build.
            let bytes = (bytes as usize).min(SIZES[SIZES.len() - 1]);
            match (bytes, count) {
                (0, 0) => return Ok(()),
                (_, 0) => {
                    self.pass(probe, 1, bytes)?;
                    continue;
                }
                _ => {}
            }
            for _ in 0..count {
                self.pass(probe, 0, bytes)?;
            }
            self.pass(probe, 1, SHORT)?;
        }
    }

    /// Passes two numbers from one of the two ranks to the other.
    fn say(&mut self, probe: &mut Probe<'_>, from: usize, numbers: [u64; 2]) -> Result<[u64; 2]> {
        let mut numbers = numbers;
        // SAFETY: `numbers` is borrowed for the call.
        unsafe { self.pass_memory(probe, from, RawSliceMut::of(&mut numbers))? };
        Ok(numbers)
    }

    /// Passes `bytes` bytes from one of the two ranks to the other.
    fn pass(&mut self, probe: &mut Probe<'_>, from: usize, bytes: usize) -> Result<()> {
        let mut memory = std::mem::take(&mut probe.memory);
        memory.resize(memory.len().max(bytes.div_ceil(size_of::<u64>())), 0);
        // SAFETY: `memory` is borrowed for the call.
        let passed = unsafe { self.pass_memory(probe, from, RawSliceMut::of(&mut memory).take(bytes)) };
        probe.memory = memory;
        passed
    }

    /// # Safety
    ///
    /// `memory` is valid until this returns, and nothing else uses it.
    unsafe fn pass_memory(&mut self, probe: &Probe<'_>, from: usize, memory: RawSliceMut) -> Result<()> {
        let call = Call { root: from, ..Call::in_place(Op::Broadcast, DType::U8, memory) };
        // SAFETY: passed on.
        unsafe { self.run_among(probe.context.clone(), &call, &probe.pair, Algorithm::Binomial, None) }
    }
}

/// The context of a call that belongs to the start.
fn connecting(info: &CommInfo) -> OpContext<'_> {
    OpContext::new(Descriptor { op: Op::Connect, ..Descriptor::nothing() }, info)
}

/// Returns the seconds to reduce one byte of `f32`.
fn time_reduction() -> f64 {
    const COUNT: usize = 64 << 10;
    let kernel = Kernel::new(DType::F32, ReduceOp::Sum).expect("f32 has sums");
    let (mut sum, part) = (vec![0f32; COUNT], vec![0f32; COUNT]);
    let mut least = f64::INFINITY;
    for _ in 0..FEWEST {
        let began = Instant::now();
        let own = sum.as_mut_ptr().cast::<u8>();
        // SAFETY: both have `COUNT` elements, are borrowed for the call, and are apart.
        unsafe { kernel.fold(&[own, part.as_ptr().cast()], own, COUNT, None) };
        least = least.min(began.elapsed().as_secs_f64());
    }
    std::hint::black_box(&sum);
    least / (COUNT * size_of::<f32>()) as f64
}

fn coarse_link(link: LinkCost) -> LinkCost {
    LinkCost { latency: coarse(link.latency), overhead: coarse(link.overhead), per_byte: coarse(link.per_byte) }
}

/// Rounds a cost to a power of the square root of two. Measurements that differ by little become
/// the same cost, and lead to the same choices.
fn coarse(cost: f64) -> f64 {
    if cost > 0.0 { 2f64.powf((cost.log2() * 2.0).round() / 2.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_that_differ_by_little_become_the_same() {
        for exponent in -80..4 {
            let cost = 2f64.powf(f64::from(exponent) / 2.0);
            for factor in [0.85, 1.0, 1.18] {
                assert!((coarse(cost * factor) / cost - 1.0).abs() < 1e-9, "{cost} {factor}");
            }
        }
        assert_eq!(coarse(0.0), 0.0);
    }

    #[test]
    fn reductions_take_time() {
        let time = time_reduction();
        assert!(time > 0.0 && time.is_finite());
    }
}

//! How large private buffers pass between processes: the first operation on such a buffer tries all ways, and the quickest is
//! taken from then on.
//!
//! No table of machines would do: with processors that share a cache, data is best staged in it; with processors that do not,
//! a cache line costs more to get from the other's cache than from memory; and what the system takes to find another process's
//! pages depends on whether there is a hypervisor. Whether it may is up to the administrator.

use std::time::{Duration, Instant};

use super::direct::{Collect, Memory, TwoShot};
use super::{NOTES, Sources, Window, WindowCall, reading};
use crate::attempt::Attempt;
use crate::buffer::ChunkMut;
use crate::config::Passage;
use crate::error::Result;
use crate::reduce::Kernel;
use crate::schedule::Blocks;
use crate::types::{DType, Op, ReduceOp};

/// From so many bytes on a buffer is large.
pub(super) const LARGE: usize = 1 << 20;

/// From so many bytes on it is too large for the caches of most processors, and other ways may be quicker.
const VERY_LARGE: usize = 8 << 20;

/// Bytes of the buffer with which ways are tried: one of the large, one of the very large.
const TRIED: [usize; 2] = [LARGE, 2 * VERY_LARGE];

/// Of so many tries of each way the quickest counts: others share the machine.
const TRIES: usize = 3;

/// The ways, in the order in which they are preferred: one that is not clearly quicker does not count as quicker.
const WAYS: [Passage; 3] = [Passage::Staged, Passage::Streamed, Passage::Read];
const CLEARLY: f64 = 0.9;

/// What an operation does with the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Traffic {
    /// All-reduces it.
    Reduced = 0,
    /// Gives it to all others as it is.
    Copied = 1,
}

/// What is known of how large private buffers pass.
pub(super) struct Passages {
    /// What the settings say.
    wanted: Passage,
    /// What the trials have said, by traffic and size; `Auto` until then.
    tried: [[Passage; TRIED.len()]; 2],
    /// Whether all ranks can read each other's memory; `None` until that has been tried.
    may_read: Option<bool>,
}

impl Passages {
    pub(super) fn new(wanted: Passage) -> Passages {
        Passages { wanted, tried: [[Passage::Auto; TRIED.len()]; 2], may_read: None }
    }

    /// How a buffer passes, if that need not be tried.
    pub(super) fn known(&self, traffic: Traffic, bytes: usize) -> Option<Passage> {
        let passage = match (self.wanted, self.may_read) {
            _ if bytes < LARGE => Passage::Staged,
            // Read, 64 MiB take a third longer than past the caches through slots.
            (Passage::Auto, _) if traffic == Traffic::Copied && bytes >= VERY_LARGE => Passage::Staged,
            (Passage::Auto, _) => self.tried[traffic as usize][size(bytes)],
            (Passage::Read, None) => Passage::Auto,
            (Passage::Read, Some(false)) => Passage::Staged,
            (wanted, _) => wanted,
        };
        (passage != Passage::Auto).then_some(passage)
    }
}

fn size(bytes: usize) -> usize {
    usize::from(bytes >= VERY_LARGE)
}

/// How a private buffer passes. All ranks come to the same, in the same operation.
pub(super) fn passage(window: &mut Window, attempt: &Attempt<'_>, traffic: Traffic, bytes: usize) -> Result<Passage> {
    if let Some(known) = window.passages.known(traffic, bytes) {
        return Ok(known);
    }
    let may_read = match window.passages.may_read {
        Some(may) => may,
        None => reading::is_allowed(window, attempt)?,
    };
    window.passages.may_read = Some(may_read);
    if window.passages.wanted != Passage::Auto {
        // Once for a host.
        if !may_read && window.rank == 0 {
            tracing::warn!("the system does not let ranks read each other's memory; buffers are staged instead");
        }
        return Ok(if may_read { Passage::Read } else { Passage::Staged });
    }
    let began = Instant::now();
    let passage = quickest(window, attempt, traffic, TRIED[size(bytes)])?;
    tracing::info!(?traffic, bytes, %passage, took = ?began.elapsed(), "tried how large buffers pass");
    window.passages.tried[traffic as usize][size(bytes)] = passage;
    Ok(passage)
}

fn quickest(window: &mut Window, attempt: &Attempt<'_>, traffic: Traffic, tried: usize) -> Result<Passage> {
    // Zeros stay zeros, however often they are added; but memory that was never written is not there.
    let mut bytes: Vec<u64> = Vec::new();
    let mut notes = [0; NOTES];
    notes[0] = bytes.try_reserve_exact(tried / size_of::<u64>()).is_ok().into();
    let turn = window.exchange(attempt, notes)?;
    if (0..window.members.len()).any(|rank| window.turns.line(rank, turn).notes()[0] == 0) {
        return Ok(Passage::Staged);
    }
    bytes.resize(tried / size_of::<u64>(), std::hint::black_box(0));
    let buffer = ChunkMut::of(&mut bytes);
    let mut mine = [Duration::MAX; WAYS.len()];
    for _ in 0..TRIES {
        for (way, best) in WAYS.into_iter().zip(&mut mine) {
            let is_possible = match way {
                Passage::Read => window.passages.may_read == Some(true),
                Passage::Streamed => traffic == Traffic::Reduced,
                Passage::Auto | Passage::Staged => true,
            };
            if is_possible {
                window.meet(attempt)?;
                let began = Instant::now();
                run(window, attempt, traffic, way, buffer)?;
                window.meet(attempt)?;
                *best = began.elapsed().min(*best);
            }
        }
    }
    let mut notes = [0; NOTES];
    for (note, time) in notes.iter_mut().zip(mine) {
        *note = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    }
    let turn = window.exchange(attempt, notes)?;
    // As slow as the slowest rank, which all ranks see alike.
    let slowest =
        |way| (0..window.members.len()).map(|rank| window.turns.line(rank, turn).notes()[way]).max().unwrap_or(u64::MAX);
    let times: [f64; WAYS.len()] = std::array::from_fn(|way| slowest(way) as f64);
    tracing::debug!(?times, "nanoseconds of each way");
    let quickest = (1..WAYS.len()).fold(0, |best, way| if times[way] < CLEARLY * times[best] { way } else { best });
    Ok(WAYS[quickest])
}

/// All-reduces or all-gathers a private buffer, one way or the other.
fn run(window: &mut Window, attempt: &Attempt<'_>, traffic: Traffic, way: Passage, buffer: ChunkMut) -> Result<()> {
    let dtype = DType::F32;
    let (rank, ranks) = (window.rank, window.members.len());
    let count = buffer.len / dtype.size();
    let call = match traffic {
        Traffic::Reduced => WindowCall {
            count,
            kernel: Kernel::new(dtype, ReduceOp::Sum),
            ..WindowCall::new(Op::AllReduce, buffer.as_const(), buffer, dtype.size())
        },
        Traffic::Copied => {
            let block = count / ranks * dtype.size();
            let input = buffer.as_const().skip(rank * block).take(block);
            WindowCall { blocks: Blocks::Even(count / ranks), ..WindowCall::new(Op::AllGather, input, buffer, dtype.size()) }
        }
    };
    let memory = Memory { call: &call, rank, ranks };
    let parts = &mut Vec::with_capacity(ranks);
    match (traffic, way) {
        (Traffic::Reduced, Passage::Read) => reading::all_reduce(window, attempt, memory, parts).map(drop),
        (Traffic::Reduced, way) => {
            let streams = way == Passage::Streamed;
            window.pipeline(attempt, Sources::Everybody, 0, &mut TwoShot { memory, root: None, streams, parts })
        }
        (Traffic::Copied, Passage::Read) => reading::copy_now(window, attempt, memory).map(drop),
        (Traffic::Copied, _) => window.pipeline(attempt, Sources::Everybody, 0, &mut Collect { memory, takes: true }),
    }
}

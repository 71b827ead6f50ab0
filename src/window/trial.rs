//! How large private buffers pass between processes: the first all-reduce on such a buffer tries all ways, and the quickest is
//! taken from then on.
//!
//! No table of machines would do: with processors that share a cache, data is best staged in it; with processors that do not,
//! a cache line costs more to get from the other's cache than from memory; and what the system takes to find another process's
//! pages depends on whether there is a hypervisor. Whether it may is up to the administrator.

use std::time::{Duration, Instant};

use super::direct::{Memory, TwoShot};
use super::{NOTES, Sources, Window, WindowCall, reading};
use crate::attempt::Attempt;
use crate::buffer::ChunkMut;
use crate::config::Passage;
use crate::error::Result;
use crate::reduce::Kernel;
use crate::types::{DType, Op, ReduceOp};

/// From so many bytes on a buffer is large.
pub(super) const LARGE: usize = 1 << 20;

/// Bytes that are reduced in the trial: more than the second-level caches of most processors hold, so that memory counts as it
/// does for the buffers that matter.
const TRIED: usize = 4 << 20;

/// Of so many tries of each way the quickest counts: others share the machine.
const TRIES: usize = 3;

/// The ways, in the order in which they are preferred: one that is not clearly quicker does not count as quicker.
const WAYS: [Passage; 3] = [Passage::Staged, Passage::Streamed, Passage::Read];
const CLEARLY: f64 = 0.9;

/// How large private buffers pass. All ranks come to the same, in the same operation.
pub(super) fn passage(window: &mut Window, attempt: &Attempt<'_>) -> Result<Passage> {
    match window.passage {
        Passage::Auto => {
            let began = Instant::now();
            window.passage = quickest(window, attempt)?;
            tracing::info!(passage = %window.passage, took = ?began.elapsed(), "tried how large buffers pass");
        }
        Passage::Read if !window.may_read => {
            window.may_read = reading::is_allowed(window, attempt)?;
            if !window.may_read {
                tracing::warn!("the system does not let this process read the memory of its peers; buffers are staged instead");
                window.passage = Passage::Staged;
            }
        }
        Passage::Read | Passage::Staged | Passage::Streamed => {}
    }
    Ok(window.passage)
}

fn quickest(window: &mut Window, attempt: &Attempt<'_>) -> Result<Passage> {
    window.may_read = reading::is_allowed(window, attempt)?;
    // Zeros stay zeros, however often they are added.
    let mut bytes = vec![0u64; TRIED / size_of::<u64>()];
    let buffer = ChunkMut::of(&mut bytes);
    let mut mine = [Duration::MAX; WAYS.len()];
    for _ in 0..TRIES {
        for (way, best) in WAYS.into_iter().zip(&mut mine) {
            if way == Passage::Read && !window.may_read {
                continue;
            }
            window.meet(attempt)?;
            let began = Instant::now();
            all_reduce(window, attempt, way, buffer)?;
            *best = began.elapsed().min(*best);
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

/// All-reduces a private buffer one way or the other.
fn all_reduce(window: &mut Window, attempt: &Attempt<'_>, way: Passage, buffer: ChunkMut) -> Result<()> {
    let dtype = DType::F32;
    let call = WindowCall {
        count: buffer.len / dtype.size(),
        kernel: Kernel::new(dtype, ReduceOp::Sum),
        ..WindowCall::new(Op::AllReduce, buffer.as_const(), buffer, dtype.size())
    };
    let memory = Memory { call: &call, rank: window.rank, ranks: window.members.len() };
    let mut parts = Vec::with_capacity(memory.ranks);
    match way {
        Passage::Read => reading::all_reduce(window, attempt, memory, &mut parts),
        Passage::Auto | Passage::Staged | Passage::Streamed => {
            let streams = way == Passage::Streamed;
            window.pipeline(attempt, Sources::Everybody, 0, &mut TwoShot { memory, root: None, streams, parts: &mut parts })
        }
    }
}

//! What depends on the machine is tried: the first operations find out how large private buffers pass between processes, and
//! up to which size one phase is better than two. The quickest way is taken from then on.
//!
//! No table of machines would do: with processors that share a cache, data is best staged in it; with processors that do not,
//! a cache line costs more to get from the other's cache than from memory; and what the system takes to find another process's
//! pages depends on whether there is a hypervisor. Whether it may is up to the administrator. And what a phase costs is 0.05 us
//! here and 0.3 us there, where the same data takes as long.

use std::time::{Duration, Instant};

use super::cma;
use super::flags::WORDS;
use super::one_shot::{ONE_SHOT, OneShot};
use super::pipeline::{Memory, Sources, WindowCall};
use super::rooted::Collect;
use super::tuning::{TRIED, Traffic, size};
use super::two_shot::TwoShot;
use super::window::Window;
use crate::buffer::RawSliceMut;
use crate::config::CopyMode;
use crate::error::Result;
use crate::failure::OpContext;
use crate::reduce::Kernel;
use crate::schedule::Blocks;
use crate::types::{DType, Op, ReduceOp};

/// Of so many tries of each way the quickest counts: others share the machine, and the first tries of the smaller buffer come to
/// slots in which nobody has written yet, where every page costs more than what is copied into it.
const TRIES: [usize; 2] = [12, 5];

/// A trial takes some ten milliseconds, and many times that where ranks share processors. It runs inside the deadline of a user's
/// operation: it begins only if every rank has this much time left, and goes on only while no rank has used more than this
/// share of its time.
pub(super) const ROOM: Duration = Duration::from_secs(4);
const SHARE: u32 = 4;

/// Of what takes microseconds, so many in a row are timed, so many times.
const SHORT_RUN: usize = 8;
const SHORT_TRIES: usize = 8;

/// The ways, in the order in which they are preferred: one that is not clearly quicker does not count as quicker.
const WAYS: [CopyMode; 3] = [CopyMode::Staged, CopyMode::Streamed, CopyMode::Cma];
const CLEARLY: f64 = 0.9;

/// How a private buffer passes. All ranks come to the same, in the same operation.
pub(super) fn copy_mode(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, bytes: usize) -> Result<CopyMode> {
    if let Some(known) = window.autotune.known(traffic, bytes) {
        return Ok(known);
    }
    let may_read = match window.autotune.may_read {
        Some(may) => may,
        None => cma::is_allowed(window, context)?,
    };
    window.autotune.may_read = Some(may_read);
    window.keep_tuning();
    if window.autotune.wanted != CopyMode::Auto {
        // Once for a host.
        if !may_read && window.rank == 0 {
            tracing::warn!("the system does not let ranks read each other's memory; buffers are staged instead");
        }
        return Ok(if may_read { CopyMode::Cma } else { CopyMode::Staged });
    }
    let began = Instant::now();
    let Some(copy_mode) = quickest(window, context, traffic, size(bytes))? else { return Ok(CopyMode::Staged) };
    tracing::info!(?traffic, bytes, %copy_mode, took = ?began.elapsed(), "tried how large buffers pass");
    window.autotune.tried[traffic as usize][size(bytes)] = copy_mode;
    window.keep_tuning();
    Ok(copy_mode)
}

/// The quickest way; `None` if a rank's deadline leaves no room to find out.
fn quickest(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, size: usize) -> Result<Option<CopyMode>> {
    let Some(mut bytes) = scratch(window, context, TRIED[size])? else { return Ok(None) };
    let buffer = RawSliceMut::of(&mut bytes);
    let possible = WAYS.map(|way| match way {
        CopyMode::Cma => window.autotune.may_read == Some(true),
        CopyMode::Streamed => traffic == Traffic::Reduced,
        CopyMode::Auto | CopyMode::Staged => true,
    });
    let times = race(window, context, TRIES[size], possible, |window, way| run(window, context, traffic, WAYS[way], buffer))?;
    let quickest = (1..WAYS.len()).fold(0, |best, way| if times[way] < CLEARLY * times[best] { way } else { best });
    Ok(Some(WAYS[quickest]))
}

/// Bytes over all ranks up to which everybody reduces everything: one phase saved is worth more than what that takes.
pub(super) fn one_shot(window: &mut Window, context: &OpContext<'_>) -> Result<usize> {
    if let Some(known) = window.autotune.one_shot {
        return Ok(known);
    }
    let began = Instant::now();
    let (least, most) = (ONE_SHOT.start - 1, ONE_SHOT.end - 1);
    let mut limit = least;
    let Some(mut bytes) = scratch(window, context, most)? else { return Ok(limit) };
    let ranks = window.members.len();
    for size in std::iter::successors(Some(2 * least), |size| Some(2 * size)).take_while(|&size| size <= most) {
        let buffer = RawSliceMut::of(&mut bytes).take(size / ranks / DTYPE.size() * DTYPE.size());
        let [one, two] = race(window, context, SHORT_TRIES, [true; 2], |window, way| {
            (0..SHORT_RUN).try_for_each(|_| reduce(window, context, 1 + way, false, buffer))
        })?;
        if two < CLEARLY * one {
            break;
        }
        limit = size;
    }
    tracing::info!(limit, took = ?began.elapsed(), "tried up to which size one phase is quicker than two");
    window.autotune.one_shot = Some(limit);
    window.keep_tuning();
    Ok(limit)
}

/// Zeros to try things on, which stay zeros however often they are added; `None` on all ranks if one has no memory for them, or
/// no time: then a later operation tries.
fn scratch(window: &mut Window, context: &OpContext<'_>, bytes: usize) -> Result<Option<Vec<u64>>> {
    let words = bytes / size_of::<u64>();
    let mut zeros: Vec<u64> = Vec::new();
    let is_ready = context.left() >= ROOM && zeros.try_reserve_exact(words).is_ok();
    if !all(window, context, is_ready)? {
        return Ok(None);
    }
    // Memory that was never written is not there.
    zeros.resize(words, std::hint::black_box(0));
    Ok(Some(zeros))
}

/// Whether all ranks say yes. All ranks get the same.
fn all(window: &mut Window, context: &OpContext<'_>, mine: bool) -> Result<bool> {
    let mut words = [0; WORDS];
    words[0] = mine.into();
    let phase = window.exchange(context, words)?;
    Ok((0..window.members.len()).all(|rank| window.phases.line(rank, phase).words()[0] == 1))
}

/// Nanoseconds of each possible way: of the quickest of its tries, on the slowest rank. All ranks get the same.
pub(super) fn race<const WAYS: usize>(
    window: &mut Window,
    context: &OpContext<'_>,
    tries: usize,
    possible: [bool; WAYS],
    mut run: impl FnMut(&mut Window, usize) -> Result<()>,
) -> Result<[f64; WAYS]> {
    let mut mine = [Duration::MAX; WAYS];
    let (began, budget) = (Instant::now(), context.left() / SHARE);
    for round in 0..tries {
        if round > 0 && !all(window, context, began.elapsed() < budget)? {
            break;
        }
        for way in (0..WAYS).filter(|&way| possible[way]) {
            window.meet(context)?;
            let began = Instant::now();
            run(window, way)?;
            window.meet(context)?;
            mine[way] = began.elapsed().min(mine[way]);
        }
    }
    let mut words = [0; WORDS];
    for (note, time) in words.iter_mut().zip(mine) {
        *note = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    }
    let phase = window.exchange(context, words)?;
    let slowest =
        |way| (0..window.members.len()).map(|rank| window.phases.line(rank, phase).words()[way]).max().unwrap_or(u64::MAX);
    let times = std::array::from_fn(|way| slowest(way) as f64);
    tracing::debug!(?times, "nanoseconds of each way");
    Ok(times)
}

/// What is tried is reduced as this.
const DTYPE: DType = DType::F32;

/// All-reduces a private buffer in one phase or in two.
fn reduce(window: &mut Window, context: &OpContext<'_>, phases: usize, streams: bool, buffer: RawSliceMut) -> Result<()> {
    let call = WindowCall {
        count: buffer.len / DTYPE.size(),
        kernel: Kernel::new(DTYPE, ReduceOp::Sum),
        ..WindowCall::new(Op::AllReduce, buffer.as_const(), buffer, DTYPE.size())
    };
    let memory = Memory { call: &call, rank: window.rank, ranks: window.members.len() };
    let mut parts = std::mem::take(&mut window.parts);
    let result = if phases == 1 {
        window.pipeline(context, Sources::Everybody, 0, &mut OneShot { memory, takes: true, parts: &mut parts })
    } else {
        window.pipeline(context, Sources::Everybody, 0, &mut TwoShot { memory, root: None, streams, parts: &mut parts })
    };
    window.parts = parts;
    result
}

/// All-reduces or all-gathers a private buffer, one way or the other.
fn run(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, way: CopyMode, buffer: RawSliceMut) -> Result<()> {
    let (rank, ranks) = (window.rank, window.members.len());
    let count = buffer.len / DTYPE.size();
    let call = match traffic {
        Traffic::Reduced if way != CopyMode::Cma => return reduce(window, context, 2, way == CopyMode::Streamed, buffer),
        Traffic::Reduced => WindowCall {
            count,
            kernel: Kernel::new(DTYPE, ReduceOp::Sum),
            ..WindowCall::new(Op::AllReduce, buffer.as_const(), buffer, DTYPE.size())
        },
        Traffic::Copied => {
            let block = count / ranks * DTYPE.size();
            let input = buffer.as_const().skip(rank * block).take(block);
            WindowCall { blocks: Blocks::Even(count / ranks), ..WindowCall::new(Op::AllGather, input, buffer, DTYPE.size()) }
        }
    };
    let memory = Memory { call: &call, rank, ranks };
    match (traffic, way) {
        (Traffic::Reduced, _) => cma::all_reduce(window, context, memory, &mut Vec::with_capacity(ranks)).map(drop),
        (Traffic::Copied, CopyMode::Cma) => cma::copy(window, context, memory).map(drop),
        (Traffic::Copied, _) => window.pipeline(context, Sources::Everybody, 0, &mut Collect { memory, takes: true }),
    }
}

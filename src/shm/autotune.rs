//! Measures what depends on the machine: the fastest copy mode for large private buffers. The first
//! operations measure, and the later ones use the result. It is measured again from time to time.
//!
//! kolo measures, because the result depends on more than the processor. Processors that share a
//! cache stage data in it best. For processors that do not, a cache line costs more from another
//! processor's cache than from memory. A hypervisor changes what the system needs to find the pages
//! of another process, and an administrator may forbid that.

use std::time::{Duration, Instant};

use super::cma;
use super::flags::WORDS;
use super::part::Part;
use super::pipeline::Collective;
use super::rooted::{Collect, Spread};
use super::tuning::{MEASURED, SIZES, Traffic};
use super::two_shot::TwoShot;
use super::wait::Sources;
use super::window::Window;
use crate::buffer::RawSliceMut;
use crate::call::Call;
use crate::config::CopyMode;
use crate::error::{Result, shown};
use crate::failure::OpContext;
use crate::types::{DType, Op, ReduceOp};

/// How often each copy mode is measured, for the sizes of [`MEASURED`]. The fastest repetition counts:
/// other programs share the machine, and where the system does not map pages before they are touched, the
/// first repetitions of the smallest buffer wait for every page.
const REPETITIONS: [usize; SIZES] = [8, 3, 2];

/// The time that every rank must have left for a measurement to begin. A measurement takes about
/// ten milliseconds, and many times that where ranks share processors. It runs inside the deadline
/// of a user's operation.
pub(super) const TIME_NEEDED: Duration = Duration::from_secs(4);

/// A measurement continues only while no rank has used more of its remaining time than one part in
/// this many.
const SHARE: u32 = 4;

/// The copy modes in the order of preference.
const MODES: [CopyMode; 3] = [CopyMode::Staged, CopyMode::Streamed, CopyMode::Cma];

/// A copy mode replaces a preferred one only if it takes less than this part of its time.
const MARGIN: f64 = 0.9;

/// Returns the copy mode for a private buffer, and measures it if necessary. All ranks get the
/// same, in the same operation.
pub(super) fn copy_mode(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, bytes: usize) -> Result<CopyMode> {
    if let Some(known) = window.autotune.known(traffic, bytes) {
        return Ok(known);
    }
    // Asked before each measurement: a process may have given up rights since.
    let may_read = cma::is_allowed(window, context)?;
    window.autotune.may_read = Some(may_read);
    keep_tuning(window);
    if window.autotune.wanted != CopyMode::Auto {
        // Logged once per host.
        if !may_read && window.rank == 0 {
            crate::log::warn!("the system does not let ranks read each other's memory; buffers are staged instead");
        }
        return Ok(if may_read { CopyMode::Cma } else { CopyMode::Staged });
    }
    let began = Instant::now();
    let Some(mut found) = fastest(window, context, traffic, traffic.size(bytes))? else {
        return Ok(window.autotune.put_off(traffic, bytes));
    };
    // Broadcasts do not wait for all ranks to measure again. All are here now.
    for bytes in MEASURED {
        if traffic != Traffic::Spread
            && window.autotune.last(Traffic::Spread, bytes) != CopyMode::Auto
            && let Some(spread) = fastest(window, context, Traffic::Spread, Traffic::Spread.size(bytes))?
        {
            window.autotune.set(Traffic::Spread, bytes, spread.copy_mode, spread.cost());
            found.all += spread.all;
        }
    }
    let copy_mode = found.copy_mode;
    crate::log::info!(?traffic, bytes, %copy_mode, took = %shown::time(began.elapsed()), "measured the copy mode for large buffers");
    window.autotune.set(traffic, bytes, copy_mode, found.cost());
    keep_tuning(window);
    Ok(copy_mode)
}

/// What a measurement of copy modes found. All ranks get the same.
struct Fastest {
    copy_mode: CopyMode,
    /// Nanoseconds of an operation in this mode.
    time: f64,
    /// Nanoseconds of the measurement.
    all: f64,
}

impl Fastest {
    /// Returns how many operations in this mode take as long as the measurement.
    fn cost(&self) -> f64 {
        self.all / self.time.max(1.0)
    }
}

/// Measures the copy modes; `None` if a rank's deadline leaves no time for that.
fn fastest(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, size: usize) -> Result<Option<Fastest>> {
    let Some(mut bytes) = scratch(window, context, MEASURED[size])? else { return Ok(None) };
    let buffer = RawSliceMut::of(&mut bytes);
    let possible = MODES.map(|mode| match mode {
        CopyMode::Cma => window.autotune.may_read == Some(true),
        CopyMode::Auto | CopyMode::Staged | CopyMode::Streamed => true,
    });
    let times = race(window, context, REPETITIONS[size], possible, |window, i| run(window, context, traffic, MODES[i], buffer))?;
    let fastest = (1..MODES.len()).fold(0, |best, i| if times[i] < MARGIN * times[best] { i } else { best });
    let all: f64 = times.iter().filter(|&&time| time < IMPOSSIBLE).sum();
    // Each repetition runs twice.
    let all = 2.0 * REPETITIONS[size] as f64 * all;
    Ok(Some(Fastest { copy_mode: MODES[fastest], time: times[fastest], all }))
}

/// Keeps what was measured for other communicators of the same ranks.
fn keep_tuning(window: &Window) {
    window.host.set_tuning(&window.jobs, window.autotune.encode());
}

/// Returns zeros to measure with, which remain zeros when they are added. Returns `None` on all
/// ranks if one has no memory or no time for a measurement: then a later operation measures.
fn scratch(window: &mut Window, context: &OpContext<'_>, bytes: usize) -> Result<Option<Vec<u64>>> {
    let words = bytes / size_of::<u64>();
    let mut zeros: Vec<u64> = Vec::new();
    let is_ready = context.left() >= TIME_NEEDED && zeros.try_reserve_exact(words).is_ok();
    if !window.all(context, is_ready)? {
        return Ok(None);
    }
    // The system provides memory only when it is written.
    zeros.resize(words, std::hint::black_box(0));
    Ok(Some(zeros))
}

/// The time of a variant that cannot run.
const IMPOSSIBLE: f64 = u64::MAX as f64;

/// Measures `N` variants of an operation. Returns the nanoseconds of each possible one: of its
/// fastest repetition, on the slowest rank. All ranks get the same. `run` returns whether the
/// variant could run, the same on all ranks; if not, it takes [`IMPOSSIBLE`].
pub(super) fn race<const N: usize>(
    window: &mut Window,
    context: &OpContext<'_>,
    repetitions: usize,
    mut possible: [bool; N],
    mut run: impl FnMut(&mut Window, usize) -> Result<bool>,
) -> Result<[f64; N]> {
    let mut mine = [Duration::MAX; N];
    let (began, budget) = (Instant::now(), context.left() / SHARE);
    for round in 0..repetitions {
        if round > 0 && !window.all(context, began.elapsed() < budget)? {
            break;
        }
        for i in 0..N {
            if !possible[i] {
                continue;
            }
            // A program uses one variant again and again, so each is measured with the caches as it
            // leaves them itself. Streamed copies, for one, evict the slots from the caches.
            let can_run = run(window, i)?;
            window.barrier(context)?;
            let began = Instant::now();
            possible[i] = can_run && run(window, i)?;
            window.barrier(context)?;
            mine[i] = if possible[i] { began.elapsed().min(mine[i]) } else { Duration::MAX };
        }
    }
    let mut words = [0; WORDS];
    for (word, time) in words.iter_mut().zip(mine) {
        *word = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    }
    let phase = window.exchange(context, &words)?;
    let slowest = |i| (0..window.members.len()).map(|rank| window.phases.line(rank, phase).words()[i]).max().unwrap_or(u64::MAX);
    let times = std::array::from_fn(|i| slowest(i) as f64);
    crate::log::debug!(?times, "measured, in nanoseconds");
    Ok(times)
}

/// The element type of the measurements.
const DTYPE: DType = DType::F32;

/// An all-reduce in place.
fn all_reduce(buffer: RawSliceMut) -> Call {
    Call { redop: Some(ReduceOp::Sum), ..Call::in_place(Op::AllReduce, DTYPE, buffer) }
}

/// All-reduces a private buffer that is staged.
fn reduce(window: &mut Window, context: &OpContext<'_>, streams: bool, buffer: RawSliceMut) -> Result<()> {
    let call = all_reduce(buffer);
    let part = Part::new(&call, window.rank, window.members.len());
    let mut parts = std::mem::take(&mut window.parts);
    let mut two_shot = TwoShot { part, root: None, parts: &mut parts };
    two_shot.set_streams(streams);
    let result = window.pipeline(context, Sources::All, 0, &mut two_shot);
    window.parts = parts;
    result
}

/// All-reduces, all-gathers or broadcasts a private buffer in a copy mode. Returns whether that is
/// possible.
fn run(window: &mut Window, context: &OpContext<'_>, traffic: Traffic, mode: CopyMode, buffer: RawSliceMut) -> Result<bool> {
    let (rank, ranks) = (window.rank, window.members.len());
    let count = buffer.len / DTYPE.size();
    let call = match traffic {
        Traffic::Reduced if mode != CopyMode::Cma => {
            return reduce(window, context, mode == CopyMode::Streamed, buffer).map(|()| true);
        }
        Traffic::Reduced => all_reduce(buffer),
        Traffic::Spread => Call { op: Op::Broadcast, ..all_reduce(buffer) },
        Traffic::Copied => {
            let block = count / ranks * DTYPE.size();
            let input = buffer.as_const().skip(rank * block).take(block);
            Call { count: count / ranks, send: input, recv: buffer, ..Call::of(Op::AllGather, DTYPE) }
        }
    };
    let part = Part { streams: mode == CopyMode::Streamed, ..Part::new(&call, rank, ranks) };
    match (traffic, mode) {
        (Traffic::Reduced, _) => cma::all_reduce(window, context, part, &mut Vec::with_capacity(ranks)),
        (_, CopyMode::Cma) => cma::copy(window, context, part),
        (Traffic::Spread, _) => window.pipeline(context, part.sources(), 0, &mut Spread { part, blocks: false }).map(|()| true),
        (Traffic::Copied, _) => window.pipeline(context, Sources::All, 0, &mut Collect { part, takes: true }).map(|()| true),
    }
}

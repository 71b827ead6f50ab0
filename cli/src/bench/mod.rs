//! `kolo bench`: measures a collective among the ranks of this job.
//!
//! The sizes and the bus bandwidth factors are those of nccl-tests, and with `--wide` the columns.

mod arguments;
pub(crate) mod device;
pub(crate) mod measure;
pub(crate) mod operation;
pub(crate) mod pattern;
pub(crate) mod plot;
mod report;
mod table;

use kolo::{Communicator, DType, ReduceOp, bf16, f16};

use std::path::PathBuf;
use std::time::Duration;

use crate::files::Output;
use crate::interrupt::Interrupt;
use crate::run::process::Signal;
use crate::units::show_rounded;
use crate::{Failure, is_read};
pub(crate) use arguments::Args;
use measure::{Figures, Measured, Plan};
use pattern::Pattern;
use report::{Report, Row};

/// How long a measurement may go on after a signal.
const MOST: Duration = Duration::from_secs(5);

/// Measures. Returns the signal that ended the measurement, if one did.
pub(crate) fn bench(args: &Args) -> Result<Option<Signal>, Failure> {
    args.check(usize::MAX).map_err(Failure::Usage)?;
    args.check_files()?;
    let comm = args.connect().map_err(|error| error.to_string())?;
    args.check(comm.world_size()).map_err(Failure::Usage)?;
    let Some([json, plot]) = open(args, &comm)? else { return Ok(None) };
    // All rows but that of a long measurement have been printed by then.
    let interrupt = Interrupt::watch(Some(MOST), comm.rank() == 0, || {})?;
    let report = match args.dtype {
        DType::F32 => bench_typed::<f32>(args, &comm, &interrupt),
        DType::F64 => bench_typed::<f64>(args, &comm, &interrupt),
        DType::F16 => bench_typed::<f16>(args, &comm, &interrupt),
        DType::BF16 => bench_typed::<bf16>(args, &comm, &interrupt),
        DType::I8 => bench_typed::<i8>(args, &comm, &interrupt),
        DType::U8 | DType::Bool => bench_typed::<u8>(args, &comm, &interrupt),
        DType::I16 => bench_typed::<i16>(args, &comm, &interrupt),
        DType::U16 => bench_typed::<u16>(args, &comm, &interrupt),
        DType::I32 => bench_typed::<i32>(args, &comm, &interrupt),
        DType::U32 => bench_typed::<u32>(args, &comm, &interrupt),
        DType::I64 => bench_typed::<i64>(args, &comm, &interrupt),
        DType::U64 => bench_typed::<u64>(args, &comm, &interrupt),
        other => unreachable!("{other} is not benchmarked"),
    };
    let report = report.map_err(|error| error.to_string())?;
    // Rank 0 has all figures before any rank ends.
    comm.barrier().map_err(|error| error.to_string())?;
    if comm.rank() != 0 {
        return Ok(interrupt.signal());
    }
    if let Some(json) = json {
        json.write_json(&report)?;
    }
    if let Some(plot) = plot {
        plot::draw(&report, plot).map_err(|error| format!("the plot cannot be drawn: {error}"))?;
    }
    let wrong: u64 = report.rows.iter().flat_map(Row::lines).filter_map(|line| line.wrong).sum();
    if wrong > 0 { Err(format!("{wrong} elements were wrong").into()) } else { Ok(interrupt.signal()) }
}

/// Opens the files of figures on rank 0. If that fails, rank 0 reports why, and the other ranks have
/// nothing to measure.
fn open(args: &Args, comm: &Communicator) -> Result<Option<[Option<Output>; 2]>, Failure> {
    let open = |file: &Option<PathBuf>| Output::open(file.as_deref().filter(|_| comm.rank() == 0));
    let opened = open(&args.json).and_then(|json| Ok([json, open(&args.plot)?]));
    let mut has_failed = [opened.is_err()];
    comm.all_reduce(&mut has_failed, ReduceOp::Max).map_err(|error| error.to_string())?;
    Ok(Some(opened?).filter(|_| !has_failed[0]))
}

fn bench_typed<T: Pattern>(args: &Args, comm: &Communicator, interrupt: &Interrupt) -> kolo::Result<Report> {
    let mut report = Report::new(args, comm);
    let is_rank_0 = comm.rank() == 0;
    let mut plans: Vec<Plan> = args.sizes().into_iter().map(|bytes| Plan::new::<T>(args, comm.world_size(), bytes)).collect();
    if args.sizes.is_empty() {
        // Sizes that become one when they are rounded to whole elements.
        plans.dedup_by_key(|plan| plan.bytes);
    }
    let mut memory = measure::Memory::<T>::new(comm, &plans, args)?;
    if is_rank_0 {
        let rounded = show_rounded(&args.sizes, plans.iter().map(|plan| plan.bytes));
        table::head(&report, args, rounded.as_deref());
    }
    for plan in &plans {
        // All ranks end together, when one got a signal or rank 0 has no reader.
        let is_wanted = is_read() || args.json.is_some() || args.plot.is_some();
        let mut ends = [interrupt.signal().is_some() || !is_wanted];
        comm.all_reduce(&mut ends, ReduceOp::Max)?;
        if ends[0] {
            break;
        }
        let mut figures = Figures::default();
        for in_place in args.forms() {
            let measured: Measured = measure::measure(comm, args, plan, &mut memory, in_place)?;
            *(if in_place { &mut figures.in_place } else { &mut figures.out_of_place }) = Some(measured);
        }
        let algorithm = args.op.collective().map_or_else(
            || "direct".to_owned(),
            |op| {
                let redop = args.op.reduces().then_some(args.redop);
                comm.algorithm_for(op, args.dtype, redop, plan.bytes).to_string()
            },
        );
        let row = Row::new(plan, algorithm, figures, args.op, comm.world_size());
        if is_rank_0 {
            table::row(&report, &row, args);
        }
        report.rows.push(row);
    }
    report.count_paths(comm);
    if is_rank_0 {
        table::foot(&report);
    }
    Ok(report)
}

//! `kolo bench`: how fast a collective is among the ranks of this job.
//!
//! The columns, the sizes and the bus bandwidth factors are those of nccl-tests.

pub(crate) mod device;
pub(crate) mod measure;
pub(crate) mod operation;
pub(crate) mod pattern;
mod plot;
mod report;
mod table;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kolo::{Algorithm, Builder, Communicator, CopyMode, DType, ReduceOp, Transport, bf16, f16};

use crate::{files, units};
use device::Place;
use measure::{Figures, Measured, Plan};
use operation::Operation;
use pattern::Pattern;
use report::{Report, Row};

/// Arguments of `kolo bench`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The operation
    op: Operation,
    /// Smallest size: 8, 4K, 1M
    #[arg(short = 'b', long = "min-bytes", value_parser = units::bytes, default_value = "8", value_name = "SIZE")]
    min: u64,
    /// Largest size
    #[arg(short = 'e', long = "max-bytes", value_parser = units::bytes, default_value = "64M", value_name = "SIZE")]
    max: u64,
    /// Factor between sizes
    #[arg(short = 'f', long, value_parser = clap::value_parser!(u64).range(2..), default_value = "2")]
    factor: u64,
    /// These sizes instead: 8,4K,1M
    #[arg(long, value_parser = units::bytes, value_delimiter = ',', conflicts_with_all = ["min", "max", "factor"], value_name = "SIZES")]
    sizes: Vec<u64>,
    /// Element type: f32, f64, f16, bf16, i8, u8, i16, u16, i32, u32, i64, u64
    #[arg(short = 'd', long, default_value = "f32")]
    dtype: DType,
    /// Reduction: sum, product, min, max, average, bitand, bitor, bitxor
    #[arg(short = 'o', long, default_value = "sum")]
    redop: ReduceOp,
    /// Root of operations that have one
    #[arg(short = 'r', long, default_value = "0")]
    root: usize,
    /// Measured iterations of each size; of small sizes, each has several calls
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..), default_value = "20")]
    iters: u32,
    /// Iterations before those
    #[arg(short = 'w', long, default_value = "5")]
    warmup: u32,
    /// Check the results, and count the wrong ones
    #[arg(short = 'c', long)]
    check: bool,
    /// Use buffers that all ranks of a host map
    #[arg(long)]
    registered: bool,
    /// Where the buffers are: cpu, or cuda, on one GPU or one for each rank of a host. There, --registered are buffers that all ranks
    /// of the host can reach, others are of CUDA's pools
    #[arg(long, default_value = "cpu")]
    device: Place,
    /// Take this algorithm where the operation has it
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// auto, tcp or shm
    #[arg(long)]
    transport: Option<Transport>,
    /// How large private buffers pass inside a host: auto, staged, streamed or cma
    #[arg(long)]
    copy_mode: Option<CopyMode>,
    /// TCP connections of one link
    #[arg(long)]
    sockets: Option<usize>,
    /// How long one operation may take, as in 1.5s
    #[arg(long, value_parser = units::duration)]
    timeout: Option<Duration>,
    /// Write every figure to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw bandwidth and latency against size
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

impl Args {
    fn check(&self) -> Result<(), String> {
        if self.dtype == DType::Bool {
            return Err("there are no benchmarks of bool; u8 moves the same bytes".to_owned());
        }
        if self.op.reduces() && !self.redop.applies_to(self.dtype) {
            return Err(format!("{} is not defined on {}", self.redop, self.dtype));
        }
        if self.sizes.is_empty() && self.min > self.max {
            return Err(format!("the smallest size, {}, is larger than the largest, {}", self.min, self.max));
        }
        if self.device == Place::Cuda {
            device::check(self.op)?;
        }
        files::check(self.json.as_deref(), self.plot.as_deref())
    }

    fn sizes(&self) -> Vec<u64> {
        if self.op == Operation::Barrier {
            return vec![0];
        }
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let next = |size: &u64| size.max(&1).checked_mul(self.factor).filter(|&next| next <= self.max);
        std::iter::successors(Some(self.min), next).collect()
    }

    fn connect(&self) -> kolo::Result<Communicator> {
        let mut builder: Builder = Communicator::builder();
        if let Some(algorithm) = self.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(transport) = self.transport {
            builder = builder.transport(transport);
        }
        if let Some(copy_mode) = self.copy_mode {
            builder = builder.copy_mode(copy_mode);
        }
        if let Some(sockets) = self.sockets {
            builder = builder.sockets(sockets);
        }
        if let Some(timeout) = self.timeout {
            builder = builder.timeout(timeout);
        }
        if self.device == Place::Cuda {
            builder = builder.devices(true);
        }
        builder.connect()
    }
}

pub(crate) fn bench(args: &Args) -> Result<(), String> {
    args.check()?;
    let comm = args.connect().map_err(|error| error.to_string())?;
    if args.root >= comm.world_size() {
        return Err(format!("root {} is out of range; there are ranks 0 to {}", args.root, comm.world_size() - 1));
    }
    let report = match args.dtype {
        DType::F32 => bench_typed::<f32>(args, &comm),
        DType::F64 => bench_typed::<f64>(args, &comm),
        DType::F16 => bench_typed::<f16>(args, &comm),
        DType::BF16 => bench_typed::<bf16>(args, &comm),
        DType::I8 => bench_typed::<i8>(args, &comm),
        DType::U8 | DType::Bool => bench_typed::<u8>(args, &comm),
        DType::I16 => bench_typed::<i16>(args, &comm),
        DType::U16 => bench_typed::<u16>(args, &comm),
        DType::I32 => bench_typed::<i32>(args, &comm),
        DType::U32 => bench_typed::<u32>(args, &comm),
        DType::I64 => bench_typed::<i64>(args, &comm),
        DType::U64 => bench_typed::<u64>(args, &comm),
        other => unreachable!("{other} is not benchmarked"),
    };
    let report = report.map_err(|error| error.to_string())?;
    // Nobody leaves before rank 0 has all there is to know; then only it goes on.
    comm.barrier().map_err(|error| error.to_string())?;
    if comm.rank() != 0 {
        return Ok(());
    }
    if let Some(file) = &args.json {
        files::write_json(file, &report)?;
    }
    if let Some(file) = &args.plot {
        plot::draw(&report, file).map_err(|error| format!("{} cannot be drawn: {error}", file.display()))?;
    }
    let wrong: u64 = report.rows.iter().flat_map(Row::lines).filter_map(|line| line.wrong).sum();
    if wrong > 0 { Err(format!("{wrong} elements were wrong")) } else { Ok(()) }
}

fn bench_typed<T: Pattern>(args: &Args, comm: &Communicator) -> kolo::Result<Report> {
    let mut report = Report::new(args, comm);
    let is_rank_0 = comm.rank() == 0;
    let sizes = args.sizes();
    let plans: Vec<Plan> = sizes.iter().map(|&bytes| Plan::new::<T>(args, comm.world_size(), bytes)).collect();
    let mut memory = measure::Memory::<T>::new(comm, &plans, args)?;
    if is_rank_0 {
        table::head(&report, args);
    }
    let bar = progress_bar(sizes.len(), is_rank_0);
    for plan in &plans {
        bar.set_message(units::show_bytes(plan.bytes));
        let mut figures = Figures::default();
        for in_place in [false, true] {
            if !(if in_place { args.op.has_in_place() } else { true }) || !args.device.has(args.op, in_place) {
                continue;
            }
            let measured: Measured = measure::measure(comm, args, plan, &mut memory, in_place)?;
            *(if in_place { &mut figures.in_place } else { &mut figures.out_of_place }) = Some(measured);
        }
        let algorithm = args.op.collective().map_or_else(|| "direct".to_owned(), |op| comm.algorithm(op, plan.bytes).to_string());
        let row = Row::new(plan, algorithm, figures, args.op, comm.world_size());
        if is_rank_0 {
            bar.suspend(|| table::row(&report, &row));
        }
        report.rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if is_rank_0 {
        table::foot(&report);
    }
    Ok(report)
}

/// A bar on rank 0's terminal, nothing elsewhere.
fn progress_bar(sizes: usize, is_rank_0: bool) -> ProgressBar {
    let shows = is_rank_0 && std::io::stderr().is_terminal() && sizes > 1;
    let target = if shows { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} sizes, now {msg}, {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(sizes as u64), target).with_style(style)
}

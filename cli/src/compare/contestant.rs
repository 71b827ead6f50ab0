//! The contestants, and how each is started.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::mpi::{Installation, Mpi, Peer};
use super::system;
use super::task::{Subject, Task};
use super::trial::{tried, write_peer};
use crate::bench::operation::Operation;
use crate::run::process::become_independent;
use crate::table::remark;

/// A library or a bound that takes part in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contestant {
    Kolo,
    KoloRegistered,
    /// The same number of bytes in bf16: the ratio compares bytes per second.
    KoloBf16,
    KoloTcp,
    Gloo,
    DeepSpeed,
    Mpi(Mpi),
    MpiTcp(Mpi),
    /// kolo from Python, with numpy.
    Pykolo,
    Mpi4py(Mpi),
    /// Each rank copies the same number of bytes from memory to memory.
    Copy,
    /// The same with non-temporal stores.
    Stream,
    /// Each rank reads and writes the same number of bytes in place: the least that an all-reduce
    /// does.
    Scale,
    /// Pairs of ranks send each other the same number of bytes over TCP, both at once.
    Exchange,
    /// A cache line moves from one rank to another and back.
    RoundTrip,
    /// A barrier in which all ranks but the last sleep: the quickest when ranks share processors.
    Futex,
}

use Contestant::*;

const ALL: [Contestant; 22] = [
    Kolo,
    KoloRegistered,
    KoloBf16,
    KoloTcp,
    Gloo,
    DeepSpeed,
    Mpi(Mpi::Open),
    MpiTcp(Mpi::Open),
    Mpi(Mpi::Mpich),
    MpiTcp(Mpi::Mpich),
    Mpi(Mpi::Intel),
    MpiTcp(Mpi::Intel),
    Pykolo,
    Mpi4py(Mpi::Open),
    Mpi4py(Mpi::Mpich),
    Mpi4py(Mpi::Intel),
    Copy,
    Stream,
    Scale,
    Exchange,
    RoundTrip,
    Futex,
];

/// A contestant that can be started.
pub(super) struct Prepared {
    pub(super) contestant: Contestant,
    /// Its versions, unless it is of this program.
    versions: Option<String>,
    /// Where its MPI is.
    mpi: Option<Installation>,
    /// What its ranks run, if an MPI starts them: a program, or a Python.
    program: PathBuf,
}

const ALL_REDUCE: Task = Task::Question(Subject::Operation(Operation::AllReduce));
const BARRIER: Task = Task::Question(Subject::Operation(Operation::Barrier));

impl Contestant {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kolo => "kolo",
            KoloRegistered => "kolo-registered",
            KoloBf16 => "kolo-bf16",
            KoloTcp => "kolo-tcp",
            Gloo => "gloo",
            DeepSpeed => "deepspeed",
            Mpi(mpi) => mpi.name(),
            MpiTcp(Mpi::Open) => "openmpi-tcp",
            MpiTcp(Mpi::Mpich) => "mpich-tcp",
            MpiTcp(Mpi::Intel) => "intel-tcp",
            Pykolo => "pykolo",
            Mpi4py(Mpi::Open) => "mpi4py-openmpi",
            Mpi4py(Mpi::Mpich) => "mpi4py-mpich",
            Mpi4py(Mpi::Intel) => "mpi4py-intel",
            Copy => "copy",
            Stream => "stream",
            Scale => "scale",
            Exchange => "exchange",
            RoundTrip => "roundtrip",
            Futex => "futex",
        }
    }

    /// Returns what can be named on the command line.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        ["bounds", "mpi4py"].into_iter().chain(ALL.into_iter().map(Contestant::name))
    }

    pub(super) fn from_name(name: &str) -> Option<Contestant> {
        ALL.into_iter().find(|contestant| contestant.name() == name)
    }

    /// Returns the contestants that a name on the command line stands for.
    pub(super) fn named(name: &str, tcp: bool, task: Task) -> Result<Vec<Contestant>, String> {
        let contestants = match (name, task) {
            ("bounds", Task::Start | Task::Question(Subject::Overlap)) => vec![],
            ("bounds", _) if tcp => vec![Exchange],
            ("bounds", BARRIER) => vec![RoundTrip, Futex],
            ("bounds", ALL_REDUCE) => vec![KoloRegistered, KoloBf16, Copy, Stream, Scale, RoundTrip],
            ("bounds", _) => vec![Copy, Stream],
            ("mpi4py", _) => vec![Pykolo, Mpi4py(Mpi::Open), Mpi4py(Mpi::Mpich)],
            _ => match Contestant::from_name(name).ok_or_else(|| format!("{name} is unknown"))? {
                Mpi(mpi) if tcp => vec![MpiTcp(mpi)],
                contestant => vec![contestant],
            },
        };
        for contestant in &contestants {
            contestant.check(tcp, task)?;
        }
        Ok(contestants)
    }

    /// Returns an error if the contestant does not do this task.
    fn check(self, tcp: bool, task: Task) -> Result<(), String> {
        let why = match self {
            KoloRegistered | KoloBf16 | DeepSpeed | Pykolo | Mpi4py(_) if tcp => "is measured in shared memory only",
            KoloRegistered | KoloBf16 | DeepSpeed if task != ALL_REDUCE => "is for all_reduce only",
            Copy | Stream | Scale | Exchange | RoundTrip | Futex if task == Task::Start => "is a bound of operations",
            Copy | Stream | Scale | Exchange | RoundTrip if task == Task::Question(Subject::Overlap) => {
                "computes nothing beside it"
            }
            Futex if task != BARRIER => "is a barrier",
            _ => return Ok(()),
        };
        Err(format!("{} {why}; it is no contestant in {}{}", self.name(), task.name(), if tcp { " --tcp" } else { "" }))
    }

    pub(super) fn is_kolo(self) -> bool {
        matches!(self, Kolo | KoloRegistered | KoloBf16 | KoloTcp)
    }

    /// Prepares the start of the contestant from this folder, unless the comparison is over before.
    pub(super) fn prepare(self, folder: &Path, peers: &[Peer], is_over: &dyn Fn() -> bool) -> Result<Prepared, String> {
        if matches!(self, Gloo | DeepSpeed | Mpi(_) | MpiTcp(_) | Pykolo | Mpi4py(_)) {
            system::check_peers()?;
        }
        let mut prepared = Prepared { contestant: self, versions: None, mpi: None, program: folder.join(self.name()) };
        match self {
            Futex => system::check_futex()?,
            Gloo => {
                let trial = "import torch, torch.distributed; print('PyTorch', torch.__version__)";
                prepared.versions = Some(prepare_python(is_over, folder, trial, "pip install torch")?);
            }
            DeepSpeed => {
                // The first use compiles its operation, which takes longer than a start may take.
                let trial = "import deepspeed, sys; from deepspeed.accelerator import get_accelerator as get; \
                             get().create_op_builder('ShareMemCommBuilder').load(); print('DeepSpeed', deepspeed.__version__)";
                let advice = "pip install torch ninja, then pip install --no-build-isolation deepspeed, with a C++ compiler";
                prepared.versions = Some(prepare_python(is_over, folder, trial, advice)?);
            }
            Pykolo => {
                let trial = "import numpy, pykolo; print('pykolo', pykolo.__version__, 'numpy', numpy.__version__)";
                prepared.versions = Some(prepare_python(is_over, folder, trial, "pip install numpy pykolo")?);
            }
            Mpi(mpi) | MpiTcp(mpi) => {
                let installation = mpi.compile(peers, is_over, &prepared.program)?;
                prepared.versions = Some(installation.title());
                prepared.mpi = Some(installation);
            }
            Mpi4py(mpi) => {
                let (installation, python, versions) = mpi.find_python(peers, is_over, folder)?;
                prepared = Prepared { versions: Some(versions), mpi: Some(installation), program: python, ..prepared };
            }
            Kolo | KoloRegistered | KoloBf16 | KoloTcp | Copy | Stream | Scale | Exchange | RoundTrip => {}
        }
        Ok(prepared)
    }
}

impl Prepared {
    /// Says which versions take part.
    pub(super) fn say_versions(&self) {
        self.versions.iter().for_each(|versions| remark(&format!("{}: {versions}", self.contestant.name())));
    }

    /// Starts the ranks, which connect to `socket`. Without one, they call one barrier and end.
    pub(super) fn start(&self, ranks: usize, folder: &Path, socket: Option<&Path>) -> Result<Vec<Child>, String> {
        let mut command = match (self.contestant, &self.mpi) {
            (Gloo | DeepSpeed, _) => return self.start_python(ranks, folder, socket),
            (Mpi4py(_), Some(mpi)) => {
                let mut command = mpi.command(ranks, false, &self.program);
                command.env("OMP_NUM_THREADS", "1").arg(folder.join("arrays.py"));
                command
            }
            (contestant, Some(mpi)) => mpi.command(ranks, matches!(contestant, MpiTcp(_)), &self.program),
            (contestant, None) => {
                let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
                let mut command = Command::new(&program);
                command.args(["run", "-n", &ranks.to_string(), "--"]);
                match contestant {
                    Pykolo => command.arg("python3").arg(folder.join("arrays.py")),
                    _ => command.arg(&program).arg("compete"),
                };
                command
            }
        };
        spawn(command.arg(self.contestant.name()).args(socket)).map(|child| vec![child])
    }

    fn start_python(&self, ranks: usize, folder: &Path, socket: Option<&Path>) -> Result<Vec<Child>, String> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        drop(listener);
        (0..ranks)
            .map(|rank| {
                let mut command = python();
                command.arg(folder.join("gloo.py")).arg(self.contestant.name()).args(socket).stderr(Stdio::null());
                command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
                command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GLOO_SOCKET_IFNAME", "lo");
                spawn(&mut command)
            })
            .collect()
    }
}

fn spawn(command: &mut Command) -> Result<Child, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // Ctrl-C is for this process, which reports what it has measured.
    become_independent(command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(|error| format!("{name} cannot be started: {error}"))
}

/// Why a contestant that is still starting is given up.
pub(super) const OVER: &str = "the comparison was over";

/// Returns a command for a Python whose libraries use one processor for each rank.
fn python() -> Command {
    let mut command = Command::new("python3");
    command.env("OMP_NUM_THREADS", "1").env("DS_ACCELERATOR", "cpu");
    command
}

fn prepare_python(is_over: &dyn Fn() -> bool, folder: &Path, trial: &str, advice: &str) -> Result<String, String> {
    let versions = tried(python().args(["-c", trial]), is_over)
        .map_err(|why| format!("python3: {why}; {advice}, and run where `python3` is that Python"))?;
    write_peer(&folder.join("gloo.py"), include_str!("../../peers/gloo.py"))?;
    write_peer(&folder.join("arrays.py"), include_str!("../../peers/arrays.py"))?;
    Ok(versions)
}

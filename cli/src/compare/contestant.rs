//! The contestants, and how each is started.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use super::system;
use super::task::{Subject, Task};
use crate::bench::operation::Operation;
use crate::run::process::{Process, Signal, become_independent};

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
    OpenMpi,
    OpenMpiTcp,
    Mpich,
    MpichTcp,
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

const ALL: [Contestant; 16] = [
    Kolo,
    KoloRegistered,
    KoloBf16,
    KoloTcp,
    Gloo,
    DeepSpeed,
    OpenMpi,
    OpenMpiTcp,
    Mpich,
    MpichTcp,
    Copy,
    Stream,
    Scale,
    Exchange,
    RoundTrip,
    Futex,
];

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
            OpenMpi => "openmpi",
            OpenMpiTcp => "openmpi-tcp",
            Mpich => "mpich",
            MpichTcp => "mpich-tcp",
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
        ["bounds"].into_iter().chain(ALL.into_iter().map(Contestant::name))
    }

    pub(super) fn from_name(name: &str) -> Option<Contestant> {
        ALL.into_iter().find(|contestant| contestant.name() == name)
    }

    /// Returns the contestants that a name on the command line stands for.
    pub(super) fn named(name: &str, tcp: bool, task: Task) -> Result<Vec<Contestant>, String> {
        let contestants = match (name, task) {
            ("openmpi", _) if tcp => vec![OpenMpiTcp],
            ("mpich", _) if tcp => vec![MpichTcp],
            ("bounds", Task::Start | Task::Question(Subject::Overlap)) => vec![],
            ("bounds", _) if tcp => vec![Exchange],
            ("bounds", BARRIER) => vec![RoundTrip, Futex],
            ("bounds", ALL_REDUCE) => vec![KoloRegistered, KoloBf16, Copy, Stream, Scale, RoundTrip],
            ("bounds", _) => vec![Copy, Stream],
            _ => vec![Contestant::from_name(name).ok_or_else(|| format!("{name} is unknown"))?],
        };
        for contestant in &contestants {
            contestant.check(tcp, task)?;
        }
        Ok(contestants)
    }

    /// Returns an error if the contestant does not do this task.
    fn check(self, tcp: bool, task: Task) -> Result<(), String> {
        let why = match self {
            KoloRegistered | KoloBf16 | DeepSpeed if tcp => "is measured in shared memory only",
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
    pub(super) fn prepare(self, folder: &Path, is_over: &dyn Fn() -> bool) -> Result<(), String> {
        if matches!(self, Gloo | DeepSpeed | OpenMpi | OpenMpiTcp | Mpich | MpichTcp) {
            system::check_peers()?;
        }
        match self {
            Futex => system::check_futex(),
            Gloo => prepare_python(is_over, folder, "import torch.distributed", "pip install torch"),
            // The first use compiles its operation, which takes longer than a start may take.
            DeepSpeed => prepare_python(
                is_over,
                folder,
                "from deepspeed.accelerator import get_accelerator as get; get().create_op_builder('ShareMemCommBuilder').load()",
                "pip install torch ninja, then pip install --no-build-isolation deepspeed, with a C++ compiler",
            ),
            OpenMpi | OpenMpiTcp => {
                compile(is_over, &self.program(folder), "mpicc.openmpi", "apt install openmpi-bin libopenmpi-dev")
            }
            Mpich | MpichTcp => compile(is_over, &self.program(folder), "mpicc.mpich", "apt install mpich libmpich-dev"),
            _ => Ok(()),
        }
    }

    /// Returns the path of its MPI program.
    fn program(self, folder: &Path) -> PathBuf {
        folder.join(self.name())
    }

    /// Starts the ranks, which connect to `socket`. Without one, they call one barrier and end.
    pub(super) fn start(self, ranks: usize, folder: &Path, socket: Option<&Path>) -> Result<Vec<Child>, String> {
        let mut command = match self {
            Gloo | DeepSpeed => return self.start_python(ranks, folder, socket),
            OpenMpi | OpenMpiTcp => {
                let mut command = Command::new("mpirun.openmpi");
                command.args(["--allow-run-as-root", "--oversubscribe"]);
                if self == OpenMpiTcp {
                    command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]);
                }
                command.args(["-n", &ranks.to_string()]).arg(self.program(folder));
                command
            }
            Mpich | MpichTcp => {
                let mut command = Command::new("mpirun.mpich");
                if self == MpichTcp {
                    command.env("MPIR_CVAR_NOLOCAL", "1").env("MPIR_CVAR_CH4_SHM_ENABLE", "0").env("UCX_TLS", "tcp,self");
                }
                command.args(["-n", &ranks.to_string()]).arg(self.program(folder));
                command
            }
            Kolo | KoloRegistered | KoloBf16 | KoloTcp | Copy | Stream | Scale | Exchange | RoundTrip | Futex => {
                let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
                let mut command = Command::new(&program);
                command.args(["run", "-n", &ranks.to_string(), "--"]).arg(&program).arg("compete");
                command
            }
        };
        spawn(command.arg(self.name()).args(socket)).map(|child| vec![child])
    }

    fn start_python(self, ranks: usize, folder: &Path, socket: Option<&Path>) -> Result<Vec<Child>, String> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        drop(listener);
        (0..ranks)
            .map(|rank| {
                let mut command = python();
                command.arg(folder.join("gloo.py")).arg(self.name()).args(socket).stderr(Stdio::null());
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

/// Runs a command to its end, or until the comparison is over.
fn output(command: &mut Command, is_over: &dyn Fn() -> bool) -> std::io::Result<Output> {
    become_independent(command);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let process = Process::new(&child);
    let reader = std::thread::spawn(move || child.wait_with_output());
    let mut is_stopped = false;
    while !reader.is_finished() {
        if is_over() && !std::mem::replace(&mut is_stopped, true) {
            process.signal(Signal::TERMINATE);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    reader.join().unwrap_or_else(|_| Err(std::io::Error::other("its output could not be read")))
}

fn compile(is_over: &dyn Fn() -> bool, program: &Path, compiler: &str, advice: &str) -> Result<(), String> {
    let source = program.with_file_name("mpi.c");
    std::fs::write(&source, include_str!("../../peers/mpi.c")).map_err(|error| error.to_string())?;
    let output = output(Command::new(compiler).args(["-O2", "-o"]).arg(program).arg(&source), is_over);
    let output = output.map_err(|error| format!("{compiler}: {error}; get it with: {advice}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{compiler} fails: {}", String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default()))
}

/// Returns a command for a Python whose libraries use one processor for each rank.
fn python() -> Command {
    let mut command = Command::new("python3");
    command.env("OMP_NUM_THREADS", "1").env("DS_ACCELERATOR", "cpu");
    command
}

fn prepare_python(is_over: &dyn Fn() -> bool, folder: &Path, trial: &str, advice: &str) -> Result<(), String> {
    let output = output(python().args(["-c", trial]), is_over);
    let output = output.map_err(|error| format!("python3: {error}; {advice}, and run where `python3` is that Python"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.trim_end().lines().last().unwrap_or_default();
        return Err(format!("python3 says: {last}; {advice}, and run where `python3` is that Python"));
    }
    let source = include_str!("../../peers/gloo.py");
    std::fs::write(folder.join("gloo.py"), source).map_err(|error| error.to_string())
}

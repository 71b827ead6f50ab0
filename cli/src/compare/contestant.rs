//! The contestants, and how each is started.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
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
    /// kolo from Python, with numpy.
    Pykolo,
    Mpi4pyOpenMpi,
    Mpi4pyMpich,
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

const ALL: [Contestant; 19] = [
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
    Pykolo,
    Mpi4pyOpenMpi,
    Mpi4pyMpich,
    Copy,
    Stream,
    Scale,
    Exchange,
    RoundTrip,
    Futex,
];

/// Options of Open MPI's launcher.
const OPEN_MPI: [&str; 2] = ["--allow-run-as-root", "--oversubscribe"];

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
            Pykolo => "pykolo",
            Mpi4pyOpenMpi => "mpi4py-openmpi",
            Mpi4pyMpich => "mpi4py-mpich",
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
            ("openmpi", _) if tcp => vec![OpenMpiTcp],
            ("mpich", _) if tcp => vec![MpichTcp],
            ("bounds", Task::Start | Task::Question(Subject::Overlap)) => vec![],
            ("bounds", _) if tcp => vec![Exchange],
            ("bounds", BARRIER) => vec![RoundTrip, Futex],
            ("bounds", ALL_REDUCE) => vec![KoloRegistered, KoloBf16, Copy, Stream, Scale, RoundTrip],
            ("bounds", _) => vec![Copy, Stream],
            ("mpi4py", _) => vec![Pykolo, Mpi4pyOpenMpi, Mpi4pyMpich],
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
            KoloRegistered | KoloBf16 | DeepSpeed | Pykolo | Mpi4pyOpenMpi | Mpi4pyMpich if tcp => {
                "is measured in shared memory only"
            }
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
    /// Returns the versions of a contestant in Python.
    pub(super) fn prepare(self, folder: &Path, is_over: &dyn Fn() -> bool) -> Result<Option<String>, String> {
        if matches!(self, Gloo | DeepSpeed | OpenMpi | OpenMpiTcp | Mpich | MpichTcp | Pykolo | Mpi4pyOpenMpi | Mpi4pyMpich) {
            system::check_peers()?;
        }
        match self {
            Futex => system::check_futex()?,
            Gloo => {
                let trial = "import torch, torch.distributed; print('PyTorch', torch.__version__)";
                return prepare_python(is_over, folder, trial, "pip install torch").map(Some);
            }
            DeepSpeed => {
                // The first use compiles its operation, which takes longer than a start may take.
                let trial = "import deepspeed, sys; from deepspeed.accelerator import get_accelerator as get; \
                             get().create_op_builder('ShareMemCommBuilder').load(); print('DeepSpeed', deepspeed.__version__)";
                let advice = "pip install torch ninja, then pip install --no-build-isolation deepspeed, with a C++ compiler";
                return prepare_python(is_over, folder, trial, advice).map(Some);
            }
            Pykolo => {
                let trial = "import numpy, pykolo; print('pykolo', pykolo.__version__, 'numpy', numpy.__version__)";
                return prepare_python(is_over, folder, trial, "pip install numpy pykolo").map(Some);
            }
            Mpi4pyOpenMpi | Mpi4pyMpich => return self.prepare_mpi4py(is_over, folder).map(Some),
            OpenMpi | OpenMpiTcp => {
                compile(is_over, &self.program(folder), "mpicc.openmpi", "apt install openmpi-bin libopenmpi-dev")?;
            }
            Mpich | MpichTcp => compile(is_over, &self.program(folder), "mpicc.mpich", "apt install mpich libmpich-dev")?,
            _ => {}
        }
        Ok(None)
    }

    /// Finds the first launcher of this MPI in `PATH`, and a Python in which mpi4py uses that MPI: the
    /// one in the launcher's folder, or the first in `PATH`. An MPI of PyPI is beside its Python.
    fn prepare_mpi4py(self, is_over: &dyn Fn() -> bool, folder: &Path) -> Result<String, String> {
        // Open MPI 4 calls its launcher OpenRTE.
        let (versions, package, options): (&[&str], &str, &[&str]) = match self {
            Mpi4pyOpenMpi => (&["Open MPI", "OpenRTE"], "openmpi", &OPEN_MPI),
            _ => (&["HYDRA"], "mpich", &[]),
        };
        let advice = format!("pip install numpy mpi4py {package}, and run with the folder of that Python in PATH");
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&paths);
        let launchers =
            folders.flat_map(|folder| ["mpiexec".to_owned(), format!("mpiexec.{package}")].map(|name| folder.join(name)));
        let mut problem = format!("no mpiexec of it is in PATH; {advice}");
        for launcher in launchers.filter(|path| path.is_file()) {
            let version = output(Command::new(&launcher).arg("--version"), is_over);
            let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
            if !versions.iter().any(|name| version.contains(name)) {
                continue;
            }
            for python in [launcher.with_file_name("python3"), PathBuf::from("python3")] {
                let found = Mpi { launcher: launcher.clone(), options, python };
                // With another MPI each rank would be alone.
                let trial = "import mpi4py, numpy; from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2, 'mpi4py uses another MPI'; \
                             mpi = ' '.join(MPI.Get_library_version().split(',')[0].split()[:3]); \
                             print('mpi4py', mpi4py.__version__, 'numpy', numpy.__version__, mpi) if MPI.COMM_WORLD.rank == 0 else None";
                match tried(&mut found.command(2, &["-c".as_ref(), trial.as_ref()]), is_over) {
                    Ok(versions) => {
                        write_peer(folder, "arrays.py", include_str!("../../peers/arrays.py"))?;
                        let _ = self.mpi().map(|slot| slot.set(found));
                        return Ok(versions);
                    }
                    Err(why) => problem = format!("{}: {why}; {advice}", launcher.display()),
                }
            }
        }
        Err(problem)
    }

    /// Returns where [`Contestant::prepare`] leaves what it has found.
    fn mpi(self) -> Option<&'static OnceLock<Mpi>> {
        static FOUND: [OnceLock<Mpi>; 2] = [const { OnceLock::new() }; 2];
        match self {
            Mpi4pyOpenMpi => Some(&FOUND[0]),
            Mpi4pyMpich => Some(&FOUND[1]),
            _ => None,
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
                command.args(OPEN_MPI);
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
            Mpi4pyOpenMpi | Mpi4pyMpich => {
                let found = self.mpi().and_then(OnceLock::get).ok_or("it is not prepared")?;
                found.command(ranks, &[folder.join("arrays.py").as_os_str()])
            }
            Pykolo => {
                let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
                let mut command = Command::new(program);
                command.args(["run", "-n", &ranks.to_string(), "--", "python3"]).arg(folder.join("arrays.py"));
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

/// The MPI of a Python's mpi4py.
#[derive(Debug)]
struct Mpi {
    launcher: PathBuf,
    options: &'static [&'static str],
    python: PathBuf,
}

impl Mpi {
    /// Returns the command with which the MPI starts Python on `ranks` ranks, with these arguments.
    fn command(&self, ranks: usize, arguments: &[&OsStr]) -> Command {
        let mut command = Command::new(&self.launcher);
        command.args(self.options).args(["-n", &ranks.to_string()]).arg(&self.python).args(arguments);
        command.env("OMP_NUM_THREADS", "1");
        command
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
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
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

/// Runs a trial, and returns its output; an error is the last line of what it complains.
fn tried(command: &mut Command, is_over: &dyn Fn() -> bool) -> Result<String, String> {
    let output = output(command, is_over).map_err(|error| error.to_string())?;
    let said = if output.status.success() { &output.stdout } else { &output.stderr };
    let said = String::from_utf8_lossy(said).trim_end().lines().last().unwrap_or_default().to_owned();
    if output.status.success() { Ok(said) } else { Err(said) }
}

fn prepare_python(is_over: &dyn Fn() -> bool, folder: &Path, trial: &str, advice: &str) -> Result<String, String> {
    let versions = tried(python().args(["-c", trial]), is_over)
        .map_err(|why| format!("python3: {why}; {advice}, and run where `python3` is that Python"))?;
    write_peer(folder, "gloo.py", include_str!("../../peers/gloo.py"))?;
    write_peer(folder, "arrays.py", include_str!("../../peers/arrays.py"))?;
    Ok(versions)
}

fn write_peer(folder: &Path, name: &str, source: &str) -> Result<(), String> {
    std::fs::write(folder.join(name), source).map_err(|error| error.to_string())
}

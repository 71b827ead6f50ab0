//! Who takes part, and how it is started.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::bench::operation::Operation;

/// Who takes part in a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contestant {
    Kolo,
    KoloRegistered,
    KoloTcp,
    Gloo,
    OpenMpi,
    OpenMpiTcp,
    Mpich,
    MpichTcp,
    /// Each rank copies as many bytes, from memory to memory.
    Copy,
    /// The same, past the caches.
    Stream,
    /// Each rank reads and writes as many bytes where they are: what no all-reduce can do without.
    Scale,
    /// Pairs of ranks send each other as many bytes over a TCP connection, both at once.
    Exchange,
    /// Two ranks hand a cache line to each other and back.
    RoundTrip,
}

use Contestant::*;

const ALL: [Contestant; 13] =
    [Kolo, KoloRegistered, KoloTcp, Gloo, OpenMpi, OpenMpiTcp, Mpich, MpichTcp, Copy, Stream, Scale, Exchange, RoundTrip];

impl Contestant {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kolo => "kolo",
            KoloRegistered => "kolo-registered",
            KoloTcp => "kolo-tcp",
            Gloo => "gloo",
            OpenMpi => "openmpi",
            OpenMpiTcp => "openmpi-tcp",
            Mpich => "mpich",
            MpichTcp => "mpich-tcp",
            Copy => "copy",
            Stream => "stream",
            Scale => "scale",
            Exchange => "exchange",
            RoundTrip => "roundtrip",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Contestant> {
        ALL.into_iter().find(|contestant| contestant.name() == name)
    }

    /// Those that a name on the command line stands for.
    pub(super) fn named(name: &str, tcp: bool, op: Operation) -> Result<Vec<Contestant>, String> {
        if name == KoloRegistered.name() && op != Operation::AllReduce {
            return Err(format!("{name} moves less in all_reduce only; it is no contestant in {}", op.name()));
        }
        Ok(match (name, tcp) {
            ("openmpi", true) => vec![OpenMpiTcp],
            ("mpich", true) => vec![MpichTcp],
            ("bounds", true) => vec![Exchange],
            ("bounds", false) if op == Operation::Barrier => vec![RoundTrip],
            ("bounds", false) if op == Operation::AllReduce => vec![KoloRegistered, Copy, Stream, Scale, RoundTrip],
            ("bounds", false) => vec![Copy, Stream],
            _ => vec![Contestant::from_name(name).ok_or_else(|| {
                let names: Vec<_> = ALL.iter().map(|contestant| contestant.name()).collect();
                format!("{name} is unknown; there are bounds, {}", names.join(", "))
            })?],
        })
    }

    pub(super) fn is_kolo(self) -> bool {
        matches!(self, Kolo | KoloRegistered | KoloTcp)
    }

    /// Starts its ranks, which connect to `socket`.
    pub(super) fn start(self, ranks: usize, folder: &Path, socket: &Path) -> Result<Vec<Child>, String> {
        match self {
            Gloo => gloo(ranks, folder, socket),
            OpenMpi | OpenMpiTcp => {
                let program = compile(folder, self.name(), "mpicc.openmpi", "apt install openmpi-bin libopenmpi-dev")?;
                let mut command = Command::new("mpirun.openmpi");
                command.args(["--allow-run-as-root", "--oversubscribe"]);
                if self == OpenMpiTcp {
                    command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]);
                }
                command.args(["-n", &ranks.to_string()]).arg(program).arg(socket).arg(self.name());
                spawn(command).map(|child| vec![child])
            }
            Mpich | MpichTcp => {
                let program = compile(folder, self.name(), "mpicc.mpich", "apt install mpich libmpich-dev")?;
                let mut command = Command::new("mpirun.mpich");
                if self == MpichTcp {
                    command.env("MPIR_CVAR_NOLOCAL", "1").env("MPIR_CVAR_CH4_SHM_ENABLE", "0").env("UCX_TLS", "tcp,self");
                }
                command.args(["-n", &ranks.to_string()]).arg(program).arg(socket).arg(self.name());
                spawn(command).map(|child| vec![child])
            }
            Kolo | KoloRegistered | KoloTcp | Copy | Stream | Scale | Exchange | RoundTrip => {
                let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
                let mut command = Command::new(&program);
                command.args(["run", "-n", &ranks.to_string(), "--"]).arg(&program).args(["compete", self.name()]).arg(socket);
                spawn(command).map(|child| vec![child])
            }
        }
    }
}

fn spawn(mut command: Command) -> Result<Child, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(|error| format!("{name} cannot be started: {error}"))
}

fn compile(folder: &Path, name: &str, compiler: &str, advice: &str) -> Result<std::path::PathBuf, String> {
    let (source, program) = (folder.join("mpi.c"), folder.join(name));
    std::fs::write(&source, include_str!("../../../benches/peers/mpi.c")).map_err(|error| error.to_string())?;
    let output = Command::new(compiler).args(["-O2", "-o"]).arg(&program).arg(&source).output();
    let output = output.map_err(|error| format!("{compiler}: {error}; get it with: {advice}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{compiler} fails: {}", said.lines().next().unwrap_or_default()));
    }
    Ok(program)
}

fn gloo(ranks: usize, folder: &Path, socket: &Path) -> Result<Vec<Child>, String> {
    let advice = "pip install torch, and run where `python3` is that Python";
    let has_torch = Command::new("python3").args(["-c", "import torch.distributed"]).output();
    match has_torch {
        Err(error) => return Err(format!("python3: {error}; {advice}")),
        Ok(output) if !output.status.success() => return Err(format!("python3 has no PyTorch; {advice}")),
        Ok(_) => {}
    }
    let source = folder.join("gloo.py");
    std::fs::write(&source, include_str!("../../../benches/peers/gloo.py")).map_err(|error| error.to_string())?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let port = listener.local_addr().map_err(|error| error.to_string())?.port();
    drop(listener);
    (0..ranks)
        .map(|rank| {
            let mut command = Command::new("python3");
            command.arg(&source).arg(socket).arg(Gloo.name());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GLOO_SOCKET_IFNAME", "lo");
            command.stderr(Stdio::null());
            spawn(command)
        })
        .collect()
}

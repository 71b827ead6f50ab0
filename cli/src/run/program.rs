//! The program that ranks run, and what its processes are told.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::nccl::Nccl;

/// Commands of this program that ranks run.
const BUILT_IN: [&str; 2] = ["bench", "doctor"];

/// The variables that [`Job::tell`] sets, beside the secret and [`MASTER`]. Those without `KOLO_` are
/// for other libraries, such as PyTorch.
pub(super) const OF_RANK: [&str; 11] = [
    "KOLO_RANK",
    "KOLO_WORLD_SIZE",
    "KOLO_LOCAL_RANK",
    "KOLO_LOCAL_WORLD_SIZE",
    "KOLO_STORE",
    "KOLO_STORE_SERVED",
    "KOLO_JOB_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
];

/// The variables of the address where PyTorch's rank 0 serves its store. A user may export others.
const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

/// The program that ranks run.
pub(super) struct Program<'a> {
    file: OsString,
    arguments: &'a [OsString],
    pub(super) is_built_in: bool,
    /// What its ranks load in place of NCCL.
    nccl: Option<Nccl>,
}

impl Program<'_> {
    /// Finds the program that the words of a command line name.
    pub(super) fn new(words: &[OsString]) -> Result<Program<'_>, String> {
        let (file, arguments) = words.split_first().ok_or("no program was given")?;
        if BUILT_IN.iter().any(|name| file == name) {
            let this = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
            return Ok(Program { file: this.into_os_string(), arguments: words, is_built_in: true, nccl: None });
        }
        Ok(Program { file: file.clone(), arguments, is_built_in: false, nccl: None })
    }

    /// Has its ranks load kolo in place of NCCL, if that is wanted.
    pub(super) fn with_nccl(self, is_wanted: bool) -> Result<Self, String> {
        Ok(Program { nccl: is_wanted.then(Nccl::find).transpose()?, ..self })
    }

    /// To be called when a rank's command has the variables that the user exports.
    pub(super) fn replace_nccl(&self, command: &mut Command) {
        self.nccl.iter().for_each(|nccl| nccl.apply(command));
    }

    /// Returns the words of a command of this program that the ranks run, as `bench`, and its arguments.
    /// Each rank would complain about them by itself.
    pub(super) fn own_command(&self) -> Option<&[OsString]> {
        if self.is_built_in {
            return Some(self.arguments);
        }
        let is_built_in = self.arguments.first().is_some_and(|first| BUILT_IN.iter().any(|name| first == name));
        let same = |path: &Path| {
            path.canonicalize()
                .is_ok_and(|path| std::env::current_exe().and_then(|this| this.canonicalize()).is_ok_and(|this| path == this))
        };
        let is_this = || {
            let file = Path::new(&self.file);
            if file.components().count() > 1 {
                return same(file);
            }
            let path = std::env::var_os("PATH").unwrap_or_default();
            let named = |folder: PathBuf| folder.join(file).with_extension(std::env::consts::EXE_EXTENSION);
            std::env::split_paths(&path).map(named).find(|path| path.is_file()).is_some_and(|path| same(&path))
        };
        (is_built_in && is_this()).then_some(self.arguments)
    }

    /// Returns the command of a rank, whose output goes to pipes.
    pub(super) fn command(&self, input: Stdio) -> Command {
        let mut command = Command::new(&self.file);
        command.args(self.arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(super) fn cannot_be_started(&self, error: &std::io::Error) -> String {
        let file = Path::new(&self.file);
        let advice = match error.kind() {
            // Only a name without a folder is looked for on the PATH.
            ErrorKind::NotFound if file.components().count() == 1 && file.is_file() => {
                format!("; it is in this folder: write ./{0}, or what runs it first, as in python3 {0}", file.display())
            }
            ErrorKind::PermissionDenied if file.is_file() => {
                format!("; make it executable, or write what runs it first, as in python3 {}", file.display())
            }
            _ => String::new(),
        };
        format!("{} cannot be started: {error}{advice}", file.display())
    }
}

/// Returns whether rank 0 reads the standard input of the launcher: not if it is a terminal.
pub(super) fn has_input() -> bool {
    !std::io::IsTerminal::is_terminal(&std::io::stdin())
}

/// The job that a rank belongs to.
pub(super) struct Job<'a> {
    pub(super) name: &'a str,
    pub(super) world_size: usize,
    /// The first rank of the host, and how many ranks the host has.
    pub(super) first: usize,
    pub(super) ranks: usize,
    pub(super) store: SocketAddr,
    /// An address of rank 0's host, with a port that is free there.
    pub(super) master: SocketAddr,
    /// The secret, unless the ranks find it by themselves.
    pub(super) secret: Option<&'a str>,
}

impl Job<'_> {
    /// Sets the variables that tell a rank its place in the job.
    pub(super) fn tell(&self, command: &mut Command, rank: usize) {
        let place = [
            ("RANK", rank),
            ("WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", rank - self.first),
            ("LOCAL_WORLD_SIZE", self.ranks),
        ];
        for (name, number) in place {
            command.env(name, number.to_string()).env(format!("KOLO_{name}"), number.to_string());
        }
        if !MASTER.iter().any(|name| command.get_envs().any(|(exported, _)| exported == *name)) {
            let [address, port] = MASTER;
            command.env(address, self.master.ip().to_string()).env(port, self.master.port().to_string());
        }
        // Inside torchrun: PyTorch's rank 0 would expect its agent to serve the store.
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.env("KOLO_STORE", format!("tcp://{}", self.store)).env("KOLO_STORE_SERVED", "1").env("KOLO_JOB_ID", self.name);
        if let Some(secret) = self.secret {
            command.env("KOLO_SECRET", secret);
        }
    }
}

/// Returns an address of this host with a port that is free now. Rank 0 of a program that uses it takes
/// the port a moment later, and fails if the system has given it to another process meanwhile.
pub(super) fn free_address(ip: IpAddr) -> io::Result<SocketAddr> {
    TcpListener::bind((ip, 0))?.local_addr()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn the_variables_of_a_rank_are_those_that_it_is_told() {
        let store = ([127, 0, 0, 1], 1).into();
        let told = |command: &mut Command| {
            Job { name: "job", world_size: 2, first: 0, ranks: 2, store, master: store, secret: None }.tell(command, 1);
            let set = command.get_envs().filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value?.to_owned())));
            set.collect::<BTreeMap<_, _>>()
        };
        let all = told(&mut Command::new("none"));
        let expected: BTreeSet<&str> = OF_RANK.into_iter().chain(MASTER).collect();
        assert!(all.keys().eq(expected), "{all:?}");
        // Both or none are the user's.
        let exported = told(Command::new("none").env("MASTER_ADDR", "elsewhere"));
        assert_eq!(exported.get("MASTER_ADDR").unwrap(), "elsewhere");
        assert!(!exported.contains_key("MASTER_PORT"));
    }
}

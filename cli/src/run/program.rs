//! The program that ranks run, and what its processes are told.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

/// Commands of this program that ranks run.
const BUILT_IN: [&str; 1] = ["bench"];

/// The variables that [`Job::tell`] sets, beside the secret.
pub(super) const OF_RANK: [&str; 7] = [
    "KOLO_RANK",
    "KOLO_WORLD_SIZE",
    "KOLO_LOCAL_RANK",
    "KOLO_LOCAL_WORLD_SIZE",
    "KOLO_STORE",
    "KOLO_STORE_SERVED",
    "KOLO_JOB_ID",
];

/// The program that ranks run.
pub(super) struct Program<'a> {
    file: OsString,
    arguments: &'a [OsString],
    pub(super) is_built_in: bool,
}

impl Program<'_> {
    /// Finds the program that the words of a command line name.
    pub(super) fn new(words: &[OsString]) -> Result<Program<'_>, String> {
        let (file, arguments) = words.split_first().ok_or("no program was given")?;
        if BUILT_IN.iter().any(|name| file == name) {
            let this = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
            return Ok(Program { file: this.into_os_string(), arguments: words, is_built_in: true });
        }
        Ok(Program { file: file.clone(), arguments, is_built_in: false })
    }

    /// Returns the command of a rank, whose output goes to pipes.
    pub(super) fn command(&self, input: Stdio) -> Command {
        let mut command = Command::new(&self.file);
        command.args(self.arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(super) fn cannot_be_started(&self, error: &std::io::Error) -> String {
        format!("{} cannot be started: {error}", Path::new(&self.file).display())
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
    /// The secret, unless the ranks find it by themselves.
    pub(super) secret: Option<&'a str>,
}

impl Job<'_> {
    /// Sets the variables that tell a rank its place in the job.
    pub(super) fn tell(&self, command: &mut Command, rank: usize) {
        command
            .env("KOLO_RANK", rank.to_string())
            .env("KOLO_WORLD_SIZE", self.world_size.to_string())
            .env("KOLO_LOCAL_RANK", (rank - self.first).to_string())
            .env("KOLO_LOCAL_WORLD_SIZE", self.ranks.to_string())
            .env("KOLO_STORE", format!("tcp://{}", self.store))
            .env("KOLO_STORE_SERVED", "1")
            .env("KOLO_JOB_ID", self.name);
        if let Some(secret) = self.secret {
            command.env("KOLO_SECRET", secret);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_a_rank_are_those_that_it_is_told() {
        let store = ([127, 0, 0, 1], 1).into();
        let mut command = Command::new("none");
        Job { name: "job", world_size: 2, first: 0, ranks: 2, store, secret: None }.tell(&mut command, 1);
        let mut expected = OF_RANK;
        expected.sort_unstable();
        assert!(command.get_envs().map(|(name, _)| name).eq(expected));
    }
}

//! `kolo run`: starts ranks of a program, on this machine or on several hosts.
//!
//! The launcher serves the store of the rendezvous. Each job has a name and a secret of its own, so
//! that jobs on one machine stay apart. The launcher forwards signals, and ends all ranks when one
//! fails, unless they are to go on. On other hosts, an agent that ssh starts does this for the ranks there.

mod arguments;
mod cause;
mod failures;
mod guard;
mod local;
mod output;
pub(crate) mod process;
mod program;
mod remote;
mod supervise;

use std::ffi::{OsStr, OsString};
use std::process::{ExitCode, Stdio};

use crossbeam_channel::{bounded, unbounded};
use kolo::TcpStoreServer;

use crate::random::{hexadecimal, random};
use crate::{check_command, complain};
use local::LocalRanks;
use output::Palette;
use program::{Job, OF_RANK, Program, free_address, has_input};
use supervise::{Failure, Supervisor, drain};

pub(crate) use arguments::Args;
pub(crate) use failures::FailureFolder;
pub(crate) use guard::{Args as GuardArgs, guard};
pub(crate) use remote::agent::agent;

/// Exit status when the launcher itself fails.
pub(crate) const LAUNCHER_FAILED: u8 = 125;
/// Exit status when the program cannot be started.
const NOT_STARTED: u8 = 127;

pub(crate) fn run(args: &Args) -> ExitCode {
    let launched = match remote::hosts(args) {
        Ok(Some(hosts)) => remote::launch(args, hosts),
        Ok(None) => launch(args),
        Err(message) => Err((LAUNCHER_FAILED, message)),
    };
    match launched {
        Ok(code) => code,
        Err((code, message)) => {
            complain(&format!("kolo run: {message}"));
            ExitCode::from(code)
        }
    }
}

/// The name and the secret of a new job.
struct Credentials {
    job: String,
    secret: [u8; 32],
    /// Whether the secret is that of the launcher's environment.
    is_given: bool,
}

impl Credentials {
    fn new() -> Result<Credentials, String> {
        let job = hexadecimal(&random::<8>()?);
        let given = kolo::settings::secret_of_environment().map_err(|error| error.to_string())?;
        Ok(Credentials { job, secret: given.map_or_else(random::<32>, Ok)?, is_given: given.is_some() })
    }
}

/// Starts ranks on this machine.
fn launch(args: &Args) -> Result<ExitCode, (u8, String)> {
    let failed = |message: String| (LAUNCHER_FAILED, message);
    if args.address.is_some() {
        return Err(failed(
            "--address needs --hosts or --hostfile: ranks on this machine reach the store on loopback".to_owned(),
        ));
    }
    let count = args.ranks.ok_or_else(|| failed("give the number of ranks with -n".to_owned()))? as usize;
    let program = Program::new(&args.program).map_err(failed)?;
    if let Some(words) = program.own_command()
        && let Err(code) = check_command(words, count, args.directory.is_none())
    {
        return Ok(code);
    }
    let exported = exported(&args.exported).map_err(failed)?;
    let credentials = Credentials::new().map_err(failed)?;
    let address = ([127, 0, 0, 1], 0).into();
    let server = TcpStoreServer::bind(address, &credentials.job, Some(credentials.secret));
    let server = server.map_err(|error| failed(error.to_string()))?;
    let (events, event) = unbounded();
    process::watch_signals(&events).map_err(|error| failed(format!("cannot watch for signals: {error}")))?;
    if let Some(folder) = &args.directory {
        std::env::set_current_dir(folder).map_err(|error| failed(format!("--directory {}: {error}", folder.display())))?;
    }

    let palette = Palette::new(count, !args.no_prefix);
    let mut supervisor = Supervisor::new(LocalRanks::new(&credentials.job, 0), args.grace());
    // Nothing is sent. The channel closes when all output of the ranks has been forwarded.
    let (unread, all_read) = bounded(0);
    // A secret in the launcher's environment reaches the ranks through theirs.
    let secret = (!credentials.is_given).then(|| hexadecimal(&credentials.secret));
    let store = server.address();
    let master = free_address(store.ip()).map_err(|error| failed(format!("no port is free on {}: {error}", store.ip())))?;
    let job = Job { name: &credentials.job, world_size: count, first: 0, ranks: count, store, master, secret: secret.as_deref() };
    for rank in 0..count {
        let mut command = program.command(if rank == 0 && has_input() { Stdio::inherit() } else { Stdio::null() });
        // Rank 0 of a built-in command prints a report and has the terminal to itself.
        if program.is_built_in && rank == 0 {
            command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
        }
        command.envs(exported.iter().map(|(name, value)| (name, value)));
        job.tell(&mut command, rank);
        if let Err(error) = supervisor.ranks.start(&mut command, |is_error| palette.sink(rank, is_error), &events, &unread) {
            supervisor.stop_all(&event);
            return Err((NOT_STARTED, program.cannot_be_started(&error)));
        }
    }
    drop(unread);
    let mut failure = supervisor.wait(&event);
    drop(server);
    // The ranks' output is written before the report of their end, however slow its reader is.
    if !matches!(failure, Some(Failure::Stopped(_))) {
        failure = drain(&all_read, &event).map(Failure::Stopped).or(failure);
    }
    // Some systems exit at once when the report has been written.
    drop(supervisor);
    Ok(conclude(failure, &palette, count))
}

/// Reports how a job has ended, and returns the exit status of the launcher.
fn conclude(failure: Option<Failure>, palette: &Palette, ranks: usize) -> ExitCode {
    let lost = palette.finish();
    if let Some(problem) = lost {
        complain(&format!("kolo run: {problem}; output of the ranks is lost"));
    }
    match failure {
        None if lost.is_some() => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
        Some(failure) => match failure.report(ranks) {
            0 if lost.is_some() => ExitCode::FAILURE,
            code => process::exit(code),
        },
    }
}

/// Returns the variables of `-x NAME` and `-x NAME=VALUE`.
fn exported(arguments: &[OsString]) -> Result<Vec<(OsString, OsString)>, String> {
    let variable = |argument: &OsString| {
        let text = argument.as_encoded_bytes();
        let at = text.iter().position(|byte| *byte == b'=');
        let name = &text[..at.unwrap_or(text.len())];
        if name.is_empty() {
            return Err(format!("-x {}: it has no name; write -x NAME or -x NAME=VALUE", argument.display()));
        }
        // SAFETY: both parts end or begin at an ASCII character, so they are encoded as a whole.
        let part = |bytes: &[u8]| unsafe { OsStr::from_encoded_bytes_unchecked(bytes) }.to_owned();
        let name = part(name);
        if OF_RANK.iter().any(|own| name == *own) {
            return Err(format!("-x {}: kolo run gives each rank a value of its own; leave it out", name.display()));
        }
        let value = match at {
            Some(at) => part(&text[at + 1..]),
            None => std::env::var_os(&name).ok_or_else(|| {
                let name = name.display();
                format!("-x {name}: this environment has no such variable; set it, or write -x {name}=VALUE")
            })?,
        };
        Ok((name, value))
    };
    arguments.iter().map(variable).collect()
}

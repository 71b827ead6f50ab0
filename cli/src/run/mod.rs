//! `kolo run`: starts ranks of a program, on this machine or on several hosts.
//!
//! The launcher serves the store of the rendezvous. Each job has a name and a secret of its own, so
//! that jobs on one machine stay apart. The launcher forwards signals, and ends all ranks when one
//! fails, unless they are to go on. On other hosts, an agent that ssh starts does this for the ranks there.

mod arguments;
mod attempt;
mod bind;
mod cause;
mod failures;
mod guard;
mod local;
mod logs;
mod nccl;
mod output;
pub(crate) mod process;
mod program;
mod remote;
mod restarts;
mod supervise;

use std::ffi::{OsStr, OsString};
use std::process::{ExitCode, Stdio};

use crossbeam_channel::{Receiver, bounded};
use kolo::TcpStoreServer;

use crate::complain;
use crate::random::{hexadecimal, random};
use attempt::{Attempt, Ended, Events, Refusal};
use bind::Bindings;
use local::LocalRanks;
use process::Event;
use program::{Job, OF_RANK, Program, free_address};
use supervise::{Failure, Supervisor, drain};

pub(crate) use arguments::Args;
pub(crate) use failures::FailureFolder;
pub(crate) use guard::{Args as GuardArgs, guard};
pub(crate) use remote::agent::agent;
pub(crate) use remote::once_each;

/// Exit status when the launcher itself fails.
pub(crate) const LAUNCHER_FAILED: u8 = 125;
/// Exit status when the program cannot be started.
const NOT_STARTED: u8 = 127;

pub(crate) fn run(args: &Args) -> ExitCode {
    let hosts = remote::hosts(args).map_err(Refusal::from);
    match hosts.and_then(|hosts| restarts::run(args, hosts.as_deref())) {
        Ok(code) => code,
        Err(Refusal(code, message)) => {
            if let Some(message) = message {
                complain(&format!("kolo run: {message}"));
            }
            code
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

/// Starts ranks on this machine, and waits for them.
fn launch(attempt: &Attempt<'_>) -> Result<Ended, Refusal> {
    let args = attempt.args;
    let Events { sender, receiver, .. } = &attempt.events()?;
    if args.address.is_some() {
        return Err("--address needs --hosts or --hostfile: ranks on this machine reach the store on loopback".to_owned().into());
    }
    let count = args.ranks.ok_or_else(|| "give the number of ranks with -n".to_owned())?.most as usize;
    let program = Program::new(&args.program)?.with_nccl(args.nccl)?;
    attempt.check(&program, count, args.directory.is_none())?;
    let exported = exported(&args.exported)?;
    let credentials = Credentials::new()?;
    let address = ([127, 0, 0, 1], 0).into();
    let server = TcpStoreServer::bind(address, &credentials.job, Some(credentials.secret)).map_err(|error| error.to_string())?;
    let palette = attempt.palette(&program, count)?;
    if let (Some(folder), 0) = (&args.directory, attempt.restarts) {
        std::env::set_current_dir(folder).map_err(|error| format!("--directory {}: {error}", folder.display()))?;
    }

    let bindings = Bindings::new(args.bind_to, count)?;
    let mut supervisor = Supervisor::new(LocalRanks::new(&credentials.job, 0), args.grace(), args.kill_after);
    // Nothing is sent. The channel closes when all output of the ranks has been forwarded.
    let (unread, all_read) = bounded(0);
    // A secret in the launcher's environment reaches the ranks through theirs.
    let secret = (!credentials.is_given).then(|| hexadecimal(&credentials.secret));
    let store = server.address();
    let master = free_address(store.ip()).map_err(|error| format!("no port is free on {}: {error}", store.ip()))?;
    let job = Job { name: &credentials.job, world_size: count, first: 0, ranks: count, store, master, secret: secret.as_deref() };
    for rank in 0..count {
        let mut command = program.command(if rank == 0 && attempt.reads_input() { Stdio::inherit() } else { Stdio::null() });
        // Rank 0 of a built-in command prints a report and has the terminal to itself.
        if program.is_built_in && rank == 0 && args.log_dir.is_none() {
            command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
        }
        command.envs(exported.iter().chain(&attempt.variables()).map(|(name, value)| (name, value)));
        job.tell(&mut command, rank);
        program.replace_nccl(&mut command);
        if args.report_bindings {
            complain(&format!("kolo run: {}", bindings.describe(&command, rank, rank)));
        }
        bindings.apply(&mut command, rank);
        if let Err(error) = supervisor.ranks.start(&mut command, |is_error| palette.sink(rank, is_error), sender, &unread) {
            supervisor.stop_all(receiver);
            return Err(Refusal(NOT_STARTED.into(), Some(program.cannot_be_started(&error))));
        }
    }
    drop(unread);
    palette.begin();
    let failure = supervisor.wait(receiver);
    drop(server);
    let failure = after_the_output(failure, &all_read, receiver);
    // Some systems exit at once when the report has been written.
    drop(supervisor);
    Ok(Ended { failure, palette, ranks: count })
}

/// Waits until the ranks' output is written, however slow its reader is, so that it comes before the
/// report of their end. Returns how the job has failed: a signal ends the wait, too.
fn after_the_output(failure: Option<Failure>, all_read: &Receiver<()>, event: &Receiver<Event>) -> Option<Failure> {
    if matches!(failure, Some(Failure::Stopped(_))) {
        return failure;
    }
    drain(all_read, event).map(Failure::Stopped).or(failure)
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

//! `--nproc`: starts ranks on this machine.
//!
//! On one node, ranks have a job name and a secret of their own. Their store is served by this
//! process, or by rank 0 at `--dist-url`. On several nodes, `--world-size` and `--rank` count
//! nodes, and rank 0 serves the store at `--dist-url`. `kolo run` does more: it forwards signals
//! and marks each line of output with its rank.
//!
//! With `--elastic --max-restarts N`, this process replaces ranks that die: it starts processes that
//! join the run.

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use kolo::TcpStoreServer;

use crate::arguments::{ENVIRONMENT, TrainArgs};
use crate::progress::complain;

/// The variable that tells a process that it is a rank, so that it does not start others.
const STARTED: &str = "KOLO_RESNET_STARTED";

/// How long the other ranks may take to report and end after a rank has failed.
const GRACE: Duration = Duration::from_secs(10);

/// How long a process that replaces a rank waits for the next epoch, unless `KOLO_START_TIMEOUT` is
/// set.
const JOIN_TIMEOUT: &str = "60m";

/// Returns whether this process joins a run that has started. The values are those that kolo takes.
pub(crate) fn joins() -> bool {
    std::env::var("KOLO_JOIN").is_ok_and(|value| ["1", "true", "yes"].contains(&value.as_str()))
}

/// Returns how many ranks this process starts; `None` if it is a rank itself.
pub(crate) fn ranks(args: &TrainArgs) -> Option<usize> {
    if std::env::var_os(STARTED).is_some() {
        return None;
    }
    args.nproc.or_else(|| args.multiprocessing_distributed.then(crate::cores))
}

/// Starts the ranks and waits for them.
pub(crate) fn launch(args: &TrainArgs, count: usize) -> Result<ExitCode, String> {
    if joins() {
        return Err(
            "with KOLO_JOIN=1 this process joins a run as one rank: leave out --nproc (or --multiprocessing-distributed)"
                .to_owned(),
        );
    }
    let (nodes, node) = match (args.world_size.unwrap_or(1), args.rank) {
        (nodes, None) if nodes > 1 => {
            return Err(format!(
                "with --nproc, --world-size counts nodes, and there are {nodes}: give the number of this node by --rank"
            ));
        }
        (nodes, node) => (nodes, node.unwrap_or(0)),
    };
    if node >= nodes {
        return Err(format!("--rank {node} must be less than --world-size, which is {nodes}; with --nproc both count nodes"));
    }
    if let Some((launcher, tasks)) = kolo::doctor::launched_by().filter(|&(_, tasks)| tasks > 1 && nodes == 1) {
        return Err(format!(
            "this process is one of {tasks} tasks ({launcher}), and with --nproc each of them would start ranks of its own: leave \
             out --nproc (or --multiprocessing-distributed), or start one task on each node with --world-size and --rank"
        ));
    }
    let (job, secret) = (hexadecimal(&random::<8>()?), random::<32>()?);
    let is_named = args.dist_url != ENVIRONMENT;
    let server = match nodes {
        1 if !is_named => {
            Some(TcpStoreServer::bind(([127, 0, 0, 1], 0).into(), &job, Some(secret)).map_err(|error| error.to_string())?)
        }
        _ => None,
    };
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    #[cfg(windows)]
    ranks_end_with_this_process()?;
    let start = |local: Option<usize>| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(STARTED, "1").stdin(Stdio::null());
        match local {
            Some(local) => command
                .env("KOLO_RANK", (node * count + local).to_string())
                .env("KOLO_WORLD_SIZE", (nodes * count).to_string())
                .env("KOLO_LOCAL_RANK", local.to_string())
                .env("KOLO_LOCAL_WORLD_SIZE", count.to_string()),
            None => {
                if std::env::var_os("KOLO_START_TIMEOUT").is_none() {
                    command.env("KOLO_START_TIMEOUT", JOIN_TIMEOUT);
                }
                command.env("KOLO_JOIN", "1")
            }
        };
        if let Some(server) = &server {
            command.env("KOLO_STORE", server.url()).env("KOLO_STORE_SERVED", "1");
        }
        if nodes == 1 {
            command.env("KOLO_JOB_ID", &job).env("KOLO_SECRET", hexadecimal(&secret));
        }
        #[cfg(target_os = "linux")]
        die_with_parent(&mut command);
        command.spawn()
    };
    let mut ranks = Ranks(Vec::new());
    for local in 0..count {
        ranks.0.push(Some(start(Some(local)).map_err(|error| format!("rank {local} cannot be started: {error}"))?));
    }
    ranks.wait(args.elastic, args.max_restarts, || start(None))
}

/// Ends a rank when its launcher ends.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let launcher = Some(rustix::process::getpid());
    let arm = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // If the launcher has ended already, no signal will come.
        if rustix::process::getppid() == launcher { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. These are two system
    // calls, and their errors are numbers.
    unsafe {
        command.pre_exec(arm);
    }
}

/// Puts this process into a job of the system, and with it the ranks that it starts. The system
/// ends all of them when this process ends, however that happens.
#[cfg(windows)]
fn ranks_end_with_this_process() -> Result<(), String> {
    let make = || {
        let job = win32job::Job::create_with_limit_info(win32job::ExtendedLimitInfo::new().limit_kill_on_job_close())?;
        job.assign_current_process()?;
        Ok::<_, win32job::JobError>(job)
    };
    let job = make().map_err(|error| format!("the ranks cannot be tied to this process: {error}"))?;
    // Closing the job would end this process. The system closes it with the process.
    std::mem::forget(job);
    Ok(())
}

/// The ranks that were started; `None` for those that have ended. Dropping this kills the remaining
/// ones.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    /// Waits for all ranks. With `elastic`, replaces up to `restarts` ranks that die, as long as the
    /// run continues.
    fn wait(
        &mut self,
        elastic: bool,
        mut restarts: usize,
        replace: impl Fn() -> std::io::Result<Child>,
    ) -> Result<ExitCode, String> {
        let (mut failed, mut succeeded) = (0, 0);
        let mut deadline: Option<Instant> = None;
        while self.0.iter().any(Option::is_some) {
            let mut lost = Vec::new();
            for (rank, place) in self.0.iter_mut().enumerate() {
                let Some(child) = place else { continue };
                let Some(status) = child.try_wait().map_err(|error| format!("rank {rank} cannot be waited for: {error}"))? else {
                    continue;
                };
                if status.success() {
                    succeeded += 1;
                } else {
                    complain(&format!("rank {rank} (pid {}) ended: {status}", child.id()));
                    lost.push(rank);
                }
                *place = None;
            }
            failed += lost.len();
            if !lost.is_empty() && !elastic {
                deadline.get_or_insert(Instant::now() + GRACE);
            }
            // A rank that succeeds has made the last epoch, which no process joins.
            let continues = elastic && succeeded == 0 && self.0.iter().any(Option::is_some);
            for rank in lost.into_iter().take(if continues { restarts } else { 0 }) {
                let child = replace().map_err(|error| format!("rank {rank} cannot be replaced: {error}"))?;
                restarts -= 1;
                complain(&format!("pid {} joins at the next epoch (restarts left: {restarts})", child.id()));
                self.0[rank] = Some(child);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
            // There is no wait for several children in the standard library; a run takes minutes.
            std::thread::sleep(Duration::from_millis(20));
        }
        let all_went_on = elastic && succeeded > 0;
        Ok(if failed == 0 || all_went_on { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.0.iter_mut().flatten() {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system has no random numbers: {error}"))?;
    Ok(bytes)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

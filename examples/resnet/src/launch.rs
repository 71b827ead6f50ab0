//! `--nproc`: ranks on this machine, started by the trainer itself.
//!
//! On one node ranks have a job name and a secret of their own, and meet at a store that the launcher serves, or at `--dist-url`, where
//! rank 0 serves it. With `--world-size` and `--rank`, which then count nodes, they meet at `--dist-url` in any case. `kolo run` does
//! more: it passes signals on and marks each line of output with its rank.

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use kolo::TcpStoreServer;

use crate::arguments::{ENVIRONMENT, TrainArgs};
use crate::progress::complain;

/// Tells a rank that it is one, so that it does not start others.
const STARTED: &str = "KOLO_RESNET_STARTED";

/// How long the others may take to end by themselves when a rank has failed: they notice at once, and say why.
const GRACE: Duration = Duration::from_secs(10);

/// How many ranks this process is to start; `None` if it is a rank itself.
pub(crate) fn ranks(args: &TrainArgs) -> Option<usize> {
    if std::env::var_os(STARTED).is_some() {
        return None;
    }
    args.nproc.or_else(|| args.multiprocessing_distributed.then(crate::cores))
}

/// Starts the ranks and waits for them.
pub(crate) fn launch(args: &TrainArgs, count: usize) -> Result<ExitCode, String> {
    let (nodes, node) = match (args.world_size.unwrap_or(1), args.rank) {
        (nodes, None) if nodes > 1 => {
            return Err(format!(
                "with --nproc --world-size counts nodes, of which there are {nodes}: say by --rank which this is"
            ));
        }
        (nodes, node) => (nodes, node.unwrap_or(0)),
    };
    if node >= nodes {
        return Err(format!("--rank {node} must be less than --world-size, which is {nodes}; with --nproc both count nodes"));
    }
    if let Some((launcher, tasks)) = outer(&|name| std::env::var(name).ok()).filter(|_| nodes == 1) {
        return Err(format!(
            "{launcher} has started {tasks} tasks, and with --nproc each of them would start ranks of its own: leave --nproc (or \
             --multiprocessing-distributed) out, or start one task on each node with --world-size and --rank"
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
    let mut ranks = Ranks(Vec::new());
    for local in 0..count {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env(STARTED, "1")
            .env("KOLO_RANK", (node * count + local).to_string())
            .env("KOLO_WORLD_SIZE", (nodes * count).to_string())
            .env("KOLO_LOCAL_RANK", local.to_string())
            .env("KOLO_LOCAL_WORLD_SIZE", count.to_string())
            .stdin(Stdio::null());
        if let Some(server) = &server {
            command.env("KOLO_STORE", server.url()).env("KOLO_STORE_SERVED", "1");
        }
        if nodes == 1 {
            command.env("KOLO_JOB_ID", &job).env("KOLO_SECRET", hexadecimal(&secret));
        }
        #[cfg(target_os = "linux")]
        die_with_parent(&mut command);
        ranks.0.push(Some(command.spawn().map_err(|error| format!("rank {local} cannot be started: {error}"))?));
    }
    ranks.wait(args.elastic)
}

/// What has started this process as one of several, and how many they are.
fn outer(env: &dyn Fn(&str) -> Option<String>) -> Option<(&'static str, usize)> {
    let known = [
        ("kolo run", "KOLO_RANK", "KOLO_WORLD_SIZE"),
        ("torchrun", "RANK", "WORLD_SIZE"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpirun", "PMI_RANK", "PMI_SIZE"),
        // A batch script has a task's number, too, but is no step.
        ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    ];
    known.into_iter().find_map(|(launcher, rank, size)| {
        let tasks = env(size)?.parse().ok()?;
        (env(rank).is_some() && tasks > 1).then_some((launcher, tasks))
    })
}

/// A rank does not outlive its launcher.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let launcher = Some(rustix::process::getpid());
    let arm = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // It may have died before that, and will not again.
        if rustix::process::getppid() == launcher { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; these are two system calls, and their errors are
    // numbers.
    unsafe {
        command.pre_exec(arm);
    }
}

/// The ranks that were started; `None` for those that have ended. What is left is killed in the end.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    fn wait(&mut self, elastic: bool) -> Result<ExitCode, String> {
        let mut failed = 0;
        let mut deadline: Option<Instant> = None;
        let count = self.0.len();
        while self.0.iter().any(Option::is_some) {
            for (rank, place) in self.0.iter_mut().enumerate() {
                let Some(child) = place else { continue };
                let Some(status) = child.try_wait().map_err(|error| format!("rank {rank} cannot be waited for: {error}"))? else {
                    continue;
                };
                if !status.success() {
                    failed += 1;
                    complain(&format!("rank {rank} (pid {}) ended: {status}", child.id()));
                    if !elastic {
                        deadline.get_or_insert(Instant::now() + GRACE);
                    }
                }
                *place = None;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
            // There is no wait for several children in the standard library; a run takes minutes.
            std::thread::sleep(Duration::from_millis(20));
        }
        let all_went_on = elastic && failed < count;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_of_several_tasks_are_known() {
        let found = |vars: &[(&str, &str)]| {
            outer(&|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(found(&[("RANK", "1"), ("WORLD_SIZE", "2")]), Some(("torchrun", 2)));
        assert_eq!(found(&[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "4")]), Some(("srun", 4)));
        assert_eq!(found(&[("KOLO_RANK", "0"), ("KOLO_WORLD_SIZE", "1")]), None);
        // A batch script, and what somebody exported.
        assert_eq!(found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
        assert_eq!(found(&[("WORLD_SIZE", "2")]), None);
    }
}

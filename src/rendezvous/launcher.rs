//! Detects what launched this process, and reads the rank and the world size from it.
//!
//! Launchers are recognised by their environment variables, the most specific first. A process of
//! mpirun inside a SLURM allocation has the variables of both, and those of mpirun count.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use crate::config::{Env, parse};
use crate::error::{Error, Result};
use crate::rendezvous::store::StoreUrl;
use crate::sys;
use crate::types::mix;

/// What a launcher tells its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// The launcher's name, for messages.
    pub(crate) launcher: &'static str,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The name of the job, which distinguishes it from other jobs.
    pub(crate) job: String,
    pub(crate) rendezvous: Rendezvous,
}

/// Where the ranks of a launcher's job can find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rendezvous {
    Store(StoreUrl),
    /// Rank 0 serves the store at the first of these ports that is free. The others try all of
    /// them.
    Ports {
        host: String,
        ports: Vec<u16>,
    },
    /// The launcher does not say. The advice is for the user.
    Unknown {
        advice: String,
    },
}

/// All variables that are looked for, for the error that none was found.
pub(crate) const LOOKED_FOR: &str = "KOLO_RANK and KOLO_WORLD_SIZE (kolo run); RANK and WORLD_SIZE (torchrun, plain); \
     OMPI_COMM_WORLD_RANK and _SIZE (Open MPI); PMI_RANK and PMI_SIZE (MPICH, Intel MPI); MV2_COMM_WORLD_RANK and _SIZE \
     (MVAPICH); PALS_RANKID (PALS); FLUX_TASK_RANK (Flux); JSM_NAMESPACE_RANK and _SIZE (LSF); PMIX_RANK (PMIx); \
     SLURM_PROCID and SLURM_NTASKS (srun); JOB_COMPLETION_INDEX (Kubernetes)";

/// A launcher that puts rank and world size into variables.
struct Known {
    launcher: &'static str,
    rank: &'static str,
    size: &'static [&'static str],
    local_size: &'static str,
    /// Variables that distinguish its jobs.
    job: &'static [&'static str],
}

const KNOWN: [Known; 7] = [
    Known {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Known {
        launcher: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        size: &["MV2_COMM_WORLD_SIZE"],
        local_size: "MV2_COMM_WORLD_LOCAL_SIZE",
        job: &[],
    },
    Known { launcher: "MPICH or Intel MPI", rank: "PMI_RANK", size: &["PMI_SIZE"], local_size: "MPI_LOCALNRANKS", job: &[] },
    Known {
        launcher: "PALS",
        rank: "PALS_RANKID",
        size: &["PALS_SIZE", "PMI_SIZE", "WORLD_SIZE"],
        local_size: "PALS_LOCAL_SIZE",
        job: &["PALS_APID"],
    },
    Known {
        launcher: "Flux",
        rank: "FLUX_TASK_RANK",
        size: &["FLUX_JOB_SIZE"],
        local_size: "FLUX_TASK_LOCAL_SIZE",
        job: &["FLUX_JOB_ID"],
    },
    Known {
        launcher: "LSF",
        rank: "JSM_NAMESPACE_RANK",
        size: &["JSM_NAMESPACE_SIZE"],
        local_size: "JSM_NAMESPACE_LOCAL_SIZE",
        job: &["LSB_JOBID", "JSM_JSRUN_NO"],
    },
    Known {
        launcher: "PMIx",
        rank: "PMIX_RANK",
        size: &["PMIX_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_size: "PMIX_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE"],
    },
];

/// Returns what launched this process; `None` if no launcher did, and the process is alone.
pub(crate) fn detect(env: Env<'_>) -> Result<Option<Launch>> {
    if let Some(launch) = kolo(env)? {
        return Ok(Some(launch));
    }
    if let Some(launch) = torchrun(env)? {
        return Ok(Some(launch));
    }
    for known in &KNOWN {
        // srun sets the variables of PMIx and PMI, too. The launcher is still srun.
        if known.rank.starts_with("PMI") && env("SLURM_STEP_ID").is_some() && env("SLURM_PROCID") == env(known.rank) {
            continue;
        }
        if let Some(launch) = mpi(env, known)? {
            return Ok(Some(launch));
        }
    }
    if let Some(launch) = plain(env)? {
        return Ok(Some(launch));
    }
    if let Some(launch) = slurm(env)? {
        return Ok(Some(launch));
    }
    // With a size but without a rank, each process would believe that it is alone.
    for name in ["KOLO_WORLD_SIZE", "WORLD_SIZE"] {
        if number(env, name)?.is_some_and(|size| size > 1) {
            let found = format!("{name} is more than 1, but no variable has the rank of this process");
            return Err(Error::NoLauncher { found, looked_for: LOOKED_FOR.to_owned() });
        }
    }
    Ok(None)
}

/// Returns whether this process is the first of its job on this host, if the launcher says so.
pub(crate) fn is_first_of_host(env: Env<'_>) -> Option<bool> {
    const LOCAL_RANKS: [&str; 9] = [
        "KOLO_LOCAL_RANK",
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PALS_LOCAL_RANKID",
        "FLUX_TASK_LOCAL_ID",
        "JSM_NAMESPACE_LOCAL_RANK",
        "SLURM_LOCALID",
    ];
    LOCAL_RANKS.into_iter().find_map(env).map(|rank| rank.trim() == "0")
}

fn number(env: Env<'_>, name: &str) -> Result<Option<usize>> {
    parse(env, name, "a whole number", |text| text.parse().ok())
}

/// Returns the world size that belongs to a rank, from the first variable that is set.
fn size(env: Env<'_>, launcher: &str, (rank_name, rank): (&str, usize), names: &[&str]) -> Result<usize> {
    for name in names {
        match number(env, name)? {
            None => {}
            Some(0) => return Err(Error::setting(*name, "0", "a world size of at least 1")),
            Some(size) if rank >= size => {
                return Err(Error::setting(
                    rank_name,
                    rank.to_string(),
                    format!("a rank less than the world size, {name}={size}"),
                ));
            }
            Some(size) => return Ok(size),
        }
    }
    Err(Error::NoLauncher {
        found: format!("{rank_name} is set as by {launcher}, but {} is not", names.join(" or ")),
        looked_for: LOOKED_FOR.to_owned(),
    })
}

/// Detects `kolo run`, or its variables set by hand.
fn kolo(env: Env<'_>) -> Result<Option<Launch>> {
    let Some(rank) = number(env, "KOLO_RANK")? else { return Ok(None) };
    let world_size = size(env, "kolo run", ("KOLO_RANK", rank), &["KOLO_WORLD_SIZE"])?;
    let rendezvous = master(env, "kolo")?.unwrap_or(Rendezvous::Unknown { advice: "set KOLO_STORE".to_owned() });
    Ok(Some(Launch { launcher: "kolo run", rank, world_size, job: "kolo".to_owned(), rendezvous }))
}

/// Detects torchrun. If its agent already serves PyTorch's own store at MASTER_PORT, rank 0 uses
/// another port, derived from variables that all ranks of this attempt share.
fn torchrun(env: Env<'_>) -> Result<Option<Launch>> {
    let Some(run) = env("TORCHELASTIC_RUN_ID") else { return Ok(None) };
    let Some(rank) = number(env, "RANK")? else { return Ok(None) };
    let world_size = size(env, "torchrun", ("RANK", rank), &["WORLD_SIZE"])?;
    let restart = env("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    let port = env("MASTER_PORT").unwrap_or_default();
    let job = format!("torchrun {run} {restart} {port}");
    let agent_has_port = env("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let rendezvous = match (env("MASTER_ADDR"), master(env, &job)?) {
        (Some(host), _) if agent_has_port => Rendezvous::Ports { host, ports: ports(&job) },
        (_, Some(rendezvous)) => rendezvous,
        _ => Rendezvous::Unknown { advice: "MASTER_ADDR is not set".to_owned() },
    };
    Ok(Some(Launch { launcher: "torchrun", rank, world_size, job, rendezvous }))
}

/// Detects RANK and WORLD_SIZE, as PyTorch's `env://` and Kubeflow set them, and an indexed
/// Kubernetes job.
fn plain(env: Env<'_>) -> Result<Option<Launch>> {
    let (launcher, rank_name, rank) = match (number(env, "RANK")?, number(env, "JOB_COMPLETION_INDEX")?) {
        (Some(rank), _) => ("plain variables", "RANK", rank),
        (None, Some(index)) => ("a Kubernetes job", "JOB_COMPLETION_INDEX", index),
        (None, None) => return Ok(None),
    };
    // The ranks of a PyTorchJob are its pods, in each of which a torchrun should start.
    if let (Some(per_pod), None) =
        (number(env, "PET_NPROC_PER_NODE").ok().flatten().filter(|&count| count > 1), env("LOCAL_RANK"))
    {
        return Err(Error::NoLauncher {
            found: format!(
                "RANK and WORLD_SIZE count pods that are to have {per_pod} processes each; start the program with torchrun"
            ),
            looked_for: LOOKED_FOR.to_owned(),
        });
    }
    let world_size = size(env, launcher, (rank_name, rank), &["WORLD_SIZE"])?;
    let rendezvous = master(env, "env")?.unwrap_or(Rendezvous::Unknown {
        advice: "set MASTER_ADDR and MASTER_PORT to an address of rank 0, or KOLO_STORE".to_owned(),
    });
    Ok(Some(Launch { launcher, rank, world_size, job: "env".to_owned(), rendezvous }))
}

/// Detects mpirun and similar launchers. kolo cannot use their rendezvous. If all ranks are on one
/// host, it needs none.
fn mpi(env: Env<'_>, known: &Known) -> Result<Option<Launch>> {
    let Some(rank) = number(env, known.rank)? else { return Ok(None) };
    let world_size = size(env, known.launcher, (known.rank, rank), known.size)?;
    let local_size = number(env, known.local_size)?;
    let is_local = local_size == Some(world_size);
    let job = match known.job.iter().find_map(|name| env(name)) {
        Some(job) => format!("{} {job}", known.launcher),
        // No variable names the job, but the processes of one mpirun on one host have one parent.
        None if is_local => format!("{} of {}", known.launcher, sys::parent()),
        None => known.launcher.to_owned(),
    };
    let rendezvous = match master(env, &job)? {
        Some(rendezvous) => rendezvous,
        None if is_local => Rendezvous::Ports { host: "127.0.0.1".to_owned(), ports: ports(&job) },
        None => Rendezvous::Unknown {
            advice:
                "ranks on several hosts need MASTER_ADDR (and MASTER_PORT, if its default is taken) or KOLO_STORE; pass one on \
                     with mpirun's -x or -genv"
                    .to_owned(),
        },
    };
    Ok(Some(Launch { launcher: known.launcher, rank, world_size, job, rendezvous }))
}

/// Detects srun.
fn slurm(env: Env<'_>) -> Result<Option<Launch>> {
    let Some(rank) = number(env, "SLURM_PROCID")? else { return Ok(None) };
    let world_size = size(env, "srun", ("SLURM_PROCID", rank), &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    if world_size > 1 && env("SLURM_STEP_ID").or_else(|| env("SLURM_STEPID")).is_none() && env("SLURM_JOB_ID").is_some() {
        return Err(Error::NoLauncher {
            found: "this process was started by a SLURM batch script, not by srun, so it is only one of its tasks; put `srun` before the \
                    command"
                .to_owned(),
            looked_for: LOOKED_FOR.to_owned(),
        });
    }
    let text = |names: [&str; 2]| names.into_iter().find_map(env).unwrap_or_default();
    let (id, step) = (text(["SLURM_JOB_ID", "SLURM_JOBID"]), text(["SLURM_STEP_ID", "SLURM_STEPID"]));
    let job = format!("slurm {id}.{step}");
    let hosts = ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find_map(env);
    // Rank 0 is on the first host, unless the user has distributed the ranks.
    let is_arbitrary = env("SLURM_DISTRIBUTION").is_some_and(|how| how.starts_with("arbitrary"));
    let rendezvous = match (master(env, &job)?, hosts.as_deref().and_then(first_host)) {
        (Some(rendezvous), _) => rendezvous,
        (None, _) if is_arbitrary && hosts.as_deref().is_some_and(|list| list.contains([',', '['])) => Rendezvous::Unknown {
            advice: "srun does not say on which host rank 0 is if ranks are distributed as \"arbitrary\"; set MASTER_ADDR to that host, \
                     or KOLO_STORE"
                .to_owned(),
        },
        (None, Some(host)) => Rendezvous::Ports { host, ports: ports(&job) },
        (None, None) => {
            Rendezvous::Unknown { advice: "SLURM_STEP_NODELIST is not set; set MASTER_ADDR or KOLO_STORE".to_owned() }
        }
    };
    Ok(Some(Launch { launcher: "srun", rank, world_size, job, rendezvous }))
}

/// Returns the store at MASTER_ADDR and MASTER_PORT (or Kubeflow's names for them). If only the
/// address is set, the ports are derived from the job.
fn master(env: Env<'_>, job: &str) -> Result<Option<Rendezvous>> {
    let Some(host) = env("MASTER_ADDR").or_else(|| env("PET_MASTER_ADDR")) else { return Ok(None) };
    let expected = "a port, 0 to 65535";
    let port = ["MASTER_PORT", "PET_MASTER_PORT"]
        .into_iter()
        .find_map(|name| parse(env, name, expected, |text| text.parse().ok()).transpose());
    Ok(Some(match port.transpose()? {
        Some(port) => Rendezvous::Store(StoreUrl::Tcp { host, port }),
        None => Rendezvous::Ports { host, ports: ports(job) },
    }))
}

/// Returns the store of `env://`.
pub(crate) fn env_store(env: Env<'_>) -> Result<StoreUrl> {
    match master(env, "env")? {
        Some(Rendezvous::Store(url)) => Ok(url),
        _ => Err(Error::setting("store", "env://", "MASTER_ADDR and MASTER_PORT must be set for it")),
    }
}

/// Derives ports from the name of a job, the same on all ranks. They are below those of outgoing
/// connections.
fn ports(job: &str) -> Vec<u16> {
    let hash = job.bytes().fold(0, |hash, byte| mix(hash, byte.into()));
    (0..6).map(|i| 20_000 + (mix(hash, i) % 12_000) as u16).collect()
}

/// Moves ports that were derived from the name of a job into a range, the same on all ranks.
pub(crate) fn ports_within(derived: &[u16], range: Option<&RangeInclusive<u16>>) -> Vec<u16> {
    let Some(range) = range else { return derived.to_vec() };
    let mut ports: Vec<u16> =
        derived.iter().map(|port| range.start() + port % (range.end() - range.start()).saturating_add(1)).collect();
    ports.extend(range.clone().take(derived.len()));
    let mut seen = HashSet::new();
    ports.retain(|port| seen.insert(*port));
    ports.truncate(derived.len());
    ports
}

/// Returns the first host of a SLURM list such as `node[07-12,15],gpu1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(ranges) = rest.strip_prefix('[') else { return (!name.is_empty()).then(|| name.to_owned()) };
    let (ranges, rest) = ranges.split_once(']')?;
    let first = ranges.split([',', '-']).next()?;
    // `rack[1-2]node[3-4]` has several lists.
    let tail = first_host(rest.split(',').next()?);
    Some(format!("{name}{first}{}", tail.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        detect(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    fn launch(variables: &[(&str, &str)]) -> Launch {
        detected(variables).unwrap().unwrap()
    }

    fn tcp(host: &str, port: u16) -> Rendezvous {
        Rendezvous::Store(StoreUrl::Tcp { host: host.to_owned(), port })
    }

    #[test]
    fn ports_of_a_job_lie_within_a_range() {
        let derived = ports("a job");
        assert_eq!(ports_within(&derived, None), derived);
        for range in [1..=65535, 40_000..=40_100, 7..=8, 65535..=65535] {
            let ports = ports_within(&derived, Some(&range));
            let distinct: HashSet<_> = ports.iter().collect();
            assert!(ports.iter().all(|port| range.contains(port)) && distinct.len() == ports.len(), "{range:?}: {ports:?}");
            assert_eq!(ports.len(), range.len().min(6), "{range:?}");
        }
    }

    #[test]
    fn every_launcher_of_the_table() {
        let master = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        let cases: [(&str, &[(&str, &str)]); 12] = [
            ("kolo run", &[("KOLO_RANK", "2"), ("KOLO_WORLD_SIZE", "4")]),
            ("torchrun", &[("TORCHELASTIC_RUN_ID", "x"), ("RANK", "2"), ("WORLD_SIZE", "4")]),
            ("plain variables", &[("RANK", "2"), ("WORLD_SIZE", "4")]),
            ("a Kubernetes job", &[("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4")]),
            ("Open MPI", &[("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "2")]),
            ("MPICH or Intel MPI", &[("PMI_RANK", "2"), ("PMI_SIZE", "4")]),
            ("MVAPICH", &[("MV2_COMM_WORLD_RANK", "2"), ("MV2_COMM_WORLD_SIZE", "4")]),
            ("PALS", &[("PALS_RANKID", "2"), ("PALS_SIZE", "4")]),
            ("Flux", &[("FLUX_TASK_RANK", "2"), ("FLUX_JOB_SIZE", "4")]),
            ("LSF", &[("JSM_NAMESPACE_RANK", "2"), ("JSM_NAMESPACE_SIZE", "4")]),
            ("PMIx", &[("PMIX_RANK", "2"), ("PMIX_SIZE", "4")]),
            (
                "srun",
                &[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("PMI_RANK", "2"), ("PMI_SIZE", "4"), ("SLURM_STEP_ID", "0")],
            ),
        ];
        for (launcher, variables) in cases {
            let found = launch(&[variables, &master].concat());
            assert_eq!((found.launcher, found.rank, found.world_size), (launcher, 2, 4));
            assert_eq!(found.rendezvous, tcp("10.0.0.1", 29500), "{launcher}");
        }
        assert_eq!(detected(&[]).unwrap(), None);
        assert_eq!(detected(&[("WORLD_SIZE", "1")]).unwrap(), None);
        for name in ["WORLD_SIZE", "KOLO_WORLD_SIZE"] {
            assert!(detected(&[(name, "4")]).unwrap_err().to_string().contains(name));
        }
        assert!(detected(&[("JOB_COMPLETION_INDEX", "1")]).unwrap_err().to_string().contains("WORLD_SIZE"));
        let pods = [("RANK", "0"), ("WORLD_SIZE", "2"), ("PET_NPROC_PER_NODE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        assert!(detected(&pods).unwrap_err().to_string().contains("torchrun"));
        assert!(detected(&[&pods[..], &[("LOCAL_RANK", "0")]].concat()).is_ok());
    }

    #[test]
    fn torchruns_agent_keeps_its_port() {
        let variables = [
            ("TORCHELASTIC_RUN_ID", "x"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
        ];
        let mut restarted = variables;
        restarted[6].1 = "1";
        match (launch(&variables), launch(&restarted)) {
            (
                Launch { rendezvous: Rendezvous::Ports { host, ports }, job, .. },
                Launch { rendezvous: Rendezvous::Ports { ports: later, .. }, job: later_job, .. },
            ) => {
                assert_eq!(host, "127.0.0.1");
                assert!(!ports.contains(&29500) && ports.len() > 1);
                assert!(ports != later && job != later_job, "a restart is another job");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn mpi_on_one_host_needs_no_address_and_on_several_says_what_it_needs() {
        let open_mpi = |local| {
            [
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", local),
                ("PMIX_NAMESPACE", "77"),
            ]
        };
        assert!(matches!(launch(&open_mpi("4")).rendezvous, Rendezvous::Ports { host, .. } if host == "127.0.0.1"));
        assert!(matches!(launch(&open_mpi("2")).rendezvous, Rendezvous::Unknown { advice } if advice.contains("MASTER_ADDR")));
    }

    #[test]
    fn slurm_finds_rank_0_by_the_first_host() {
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_ID", "5"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "node[07-12,15],gpu1"),
        ];
        let found = launch(&step);
        assert_eq!((found.rank, found.world_size, &*found.job), (1, 2, "slurm 5.0"));
        assert!(matches!(found.rendezvous, Rendezvous::Ports { host, .. } if host == "node07"));
        let apart = [&step[..], &[("SLURM_DISTRIBUTION", "arbitrary")]].concat();
        assert!(matches!(launch(&apart).rendezvous, Rendezvous::Unknown { advice } if advice.contains("set MASTER_ADDR")));
        let told = [&apart[..], &[("MASTER_ADDR", "node15")]].concat();
        assert!(matches!(launch(&told).rendezvous, Rendezvous::Ports { host, .. } if host == "node15"));
        let error = detected(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")]).unwrap_err().to_string();
        assert!(error.contains("put `srun` before"), "{error}");
    }

    #[test]
    fn host_lists() {
        for (list, first) in [
            ("localhost", Some("localhost")),
            ("a,b", Some("a")),
            ("n[1-3]", Some("n1")),
            ("n[007,9]", Some("n007")),
            ("rack[1-2]node[3-4],x", Some("rack1node3")),
            ("n[1-3]-ib,m", Some("n1-ib")),
            ("", None),
            ("n[1", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn half_of_what_is_needed_is_an_error_that_lists_what_is_looked_for() {
        let error = detected(&[("RANK", "0")]).unwrap_err().to_string();
        assert!(error.contains("WORLD_SIZE is not") && error.contains("OMPI_COMM_WORLD_RANK"), "{error}");
        let error = detected(&[("RANK", "4"), ("WORLD_SIZE", "4")]).unwrap_err().to_string();
        assert!(error.contains("RANK=\"4\": a rank less than the world size, WORLD_SIZE=4"), "{error}");
        let error = detected(&[("KOLO_RANK", "0"), ("KOLO_WORLD_SIZE", "0")]).unwrap_err().to_string();
        assert!(error.contains("KOLO_WORLD_SIZE=\"0\": a world size of at least 1"), "{error}");
        let error = detected(&[("PMI_RANK", "one"), ("PMI_SIZE", "4")]).unwrap_err().to_string();
        assert!(error.contains("PMI_RANK=\"one\""), "{error}");
    }
}

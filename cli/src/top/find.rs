//! Finds the job that is to be shown.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kolo::observer::{Observer, Silence};

use super::Args;
use crate::run::FailureFolder;
use crate::run::process::temporary;
use crate::units::count;

/// How long a store may take.
const STORE: Duration = Duration::from_secs(10);

/// How long the ranks of a job may take to show that one of them lives.
const ANSWER: Duration = Duration::from_secs(1);

pub(super) fn find(args: &Args) -> Result<Observer, String> {
    // As in the settings of a rank, an empty variable counts as not set.
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let folder = args.dir.clone().or_else(|| variable("KOLO_TOP_DIR").filter(|_| args.store.is_none()).map(PathBuf::from));
    let url = args.store.clone().or_else(|| variable("KOLO_STORE").map(|url| url.to_string_lossy().into_owned()));
    let job = args.job.clone().or_else(|| variable("KOLO_JOB_ID").map(|job| job.to_string_lossy().into_owned()));
    match (folder, url) {
        (None, Some(url)) => in_store(args, &url, job.as_deref().unwrap_or("kolo")),
        (folder, _) => in_folders(folder.as_deref(), job.as_deref()),
    }
}

/// Finds a job as its ranks do.
fn in_store(args: &Args, url: &str, job: &str) -> Result<Observer, String> {
    let deadline = Instant::now() + STORE;
    let secret = match &args.secret_file {
        Some(file) => kolo::settings::secret_in("--secret-file", file, deadline).map(Some),
        None => kolo::settings::secret_of_environment(),
    };
    let secret = secret.map_err(|error| error.to_string())?;
    let found = Observer::of_store(url, job, secret, deadline).map_err(|error| {
        if let kolo::Error::Store { store, problem: kolo::StoreError::Unreachable { waited, last } } = &error {
            return format!(
                "the store {store} has not answered within {waited:.1?} ({last}); check the address. A store that rank 0 serves, or a \
                 file, ends after the rendezvous; for such a job, set KOLO_TOP_DIR for the ranks and for kolo top"
            );
        }
        format!(
            "{error}\nkolo top needs the secret and the job's name that the ranks have (--secret-file, --job). A store that rank 0 \
             serves, or a file, ends after the rendezvous; for such a job, set KOLO_TOP_DIR for the ranks and for kolo top"
        )
    })?;
    found.ok_or_else(|| format!("no job {job:?} has started in the store {url}"))
}

/// Finds a job of this user on this machine.
fn in_folders(folder: Option<&Path>, wanted: Option<&str>) -> Result<Observer, String> {
    let mut jobs = jobs(folder)?;
    if let Some(wanted) = wanted {
        jobs.retain(|(_, job)| job.job() == wanted || job.run().starts_with(wanted));
    }
    // Of several runs of one job, the last one counts.
    jobs.sort_by_key(|(written, _)| std::cmp::Reverse(*written));
    let mut living: Vec<Observer> = Vec::new();
    for (_, job) in jobs {
        if living.iter().all(|other| other.job() != job.job()) && lives(&job) {
            living.push(job);
        }
    }
    match living.len() {
        1 => Ok(living.remove(0)),
        0 => Err(match (wanted, folder) {
            (Some(job), _) => format!("no job {job:?} of this user runs here"),
            (None, Some(folder)) => format!("no job runs whose ranks have written a file to {}", folder.display()),
            (None, None) => {
                "no job of this user that `kolo run` has started runs on this machine; for a job of another launcher, \
                             set KOLO_TOP_DIR to a folder of yours for the ranks and for kolo top, or give --store"
                    .to_owned()
            }
        }),
        _ => {
            let mut text = "several jobs run here; choose one with --job:".to_owned();
            for job in &living {
                let peers = job.peers();
                text += &format!("\n  {}  run {}, {}", job.job(), job.run(), count(peers.len(), "rank"));
                text +=
                    &peers.first().map_or_else(String::new, |first| format!(", rank 0 is pid {} on {}", first.pid, first.host));
            }
            Err(text)
        }
    }
}

/// Returns the jobs that have left files, and when those were written.
fn jobs(folder: Option<&Path>) -> Result<Vec<(SystemTime, Observer)>, String> {
    let unread = |folder: &Path, error: std::io::Error| {
        format!("{} cannot be read: {error}; give the folder that the ranks have as KOLO_TOP_DIR (--dir)", folder.display())
    };
    let mut found = Vec::new();
    match folder {
        Some(folder) => found = Observer::of_folder(folder).map_err(|error| unread(folder, error))?,
        None => {
            let folders = FailureFolder::of_all_jobs();
            for folder in folders.map_err(|error| unread(&temporary(), error))? {
                // It may be another user's, or may just have been removed.
                found.extend(Observer::of_folder(&folder).unwrap_or_default());
            }
        }
    }
    let written = |path: &PathBuf| path.metadata().and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    Ok(found.into_iter().map(|(path, job)| (written(&path), job)).collect())
}

/// Returns whether a rank of a job still runs. A job that was killed leaves its file.
fn lives(job: &Observer) -> bool {
    let deadline = Instant::now() + ANSWER;
    let (next, ranks, lives) = (AtomicUsize::new(0), job.peers().len(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..ranks.min(16) {
            scope.spawn(|| {
                while !lives.load(Ordering::Relaxed) && Instant::now() < deadline {
                    let rank = next.fetch_add(1, Ordering::Relaxed);
                    if rank >= ranks {
                        break;
                    }
                    if !matches!(job.ask(rank, deadline), Err(Silence::Gone | Silence::Unreachable(_))) {
                        lives.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    lives.into_inner()
}

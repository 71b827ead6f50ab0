//! Connecting all ranks of a job: the options, and how a communicator starts.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connect::{connect, info};
use super::{Communicator, join};
use crate::config::choices::*;
use crate::config::kinds::*;
use crate::config::{self, Options, Settings, own_settings, process_env, shared_settings};
use crate::error::{Error, Result};
use crate::exec::Core;
use crate::failure::{StatusBoard, name_refused_call, wait_check};
use crate::network::fabric::Fabric;
use crate::network::identity::Identity;
use crate::rendezvous::admission::Job;
use crate::rendezvous::launcher::{self, LOOKED_FOR, Launch, Rendezvous};
use crate::rendezvous::store::{Store, WatchedStore, masked};
use crate::rendezvous::store_source::StoreSource;
use crate::rendezvous::{MOST_RANKS, Start};
use crate::schedule::Algorithm;
use crate::schedule::select::CostModel;
use crate::sys;
use crate::trace::{self, RankOfJob, Recorder};
use crate::transport::memory::Hub;
use crate::types::{Member, Op, Rank};

/// Options for connecting. An option that is not set comes from its environment variable, then from
/// the launcher, then from its default; see [`crate::settings`].
///
/// ```no_run
/// # fn main() -> kolo::Result<()> {
/// use std::time::Duration;
/// let comm = kolo::Communicator::builder()
///     .store("tcp://10.0.0.1:29500")
///     .rank(3)
///     .world_size(8)
///     .timeout(Duration::from_secs(30))
///     .connect()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct Builder {
    rank: Option<Rank>,
    world_size: Option<usize>,
    store: Option<String>,
    store_object: Option<Arc<dyn Store>>,
    store_ends_with_start: bool,
    store_is_served: bool,
    job: Option<String>,
    secret: Option<[u8; 32]>,
    secret_file: Option<PathBuf>,
    list_lifetime: Option<Duration>,
    options: Options,
}

/// Whether there is a secret, but not the secret, and the URL of the store without its password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Builder { rank, world_size, store, store_object, store_is_served, job, secret, secret_file, options, .. } = self;
        f.debug_struct("Builder")
            .field("rank", rank)
            .field("world_size", world_size)
            .field("store", &store.as_deref().map(masked))
            .field("store_object", &store_object.as_ref().map(|store| store.url()))
            .field("store_is_served", store_is_served)
            .field("job", job)
            .field("secret", &secret.map(|_| "***"))
            .field("secret_file", secret_file)
            .field("options", options)
            .finish()
    }
}

/// Defines a method of [`Builder`] for each row of the table of settings.
macro_rules! define_methods {
    (
        ($builder:ident) => $options:expr;
        $($(#[$doc:meta])* $name:ident($($argument:ident: $given:ty),+) as $kind:ty = $default:expr, $($variable:literal),+;)*
    ) => {
        impl Builder {
            $(
                $(#[$doc])*
                pub fn $name(mut self, $($argument: $given),+) -> Self {
                    let $builder = &mut self;
                    $options.$name = Some(<$kind as Kind>::check(stringify!($name), ($($argument.into()),+)));
                    self
                }
            )*
        }
    };
}

shared_settings! { define_methods! { (builder) => builder.options.shared; } }
own_settings! { define_methods! { (builder) => builder.options; } }

impl Builder {
    /// Sets the rank of this process.
    pub fn rank(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Sets the number of ranks.
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.world_size = Some(world_size);
        self
    }

    /// Sets the URL of the store where ranks find each other: `file:///path`, `tcp://host:port`,
    /// `redis://host:port`, `rediss://host:port`, `env://`.
    pub fn store(mut self, url: impl Into<String>) -> Self {
        self.store = Some(url.into());
        self
    }

    /// Sets a store of the caller's own where ranks find each other.
    pub fn store_object(mut self, store: Arc<dyn Store>) -> Self {
        self.store_object = Some(store);
        self
    }

    /// Drops the store object when the ranks have connected. The communicator does not grow.
    #[doc(hidden)]
    pub fn store_for_start_only(mut self) -> Self {
        self.store_ends_with_start = true;
        self
    }

    /// Has rank 0 not serve the `tcp://` store, because a [`TcpStoreServer`](crate::TcpStoreServer)
    /// does. A program that binds one to port 0 learns the port before any rank connects.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// let server = kolo::TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "job", None)?;
    /// println!("start the other ranks with KOLO_STORE={}", server.url());
    /// let rank = |rank: usize| kolo::Communicator::builder().store(server.url()).store_is_served().job("job").rank(rank).world_size(2);
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| rank(1).connect().unwrap().barrier().unwrap());
    ///     rank(0).connect()?.barrier()
    /// })
    /// # }
    /// ```
    pub fn store_is_served(mut self) -> Self {
        self.store_is_served = true;
        self
    }

    /// Sets the name of the job, which distinguishes it from others that use the same store.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = Some(job.into());
        self
    }

    /// Sets the secret of the job, with which its ranks authenticate each other.
    pub fn secret(mut self, secret: [u8; 32]) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Sets a file with the secret of the job as 64 hexadecimal digits. The file belongs to the
    /// user of this process, and no other user may open it. [`Builder::secret`] takes precedence.
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.secret_file = Some(path.into());
        self
    }

    /// Sets an option from text, in the syntax of its variable: `set("copy_mode", "cma")?` for
    /// `KOLO_COPY_MODE=cma`. `tls` takes three paths and `cost_model` a latency and a bandwidth, with
    /// commas between them. Rank, world size, store, job and secret have only their methods.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if no option has the name, or if its value is wrong.
    pub fn set(mut self, name: &str, value: &str) -> Result<Self> {
        self.options.set(name, value)?;
        Ok(self)
    }

    /// Sets after which time a waiting list is replaced. For tests.
    #[doc(hidden)]
    pub fn waiting_list_lifetime(mut self, lifetime: Duration) -> Self {
        self.list_lifetime = Some(lifetime);
        self
    }

    /// Connects with all other ranks. Returns when all ranks have connected.
    ///
    /// # Errors
    ///
    /// See [`Communicator::from_env`]. With [`Builder::join`], [`Error::NotAdmitted`] if the ranks of
    /// the job did not admit this process within the start timeout.
    pub fn connect(self) -> Result<Communicator> {
        wait_check::begin();
        self.try_to_connect().map_err(|error| match wait_check::has_stopped() {
            true => Error::Aborted { op: Op::Connect, seq: 0 },
            false => name_refused_call(error),
        })
    }

    fn try_to_connect(self) -> Result<Communicator> {
        let began = Instant::now();
        let settings = self.settings()?;
        let launch = if settings.join { self.launch_of_newcomer() } else { self.launch() };
        // A misspelt variable may be why there is no launch.
        config::warn_of_unknown_variables(|| {
            launcher::is_first_of_host(&process_env).unwrap_or_else(|| launch.as_ref().map_or(true, |launch| launch.rank == 0))
        });
        let launch = launch?;
        let deadline = began + settings.start_timeout;
        let secret = match (self.secret, &self.secret_file) {
            (Some(secret), _) => Some(secret),
            (None, Some(path)) => Some(config::secret_in("secret_file", path, deadline)?),
            (None, None) => config::secret_of(&process_env, deadline)?,
        };
        let job = self.job.clone().or_else(|| process_env("KOLO_JOB_ID")).unwrap_or_else(|| launch.job.clone());
        let identity = Identity::new(&job, secret).insecure(settings.insecure);
        let Launch { launcher, rank, world_size, .. } = launch;
        let mut source = self.store_source(launch, &settings);
        if settings.join {
            return join::join(self.job_of(identity, settings, source), began);
        }
        if world_size == 1 {
            let alone = Communicator::alone(settings.clone())?;
            if self.store_ends_with_start {
                return Ok(alone);
            }
            return Ok(alone.of_job(Arc::new(self.job_of(identity, settings, source))));
        }
        let (store, store_url) = source.open(rank == 0, &identity, deadline)?;
        source.keep_port(&*store, store_url.as_ref());
        let store = if wait_check::has_wait_check() { Arc::new(WatchedStore::new(store)) } else { store };
        crate::log::info!(rank, world_size, launcher, job, store = store.url(), "connecting");
        let given = identity.clone();
        let start = Start { rank, world_size, identity, store: &*store, store_url, settings: &settings, deadline, absence: None };
        let (core, info, identity) = connect(&start)?;
        // All ranks have connected: the store is not needed before a growth.
        drop(store);
        let comm = Communicator::new(core, info);
        if self.store_ends_with_start {
            return Ok(comm);
        }
        let job = self.job_of(given, settings, source);
        job.keep(identity);
        Ok(comm.of_job(Arc::new(job)))
    }

    fn job_of(&self, given: Identity, settings: Settings, source: StoreSource) -> Job {
        let job = Job::new(given, settings, source);
        match self.list_lifetime {
            Some(lifetime) => job.list_lifetime(lifetime),
            None => job,
        }
    }

    /// The settings: the options, otherwise the environment variables.
    fn settings(&self) -> Result<Settings> {
        let mut settings = Settings::from_env(&process_env)?;
        self.options.clone().apply(&mut settings)?;
        trace::prepare(settings.trace_dir.as_ref(), settings.trace_signal, Instant::now() + settings.start_timeout)?;
        Ok(settings)
    }

    /// A newcomer has no rank. The launcher may know the job and its store.
    fn launch_of_newcomer(&self) -> Result<Launch> {
        if self.rank.is_some() || self.world_size.is_some() {
            return Err(Error::setting(
                "join",
                "true",
                "a newcomer has no rank and no world size, which the ranks of the job choose: set neither",
            ));
        }
        let found = launcher::detect(&process_env).ok().flatten();
        let advice = "name the job's with Builder::store or KOLO_STORE".to_owned();
        let (launcher, job, rendezvous) = match found {
            Some(launch) => (launch.launcher, launch.job, launch.rendezvous),
            None => ("KOLO_JOIN", "kolo".to_owned(), Rendezvous::Unknown { advice }),
        };
        Ok(Launch { launcher, rank: 0, world_size: 0, job, rendezvous })
    }

    /// Rank and world size: the options, otherwise those of the launcher.
    fn launch(&self) -> Result<Launch> {
        let Builder { rank, world_size, .. } = *self;
        let launch = match (rank, world_size) {
            (Some(rank), Some(world_size)) => Launch {
                launcher: "the program",
                rank,
                world_size,
                job: "kolo".to_owned(),
                rendezvous: Rendezvous::Unknown { advice: "name one with Builder::store or KOLO_STORE".to_owned() },
            },
            (None, None) => launcher::detect(&process_env)?.unwrap_or_else(|| Launch {
                launcher: "none",
                rank: 0,
                world_size: 1,
                job: "kolo".to_owned(),
                rendezvous: Rendezvous::Unknown { advice: String::new() },
            }),
            _ => {
                let found = "Builder has a rank or a world size, but not both".to_owned();
                return Err(Error::NoLauncher { found, looked_for: LOOKED_FOR.to_owned() });
            }
        };
        let Launch { rank, world_size, .. } = launch;
        if world_size > MOST_RANKS {
            return Err(Error::setting("world_size", world_size.to_string(), format!("at most {MOST_RANKS}")));
        }
        if rank >= world_size {
            return Err(Error::setting("rank", rank.to_string(), format!("less than the world size, which is {world_size}")));
        }
        Ok(launch)
    }

    /// Which store the ranks use.
    fn store_source(&self, launch: Launch, settings: &Settings) -> StoreSource {
        // Under `kolo run` the launcher serves the store of the environment variable, but not one
        // that the program has set.
        let is_served = self.store_is_served || self.store.is_none() && process_env("KOLO_STORE_SERVED").is_some();
        let url = self.store.clone().or_else(|| process_env("KOLO_STORE"));
        StoreSource { object: self.store_object.clone(), url, is_served, launch, within: settings.ports.clone() }
    }
}

/// The recorder of a rank whose peers are all in this process.
fn recorder(job: &str, rank: Rank, members: &[Member], settings: &Settings) -> Arc<Recorder> {
    // All ranks are of one process, whose id distinguishes the run from others.
    let run = u64::from(std::process::id());
    Recorder::new(RankOfJob { job: job.to_owned(), run, rank, members: members.to_vec() }, settings.trace_dir.clone(), None)
}

impl Communicator {
    /// Connects all ranks that a launcher started; without a launcher, makes a communicator of this
    /// process alone.
    ///
    /// It recognises `kolo run`, torchrun, SLURM's srun, mpirun of Open MPI, MPICH and Intel MPI,
    /// PMIx, PALS, Flux, LSF, Kubernetes jobs, and plain `RANK` and `WORLD_SIZE` variables. It
    /// waits for all ranks, at most for `KOLO_START_TIMEOUT`.
    ///
    /// # Errors
    ///
    /// [`Error::NoLauncher`] if the launcher's variables are incomplete; it lists those that kolo
    /// looked for. [`Error::Missing`], [`Error::WorldSize`], [`Error::RankTaken`] and
    /// [`Error::Store`] if the ranks do not find each other.
    pub fn from_env() -> Result<Communicator> {
        Builder::default().connect()
    }

    /// Returns the options for connecting, none of them set.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Makes a communicator of one rank, which needs no store.
    fn alone(settings: Settings) -> Result<Communicator> {
        let member = Member { host: sys::hostname().into(), pid: std::process::id() };
        let members = vec![member];
        let fabric = Fabric::alone(recorder("alone", 0, &members, &settings));
        let info = info(&fabric, members, &settings);
        let core = Core::start(fabric, settings.shared, &info, Instant::now())?;
        Ok(Communicator::new(core, info))
    }

    /// Makes `world_size` communicators inside this process, one for each rank, to be used by one
    /// thread each: for tests, and for programs with a thread for each device.
    ///
    /// ```
    /// # fn main() -> kolo::Result<()> {
    /// std::thread::scope(|scope| {
    ///     for comm in kolo::Communicator::in_process(4)? {
    ///         scope.spawn(move || {
    ///             let mut sum = [comm.rank()].map(|rank| rank as u64);
    ///             comm.all_reduce(&mut sum, kolo::ReduceOp::Sum).unwrap();
    ///             assert_eq!(sum, [6]);
    ///         });
    ///     }
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if `world_size` is 0 or more than 4,096, or if an environment variable
    /// has an invalid value.
    pub fn in_process(world_size: usize) -> Result<Vec<Communicator>> {
        Communicator::builder().connect_in_process(world_size)
    }
}

/// Each rank is at least a thread: a larger number is a mistake, and would exhaust the memory of
/// the process.
const MOST_IN_PROCESS: usize = 4096;

impl Builder {
    /// Makes communicators as [`Communicator::in_process`], with options. Ranks exchange data
    /// through memory with every transport.
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::in_process`]; [`Error::Setting`] also if an option has an invalid
    /// value.
    pub fn connect_in_process(self, world_size: usize) -> Result<Vec<Communicator>> {
        let mut settings = self.settings()?;
        config::warn_of_unknown_variables(|| true);
        // The links of one process are no network.
        settings.shared.cost_model.are_measured = false;
        if world_size == 0 {
            return Err(Error::setting("world_size", "0", "at least 1"));
        }
        if world_size > MOST_IN_PROCESS {
            return Err(Error::setting(
                "world_size",
                world_size.to_string(),
                format!("at most {MOST_IN_PROCESS} in one process"),
            ));
        }
        let (hub, board) = (Arc::new(Hub::default()), Arc::new(StatusBoard::default()));
        let host: Arc<str> = sys::hostname().into();
        let members = vec![Member { host, pid: std::process::id() }; world_size];
        let connect = |rank| {
            let recorder = recorder("in-process", rank, &members, &settings);
            let fabric = Fabric::of_process(hub.clone(), board.clone(), rank, world_size, recorder);
            let info = info(&fabric, members.clone(), &settings);
            let core = Core::start(fabric, settings.shared, &info, Instant::now())?;
            Ok(Communicator::new(core, info))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || connect(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_shown_without_secrets() {
        let builder = Communicator::builder().store("redis://me:open-sesame@host:6379").secret([0xa7; 32]).rank(3);
        for shown in [format!("{builder:?}"), format!("{builder:#?}")] {
            for hidden in ["sesame", "167", "a7", "A7"] {
                assert!(!shown.contains(hidden), "{shown}");
            }
            for visible in ["rank: Some(", "redis://***@host:6379", "***"] {
                assert!(shown.contains(visible), "{shown}");
            }
        }
    }
}

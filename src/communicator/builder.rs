//! How a communicator of all ranks comes to be.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Communicator;
use crate::bootstrap::fabric::Fabric;
use crate::bootstrap::identity::Identity;
use crate::bootstrap::launcher::{self, LOOKED_FOR, Launch, Rendezvous};
use crate::bootstrap::store::tcp::TcpStore;
use crate::bootstrap::store::{self, Store, StoreUrl};
use crate::bootstrap::{self, Connected, Start};
use crate::config::{self, CopyMode, DevicePath, FOREVER, Settings, SharedSettings, TlsFiles, Transport, process_env};
use crate::error::{Error, Result};
use crate::exec::Core;
use crate::failure::CommInfo;
use crate::failure::StatusBoard;
use crate::plan::CostModel;
use crate::schedule::Algorithm;
use crate::sys;
use crate::trace::{self, RankOfJob, Recorder};
use crate::transport::memory::Hub;
use crate::types::{Member, Rank};

/// Options for connecting. What is not set comes from environment variables, then from the launcher, then from defaults; see
/// [`crate::settings`].
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
    store_is_served: bool,
    job: Option<String>,
    secret: Option<[u8; 32]>,
    secret_file: Option<PathBuf>,
    algorithm: Option<Algorithm>,
    transport: Option<Transport>,
    copy_mode: Option<CopyMode>,
    reproducible: Option<bool>,
    sockets: Option<usize>,
    devices: Option<bool>,
    device_path: Option<DevicePath>,
    model: Option<CostModel>,
    timeout: Option<Duration>,
    start_timeout: Option<Duration>,
    host: Option<String>,
    interface: Option<String>,
    insecure: Option<bool>,
    trace_dir: Option<PathBuf>,
    trace_signal: Option<bool>,
    tls: Option<TlsFiles>,
}

impl Builder {
    /// This process's rank.
    pub fn rank(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// How many ranks there are.
    pub fn world_size(mut self, world_size: usize) -> Self {
        self.world_size = Some(world_size);
        self
    }

    /// The URL of the store where ranks find each other: `file:///path`, `tcp://host:port`, `redis://host:port`, `rediss://host:port`, `env://`.
    pub fn store(mut self, url: impl Into<String>) -> Self {
        self.store = Some(url.into());
        self
    }

    /// A store of your own where ranks find each other.
    pub fn store_object(mut self, store: Arc<dyn Store>) -> Self {
        self.store_object = Some(store);
        self
    }

    /// Rank 0 does not serve the `tcp://` store, because a [`TcpStoreServer`](crate::TcpStoreServer) does. The program that binds
    /// one to port 0 learns the port before any rank connects.
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

    /// The name of the job, which tells it from others that use the same store.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = Some(job.into());
        self
    }

    /// What all ranks know and strangers do not.
    pub fn secret(mut self, secret: [u8; 32]) -> Self {
        self.secret = Some(secret);
        self
    }

    /// A file with the secret of the job, as 64 hexadecimal digits. It belongs to this process's user, and no other user may open it.
    /// [`Builder::secret`] wins.
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.secret_file = Some(path.into());
        self
    }

    /// The algorithm for all operations that have it. Rank 0's counts.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// Through what ranks exchange data. Rank 0's counts.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }

    /// How data of 1 MiB and more in private memory gets from one process of a host to another. Rank 0's counts.
    pub fn copy_mode(mut self, copy_mode: CopyMode) -> Self {
        self.copy_mode = Some(copy_mode);
        self
    }

    /// Whether reductions have the same bits whatever the transport, the layout and the size: they are then summed in the order
    /// of ranks. Rank 0's counts.
    pub fn reproducible(mut self, reproducible: bool) -> Self {
        self.reproducible = Some(reproducible);
        self
    }

    /// How many TCP connections share the work of one link, 1 to 64. Rank 0's counts.
    pub fn sockets(mut self, sockets: usize) -> Self {
        self.sockets = Some(sockets);
        self
    }

    /// Whether buffers may be in the memory of GPUs. Rank 0's counts. If not set, they may where rank 0's kolo was built with the
    /// feature `cuda` and its machine has a driver. Operations of more than 64 KiB then begin with asking where all buffers are,
    /// which takes a microsecond or two inside a host; and calls look whose memory they are given.
    pub fn devices(mut self, devices: bool) -> Self {
        self.devices = Some(devices);
        self
    }

    /// How data in the memory of GPUs gets from one rank to another. Rank 0's counts.
    pub fn device_path(mut self, path: DevicePath) -> Self {
        self.device_path = Some(path);
        self
    }

    /// The costs with which algorithms are compared. Rank 0's count.
    pub fn cost_model(mut self, model: CostModel) -> Self {
        self.model = Some(model);
        self
    }

    /// The longest that one operation may take: more than 0.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The longest that ranks wait for each other when they connect: more than 0.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = Some(timeout);
        self
    }

    /// Declares this rank's host: ranks that declare different ones do not share memory.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = Some(host.into());
        self
    }

    /// Whether a `tcp://` store listens to other machines even if the ranks were given no secret: then every process that reaches it can
    /// join, or disturb, the job.
    pub fn insecure(mut self, insecure: bool) -> Self {
        self.insecure = Some(insecure);
        self
    }

    /// Which network interfaces or addresses may be used; the syntax is that of `KOLO_INTERFACE`.
    pub fn interface(mut self, filter: impl Into<String>) -> Self {
        self.interface = Some(filter.into());
        self
    }

    /// A folder where a rank leaves the last operations of its communicators when one of them fails: a file for `kolo trace`. It is
    /// made if it is not there.
    pub fn trace_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.trace_dir = Some(folder.into());
        self
    }

    /// Whether the files are also left when this process gets SIGUSR1. Only then does kolo handle the signal, in addition to who
    /// handled it before; without, the signal ends a process that has not provided for it.
    pub fn trace_signal(mut self, on: bool) -> Self {
        self.trace_signal = Some(on);
        self
    }

    /// Encrypts links in the network, with TLS 1.3: PEM files with the certificate of the job's authority, with one that it has
    /// signed for the name `kolo`, and with the latter's private key. All ranks have certificates, or none. What ranks tell each
    /// other of themselves and of failures goes beside the links: authenticated, and not encrypted.
    ///
    /// A link starts when both ranks use it, so a send does not return before its receiver has come. Only with the feature
    /// `tls`; without, connecting fails.
    pub fn tls(mut self, authority: impl Into<PathBuf>, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.tls = Some(TlsFiles { authority: authority.into(), certificate: certificate.into(), key: key.into() });
        self
    }

    /// Connects with all other ranks. Returns when all have connected.
    ///
    /// # Errors
    ///
    /// See [`Communicator::from_env`].
    pub fn connect(self) -> Result<Communicator> {
        let began = Instant::now();
        let settings = self.settings()?;
        let launch = self.launch()?;
        let deadline = began + settings.start_timeout;
        let secret = match (self.secret, &self.secret_file) {
            (Some(secret), _) => Some(secret),
            (None, Some(path)) => Some(config::secret_in("secret_file", path, deadline)?),
            (None, None) => config::secret_of(&process_env, deadline)?,
        };
        if launch.world_size == 1 {
            return Communicator::alone(settings);
        }
        let job = self.job.clone().or_else(|| process_env("KOLO_JOB_ID")).unwrap_or_else(|| launch.job.clone());
        let identity = Identity::new(&job, secret).insecure(settings.insecure);
        let (store, store_url) = self.open_store(&launch, &identity, deadline)?;
        let Launch { launcher, rank, world_size, .. } = launch;
        tracing::info!(rank, world_size, launcher, job, store = store.url(), "connecting");
        let start = Start { rank, world_size, identity, store: &*store, store_url, settings: &settings, deadline };
        let Connected { fabric, settings: shared, members } = bootstrap::connect(&start)?;
        let info = info(&fabric, members, &settings);
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        let core = Core::start(fabric, shared, &CommInfo { timeout: left, ..info.clone() }, Instant::now())?;
        // Everybody has connected: the store has done its duty.
        drop(store);
        Ok(Communicator::new(core, info))
    }

    /// The settings: what was set here, else what the environment says.
    fn settings(&self) -> Result<Settings> {
        let mut settings = Settings::from_env(&process_env)?;
        let SharedSettings { algorithm, transport, copy_mode, reproducible, sockets, devices, device_path, model } =
            &mut settings.shared;
        *algorithm = self.algorithm.or(*algorithm);
        *transport = self.transport.unwrap_or(*transport);
        *copy_mode = self.copy_mode.unwrap_or(*copy_mode);
        *reproducible = self.reproducible.unwrap_or(*reproducible);
        *devices = self.devices.unwrap_or(*devices);
        *device_path = self.device_path.unwrap_or(*device_path);
        *model = self.model.unwrap_or(*model);
        if let Some(given) = self.sockets {
            *sockets = config::sockets(given).ok_or_else(|| Error::setting("sockets", given.to_string(), config::SOCKETS))?;
        }
        for (name, given) in [("timeout", self.timeout), ("start_timeout", self.start_timeout)] {
            if given.is_some_and(|given| given.is_zero()) {
                return Err(Error::setting(name, "0", config::DURATION));
            }
        }
        // What is longer than a life is forever, and can be added to a time.
        settings.timeout = self.timeout.unwrap_or(settings.timeout).min(FOREVER);
        settings.start_timeout = self.start_timeout.unwrap_or(settings.start_timeout).min(FOREVER);
        settings.host = self.host.clone().or(settings.host);
        settings.interface = self.interface.clone().or(settings.interface);
        settings.insecure = self.insecure.unwrap_or(settings.insecure);
        settings.trace_dir = self.trace_dir.clone().or(settings.trace_dir);
        settings.trace_signal = self.trace_signal.unwrap_or(settings.trace_signal);
        settings.tls = self.tls.clone().or(settings.tls);
        trace::prepare(settings.trace_dir.as_ref(), settings.trace_signal, Instant::now() + settings.start_timeout)?;
        Ok(settings)
    }

    /// Rank and world size: what was set here, else what the launcher says.
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
                launcher: "nobody",
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
        if rank >= world_size || world_size > u32::MAX as usize {
            return Err(Error::setting("rank", rank.to_string(), format!("less than the world size, which is {world_size}")));
        }
        Ok(launch)
    }

    fn open_store(&self, launch: &Launch, identity: &Identity, deadline: Instant) -> Result<(Arc<dyn Store>, Option<StoreUrl>)> {
        if let Some(store) = &self.store_object {
            return Ok((store.clone(), None));
        }
        let owner = launch.rank == 0;
        // Under `kolo run` the launcher serves the store of the environment, and every rank is a guest. Of one that the program has
        // named it knows nothing.
        let is_served = self.store_is_served || self.store.is_none() && process_env("KOLO_STORE_SERVED").is_some();
        let url = self.store.clone().or_else(|| process_env("KOLO_STORE"));
        let place = match (url, &launch.rendezvous) {
            (Some(url), _) => match StoreUrl::parse(&url)? {
                StoreUrl::Env => launcher::env_store(&process_env)?,
                place => place,
            },
            (None, Rendezvous::Store(place)) => place.clone(),
            (None, Rendezvous::Ports { host, ports }) => {
                let store = TcpStore::open_any(host, ports, owner, identity, deadline)?;
                return Ok((Arc::new(store), Some(StoreUrl::Tcp { host: host.clone(), port: ports[0] })));
            }
            (None, Rendezvous::Unknown { advice }) => {
                let found = format!(
                    "{} says rank {} of {}, but no store is known where they find each other: {advice}",
                    launch.launcher, launch.rank, launch.world_size
                );
                return Err(Error::NoLauncher { found, looked_for: LOOKED_FOR.to_owned() });
            }
        };
        let store = store::open(&place, owner && !is_served, identity, deadline)?;
        Ok((store.into(), Some(place)))
    }
}

/// The recorder of a rank that meets nobody outside this process.
fn recorder(job: &str, rank: Rank, members: &[Member], settings: &Settings) -> Arc<Recorder> {
    // Of one process all ranks come from one call; its number tells it from others.
    let run = u64::from(std::process::id());
    Recorder::new(RankOfJob { job: job.to_owned(), run, rank, members: members.to_vec() }, settings.trace_dir.clone())
}

impl Communicator {
    /// A communicator of one rank, which needs no store.
    fn alone(settings: Settings) -> Result<Communicator> {
        let member = Member { host: sys::hostname().into(), pid: std::process::id() };
        let members = vec![member];
        let fabric = Fabric::alone(recorder("alone", 0, &members, &settings));
        let info = info(&fabric, members, &settings);
        let core = Core::start(fabric, settings.shared, &info, Instant::now())?;
        Ok(Communicator::new(core, info))
    }

    /// Communicators of `world_size` ranks inside this process, one for each of as many threads: for tests, and for programs
    /// with a thread for each device.
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
    pub fn in_process(world_size: usize) -> Result<Vec<Communicator>> {
        Communicator::builder().connect_in_process(world_size)
    }
}

/// Each is a thread, at least: more is a mistake, and would end in a process without memory.
const MOST_IN_PROCESS: usize = 4096;

impl Builder {
    /// As [`Communicator::in_process`], with options. Ranks exchange data through memory whatever the transport.
    pub fn connect_in_process(self, world_size: usize) -> Result<Vec<Communicator>> {
        let settings = self.settings()?;
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

fn info(fabric: &Fabric, members: Vec<Member>, settings: &Settings) -> CommInfo {
    let Settings { timeout, start_timeout, .. } = *settings;
    CommInfo { rank: fabric.rank(), members, timeout, start_timeout, cancel: fabric.status().cancel.clone() }
}

//! Connecting all ranks of a job: the options, and how a communicator starts.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connect::{connect, info};
use super::{Communicator, join};
use crate::config::{
    self, CongestionControl, CopyMode, DevicePath, DeviceWaits, FOREVER, FlagLayout, MetricsAddress, Settings, SharedSettings,
    TlsFiles, Transport, WireDType, process_env,
};
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
    store_is_lent: bool,
    store_is_served: bool,
    job: Option<String>,
    secret: Option<[u8; 32]>,
    secret_file: Option<PathBuf>,
    algorithm: Option<Algorithm>,
    transport: Option<Transport>,
    copy_mode: Option<CopyMode>,
    flag_layout: Option<FlagLayout>,
    reproducible: Option<bool>,
    sockets: Option<usize>,
    congestion_control: Option<String>,
    devices: Option<bool>,
    device_path: Option<DevicePath>,
    device_waits: Option<DeviceWaits>,
    wire_dtype: Option<WireDType>,
    model: Option<CostModel>,
    timeout: Option<Duration>,
    start_timeout: Option<Duration>,
    host: Option<String>,
    topology: Option<String>,
    interface: Option<String>,
    rails: Option<String>,
    ports: Option<RangeInclusive<u16>>,
    insecure: Option<bool>,
    join: Option<bool>,
    list_lifetime: Option<Duration>,
    trace_dir: Option<PathBuf>,
    trace_signal: Option<bool>,
    top_dir: Option<PathBuf>,
    metrics: Option<String>,
    tls: Option<TlsFiles>,
}

/// Whether there is a secret, but not the secret, and the URL of the store without its password.
impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Builder { rank, world_size, store, store_object, store_is_served, job, secret, secret_file, .. } = self;
        let Builder { algorithm, transport, copy_mode, flag_layout, reproducible, sockets, model, .. } = self;
        let Builder { congestion_control, devices, device_path, device_waits, wire_dtype, .. } = self;
        let Builder {
            timeout,
            start_timeout,
            host,
            topology,
            interface,
            rails,
            ports,
            insecure,
            join,
            trace_dir,
            trace_signal,
            top_dir,
            metrics,
            tls,
            ..
        } = self;
        f.debug_struct("Builder")
            .field("rank", rank)
            .field("world_size", world_size)
            .field("store", &store.as_deref().map(masked))
            .field("store_object", &store_object.as_ref().map(|store| store.url()))
            .field("store_is_served", store_is_served)
            .field("job", job)
            .field("secret", &secret.map(|_| "***"))
            .field("secret_file", secret_file)
            .field("algorithm", algorithm)
            .field("transport", transport)
            .field("copy_mode", copy_mode)
            .field("flag_layout", flag_layout)
            .field("reproducible", reproducible)
            .field("sockets", sockets)
            .field("congestion_control", congestion_control)
            .field("devices", devices)
            .field("device_path", device_path)
            .field("device_waits", device_waits)
            .field("wire_dtype", wire_dtype)
            .field("cost_model", model)
            .field("timeout", timeout)
            .field("start_timeout", start_timeout)
            .field("host", host)
            .field("topology", topology)
            .field("interface", interface)
            .field("rails", rails)
            .field("ports", ports)
            .field("insecure", insecure)
            .field("join", join)
            .field("trace_dir", trace_dir)
            .field("trace_signal", trace_signal)
            .field("top_dir", top_dir)
            .field("metrics", metrics)
            .field("tls", tls)
            .finish()
    }
}

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
        self.store_is_lent = true;
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

    /// Sets the algorithm for all operations that have it. Rank 0's value applies to all ranks.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// Sets how ranks exchange data. Rank 0's value applies to all ranks.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = Some(transport);
        self
    }

    /// Sets how 1 MiB and more of private memory gets from one process of a host to another. Rank
    /// 0's value applies to all ranks.
    pub fn copy_mode(mut self, copy_mode: CopyMode) -> Self {
        self.copy_mode = Some(copy_mode);
        self
    }

    /// Sets how ranks of a host learn that all have reached a phase. Rank 0's value applies to all
    /// ranks.
    pub fn flag_layout(mut self, flag_layout: FlagLayout) -> Self {
        self.flag_layout = Some(flag_layout);
        self
    }

    /// Sets whether reductions have the same bits with every transport, layout and size: they then
    /// reduce in the order of ranks. Rank 0's value applies to all ranks.
    pub fn reproducible(mut self, reproducible: bool) -> Self {
        self.reproducible = Some(reproducible);
        self
    }

    /// Sets the number of TCP connections that share the work of one link, 1 to 64. By default it is
    /// 1, and 4 where the round trip is long and the congestion control is not BBR. Rank 0's value applies to all
    /// ranks.
    pub fn sockets(mut self, sockets: usize) -> Self {
        self.sockets = Some(sockets);
        self
    }

    /// Sets the congestion control of this rank's TCP connections, for what it sends: `auto`,
    /// `system`, or a name that the system knows, such as `cubic`. By default it is BBR where the
    /// round trip takes 2 ms or more and the system has it, Reno inside a machine, and otherwise the
    /// system's.
    pub fn congestion_control(mut self, name: impl Into<String>) -> Self {
        self.congestion_control = Some(name.into());
        self
    }

    /// Sets whether buffers may be in the memory of GPUs. Rank 0's value applies to all ranks. By
    /// default they may if rank 0's machine has a driver. They may not if a rank's kolo was built
    /// without the feature `cuda`. If they may, each call finds out in which memory its buffers are, and ranks tell each other
    /// before an operation of more than 64 KiB, which takes one or two microseconds inside a host.
    pub fn devices(mut self, devices: bool) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Sets how data in the memory of GPUs gets from one rank to another. Rank 0's value applies to
    /// all ranks.
    pub fn device_path(mut self, path: DevicePath) -> Self {
        self.device_path = Some(path);
        self
    }

    /// Sets where ranks that each have a GPU of their own wait for each other. Rank 0's value applies to
    /// all ranks.
    pub fn device_waits(mut self, waits: DeviceWaits) -> Self {
        self.device_waits = Some(waits);
        self
    }

    /// Sets the type of the elements of messages between hosts, in all-reduces, reduces and
    /// reduce-scatters that sum or average 16 KiB of `f32` or more. With a type of 16 bits, a link
    /// carries half the bytes. Each host's part is rounded once, all parts are accumulated in `f32`,
    /// and the result is rounded once; every rank has the same bits. Other operations, and memory
    /// that the ranks of a host share, are exact; so is everything in reproducible mode. Rank 0's
    /// value applies to all ranks.
    pub fn wire_dtype(mut self, dtype: WireDType) -> Self {
        self.wire_dtype = Some(dtype);
        self
    }

    /// Sets the costs with which algorithms are compared, each finite and at least 0, so that those
    /// between hosts are not measured. Rank 0's value applies to all ranks.
    pub fn cost_model(mut self, model: CostModel) -> Self {
        self.model = Some(model);
        self
    }

    /// Sets the deadline of each operation, more than 0.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long ranks wait for each other when they connect, more than 0.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = Some(timeout);
        self
    }

    /// Sets the name of this rank's host. Ranks with different host names do not share memory.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = Some(host.into());
        self
    }

    /// Sets where this rank's host is in the network: a path such as `rack7` or `pod1/rack7`. If all
    /// ranks have one, fewer bytes cross the uplinks of racks. The path of a host is that of its lowest
    /// rank.
    pub fn topology(mut self, path: impl Into<String>) -> Self {
        self.topology = Some(path.into());
        self
    }

    /// Sets whether a `tcp://` store accepts other machines although the ranks have no secret. Then
    /// every process that reaches it can join the job, or disturb it.
    pub fn insecure(mut self, insecure: bool) -> Self {
        self.insecure = Some(insecure);
        self
    }

    /// Sets which network interfaces or addresses may be used, in the syntax of `KOLO_INTERFACE`.
    pub fn interface(mut self, filter: impl Into<String>) -> Self {
        self.interface = Some(filter.into());
        self
    }

    /// Sets the network interfaces over which the links to other hosts are striped, in the syntax of
    /// `KOLO_RAILS`, which is that of [`Builder::interface`]: `"eth0,eth1"`.
    pub fn rails(mut self, filter: impl Into<String>) -> Self {
        self.rails = Some(filter.into());
        self
    }

    /// Sets the ports at which this process listens, for firewalls: to the other ranks, and with the
    /// store if rank 0 picks its port. All ranks have the same range. It needs one port for every rank of
    /// a host and one more for the store, or two for every rank if the job grows.
    pub fn ports(mut self, ports: RangeInclusive<u16>) -> Self {
        self.ports = Some(ports);
        self
    }

    /// Sets a folder where a rank writes the last operations of its communicators when one of them
    /// fails, as a file for `kolo trace`. The folder is created if it does not exist.
    pub fn trace_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.trace_dir = Some(folder.into());
        self
    }

    /// Sets whether these files are also written when this process receives SIGUSR1. Only then does
    /// kolo handle the signal, and calls the earlier handler as well. By default the signal ends a
    /// process that does not handle it.
    pub fn trace_signal(mut self, on: bool) -> Self {
        self.trace_signal = Some(on);
        self
    }

    /// Sets a folder where the lowest rank of each machine writes a file by which `kolo top` finds
    /// and enters the job. Only its user can open the file, which holds the secret of the job. The
    /// rank removes the file when it drops its last communicator. `kolo run` sets such a folder.
    pub fn top_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.top_dir = Some(folder.into());
        self
    }

    /// Sets where this rank serves metrics as Prometheus text, over HTTP: an address and a port as
    /// in `127.0.0.1:9400`, or a Unix socket as in `unix:/run/kolo-{rank}.sock`. The first rank of a
    /// machine listens at the port, and each other one at a port that is higher by 1. Every process
    /// that reaches the address can read the metrics.
    ///
    /// A rank of a world of one serves none. If the address cannot be used, connecting fails.
    pub fn metrics(mut self, address: impl Into<String>) -> Self {
        self.metrics = Some(address.into());
        self
    }

    /// Encrypts links between hosts by TLS 1.3. The PEM files hold the certificate of the job's
    /// authority, a certificate that it has signed for the name `kolo`, and the private key of the
    /// latter. Either all ranks have certificates, or none. Peer info and failure reports do not
    /// use the links: they are authenticated, but not encrypted.
    ///
    /// A link starts when both ranks use it, so a send does not return before its receiver has
    /// called. Without the feature `tls`, connecting fails.
    pub fn tls(mut self, authority: impl Into<PathBuf>, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.tls = Some(TlsFiles { authority: authority.into(), certificate: certificate.into(), key: key.into() });
        self
    }

    /// Sets whether this process joins a job that has started, as a further rank. Its ranks admit it
    /// when they call [`Communicator::grow`]; it has no rank and no world size before. It needs the
    /// store, the name and the secret of the job.
    ///
    /// ```no_run
    /// # fn main() -> kolo::Result<()> {
    /// let comm = kolo::Communicator::builder().store("file:///shared/job").job("job").join(true).connect()?;
    /// let mut weights = vec![0.0f32; 1000];
    /// comm.broadcast(&mut weights, 0)?; // The ranks that were there call this, too.
    /// # Ok(())
    /// # }
    /// ```
    pub fn join(mut self, join: bool) -> Self {
        self.join = Some(join);
        self
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
        wait_check::begin_start();
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
            if self.store_is_lent {
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
        if self.store_is_lent {
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
        let SharedSettings {
            algorithm,
            transport,
            copy_mode,
            reproducible,
            sockets,
            devices,
            device_path,
            device_waits,
            flag_layout,
            wire_dtype,
            model,
            measures,
        } = &mut settings.shared;
        *algorithm = self.algorithm.or(*algorithm);
        *transport = self.transport.unwrap_or(*transport);
        *copy_mode = self.copy_mode.unwrap_or(*copy_mode);
        *flag_layout = self.flag_layout.unwrap_or(*flag_layout);
        *reproducible = self.reproducible.unwrap_or(*reproducible);
        *devices = self.devices.unwrap_or(*devices);
        *device_path = self.device_path.unwrap_or(*device_path);
        *device_waits = self.device_waits.unwrap_or(*device_waits);
        *wire_dtype = self.wire_dtype.unwrap_or(*wire_dtype);
        *model = self.model.unwrap_or(*model);
        *measures &= self.model.is_none();
        if let Some((cost, value)) = model.invalid() {
            return Err(Error::setting("cost_model", format!("{cost}: {value}"), "finite costs of at least 0"));
        }
        if let Some(given) = self.sockets {
            let checked = config::sockets(given);
            *sockets = Some(checked.ok_or_else(|| Error::setting("sockets", given.to_string(), config::SOCKETS))?);
        }
        if let Some(given) = &self.congestion_control {
            let control = CongestionControl::parse(given);
            settings.congestion_control =
                control.ok_or_else(|| Error::setting("congestion_control", given, config::CONGESTION_CONTROL))?;
        }
        for (name, given) in [("timeout", self.timeout), ("start_timeout", self.start_timeout)] {
            if given.is_some_and(|given| given.is_zero()) {
                return Err(Error::setting(name, "0", config::DURATION));
            }
        }
        // Longer times count as forever, which can still be added to a point in time.
        settings.timeout = self.timeout.unwrap_or(settings.timeout).min(FOREVER);
        settings.start_timeout = self.start_timeout.unwrap_or(settings.start_timeout).min(FOREVER);
        settings.host = self.host.clone().or(settings.host);
        if let Some(given) = &self.topology {
            let path = config::topology_path(given.trim());
            settings.topology = Some(path.ok_or_else(|| Error::setting("topology", given, config::TOPOLOGY))?);
        }
        settings.interface = self.interface.clone().or(settings.interface);
        settings.rails = self.rails.clone().or(settings.rails);
        if let Some(ports) = self.ports.clone() {
            let text = config::ports_text(&ports);
            settings.ports = Some(config::checked_ports(ports).ok_or_else(|| Error::setting("ports", text, config::PORTS))?);
        }
        settings.insecure = self.insecure.unwrap_or(settings.insecure);
        settings.join = self.join.unwrap_or(settings.join);
        settings.trace_dir = self.trace_dir.clone().or(settings.trace_dir);
        settings.trace_signal = self.trace_signal.unwrap_or(settings.trace_signal);
        settings.top_dir = self.top_dir.clone().or(settings.top_dir);
        if let Some(given) = &self.metrics {
            let address = MetricsAddress::parse(given).ok_or_else(|| Error::setting("metrics", given, config::METRICS))?;
            settings.metrics = Some(address);
        }
        settings.tls = self.tls.clone().or(settings.tls);
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
        settings.shared.measures = false;
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

//! Checks whether a machine has what kolo needs, for `kolo doctor`.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::communicator::Communicator;
use crate::config::{self, CongestionControl, Settings, process_env};
use crate::error::{Error, Result, shown};
use crate::exec::costs::{Again, Measured, short_names};
use crate::host_group::HOME;
use crate::host_group::area::{AREA, slabs_for};
use crate::host_group::stage::{KEPT, STAGE};
use crate::network::address::{self, Chosen};
use crate::network::topology::{self, Position};
use crate::reduce;
use crate::rendezvous::launcher::{self, Launch, Rendezvous};
use crate::rendezvous::store::StoreUrl;
use crate::schedule::order::{ORDERED, PairCosts};
use crate::sys::{self, Cuda, LocalListener, Process, Region};
use crate::transport::tls::Tls;

/// How severe a finding is, the more severe the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// No problem.
    Fine,
    /// kolo works, but more slowly than it could, or without some feature.
    Warning,
    /// kolo does not work.
    Failure,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What was checked, in a word or two.
    pub subject: &'static str,
    /// How severe the finding is.
    pub severity: Severity,
    /// What was found.
    pub found: String,
    /// What to do, unless there is no problem.
    pub advice: Option<String>,
}

impl Finding {
    /// Makes a finding without a problem.
    pub fn fine(subject: &'static str, found: impl Into<String>) -> Finding {
        Finding { subject, severity: Severity::Fine, found: found.into(), advice: None }
    }

    /// Makes a finding with [`Severity::Warning`].
    pub fn warning(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { subject, severity: Severity::Warning, found: found.into(), advice: Some(advice.into()) }
    }

    /// Makes a finding with [`Severity::Failure`].
    pub fn failure(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { subject, severity: Severity::Failure, found: found.into(), advice: Some(advice.into()) }
    }
}

/// What messages between the hosts of a job take.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostLinks {
    /// Name and address of each host, in the order of their ranks; the address only if names are equal.
    pub hosts: Vec<String>,
    /// One for each two hosts.
    pub links: Vec<HostLink>,
    /// The order in which schedules visit the hosts; empty if that does not follow from the links.
    pub order: Vec<usize>,
    /// A warning for each link that is slower than most; between sites, slow links are usual.
    pub findings: Vec<Finding>,
}

/// What messages between two hosts take.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct HostLink {
    /// The two hosts, as indices of [`HostLinks::hosts`].
    pub hosts: [usize; 2],
    /// Half of a round trip, in seconds.
    pub latency: f64,
    /// In the slower direction; `None` if other work has disturbed the measurement, or the link is too slow for it.
    pub bytes_per_second: Option<f64>,
}

/// The most hosts each two of which are measured.
pub const MOST_HOSTS: usize = *ORDERED.end();

/// How often pairs are measured, at most, that other work has disturbed.
const MOST_TRIES: usize = 3;

/// Measures each two hosts of a job, for a second a round of pairs at most, and up to three times if other work
/// disturbs it. All ranks call this together, while no other operation is in flight. Later jobs find the result, and
/// measure anew what is not of it.
///
/// Returns `None` with one host or more than [`MOST_HOSTS`], if ranks of one machine are on several hosts, and if
/// a message takes too long for that.
///
/// # Errors
///
/// As of an operation: another rank ended, or did not call this.
pub fn host_links(comm: &Communicator) -> Result<Option<HostLinks>> {
    for left in (0..MOST_TRIES).rev() {
        let Some(again) = comm.measure_hosts()? else { break };
        if left == 0 || again.measured.unconfirmed == 0 {
            return Ok(Some(links_of(&again)));
        }
    }
    Ok(None)
}

fn links_of(Again { names, measured: Measured { exact, costs, .. }, is_followed, .. }: &Again) -> HostLinks {
    let link = |((a, b), &(latency, per_byte)): (_, &(u64, Option<u64>))| HostLink {
        hosts: [a, b],
        latency: 1e-9 * latency as f64,
        bytes_per_second: per_byte.map(|per_byte| 1e12 / per_byte.max(1) as f64),
    };
    let links: Vec<HostLink> = PairCosts::pairs(names.len()).zip(exact).map(link).collect();
    let rate = |bytes_per_second: f64| format!("{:.3} Gb/s", 8e-9 * bytes_per_second);
    // Of a host all links of which are slow, the fastest one says how much it can carry.
    let fastest_of = |some: &[usize]| {
        let is_of = |link: &&HostLink| some.iter().all(|host| link.hosts.contains(host));
        links.iter().filter(is_of).filter_map(|link| link.bytes_per_second).fold(0.0, f64::max)
    };
    let (slow, shown) = (costs.slow(), short_names(names));
    let is_slow = |link: &HostLink| slow.iter().any(|slow| slow.hosts.iter().all(|host| link.hosts.contains(host)));
    let others = links.iter().filter(|link| !is_slow(link)).filter_map(|link| link.bytes_per_second);
    let others = others.fold(f64::INFINITY, f64::min);
    let mut findings: Vec<Finding> = slow
        .iter()
        .map(|slow| {
            let named: Vec<&str> = slow.hosts.iter().map(|&host| shown[host]).collect();
            let of = if let [host] = named[..] { format!("all of {host}") } else { named.join(" to ") };
            let found = format!("{of}: {}, others at least {}", rate(fastest_of(&slow.hosts)), rate(others));
            let advice = "check its cable, and the speed and duplex mode of its switch port";
            Finding::warning("a slow link", found, advice)
        })
        .collect();
    let unknown = links.iter().filter(|link| link.bytes_per_second.is_none()).count();
    if findings.is_empty() && unknown < links.len() {
        let longest = links.iter().map(|link| 2e6 * link.latency).fold(0.0, f64::max);
        let found = format!("at least {} between each two hosts, round trips of at most {longest:.0} us", rate(others));
        findings.push(Finding::fine("links", found));
    }
    if unknown > 0 {
        let found = format!("other work disturbed the measurement of {unknown} of {} pairs, or they are too slow", links.len());
        findings.push(Finding::warning("links", found, "try again when the hosts are idle"));
    }
    let order = if *is_followed { costs.order().unwrap_or_else(|| (0..names.len()).collect()) } else { Vec::new() };
    HostLinks { hosts: shown.into_iter().map(str::to_owned).collect(), links, order, findings }
}

/// Returns the launcher that has started this process as a rank, and the world size of its job;
/// `None` if there is none, or its variables are incomplete.
pub fn launched_by() -> Option<(&'static str, usize)> {
    let launch = launcher::detect(&process_env).ok().flatten()?;
    Some((launch.launcher, launch.world_size))
}

/// Checks this machine as a rank that starts here now would find it. Takes a few milliseconds,
/// unless a name server is silent, and changes nothing.
pub fn examine() -> Vec<Finding> {
    let settings = Settings::from_env(&process_env);
    let launch = launcher::detect(&process_env);
    let url = store(launch.as_ref().ok().and_then(Option::as_ref));
    let mut findings = vec![version(), of_settings(&settings)];
    findings.extend(unknown_variables());
    let settings = settings.unwrap_or_default();
    findings.extend([secret(settings.insecure), of_launcher(&launch)]);
    findings.extend([topology(&settings), interfaces()]);
    let deadline = Instant::now() + settings.start_timeout;
    let place = url.as_ref().and_then(StoreUrl::host_and_port);
    let chosen = address::choose(place, settings.interface.as_deref(), settings.rails.as_deref(), deadline);
    findings.push(of_address(&chosen));
    if let Ok(chosen) = &chosen {
        findings.push(ports(chosen));
    }
    findings.extend(url.map(|url| of_store(&url, launch.ok().flatten().is_none_or(|launch| launch.rank == 0), deadline)));
    findings.extend(congestion_control(&settings.congestion_control));
    findings.extend([local_connections(), shared_memory(), clock(), processor()]);
    let ranks = launcher::detect(&process_env).ok().flatten().map_or(1, |launch| launch.world_size);
    findings.extend([descriptors(ranks, settings.shared.sockets.unwrap_or(1).into()), cuda()]);
    findings
}

fn version() -> Finding {
    let protocol = crate::network::listener::handshake::VERSION;
    let system = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    Finding::fine("version", format!("kolo {}, protocol {protocol}, on {system}", env!("CARGO_PKG_VERSION")))
}

fn of_settings(settings: &Result<Settings>) -> Finding {
    let secret = config::secret_of_environment();
    let tls = settings.as_ref().ok().and_then(|settings| settings.tls.as_ref());
    let tls = tls.map(|files| Tls::load(&files.authority, &files.certificate, &files.key)).transpose();
    let what = match (settings, &secret, &tls) {
        (Err(_), ..) => wrong_settings(&process_env).join("; "),
        (_, Err(error), _) | (.., Err(error)) => error.to_string(),
        (Ok(_), Ok(_), Ok(_)) => {
            let mut set: Vec<&str> = config::VARIABLES.iter().copied().filter(|name| process_env(name).is_some()).collect();
            set.sort_unstable();
            return Finding::fine(
                "settings",
                if set.is_empty() { "no variable that kolo reads is set".to_owned() } else { set.join(", ") },
            );
        }
    };
    Finding::failure("settings", what, "correct the variable, or unset it; docs/settings.md lists what each may be")
}

/// Warns of variables that start with `KOLO_` and that kolo does not read. They may be misspelt.
fn unknown_variables() -> Option<Finding> {
    let unknown = config::unknown_variables();
    (!unknown.is_empty()).then(|| Finding::warning("variables", config::describe_unknown(&unknown), config::UNKNOWN_VARIABLES))
}

/// Returns what is wrong with each variable that is.
fn wrong_settings(env: config::Env<'_>) -> Vec<String> {
    /// Variables that are used together: one of them alone is wrong, too.
    const TOGETHER: [&str; 2] = ["KOLO_NETWORK_", "KOLO_TLS_"];
    let (mut wrong, mut names) = (Vec::new(), Vec::<String>::new());
    loop {
        let is_wrong =
            |name: &str| names.iter().any(|wrong| wrong == name || TOGETHER.contains(&&**wrong) && name.starts_with(&**wrong));
        let without = |name: &str| env(name).filter(|_| !is_wrong(name));
        let Err(error) = Settings::from_env(&without) else { return wrong };
        wrong.push(error.to_string());
        let Error::Setting { name, .. } = error else { return wrong };
        let name = TOGETHER.iter().find(|group| name.starts_with(**group)).map_or(name, |group| (*group).to_owned());
        // The same again: it comes from elsewhere.
        if names.contains(&name) {
            return wrong;
        }
        names.push(name);
    }
}

fn secret(is_insecure: bool) -> Finding {
    const SUBJECT: &str = "secret";
    const ADVICE: &str = "between hosts, give all ranks the same secret in KOLO_SECRET_FILE (openssl rand -hex 32); kolo run makes one for each job";
    if ["KOLO_SECRET", "KOLO_SECRET_FILE"].iter().any(|name| process_env(name).is_some()) {
        Finding::fine(SUBJECT, "set; all ranks need the same secret")
    } else if is_insecure {
        let what = "none, and KOLO_INSECURE is set: any process that reaches this machine's ports can join or disturb a job";
        Finding::warning(SUBJECT, what, ADVICE)
    } else {
        let what = "none: a tcp:// store listens only to its own machine; with other stores, the ranks agree on a secret";
        Finding::warning(SUBJECT, what, ADVICE)
    }
}

fn of_launcher(launch: &Result<Option<Launch>>) -> Finding {
    const SUBJECT: &str = "launcher";
    match launch {
        Ok(Some(Launch { launcher, rank, world_size, rendezvous, .. })) => {
            let found = format!("{launcher}: rank {rank} of {world_size}");
            match rendezvous {
                Rendezvous::Unknown { advice } if *world_size > 1 && process_env("KOLO_STORE").is_none() => {
                    Finding::failure(SUBJECT, format!("{found}, but no variable says where the ranks find each other"), advice)
                }
                _ => Finding::fine(SUBJECT, found),
            }
        }
        Ok(None) => Finding::fine(SUBJECT, "none: a program started like this is alone, one rank of one"),
        Err(error @ Error::Setting { .. }) => {
            Finding::failure(SUBJECT, error.to_string(), "correct the variable, or unset it; the launcher sets it for each rank")
        }
        Err(error) => Finding::failure(SUBJECT, error.to_string(), "start the program with kolo run, torchrun, srun or mpirun"),
    }
}

fn topology(settings: &Settings) -> Finding {
    const SUBJECT: &str = "topology";
    match topology::position(settings.topology.clone(), &process_env) {
        Some(Position { path, source }) => Finding::fine(SUBJECT, format!("this host is at {path} ({source})")),
        None => Finding::fine(SUBJECT, "unknown; if hosts are in several racks, give each its path in KOLO_TOPOLOGY"),
    }
}

/// Returns the store where this process would find the other ranks.
fn store(launch: Option<&Launch>) -> Option<StoreUrl> {
    if let Some(url) = process_env("KOLO_STORE") {
        return match StoreUrl::parse(&url) {
            Ok(StoreUrl::Env) => launcher::env_store(&process_env).ok(),
            url => url.ok(),
        };
    }
    match &launch?.rendezvous {
        Rendezvous::Store(url) => Some(url.clone()),
        Rendezvous::Ports { host, ports } => Some(StoreUrl::Tcp { host: host.clone(), port: *ports.first()? }),
        Rendezvous::Unknown { .. } => None,
    }
}

fn interfaces() -> Finding {
    const SUBJECT: &str = "interfaces";
    match sys::above_standard(if_addrs::get_if_addrs) {
        Ok(interfaces) if interfaces.is_empty() => {
            Finding::failure(SUBJECT, "this machine has none, not even loopback", "bring one up: ip link set lo up")
        }
        Ok(interfaces) => {
            let list: Vec<String> =
                interfaces.iter().map(|interface| format!("{} ({})", interface.name, interface.ip())).collect();
            Finding::fine(SUBJECT, list.join(", "))
        }
        Err(error) => Finding::failure(SUBJECT, format!("cannot list them: {error}"), "allow this process to see the network"),
    }
}

fn of_address(chosen: &Result<Chosen>) -> Finding {
    const SUBJECT: &str = "address";
    match chosen {
        Ok(Chosen { ip, why }) if ip.is_loopback() => Finding::warning(
            SUBJECT,
            format!("{ip}: {why}"),
            "only ranks on this machine reach it; for others, name an interface with KOLO_INTERFACE or a store on another machine",
        ),
        Ok(Chosen { ip, why }) => Finding::fine(SUBJECT, format!("{ip}: {why}")),
        Err(error) => {
            Finding::failure(SUBJECT, error.to_string(), "set KOLO_INTERFACE to an interface or a network of this machine")
        }
    }
}

/// How long a connection of this machine to itself may take.
const OWN_CONNECTION: Duration = Duration::from_secs(2);

/// Checks that a port can be opened and reached.
fn ports(chosen: &Chosen) -> Finding {
    const SUBJECT: &str = "ports";
    let connect = || -> io::Result<u16> {
        let listener = sys::above_standard(|| TcpListener::bind((chosen.ip, 0)))?;
        let address = listener.local_addr()?;
        drop(sys::above_standard(|| TcpStream::connect_timeout(&address, OWN_CONNECTION))?);
        Ok(address.port())
    };
    match connect() {
        Ok(port) => Finding::fine(SUBJECT, format!("opened and reached port {port} at {}", chosen.ip)),
        Err(error) => Finding::failure(
            SUBJECT,
            format!("cannot open and reach a port at {}: {error}", chosen.ip),
            "let this machine connect to itself there (firewall, network policy), or choose another address with KOLO_INTERFACE",
        ),
    }
}

/// Opens a port for a moment, at a name that is resolved by the deadline.
fn bind(host: &str, port: u16, deadline: Instant) -> io::Result<()> {
    let addresses = sys::resolve(host, port, deadline)?;
    sys::above_standard(|| TcpListener::bind(&*addresses)).map(drop)
}

/// Checks that rank 0 can serve the store. The other ranks cannot check before rank 0 has started.
fn of_store(url: &StoreUrl, is_owner: bool, deadline: Instant) -> Finding {
    const SUBJECT: &str = "store";
    let is_served = process_env("KOLO_STORE_SERVED").is_some();
    match url {
        StoreUrl::Tcp { host, port } if is_owner && !is_served => match bind(host, *port, deadline) {
            Ok(()) => Finding::fine(SUBJECT, format!("rank 0 can serve it at {host}:{port}")),
            Err(error) => {
                let addresses = sys::resolve(host, *port, deadline).unwrap_or_default();
                let holder = sys::port_holder(&addresses).map_or_else(String::new, |holder| format!(" (used by {holder})"));
                let advice = "choose another port, or end the process that uses it; the address must be this machine's";
                Finding::failure(SUBJECT, format!("rank 0 cannot serve it at {host}:{port}: {error}{holder}"), advice)
            }
        },
        StoreUrl::Tcp { host, port } => {
            Finding::fine(SUBJECT, format!("served at {host}:{port} by {}", if is_served { "the launcher" } else { "rank 0" }))
        }
        StoreUrl::File(path) => {
            let folder = path.parent().unwrap_or(path).to_owned();
            let kind = format!("examine {}", folder.display());
            let look = move || sys::check_folder(&folder);
            match sys::by_deadline(kind, deadline, sys::SILENT_FILE, look, |error| error) {
                Ok(()) => Finding::fine(SUBJECT, format!("the file {}", path.display())),
                Err(error) => Finding::failure(
                    SUBJECT,
                    format!("cannot create the file {}: {error}", path.display()),
                    "make the folder, where all ranks reach it and their user may write, or choose another path",
                ),
            }
        }
        StoreUrl::Redis(_) if !cfg!(feature = "redis") => {
            let advice = "build with --features redis, or use file:// or tcp://";
            Finding::failure(SUBJECT, "redis://, but kolo was built without the feature `redis`", advice)
        }
        StoreUrl::Redis(_) | StoreUrl::Env | StoreUrl::Hash(_) => Finding::fine(SUBJECT, "not checked"),
    }
}

fn local_connections() -> Finding {
    const SUBJECT: &str = "local connections";
    match LocalListener::bind(&crate::network::listener::random_name()) {
        Ok(_) => Finding::fine(SUBJECT, "processes of this machine can share memory"),
        Err(error) => {
            Finding::warning(SUBJECT, format!("processes of this machine cannot share memory: {error}"), sys::LOCAL_CONNECTIONS)
        }
    }
}

/// What a job costs the system; see [`cost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cost {
    /// The most descriptors of a rank: watches over the other processes, its regions of memory and
    /// theirs. Descriptors of links, of the program and of its listener are not included.
    pub descriptors: u64,
    /// The most bytes of shared memory that the ranks of a host use together, if no rank has
    /// operations in flight on more than three communicators at once. Registered buffers and links
    /// are not included.
    pub shared_memory: u64,
}

/// Returns what `ranks` on one host cost with `communicators` of all of them, the first one
/// included. `docs/scale.md` has a table.
pub fn cost(ranks: usize, communicators: usize) -> Cost {
    let (ranks, communicators) = (ranks as u64, communicators as u64);
    let of_areas = ranks * communicators * AREA as u64;
    let stages = KEPT as u64;
    // Every rank may lead communicators, and the size of its slabs is bounded.
    let slabs = ranks * slabs_for(of_areas / ranks.max(1)) as u64;
    // All stages are in the first memory region of the host.
    Cost { descriptors: ranks + 1 + slabs, shared_memory: of_areas + ranks * stages * STAGE as u64 }
}

/// The number of ranks for which there should be shared memory.
const RANKS: usize = 4;

fn shared_memory() -> Finding {
    const SUBJECT: &str = "shared memory";
    let mebibytes = |bytes: u64| bytes >> 20;
    let limit = sys::address_space_limit()
        .map_or_else(String::new, |limit| format!("; the address space is limited to {} MiB", mebibytes(limit)));
    let available = match sys::available_memory() {
        Some(bytes) => format!("{} MiB are available{limit}", mebibytes(bytes)),
        None => format!("the available amount is unknown{limit}"),
    };
    let len = RANKS * HOME;
    let made = Region::create(len).and_then(|region| region.reserve(0..len));
    let per_rank =
        format!("{} MiB for each rank, and {} KiB for each rank of a further communicator,", (KEPT * STAGE) >> 20, AREA >> 10);
    match made {
        Ok(()) => Finding::fine(SUBJECT, format!("{available}; {per_rank} are needed")),
        Err(error) => Finding::warning(SUBJECT, format!("none: {error}; {available}; {per_rank} are needed"), sys::MORE_MEMORY),
    }
}

/// The longest time that reading the clock should take.
const SLOW_CLOCK: Duration = Duration::from_nanos(500);

fn clock() -> Finding {
    const SUBJECT: &str = "clock";
    const READINGS: u32 = 1000;
    let began = Instant::now();
    (0..READINGS).for_each(|_| _ = std::hint::black_box(Instant::now()));
    let each = began.elapsed() / READINGS;
    let source = sys::clock_source().map_or_else(String::new, |source| format!(", from {source}"));
    let found = format!("read in {} ns{source}", each.as_nanos());
    if each > SLOW_CLOCK {
        let advice = "small operations take longer; on Linux choose the clock source tsc, if the kernel trusts it";
        return Finding::warning(SUBJECT, found, advice);
    }
    Finding::fine(SUBJECT, found)
}

/// Finds out which congestion control connections to other hosts have; `None` if the system does not
/// let processes choose it.
fn congestion_control(chosen: &CongestionControl) -> Option<Finding> {
    const SUBJECT: &str = "congestion control";
    let socket = sys::tcp_socket().ok()?;
    let systems = sys::congestion_control(&socket)?;
    let (wanted, found) = match chosen {
        CongestionControl::System => return Some(Finding::fine(SUBJECT, format!("the system's, {systems}"))),
        CongestionControl::Named(name) => (name.as_str(), name.clone()),
        CongestionControl::Auto => {
            let tolerant = sys::LOSS_TOLERANT?;
            (tolerant, format!("the system's, {systems}, and {tolerant} where the round trip is long"))
        }
    };
    let Err(error) = sys::set_congestion_control(&socket, wanted) else { return Some(Finding::fine(SUBJECT, found)) };
    let refused = format!("{systems}: the system refuses {wanted}: {error}");
    // This costs speed only where the round trip is long.
    if *chosen == CongestionControl::Auto {
        return Some(Finding::fine(SUBJECT, format!("{refused}; links with a long round trip have several connections instead")));
    }
    let advice = format!(
        "have the administrator load tcp_{wanted} and add it to net.ipv4.tcp_allowed_congestion_control, or correct \
         KOLO_CONGESTION_CONTROL"
    );
    Some(Finding::warning(SUBJECT, refused, advice))
}

fn processor() -> Finding {
    let allowed = sys::domains(sys::Domain::Core).iter().map(Vec::len).sum();
    Finding::fine("processor", format!("{}; reductions use {}", usable(sys::cores(), allowed), reduce::instructions()))
}

/// Says what a process has of the processors on which it may run; none are `allowed` if the system does not say.
fn usable(cores: usize, allowed: usize) -> String {
    if cores >= allowed {
        return format!("{cores} core{} for this process", if cores == 1 { "" } else { "s" });
    }
    format!("the CPU quota leaves the time of {cores} of {allowed} cores; if ranks are more than {cores}, they wait asleep")
}

/// Descriptors of a rank beside its links: libraries, its listener, its store, connections to the
/// listener.
const FILES: u64 = 192;

fn descriptors(ranks: usize, sockets: u64) -> Finding {
    const SUBJECT: &str = "descriptors";
    let Some([now, most]) = sys::descriptor_limit() else {
        return Finding::fine(SUBJECT, "not limited");
    };
    let needed = FILES + cost(ranks, 1).descriptors + ranks as u64 * sockets;
    let number = |limit: u64| if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() };
    let found = format!("{} may be open; a rank of a job of {} needs up to {needed}", number(now), shown::count(ranks, "rank"));
    if now >= needed {
        return Finding::fine(SUBJECT, found);
    }
    let advice = if most >= needed {
        format!("ulimit -n {}", needed.next_power_of_two().min(most))
    } else {
        format!("have the administrator raise the limit, which is {}, to {needed}", number(most))
    };
    Finding::failure(SUBJECT, found, advice)
}

/// The version of the kernels' compiler, or why there is none; `None` if kolo was built without devices.
fn compiler() -> Option<std::result::Result<String, String>> {
    #[cfg(feature = "cuda")]
    return Some(crate::cuda::compiler());
    #[cfg(not(feature = "cuda"))]
    None
}

fn cuda() -> Finding {
    const SUBJECT: &str = "CUDA";
    match sys::probe_cuda() {
        Cuda::NoLibrary(why) if config::process_env("KOLO_DEVICES").is_some_and(|devices| devices.trim() == "cuda") => {
            let advice = "unset KOLO_DEVICES, or install NVIDIA's driver";
            Finding::warning(SUBJECT, format!("not found, though KOLO_DEVICES asks for it: {why}"), advice)
        }
        // A machine without a GPU needs no driver.
        Cuda::NoLibrary(why) => Finding::fine(SUBJECT, format!("not found: {why}")),
        Cuda::Devices(devices, version) => {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            let found = format!("{devices} devices, driver for CUDA {major}.{minor}");
            match compiler() {
                Some(Ok(compiler)) => Finding::fine(SUBJECT, format!("{found}; {compiler} compiles the kernels")),
                Some(Err(why)) => {
                    let advice = "install NVRTC (pip install nvidia-cuda-nvrtc-cu12, and have LD_LIBRARY_PATH name its folder)";
                    Finding::warning(SUBJECT, format!("{found}; the prebuilt kernels are used: {why}"), advice)
                }
                None => {
                    let advice = "build kolo with the feature `cuda`, if buffers are in the memory of GPUs";
                    Finding::warning(SUBJECT, format!("{found}; but kolo was built without CUDA"), advice)
                }
            }
        }
        Cuda::Refuses(call, code) => {
            let (why, advice) = match code {
                100 => {
                    ("there is no device that it can use", "check CUDA_VISIBLE_DEVICES, and that the container has the devices")
                }
                3 | 101 => ("it does not know the device", "check CUDA_VISIBLE_DEVICES"),
                802 | 803 => {
                    ("driver and library have different versions", "reboot, or install the library of the driver's version")
                }
                _ => ("CUDA does not work on this machine", "run nvidia-smi; only device memory needs CUDA"),
            };
            Finding::warning(SUBJECT, format!("found the driver's library, but {call} returned {code}: {why}"), advice)
        }
    }
}

/// Reads a word of another process of this user, for two processes that `kolo doctor` starts.
#[doc(hidden)]
pub fn read_word(pid: u32, address: u64) -> Result<u64> {
    let mut word = 0u64;
    // SAFETY: `word` has the length that is read, and no other thread accesses it.
    let read = unsafe { sys::read_process(Process::with_id(pid), address, (&raw mut word).cast(), size_of::<u64>()) };
    read.map(|()| word).map_err(Error::os(format!("reading process {pid}")))
}

/// Makes the finding of an attempt of one process to read another's memory.
#[doc(hidden)]
pub fn of_reading(outcome: &std::result::Result<(), String>) -> Finding {
    const SUBJECT: &str = "reading processes";
    match outcome {
        Ok(()) => Finding::fine(SUBJECT, format!("ranks of one machine can read each other's memory ({})", sys::READING_CALL)),
        Err(why) => {
            let policy = sys::reading_policy().map_or_else(String::new, |policy| format!("; {policy}"));
            let what = format!("ranks of one machine cannot read each other's memory: {why}{policy}");
            Finding::warning(SUBJECT, what, sys::READING)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::order::PairCost;

    /// Returns what is said of three hosts whose pairs take this many picoseconds for a byte.
    fn said(per_byte: [Option<u64>; 3]) -> (Vec<Severity>, String) {
        let mut costs = PairCosts::new(3);
        for ((a, b), per_byte) in PairCosts::pairs(3).zip(per_byte) {
            costs.set(a, b, PairCost { latency: 50_000, per_byte: per_byte.unwrap_or(8_000) });
        }
        let exact = per_byte.map(|per_byte| (50_000, per_byte)).to_vec();
        let names = ["a 10.0.0.1", "b 10.0.0.2", "c 10.0.0.3"].map(str::to_owned).to_vec();
        let measured = Measured { exact, costs, unconfirmed: 0 };
        let links = links_of(&Again { names, measured, is_followed: true, is_slower: false });
        let found: Vec<&str> = links.findings.iter().map(|finding| &*finding.found).collect();
        (links.findings.iter().map(|finding| finding.severity).collect(), found.join("; "))
    }

    #[test]
    fn links_are_named_that_are_slow_or_unknown() {
        let fine = "at least 1.000 Gb/s between each two hosts, round trips of at most 100 us";
        assert_eq!(said([Some(8_000); 3]), (vec![Severity::Fine], fine.to_owned()));
        let slow = said([Some(80_000), Some(8_000), Some(80_000)]);
        assert_eq!(slow, (vec![Severity::Warning], "all of b: 0.100 Gb/s, others at least 1.000 Gb/s".to_owned()));
        let (severities, found) = said([None, Some(8_000), Some(8_000)]);
        assert_eq!(severities, [Severity::Fine, Severity::Warning]);
        assert!(found.contains("1 of 3 pairs"), "{found}");
        let (severities, found) = said([None; 3]);
        assert!(severities == [Severity::Warning] && found.contains("3 of 3 pairs"), "{found}");
    }

    #[test]
    fn a_quota_is_told_apart_from_a_choice_of_processors() {
        assert_eq!(usable(2, 2), "2 cores for this process");
        assert_eq!(usable(1, 1), "1 core for this process");
        // Where the system does not list them.
        assert_eq!(usable(8, 0), "8 cores for this process");
        assert!(usable(1, 4).starts_with("the CPU quota leaves the time of 1 of 4 cores; "));
    }
}

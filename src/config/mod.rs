//! The settings of a communicator, from options and environment variables. `docs/settings.md` lists
//! them.

mod environment;
mod secret;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::log;
use crate::schedule::Algorithm;
use crate::schedule::select::CostModel;
use crate::sys;
use crate::types::{DType, numbered};
pub use environment::{
    BANDWIDTH, TOLD, UNKNOWN_VARIABLES, VARIABLES, bandwidth, describe_unknown, duration, nearest_of, unknown_variables, variable,
};
pub(crate) use environment::{DURATION, Env, parse, process_env, warn_of_unknown_variables};
use environment::{empty, flag, named, path_of_environment, some_time};
pub(crate) use secret::secret_of;
pub use secret::{secret_given, secret_in};

numbered! {
    /// The transport between ranks.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum Transport {
        /// Shared memory inside a host, TCP between hosts.
        #[default]
        Auto = 0, "auto";
        /// TCP, inside a host as well.
        Tcp = 1, "tcp";
        /// Shared memory only: ranks on several hosts refuse to connect. If the system grants no
        /// shared memory, the ranks log a warning and exchange messages.
        Shm = 2, "shm";
    }
}

numbered! {
    /// How private memory passes from one process of a host to another: 1 MiB or more in
    /// all-reduce and reduce-scatter, 64 KiB or more in broadcast, scatter, all-gather and
    /// all-to-all.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum CopyMode {
        /// The fastest mode, which the first such operations measure.
        #[default]
        Auto = 0, "auto";
        /// Through shared memory.
        Staged = 1, "staged";
        /// Through shared memory, past the caches.
        Streamed = 2, "streamed";
        /// The system copies it from the other process (`process_vm_readv`), where kolo may do so;
        /// otherwise staged.
        Cma = 3, "cma";
    }
}

numbered! {
    /// How ranks of a host learn that all have reached a phase.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum FlagLayout {
        /// The layout whose cache lines cost less, by the caches that ranks share.
        #[default]
        Auto = 0, "auto";
        /// Every rank reads the flags of every other rank.
        Flat = 1, "flat";
        /// Ranks form groups. The leaders of groups read the flags of their members and of each
        /// other.
        Hierarchy = 2, "hierarchy";
    }
}

numbered! {
    /// How data in the memory of GPUs passes from one rank to another.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum DevicePath {
        /// In place, if all ranks can reach all buffers of an operation; otherwise through pinned
        /// host memory.
        #[default]
        Auto = 0, "auto";
        /// Through pinned host memory.
        Staged = 1, "staged";
    }
}

numbered! {
    /// Where ranks that each have a GPU of their own wait for each other, in a large operation on
    /// buffers that are open to all of them. Data that passes through areas waits on the host in any
    /// case.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum DeviceWaits {
        /// In the kernels, if no GPU limits the time of a kernel; otherwise on the host. This also
        /// allows one-shot all-reduces.
        #[default]
        Kernels = 0, "kernels";
        /// On the host.
        Host = 1, "host";
    }
}

numbered! {
    /// The type of the elements of messages between hosts, in sums and averages of `f32`.
    #[derive(Default)]
    #[non_exhaustive]
    pub enum WireDType {
        /// That of the buffers.
        #[default]
        F32 = 0, "f32";
        /// Half the bytes, with 11 significant bits: an element beyond 65504 becomes infinite.
        F16 = 1, "f16";
        /// Half the bytes, with 8 significant bits and the range of `f32`.
        BF16 = 2, "bf16";
    }
}

impl WireDType {
    /// Returns the type of 16 bits, if messages have one.
    pub(crate) const fn narrowed(self) -> Option<DType> {
        match self {
            WireDType::F32 => None,
            WireDType::F16 => Some(DType::F16),
            WireDType::BF16 => Some(DType::BF16),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) shared: SharedSettings,
    pub(crate) timeout: Duration,
    pub(crate) start_timeout: Duration,
    pub(crate) host: Option<String>,
    /// Where this host is in the network.
    pub(crate) topology: Option<String>,
    pub(crate) interface: Option<String>,
    pub(crate) congestion_control: CongestionControl,
    /// The interfaces over which links are striped.
    pub(crate) rails: Option<String>,
    /// Where this process listens.
    pub(crate) ports: Option<RangeInclusive<u16>>,
    pub(crate) insecure: bool,
    /// Whether this process joins a job that has started.
    pub(crate) join: bool,
    /// Where the flight recorder writes files, and whether SIGUSR1 makes it write one.
    pub(crate) trace_dir: Option<PathBuf>,
    pub(crate) trace_signal: bool,
    /// Where a rank writes the file by which `kolo top` finds the job.
    pub(crate) top_dir: Option<PathBuf>,
    /// Where a rank serves metrics.
    pub(crate) metrics: Option<MetricsAddress>,
    /// Where a rank writes which rank its failure names, for `kolo run`.
    pub(crate) failure_file: Option<PathBuf>,
    /// The files for encrypting links in the network, if they are encrypted.
    pub(crate) tls: Option<TlsFiles>,
}

/// Where ranks serve metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MetricsAddress {
    /// The first rank of a machine listens at this port, and the others at those that follow.
    Port(SocketAddr),
    /// A Unix socket; `{rank}` stands for the rank.
    Socket(String),
}

/// What [`MetricsAddress::parse`] parses, for messages.
pub(crate) const METRICS: &str =
    "an address and a port, as in 127.0.0.1:9400, or a socket for each rank, as in unix:/run/kolo-{rank}.sock";

impl MetricsAddress {
    pub(crate) fn parse(text: &str) -> Option<MetricsAddress> {
        match text.strip_prefix("unix:") {
            Some(path) => path.contains("{rank}").then(|| MetricsAddress::Socket(path.to_owned())),
            None => text.parse().ok().map(MetricsAddress::Port),
        }
    }
}

/// How TCP connections between ranks react to lost packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum CongestionControl {
    /// BBR where the round trip is long, if the system has it; Reno inside a machine; otherwise the
    /// system's.
    #[default]
    Auto,
    /// The system's.
    System,
    /// The one with this name.
    Named(String),
}

/// What [`CongestionControl::parse`] reads, for messages.
pub(crate) const CONGESTION_CONTROL: &str = "auto, system, or the name of a congestion control of the system such as cubic";

impl CongestionControl {
    pub(crate) fn parse(text: &str) -> Option<CongestionControl> {
        /// Linux has names of at most 15 bytes.
        const LONGEST: usize = 15;
        let is_name = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        match text {
            "auto" => Some(CongestionControl::Auto),
            "system" => Some(CongestionControl::System),
            name => ((1..=LONGEST).contains(&name.len()) && is_name(name)).then(|| CongestionControl::Named(name.to_owned())),
        }
    }
}

/// The PEM files with which links are encrypted.
#[derive(Clone, Debug)]
pub(crate) struct TlsFiles {
    /// The certificate of the job's authority.
    pub(crate) authority: PathBuf,
    /// The certificate that this rank shows, and its private key.
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// The settings that all ranks take from rank 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedSettings {
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) transport: Transport,
    pub(crate) copy_mode: CopyMode,
    pub(crate) reproducible: bool,
    /// TCP connections of a link; `None` if each link has as many as its way needs.
    pub(crate) sockets: Option<u8>,
    /// Whether buffers of any rank may be in the memory of devices.
    pub(crate) devices: bool,
    pub(crate) device_path: DevicePath,
    pub(crate) device_waits: DeviceWaits,
    pub(crate) flag_layout: FlagLayout,
    pub(crate) wire_dtype: WireDType,
    pub(crate) model: CostModel,
    /// Whether the costs between hosts are measured, because none were given.
    pub(crate) measures: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            shared: SharedSettings {
                algorithm: None,
                transport: Transport::Auto,
                copy_mode: CopyMode::Auto,
                reproducible: false,
                sockets: None,
                devices: false,
                device_path: DevicePath::Auto,
                device_waits: DeviceWaits::Kernels,
                flag_layout: FlagLayout::Auto,
                wire_dtype: WireDType::F32,
                model: CostModel::default(),
                measures: false,
            },
            timeout: Duration::from_secs(300),
            start_timeout: START_TIMEOUT,
            host: None,
            topology: None,
            interface: None,
            congestion_control: CongestionControl::Auto,
            rails: None,
            ports: None,
            insecure: false,
            join: false,
            trace_dir: None,
            trace_signal: false,
            top_dir: None,
            metrics: None,
            failure_file: None,
            tls: None,
        }
    }
}

impl Settings {
    pub(crate) fn from_env(env: Env<'_>) -> Result<Settings> {
        let mut settings = Settings::default();
        // What follows may log.
        log::start(parse(env, "KOLO_LOG", log::LEVEL, log::level)?);
        let shared = &mut settings.shared;
        (shared.algorithm, shared.model) = selection(env)?;
        shared.measures = NETWORK_COSTS.into_iter().all(|name| env(name).is_none());
        shared.transport = named(env, "KOLO_TRANSPORT")?.unwrap_or(shared.transport);
        shared.copy_mode = named(env, "KOLO_COPY_MODE")?.unwrap_or(shared.copy_mode);
        shared.flag_layout = named(env, "KOLO_FLAG_LAYOUT")?.unwrap_or(shared.flag_layout);
        shared.reproducible = parse(env, "KOLO_REPRODUCIBLE", "0 or 1", flag)?.unwrap_or(shared.reproducible);
        shared.sockets = parse(env, "KOLO_SOCKETS", SOCKETS, |text| text.parse().ok().and_then(sockets))?;
        shared.device_path = named(env, "KOLO_DEVICE_PATH")?.unwrap_or(shared.device_path);
        shared.device_waits = named(env, "KOLO_DEVICE_WAITS")?.unwrap_or(shared.device_waits);
        shared.wire_dtype = named(env, "KOLO_WIRE_DTYPE")?.unwrap_or(shared.wire_dtype);
        shared.devices = match parse(env, "KOLO_DEVICES", DEVICES, devices)? {
            Some(DeviceChoice::None) => false,
            Some(DeviceChoice::Cuda) => true,
            Some(DeviceChoice::Auto) | None => sys::may_have_devices(),
        };
        settings.timeout = parse(env, "KOLO_TIMEOUT", DURATION, some_time)?.unwrap_or(settings.timeout);
        settings.start_timeout = start_timeout(env)?;
        settings.insecure = insecure(env)?.unwrap_or(settings.insecure);
        settings.join = parse(env, "KOLO_JOIN", "0 or 1", flag)?.unwrap_or(settings.join);
        settings.host = env("KOLO_HOST");
        settings.topology = topology(env)?;
        settings.trace_dir = env("KOLO_TRACE_DIR").map(PathBuf::from);
        settings.failure_file = path_of_environment("KOLO_FAILURE_FILE");
        settings.trace_signal = parse(env, "KOLO_TRACE_SIGNAL", "0 or 1", flag)?.unwrap_or(settings.trace_signal);
        settings.top_dir = env("KOLO_TOP_DIR").map(PathBuf::from);
        settings.metrics = parse(env, "KOLO_METRICS", METRICS, MetricsAddress::parse)?;
        settings.interface = ["KOLO_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"].into_iter().find_map(env);
        settings.congestion_control =
            parse(env, "KOLO_CONGESTION_CONTROL", CONGESTION_CONTROL, CongestionControl::parse)?.unwrap_or_default();
        settings.rails = env("KOLO_RAILS");
        settings.ports = ports(env)?;
        settings.tls = tls(env)?;
        Ok(settings)
    }
}

/// Returns the algorithm that the process's environment chooses, and the costs by which algorithms
/// are compared otherwise: those that a job takes from it.
///
/// # Errors
///
/// [`Error::Setting`] if a variable has an invalid value.
pub fn selection_of_environment() -> Result<(Option<Algorithm>, CostModel)> {
    selection(&process_env)
}

/// The variables that give costs of messages between hosts.
const NETWORK_COSTS: [&str; 2] = ["KOLO_NETWORK_LATENCY", "KOLO_NETWORK_BANDWIDTH"];

fn selection(env: Env<'_>) -> Result<(Option<Algorithm>, CostModel)> {
    let (algorithm, mut model) = (named(env, "KOLO_ALGORITHM")?, CostModel::default());
    if let Some(latency) = parse(env, "KOLO_NETWORK_LATENCY", DURATION, some_time)? {
        model.network.latency = latency.as_secs_f64();
        model.uplink.latency = model.network.latency;
    }
    if let Some(rate) = parse(env, "KOLO_NETWORK_BANDWIDTH", BANDWIDTH, bandwidth)? {
        model.network.per_byte = 1e-9 / rate;
    }
    Ok((algorithm, model))
}

/// Returns the folder for files that later jobs use: `KOLO_CACHE_DIR`, or `kolo` in the cache folder
/// of the system.
pub(crate) fn cache_folder(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("KOLO_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("kolo")))
        .or_else(|| set("LOCALAPPDATA").map(|folder| folder.join("kolo")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("kolo")))
}

/// Returns whether `tcp://` stores accept other machines without a secret, if the variable is set.
pub(crate) fn insecure(env: Env<'_>) -> Result<Option<bool>> {
    parse(env, "KOLO_INSECURE", "0 or 1", flag)
}

/// The devices whose memory may hold buffers.
#[derive(Clone, Copy)]
enum DeviceChoice {
    /// The devices that this machine seems to have.
    Auto,
    None,
    Cuda,
}

const DEVICES: &str = "auto, none or cuda";

fn devices(text: &str) -> Option<DeviceChoice> {
    Some(match text {
        "auto" => DeviceChoice::Auto,
        "none" => DeviceChoice::None,
        "cuda" => DeviceChoice::Cuda,
        _ => return None,
    })
}

fn tls(env: Env<'_>) -> Result<Option<TlsFiles>> {
    const NAMES: [&str; 3] = ["KOLO_TLS_CA", "KOLO_TLS_CERT", "KOLO_TLS_KEY"];
    let values = NAMES.map(env);
    if let Some((name, _)) = NAMES.iter().zip(&values).find(|(_, value)| value.as_deref() == Some("")) {
        return Err(empty(name, "the path of a PEM file", "TLS"));
    }
    match values.map(|value| value.map(PathBuf::from)) {
        [None, None, None] => Ok(None),
        [Some(authority), Some(certificate), Some(key)] => Ok(Some(TlsFiles { authority, certificate, key })),
        some => {
            let missing = NAMES.into_iter().zip(&some).find(|(_, file)| file.is_none()).map_or("", |(name, _)| name);
            Err(Error::setting(missing, "", format!("a PEM file: {} belong together", NAMES.join(", "))))
        }
    }
}

/// The timeout of the start, unless one is set.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest timeout: 100 years. It can be added to a time without overflow.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

fn start_timeout(env: Env<'_>) -> Result<Duration> {
    Ok(parse(env, "KOLO_START_TIMEOUT", DURATION, some_time)?.unwrap_or(START_TIMEOUT).min(FOREVER))
}

pub(crate) const SOCKETS: &str = "1 to 64 sockets for each link";

/// Returns a number of sockets, if it is valid.
pub(crate) fn sockets(count: usize) -> Option<u8> {
    (1..=64).contains(&count).then_some(count as u8)
}

/// Returns the path of this host in the network, if a variable gives it.
pub(crate) fn topology(env: Env<'_>) -> Result<Option<String>> {
    parse(env, "KOLO_TOPOLOGY", TOPOLOGY, topology_path)
}

/// What [`topology_path`] parses, for messages.
pub(crate) const TOPOLOGY: &str =
    "the path of this host in the network, such as rack7 or pod1/rack7: up to 8 names, 255 bytes together, without blanks";

/// Parses the path of a host in the network.
pub(crate) fn topology_path(text: &str) -> Option<String> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(|letter: char| letter.is_whitespace() || letter.is_control());
    let is_path = text.len() <= 255 && text.split('/').count() <= 8 && text.split('/').all(is_name);
    is_path.then(|| text.to_owned())
}

/// Returns the ports at which an environment lets a process listen.
pub(crate) fn ports(env: Env<'_>) -> Result<Option<RangeInclusive<u16>>> {
    parse(env, "KOLO_PORTS", PORTS, port_range)
}

pub(crate) const PORTS: &str = "give a range of ports of 1 to 65535, the smaller one first, such as 20000-20100";

/// Parses the range of ports that the setting of that name holds.
///
/// # Errors
///
/// [`Error::Setting`] if the text is no range of ports.
pub fn ports_given(setting: &str, text: &str) -> Result<RangeInclusive<u16>> {
    port_range(text).ok_or_else(|| Error::setting(setting, text, PORTS))
}

/// Parses a range of ports, or one port.
fn port_range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    checked_ports(first.trim().parse().ok()?..=last.trim().parse().ok()?)
}

/// Returns a range if it has ports, and 0 is none of them.
pub(crate) fn checked_ports(ports: RangeInclusive<u16>) -> Option<RangeInclusive<u16>> {
    (*ports.start() > 0 && !ports.is_empty()).then_some(ports)
}

pub(crate) fn ports_text(ports: &RangeInclusive<u16>) -> String {
    format!("{}-{}", ports.start(), ports.end())
}

/// Returns the secret that the environment of this process holds or names: that of `KOLO_SECRET`,
/// else that in the file `KOLO_SECRET_FILE`. Reads the file within `KOLO_START_TIMEOUT`.
///
/// # Errors
///
/// One of the variables is set but holds no secret or is empty, or the file cannot be read in time
/// or may be read by others.
pub fn secret_of_environment() -> Result<Option<[u8; 32]>> {
    secret_of(&process_env, Instant::now() + start_timeout(&process_env)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings> {
        Settings::from_env(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn one_rule_says_whether_a_job_is_insecure() {
        let read = |value: &str| insecure(&|_| Some(value.to_owned()));
        assert_eq!(["1", "true", "yes"].map(|value| read(value).unwrap()), [Some(true); 3]);
        assert_eq!(["0", "false", "no"].map(|value| read(value).unwrap()), [Some(false); 3]);
        assert!(matches!(read("maybe"), Err(Error::Setting { .. })));
        assert_eq!(insecure(&|_| None).unwrap(), None);
    }

    #[test]
    fn variables_are_read() {
        let read = settings(&[
            ("KOLO_ALGORITHM", "ring"),
            ("KOLO_TRANSPORT", "tcp"),
            ("KOLO_COPY_MODE", "cma"),
            ("KOLO_FLAG_LAYOUT", "hierarchy"),
            ("KOLO_REPRODUCIBLE", "1"),
            ("KOLO_SOCKETS", "4"),
            ("KOLO_CONGESTION_CONTROL", "cubic"),
            ("KOLO_DEVICES", "cuda"),
            ("KOLO_DEVICE_PATH", "staged"),
            ("KOLO_DEVICE_WAITS", "host"),
            ("KOLO_WIRE_DTYPE", "bf16"),
            ("KOLO_TIMEOUT", "1.5s"),
            ("KOLO_START_TIMEOUT", "2m"),
            ("KOLO_PORTS", "20000-20100"),
            ("KOLO_NETWORK_LATENCY", "5us"),
            ("KOLO_NETWORK_BANDWIDTH", "12.5"),
            ("GLOO_SOCKET_IFNAME", "eth0"),
            ("KOLO_RAILS", "eth0,eth1"),
            ("KOLO_TRACE_DIR", "/tmp/traces"),
            ("KOLO_TRACE_SIGNAL", "yes"),
            ("KOLO_TOP_DIR", "/run/top"),
            ("KOLO_METRICS", "unix:/run/kolo-{rank}.sock"),
        ])
        .unwrap();
        assert_eq!(read.shared.algorithm, Some(Algorithm::Ring));
        assert_eq!(read.shared.transport, Transport::Tcp);
        assert_eq!(read.shared.copy_mode, CopyMode::Cma);
        assert_eq!(read.shared.flag_layout, FlagLayout::Hierarchy);
        assert!(read.shared.reproducible);
        assert_eq!(read.shared.sockets, Some(4));
        assert_eq!(read.congestion_control, CongestionControl::Named("cubic".to_owned()));
        let system = settings(&[("KOLO_CONGESTION_CONTROL", "system")]).unwrap();
        assert_eq!((system.shared.sockets, system.congestion_control), (None, CongestionControl::System));
        assert!(read.shared.devices);
        assert_eq!(read.shared.device_path, DevicePath::Staged);
        assert_eq!(read.shared.device_waits, DeviceWaits::Host);
        assert_eq!(read.shared.wire_dtype, WireDType::BF16);
        assert!(!settings(&[("KOLO_DEVICES", "none")]).unwrap().shared.devices);
        assert_eq!(read.timeout, Duration::from_millis(1500));
        assert_eq!(read.start_timeout, Duration::from_secs(120));
        assert!((read.shared.model.network.latency - 5e-6).abs() < 1e-12);
        assert!((read.shared.model.network.per_byte - 8e-11).abs() < 1e-15);
        assert_eq!(read.interface.as_deref(), Some("eth0"));
        assert_eq!(read.rails.as_deref(), Some("eth0,eth1"));
        assert_eq!(read.ports, Some(20_000..=20_100));
        assert_eq!(settings(&[("KOLO_PORTS", "4242")]).unwrap().ports, Some(4242..=4242));
        assert_eq!((read.trace_dir.as_deref(), read.trace_signal), (Some("/tmp/traces".as_ref()), true));
        assert_eq!(read.top_dir.as_deref(), Some("/run/top".as_ref()));
        assert_eq!(read.metrics, Some(MetricsAddress::Socket("/run/kolo-{rank}.sock".to_owned())));
    }

    /// All others are taken for misspelt.
    #[test]
    fn every_variable_is_known_and_documented() {
        let is_of_name = |letter: char| letter.is_ascii_uppercase() || letter == '_';
        let words = include_str!("../../docs/settings.md").split(|letter| !is_of_name(letter));
        let documented: std::collections::BTreeSet<&str> =
            words.filter(|word| word.starts_with("KOLO_") && !word.ends_with('_')).collect();
        assert_eq!(documented, VARIABLES.iter().copied().collect());
        let read = std::cell::RefCell::new(Vec::new());
        let env = |name: &str| {
            read.borrow_mut().push(name.to_owned());
            None
        };
        Settings::from_env(&env).unwrap();
        secret_of(&env, late()).unwrap();
        for name in read.into_inner().iter().filter(|name| name.starts_with("KOLO_")) {
            assert!(VARIABLES.contains(&&**name), "{name} is read");
        }
    }

    #[test]
    fn the_documentation_has_the_defaults_and_all_values() {
        let page = include_str!("../../docs/settings.md");
        let row = |name: &str| page.lines().find(|line| line.starts_with(&format!("| `{name}`"))).unwrap();
        let unset = format!("{:?}", settings(&[]).unwrap());
        let mut checked = 0;
        for line in page.lines().filter(|line| line.starts_with("| `KOLO_")) {
            let cells: Vec<&str> = line.split(" | ").collect();
            let [name, default] = [cells[0].trim_start_matches("| "), cells[1]].map(|cell| cell.trim_matches('`'));
            if cells[1].starts_with('`') && cells[1].ends_with('`') {
                let read = format!("{:?}", settings(&[(name, default)]).unwrap());
                assert_eq!(read, unset, "docs/settings.md says that the default of {name} is {default}");
                checked += 1;
            }
        }
        assert!(checked > 10, "only {checked} defaults were found: the test looks in the wrong place");
        macro_rules! names {
            ($kind:ty) => {
                <$kind>::ALL.iter().map(|value| value.name()).collect::<Vec<_>>()
            };
        }
        for (name, values) in [
            ("KOLO_ALGORITHM", names!(Algorithm)),
            ("KOLO_TRANSPORT", names!(Transport)),
            ("KOLO_COPY_MODE", names!(CopyMode)),
            ("KOLO_FLAG_LAYOUT", names!(FlagLayout)),
            ("KOLO_DEVICE_PATH", names!(DevicePath)),
            ("KOLO_DEVICE_WAITS", names!(DeviceWaits)),
            ("KOLO_WIRE_DTYPE", names!(WireDType)),
        ] {
            for value in values {
                assert!(row(name).contains(&format!("`{value}`")), "docs/settings.md does not name {value} for {name}");
            }
        }
        let network = CostModel::default().network;
        let latency = format!("{:.0} us", network.latency * 1e6);
        assert!(row("KOLO_NETWORK_LATENCY").contains(&latency), "{latency}");
        let bandwidth = format!("{}", 1e-9 / network.per_byte);
        assert!(row("KOLO_NETWORK_BANDWIDTH").contains(&bandwidth), "{bandwidth}");
    }

    #[test]
    fn wrong_values_are_named_with_what_they_may_be() {
        for (name, value, hint) in [
            ("KOLO_ALGORITHM", "rings", "halving-doubling"),
            ("KOLO_TRANSPORT", "rdma", "auto"),
            ("KOLO_LOG", "loud", "off, error, warn"),
            ("KOLO_COPY_MODE", "copied", "streamed"),
            ("KOLO_FLAG_LAYOUT", "tree", "hierarchy"),
            ("KOLO_REPRODUCIBLE", "maybe", "0 or 1"),
            ("KOLO_SOCKETS", "0", "1 to 64"),
            ("KOLO_SOCKETS", "65", "1 to 64"),
            ("KOLO_CONGESTION_CONTROL", "b b r", "such as cubic"),
            ("KOLO_CONGESTION_CONTROL", "a-name-of-16-byte", "such as cubic"),
            ("KOLO_DEVICES", "gpu", "none or cuda"),
            ("KOLO_DEVICE_PATH", "ipc", "staged"),
            ("KOLO_DEVICE_WAITS", "gpu", "kernels"),
            ("KOLO_WIRE_DTYPE", "f64", "bf16"),
            ("KOLO_METRICS", "9400", "127.0.0.1:9400"),
            ("KOLO_METRICS", "unix:/run/kolo.sock", "{rank}"),
            ("KOLO_PORTS", "0-5", "20000-20100"),
            ("KOLO_PORTS", "5-4", "20000-20100"),
            ("KOLO_PORTS", "1-65536", "20000-20100"),
            ("KOLO_PORTS", "-", "20000-20100"),
            ("KOLO_TIMEOUT", "soon", "500ms"),
            ("KOLO_TIMEOUT", "0", "more than 0"),
            ("KOLO_TIMEOUT", "-1", "more than 0"),
            ("KOLO_TIMEOUT", "nan", "more than 0"),
            ("KOLO_NETWORK_BANDWIDTH", "0", "more than 0"),
            ("KOLO_TLS_CA", "", "or, for a job without TLS, remove the variable"),
            ("KOLO_TLS_KEY", "", "the path of a PEM file"),
        ] {
            let error = settings(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value) && error.contains(hint), "{error}");
        }
        let incomplete = settings(&[("KOLO_TLS_CA", "ca.pem")]).unwrap_err().to_string();
        assert!(incomplete.contains("KOLO_TLS_CERT") && incomplete.contains("belong together"), "{incomplete}");
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn the_folder_comes_from_the_environment() {
        let of = |set: &[(&str, &str)]| {
            cache_folder(|name| set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.into()))
                .map(|folder| folder.display().to_string().replace('\\', "/"))
        };
        let all = [("KOLO_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/b"), ("LOCALAPPDATA", "/c"), ("HOME", "/d")];
        let expected = ["/a", "/b/kolo", "/c/kolo", "/d/.cache/kolo"];
        for (i, expected) in expected.into_iter().enumerate() {
            assert_eq!(of(&all[i..]).as_deref(), Some(expected));
        }
        assert_eq!(of(&[("KOLO_CACHE_DIR", ""), ("HOME", "/d")]).as_deref(), Some("/d/.cache/kolo"));
        assert_eq!(of(&[]), None);
    }
}

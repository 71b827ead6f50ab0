//! The kinds of values that settings have: how each is read from a variable, taken from a program, and
//! passed on by rank 0.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::environment::{BANDWIDTH, DURATION, Env, bandwidth, empty, flag, parse, some_time};
use crate::error::{Error, Result};
use crate::schedule::select::{CostModel, LinkCost};
use crate::sys;
use crate::types::{Numbered, UnknownNameError};
use crate::wire::{Reader, Writer};

/// A kind of setting.
pub(crate) trait Kind {
    /// What a communicator works with.
    type Value: Clone + fmt::Debug;
    /// What a program gives.
    type Given;

    /// Reads text. The setting has this name in errors.
    fn parse(name: &str, text: &str) -> Result<Self::Value>;

    /// Checks what a program gives.
    fn check(name: &str, given: Self::Given) -> Result<Self::Value>;

    /// Reads the variables of the setting: usually one.
    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<Self::Value>> {
        let name = variables[0];
        env(name).map(|text| Self::parse(name, &text)).transpose()
    }

    /// Texts that are right: all of them, if they are names.
    #[cfg(test)]
    fn right() -> Vec<&'static str>;

    /// Texts that are wrong, each with a part of what the error says instead.
    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }
}

/// A kind of setting that all ranks take from rank 0.
pub(crate) trait Shared: Kind {
    fn write(value: &Self::Value, writer: &mut Writer);

    /// Takes what [`Shared::write`] wrote; `None` if it is no value.
    fn take(reader: &mut Reader<'_>) -> Option<Self::Value>;
}

/// A kind of setting that is a number on the wire.
pub(crate) trait Number: Kind {
    /// Stands for an option that is not set.
    const NONE: u64 = u64::MAX;

    fn number(value: &Self::Value) -> u64;

    fn of_number(number: u64) -> Option<Self::Value>;
}

impl<K: Number> Shared for K {
    fn write(value: &K::Value, writer: &mut Writer) {
        writer.number(K::number(value));
    }

    fn take(reader: &mut Reader<'_>) -> Option<K::Value> {
        K::of_number(reader.number()?)
    }
}

/// A setting without a default.
impl<K: Kind> Kind for Option<K> {
    type Value = Option<K::Value>;
    type Given = K::Given;

    fn parse(name: &str, text: &str) -> Result<Self::Value> {
        K::parse(name, text).map(Some)
    }

    fn check(name: &str, given: K::Given) -> Result<Self::Value> {
        K::check(name, given).map(Some)
    }

    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<Self::Value>> {
        Ok(K::read(env, variables)?.map(Some))
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        K::right()
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        K::wrong()
    }
}

impl<K: Number> Number for Option<K> {
    fn number(value: &Self::Value) -> u64 {
        value.as_ref().map_or(K::NONE, K::number)
    }

    fn of_number(number: u64) -> Option<Self::Value> {
        if number == K::NONE { Some(None) } else { K::of_number(number).map(Some) }
    }
}

/// One of several names.
impl<T: Numbered> Kind for T {
    type Value = T;
    type Given = T;

    fn parse(name: &str, text: &str) -> Result<T> {
        text.trim().parse().map_err(|unknown: UnknownNameError| Error::setting(name, text, unknown.to_string()))
    }

    fn check(_: &str, given: T) -> Result<T> {
        Ok(given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        T::values().iter().map(|value| value.to_string().leak() as &str).collect()
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("none of them", T::right()[0])]
    }
}

impl<T: Numbered> Number for T {
    fn number(value: &T) -> u64 {
        Numbered::number(*value).into()
    }

    fn of_number(number: u64) -> Option<T> {
        T::values().iter().copied().find(|value| u64::from(Numbered::number(*value)) == number)
    }
}

impl Kind for bool {
    type Value = bool;
    type Given = bool;

    fn parse(name: &str, text: &str) -> Result<bool> {
        flag(text.trim()).ok_or_else(|| Error::setting(name, text, "0 or 1"))
    }

    fn check(_: &str, given: bool) -> Result<bool> {
        Ok(given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["0", "1", "yes"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("maybe", "0 or 1")]
    }
}

impl Number for bool {
    fn number(value: &bool) -> u64 {
        (*value).into()
    }

    fn of_number(number: u64) -> Option<bool> {
        Some(number != 0)
    }
}

/// A text as it is.
impl Kind for String {
    type Value = String;
    type Given = String;

    fn parse(_: &str, text: &str) -> Result<String> {
        Ok(text.to_owned())
    }

    fn check(_: &str, given: String) -> Result<String> {
        Ok(given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["eth0,eth1"]
    }
}

/// A path as it is.
impl Kind for PathBuf {
    type Value = PathBuf;
    type Given = PathBuf;

    fn parse(_: &str, text: &str) -> Result<PathBuf> {
        Ok(text.into())
    }

    fn check(_: &str, given: PathBuf) -> Result<PathBuf> {
        Ok(given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["/tmp/traces"]
    }
}

/// The longest timeout: 100 years. It can be added to a time without overflow.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A timeout. Longer ones than [`FOREVER`] count as that.
impl Kind for Duration {
    type Value = Duration;
    type Given = Duration;

    fn parse(name: &str, text: &str) -> Result<Duration> {
        let timeout = some_time(text.trim()).ok_or_else(|| Error::setting(name, text, DURATION))?;
        Ok(timeout.min(FOREVER))
    }

    fn check(name: &str, given: Duration) -> Result<Duration> {
        if given.is_zero() { Err(Error::setting(name, "0", DURATION)) } else { Ok(given.min(FOREVER)) }
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["1.5s", "2m"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("soon", "500ms"), ("0", "more than 0"), ("-1", "more than 0"), ("nan", "more than 0")]
    }
}

/// The number of TCP connections of a link.
pub(crate) enum Sockets {}

const SOCKETS: &str = "1 to 64 sockets for each link";

impl Kind for Sockets {
    type Value = u8;
    type Given = usize;

    fn parse(name: &str, text: &str) -> Result<u8> {
        let count = text.trim().parse().ok().and_then(Sockets::of_number);
        count.ok_or_else(|| Error::setting(name, text, SOCKETS))
    }

    fn check(name: &str, given: usize) -> Result<u8> {
        Sockets::of_number(given as u64).ok_or_else(|| Error::setting(name, given.to_string(), SOCKETS))
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["1", "4", "64"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("0", "1 to 64"), ("65", "1 to 64"), ("two", "1 to 64")]
    }
}

impl Number for Sockets {
    /// Each link has as many as its round trip asks for.
    const NONE: u64 = 0;

    fn number(value: &u8) -> u64 {
        (*value).into()
    }

    fn of_number(number: u64) -> Option<u8> {
        (1..=64).contains(&number).then_some(number as u8)
    }
}

/// The seed of rounding at random, or 0.
pub(crate) enum Seed {}

const SEED: &str = "a number from 0 to 4294967295";

impl Kind for Seed {
    type Value = u32;
    type Given = u32;

    fn parse(name: &str, text: &str) -> Result<u32> {
        text.trim().parse().map_err(|_| Error::setting(name, text, SEED))
    }

    fn check(_: &str, given: u32) -> Result<u32> {
        Ok(given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["0", "1", "4294967295"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("-1", "from 0"), ("4294967296", "to 4294967295"), ("any", "a number")]
    }
}

impl Number for Seed {
    fn number(value: &u32) -> u64 {
        (*value).into()
    }

    fn of_number(number: u64) -> Option<u32> {
        number.try_into().ok()
    }
}

/// Whether buffers may be in the memory of devices: by default if this machine seems to have some.
pub(crate) enum Devices {}

impl Kind for Devices {
    type Value = bool;
    type Given = bool;

    fn parse(name: &str, text: &str) -> Result<bool> {
        match text.trim() {
            "auto" => Ok(sys::may_have_devices()),
            "none" => Ok(false),
            "cuda" => Ok(true),
            _ => Err(Error::setting(name, text, "auto, none or cuda")),
        }
    }

    fn check(_: &str, given: bool) -> Result<bool> {
        Ok(given)
    }

    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<bool>> {
        let name = variables[0];
        Devices::parse(name, env(name).as_deref().unwrap_or("auto")).map(Some)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["auto", "none", "cuda"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("gpu", "none or cuda")]
    }
}

impl Number for Devices {
    fn number(value: &bool) -> u64 {
        (*value).into()
    }

    fn of_number(number: u64) -> Option<bool> {
        Some(number != 0)
    }
}

/// The network interfaces to use. Variables of other libraries are read after kolo's.
pub(crate) enum Interface {}

impl Kind for Interface {
    type Value = String;
    type Given = String;

    fn parse(_: &str, text: &str) -> Result<String> {
        Ok(text.to_owned())
    }

    fn check(_: &str, given: String) -> Result<String> {
        Ok(given)
    }

    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<String>> {
        Ok([variables[0], "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"].into_iter().find_map(env))
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["^lo,docker"]
    }
}

/// The path of a host in the network.
pub(crate) enum Topology {}

const TOPOLOGY: &str =
    "the path of this host in the network, such as rack7 or pod1/rack7: up to 8 names, 255 bytes together, without blanks";

/// Parses the path of a host in the network.
pub(crate) fn topology_path(text: &str) -> Option<String> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(|letter: char| letter.is_whitespace() || letter.is_control());
    let is_path = text.len() <= 255 && text.split('/').count() <= 8 && text.split('/').all(is_name);
    is_path.then(|| text.to_owned())
}

impl Kind for Topology {
    type Value = String;
    type Given = String;

    fn parse(name: &str, text: &str) -> Result<String> {
        topology_path(text.trim()).ok_or_else(|| Error::setting(name, text, TOPOLOGY))
    }

    fn check(name: &str, given: String) -> Result<String> {
        Topology::parse(name, &given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["rack7", "pod1/rack7"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("a//b", "rack7"), ("rack 7", "without blanks")]
    }
}

/// The ports at which a process listens.
impl Kind for RangeInclusive<u16> {
    type Value = RangeInclusive<u16>;
    type Given = RangeInclusive<u16>;

    fn parse(name: &str, text: &str) -> Result<Self> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = first.trim().parse().and_then(|first| Ok(first..=last.trim().parse()?));
        range.ok().filter(has_ports).ok_or_else(|| Error::setting(name, text, PORTS))
    }

    fn check(name: &str, given: Self) -> Result<Self> {
        if has_ports(&given) { Ok(given) } else { Err(Error::setting(name, ports_text(&given), PORTS)) }
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["20000-20100", "4242"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        ["0-5", "5-4", "1-65536", "-"].map(|text| (text, "20000-20100")).to_vec()
    }
}

const PORTS: &str = "give a range of ports of 1 to 65535, the smaller one first, such as 20000-20100";

/// Whether a range has ports, and 0 is none of them.
fn has_ports(range: &RangeInclusive<u16>) -> bool {
    *range.start() > 0 && !range.is_empty()
}

pub(crate) fn ports_text(ports: &RangeInclusive<u16>) -> String {
    format!("{}-{}", ports.start(), ports.end())
}

/// Where ranks serve metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MetricsAddress {
    /// The first rank of a machine listens at this port, and the others at those that follow.
    Port(SocketAddr),
    /// A Unix socket; `{rank}` stands for the rank.
    Socket(String),
}

impl Kind for MetricsAddress {
    type Value = MetricsAddress;
    type Given = String;

    fn parse(name: &str, text: &str) -> Result<MetricsAddress> {
        const METRICS: &str =
            "an address and a port, as in 127.0.0.1:9400, or a socket for each rank, as in unix:/run/kolo-{rank}.sock";
        let address = match text.trim().strip_prefix("unix:") {
            Some(path) => path.contains("{rank}").then(|| MetricsAddress::Socket(path.to_owned())),
            None => text.trim().parse().ok().map(MetricsAddress::Port),
        };
        address.ok_or_else(|| Error::setting(name, text, METRICS))
    }

    fn check(name: &str, given: String) -> Result<MetricsAddress> {
        MetricsAddress::parse(name, &given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["127.0.0.1:9400", "unix:/run/kolo-{rank}.sock"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("9400", "127.0.0.1:9400"), ("unix:/run/kolo.sock", "{rank}")]
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

impl Kind for CongestionControl {
    type Value = CongestionControl;
    type Given = String;

    fn parse(name: &str, text: &str) -> Result<CongestionControl> {
        const EXPECTED: &str = "auto, system, or the name of a congestion control of the system such as cubic";
        /// Linux has names of at most 15 bytes.
        const LONGEST: usize = 15;
        let is_name = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        match text.trim() {
            "auto" => Ok(CongestionControl::Auto),
            "system" => Ok(CongestionControl::System),
            own if (1..=LONGEST).contains(&own.len()) && is_name(own) => Ok(CongestionControl::Named(own.to_owned())),
            _ => Err(Error::setting(name, text, EXPECTED)),
        }
    }

    fn check(name: &str, given: String) -> Result<CongestionControl> {
        CongestionControl::parse(name, &given)
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["auto", "system", "cubic"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("b b r", "such as cubic"), ("a-name-of-16-byte", "such as cubic")]
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

impl Kind for TlsFiles {
    type Value = TlsFiles;
    type Given = (PathBuf, PathBuf, PathBuf);

    fn parse(name: &str, text: &str) -> Result<TlsFiles> {
        match text.split(',').collect::<Vec<_>>()[..] {
            [authority, certificate, key] => TlsFiles::check(name, (authority.into(), certificate.into(), key.into())),
            _ => Err(Error::setting(name, text, "three PEM files, with a comma between them")),
        }
    }

    fn check(_: &str, (authority, certificate, key): Self::Given) -> Result<TlsFiles> {
        Ok(TlsFiles { authority, certificate, key })
    }

    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<TlsFiles>> {
        let values: Vec<Option<String>> = variables.iter().map(|name| env(name)).collect();
        if let Some((name, _)) = variables.iter().zip(&values).find(|(_, value)| value.as_deref() == Some("")) {
            return Err(empty(name, "the path of a PEM file", "TLS"));
        }
        match &values[..] {
            [None, None, None] => Ok(None),
            [Some(authority), Some(certificate), Some(key)] => {
                Ok(Some(TlsFiles { authority: authority.into(), certificate: certificate.into(), key: key.into() }))
            }
            some => {
                let missing = variables.iter().zip(some).find(|(_, file)| file.is_none()).map_or("", |(name, _)| name);
                Err(Error::setting(missing, "", format!("a PEM file: {} belong together", variables.join(", "))))
            }
        }
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["ca.pem,rank.pem,rank.key"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("ca.pem", "three PEM files")]
    }
}

/// The costs by which algorithms are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Costs {
    pub(crate) model: CostModel,
    /// Whether the costs between hosts are measured, because none were given.
    pub(crate) are_measured: bool,
}

impl Kind for Costs {
    type Value = Costs;
    type Given = CostModel;

    fn parse(name: &str, text: &str) -> Result<Costs> {
        let (latency, rate) = text.split_once(',').map_or((text, None), |(latency, rate)| (latency, Some(rate)));
        let given = |variable: &str| if variable == "latency" { Some(latency.to_owned()) } else { rate.map(str::to_owned) };
        let costs = Costs::read(&given, &["latency", "rate"]);
        costs.ok().flatten().ok_or_else(|| Error::setting(name, text, format!("{DURATION}, a comma, and {BANDWIDTH}")))
    }

    fn check(name: &str, model: CostModel) -> Result<Costs> {
        match model.invalid() {
            Some((cost, value)) => Err(Error::setting(name, format!("{cost}: {value}"), "finite costs of at least 0")),
            None => Ok(Costs { model, are_measured: false }),
        }
    }

    /// Reads a latency and a bandwidth.
    fn read(env: Env<'_>, variables: &[&str]) -> Result<Option<Costs>> {
        let mut model = CostModel::default();
        if let Some(latency) = parse(env, variables[0], DURATION, some_time)? {
            model.network.latency = latency.as_secs_f64();
            model.uplink.latency = model.network.latency;
        }
        if let Some(rate) = parse(env, variables[1], BANDWIDTH, bandwidth)? {
            model.network.per_byte = 1e-9 / rate;
        }
        Ok(Some(Costs { model, are_measured: variables.iter().all(|name| env(name).is_none()) }))
    }

    #[cfg(test)]
    fn right() -> Vec<&'static str> {
        vec!["5us,12.5"]
    }

    #[cfg(test)]
    fn wrong() -> Vec<(&'static str, &'static str)> {
        vec![("5us,0", "more than 0"), ("soon,1", "more than 0")]
    }
}

impl Shared for Costs {
    fn write(value: &Costs, writer: &mut Writer) {
        writer.number(value.are_measured.into());
        let CostModel { network, uplink, ring, local, reduce, window_sync, window_per_byte } = value.model;
        for LinkCost { latency, overhead, per_byte } in [network, uplink, ring.unwrap_or(network), local] {
            [latency, overhead, per_byte].iter().for_each(|cost| _ = writer.number(cost.to_bits()));
        }
        [reduce, window_sync, window_per_byte].iter().for_each(|cost| _ = writer.number(cost.to_bits()));
    }

    fn take(reader: &mut Reader<'_>) -> Option<Costs> {
        let are_measured = reader.number()? != 0;
        let mut cost = || reader.number().map(f64::from_bits);
        let mut link = || Some(LinkCost { latency: cost()?, overhead: cost()?, per_byte: cost()? });
        let (network, uplink, ring, local) = (link()?, link()?, link()?, link()?);
        let ring = Some(ring).filter(|ring| *ring != network);
        let (reduce, window_sync, window_per_byte) = (cost()?, cost()?, cost()?);
        let model = CostModel { network, uplink, ring, local, reduce, window_sync, window_per_byte };
        model.invalid().is_none().then_some(Costs { model, are_measured })
    }
}

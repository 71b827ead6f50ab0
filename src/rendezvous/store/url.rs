//! The URLs of stores.

use std::fmt;
use std::path::PathBuf;

use crate::error::{Result, StoreError};
use crate::sys;

/// The URL of a store, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    File(PathBuf),
    Tcp { host: String, port: u16 },
    Redis(RedisUrl),
    Etcd(EtcdUrl),
    Env,
    Hash(String),
}

/// The URL of a Redis server. It is displayed without its password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RedisUrl(pub(super) String);

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&masked(&self.0))
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The URL of an etcd cluster. It is displayed without its user and password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct EtcdUrl {
    /// Whether the servers speak TLS.
    pub(super) tls: bool,
    /// User and password, if the cluster asks for them.
    pub(super) login: Option<(String, String)>,
    /// The servers of the cluster, as `host:port`.
    pub(super) servers: Vec<String>,
    /// What all keys begin with, between slashes.
    pub(super) prefix: String,
}

impl EtcdUrl {
    const PORT: u16 = 2379;
    const PREFIX: &str = "kolo";
    const MOST_SERVERS: usize = 16;

    /// Parses what follows the scheme: `[user:password@]host[:port][,host[:port]...][/prefix]`.
    fn parse(rest: &str, tls: bool) -> Result<EtcdUrl, String> {
        let (login, rest) = match rest.rsplit_once('@') {
            Some((login, rest)) => {
                let (user, password) = login.split_once(':').ok_or_else(|| "the user has no password".to_owned())?;
                (Some((unescaped(user)?, unescaped(password)?)), rest)
            }
            None => (None, rest),
        };
        let (servers, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { EtcdUrl::PREFIX } else { prefix };
        if !prefix.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-_.".contains(&byte)) {
            return Err("the prefix of its keys may have letters, digits and /-_. only".to_owned());
        }
        let server = |text: &str| {
            let has_port = text.rfind(':').is_some_and(|colon| text.rfind(']').is_none_or(|bracket| bracket < colon));
            let (host, port) = if has_port { split_port(text)? } else { split_port(&format!("{text}:{}", EtcdUrl::PORT))? };
            if !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:%".contains(&byte)) {
                return Err("a server's name is no host".to_owned());
            }
            Ok(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
        };
        let servers = servers.split(',').map(server).collect::<Result<Vec<_>, String>>()?;
        if servers.len() > EtcdUrl::MOST_SERVERS {
            return Err(format!("it names more than {} servers", EtcdUrl::MOST_SERVERS));
        }
        Ok(EtcdUrl { tls, login, servers, prefix: prefix.to_owned() })
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "etcds" } else { "etcd" };
        let user = if self.login.is_some() { "***@" } else { "" };
        write!(f, "{scheme}://{user}{}/{}", self.servers.join(","), self.prefix)
    }
}

impl fmt::Debug for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns a text of a URL with its `%xx` replaced by what they stand for.
fn unescaped(text: &str) -> Result<String, String> {
    let wrong = || "a % in its user or password is not followed by two hexadecimal digits; write % itself as %25".to_owned();
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| (byte? as char).to_digit(16);
        bytes.push(match byte {
            b'%' => {
                let (high, low) = (digit(rest.next()).ok_or_else(wrong)?, digit(rest.next()).ok_or_else(wrong)?);
                (high << 4 | low) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| "its user or password is not UTF-8".to_owned())
}

/// Returns a URL without its user, password and parameters. The path of a file is not changed.
pub(crate) fn masked(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (&url[..scheme.len() + 3], rest));
    if scheme == "file://" || is_path(url) {
        return url.to_owned();
    }
    let (rest, parameters) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?***"));
    let (user, host) = rest.rsplit_once('@').map_or(("", rest), |(_, host)| ("***@", host));
    format!("{scheme}{user}{host}{parameters}")
}

impl StoreUrl {
    /// Returns the host and the port of a store over TCP, which help to choose an address.
    pub(crate) fn host_and_port(&self) -> Option<(&str, u16)> {
        if let StoreUrl::Tcp { host, port } = self { Some((host, *port)) } else { None }
    }

    /// Returns the address if the server is not one of kolo, and so is asked by a library.
    pub(super) fn asks_a_foreign_server(&self) -> Option<String> {
        match self {
            StoreUrl::Redis(url) => Some(url.to_string()),
            StoreUrl::Etcd(url) => Some(url.to_string()),
            _ => None,
        }
    }

    pub(crate) fn parse(url: &str) -> Result<StoreUrl> {
        StoreUrl::try_parse(url).map_err(|problem| StoreError::Url(problem).at(masked(url)))
    }

    fn try_parse(url: &str) -> Result<StoreUrl, String> {
        if is_path(url) {
            return file_path(url).map(StoreUrl::File);
        }
        let (scheme, rest) = url.split_once("://").ok_or_else(|| "it has no scheme".to_owned())?;
        match scheme {
            "file" => file_path(rest).map(StoreUrl::File),
            "tcp" => {
                let (host, port) = split_port(rest)?;
                Ok(StoreUrl::Tcp { host, port })
            }
            "redis" | "rediss" if rest.is_empty() => Err("it names no host".to_owned()),
            "redis" | "rediss" => Ok(StoreUrl::Redis(RedisUrl(url.to_owned()))),
            "etcd" | "etcds" => Ok(StoreUrl::Etcd(EtcdUrl::parse(rest, scheme == "etcds")?)),
            "env" if rest.is_empty() => Ok(StoreUrl::Env),
            "env" => Err("env:// takes no host or path".to_owned()),
            "hash" if !rest.is_empty() => Ok(StoreUrl::Hash(rest.to_owned())),
            "hash" => Err("it has no name".to_owned()),
            // The text before the first colon may be a part of a password.
            _ if scheme.contains('@') => Err("it has no scheme".to_owned()),
            _ => Err(format!("{scheme}:// is not a kind of store")),
        }
    }
}

/// Splits `host:port`; IPv6 addresses are in brackets.
fn split_port(text: &str) -> Result<(String, u16), String> {
    let text = text.strip_suffix('/').unwrap_or(text);
    let (host, port) = text.rsplit_once(':').ok_or_else(|| "it has no port".to_owned())?;
    let port = port.parse().map_err(|_| "the text after its last colon is not a port".to_owned())?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    if host.is_empty() {
        return Err("it names no host".to_owned());
    }
    if bare.is_none() && host.contains(':') {
        return Err("an IPv6 address must be in brackets".to_owned());
    }
    Ok((host.to_owned(), port))
}

/// Returns whether a text is a path that begins with a drive, on systems that have drives.
fn has_drive(path: &str) -> bool {
    let mut letters = path.chars();
    let has_letter = letters.next().is_some_and(|letter| letter.is_ascii_alphabetic()) && letters.next() == Some(':');
    sys::has_drive_letters() && has_letter
}

/// Returns whether a text is the absolute path of a file instead of a URL.
fn is_path(text: &str) -> bool {
    text.starts_with('/') || (has_drive(text) && text[2..].starts_with(['/', '\\']) && !text[2..].starts_with("//"))
}

/// Returns the path in `file://<rest>`.
fn file_path(rest: &str) -> Result<PathBuf, String> {
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    let path = path.strip_prefix('/').filter(|path| has_drive(path)).unwrap_or(path);
    if !path.starts_with('/') && !has_drive(path) {
        return Err("a file's URL has three slashes: file:///path".to_owned());
    }
    // "D:pg" would be in whichever folder of the drive the rank is.
    if has_drive(path) && !path[2..].starts_with(['/', '\\']) {
        return Err("a slash must follow the drive: file:///D:/path".to_owned());
    }
    if path.ends_with('/') || (sys::has_drive_letters() && path.ends_with('\\')) {
        return Err("it names a folder, not a file".to_owned());
    }
    Ok(PathBuf::from(path))
}

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

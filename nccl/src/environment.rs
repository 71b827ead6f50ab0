//! The variables `NCCL_*`, and what this library prints about itself.

use std::io::Write;
use std::sync::Once;

use kolo::{Builder, Communicator, DevicePath, Transport};

use crate::codes::VERSION;
use crate::driver;

/// Variables that have an effect.
pub(crate) const HONOURED: [&str; 7] = [
    "NCCL_COMM_BLOCKING",
    "NCCL_COMM_ID",
    "NCCL_DEBUG",
    "NCCL_HOSTID",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
];

/// Variables that people set, and why they have no effect. Others have none either.
const IGNORED: [(&str, &str); 8] = [
    ("NCCL_ALGO", "kolo chooses algorithms by measured costs; see KOLO_ALGORITHM"),
    ("NCCL_DEBUG_FILE", "the log goes to standard error"),
    ("NCCL_IB_DISABLE", "kolo uses TCP between hosts, never InfiniBand's verbs"),
    ("NCCL_NET_PLUGIN", "kolo loads no plugins"),
    ("NCCL_PROFILER_PLUGIN", "kolo loads no plugins; see KOLO_TRACE_DIR and KOLO_METRICS"),
    ("NCCL_PROTO", "kolo has no such protocols"),
    ("NCCL_TUNER_PLUGIN", "kolo loads no plugins; see KOLO_ALGORITHM"),
    ("NCCL_TUNER_CONFIG_FILE", "kolo loads no plugins; see KOLO_ALGORITHM"),
];

/// Returns a variable. In a program with rights that its user need not have, none counts.
pub(crate) fn variable(name: &str) -> Option<String> {
    kolo::settings::variable(name, "text", |text| Some(text.to_owned())).ok().flatten()
}

/// Returns the number of a variable.
pub(crate) fn number(name: &str) -> Option<i64> {
    variable(name)?.parse().ok()
}

/// Returns the options that the variables ask for. Those of kolo take precedence.
pub(crate) fn builder() -> Builder {
    let asks = |name: &str, own: &str| number(name).is_some_and(|number| number != 0) && variable(own).is_none();
    let mut builder = Communicator::builder();
    if driver::is_there() && variable("KOLO_DEVICES").is_none() {
        builder = builder.devices(true);
    }
    if asks("NCCL_SHM_DISABLE", "KOLO_TRANSPORT") {
        builder = builder.transport(Transport::Tcp);
    }
    if asks("NCCL_P2P_DISABLE", "KOLO_DEVICE_PATH") {
        builder = builder.device_path(DevicePath::Staged);
    }
    if let Some(host) = variable("NCCL_HOSTID").filter(|_| variable("KOLO_HOST").is_none()) {
        builder = builder.host(host);
    }
    builder
}

/// What is printed, by `NCCL_DEBUG`.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(crate) enum Level {
    Nothing,
    Version,
    Warn,
    Info,
}

fn level() -> Level {
    let text = variable("NCCL_DEBUG").unwrap_or_default().to_ascii_uppercase();
    match &*text {
        "VERSION" => Level::Version,
        "WARN" => Level::Warn,
        "INFO" | "ABORT" | "TRACE" => Level::Info,
        _ => Level::Nothing,
    }
}

/// Writes a line to standard error. A closed pipe or a full disk there fails no call: `eprintln!` would
/// panic.
pub(crate) fn write_line(text: &str) {
    _ = std::io::stderr().write_all(format!("kolo-nccl: {text}\n").as_bytes());
}

/// Prints a line if `NCCL_DEBUG` asks for its level.
pub(crate) fn print(of: Level, text: impl FnOnce() -> String) {
    if of <= level() {
        let name = if of == Level::Warn { "NCCL WARN" } else { "NCCL INFO" };
        write_line(&format!("{name} {}", text()));
    }
}

/// Prints once per process which library this is and which variables have no effect.
pub(crate) fn introduce() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        print(Level::Version, || {
            format!(
                "NCCL version {}.{}.{} by kolo {}",
                VERSION / 10_000,
                VERSION / 100 % 100,
                VERSION % 100,
                env!("CARGO_PKG_VERSION")
            )
        });
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let mut ignored: Vec<String> = names
            .filter(|name| name.starts_with("NCCL_") && !HONOURED.contains(&&**name))
            .map(|name| {
                let why = IGNORED.iter().find(|(known, _)| *known == name);
                why.map_or(name.clone(), |(_, why)| format!("{name} ({why})"))
            })
            .collect();
        ignored.sort();
        if !ignored.is_empty() {
            write_line(&format!("these variables have no effect: {}", ignored.join(", ")));
        }
    });
}

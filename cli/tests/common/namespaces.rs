//! Several hosts on one machine: each network namespace has its own address, and none shares memory
//! with another.

use std::process::{Command, Stdio};

/// Hosts that exist until this is dropped.
pub(crate) struct Namespaces {
    pub(crate) names: Vec<String>,
    bridge: String,
    network: &'static str,
}

impl Namespaces {
    /// Makes hosts whose addresses are in `network`, the first three bytes of an address.
    pub(crate) fn new(network: &'static str, count: usize) -> Result<Namespaces, String> {
        let id = format!("k{}x{}", network.rsplit('.').next().unwrap_or_default(), std::process::id() % 10_000);
        let mut made = Namespaces { names: Vec::new(), bridge: id.clone(), network };
        ip(&format!("link add {} type bridge", made.bridge))?;
        ip(&format!("link set {} up", made.bridge))?;
        for i in 0..count {
            let (name, outside) = (format!("{id}n{i}"), format!("{id}v{i}"));
            ip(&format!("netns add {name}"))?;
            made.names.push(name.clone());
            ip(&format!("link add {outside} type veth peer name eth0 netns {name}"))?;
            ip(&format!("link set {outside} master {} up", made.bridge))?;
            ip(&format!("-n {name} addr add {}/24 dev eth0", made.address(i)))?;
            ip(&format!("-n {name} link set eth0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(made)
    }

    /// Gives this machine an address among those of the hosts.
    #[allow(dead_code, reason = "one of the tests runs all its processes on the hosts")]
    pub(crate) fn join(&self) -> Result<(), String> {
        ip(&format!("addr add {}.254/24 dev {}", self.network, self.bridge))
    }

    /// The address of a host.
    pub(crate) fn address(&self, host: usize) -> String {
        format!("{}.{}", self.network, host + 1)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
        let _ = Command::new("ip").args(["link", "del", &self.bridge]).stderr(Stdio::null()).status();
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

//! Where hosts are in the network: the path of each, such as `pod1/rack7`, the order and the racks that
//! follow from the paths of all, and what a job has measured between its hosts.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::config::{self, Env, process_env, topology_path};
use crate::error::Result;
use crate::schedule::order::{PairCost, PairCosts};
use crate::schedule::select::CostModel;

/// The path of a host, and what says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) path: String,
    pub(crate) source: &'static str,
}

/// Returns where this host is; `None` if nothing says so. `given` is the path that the settings give.
pub(crate) fn position(given: Option<String>, env: Env<'_>) -> Option<Position> {
    let given = given.map(|path| Position { path, source: "KOLO_TOPOLOGY" });
    given.or_else(|| slurm(env).map(|path| Position { path, source: "SLURM_TOPOLOGY_ADDR" }))
}

/// Returns the path of this host in the network as a job takes it from the process's environment, and the
/// variable that has it.
///
/// # Errors
///
/// [`Error::Setting`](crate::Error::Setting) if `KOLO_TOPOLOGY` has an invalid value.
pub fn topology_of_environment() -> Result<Option<(String, &'static str)>> {
    let given = config::topology(&process_env)?;
    Ok(position(given, &process_env).map(|Position { path, source }| (path, source)))
}

/// Returns the switches above this host, as SLURM's topology plugin names them: `s0.s1.node7`, with the
/// pattern `switch.switch.node`. A plugin without a topology names only the host.
fn slurm(env: Env<'_>) -> Option<String> {
    let (address, pattern) = (env("SLURM_TOPOLOGY_ADDR")?, env("SLURM_TOPOLOGY_ADDR_PATTERN")?);
    let (address, pattern): (Vec<&str>, Vec<&str>) = (address.trim().split('.').collect(), pattern.trim().split('.').collect());
    let (&last, above) = pattern.split_last()?;
    // The name of a host may have dots, and is last.
    if last != "node" || above.is_empty() || address.len() < pattern.len() || above.contains(&"node") {
        return None;
    }
    topology_path(&address[..above.len()].join("/"))
}

/// The order in which schedules visit hosts, and the racks in which these are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostOrder {
    /// Indices of hosts.
    pub(crate) hosts: Vec<usize>,
    /// Where each rack starts in `hosts`, and where the last one ends.
    pub(crate) racks: Vec<usize>,
}

impl HostOrder {
    /// Returns the order of hosts with these paths: hosts with a longer common path are closer to each
    /// other, otherwise they stay in order. Racks are the lowest level of the paths that divides the
    /// hosts into several racks of which one has several hosts. `None` if no level does, or if a host
    /// has no path.
    pub(crate) fn of(paths: &[&str]) -> Option<HostOrder> {
        if paths.iter().any(|path| path.is_empty()) {
            return None;
        }
        let levels = paths.iter().map(|path| path.split('/').count()).max()?;
        // For each level, the first host with the same path down to it.
        let mut keys = vec![Vec::with_capacity(levels); paths.len()];
        for level in 1..=levels {
            let mut first = HashMap::new();
            for (host, path) in paths.iter().enumerate() {
                keys[host].push(*first.entry(down_to(path, level)).or_insert(host));
            }
        }
        let mut hosts: Vec<usize> = (0..paths.len()).collect();
        hosts.sort_by(|&a, &b| keys[a].cmp(&keys[b]));
        let racks_at = |level: usize| -> Vec<usize> {
            let starts = (0..hosts.len()).filter(|&at| at == 0 || keys[hosts[at]][level] != keys[hosts[at - 1]][level]);
            starts.chain([hosts.len()]).collect()
        };
        let dividing = || (0..levels).rev().map(racks_at).filter(|racks| (2..hosts.len()).contains(&(racks.len() - 1)));
        // A level at which most hosts have a rack of their own says less than the next larger one.
        let has_company = |racks: &Vec<usize>| 3 * (racks.len() - 1) <= 2 * hosts.len();
        let racks = dividing().find(has_company).or_else(|| dividing().next())?;
        Some(HostOrder { hosts, racks })
    }

    /// Returns the hosts of each rack.
    pub(crate) fn racks(&self) -> impl Iterator<Item = &[usize]> {
        self.racks.windows(2).map(|ends| &self.hosts[ends[0]..ends[1]])
    }

    /// Returns the fewest hosts of a rack.
    pub(crate) fn fewest_per_rack(&self) -> usize {
        self.racks().map(<[usize]>::len).min().unwrap_or(1)
    }
}

/// What messages between the hosts of a job cost, as it has measured at the start, or a communicator since.
pub(crate) struct BetweenHosts {
    /// The host of each rank of the job, in the order of `costs`.
    pub(crate) hosts: Vec<usize>,
    pub(crate) costs: PairCosts,
    /// The costs if all links were as `usual`.
    pub(crate) model: CostModel,
    /// What the link between the first two hosts cost at the start.
    pub(crate) usual: PairCost,
    /// Whether a link carries clearly less than at the start.
    pub(crate) is_slower: bool,
    /// The order of these hosts, which was asked for last.
    pub(super) last: Mutex<(Vec<usize>, Vec<usize>)>,
}

impl BetweenHosts {
    /// Returns the order in which schedules visit hosts, between which messages cost this. Programs split
    /// communicators again and again, so the last order is kept.
    pub(crate) fn order(&self, hosts: &[usize], costs: &PairCosts) -> Vec<usize> {
        let mut last = self.last.lock();
        if last.0 != hosts {
            *last = (hosts.to_vec(), costs.order().unwrap_or_else(|| (0..hosts.len()).collect()));
        }
        last.1.clone()
    }
}

/// Logs whether schedules follow the topology that the paths of all hosts describe.
pub(crate) fn log(paths: &[&str]) {
    let unknown = paths.iter().filter(|path| path.is_empty()).count();
    match HostOrder::of(paths) {
        Some(order) => {
            let racks = order.racks().count();
            crate::log::info!(hosts = paths.len(), racks, "messages between hosts follow the topology");
        }
        None if unknown > 0 && unknown < paths.len() => {
            let hosts = paths.len();
            crate::log::warn!(
                hosts,
                unknown,
                "the topology is not used: some hosts have no path; set KOLO_TOPOLOGY, or SLURM's variables, on all or on none"
            );
        }
        None if unknown == 0 => crate::log::info!(hosts = paths.len(), "the topology is not used: it puts no hosts together"),
        None => {}
    }
}

/// Returns the first levels of a path.
fn down_to(path: &str, levels: usize) -> &str {
    path.match_indices('/').nth(levels - 1).map_or(path, |(at, _)| &path[..at])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(paths: &[&str]) -> Option<(Vec<usize>, Vec<usize>)> {
        HostOrder::of(paths).map(|HostOrder { hosts, racks }| (hosts, racks))
    }

    #[test]
    fn hosts_of_a_rack_follow_each_other() {
        assert_eq!(order(&["a", "b", "a", "b"]), Some((vec![0, 2, 1, 3], vec![0, 2, 4])));
        assert_eq!(order(&["b", "a", "a"]), Some((vec![0, 1, 2], vec![0, 1, 3])));
        // Racks of different pods may have one name.
        assert_eq!(
            order(&["p/a", "q/a", "p/b", "q/a", "p/a", "q/b", "p/b"]),
            Some((vec![0, 4, 2, 6, 1, 3, 5], vec![0, 2, 4, 6, 7]))
        );
        // If most hosts have a rack of their own, pods count.
        assert_eq!(order(&["p/1", "q/2", "p/3", "q/4", "p/1"]), Some((vec![0, 4, 2, 1, 3], vec![0, 3, 5])));
        assert_eq!(order(&["p/1", "q/2", "p/3", "q/4"]), Some((vec![0, 2, 1, 3], vec![0, 2, 4])));
        assert_eq!(order(&["p", "q/2", "p/3", "q"]), Some((vec![0, 2, 1, 3], vec![0, 2, 4])));
    }

    #[test]
    fn paths_that_divide_nothing_say_nothing() {
        for paths in [&[][..], &["a"], &["a", "a"], &["a", "b"], &["a", "b", "c"], &["a", "", "a", "b"], &["p/a", "p/b"]] {
            assert_eq!(order(paths), None, "{paths:?}");
        }
    }

    proptest! {
        #[test]
        fn orders_are_complete(paths in proptest::collection::vec("[a-c](/[a-c]){0,2}", 0..20)) {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            if let Some(order) = HostOrder::of(&paths) {
                let mut hosts = order.hosts.clone();
                hosts.sort_unstable();
                prop_assert!(hosts.into_iter().eq(0..paths.len()));
                prop_assert!(order.racks.is_sorted_by(|a, b| a < b));
                prop_assert_eq!(order.racks().map(<[usize]>::len).sum::<usize>(), paths.len());
                prop_assert!((2..paths.len()).contains(&order.racks().count()));
            }
        }
    }

    #[test]
    fn slurm_names_the_switches() {
        let of = |address: &str, pattern: &str| {
            let env = |name: &str| match name {
                "SLURM_TOPOLOGY_ADDR" => Some(address.to_owned()),
                "SLURM_TOPOLOGY_ADDR_PATTERN" => Some(pattern.to_owned()),
                _ => None,
            };
            position(None, &env).map(|position| position.path)
        };
        assert_eq!(of("s0.s1.node7", "switch.switch.node"), Some("s0/s1".to_owned()));
        assert_eq!(of("s1.node7.cluster.local", "switch.node"), Some("s1".to_owned()));
        assert_eq!(of("block2.node7", "block.node"), Some("block2".to_owned()));
        for (address, pattern) in
            [("node7", "node"), ("s1", "switch.node"), ("s0..node7", "switch.switch.node"), ("", ""), ("a.b", "x")]
        {
            assert_eq!(of(address, pattern), None, "{address} as {pattern}");
        }
        let given = Some("rack7".to_owned());
        let env = |name: &str| Some(if name.ends_with("PATTERN") { "switch.node" } else { "s1.node7" }.to_owned());
        assert_eq!(position(given, &env), Some(Position { path: "rack7".to_owned(), source: "KOLO_TOPOLOGY" }));
    }
}

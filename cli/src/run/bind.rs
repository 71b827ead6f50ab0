//! Which processors the ranks of a host may use (`--bind-to`), and how many threads they start.

use std::process::Command;

use clap::ValueEnum;
use kolo::settings::{Domain, cores, domains};
use serde::{Deserialize, Serialize};

use super::process::use_processors;

/// The variable by which OpenMP, and with it PyTorch and numpy, chooses its number of threads.
const THREADS: &str = "OMP_NUM_THREADS";

/// What the processors of a rank share, with mpirun's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(super) enum BindTo {
    /// A core for each rank
    Core,
    /// The cores that share a last-level cache
    L3,
    /// The cores of a NUMA node
    Numa,
    /// Every processor that the launcher may use
    #[default]
    None,
}

/// The processors of each rank of a host, and how many threads OpenMP starts there.
pub(super) struct Bindings {
    bind_to: BindTo,
    ranks: Vec<Binding>,
}

#[derive(Debug, PartialEq, Eq)]
struct Binding {
    /// The number of the domain, and its processors. `None`: the rank is not bound.
    domain: Option<(usize, Vec<u32>)>,
    threads: usize,
}

impl Bindings {
    /// Chooses processors for each of `ranks` ranks on this host.
    pub(super) fn new(bind_to: BindTo, ranks: usize) -> Result<Bindings, String> {
        let shared = match bind_to {
            BindTo::Core => domains(Domain::Core),
            BindTo::L3 => domains(Domain::Cache),
            BindTo::Numa => domains(Domain::Node),
            BindTo::None => Vec::new(),
        };
        if bind_to != BindTo::None && shared.is_empty() {
            return Err("--bind-to: this system does not say which processors share what; leave it out".to_owned());
        }
        // A control group may leave less time than that of all processors.
        let time = cores();
        let ranks = place(bind_to, ranks, &shared, &domains(Domain::Core), time)?;
        Ok(Bindings { bind_to, ranks })
    }

    /// Prepares the start of a rank, by its number on this host.
    pub(super) fn apply(&self, command: &mut Command, local: usize) {
        if let Some((_, processors)) = &self.ranks[local].domain {
            use_processors(command, processors);
        }
        if let Some(threads) = self.threads(command, local) {
            command.env(THREADS, threads.to_string());
        }
    }

    /// Returns how many threads a rank is told to start: none if it has the host for itself or the user
    /// has chosen.
    fn threads(&self, command: &Command, local: usize) -> Option<usize> {
        let is_given = command.get_envs().any(|(name, _)| name == THREADS) || std::env::var_os(THREADS).is_some();
        (self.ranks.len() > 1 && !is_given).then_some(self.ranks[local].threads)
    }

    /// Describes what [`Bindings::apply`] does.
    pub(super) fn describe(&self, command: &Command, rank: usize, local: usize) -> String {
        let threads = self.threads(command, local).map_or_else(String::new, |threads| format!("; {THREADS}={threads}"));
        let Some((number, processors)) = &self.ranks[local].domain else { return format!("rank {rank} is not bound{threads}") };
        let what = match self.bind_to {
            BindTo::Core | BindTo::None => "core",
            BindTo::L3 => "L3 cache",
            BindTo::Numa => "NUMA node",
        };
        let list: Vec<String> = processors.iter().map(u32::to_string).collect();
        format!("rank {rank} is bound to {what} {number} (processors {}){threads}", list.join(","))
    }
}

/// Places ranks on domains: neighbours in one, as they send each other most.
fn place(bind_to: BindTo, ranks: usize, shared: &[Vec<u32>], cores: &[Vec<u32>], time: usize) -> Result<Vec<Binding>, String> {
    if bind_to == BindTo::Core && ranks > shared.len() {
        let cores = shared.len();
        return Err(format!(
            "--bind-to core: this host has {cores} cores for {ranks} ranks; start {cores} there, or give --bind-to none"
        ));
    }
    let core_time = if cores.is_empty() { time } else { cores.len().min(time) };
    let domain_of = |local: usize| if shared.len() > ranks { local } else { local * shared.len() / ranks };
    let binding = |local: usize| {
        if shared.is_empty() {
            return Binding { domain: None, threads: (core_time / ranks).max(1) };
        }
        let number = domain_of(local);
        let with = (0..ranks).filter(|other| domain_of(*other) == number).count();
        let own = cores.iter().filter(|core| core.iter().any(|processor| shared[number].contains(processor))).count();
        let threads = (own / with).min(time / ranks).max(1);
        Binding { domain: Some((number, shared[number].clone())), threads }
    };
    Ok((0..ranks).map(binding).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the domain and the threads of each rank, on eight cores of two hyperthreads and two caches.
    fn placed(bind_to: BindTo, ranks: usize, time: usize) -> Result<Vec<(Option<usize>, usize)>, String> {
        let cores: Vec<Vec<u32>> = (0..8).map(|core| vec![core, core + 8]).collect();
        let caches = [0, 4].map(|first| (first..first + 4).flat_map(|core| [core, core + 8]).collect::<Vec<u32>>());
        let shared = match bind_to {
            BindTo::Core => &cores[..],
            BindTo::None => &[],
            _ => &caches,
        };
        let all = place(bind_to, ranks, shared, &cores, time)?;
        Ok(all.into_iter().map(|binding| (binding.domain.map(|(number, _)| number), binding.threads)).collect())
    }

    #[test]
    fn ranks_share_the_processors() {
        assert_eq!(placed(BindTo::None, 2, 16), Ok(vec![(None, 4); 2]));
        assert_eq!(placed(BindTo::None, 16, 16), Ok(vec![(None, 1); 16]));
        // A quota of three processors.
        assert_eq!(placed(BindTo::None, 2, 3), Ok(vec![(None, 1); 2]));
        assert_eq!(placed(BindTo::Core, 3, 16), Ok(vec![(Some(0), 1), (Some(1), 1), (Some(2), 1)]));
        assert_eq!(placed(BindTo::L3, 4, 16), Ok(vec![(Some(0), 2), (Some(0), 2), (Some(1), 2), (Some(1), 2)]));
        assert_eq!(placed(BindTo::L3, 1, 16), Ok(vec![(Some(0), 4)]));
        assert_eq!(placed(BindTo::Numa, 3, 16), Ok(vec![(Some(0), 2), (Some(0), 2), (Some(1), 4)]));
        let problem = placed(BindTo::Core, 9, 16).unwrap_err();
        assert!(problem.contains("8 cores for 9 ranks") && problem.contains("start 8"), "{problem}");
    }

    #[test]
    fn what_the_user_chose_stays() {
        let bindings = Bindings { bind_to: BindTo::None, ranks: placed_two() };
        let mut command = Command::new("none");
        command.env(THREADS, "7");
        bindings.apply(&mut command, 1);
        assert!(command.get_envs().any(|(name, value)| name == THREADS && value.is_some_and(|value| value == "7")));
        assert_eq!(bindings.describe(&command, 5, 1), "rank 5 is not bound");
    }

    fn placed_two() -> Vec<Binding> {
        place(BindTo::None, 2, &[], &[], 8).unwrap()
    }
}

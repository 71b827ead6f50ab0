//! Which processors a thread may use, and which last-level cache and which NUMA node these share.

/// Where a rank runs: numbers that are the same in two ranks only if both run in the same cache or
/// node. 0 if the system does not say, or if the rank may run in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Domains {
    pub(crate) cache: u32,
    pub(crate) node: u32,
}

/// The processors that a thread may use: how many, and the numbers of the first and the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processors {
    pub(crate) count: u32,
    pub(crate) first: u32,
    pub(crate) last: u32,
}

/// Returns which processors this thread may use, and what they share.
pub(crate) fn affinity() -> (Processors, Domains) {
    #[cfg(all(target_os = "linux", not(miri)))]
    if let Some((processors, domains)) = linux::affinity() {
        // A control group may leave less time than that of all of them.
        return (Processors { count: processors.count.min(super::cores() as u32), ..processors }, domains);
    }
    (Processors { count: super::cores() as u32, first: 0, last: u32::MAX }, Domains::default())
}

/// What processors share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// The core of processors that run hyperthreads; otherwise each is a core.
    Core,
    /// The last-level cache.
    Cache,
    /// The memory of a NUMA node.
    Node,
}

/// Returns the numbers of the processors that this process may use, those together that share a domain;
/// none where the system has no such numbers. Where it does not say what they share, each is a core, and
/// all share their cache and their node.
#[must_use]
pub fn domains(domain: Domain) -> Vec<Vec<u32>> {
    #[cfg(all(target_os = "linux", not(miri)))]
    return linux::domains(domain);
    #[cfg(not(all(target_os = "linux", not(miri))))]
    {
        let _ = domain;
        Vec::new()
    }
}

/// Whether ranks that may use these processors are more than the processors. If ranks may use some
/// of the same processors and some others, it may be wrong.
pub(crate) fn is_crowded(ranks: &[Processors]) -> bool {
    let (Some(first), Some(last)) =
        (ranks.iter().map(|processors| processors.first).min(), ranks.iter().map(|processors| processors.last).max())
    else {
        return false;
    };
    let with_the_same = |processors| ranks.iter().filter(|&other| other == processors).count();
    ranks.len() as u64 > u64::from(last.saturating_sub(first)) + 1
        || ranks.iter().any(|processors| with_the_same(processors) > processors.count as usize)
}

#[cfg(all(target_os = "linux", not(miri)))]
mod linux {
    use std::fs;
    use std::path::Path;

    use parking_lot::Mutex;
    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::{Domain, Domains, Processors};

    /// The last answer, because most threads of a process have the same processors.
    static LAST: Mutex<Option<(Vec<u32>, Domains)>> = Mutex::new(None);

    /// The processors that this thread may use, in ascending order.
    fn allowed() -> Option<Vec<u32>> {
        let allowed = sched_getaffinity(None).ok()?;
        Some((0..CpuSet::MAX_CPU as u32).filter(|&cpu| allowed.is_set(cpu as usize)).collect())
    }

    pub(super) fn domains(domain: Domain) -> Vec<Vec<u32>> {
        allowed().map_or_else(Vec::new, |allowed| groups(Path::new("/sys/devices/system"), &allowed, domain))
    }

    /// Returns the processors that share a domain together, by the files of a system.
    fn groups(system: &Path, allowed: &[u32], domain: Domain) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = Vec::new();
        for &cpu in allowed {
            let folder = system.join(format!("cpu/cpu{cpu}"));
            let shared = match domain {
                Domain::Core => read(&folder.join("topology/thread_siblings_list")),
                Domain::Cache => last_cache(&folder),
                Domain::Node => node(&folder).and_then(|node| read(&system.join(format!("node/node{node}/cpulist")))),
            };
            let with = match (&shared, domain) {
                (Some(shared), _) => groups.iter_mut().find(|group| shared.contains(&group[0])),
                (None, Domain::Core) => None,
                (None, _) => groups.first_mut(),
            };
            match with {
                Some(group) => group.push(cpu),
                None => groups.push(vec![cpu]),
            }
        }
        groups
    }

    fn read(list: &Path) -> Option<Vec<u32>> {
        processors(&fs::read_to_string(list).ok()?)
    }

    pub(super) fn affinity() -> Option<(Processors, Domains)> {
        let allowed = allowed()?;
        let processors = Processors { count: allowed.len() as u32, first: *allowed.first()?, last: *allowed.last()? };
        let known = LAST.lock().as_ref().and_then(|(of, domains)| (*of == allowed).then_some(*domains));
        // Outside the lock, which a child that is forked meanwhile would find locked.
        let domains = known.or_else(|| domains_in(Path::new("/sys/devices/system"), &allowed)).unwrap_or_default();
        if known.is_none() {
            *LAST.lock() = Some((allowed, domains));
        }
        Some((processors, domains))
    }

    /// Returns the domains of some processors by the files of a system.
    pub(super) fn domains_in(system: &Path, allowed: &[u32]) -> Option<Domains> {
        let first = *allowed.first()?;
        let cpu = system.join(format!("cpu/cpu{first}"));
        let cache = last_cache(&cpu).filter(|shared| has_all(shared, allowed));
        let node = node(&cpu).filter(|&node| {
            let list = fs::read_to_string(system.join(format!("node/node{node}/cpulist")));
            list.ok().and_then(|list| processors(&list)).is_some_and(|shared| has_all(&shared, allowed))
        });
        // The number of a cache is that of its first processor.
        let cache = cache.and_then(|shared| shared.first()?.checked_add(1));
        Some(Domains { cache: cache.unwrap_or(0), node: node.and_then(|node| node.checked_add(1)).unwrap_or(0) })
    }

    fn has_all(shared: &[u32], allowed: &[u32]) -> bool {
        allowed.iter().all(|cpu| shared.contains(cpu))
    }

    /// Returns the processors that share the last-level cache of one.
    fn last_cache(cpu: &Path) -> Option<Vec<u32>> {
        let caches = fs::read_dir(cpu.join("cache")).ok()?.flatten().filter_map(|entry| {
            let read = |file| fs::read_to_string(entry.path().join(file)).ok();
            let level: u32 = read("level")?.trim().parse().ok()?;
            Some((level, processors(&read("shared_cpu_list")?)?))
        });
        caches.max_by_key(|(level, shared)| (*level, shared.len())).map(|(_, shared)| shared)
    }

    /// Returns the node of a processor: its folder has a link to it.
    fn node(cpu: &Path) -> Option<u32> {
        let mut names = fs::read_dir(cpu).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.find_map(|name| name.strip_prefix("node")?.parse().ok())
    }

    /// Parses a list of processors such as `0-3,8`, in ascending order.
    fn processors(list: &str) -> Option<Vec<u32>> {
        let mut all = Vec::new();
        for range in list.trim().split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            // A processor above this is in no affinity mask that was read here.
            all.extend(first..=last.min(CpuSet::MAX_CPU as u32));
        }
        Some(all)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn lists_of_processors_are_parsed() {
            assert_eq!(processors("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
            assert_eq!(processors("5"), Some(vec![5]));
            assert_eq!(processors(""), None);
            assert_eq!(processors("1-x"), None);
        }

        /// Two nodes of two caches of two processors each.
        #[test]
        fn a_process_has_the_domains_that_hold_all_its_processors() {
            let system = std::env::temp_dir().join(format!("kolo-{}-topology", std::process::id()));
            let write = |path: String, text: String| {
                let path = system.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            };
            for cpu in 0..8u32 {
                let (pair, node) = (cpu / 2 * 2, cpu / 4);
                for (index, level, shared) in [(0, 1, format!("{cpu}")), (1, 3, format!("{pair}-{}", pair + 1))] {
                    write(format!("cpu/cpu{cpu}/cache/index{index}/level"), format!("{level}\n"));
                    write(format!("cpu/cpu{cpu}/cache/index{index}/shared_cpu_list"), shared);
                }
                write(format!("cpu/cpu{cpu}/node{node}/cpulist"), String::new());
                write(format!("node/node{node}/cpulist"), format!("{}-{}\n", 4 * node, 4 * node + 3));
            }
            let of = |allowed: &[u32]| domains_in(&system, allowed).map(|Domains { cache, node }| (cache, node));
            assert_eq!(of(&[0]), Some((1, 1)));
            assert_eq!(of(&[6, 7]), Some((7, 2)));
            assert_eq!(of(&[4, 7]), Some((0, 2)));
            assert_eq!(of(&[3, 4]), Some((0, 0)));
            assert_eq!(of(&[9]), Some((0, 0)));
            assert_eq!(of(&[]), None);
            let shared = |allowed: &[u32], domain| groups(&system, allowed, domain);
            let pairs = [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]];
            let all: Vec<u32> = (0..8).collect();
            assert_eq!(shared(&all, Domain::Cache), pairs);
            assert_eq!(shared(&all, Domain::Node), [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
            assert_eq!(shared(&[1, 3, 6], Domain::Node), [vec![1, 3], vec![6]]);
            // These do not say which cores they are.
            assert_eq!(shared(&[2, 3], Domain::Core), [[2], [3]]);
            for cpu in 0..4u32 {
                write(format!("cpu/cpu{cpu}/topology/thread_siblings_list"), format!("{},{}\n", cpu % 2, cpu % 2 + 2));
            }
            assert_eq!(shared(&[0, 1, 2, 3, 4], Domain::Core), [vec![0, 2], vec![1, 3], vec![4]]);
            // No files at all.
            assert_eq!(groups(Path::new("/none"), &[3, 5], Domain::Cache), [[3, 5]]);
            fs::remove_dir_all(&system).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_crowded_if_they_are_more_than_their_processors() {
        let one = |first| Processors { count: 1, first, last: first };
        let some = |first, last| Processors { count: last - first + 1, first, last };
        // Bound to a processor each, or to two nodes of four.
        assert!(!is_crowded(&[one(0), one(1)]));
        assert!(!is_crowded(&[[some(0, 3); 4], [some(4, 7); 4]].concat()));
        assert!(!is_crowded(&[some(0, 3); 4]));
        assert!(!is_crowded(&[one(0), some(0, 3), some(0, 3)]));
        assert!(!is_crowded(&[]));
        assert!(is_crowded(&[one(0), one(0)]));
        assert!(is_crowded(&[[some(0, 3); 5], [some(4, 7); 5]].concat()));
        assert!(is_crowded(&[one(0), one(1), some(0, 1)]));
        // The time of two of eight processors.
        assert!(is_crowded(&[Processors { count: 2, first: 0, last: 7 }; 3]));
    }
}

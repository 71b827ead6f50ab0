//! The measured costs on disk: one line for each pair of hosts, in the file `network-costs` of the
//! cache folder.
//!
//! A folder on a network may not answer, so a thread of its own reads and writes it, and nothing
//! waits for that thread for long.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::config;
use crate::schedule::order::{PairCost, PairCosts};
use crate::schedule::select::{CostModel, LinkCost};
use crate::sys;
use crate::timeouts::FILE_SYSTEM;

/// Where the two hosts of a pair are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PairClass {
    /// In a network whose topology is unknown.
    Hosts,
    /// In one rack.
    SameRack,
    /// In different racks.
    OtherRack,
    /// Each two hosts of a job: by these costs schedules visit the hosts in the best order.
    Pair,
}

impl PairClass {
    const ALL: [PairClass; 4] = [PairClass::Hosts, PairClass::SameRack, PairClass::OtherRack, PairClass::Pair];

    /// Returns the name, as the file has it.
    pub fn name(self) -> &'static str {
        match self {
            PairClass::Hosts => "hosts",
            PairClass::SameRack => "same-rack",
            PairClass::OtherRack => "other-rack",
            PairClass::Pair => "pair",
        }
    }
}

/// Two hosts, and what the links between them are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Name and address of the first host.
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) links: String,
    pub(crate) class: PairClass,
}

/// The costs of messages between two hosts, as a job has measured them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeasuredCosts {
    /// Name and address of the host that measured.
    pub from: String,
    /// Name and address of the other host.
    pub to: String,
    /// What a link is made of: `tcp`, several connections as in `4 tcp`, or `tls`; with rails, both ends
    /// of each, as in `tcp on 10.0.1.1-10.0.1.2 and 10.0.2.1-10.0.2.2`.
    pub links: String,
    /// Where the two hosts are.
    pub class: PairClass,
    /// What messages cost.
    pub network: LinkCost,
    /// Seconds to reduce one byte on the first host; 0 for [`PairClass::Pair`].
    pub reduce: f64,
    /// When this was measured.
    pub at: SystemTime,
}

/// How long measured costs count: a network may change.
const LASTS: Duration = Duration::from_secs(7 * 24 * 3600);

/// Bytes of the file that are read, and entries that are kept.
const MOST_BYTES: u64 = 1 << 20;
const MOST_ENTRIES: usize = 1000;

/// What the file begins with.
const TITLE: &str = "kolo network costs 3";

/// Returns the costs that jobs have measured from this machine, the latest first. They are in the
/// file `network-costs` of the cache folder (`KOLO_CACHE_DIR`); a job takes its costs from there for
/// a week.
pub fn measured() -> Vec<MeasuredCosts> {
    let mut known = file().map_or_else(Vec::new, |path| read(&path));
    known.sort_by_key(|entry| std::cmp::Reverse(entry.at));
    known
}

/// The hosts of a job that has measured each two of them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeasuredHosts {
    /// Their names and addresses, in the order of their ranks.
    pub hosts: Vec<String>,
    /// The order in which schedules visit them.
    pub order: Vec<usize>,
    /// What messages between two of them cost, by both hosts.
    pub links: Vec<Vec<LinkCost>>,
    /// The model by which such a job chooses its algorithms.
    pub model: CostModel,
}

/// Returns the hosts of the latest job that has measured each two of its hosts. `known` are the costs that
/// [`measured`] returns, and `model` has those of [`PairClass::Hosts`].
pub fn measured_hosts(known: &[MeasuredCosts], model: CostModel) -> Option<MeasuredHosts> {
    let pairs = || known.iter().filter(|entry| entry.class == PairClass::Pair && entry.from != entry.to && entry.is_young());
    let latest = pairs().map(|entry| entry.at).max()?;
    let pairs: Vec<&MeasuredCosts> = pairs().filter(|entry| entry.at == latest).collect();
    let mut hosts: Vec<String> = Vec::new();
    for host in pairs.iter().flat_map(|entry| [&entry.from, &entry.to]) {
        if !hosts.contains(host) {
            hosts.push(host.clone());
        }
    }
    let at = |name: &String| hosts.iter().position(|host| host == name);
    let mut costs = PairCosts::new(hosts.len());
    for MeasuredCosts { from, to, network, .. } in pairs {
        costs.set(at(from)?, at(to)?, PairCost::of(*network));
    }
    // Two jobs may have measured in one second.
    if PairCosts::pairs(hosts.len()).any(|(a, b)| costs.of(a, b) == PairCost::default()) {
        return None;
    }
    let order = costs.order().unwrap_or_else(|| (0..hosts.len()).collect());
    let model = costs.model(model, costs.of(0, 1), &order);
    let links = (0..hosts.len()).map(|a| (0..hosts.len()).map(|b| costs.of(a, b).link()).collect()).collect();
    Some(MeasuredHosts { hosts, order, links, model })
}

impl Pair {
    /// Returns the pair of these hosts, as the lines of the file can have them.
    pub(super) fn new(from: &str, to: &str, links: String, class: PairClass) -> Pair {
        let clean = |text: &str| text.replace(char::is_control, " ");
        Pair { from: clean(from), to: clean(to), links, class }
    }
}

/// Looks for the costs of each of these pairs, if a job has measured them in the last week. `None` if the file
/// has not answered in time: it may have costs, which later jobs should keep.
pub(super) fn look_up(pairs: Vec<Pair>) -> Option<Vec<Option<MeasuredCosts>>> {
    let (sender, answer) = channel();
    let file = file();
    in_background(move || {
        let known = file.map_or_else(Vec::new, |path| read(&path));
        let found = pairs.iter().map(|pair| known.iter().find(|entry| entry.is_of(pair) && entry.is_young()).cloned());
        // Nothing receives if the file took too long.
        _ = sender.send(found.collect());
    });
    answer.recv_timeout(FILE_SYSTEM).ok()
}

/// Writes what was measured to the file, for later jobs.
pub(super) fn keep(costs: Vec<(Pair, LinkCost, f64)>) {
    change(move |known| {
        // Whole seconds, as the file has them.
        let at = UNIX_EPOCH + Duration::from_secs(now());
        known.retain(|entry| costs.iter().all(|(pair, ..)| !entry.is_of(pair)));
        let new = costs.into_iter().map(|(Pair { from, to, links, class }, network, reduce)| MeasuredCosts {
            from,
            to,
            links,
            class,
            network,
            reduce,
            at,
        });
        known.splice(0..0, new);
        known.truncate(MOST_ENTRIES);
    });
}

/// Removes what one pair of these hosts has measured for all, so that the next job measures it again.
pub(super) fn forget(hosts: Vec<String>) {
    change(move |known| {
        let is_of = |entry: &MeasuredCosts| hosts.contains(&entry.from) && hosts.contains(&entry.to);
        known.retain(|entry| entry.class == PairClass::Pair || !is_of(entry));
    });
}

/// Changes the entries of the file, on a thread of its own.
fn change(entries: impl FnOnce(&mut Vec<MeasuredCosts>) + Send + 'static) {
    let Some(path) = file() else { return };
    in_background(move || {
        // A job may write twice at the same time.
        static WRITES: Mutex<()> = Mutex::new(());
        let _writes = WRITES.lock();
        let mut known = read(&path);
        entries(&mut known);
        if let Err(error) = write(&path, &known) {
            crate::log::debug!("cannot write {}: {error}; the next job measures the costs again", path.display());
        }
    });
}

fn in_background(work: impl FnOnce() + Send + 'static) {
    // Without the thread, the costs are measured again.
    _ = std::thread::Builder::new().name("kolo-costs".to_owned()).spawn(work);
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs())
}

/// Returns the path of the file. Called on the caller's thread: its program may change the environment
/// later.
fn file() -> Option<PathBuf> {
    config::cache_folder(sys::variable).map(|folder| folder.join("network-costs"))
}

impl MeasuredCosts {
    /// Returns whether jobs still use it.
    fn is_young(&self) -> bool {
        SystemTime::now().duration_since(self.at).is_ok_and(|age| age < LASTS)
    }

    fn is_of(&self, pair: &Pair) -> bool {
        (&self.from, &self.to, &self.links, self.class) == (&pair.from, &pair.to, &pair.links, pair.class)
    }

    fn line(&self) -> String {
        let MeasuredCosts { from, to, links, class, network: LinkCost { latency, overhead, per_byte }, reduce, at } = self;
        let at = at.duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let class = class.name();
        format!("{from}\t{to}\t{links}\t{latency:e}\t{overhead:e}\t{per_byte:e}\t{reduce:e}\t{at}\t{class}\n")
    }

    /// Reads a line. Any program of this user may have written it.
    fn parse(line: &str) -> Option<MeasuredCosts> {
        let mut fields = line.split('\t');
        let (from, to) = (fields.next()?.to_owned(), fields.next()?.to_owned());
        let links = fields.next()?.to_owned();
        // A cost that is negative, not a number or absurd is refused.
        let mut cost = || fields.next()?.parse().ok().filter(|&cost: &f64| (0.0..1e6).contains(&cost));
        let network = LinkCost { latency: cost()?, overhead: cost()?, per_byte: cost()? };
        let reduce = cost()?;
        let seconds = fields.next()?.parse().ok()?;
        let at = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
        let name = fields.next()?;
        let class = PairClass::ALL.into_iter().find(|class| class.name() == name)?;
        fields.next().is_none().then_some(MeasuredCosts { from, to, links, class, network, reduce, at })
    }
}

/// Returns what the file says; nothing if it cannot be read or is not of this version.
fn read(path: &Path) -> Vec<MeasuredCosts> {
    let mut text = String::new();
    let Ok(_) = sys::open_regular(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text)) else {
        return Vec::new();
    };
    let mut lines = text.lines();
    if lines.next() != Some(TITLE) {
        return Vec::new();
    }
    lines.filter_map(MeasuredCosts::parse).take(MOST_ENTRIES).collect()
}

/// Writes the file, and its folder if that is missing.
fn write(path: &Path, known: &[MeasuredCosts]) -> io::Result<()> {
    sys::make_folder(path.parent().unwrap_or(Path::new(".")))?;
    let lines: String = known.iter().map(MeasuredCosts::line).collect();
    sys::write_file(path, format!("{TITLE}\n{lines}").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn entry(to: &str, seconds: u64) -> MeasuredCosts {
        let network = LinkCost { latency: 35.5e-6, overhead: 0.0, per_byte: 8e-9 };
        let at = UNIX_EPOCH + Duration::from_secs(seconds);
        MeasuredCosts {
            from: "a 10.0.0.1".to_owned(),
            to: to.to_owned(),
            links: "2 tcp".to_owned(),
            class: PairClass::Hosts,
            network,
            reduce: 1.25e-10,
            at,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = std::env::temp_dir().join(format!("costs-{}-{:08x}", std::process::id(), getrandom::u32().unwrap()));
        let path = folder.join("kolo").join("network-costs");
        assert_eq!(read(&path), []);
        let other_rack = MeasuredCosts { class: PairClass::OtherRack, ..entry("b 10.0.0.2", 7) };
        let known = [entry("b 10.0.0.2", 7), other_rack, entry("c fd00::3", 1 << 34)];
        write(&path, &known).unwrap();
        assert_eq!(read(&path), known);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "a file is left beside");
        // A line that is no entry does not hide the others.
        let text = fs::read_to_string(&path).unwrap();
        let (title, lines) = text.split_once('\n').unwrap();
        fs::write(&path, format!("{title}\ngarbage\n{lines}half\t")).unwrap();
        assert_eq!(read(&path), known);
        for other in [text.replacen(TITLE, "kolo network costs 1", 1), "\u{0}".repeat(100), String::new()] {
            fs::write(&path, other).unwrap();
            assert_eq!(read(&path), []);
        }
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert_eq!(read(&path), []);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_order_is_that_of_the_latest_pairs() {
        let pair = |from: &str, to: &str, per_byte: f64, seconds: u64| {
            let network = LinkCost { latency: 50e-6, overhead: 0.0, per_byte };
            MeasuredCosts { from: from.to_owned(), class: PairClass::Pair, network, ..entry(to, seconds) }
        };
        let (even, at) = (CostModel::default(), now() - 60);
        assert_eq!(measured_hosts(&[entry("b", at)], even), None);
        // A host and itself, and a pair of a former job.
        let mut known = vec![entry("b", at + 1), pair("a", "a", 1e-9, at), pair("x", "y", 1e-9, at - 1)];
        for (from, to) in [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")] {
            let known_before = known.clone();
            known.push(pair(from, to, if (from, to) == ("b", "c") { 80e-9 } else { 8e-9 }, at));
            // As of two jobs in one second.
            let missing = measured_hosts(&known_before, even);
            assert!(known_before.len() < 5 || missing.is_none(), "{missing:?}");
        }
        for (from, to) in [("a", "b"), ("a", "c"), ("b", "c")] {
            // Nothing old counts, nor what the future will bring.
            known.extend([1, now() + 1000].map(|at| pair(from, to, if from == "a" { 1e-9 } else { 9e-9 }, at)));
        }
        let MeasuredHosts { hosts, order, links, model } = measured_hosts(&known, even).unwrap();
        assert_eq!(hosts, ["a", "b", "c", "d"]);
        assert!(links[1][2].per_byte > 9.0 * links[0][3].per_byte && links[2][1] == links[1][2]);
        let place = |host: usize| order.iter().position(|&other| other == host).unwrap();
        let apart = place(1).abs_diff(place(2));
        assert_eq!((order.len(), apart, model.ring), (4, 2, Some(even.network)), "{order:?}");
        assert!(model.network.per_byte > 9.0 * even.network.per_byte);
    }

    #[test]
    fn a_line_that_is_no_entry_is_refused() {
        let good = entry("b", 7).line();
        let good = good.trim_end();
        assert!(MeasuredCosts::parse(good).is_some());
        let fields: Vec<&str> = good.split('\t').collect();
        for (field, bad) in [(3, "-1"), (4, "NaN"), (5, "inf"), (5, ""), (6, "1e7"), (7, "x"), (7, "18446744073709551616")] {
            let mut fields = fields.clone();
            fields[field] = bad;
            assert_eq!(MeasuredCosts::parse(&fields.join("\t")), None, "{bad} in field {field}");
        }
        assert_eq!(MeasuredCosts::parse(&format!("{good}\tmore")), None);
        assert_eq!(MeasuredCosts::parse(&format!("{good}\tsame-rack\tmore")), None);
    }
}

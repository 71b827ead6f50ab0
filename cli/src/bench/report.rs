//! All figures and the machine that they were measured on: the content of `--json`.

use kolo::Communicator;
use serde::Serialize;

use super::arguments::Args;
use super::measure::{Figures, Measured, Plan};
use super::operation::Operation;
use super::pattern::packs;
use crate::trace::dump::Devices;

/// The figures of one run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The version of the library.
    kolo: &'static str,
    pub(crate) op: &'static str,
    pub(crate) ranks: usize,
    pub(crate) hosts: usize,
    pub(crate) dtype: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) redop: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) root: Option<usize>,
    pub(crate) transport: &'static str,
    pub(crate) registered: bool,
    /// The type of the elements of messages between hosts, where it is not that of the buffers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wire_dtype: Option<&'static str>,
    machine: Machine,
    /// How many operations of rank 0 took each path on devices, with those that were not measured.
    #[serde(skip_serializing_if = "Devices::are_unused")]
    pub(crate) devices: Devices,
    pub(crate) rows: Vec<Row>,
}

/// The machine of rank 0.
#[derive(Clone, Debug, Serialize)]
struct Machine {
    hostname: String,
    os: &'static str,
    arch: &'static str,
    cores: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
}

/// One size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) bytes: u64,
    /// Elements of the whole buffer.
    pub(crate) count: usize,
    pub(crate) algorithm: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_place: Option<Line>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) out_of_place: Option<Line>,
}

/// One form at one size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) min_us: f64,
    iters: usize,
    /// Calls of one sample. Percentiles are of the means over these calls.
    calls: usize,
    pub(crate) algbw_gbs: f64,
    pub(crate) busbw_gbs: f64,
    /// `null` if the results were not checked.
    pub(crate) wrong: Option<u64>,
}

impl Report {
    pub(crate) fn new(args: &Args, comm: &Communicator) -> Report {
        Report {
            kolo: env!("CARGO_PKG_VERSION"),
            op: args.op.name(),
            ranks: comm.world_size(),
            hosts: comm.host_count(),
            dtype: args.dtype.name(),
            redop: args.op.reduces().then(|| args.redop.name()),
            root: args.op.has_root().then_some(args.root),
            transport: comm.transport_name(),
            registered: args.registered,
            wire_dtype: compresses(args, comm).then(|| comm.wire_dtype().name()),
            machine: Machine::this(),
            devices: Devices::default(),
            rows: Vec::new(),
        }
    }

    /// Takes the paths of all operations so far.
    pub(crate) fn count_paths(&mut self, comm: &Communicator) {
        let kolo::DeviceStats { in_place, through_areas, one_shot, staged, whole, copied, .. } = comm.stats().device;
        self.devices = Devices { in_place, through_areas, one_shot, staged, whole, copied };
    }
}

/// Whether messages between hosts have fewer bits than the buffers' elements, in large operations.
fn compresses(args: &Args, comm: &Communicator) -> bool {
    args.op.reduces() && comm.host_count() > 1 && packs(comm, args.dtype, Some(args.redop))
}

impl Row {
    pub(crate) fn new(plan: &Plan, algorithm: String, figures: Figures, op: Operation, ranks: usize) -> Row {
        let line = |measured: Option<Measured>| measured.map(|measured| Line::new(&measured, plan, op.bus_factor(ranks)));
        let (in_place, out_of_place) = (line(figures.in_place), line(figures.out_of_place));
        Row { bytes: plan.bytes, count: plan.elements, algorithm, in_place, out_of_place }
    }

    /// Returns the forms that were measured.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &Line> {
        [&self.out_of_place, &self.in_place].into_iter().flatten()
    }
}

impl Line {
    fn new(measured: &Measured, plan: &Plan, bus_factor: f64) -> Line {
        let mean = measured.mean();
        let rate = if mean > 0.0 { plan.bytes as f64 / mean * 1e-9 } else { 0.0 };
        Line {
            p50_us: measured.percentile(0.5) * 1e6,
            p99_us: measured.percentile(0.99) * 1e6,
            mean_us: mean * 1e6,
            min_us: measured.min() * 1e6,
            iters: measured.iterations(),
            calls: plan.calls,
            algbw_gbs: rate,
            busbw_gbs: rate * bus_factor,
            wrong: measured.wrong,
        }
    }
}

impl Machine {
    fn this() -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let field = |text: String, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = read("/proc/meminfo").and_then(|text| field(text, "MemTotal"));
        let kibibytes = memory.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
        let hostname = read("/proc/sys/kernel/hostname").or_else(|| std::env::var("COMPUTERNAME").ok());
        Machine {
            hostname: hostname.unwrap_or_default().trim().to_owned(),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cores: kolo::settings::cores(),
            cpu: read("/proc/cpuinfo").and_then(|text| field(text, "model name")),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            memory_bytes: kibibytes.map(|kibibytes| kibibytes << 10),
        }
    }
}

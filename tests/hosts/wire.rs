//! The network of a bed (`bed.sh`) whose packets are delayed or lost. It is a program of its own,
//! without crates, because not every kernel can delay packets (`netem`): it makes one interface for
//! each host, and carries every packet from the host that sends it to the host of its address.
//!
//!     wire HOSTS DELAY LOSS RATE SITES  # as in `wire 2 5ms 1% 100mbit 0`; the RATE may be `none`
//!
//! The interfaces have the names `host0`, `host1` and so on. The last byte of a host's address is its
//! number plus one. A packet arrives DELAY after it was sent, or later if the receiver's link, of
//! RATE, is busy. The queue before that link is like that of a switch. With SITES, the hosts are dealt to
//! sites in turns, and only packets between sites are delayed and lost.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The longest packet.
const MTU: usize = 1500;

/// How long a packet may wait for the receiver's link, in bytes before it.
const QUEUE: f64 = 1e6;

const O_NONBLOCK: i32 = 0o4000;
const TUNSETIFF: u64 = 0x4004_54ca;
/// Packets of IP, without a header of the interface.
const IFF_TUN_NO_PI: i16 = 0x1001;
const POLLIN: i16 = 1;

#[repr(C)]
struct Wanted {
    file: i32,
    events: i16,
    found: i16,
}

unsafe extern "C" {
    fn ioctl(file: i32, request: u64, ...) -> i32;
    fn ppoll(wanted: *mut Wanted, count: u64, timeout: *const [i64; 2], signals: *const u8) -> i32;
}

struct Wire {
    hosts: Vec<Host>,
    delay: Duration,
    /// The part of the packets that is lost.
    loss: f64,
    /// Seconds that a byte takes on a host's link.
    per_byte: f64,
    /// The number of sites; each host is one if it is 0.
    sites: usize,
    random: u64,
}

struct Host {
    interface: File,
    /// Packets that are on their way to its link, and when they arrive there, in this order.
    far: VecDeque<(Instant, Vec<u8>)>,
    /// Packets to this host and when they arrive, in this order.
    coming: VecDeque<(Instant, Vec<u8>)>,
    /// When the link has carried the last of them.
    is_free: Instant,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match Wire::new(&arguments) {
        Ok(mut wire) => wire.carry(),
        Err(why) => {
            eprintln!("wire: {why}");
            ExitCode::FAILURE
        }
    }
}

impl Wire {
    fn new(arguments: &[String]) -> Result<Wire, String> {
        let [hosts, delay, loss, rate, sites] = arguments else { return Err("HOSTS DELAY LOSS RATE SITES".to_owned()) };
        let count: usize = hosts.parse().map_err(|_| format!("{hosts} is no number of hosts"))?;
        let delay = Duration::from_secs_f64(scaled(delay, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])?);
        let loss = scaled(loss, &[("%", 0.01)])?;
        let per_byte = match rate.as_str() {
            "none" => 0.0,
            _ => 8.0 / scaled(rate, &[("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)])?,
        };
        let sites = sites.parse().map_err(|_| format!("{sites} is no number of sites"))?;
        let host = |i| {
            Ok(Host {
                interface: open(&format!("host{i}"))?,
                far: VecDeque::new(),
                coming: VecDeque::new(),
                is_free: Instant::now(),
            })
        };
        let hosts = (0..count).map(host).collect::<Result<Vec<_>, String>>()?;
        Ok(Wire { hosts, delay, loss, per_byte, sites, random: 1 })
    }

    /// Carries packets until the process is killed.
    fn carry(&mut self) -> ! {
        loop {
            let now = Instant::now();
            for from in 0..self.hosts.len() {
                self.take(from, now);
            }
            for host in &mut self.hosts {
                while host.far.front().is_some_and(|(arrives, _)| *arrives <= Instant::now()) {
                    let (arrives, packet) = host.far.pop_front().expect("there is one");
                    host.queue(arrives, packet, self.per_byte);
                }
                let Host { interface, coming, .. } = host;
                while coming.front().is_some_and(|(due, _)| *due <= Instant::now()) {
                    // A packet that does not fit is lost, as on any wire.
                    _ = coming.pop_front().map(|(_, packet)| interface.write(&packet));
                }
            }
            self.wait();
        }
    }

    /// Takes what a host has sent.
    fn take(&mut self, from: usize, now: Instant) {
        let mut packet = [0; MTU];
        // An interface that is not up yet has an error.
        while let Ok(len) = self.hosts[from].interface.read(&mut packet) {
            let packet = &packet[..len];
            let Some(to) = receiver(packet).filter(|&to| to < self.hosts.len()) else { continue };
            if self.sites > 0 && from % self.sites == to % self.sites {
                self.hosts[to].queue(now, packet.to_vec(), self.per_byte);
            } else if self.random() >= self.loss {
                self.hosts[to].far.push_back((now + self.delay, packet.to_vec()));
            }
        }
    }

    /// Waits for a packet, or until one is due; at most 50 ms, after which an interface may be up.
    fn wait(&self) {
        let mut wanted: Vec<Wanted> =
            self.hosts.iter().map(|host| Wanted { file: host.interface.as_raw_fd(), events: POLLIN, found: 0 }).collect();
        let due = self.hosts.iter().flat_map(|host| host.far.front().into_iter().chain(host.coming.front()));
        let due = due.map(|(due, _)| *due).min();
        let most = Duration::from_millis(50);
        let time = due.map_or(most, |due| due.saturating_duration_since(Instant::now()).min(most));
        let timeout = [time.as_secs() as i64, i64::from(time.subsec_nanos())];
        // SAFETY: `wanted` and `timeout` live until the call returns.
        let ready = unsafe { ppoll(wanted.as_mut_ptr(), wanted.len() as u64, &raw const timeout, std::ptr::null()) };
        if ready > 0 && wanted.iter().all(|wanted| wanted.found & POLLIN == 0) {
            // An interface is down, for which poll returns at once.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns a number from 0 to 1 (SplitMix64).
    fn random(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Host {
    /// Puts a packet that arrives at this host's link behind the others, unless they are too many.
    fn queue(&mut self, arrives: Instant, packet: Vec<u8>, per_byte: f64) {
        let begins = self.is_free.max(arrives);
        if (begins - arrives).as_secs_f64() <= QUEUE * per_byte {
            self.is_free = begins + Duration::from_secs_f64(packet.len() as f64 * per_byte);
            self.coming.push_back((self.is_free, packet));
        }
    }
}

/// Returns the host that a packet is for.
fn receiver(packet: &[u8]) -> Option<usize> {
    let last = match packet.first()? >> 4 {
        4 => packet.get(19)?,
        6 => packet.get(39)?,
        _ => return None,
    };
    usize::from(*last).checked_sub(1)
}

/// Reads a number with one of these units.
fn scaled(text: &str, units: &[(&str, f64)]) -> Result<f64, String> {
    let read = |(unit, factor): &(&str, f64)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        (number >= 0.0 && number.is_finite()).then_some(number * factor)
    };
    let names: Vec<&str> = units.iter().map(|(unit, _)| *unit).collect();
    units.iter().find_map(read).ok_or_else(|| format!("{text} is no number with a unit ({})", names.join(", ")))
}

/// Makes an interface; returns the file from which its packets are read and to which they are
/// written.
fn open(name: &str) -> Result<File, String> {
    let path = "/dev/net/tun";
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => format!("{path} is missing: modprobe tun"),
        _ => format!("{path}: {error}"),
    };
    let file = OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open(path).map_err(failed)?;
    // A name of 16 bytes, then flags.
    let mut request = [0u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    request[16..18].copy_from_slice(&IFF_TUN_NO_PI.to_ne_bytes());
    // SAFETY: the request has the size of the kernel's `ifreq`.
    match unsafe { ioctl(file.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) } {
        0 => Ok(file),
        _ => Err(failed(std::io::Error::last_os_error())),
    }
}

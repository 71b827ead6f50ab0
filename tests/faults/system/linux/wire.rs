//! A wire between two network namespaces. This program carries every packet, and may delay, drop or
//! forge packets.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The state of a wire.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Weather {
    Fair = 0,
    /// Packets are delayed by 5 ms, and one of a hundred is lost.
    Bad = 1,
    /// All packets are lost, without an error.
    Cut = 2,
    /// Older connections are reset on both sides, as by a firewall that forgets them.
    Resetting = 3,
}

/// The longest packet.
const MTU: usize = 16 << 10;

/// The delay of packets in bad weather.
const LATE: Duration = Duration::from_millis(5);

pub(crate) struct Wire {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    weather: AtomicU8,
    ends: AtomicU8,
    carried: AtomicU64,
    lost: AtomicU64,
    /// The first short messages of connections.
    overheard: Mutex<Vec<Said>>,
    /// Connections that began while others were reset.
    young: Mutex<HashSet<Connection>>,
}

/// A short message with its sender and receiver.
#[derive(Clone)]
pub(crate) struct Said {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) bytes: Vec<u8>,
}

/// The longest message that is kept, in bytes, and the number of messages that are kept.
const SHORT: usize = 128;
const REMEMBERED: usize = 1000;

/// Address and port.
type End = ([u8; 4], [u8; 2]);

/// Both ends of a connection, the lower one first.
type Connection = [End; 2];

impl Wire {
    /// Creates two interfaces with these names and carries packets between them. The caller moves
    /// them to their namespaces.
    pub(crate) fn new(names: [&str; 2]) -> Result<Wire, String> {
        let [a, b] = [open(names[0])?, open(names[1])?];
        let shared = Arc::new(Shared {
            weather: AtomicU8::new(Weather::Fair as u8),
            ends: AtomicU8::new(0),
            carried: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            overheard: Mutex::default(),
            young: Mutex::default(),
        });
        let mut threads = Vec::new();
        for (from, to) in [(&a, &b), (&b, &a)] {
            let clone = |file: &File| file.try_clone().map_err(|error| format!("a wire: {error}"));
            let (sender, receiver) = channel();
            let (reader, back, writer) = (clone(from)?, clone(from)?, clone(to)?);
            let (here, there) = (shared.clone(), shared.clone());
            threads.push(std::thread::spawn(move || here.take_up(reader, back, &sender)));
            threads.push(std::thread::spawn(move || there.deliver(writer, &receiver)));
        }
        Ok(Wire { shared, threads })
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.shared.weather.store(weather as u8, Ordering::SeqCst);
    }

    /// Returns the short messages that passed, as an eavesdropper can read them.
    pub(crate) fn overheard(&self) -> Vec<Said> {
        self.shared.overheard.lock().unwrap().clone()
    }

    /// Returns the numbers of packets that were carried and that were lost.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.shared.carried.load(Ordering::Relaxed), self.shared.lost.load(Ordering::Relaxed))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.ends.store(1, Ordering::SeqCst);
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Creates an interface and returns the file from which its packets are read and to which they are
/// written.
fn open(name: &str) -> Result<File, String> {
    let path = "/dev/net/tun";
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| format!("{path}: {error}"))?;
    // SAFETY: zeros are a valid request without a name, and the name is shorter than its field.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        assert!(name.len() < request.ifr_name.len());
        for (field, letter) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *field = letter as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
        libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &request)
    };
    if done == 0 { Ok(file) } else { Err(format!("{path}: {}", std::io::Error::last_os_error())) }
}

impl Shared {
    fn weather(&self) -> Weather {
        [Weather::Fair, Weather::Bad, Weather::Cut, Weather::Resetting][usize::from(self.weather.load(Ordering::SeqCst))]
    }

    fn ends(&self) -> bool {
        self.ends.load(Ordering::SeqCst) != 0
    }

    fn take_up(&self, mut from: File, mut back: File, to: &Sender<(Instant, Vec<u8>)>) {
        let mut number = 0u64;
        while !self.ends() {
            let mut packet = vec![0; MTU];
            match from.read(&mut packet) {
                Ok(len) => packet.truncate(len),
                // The interface may not be up yet.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) || is_down(&error) => {
                    wait_for(&from);
                    continue;
                }
                Err(_) => return,
            }
            number += 1;
            self.overhear(&packet);
            let now = Instant::now();
            let due = match self.weather() {
                Weather::Fair => Some(now),
                Weather::Bad => (!number.is_multiple_of(100)).then_some(now + LATE),
                Weather::Cut => None,
                Weather::Resetting => match self.forged(&packet) {
                    Fate::Passes => Some(now),
                    Fate::Reset { to_sender, to_receiver } => {
                        let _ = back.write(&to_sender);
                        let _ = to.send((now, to_receiver));
                        None
                    }
                },
            };
            match due {
                Some(due) if to.send((due, packet)).is_ok() => {}
                _ => _ = self.lost.fetch_add(1, Ordering::Relaxed),
            }
        }
    }

    fn overhear(&self, packet: &[u8]) {
        let Some(Segment { source, target, payload, .. }) = Segment::of(packet) else { return };
        let mut overheard = self.overheard.lock().unwrap();
        if (1..=SHORT).contains(&payload.len()) && overheard.len() < REMEMBERED {
            let address = |(ip, port): End| SocketAddr::from((ip, u16::from_be_bytes(port)));
            overheard.push(Said { from: address(source), to: address(target), bytes: payload.to_vec() });
        }
    }

    fn deliver(&self, mut to: File, packets: &Receiver<(Instant, Vec<u8>)>) {
        while !self.ends() {
            match packets.recv_timeout(Duration::from_millis(50)) {
                Ok((due, packet)) => {
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    // A packet that does not fit is lost, as on any wire.
                    let counter = if to.write(&packet).is_ok() { &self.carried } else { &self.lost };
                    counter.fetch_add(1, Ordering::Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Returns what to do with a packet while connections are reset.
    fn forged(&self, packet: &[u8]) -> Fate {
        const SYN: u8 = 2;
        let Some(Segment { source, target, seq, ack, flags, .. }) = Segment::of(packet) else { return Fate::Passes };
        let mut connection = [source, target];
        connection.sort();
        let mut young = self.young.lock().unwrap();
        if flags & SYN != 0 {
            young.insert(connection);
        }
        if flags & RST != 0 || young.contains(&connection) {
            return Fate::Passes;
        }
        // Each end accepts a segment with the sequence number that it expects next.
        Fate::Reset { to_sender: reset_segment(target, source, ack), to_receiver: reset_segment(source, target, seq) }
    }
}

enum Fate {
    Passes,
    Reset { to_sender: Vec<u8>, to_receiver: Vec<u8> },
}

fn is_down(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EIO))
}

/// Waits until there is a packet, for 50 ms at most.
fn wait_for(file: &File) {
    let mut wanted = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one valid struct.
    let ready = unsafe { libc::poll(&mut wanted, 1, 50) };
    if ready > 0 && wanted.revents & libc::POLLIN == 0 {
        // For an interface that is down, poll returns at once.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The fields of a TCP segment over IPv4 that matter here.
struct Segment<'a> {
    source: End,
    target: End,
    seq: [u8; 4],
    ack: [u8; 4],
    flags: u8,
    payload: &'a [u8],
}

impl Segment<'_> {
    fn of(packet: &[u8]) -> Option<Segment<'_>> {
        let header = usize::from(packet.first()? & 15) * 4;
        if packet[0] >> 4 != 4 || *packet.get(9)? != 6 {
            return None;
        }
        let tcp = packet.get(header..header + 20)?;
        let (source, target) = (packet[12..16].try_into().ok()?, packet[16..20].try_into().ok()?);
        Some(Segment {
            source: (source, [tcp[0], tcp[1]]),
            target: (target, [tcp[2], tcp[3]]),
            seq: tcp[4..8].try_into().ok()?,
            ack: tcp[8..12].try_into().ok()?,
            flags: tcp[13],
            payload: packet.get(header + usize::from(tcp[12] >> 4) * 4..)?,
        })
    }
}

const RST: u8 = 4;

/// Returns a segment that resets a connection.
fn reset_segment(source: End, target: End, seq: [u8; 4]) -> Vec<u8> {
    let mut tcp = [&source.1[..], &target.1, &seq, &[0; 4], &[5 << 4, RST, 0, 0, 0, 0, 0, 0]].concat();
    // The checksum also covers the addresses, the protocol and the length.
    let covered = [&source.0[..], &target.0, &[0, 6, 0, tcp.len() as u8], &tcp].concat();
    tcp[16..18].copy_from_slice(&checksum(&covered));
    let mut ip = [&[0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0][..], &source.0, &target.0].concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    [ip, tcp].concat()
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

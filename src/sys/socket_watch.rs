//! What the system knows about a TCP connection that another thread uses.

#[cfg(all(target_os = "linux", not(miri)))]
use std::os::fd::AsRawFd;

use std::time::Duration;

use mio::net::TcpStream;

/// A TCP connection, to ask the system about it. It does not keep the connection open.
#[derive(Debug)]
pub(crate) struct SocketWatch {
    #[cfg(all(target_os = "linux", not(miri)))]
    descriptor: i32,
}

/// What the system says about a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SocketInfo {
    /// Segments that were sent again.
    pub(crate) retransmits: u64,
    /// The round trip, in microseconds, smoothed.
    pub(crate) round_trip: u64,
    /// The shortest round trip so far, in microseconds, on which a busy machine has little effect;
    /// `None` if none has been measured.
    pub(crate) least_round_trip: Option<u64>,
    /// How often the system has sent something again since the peer's system last answered.
    pub(crate) unanswered: u32,
    /// How long ago the peer's system last answered.
    pub(crate) quiet: Duration,
    /// Whether the connection is over in both directions.
    pub(crate) is_over: bool,
    /// `None` before Linux 4.10.
    pub(crate) flow: Option<Flow>,
}

/// How fast a connection carries what is written to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Bytes that the peer's system has acknowledged so far.
    pub(crate) acknowledged: u64,
    /// How long bytes were in flight so far, without the time in which the peer had no room for more.
    pub(crate) busy: Duration,
    /// Whether written bytes wait to be sent: the network, and not the program, limits the rate.
    pub(crate) is_full: bool,
}

/// Returns how many bytes the interfaces of this process's network namespace have sent so far; `None` if the system
/// does not say.
pub(crate) fn sent_by_host() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let table = std::fs::read_to_string("/proc/self/net/dev").ok()?;
        // Behind the name are eight numbers of what was received.
        let sent = |line: &str| {
            let (name, numbers) = line.split_once(':')?;
            (name.trim() != "lo").then(|| numbers.split_whitespace().nth(8)?.parse::<u64>().ok()).flatten()
        };
        Some(table.lines().filter_map(sent).sum())
    }
    #[cfg(not(target_os = "linux"))]
    {
        None
    }
}

impl SocketWatch {
    /// Watches a connection. Drop the watch before the connection: the system may give the
    /// descriptor to another file, about which the watch would then ask.
    pub(crate) fn new(stream: &TcpStream) -> SocketWatch {
        #[cfg(all(target_os = "linux", not(miri)))]
        return SocketWatch { descriptor: stream.as_raw_fd() };
        #[cfg(any(not(target_os = "linux"), miri))]
        {
            let _ = stream;
            SocketWatch {}
        }
    }

    /// Asks the system; `None` if it does not say.
    pub(crate) fn read(&self) -> Option<SocketInfo> {
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            // The layout of the kernel's `tcp_info`, which only grows: eight bytes, then words of 32
            // bits. libc does not have the structure for every C library.
            const ROUND_TRIP: usize = 2 + 15;
            const RETRANSMITS: usize = 2 + 23;
            const LEAST_ROUND_TRIP: usize = 2 + 35;
            const LAST_ANSWER: usize = 2 + 12;
            const ACKNOWLEDGED: usize = 2 + 28;
            const UNSENT: usize = 2 + 34;
            const BUSY: usize = 2 + 40;
            const NO_ROOM: usize = 2 + 42;
            /// The state of a connection that is over.
            const CLOSED: u8 = 7;
            let mut words = [0u32; NO_ROOM + 2];
            let mut len = size_of_val(&words) as libc::socklen_t;
            // SAFETY: the system writes at most `len` bytes to `words`, whose bits may have any
            // value. If the descriptor is not that of a TCP connection, it fails.
            let result = unsafe {
                libc::getsockopt(self.descriptor, libc::IPPROTO_TCP, libc::TCP_INFO, words.as_mut_ptr().cast(), &raw mut len)
            };
            // The kernel has the round trip since 4.6, and fills it with ones until it has measured.
            let is_said = |word: usize| result == 0 && len as usize > word * size_of::<u32>();
            let least = Some(words[LEAST_ROUND_TRIP]).filter(|&least| is_said(LEAST_ROUND_TRIP) && least != u32::MAX);
            let long = |word: usize| {
                let ([a, b, c, d], [e, f, g, h]) = (words[word].to_ne_bytes(), words[word + 1].to_ne_bytes());
                u64::from_ne_bytes([a, b, c, d, e, f, g, h])
            };
            let flow = is_said(NO_ROOM + 1).then(|| Flow {
                acknowledged: long(ACKNOWLEDGED),
                busy: Duration::from_micros(long(BUSY).saturating_sub(long(NO_ROOM))),
                is_full: words[UNSENT] > 0,
            });
            let [state, _, again, probes] = words[0].to_ne_bytes();
            is_said(RETRANSMITS).then(|| SocketInfo {
                retransmits: words[RETRANSMITS].into(),
                round_trip: words[ROUND_TRIP].into(),
                least_round_trip: least.map(u64::from),
                unanswered: u32::from(again) + u32::from(probes),
                quiet: Duration::from_millis(words[LAST_ANSWER].into()),
                is_over: state == CLOSED,
                flow,
            })
        }
        #[cfg(any(not(target_os = "linux"), miri))]
        None
    }

    /// Returns how many bytes at the end of what was written the peer's system has not
    /// acknowledged, also after the connection has failed; `None` if the system does not say.
    pub(crate) fn unacknowledged(&self) -> Option<usize> {
        #[cfg(all(target_os = "linux", not(miri)))]
        {
            let mut count: libc::c_int = 0;
            // SAFETY: the system writes one number to `count`, or fails.
            let result = unsafe { libc::ioctl(self.descriptor, libc::TIOCOUTQ, &raw mut count) };
            (result == 0).then_some(usize::try_from(count).ok()?)
        }
        #[cfg(any(not(target_os = "linux"), miri))]
        None
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_system_describes_a_connection() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // The handshake of TCP measures the first round trip.
        let (stream, _peer) = (TcpStream::from_std(stream), listener.accept().unwrap());
        let info = SocketWatch::new(&stream).read().unwrap();
        assert_eq!(info.retransmits, 0);
        assert!(info.round_trip > 0 && info.round_trip < 60_000_000, "{info:?}");
        // The kernel's smoothed figure begins with the first round trip.
        assert!(info.least_round_trip.is_none_or(|least| least > 0 && least <= info.round_trip), "{info:?}");
    }

    #[test]
    fn the_system_knows_what_the_peer_has_not_acknowledged() {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut stream = TcpStream::from_std(stream);
        let watch = SocketWatch::new(&stream);
        assert_eq!(watch.unacknowledged(), Some(0));
        let (peer, _) = listener.accept().unwrap();
        socket2::SockRef::from(&stream).set_nonblocking(true).unwrap();
        let (mut written, block) = (0, vec![0; 1 << 20]);
        while let Ok(count) = stream.write(&block) {
            written += count;
        }
        let held = watch.unacknowledged().unwrap();
        assert!((1..=written).contains(&held), "{held} of {written}");
        if let Some(flow) = watch.read().unwrap().flow {
            assert!(flow.is_full && flow.acknowledged > 0 && flow.acknowledged <= written as u64, "{flow:?} of {written}");
        }
        // What the peer's system has not acknowledged when it resets the connection is lost.
        drop(peer);
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !watch.read().unwrap().is_over {
            assert!(std::time::Instant::now() < deadline, "the connection lives");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!((1..=written).contains(&watch.unacknowledged().unwrap()));
    }

    #[test]
    fn nothing_is_said_about_another_file() {
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        assert_eq!(SocketWatch { descriptor: file.as_raw_fd() }.read(), None);
    }
}

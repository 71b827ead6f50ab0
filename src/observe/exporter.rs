//! Serves metrics over HTTP. The clients are strangers: each gets two seconds and one request of a
//! bounded length, and the next one waits for its turn.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use mio::{Events, Token};

use super::answer::snapshot;
use super::exposition::{CONTENT_TYPE, Target, exposition};
use crate::config::MetricsAddress;
use crate::error::{Error, Result};
use crate::failure::StatusBoard;
use crate::sys::{self, Poll, ScrapeListener, Waker};
use crate::timeouts::{METRICS_ACCEPT_PAUSE, METRICS_CLIENT};

/// The most bytes of a request.
const LONGEST: usize = 8 << 10;

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);

/// Serves metrics on a thread of its own, until it is dropped.
pub(crate) struct Exporter {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread. A forked child also has this value, and not the thread.
    owner: u32,
}

impl Exporter {
    /// Serves the metrics of a rank, which is at this place among the ranks of its machine.
    pub(crate) fn open(address: &MetricsAddress, place: usize, target: Target, board: Arc<StatusBoard>) -> Result<Exporter> {
        let (mut listener, name) = listen(address, place, target.rank)?;
        let failed = |error| Error::os(format!("serving metrics at {name}"))(error);
        let poll = Poll::new().map_err(failed)?;
        let waker = Arc::new(Waker::new(&poll, WAKER).map_err(failed)?);
        listener.register(poll.registry(), LISTENER).map_err(failed)?;
        crate::log::info!(address = name, rank = target.rank, "serving metrics");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serve = move || {
            let text = || exposition(&target, &snapshot(&board, target.rank));
            if let Err(error) = serve(poll, &listener, &stopped, text) {
                crate::log::warn!(%error, "this process serves no more metrics");
            }
        };
        let thread = std::thread::Builder::new().name("kolo-metrics".to_owned()).spawn(serve).map_err(failed)?;
        Ok(Exporter { stop, waker, thread: Some(thread), owner: std::process::id() })
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            // As for the listener of links.
            return std::mem::forget((self.thread.take(), self.waker.clone()));
        }
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            crate::log::error!(%error, "cannot stop serving metrics");
            return;
        }
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            sys::join(thread);
        }
    }
}

/// Listens where the setting says. Returns the address, too, for messages.
fn listen(address: &MetricsAddress, place: usize, rank: usize) -> Result<(ScrapeListener, String)> {
    let refuse = |address: &str, error: &io::Error| {
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => "end the process that listens there, or give another address",
            _ => "give another address",
        };
        Error::setting("KOLO_METRICS", address, format!("rank {rank} cannot listen there: {error}; {advice}"))
    };
    match address {
        MetricsAddress::Port(first) => {
            let port = match first.port() {
                0 => Some(0),
                port => u16::try_from(usize::from(port) + place).ok(),
            };
            let too_high =
                || Error::setting("KOLO_METRICS", first.to_string(), "a port that leaves room for each rank of the machine");
            let address = SocketAddr::new(first.ip(), port.ok_or_else(too_high)?);
            let (listener, bound) = ScrapeListener::at_address(address).map_err(|error| refuse(&address.to_string(), &error))?;
            Ok((listener, bound.to_string()))
        }
        MetricsAddress::Socket(path) => {
            let path = path.replace("{rank}", &rank.to_string());
            let listener = ScrapeListener::at_path(&path).map_err(|error| refuse(&format!("unix:{path}"), &error))?;
            Ok((listener, format!("unix:{path}")))
        }
    }
}

fn serve(mut poll: Poll, listener: &ScrapeListener, stop: &AtomicBool, text: impl Fn() -> String) -> io::Result<()> {
    let mut events = Events::with_capacity(4);
    let mut pause = None;
    loop {
        match poll.poll(&mut events, pause.take()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => result?,
        }
        loop {
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
            match listener.accept(METRICS_CLIENT) {
                Ok(mut stream) => {
                    if let Err(error) = respond(&mut stream, &text) {
                        crate::log::debug!(%error, "a client did not get the metrics");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                Err(error) if sys::is_refused(&error) => return Err(error),
                Err(error) => {
                    crate::log::debug!(%error, "cannot accept a client of metrics at the moment");
                    pause = Some(METRICS_ACCEPT_PAUSE);
                    break;
                }
            }
        }
    }
}

/// Reads a request and answers it.
fn respond(stream: &mut (impl Read + Write), text: impl Fn() -> String) -> io::Result<()> {
    let mut request = Vec::new();
    let mut bytes = [0; 1024];
    let status = loop {
        let count = stream.read(&mut bytes)?;
        request.extend_from_slice(&bytes[..count]);
        if let Some(status) = status_of(&request, count == 0) {
            break status;
        }
    };
    let body = match status {
        "200 OK" => text(),
        _ => format!("{status}\n"),
    };
    let length = body.len();
    let head =
        format!("HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Returns the status with which a request is answered; `None` while it is incomplete.
fn status_of(request: &[u8], is_all: bool) -> Option<&'static str> {
    let ends = |end: &[u8]| request.windows(end.len()).any(|window| window == end);
    if !ends(b"\r\n\r\n") && !ends(b"\n\n") {
        return match request.len() > LONGEST || is_all {
            true => Some("400 Bad Request"),
            false => None,
        };
    }
    let line = request.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    Some(match (words.next(), words.next()) {
        (Some(b"GET"), Some(path)) => match path.split(|&byte| byte == b'?').next() {
            Some(b"/metrics" | b"/") => "200 OK",
            _ => "404 Not Found",
        },
        (Some(_), Some(_)) => "405 Method Not Allowed",
        _ => "400 Bad Request",
    })
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::net::TcpStream;
    use std::time::Duration;

    use super::*;

    fn exporter(address: &MetricsAddress) -> Result<Exporter> {
        let target = Target { job: "job".to_owned(), host: "here".to_owned(), rank: 3 };
        Exporter::open(address, 0, target, Arc::default())
    }

    #[test]
    fn requests_have_one_status() {
        for (request, status) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200 OK"),
            ("GET / HTTP/1.0\n\n", "200 OK"),
            ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", "200 OK"),
            ("GET /secret HTTP/1.1\r\n\r\n", "404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            ("\r\n\r\n", "400 Bad Request"),
        ] {
            assert_eq!(status_of(request.as_bytes(), false), Some(status), "{request:?}");
        }
        assert_eq!(status_of(b"GET /metrics HTTP/1.1\r\nHost", false), None);
        assert_eq!(status_of(b"GET /metrics HTTP/1.1\r\nHost", true), Some("400 Bad Request"));
        assert_eq!(status_of(&[b'x'; LONGEST + 1], false), Some("400 Bad Request"));
    }

    /// Reads a request, and keeps what is written.
    struct Client(Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Client {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Client {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.1.extend_from_slice(from);
            Ok(from.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn garbage_gets_a_short_answer() {
        for garbage in [vec![0xff; 100_000], b"\x16\x03\x01\x02".to_vec(), Vec::new()] {
            let mut client = Client(Cursor::new(garbage), Vec::new());
            respond(&mut client, || unreachable!("garbage gets no metrics")).unwrap();
            assert!(client.1.starts_with(b"HTTP/1.0 400 ") && client.1.len() < 200);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no sockets")]
    fn a_silent_client_keeps_others_out_for_a_bounded_time() {
        // A port that was free a moment ago.
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let exporter = exporter(&MetricsAddress::Port(address)).unwrap();
        let _silent = TcpStream::connect(address).unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.0 200 OK\r\n") && answer.contains("target_info{"), "{answer}");
        drop(exporter);
        assert!(TcpStream::connect(address).is_err(), "a dropped exporter listens no longer");
    }

    #[test]
    fn an_address_that_is_taken_is_an_error_that_names_it() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = exporter(&MetricsAddress::Port(address)).err().unwrap().to_string();
        assert!(error.contains("KOLO_METRICS") && error.contains(&address.to_string()), "{error}");
        let last = MetricsAddress::Port("127.0.0.1:65535".parse().unwrap());
        assert!(listen(&last, 1, 0).err().unwrap().to_string().contains("room for each rank"));
    }
}

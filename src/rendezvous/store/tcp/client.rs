//! A rank's connection to the server.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connect::{ConnectError, connect, listening};
use super::protocol::{CLAIM, FOUND, FULL, GET, NOT_FOUND, SET, encode_request, read_response};
use super::server::{CAPACITY, TcpStoreServer, port_problem};
use crate::error::{Result, StoreError};
use crate::network::identity::Identity;
use crate::network::listener::Until;
use crate::rendezvous::store::kv::{Store, check};
use crate::rendezvous::store::watched;
use crate::sys::{self, Guarded};
use crate::timeouts::{RESPONSE_GRACE, STORE_NO_DESCRIPTOR};

/// A rank's connection to the server.
pub(crate) struct TcpStore {
    stream: Mutex<Guarded<TcpStream>>,
    url: String,
    /// The deadline of the start. Until then the server may be silent, because its process may be
    /// paused.
    deadline: Instant,
    // Rank 0 serves the others.
    server: Option<TcpStoreServer>,
    /// Where another process serves the store.
    served_at: Option<ServedAt>,
}

/// Where another process serves a store.
struct ServedAt {
    host: String,
    ports: Vec<u16>,
    identity: Identity,
}

impl TcpStore {
    pub(in crate::rendezvous::store) fn open(
        host: &str,
        port: u16,
        owner: bool,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<TcpStore> {
        let url = if host.contains(':') { format!("tcp://[{host}]:{port}") } else { format!("tcp://{host}:{port}") };
        if !owner {
            if port == 0 {
                let problem =
                    "only rank 0 can use port 0; the other ranks need the port that rank 0 has picked and logged".to_owned();
                return Err(StoreError::Url(problem).at(url));
            }
            return TcpStore::find(host, &[port], identity, deadline).map_err(|problem| problem.at(url));
        }
        let server = serve_at(host, port, identity, deadline).map_err(|problem| problem.at(&url))?;
        if port == 0 {
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            crate::log::warn!(
                url = format!("tcp://{host}:{}", server.address().port()),
                "rank 0 has picked the port of the store; give this URL to the other ranks"
            );
        }
        TcpStore::of_server(server, identity, deadline)
    }

    /// Opens the store on the first of these ports that rank 0 can serve, or that serves this job.
    /// This is for launchers that give ranks an address, but no port of their own.
    pub(crate) fn open_any(host: &str, ports: &[u16], owner: bool, identity: &Identity, deadline: Instant) -> Result<TcpStore> {
        let url = match ports {
            [first, .., last] if ports.len() > 8 => format!("tcp://{host}:{first}-{last}"),
            _ => format!("tcp://{host}:{}", ports.iter().map(u16::to_string).collect::<Vec<_>>().join("|")),
        };
        if !owner {
            return TcpStore::find(host, ports, identity, deadline).map_err(|problem| problem.at(url));
        }
        let mut last = None;
        for &port in ports {
            match serve_at(host, port, identity, deadline) {
                Ok(server) => return TcpStore::of_server(server, identity, deadline),
                Err(problem) => last = Some(problem),
            }
        }
        Err(last.unwrap_or_else(|| StoreError::Url("it has no port".to_owned())).at(url))
    }

    fn of_server(server: TcpStoreServer, identity: &Identity, deadline: Instant) -> Result<TcpStore> {
        let address = server.address();
        let reachable = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(IpAddr::from([127, 0, 0, 1]), address.port()),
            IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(std::net::Ipv6Addr::LOCALHOST.into(), address.port()),
            _ => address,
        };
        let connect = || connect(reachable, identity, deadline);
        // If this process was stopped during the handshake, the server has dropped it.
        let again = |problem| match problem {
            ConnectError::Transient(_) if sys::shortage_of(2).is_none() => connect(),
            problem => Err(problem),
        };
        let stream = connect().or_else(again).map_err(|problem| match problem {
            ConnectError::Transient(error) => {
                // A connection has two ends in this process, and the server stays silent if it has no
                // descriptor for its end.
                let error = sys::shortage_of(2).unwrap_or(error);
                StoreError::io("reaching its own server")(error).at(server.url())
            }
            ConnectError::Permanent(problem) | ConnectError::Own(problem) => problem.at(server.url()),
        })?;
        Ok(TcpStore { stream: Mutex::new(stream), url: server.url(), deadline, server: Some(server), served_at: None })
    }

    /// Connects as soon as one of the ports serves this job.
    fn find(host: &str, ports: &[u16], identity: &Identity, deadline: Instant) -> Result<TcpStore, StoreError> {
        let started = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let last = match TcpStore::try_ports(host, ports, identity, deadline)? {
                Ok(store) => return Ok(store),
                Err(last) => last,
            };
            watched::check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StoreError::Unreachable { waited: started.elapsed(), last });
            }
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(Duration::from_millis(100));
        }
    }

    /// Tries each port once. Returns the store, or the last error if another attempt may succeed.
    fn try_ports(
        host: &str,
        ports: &[u16],
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Result<TcpStore, String>, StoreError> {
        let mut last = String::new();
        for &port in ports {
            // Resolved for each attempt: in clusters, names appear with their hosts.
            let addresses = match sys::resolve(host, port, deadline) {
                Ok(addresses) => addresses,
                Err(error) => {
                    last = format!("cannot resolve {host}: {error}");
                    continue;
                }
            };
            for address in addresses {
                match connect(address, identity, deadline) {
                    Ok(stream) => {
                        let url = format!("tcp://{address}");
                        let served_at = ServedAt { host: host.to_owned(), ports: ports.to_owned(), identity: identity.clone() };
                        let stream = Mutex::new(stream);
                        return Ok(Ok(TcpStore { stream, url, deadline, server: None, served_at: Some(served_at) }));
                    }
                    Err(ConnectError::Transient(error)) => last = format!("{address}: {error}"),
                    // Another program may listen at one of several ports.
                    Err(ConnectError::Permanent(problem)) if ports.len() > 1 => last = format!("{address}: {problem}"),
                    Err(ConnectError::Permanent(problem) | ConnectError::Own(problem)) => return Err(problem),
                }
            }
        }
        Ok(Err(last))
    }

    fn ask(&self, operation: u8, key: &str, value: &[u8], timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        check(key, value)?;
        let request = encode_request(operation, key, value, timeout);
        let stream = self.stream.lock();
        let mut until = Until { stream: &stream, deadline: self.deadline.max(Instant::now() + timeout + RESPONSE_GRACE) };
        let lost = |error: io::Error| match error.kind() {
            // A server that ends with a request unread resets the connection.
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => StoreError::io(
                "its server closed the connection before this rank joined; check that rank 0 runs, that this rank was started \
                 once, and that both have the same job name (KOLO_JOB_ID)",
            )(error.kind().into()),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                StoreError::io("asking its server, which does not answer; is rank 0 paused?")(io::ErrorKind::TimedOut.into())
            }
            _ => StoreError::io("asking its server")(error),
        };
        match until.write_all(&request).and_then(|()| read_response(&mut until)).map_err(lost)? {
            (FOUND, value) => Ok(Some(value)),
            (NOT_FOUND, _) => Ok(None),
            (FULL, _) => Err(StoreError::TooLarge { what: "a value", bytes: value.len(), limit: CAPACITY }),
            _ => Err(StoreError::Foreign("its server sent an invalid response".to_owned())),
        }
    }
}

/// Serves the store at a name or an address of this machine.
fn serve_at(host: &str, port: u16, identity: &Identity, deadline: Instant) -> Result<TcpStoreServer, StoreError> {
    let addresses = sys::resolve(host, port, deadline).map_err(StoreError::io("resolving its host"))?;
    let is_name = host.parse::<IpAddr>().is_err() && !host.eq_ignore_ascii_case("localhost");
    let mut last = None;
    for mut address in addresses {
        // On many systems a host's own name resolves to 127.0.1.1. Ranks on other hosts resolve it
        // to another address, where nothing would listen.
        if is_name && address.ip().is_loopback() && identity.may_listen() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            });
        }
        address = listening(address, identity);
        match TcpStoreServer::serve(address, identity.clone()) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some((address, error)),
        }
    }
    let Some((address, error)) = last else {
        return Err(StoreError::Url(format!("{host} has no address")));
    };
    match error.kind() {
        // If the port serves a store of another job, that says more than the port.
        io::ErrorKind::AddrInUse => {
            let found = connect(address, identity, deadline.min(Instant::now() + Duration::from_secs(1)));
            if let Err(ConnectError::Permanent(found @ StoreError::OtherJob { .. })) = found {
                return Err(found);
            }
            let of_kolo = match found {
                Ok(_) => Some(format!("the store of a job with the same name, {:?} (KOLO_JOB_ID)", identity.job())),
                Err(ConnectError::Permanent(StoreError::Secret)) => Some("the store of a job with another secret".to_owned()),
                Err(ConnectError::Permanent(StoreError::Version { theirs, .. })) => {
                    Some(format!("the store of a job with version {theirs} of kolo's protocol"))
                }
                Err(_) => None,
            };
            match (port_problem(address, error), of_kolo) {
                (StoreError::PortTaken { address, holder }, Some(of_kolo)) => {
                    let process = holder.map_or_else(String::new, |holder| format!(", in {holder}"));
                    Err(StoreError::PortTaken { address, holder: Some(of_kolo + &process) })
                }
                (problem, _) => Err(problem),
            }
        }
        io::ErrorKind::AddrNotAvailable => {
            let advice = format!("{host} ({}) is not an address of this machine, where rank 0 runs", address.ip());
            Err(StoreError::Url(advice))
        }
        _ => Err(port_problem(address, error)),
    }
}

impl Store for TcpStore {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.ask(SET, key, value, timeout).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.ask(GET, key, &[], timeout)?;
        // The ranks that could set the key may not reach the server.
        match self.server.as_ref().filter(|_| found.is_none()).and_then(|server| server.shortage(STORE_NO_DESCRIPTOR)) {
            Some(error) => Err(StoreError::io("accepting the connections of the other ranks")(error)),
            None => Ok(found),
        }
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.ask(CLAIM, key, value, timeout)?.ok_or_else(|| StoreError::Foreign("its server sent an invalid response".to_owned()))
    }

    fn reconnect(&self, timeout: Duration) -> Result<bool, StoreError> {
        let Some(ServedAt { host, ports, identity }) = &self.served_at else { return Ok(false) };
        let found = TcpStore::find(host, ports, identity, Instant::now() + timeout)?;
        *self.stream.lock() = found.stream.into_inner();
        Ok(true)
    }
}

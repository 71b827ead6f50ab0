//! Congestion control and number of the TCP connections of a link, by its round trip.
//!
//! CUBIC and Reno take a lost packet for a full network. With a round trip of R and a part P of the
//! packets lost, Reno sends about 1.2 segments / (R sqrt(P)) (Mathis, Semke, Mahdavi and Ott, "The
//! macroscopic behavior of the TCP congestion avoidance algorithm", 1997): 1.7 MB/s at 10 ms and 1 %,
//! however fast the network is. BBR sends at the rate at which data arrives (Cardwell et al., "BBR:
//! congestion-based congestion control", 2016). Several connections share the losses: a link of
//! them has several times the rate.
//!
//! With a short round trip, packets get lost where the network is full, and the system's choice stays.

use mio::net::TcpStream;

use crate::config::CongestionControl;
use crate::sys::{self, SocketWatch};

/// A round trip that is long, in microseconds. In a building it is below 1 ms.
const LONG: u64 = 2_000;

/// Connections of a link with a long round trip, whose congestion control takes every lost packet for a
/// full network.
const LANES: u8 = 4;

/// Returns whether both ends of a connection have one address: there is no wire between them.
pub(super) fn is_local(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(here), Ok(there)) if here.ip() == there.ip())
}

/// Chooses the congestion control for what this end of a connection sends.
pub(crate) fn control(stream: &TcpStream, chosen: &CongestionControl) {
    let name = match chosen {
        CongestionControl::Named(name) => Some(name.as_str()),
        CongestionControl::System => None,
        // Pacing has no use inside a machine: BBR sends no faster than it once saw the peer receive,
        // and then 64 KiB take 38 us instead of 17 us.
        CongestionControl::Auto if is_local(stream) => sys::UNPACED,
        CongestionControl::Auto if is_long(stream) => sys::LOSS_TOLERANT,
        CongestionControl::Auto => None,
    };
    let Some(name) = name else { return };
    // The system may not have it, or keep it for the administrator. That costs speed, but not
    // correctness.
    if let Err(error) = sys::set_congestion_control(&socket2::SockRef::from(stream), name) {
        crate::log::debug!(%error, name, "cannot choose the congestion control of a connection; it has the system's");
    }
}

/// Returns how many connections a link needs, of which this one is the first and has its congestion
/// control. The rank that connects decides, and tells its peer: if the peer's system has no BBR, what
/// it sends over one connection is slow.
pub(crate) fn lanes(stream: &TcpStream) -> u8 {
    let control = sys::congestion_control(&socket2::SockRef::from(stream));
    let lanes = if is_long(stream) && control.as_deref() != sys::LOSS_TOLERANT { LANES } else { 1 };
    crate::log::debug!(lanes, control, "chose the connections of a link by its round trip");
    lanes
}

/// Returns whether a round trip takes long; not, where the system does not say.
pub(super) fn is_long(stream: &TcpStream) -> bool {
    let info = SocketWatch::new(stream).read();
    info.and_then(|info| info.least_round_trip).is_some_and(|least| least >= LONG)
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    fn pair() -> [TcpStream; 2] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [near, listener.accept().unwrap().0].map(TcpStream::from_std)
    }

    fn control(stream: &TcpStream) -> String {
        sys::congestion_control(&socket2::SockRef::from(stream)).unwrap()
    }

    #[test]
    fn the_setting_chooses_the_congestion_control() {
        let [near, far] = pair();
        let systems = control(&near);
        super::control(&near, &CongestionControl::System);
        assert_eq!(control(&near), systems);
        // A name that the system does not have is no failure.
        super::control(&near, &CongestionControl::Named("no-such-one".to_owned()));
        assert_eq!(control(&near), systems);
        super::control(&near, &CongestionControl::Named("reno".to_owned()));
        // Each end chooses for itself.
        assert_eq!((control(&near).as_str(), control(&far)), ("reno", systems));
    }

    #[test]
    fn inside_a_machine_nothing_is_paced_and_one_connection_is_enough() {
        let [near, _far] = pair();
        super::control(&near, &CongestionControl::Auto);
        assert_eq!(control(&near), "reno");
        assert_eq!(lanes(&near), 1);
    }
}

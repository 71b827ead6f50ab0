//! One connection of a link over several rails: the stripes that it has to deliver, how fast it
//! does, and whether it still does.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use super::link::sent;
use super::stripes::{DROPPED, HEADER, Incoming, encode};
use crate::buffer::RawSlice;
use crate::error::Cause;
use crate::sys::{self, SocketInfo, SocketWatch, TcpStream};
use crate::timeouts::{RAIL_DOUBT, RAIL_SILENCE};

/// Bytes that a connection may hold before its speed is known.
const FIRST_BUFFER: usize = 64 << 10;

/// The most bytes that a connection may hold afterwards, and for how many seconds they may keep it
/// busy: what it holds cannot go to another one that turns out to be faster.
const BUFFER: usize = 8 << 20;
const HELD: f64 = 0.1;

/// How long deliveries are counted for one measurement of the speed, at least and at most, and how
/// many bytes they have to be: the peer's system acknowledges many at once.
const WINDOW: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);
const LEAST: u64 = 256 << 10;

/// How much faster a connection may seem from one window to the next unless it is full.
const RISE: f64 = 1.05;

/// Bytes of the stream with their header, kept until the peer's system has them.
#[derive(Clone)]
pub(super) struct Stripe {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) bytes: Vec<u8>,
    /// A connection has taken all of it before, or another one has it as well.
    pub(super) is_repeat: bool,
}

impl Stripe {
    /// Makes a stripe in `bytes`, to which the caller appends the bytes of the stream.
    pub(super) fn new(start: u64, end: u64, mut bytes: Vec<u8>) -> Stripe {
        bytes.clear();
        bytes.extend_from_slice(&encode(start, end));
        Stripe { start, end, bytes, is_repeat: false }
    }
}

/// Why a rail carries no stripes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Loss {
    /// The connection failed.
    Failed(Cause),
    /// The peer's system does not answer. It may answer again.
    Silent,
}

pub(super) struct Rail {
    pub(super) stream: TcpStream,
    watch: SocketWatch,
    pub(super) incoming: Incoming,
    /// The peer has closed the connection.
    pub(super) has_ended: bool,
    pub(super) loss: Option<Loss>,
    /// Since when, and whether the log says so.
    pub(super) lost_at: Instant,
    pub(super) is_reported: bool,
    /// The stripes that the peer's system may lack, oldest first.
    stripes: VecDeque<Stripe>,
    /// Whether they are in the order of the stream: one that is sent again comes behind later ones.
    is_in_order: bool,
    /// Bytes of them.
    held: usize,
    /// Bytes of the last one that the connection has not taken.
    unsent: usize,
    /// Bytes that the connection had taken and the peer's system lacked, when last asked, and
    /// what was given since.
    backlog: usize,
    /// All bytes that the connection has taken.
    written: u64,
    /// The measurement that goes on.
    window: Option<Window>,
    /// Bytes in a second, once known.
    speed: Option<f64>,
}

/// A measurement of the speed.
struct Window {
    since: Instant,
    /// What the connection had delivered then.
    delivered: u64,
    /// Whether it is the first one after a pause.
    is_first: bool,
    /// Whether the connection had no room, so that it was as fast as it can be.
    is_full: bool,
}

impl Rail {
    pub(super) fn new(stream: TcpStream) -> Rail {
        let watch = SocketWatch::new(&stream);
        let rail = Rail {
            stream,
            watch,
            incoming: Incoming::default(),
            has_ended: false,
            loss: None,
            lost_at: Instant::now(),
            is_reported: false,
            stripes: VecDeque::new(),
            is_in_order: true,
            held: 0,
            unsent: 0,
            backlog: 0,
            written: 0,
            window: None,
            speed: None,
        };
        // A buffer that does not follow the speed would stay small.
        if rail.knows_deliveries() {
            rail.hold(FIRST_BUFFER);
        }
        rail
    }

    /// Limits what the connection holds.
    fn hold(&self, bytes: usize) {
        if let Err(error) = socket2::SockRef::from(&self.stream).set_send_buffer_size(bytes) {
            crate::log::debug!(%error, "cannot set the buffer of a rail; its link may be slower");
        }
    }

    /// Whether the system says what a connection has delivered, without which nothing can be sent
    /// again.
    pub(super) fn knows_deliveries(&self) -> bool {
        self.watch.unacknowledged().is_some()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.loss.is_some()
    }

    pub(super) fn info(&self) -> Option<SocketInfo> {
        self.watch.read()
    }

    /// Whether the peer's system has left something unanswered that was sent twice.
    pub(super) fn is_unanswered(&self) -> bool {
        !self.is_lost() && self.info().is_some_and(|info| info.unanswered > 0)
    }

    /// Returns the addresses of both ends, for people.
    pub(super) fn route(&self) -> String {
        let show = |address: io::Result<std::net::SocketAddr>| address.map_or("?".to_owned(), |address| address.to_string());
        format!("{} -> {}", show(self.stream.local_addr()), show(self.stream.peer_addr()))
    }

    /// Forgets the stripes that the peer's system has, and measures the speed. Their memory goes to
    /// `pool`.
    pub(super) fn refresh(&mut self, now: Instant, pool: &mut Vec<Vec<u8>>) {
        let taken = self.held - self.unsent;
        // If the system does not say, nothing is kept.
        let missing = if taken == 0 { 0 } else { self.watch.unacknowledged().unwrap_or(0).min(taken) };
        // The peer's system also answers for a connection that the peer does not have in its link.
        let mut delivered = if self.incoming.has_begun { taken - missing } else { 0 };
        while let Some(first) = self.stripes.front()
            && first.bytes.len() <= delivered
            && let Some(stripe) = self.stripes.pop_front()
        {
            delivered -= stripe.bytes.len();
            self.held -= stripe.bytes.len();
            pool.push(stripe.bytes);
        }
        self.backlog = missing + self.unsent;
        self.measure(now, missing);
    }

    /// Measures the speed while the connection has something to deliver. The first window after a pause
    /// does not count: the network may take a burst at once.
    fn measure(&mut self, now: Instant, missing: usize) {
        let delivered = self.written.saturating_sub(missing as u64);
        let is_full = self.unsent > 0;
        let Some(mut window) = self.window.take().filter(|_| missing > 0) else {
            self.window = (missing > 0).then_some(Window { since: now, delivered, is_first: true, is_full });
            return;
        };
        window.is_full &= is_full;
        // The system also counts the end of a connection that is shut down.
        let (elapsed, bytes) = (now - window.since, delivered.saturating_sub(window.delivered));
        if elapsed < WINDOW || (bytes < LEAST && elapsed < LONGEST) {
            self.window = Some(window);
            return;
        }
        self.window = Some(Window { since: now, delivered, is_first: false, is_full });
        // With fewer bytes, the peer did not read.
        if window.is_first || bytes < LEAST {
            return;
        }
        let sample = bytes as f64 / elapsed.as_secs_f64();
        self.speed = match self.speed {
            Some(speed) if window.is_full => Some((speed + sample) / 2.0),
            // A connection that waits for bytes is at least as fast as this. A rise may be a burst.
            Some(speed) => Some(speed.max(sample.min(RISE * speed))),
            None if window.is_full => Some(sample),
            None => None,
        };
        if let Some(speed) = self.speed {
            self.hold(((speed * HELD) as usize).clamp(FIRST_BUFFER, BUFFER));
        }
    }

    /// Returns the bytes that the connection has to deliver, and its speed.
    pub(super) fn load(&self) -> Load {
        Load { backlog: self.backlog, speed: self.speed }
    }

    /// Whether the connection has taken all that it was given.
    pub(super) fn has_room(&self) -> bool {
        self.unsent == 0
    }

    /// Returns the stream position of the first byte that the peer's system may lack.
    pub(super) fn oldest(&self) -> Option<u64> {
        match self.is_in_order {
            true => self.stripes.front().map(|stripe| stripe.start),
            false => self.stripes.iter().map(|stripe| stripe.start).min(),
        }
    }

    /// Whether it has nothing to deliver.
    pub(super) fn is_idle(&self) -> bool {
        self.held == 0
    }

    /// Gives the connection a stripe. It has room.
    pub(super) fn give(&mut self, stripe: Stripe) {
        self.unsent = stripe.bytes.len();
        self.held += self.unsent;
        self.backlog += self.unsent;
        let is_in_order = self.stripes.back().is_none_or(|last| last.start <= stripe.start);
        self.is_in_order = is_in_order && (self.is_in_order || self.stripes.is_empty());
        self.stripes.push_back(stripe);
    }

    /// Sends what the connection takes.
    pub(super) fn flush(&mut self) -> Result<(), Cause> {
        while self.unsent > 0
            && let Some(last) = self.stripes.back()
        {
            let rest = RawSlice::of(&last.bytes[last.bytes.len() - self.unsent..]);
            let stream = &self.stream;
            // SAFETY: the stripe is this rail's own.
            let count = sent(stream.try_io(|| unsafe { sys::send(stream, &[rest]) }))?;
            if count == 0 {
                break;
            }
            self.unsent -= count;
            self.written += count as u64;
        }
        Ok(())
    }

    /// Returns the stream position of the first byte that the connection has not taken, of those
    /// that it was given. Bytes that another connection had taken do not count.
    pub(super) fn pending(&self) -> Option<u64> {
        let last = self.stripes.back().filter(|stripe| self.unsent > 0 && !stripe.is_repeat)?;
        Some(last.end - (self.unsent as u64).min(last.end - last.start))
    }

    /// Reads what has arrived, and drops it. The peer may go on sending, so this takes no more than a
    /// connection may hold.
    pub(super) fn drain(&mut self) {
        let mut dropped = [0; DROPPED];
        for _ in 0..BUFFER / DROPPED {
            match (&*self.stream).read(&mut dropped) {
                Ok(0) => return self.has_ended = true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Returns whether the peer's system has everything, or takes no more.
    pub(super) fn has_delivered(&self) -> bool {
        let has_all = self.has_room() && self.watch.unacknowledged().is_none_or(|missing| missing == 0);
        has_all || self.info().is_some_and(|info| info.is_over)
    }

    /// Sends no more.
    pub(super) fn end(&self) {
        // It may be over already.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// Takes back what the peer's system may lack. The connection may have delivered some of it.
    pub(super) fn lose(&mut self, loss: Loss, now: Instant, pool: &mut Vec<Vec<u8>>) -> VecDeque<Stripe> {
        self.refresh(now, pool);
        let mut stripes = std::mem::take(&mut self.stripes);
        // If the peer answers again, the stripe that was cut off comes first.
        let mut cut = stripes.back().filter(|_| self.unsent > 0 && loss == Loss::Silent).cloned();
        cut.iter_mut().for_each(|stripe| stripe.is_repeat = true);
        let is_cut = usize::from(self.unsent > 0);
        stripes.iter_mut().rev().skip(is_cut).for_each(|stripe| stripe.is_repeat = true);
        self.held = cut.as_ref().map_or(0, |stripe| stripe.bytes.len());
        self.unsent = self.unsent.min(self.held);
        self.stripes.extend(cut);
        self.window = None;
        (self.loss, self.lost_at, self.is_reported) = (Some(loss), now, false);
        stripes.retain(|stripe| stripe.bytes.len() > HEADER);
        stripes
    }

    /// Returns whether a silent rail answers again, and has delivered what it was given.
    pub(super) fn answers_again(&self) -> bool {
        self.loss == Some(Loss::Silent) && self.incoming.has_begun && self.watch.unacknowledged() == Some(0)
    }
}

/// What a rail has to deliver, and how fast it does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Bytes that it has been given and has not delivered.
    pub(super) backlog: usize,
    /// Bytes in a second, once known.
    pub(super) speed: Option<f64>,
}

/// The slowest rail counts as this much slower than the fastest at most, so that it is tried again.
const SLOWEST: f64 = 1.0 / 32.0;

/// Returns which rail delivers `bytes` first. If that one has no room, waiting for it is better than
/// giving them to another: each rail gets as much as it delivers while the others deliver theirs.
pub(super) fn soonest(loads: impl Iterator<Item = (usize, Load)> + Clone, bytes: usize) -> Option<usize> {
    let fastest = loads.clone().filter_map(|(_, load)| load.speed).fold(0.0, f64::max);
    let fastest = if fastest > 0.0 { fastest } else { 1.0 };
    let time = |load: Load| (load.backlog + bytes) as f64 / load.speed.unwrap_or(fastest).max(SLOWEST * fastest);
    loads.min_by(|(_, one), (_, other)| time(*one).total_cmp(&time(*other))).map(|(at, _)| at)
}

/// Returns whether the peer's system answers on another rail, and no longer on this one.
pub(super) fn is_silent(this: &SocketInfo, others: impl Iterator<Item = SocketInfo>) -> bool {
    this.unanswered >= 2 && this.quiet >= RAIL_SILENCE && others.into_iter().any(|other| other.quiet < this.quiet / 2)
}

/// Returns whether a rail may be silent, so that the others should ask the peer's system.
pub(super) fn is_doubtful(this: &SocketInfo) -> bool {
    this.unanswered >= 1 && this.quiet >= RAIL_DOUBT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rails_get_stripes_by_their_speed() {
        const STRIPE: usize = 128 << 10;
        let speeds = [1.0e9, 1.0e8];
        let mut loads = speeds.map(|speed| Load { backlog: 0, speed: Some(speed) });
        for _ in 0..110 {
            let at = soonest(loads.into_iter().enumerate(), STRIPE).unwrap();
            loads[at].backlog += STRIPE;
        }
        assert_eq!(loads.map(|load| load.backlog / STRIPE), [100, 10]);
        // A speed that is not known counts as the best one, and one that was measured too low is tried.
        let unknown = [Load { backlog: STRIPE, speed: None }, Load { backlog: 2 * STRIPE, speed: Some(1.0) }];
        assert_eq!(soonest(unknown.into_iter().enumerate(), STRIPE), Some(0));
        let slow = [Load { backlog: 0, speed: Some(1.0) }, Load { backlog: 64 * STRIPE, speed: Some(1e9) }];
        assert_eq!(soonest(slow.into_iter().enumerate(), STRIPE), Some(0));
        assert_eq!(soonest([].into_iter(), STRIPE), None);
    }

    #[test]
    fn a_rail_is_silent_only_if_another_one_answers() {
        let info = |unanswered, millis| SocketInfo { unanswered, quiet: Duration::from_millis(millis), ..SocketInfo::default() };
        for (this, others, silent) in [
            (info(3, 2500), vec![info(0, 100)], true),
            // The peer's host does not answer at all.
            (info(3, 2500), vec![info(3, 2400)], false),
            (info(3, 2500), vec![], false),
            // Nothing was sent, or not long ago.
            (info(0, 9000), vec![info(0, 100)], false),
            (info(3, 900), vec![info(0, 100)], false),
        ] {
            assert_eq!(is_silent(&this, others.into_iter()), silent, "{this:?}");
        }
        assert!(is_doubtful(&info(1, 600)) && !is_doubtful(&info(0, 600)));
    }
}

//! A link over several rails: TCP connections between different network interfaces of two hosts.
//!
//! The stream is cut into [stripes](super::stripes), and each stripe goes to the rail that delivers it
//! first, by the speeds that the link measures. The link keeps a copy of each stripe until the peer's
//! system has acknowledged it. If a rail fails, the others carry what it has not delivered. The peer
//! may then get some bytes twice, and drops them.
//!
//! The sender may have left the library when a rail fails. So a thread of the process, the keeper,
//! looks after all such links. It also finds the rails on which the peer's system no longer answers.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};
use parking_lot::Mutex;

use super::Link;
use super::rail::{Loss, Rail, Stripe, is_doubtful, is_silent, soonest};
use super::stripes::{Goal, Joiner, MOST_AHEAD, STRIPE, append};
use crate::buffer::{RawSlice, RawSliceMut};
use crate::error::Cause;
use crate::sys::{self, SocketWatch, TcpStream};
use crate::timeouts::{RAIL_HANDING_OVER, RAIL_LEAVING, RAIL_LOOK, RAIL_REPORT, RAIL_ROUND, RAIL_SILENCE, RAIL_STALL};
use crate::trace::Traffic;
use crate::types::Rank;

/// The most buffers of stripes that are kept for the next ones.
const POOL: usize = 64;

pub(crate) struct RailLink {
    rails: Arc<Mutex<Rails>>,
    /// How often the process that made the link had been forked.
    forks: u32,
}

struct Rails {
    peer: Rank,
    rails: Vec<Rail>,
    /// Whether what a rail has not delivered can be sent again.
    can_repeat: bool,
    /// Stream position of the first byte that has not been taken from the caller.
    taken: u64,
    /// Stream position up to which stripes have been given to rails.
    assigned: u64,
    /// Whether a rail was ever lost, so that bytes may have been sent twice.
    was_damaged: bool,
    /// Stripes of lost rails, for the others.
    again: VecDeque<Stripe>,
    /// Memory for stripes.
    pool: Vec<Vec<u8>>,
    joiner: Joiner,
    /// Since when something has come on any rail.
    begun: Option<Instant>,
    /// Since when later bytes have waited for earlier ones.
    stalled: Option<Instant>,
    /// Whether the sender is so far ahead of a stripe that it waits, although connections have room.
    is_far_ahead: bool,
    traffic: Arc<Traffic>,
}

impl RailLink {
    /// Makes a link to a peer over connections, each over a rail. `left_out` others could not be made.
    pub(crate) fn new(streams: Vec<TcpStream>, left_out: usize, peer: Rank) -> RailLink {
        let traffic = Traffic::of_sockets(streams.iter().map(|stream| SocketWatch::new(stream)).collect());
        (0..left_out).for_each(|_| traffic.lost_rail());
        let mut rails: Vec<Rail> = streams.into_iter().map(Rail::new).collect();
        let can_repeat = rails.iter().all(Rail::knows_deliveries);
        for rail in rails.iter_mut().filter(|_| can_repeat) {
            // Tells the peer that this link has the rail. The first call sees a failure, too.
            rail.give(Stripe::new(0, 0, Vec::new()));
            let _ = rail.flush();
        }
        let (again, pool, joiner) = (VecDeque::new(), Vec::new(), Joiner::new(true));
        let rails = Rails {
            peer,
            rails,
            can_repeat,
            taken: 0,
            assigned: 0,
            was_damaged: false,
            again,
            pool,
            joiner,
            begun: None,
            stalled: None,
            is_far_ahead: false,
            traffic,
        };
        let link = RailLink { rails: Arc::new(Mutex::new(rails)), forks: sys::forks() };
        if can_repeat {
            keep(Arc::downgrade(&link.rails));
        }
        link
    }
}

// The tests that use these run on Linux only.
#[cfg(test)]
#[allow(dead_code)]
impl RailLink {
    pub(super) fn lost(&self) -> usize {
        self.rails.lock().rails.iter().filter(|rail| rail.is_lost()).count()
    }

    /// Drops a rail, although it works.
    pub(super) fn lose(&self, at: usize, loss: Loss) {
        self.rails.lock().lose(at, loss).expect("another rail is left");
    }

    /// Stream position up to which rails have stripes.
    pub(super) fn assigned(&self) -> u64 {
        self.rails.lock().assigned
    }
}

impl Rails {
    fn is_intact(&self) -> bool {
        self.rails.iter().all(|rail| rail.stream.is_intact())
    }

    /// Sends stripes: those of lost rails first, then bytes of `parts`, which are the stream's from
    /// `taken` to `offered`.
    ///
    /// # Safety
    ///
    /// The parts are readable until this returns.
    unsafe fn pump(&mut self, parts: &[RawSlice], offered: u64) -> Result<(), Cause> {
        let now = Instant::now();
        self.look_for_first_stripes(now);
        for at in 0..self.rails.len() {
            if !self.rails[at].is_lost() {
                self.rails[at].refresh(now, &mut self.pool);
                self.flush(at)?;
            }
        }
        self.pool.truncate(POOL);
        self.is_far_ahead = false;
        let mut oldest = self.rails.iter().filter(|rail| !rail.is_lost()).filter_map(Rail::oldest).min().unwrap_or(u64::MAX);
        while !self.again.is_empty() || self.assigned < offered {
            let loads = self.rails.iter().enumerate().filter(|(_, rail)| !rail.is_lost()).map(|(at, rail)| (at, rail.load()));
            let len = (offered - self.assigned.min(offered)).clamp(1, STRIPE) as usize;
            let Some(at) = soonest(loads, len) else { return Err(self.cause()) };
            // A rail that delivers nothing may have fallen silent. The others wait until the keeper knows.
            if self.again.is_empty() && self.assigned + STRIPE > oldest.saturating_add(MOST_AHEAD) {
                self.is_far_ahead = true;
                break;
            }
            if !self.rails[at].has_room() {
                break;
            }
            let stripe = match self.again.pop_front() {
                Some(stripe) => stripe,
                None => {
                    let (start, end) = (self.assigned, offered.min(self.assigned + STRIPE));
                    let mut stripe = Stripe::new(start, end, self.pool.pop().unwrap_or_default());
                    // SAFETY: the caller vouches for the parts.
                    unsafe { append(&mut stripe.bytes, parts, self.taken, start, end) };
                    self.assigned = end;
                    stripe
                }
            };
            oldest = oldest.min(stripe.start);
            self.rails[at].give(stripe);
            self.flush(at)?;
        }
        Ok(())
    }

    /// Looks on which rails the peer has begun to send: its link has these.
    fn look_for_first_stripes(&mut self, now: Instant) {
        for rail in self.rails.iter_mut().filter(|rail| !rail.incoming.has_begun) {
            // The next call that reads sees a failure, or the end, too.
            rail.incoming.has_begun = rail.stream.peek(&mut [0]).is_ok_and(|count| count > 0);
        }
        if self.begun.is_none() && self.rails.iter().any(|rail| rail.incoming.has_begun) {
            self.begun = Some(now);
        }
    }

    /// Returns the stream position up to which connections have taken all bytes. What is sent again may
    /// have arrived, and the peer may read it much later, so the caller does not wait for it.
    fn passed_on(&self) -> u64 {
        let waiting = self.rails.iter().filter(|rail| !rail.is_lost()).filter_map(Rail::pending);
        let lost = self.again.iter().find(|stripe| !stripe.is_repeat).map(|stripe| stripe.start);
        waiting.chain(lost).min().unwrap_or(self.assigned)
    }

    /// Sends what a rail takes. Fails if no other rail is left for what it does not deliver.
    fn flush(&mut self, at: usize) -> Result<(), Cause> {
        match self.rails[at].flush() {
            Ok(()) => Ok(()),
            Err(cause) => self.lose(at, Loss::Failed(cause)),
        }
    }

    /// Drops a rail. Fails if none is left.
    fn lose(&mut self, at: usize, loss: Loss) -> Result<(), Cause> {
        if !self.can_repeat
            && let Loss::Failed(cause) = &loss
        {
            return Err(cause.clone());
        }
        if self.rails[at].is_lost() && loss == Loss::Silent {
            return Ok(());
        }
        self.was_damaged = true;
        let undelivered = self.rails[at].lose(loss, Instant::now(), &mut self.pool);
        self.again.extend(undelivered);
        self.again.make_contiguous().sort_by_key(|stripe| stripe.start);
        if !self.rails.iter().all(Rail::is_lost) {
            return Ok(());
        }
        self.report_all();
        Err(self.cause())
    }

    /// Returns why there is no rail.
    fn cause(&self) -> Cause {
        match self.last_loss() {
            Some(Loss::Failed(cause)) => cause.clone(),
            _ => Cause::Broken(io::ErrorKind::TimedOut),
        }
    }

    /// Returns why the rail that was lost last was lost.
    fn last_loss(&self) -> Option<&Loss> {
        self.rails.iter().filter(|rail| rail.is_lost()).max_by_key(|rail| rail.lost_at)?.loss.as_ref()
    }

    /// Reads from all rails what the goal wants.
    ///
    /// # Safety
    ///
    /// The memory of the goal is writable until this returns, and no other thread accesses it.
    unsafe fn collect(&mut self, goal: Goal) -> Result<(), Cause> {
        let before = self.joiner.complete();
        // What a lost rail had may come behind later stripes.
        let sets_aside = self.rails.iter().any(|rail| rail.is_lost() || rail.has_ended)
            || self.stalled.is_some_and(|since| since.elapsed() >= RAIL_STALL);
        // SAFETY: the caller vouches for the memory.
        let mut has_moved = unsafe { self.joiner.take_aside(goal) };
        let mut is_ahead = false;
        for at in 0..self.rails.len() {
            let rail = &mut self.rails[at];
            if rail.has_ended {
                continue;
            }
            // Also from a rail that is lost for sending: what it has delivered lies in its socket.
            // SAFETY: the caller vouches for the memory.
            match unsafe { self.joiner.read(&rail.stream, &mut rail.incoming, goal, sets_aside, &self.traffic) } {
                Ok(delivery) => {
                    has_moved |= delivery.has_moved;
                    is_ahead |= delivery.is_ahead;
                    rail.has_ended = delivery.has_ended;
                }
                Err(cause) if !self.can_repeat || !is_end_of_rail(&cause) => return Err(cause),
                Err(_) => rail.has_ended = true,
            }
            let rail = &self.rails[at];
            if rail.has_ended && !rail.is_lost() && rail.info().is_some_and(|info| info.is_over) {
                // What the peer sends comes over the other rails, unless this was the last one.
                let _ = self.lose(at, Loss::Failed(Cause::Closed));
            }
        }
        // SAFETY: as above.
        has_moved |= unsafe { self.joiner.take_aside(goal) };
        let is_stalled = (is_ahead || self.joiner.has_aside()) && self.joiner.complete() == before;
        self.stalled = is_stalled.then(|| self.stalled.unwrap_or_else(Instant::now));
        if !has_moved && self.joiner.complete() == before && self.rails.iter().all(|rail| rail.has_ended || rail.is_lost()) {
            return Err(if self.rails.iter().any(|rail| rail.has_ended) { Cause::Closed } else { self.cause() });
        }
        if !self.again.is_empty() {
            // What has arrived counts also if nothing can be sent any more.
            // SAFETY: no bytes are offered.
            let _ = unsafe { self.pump(&[], self.assigned) };
        }
        Ok(())
    }

    /// Looks for rails that have failed without a call, and lets the others carry what these have not
    /// delivered.
    fn keep(&mut self) {
        let now = Instant::now();
        self.look_for_first_stripes(now);
        for rail in self.rails.iter_mut().filter(|rail| !rail.is_lost()) {
            rail.refresh(now, &mut self.pool);
        }
        let have_all_begun = self.begun.is_some_and(|since| now - since >= RAIL_SILENCE);
        let infos: Vec<_> = self.rails.iter().map(|rail| rail.info().filter(|_| !rail.is_lost())).collect();
        let mut is_any_doubtful = false;
        for at in 0..self.rails.len() {
            let Some(info) = &infos[at] else { continue };
            let others = infos.iter().enumerate().filter(|(other, _)| *other != at).filter_map(|(_, info)| *info);
            // The next call fails if no rail is left.
            if info.is_over {
                let _ = self.lose(at, Loss::Failed(Cause::Closed));
            } else if is_silent(info, others) || (have_all_begun && !self.rails[at].incoming.has_begun) {
                let _ = self.lose(at, Loss::Silent);
            }
            is_any_doubtful |= is_doubtful(info);
        }
        for rail in self.rails.iter_mut().filter(|rail| is_any_doubtful && !rail.is_lost() && rail.is_idle()) {
            // An empty stripe: the peer's system answers it.
            rail.give(Stripe::new(self.assigned, self.assigned, Vec::new()));
        }
        // SAFETY: no bytes are offered.
        let _ = unsafe { self.pump(&[], self.assigned) };
        if self.rails.iter().all(Rail::is_idle) {
            self.pool = Vec::new();
        }
        self.report(now);
    }

    /// Tells the user of all rails, the last of which was lost. A peer that leaves closes them.
    fn report_all(&mut self) {
        let peer = self.peer;
        if self.last_loss() == Some(&Loss::Failed(Cause::Closed)) {
            return;
        }
        for rail in self.rails.iter_mut().filter(|rail| !rail.is_reported) {
            let Some(loss) = &rail.loss else { continue };
            rail.is_reported = true;
            self.traffic.lost_rail();
            let (route, why) = (rail.route(), loss.to_string());
            crate::log::warn!(peer, route, why, "a rail to a rank failed, and no other rail is left");
        }
    }

    /// Tells the user of rails that were lost, and takes back those that answer again.
    fn report(&mut self, now: Instant) {
        let peer = self.peer;
        // A peer that leaves closes all of them.
        if self.rails.iter().all(|rail| rail.is_lost() || rail.has_ended) {
            return;
        }
        for rail in self.rails.iter_mut() {
            let Some(loss) = &rail.loss else { continue };
            if !rail.is_reported && now - rail.lost_at >= RAIL_REPORT {
                rail.is_reported = true;
                self.traffic.lost_rail();
                let (route, why) = (rail.route(), loss.to_string());
                crate::log::warn!(peer, route, why, "a rail to a rank failed; its link goes on over the other rails");
            }
            if rail.answers_again() {
                crate::log::info!(peer, route = rail.route(), "a rail to a rank works again");
                rail.loss = None;
            }
        }
    }

    /// Drops what the link has received: the system resets a connection that is closed with bytes that
    /// no call has read, and throws away what it has not delivered. If an end lost a rail, these may be
    /// bytes that the peer sent twice, and this waits until the peer's system has what the link has
    /// taken.
    fn leave(&mut self) {
        let began = Instant::now();
        self.rails.iter_mut().for_each(Rail::drain);
        let is_unanswered = self.rails.iter().any(Rail::is_unanswered) && !self.rails.iter().all(Rail::is_unanswered);
        let is_whole = !self.was_damaged && !self.joiner.has_repeated && !is_unanswered;
        if is_whole || self.assigned != self.taken {
            return;
        }
        loop {
            // SAFETY: no bytes are offered.
            if unsafe { self.pump(&[], self.assigned) }.is_err() {
                return;
            }
            let live = || self.rails.iter().filter(|rail| !rail.is_lost());
            let has_left = self.again.is_empty() && live().all(Rail::has_delivered);
            // What a connection holds arrives after it was closed.
            let is_handed_over = self.again.is_empty() && live().all(Rail::has_room);
            let is_gone = live().all(Rail::is_unanswered);
            if has_left || began.elapsed() >= if is_handed_over || is_gone { RAIL_LEAVING } else { RAIL_HANDING_OVER } {
                break;
            }
            // There is no time to be sure that a rail is silent.
            if began.elapsed() >= RAIL_LEAVING / 2 && !is_gone {
                for at in 0..self.rails.len() {
                    if self.rails[at].is_unanswered() {
                        let _ = self.lose(at, Loss::Silent);
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(1));
            self.rails.iter_mut().for_each(Rail::drain);
        }
        self.rails.iter().filter(|rail| !rail.is_lost()).for_each(Rail::end);
    }
}

/// Returns whether an error says that one connection is over, and nothing about this process or the
/// stream.
fn is_end_of_rail(cause: &Cause) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    match cause {
        Cause::Closed => true,
        Cause::Broken(kind) => {
            matches!(kind, ConnectionAborted | ConnectionRefused | HostUnreachable | NetworkDown | NetworkUnreachable | TimedOut)
        }
        _ => false,
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Loss::Failed(cause) => write!(f, "{cause}"),
            Loss::Silent => f.write_str("the peer's system answers on other rails, and not on this one"),
        }
    }
}

impl Link for RailLink {
    unsafe fn send(&mut self, parts: &[RawSlice]) -> Result<usize, Cause> {
        let mut rails = self.rails.lock();
        let offered = rails.taken + parts.iter().map(|part| part.len as u64).sum::<u64>();
        // SAFETY: the caller vouches for the parts.
        unsafe { rails.pump(parts, offered)? };
        let taken = rails.passed_on().clamp(rails.taken, offered);
        let count = (taken - rails.taken) as usize;
        rails.taken = taken;
        rails.traffic.sent(count);
        Ok(count)
    }

    fn has_begun(&self) -> bool {
        let rails = self.rails.lock();
        rails.assigned > rails.taken
    }

    fn peek(&mut self, want: usize) -> Result<RawSlice, Cause> {
        let mut rails = self.rails.lock();
        if let Some(goal) = rails.joiner.goal_to_show(want) {
            // SAFETY: the memory is the link's own.
            unsafe { rails.collect(goal)? };
            rails.joiner.show(goal);
        }
        // The keeper leaves the joiner and its buffer alone.
        Ok(rails.joiner.arrived.front(want))
    }

    fn consume(&mut self, count: usize) {
        self.rails.lock().joiner.arrived.consume(count);
    }

    unsafe fn receive(&mut self, into: RawSliceMut) -> Result<usize, Cause> {
        let mut rails = self.rails.lock();
        let buffered = rails.joiner.arrived.take(into);
        if buffered > 0 {
            return Ok(buffered);
        }
        match rails.joiner.goal_in_memory(into) {
            Some(goal) => {
                // SAFETY: the caller vouches for the memory.
                unsafe { rails.collect(goal)? };
                Ok(rails.joiner.bypass(goal))
            }
            None => {
                drop(rails);
                self.peek(into.len)?;
                Ok(self.rails.lock().joiner.arrived.take(into))
            }
        }
    }

    fn traffic(&self) -> Option<(&'static str, Arc<Traffic>)> {
        Some(("tcp", self.rails.lock().traffic.clone()))
    }

    fn left(&self) -> Option<Duration> {
        let rails = self.rails.lock();
        let until_set_aside = rails.stalled.and_then(|since| RAIL_STALL.checked_sub(since.elapsed()));
        let until_look = rails.is_far_ahead.then_some(RAIL_LOOK);
        // The keeper sends again without an event.
        let until_keeper = (rails.was_damaged && rails.assigned > rails.taken).then_some(RAIL_ROUND);
        [until_set_aside, until_look, until_keeper].into_iter().flatten().min()
    }

    fn is_intact(&self) -> bool {
        self.rails.lock().is_intact()
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let mut rails = self.rails.lock();
        let both = Interest::READABLE | Interest::WRITABLE;
        rails.rails.iter_mut().try_for_each(|rail| registry.register(&mut rail.stream, token, both))
    }
}

impl Drop for RailLink {
    fn drop(&mut self) {
        // The connections are the parent's, and the lock may be held for ever.
        if self.forks != sys::forks() {
            return;
        }
        let Some(mut rails) = self.rails.try_lock_for(RAIL_LEAVING) else { return };
        if rails.is_intact() {
            rails.leave();
        }
        rails.traffic.close();
    }
}

/// The links that the keeper looks after. Taken only between forks, so that a child finds it open.
static KEPT: Mutex<Kept> = Mutex::new(Kept { links: Vec::new(), forks: 0, is_running: false });

struct Kept {
    links: Vec<Weak<Mutex<Rails>>>,
    /// How often the process that uses these links had been forked.
    forks: u32,
    /// Whether the keeper's thread runs.
    is_running: bool,
}

impl Kept {
    /// Adds a link. A forked child has the links of its parent, which it must not touch, and no thread.
    fn add(&mut self, link: Weak<Mutex<Rails>>, forks: u32) {
        if self.forks != forks {
            *self = Kept { links: Vec::new(), forks, is_running: false };
        }
        self.links.push(link);
    }
}

/// Has the keeper look after a link.
fn keep(link: Weak<Mutex<Rails>>) {
    sys::between_forks(|| {
        let mut kept = KEPT.lock();
        kept.add(link, sys::forks());
        if kept.is_running {
            return;
        }
        match std::thread::Builder::new().name("kolo-rails".to_owned()).spawn(look_after_links) {
            Ok(_) => kept.is_running = true,
            Err(error) => crate::log::warn!(%error, "cannot start a thread for rails; one that fails silently is not noticed"),
        }
    });
}

fn look_after_links() {
    let panicking = Panicking;
    loop {
        std::thread::sleep(RAIL_ROUND);
        let links = sys::between_forks(|| {
            let mut kept = KEPT.lock();
            kept.links.retain(|link| link.strong_count() > 0);
            kept.is_running = !kept.links.is_empty();
            kept.links.clone()
        });
        if links.is_empty() {
            // The next link may have started another thread already.
            std::mem::forget(panicking);
            return;
        }
        for link in links.iter().filter_map(Weak::upgrade) {
            // One that a call looks after, or that is dropped, does not hold up the others.
            if let Some(mut rails) = link.try_lock_for(RAIL_ROUND / 10) {
                rails.keep();
            }
        }
    }
}

/// Has the next link start another thread if the keeper's panics.
struct Panicking;

impl Drop for Panicking {
    fn drop(&mut self) {
        sys::between_forks(|| KEPT.lock().is_running = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_leaves_the_links_of_its_parent_alone() {
        let mut kept = Kept { links: Vec::new(), forks: 0, is_running: false };
        kept.add(Weak::new(), 0);
        kept.is_running = true;
        kept.add(Weak::new(), 0);
        assert_eq!((kept.links.len(), kept.is_running), (2, true));
        kept.add(Weak::new(), 1);
        assert_eq!((kept.links.len(), kept.is_running), (1, false));
    }
}

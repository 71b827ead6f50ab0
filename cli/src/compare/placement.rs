//! How far apart the processors of a machine with two are while it is compared.
//!
//! The two processors of a virtual machine share a last-level cache or do not, and that changes within
//! seconds. Every library is slower where they do not, and not by the same factor. With more processors, it
//! is not known on which the ranks run.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use kolo::settings::{Domain, domains};
use serde::Serialize;

use super::system::bind_thread;
use crate::table::remark;

/// Cores that share a last-level cache need about 0.1 us for a round trip, and others 0.3 us or more.
const FAR: Duration = Duration::from_nanos(200);

/// Where the processors were during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Near,
    Far,
}

/// The round trips of a cache line between two processors, one before each measurement and one after it.
#[derive(Debug, Default)]
pub(super) struct Placement {
    trips: Vec<Duration>,
    /// By the latest round trip. `None` where no round trip is measured.
    current: Option<State>,
}

/// What the report has of one state.
#[derive(Debug, Serialize)]
pub(super) struct Met {
    /// The median round trip.
    round_trip_us: f64,
    measurements: usize,
}

impl Placement {
    /// Measures after what was measured, and before what comes. Returns the state between this call and
    /// the last one, if it was the same at both.
    pub(super) fn probe(&mut self) -> Option<State> {
        self.note(round_trip())
    }

    /// As [`Placement::probe`], with what was measured.
    fn note(&mut self, trip: Option<Duration>) -> Option<State> {
        self.trips.extend(trip);
        let next = trip.map(state);
        let before = std::mem::replace(&mut self.current, next);
        before.filter(|before| Some(*before) == next)
    }

    /// Returns what was met of a state, if it was.
    pub(super) fn met(&self, of: State) -> Option<Met> {
        let mut trips: Vec<Duration> = self.trips.iter().copied().filter(|trip| state(*trip) == of).collect();
        trips.sort();
        let median = trips.get(trips.len() / 2)?;
        Some(Met { round_trip_us: median.as_secs_f64() * 1e6, measurements: trips.len() })
    }
}

/// Says which states were met.
pub(super) fn say([near, far]: [&Option<Met>; 2]) {
    let of = |met: &Met| format!("{:.2} us", met.round_trip_us);
    let said = match (near, far) {
        (None, None) => return,
        (Some(near), None) => format!("{}: near throughout", of(near)),
        (None, Some(far)) => format!("{}: far throughout", of(far)),
        (Some(near), Some(far)) => {
            let all = near.measurements + far.measurements;
            format!("near {}, far {} in {} of {all} measurements; near, far: the ratio then", of(near), of(far), far.measurements)
        }
    };
    remark(&format!("round trip of a cache line between two processors: {said}"));
}

fn state(trip: Duration) -> State {
    if trip < FAR { State::Near } else { State::Far }
}

/// Measures the round trip of a cache line between the two cores of a machine. `None` where there are more
/// or fewer, or the system does not say which there are.
fn round_trip() -> Option<Duration> {
    const BATCHES: usize = 8;
    const TRIPS: u32 = 100;
    let cores = domains(Domain::Core);
    let [here, there] = cores.as_slice() else { return None };
    let (here, there) = (*here.first()?, *there.first()?);
    // Whose turn it is. Alone in its cache line, with what processors fetch beside it.
    #[repr(align(128))]
    struct Line(AtomicU32);
    let line = Line(AtomicU32::new(0));
    let pass = |mine: u32| {
        while line.0.load(Ordering::Acquire) != mine {
            std::hint::spin_loop();
        }
        line.0.store(1 - mine, Ordering::Release);
    };
    thread::scope(|scope| {
        let answer = move || {
            let is_bound = bind_thread(there).is_ok();
            (0..BATCHES as u32 * TRIPS).for_each(|_| pass(1));
            is_bound
        };
        // One thread starts the other: without it, none waits for an answer.
        let ask = move || {
            let answering = Builder::new().spawn_scoped(scope, answer).ok()?;
            let is_bound = bind_thread(here).is_ok();
            let batch = || {
                let began = Instant::now();
                (0..TRIPS).for_each(|_| pass(0));
                began.elapsed() / TRIPS
            };
            // The least, as another program may interrupt a batch.
            let least = (0..BATCHES).map(|_| batch()).min()?;
            (answering.join().ok()? && is_bound).then_some(least)
        };
        Builder::new().spawn_scoped(scope, ask).ok()?.join().ok()?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_one_that_was_there_before_and_after() {
        let of = |trips: &[u64]| Placement { trips: trips.iter().copied().map(Duration::from_nanos).collect(), current: None };
        let placement = of(&[100, 400, 110, 120]);
        let met = |state| placement.met(state).map(|met| ((met.round_trip_us * 1e3).round(), met.measurements));
        assert_eq!([State::Near, State::Far].map(met), [Some((110.0, 3)), Some((400.0, 1))]);
        assert_eq!(of(&[100]).met(State::Far).map(|met| met.measurements), None);
        let mut placement = Placement::default();
        let trips = [Some(100), Some(110), Some(400), Some(410), None, Some(120), Some(130)];
        let states = trips.map(|trip| placement.note(trip.map(Duration::from_nanos)));
        assert_eq!(states, [None, Some(State::Near), None, Some(State::Far), None, None, Some(State::Near)]);
    }
}

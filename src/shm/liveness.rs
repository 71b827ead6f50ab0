//! Which peers in a window have failed, left or died.

use std::time::{Duration, Instant};

use super::flag_area::{ABSENT, REVOKED};
use super::window::Window;
use crate::error::{Cause, Result};
use crate::failure::{OpContext, Written};
use crate::sync::Ordering;
use crate::sys::Process;

/// How long a rank that waits does not ask for the processes of ranks that it does not wait for
/// itself: at least this long, and this long for each of them. So 256 ranks on two processors spend
/// their time on the operation.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
const PAUSE_FOR_EACH: Duration = Duration::from_millis(1);

impl Window {
    /// Returns an error if a rank of this host has failed.
    #[inline]
    pub(super) fn check_no_peer_failed(&self, context: &OpContext<'_>) -> Result<()> {
        for peer in self.peers() {
            if self.phases.lines.rank_state(peer).state.load(Ordering::SeqCst) == REVOKED {
                return Err(context.failed(self.members[peer], Cause::Revoked));
            }
        }
        Ok(())
    }

    /// Returns an error if a rank can no longer publish `phase`: then the operation, in which all
    /// ranks take part, cannot end.
    ///
    /// Among several such ranks, the error names one that died before one that left, one that left
    /// before one that failed, and `peer` before another.
    ///
    /// To ask for a process is a system call, and every rank of a host waits for every other one. So
    /// each call asks for that of `peer`, and calls ask for those of the others after a pause.
    #[cold]
    pub(super) fn check_peers_can_reach(&mut self, context: &OpContext<'_>, peer: usize, phase: u32) -> Result<()> {
        let now = Instant::now();
        let pause = LEAST_PAUSE.max(PAUSE_FOR_EACH * self.members.len() as u32);
        let asks = self.asked.is_none_or(|asked| now - asked >= pause);
        let mut gone = self.first_gone(peer, phase, asks);
        if asks || gone.is_some() {
            self.asked = Some(now);
        }
        if gone.is_some() && !asks {
            gone = self.first_gone(peer, phase, true);
        }
        gone.map_or(Ok(()), |(other, cause)| Err(context.failed(self.members[other], cause)))
    }

    /// Returns the rank to name of those that can no longer publish `phase`. `asks` for the processes
    /// of all ranks, not only of `peer`.
    fn first_gone(&mut self, peer: usize, phase: u32, asks: bool) -> Option<(usize, Cause)> {
        let peer_first = std::iter::once(peer).chain(self.peers().filter(|&other| other != peer));
        // What a rank published before it ended still counts.
        let gone = peer_first.filter_map(|other| {
            let cause = if asks || other == peer { self.why_gone(other) } else { self.has_told(other) }?;
            (!self.phases.has_reached(other, phase)).then_some((other, cause))
        });
        // A rank that has failed did so because of another one.
        gone.min_by_key(|(_, cause)| match cause {
            Cause::Died => 0,
            Cause::Left { .. } => 1,
            _ => 2,
        })
    }

    /// Returns why a rank publishes no more phases; `None` if it still may.
    pub(super) fn why_gone(&self, peer: usize) -> Option<Cause> {
        // Looked up before the state: a rank that left and whose process then ended has left, not
        // died.
        let has_ended = self.has_ended(peer);
        self.has_told(peer).or(has_ended.then_some(Cause::Died))
    }

    /// As [`Window::why_gone`], by what the rank itself has written.
    fn has_told(&self, peer: usize) -> Option<Cause> {
        match self.phases.lines.rank_state(peer).written()? {
            Written::Left { last_seq } => Some(Cause::Left { last_seq }),
            Written::Revoked => Some(Cause::Revoked),
            Written::TakesPart => None,
        }
    }

    /// Returns the process of a rank that has written its state, if its id means something in this
    /// process's namespace.
    pub(super) fn process(&self, peer: usize) -> Option<Process> {
        let rank_state = self.phases.lines.rank_state(peer);
        let namespace = rank_state.namespace.load(Ordering::Relaxed);
        let process =
            || Process { id: rank_state.pid.load(Ordering::Relaxed), created: rank_state.created.load(Ordering::Relaxed) };
        (namespace != 0 && namespace == self.namespace).then(process)
    }

    /// Whether the process of a rank is known to have ended.
    pub(super) fn has_ended(&self, peer: usize) -> bool {
        let is_there = self.phases.lines.rank_state(peer).state.load(Ordering::Acquire) != ABSENT;
        is_there && self.process(peer).is_some_and(|process| self.host.process_has_ended(process))
    }
}

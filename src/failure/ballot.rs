//! What a rank has promised and accepted while the survivors of a failure agree on the ranks that
//! continue. See [`super::shrink`].

use parking_lot::Condvar;

use super::message::{Decision, Reply};
use crate::types::Rank;

/// What a rank knows of the agreement in progress.
#[derive(Default)]
pub(super) struct Ballots {
    /// Whether this rank is in [`super::shrink::agree`].
    pub(super) shrinks: bool,
    /// The ranks that are known to be there, too.
    pub(super) joined: Vec<Rank>,
    pub(super) decision: Option<Decision>,
    /// The highest ballot with which a rank has asked before deciding.
    pub(super) promised: u64,
}

impl Ballots {
    pub(super) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    pub(super) fn join(&mut self, from: Rank, changed: &Condvar) -> Reply {
        if !self.joined.contains(&from) {
            self.joined.push(from);
            changed.notify_all();
        }
        self.answer()
    }

    /// Promises a rank that is about to decide to accept no lower ballot.
    pub(super) fn prepare(&mut self, from: Rank, ballot: u64, changed: &Condvar) -> Reply {
        self.promised = self.promised.max(ballot);
        self.join(from, changed)
    }

    /// Accepts a rank's decision, unless a higher ballot was promised. The first decision stays.
    pub(super) fn decide(&mut self, decision: Decision, ballot: u64, changed: &Condvar) -> Reply {
        if ballot >= self.promised {
            self.adopt(decision, changed);
        }
        self.answer()
    }

    /// Adopts a decision that another rank has accepted.
    pub(super) fn adopt(&mut self, decision: Decision, changed: &Condvar) {
        self.decision.get_or_insert(decision);
        changed.notify_all();
    }

    fn answer(&self) -> Reply {
        Reply::Joins { shrinks: self.shrinks, promised: self.promised, decision: self.decision.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_rules_out_lower_ballots() {
        let (mut state, changed) = (Ballots::default(), Condvar::new());
        let decision = |nonce| Decision { nonce, members: vec![0, 1] };
        let accepted = |answer| matches!(answer, Reply::Joins { decision: Some(_), .. });
        state.prepare(1, 7, &changed);
        assert!(!accepted(state.decide(decision(1), 6, &changed)));
        assert!(accepted(state.decide(decision(2), 7, &changed)));
        // The first stays.
        state.decide(decision(3), 9, &changed);
        assert_eq!(state.decision(), Some(&decision(2)));
    }

    #[test]
    fn decisions_with_unknown_ranks_are_refused() {
        assert!(Decision { nonce: 0, members: vec![0, 2] }.is_of(3));
        assert!(!Decision { nonce: 0, members: vec![0, 3] }.is_of(3));
    }
}

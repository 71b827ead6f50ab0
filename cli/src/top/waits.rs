//! Finds which rank waits for which.
//!
//! A rank in a collective waits for the ranks that have not called it: their sequence number is
//! lower. If all have, it waits for those that do not answer, and otherwise for the peers that it
//! names itself. A rank for which others wait, and that waits for none, keeps the others waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo::observer::{Communicator, Running, Snapshot};

use super::state::State;

/// An operation that has run for less is not said to wait. Ranks are asked one after the other, so
/// all shorter waits may be over.
const LONG: Duration = Duration::from_millis(100);

/// A rank waits for another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Edge {
    pub(super) from: usize,
    pub(super) to: usize,
    /// The communicator.
    pub(super) comm: u64,
    pub(super) op: String,
    pub(super) seq: u64,
    /// For how long the operation has run.
    pub(super) age: Duration,
}

/// Returns the last answer of a rank, and when it came, if the rank still answers.
fn answering(state: &State, rank: usize) -> Option<(Instant, &Snapshot)> {
    let known = state.ranks.get(rank)?;
    let (at, snapshot) = known.last.as_ref().filter(|_| known.silence.is_none())?;
    Some((*at, snapshot))
}

/// Returns which rank waits for which, in the order of the ranks.
pub(super) fn edges(state: &State) -> Vec<Edge> {
    let mut edges = Vec::new();
    for from in 0..state.ranks.len() {
        let Some((at, snapshot)) = answering(state, from) else { continue };
        for comm in &snapshot.communicators {
            for running in comm.running.iter().filter(|running| running.age >= LONG) {
                for to in awaited(state, from, at, comm, running) {
                    let (op, seq, age) = (running.op.to_string(), running.seq, running.age);
                    edges.push(Edge { from, to, comm: comm.id, op, seq, age });
                }
            }
        }
    }
    edges
}

/// Returns the ranks of the job for which a rank waits in an operation.
fn awaited(state: &State, from: usize, at: Instant, comm: &Communicator, running: &Running) -> BTreeSet<usize> {
    let job_rank = |rank: usize| comm.members.get(rank).copied();
    let named = || comm.waits.iter().filter(|wait| wait.op.is_none_or(|op| op == running.op) && wait.seq == running.seq);
    if running.op.is_point_to_point() {
        let peer = running.root.and_then(|root| job_rank(root as usize));
        return peer.map_or_else(|| named().filter_map(|wait| job_rank(wait.peer)).collect(), |peer| BTreeSet::from([peer]));
    }
    let others = || comm.members.iter().copied().filter(|member| *member != from);
    let late = |member: &usize| {
        let Some((heard, theirs)) = state.ranks.get(*member).and_then(|known| known.last.as_ref()) else { return false };
        let theirs = theirs.communicators.iter().find(|other| other.id == comm.id);
        // The other rank may have called it after it was asked.
        let slack = if answering(state, *member).is_some() { at.saturating_duration_since(*heard) } else { Duration::ZERO };
        theirs.is_none_or(|theirs| theirs.begun < running.seq) && running.age >= LONG + slack
    };
    let missing: BTreeSet<usize> = others().filter(late).collect();
    if !missing.is_empty() {
        return missing;
    }
    let silent: BTreeSet<usize> = others().filter(|member| answering(state, *member).is_none()).collect();
    if !silent.is_empty() {
        return silent;
    }
    named().filter_map(|wait| job_rank(wait.peer)).filter(|peer| *peer != from).collect()
}

/// A rank that keeps others waiting.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Culprit {
    pub(super) rank: usize,
    /// The ranks that wait for it, some of them perhaps for a rank that waits for it.
    pub(super) by: Vec<usize>,
    /// The longest wait.
    pub(super) longest: Edge,
}

/// Returns the ranks that keep others waiting: others wait for them, and they for none.
pub(super) fn culprits(edges: &[Edge]) -> Vec<Culprit> {
    let mut to: BTreeMap<usize, Vec<&Edge>> = BTreeMap::new();
    edges.iter().for_each(|edge| to.entry(edge.to).or_default().push(edge));
    let waits: BTreeSet<usize> = edges.iter().map(|edge| edge.from).collect();
    let mut found = Vec::new();
    for (&rank, direct) in to.iter().filter(|(rank, _)| !waits.contains(rank)) {
        let (mut by, mut open) = (BTreeSet::new(), vec![rank]);
        while let Some(next) = open.pop() {
            for edge in to.get(&next).into_iter().flatten() {
                if by.insert(edge.from) {
                    open.push(edge.from);
                }
            }
        }
        let longest = direct.iter().max_by_key(|edge| edge.age).map(|edge| (*edge).clone());
        found.extend(longest.map(|longest| Culprit { rank, by: by.into_iter().collect(), longest }));
    }
    found
}

#[cfg(test)]
mod tests {
    use kolo::observer::{Silence, Wait};
    use kolo::{DType, Op};

    use super::super::sample::{self, all_reduce, comm, snapshot};
    use super::*;

    const NOW: Duration = Duration::from_secs(3);

    fn state(begun: &[u64], in_seq: &[Option<u64>]) -> State {
        let mut state = sample::state(begun.len());
        for (rank, (&begun, seq)) in begun.iter().zip(in_seq).enumerate() {
            let running = seq.map(|seq| all_reduce(seq, NOW)).into_iter().collect();
            let answer = snapshot(rank, vec![comm(rank, state.ranks.len(), begun, running)]);
            state.hear(rank, Instant::now(), Ok(answer));
        }
        state
    }

    fn pairs(state: &State) -> Vec<(usize, usize)> {
        edges(state).iter().map(|edge| (edge.from, edge.to)).collect()
    }

    #[test]
    fn ranks_wait_for_those_that_have_not_called() {
        let state = state(&[5, 4, 5, 4], &[Some(5), None, Some(5), None]);
        assert_eq!(pairs(&state), [(0, 1), (0, 3), (2, 1), (2, 3)]);
        let found = culprits(&edges(&state));
        assert_eq!(found.iter().map(|culprit| culprit.rank).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((&*found[0].by, found[0].longest.seq, found[0].longest.age), (&[0, 2][..], 5, NOW));
    }

    #[test]
    fn a_rank_that_stopped_in_the_operation_is_awaited() {
        let mut state = state(&[5, 5, 5], &[Some(5), Some(5), Some(5)]);
        assert_eq!(pairs(&state), []);
        state.hear(2, Instant::now(), Err(Silence::Stopped));
        assert_eq!(pairs(&state), [(0, 2), (1, 2)]);
        assert_eq!(culprits(&edges(&state))[0].rank, 2);
    }

    #[test]
    fn a_rank_that_never_answered_is_awaited_if_no_other_is() {
        let mut silent = sample::state(2);
        silent.hear(0, Instant::now(), Ok(snapshot(0, vec![comm(0, 2, 5, vec![all_reduce(5, NOW)])])));
        silent.hear(1, Instant::now(), Err(Silence::Mute));
        assert_eq!(pairs(&silent), [(0, 1)]);
    }

    #[test]
    fn a_short_operation_waits_for_none() {
        let mut state = state(&[5, 4], &[Some(5), None]);
        let answer = snapshot(0, vec![comm(0, 2, 5, vec![all_reduce(5, LONG / 2)])]);
        state.hear(0, Instant::now(), Ok(answer));
        assert_eq!(pairs(&state), []);
    }

    /// Rank 1 was asked 2 s before rank 0, whose operation began only 1 s ago.
    #[test]
    fn an_old_answer_proves_nothing() {
        let mut state = sample::state(2);
        let now = Instant::now() + Duration::from_secs(10);
        state.hear(1, now - Duration::from_secs(2), Ok(snapshot(1, vec![comm(1, 2, 4, vec![])])));
        state.hear(0, now, Ok(snapshot(0, vec![comm(0, 2, 5, vec![all_reduce(5, Duration::from_secs(1))])])));
        assert_eq!(pairs(&state), []);
        state.hear(1, now, Ok(snapshot(1, vec![comm(1, 2, 4, vec![])])));
        assert_eq!(pairs(&state), [(0, 1)]);
    }

    /// Rank 0 waits for a message of rank 1, which waits for rank 2 in a barrier.
    #[test]
    fn the_end_of_a_chain_keeps_all_waiting() {
        let mut state = sample::state(3);
        let receive = Running { op: Op::Recv, dtype: DType::U8, root: Some(1), ..all_reduce(1, NOW) };
        state.hear(0, Instant::now(), Ok(snapshot(0, vec![comm(0, 3, 0, vec![receive])])));
        let pair = |rank, begun, running| Communicator { id: 9, rank, members: vec![1, 2], ..comm(0, 2, begun, running) };
        let busy = vec![comm(1, 3, 0, vec![]), pair(0, 7, vec![all_reduce(7, NOW)])];
        state.hear(1, Instant::now(), Ok(snapshot(1, busy)));
        state.hear(2, Instant::now(), Ok(snapshot(2, vec![comm(2, 3, 0, vec![]), pair(1, 6, vec![])])));
        assert_eq!(pairs(&state), [(0, 1), (1, 2)]);
        let found = culprits(&edges(&state));
        assert_eq!((found.len(), found[0].rank, &*found[0].by), (1, 2, &[0, 1][..]));
    }

    #[test]
    fn peers_that_a_rank_names_count_if_all_have_called() {
        let mut state = state(&[5, 5, 5], &[Some(5), None, None]);
        let waits = vec![Wait { peer: 2, age: NOW, op: Some(Op::AllReduce), seq: 5 }];
        let answer = snapshot(0, vec![Communicator { waits, ..comm(0, 3, 5, vec![all_reduce(5, NOW)]) }]);
        state.hear(0, Instant::now(), Ok(answer));
        assert_eq!(pairs(&state), [(0, 2)]);
    }
}

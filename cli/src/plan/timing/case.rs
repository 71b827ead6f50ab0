//! How much of a world has to be simulated.

use kolo::plan::chunk;
use kolo::{Algorithm, Op};

use super::placement::Placement;
use super::programme::Programme;
use super::scenario::{ELEMENT, Method, Scenario, Simulated};
use super::world::World;

/// The most messages that one simulation sends, and the most that it sends if two smaller sizes say as
/// much.
const MOST_MESSAGES: u64 = 4 << 20;
const MANY_MESSAGES: u64 = 1 << 20;

/// The most pieces into which a simulation cuts what it sends, and the smallest piece.
const MOST_PIECES: u64 = 2 << 20;
const LEAST_PIECE: u64 = 16 << 10;

/// Simulates the time of `op` with `bytes` (of the buffer, or of all blocks together) by an
/// algorithm (for a hierarchical one, `between` hosts). Returns `None` for shared memory
/// alone, for hierarchical forms that have no price, and if the world is too large to be simulated.
pub(in crate::plan) fn simulate(
    op: Op,
    bytes: u64,
    (algorithm, between): (Algorithm, Option<Algorithm>),
    scenario: &Scenario,
) -> Option<Simulated> {
    let layout = scenario.layout;
    let programme = Programme::new(op, bytes.div_ceil(ELEMENT), (algorithm, between), layout, &scenario.model)?;
    let case = Case { programme, scenario, placement: Placement::new(layout, scenario.racks) };
    case.by_best_method()
}

/// One collective in one scenario.
pub(super) struct Case<'a> {
    pub(super) programme: Programme,
    pub(super) scenario: &'a Scenario,
    pub(super) placement: Placement,
}

impl Case<'_> {
    pub(super) fn by_best_method(&self) -> Option<Simulated> {
        if let Some(period) = self.period().filter(|_| !self.scenario.has_stragglers()) {
            let padded = self.programme.clone().padded();
            if self.messages(&padded, period) <= MOST_MESSAGES {
                return Some(self.run(&padded, period, Method::Symmetry));
            }
        }
        let ranks = self.scenario.layout.ranks;
        let messages = self.messages(&self.programme, ranks);
        let line = if messages > MANY_MESSAGES { self.extrapolated(MOST_MESSAGES) } else { None };
        let all = || (messages <= MOST_MESSAGES).then(|| self.run(&self.programme, ranks, Method::Full));
        line.or_else(all).or_else(|| self.bound())
    }

    /// Returns after how many ranks the schedules repeat, rotated; `None` if they do not.
    fn period(&self) -> Option<usize> {
        let Scenario { layout, processors, links, .. } = self.scenario;
        let is_rotated = match self.programme.moves.algorithm {
            Algorithm::Ring => matches!(self.programme.moves.op, Op::AllReduce | Op::AllGather | Op::ReduceScatter),
            Algorithm::Direct => matches!(self.programme.moves.op, Op::AllReduce | Op::AllGather | Op::ReduceScatter),
            Algorithm::Dissemination => true,
            _ => false,
        };
        // With fewer elements than chunks, some ranks send nothing.
        let has_elements = self.programme.moves.op == Op::Barrier || self.programme.has_elements_for_all();
        let period = self.placement.period()?;
        (is_rotated && has_elements && processors.is_none() && links.is_none() && period < layout.ranks).then_some(period)
    }

    /// Returns about how many messages the first `ranks` ranks send in all calls.
    fn messages(&self, programme: &Programme, ranks: usize) -> u64 {
        const SAMPLES: usize = 16;
        let senders = programme.moves.world * programme.columns * ranks / self.scenario.layout.ranks;
        let step = programme.moves.world.div_ceil(SAMPLES);
        let samples = (0..programme.moves.world).step_by(step);
        let count = samples.len() as u64;
        let sent: u64 = samples.map(|member| self.sent(programme, member).1).sum();
        (sent * senders as u64 / count.max(1)).saturating_mul(self.scenario.calls as u64)
    }

    /// Returns the elements and messages that a member of the first column sends.
    fn sent(&self, programme: &Programme, member: usize) -> (u64, u64) {
        let count = chunk(programme.count as usize, programme.columns, 0).len() as u64;
        programme.moves.sent(member, count)
    }

    fn run(&self, programme: &Programme, period: usize, method: Method) -> Simulated {
        let ranks = self.scenario.layout.ranks;
        // Elements that the simulated ranks send, about: twice the buffer each, or all of it in each
        // round.
        let rounds = if programme.moves.algorithm == Algorithm::RecursiveDoubling { ranks.ilog2().max(2).into() } else { 2 };
        let total = programme.count.saturating_mul(rounds).saturating_mul((period * self.scenario.calls) as u64);
        let piece = (total.saturating_mul(ELEMENT) / MOST_PIECES).next_power_of_two().max(LEAST_PIECE);
        let late = if method == Method::Full { self.scenario.lateness() } else { vec![0.0; period] };
        World::new(programme, self.scenario, &self.placement, period, piece, late).run(method)
    }

    /// Continues the line through the times of two sizes that are small enough.
    pub(super) fn extrapolated(&self, most_messages: u64) -> Option<Simulated> {
        let Programme { moves, count, columns, .. } = self.programme;
        let ranks = self.scenario.layout.ranks;
        let round = moves.round()? * columns as u64;
        let with = |rounds: u64| Programme { count: rounds * round, ..self.programme.clone() };
        let each = self.messages(&with(1), ranks).max(1);
        // Both sizes have to fill the pipeline, up and down.
        let depth = 2 * u64::from(moves.world.ilog2() + 1);
        let rounds = (12 * depth).min(most_messages / each);
        if rounds / 2 < depth || rounds * round >= count {
            return None;
        }
        let [short, long] = [rounds / 2, rounds].map(|rounds| self.run(&with(rounds), ranks, Method::Full));
        let ratio = (count - rounds * round) as f64 / ((rounds - rounds / 2) * round) as f64;
        let on = |short: f64, long: f64| long + (long - short) * ratio;
        Some(Simulated {
            seconds: on(short.seconds, long.seconds),
            busiest_bytes: on(short.busiest_bytes, long.busiest_bytes),
            method: Method::Extrapolated,
            messages: short.messages + long.messages,
            ..long
        })
    }

    /// Adds the longest delay to the time without delays. Where a rank sends to one peer, no step can end
    /// later than if all ranks had begun then.
    fn bound(&self) -> Option<Simulated> {
        if !self.scenario.has_stragglers() {
            return None;
        }
        let late = self.scenario.lateness();
        let (critical, latest) = late.into_iter().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let punctual = Scenario { late: Vec::new(), jitter: 0.0, ..self.scenario.clone() };
        let case = Case {
            programme: self.programme.clone(),
            scenario: &punctual,
            placement: Placement::new(punctual.layout, punctual.racks),
        };
        let found = case.by_best_method()?;
        Some(Simulated { seconds: found.seconds + latest, critical, method: Method::Bound, ..found })
    }
}

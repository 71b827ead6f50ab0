//! How ranks that form groups learn that all have published a phase, without reading the flag line
//! of each.
//!
//! Every rank publishes its flag line as in [`super::flags`]. Then:
//!
//! 1. the leader of a group waits for the lines of its members, compares their calls with its own,
//!    and publishes a *group line*, with words of its members side by side;
//! 2. the leaders wait for the group lines of each other;
//! 3. each leader publishes a *release line* for its members, with the result if there is one.
//!
//! Each step is a store with release that the next one loads with acquire. So a rank that sees its
//! leader's release line also sees what every rank wrote before. Group lines and release lines are
//! used in rotation as slots are, and are retired with them.
//!
//! The flag lines decide. A rank that would have to sleep for a group line or a release
//! line waits for the flag lines of all ranks instead, as it does without groups. So no rank sleeps
//! on these lines, a leader that ends does not keep the others waiting, and every error is found
//! and named in one way. For the same reason, a rank whose leader called something else compares
//! the flag lines of all.

use super::flags::{FlagLines, Phases, WORDS, Words};
use super::groups::{self, GROUP_WORDS, Groups};
use crate::sync::{self, AtomicU64, Ordering};

/// A line that a leader writes for other ranks: the last phase in which it did, and the fingerprint
/// of the calls on all ranks that it speaks for.
#[repr(C, align(64))]
struct LeaderLine<const N: usize> {
    /// The phase, and half of the fingerprint: see [`tag`].
    tag: AtomicU64,
    fingerprint: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> LeaderLine<N> {
    #[cfg(kolo_loom)]
    fn new() -> LeaderLine<N> {
        LeaderLine { tag: AtomicU64::new(0), fingerprint: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Returns `None` if the line has not been published in this phase, and otherwise whether it
    /// belongs to the same calls.
    ///
    /// A line is not used in every phase, so phases may wrap before it is used again. Then it has
    /// another fingerprint.
    fn is_published(&self, phase: u32, fingerprint: u64) -> Option<bool> {
        // Acquire: what the leader and those that it speaks for wrote before.
        let now = self.tag.load(Ordering::Acquire);
        (now as u32 == phase).then(|| now == tag(phase, fingerprint) && self.fingerprint.load(Ordering::Relaxed) == fingerprint)
    }

    fn publish(&self, phase: u32, fingerprint: u64, words: impl Iterator<Item = u64>) {
        self.fingerprint.store(fingerprint, Ordering::Relaxed);
        self.words.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        // Release: the line, and what this rank has acquired.
        self.tag.store(tag(phase, fingerprint), Ordering::Release);
    }
}

/// Returns the word that publishes a line. It has half of the fingerprint, because a line that was
/// last used when phases had the same number, before they wrapped, has the right phase while its
/// leader writes the rest of it.
fn tag(phase: u32, fingerprint: u64) -> u64 {
    fingerprint << 32 | u64::from(phase)
}

/// The lines of a leader beside one of its slots.
#[repr(C, align(128))]
pub(crate) struct LeaderLines {
    group: LeaderLine<GROUP_WORDS>,
    release: LeaderLine<WORDS>,
}

impl LeaderLines {
    /// Publishes both lines, with the words that they have, as a leader that makes the same calls
    /// does.
    #[cfg(any(fuzzing, test))]
    pub(super) fn agree(&self, phase: u32, fingerprint: u64) {
        self.group.publish(phase, fingerprint, std::iter::empty());
        self.release.publish(phase, fingerprint, std::iter::empty());
    }

    #[cfg(kolo_loom)]
    pub(crate) fn new() -> LeaderLines {
        LeaderLines { group: LeaderLine::new(), release: LeaderLine::new() }
    }
}

const _: () = assert!(size_of::<LeaderLine<WORDS>>() == 64 && size_of::<LeaderLines>() == 256);

/// Where these lines live: shared memory, or a model of it.
pub(crate) trait GroupLines: FlagLines {
    /// The lines that a rank writes beside a slot, if it leads a group.
    fn leader_lines(&self, leader: usize, slot: usize) -> &LeaderLines;
}

/// How a rank waits.
pub(super) trait Waiter {
    type Lines: GroupLines;
    type Error;

    fn phases(&self) -> &Phases<Self::Lines>;

    /// The fingerprint of this rank's calls.
    fn fingerprint(&self) -> u64;

    /// Waits until a rank has published a phase, and compares its call with this rank's.
    fn wait_for_rank(&mut self, rank: usize, phase: u32) -> Result<(), Self::Error>;

    /// As [`Waiter::wait_for_rank`] for every peer.
    fn wait_for_each(&mut self, phase: u32) -> Result<(), Self::Error>;

    /// Waits for a line of a leader until `is_there` tells whether it belongs to the same calls,
    /// which it returns. Returns false when it is time to sleep.
    fn wait_for_leader_line(&mut self, is_there: impl Fn(&Self::Lines) -> Option<bool>) -> bool;
}

/// How a rank learnt that all have published a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It leads a group, whose members now wait for [`release`].
    Leads,
    /// From its leader.
    Released,
    /// From the flag lines of all ranks.
    Alone,
}

/// Waits until all ranks have published a phase of the same calls. All ranks do this in this phase,
/// which the caller has published. Leaders give each other the first `words` words of each rank.
pub(super) fn wait_for_all<W: Waiter>(waiter: &mut W, groups: &Groups, phase: u32, words: usize) -> Result<Arrival, W::Error> {
    let (rank, slot, fingerprint) = (waiter.phases().rank(), Phases::<W::Lines>::slot(phase), waiter.fingerprint());
    let own = groups.of_rank(rank);
    let members = groups.members(own);
    if rank != members[0] {
        let is_released =
            waiter.wait_for_leader_line(|lines| lines.leader_lines(members[0], slot).release.is_published(phase, fingerprint));
        if is_released {
            return Ok(Arrival::Released);
        }
        waiter.wait_for_each(phase)?;
        return Ok(Arrival::Alone);
    }
    members[1..].iter().try_for_each(|&member| waiter.wait_for_rank(member, phase))?;
    let phases = waiter.phases();
    let of_members = members.iter().flat_map(|&member| (0..words).map(move |at| phases.line(member, phase).word(at)));
    phases.lines.leader_lines(rank, slot).group.publish(phase, fingerprint, of_members);
    for leader in (0..groups.count()).filter(|&group| group != own).map(|group| groups.members(group)[0]) {
        if !waiter.wait_for_leader_line(|lines| lines.leader_lines(leader, slot).group.is_published(phase, fingerprint)) {
            waiter.wait_for_each(phase)?;
            break;
        }
    }
    Ok(Arrival::Leads)
}

/// Tells the members of this rank's group that all ranks have published a phase, and gives them
/// `result`. `words` is what [`wait_for_all`] got.
pub(super) fn release<L: GroupLines>(
    phases: &Phases<L>,
    groups: &Groups,
    phase: u32,
    fingerprint: u64,
    words: usize,
    result: Words,
) {
    let rank = phases.rank();
    let members = groups.members(groups.of_rank(rank)).len();
    if members > 1 {
        phases.lines.leader_lines(rank, Phases::<L>::slot(phase)).release.publish(phase, fingerprint, result.into_iter());
    }
    // The next lines, while this rank does something else: the peers' caches have them.
    let next = phases.lines.leader_lines(rank, Phases::<L>::slot(phase.wrapping_add(1)));
    for line in 0..groups::lines(members * words) {
        sync::prefetch_to_write((&raw const next.group).cast::<u8>().wrapping_add(64 * line));
    }
    sync::prefetch_to_write(&next.release);
}

/// Returns the result that a rank's leader gave in a phase: [`Arrival::Released`].
pub(super) fn result<L: GroupLines>(phases: &Phases<L>, groups: &Groups, phase: u32) -> Words {
    let leader = groups.members(groups.of_rank(phases.rank()))[0];
    let line = &phases.lines.leader_lines(leader, Phases::<L>::slot(phase)).release;
    std::array::from_fn(|at| line.words[at].load(Ordering::Relaxed))
}

/// Collects the first `words` words of each rank in a phase that all have published: from the group
/// lines, and from the flag lines of groups whose leader is late.
pub(super) fn collect<L: GroupLines>(
    phases: &Phases<L>,
    groups: &Groups,
    phase: u32,
    fingerprint: u64,
    words: usize,
    all: &mut [Words],
) {
    for group in 0..groups.count() {
        let members = groups.members(group);
        let line = &phases.lines.leader_lines(members[0], Phases::<L>::slot(phase)).group;
        if line.is_published(phase, fingerprint) != Some(true) {
            members.iter().for_each(|&member| all[member] = phases.line(member, phase).words());
            continue;
        }
        for (at, &member) in members.iter().enumerate() {
            let given = &line.words[at * words..(at + 1) * words];
            all[member].iter_mut().zip(given).for_each(|(to, word)| *to = word.load(Ordering::Relaxed));
        }
    }
}

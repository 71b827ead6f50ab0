//! On which host and in which rack each rank is.

use kolo::Rank;
use kolo::plan::{Layout, chunk, part_of};

/// On which host and in which rack each rank is. Ranks of a host, and hosts of a rack, are
/// consecutive.
pub(super) struct Placement {
    pub(super) ranks: usize,
    pub(super) hosts: usize,
    pub(super) racks: usize,
}

impl Placement {
    pub(super) fn new(layout: Layout, racks: usize) -> Placement {
        Placement { ranks: layout.ranks, hosts: layout.hosts, racks: racks.clamp(1, layout.hosts) }
    }

    /// Returns the first rank of a host.
    pub(super) fn first(&self, host: usize) -> Rank {
        chunk(self.ranks, self.hosts, host).start
    }

    /// Returns the number of ranks on a host.
    pub(super) fn on_host(&self, host: usize) -> usize {
        chunk(self.ranks, self.hosts, host).len()
    }

    pub(super) fn host_of(&self, rank: Rank) -> usize {
        part_of(self.ranks, self.hosts, rank)
    }

    pub(super) fn rack_of(&self, host: usize) -> usize {
        part_of(self.hosts, self.racks, host)
    }

    /// Returns the number of hosts in a rack.
    pub(super) fn in_rack(&self, rack: usize) -> usize {
        chunk(self.hosts, self.racks, rack).len()
    }

    /// Returns after how many ranks the placement repeats: the ranks of a host, or with several racks
    /// those of a rack. `None` if hosts or racks differ.
    pub(super) fn period(&self) -> Option<usize> {
        let is_even = self.ranks.is_multiple_of(self.hosts) && self.hosts.is_multiple_of(self.racks);
        is_even.then(|| if self.racks > 1 { self.ranks / self.racks } else { self.ranks / self.hosts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_is_on_the_host_whose_chunk_contains_it() {
        for (ranks, hosts) in [(8, 8), (8, 3), (17, 4), (5, 2), (16, 2)] {
            let placement = Placement::new(Layout::even(ranks, hosts), 2);
            for rank in 0..ranks {
                let host = placement.host_of(rank);
                assert!(chunk(ranks, hosts, host).contains(&rank), "rank {rank} of {ranks} on host {host} of {hosts}");
            }
        }
    }
}

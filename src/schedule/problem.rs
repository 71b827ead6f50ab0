//! What a generator has to solve, and how buffers are divided.

use std::ops::Range;

use crate::types::{Op, Rank};

/// The ranges of the ranks' blocks, in a buffer with one block for each rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Blocks<'a> {
    /// Every block has this many elements.
    Even(usize),
    /// Block `i` is the range from entry `i` to entry `i + 1`.
    Listed(&'a [usize]),
    /// Block `i` is range `i`. Blocks of consecutive ranks may be apart, so only schedules that move
    /// every block by itself can use them.
    Placed(&'a [Range<usize>]),
}

impl Blocks<'_> {
    pub(crate) fn range(&self, block: usize) -> Range<usize> {
        match self {
            Blocks::Even(count) => block * count..(block + 1) * count,
            Blocks::Listed(offsets) => offsets[block]..offsets[block + 1],
            Blocks::Placed(ranges) => ranges[block].clone(),
        }
    }

    pub(crate) fn longest(&self, world: usize) -> usize {
        match self {
            Blocks::Even(count) => *count,
            Blocks::Listed(_) | Blocks::Placed(_) => (0..world).map(|block| self.range(block).len()).max().unwrap_or(0),
        }
    }
}

/// How the ranks of a schedule are divided into racks. The ranks of a rack are consecutive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Racks<'a> {
    /// This many racks, whose sizes differ by at most one, as [`chunk`] divides.
    Even(usize),
    /// The first rank of each rack, and the number of ranks.
    Listed(&'a [usize]),
}

impl Racks<'_> {
    /// All ranks in one rack, or in racks that are not known.
    pub(crate) const ONE: Racks<'static> = Racks::Even(1);

    pub(super) fn count(&self) -> usize {
        match self {
            Racks::Even(racks) => *racks,
            Racks::Listed(starts) => starts.len() - 1,
        }
    }

    /// The ranks of a rack.
    pub(super) fn range(&self, world: usize, rack: usize) -> Range<Rank> {
        match self {
            Racks::Even(racks) => chunk(world, *racks, rack),
            Racks::Listed(starts) => starts[rack]..starts[rack + 1],
        }
    }

    /// The rack of a rank.
    pub(super) fn of(&self, world: usize, rank: Rank) -> usize {
        match self {
            Racks::Even(racks) => part_of(world, *racks, rank),
            Racks::Listed(starts) => starts.partition_point(|&start| start <= rank) - 1,
        }
    }
}

/// What a generator has to solve, from the view of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) op: Op,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    /// The root, or the peer of `Send` and `Recv`.
    pub(crate) root: Rank,
    /// The elements of the buffer, if it is not made of blocks.
    pub(crate) count: usize,
    /// The blocks of the input, if it has one for each rank.
    pub(crate) sends: Blocks<'a>,
    /// The blocks of the output, if it has one for each rank.
    pub(crate) recvs: Blocks<'a>,
    /// The elements of one segment, for the algorithms that overlap segments.
    pub(crate) segment: usize,
    /// The racks of the ranks, for the algorithm that has two levels.
    pub(crate) racks: Racks<'a>,
}

impl Problem<'_> {
    /// The rank after this one in the ring.
    pub(super) fn next(&self) -> Rank {
        self.ahead(1)
    }

    /// The rank before this one in the ring.
    pub(super) fn prev(&self) -> Rank {
        self.behind(1)
    }

    pub(super) fn ahead(&self, by: usize) -> Rank {
        (self.rank + by) % self.world
    }

    pub(super) fn behind(&self, by: usize) -> Rank {
        (self.rank + self.world - by) % self.world
    }

    /// This rank, counted from the root.
    pub(super) fn relative(&self) -> usize {
        (self.rank + self.world - self.root) % self.world
    }

    /// The rank that is `relative` ranks after the root.
    pub(super) fn absolute(&self, relative: usize) -> Rank {
        (self.root + relative) % self.world
    }
}

/// Returns the `part`-th of `parts` nearly equal ranges of `count` elements. If the count does not
/// divide evenly, the first ranges are longer by one.
pub fn chunk(count: usize, parts: usize, part: usize) -> Range<usize> {
    let (base, longer) = (count / parts, count % parts);
    let at = part * base + part.min(longer);
    at..at + base + usize::from(part < longer)
}

/// Returns the part of [`chunk`] that contains an element.
pub fn part_of(count: usize, parts: usize, element: usize) -> usize {
    let (base, longer) = (count / parts, count % parts);
    let in_longer = longer * (base + 1);
    if element < in_longer { element / (base + 1) } else { longer + (element - in_longer) / base }
}

/// Divides a range into segments of at most `segment` elements.
pub(crate) fn segments(range: Range<usize>, segment: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let segment = segment.max(1);
    (0..range.len().div_ceil(segment)).map(move |i| {
        let at = range.start + i * segment;
        at..range.end.min(at + segment)
    })
}

/// Returns the elements of a rank's input and output, and where each begins in the other if they are in
/// place: for tests of every kind of path.
#[cfg(any(fuzzing, test))]
pub(crate) fn elements(
    op: Op,
    rank: Rank,
    root: Rank,
    world: usize,
    count: usize,
    blocks: &Blocks<'_>,
) -> (usize, usize, [usize; 2]) {
    use crate::types::Part::{All, AllAtRoot, AllOf, Nothing, One, OneAtRoot, OwnOf};
    let (block, all) = (blocks.range(rank), blocks.range(world - 1).end);
    let one = if op.has_blocks() { block.len() } else { count };
    let len = |part| match part {
        Nothing => 0,
        One | OwnOf(_) => one,
        All | AllOf(_) => all,
        OneAtRoot => one * usize::from(rank == root),
        AllAtRoot => all * usize::from(rank == root),
    };
    let [gives, gets] = op.form();
    let is_whole = |part| matches!(part, All | AllOf(_)) || part == AllAtRoot && rank == root;
    let at = match [is_whole(gives), is_whole(gets)] {
        [false, true] => [block.start, 0],
        [true, false] => [0, block.start],
        _ => [0, 0],
    };
    (len(gives), len(gets), at)
}

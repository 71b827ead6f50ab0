//! Which rank sees which image, and when.

use crate::random::{Purpose, Random};

/// The order of one epoch, drawn from the seed and the epoch, and what is left of it.
///
/// The ranks take images in turns, so that the images of a step are the same whatever the number of
/// ranks, if the global batch is. The order is that of a whole permutation: no image is left out,
/// and none comes twice, but that at the end the first images left are repeated until every rank
/// has as many (at most one less than the number of ranks).
pub(crate) struct Sampler {
    /// The rest of the epoch, padded to a multiple of the world size.
    order: Vec<usize>,
    rank: usize,
    world: usize,
    /// Images of this rank for each step.
    batch: usize,
}

impl Sampler {
    /// Makes the sampler of an epoch of which all ranks together have seen `done` images.
    pub(crate) fn new(images: usize, seed: u64, epoch: usize, done: usize, [rank, world]: [usize; 2], batch: usize) -> Sampler {
        let mut order: Vec<usize> = (0..images).collect();
        Random::new(seed, Purpose::Order, &[epoch as u64]).shuffle(&mut order);
        order.drain(..done.min(images));
        let left = order.len();
        for i in left..left.next_multiple_of(world) {
            order.push(order[i % left]);
        }
        Sampler { order, rank, world, batch }
    }

    /// Returns how many steps are left.
    pub(crate) fn steps(&self) -> usize {
        self.order.len().div_ceil(self.world * self.batch)
    }

    /// Returns this rank's images of a remaining step. Each rank has the same number.
    pub(crate) fn step(&self, step: usize) -> Vec<usize> {
        let of_all = self.world * self.batch;
        let images = &self.order[step * of_all..self.order.len().min((step + 1) * of_all)];
        images.iter().skip(self.rank).step_by(self.world).copied().collect()
    }

    /// Returns how many images all ranks together have seen at the end of a remaining step.
    pub(crate) fn seen(&self, step: usize) -> usize {
        self.order.len().min((step + 1) * self.world * self.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn all_ranks(images: usize, epoch: usize, done: usize, world: usize, batch: usize) -> Vec<Vec<usize>> {
        let ranks: Vec<Sampler> = (0..world).map(|rank| Sampler::new(images, 3, epoch, done, [rank, world], batch)).collect();
        (0..ranks[0].steps())
            .map(|step| {
                let parts: Vec<Vec<usize>> = ranks.iter().map(|rank| rank.step(step)).collect();
                assert!(parts.iter().all(|part| part.len() == parts[0].len() && !part.is_empty()), "{parts:?}");
                parts.concat()
            })
            .collect()
    }

    #[test]
    fn every_image_comes_once_but_for_the_padding() {
        let mut random = Random::new(1, Purpose::Order, &[]);
        for _ in 0..300 {
            let (images, world, batch) = (1 + random.below(200), 1 + random.below(9), 1 + random.below(20));
            let done = random.below(images);
            let mut seen = vec![0; images];
            let steps = all_ranks(images, 5, done, world, batch);
            steps.concat().iter().for_each(|&image| seen[image] += 1);
            let left = images - done;
            assert_eq!(seen.iter().filter(|&&times| times > 0).count(), left);
            assert_eq!(seen.iter().sum::<usize>(), left.next_multiple_of(world), "padding is what it takes, and no more");
            if left >= world {
                assert!(seen.iter().all(|&times| times <= 2));
            }
            assert_eq!(steps[..steps.len() - 1].iter().filter(|step| step.len() != world * batch).count(), 0);
        }
    }

    #[test]
    fn a_step_has_the_same_images_whatever_the_ranks() {
        let sorted = |mut steps: Vec<Vec<usize>>| {
            steps.iter_mut().for_each(|step| step.sort_unstable());
            steps
        };
        let one = sorted(all_ranks(96, 2, 0, 1, 16));
        assert_eq!(one, sorted(all_ranks(96, 2, 0, 2, 8)));
        assert_eq!(one, sorted(all_ranks(96, 2, 0, 4, 4)));
        assert_ne!(one, sorted(all_ranks(96, 3, 0, 4, 4)), "another epoch has another order");
    }

    #[test]
    fn what_is_left_goes_on_where_it_was() {
        let whole = all_ranks(100, 1, 0, 2, 8);
        let sampler = Sampler::new(100, 3, 1, 0, [0, 2], 8);
        let done = sampler.seen(2);
        assert_eq!(done, 48);
        assert_eq!(whole[3..].concat(), all_ranks(100, 1, done, 2, 8).concat());
        // With another number of ranks, it is the rest of the same permutation.
        let mut rest = all_ranks(100, 1, done, 3, 4).concat();
        rest.sort_unstable();
        rest.dedup();
        let mut expected = whole[3..].concat();
        expected.sort_unstable();
        assert_eq!(rest, expected);
    }
}

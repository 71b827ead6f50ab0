//! Random numbers that depend on their purpose only.
//!
//! All that is random in a run (initial weights, the order of images, how each is augmented) comes
//! from a stream of its own, named by the seed and by numbers such as the epoch and the image. So
//! it does not matter which rank or thread asks, nor in which order, and there is no state to save:
//! a run that is resumed, or has other ranks, draws the same.

/// The purpose of a stream. Changing the numbers changes the meaning of seeds.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// Initial weights; followed by the parameter.
    Weights = 1,
    /// The order of images; followed by the epoch.
    Order = 2,
    /// Augmentation; followed by the epoch and the image.
    Augmentation = 3,
    /// Generated images; followed by the image.
    Image = 4,
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64, purpose: Purpose, numbers: &[u64]) -> Random {
        let mut random = Random(seed);
        for &number in [purpose as u64].iter().chain(numbers) {
            random.0 = random.next() ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93);
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to 1, excluding 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number from `low` to `high`.
    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Returns a number less than `count`.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        // The bias is less than count / 2^64.
        ((self.next() as u128 * count as u128) >> 64) as usize
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Returns a normal number with mean 0 and variance 1 (Box and Muller, 1958).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Shuffles (Fisher and Yates; Durstenfeld, 1964).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_each_number_of_their_name() {
        let names: [(u64, Purpose, &[u64]); 7] = [
            (1, Purpose::Order, &[0]),
            (2, Purpose::Order, &[0]),
            (1, Purpose::Order, &[1]),
            (1, Purpose::Image, &[0]),
            (1, Purpose::Augmentation, &[0, 1]),
            (1, Purpose::Augmentation, &[1, 0]),
            (1, Purpose::Augmentation, &[1]),
        ];
        let firsts: std::collections::HashSet<u64> = names.iter().map(|(s, p, n)| Random::new(*s, *p, n).next()).collect();
        assert_eq!(firsts.len(), names.len());
        let again = Random::new(1, Purpose::Order, &[0]).next();
        assert!(firsts.contains(&again));
    }

    #[test]
    fn numbers_are_spread_as_they_should() {
        let mut random = Random::new(7, Purpose::Weights, &[]);
        let normal: Vec<f64> = (0..40_000).map(|_| random.normal()).collect();
        let mean = normal.iter().sum::<f64>() / 40_000.0;
        let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 40_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        let mut counts = [0; 10];
        (0..10_000).for_each(|_| counts[random.below(10)] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
        let mut items: Vec<usize> = (0..100).collect();
        random.shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}

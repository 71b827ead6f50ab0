//! Images that need no download.

use image::{Rgb, RgbImage};

use super::Dataset;
use crate::random::{Purpose, Random};

/// Noise for measurements (`--dummy`), with any number of images and classes. It cannot be learnt.
pub(crate) struct Noise {
    pub(crate) images: usize,
    pub(crate) classes: usize,
    pub(crate) size: usize,
    pub(crate) seed: u64,
}

impl Dataset for Noise {
    fn len(&self) -> usize {
        self.images
    }

    fn classes(&self) -> usize {
        self.classes
    }

    fn image(&self, index: usize) -> Result<(RgbImage, usize), String> {
        let mut random = Random::new(self.seed, Purpose::Image, &[index as u64]);
        let label = random.below(self.classes);
        let size = self.size as u32;
        Ok((RgbImage::from_fn(size, size, |_, _| Rgb(random.next().to_le_bytes()[..3].try_into().unwrap_or_default())), label))
    }
}

/// Shapes of random position, size and colour on a noisy background: ten classes that a small net
/// learns in a minute.
pub(crate) struct Shapes {
    pub(crate) images: usize,
    /// The number of the first image, so that images to test on differ from those to train on.
    pub(crate) first: usize,
    pub(crate) seed: u64,
}

/// Tells whether a point is inside a shape that spans from -1 to 1.
type Inside = fn(f64, f64) -> bool;

const SHAPES: [Inside; 10] = [
    |x, y| x.hypot(y) < 1.0,                                                  // disc
    |x, y| (0.55..1.0).contains(&x.hypot(y)),                                 // ring
    |x, y| x.abs().max(y.abs()) < 0.9,                                        // square
    |x, y| (0.5..0.95).contains(&x.abs().max(y.abs())),                       // frame
    |x, y| y < 0.8 && y > -0.9 + 2.0 * x.abs(),                               // triangle
    |x, y| x.abs().min(y.abs()) < 0.28 && x.abs().max(y.abs()) < 1.0,         // plus
    |x, y| (x.abs() - y.abs()).abs() < 0.35 && x.abs().max(y.abs()) < 0.95,   // cross
    |x, y| x.abs() < 1.0 && y.abs() < 1.0 && (y * 2.5).rem_euclid(2.0) < 1.0, // stripes across
    |x, y| x.abs() < 1.0 && y.abs() < 1.0 && (x * 2.5).rem_euclid(2.0) < 1.0, // stripes upright
    |x, y| x.abs() + y.abs() < 1.0,                                           // diamond
];

const SIZE: u32 = 32;

impl Dataset for Shapes {
    fn len(&self) -> usize {
        self.images
    }

    fn classes(&self) -> usize {
        SHAPES.len()
    }

    fn image(&self, index: usize) -> Result<(RgbImage, usize), String> {
        let number = self.first + index;
        let mut random = Random::new(self.seed, Purpose::Image, &[number as u64]);
        let label = number % SHAPES.len();
        let radius = random.between(6.0, 12.0);
        let [x0, y0] = [(); 2].map(|()| SIZE as f64 / 2.0 + random.between(-4.0, 4.0));
        let mut colour = || [(); 3].map(|()| random.between(40.0, 215.0));
        let (mut shape, ground) = (colour(), colour());
        // A shape that differs little from the background is made brighter or darker.
        let contrast = shape.iter().zip(&ground).map(|(a, b)| (a - b).abs()).sum::<f64>();
        if contrast < 150.0 {
            shape = ground.map(|value| if value < 127.0 { value + 70.0 } else { value - 70.0 });
        }
        let image = RgbImage::from_fn(SIZE, SIZE, |x, y| {
            let (x, y) = ((x as f64 + 0.5 - x0) / radius, (y as f64 + 0.5 - y0) / radius);
            let colour = if SHAPES[label](x, y) { shape } else { ground };
            Rgb(colour.map(|value| (value + random.between(-20.0, 20.0)).clamp(0.0, 255.0) as u8))
        });
        Ok((image, label))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_the_same_each_time_and_differ_from_each_other() {
        let train = Shapes { images: 40, first: 0, seed: 1 };
        let test = Shapes { images: 40, first: 40, seed: 1 };
        let noise = Noise { images: 40, classes: 10, size: 16, seed: 1 };
        for data in [&train as &dyn Dataset, &test, &noise] {
            for i in 0..40 {
                let (image, label) = data.image(i).unwrap();
                assert_eq!((&image, label), (&data.image(i).unwrap().0, data.image(i).unwrap().1));
                assert!(label < 10);
                assert_ne!(image, data.image((i + 10) % 40).unwrap().0);
            }
        }
        assert_ne!(train.image(0).unwrap().0, test.image(0).unwrap().0);
    }

    #[test]
    fn shapes_differ_from_each_other_in_many_places() {
        let points: Vec<(f64, f64)> = (0..400).map(|i| ((i % 20) as f64 / 10.0 - 0.95, (i / 20) as f64 / 10.0 - 0.95)).collect();
        for (i, a) in SHAPES.iter().enumerate() {
            for b in &SHAPES[..i] {
                assert!(points.iter().filter(|(x, y)| a(*x, *y) != b(*x, *y)).count() > 30);
            }
        }
    }
}

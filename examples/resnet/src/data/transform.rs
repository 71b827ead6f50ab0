//! Turns an image into the net's input: cuts, flips and normalises it.

use clap::ValueEnum;
use image::imageops::{FilterType, crop_imm, resize};
use image::{Rgb, RgbImage};

use crate::random::Random;

/// How images to train on are varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Augmentation {
    /// A random part of the image, of random size and shape, sometimes flipped (Szegedy et al.,
    /// 2014), for ImageNet
    Resized,
    /// The image moved by up to an eighth, with black around it, sometimes flipped (He et al.,
    /// 2015), for CIFAR
    Moved,
    /// Not at all
    None,
}

/// Turns images of any size into planes of one size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transform {
    pub(crate) size: usize,
    pub(crate) augmentation: Augmentation,
}

/// Mean and standard deviation of ImageNet's colours, from 0 to 1. Other photographs are similar.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

impl Transform {
    /// Writes an image to train on: 3 planes of `size` x `size`.
    pub(crate) fn train(&self, image: RgbImage, random: &mut Random, planes: &mut [f32]) {
        let image = match self.augmentation {
            Augmentation::Resized => {
                let [x, y, width, height] = part(image.dimensions(), random);
                let flips = random.coin();
                let part = resize_to(&crop_imm(&image, x, y, width, height).to_image(), self.size, self.size);
                normalise(&part, flips, planes);
                return;
            }
            Augmentation::Moved => {
                let image = self.whole(image);
                let reach = self.size / 8;
                let [dx, dy] = [(); 2].map(|()| random.below(2 * reach + 1) as i64 - reach as i64);
                let flips = random.coin();
                normalise(&moved(&image, dx, dy), flips, planes);
                return;
            }
            Augmentation::None => self.whole(image),
        };
        normalise(&image, false, planes);
    }

    /// Writes an image to test on: its middle, after the shorter side is resized to 8/7 of `size`;
    /// or the whole image if images to train on are not cut.
    pub(crate) fn test(&self, image: RgbImage, planes: &mut [f32]) {
        let image = match self.augmentation {
            Augmentation::Resized => {
                let image = squarer(image);
                let (width, height) = image.dimensions();
                let shorter = self.size * 8 / 7;
                let scale = shorter as f64 / width.min(height) as f64;
                let side = |side: u32| ((side as f64 * scale).round() as usize).max(shorter);
                let image = resize_to(&image, side(width), side(height));
                let middle = |side: u32| (side - self.size as u32) / 2;
                let (x, y) = (middle(image.width()), middle(image.height()));
                crop_imm(&image, x, y, self.size as u32, self.size as u32).to_image()
            }
            Augmentation::Moved | Augmentation::None => self.whole(image),
        };
        normalise(&image, false, planes);
    }

    /// Returns the image in the right size.
    fn whole(&self, image: RgbImage) -> RgbImage {
        if image.dimensions() == (self.size as u32, self.size as u32) { image } else { resize_to(&image, self.size, self.size) }
    }
}

/// Cuts out the middle of an image that is much longer than wide. The rest would not be visible,
/// and resizing all of it could need too much memory.
fn squarer(image: RgbImage) -> RgbImage {
    let (width, height) = image.dimensions();
    let most = width.min(height).saturating_mul(LONGEST);
    let (w, h) = (width.min(most), height.min(most));
    if (w, h) == (width, height) { image } else { crop_imm(&image, (width - w) / 2, (height - h) / 2, w, h).to_image() }
}

/// An image that is longer than this many times its width is not resized as a whole. The
/// interpolation reaches less far beyond the middle.
const LONGEST: u32 = 16;

/// Resizes by linear interpolation over all pixels that a pixel of the result covers, as PIL and
/// torchvision do.
fn resize_to(image: &RgbImage, width: usize, height: usize) -> RgbImage {
    resize(image, width as u32, height as u32, FilterType::Triangle)
}

/// Returns a random part as x, y, width and height: 8 to 100 % of the area, with sides between 3:4
/// and 4:3.
fn part((width, height): (u32, u32), random: &mut Random) -> [u32; 4] {
    let area = width as f64 * height as f64;
    for _ in 0..10 {
        let area = area * random.between(0.08, 1.0);
        let ratio = random.between((3.0f64 / 4.0).ln(), (4.0f64 / 3.0).ln()).exp();
        let (w, h) = ((area * ratio).sqrt().round() as u32, (area / ratio).sqrt().round() as u32);
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let (x, y) = (random.below((width - w + 1) as usize), random.below((height - h + 1) as usize));
            return [x as u32, y as u32, w, h];
        }
    }
    // No part fits into an image that is this long: return the largest middle of an allowed shape.
    let (w, h) = (width.min(height * 4 / 3).max(1), height.min(width * 4 / 3).max(1));
    [(width - w) / 2, (height - h) / 2, w, h]
}

/// Returns the image moved right and down, with black in the empty area.
fn moved(image: &RgbImage, dx: i64, dy: i64) -> RgbImage {
    RgbImage::from_fn(image.width(), image.height(), |x, y| {
        let (x, y) = (x as i64 - dx, y as i64 - dy);
        match (u32::try_from(x), u32::try_from(y)) {
            (Ok(x), Ok(y)) => image.get_pixel_checked(x, y).copied().unwrap_or(Rgb([0; 3])),
            _ => Rgb([0; 3]),
        }
    })
}

/// Converts bytes to planes of numbers around 0, by rows or by mirrored rows.
fn normalise(image: &RgbImage, flips: bool, planes: &mut [f32]) {
    let width = image.width() as usize;
    let plane = width * image.height() as usize;
    let scale = DEVIATION.map(|deviation| 1.0 / (255.0 * deviation));
    let shift = [0, 1, 2].map(|colour| MEAN[colour] / DEVIATION[colour]);
    for (y, row) in image.as_raw().chunks_exact(3 * width).enumerate() {
        for (x, pixel) in row.chunks_exact(3).enumerate() {
            let at = y * width + if flips { width - 1 - x } else { x };
            for colour in 0..3 {
                planes[colour * plane + at] = pixel[colour] as f32 * scale[colour] - shift[colour];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Purpose;

    fn random(number: u64) -> Random {
        Random::new(1, Purpose::Augmentation, &[number])
    }

    #[test]
    fn parts_lie_inside_and_vary() {
        let mut parts = std::collections::HashSet::new();
        for i in 0..500 {
            let size = (1 + random(i).below(300) as u32, 1 + random(i + 1000).below(300) as u32);
            let [x, y, w, h] = part(size, &mut random(i + 2000));
            assert!(w > 0 && h > 0 && x + w <= size.0 && y + h <= size.1, "{size:?} {:?}", [x, y, w, h]);
            parts.insert([x, y, w, h]);
        }
        assert!(parts.len() > 400);
        assert_eq!(part((1000, 10), &mut random(1))[2..], [13, 10]);
    }

    #[test]
    fn colours_are_normalised_and_rows_mirrored() {
        let image = RgbImage::from_fn(2, 1, |x, _| Rgb([x as u8 * 255, 0, 255]));
        let mut planes = [0.0; 6];
        normalise(&image, false, &mut planes);
        let value = |byte: f32, colour: usize| (byte / 255.0 - MEAN[colour]) / DEVIATION[colour];
        let expected = [value(0.0, 0), value(255.0, 0), value(0.0, 1), value(0.0, 1), value(255.0, 2), value(255.0, 2)];
        assert!(planes.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{planes:?} {expected:?}");
        let mut mirrored = [0.0; 6];
        normalise(&image, true, &mut mirrored);
        assert_eq!([mirrored[1], mirrored[0]], planes[..2]);
    }

    #[test]
    fn images_move_with_black_around() {
        let image = RgbImage::from_fn(3, 3, |x, y| Rgb([(10 * x + y + 1) as u8; 3]));
        let right = moved(&image, 1, -1);
        assert_eq!(right.get_pixel(0, 0).0, [0; 3]);
        assert_eq!(right.get_pixel(1, 0), image.get_pixel(0, 1));
        assert_eq!(right.get_pixel(1, 2).0, [0; 3]);
        assert_eq!(moved(&image, 0, 0), image);
    }

    #[test]
    fn what_would_be_gigabytes_is_cut_before_it_is_resized() {
        let sizes = [(1, 65_535), (65_535, 2), (100, 40), (40, 640)].map(|(w, h)| squarer(RgbImage::new(w, h)).dimensions());
        assert_eq!(sizes, [(1, 16), (32, 2), (100, 40), (40, 640)]);
        let image = RgbImage::from_fn(1, 101, |_, y| Rgb([y as u8; 3]));
        assert_eq!(squarer(image).get_pixel(0, 8).0, [50; 3], "it is the middle");
    }

    #[test]
    fn every_image_becomes_the_size_asked_for() {
        for augmentation in [Augmentation::Resized, Augmentation::Moved, Augmentation::None] {
            let transform = Transform { size: 28, augmentation };
            for (width, height) in [(28, 28), (100, 40), (7, 90), (1, 1), (1, 65_535), (65_535, 1)] {
                let image = RgbImage::from_pixel(width, height, Rgb([124, 116, 104]));
                let mut planes = vec![9.0; 3 * 28 * 28];
                transform.test(image.clone(), &mut planes);
                // Each pixel has the mean colour.
                assert!(planes.iter().all(|value| value.abs() < 0.01));
                planes.fill(9.0);
                transform.train(image, &mut random(3), &mut planes);
                assert!(planes.iter().all(|value| value.abs() < 3.0));
            }
        }
    }
}

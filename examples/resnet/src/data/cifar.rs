//! CIFAR-10 in its binary version: records of a label and 3072 bytes: red, green and blue, each 32
//! x 32 by rows.

use std::fs;
use std::path::{Path, PathBuf};

use image::{Rgb, RgbImage};

use super::Dataset;

const SIZE: usize = 32;
const PLANE: usize = SIZE * SIZE;
const RECORD: usize = 1 + 3 * PLANE;
const CLASSES: usize = 10;

/// Images in memory.
pub(crate) struct Cifar {
    records: Vec<u8>,
}

/// Returns the folder with the files: this one, or the one that the archive unpacks to.
pub(super) fn find(folder: &Path) -> Option<PathBuf> {
    [folder.to_owned(), folder.join("cifar-10-batches-bin")].into_iter().find(|folder| folder.join("data_batch_1.bin").is_file())
}

impl Cifar {
    pub(super) fn train(folder: &Path) -> Result<Cifar, String> {
        let (there, missing) = Cifar::parts(folder);
        let data = Cifar::read(&there)?;
        // For a trial, the first file is enough.
        if !missing.is_empty() {
            tracing::warn!(
                "{} of CIFAR-10's 5 files are missing ({}): {} images to train on",
                missing.len(),
                missing.join(", "),
                data.len()
            );
        }
        Ok(data)
    }

    /// Returns the files to train on that exist, and the names of those that are missing.
    fn parts(folder: &Path) -> (Vec<PathBuf>, Vec<String>) {
        let names = (1..=5).map(|i| format!("data_batch_{i}.bin"));
        let (there, missing): (Vec<_>, Vec<_>) = names.partition(|name| folder.join(name).is_file());
        (there.into_iter().map(|name| folder.join(name)).collect(), missing)
    }

    pub(super) fn test(folder: &Path) -> Result<Cifar, String> {
        Cifar::read(&[folder.join("test_batch.bin")])
    }

    fn read(files: &[PathBuf]) -> Result<Cifar, String> {
        let mut records = Vec::new();
        for path in files {
            let bytes = fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
            if bytes.len() % RECORD != 0 || bytes.is_empty() {
                return Err(format!(
                    "{} has {} bytes, which are not records of {RECORD}: it is damaged",
                    path.display(),
                    bytes.len()
                ));
            }
            if let Some(at) = bytes.iter().step_by(RECORD).position(|&label| label as usize >= CLASSES) {
                return Err(format!("{} has class {} at image {at}: it is damaged", path.display(), bytes[at * RECORD]));
            }
            records.extend(bytes);
        }
        Ok(Cifar { records })
    }
}

impl Dataset for Cifar {
    fn len(&self) -> usize {
        self.records.len() / RECORD
    }

    fn classes(&self) -> usize {
        CLASSES
    }

    fn image(&self, index: usize) -> Result<(RgbImage, usize), String> {
        let record = &self.records[index * RECORD..(index + 1) * RECORD];
        let planes = &record[1..];
        let image = RgbImage::from_fn(SIZE as u32, SIZE as u32, |x, y| {
            let at = y as usize * SIZE + x as usize;
            Rgb([planes[at], planes[PLANE + at], planes[2 * PLANE + at]])
        });
        Ok((image, record[0] as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_damage_is_named() {
        let folder = std::env::temp_dir().join(format!("kolo-resnet-cifar-{}/cifar-10-batches-bin", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut records = vec![0; 2 * RECORD];
        records[RECORD] = 7;
        // The second pixel of the second image: red 1, green 2, blue 3.
        (1..=3).for_each(|colour| records[RECORD + 2 + (colour - 1) * PLANE] = colour as u8);
        fs::write(folder.join("data_batch_1.bin"), &records).unwrap();
        fs::write(folder.join("test_batch.bin"), &records[..RECORD]).unwrap();
        let data = super::super::Data::open(folder.parent().unwrap()).unwrap();
        assert_eq!((data.train.len(), data.test.len(), data.train.classes()), (2, 1, 10));
        let (there, missing) = Cifar::parts(&folder);
        assert_eq!((there.len(), missing), (1, (2..=5).map(|i| format!("data_batch_{i}.bin")).collect()));
        let (image, label) = data.train.image(1).unwrap();
        assert_eq!((image.get_pixel(1, 0).0, label), ([1, 2, 3], 7));

        let message = |bytes: &[u8]| {
            fs::write(folder.join("data_batch_2.bin"), bytes).unwrap();
            super::super::Data::open(&folder).err().unwrap()
        };
        assert!(message(&records[1..]).contains("data_batch_2.bin has 6145 bytes"));
        records[RECORD] = 10;
        assert!(message(&records).contains("class 10 at image 1"));
        fs::remove_dir_all(folder.parent().unwrap()).unwrap();
    }
}

//! Images: where they come from, what is done to them, and how they get to the step in time.

pub(crate) mod cifar;
pub(crate) mod folder;
pub(crate) mod generated;
pub(crate) mod loader;
pub(crate) mod sampler;
pub(crate) mod transform;

use std::path::Path;

use image::RgbImage;

/// Labelled images, which worker threads take by number.
pub(crate) trait Dataset: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// How many classes there are.
    fn classes(&self) -> usize;

    /// The classes' names, if they have any.
    fn names(&self) -> &[String] {
        &[]
    }

    /// An image and its class.
    ///
    /// # Errors
    ///
    /// Says which image cannot be had, and why.
    fn image(&self, index: usize) -> Result<(RgbImage, usize), String>;
}

/// The images to train on and those to test on.
pub(crate) struct Data {
    pub(crate) train: Box<dyn Dataset>,
    pub(crate) test: Box<dyn Dataset>,
}

impl Data {
    /// Images below a folder: CIFAR-10's binary files if they are there, else folders of JPEG and PNG files.
    pub(crate) fn open(folder: &Path) -> Result<Data, String> {
        if let Some(folder) = cifar::find(folder) {
            return Ok(Data { train: Box::new(cifar::Cifar::train(&folder)?), test: Box::new(cifar::Cifar::test(&folder)?) });
        }
        let train = folder::Folder::open(&folder.join("train"))?;
        let test = ["val", "test"].map(|name| folder.join(name)).into_iter().find(|folder| folder.is_dir());
        let test = test.ok_or_else(|| format!("{} has no folder val or test beside train", folder.display()))?;
        let test = folder::Folder::open(&test)?;
        train.check_same_classes(&test)?;
        Ok(Data { train: Box::new(train), test: Box::new(test) })
    }
}

//! Images: sources, transforms, the order among ranks, and loading ahead of the step.

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
    /// Returns the number of images.
    fn len(&self) -> usize;

    /// Returns the number of classes.
    fn classes(&self) -> usize;

    /// Returns the names of the classes, if they have names.
    fn names(&self) -> &[String] {
        &[]
    }

    /// Returns an image and its class.
    ///
    /// # Errors
    ///
    /// Names the image that cannot be read, and the cause.
    fn image(&self, index: usize) -> Result<(RgbImage, usize), String>;
}

/// The images to train on and those to test on.
pub(crate) struct Data {
    pub(crate) train: Box<dyn Dataset>,
    pub(crate) test: Box<dyn Dataset>,
}

impl Data {
    /// Opens the images below a folder: CIFAR-10's binary files if there are any, else folders of
    /// JPEG and PNG files.
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

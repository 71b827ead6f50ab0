//! Folders of images: one folder for each class, as of ImageNet.

use std::fs;
use std::path::{Path, PathBuf};

use image::{ImageReader, RgbImage};

use super::Dataset;

/// `root/CLASS/IMAGE.jpg`; classes are numbered in order of their names, as torchvision does.
pub(crate) struct Folder {
    root: PathBuf,
    classes: Vec<String>,
    images: Vec<(PathBuf, usize)>,
}

const ENDINGS: [&str; 3] = ["jpg", "jpeg", "png"];

impl Folder {
    /// Lists the folders. Opens no image.
    pub(crate) fn open(root: &Path) -> Result<Folder, String> {
        let name = |path: PathBuf| match path.file_name().and_then(|name| name.to_str()) {
            Some(name) => Ok(name.to_owned()),
            None => Err(format!("{} has a name that is not UTF-8, by which it is no class: rename it", path.display())),
        };
        let classes: Vec<String> = entries(root)?.into_iter().filter(|path| path.is_dir()).map(name).collect::<Result<_, _>>()?;
        let mut images = Vec::new();
        for (label, class) in classes.iter().enumerate() {
            let before = images.len();
            search(&root.join(class), label, &mut images)?;
            if images.len() == before {
                return Err(format!("{} has no image: {} are known", root.join(class).display(), ENDINGS.join(", ")));
            }
        }
        if classes.is_empty() {
            return Err(format!("{} has no folders, of which there should be one for each class of images", root.display()));
        }
        Ok(Folder { root: root.to_owned(), classes, images })
    }

    pub(super) fn check_same_classes(&self, other: &Folder) -> Result<(), String> {
        let strange = |a: &Folder, b: &Folder| {
            let class = a.classes.iter().find(|class| !b.classes.contains(class))?;
            Some(format!("{} has a class {class}, and {} has not", a.root.display(), b.root.display()))
        };
        strange(self, other).or_else(|| strange(other, self)).map_or(Ok(()), Err)
    }
}

/// Returns the entries of a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error| format!("{} cannot be read: {error}", folder.display());
    let mut entries =
        fs::read_dir(folder).map_err(failed)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    entries.sort_unstable();
    Ok(entries)
}

/// Collects the images in a folder and below it.
fn search(folder: &Path, label: usize, found: &mut Vec<(PathBuf, usize)>) -> Result<(), String> {
    for path in entries(folder)? {
        let ending = path.extension().and_then(|ending| ending.to_str()).map(str::to_ascii_lowercase);
        // Asking the system about each of a million images is slow. So only names without an image
        // ending may be folders.
        if ending.as_deref().is_some_and(|ending| ENDINGS.contains(&ending)) {
            found.push((path, label));
        } else if path.is_dir() {
            search(&path, label, found)?;
        }
    }
    Ok(())
}

impl Dataset for Folder {
    fn len(&self) -> usize {
        self.images.len()
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn names(&self) -> &[String] {
        &self.classes
    }

    fn image(&self, index: usize) -> Result<(RgbImage, usize), String> {
        let (path, label) = &self.images[index];
        let failed = |error: &dyn std::fmt::Display| format!("{} cannot be read: {error}", path.display());
        // The first bytes tell the format: ImageNet has a PNG whose name ends in JPEG.
        let reader = ImageReader::open(path).and_then(ImageReader::with_guessed_format).map_err(|error| failed(&error))?;
        let image = reader.decode().map_err(|error| failed(&error))?;
        Ok((image.into_rgb8(), *label))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(path: &Path, colour: [u8; 3]) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        RgbImage::from_pixel(8, 6, image::Rgb(colour)).save(path).unwrap();
    }

    #[test]
    fn folders_are_classes_in_order_of_names() {
        let root = std::env::temp_dir().join(format!("kolo-resnet-folder-{}", std::process::id()));
        save(&root.join("train/zebra/a.png"), [255, 255, 255]);
        save(&root.join("train/ape/more/b.jpg"), [0, 0, 0]);
        fs::write(root.join("train/ape/notes.txt"), "not an image").unwrap();
        // A PNG with another ending.
        save(&root.join("train/ape/c.png"), [9, 9, 9]);
        fs::rename(root.join("train/ape/c.png"), root.join("train/ape/c.JPEG")).unwrap();
        save(&root.join("val/zebra/d.png"), [1, 1, 1]);
        save(&root.join("val/ape/e.png"), [1, 1, 1]);
        let data = super::super::Data::open(&root).unwrap();
        assert_eq!((data.train.len(), data.train.classes(), data.test.len()), (3, 2, 2));
        let labels: Vec<usize> = (0..3).map(|i| data.train.image(i).unwrap().1).collect();
        assert_eq!(labels, [0, 0, 1]);
        assert_eq!(data.train.image(2).unwrap().0.get_pixel(0, 0).0, [255; 3]);

        fs::write(root.join("train/zebra/a.png"), "damaged").unwrap();
        let error = data.train.image(2).unwrap_err();
        assert!(error.contains("a.png"), "{error}");
        #[cfg(target_os = "linux")]
        {
            use std::os::unix::ffi::OsStrExt;
            let strange = root.join("train").join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
            fs::create_dir(&strange).unwrap();
            let error = super::super::Data::open(&root).err().unwrap();
            assert!(error.contains("not UTF-8") && error.contains("caf"), "{error}");
            fs::remove_dir(strange).unwrap();
        }
        fs::remove_dir_all(root.join("val/ape")).unwrap();
        let error = super::super::Data::open(&root).err().unwrap();
        assert!(error.contains("class ape"), "{error}");
        fs::remove_dir_all(root).unwrap();
    }
}

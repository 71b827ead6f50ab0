//! Worker threads that decode and augment ahead of the step.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, bounded};

use super::Dataset;
use super::transform::Transform;
use crate::model::Batch;
use crate::random::{Purpose, Random};

/// Batches that each worker has ready.
const AHEAD: usize = 2;

/// How images become batches.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) dataset: Arc<dyn Dataset>,
    pub(crate) transform: Transform,
    /// The seed and the epoch; `None` for images to test on, which are not varied.
    pub(crate) variation: Option<(u64, usize)>,
}

/// Returns batches in order. Worker `i` of `n` makes batches `i`, `i + n`, and so on, and waits
/// when it is ahead. Dropping the loader ends the workers.
pub(crate) struct Loader {
    workers: Vec<Worker>,
    batches: usize,
    next: usize,
}

struct Worker {
    batches: Receiver<Result<Batch, String>>,
    thread: JoinHandle<()>,
}

impl Loader {
    /// `batches` are the images of each batch.
    pub(crate) fn start(source: &Source, batches: Vec<Vec<usize>>, workers: usize) -> Result<Loader, String> {
        let batches = Arc::new(batches);
        let count = workers.clamp(1, batches.len().max(1));
        let start = |worker: usize| {
            let (sender, receiver) = bounded(AHEAD);
            let (source, batches) = (source.clone(), batches.clone());
            let work = move || {
                for images in batches.iter().skip(worker).step_by(count) {
                    // If a decoder panics on a damaged image, the run ends with a message.
                    let batch = std::panic::catch_unwind(AssertUnwindSafe(|| source.batch(images)))
                        .unwrap_or_else(|_| Err("a worker that reads images panicked".to_owned()));
                    if sender.send(batch).is_err() {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("images-{worker}")).spawn(work);
            let thread = thread.map_err(|error| format!("no thread can be started to read images: {error}"))?;
            Ok(Worker { batches: receiver, thread })
        };
        let workers = (0..count).map(start).collect::<Result<_, String>>()?;
        Ok(Loader { workers, batches: batches.len(), next: 0 })
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.batches {
            return None;
        }
        let worker = &self.workers[self.next % self.workers.len()];
        self.next += 1;
        Some(worker.batches.recv().unwrap_or_else(|_| Err("a worker that reads images ended early".to_owned())))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        for Worker { batches, thread } in self.workers.drain(..) {
            // A worker that waits for room sees that the receiver is gone.
            drop(batches);
            let _ = thread.join();
        }
    }
}

impl Source {
    fn batch(&self, images: &[usize]) -> Result<Batch, String> {
        let size = self.transform.size;
        let each = 3 * size * size;
        let mut pixels = vec![0.0; images.len() * each];
        let mut labels = Vec::with_capacity(images.len());
        for (&index, planes) in images.iter().zip(pixels.chunks_exact_mut(each)) {
            let (image, label) = self.dataset.image(index)?;
            match self.variation {
                Some((seed, epoch)) => {
                    let mut random = Random::new(seed, Purpose::Augmentation, &[epoch as u64, index as u64]);
                    self.transform.train(image, &mut random, planes);
                }
                None => self.transform.test(image, planes),
            }
            labels.push(label);
        }
        Ok(Batch { pixels, labels, height: size, width: size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::generated::Shapes;
    use crate::data::transform::Augmentation;

    fn source(epoch: usize) -> Source {
        Source {
            dataset: Arc::new(Shapes { images: 100, first: 0, seed: 1 }),
            transform: Transform { size: 32, augmentation: Augmentation::Moved },
            variation: Some((1, epoch)),
        }
    }

    #[test]
    fn batches_come_in_order_and_are_the_same_whatever_the_workers() {
        let batches: Vec<Vec<usize>> = (0..13).map(|i| (i..i + 3).collect()).collect();
        let load = |workers, epoch| -> Vec<(Vec<usize>, Vec<f32>)> {
            let loader = Loader::start(&source(epoch), batches.clone(), workers).unwrap();
            loader.map(|batch| batch.map(|batch| (batch.labels, batch.pixels)).unwrap()).collect()
        };
        let one = load(1, 0);
        assert_eq!(one.len(), 13);
        assert_eq!(one[4].0, [4, 5, 6]);
        assert!(one == load(5, 0) && one == load(40, 0));
        assert!(one != load(1, 1), "another epoch varies images in another way");
    }

    #[test]
    fn a_loader_can_be_dropped_in_the_middle() {
        let mut loader = Loader::start(&source(0), vec![vec![0]; 1000], 3).unwrap();
        loader.next().unwrap().unwrap();
        drop(loader);
    }

    /// Cannot read its second image.
    struct Damaged;

    impl Dataset for Damaged {
        fn len(&self) -> usize {
            3
        }
        fn classes(&self) -> usize {
            1
        }
        fn image(&self, index: usize) -> Result<(image::RgbImage, usize), String> {
            match index {
                0 => Ok((image::RgbImage::new(8, 8), 0)),
                1 => Err("image 1 is damaged".to_owned()),
                _ => panic!("as a decoder might"),
            }
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error_in_its_place() {
        let source = Source { dataset: Arc::new(Damaged), ..source(0) };
        let loader = Loader::start(&source, vec![vec![0], vec![1], vec![2], vec![0]], 2).unwrap();
        let got: Vec<_> = loader.map(|batch| batch.map(|batch| batch.labels.len())).collect();
        assert_eq!(got[0], Ok(1));
        assert_eq!(got[1], Err("image 1 is damaged".to_owned()));
        assert!(got[2].as_ref().unwrap_err().contains("panicked"));
        assert_eq!(got[3], Ok(1));
    }
}

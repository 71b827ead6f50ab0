//! Runs as their metrics tell of them, and how they compare.

use std::path::{Path, PathBuf};

use crate::metrics::{self, Epoch, Event, Start, Step};

/// A run, from its metrics.
pub(crate) struct Run {
    pub(crate) name: String,
    /// The start or the last resumption. If ranks were lost since, ranks and batch are those of the
    /// survivors.
    pub(crate) start: Start,
    pub(crate) steps: Vec<Step>,
    pub(crate) epochs: Vec<Epoch>,
    /// The first step, and the first whole epoch, of these ranks. Speeds are measured from there.
    pub(crate) since: [usize; 2],
}

impl Run {
    pub(crate) fn read(folder: &Path) -> Result<Run, String> {
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        let run = Run::of(name, metrics::read(folder)?);
        run.ok_or_else(|| format!("{} is of a run that has not begun", metrics::place(folder).display()))
    }

    fn of(name: String, events: Vec<Event>) -> Option<Run> {
        // Each rank keeps its number of images in a step.
        let resize = |start: &mut Option<Start>, ranks: usize| {
            if let Some(start) = start {
                start.global_batch = start.global_batch / start.ranks.max(1) * ranks;
                start.ranks = ranks;
            }
        };
        let (mut start, mut steps, mut epochs, mut since): (Option<Start>, _, _, _) = (None, Vec::new(), Vec::new(), [0, 0]);
        for event in events {
            match event {
                Event::Start(event) => {
                    // The figures of a resumed epoch cover the part since the resumption only.
                    since = [steps.len(), epochs.len()];
                    start = Some(event);
                }
                Event::Step(event) => steps.push(event),
                Event::Epoch(event) => epochs.push(event),
                Event::Shrink { ranks, .. } => {
                    // The epoch in which ranks were lost has figures from before and after the
                    // loss.
                    since = [steps.len(), epochs.len() + 1];
                    resize(&mut start, ranks);
                }
                // This comes between two epochs.
                Event::Grow { ranks, .. } => {
                    since = [steps.len(), epochs.len()];
                    resize(&mut start, ranks);
                }
            }
        }
        Some(Run { name, start: start?, steps, epochs, since })
    }

    /// Returns the epochs of the current ranks.
    fn latest(&self) -> &[Epoch] {
        self.epochs.get(self.since[1]..).unwrap_or_default()
    }

    /// Returns the images per second of all ranks: the median over whole epochs, which one
    /// disturbed epoch does not move. Without a whole epoch, the median over steps.
    pub(crate) fn images_per_s(&self) -> Option<f64> {
        let speeds = |mut speeds: Vec<f64>| {
            speeds.sort_unstable_by(f64::total_cmp);
            speeds.get(speeds.len() / 2).copied()
        };
        speeds(self.latest().iter().map(|epoch| epoch.images_per_s).collect())
            .or_else(|| speeds(self.steps[self.since[0]..].iter().map(|step| step.images_per_s).collect()))
    }

    /// Returns the seconds of an epoch.
    pub(crate) fn epoch_seconds(&self) -> Option<f64> {
        self.images_per_s().map(|speed| self.start.images as f64 / speed)
    }

    /// Returns the best accuracy in a test, from 0 to 1.
    pub(crate) fn best(&self) -> Option<f64> {
        self.epochs.iter().map(|epoch| epoch.test_accuracy).max_by(f64::total_cmp)
    }

    /// Returns the mean share of time that ranks waited for each other, from 0 to 1.
    pub(crate) fn waiting(&self) -> Option<f64> {
        let epochs = self.latest();
        (!epochs.is_empty()).then(|| epochs.iter().map(|epoch| epoch.waiting).sum::<f64>() / epochs.len() as f64)
    }

    /// Returns whether the speeds can be compared: the same net, engine and images, and the same
    /// number of images in a step of all ranks or of each rank.
    pub(crate) fn is_like(&self, other: &Run) -> bool {
        let what = |run: &Run| {
            // The threads are not compared: a rank has its share of the machine's.
            let engine = run.start.engine.split(", ").filter(|part| !part.ends_with("threads")).map(str::to_owned);
            (run.start.arch.clone(), engine.collect::<Vec<_>>(), run.start.image_size, run.start.images)
        };
        let each = |run: &Run| run.start.global_batch / run.start.ranks.max(1);
        what(self) == what(other) && (self.start.global_batch == other.start.global_batch || each(self) == each(other))
    }
}

/// Returns the speed for each rank, relative to the [comparable](Run::is_like) run with the fewest
/// ranks: 1 is ideal.
pub(crate) fn efficiency(runs: &[Run], run: &Run) -> Option<f64> {
    let base = runs.iter().filter(|other| run.is_like(other)).min_by_key(|run| run.start.ranks)?;
    let each = |run: &Run| Some(run.images_per_s()? / run.start.ranks as f64);
    Some(each(run)? / each(base)?)
}

/// Reads the runs in these folders.
pub(crate) fn read_all(folders: &[PathBuf]) -> Result<Vec<Run>, String> {
    folders.iter().map(|folder| Run::read(folder)).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn run(ranks: usize, speed: f64) -> Run {
        let start = Start {
            arch: "resnet20".to_owned(),
            engine: String::new(),
            transport: String::new(),
            ranks,
            hosts: 1,
            global_batch: 128,
            images: 1000,
            image_size: 32,
            seed: 0,
            step: 0,
        };
        let epoch = |speed: f64, test_accuracy: f64| Epoch {
            epoch: 1,
            step: 1,
            seconds: 1000.0 / speed,
            images_per_s: speed,
            train_loss: 1.0,
            train_accuracy: 0.5,
            test_loss: 1.0,
            test_accuracy,
            waiting: 0.02,
            cores: None,
        };
        // One epoch was disturbed.
        let epochs = vec![epoch(speed, 0.5), epoch(speed / 10.0, 0.7), epoch(speed, 0.6)];
        Run { name: format!("{ranks}-ranks"), start, steps: Vec::new(), epochs, since: [0, 0] }
    }

    #[test]
    fn only_what_can_be_compared_is() {
        let other = |change: fn(&mut Start)| {
            let mut runs = [run(1, 100.0), run(2, 150.0)];
            change(&mut runs[1].start);
            efficiency(&runs, &runs[1])
        };
        // Without a comparable run, each is compared with itself.
        assert_eq!(other(|_| ()), Some(0.75));
        assert_eq!(other(|start| start.engine = "libtorch".to_owned()), Some(1.0));
        assert_eq!(other(|start| start.images = 7), Some(1.0));
        assert_eq!(other(|start| start.global_batch = 64), Some(1.0));
        // The same number of images on each rank.
        assert_eq!(other(|start| start.global_batch = 256), Some(0.75));
    }

    #[test]
    fn speeds_are_those_of_the_ranks_in_force() {
        let Run { start, epochs, .. } = run(4, 400.0);
        let epoch = |speed| Event::Epoch(Epoch { images_per_s: speed, waiting: speed / 1000.0, ..epochs[0].clone() });
        let begin = |ranks| Event::Start(Start { ranks, ..start.clone() });
        let run = Run::of("a".to_owned(), vec![begin(4), epoch(400.0), epoch(420.0), begin(2), epoch(200.0)]).unwrap();
        assert_eq!((run.start.ranks, run.images_per_s(), run.waiting()), (2, Some(200.0), Some(0.2)));
        assert_eq!(run.epochs.len(), 3);
        let shrink = Event::Shrink { step: 5, ranks: 3, reason: String::new() };
        let mut events = vec![begin(4), epoch(400.0), shrink, epoch(350.0)];
        let mixed = Run::of("b".to_owned(), events.clone()).unwrap();
        assert_eq!((mixed.start.ranks, mixed.start.global_batch, mixed.images_per_s()), (3, 96, None));
        events.push(epoch(300.0));
        assert_eq!(Run::of("b".to_owned(), events).unwrap().images_per_s(), Some(300.0));
        let grown =
            Run::of("d".to_owned(), vec![begin(2), epoch(200.0), Event::Grow { step: 5, ranks: 3 }, epoch(330.0)]).unwrap();
        assert_eq!((grown.start.ranks, grown.start.global_batch, grown.images_per_s()), (3, 192, Some(330.0)));
        assert!(Run::of("c".to_owned(), vec![epoch(1.0)]).is_none());
    }
}

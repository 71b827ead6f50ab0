//! The metrics of a run: one line of JSON for each event, in `metrics.jsonl`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::write_whole;

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Event {
    Start(Start),
    Step(Step),
    Epoch(Epoch),
    /// Ranks were lost, and the survivors continue.
    Shrink {
        step: u64,
        ranks: usize,
        reason: String,
    },
    /// Processes joined at the start of an epoch.
    Grow {
        step: u64,
        ranks: usize,
    },
}

/// The start of a run, and each resumption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) arch: String,
    pub(crate) engine: String,
    pub(crate) transport: String,
    pub(crate) ranks: usize,
    pub(crate) hosts: usize,
    pub(crate) global_batch: usize,
    pub(crate) images: usize,
    pub(crate) image_size: usize,
    pub(crate) seed: u64,
    /// Steps before this start.
    pub(crate) step: u64,
}

/// The steps since the last report, up to the named one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) step: u64,
    /// Epochs that have passed, as a fraction.
    pub(crate) epoch: f64,
    /// Mean over the images of all ranks.
    pub(crate) loss: f64,
    /// From 0 to 1.
    pub(crate) accuracy: f64,
    pub(crate) lr: f64,
    pub(crate) images_per_s: f64,
    /// The share of time, from 0 to 1, that a rank waits for communication, on average.
    pub(crate) waiting: f64,
    /// The share of communication that was hidden behind the computation, from 0 to 1.
    pub(crate) overlap: f64,
    /// The share of time that a rank waits for images, on average.
    pub(crate) loading: f64,
    /// The rank that computed longest, and how much longer than the mean: 0.1 is 10 %.
    pub(crate) slowest: usize,
    pub(crate) slower: f64,
}

/// An epoch, and the test after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    /// The number of epochs that have passed.
    pub(crate) epoch: usize,
    pub(crate) step: u64,
    /// Seconds of the epoch without the test. After a resumption, of the part since then.
    pub(crate) seconds: f64,
    /// Images per second of all ranks together.
    pub(crate) images_per_s: f64,
    pub(crate) train_loss: f64,
    pub(crate) train_accuracy: f64,
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
    pub(crate) waiting: f64,
    /// Cores that rank 0 kept busy, on average; `None` (null) where the system does not tell.
    pub(crate) cores: Option<f64>,
}

impl Event {
    /// Steps before the loss.
    fn step(&self) -> u64 {
        match self {
            Event::Start(start) => start.step,
            Event::Step(step) => step.step,
            Event::Epoch(epoch) => epoch.step,
            Event::Shrink { step, .. } | Event::Grow { step, .. } => *step,
        }
    }
}

/// Returns the path of a run's metrics.
pub(crate) fn place(run: &Path) -> PathBuf {
    run.join("metrics.jsonl")
}

/// Reads a run's metrics. Skips an incomplete last line.
pub(crate) fn read(run: &Path) -> Result<Vec<Event>, String> {
    let path = place(run);
    let text = fs::read_to_string(&path).map_err(|error| format!("the metrics {} cannot be read: {error}", path.display()))?;
    let lines: Vec<&str> = text.lines().collect();
    let parse = |(number, line): (usize, &&str)| match serde_json::from_str(line) {
        Ok(event) => Some(Ok(event)),
        Err(_) if number + 1 == lines.len() && !text.ends_with('\n') => None,
        Err(error) => Some(Err(format!("{}, line {}: {error}", path.display(), number + 1))),
    };
    lines.iter().enumerate().filter_map(parse).collect()
}

/// Writes metrics, line by line.
pub(crate) struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Writer {
    /// Opens the file after a step, when `epochs` epochs had ended. Removes later lines, because
    /// the run repeats them.
    pub(crate) fn open(run: &Path, step: u64, epochs: usize) -> Result<Writer, String> {
        let path = place(run);
        let kept = if path.exists() { read(run)? } else { Vec::new() };
        let is_past = |event: &&Event| event.step() <= step && !matches!(event, Event::Epoch(epoch) if epoch.epoch > epochs);
        let kept = kept.iter().filter(is_past).map(line).collect::<Result<Vec<_>, _>>()?;
        write_whole(&path, &[kept.concat().as_bytes()])?;
        let file =
            File::options().append(true).open(&path).map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        Ok(Writer { path, file: BufWriter::new(file) })
    }

    pub(crate) fn write(&mut self, event: &Event) -> Result<(), String> {
        let line = line(event)?;
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush());
        written.map_err(|error| format!("{} cannot be written: {error}", self.path.display()))
    }
}

fn line(event: &Event) -> Result<String, String> {
    // JSON would turn numbers that are not finite into null, which cannot be read. The caller puts
    // none into an event.
    serde_json::to_string(event).map(|line| line + "\n").map_err(|error| format!("metrics cannot be written: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_go_on_after_the_checkpoint() {
        let run = std::env::temp_dir().join(format!("kolo-resnet-metrics-{}", std::process::id()));
        fs::create_dir_all(&run).unwrap();
        let shrink = |step| Event::Shrink { step, ranks: 1, reason: "a test".to_owned() };
        let mut writer = Writer::open(&run, 0, 0).unwrap();
        (1..=4).for_each(|step| writer.write(&shrink(step)).unwrap());
        drop(writer);
        // As if the run had been killed while it wrote.
        let mut text = fs::read_to_string(place(&run)).unwrap();
        text.push_str("{\"kind\":\"shr");
        fs::write(place(&run), &text).unwrap();
        assert_eq!(read(&run).unwrap().len(), 4);
        let mut writer = Writer::open(&run, 2, 0).unwrap();
        let epoch = Epoch {
            epoch: 1,
            step: 2,
            seconds: 1.0,
            images_per_s: 1.0,
            train_loss: 1.0,
            train_accuracy: 0.5,
            test_loss: 1.0,
            test_accuracy: 0.5,
            waiting: 0.0,
            cores: None,
        };
        writer.write(&Event::Epoch(epoch.clone())).unwrap();
        drop(Writer::open(&run, 2, 1).unwrap());
        assert_eq!(read(&run).unwrap(), [shrink(1), shrink(2), Event::Epoch(epoch)]);
        // The run repeats the end of that epoch.
        let mut writer = Writer::open(&run, 2, 0).unwrap();
        writer.write(&shrink(3)).unwrap();
        assert_eq!(read(&run).unwrap(), [shrink(1), shrink(2), shrink(3)]);
        fs::write(place(&run), text + "\n").unwrap();
        assert!(read(&run).unwrap_err().contains("line 5"));
        fs::remove_dir_all(run).unwrap();
    }
}

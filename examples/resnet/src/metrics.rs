//! What a run writes about itself: a line of JSON for each thing that happened, in `metrics.jsonl`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::write_whole;

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Event {
    Start(Start),
    Step(Step),
    Epoch(Epoch),
    /// Ranks were lost, and the others went on.
    Shrink {
        step: u64,
        ranks: usize,
        reason: String,
    },
}

/// The beginning of a run, and each time it is resumed.
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
    /// Steps that were made before.
    pub(crate) step: u64,
}

/// Some steps, up to the one that is named.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) step: u64,
    /// Epochs that have passed, in parts.
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
    /// The rank that computed longest, and how much longer than the mean: 0.1 is a tenth.
    pub(crate) slowest: usize,
    pub(crate) slower: f64,
}

/// An epoch, and the test after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Epoch {
    /// The number of epochs that have passed.
    pub(crate) epoch: usize,
    pub(crate) step: u64,
    /// Without the test. Of the part since the run was resumed, if it was. If ranks were lost meanwhile, with and without them.
    pub(crate) seconds: f64,
    /// Of all ranks together.
    pub(crate) images_per_s: f64,
    pub(crate) train_loss: f64,
    pub(crate) train_accuracy: f64,
    pub(crate) test_loss: f64,
    pub(crate) test_accuracy: f64,
    pub(crate) waiting: f64,
    /// Cores that rank 0 kept busy, on average; `None`, which is null, where the system does not tell.
    pub(crate) cores: Option<f64>,
}

impl Event {
    /// Steps that had been made.
    fn step(&self) -> u64 {
        match self {
            Event::Start(start) => start.step,
            Event::Step(step) => step.step,
            Event::Epoch(epoch) => epoch.step,
            Event::Shrink { step, .. } => *step,
        }
    }
}

/// The file of a run's metrics.
pub(crate) fn place(run: &Path) -> PathBuf {
    run.join("metrics.jsonl")
}

/// Reads a run's metrics. A last line that was not written to its end is left out.
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
    /// Goes on after what was written up to a step, when so many epochs had ended; what came later is made again, and forgotten here.
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
    // What is not finite would be null in JSON, and could not be read: whoever makes an event sees to it that there is none.
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
        // As if it had been killed while it wrote.
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
        // The end of that epoch comes again.
        let mut writer = Writer::open(&run, 2, 0).unwrap();
        writer.write(&shrink(3)).unwrap();
        assert_eq!(read(&run).unwrap(), [shrink(1), shrink(2), shrink(3)]);
        fs::write(place(&run), text + "\n").unwrap();
        assert!(read(&run).unwrap_err().contains("line 5"));
        fs::remove_dir_all(run).unwrap();
    }
}

//! The command line: that of PyTorch's ImageNet example, and more.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::data::transform::Augmentation;
use crate::engine::Kind;
use crate::model::architecture::{Architecture, Shape};
use crate::optimizer::{Decay, Scale};

/// The value of `--dist-url` that stands for the launcher's environment.
pub(crate) const ENVIRONMENT: &str = "env://";

/// Trains a ResNet data-parallel, on the ranks of this machine (--nproc) or of any launcher.
#[derive(Parser)]
#[command(name = "resnet", version, args_conflicts_with_subcommands = true, args_override_self = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) train: TrainArgs,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Compare runs: the time of an epoch by number of ranks, and the scaling efficiency
    Report(ReportArgs),
}

/// Arguments of `resnet report`.
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Folders that runs have written
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Draw the losses, accuracies, times, efficiency and utilisation of the runs
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// Arguments of training.
#[derive(Args, Clone)]
pub(crate) struct TrainArgs {
    /// Images: a folder with train/ and val/ (or test/), each with a folder of JPEG or PNG files
    /// for each class; or CIFAR-10's binary files
    #[arg(value_name = "DIR", conflicts_with_all = ["dummy", "shapes"])]
    pub(crate) dir: Option<PathBuf>,
    /// Noise instead of images, to measure the speed
    #[arg(long)]
    pub(crate) dummy: bool,
    /// A small generated set of images of shapes
    #[arg(long, conflicts_with = "dummy")]
    pub(crate) shapes: bool,
    /// Images to train on with --dummy or --shapes; there are a quarter as many to test on
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "dir")]
    pub(crate) images: Option<usize>,

    /// Which ResNet
    #[arg(short, long, value_enum, default_value = "resnet18")]
    pub(crate) arch: Architecture,
    /// Weights to start with, in safetensors with torchvision's names
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) weights: Option<PathBuf>,
    /// Width and height of the net's input [default: 32 for resnet20, 32 and 56, else 224]
    #[arg(long, value_name = "N", value_parser = at_least_eight)]
    pub(crate) image_size: Option<usize>,
    /// How to vary images to train on [default: moved for 32 pixels, else resized]
    #[arg(long, value_enum)]
    pub(crate) augment: Option<Augmentation>,

    /// Epochs to train
    #[arg(long, default_value_t = 90, value_name = "N")]
    pub(crate) epochs: usize,
    /// The first epoch, for a restart by hand
    #[arg(long, default_value_t = 0, value_name = "N", conflicts_with = "resume")]
    pub(crate) start_epoch: usize,
    /// Images in a step of all ranks of a node together
    #[arg(short, long, default_value_t = 256, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch_size: usize,
    /// Images in a step of all ranks of all nodes together, instead of -b
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "batch_size")]
    pub(crate) global_batch: Option<usize>,
    /// Learning rate
    #[arg(long, visible_alias = "learning-rate", default_value_t = 0.1, value_name = "RATE", value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// How the learning rate grows with the batch
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) lr_scale: Scale,
    /// Epochs in which the learning rate grows to its scaled value [default: 5 with --lr-scale,
    /// else 0]
    #[arg(long, value_name = "EPOCHS", value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) warmup: Option<f64>,
    /// How the learning rate falls
    #[arg(long, value_enum, default_value = "step")]
    pub(crate) lr_decay: Decay,
    /// Epochs until it falls, with --lr-decay step
    #[arg(long, default_value_t = 30, value_name = "EPOCHS", value_parser = at_least_one)]
    pub(crate) lr_step: usize,
    /// Momentum
    #[arg(long, default_value_t = 0.9, value_name = "M", value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) momentum: f64,
    /// Weight decay
    #[arg(long, visible_alias = "weight-decay", default_value_t = 1e-4, value_name = "W", value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) wd: f64,
    /// The seed of all random numbers [default: a new one each time]
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// The engine that computes [feature tch: also torch and torch-cuda]
    #[arg(long, value_enum, default_value = "flex")]
    pub(crate) engine: Kind,
    /// Threads of a node that read images, divided among its ranks
    #[arg(short = 'j', long, default_value_t = 4, value_name = "N")]
    pub(crate) workers: usize,
    /// Threads of each rank that compute [default: the node's cores divided among its ranks]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<usize>,

    /// Start this many ranks on this machine
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) nproc: Option<usize>,
    /// Start a rank for each core of this machine
    #[arg(long, conflicts_with = "nproc")]
    pub(crate) multiprocessing_distributed: bool,
    /// The number of ranks; with --nproc, of nodes
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) world_size: Option<usize>,
    /// This rank; with --nproc, this node
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<usize>,
    /// Where ranks find each other: tcp://host:port, file:///path, or env:// for the launcher's
    /// environment
    #[arg(long, value_name = "URL", default_value = ENVIRONMENT)]
    pub(crate) dist_url: String,
    /// When a rank dies, the other ranks continue without it; at each epoch they admit processes
    /// that were started with KOLO_JOIN=1
    #[arg(long)]
    pub(crate) elastic: bool,
    /// With --nproc and --elastic: replace ranks that die, at most N in all
    #[arg(long, value_name = "N", default_value_t = 0, requires = "elastic")]
    pub(crate) max_restarts: usize,

    /// Continue from a checkpoint: the file, or the folder of the run
    #[arg(long, value_name = "CHECKPOINT")]
    pub(crate) resume: Option<PathBuf>,
    /// Steps between checkpoints within an epoch; each epoch also ends with one
    #[arg(long, value_name = "STEPS", value_parser = at_least_one)]
    pub(crate) checkpoint_every: Option<usize>,
    /// The folder for checkpoints and metrics, which must have none [default: a new one below
    /// runs/]
    #[arg(short, long, value_name = "RUN")]
    pub(crate) output: Option<PathBuf>,
    /// Test only
    #[arg(short, long, conflicts_with_all = ["plot", "checkpoint_every", "output"])]
    pub(crate) evaluate: bool,
    /// Steps between reports
    #[arg(short, long, default_value_t = 10, value_name = "STEPS", value_parser = at_least_one)]
    pub(crate) print_freq: usize,
    /// Draw the curves of the run at its end
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// How gradients are compressed before they are sent
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) compress: Compression,
    /// MiB of gradients that are reduced together; over slow links less may be better
    #[arg(long, default_value_t = 25.0, value_name = "MIB", value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) bucket_mb: f64,
    /// Start reductions after the backward pass, to measure the gain of overlap
    #[arg(long)]
    pub(crate) no_overlap: bool,
    /// Do not reduce gradients: each rank trains alone, to measure the cost of communication
    #[arg(long, hide = true)]
    pub(crate) no_communication: bool,
    /// Leave batch normalisation out. The result then does not depend on how images are divided
    /// among ranks, which tests use.
    #[arg(long, hide = true)]
    pub(crate) no_norm: bool,
}

/// How gradients are compressed before they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compression {
    /// Not at all
    None,
    /// Half the bits
    F16,
    /// Half the bits, with the range of f32
    Bf16,
    /// In the messages of KOLO_WIRE_DTYPE, whose rounding is fed back
    ErrorFeedback,
    /// PowerSGD with matrices of rank 1. Checkpoints leave out its error feedback
    PowerSgd1,
    /// PowerSGD with matrices of rank 2
    PowerSgd2,
    /// PowerSGD with matrices of rank 4
    PowerSgd4,
}

fn at_least(text: &str, least: usize) -> Result<usize, String> {
    let number: usize = text.parse().map_err(|_| format!("expected a whole number, at least {least}"))?;
    if number < least { Err(format!("expected at least {least}")) } else { Ok(number) }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    at_least(text, 1)
}

fn at_least_eight(text: &str) -> Result<usize, String> {
    at_least(text, 8)
}

fn not_negative(text: &str) -> Result<f64, String> {
    let number: Result<f64, _> = text.parse();
    number.ok().filter(|number| number.is_finite() && *number >= 0.0).ok_or_else(|| "expected a number, at least 0".to_owned())
}

impl TrainArgs {
    /// The layers of the net.
    pub(crate) fn shape(&self) -> Shape {
        Shape { normalises: !self.no_norm, ..self.arch.shape() }
    }

    pub(crate) fn size(&self) -> usize {
        self.image_size.unwrap_or_else(|| self.arch.image_size())
    }

    pub(crate) fn augmentation(&self) -> Augmentation {
        self.augment.unwrap_or(if self.size() <= 32 { Augmentation::Moved } else { Augmentation::Resized })
    }

    pub(crate) fn warmup_epochs(&self) -> f64 {
        self.warmup.unwrap_or(if self.lr_scale == Scale::None { 0.0 } else { 5.0 })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<TrainArgs, String> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.train).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn pytorchs_command_line_is_understood() {
        let args = parse(
            "resnet imagenet -a resnet50 --epochs 3 --start-epoch 1 -b 64 --lr 0.2 --momentum 0.8 --wd 1e-5 -j 2 -p 5 -e --seed 1 \
             --world-size 2 --rank 1 --dist-url tcp://127.0.0.1:29500 --multiprocessing-distributed",
        )
        .unwrap();
        assert_eq!((args.arch, args.batch_size, args.lr, args.wd), (Architecture::ResNet50, 64, 0.2, 1e-5));
        assert!(args.evaluate && args.multiprocessing_distributed && args.size() == 224);
        assert!(parse("resnet --dummy --learning-rate 0.1 --weight-decay 0").is_ok());
    }

    #[test]
    fn mistakes_are_named() {
        for (line, hint) in [
            ("resnet d --dummy", "cannot be used with"),
            ("resnet d -a vgg16", "resnet18"),
            ("resnet d -b 0", "at least 1"),
            ("resnet d --lr -1", "at least 0"),
            ("resnet d --lr fast", "a number"),
            ("resnet d --lr-scale cubic", "linear"),
            ("resnet d -b 8 --global-batch 8", "cannot be used with"),
            ("resnet d --images 8", "cannot be used with"),
            ("resnet d --weights w --resume r", "cannot be used with"),
            ("resnet d -e --plot p.svg", "cannot be used with"),
            ("resnet d -e --checkpoint-every 5", "cannot be used with"),
            ("resnet d -e --output o", "cannot be used with"),
            ("resnet d --nproc 0", "at least 1"),
            ("resnet d --image-size 4", "at least 8"),
            ("resnet report", "<RUN>"),
        ] {
            let error = parse(line).err().unwrap_or_else(|| panic!("{line} was accepted"));
            assert!(error.contains(hint), "{line}: {error}");
        }
    }
}

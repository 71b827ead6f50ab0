//! `resnet`: trains ResNets data-parallel on kolo, with nothing but Rust installed.
//!
//! | what | where |
//! |---|---|
//! | the tensor library, behind one small trait | `engine` |
//! | layers, forward, and backward by segments | `model`, `loss`, `optimizer`, `rule` |
//! | images, and their division among ranks | `data` |
//! | a rank's training: steps, tests, checkpoints | `train`, `checkpoint` |
//! | ranks on this machine | `launch` |
//! | output of a run | `progress`, `metrics`, `plot`, `report` |

mod arguments;
#[allow(dead_code, reason = "the program kolo uses more of it")]
#[path = "../../../cli/src/chart.rs"]
mod chart;
mod checkpoint;
mod data;
mod engine;
mod launch;
mod loss;
mod metrics;
mod model;
mod optimizer;
mod plot;
mod progress;
mod random;
mod report;
mod rule;
mod runs;
mod train;

use std::process::ExitCode;

use arguments::{Cli, Command, TrainArgs};
use clap::Parser;
use clap::error::{ContextKind, ContextValue};

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| suggest(error).exit());
    log();
    let result = match &cli.command {
        Some(Command::Report(args)) => report::report(args).map(|()| ExitCode::SUCCESS),
        None => start(&cli.train),
    };
    result.unwrap_or_else(|problem| {
        progress::complain(&problem);
        ExitCode::FAILURE
    })
}

/// Suggests the value with the most letters right. clap's measure counts equal beginnings more: it
/// took resnet152 for resnet21.
fn suggest(mut error: clap::Error) -> clap::Error {
    let strings = |value: Option<&ContextValue>| match value {
        Some(ContextValue::Strings(strings)) => strings.clone(),
        Some(ContextValue::String(string)) => vec![string.clone()],
        _ => Vec::new(),
    };
    let (given, known) = (strings(error.get(ContextKind::InvalidValue)), strings(error.get(ContextKind::ValidValue)));
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    if let Some(nearest) = given.first().and_then(|given| kolo::settings::nearest_of(given, &known)) {
        error.insert(ContextKind::SuggestedValue, ContextValue::String(nearest.to_owned()));
    }
    error
}

/// Starts ranks, or runs as one.
fn start(args: &TrainArgs) -> Result<ExitCode, String> {
    if args.dir.is_none() && !args.shapes && !args.dummy {
        return Err("no images: name a folder DIR with train/ and val/, or take --shapes, which are generated, or --dummy, which is noise \
                    (--help tells more)"
            .to_owned());
    }
    match launch::ranks(args) {
        Some(count) => launch::launch(args, count),
        None => train::run(args).map(|()| ExitCode::SUCCESS),
    }
}

/// Returns the number of cores of this machine.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Writes the library's log to standard error: warnings, or the level of `KOLO_LOG`.
fn log() {
    let level = std::env::var("KOLO_LOG").ok().and_then(|level| level.parse().ok()).unwrap_or(tracing::Level::WARN);
    tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_writer(std::io::stderr).with_target(false).init();
}

//! The `kolo` program: starts ranks, measures collectives, explains the choice of algorithm, finds out what went wrong.

mod bench;
mod chart;
#[cfg(unix)]
mod compare;
mod doctor;
mod files;
mod plan;
mod run;
#[cfg(unix)]
mod soak;
mod trace;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Collective communication for processes: all-reduce and the rest, over TCP and shared memory.
#[derive(Parser)]
#[command(name = "kolo", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start ranks of a program on this machine
    Run(run::Args),
    /// Measure a collective among the ranks of this job
    Bench(bench::Args),
    /// Explain which algorithm a collective would use, and what it would cost
    Plan(plan::Args),
    /// Run random jobs with random faults, and check all that comes of it
    #[cfg(unix)]
    Soak(soak::Args),
    /// Find out whether kolo can work on this machine, and what to do if not
    Doctor(doctor::Args),
    /// Find where ranks first disagreed and who was late, in the files that they left
    Trace(trace::Args),
    /// Compare with other libraries and with what the machine can do, in interleaved rounds
    #[cfg(unix)]
    Compare(compare::Args),
    /// Be a rank in a comparison
    #[cfg(unix)]
    #[command(hide = true)]
    Compete(compare::RankArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log();
    let result = match cli.command {
        Command::Run(args) => return run::run(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Doctor(args) => return doctor::doctor(&args),
        #[cfg(unix)]
        Command::Soak(args) => return soak::soak(&args),
        Command::Trace(args) => trace::trace(&args),
        #[cfg(unix)]
        Command::Compare(args) => compare::compare(&args),
        #[cfg(unix)]
        Command::Compete(args) => compare::compete(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("kolo: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// What the library has to tell goes to standard error: warnings, or as much as `KOLO_LOG` asks for.
fn log() {
    let level = std::env::var("KOLO_LOG").ok().and_then(|level| level.parse().ok()).unwrap_or(tracing::Level::WARN);
    let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let ansi = wants_colour && std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt().with_max_level(level).with_ansi(ansi).with_writer(std::io::stderr).with_target(false).init();
}

/// Writes a line to standard output. Ends the program quietly if nobody reads it any more, as `head` does not.
fn say(line: &str) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}") {
        if error.kind() != std::io::ErrorKind::BrokenPipe {
            complain(&format!("kolo: standard output cannot be written: {error}"));
        }
        std::process::exit(1);
    }
}

/// Writes a line to standard error, in one call: other ranks may write there, too.
fn complain(line: &str) {
    use std::io::Write;
    // Nobody is left to be told.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

//! The `kolo` program: starts ranks, measures collectives, explains the choice of algorithm, and
//! finds the cause of failures.
//!
//! A library, which cargo compiles beside the last half of the crate `kolo`; a program has to wait for
//! the whole of it.

mod bench;
#[allow(dead_code, reason = "the trainer in examples/resnet uses more of it")]
mod chart;
mod compare;
mod completions;
mod doctor;
mod files;
mod foreign;
mod interrupt;
mod names;
mod plan;
mod progress;
mod random;
mod run;
mod soak;
mod table;
mod top;
mod trace;
mod units;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use run::process::{self, Signal};
use table::{Complaints, columns_of_terminal};

/// Collective communication for processes: all-reduce and the rest, over TCP and shared memory.
#[derive(Parser)]
#[command(name = "kolo", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start ranks of a program, on this machine or on several hosts over ssh
    Run(run::Args),
    /// Measure a collective among the ranks of this job
    Bench(bench::Args),
    /// Explain which algorithm a collective would use and what it would cost
    Plan(plan::Args),
    /// Run random jobs with random faults and check every result
    Soak(soak::Args),
    /// Check whether kolo works on this machine, and say what to do if it does not
    Doctor(doctor::Args),
    /// Find the first call mismatch and the late ranks in the files of the flight recorder
    Trace(trace::Args),
    /// Show what the ranks of a running job do, and which rank the others wait for
    Top(top::Args),
    /// Compare kolo with other libraries and with the limits of the machine, in interleaved rounds
    Compare(compare::Args),
    /// Print what a shell needs to complete the command line of this program
    Completions(completions::Args),
    /// Write the man pages, one for each command
    #[command(hide = true)]
    Man(completions::ManArgs),
    /// Run as the process that ends the ranks of a launcher that was killed
    #[command(hide = true)]
    Guard(run::GuardArgs),
    /// Run as the process that starts the ranks of a host
    #[command(hide = true)]
    Agent,
    /// Run as a rank of a comparison
    #[command(hide = true)]
    Compete(compare::RankArgs),
}

/// Parses a command line. An error says what can be given instead.
fn parse(words: impl IntoIterator<Item: Into<OsString> + Clone>) -> clap::error::Result<Cli> {
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    // clap would take 100 columns where there is no terminal, or one without a size.
    let mut command = Cli::command().term_width(columns_of_terminal());
    let matches = command.try_get_matches_from_mut(&words);
    matches.and_then(|matches| Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))).map_err(|error| {
        let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        explain(error, &words)
    })
}

/// Adds to an error what its command line was probably meant to be.
fn explain(mut error: clap::Error, words: &[String]) -> clap::Error {
    let strings = |value: Option<&ContextValue>| match value {
        Some(ContextValue::Strings(strings)) => strings.clone(),
        Some(ContextValue::String(string)) => vec![string.clone()],
        _ => Vec::new(),
    };
    // Commands that the help hides are of no use by hand.
    let mut commands = strings(error.get(ContextKind::SuggestedSubcommand));
    commands.retain(|name| !Cli::command().find_subcommand(name).is_some_and(clap::Command::is_hide_set));
    if !commands.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(commands));
    } else if error.get(ContextKind::SuggestedSubcommand).is_some() {
        error.remove(ContextKind::SuggestedSubcommand);
    }
    let command = words.get(1).map_or("", String::as_str);
    let (given, similar) = (strings(error.get(ContextKind::InvalidArg)), strings(error.get(ContextKind::SuggestedArg)));
    // Other launchers have long options with one dash, of which clap reads the first letter: `-h` of
    // `-hostfile` is the help.
    let letter = if error.kind() == ErrorKind::DisplayHelp { Some("-h") } else { given.first().map(String::as_str) };
    let is_whole = |word: &&String| letter.is_some_and(|letter| letter.len() == 2 && word.len() > 2 && word.starts_with(letter));
    let whole =
        words.iter().take_while(|word| *word != "--").find(is_whole).filter(|word| foreign::advice(command, word).is_some());
    let option = whole.or(given.first());
    if let Some(advice) = option.and_then(|option| foreign::advice(command, option)) {
        let mut unknown = clap::Error::new(ErrorKind::UnknownArgument).with_cmd(&Cli::command());
        unknown.insert(ContextKind::InvalidArg, ContextValue::String(option.cloned().unwrap_or_default()));
        unknown.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
        return unknown;
    }
    // clap finds --address similar to --max-restarts, and has it in the usage.
    let is_far = |(given, similar): (&String, &String)| {
        kolo::settings::nearest_of(given.trim_matches('-'), &[similar.trim_matches('-')]).is_none()
    };
    if given.first().zip(similar.first()).is_some_and(is_far) {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
    }
    // Says which option needs the missing one: each of those under the heading of that.
    if let (ErrorKind::MissingRequiredArgument, [missing]) = (error.kind(), &given[..]) {
        let missing = missing.split(' ').next().unwrap_or_default();
        let mut all = Cli::command();
        all.build();
        let options = all.find_subcommand(command).into_iter().flat_map(clap::Command::get_arguments);
        let under = options.filter(|option| option.get_help_heading() == Some(&*format!("With {missing}")));
        let names: Vec<String> = under.filter_map(|option| Some(format!("--{}", option.get_long()?))).collect();
        let is_name = |word: &&String| names.iter().any(|name| word.split('=').next() == Some(name));
        if let Some(option) = words.iter().find(is_name) {
            let option = option.split('=').next().unwrap_or_default();
            let problem = format!("{option} needs {missing}");
            return all
                .find_subcommand_mut(command)
                .map_or(error, |command| command.error(ErrorKind::MissingRequiredArgument, problem));
        }
    }
    // clap's measure counts equal beginnings more than equal letters.
    let (given, known) = (strings(error.get(ContextKind::InvalidValue)), strings(error.get(ContextKind::ValidValue)));
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    if let Some(nearest) = given.first().and_then(|given| kolo::settings::nearest_of(given, &known)) {
        error.insert(ContextKind::SuggestedValue, ContextValue::String(nearest.to_owned()));
    }
    error
}

/// Why a command fails.
enum Failure {
    /// Its arguments contradict each other, or are out of range.
    Usage(String),
    Other(String),
}

impl From<String> for Failure {
    fn from(problem: String) -> Failure {
        Failure::Other(problem)
    }
}

impl Failure {
    /// Reports it. Returns the exit status.
    fn report(self) -> ExitCode {
        let (code, problem) = match self {
            Failure::Usage(problem) => (ExitCode::from(2), problem),
            Failure::Other(problem) => (ExitCode::FAILURE, problem),
        };
        complain(&format!("kolo: {problem}"));
        code
    }
}

/// Checks the arguments of a command of this program that `ranks` ranks are to run, so that one
/// message says what is wrong. On this machine, this includes the files. Returns the exit status if
/// there is nothing to run.
fn check_command(words: &[OsString], ranks: usize, is_here: bool) -> Result<(), ExitCode> {
    let this = OsString::from("kolo");
    let cli = parse([&this].into_iter().chain(words)).map_err(|error| show(&error))?;
    let Command::Bench(args) = &cli.command else { return Ok(()) };
    let files = || if is_here { args.check_files() } else { Ok(()) };
    args.check(ranks).map_err(Failure::Usage).and_then(|()| files()).map_err(Failure::report)
}

/// Runs the program with the arguments of this process. Returns its exit status.
pub fn main() -> ExitCode {
    let code = match parse(std::env::args_os()) {
        Ok(cli) => command(cli),
        Err(error) => show(&error),
    };
    // The command has ended in order, and has removed its files.
    match OUTPUT_PROBLEM.get() {
        Some(problem) => {
            complain(&format!("kolo: {problem}"));
            ExitCode::FAILURE
        }
        None => code,
    }
}

/// Prints the help, or what is wrong with a command line. Returns the exit status.
fn show(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let is_wide = |line: &str| line.chars().count() > columns_of_terminal();
    // clap fits the help into the terminal, but not a list of values.
    if error.use_stderr() && std::io::stderr().is_terminal() && text.lines().any(is_wide) {
        complain(text.trim_end());
    } else if let (Err(problem), false) = (error.print(), error.use_stderr()) {
        note(problem);
    }
    ExitCode::from(error.exit_code() as u8)
}

fn command(cli: Cli) -> ExitCode {
    if let Err(error) = log() {
        complain(&format!("kolo: {error}"));
        return if matches!(cli.command, Command::Run(_)) { ExitCode::from(run::LAUNCHER_FAILED) } else { ExitCode::FAILURE };
    }
    // Ranks warn by themselves, `kolo doctor` lists the variables, and a shell asks for completions when it
    // starts.
    if !matches!(
        cli.command,
        Command::Bench(_)
            | Command::Doctor(_)
            | Command::Completions(_)
            | Command::Guard(_)
            | Command::Agent
            | Command::Compete(_)
    ) {
        warn_of_unknown_variables();
    }
    let result = match cli.command {
        Command::Run(args) => return run::run(&args),
        Command::Guard(args) => {
            run::guard(&args);
            return ExitCode::SUCCESS;
        }
        Command::Agent => return run::agent(),
        Command::Bench(args) => return ended(bench::bench(&args)),
        Command::Plan(args) => plan::plan(&args),
        Command::Doctor(args) => return doctor::doctor(&args),
        Command::Soak(args) => return soak::soak(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Top(args) => top::top(&args).map_err(Failure::Other),
        Command::Compare(args) => return ended(compare::compare(&args)),
        Command::Completions(args) => {
            completions::print(&args);
            Ok(())
        }
        Command::Man(args) => completions::write_pages(&args).map_err(Failure::Other),
        Command::Compete(args) => compare::compete(&args).map_err(Failure::Other),
    };
    ended(result.map(|()| None))
}

/// Warns of variables that may be misspelt, and has the processes that this one starts not warn of them
/// again.
fn warn_of_unknown_variables() {
    use kolo::settings::{TOLD, UNKNOWN_VARIABLES, describe_unknown, unknown_variables};
    let unknown = unknown_variables();
    if unknown.is_empty() {
        return;
    }
    tracing::warn!("{}; {UNKNOWN_VARIABLES}", describe_unknown(&unknown));
    let before = std::env::var(TOLD).into_iter();
    // SAFETY: the program has one thread so far, so no other one reads the environment.
    unsafe { std::env::set_var(TOLD, before.chain(unknown).collect::<Vec<_>>().join(",")) };
}

/// Returns the exit status of a command that has ended, by a signal or by itself.
fn ended(result: Result<Option<Signal>, Failure>) -> ExitCode {
    match result {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(signal)) => {
            complain(&format!("kolo: stopped by {signal}"));
            process::exit(signal.exit_code())
        }
        Err(failure) => failure.report(),
    }
}

/// Writes the library's log to standard error: warnings, or the level of `KOLO_LOG`.
fn log() -> kolo::Result<()> {
    let level = kolo::settings::variable("KOLO_LOG", kolo::settings::LOG_LEVEL, kolo::settings::log_level)?;
    let level = level.unwrap_or(tracing::level_filters::LevelFilter::WARN);
    let ansi = std::io::stderr().is_terminal() && wants_colour();
    tracing_subscriber::fmt().with_max_level(level).with_ansi(ansi).with_writer(|| Complaints).with_target(false).init();
    Ok(())
}

/// Returns whether the user wants colours on a terminal.
fn wants_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) && has_controls()
}

/// Returns whether a terminal understands more than lines of text.
fn has_controls() -> bool {
    std::env::var_os("TERM").is_none_or(|name| name != "dumb")
}

/// Whether a file of figures is standard output (`--json -`). Then lines for people go to standard
/// error.
static HAS_FIGURES: AtomicBool = AtomicBool::new(false);

/// Whether the reader of standard output has gone, as with `head`.
static IS_UNREAD: AtomicBool = AtomicBool::new(false);

/// Why standard output cannot be written, although it has a reader: a disk may be full.
static OUTPUT_PROBLEM: OnceLock<String> = OnceLock::new();

/// Writes a line to standard output, as long as that is of use.
fn say(line: &str) {
    if !is_read() {
        return;
    }
    let line = format!("{line}\n");
    if HAS_FIGURES.load(Relaxed) {
        return complain(line.trim_end());
    }
    print(line.as_bytes());
}

/// Writes to standard output. If that fails, the command goes on to its end, and then the program
/// reports why.
fn print(bytes: &[u8]) {
    let mut out = std::io::stdout().lock();
    if let Err(problem) = out.write_all(bytes).and_then(|()| out.flush()) {
        note(problem);
    }
}

/// Keeps the reason why standard output cannot be written.
fn note(problem: std::io::Error) {
    match problem.kind() {
        std::io::ErrorKind::BrokenPipe => IS_UNREAD.store(true, Relaxed),
        _ => _ = OUTPUT_PROBLEM.set(format!("standard output cannot be written: {problem}")),
    }
}

/// Returns whether standard output still has a reader and can be written: a command without an end ends
/// if not.
fn is_read() -> bool {
    !IS_UNREAD.load(Relaxed) && OUTPUT_PROBLEM.get().is_none()
}

/// Writes a line to standard error, in one call, because other ranks may write there too.
fn complain(line: &str) {
    // There is nowhere else to report it.
    let _ = Complaints.write_all(format!("{line}\n").as_bytes());
}

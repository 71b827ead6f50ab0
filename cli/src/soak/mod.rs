//! `kolo soak`: runs random jobs with random faults for a given time. It checks every result and
//! what the ranks report of every fault. A seed determines the rounds, but not how they interleave.

mod check;
mod holder;
mod judge;
mod rank;
mod script;
mod stranger;
mod system;

use std::io::{BufRead, BufReader};
use std::path::{Path as FilePath, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use crossbeam_channel::{Receiver, Sender, select, unbounded};
use kolo::TcpStoreServer;

use crate::random::{hexadecimal, random};
use crate::run::process::{self, make_temporary, prepare, temporary};
use crate::table::say_prose;
use crate::units::{count, duration, show_ranks};
use crate::{complain, is_read, say};
use judge::{Outcome, judge};
use rank::{Report, STOPS};
use script::{Fault, Ingredient, Rendezvous, Round};
use stranger::Stranger;

/// Arguments of `kolo soak`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// How long to start new rounds
    #[arg(long, default_value_t = 1.0, value_parser = minutes)]
    minutes: f64,
    /// The seed of all rounds; by default a random one, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// How many ranks
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(2..=64), default_value = "4")]
    ranks: u32,
    /// Play only rounds with one of these faults
    #[arg(long, value_delimiter = ',')]
    fault: Vec<Fault>,
    /// Play only rounds with all of these ingredients
    #[arg(long, value_delimiter = ',')]
    with: Vec<Ingredient>,
    /// Replay this round only
    #[arg(long, conflicts_with_all = ["fault", "with"])]
    round: Option<u64>,
    /// How long one round may take before it counts as a hang
    #[arg(long, value_parser = duration, default_value = "5m")]
    patience: Duration,
    /// Run as this rank of the round
    #[arg(long, hide = true, requires = "round", requires = "seed")]
    rank: Option<usize>,
}

fn minutes(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|minutes: &f64| (0.0..1e6).contains(minutes)).ok_or_else(|| "a number of minutes".to_owned())
}

/// Why a soak ends early.
enum End {
    /// A round went wrong.
    Failed(String),
    /// A signal stopped the soak.
    Stopped(process::Signal),
}

impl From<String> for End {
    fn from(problem: String) -> End {
        End::Failed(problem)
    }
}

pub(crate) fn soak(args: &Args) -> ExitCode {
    match play_rounds(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(End::Failed(problem)) => {
            complain(&format!("kolo: {problem}"));
            ExitCode::FAILURE
        }
        Err(End::Stopped(signal)) => {
            complain(&format!("kolo soak: stopped by {signal}"));
            process::exit(signal.exit_code())
        }
    }
}

/// How many rounds are searched for the chosen kind before the soak fails.
const SEARCHED: u64 = 1_000_000;

fn play_rounds(args: &Args) -> Result<(), End> {
    let ranks = args.ranks as usize;
    if let (Some(rank), Some(seed), Some(number)) = (args.rank, args.seed, args.round) {
        let report = rank::take_part(&Round::new(seed, number, ranks), rank)?;
        say(&serde_json::to_string(&report).map_err(|error| error.to_string())?);
        return Ok(());
    }
    let seed = match args.seed {
        Some(seed) => seed,
        None => u32::from_le_bytes(random()?).into(),
    };
    let arena = Arena::new(args, seed)?;
    say(&format!("kolo soak: {}, seed {seed}", count(ranks, "rank")));
    let began = Instant::now();
    if args.fault.iter().any(|fault| !fault.is_possible()) {
        return Err("--fault cut is not possible here: Windows does not tell a process which connections it has"
            .to_owned()
            .into());
    }
    if args.with.iter().any(|ingredient| !ingredient.is_possible()) {
        return Err("--with forks is not possible here: Windows has no forks".to_owned().into());
    }
    let mut tally = Tally::default();
    for number in args.round.unwrap_or(0).. {
        // Check between rounds too: possibly none is of the chosen kind.
        arena.check_signals()?;
        let round = Round::new(seed, number, ranks);
        let is_chosen = args.fault.is_empty() || args.fault.contains(&round.fault);
        if is_chosen && args.with.iter().all(|ingredient| round.has(*ingredient)) {
            let (line, operations) = arena.play(&round).map_err(|end| match end {
                End::Stopped(signal) => End::Stopped(signal),
                End::Failed(problem) => End::Failed(format!(
                    "round {number} ({}): {problem}\nreplay it with: kolo soak --seed {seed} --round {number} --ranks {ranks}\n\
                     the traces of the ranks are in {}, for kolo trace",
                    describe_round(&round),
                    arena.keep().display()
                )),
            })?;
            tally.add(&round, operations);
            say_prose(&format!("round {number}: {}: {line}", describe_round(&round)));
        }
        let is_over = tally.rounds > 0 && began.elapsed().as_secs_f64() > 60.0 * args.minutes;
        if args.round.is_some() || is_over || !is_read() || tally.rounds == 0 && number >= SEARCHED {
            break;
        }
    }
    if tally.rounds == 0 {
        return Err("no round has such a fault and all of these ingredients; choose fewer".to_owned().into());
    }
    say_prose(&tally.text(began.elapsed()));
    Ok(())
}

fn describe_round(round: &Round) -> String {
    let fault = match round.fault {
        Fault::Nothing => "no fault".to_owned(),
        Fault::Kill => format!("rank {} is killed in step {}", round.victim, round.at),
        Fault::Pause => format!("rank {} is stopped for a moment in step {}", round.victim, round.at),
        Fault::PauseUnlinked => format!("rank {} is stopped for a while before it has links", round.victim),
        Fault::Stop => format!("rank {} is stopped in step {}", round.victim, round.at),
        Fault::StopUnlinked => format!("rank {} is stopped before it has links", round.victim),
        Fault::Cut => format!("a connection of rank {} is cut in step {}", round.victim, round.at),
        Fault::Leave => format!("rank {} leaves before step {}", round.victim, round.at),
        Fault::Crash => format!("all are killed after {} ms", round.after.as_millis()),
    };
    let mut path = format!("{:?}", round.path).to_lowercase();
    if round.path == script::Path::Tcp && round.sockets > 1 {
        path += &format!(" over {} sockets a link", round.sockets);
    }
    let with: Vec<&str> = round.with.iter().map(|ingredient| ingredient.in_words()).collect();
    let with = if with.is_empty() { String::new() } else { format!(" with {}", with.join(", ")) };
    format!("{path}, {} steps{with}, {fault}", round.steps)
}

/// What all rounds share.
struct Arena {
    folder: PathBuf,
    server: TcpStoreServer,
    secret: String,
    job: String,
    patience: Duration,
    /// The signals that this process receives.
    signals: Receiver<process::Event>,
    /// Ends the ranks if this process is killed.
    _tie: process::Tie,
}

/// A rank's process.
struct Rank {
    child: Child,
    report: Option<Report>,
    /// Its standard error.
    errors: String,
}

enum Event {
    Said(usize, String),
    Complained(usize, String),
    /// One of its outputs has ended.
    Silent,
}

impl Arena {
    fn new(args: &Args, seed: u64) -> Result<Arena, String> {
        let secret = random()?;
        let job = format!("soak-{seed}");
        let server = TcpStoreServer::bind(([127, 0, 0, 1], 0).into(), &job, Some(secret)).map_err(|error| error.to_string())?;
        // From now on, a signal ends the soak in order, so that its folder is removed.
        let (sender, signals) = unbounded();
        process::watch_signals(&sender).map_err(|error| format!("cannot watch for signals: {error}"))?;
        let folder = temporary().join(format!("kolo-soak-{seed}-{}", hexadecimal(&random::<8>()?)));
        make_temporary(&folder).and_then(|()| make_temporary(&folder.join("traces")))?;
        Ok(Arena {
            folder,
            server,
            secret: hexadecimal(&secret),
            job,
            patience: args.patience,
            signals,
            _tie: process::Tie::new(),
        })
    }

    fn traces(&self) -> PathBuf {
        self.folder.join("traces")
    }

    /// Keeps the files that the ranks of a round left.
    fn keep(&self) -> PathBuf {
        let kept = temporary().join(format!("{}-failed", self.folder.file_name().unwrap_or_default().display()));
        match std::fs::rename(self.traces(), &kept) {
            Ok(()) => kept,
            Err(_) => self.traces(),
        }
    }

    fn start(&self, round: &Round, rank: usize, events: &Sender<Event>) -> Result<Rank, String> {
        let failed = |error: std::io::Error| format!("rank {rank} cannot be started: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["soak", "--seed", &round.seed.to_string(), "--round", &round.number.to_string()]);
        command.args(["--ranks", &round.ranks.to_string(), "--rank", &rank.to_string()]);
        command.env("KOLO_RANK", rank.to_string()).env("KOLO_WORLD_SIZE", round.ranks.to_string());
        command.env("KOLO_JOB_ID", &self.job).env("KOLO_SECRET", &self.secret);
        command.env("KOLO_TRACE_DIR", self.traces());
        if system::HAS_SIGNALS {
            command.env("KOLO_TRACE_SIGNAL", "1");
        }
        match round.rendezvous {
            Rendezvous::Served => command.env("KOLO_STORE", self.server.url()).env("KOLO_STORE_SERVED", "1"),
            // The ranks read the secret from the file.
            Rendezvous::File => command
                .env("KOLO_STORE", format!("file://{}", self.folder.join("store").display()))
                .env_remove("KOLO_STORE_SERVED")
                .env_remove("KOLO_SECRET"),
        };
        prepare(&mut command);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
        listen(child.stdout.take(), events.clone(), move |line| Event::Said(rank, line));
        listen(child.stderr.take(), events.clone(), move |line| Event::Complained(rank, line));
        Ok(Rank { child, report: None, errors: String::new() })
    }

    /// Returns an error if a signal has stopped the soak.
    fn check_signals(&self) -> Result<(), End> {
        let stops = self.signals.try_iter().find_map(|event| match event {
            process::Event::Signalled(signal) if signal.ends() => Some(signal),
            _ => None,
        });
        stops.map_or(Ok(()), |signal| Err(End::Stopped(signal)))
    }

    /// Plays a round. Returns a line about it and how many results were checked. An error says what
    /// went wrong.
    fn play(&self, round: &Round) -> Result<(String, u64), End> {
        remove_files(&self.traces());
        let began = Instant::now();
        let (sender, events) = unbounded();
        let store = (round.rendezvous == Rendezvous::Served).then(|| self.server.address());
        let stranger = round.has(Ingredient::Stranger).then(|| Stranger::start(round, &self.job, store));
        let mut ranks = Vec::new();
        for rank in 0..round.ranks {
            let started = self.start(round, rank, &sender)?;
            if let Some(stranger) = &stranger {
                stranger.call_at(started.child.id());
            }
            ranks.push(started);
        }
        drop(sender);
        if round.fault == Fault::Crash {
            std::thread::sleep(round.after);
            kill_all(&ranks);
        }
        let outcome = follow(round, &mut ranks, &events, &self.signals, self.patience);
        if let Err(end) = &outcome {
            if let End::Failed(_) = end {
                // The traces show what the ranks do.
                ranks.iter().for_each(|rank| system::ask_for_trace(rank.child.id()));
                std::thread::sleep(Duration::from_millis(500));
            }
            kill_all(&ranks);
        }
        let mut outcomes = Vec::new();
        for Rank { mut child, report, errors } in ranks {
            outcomes.push(Outcome { status: child.wait().map_err(|error| error.to_string())?, report, errors });
        }
        outcome?;
        let took = began.elapsed();
        stranger.map_or(Ok(0), Stranger::finish)?;
        let line = judge(round, &outcomes)?;
        // After a rank has left, a receive from any rank waits for the other ranks until its
        // deadline.
        let failures = outcomes.iter().filter_map(|outcome| outcome.report.as_ref()?.failure.as_ref());
        let receives = round.fault == Fault::Leave && failures.into_iter().any(|failure| failure.text.starts_with("recv seq="));
        if !round.fault.outlasts_the_deadline() && !receives && took >= round.timeout {
            return Err(format!("it took {took:.0?}, the deadline of an operation, though it ended well: {line}").into());
        }
        let operations = outcomes.iter().filter_map(|outcome| Some(outcome.report.as_ref()?.operations)).sum();
        Ok((line, operations))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn remove_files(folder: &FilePath) {
    for file in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let _ = std::fs::remove_file(file.path());
    }
}

/// Sends the output of a process as events, line by line.
fn listen(
    pipe: Option<impl std::io::Read + Send + 'static>,
    events: Sender<Event>,
    event: impl Fn(String) -> Event + Send + 'static,
) {
    let Some(pipe) = pipe else { return };
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if events.send(event(line)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::Silent);
    });
}

fn kill_all(ranks: &[Rank]) {
    ranks.iter().for_each(|rank| system::kill(rank.child.id()));
}

/// How often a rank is told to continue: the first signals may come before it has stopped.
const AGAIN: Duration = Duration::from_millis(50);

/// Collects the reports of the ranks until they have ended.
fn follow(
    round: &Round,
    ranks: &mut [Rank],
    events: &Receiver<Event>,
    signals: &Receiver<process::Event>,
    patience: Duration,
) -> Result<(), End> {
    let deadline = Instant::now() + patience;
    let mut silent = 0;
    // When the stopped rank continues.
    let mut goes_on: Option<Instant> = None;
    while silent < 2 * ranks.len() {
        let next = goes_on.unwrap_or(deadline).min(deadline);
        let event = select! {
            recv(events) -> event => event.ok(),
            recv(signals) -> signal => match signal {
                Ok(process::Event::Signalled(signal)) if signal.ends() => return Err(End::Stopped(signal)),
                _ => continue,
            },
            default(next.saturating_duration_since(Instant::now())) => None,
        };
        match event {
            Some(Event::Said(_, line)) if line == STOPS => {
                goes_on = round.fault.stop().map(|stop| Instant::now() + stop);
            }
            Some(Event::Said(rank, line)) => {
                ranks[rank].report =
                    Some(serde_json::from_str(&line).map_err(|error| format!("rank {rank} says {line:?}: {error}"))?);
            }
            Some(Event::Complained(rank, line)) => ranks[rank].errors += &(line + "\n"),
            Some(Event::Silent) => silent += 1,
            None if Instant::now() < deadline => {
                system::go_on(ranks[round.victim].child.id());
                goes_on = Some(Instant::now() + AGAIN);
            }
            None => {
                let running = |(rank, process): (usize, &Rank)| process.report.is_none().then_some(rank);
                let running: Vec<usize> = ranks.iter().enumerate().filter_map(running).collect();
                return Err(format!("a hang: after {patience:?}, {} had not ended", show_ranks(&running)).into());
            }
        }
    }
    Ok(())
}

/// Counts for the summary.
#[derive(Default)]
struct Tally {
    rounds: usize,
    operations: u64,
    faults: std::collections::BTreeMap<&'static str, usize>,
}

impl Tally {
    fn add(&mut self, round: &Round, operations: u64) {
        self.rounds += 1;
        self.operations += operations;
        let fault = match round.fault {
            Fault::Nothing => return,
            Fault::Kill => "killed",
            Fault::Pause | Fault::PauseUnlinked => "paused",
            Fault::Stop | Fault::StopUnlinked => "stopped",
            Fault::Cut => "cut",
            Fault::Leave => "left",
            Fault::Crash => "crashed",
        };
        *self.faults.entry(fault).or_default() += 1;
    }

    fn text(&self, took: Duration) -> String {
        let faults: Vec<String> = self.faults.iter().map(|(fault, times)| format!("{fault} {times}")).collect();
        format!(
            "soak passed: {} in {:.0} s, {} checked; faults: {}",
            count(self.rounds, "round"),
            took.as_secs_f64(),
            count(self.operations as usize, "result"),
            if faults.is_empty() { "none".to_owned() } else { faults.join(", ") }
        )
    }
}

//! A job, started again after a failure of a rank as often as `--max-restarts` says.
//!
//! As with torchrun, all ranks start again: the program goes on from what it has saved. Each start is a
//! job with a name and a secret of its own, so that what is left of the last one disturbs nothing.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;

use super::arguments::Args;
use super::attempt::{Attempt, Ended, Refusal};
use super::process;
use super::remote::Host;
use super::supervise::Failure;
use super::{launch, remote};
use crate::complain;
use crate::units::count;

/// What is known of a start when all have ended.
struct Row {
    took: Duration,
    /// The exit status; `None` if it was not started.
    code: Option<i32>,
    reason: String,
}

/// Starts the job, on this machine unless there are hosts, until it succeeds or may not start again.
pub(super) fn run(args: &Args, hosts: Option<&[Host]>) -> Result<ExitCode, Refusal> {
    let (sender, signals) = unbounded();
    process::watch_signals(&sender).map_err(|error| format!("cannot watch for signals: {error}"))?;
    let log_dir = args.log_dir.as_ref().map(std::path::absolute).transpose();
    let log_dir = log_dir.map_err(|error| format!("--log-dir: {error}"))?;
    let asked_to_end = Arc::new(OnceLock::new());
    let mut rows = Vec::new();
    let mut restarts = 0;
    loop {
        let began = Instant::now();
        let attempt = Attempt { args, log_dir: log_dir.as_deref(), restarts, signals: &signals, asked_to_end: &asked_to_end };
        let launched = match hosts {
            Some(hosts) => remote::launch(&attempt, hosts),
            None => launch(&attempt),
        };
        let Ended { failure, palette, ranks } = match launched {
            Ok(ended) => ended,
            Err(Refusal(code, Some(reason))) if restarts > 0 => {
                complain(&format!("kolo run: {reason}"));
                rows.push(Row { took: began.elapsed(), code: None, reason });
                report(&rows);
                return Err(Refusal(code, None));
            }
            Err(refusal) => return Err(refusal),
        };
        let lost = palette.finish();
        if let Some(problem) = lost {
            complain(&format!("kolo run: {problem}; output of the ranks is lost"));
        }
        let code = match failure.as_ref().map_or(0, |failure| failure.exit_code(ranks)) {
            0 if lost.is_some() => 1,
            code => code,
        };
        let reason =
            failure.as_ref().map_or_else(|| "all ranks ended with status 0".to_owned(), |failure| failure.describe(ranks));
        let may_start_again = restarts < args.max_restarts && asked_to_end.get().is_none();
        let starts_again = may_start_again && matches!(failure, Some(Failure::Rank(..)));
        if starts_again {
            complain(&format!("kolo run: {reason}; all ranks start again ({} of {})", restarts + 1, count_of(args.max_restarts)));
        } else if failure.is_some() {
            complain(&format!("kolo run: {reason}"));
        }
        rows.push(Row { took: began.elapsed(), code: Some(code), reason });
        if !starts_again {
            report(&rows);
            return Ok(process::exit(code));
        }
        restarts += 1;
    }
}

fn count_of(restarts: u32) -> String {
    count(restarts as usize, "restart")
}

/// Reports how each start has ended, if there were several.
fn report(rows: &[Row]) {
    if rows.len() == 1 {
        return;
    }
    complain("kolo run: start   seconds  status  ended because");
    for (start, Row { took, code, reason }) in rows.iter().enumerate() {
        let code = code.map_or_else(|| "-".to_owned(), |code| code.to_string());
        complain(&format!("kolo run: {:>5} {:>9.1} {code:>7}  {reason}", start + 1, took.as_secs_f64()));
    }
}

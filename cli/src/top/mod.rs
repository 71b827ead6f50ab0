//! `kolo top`: shows what the ranks of a running job do, and which rank the others wait for.
//!
//! | file | what it does |
//! |---|---|
//! | `find` | finds the job: in the folders of `kolo run`, in another folder, or in a store |
//! | `poll` | asks all ranks at once, again and again |
//! | `state` | what is known of the ranks |
//! | `waits` | finds which rank waits for which, and the rank that keeps the others waiting |
//! | `view` | what is shown: the object of `--json` |
//! | `lines` | the view as lines of text, with what stands out |
//! | `screen` | shows the lines in a terminal, until a key ends it |

mod find;
mod lines;
#[cfg(test)]
mod picture;
mod poll;
#[cfg(test)]
mod sample;
mod screen;
mod state;
mod view;
mod waits;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;

use crate::table::{say_prose, width};
use crate::units::duration;
use crate::{has_controls, is_read, say};
use poll::Poll;
use view::View;

/// Arguments of `kolo top`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// The job, if there are several: its name, or the beginning of its run. With a store, the name
    /// that its ranks use
    #[arg(long)]
    job: Option<String>,
    /// The folder that the ranks have as KOLO_TOP_DIR. If neither this nor a store is given,
    /// KOLO_TOP_DIR or KOLO_STORE counts. Without them, `kolo top` looks for the jobs that `kolo
    /// run` has started on this machine
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// The store of the rendezvous, as in KOLO_STORE. It must still exist
    #[arg(long, value_name = "URL", conflicts_with = "dir")]
    store: Option<String>,
    /// The file with the secret of the job, for a store. Without it, KOLO_SECRET or
    /// KOLO_SECRET_FILE has the secret
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// The time between two looks
    #[arg(long, value_parser = duration, default_value = "500ms")]
    interval: Duration,
    /// Look once and print the result
    #[arg(long)]
    once: bool,
    /// Print lines of any length, in which all columns are
    #[arg(long)]
    wide: bool,
    /// Print an object of JSON for each look, on one line
    #[arg(long)]
    json: bool,
}

/// The shortest time between two looks.
const SHORTEST: Duration = Duration::from_millis(50);

pub(crate) fn top(args: &Args) -> Result<(), String> {
    let observer = find::find(args)?;
    let interval = args.interval.max(SHORTEST);
    let poll = Poll::start(observer, interval);
    if !args.once && !args.json && !args.wide && std::io::stdout().is_terminal() && has_controls() {
        return screen::show(&poll, interval);
    }
    loop {
        // Rates need two looks.
        poll.wait_for_rounds(2);
        let view = View::new(&poll.state(), Instant::now());
        if args.json {
            say(&serde_json::to_string(&view).map_err(|error| format!("the view cannot be written: {error}"))?);
        } else {
            let most = if args.wide { usize::MAX } else { width() };
            lines::plain(&view, most).iter().for_each(|line| if args.wide { say(line) } else { say_prose(line) });
        }
        if args.once {
            return refused(&view);
        }
        if view.has_ended() || !is_read() {
            return Ok(());
        }
        if !args.json {
            say("");
        }
        std::thread::sleep(interval);
    }
}

/// Fails if no rank answers because all of them refuse.
fn refused(view: &View) -> Result<(), String> {
    match view.refusal() {
        Some(why) => Err(format!("rank {}: {}", why.0, why.1)),
        None => Ok(()),
    }
}

//! Starts ranks, injects faults into them, reads their output, and checks what all survivors report
//! after a failure.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::rank::{DEADLINE, WORKER};
use crate::system;
use crate::wait;
pub(crate) use crate::wait::wait_until;

/// The time after which a test gives up: far more than a healthy rank needs.
pub(crate) const LATE: Duration = Duration::from_secs(120);

pub(crate) const SECRET: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/// The bytes of [`SECRET`].
pub(crate) fn secret() -> [u8; 32] {
    std::array::from_fn(|i| u8::from_str_radix(&SECRET[2 * i..2 * i + 2], 16).unwrap())
}

/// The processes of one test, which are killed at its end.
pub(crate) struct Job {
    ranks: Vec<Process>,
    lines: Receiver<(usize, String)>,
    sender: Sender<(usize, String)>,
    /// The lines that were read and not used yet, with their rank.
    heard: Vec<(usize, String)>,
}

struct Process {
    child: Child,
    /// The name that its peers have for its host.
    host: String,
}

/// What all survivors report about a failure.
pub(crate) struct Told {
    pub(crate) cause: String,
    /// The message of one survivor.
    pub(crate) text: String,
    /// The time from the fault to the report of the last survivor.
    pub(crate) after: Duration,
}

/// Returns a new URL of a store's file, and a new name of a job.
pub(crate) fn fresh() -> (String, String) {
    let name = wait::fresh();
    (format!("file://{}", std::env::temp_dir().join(&name).display()), name)
}

/// Returns the command that runs this program as a rank.
pub(crate) fn rank(task: &str, rank: usize, world: usize, store: &str, job: &str) -> Command {
    configured(Command::new(std::env::current_exe().unwrap()), task, rank, world, store, job)
}

pub(crate) fn configured(mut command: Command, task: &str, rank: usize, world: usize, store: &str, job: &str) -> Command {
    command
        .env(WORKER, task)
        .env("KOLO_RANK", rank.to_string())
        .env("KOLO_WORLD_SIZE", world.to_string())
        .env("KOLO_STORE", store)
        .env("KOLO_JOB_ID", job)
        .env("KOLO_SECRET", SECRET)
        .env("KOLO_START_TIMEOUT", "60s")
        .stdin(Stdio::null());
    command
}

/// Measures how long this machine needs at the moment to start a process and to notice its end.
/// Returns the slowest of several. Bounds for kolo are multiples of this.
pub(crate) fn pace() -> Duration {
    let start = || {
        let began = Instant::now();
        let ended = Command::new(std::env::current_exe().unwrap()).arg("--list").stdout(Stdio::null()).status();
        assert!(ended.unwrap().success());
        began.elapsed()
    };
    (0..5).map(|_| start()).max().unwrap()
}

/// Returns the bound for something that takes at most `usual` on an idle machine. On a busy machine
/// it is the time in which two hundred processes start.
pub(crate) fn at_most(usual: Duration) -> Duration {
    usual.max(200 * pace())
}

/// The bound for what a rank learns at once, because a connection or a process ends.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(500);

/// The bound for what a rank finds out by asking its peers: it waits for 150 ms before it asks, and
/// asks twice.
pub(crate) const ASKED: Duration = Duration::from_secs(1);

/// Checks that something took no longer than `usual`, as far as this machine is not busy.
pub(crate) fn in_time(what: &str, took: Duration, usual: Duration) {
    let most = at_most(usual);
    assert!(took < most, "{what}: took {took:?}; the bound on this machine is {most:?} at the moment");
}

impl Job {
    /// Returns a job without ranks.
    pub(crate) fn empty() -> Job {
        let (sender, lines) = channel();
        Job { ranks: Vec::new(), lines, sender, heard: Vec::new() }
    }

    /// Starts `world` ranks with a task and a deadline in milliseconds. `more` adds to their
    /// environment.
    pub(crate) fn start(task: &str, world: usize, deadline: u64, more: impl Fn(usize, &mut Command)) -> Job {
        let (store, name) = fresh();
        let mut job = Job::empty();
        for i in 0..world {
            let mut command = rank(task, i, world, &store, &name);
            command.env(DEADLINE, deadline.to_string());
            more(i, &mut command);
            job.add(command);
        }
        job
    }

    /// Starts one more rank.
    pub(crate) fn add(&mut self, mut command: Command) {
        let declared = command.get_envs().find(|(name, _)| *name == "KOLO_HOST").and_then(|(_, value)| value);
        let declared = declared.map(|host| host.to_str().unwrap().to_owned());
        let host = declared.unwrap_or_else(system::host_name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (number, sender) = (self.ranks.len(), self.sender.clone());
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send((number, line)).is_err() {
                    return;
                }
            }
            let _ = sender.send((number, "end".to_owned()));
        });
        self.ranks.push(Process { child, host });
    }

    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].child.id()
    }

    /// Ends the process of a rank.
    pub(crate) fn kill(&self, rank: usize) {
        system::kill(self.pid(rank));
    }

    /// Stops the process of a rank.
    pub(crate) fn stop(&self, rank: usize) {
        system::stop(self.pid(rank));
    }

    /// Continues a stopped rank.
    pub(crate) fn go_on(&self, rank: usize) {
        system::go_on(self.pid(rank));
    }

    /// Writes a line to the standard input of a rank, which waits for it.
    pub(crate) fn tell(&mut self, rank: usize) {
        self.ranks[rank].child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Waits until a rank writes a line that begins with `start`, and returns the rest of the line.
    pub(crate) fn hear(&mut self, rank: usize, start: &str) -> String {
        self.hear_all(rank, &[start], start.len())
    }

    /// Waits until a rank logs a line that contains all of `parts`.
    pub(crate) fn hear_log(&mut self, rank: usize, parts: &[&str]) -> String {
        let parts: Vec<&str> = ["log "].iter().chain(parts).copied().collect();
        self.hear_all(rank, &parts, 4)
    }

    /// Waits for a line that begins with the first of `parts` and contains the others. Returns the
    /// line without its first `skip` bytes.
    fn hear_all(&mut self, rank: usize, parts: &[&str], skip: usize) -> String {
        let deadline = Instant::now() + LATE;
        let is_it = |line: &str| line.starts_with(parts[0]) && parts.iter().all(|part| line.contains(part));
        let mut has_ended = false;
        loop {
            if let Some(at) = self.heard.iter().position(|(from, line)| *from == rank && is_it(line)) {
                return self.heard.remove(at).1[skip..].trim().to_owned();
            }
            assert!(!has_ended, "rank {rank} ended without a line with {parts:?}; other lines: {:#?}", self.heard);
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.heard.push(line),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("rank {rank} wrote no line with {parts:?}; other lines: {:#?}", self.heard)
                }
            }
            has_ended = parts[0] != "end" && self.said(rank, "end");
        }
    }

    /// Whether a rank has written a line that begins with `start`.
    pub(crate) fn has_said(&mut self, rank: usize, start: &str) -> bool {
        if let Ok(line) = self.lines.recv_timeout(Duration::from_millis(20)) {
            self.heard.push(line);
        }
        self.said(rank, start)
    }

    fn said(&self, rank: usize, start: &str) -> bool {
        self.heard.iter().any(|(from, line)| *from == rank && line.starts_with(start))
    }

    /// Waits until all ranks report progress three times more, so that they work after what has
    /// happened.
    pub(crate) fn all_go_on(&mut self) {
        for _ in 0..3 {
            self.all_work();
        }
    }

    /// Waits until all ranks report progress.
    pub(crate) fn all_work(&mut self) {
        for rank in 0..self.ranks.len() {
            self.hear(rank, "ready");
        }
    }

    /// Waits until all ranks have written a line that begins with `start`, and returns the rest of
    /// the lines.
    pub(crate) fn all_say(&mut self, start: &str) -> Vec<String> {
        (0..self.ranks.len()).map(|rank| self.hear(rank, start)).collect()
    }

    /// Waits for a rank's failure and returns it.
    pub(crate) fn failure(&mut self, rank: usize) -> Failure {
        Failure::parse(&self.hear(rank, "failed"))
    }

    /// The same, but keeps the line for later.
    pub(crate) fn peek_failure(&mut self, rank: usize) -> Failure {
        let line = self.hear(rank, "failed");
        self.heard.push((rank, format!("failed {line}")));
        Failure::parse(&line)
    }

    /// Waits for a rank's failure. Returns whether the rank has logged a line that contains all of
    /// `parts` before.
    pub(crate) fn hears_log_before_failing(&mut self, rank: usize, parts: &[&str]) -> bool {
        let failure = self.hear(rank, "failed");
        let is_it = |(from, line): &(usize, String)| {
            *from == rank && line.starts_with("log ") && parts.iter().all(|part| line.contains(part))
        };
        // The lines of a rank arrive in the order in which it writes them.
        let is_logged = self.heard.iter().any(is_it);
        self.heard.push((rank, format!("failed {failure}")));
        is_logged
    }

    /// Checks what docs/faults.md calls F: each of these ranks gets an error that names the rank at
    /// fault, its host and process, the operation as this rank called it, its sequence number, and
    /// the cause. The cause is the same for all and one of `causes`. Also checks [`Job::lives_on`].
    pub(crate) fn all_name(&mut self, ranks: &[usize], culprit: usize, causes: &[&str], since: u64) -> Told {
        let failures: Vec<Failure> = ranks.iter().map(|&rank| self.failure(rank)).collect();
        for (failure, rank) in failures.iter().zip(ranks) {
            let Failure { kind, operation, called, cause, text, .. } = failure;
            let Process { child, host } = &self.ranks[culprit];
            let name = cause.split([' ', '(']).next().unwrap();
            assert_eq!((kind.as_str(), failure.culprit), ("Peer", Some(culprit)), "rank {rank}: {text}");
            assert_eq!((&failure.host, failure.pid), (host, child.id()), "rank {rank}: {text}");
            assert!(called.is_empty() || operation == called, "rank {rank} called {called}: {text}");
            assert!(causes.contains(&name), "rank {rank}, {cause}: {text}");
            assert_eq!(*cause, failures[0].cause, "ranks {ranks:?} give different causes");
            let named = format!("rank {culprit} ({host}, pid {})", child.id());
            assert!(text.starts_with(operation.as_str()) && text.contains(&named), "rank {rank}: {text}");
        }
        ranks.iter().for_each(|&rank| self.lives_on(rank));
        let last = failures.iter().map(|failure| failure.at).max().unwrap();
        let after = Duration::from_micros(last.saturating_sub(since));
        Told { cause: failures[0].cause.clone(), text: failures[0].text.clone(), after }
    }

    /// Checks a rank after a failure: every later call returns that the communicator is revoked,
    /// and why. After dropping the communicator, the rank has no thread, descriptor or shared
    /// memory left, and its process ends without an error.
    pub(crate) fn lives_on(&mut self, rank: usize) {
        self.hear(rank, "revoked");
        assert!(!self.said(rank, "usable"), "rank {rank}: {:#?}", self.heard);
        self.ends_clean(rank);
    }

    /// Checks that a rank leaves nothing behind and that its process ends without an error.
    pub(crate) fn ends_clean(&mut self, rank: usize) {
        self.hear(rank, "clean");
        self.hear(rank, "end");
        let status = self.ranks[rank].child.wait().unwrap();
        assert!(status.success(), "rank {rank}: {status}");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for Process { child, .. } in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

//! Starts ranks, injects faults into them, and hears what they say.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::rank::{DEADLINE, WORKER};

/// Far more than anything here takes.
pub(crate) const LATE: Duration = Duration::from_secs(60);

pub(crate) const SECRET: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

/// The processes of one test, which end with it.
pub(crate) struct Job {
    ranks: Vec<Child>,
    lines: Receiver<(usize, String)>,
    sender: Sender<(usize, String)>,
    /// What was heard and not asked for yet.
    heard: Vec<(usize, String)>,
}

/// What one rank said of a failure.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Microseconds on the clock that all processes share.
    pub(crate) at: u64,
    pub(crate) culprit: i64,
    pub(crate) text: String,
}

/// A place for a store's file, and a name for its job.
pub(crate) fn fresh() -> (String, String) {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("kolo-faults-{}-{number}", std::process::id());
    (format!("file://{}", std::env::temp_dir().join(&name).display()), name)
}

/// A rank of this program, with all that it needs.
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
        .env("KOLO_START_TIMEOUT", "20s")
        .stdin(Stdio::null());
    command
}

impl Job {
    /// Ranks that have not been started.
    pub(crate) fn empty() -> Job {
        let (sender, lines) = channel();
        Job { ranks: Vec::new(), lines, sender, heard: Vec::new() }
    }

    /// `world` ranks with a task, a deadline in milliseconds, and more of their environment.
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

    /// Starts one more.
    pub(crate) fn add(&mut self, mut command: Command) {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
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
        self.ranks.push(child);
    }

    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.ranks[rank].id()
    }

    pub(crate) fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the process is this one's child, and was not waited for.
        assert_eq!(unsafe { libc::kill(self.pid(rank) as i32, signal) }, 0);
    }

    /// Waits until a rank says something that begins so, and returns the rest of it.
    pub(crate) fn hear(&mut self, rank: usize, start: &str) -> String {
        let deadline = Instant::now() + LATE;
        loop {
            if let Some(at) = self.heard.iter().position(|(from, line)| *from == rank && line.starts_with(start)) {
                return self.heard.remove(at).1[start.len()..].trim().to_owned();
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.heard.push(line),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("rank {rank} did not say {start:?}; what was said: {:#?}", self.heard)
                }
            }
            let has_ended = |(from, line): &(usize, String)| *from == rank && line == "end";
            if start != "end" && self.heard.iter().any(has_ended) && !self.said(rank, start) {
                panic!("rank {rank} ended and did not say {start:?}; what was said: {:#?}", self.heard);
            }
        }
    }

    /// Whether a rank has said something that begins so.
    pub(crate) fn has_said(&mut self, rank: usize, start: &str) -> bool {
        if let Ok(line) = self.lines.recv_timeout(Duration::from_millis(20)) {
            self.heard.push(line);
        }
        self.said(rank, start)
    }

    fn said(&self, rank: usize, start: &str) -> bool {
        self.heard.iter().any(|(from, line)| *from == rank && line.starts_with(start))
    }

    /// Waits until ranks are in the middle of their work.
    pub(crate) fn all_work(&mut self) {
        for rank in 0..self.ranks.len() {
            self.hear(rank, "ready");
        }
    }

    /// What a rank says of its failure.
    pub(crate) fn failure(&mut self, rank: usize) -> Failure {
        let line = self.hear(rank, "failed");
        let mut parts = line.splitn(3, ' ');
        let mut next = || parts.next().unwrap();
        Failure { at: next().parse().unwrap(), culprit: next().parse().unwrap(), text: next().to_owned() }
    }

    /// These ranks fail because of that one, say all the same of it, lose nothing, and leave nothing behind. Returns the texts, and
    /// how long after `since` the last of them failed.
    pub(crate) fn all_name(&mut self, ranks: &[usize], culprit: usize, since: u64) -> (Vec<String>, Duration) {
        let mut last = 0;
        let mut texts = Vec::new();
        for &rank in ranks {
            let failure = self.failure(rank);
            assert_eq!(failure.culprit, culprit as i64, "rank {rank}: {}", failure.text);
            last = failure.at.max(last);
            texts.push(failure.text);
        }
        for &rank in ranks {
            self.hear(rank, "clean");
            assert!(!self.said(rank, "usable"), "rank {rank} went on with a communicator that had failed");
        }
        (texts, Duration::from_micros(last.saturating_sub(since)))
    }

    /// Waits until all have said something that begins so.
    pub(crate) fn all_say(&mut self, start: &str) -> Vec<String> {
        (0..self.ranks.len()).map(|rank| self.hear(rank, start)).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

//! The contestants, which wait for questions: each of their ranks connects to a socket.
//! `cli/peers/README.md` describes the protocol.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use super::contestant::{Contestant, OVER, Prepared};
use super::mpi::Peer;
use super::system::{Listener, Stream};
use super::task::Subject;
use crate::random::{hexadecimal, random};
use crate::run::process::{Process, Signal, make_temporary, temporary};

/// How long a contestant may take to start. PyTorch is slow to start.
pub(super) const START: Duration = Duration::from_secs(120);
/// How long a contestant may take to answer.
const ANSWER: Duration = Duration::from_secs(120);

/// One question to all ranks of a contestant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    subject: Subject,
    bytes: usize,
    warmup: u32,
    iters: u32,
    /// Calls of one iteration. The time of the iteration is the mean of their operations.
    calls: u32,
}

impl Question {
    /// Returns a question that takes some tens of milliseconds if an operation took `last` seconds in the
    /// last one: by its answer, or for an overlap by [`Question::call`].
    pub(super) fn new(subject: Subject, bytes: usize, last: Option<f64>) -> Question {
        // Ranks that were asleep may wake on one processor, and the system needs milliseconds to
        // move one away.
        const WARMUP: f64 = 0.01;
        const BUDGET: f64 = 0.03;
        // The calls of an iteration take much longer than the ranks need to leave the barrier
        // before them, also where ranks share processors.
        const ITERATION: f64 = 0.002;
        let Some(last) = last else { return Question { subject, bytes, warmup: 2, iters: 2, calls: 4 } };
        let last = (last * f64::from(subject.operations())).max(1e-9);
        let calls = (ITERATION / last).clamp(4.0, 1000.0) as u32;
        let iteration = (last * f64::from(calls)).max(1e-6);
        let iters = (BUDGET / iteration).clamp(2.0, 50.0) as u32;
        let warmup = (WARMUP / iteration).clamp(1.0, 1000.0) as u32;
        Question { subject, bytes, warmup, iters, calls }
    }

    /// Returns about how long a call takes if the ranks of an overlap needed this time. The answer is only
    /// what the computation did not hide, which may be nothing.
    pub(super) fn call(&self, took: Duration) -> f64 {
        // Calls alone, computations alone, and both at once, one after the other at worst.
        let calls = self.warmup + 2 + 2 * (self.warmup + self.iters);
        took.as_secs_f64() / f64::from(calls) / f64::from(self.calls)
    }
}

/// A contestant whose ranks are connected.
struct Entered {
    contestant: Contestant,
    children: Started,
    /// Connections to its ranks, in order. None if it is still starting.
    ranks: Vec<BufReader<Stream>>,
}

/// Processes that do not outlive this. They have the time to end by themselves, or when they are asked to.
pub(super) struct Started(pub(super) Vec<Child>);

/// The contestants, and the socket to which their ranks connect.
pub(super) struct Arena {
    ranks: usize,
    listener: Listener,
    entered: Vec<Entered>,
    /// The last field, because the ranks use the folder until they have ended.
    folder: Folder,
}

impl Arena {
    pub(super) fn new(ranks: usize, folder: Folder) -> Result<Arena, String> {
        let listener = Listener::bind(&folder.path().join("socket"));
        let listener = listener.map_err(|error| format!("{}: {error}", folder.path().display()))?;
        Ok(Arena { ranks, listener, entered: Vec::new(), folder })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entered.is_empty()
    }

    pub(super) fn contestants(&self) -> Vec<Contestant> {
        self.entered.iter().map(|entered| entered.contestant).collect()
    }

    /// Starts a contestant and waits until all its ranks have connected, or the comparison is over.
    pub(super) fn enter(
        &mut self,
        contestant: Contestant,
        peers: &[Peer],
        is_over: &dyn Fn() -> bool,
    ) -> Result<Prepared, String> {
        let folder = self.folder.path();
        let prepared = contestant.prepare(folder, peers, is_over)?;
        let children = prepared.start(self.ranks, folder, Some(&folder.join("socket")))?;
        let mut entered = Entered { contestant, children: Started(children), ranks: Vec::new() };
        let deadline = Instant::now() + START;
        let mut ranks: Vec<Option<BufReader<Stream>>> = (0..self.ranks).map(|_| None).collect();
        while ranks.iter().any(Option::is_none) {
            match self.listener.accept() {
                Ok(stream) => {
                    let (name, rank, reader) = greet(stream).map_err(|error| format!("its greeting: {error}"))?;
                    // A late rank of a contestant that was given up may connect now.
                    if let Some(slot) = ranks.get_mut(rank).filter(|_| name == contestant.name()) {
                        *slot = Some(reader);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    for child in &mut entered.children.0 {
                        if let Ok(Some(status)) = child.try_wait() {
                            return Err(format!("it ended while it started: {status}"));
                        }
                    }
                    if Instant::now() >= deadline {
                        return Err(format!("its ranks did not connect within {START:?}"));
                    }
                    if is_over() {
                        return Err(OVER.to_owned());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        entered.ranks = ranks.into_iter().flatten().collect();
        self.entered.push(entered);
        Ok(prepared)
    }

    /// Returns the times of the iterations in seconds. Each is the time of the slowest rank.
    pub(super) fn ask(&mut self, place: usize, question: Question) -> Result<Vec<f64>, String> {
        let Entered { contestant, ranks, .. } = &mut self.entered[place];
        let Question { subject, bytes, warmup, iters, calls } = question;
        let line = format!("{} {bytes} {warmup} {iters} {calls}\n", subject.name());
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("{} did not answer within {ANSWER:?}; compare on a machine that is less busy", contestant.name())
            }
            _ => format!("{} does not answer: {error}", contestant.name()),
        };
        for rank in ranks.iter_mut() {
            rank.get_mut().write_all(line.as_bytes()).map_err(failed)?;
        }
        let mut times = vec![0.0f64; iters as usize];
        for rank in ranks.iter_mut() {
            let mut answer = String::new();
            rank.read_line(&mut answer).map_err(failed)?;
            let nanoseconds: Vec<f64> = answer.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if answer.is_empty() {
                return Err(format!("{} ended during its measurement", contestant.name()));
            }
            if nanoseconds.len() != times.len() {
                return Err(format!("{} answered something else than its times: {answer:?}", contestant.name()));
            }
            for (time, nanoseconds) in times.iter_mut().zip(nanoseconds) {
                *time = time.max(nanoseconds * 1e-9);
            }
        }
        Ok(times)
    }
}

fn greet(stream: Stream) -> std::io::Result<(String, usize, BufReader<Stream>)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let (name, rank) = line.trim().split_once(' ').ok_or(ErrorKind::InvalidData)?;
    let rank = rank.parse().map_err(|_| ErrorKind::InvalidData)?;
    Ok((name.to_owned(), rank, reader))
}

impl Drop for Entered {
    fn drop(&mut self) {
        // A rank ends when its connection closes. One that is still starting notices that only later.
        if self.ranks.is_empty() {
            self.children.stop();
        }
        self.ranks.clear();
    }
}

impl Started {
    /// Asks the processes to end. A launcher then ends its ranks.
    pub(super) fn stop(&self) {
        self.0.iter().for_each(|child| Process::new(child).signal(Signal::TERMINATE));
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        for child in &mut self.0 {
            while let Ok(None) = child.try_wait() {
                if Instant::now() >= deadline {
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

/// A temporary folder, which is removed when it is dropped.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Returns the path of a new folder.
    pub(super) fn new_path() -> Result<PathBuf, String> {
        Ok(temporary().join(format!("kolo-compare-{}", hexadecimal(&random::<8>()?))))
    }

    pub(super) fn make(path: PathBuf) -> Result<Folder, String> {
        make_temporary(&path)?;
        Ok(Folder(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the contestant whose turn it is in a round. The order rotates, so that each contestant
/// starts equally often.
pub(super) fn place(round: usize, turn: usize, contestants: usize) -> usize {
    (turn + round) % contestants
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether little or nothing of a call is hidden by the computation.
    #[test]
    fn a_question_is_short_however_long_a_call_takes() {
        for call in [1e-6, 1e-4, 1e-3, 1e-2] {
            let mut last = None;
            for _ in 0..4 {
                let question = Question::new(Subject::Overlap, 8, last);
                let calls = |times: u32| f64::from(times * question.calls) * call;
                let took = calls(2 * question.warmup + question.iters + 2);
                assert!(took < 50.0 * (0.03 + call), "{took} s for {question:?}");
                last = Some(question.call(Duration::from_secs_f64(took)));
            }
        }
    }
}

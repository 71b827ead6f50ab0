//! A stranger: it knows the job's name and the addresses of its listeners, but not the secret.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::script::{Dice, Round};
use super::system::{LocalListener, listeners};

/// Connects to the listeners of the ranks and of their store until it is
/// [finished](Stranger::finish).
pub(crate) struct Stranger {
    /// The processes of the ranks that have been started.
    ranks: Arc<Mutex<Vec<u32>>>,
    is_over: Arc<AtomicBool>,
    /// Returns the number of connections, or an error that says which listener accepted the
    /// stranger.
    thread: JoinHandle<Result<u64, String>>,
}

/// How many silent connections the stranger keeps open: more than a listener serves at once.
const SILENT: usize = 100;

/// How long the stranger waits for an answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// The time between two connections, which leaves the processor to the ranks.
const PAUSE: Duration = Duration::from_millis(2);

impl Stranger {
    pub(crate) fn start(round: &Round, job: &str, store: Option<SocketAddr>) -> Stranger {
        let (ranks, is_over) = (Arc::<Mutex<Vec<u32>>>::default(), Arc::<AtomicBool>::default());
        let visits = Visits {
            dice: Dice::new(&[round.seed, round.number, u64::MAX - 1]),
            job: job.to_owned(),
            world: round.ranks,
            silent: VecDeque::new(),
        };
        let (known, told) = (ranks.clone(), is_over.clone());
        let thread = std::thread::spawn(move || visits.go_on_until(&told, &known, store));
        Stranger { ranks, is_over, thread }
    }

    /// Adds a process whose listeners the stranger connects to.
    pub(crate) fn call_at(&self, pid: u32) {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
    }

    /// Ends the stranger and returns the number of its connections. An error says which listener
    /// accepted it.
    pub(crate) fn finish(self) -> Result<u64, String> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|_| Err("the stranger panicked".to_owned()))
    }
}

struct Visits {
    dice: Dice,
    job: String,
    world: usize,
    /// Connections that stay open.
    silent: VecDeque<Connection>,
}

impl Visits {
    fn go_on_until(mut self, is_over: &AtomicBool, ranks: &Mutex<Vec<u32>>, store: Option<SocketAddr>) -> Result<u64, String> {
        let mut calls = 0;
        while !is_over.load(Ordering::Relaxed) {
            let pids = ranks.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let listeners = pids.iter().enumerate().flat_map(|(rank, pid)| Listener::of(*pid).map(move |at| (rank, at)));
            let store = store.map(|address| (0, Listener::Tcp(address)));
            for (rank, listener) in store.into_iter().chain(listeners) {
                // Its process may have ended.
                if let Some(connection) = listener.connect() {
                    calls += 1;
                    if self.call(connection, matches!(listener, Listener::Local(_)), rank) {
                        return Err(format!("rank {rank} accepted a stranger without the secret at {listener:?}"));
                    }
                }
                std::thread::sleep(PAUSE);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(calls)
    }

    /// Returns whether the listener of a rank accepts the stranger.
    fn call(&mut self, mut connection: Connection, is_local: bool, rank: usize) -> bool {
        match self.dice.below(5) {
            // Close at once.
            0 => false,
            // Send nothing and stay.
            1 => {
                self.silent.push_back(connection);
                if self.silent.len() > SILENT {
                    self.silent.pop_front();
                }
                false
            }
            2 => {
                let bytes: Vec<u8> = (0..self.dice.below(300)).map(|_| self.dice.below(256) as u8).collect();
                let _ = connection.write_all(&bytes);
                false
            }
            // Speak the protocol with an empty key.
            _ => {
                let from = (rank + 1 + self.dice.below(self.world - 1)) % self.world;
                kolo::stranger::is_believed(&mut connection, is_local, &self.job, from, rank, self.dice.below(6) as u8)
            }
        }
    }
}

#[derive(Debug)]
enum Listener {
    Tcp(SocketAddr),
    /// Without an address.
    Local(LocalListener),
}

impl Listener {
    /// Returns the listeners of a process.
    fn of(pid: u32) -> impl Iterator<Item = Listener> {
        let (addresses, names) = listeners(pid);
        addresses.into_iter().map(Listener::Tcp).chain(names.into_iter().map(Listener::Local))
    }

    fn connect(&self) -> Option<Connection> {
        match self {
            Listener::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, PATIENCE).ok()?;
                stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).ok()?;
                Some(Box::new(stream))
            }
            Listener::Local(listener) => Some(Box::new(listener.connect(PATIENCE)?)),
        }
    }
}

trait Both: Read + Write + Send {}

impl<T: Read + Write + Send> Both for T {}

type Connection = Box<dyn Both>;

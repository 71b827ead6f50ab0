//! How processes join a job that has started.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{PATIENCE, on_every_transport};
use kolo::{Builder, Communicator, Error, ReduceOp, Store, StoreError};

const SECRET: [u8; 32] = [7; 32];

/// Returns a new name.
fn fresh() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("kolo-join-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Checks data on all ranks of a communicator.
fn check(comm: &Communicator) {
    let world = comm.world_size() as u64;
    let mut sums = vec![comm.rank() as u64 + 1; 3000];
    comm.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
    assert_eq!(sums, vec![world * (world + 1) / 2; 3000]);
    let mut ranks = vec![0; comm.world_size()];
    comm.all_gather(&[comm.rank() as u64], &mut ranks).unwrap();
    assert_eq!(ranks, (0..world).collect::<Vec<_>>());
}

/// Calls `grow` until the communicator has `world` ranks. Checks each communicator, as each newcomer
/// does, too.
fn grow_to(mut comm: Communicator, world: usize) -> Communicator {
    let deadline = Instant::now() + PATIENCE;
    while comm.world_size() < world {
        if let Some(larger) = comm.grow().unwrap() {
            assert_eq!(larger.rank(), comm.rank());
            comm = larger;
            check(&comm);
        }
        assert!(Instant::now() < deadline, "no newcomer came");
    }
    comm
}

/// As a newcomer: joins, checks the communicator, and grows with the others to `world` ranks.
fn join(builder: Builder, world: usize) -> Communicator {
    let comm = builder.join(true).start_timeout(PATIENCE).connect().unwrap();
    check(&comm);
    grow_to(comm, world)
}

#[test]
fn newcomers_join_on_every_transport() {
    for transport in ["shm", "tcp", "hosts"] {
        let store = format!("hash://{}", fresh());
        let options = |i: usize, builder: Builder| match transport {
            "tcp" => builder.transport(kolo::Transport::Tcp),
            "hosts" => builder.host(format!("host{}", i % 2)),
            _ => builder,
        };
        let builder = |i| options(i, Communicator::builder().store(&store).start_timeout(PATIENCE));
        std::thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let comm = builder(rank).rank(rank).world_size(2).connect().unwrap();
                    let larger = grow_to(comm, 5);
                    // The larger communicator has all features.
                    check(&larger.split(0, larger.rank()).unwrap());
                    assert_eq!(larger.start_all_reduce(vec![1u32; 9], ReduceOp::Sum).unwrap().wait().unwrap(), [5; 9]);
                });
            }
            for newcomer in 2..5 {
                scope.spawn(move || {
                    let larger = join(builder(newcomer), 5);
                    assert!(larger.rank() >= 2);
                    check(&larger.split(0, larger.rank()).unwrap());
                    assert_eq!(larger.start_all_reduce(vec![1u32; 9], ReduceOp::Sum).unwrap().wait().unwrap(), [5; 9]);
                });
            }
        });
    }
}

#[test]
fn a_rank_alone_grows_and_shrinks_and_grows() {
    let store = format!("hash://{}", fresh());
    let builder = || Communicator::builder().store(&store);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let comm = builder().rank(0).world_size(1).connect().unwrap();
            let two = grow_to(comm, 2);
            two.barrier().unwrap_err();
            let one = two.shrink().unwrap();
            drop(two);
            assert_eq!(one.world_size(), 1);
            grow_to(one, 2).barrier().unwrap();
        });
        drop(join(builder(), 2));
        join(builder(), 2).barrier().unwrap();
    });
}

/// A store that this process shares.
#[derive(Default)]
struct Memory {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    /// How often a place of a waiting list was read.
    reads: AtomicUsize,
}

impl Memory {
    /// Waits until the store has a waiting list.
    fn wait_for_list(&self) {
        assert!(self.get("waiting-list", PATIENCE).unwrap().is_some(), "no list is opened");
    }
}

impl Store for Memory {
    fn url(&self) -> String {
        "memory".to_owned()
    }

    fn set(&self, key: &str, value: &[u8], _: Duration) -> Result<(), StoreError> {
        self.values.lock().unwrap().insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        self.reads.fetch_add(key.contains("/newcomer/").into(), Ordering::Relaxed);
        let values = self.values.lock().unwrap();
        let (values, _) = self.changed.wait_timeout_while(values, timeout, |values| !values.contains_key(key)).unwrap();
        Ok(values.get(key).cloned())
    }

    fn claim(&self, key: &str, value: &[u8], _: Duration) -> Result<Vec<u8>, StoreError> {
        let mut values = self.values.lock().unwrap();
        let first = values.entry(key.to_owned()).or_insert_with(|| value.to_owned()).clone();
        self.changed.notify_all();
        Ok(first)
    }
}

/// A store whose process ends as soon as it has read a value whose key contains this.
struct Deadly(Arc<Memory>, &'static str);

impl Store for Deadly {
    fn url(&self) -> String {
        self.0.url()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.0.set(key, value, timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.0.get(key, timeout)?;
        assert!(value.is_none() || !key.contains(self.1), "the newcomer is killed here");
        Ok(value)
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.0.claim(key, value, timeout)
    }
}

/// Runs two ranks that share a store in memory, and `other` beside them.
fn beside_two<T: Send>(member: impl Fn(Communicator) + Sync, other: impl FnOnce(Arc<Memory>) -> T + Send) -> T {
    let store = Arc::new(Memory::default());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, member) = (store.clone(), &member);
            scope.spawn(move || {
                let builder = Communicator::builder().store_object(store).secret(SECRET).start_timeout(PATIENCE);
                member(builder.rank(rank).world_size(2).connect().unwrap());
            });
        }
        other(store.clone())
    })
}

fn newcomer(store: Arc<dyn Store>) -> Builder {
    Communicator::builder().store_object(store).secret(SECRET).join(true)
}

#[test]
fn ranks_survive_a_newcomer_that_ends_while_it_is_admitted() {
    // Before it writes its peer info, and after it has read the table of all ranks.
    for moment in ["/admission/", "/run", "/table"] {
        let has_failed = AtomicBool::new(false);
        let grow_on = |mut comm: Communicator| {
            let deadline = Instant::now() + PATIENCE;
            while comm.world_size() < 3 {
                match comm.grow() {
                    Ok(Some(larger)) => comm = larger,
                    Ok(None) => {}
                    Err(error @ Error::NotGrown { .. }) => {
                        assert!(error.leaves_communicator_usable());
                        has_failed.store(true, Ordering::Relaxed);
                        check(&comm);
                    }
                    Err(error) => panic!("{moment}: {error}"),
                }
                assert!(Instant::now() < deadline, "{moment}: no growth succeeds");
            }
            check(&comm);
        };
        beside_two(grow_on, |store| {
            let deadly = Arc::new(Deadly(store.clone(), moment));
            let killed =
                std::thread::spawn(move || newcomer(deadly).host("elsewhere").start_timeout(PATIENCE).connect().map(drop)).join();
            assert!(killed.is_err(), "{moment}: the newcomer is not killed");
            check(&newcomer(store).start_timeout(PATIENCE).connect().unwrap());
        });
        assert!(has_failed.into_inner(), "{moment}: the growth has not failed");
    }
}

#[test]
fn it_costs_one_read_to_learn_that_no_process_waits() {
    const CALLS: usize = 50;
    let member = |comm: Communicator| (0..CALLS).for_each(|_| assert!(comm.grow().unwrap().is_none()));
    let store = beside_two(
        |comm| {
            comm.barrier().unwrap();
            member(comm);
        },
        |store| store,
    );
    assert_eq!(store.reads.load(Ordering::Relaxed), CALLS);
}

#[test]
fn a_newcomer_with_another_secret_has_no_effect() {
    let ended = AtomicBool::new(false);
    let member = |comm: Communicator| {
        let mut has_ended = [0u8];
        while has_ended == [0] {
            assert!(comm.grow().unwrap().is_none());
            has_ended = [u8::from(ended.load(Ordering::Relaxed))];
            comm.broadcast(&mut has_ended, 0).unwrap();
        }
    };
    let (error, has_place) = beside_two(member, |store| {
        store.wait_for_list();
        let error = newcomer(store.clone()).secret([8; 32]).start_timeout(Duration::from_secs(2)).connect().map(drop);
        let has_place = store.values.lock().unwrap().keys().any(|key| key.contains("/newcomer/"));
        ended.store(true, Ordering::Relaxed);
        (error.unwrap_err(), has_place)
    });
    assert!(!has_place, "the newcomer has taken a place");
    assert!(matches!(&error, Error::Store { problem: StoreError::Forged { .. }, .. }), "{error}");
    assert!(error.to_string().contains("KOLO_SECRET"), "{error}");
}

#[test]
fn places_that_strangers_take_are_passed_over() {
    const STRANGERS: usize = 3;
    let member = |comm: Communicator| drop(grow_to(comm, 3));
    beside_two(member, |store| {
        store.wait_for_list();
        let announced = store.get("waiting-list", PATIENCE).unwrap().unwrap();
        let list: String = announced[8..24].iter().map(|byte| format!("{byte:02x}")).collect();
        for place in 0..STRANGERS {
            store.set(&format!("{list}/newcomer/{place}"), &[0xff; 300], PATIENCE).unwrap();
        }
        check(&newcomer(store.clone()).start_timeout(PATIENCE).connect().unwrap());
        let values = store.values.lock().unwrap();
        assert!(values.contains_key(&format!("{list}/admission/{STRANGERS}")), "{:?}", values.keys());
    });
}

#[test]
fn a_newcomer_learns_why_it_waits_in_vain() {
    let soon = Duration::from_secs(3);
    let alone = newcomer(Arc::new(Memory::default())).start_timeout(soon).connect().unwrap_err().to_string();
    assert!(alone.contains("there is no waiting list") && alone.contains("called grow"), "{alone}");

    let step = std::sync::Barrier::new(3);
    let member = |comm: Communicator| {
        let nothing = comm.grow();
        step.wait();
        step.wait();
        // The process that has waited in vain is passed over.
        let still_nothing = comm.grow();
        drop(comm);
        step.wait();
        assert!(nothing.unwrap().is_none() && still_nothing.unwrap().is_none());
    };
    let (ignored, ended, waited) = beside_two(member, |store| {
        step.wait();
        let ignored = newcomer(store.clone()).start_timeout(soon).connect().map(drop);
        step.wait();
        step.wait();
        let began = Instant::now();
        let ended = newcomer(store).start_timeout(PATIENCE).connect().map(drop);
        (ignored.unwrap_err().to_string(), ended.unwrap_err(), began.elapsed())
    });
    assert!(ignored.contains("the ranks did not call grow"), "{ignored}");
    assert!(matches!(ended, Error::NotAdmitted { .. }) && ended.to_string().contains("the job has ended"), "{ended}");
    assert!(waited < PATIENCE, "the newcomer waits although the job has ended");

    let error = newcomer(Arc::new(Memory::default())).rank(0).world_size(2).connect().unwrap_err();
    assert!(matches!(error, Error::Setting { .. }), "{error}");
}

#[test]
fn some_communicators_cannot_grow() {
    let refused = |comm: &Communicator| {
        let error = comm.grow().unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        comm.barrier().unwrap();
    };
    on_every_transport(2, |comm| refused(&comm.split(0, comm.rank()).unwrap()));
    std::thread::scope(|scope| {
        for comm in Communicator::in_process(2).unwrap() {
            scope.spawn(move || refused(&comm));
        }
    });
    // Newcomers could not learn the secret.
    let store = Arc::new(Memory::default());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = store.clone();
            scope.spawn(move || {
                let comm = Communicator::builder().store_object(store).rank(rank).world_size(2).connect().unwrap();
                let error = comm.grow().unwrap_err();
                assert!(matches!(error, Error::NotGrown { .. }) && error.to_string().contains("KOLO_SECRET_FILE"), "{error}");
                comm.barrier().unwrap();
            });
        }
    });
}

/// Set in the processes of the test with real processes: the file that ends the job.
const STOP: &str = "KOLO_JOIN_TEST_STOP";

/// One rank of the test with real processes: checks data, grows and shrinks until the file exists.
fn rank(stop: &Path) {
    let mut comm = Communicator::from_env().unwrap();
    let is_newcomer = std::env::var_os("KOLO_JOIN").is_some();
    let mut step = [u64::MAX];
    if is_newcomer {
        comm.broadcast(&mut step, 0).unwrap();
        assert_ne!(step, [u64::MAX], "the newcomer has no state");
    }
    println!("world {} rank {}", comm.world_size(), comm.rank());
    let continue_with = |comm: Communicator| {
        let comm = comm.shrink().unwrap();
        println!("world {} rank {}", comm.world_size(), comm.rank());
        comm
    };
    loop {
        let world = comm.world_size() as u64;
        let mut sums = [comm.rank() as u64 + 1, u64::from(stop.exists())];
        if let Err(error) = comm.all_reduce(&mut sums, ReduceOp::Sum) {
            assert!(!error.leaves_communicator_usable());
            comm = continue_with(comm);
            continue;
        }
        assert_eq!(sums[0], world * (world + 1) / 2);
        if sums[1] > 0 {
            return println!("done");
        }
        step[0] = step[0].wrapping_add(1);
        match comm.grow() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Ok(Some(larger)) => {
                comm = larger;
                match comm.broadcast(&mut step, 0) {
                    Ok(()) => println!("world {} rank {}", comm.world_size(), comm.rank()),
                    Err(_) => comm = continue_with(comm),
                }
            }
            Err(error) if error.leaves_communicator_usable() => println!("{error}"),
            Err(_) => comm = continue_with(comm),
        }
    }
}

/// A process, and what it says.
struct Process {
    child: Child,
    said: Receiver<String>,
}

impl Process {
    fn start(test: &str, stop: &Path, store: &str, more: impl FnOnce(&mut Command)) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(STOP, stop).env("KOLO_STORE", store);
        command.env("KOLO_JOB_ID", store).stdout(Stdio::piped());
        more(common::patient(&mut command));
        let mut child = command.spawn().unwrap();
        let (sender, said) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Process { child, said }
    }

    /// Waits until the process says a line that begins like this.
    fn says(&self, what: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.said.recv_timeout(left).unwrap_or_else(|error| panic!("a rank does not say {what:?}: {error}"));
            if line.starts_with(what) {
                return line;
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Grows, shrinks and grows again: also after rank 0, which owned the file, is killed.
#[test]
fn killed_ranks_are_replaced() {
    if let Some(stop) = std::env::var_os(STOP) {
        return rank(&PathBuf::from(stop));
    }
    for transport in ["auto", "tcp"] {
        let stop = std::env::temp_dir().join(fresh());
        let store = format!("file://{}", std::env::temp_dir().join(fresh()).display());
        let start = |more: &dyn Fn(&mut Command)| {
            Process::start("killed_ranks_are_replaced", &stop, &store, |command| {
                command.env("KOLO_TRANSPORT", transport);
                more(command);
            })
        };
        let member = |rank: usize| start(&|command| _ = command.env("KOLO_RANK", rank.to_string()).env("KOLO_WORLD_SIZE", "2"));
        let newcomer = || start(&|command| _ = command.env("KOLO_JOIN", "1"));
        let all_say = |ranks: &[Process], world: usize| {
            for (rank, process) in ranks.iter().enumerate() {
                assert_eq!(process.says(&format!("world {world} ")), format!("world {world} rank {rank}"), "{transport}");
            }
        };
        let mut ranks = vec![member(0), member(1)];
        all_say(&ranks, 2);
        for world in [3, 4] {
            ranks.push(newcomer());
            all_say(&ranks, world);
        }
        for killed in [1, 0] {
            drop(ranks.remove(killed));
            all_say(&ranks, 3);
            ranks.push(newcomer());
            all_say(&ranks, 4);
        }
        std::fs::write(&stop, "").unwrap();
        for mut process in ranks {
            process.says("done");
            assert!(process.child.wait().unwrap().success(), "{transport}");
        }
        std::fs::remove_file(&stop).unwrap();
    }
}

//! How processes join a job that has started.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Barrier, PATIENCE, fresh, on_every_transport, wait_until};
use kolo::{Builder, Communicator, Error, ReduceOp, Store, StoreError};

const SECRET: [u8; 32] = [7; 32];

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

    /// Waits until a key that contains this is set.
    fn wait_for_place(&self, part: &str) {
        let has_none = |values: &mut HashMap<String, Vec<u8>>| !values.keys().any(|key| key.contains(part));
        let values = self.values.lock().unwrap();
        let (values, waited) = self.changed.wait_timeout_while(values, PATIENCE, has_none).unwrap();
        drop(values);
        assert!(!waited.timed_out(), "no key with {part} is set");
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

/// A store that does something before it sets a value, and after it has read one.
struct Watched<S, G> {
    memory: Arc<Memory>,
    before_set: S,
    after_get: G,
}

impl<S, G> Store for Watched<S, G>
where
    S: Fn(&Memory, &str, &[u8]) -> Result<(), StoreError> + Send + Sync,
    G: Fn(&str, bool) + Send + Sync,
{
    fn url(&self) -> String {
        self.memory.url()
    }

    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        (self.before_set)(&self.memory, key, value)?;
        self.memory.set(key, value, timeout)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.memory.get(key, timeout)?;
        (self.after_get)(key, value.is_some());
        Ok(value)
    }

    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.memory.claim(key, value, timeout)
    }
}

fn refuses() -> StoreError {
    StoreError::Io { doing: "a test", source: Arc::new(std::io::Error::other("the store refuses")) }
}

/// Returns the options of one of two ranks.
fn member(store: Arc<dyn Store>, rank: usize) -> Builder {
    Communicator::builder().store_object(store).secret(SECRET).start_timeout(PATIENCE).rank(rank).world_size(2)
}

/// Grows to three ranks, whatever growths fail. Returns how many did.
fn grow_despite_failures(mut comm: Communicator) -> usize {
    let (deadline, mut failed) = (Instant::now() + PATIENCE, 0);
    while comm.world_size() < 3 {
        match comm.grow() {
            Ok(Some(larger)) => comm = larger,
            Ok(None) => {}
            Err(Error::NotGrown { .. }) => failed += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "no growth succeeds");
    }
    check(&comm);
    failed
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
fn a_list_is_read_before_it_is_replaced() {
    let (memory, list_is_open) = (Arc::new(Memory::default()), Barrier::new(3));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (memory, list_is_open) = (memory.clone(), &list_is_open);
            scope.spawn(move || {
                let comm = member(memory.clone(), rank).waiting_list_lifetime(Duration::ZERO).connect().unwrap();
                assert!(comm.grow().unwrap().is_none());
                list_is_open.wait();
                memory.wait_for_place("/newcomer/0");
                check(&comm.grow().unwrap().expect("the newcomer is admitted"));
            });
        }
        list_is_open.wait();
        check(&newcomer(memory.clone()).start_timeout(PATIENCE).connect().unwrap());
    });
}

#[test]
fn ranks_may_come_to_a_growth_at_different_times() {
    let (memory, list_is_open, timeout) = (Arc::new(Memory::default()), Barrier::new(3), Duration::from_secs(6));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (memory, list_is_open) = (memory.clone(), &list_is_open);
            scope.spawn(move || {
                let mut comm = member(memory.clone(), rank).start_timeout(timeout).connect().unwrap();
                assert!(comm.grow().unwrap().is_none());
                list_is_open.wait();
                memory.wait_for_place("/newcomer/0");
                let deadline = Instant::now() + PATIENCE;
                while comm.world_size() < 3 {
                    if rank == 1 {
                        // Later than the start timeout of rank 0.
                        std::thread::sleep(timeout + Duration::from_millis(200));
                    }
                    match comm.grow() {
                        Ok(Some(larger)) => comm = larger,
                        Ok(None) | Err(Error::NotGrown { .. }) => assert!(Instant::now() < deadline, "no growth succeeds"),
                        Err(error) => panic!("{error}"),
                    }
                }
                check(&comm);
            });
        }
        list_is_open.wait();
        check(&newcomer(memory.clone()).start_timeout(PATIENCE).connect().unwrap());
    });
}

#[test]
fn newcomers_survive_a_growth_whose_admissions_fail() {
    // The newcomer has read its admission, or has not.
    for writes in [true, false] {
        let (memory, has_failed) = (Arc::new(Memory::default()), AtomicBool::new(false));
        let has_failed = Arc::new(has_failed);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (memory, has_failed) = (memory.clone(), has_failed.clone());
                scope.spawn(move || {
                    let before_set = move |memory: &Memory, key: &str, value: &[u8]| {
                        if !key.contains("/admission/") || has_failed.swap(true, Ordering::Relaxed) {
                            return Ok(());
                        }
                        if writes {
                            memory.set(key, value, PATIENCE)?;
                        }
                        Err(refuses())
                    };
                    let store = Watched { memory, before_set, after_get: |_: &str, _| {} };
                    assert!(grow_despite_failures(member(Arc::new(store), rank).connect().unwrap()) > 0);
                });
            }
            check(&newcomer(memory.clone()).start_timeout(PATIENCE).connect().unwrap());
        });
    }
}

#[test]
fn a_newcomer_is_admitted_only_if_all_ranks_grow() {
    let memory = Arc::new(Memory::default());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let memory = memory.clone();
            scope.spawn(move || {
                let aborted: Arc<Mutex<Weak<Communicator>>> = Arc::default();
                let of_store = aborted.clone();
                // Rank 1 ends the smaller communicator when it has all that the larger one needs.
                let after_get = move |key: &str, is_set: bool| {
                    let is_last = rank == 1 && is_set && key.contains("growth-") && key.contains("/table");
                    if let Some(comm) = of_store.lock().unwrap().upgrade().filter(|_| is_last) {
                        comm.abort();
                    }
                };
                let store = Watched { memory: memory.clone(), before_set: |_: &Memory, _: &str, _: &[u8]| Ok(()), after_get };
                let comm = Arc::new(member(Arc::new(store), rank).connect().unwrap());
                *aborted.lock().unwrap() = Arc::downgrade(&comm);
                let error = loop {
                    match comm.grow() {
                        Ok(None) => {}
                        Ok(Some(_)) => panic!("the ranks grow, although rank 1 has ended"),
                        Err(error) => break error,
                    }
                };
                assert!(!error.leaves_communicator_usable(), "{error}");
                drop(comm);
                // The newcomer still waits for a job of this name.
                drop(grow_to(member(memory, rank).connect().unwrap(), 3));
            });
        }
        check(&newcomer(memory.clone()).start_timeout(PATIENCE).connect().unwrap());
    });
}

#[test]
fn a_store_that_fails_is_not_opened_at_every_growth() {
    let tries = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (memory, tries) = (Arc::new(Memory::default()), Arc::new(tries));
        for rank in 0..2 {
            let (memory, tries) = (memory.clone(), tries.clone());
            scope.spawn(move || {
                let counts = tries.clone();
                let before_set = move |_: &Memory, key: &str, _: &[u8]| match key {
                    "waiting-list" => {
                        counts.fetch_add(1, Ordering::Relaxed);
                        Err(refuses())
                    }
                    _ => Ok(()),
                };
                let store = Watched { memory, before_set, after_get: |_: &str, _| {} };
                let comm = member(Arc::new(store), rank).connect().unwrap();
                let first = comm.grow().unwrap_err().to_string();
                assert!(first.contains("the store refuses"), "{first}");
                assert_eq!(comm.grow().unwrap_err().to_string(), first);
                comm.barrier().unwrap();
                assert_eq!(tries.load(Ordering::Relaxed), 1);
            });
        }
    });
}

#[test]
fn a_job_that_starts_again_admits_a_newcomer_of_the_last_one() {
    let memory = Arc::new(Memory::default());
    let run = |grow: fn(Communicator)| {
        let memory = &memory;
        std::thread::scope(|scope| {
            (0..2).for_each(|rank| _ = scope.spawn(move || grow(member(memory.clone(), rank).connect().unwrap())))
        });
    };
    run(|comm| assert!(comm.grow().unwrap().is_none()));
    memory.wait_for_place("/closed");
    std::thread::scope(|scope| {
        let seen = Arc::new(AtomicBool::new(false));
        let of_store = seen.clone();
        let after_get =
            move |key: &str, is_set: bool| _ = of_store.fetch_or(is_set && key.contains("/closed"), Ordering::Relaxed);
        let store = Watched { memory: memory.clone(), before_set: |_: &Memory, _: &str, _: &[u8]| Ok(()), after_get };
        let newcomer = scope.spawn(|| check(&newcomer(Arc::new(store)).start_timeout(PATIENCE).connect().unwrap()));
        wait_until("the newcomer does not look", || seen.load(Ordering::Relaxed) || newcomer.is_finished());
        run(|comm| drop(grow_to(comm, 3)));
        newcomer.join().unwrap();
    });
}

#[test]
fn the_job_goes_on_after_a_rank_has_failed() {
    let memory = beside_two(
        |comm| {
            assert!(comm.grow().unwrap().is_none());
            comm.barrier().unwrap();
            if comm.rank() == 0 {
                comm.barrier().unwrap_err();
            }
        },
        |memory| memory,
    );
    assert!(!memory.values.lock().unwrap().keys().any(|key| key.contains("/closed")), "rank 0 says that the job has ended");
}

#[test]
fn a_newcomer_believes_only_what_the_ranks_can_write() {
    let memory = Arc::new(Memory::default());
    memory.set("waiting-list", &[&b"kolo-run"[..], &[3; 16], &[1], &[4; 32]].concat(), PATIENCE).unwrap();
    let without_secret = Communicator::builder().store_object(memory.clone()).join(true).start_timeout(Duration::from_secs(2));
    let error = without_secret.connect().map(drop).unwrap_err();
    assert!(matches!(&error, Error::Store { problem: StoreError::Secret, .. }), "{error}");
    assert_eq!(memory.values.lock().unwrap().len(), 1, "the newcomer has taken a place");
}

#[test]
fn a_newcomer_says_that_no_rank_serves_the_store() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let builder = Communicator::builder().store(format!("tcp://127.0.0.1:{port}")).secret(SECRET).join(true);
    let error = builder.start_timeout(Duration::from_secs(1)).connect().map(drop).unwrap_err();
    assert!(matches!(error, Error::NotAdmitted { .. }) && error.to_string().contains("no rank has called grow"), "{error}");
}

#[test]
fn a_store_for_the_start_is_not_kept() {
    let memory = Arc::new(Memory::default());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let memory = memory.clone();
            scope.spawn(move || {
                let store = Arc::new(Deadly(memory, "no key"));
                let kept = Arc::downgrade(&store);
                let comm = member(store, rank).store_for_start_only().connect().unwrap();
                assert!(kept.upgrade().is_none(), "the store is kept");
                let error = comm.grow().unwrap_err();
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                comm.barrier().unwrap();
            });
        }
    });
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
    let soon = Duration::from_secs(2);
    let alone = newcomer(Arc::new(Memory::default())).start_timeout(soon).connect().unwrap_err().to_string();
    assert!(alone.contains("there is no waiting list") && alone.contains("called grow"), "{alone}");

    let step = Barrier::new(3);
    let member = |comm: Communicator| {
        let nothing = comm.grow();
        step.wait();
        step.wait();
        // The process that has waited in vain is passed over.
        let still_nothing = comm.grow();
        step.wait();
        step.wait();
        drop(comm);
        step.wait();
        assert!(nothing.unwrap().is_none() && still_nothing.unwrap().is_none());
    };
    let (ignored, ended, waited, late) = beside_two(member, |store| {
        step.wait();
        // Long enough to take a place, also on a busy machine.
        let ignored = newcomer(store.clone()).start_timeout(Duration::from_secs(8)).connect().map(drop);
        step.wait();
        // The ranks have looked when the last of them drops its communicator.
        let began = Instant::now();
        step.wait();
        let ended = std::thread::scope(|scope| {
            let waits = scope.spawn(|| newcomer(store.clone()).start_timeout(PATIENCE).connect().map(drop));
            store.wait_for_place("/newcomer/1");
            step.wait();
            waits.join().unwrap()
        });
        step.wait();
        let waited = began.elapsed();
        let late = newcomer(store).start_timeout(soon).connect().map(drop);
        (ignored.unwrap_err().to_string(), ended.unwrap_err(), waited, late.unwrap_err().to_string())
    });
    assert!(ignored.contains("the ranks did not call grow"), "{ignored}");
    assert!(matches!(ended, Error::NotAdmitted { .. }) && ended.to_string().contains("the job has ended"), "{ended}");
    assert!(waited < PATIENCE, "the newcomer waits although the job has ended");
    assert!(late.contains("the job has ended"), "{late}");

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
        command.args(["--exact", &format!("join::{test}"), "--nocapture"]).env(STOP, stop).env("KOLO_STORE", store);
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

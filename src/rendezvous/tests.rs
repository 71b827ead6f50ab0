use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::hosts::exchange_hosts;
use super::membership::{self, Membership};
use super::store_keys::{TABLE, key_share_of, peer_info_of, secret_for};
use crate::config::Settings;
use crate::error::{Error, Result, StoreError};
use crate::network::identity::Identity;
use crate::rendezvous::key_exchange::KeyShare;
use crate::rendezvous::run_info::{self, RunInfo};
use crate::rendezvous::signed::in_run;
use crate::rendezvous::start::Start;
use crate::rendezvous::store::{self, Store, StoreUrl};
use crate::sys::wait_until;
use crate::timeouts::{REASON_GRACE, RUN_INFO_CHECK};
use crate::types::Rank;
use crate::wire::hexadecimal;

/// A store that records all values put into it.
struct Recording {
    store: Box<dyn Store>,
    is_private: bool,
    values: Mutex<Vec<(String, Vec<u8>)>>,
    reads_of_table: AtomicUsize,
    /// Reads of peer infos and of public keys.
    reads_of_ranks: AtomicUsize,
}

impl Recording {
    fn new(name: &str, is_private: bool) -> Recording {
        let url = StoreUrl::Hash(name.to_owned());
        let store = store::open(&url, true, &Identity::new("job", None), late()).unwrap();
        Recording { store, is_private, values: Mutex::default(), reads_of_table: 0.into(), reads_of_ranks: 0.into() }
    }

    fn holds_key(&self, end: &str) -> bool {
        self.values.lock().unwrap().iter().any(|(key, _)| key.ends_with(&format!("/{end}")))
    }
}

impl Store for Recording {
    fn url(&self) -> String {
        self.store.url()
    }
    fn is_private(&self) -> bool {
        self.is_private
    }
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.values.lock().unwrap().push((key.to_owned(), value.to_vec()));
        self.store.set(key, value, timeout)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        if key.ends_with(TABLE) {
            self.reads_of_table.fetch_add(1, Ordering::Relaxed);
        } else if key.contains("/rank/") || key.contains("/key_share/") {
            self.reads_of_ranks.fetch_add(1, Ordering::Relaxed);
        }
        self.store.get(key, timeout)
    }
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.values.lock().unwrap().push((key.to_owned(), value.to_vec()));
        self.store.claim(key, value, timeout)
    }
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Has three ranks meet; returns the secret that all of them know.
fn secret_of(store: &Recording, given: Option<[u8; 32]>) -> [u8; 32] {
    let settings = Settings::default();
    let secrets: Vec<_> = std::thread::scope(|scope| {
        let gather_members = |rank| {
            let identity = Identity::new("job", given);
            let start = Start {
                rank,
                world_size: 3,
                identity,
                store,
                store_url: None,
                settings: &settings,
                deadline: late(),
                absence: None,
            };
            let met = membership::gather_members(&start, [127, 0, 0, 1].into(), Instant::now()).unwrap();
            exchange_hosts(&start, &met.identity, &[rank]).unwrap();
            met.identity.secret().unwrap()
        };
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || gather_members(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(secrets.iter().all(|secret| *secret == secrets[0]));
    secrets[0]
}

fn holds(store: &Recording, secret: &[u8; 32]) -> bool {
    let hexadecimal = hexadecimal(secret);
    // A part of the secret counts, too.
    let parts: Vec<&[u8]> = secret.windows(8).chain(hexadecimal.as_bytes().windows(16)).collect();
    let values = store.values.lock().unwrap();
    assert!(values.len() > 8, "the ranks did not meet in this store");
    values.iter().any(|(_, value)| parts.iter().any(|part| value.windows(part.len()).any(|bytes| bytes == *part)))
}

#[test]
fn no_secret_is_in_a_store_that_others_read() {
    let store = Recording::new("no secret, agreed", false);
    let agreed = secret_of(&store, None);
    assert!(!holds(&store, &agreed), "the agreed secret is in the store");
    let store = Recording::new("no secret, given", false);
    assert_eq!(secret_of(&store, Some([7; 32])), [7; 32]);
    assert!(!holds(&store, &[7; 32]), "the given secret is in the store");
    // In a private store, the test finds the secret.
    let store = Recording::new("secret, shared", true);
    let shared = secret_of(&store, None);
    assert!(holds(&store, &shared) && shared != agreed);
}

/// A store where a stranger overwrites the public key of rank 1 before rank 0 has read it.
struct Overwritten {
    store: Box<dyn Store>,
    writes: AtomicUsize,
}

impl Store for Overwritten {
    fn url(&self) -> String {
        self.store.url()
    }
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.writes.fetch_add(usize::from(key.ends_with(&key_share_of(1))), Ordering::Relaxed);
        self.store.set(key, value, timeout)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(key, timeout)
    }
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        if key.ends_with(&key_share_of(1)) {
            // Rank 1 believes that its key is in the store, and no rank ever reads it there.
            self.store.set(key, b"garbage", timeout)?;
            return Ok(value.to_vec());
        }
        self.store.claim(key, value, timeout)
    }
}

#[test]
fn a_rank_whose_public_key_is_overwritten_writes_it_again() {
    let store = Overwritten { store: Recording::new("overwritten", false).store, writes: 0.into() };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let store = &store;
                scope.spawn(move || gather_members(store, rank, 2, late()).map(drop))
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
    assert_eq!(store.writes.load(Ordering::Relaxed), 1);
}

/// A store where a stranger writes before the ranks: values that are no public keys, and one that
/// is no secret.
struct Disturbed {
    store: Box<dyn Store>,
    /// How often rank 1 has read its secret.
    reads: AtomicUsize,
}

impl Store for Disturbed {
    fn url(&self) -> String {
        self.store.url()
    }
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        if key == run_info::NAME {
            let run = RunInfo::decode(value).unwrap().run;
            let of_small_order = KeyShare { public: [0; 32], process: "a stranger".to_owned() }.encode();
            self.store.set(&in_run(&run, &key_share_of(1)), &of_small_order, timeout)?;
            self.store.set(&in_run(&run, &key_share_of(2)), b"garbage", timeout)?;
            self.store.set(&in_run(&run, &secret_for(1)), &[7; 64], timeout)?;
        }
        if key.ends_with(&secret_for(1)) {
            wait_until("rank 1 does not read the stranger's value", || self.reads.load(Ordering::Relaxed) > 1);
        }
        self.store.set(key, value, timeout)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.store.get(key, timeout);
        if key.ends_with(&secret_for(1)) {
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
        value
    }
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.store.claim(key, value, timeout)
    }
}

#[test]
fn garbage_in_place_of_keys_and_secrets_does_not_keep_ranks_from_meeting() {
    let store = Recording::new("disturbed", false).store;
    let store = Disturbed { store, reads: 0.into() };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let store = &store;
                scope.spawn(move || gather_members(store, rank, 3, late()).map(|met| met.identity.secret()))
            })
            .collect();
        let secrets: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
        assert!(secrets[0].is_some() && secrets.iter().all(|secret| *secret == secrets[0]));
    });
    assert!(store.reads.load(Ordering::Relaxed) >= 2);
}

/// The test between processes is `row_37_before_the_secret`. This one is about the order of writes.
#[test]
fn a_rank_publishes_its_address_after_it_has_learned_the_secret() {
    let store = Recording::new("order", false);
    secret_of(&store, None);
    let values = store.values.lock().unwrap();
    let position = |end: &str| values.iter().position(|(key, _)| key.ends_with(end)).unwrap();
    for rank in 1..3 {
        assert!(position(&key_share_of(rank)) < position(&secret_for(rank)));
        assert!(position(&secret_for(rank)) < position(&format!("/{}", peer_info_of(rank))));
    }
}

/// Meets the others as `rank` of `world_size`, by the deadline.
fn gather_members(store: &dyn Store, rank: Rank, world_size: usize, deadline: Instant) -> Result<Membership> {
    let settings = Settings::default();
    let identity = Identity::new("job", None);
    let start = Start { rank, world_size, identity, store, store_url: None, settings: &settings, deadline, absence: None };
    membership::gather_members(&start, [127, 0, 0, 1].into(), Instant::now())
}

/// A store that outlives runs holds how a former run ended. The ranks of the next run wait for
/// their rank 0 all the same.
#[test]
fn the_end_of_a_former_run_does_not_end_the_next() {
    // In one former run only rank 0 came. The other had another size and was complete.
    for former_size in [2, 1] {
        let store = Recording::new(&format!("former run of {former_size}"), true);
        let former = gather_members(&store, 0, former_size, Instant::now() + RUN_INFO_CHECK);
        assert_eq!(former.is_err(), former_size == 2);
        drop(former);
        std::thread::scope(|scope| {
            let one = scope.spawn(|| gather_members(&store, 1, 2, late()).map(drop));
            wait_until("rank 1 does not read the table", || {
                store.reads_of_table.load(Ordering::Relaxed) > 1 || one.is_finished()
            });
            gather_members(&store, 0, 2, Instant::now() + 10 * REASON_GRACE).map(drop).unwrap();
            one.join().unwrap().unwrap();
        });
    }
}

/// A store as one rank sees it.
struct View<'a> {
    store: &'a dyn Store,
    /// The store that is served after the first has closed.
    next: Option<&'a dyn Store>,
    is_private: bool,
    reads_of_run_info: AtomicUsize,
    hides_secrets: bool,
    has_closed: AtomicBool,
    has_reconnected: AtomicBool,
}

impl<'a> View<'a> {
    fn new(store: &'a dyn Store, is_private: bool) -> View<'a> {
        let no = AtomicBool::default;
        View {
            store,
            next: None,
            is_private,
            reads_of_run_info: 0.into(),
            hides_secrets: false,
            has_closed: no(),
            has_reconnected: no(),
        }
    }

    fn now(&self) -> Result<&'a dyn Store, StoreError> {
        match (self.has_closed.load(Ordering::Relaxed), self.has_reconnected.load(Ordering::Relaxed)) {
            (true, false) => Err(StoreError::io("asking it")(std::io::ErrorKind::ConnectionReset.into())),
            (true, true) => Ok(self.next.unwrap()),
            (false, _) => Ok(self.store),
        }
    }

    /// Waits until a rank has read the run info so often that it has waited longer than for a
    /// process that has its rank, or until it has ended.
    fn is_read_by<T>(&self, rank: &std::thread::ScopedJoinHandle<'_, T>) {
        wait_until("no rank reads it", || self.reads_of_run_info.load(Ordering::Relaxed) >= 100 || rank.is_finished());
    }
}

impl Store for View<'_> {
    fn url(&self) -> String {
        self.store.url()
    }
    fn is_private(&self) -> bool {
        self.is_private
    }
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.now()?.set(key, value, timeout)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        self.reads_of_run_info.fetch_add(usize::from(key == run_info::NAME), Ordering::Relaxed);
        if self.hides_secrets && key.contains("/secret/") {
            std::thread::sleep(timeout);
            return Ok(None);
        }
        self.now()?.get(key, timeout)
    }
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.now()?.claim(key, value, timeout)
    }
    fn reconnect(&self, _: Duration) -> Result<bool, StoreError> {
        self.has_reconnected.store(self.next.is_some(), Ordering::Relaxed);
        Ok(self.next.is_some())
    }
}

/// Has two ranks meet; returns their endpoints, which still listen.
fn two_meet(store: &dyn Store) -> [Membership; 2] {
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || gather_members(store, rank, 2, late()).unwrap())).map(|rank| rank.join().unwrap())
    })
}

/// The former start still listens, as a communicator that a program has not dropped yet.
#[test]
fn a_rank_that_starts_again_is_not_a_second_process() {
    for is_private in [true, false] {
        let store = Recording::new(&format!("again, {is_private}"), is_private).store;
        let store = View::new(&*store, is_private);
        let former = two_meet(&store);
        std::thread::scope(|scope| {
            store.reads_of_run_info.store(0, Ordering::Relaxed);
            let one = scope.spawn(|| gather_members(&store, 1, 2, late()).map(drop));
            store.is_read_by(&one);
            gather_members(&store, 0, 2, late()).map(drop).unwrap();
            one.join().unwrap().unwrap();
        });
        drop(former);
    }
}

#[test]
fn a_rank_that_starts_again_follows_its_store() {
    for is_private in [true, false] {
        for looks_before in [true, false] {
            let name = |which: &str| format!("{which} store, {is_private}, {looks_before}");
            let [first, second] = ["first", "second"].map(|which| Recording::new(&name(which), is_private).store);
            drop(two_meet(&View::new(&*first, is_private)));
            let of_one = View { next: Some(&*second), ..View::new(&*first, is_private) };
            let of_zero = View::new(&*second, is_private);
            of_one.has_closed.store(!looks_before, Ordering::Relaxed);
            std::thread::scope(|scope| {
                let one = scope.spawn(|| gather_members(&of_one, 1, 2, late()).map(drop));
                if looks_before {
                    of_one.is_read_by(&one);
                    of_one.has_closed.store(true, Ordering::Relaxed);
                }
                gather_members(&of_zero, 0, 2, late()).map(drop).unwrap();
                one.join().unwrap().unwrap();
            });
            assert!(of_one.has_reconnected.load(Ordering::Relaxed));
        }
    }
    // A process that has not been there reports it at once.
    let store = Recording::new("closed", true).store;
    let closed = View { next: Some(&*store), ..View::new(&*store, true) };
    closed.has_closed.store(true, Ordering::Relaxed);
    let refused = gather_members(&closed, 1, 2, late()).map(drop);
    assert!(matches!(refused, Err(Error::Store { .. })), "{refused:?}");
    assert!(!closed.has_reconnected.load(Ordering::Relaxed));
}

/// Rank 0 answers the keys of the first attempt, and waits for the peer info.
#[test]
fn a_start_continues_one_that_ended_before_it_knew_the_secret() {
    let store = Recording::new("continued", false);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| gather_members(&store, 0, 2, late()).map(drop));
        let hidden = View { hides_secrets: true, ..View::new(&store, false) };
        let mut error = None;
        while !store.holds_key(&secret_for(1)) && !zero.is_finished() {
            error = gather_members(&hidden, 1, 2, Instant::now() + RUN_INFO_CHECK).err();
        }
        assert!(matches!(error, Some(Error::Missing { .. })), "{error:?}");
        gather_members(&store, 1, 2, late()).map(drop).unwrap();
        zero.join().unwrap().unwrap();
    });
}

/// Rank 0 reads the keys of each rank about once, whatever the number of ranks.
#[test]
fn a_start_reads_the_keys_of_each_rank_about_once() {
    const RANKS: usize = 40;
    for is_private in [true, false] {
        let store = Recording::new(&format!("requests, {is_private}"), is_private);
        // The others come one after the other: each round of rank 0 finds one more.
        let began = Instant::now();
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| gather_members(&store, 0, RANKS, late()).map(drop));
            let others: Vec<_> = (1..RANKS)
                .map(|rank| {
                    let joins = scope.spawn({
                        let store = &store;
                        move || gather_members(store, rank, RANKS, late()).map(drop)
                    });
                    wait_until("a rank does not come", || store.holds_key(&peer_info_of(rank)) || joins.is_finished());
                    joins
                })
                .collect();
            zero.join().unwrap().unwrap();
            others.into_iter().for_each(|joins| joins.join().unwrap().unwrap());
        });
        let reads = store.reads_of_ranks.load(Ordering::Relaxed);
        // While the first rank is missing, rank 0 reads the keys of all ranks in each round.
        let rounds = 8 + began.elapsed().div_duration_f64(RUN_INFO_CHECK) as usize;
        assert!(reads < rounds * RANKS, "{reads} reads for {RANKS} ranks");
    }
}

/// The view that one rank has of a store, which counts its requests.
struct Counted<'a> {
    store: &'a dyn Store,
    is_private: bool,
    /// Writes, and reads that found a value.
    requests: AtomicUsize,
    /// Reads that found nothing: one for each time that the rank waits in vain.
    polls: AtomicUsize,
    read: AtomicUsize,
    written: AtomicUsize,
}

impl Counted<'_> {
    fn new(store: &dyn Store, is_private: bool) -> Counted<'_> {
        let zero = AtomicUsize::default;
        Counted { store, is_private, requests: zero(), polls: zero(), read: zero(), written: zero() }
    }

    fn counts(&self) -> [usize; 4] {
        [&self.requests, &self.polls, &self.read, &self.written].map(|count| count.load(Ordering::Relaxed))
    }
}

impl Store for Counted<'_> {
    fn url(&self) -> String {
        self.store.url()
    }
    fn is_private(&self) -> bool {
        self.is_private
    }
    fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<(), StoreError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.written.fetch_add(value.len(), Ordering::Relaxed);
        self.store.set(key, value, timeout)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.store.get(key, timeout)?;
        let (count, bytes) = found.as_ref().map_or((&self.polls, 0), |value| (&self.requests, value.len()));
        count.fetch_add(1, Ordering::Relaxed);
        self.read.fetch_add(bytes, Ordering::Relaxed);
        Ok(found)
    }
    fn claim(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.written.fetch_add(value.len(), Ordering::Relaxed);
        self.store.claim(key, value, timeout)
    }
}

/// Has the ranks of hosts of eight meet; returns the counts of each.
fn counts_of_a_start(ranks: usize, is_private: bool, given: Option<[u8; 32]>) -> Vec<[usize; 4]> {
    const PER_HOST: usize = 8;
    let shared = Recording::new(&format!("counts of {ranks}, {is_private}, {}", given.is_some()), is_private).store;
    let settings = Settings::default();
    let deadline = Instant::now() + Duration::from_secs(300);
    let join = |rank: Rank| {
        let store = Counted::new(&*shared, is_private);
        let identity = Identity::new("job", given);
        let start = Start {
            rank,
            world_size: ranks,
            identity,
            store: &store,
            store_url: None,
            settings: &settings,
            deadline,
            absence: None,
        };
        let met = membership::gather_members(&start, [127, 0, 0, 1].into(), Instant::now()).unwrap();
        let first = rank / PER_HOST * PER_HOST;
        let together: Vec<Rank> = (first..ranks.min(first + PER_HOST)).collect();
        exchange_hosts(&start, &met.identity, &together).unwrap();
        store.counts()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// docs/scale.md continues these lines to 16,384 ranks.
#[test]
fn a_rank_makes_as_many_requests_in_a_large_job_as_in_a_small_one() {
    const MOST_REQUESTS: usize = 14;
    let sizes: &[usize] = if crate::sys::every_case() { &[16, 64, 256, 1024] } else { &[16, 64] };
    for (is_private, given) in [(true, None), (false, Some([7; 32])), (false, None)] {
        for &ranks in sizes {
            let began = Instant::now();
            let counts = counts_of_a_start(ranks, is_private, given);
            // A rank that waits looks for another run info from time to time.
            let looks = 2 * began.elapsed().div_duration_f64(RUN_INFO_CHECK) as usize;
            let most = |what: usize| counts[1..].iter().map(|count| count[what]).max().unwrap();
            let all = |what: usize| counts.iter().map(|count| count[what]).sum::<usize>();
            println!(
                "{ranks} ranks, {}: rank 0 makes {} requests, others {} at most, {} polls; reads {} bytes, writes {}; all {} requests, \
                 read {} bytes",
                if is_private {
                    "private store"
                } else if given.is_some() {
                    "given secret"
                } else {
                    "agreed secret"
                },
                counts[0][0],
                most(0),
                most(1),
                most(2),
                most(3),
                all(0),
                all(2)
            );
            assert!(most(0) <= MOST_REQUESTS + looks, "a rank of {ranks} makes {} requests", most(0));
            // Rank 0 reads each rank's key and peer info, writes its secret, and reads the hosts.
            assert!(counts[0][0] <= 4 * ranks + MOST_REQUESTS + looks, "rank 0 of {ranks} makes {} requests", counts[0][0]);
            // The table, and the host of each rank.
            assert!(most(2) <= 400 * ranks + 1000 + 100 * looks, "a rank of {ranks} reads {} bytes", most(2));
        }
    }
}

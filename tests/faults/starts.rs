//! Mistakes at the start and faults of stores: rows 7 to 12, 36 and 39.

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::job::{ASKED, Job, LATE, at_most, fresh, in_time, rank, secret, wait_until};
use crate::processes::GONE;
use crate::runner;
use crate::runner::Outcome::{self, Passed};
use crate::system::{self, SAYS_STOPPED, now};
use crate::wait::free_port;

/// Starts ranks with these numbers and world sizes. They wait for each other far longer than it
/// takes to find a mistake.
fn job(store: &str, name: &str, ranks: &[(usize, usize)]) -> Job {
    let mut job = Job::empty();
    for &(number, world) in ranks {
        job.add(patient(rank("once", number, world, store, name)));
    }
    job
}

fn patient(mut command: Command) -> Command {
    command.env("KOLO_START_TIMEOUT", "10m");
    command
}

fn without_secret(mut command: Command) -> Command {
    command.env_remove("KOLO_SECRET");
    command
}

pub(crate) fn port_taken() -> Outcome {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let began = Instant::now();
    let mut job = job(&format!("tcp://127.0.0.1:{port}"), "port", &[(0, 2)]);
    let text = job.hear(0, "refused");
    let took = began.elapsed();
    let holder = match system::hides_listeners() {
        None => format!("process {}", std::process::id()),
        Some(_) => "a process that this one cannot see".to_owned(),
    };
    let holder = format!("it cannot be served at 127.0.0.1:{port}: port {port} is taken by {holder}");
    let advice = "end that process, or choose another port in the store's URL (KOLO_STORE) or MASTER_PORT";
    assert!(text.starts_with("Store: ") && text.contains(&holder) && text.contains(advice), "{text}");
    // For one second the rank asks whether a store is there, and of which job.
    in_time("to be rejected", took, 2 * ASKED);
    Passed(String::new())
}

pub(crate) fn stale_store() -> Outcome {
    let (store, name) = fresh();
    // Rank 0 is killed while it waits, and leaves the file.
    let mut crashed = job(&store, &name, &[(0, 2)]);
    let path = store.strip_prefix("file://").unwrap();
    wait_until("rank 0 does not create the store", || std::fs::metadata(path).is_ok_and(|file| file.len() >= 200));
    crashed.kill(0);
    crashed.hear(0, "end");
    let began = Instant::now();
    // Rank 1 comes first, and finds the old file.
    let mut next = job(&store, &name, &[(1, 2), (0, 2)]);
    next.all_say("done");
    let took = began.elapsed();
    next.hear_log(1, &["WARN", "replacing the store's file, which a former run has left behind"]);
    in_time("to replace the old file", took, ASKED);
    assert!(!std::path::Path::new(path).exists(), "the store's file is left");
    let _ = std::fs::remove_file(format!("{path}.lock"));
    Passed(format!("connected after {took:.0?}"))
}

/// Only ranks 1 and 3 of four start with the file that ranks 0, 1 and 2 of a crashed run have left.
pub(crate) fn stale_store_of_missing_ranks() -> Outcome {
    let (store, name) = fresh();
    let path = store.strip_prefix("file://").unwrap();
    let mut crashed = job(&store, &name, &[(0, 4), (1, 4), (2, 4)]);
    let contains = |text: &str| {
        let file = std::fs::read(path).unwrap_or_default();
        file.windows(text.len()).any(|part| part == text.as_bytes())
    };
    wait_until("a rank does not join", || ["/rank/0", "/rank/1", "/rank/2"].iter().all(|key| contains(key)));
    for rank in 0..3 {
        crashed.kill(rank);
        crashed.hear(rank, "end");
    }
    let mut next = Job::empty();
    let deadline = Duration::from_secs(4);
    let began = Instant::now();
    for number in [1, 3] {
        let mut command = rank("once", number, 4, &store, &name);
        command.env("KOLO_START_TIMEOUT", "4s");
        next.add(command);
    }
    for text in next.all_say("refused") {
        assert!(text.starts_with("Missing: 2 of 4 ranks") && text.contains("missing 0, 2;"), "{text}");
    }
    // Rank 0 does not live, so no rank waits for what it says.
    in_time("to report the missing ranks after the deadline", began.elapsed().saturating_sub(deadline), ASKED);
    let _ = std::fs::remove_file(path);
    let _ = std::fs::remove_file(format!("{path}.lock"));
    Passed(String::new())
}

pub(crate) fn two_jobs() -> Outcome {
    let address = format!("127.0.0.1:{}", free_port());
    let (file, _) = fresh();
    let path = file.strip_prefix("file://").unwrap();
    let is_served = || TcpStream::connect(&address).is_ok();
    let is_written = || std::fs::metadata(path).is_ok_and(|file| file.len() >= 200);
    let stores: [(String, &dyn Fn() -> bool); 2] = [(format!("tcp://{address}"), &is_served), (file.clone(), &is_written)];
    for (store, is_started) in stores {
        let mut first = job(&store, "first", &[(0, 2)]);
        wait_until("rank 0 does not create the store", is_started);
        let began = Instant::now();
        let mut second = job(&store, "second", &[(0, 2), (1, 2)]);
        for text in second.all_say("refused") {
            assert!(text.starts_with("Store: "), "{text}");
            assert!(text.contains("job \"first\"") && text.contains("job \"second\""), "{text}");
        }
        // With a file, a rank reads twice before it reports.
        in_time("to be rejected", began.elapsed(), 2 * ASKED);
        first.add(patient(rank("once", 1, 2, &store, "first")));
        first.all_say("done");
    }
    Passed(String::new())
}

pub(crate) fn rank_twice() -> Outcome {
    let (store, name) = fresh();
    let mut job = job(&store, &name, &[(0, 3), (1, 3), (1, 3)]);
    // The rank that comes second is rejected, and names both processes.
    let began = Instant::now();
    let deadline = Instant::now() + LATE;
    let mut refused = None;
    while refused.is_none() && Instant::now() < deadline {
        refused = [1, 2].into_iter().find(|&rank| job.has_said(rank, "refused"));
    }
    let refused = refused.expect("neither rank is rejected");
    let took = began.elapsed();
    let text = job.hear(refused, "refused");
    let pids = [job.pid(1), job.pid(2)].map(|pid| format!("process {pid} on "));
    assert!(text.starts_with("RankTaken: rank 1 was started twice"), "{text}");
    assert!(pids.iter().all(|pid| text.contains(pid)), "{text}");
    // The second rank waits 700 ms for the first one to end.
    in_time("to be rejected", took.saturating_sub(Duration::from_millis(700)), ASKED);
    // The other two ranks start when the missing rank comes.
    job.add(patient(rank("once", 2, 3, &store, &name)));
    [0, 3 - refused, 3].into_iter().for_each(|rank| _ = job.hear(rank, "done"));
    Passed(String::new())
}

/// The ranks agree on a secret, which a rank that is started twice does not learn.
pub(crate) fn rank_twice_without_a_secret() -> Outcome {
    for store in [format!("tcp://127.0.0.1:{}", free_port()), fresh().0] {
        let (_, name) = fresh();
        let mut job = Job::empty();
        for number in [0, 1, 1] {
            job.add(without_secret(patient(rank("once", number, 3, &store, &name))));
        }
        let deadline = Instant::now() + LATE;
        let mut refused = None;
        while refused.is_none() && Instant::now() < deadline {
            refused = [1, 2].into_iter().find(|&rank| job.has_said(rank, "refused"));
        }
        let refused = refused.expect("neither rank is rejected");
        let text = job.hear(refused, "refused");
        let pids = [job.pid(1), job.pid(2)].map(|pid| format!("process {pid} on "));
        assert!(text.starts_with("RankTaken: rank 1 was started twice"), "{store}: {text}");
        assert!(pids.iter().all(|pid| text.contains(pid)), "{store}: {text}");
        job.add(without_secret(patient(rank("once", 2, 3, &store, &name))));
        [0, 3 - refused, 3].into_iter().for_each(|rank| _ = job.hear(rank, "done"));
    }
    Passed(String::new())
}

/// All ranks start before or while the second process of rank 1 looks into the store.
pub(crate) fn rank_twice_at_the_end_of_the_start() -> Outcome {
    let mut taken = 0;
    let rounds = if runner::all() { 6 } else { 2 };
    for round in 0..rounds {
        let store = if round % 2 == 0 { fresh().0 } else { format!("tcp://127.0.0.1:{}", free_port()) };
        let (_, name) = fresh();
        let mut job = Job::empty();
        for number in [0, 1, 1] {
            let mut command = without_secret(rank("work", number, 2, &store, &name));
            command.env("KOLO_START_TIMEOUT", "20s");
            job.add(command);
        }
        let deadline = Instant::now() + LATE;
        let mut refused = None;
        while refused.is_none() && Instant::now() < deadline {
            refused = [1, 2].into_iter().find(|&rank| job.has_said(rank, "refused"));
        }
        let refused = refused.expect("neither rank is rejected");
        let text = job.hear(refused, "refused");
        let is_taken = text.starts_with("RankTaken: rank 1 was started twice: as ");
        let has_hint = text.contains("started twice") || text.contains("was started once");
        assert!(is_taken || has_hint, "{store}: {text}");
        taken += u32::from(is_taken);
        // The other two work.
        for rank in [0, 3 - refused] {
            job.hear(rank, "ready");
            job.hear(rank, "ready");
        }
    }
    Passed(format!("the other process was seen {taken} times of {rounds}"))
}

pub(crate) fn missing_rank() -> Outcome {
    let (store, name) = fresh();
    let mut job = Job::empty();
    for number in [0, 2] {
        let mut command = rank("once", number, 5, &store, &name);
        command.env("KOLO_START_TIMEOUT", "2s");
        job.add(command);
    }
    for text in job.all_say("refused") {
        assert!(text.starts_with("Missing: 3 of 5 ranks") && text.contains("missing 1, 3, 4"), "{text}");
    }
    Passed(String::new())
}

/// Rank 2 is stopped while the ranks connect. Rank 0 waits for it, and ranks 1 and 3 wait for rank
/// 0. The deadline of rank 0 comes last, and then first.
pub(crate) fn stopped_at_the_start() -> Outcome {
    for of_rank_0 in ["7s", "5s"] {
        let (store, name) = fresh();
        let path = store.strip_prefix("file://").unwrap();
        let mut job = Job::empty();
        let add = |job: &mut Job, number: usize| {
            let mut command = rank("once", number, 4, &store, &name);
            command.env("KOLO_START_TIMEOUT", if number == 0 { of_rank_0 } else { "6s" });
            job.add(command);
        };
        (0..3).for_each(|number| add(&mut job, number));
        let has_joined = || std::fs::read(path).unwrap_or_default().windows(7).any(|part| part == b"/rank/2");
        wait_until("rank 2 does not join", has_joined);
        job.stop(2);
        // The ranks connect when the last one has joined.
        add(&mut job, 3);
        for number in [0, 1, 3] {
            let text = job.hear(number, "refused");
            let about = format!("rank 0 has {of_rank_0}, rank {number}: {text}");
            assert!(text.starts_with("Peer: ") && text.contains("rank 2 (") && text.contains(SAYS_STOPPED), "{about}");
            assert!(!text.contains("rank 0 ("), "{about}");
        }
    }
    Passed(String::new())
}

pub(crate) fn world_sizes() -> Outcome {
    let (store, name) = fresh();
    let began = Instant::now();
    let mut job = job(&store, &name, &[(0, 3), (1, 2), (2, 3)]);
    for text in job.all_say("refused") {
        assert!(text.starts_with("WorldSize: world sizes differ: rank 1 ("), "{text}");
        assert!(text.contains(") was started with 2, rank 0 with 3;"), "{text}");
    }
    in_time("to be rejected", began.elapsed(), ASKED);
    Passed(String::new())
}

/// After a crash the job starts again with fewer ranks, and then with more, with the same store.
pub(crate) fn other_world_size() -> Outcome {
    for store in [fresh().0, format!("tcp://127.0.0.1:{}", free_port())] {
        let job = |world: usize, task: &str| {
            let mut job = Job::empty();
            (0..world).for_each(|number| job.add(rank(task, number, world, &store, "again")));
            job
        };
        let mut first = job(3, "work");
        first.all_work();
        first.kill(1);
        first.all_name(&[0, 2], 1, &GONE, now());
        job(2, "once").all_say("done");
        job(4, "once").all_say("done");
    }
    Passed(String::new())
}

/// With a file that many ranks read, the missing ranks are told apart from the others.
pub(crate) fn missing_of_many() -> Outcome {
    const CAME: usize = 24;
    let (store, name) = fresh();
    let mut job = Job::empty();
    // Rank 0 starts last. The others wait for longer, so that they learn from it who is missing.
    let deadline = at_most(Duration::from_secs(8)).as_secs();
    for number in (0..CAME).rev() {
        let mut command = rank("once", number, CAME + 2, &store, &name);
        let timeout = if number == 0 { deadline } else { 4 * deadline };
        command.env("KOLO_START_TIMEOUT", format!("{timeout}s"));
        job.add(command);
    }
    for text in job.all_say("refused") {
        assert!(text.contains("2 of 26 ranks did not join") && text.contains("missing 24, 25;"), "{text}");
    }
    Passed(String::new())
}

/// As many ranks as a large machine has start with a file about as fast as with a server.
pub(crate) fn file_keeps_up() -> Outcome {
    const RANKS: usize = 48;
    let start = |store: String| {
        let began = Instant::now();
        let mut job = Job::empty();
        (0..RANKS).for_each(|number| job.add(rank("once", number, RANKS, &store, "many")));
        job.all_say("done");
        began.elapsed()
    };
    let mut ratios: Vec<f64> = (0..3)
        .map(|_| start(fresh().0).as_secs_f64() / start(format!("tcp://127.0.0.1:{}", free_port())).as_secs_f64())
        .collect();
    ratios.sort_by(f64::total_cmp);
    // Other programs share the machine. If every rank read the whole file again and again, the
    // ratio would be about the number of ranks.
    assert!(ratios[0] < 3.0, "times with a file over times with a server: {ratios:.2?}");
    Passed(format!("{RANKS} ranks: times with a file over times with a server {ratios:.2?}"))
}

/// The server of the store runs in this process, as under `kolo run`.
pub(crate) fn store_ends() -> Outcome {
    let server = kolo::TcpStoreServer::bind("127.0.0.1:0".parse().unwrap(), "served", Some(secret())).unwrap();
    let mut job = Job::empty();
    for number in 0..3 {
        let mut command = rank("work", number, 3, &server.url(), "served");
        command.env("KOLO_STORE_SERVED", "1");
        job.add(command);
    }
    job.all_work();
    drop(server);
    job.all_go_on();
    // The store is not needed to find the rank that failed either.
    job.kill(0);
    job.all_name(&[1, 2], 0, &GONE, now());
    Passed(String::new())
}

/// Rank 0 is stopped while all others start, and then must accept all at once.
pub(crate) fn paused_root() -> Outcome {
    /// More than the strangers that a listener accepts at once.
    const RANKS: usize = 100;
    let port = free_port();
    let (_, name) = fresh();
    let store = format!("tcp://127.0.0.1:{port}");
    let crowd = |number| {
        let mut command = rank("crowd", number, RANKS, &store, &name);
        command.env("KOLO_START_TIMEOUT", "120s").env("KOLO_TIMEOUT", "120s");
        command
    };
    let mut job = Job::empty();
    job.add(crowd(0));
    wait_until("rank 0 does not serve the store", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    job.stop(0);
    (1..RANKS).for_each(|number| job.add(crowd(number)));
    (1..RANKS).for_each(|number| _ = job.hear(number, "begins"));
    // Longer than the listener waits for a handshake.
    std::thread::sleep(Duration::from_secs(1));
    job.go_on(0);
    let since = now();
    job.all_say("done");
    Passed(format!("{RANKS} ranks, {:.1?} after rank 0 continued", Duration::from_micros(now() - since)))
}

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::format::{View, fuzz, header, record};
use super::log::{Log, Look};
use super::store::FileStore;
use crate::error::StoreError;
use crate::sys;
use crate::timeouts::{FILE_LOCK_CHECK, LONGEST_FILE_PAUSE};

/// A folder that is removed with its files.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Leaves the file and the lock of a former run of another job, which rank 0 and another rank of
/// this job find.
fn left_behind(name: &str) -> (Folder, [Log; 2]) {
    let folder = Folder(std::env::temp_dir().join(format!("kolo-{name}-{}", std::process::id())));
    std::fs::create_dir(&folder.0).unwrap();
    let path = folder.0.join("store");
    let logs = [(); 2].map(|()| Log::new(&path, "second"));
    for (path, bytes) in [(&path, header([3; 16], "first")), (&logs[0].lock_path(), Vec::new())] {
        let file = sys::open_own(OpenOptions::new().write(true).create_new(true), path);
        file.ok().unwrap().write_all(&bytes).unwrap();
    }
    (folder, logs)
}

#[test]
fn a_rank_waits_while_its_rank_0_is_slow_to_replace_the_file() {
    let (_folder, [mut zero, mut other]) = left_behind("slow-rank-0");
    let began = Instant::now();
    let held = zero.own().unwrap();
    while began.elapsed() < 3 * FILE_LOCK_CHECK {
        let found = other.value("key");
        assert!(matches!(&found, Ok(Look::NotYet(Some(StoreError::OtherJob { .. })))), "{:?}", found.err());
        std::thread::sleep(LONGEST_FILE_PAUSE);
    }
    drop(held);
}

/// The file belongs to a former run of one job, while another job starts with it.
#[test]
fn the_job_that_starts_is_named_and_not_the_one_before() {
    let (_folder, [mut third, mut other]) = left_behind("third-job");
    third.job = "third".to_owned();
    let held = third.own().unwrap();
    let began = Instant::now();
    loop {
        match other.value("key") {
            Err(StoreError::InUse { theirs, mine, .. }) => break assert_eq!([theirs, mine], ["third", "second"]),
            Ok(Look::NotYet(Some(StoreError::OtherJob { .. }))) => {}
            found => panic!("{:?}", found.err()),
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the other job is not noticed");
        std::thread::sleep(LONGEST_FILE_PAUSE);
    }
    drop(held);
}

#[test]
fn rank_0_waits_while_another_rank_checks_the_lock() {
    let (_folder, [zero, _]) = left_behind("looked-at");
    let lock = File::open(zero.lock_path()).unwrap();
    sys::try_lock_shared(&lock).unwrap();
    let check = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(lock);
    });
    let late = Instant::now() + Duration::from_secs(60);
    if let Err(problem) = FileStore::open(&zero.path, true, "second", late) {
        panic!("{problem}");
    }
    check.join().unwrap();
}

#[test]
fn records_survive_a_crash_in_the_middle_of_the_next() {
    let mut bytes = header([3; 16], "job");
    bytes.extend(record("a", b"1"));
    let whole = bytes.len();
    bytes.extend(record("b", b"22"));
    for cut in whole..bytes.len() {
        let mut view = View::default();
        view.take_in(&bytes[..cut]);
        assert_eq!((view.end, view.values.len()), (whole as u64, 1), "cut at {cut}");
        view.take_in(&bytes[whole..]);
        assert_eq!(view.values["b"], b"22", "cut at {cut}");
    }
}

proptest! {
    #[test]
    fn damaged_files_are_read_without_harm(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
        real in any::<bool>(),
        flip in any::<(usize, u8)>(),
    ) {
        if real {
            let mut whole = header([1; 16], "job");
            whole.extend(record("key", &bytes));
            let at = flip.0 % whole.len();
            whole[at] ^= flip.1;
            bytes = whole;
        }
        fuzz(&bytes);
    }
}

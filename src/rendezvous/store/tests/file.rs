use std::sync::mpsc;
use std::time::{Duration, Instant};

#[cfg(unix)]
use super::not_run;
use super::{LATE, SOON, identity, late, promises, temporary};
use crate::error::{Error, StoreError};
use crate::network::identity::Identity;
#[cfg(unix)]
use crate::rendezvous::store::file;
use crate::rendezvous::store::{StoreUrl, open};
use crate::sys;

fn file_url() -> StoreUrl {
    StoreUrl::File(temporary())
}

#[test]
fn file_stores() {
    let url = file_url();
    let zero = open(&url, true, &identity(), late()).unwrap();
    let other = open(&url, false, &identity(), late()).unwrap();
    promises(&*zero, &*other);
    drop(zero);
    let StoreUrl::File(path) = url else { unreachable!() };
    assert!(!path.exists(), "rank 0 removes the file when it drops the store");
}

/// Opens a file as another rank and then as rank 0; returns the errors, which refuse the file.
#[cfg(unix)]
fn refused(path: &std::path::Path) -> [String; 2] {
    let url = StoreUrl::File(path.to_owned());
    let other = open(&url, false, &identity(), late()).unwrap().get("a", SOON).unwrap_err();
    assert!(matches!(other, StoreError::Untrusted(_)), "{other}");
    let zero = open(&url, true, &identity(), late()).err().expect("rank 0 refuses the file");
    assert!(matches!(zero, Error::Store { problem: StoreError::Untrusted(_), .. }), "{zero}");
    assert!(path.symlink_metadata().is_ok(), "the refused file is not changed");
    [other.to_string(), zero.to_string()]
}

#[cfg(unix)]
#[test]
fn a_file_that_others_may_have_written_is_refused() {
    use std::os::unix::fs::PermissionsExt;

    let path = temporary();
    let former = || {
        std::fs::write(&path, file::sample()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    former();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
    for text in refused(&path) {
        assert!(
            text.contains("users other than its owner") && text.contains("mode 0622") && text.contains("remove it"),
            "{text}"
        );
    }
    if rustix::process::geteuid().is_root() {
        former();
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        for text in refused(&path) {
            assert!(text.contains("belongs to user 65534 (mode 0600), and this process runs as user 0"), "{text}");
        }
    } else {
        not_run("a store's file of another user; only root can give files away");
    }
    former();
    let link = temporary();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    refused(&link).iter().for_each(|text| assert!(text.contains("symbolic link"), "{text}"));
    std::fs::remove_file(&link).unwrap();
    // A lock that another user may have made is refused, too.
    let lock = std::path::PathBuf::from(format!("{}.lock", path.display()));
    std::os::unix::fs::symlink(&path, &lock).unwrap();
    let result = open(&StoreUrl::File(path.clone()), true, &identity(), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreError::Untrusted(_), .. })));
    std::fs::remove_file(&lock).unwrap();
    std::fs::remove_file(&path).unwrap();
    // A pipe without a writer is refused at once.
    let pipe = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    refused(&path).iter().for_each(|text| assert!(text.contains("not a regular file"), "{text}"));
    std::fs::remove_file(&path).unwrap();
}

#[cfg(unix)]
#[test]
fn only_its_user_can_open_a_file_store() {
    use std::os::unix::fs::PermissionsExt;

    let path = temporary();
    // A file that other users could read, and may have opened, is not written to.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let former = std::fs::File::open(&path).unwrap();
    let zero = open(&StoreUrl::File(path.clone()), true, &identity(), late()).unwrap();
    assert!(zero.is_private());
    zero.set("secret", b"1", LATE).unwrap();
    for path in [path.clone(), format!("{}.lock", path.display()).into()] {
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
    }
    assert_eq!(former.metadata().unwrap().len(), 0);
}

/// A writer was killed in the middle of a record, at any of its bytes.
#[test]
fn the_next_writer_overwrites_a_torn_record() {
    let url = file_url();
    let StoreUrl::File(path) = &url else { unreachable!() };
    let zero = open(&url, true, &identity(), late()).unwrap();
    zero.set("first", &[1; 100], LATE).unwrap();
    let whole = std::fs::read(path).unwrap();
    zero.set("second", &[2; 100], LATE).unwrap();
    let torn = std::fs::read(path).unwrap()[whole.len()..].to_vec();
    for cut in (1..torn.len()).step_by(7) {
        std::fs::write(path, [&whole[..], &torn[..cut]].concat()).unwrap();
        let [reader, writer] = [0; 2].map(|_| open(&url, false, &identity(), late()).unwrap());
        assert_eq!(reader.get("first", LATE).unwrap().unwrap(), [1; 100]);
        assert_eq!(reader.get("second", Duration::ZERO).unwrap(), None);
        writer.set("third", &[cut as u8], LATE).unwrap();
        let late_reader = open(&url, false, &identity(), late()).unwrap();
        for store in [reader, writer, late_reader] {
            assert_eq!(store.get("third", LATE).unwrap().unwrap(), [cut as u8], "cut at {cut}");
        }
    }
}

/// A process that is stopped in the middle of a record holds the lock.
#[test]
fn a_locked_file_is_readable_and_writers_report_the_lock() {
    let url = file_url();
    let StoreUrl::File(path) = &url else { unreachable!() };
    let zero = open(&url, true, &identity(), late()).unwrap();
    let other = open(&url, false, &identity(), late()).unwrap();
    zero.set("a", b"1", LATE).unwrap();
    let lock = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    lock.lock().unwrap();
    // On Windows, this lock of the standard library is on all bytes, and kolo's is not.
    if !cfg!(windows) {
        assert_eq!(other.get("a", LATE).unwrap().unwrap(), b"1");
    }
    let error = other.set("b", b"2", SOON).unwrap_err().to_string();
    assert!(error.contains("its lock, which another process holds"), "{error}");
    drop(lock);
    let lock = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    sys::try_lock(&lock).unwrap();
    assert_eq!(other.get("a", LATE).unwrap().unwrap(), b"1");
    let error = other.set("b", b"2", SOON).unwrap_err().to_string();
    assert!(error.contains("its lock, which another process holds"), "{error}");
    drop(lock);
    other.set("b", b"2", LATE).unwrap();
}

#[test]
fn many_writers_and_readers_of_one_file_lose_nothing() {
    const RANKS: usize = 64;
    let url = file_url();
    let zero = open(&url, true, &identity(), late()).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let url = &url;
            scope.spawn(move || {
                let store = open(url, false, &identity(), late()).unwrap();
                let mine = rank.to_le_bytes();
                assert_eq!(store.claim(&format!("rank/{rank}"), &mine, LATE).unwrap(), mine);
                assert_eq!(store.claim("first", &mine, LATE).unwrap().len(), mine.len());
                assert_eq!(store.get("table", LATE).unwrap().unwrap(), b"all");
            });
        }
        for rank in 0..RANKS {
            assert_eq!(zero.get(&format!("rank/{rank}"), LATE).unwrap().unwrap(), rank.to_le_bytes());
        }
        zero.set("table", b"all", LATE).unwrap();
    });
    let first = zero.get("first", LATE).unwrap();
    assert_eq!(zero.claim("first", b"too late", LATE).unwrap(), first.unwrap());
}

#[test]
fn the_file_of_a_crashed_run_is_replaced() {
    let url = file_url();
    let crashed = open(&url, true, &identity(), late()).unwrap();
    crashed.set("table", b"stale", LATE).unwrap();
    let StoreUrl::File(path) = &url else { unreachable!() };
    let left = std::fs::read(path).unwrap();
    drop(crashed);
    std::fs::write(path, left).unwrap();

    let zero = open(&url, true, &identity(), late()).unwrap();
    assert_eq!(zero.get("table", SOON).unwrap(), None);
}

#[test]
fn two_jobs_with_one_file_get_errors() {
    let url = file_url();
    let _zero = open(&url, true, &identity(), late()).unwrap();
    let problem = |result: Result<_, Error>| match result {
        Err(Error::Store { problem, .. }) => problem,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("opened"),
    };
    let second = Identity::new("second", None);
    match problem(open(&url, true, &second, late())) {
        StoreError::InUse { theirs, mine, process } => {
            assert_eq!((&*theirs, &*mine), ("job", "second"));
            assert!(process.starts_with(&format!("process {} on ", std::process::id())), "{process}");
        }
        other => panic!("{other}"),
    }
    let stray = open(&url, false, &second, late()).unwrap();
    let deadline = late();
    loop {
        match stray.get("a", SOON) {
            // At first the file may seem to belong to a former run.
            Err(StoreError::OtherJob { theirs, mine }) if Instant::now() < deadline => {
                assert_eq!((&*theirs, &*mine), ("job", "second"));
            }
            Err(problem @ StoreError::InUse { .. }) => {
                let text = problem.to_string();
                let is_named = text.contains("job \"job\" (process ") && text.contains("belongs to job \"second\"");
                assert!(is_named, "{text}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Ranks that check the lock of a former run of another job do not stop their rank 0.
#[test]
fn the_file_of_a_former_job_is_replaced_while_ranks_check_it() {
    let url = file_url();
    let StoreUrl::File(path) = &url else { unreachable!() };
    let zero = open(&url, true, &identity(), late()).unwrap();
    let left = std::fs::read(path).unwrap();
    drop(zero);
    let lock = format!("{}.lock", path.display());
    for file in [path.to_str().unwrap(), &lock] {
        std::fs::write(file, if file == lock { &[] } else { &left[..] }).unwrap();
        #[cfg(unix)]
        std::fs::set_permissions(file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let second = Identity::new("second", None);
    // Rank 0 keeps the store until all ranks have read its value.
    let zero = std::thread::scope(|scope| {
        let (looked, has_looked) = mpsc::channel();
        for _ in 0..8 {
            let (stray, looked) = (open(&url, false, &second, late()).unwrap(), looked.clone());
            scope.spawn(move || {
                let began = Instant::now();
                // This is more than twice the time until the second check.
                while began.elapsed() < Duration::from_millis(2500) {
                    let found = stray.get("a", SOON);
                    assert!(matches!(found, Err(StoreError::OtherJob { .. })), "{found:?}");
                }
                looked.send(()).unwrap();
                let deadline = late();
                let mut found = stray.get("a", SOON);
                while matches!(found, Err(StoreError::OtherJob { .. }) | Ok(None)) && Instant::now() < deadline {
                    found = stray.get("a", SOON);
                }
                assert_eq!(found.unwrap().unwrap(), b"1");
            });
        }
        (0..8).for_each(|_| has_looked.recv_timeout(LATE).unwrap());
        let zero = open(&url, true, &second, late()).unwrap();
        zero.set("a", b"1", LATE).unwrap();
        zero
    });
    drop(zero);
    assert!(!path.exists() && !std::path::Path::new(&lock).exists());
}

#[test]
fn a_file_that_is_no_store_is_not_changed() {
    let path = temporary();
    std::fs::write(&path, "my thesis").unwrap();
    let result = open(&StoreUrl::File(path.clone()), true, &identity(), late());
    assert!(matches!(result.err(), Some(Error::Store { problem: StoreError::Foreign(_), .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"my thesis");
    std::fs::remove_file(&path).unwrap();
}

//! What programs do to descriptors: rows 70 and 72.

use std::time::Duration;

use kolo::Communicator;

use crate::job::Job;
use crate::processes::on_every_transport;
use crate::rank::{Calls, End, Task, collectives, say};
use crate::runner::Outcome::{self, Passed};
use crate::wait::free_port;

/// Where a rank keeps its standard input, output and error while they are closed.
const KEPT: i32 = 500;

/// Closes standard input, output and error. From now on the lines of this rank go nowhere.
pub(super) fn close_standard() {
    for number in 0..3 {
        // SAFETY: the numbers are open, and only this thread uses them.
        unsafe {
            assert_eq!(libc::dup2(number, KEPT + number), KEPT + number);
            assert_eq!(libc::close(number), 0);
        }
    }
}

/// Undoes [`close_standard`].
fn open_standard() {
    for number in 0..3 {
        // SAFETY: as above.
        unsafe {
            assert_eq!(libc::dup2(KEPT + number, number), number);
            assert_eq!(libc::close(KEPT + number), 0);
        }
    }
}

/// Runs collectives and prints lines meanwhile.
pub(super) fn print_into_nothing(comm: &Communicator) -> Task {
    let ended = collectives(Calls::of(comm), Duration::MAX, 60);
    let names = (0..3).filter_map(|number| std::fs::read_link(format!("/proc/self/fd/{number}")).ok());
    // While kolo makes descriptors, the root folder occupies the numbers.
    let taken: Vec<_> = names.filter(|name| name.as_os_str() != "/").collect();
    open_standard();
    say(&format!("taken {taken:?}"));
    ended?;
    Err(End::Leaves(Box::new(|| {})))
}

/// Ranks have closed their standard input, output and error before they connect. What they print
/// reaches no connection.
pub(crate) fn closed_standard() -> Outcome {
    on_every_transport(|name, more| {
        let mut job = Job::start("closed", 3, 60_000, more);
        for taken in job.all_say("taken") {
            assert_eq!(taken, "[]", "{name}");
        }
        (0..3).for_each(|rank| job.ends_clean(rank));
    });
    Passed(String::new())
}

/// Closes all descriptors but standard input, output and error. Then opens as many files as
/// `KOLO_TEST_FILES` says, which get their numbers. They stay as they are when the communicator is
/// dropped.
pub(super) fn close_from(comm: &Communicator) -> Task {
    const TEXT: &[u8] = b"theirs";
    let count: usize = std::env::var("KOLO_TEST_FILES").unwrap().parse().unwrap();
    collectives(Calls::of(comm), Duration::MAX, 20)?;
    // SAFETY: no descriptor of this program is used afterwards.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
    // SAFETY: the name ends with a zero, and the text has as many bytes.
    let files: Vec<i32> = (0..count)
        .map(|_| unsafe {
            let file = libc::memfd_create(c"theirs".as_ptr(), 0);
            assert_eq!(libc::write(file, TEXT.as_ptr().cast(), TEXT.len()), TEXT.len() as isize);
            file
        })
        .collect();
    let look = move || {
        let is_changed = |file: &i32| std::fs::read(format!("/proc/self/fd/{file}")).ok().as_deref() != Some(TEXT);
        say(&format!("changed {:?}", files.iter().copied().filter(is_changed).collect::<Vec<_>>()));
        std::process::exit(0);
    };
    Err(End::Leaves(Box::new(look)))
}

/// Ranks close the descriptors of the library, as a program that becomes a daemon does. Files that get
/// their numbers are neither written to nor closed, and the end of the communicator does not wait for
/// what cannot come.
pub(crate) fn close_all() -> Outcome {
    for files in [0, 200] {
        on_every_transport(|name, more| {
            let store = format!("tcp://127.0.0.1:{}", free_port());
            let mut job = Job::start("closefrom", 3, 60_000, |rank, command| {
                more(rank, command);
                command.env("KOLO_TEST_FILES", files.to_string()).env("KOLO_STORE", &store).env("KOLO_METRICS", "127.0.0.1:0");
            });
            for changed in job.all_say("changed") {
                assert_eq!(changed, "[]", "{name}, {files} files");
            }
            job.all_say("end");
        });
    }
    Passed(String::new())
}

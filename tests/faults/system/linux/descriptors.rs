//! What programs do to descriptors: rows 70 and 71.

use std::time::Duration;

use kolo::Communicator;

use crate::job::Job;
use crate::processes::on_every_transport;
use crate::rank::{Calls, End, Task, collectives, say};
use crate::runner::Outcome::{self, Passed};

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

//! Tests that wait for a deadline of seconds. Tests begin in the order of their names: those of this module do when many others
//! are still to run, and nothing waits for them at the end.

use std::path::PathBuf;

use crate::program::{Folder, everything};
use crate::soak::soak;
use crate::trace;

/// One round with a rank that is stopped before any rank has a link to it.
fn unlinked(fault: &str) -> String {
    let output = soak(&["--seed", "7", "--minutes", "0", "--fault", fault]);
    assert!(output.status.success(), "{}", everything(&output));
    everything(&output)
}

#[test]
fn a_rank_that_is_stopped_before_it_has_links_is_waited_for() {
    let said = unlinked("pause-unlinked");
    assert!(said.contains("faults: paused 1") && !said.contains("went on"), "{said}");
}

#[test]
fn a_rank_that_is_stopped_before_it_has_links_is_given_up_at_the_deadline() {
    let said = unlinked("stop-unlinked");
    assert!(said.contains("faults: stopped 1") && said.contains("went on after"), "{said}");
}

#[test]
fn a_rank_that_is_late_beyond_the_deadline_is_named() {
    let folder = Folder::new("late");
    let output = trace::job("late", &folder.0).output().unwrap();
    assert!(output.status.success(), "{}", everything(&output));
    let files = trace::ranks_files(&folder.0);
    let name = |path: &PathBuf| path.to_str().unwrap().to_owned();
    // The files of the two ranks that gave up, before the third has called.
    let early: Vec<PathBuf> = files.iter().filter(|path| !name(path).ends_with("rank2.json")).cloned().collect();
    assert_eq!(early.len(), 2, "{files:?}");
    let without = trace::said(&early);
    assert!(without.contains("no file of rank 2") && without.contains("names it"), "{without}");
    // All three files: when the third rank called, the communicator had ended.
    let all = trace::said(&files);
    assert!(
        all.contains("first disagreement: world, seq 8") && all.contains("  ranks 0, 1: all_reduce f32 x 1000 max, failed"),
        "{all}"
    );
    assert!(all.contains("  rank 2 has not called it: its last is seq 7, split, done"), "{all}");
    assert!(all.contains("  the others waited for rank 2 for at least 5.0"), "{all}");
}

//! `kolo soak` as a user meets it. What it checks is tested beside the code.
#![cfg(unix)]

use std::process::{Command, Output};

fn soak(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kolo")).arg("soak").args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_short_soak_passes_and_says_what_it_did() {
    let output = soak(&["--minutes", "0.1"]);
    let said = text(&output);
    assert!(output.status.success() && said.contains("kolo soak: 4 ranks, seed "), "{said}");
    assert!(said.lines().last().unwrap().starts_with("soak passed: ") && said.contains("results checked"), "{said}");
    assert!(said.contains("round 0: "), "{said}");
}

#[test]
fn a_seed_replays() {
    for round in ["1", "2", "7"] {
        let play = || {
            let output = soak(&["--seed", "11", "--round", round, "--ranks", "3"]);
            let said = text(&output);
            assert!(output.status.success(), "{said}");
            // What was done; how it went may differ in its times.
            let line = said.lines().find(|line| line.starts_with("round ")).unwrap();
            line.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": ")
        };
        assert_eq!(play(), play());
    }
}

#[test]
fn a_round_that_does_not_end_is_a_hang_and_can_be_replayed() {
    // So little patience has nobody.
    let output = soak(&["--seed", "5", "--round", "3", "--patience", "1ms"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a hang: after 1ms") && said.contains("kolo soak --seed 5 --round 3 --ranks 4"), "{said}");
}

/// Whatever else goes on in a round, who is killed is named, and every result is right.
#[test]
fn each_ingredient_is_survived() {
    for with in ["splits", "many-splits", "holder", "forks", "stranger"] {
        let output = soak(&["--seed", "7", "--minutes", "0", "--fault", "kill", "--with", with]);
        let said = text(&output);
        assert!(output.status.success() && said.contains("1 round in") && said.contains("faults: killed 1"), "{with}: {said}");
    }
}

/// One round with a rank that is stopped before any rank has a link to it.
fn unlinked(fault: &str) -> String {
    let output = soak(&["--seed", "7", "--minutes", "0", "--fault", fault]);
    assert!(output.status.success(), "{}", text(&output));
    text(&output)
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

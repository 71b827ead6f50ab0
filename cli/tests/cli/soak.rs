//! `kolo soak` as users run it. Unit tests beside the code cover its checks.

use std::process::{Command, Output};

use crate::program::everything;

pub(crate) fn soak(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kolo")).arg("soak").args(arguments).output().unwrap()
}

#[test]
fn a_short_soak_passes_and_says_what_it_did() {
    let output = soak(&["--minutes", "0.02"]);
    let said = everything(&output);
    assert!(output.status.success() && said.contains("kolo soak: 4 ranks, seed "), "{said}");
    assert!(said.lines().last().unwrap().starts_with("soak passed: ") && said.contains("results checked"), "{said}");
    assert!(said.contains("round 0: "), "{said}");
}

#[test]
fn a_seed_replays() {
    for round in if crate::common::all() { &["1", "2", "7"][..] } else { &["6"] } {
        let play = || {
            let output = soak(&["--seed", "11", "--round", round, "--ranks", "3"]);
            let said = everything(&output);
            assert!(output.status.success(), "{said}");
            // Compare what was done. The times may differ.
            let line = said.lines().find(|line| line.starts_with("round ")).unwrap();
            line.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": ")
        };
        assert_eq!(play(), play());
    }
}

#[test]
fn a_round_that_does_not_end_is_a_hang_and_can_be_replayed() {
    // The round lasts for seconds, because a rank is stopped for seconds.
    let output = soak(&["--seed", "7", "--minutes", "0", "--fault", "stop", "--patience", "1ms"]);
    let said = everything(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a hang: after 1ms") && said.contains("kolo soak --seed 7 --round "), "{said}");
}

/// In a round with all ingredients, the killed rank is named and every result is right.
#[test]
fn each_ingredient_is_survived() {
    for with in ["splits", "many-splits", "holder", "forks", "stranger"] {
        if cfg!(windows) && with == "forks" {
            continue;
        }
        let output = soak(&["--seed", "7", "--minutes", "0", "--fault", "kill", "--with", with]);
        let said = everything(&output);
        assert!(output.status.success() && said.contains("1 round in") && said.contains("faults: killed 1"), "{with}: {said}");
    }
}

/// In the middle of a round, or while it looks for a round, the soak ends its ranks and leaves
/// nothing in the folder for temporary files.
#[cfg(unix)]
#[test]
fn a_soak_that_is_stopped_leaves_nothing() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    // The ranks of a round wait for the stopped one until their deadline.
    for (signal, number) in [("TERM", 15), ("INT", 2)] {
        let folder = std::env::temp_dir().join(format!("kolo-soak-stopped-{signal}-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.args(["soak", "--seed", "7", "--minutes", "60", "--fault", "stop"]).env("TMPDIR", &folder);
        let mut soak = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(soak.stdout.take().unwrap()).lines();
        assert!(lines.next().unwrap().unwrap().starts_with("kolo soak: "));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "the soak has its folder");
        let told = Command::new("kill").args([&format!("-{signal}"), &soak.id().to_string()]).status().unwrap();
        assert!(told.success());
        lines.for_each(drop);
        let output = soak.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + number), "{}", everything(&output));
        assert!(everything(&output).contains(&format!("stopped by SIG{signal}")), "{}", everything(&output));
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
        std::fs::remove_dir(&folder).unwrap();
    }
}

#[cfg(windows)]
#[test]
fn what_the_system_does_not_have_is_refused() {
    for (chosen, why) in [(["--fault", "cut"], "--fault cut is not possible here"), (["--with", "forks"], "Windows has no forks")]
    {
        let output = soak(&chosen);
        assert!(!output.status.success() && everything(&output).contains(why), "{}", everything(&output));
    }
}

#[test]
fn a_soak_without_a_round_of_the_chosen_kind_fails() {
    // No round has splits and many splits.
    let output = soak(&["--seed", "7", "--with", "splits,many-splits"]);
    let said = everything(&output);
    assert!(!output.status.success() && said.contains("no round has such a fault"), "{said}");
}

//! Which processors ranks may use, and how many threads they are told to start.

use std::process::{Output, Stdio};

use crate::program::{kolo, program, text};

/// What a rank says of its processors and its threads.
const SAY: &str = "sed -n 's/^Cpus_allowed_list:[[:space:]]*/allowed /p' /proc/self/status; echo threads ${OMP_NUM_THREADS-none}";

fn run(ranks: &str, options: &[&str]) -> Output {
    kolo(&[&["run", "-n", ranks], options, &["--", "sh", "-c", SAY]].concat())
}

/// Returns what is said after a word.
fn after(said: &str, word: &str) -> Vec<String> {
    said.lines().filter_map(|line| Some(line.split_once(word)?.1.trim().to_owned())).collect()
}

/// Parses `0-2,5` and `0,1,2,5`.
fn processors(list: &str) -> Vec<u32> {
    let parsed = list.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    });
    parsed.collect()
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_are_bound_as_is_reported() {
    let unbound = run("1", &["--report-bindings"]);
    assert_eq!(text(&unbound.stderr), "kolo run: rank 0 is not bound\n");
    let all = processors(&after(&text(&unbound.stdout), "allowed ")[0]);
    for (what, name) in [("core", "core"), ("l3", "L3 cache"), ("numa", "NUMA node")] {
        let output = run("1", &["--bind-to", what, "--report-bindings"]);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(err.starts_with(&format!("kolo run: rank 0 is bound to {name} 0 (processors ")), "{err}");
        let reported = after(&err, "(processors ")[0].trim_end_matches(')').to_owned();
        let allowed = processors(&after(&out, "allowed ")[0]);
        assert_eq!(allowed, processors(&reported), "{out}{err}");
        assert!(allowed.iter().all(|processor| all.contains(processor)));
    }
    let output = run("4096", &["--bind-to", "core"]);
    let err = text(&output.stderr);
    assert!(
        output.status.code() == Some(125) && err.contains("for 4096 ranks; start ") && err.contains("--bind-to none"),
        "{err}"
    );
}

#[test]
fn ranks_that_share_a_host_share_its_threads() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let threads = |output: Output| after(&text(&output.stdout), "threads ");
    let told = threads(run("2", &[]));
    let told: Vec<usize> = told.iter().map(|threads| threads.parse().unwrap()).collect();
    assert!(told.len() == 2 && told.iter().all(|&threads| threads >= 1 && threads <= (cores / 2).max(1)), "{told:?}");
    assert_eq!(threads(run("1", &[])), ["none"]);
    assert_eq!(threads(run("2", &["-x", "OMP_NUM_THREADS=5"])), ["5", "5"]);
    let given =
        program().env("OMP_NUM_THREADS", "3").args(["run", "-n", "2", "--", "sh", "-c", SAY]).stdin(Stdio::null()).output();
    assert_eq!(threads(given.unwrap()), ["3", "3"]);
}

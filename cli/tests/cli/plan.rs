//! `kolo plan`: prices, simulations and variables.

use std::process::Stdio;

use crate::program::{failed, program, said, text};

#[test]
fn the_prices_are_printed_as_json() {
    let arguments = ["plan", "all_reduce", "--ranks", "8", "--hosts", "8", "--json"];
    let plan: serde_json::Value = serde_json::from_str(&said(&arguments)).unwrap();
    let algorithms = plan["algorithms"].as_array().unwrap();
    assert!(algorithms.len() > 4 && algorithms[0]["is_chosen"] == true, "{plan}");
    assert!(algorithms.iter().all(|found| found["priced_s"].as_f64().unwrap() > 0.0), "{plan}");
}

#[test]
fn the_choice_is_explained() {
    let plan = said(&["plan", "all_reduce", "--bytes", "1M", "--ranks", "64", "--hosts", "8"]);
    assert!(plan.contains("all_reduce of 1 MiB among 64 ranks on 8 hosts"), "{plan}");
    for word in
        ["predicted time", "on the wire, per rank", "hierarchical", "ring", "times as long", "more latency", "more transfer"]
    {
        assert!(plan.contains(word), "{word} in {plan}");
    }
    assert_eq!(plan.matches("chosen").count(), 1);
    let forced = said(&["plan", "all_reduce", "--ranks", "8", "--hosts", "8", "--algorithm", "ring"]);
    assert!(forced.contains("ring (forced)") && forced.contains("1.8 MiB in 14 messages"), "{forced}");
    let by_variable =
        program().args(["plan", "all_reduce", "--ranks", "8", "--hosts", "8"]).env("KOLO_ALGORITHM", "ring").output().unwrap();
    assert_eq!(text(&by_variable.stdout), forced);
}

#[test]
fn a_simulation_stands_beside_the_prices() {
    let arguments = ["plan", "all_reduce", "--bytes", "64K", "--ranks", "16", "--hosts", "8", "--simulate"];
    let with = |more: &[&'static str]| [&arguments[..], more].concat();
    let table = said(&arguments);
    for word in ["simulated", "priced", "busiest link", "ring", "hierarchical", "by symmetry", "all messages"] {
        assert!(table.contains(word), "{word} in {table}");
    }
    let late: serde_json::Value = serde_json::from_str(&said(&with(&["--straggler", "3:1s", "--json"]))).unwrap();
    let algorithms = late["algorithms"].as_array().unwrap();
    assert!(algorithms.len() >= 6, "{late}");
    for found in algorithms {
        assert!(found["simulated_s"].as_f64().unwrap() > 1.0 && found["critical_rank"] == 3, "{found}");
    }
    let jitter = |seed: &'static str| said(&with(&["--jitter", "1ms", "--seed", seed]));
    assert_eq!(jitter("7"), jitter("7"));
    assert_ne!(jitter("7"), jitter("8"));
    for (option, value, hint) in [
        ("--straggler", "16:1s", "only 16 ranks"),
        ("--straggler", "1", "write 3:5ms"),
        ("--racks", "9", "cannot be in 9 racks"),
        ("--racks", "8", "alone in its rack"),
        ("--oversubscription", "0", "a factor"),
        ("--oversubscription", "4", "--racks"),
        ("--rack-latency", "1us", "--racks"),
    ] {
        let (_, err) = failed(&with(&[option, value]));
        assert!(err.contains(hint), "{option} {value}: {err}");
    }
    for (option, value) in [("--oversubscription", "4"), ("--rack-latency", "1us")] {
        let (_, err) = failed(&with(&["--racks", "1", option, value]));
        assert!(err.contains("one rack has no uplinks"), "{option}: {err}");
    }
    let (_, err) = failed(&with(&["--plots", "folder", "--json"]));
    assert!(err.contains("cannot be used with"), "{err}");
}

#[test]
fn plan_knows_racks() {
    let arguments = ["plan", "all_reduce", "--bytes", "64M", "--ranks", "16", "--hosts", "16"];
    let with = |more: &[&'static str]| said(&[&arguments[..], more].concat());
    assert!(!with(&[]).contains("two-level"));
    let in_racks = with(&["--racks", "4", "--oversubscription", "8"]);
    assert!(in_racks.contains("on 16 hosts in 4 racks (--racks)\ntwo-level\n"), "{in_racks}");
    assert!(with(&["--racks", "4", "--simulate"]).contains("two-level"));
}

/// `kolo plan` reads variables as a job does.
#[test]
fn variables_are_those_of_a_job() {
    let plan = |variables: &[(&str, &str)]| {
        let arguments = ["plan", "all_reduce", "--ranks", "8", "--hosts", "8"];
        program().args(arguments).envs(variables.iter().copied()).output().unwrap()
    };
    let usual = text(&plan(&[]).stdout);
    let empty = plan(&[("KOLO_ALGORITHM", ""), ("KOLO_NETWORK_LATENCY", ""), ("KOLO_NETWORK_BANDWIDTH", "")]);
    assert_eq!((text(&empty.stdout), text(&empty.stderr)), (usual.clone(), String::new()));
    let at = text(&plan(&[("KOLO_TOPOLOGY", " pod1/rack7")]).stdout);
    assert!(at.contains("this host is at pod1/rack7 (KOLO_TOPOLOGY)"), "{at}");
    let given = [("KOLO_ALGORITHM", " ring "), ("KOLO_NETWORK_LATENCY", " 5us"), ("KOLO_NETWORK_BANDWIDTH", "12.5 ")];
    let options = ["--algorithm", "ring", "--latency", "5us", "--bandwidth", " 12.5"];
    let by_option = said(&[&["plan", "all_reduce", "--ranks", "8", "--hosts", "8"], &options[..]].concat());
    assert_eq!(text(&plan(&given).stdout), by_option);
    assert_ne!(by_option, usual);
    let misspelt = plan(&[("KOLO_ALGORITM", "ring")]);
    assert_eq!(text(&misspelt.stdout), usual);
    let err = text(&misspelt.stderr);
    assert_eq!(err.matches("does not read KOLO_ALGORITM (the nearest that it reads is KOLO_ALGORITHM)").count(), 1, "{err}");
    for (name, wrong, hint) in [
        ("KOLO_ALGORITHM", "rings", "halving-doubling"),
        ("KOLO_TOPOLOGY", "pod1//rack7", "such as rack7"),
        ("KOLO_NETWORK_LATENCY", "0", "more than 0"),
        ("KOLO_NETWORK_BANDWIDTH", "fast", "more than 0"),
    ] {
        let output = plan(&[(name, wrong)]);
        let err = text(&output.stderr);
        assert!(!output.status.success() && err.contains(&format!("{name}=\"{wrong}\"")) && err.contains(hint), "{err}");
    }
}

/// Ranks that use TCP count as hosts. The first job measures, the second one takes the result, and a
/// job with given costs does neither.
#[test]
fn costs_are_measured_once_and_kept() {
    let folder = std::env::temp_dir().join(format!("measured-costs-{}", std::process::id()));
    let job = |variables: &[(&str, &str)]| {
        let mut command = program();
        command.args(["run", "-n", "3", "--", "bench", "all_reduce", "--sizes", "8", "--iters", "1", "--warmup", "0", "--check"]);
        command.env("KOLO_CACHE_DIR", &folder).env("KOLO_TRANSPORT", "tcp").env("KOLO_LOG", "info").env("NO_COLOR", "1");
        command.env_remove("KOLO_NETWORK_LATENCY").env_remove("KOLO_NETWORK_BANDWIDTH").env_remove("KOLO_ALGORITHM");
        let output = command.envs(variables.iter().copied()).stdin(Stdio::null()).output().unwrap();
        let log = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success(), "{log}");
        log
    };
    let plan = |option| {
        let arguments = ["plan", "all_reduce", "--ranks", "8", "--hosts", "8", option];
        program().args(arguments).env("KOLO_CACHE_DIR", &folder).stdin(Stdio::null()).output().unwrap()
    };
    let before = plan("--measured");
    assert!(!before.status.success() && text(&before.stderr).contains("no job has measured costs"), "{before:?}");

    for given in [("KOLO_NETWORK_LATENCY", "5us"), ("KOLO_NETWORK_BANDWIDTH", "2"), ("KOLO_ALGORITHM", "ring")] {
        let log = job(&[given]);
        assert!(!log.contains("costs between hosts"), "{given:?}: {log}");
    }
    assert!(!folder.exists());

    let first = job(&[]);
    assert!(first.contains("costs between hosts") && first.contains("is_cached=false"), "{first}");
    // A thread writes the file. The job may end before.
    let file = folder.join("network-costs");
    let mut jobs = 0;
    while !file.exists() {
        jobs += 1;
        assert!(jobs < 100, "{first}");
        job(&[]);
    }
    let kept = std::fs::read_to_string(&file).unwrap();
    assert_eq!(kept.lines().count(), 2, "{kept}");
    let next = job(&[]);
    assert!(next.contains("is_cached=true"), "{next}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), kept);

    let measured = plan("--measured");
    let shown = text(&measured.stdout);
    assert!(measured.status.success() && shown.contains("127.0.0.1") && shown.contains(" min\n"), "{measured:?}");
    assert_ne!(shown.split_once("\n\n").unwrap().1, text(&plan("--no-windows").stdout));
    assert!(!shown.contains("schedules visit"), "{shown}");

    // The hosts b and c have a slow link, so others are between them.
    let now = kept.lines().last().unwrap().rsplit('\t').nth(1).unwrap();
    let mut pairs = kept.clone();
    for (from, to) in [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")] {
        let per_byte = if (from, to) == ("b", "c") { "1e-7" } else { "1e-8" };
        pairs += &format!("{from}\t{to}\ttcp\t5e-5\t0e0\t{per_byte}\t0e0\t{now}\tpair\n");
    }
    std::fs::write(&file, pairs).unwrap();
    let ordered = plan("--measured");
    let shown = text(&ordered.stdout);
    assert!(shown.contains("\nschedules visit a, b, d, c\n") || shown.contains("\nschedules visit a, c, d, b\n"), "{ordered:?}");
    // A simulation of these hosts has their links: a ring goes around the slow one, a direct schedule does not.
    let arguments =
        ["plan", "all_reduce", "--bytes", "16M", "--ranks", "4", "--hosts", "4", "--measured", "--simulate", "--json"];
    let simulated = program().args(arguments).env("KOLO_CACHE_DIR", &folder).stdin(Stdio::null()).output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&simulated.stdout).unwrap();
    let seconds = |name: &str| {
        let row = all["algorithms"].as_array().unwrap().iter().find(|row| row["algorithm"] == name);
        row.unwrap_or_else(|| panic!("no {name}: {all}"))["simulated_s"].as_f64().unwrap()
    };
    assert!(3.0 * seconds("ring") < seconds("direct"), "{all}");
    let other = ["plan", "all_reduce", "--ranks", "8", "--hosts", "8", "--measured", "--simulate"];
    let other = program().args(other).env("KOLO_CACHE_DIR", &folder).stdin(Stdio::null()).output().unwrap();
    assert!(text(&other.stdout).contains("the links of 4 hosts were measured; those of this simulation are alike"), "{other:?}");

    // What another program has written is measured again, and replaced.
    std::fs::write(&file, "garbage").unwrap();
    let again = job(&[]);
    assert!(again.contains("is_cached=false"), "{again}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// It would take hours to count the segments one by one.
#[test]
fn the_largest_size_is_planned() {
    for op in ["all_reduce", "reduce", "reduce_scatter"] {
        let plan = said(&["plan", op, "--bytes", "65536T", "--ranks", "64", "--hosts", "64"]);
        assert!(plan.contains("double-tree") || op == "reduce_scatter", "{plan}");
    }
    let (_, err) = failed(&["plan", "all_reduce", "--bytes", "65537T", "--ranks", "2"]);
    assert!(err.contains("more than memory can hold; the most is 65536T"), "{err}");
}

#[test]
fn every_operation_can_be_planned() {
    for op in [
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "send",
    ] {
        for (ranks, hosts) in [("2", "1"), ("5", "5"), ("1000", "10")] {
            assert!(said(&["plan", op, "--ranks", ranks, "--hosts", hosts]).contains("predicted time"), "{op} {ranks}");
        }
    }
}

#[test]
fn what_cannot_be_planned_is_said() {
    for (arguments, hint) in [
        (&["plan", "all_reduce", "--ranks", "2", "--hosts", "3"][..], "2 ranks cannot be on 3 hosts"),
        (&["plan", "all_reduce", "--ranks", "1"], "at least two ranks"),
        (&["plan", "all_reduce", "--ranks", "0"], "0 is not in 1.."),
        (&["plan", "barrier", "--ranks", "4", "--algorithm", "ring"], "it has window, dissemination"),
        (&["plan", "frobnicate", "--ranks", "4"], "all_reduce, broadcast"),
        (&["plan", "all_reduce", "--ranks", "4", "--bandwidth", "0"], "more than 0"),
    ] {
        let (_, err) = failed(arguments);
        assert!(err.contains(hint), "{arguments:?}: {err}");
    }
}

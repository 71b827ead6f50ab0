//! `kolo bench`: results, tables, files and arguments.

use crate::common::all;
use crate::program::{failed, kolo, said, text};

fn run(ranks: &str, arguments: &[&str]) -> String {
    said(&[&["run", "-n", ranks, "--", "bench"], arguments].concat())
}

#[test]
fn every_operation_computes_what_it_should() {
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
        "send_recv",
    ] {
        let others: [&[&str]; 2] =
            [&["--registered", "--dtype", "bf16", "--root", "1"], &["--transport", "tcp", "--dtype", "u8", "--redop", "max"]];
        // In turns, unless every case is tried.
        for more in [&[][..]].into_iter().chain(if all() { others.to_vec() } else { vec![others[op.len() % 2]] }) {
            let arguments = [&[op, "--sizes", "8,1000,70K", "--iters", "1", "--warmup", "0", "--check", "--wide"], more].concat();
            let table = run("3", &arguments);
            assert!(table.contains("Out of bounds values : 0 OK"), "{table}");
            assert!(table.contains("algbw") && table.contains("#wrong") && table.contains("p99"), "{table}");
        }
    }
}

/// Between processes, in both classes of size. Where the system does not let ranks read each
/// other, a warning says so.
#[test]
fn large_buffers_are_right_by_every_way_that_they_can_pass() {
    for copy_mode in ["auto", "staged", "streamed", "cma"] {
        for op in ["all_reduce", "all_gather", "all_to_all"] {
            // Each way with one of them, unless every case is tried.
            let is_its =
                matches!((copy_mode, op), ("auto" | "staged", "all_reduce") | ("streamed", "all_gather") | ("cma", "all_to_all"));
            if !is_its && !all() {
                continue;
            }
            // Wide elements are few to check.
            let bench = ["bench", op, "--wide", "--dtype", "f64", "--sizes", "1M,9M", "--iters", "1", "--warmup", "0", "--check"];
            let output = kolo(&[&["run", "-n", "3", "--"], &bench[..], &["--copy-mode", copy_mode]].concat());
            assert!(text(&output.stdout).contains("Out of bounds values : 0 OK"), "{copy_mode} {op}: {output:?}");
            // On a busy machine there may be other warnings: of a rank that does not answer, for example.
            let warnings = text(&output.stderr).matches("does not let ranks read").count();
            assert!(warnings <= 1, "said once, not by every rank: {output:?}");
            let warned = warnings == 1;
            assert!(!warned || copy_mode == "cma", "{copy_mode} {op}: {output:?}");
            if warned {
                // Print past the test harness, which would capture it.
                let said = b"NOT RUN: reading another process's memory is not allowed here\n";
                std::io::Write::write_all(&mut std::io::stderr(), said).unwrap();
            }
        }
    }
}

/// Between processes, where only `hierarchy` makes so few ranks form groups.
#[test]
fn results_are_right_in_every_layout_of_flags() {
    for layout in ["auto", "flat", "hierarchy"] {
        let bench = ["bench", "all_reduce", "--wide", "--dtype", "f64", "--sizes", "8,1M", "--iters", "4", "--check"];
        let said = said(&[&["run", "-n", "3", "--"], &bench[..], &["--flag-layout", layout]].concat());
        assert!(said.contains("Out of bounds values : 0 OK"), "{layout}: {said}");
    }
}

#[test]
fn every_type_and_reduction_is_checked() {
    for dtype in ["f32", "f64", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"] {
        for redop in ["sum", "product", "min", "max", "average", "bitand", "bitor", "bitxor"] {
            // Each type with some reductions, and some types with each, unless every case is
            // tried.
            if !["sum", "bitor"].contains(&redop) && !["f32", "u8"].contains(&dtype) && !all() {
                continue;
            }
            let is_float = dtype.contains('f');
            let applies = if redop.starts_with("bit") { !is_float } else { redop != "average" || is_float };
            let bench =
                ["run", "-n", "2", "--", "bench", "all_reduce", "--sizes", "4K", "--iters", "1", "--warmup", "0", "--check"];
            let arguments = [&bench[..], &["-d", dtype, "-o", redop]].concat();
            if applies {
                assert!(said(&arguments).contains("0 OK"), "{dtype} {redop}");
            } else {
                let (_, err) = failed(&arguments);
                assert!(err.contains(&format!("{redop} is not defined on {dtype}")), "{err}");
            }
        }
    }
}

/// The longest names of reductions, and the largest numbers.
#[test]
fn the_table_fits_80_columns() {
    let sizes = if all() { "8,32M" } else { "8,1M" };
    let table = run("3", &["all_reduce", "--sizes", sizes, "--redop", "product", "--check", "--transport", "tcp"]);
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(!table.contains("out-of-place") && !table.contains("p99"), "{table}");
    assert!(table.contains("all_reduce, product of f32: 3 ranks"), "{table}");
    let wide = run("2", &["all_reduce", "--sizes", "8", "--wide"]);
    assert!(wide.contains("out-of-place") && wide.contains(" in-place"), "{wide}");
    assert!(["count", "type", "redop", "root", "p99"].iter().all(|title| wide.contains(&format!(" {title} "))), "{wide}");
}

#[test]
fn results_are_checked_only_on_request() {
    assert!(!run("1", &["all_reduce", "--sizes", "8", "--iters", "1"]).contains("Out of bounds"));
}

#[test]
fn files_hold_every_figure() {
    let folder = std::env::temp_dir().join(format!("kolo-bench-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (json, svg) = (folder.join("a.json"), folder.join("a.svg"));
    let files = ["--json", json.to_str().unwrap(), "--plot", svg.to_str().unwrap()];
    run("2", &[&["all_gather", "-b", "8", "-e", "2K", "-f", "4", "--iters", "3", "--check", "--wide"], &files[..]].concat());
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(report["kolo"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&report["op"], &report["ranks"], &report["hosts"], &report["dtype"]),
        (&"all_gather".into(), &2.into(), &1.into(), &"f32".into())
    );
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 32, 128, 512, 2048]);
    for row in rows {
        assert_eq!(row["count"].as_u64().unwrap() * 4, row["bytes"].as_u64().unwrap());
        assert!(row["algorithm"].is_string());
        for form in ["in_place", "out_of_place"] {
            let line = &row[form];
            let of = |name: &str| line[name].as_f64().unwrap();
            assert!(of("min_us") > 0.0 && of("min_us") <= of("p50_us") && of("p50_us") <= of("p99_us"), "{line}");
            assert_eq!((of("iters"), of("wrong")), (3.0, 0.0));
            // All-gather among two: half of the bytes cross the bus.
            assert!((of("busbw_gbs") / of("algbw_gbs") - 0.5).abs() < 1e-9);
            let rate = row["bytes"].as_f64().unwrap() / of("mean_us") * 1e-3;
            assert!((of("algbw_gbs") / rate - 1.0).abs() < 1e-6);
        }
    }
    let drawing = std::fs::read_to_string(&svg).unwrap();
    assert!(drawing.starts_with("<svg") && drawing.contains("bus bandwidth") && drawing.contains("in place"), "{drawing}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn wrong_arguments_are_refused_with_what_is_right() {
    for (arguments, hint) in [
        (&["bench", "all_reduc"][..], "all_reduce"),
        (&["bench", "all_reduce", "--sizes", "4Q"], "write 8, 4K, 1M"),
        (&["bench", "all_reduce", "-b", "2K", "-e", "1K"], "larger than the largest"),
        (&["bench", "all_reduce", "-f", "1"], "1 is not in 2.."),
        (&["bench", "all_reduce", "-d", "flot"], "bf16"),
        (&["bench", "all_reduce", "-d", "bool"], "u8 moves the same bytes"),
        (&["bench", "all_reduce", "-d", "f8e4m3"], "u8 moves the same bytes"),
        (&["bench", "all_reduce", "--algorithm", "rng"], "a similar value exists: 'ring'"),
        (&["bench", "all_reduce", "-o", "avgg"], "a similar value exists: 'average'"),
        (&["bench", "broadcast", "--root", "3"], "root 3 is out of range"),
        (&["bench", "all_reduce", "--json", "/no/such/folder/a.json"], "no such folder"),
        (&["bench", "all_reduce", "--algorithm", "rings"], "halving-doubling"),
        (&["bench", "all_reduce", "--sockets", "65"], "1 to 64"),
        (&["bench", "all_reduce", "--copy-mode", "fast"], "streamed"),
        (&["bench", "all_reduce", "--flag-layout", "tree"], "hierarchy"),
        (&["bench", "all_reduce", "--wire-dtype", "f64"], "bf16"),
    ] {
        let (_, err) = failed(arguments);
        assert!(err.contains(hint), "{arguments:?}: {err}");
    }
}

/// nccl-tests and PyTorch have other names.
#[test]
fn other_names_of_types_and_reductions_are_known() {
    let bench =
        |more: &[&'static str]| said(&[&["bench", "all_reduce", "--sizes", "8", "--iters", "1", "--warmup", "0"], more].concat());
    for (given, known) in [(["-d", "float", "-o", "avg"], ["f32", "average"]), (["-d", "int8", "-o", "prod"], ["i8", "product"])]
    {
        let out = bench(&given);
        assert!(known.iter().all(|name| out.contains(name)), "{out}");
    }
}

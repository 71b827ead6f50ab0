//! The program as users run it: output, exit status and error messages.

use std::process::{Command, Output, Stdio};

use crate::common::all;

/// Returns the program. Its ranks have time to connect on a busy machine.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.env("KOLO_START_TIMEOUT", "15m");
    command
}

fn kolo(arguments: &[&str]) -> Output {
    program().args(arguments).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Standard output of a command that succeeds.
pub(crate) fn said(arguments: &[&str]) -> String {
    let output = kolo(arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Exit status and standard error of a command that fails.
pub(crate) fn failed(arguments: &[&str]) -> (i32, String) {
    let output = kolo(arguments);
    assert!(!output.status.success(), "{arguments:?}: {}", text(&output.stdout));
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn help_names_the_commands() {
    let help = said(&["--help"]);
    for command in ["run", "bench", "plan"] {
        assert!(help.contains(command), "{help}");
    }
    assert!(said(&["bench", "--help"]).contains("send_recv"));
    assert!(said(&["--version"]).starts_with("kolo "));
}

/// Such a value was taken for one that is not set.
#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf_8_is_refused_where_it_cannot_be_meant() {
    use std::os::unix::ffi::OsStrExt;
    let with = |name: &str, value: &[u8], arguments: &[&str]| {
        program().args(arguments).env(name, std::ffi::OsStr::from_bytes(value)).stdin(Stdio::null()).output().unwrap()
    };
    let bench = ["bench", "barrier", "--iters", "1", "--warmup", "0"];
    for (name, value, hint) in [
        ("KOLO_TRANSPORT", &b"tcp\xff"[..], "auto, tcp, shm"),
        ("KOLO_TIMEOUT", b"\xff5m", "500ms"),
        ("KOLO_SECRET", b"\xc3\x28", "64 hexadecimal digits"),
        ("KOLO_RANK", b"\xff", "KOLO_RANK"),
    ] {
        let output = with(name, value, &bench);
        let err = text(&output.stderr);
        assert!(!output.status.success() && err.contains(name) && err.contains(hint), "{name}: {err}");
    }
    let output = with("KOLO_ALGORITHM", b"ring\xfe", &["plan", "all_reduce", "--ranks", "4"]);
    let err = text(&output.stderr);
    assert!(!output.status.success() && err.contains("KOLO_ALGORITHM=\"ring\u{fffd}\""), "{err}");
    // The name of a host is free.
    let output = with("KOLO_HOST", b"h\xff", &bench);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// A misspelt level must not look as if there was nothing to log.
#[test]
fn the_level_of_the_log_is_checked() {
    let plan = |level: &str| program().args(["plan", "barrier", "--ranks", "2"]).env("KOLO_LOG", level).output().unwrap();
    for level in ["", "warn", " debug ", "TRACE"] {
        let output = plan(level);
        assert!(output.status.success() && output.stderr.is_empty(), "{level:?}: {}", text(&output.stderr));
    }
    let output = plan("blah");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "kolo: KOLO_LOG=\"blah\": off, error, warn, info, debug or trace\n");
    let output = program().args(["run", "-n", "1", "--", "true"]).env("KOLO_LOG", "warn,kolo=debug").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("KOLO_LOG"), "{}", text(&output.stderr));
}

/// A folder that is removed when this is dropped.
pub(crate) struct Folder(pub(crate) std::path::PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("kolo-program-test-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn entries(&self) -> Vec<std::path::PathBuf> {
        std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file called `-` is standard output, and lines for people are not in it.
#[test]
fn figures_can_be_standard_output() {
    let folder = Folder::new("output");
    let quick = ["--sizes", "8", "--iters", "1", "--warmup", "0"];
    let bench = [&["run", "-n", "2", "--", "bench", "all_reduce"], &quick[..]].concat();
    let alone = [&["bench", "all_gather"], &quick[..]].concat();
    let compare = vec!["compare", "barrier", "--rounds", "1", "--with", "roundtrip"];
    for command in [bench, alone, compare] {
        let run =
            |more: &[&str]| program().args(&command).args(more).current_dir(&folder.0).stdin(Stdio::null()).output().unwrap();
        let json = run(&["--json", "-"]);
        let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert!(report["rows"].is_array() && text(&json.stderr).contains("# "), "{command:?}: {}", text(&json.stderr));
        let plot = run(&["--plot", "-"]);
        assert!(plot.stdout.starts_with(b"<svg") && plot.stdout.ends_with(b"</svg>\n"), "{command:?}");
        let both = run(&["--json", "-", "--plot", "-"]);
        assert!(!both.status.success() && text(&both.stderr).contains("only one file"), "{}", text(&both.stderr));
    }
    assert!(folder.entries().is_empty(), "{:?}", folder.entries());
}

/// As `| head -1` does. The command is not asked for more, so it has succeeded.
#[test]
fn a_reader_that_goes_ends_a_command_quietly() {
    use std::io::{BufRead, BufReader};
    for arguments in [
        &["run", "-n", "3", "--", "bench", "all_reduce", "--iters", "2"][..],
        &["bench", "all_reduce", "--iters", "2"],
        &["plan", "all_reduce", "--ranks", "64", "--hosts", "8"],
        &["compare", "--rounds", "1000000", "--sizes", "8", "--with", "openmpi,gloo,mpich,deepspeed"],
        &["soak", "--minutes", "100000", "--seed", "1"],
    ] {
        let mut command = program();
        command.args(arguments).env("PATH", "/nowhere").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        drop(out);
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(0), ""), "{arguments:?}: {line}");
    }
}

mod compare {
    use super::*;

    /// The report says what was measured until then, and no folder is left.
    #[cfg(unix)]
    #[test]
    fn an_interrupt_ends_it_with_a_report() {
        use std::os::unix::process::CommandExt;

        let folder = Folder::new("interrupt");
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
        let plot = |more: &[&'static str]| {
            said(&[&["compare", "--rounds", "1", "--sizes", "8", "--plot", "-", "--with"], more].concat())
        };
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
        }
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
        for who in ["kolo-registered", "kolo-bf16", "deepspeed"] {
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
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_kolo")]).arg(&folder);
        let output = command.env("KOLO_START_TIMEOUT", "15m").stdin(Stdio::null()).output();
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

    #[test]
    fn what_is_missing_is_said_and_what_is_wrong_refused() {
        let (_, err) = failed(&["compare", "gather"]);
        assert!(err.contains("invalid value 'gather'") && err.contains("all_to_all"), "{err}");
        let (_, err) = failed(&["compare", "--with", "nccl"]);
        assert!(err.contains("invalid value 'nccl'") && err.contains("openmpi"), "{err}");
        let output = program()
            .args(["compare", "--rounds", "1", "--sizes", "8", "--with", "openmpi,gloo,deepspeed"])
            .env("PATH", "/nowhere")
            .output()
            .unwrap();
        let out = text(&output.stdout);
        assert!(output.status.success() && out.matches("# NOT RUN: ").count() == 3 && out.contains(ADVICE), "{out}");
    }
}

#[cfg(unix)]
mod run {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Child;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_full_disk_is_named_and_ends_no_rank() {
        let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        for lines in ["1", "100000"] {
            let mut command = program();
            command.args(["run", "-n", "2", "--", "seq", lines]).stdin(Stdio::null()).stdout(full());
            let ended = command.output().unwrap();
            let said = text(&ended.stderr);
            assert!(said.contains("standard output cannot be written: No space left on device"), "{said}");
            assert!(!said.contains("SIGPIPE") && ended.status.code() == Some(1), "{said}");
        }
    }

    #[test]
    fn output_is_prefixed_by_rank() {
        let output = kolo(&["run", "-n", "3", "--", "sh", "-c", "echo out $KOLO_RANK of $KOLO_WORLD_SIZE; echo err >&2"]);
        assert!(output.status.success());
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        let mut lines: Vec<&str> = out.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["[0] out 0 of 3", "[1] out 1 of 3", "[2] out 2 of 3"]);
        assert_eq!(err.lines().count(), 3);
        let plain = said(&["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "printf 'no newline'"]);
        assert_eq!(plain, "no newline\n");
    }

    /// A slow reader, such as `less`, gets all output that the ranks wrote before they ended.
    #[test]
    fn output_is_whole_however_slowly_it_is_read() {
        // More than a pipe holds, less than two.
        let mut child = start(&["run", "-n", "1", "--", "seq", "15000"]);
        let mut out = lines(child.stdout.take().unwrap());
        assert_eq!(out.next().unwrap(), "[0] 1");
        // The rank ends meanwhile.
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(out.last().unwrap(), "[0] 15000");
        assert!(child.wait().unwrap().success());
    }

    /// A process that a rank has started keeps the output open. The job ends with its ranks all the
    /// same.
    #[test]
    fn a_job_ends_with_its_ranks_whatever_they_leave_running() {
        let out = said(&["run", "-n", "2", "--", "sh", "-c", "sleep 600 & echo $!"]);
        for pid in out.lines().map(|line| line.split(' ').nth(1).unwrap()) {
            assert!(Command::new("kill").arg(pid).status().unwrap().success());
        }
    }

    #[test]
    fn every_job_has_its_own_name_and_secret() {
        let job = || said(&["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "echo $KOLO_JOB_ID $KOLO_SECRET"]);
        let (first, second) = (job(), job());
        assert_ne!(first, second);
        assert_eq!(first.trim().len(), 16 + 1 + 64);
    }

    /// The ranks get the name of the file, but not its content.
    #[test]
    fn a_secret_in_a_file_holds_for_the_job() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("kolo-run-secret-{}", std::process::id()));
        std::fs::write(&path, "0f".repeat(32)).unwrap();
        let run = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
            command.arg("run").args(arguments).env("KOLO_SECRET_FILE", &path).env_remove("KOLO_SECRET");
            command.stdin(Stdio::null()).output().unwrap()
        };
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o644);
        let refused = run(&["-n", "1", "--", "true"]);
        let err = text(&refused.stderr);
        assert!(!refused.status.success() && err.contains("KOLO_SECRET_FILE") && err.contains("chmod 600"), "{err}");
        mode(0o600);
        let told = run(&["-n", "1", "--no-prefix", "--", "sh", "-c", "echo $KOLO_SECRET_FILE [$KOLO_SECRET]"]);
        assert_eq!(text(&told.stdout), format!("{} []\n", path.display()), "{}", text(&told.stderr));
        // The ranks find each other with it.
        let bench = run(&["-n", "2", "--", "bench", "barrier", "--sizes", "8", "--warmup", "1"]);
        assert!(bench.status.success(), "{}{}", text(&bench.stdout), text(&bench.stderr));
        std::fs::remove_file(&path).unwrap();
    }

    /// The user believes that the job has a secret.
    #[test]
    fn a_secret_that_is_set_but_empty_starts_no_job() {
        for name in ["KOLO_SECRET", "KOLO_SECRET_FILE"] {
            let alone: &[&str] = &["bench", "barrier", "--sizes", "8", "--warmup", "1"];
            for arguments in [&["run", "-n", "1", "--", "true"], alone] {
                let mut command = program();
                command.args(arguments).env_remove("KOLO_SECRET").env(name, "").stdin(Stdio::null());
                let output = command.output().unwrap();
                let err = text(&output.stderr);
                assert!(!output.status.success(), "{arguments:?} with an empty {name}");
                assert!(err.contains(&format!("{name}=\"\": it is set but empty")), "{err}");
                assert!(err.contains(&format!("`unset {name}`")), "{err}");
            }
        }
    }

    #[test]
    fn what_ranks_have_started_ends_with_the_job() {
        // Each rank is a shell that waits for another program.
        let script = "echo $$; sleep 600 & echo $!; if [ $KOLO_RANK = 1 ]; then exit 7; fi; wait";
        let output = kolo(&["run", "-n", "2", "--no-prefix", "--grace", "100ms", "--", "sh", "-c", script]);
        assert_eq!(output.status.code(), Some(7));
        let out = text(&output.stdout);
        assert_eq!(out.lines().count(), 4, "{out}");
        out.lines().for_each(ends);
    }

    #[test]
    fn the_first_failure_ends_all_and_is_the_outcome() {
        let began = Instant::now();
        let script = "if [ $KOLO_RANK = 1 ]; then exit 7; fi; exec sleep 600";
        let (code, err) = failed(&["run", "-n", "3", "--grace", "0.1", "--", "sh", "-c", script]);
        assert_eq!(code, 7);
        assert!(
            err.contains("rank 1 (pid ") && err.contains("exited with status 7") && err.contains("the other ranks were stopped"),
            "{err}"
        );
        let script = "if [ $KOLO_RANK = 2 ]; then kill -9 $$; fi; exec sleep 600";
        let (code, err) = failed(&["run", "-n", "3", "--grace", "0.1", "--", "sh", "-c", script]);
        assert_eq!(code, 128 + 9);
        assert!(err.contains("rank 2") && err.contains("SIGKILL"), "{err}");
        assert!(began.elapsed() < Duration::from_secs(300));
    }

    #[test]
    fn ranks_that_ignore_the_request_are_killed() {
        let script = "if [ $KOLO_RANK = 0 ]; then exit 1; fi; trap '' TERM; while true; do sleep 0.1; done";
        let (code, _) = failed(&["run", "-n", "2", "--grace", "0", "--", "sh", "-c", script]);
        assert_eq!(code, 1);
    }

    #[test]
    fn signals_are_passed_on() {
        let script = "trap 'echo got it; exit 0' USR1; echo ready; while true; do sleep 0.05; done";
        let mut child = start(&["run", "-n", "2", "--", "sh", "-c", script]);
        let mut lines = lines(child.stdout.take().unwrap());
        assert!(lines.by_ref().take(2).all(|line| line.ends_with("ready")));
        assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
        assert_eq!(lines.filter(|line| line.ends_with("got it")).count(), 2);
        assert!(child.wait().unwrap().success());
    }

    /// The ranks of the built-in command end together, after a size.
    #[test]
    fn a_bench_that_is_interrupted_writes_what_it_has_measured() {
        let folder = Folder::new("bench");
        let json = folder.0.join("a.json");
        let sizes = ["8"; 10_000].join(",");
        let arguments = ["run", "-n", "2", "--", "bench", "all_reduce", "--iters", "1", "--sizes", &sizes, "--json"];
        let mut child = start(&[&arguments[..], &[json.to_str().unwrap()]].concat());
        let mut rows = lines(child.stdout.take().unwrap()).filter(|line| !line.starts_with('#'));
        assert_eq!(rows.by_ref().take(3).count(), 3);
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let shown = 3 + rows.count();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(report["rows"].as_array().unwrap().len(), shown);
        assert!(shown < 10_000);
    }

    #[test]
    fn a_bench_ends_at_a_signal_however_long_it_would_measure() {
        let mut child = start(&["bench", "all_reduce", "--sizes", "1M", "--iters", "1000000000"]);
        assert!(lines(child.stdout.take().unwrap()).any(|line| line.contains("(GB/s)")));
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
        let mut err = String::new();
        child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        let told = "kolo: SIGTERM: a measurement still runs; another signal ends it at once\nkolo: stopped by SIGTERM\n";
        assert_eq!(err, told);
    }

    #[test]
    fn a_launcher_that_is_told_to_stop_stops_its_ranks() {
        let (child, pids) = sleeping_ranks();
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + 15));
        assert!(text(&output.stderr).contains("stopped by SIGTERM"));
        for pid in pids {
            assert!(!Command::new("kill").args(["-0", &pid]).stderr(Stdio::null()).status().unwrap().success(), "{pid} lives");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_do_not_outlive_a_launcher_that_is_killed() {
        let (mut child, pids) = sleeping_ranks();
        child.kill().unwrap();
        child.wait().unwrap();
        pids.iter().for_each(|pid| ends(pid));
    }

    /// The system ends the shells with the launcher, but not what they have started.
    #[test]
    fn what_ranks_have_started_does_not_outlive_a_launcher_that_is_killed() {
        let script = "trap '' USR1; sleep 600 & started=$!; trap 'echo ready' USR1; echo $started; while :; do wait; done";
        let mut child = start(&["run", "-n", "2", "--no-prefix", "--", "sh", "-c", script]);
        let mut out = lines(child.stdout.take().unwrap());
        let pids: Vec<String> = out.by_ref().take(2).collect();
        // A launcher that forwards signals has started all that it needs.
        assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
        assert!(out.by_ref().take(2).all(|line| line == "ready"));
        child.kill().unwrap();
        child.wait().unwrap();
        pids.iter().for_each(|pid| ends(pid));
    }

    /// Returns the guard of a launcher, once it ignores signals.
    #[cfg(target_os = "linux")]
    fn guard_of(launcher: u32) -> String {
        let is_guard = |pid: &String| {
            let read = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let status = text(&read("status"));
            let field = |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
            // The signals with handlers.
            let caught = field("SigCgt:").and_then(|mask| u64::from_str_radix(&mask, 16).ok()).unwrap_or_default();
            let all = [1, 2, 3, 15].iter().all(|signal| caught >> (signal - 1) & 1 == 1);
            all && field("PPid:") == Some(launcher.to_string()) && text(&read("cmdline")).contains("\0guard\0")
        };
        let deadline = Instant::now() + Duration::from_secs(240);
        loop {
            let processes = std::fs::read_dir("/proc").unwrap();
            let mut pids = processes.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
            if let Some(guard) = pids.find(is_guard) {
                return guard;
            }
            assert!(Instant::now() < deadline, "no guard");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn signals_do_not_end_the_guard() {
        let folder = Folder::new("guard");
        let mut command = program();
        command.args(["run", "-n", "1", "--no-prefix", "--", "sh", "-c", "sleep 600 & echo $!; wait"]);
        command.env("TMPDIR", &folder.0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pid = lines(child.stdout.take().unwrap()).next().unwrap();
        let guard = guard_of(child.id());
        for signal in ["-HUP", "-INT", "-QUIT", "-TERM"] {
            assert!(Command::new("kill").args([signal, &guard]).status().unwrap().success());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        ends(&pid);
        becomes_empty(&folder);
    }

    /// Waits until the folder of a job has been removed.
    #[cfg(target_os = "linux")]
    fn becomes_empty(folder: &Folder) {
        let deadline = Instant::now() + Duration::from_secs(240);
        while !folder.entries().is_empty() {
            assert!(Instant::now() < deadline, "{}", folder.0.display());
            std::thread::yield_now();
        }
    }

    /// Rank 9 kills the launcher, which is still starting ranks.
    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_outlives_a_launcher_that_is_killed_while_it_starts_ranks() {
        let (folder, started) = (Folder::new("starts"), Folder::new("started"));
        let script = "cd \"$1\"; [ $KOLO_RANK = 0 ] && { sleep 600 & echo $! > new; mv new pid; }; \
                      [ $KOLO_RANK = 9 ] && { until [ -e pid ]; do :; done; kill -KILL $PPID; }; exec sleep 600";
        let mut command = program();
        command.args(["run", "-n", "400", "--", "sh", "-c", script, "sh"]).arg(&started.0).env("TMPDIR", &folder.0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(!command.status().unwrap().success());
        ends(std::fs::read_to_string(started.0.join("pid")).unwrap().trim());
        becomes_empty(&folder);
    }

    /// A running command.
    fn start(arguments: &[&str]) -> Child {
        let mut command = program();
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn lines(pipe: impl Read) -> impl Iterator<Item = String> {
        BufReader::new(pipe).lines().map(Result::unwrap)
    }

    /// A launcher with two ranks that sleep, and their processes.
    fn sleeping_ranks() -> (Child, Vec<String>) {
        let mut child = start(&["run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep 600"]);
        let pids = lines(child.stdout.take().unwrap()).take(2);
        let pids = pids.map(|line| line.split(' ').nth(1).unwrap().to_owned()).collect();
        (child, pids)
    }

    /// Waits until a process has ended.
    fn ends(pid: &str) {
        let deadline = Instant::now() + Duration::from_secs(240);
        while Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status().unwrap().success() {
            // A killed process may remain as a zombie until its new parent waits for it.
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if state.contains(") Z ") {
                break;
            }
            assert!(Instant::now() < deadline, "{pid} lives");
            std::thread::yield_now();
        }
    }

    #[test]
    fn rank_0_reads_what_is_piped_in() {
        let mut child =
            program().args(["run", "-n", "2", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"words\n").unwrap();
        assert_eq!(text(&child.wait_with_output().unwrap().stdout), "[0] words\n");
    }

    #[test]
    fn what_cannot_be_started_is_said() {
        let (code, err) = failed(&["run", "-n", "2", "--", "no-such-program"]);
        assert_eq!(code, 127);
        assert!(err.contains("no-such-program cannot be started"), "{err}");
        for arguments in [&["run", "-n", "2"][..], &["run", "-n", "0", "true"], &["run", "true"], &["run", "-n", "x", "true"]] {
            assert_eq!(failed(arguments).0, 2, "{arguments:?}");
        }
    }

    /// Rank 0 fails because rank 1 was killed, and the launcher learns of rank 0 first. The report
    /// is the same in the other order.
    #[test]
    fn who_was_killed_counts_as_the_cause() {
        let script = "[ $KOLO_RANK = 0 ] && exit 1; sleep 0.3; kill -KILL $$";
        let (code, err) = failed(&["run", "-n", "2", "--grace", "240", "--", "sh", "-c", script]);
        assert_eq!(code, 137);
        assert!(err.contains("rank 1"), "{err}");
    }

    /// A rank is killed in the middle of a collective, and the survivors name it.
    #[test]
    fn survivors_name_the_culprit() {
        for (transport, copy_mode) in [("auto", "staged"), ("auto", "cma"), ("tcp", "auto")] {
            let bench = format!(
                "echo $$ >&2; KOLO_COPY_MODE={copy_mode} exec {} bench all_reduce --sizes 1M --iters 1000000 --transport {transport}",
                env!("CARGO_BIN_EXE_kolo")
            );
            let mut child = start(&["run", "-n", "3", "--grace", "60", "--", "sh", "-c", &bench]);
            // All ranks have connected when the head of the table appears.
            let mut out = lines(child.stdout.take().unwrap());
            assert!(out.next().unwrap().contains("3 ranks"));
            let mut err = lines(child.stderr.take().unwrap());
            let started: Vec<String> = err.by_ref().take(3).collect();
            let victim = started.iter().find_map(|line| line.strip_prefix("[2] ")).unwrap();
            assert!(Command::new("kill").args(["-KILL", victim]).status().unwrap().success());
            let rest: Vec<String> = err.collect();
            let named =
                rest.iter().filter(|line| line.contains("failed after") && line.contains(&format!("pid {victim}) "))).count();
            assert!(named >= 1, "{transport}: {rest:?}");
            assert!(rest.last().unwrap().contains("rank 2") && rest.last().unwrap().contains("SIGKILL"), "{rest:?}");
            assert_eq!(child.wait().unwrap().code(), Some(137));
        }
    }
}

mod bench {
    use super::*;

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
                let arguments =
                    [&[op, "--sizes", "8,1000,70K", "--iters", "2", "--warmup", "1", "--check", "--wide"], more].concat();
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
                // Each way with one of them, and the chosen one with all, unless every case is tried.
                let is_its = matches!(
                    (copy_mode, op),
                    ("auto", _) | ("staged", "all_reduce") | ("streamed", "all_gather") | ("cma", "all_to_all")
                );
                if !is_its && !all() {
                    continue;
                }
                let bench = [
                    "bench",
                    op,
                    "--wide",
                    "--sizes",
                    "1M,9M",
                    "--iters",
                    "2",
                    "--warmup",
                    "1",
                    "--check",
                    "--copy-mode",
                    copy_mode,
                ];
                let output = kolo(&[&["run", "-n", "3", "--"], &bench[..]].concat());
                assert!(text(&output.stdout).contains("Out of bounds values : 0 OK"), "{copy_mode} {op}: {output:?}");
                let warned = text(&output.stderr).contains("does not let ranks read");
                assert!(text(&output.stderr).lines().count() <= 1, "said once, not by every rank: {output:?}");
                assert!(output.stderr.is_empty() || (copy_mode == "cma" && warned), "{copy_mode} {op}: {output:?}");
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
            let bench = ["bench", "all_reduce", "--wide", "--sizes", "8,1M", "--iters", "4", "--check", "--flag-layout", layout];
            let said = said(&[&["run", "-n", "3", "--"], &bench[..]].concat());
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
        let table = run("3", &["all_reduce", "--sizes", "8,1M", "--redop", "product", "--check", "--transport", "tcp"]);
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

mod plan {
    use super::*;

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
        let by_variable = program()
            .args(["plan", "all_reduce", "--ranks", "8", "--hosts", "8"])
            .env("KOLO_ALGORITHM", "ring")
            .output()
            .unwrap();
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
            command.args([
                "run",
                "-n",
                "3",
                "--",
                "bench",
                "all_reduce",
                "--sizes",
                "8",
                "--iters",
                "1",
                "--warmup",
                "0",
                "--check",
            ]);
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
}

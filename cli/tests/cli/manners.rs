//! What all commands have in common: output that cannot be written, signals, widths, and wrong command
//! lines.

use std::process::Stdio;

use crate::program::{Folder, failed, program, said, text};

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
        // On a busy machine, a rank may warn that it waits for another one.
        command.args(arguments).env("PATH", "/nowhere").env("KOLO_LOG", "error");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        drop(out);
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(0), ""), "{arguments:?}: {line}");
    }
}

/// The command fails, says why, and leaves nothing behind.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_under_standard_output_is_told() {
    let folder = Folder::new("full");
    let bench = ["bench", "all_reduce", "--sizes", "8,16", "--iters", "1", "--warmup", "0"];
    for arguments in [
        &["--help"][..],
        &["plan", "all_reduce", "--ranks", "4"],
        &["plan", "all_reduce", "--ranks", "4", "--json"],
        &bench,
        &[&bench[..], &["--json", "-"]].concat(),
        &[&["run", "-n", "2", "--"], &bench[..]].concat(),
        &["compare", "--rounds", "1000000", "--sizes", "8", "--with", "copy"],
        &["compare", "barrier", "--rounds", "1", "--with", "roundtrip", "--plot", "-"],
        &["soak", "--minutes", "100000", "--seed", "1"],
        &["doctor"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = program();
        command.args(arguments).env("TMPDIR", &folder.0).env("PATH", "/nowhere").stdin(Stdio::null()).stdout(full);
        let output = command.output().unwrap();
        let err = text(&output.stderr);
        let expected = "kolo: standard output cannot be written: No space left on device (os error 28)";
        assert!(output.status.code() == Some(1) && err.lines().any(|line| line == expected), "{arguments:?}: {err}");
        assert_eq!(err.matches("cannot be written").count(), 1, "{arguments:?}: {err}");
        assert!(!err.contains("has died"), "{arguments:?}: {err}");
        assert!(folder.entries().is_empty(), "{arguments:?}: {:?}", folder.entries());
    }
}

/// A contestant that takes long to start is asked to end.
#[cfg(unix)]
#[test]
fn a_comparison_ends_while_a_contestant_starts() {
    use std::path::Path;

    let wait_for = |path: &Path| crate::common::wait_until(&path.display().to_string(), || path.exists());
    for (blocked, task) in [("-c", "barrier"), ("ranks", "barrier"), ("ranks", "start")] {
        let folder = Folder::new("start");
        let (temporary, programs) = (folder.0.join("temporary"), folder.0.join("bin"));
        std::fs::create_dir(&temporary).unwrap();
        std::fs::create_dir(&programs).unwrap();
        let script = "#!/bin/sh\n[ \"$1\" = -c ] && [ \"$BLOCKED\" != -c ] && exit\n\
                      trap 'echo > \"$FOLDER/told\"; exit 0' TERM\necho > \"$FOLDER/started\"\nwhile :; do sleep 0.05; done\n";
        crate::program::write_program(&programs.join("python3"), script.as_bytes());
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = program();
        command.args(["compare", task, "--with", "gloo"]).env("TMPDIR", &temporary).env("PATH", path);
        command.env("BLOCKED", blocked).env("FOLDER", &folder.0);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&folder.0.join("started"));
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(143), "kolo: stopped by SIGTERM\n".to_owned()));
        assert!(folder.0.join("told").exists(), "{blocked} {task}: it was killed");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{blocked} {task}");
    }
}

/// Checks that each line that a command writes fits a terminal of 80 and of 60 columns: the terminal would
/// break words. One without a size counts as one of 80.
#[cfg(unix)]
pub(crate) fn fits(command: &dyn Fn() -> std::process::Command) {
    for (size, columns) in [(80, 80), (60, 60)] {
        fits_in(command(), size, columns);
    }
}

#[cfg(unix)]
fn fits_in(command: std::process::Command, size: u16, columns: usize) {
    let shown = format!("{:?}", command.get_args().collect::<Vec<_>>());
    let mut terminal = crate::top::Pty::start_in(command, (60, size));
    terminal.program.wait().unwrap();
    let said = terminal.all();
    for line in said.lines() {
        // A line of progress takes the place of the one before, and a sequence no column.
        let mut line = line.rsplit('\r').next().unwrap().to_owned();
        while let Some(from) = line.find('\x1b') {
            let to = line[from..].find(|letter: char| letter.is_ascii_alphabetic()).unwrap();
            line.replace_range(from..=from + to, "");
        }
        assert!(line.chars().count() <= columns, "{shown}: {} columns: {line}", line.chars().count());
    }
    assert!(said.lines().count() > 1, "{shown}: {said}");
}

/// Help, reports, warnings and errors.
#[cfg(unix)]
#[test]
fn lines_fit_a_terminal() {
    let with = |arguments: &[&str]| {
        let words: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        fits(&|| {
            let mut command = program();
            command.args(&words).env("PATH", "/nowhere").env("KOLO_TIMOUT", "5s");
            // Ranks warn when they wait for long. Their lines pass through the launcher as they are.
            command.env("KOLO_LOG", if ["run", "compare"].contains(&&*words[0]) { "error" } else { "warn" });
            command
        });
    };
    let help = said(&["--help"]);
    let commands = help.split("Commands:\n").nth(1).unwrap().lines().take_while(|line| !line.is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    assert!(commands.len() > 7 && commands.contains(&"compare"), "{commands:?}");
    with(&["--help"]);
    for arguments in [&["plan", "--help"][..], &["plan", "all_reduce", "--ranks", "64", "--hosts", "16"], &["doctor"]] {
        let mut command = program();
        command.args(arguments);
        fits_in(command, 0, 80);
    }
    // Where there is no terminal, too.
    let help = said(&["plan", "--help"]);
    assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    for command in commands.into_iter().filter(|command| *command != "help" && !command.is_empty()) {
        with(&[command, "--help"]);
        with(&[command, "-h"]);
        with(&[command, "--no-such-option"]);
    }
    let op = ["all_reduce", "--sizes", "8,100K", "--iters", "1", "--warmup", "0", "--redop", "product", "--check"];
    with(&[&["run", "-n", "3", "--", "bench"], &op[..], &["--transport", "tcp"]].concat());
    with(&["bench", "broadcast", "--sizes", "3,8", "--root", "1"]);
    let plan = ["plan", "all_reduce", "--ranks", "64", "--hosts", "16", "--racks", "4"];
    with(&plan);
    with(&[&plan[..], &["--simulate"]].concat());
    with(&["plan", "no_such_operation", "--ranks", "4"]);
    with(&["compare", "--rounds", "1", "--sizes", "8,100K", "--with", "openmpi,mpich,gloo,bounds"]);
    with(&["compare", "--with", "glo"]);
    with(&["soak", "--minutes", "0", "--seed", "1"]);
    with(&["doctor"]);
    with(&["run", "-n", "2", "--", "/no/such/program/with/a/name/that/is/long"]);
    with(&["run", "-n", "2", "--", "/bin/sh", "-c", "exit 3"]);
    with(&["top", "--once", "--job", "none-of-this-name"]);
    let traces = Folder::new("widths");
    let mut job = program();
    let bench = "[ $KOLO_RANK = 0 ] && size=8 || size=16; exec \"$0\" bench all_reduce --sizes $size --iters 2";
    job.args(["run", "-n", "2", "--", "sh", "-c", bench, env!("CARGO_BIN_EXE_kolo")]).env("KOLO_TRACE_DIR", &traces.0);
    assert!(!job.stdin(Stdio::null()).output().unwrap().status.success());
    assert_eq!(traces.entries().len(), 2);
    with(&["trace", traces.0.to_str().unwrap()]);
}

/// By the command, and not again by the ranks that it starts.
#[test]
fn a_misspelt_variable_is_told_by_every_command() {
    let bench = ["--", "bench", "all_reduce", "--sizes", "8", "--iters", "1", "--warmup", "0"];
    for arguments in [
        &[&["run", "-n", "2"], &bench[..]].concat()[..],
        &bench[1..],
        &["plan", "all_reduce", "--ranks", "4"],
        &["soak", "--minutes", "0", "--seed", "1"],
        &["compare", "--rounds", "1", "--sizes", "8", "--with", "kolo-tcp,copy"],
    ] {
        let output = program().args(arguments).env("KOLO_TIMEUOT", "3s").stdin(Stdio::null()).output().unwrap();
        let err = text(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {err}");
        assert_eq!(err.matches("kolo does not read KOLO_TIMEUOT").count(), 1, "{arguments:?}: {err}");
    }
}

/// Mistakes that users of other launchers make.
#[test]
fn a_wrong_command_line_is_told_once_and_by_its_fault() {
    let kolo = env!("CARGO_BIN_EXE_kolo");
    for (arguments, code, hint) in [
        (&["run", "--no-kill", "-n", "2", "true"][..], 2, "unexpected argument '--no-kill'"),
        (&["run", "--map-by", "core", "-n", "2", "true"], 2, "unexpected argument '--map-by'"),
        (&["run", "-np", "2", "true"], 2, "write -n 2, not -np 2"),
        (&["run", "-n", "4", "--", kolo, "bench", "nonsense"], 2, "invalid value 'nonsense'"),
        (&["run", "-n", "4", "--", "bench", "nonsense"], 2, "invalid value 'nonsense'"),
        (&["run", "-n", "4", "--", kolo, "bench", "all_reduce", "-d", "bool"], 2, "there are no benchmarks of bool"),
        (&["run", "-n", "4", "--", "bench", "broadcast", "--root", "4"], 2, "root 4 is out of range; there are ranks 0 to 3"),
        (&["run", "-n", "4", "--", "bench", "barrier", "--json", "/no/such/folder/x"], 1, "no such folder"),
    ] {
        let (status, err) = failed(arguments);
        assert_eq!((status, err.matches(hint).count()), (code, 1), "{arguments:?}: {err}");
        assert!(!err.contains("--ranks <RANKS>\n") && !err.contains("[1] "), "{arguments:?}: {err}");
    }
    for (arguments, tip) in [
        (&["run", "--enable-recovery", "true"][..], "with '--keep-going', the other ranks go on"),
        (&["run", "--output-filename", "logs", "true"], "write '--log-dir FOLDER'"),
        (&["run", "--cpus-per-task=2", "true"], "'--bind-to core'"),
        (&["run", "--np", "2", "true"], "'-n 4' starts four ranks"),
        (&["run", "--nproc_per_node=2", "true"], "'-n 4' starts four ranks"),
        (&["run", "-machinefile", "hosts", "true"], "write '--hostfile'"),
        (&["run", "-hostfile", "hosts", "true"], "write '--hostfile'"),
        (&["run", "-wdir", "/tmp", "true"], "write '--directory'"),
        (&["run", "--hostfiel", "hosts", "true"], "a similar argument exists: '--hostfile'"),
        (&["bench", "all_reduce", "-g", "2"], "'kolo run -n 4 -- bench' measures four ranks"),
        (&["compare", "--with", "glo"], "a similar value exists: 'gloo'"),
        (&["compare", "all_reduc"], "a similar value exists: 'all_reduce'"),
        (&["compare", "--plot-bounds"], "--plot-bounds needs --plot"),
        (&["plan", "all_reduce", "-n", "4", "--plots", "folder"], "--plots needs --simulate"),
        (&["plan", "all_reduce", "-n", "4", "--jitter=1ms"], "--jitter needs --simulate"),
        (&["plan", "all_reduce", "-n", "4", "--hosts", "5"], "4 ranks cannot be on 5 hosts"),
    ] {
        let (code, err) = failed(arguments);
        assert!(code == 2 && err.contains(tip), "{arguments:?}: {code} {err}");
        assert!(err.matches("tip: ").count() <= 1 || arguments[1] == "--hostfiel", "{err}");
    }
    let (_, err) = failed(&["run", "--no-such", "3", "true"]);
    assert!(!err.contains("similar argument exists"), "{err}");
    // Commands that the help hides are not suggested.
    for (name, tip) in [("completition", true), ("agnt", false), ("gard", false)] {
        let (_, err) = failed(&[name]);
        assert!(!["'compete'", "agent'", "guard'"].iter().any(|hidden| err.contains(hidden)), "{err}");
        assert_eq!(err.contains("tip: "), tip, "{err}");
    }
    assert!(said(&["run", "-n", "4", "--", "bench", "--help"]).starts_with("Measure a collective"));
    // Options of the program are its own.
    assert_eq!(said(&["run", "-n", "1", "--no-prefix", "echo", "-n", "--max", "-x", "y"]).trim_end(), "--max -x y");
}

/// Before a measurement, and not after it.
#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_written_is_told_before_the_work() {
    let folder = Folder::new("files");
    let pipe = folder.0.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let pipe = pipe.to_str().unwrap();
    // They would take days.
    let bench = ["bench", "all_reduce", "--sizes", "8", "--iters", "1000000000", "--json", pipe];
    for arguments in [
        &bench[..],
        &[&["run", "-n", "2", "--"], &bench[..]].concat(),
        &["compare", "--rounds", "4000000000", "--sizes", "8", "--with", "copy", "--json", pipe],
        &["trace", pipe, "--chrome", pipe],
    ] {
        let (code, err) = failed(arguments);
        let told = format!("kolo: {pipe} cannot be written: no process reads this pipe\n");
        assert!(code == 1 && err.starts_with(&told), "{arguments:?}: {err}");
        assert!(!err.contains("[1]"), "{arguments:?}: {err}");
    }
    let file = folder.0.join("file");
    std::fs::write(&file, "").unwrap();
    let plots = ["plan", "all_reduce", "-n", "65536", "--hosts", "65536", "--simulate", "--calls", "10000", "--plots"];
    let (_, err) = failed(&[&plots[..], &[file.to_str().unwrap()]].concat());
    assert!(err.contains("cannot make"), "{err}");
}

/// The smallest sizes are those of one element.
#[test]
fn sizes_are_told_that_are_not_those_that_were_asked_for() {
    for (arguments, told) in [
        (&["bench", "all_reduce", "--iters", "1", "--sizes", "3,8"][..], "# bytes, in whole elements: 3 is measured as 4\n"),
        (&["compare", "--rounds", "1", "--with", "copy", "--sizes", "8,3"], "# bytes, in whole elements: 3 is measured as 4\n"),
    ] {
        let out = said(arguments);
        assert!(out.contains(told), "{out}");
        assert!(!out.contains("middle half"), "one round has none: {out}");
    }
    assert!(!said(&["bench", "all_reduce", "--iters", "1", "--sizes", "8"]).contains("whole elements"));
}

#[cfg(unix)]
#[test]
fn a_folder_for_temporary_files_that_takes_none_is_told_with_what_to_do() {
    for arguments in [&["soak", "--minutes", "0"][..], &["compare", "--rounds", "1", "--with", "copy"]] {
        let output = program().args(arguments).env("TMPDIR", "/no/such/folder").stdin(Stdio::null()).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.starts_with("kolo: the folder /no/such/folder/kolo-") && err.contains("; set TMPDIR to a folder"), "{err}");
    }
}

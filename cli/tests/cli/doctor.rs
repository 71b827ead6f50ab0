//! `kolo doctor` on a machine that is fit, and with one problem each.

use std::process::Command;

use crate::program::everything;

fn kolo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    // The environment of a user's shell, whatever started the tests.
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("KOLO_") || ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].contains(&name))
        {
            command.env_remove(name);
        }
    }
    command
}

#[test]
fn all_is_well_here() {
    let output = kolo().arg("doctor").output().unwrap();
    let said = everything(&output);
    assert!(output.status.success() && said.ends_with("kolo works here\n"), "{said}");
    for subject in [
        "version",
        "settings",
        "secret",
        "launcher",
        "interfaces",
        "address",
        "ports",
        "local connections",
        "shared memory",
        "clock",
        "processor",
        "descriptors",
        "CUDA",
        "reading processes",
        "a job",
    ] {
        let lines =
            said.lines().filter(|line| line.get(9..).is_some_and(|line| line.starts_with(&format!("{subject} ")))).count();
        assert_eq!(lines, 1, "{subject}: {said}");
    }
    // Each warning has advice, and no other finding does.
    let warnings = said.lines().filter(|line| line.starts_with("warning ")).count();
    assert_eq!(said.matches(" -> ").count(), warnings, "{said}");
}

#[test]
fn what_was_found_can_be_had_as_json() {
    let output = kolo().args(["doctor", "--json"]).env("KOLO_TIMEOUT", "soon").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["failures"], 1);
    let findings = report["findings"].as_array().unwrap();
    for finding in findings {
        assert_eq!(finding["advice"].is_null(), finding["severity"] == "ok", "{finding}");
    }
    let failure = findings.iter().find(|finding| finding["severity"] == "failure").unwrap();
    assert_eq!(failure["subject"], "settings");
    assert!(failure["found"].as_str().unwrap().contains("KOLO_TIMEOUT"), "{failure}");
    // No job is started if it would fail anyway.
    assert!(findings.iter().all(|finding| finding["subject"] != "a job"));
}

/// Checks for one failure, which names the problem and says in one line what to do.
fn fails(command: &mut Command, subject: &str, hints: &[&str]) {
    let output = command.output().unwrap();
    let said = everything(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let at = said.lines().position(|line| line.starts_with("FAILURE ") && line.contains(subject));
    let Some(at) = at else { panic!("{subject}: {said}") };
    let lines: Vec<&str> = said.lines().skip(at).take(2).collect();
    assert!(lines[1].contains(" -> "), "{said}");
    for hint in hints {
        assert!(lines.iter().any(|line| line.contains(hint)), "{hint}: {said}");
    }
}

#[test]
fn what_is_wrong_is_said_with_what_to_do() {
    let doctor = || {
        let mut command = kolo();
        command.arg("doctor");
        command
    };
    fails(doctor().env("KOLO_INTERFACE", "nosuch"), "address", &["no interface is admitted", "KOLO_INTERFACE"]);
    let several = [("KOLO_TIMEOUT", "soon"), ("KOLO_SOCKETS", "0"), ("KOLO_NETWORK_LATENCY", "-1"), ("KOLO_DEVICES", "gpu")];
    fails(
        doctor().envs(several),
        "settings",
        &["; KOLO_TIMEOUT", "KOLO_SOCKETS", "1 to 64", "KOLO_NETWORK_LATENCY", "KOLO_DEVICES"],
    );
    fails(doctor().env("KOLO_SECRET", "1234"), "settings", &["KOLO_SECRET", "64 hexadecimal digits"]);
    fails(doctor().env("KOLO_SECRET", ""), "settings", &["KOLO_SECRET", "set but empty", "unset"]);
    fails(doctor().env("KOLO_TLS_CA", "ca.pem"), "settings", &["KOLO_TLS_CERT"]);
    let tls = ["KOLO_TLS_CA", "KOLO_TLS_CERT", "KOLO_TLS_KEY"].map(|name| (name, "none.pem"));
    fails(doctor().envs(tls), "settings", &["KOLO_TLS_CA"]);
    fails(doctor().env("RANK", "1"), "launcher", &["WORLD_SIZE", "start the program with"]);
    fails(doctor().env("RANK", "x"), "launcher", &["RANK=\"x\": a whole number", "correct the variable"]);
    let beyond = [("RANK", "5"), ("WORLD_SIZE", "4")];
    fails(
        doctor().envs(beyond),
        "launcher",
        &["RANK=\"5\": a rank less than the world size, WORLD_SIZE=4", "correct the variable"],
    );
    fails(doctor().envs([("RANK", "1"), ("WORLD_SIZE", "2")]), "launcher", &["where the ranks find each other", "MASTER_ADDR"]);
    fails(
        doctor().env("KOLO_STORE", "file:///no/such/folder/store"),
        "store",
        &["/no/such/folder/store", if cfg!(windows) { "(os error 3)" } else { "No such file" }, "make the folder"],
    );
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let taken = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    fails(doctor().envs(taken), "store", &[&format!("127.0.0.1:{port}"), "choose another port"]);
    // A rank that does not serve the store reports nothing.
    let guest = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    let output = doctor().envs(guest).output().unwrap();
    assert!(output.status.success(), "{}", everything(&output));
}

#[test]
fn variables_that_kolo_does_not_read_are_listed() {
    let output = kolo()
        .args(["doctor"])
        .envs([("KOLO_SECRT", "0f"), ("KOLO_TIEMOUT", "5"), ("KOLO_WEATHER", "fair"), ("KOLO_TIMEOUT", "5")])
        .output()
        .unwrap();
    let said = everything(&output);
    assert!(output.status.success(), "{said}");
    let lines: Vec<&str> = said.lines().skip_while(|line| !line.starts_with("warning  variables ")).take(2).collect();
    assert_eq!(
        lines[0].split_once("variables").unwrap().1.trim(),
        "kolo does not read KOLO_SECRT (the nearest that it reads is KOLO_SECRET); kolo does not read KOLO_TIEMOUT (the nearest \
         that it reads is KOLO_TIMEOUT); kolo does not read KOLO_WEATHER"
    );
    assert!(lines[1].contains(" -> correct the name"), "{said}");
    let settings = said.lines().find(|line| line.starts_with("ok       settings ")).unwrap();
    assert_eq!(settings.split_whitespace().skip(2).collect::<Vec<_>>(), ["KOLO_TIMEOUT"], "{said}");
}

#[cfg(unix)]
#[test]
fn limits_are_seen() {
    let limited = |limit: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{limit} && exec {} doctor", env!("CARGO_BIN_EXE_kolo"))]);
        command
    };
    fails(&mut limited("ulimit -n 100"), "descriptors", &["100 may be open", "raise the limit"]);
    fails(&mut limited("ulimit -S -n 100"), "descriptors", &["100 may be open", "ulimit -n 256"]);
}

/// A stub of the driver's library that finds no device.
#[cfg(target_os = "linux")]
#[test]
fn cuda_that_does_not_work_is_a_warning_and_one_that_does_is_counted() {
    let folder = std::env::temp_dir().join(format!("kolo-doctor-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (init, hint) in [("100", "cuInit returned 100: there is no device"), ("0", "3 devices, driver for CUDA 12.1")] {
        let source = folder.join("cuda.c");
        let code = format!(
            "int cuInit(unsigned f) {{ return {init}; }} int cuDriverGetVersion(int *v) {{ *v = 12010; return 0; }} \
             int cuDeviceGetCount(int *c) {{ *c = 3; return 0; }}"
        );
        std::fs::write(&source, code).unwrap();
        let library = folder.join("libcuda.so.1");
        let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).output();
        if !built.is_ok_and(|output| output.status.success()) {
            std::io::Write::write_all(&mut std::io::stderr(), b"NOT RUN: a library in place of CUDA's: there is no C compiler\n")
                .unwrap();
            break;
        }
        let output = kolo().arg("doctor").env("LD_LIBRARY_PATH", &folder).output().unwrap();
        assert!(output.status.success() && everything(&output).contains(hint), "{}", everything(&output));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

//! The C ABI as programs in C and C++ see it: installed by the script, compiled by gcc and g++ with
//! all warnings, linked with both libraries, under `kolo run` and under valgrind.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::common;

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("c")
}

fn run(command: &mut Command) -> Output {
    let output = common::patient(command).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Whether the tests can run here; says loudly what cannot.
fn have(programs: &[&str]) -> bool {
    if !cfg!(target_os = "linux") {
        common::not_run("the C ABI: the install script's tests are for Linux");
        return false;
    }
    let missing: Vec<&&str> = programs.iter().filter(|program| !has(program)).collect();
    if !missing.is_empty() {
        common::not_run(&format!("the C ABI: {missing:?} not found"));
    }
    missing.is_empty()
}

/// Builds the C library, and returns the folder with both files. cargo builds libraries that no
/// Rust program can link with for no test. With the selection of `cargo test` it finds everything
/// else built, with the same features.
fn built() -> &'static Path {
    let folder = Path::new(env!("CARGO_BIN_EXE_kolo")).parent().unwrap();
    let profile = folder.file_name().unwrap().to_str().unwrap();
    let features = [("redis", cfg!(feature = "redis")), ("tls", cfg!(feature = "tls")), ("cuda", cfg!(feature = "cuda"))];
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).args(["build", "--quiet", "--lib", "--test", "processes"]);
    cargo.arg("--target-dir").arg(folder.parent().unwrap());
    cargo.args(["--profile", if profile == "debug" { "dev" } else { profile }]);
    for (feature, _) in features.iter().filter(|(_, is_on)| *is_on) {
        cargo.arg("--features").arg(format!("kolo-capi/{feature},kolo-cli/{feature}"));
    }
    run(crate::without_package(&mut cargo));
    folder
}

/// Returns where the install script has put it: what cargo has just built, not another build.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        fs::create_dir_all(folder()).unwrap();
        // Tests may be processes of their own.
        let lock = File::create(folder().join("lock")).unwrap();
        lock.lock().unwrap();
        let prefix = folder().join("prefix");
        run(Command::new(root().join("scripts/install.sh")).arg(&prefix).env("BUILT", built()).env("STRIP", "0"));
        prefix
    })
}

#[derive(Clone, Copy, Debug)]
enum Language {
    C,
    Cpp,
}

#[derive(Clone, Copy, Debug)]
enum Linking {
    Static,
    Dynamic,
}

/// Compiles a source of this repository, and returns the program.
fn compile(source: &str, language: Language, linking: Linking) -> PathBuf {
    let name = Path::new(source).file_stem().unwrap().to_str().unwrap();
    // Tests that run at the same time have programs of their own.
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let program = folder().join(format!("{test}-{name}-{language:?}-{linking:?}"));
    let lib = prefix().join("lib");
    let mut compiler = match language {
        Language::C => Command::new("gcc"),
        Language::Cpp => Command::new("g++"),
    };
    match language {
        Language::C => compiler.arg("-std=c99"),
        Language::Cpp => compiler.args(["-x", "c++", "-std=c++11"]),
    };
    compiler.args(WARNINGS).args(["-O1", "-g"]).arg("-I").arg(prefix().join("include"));
    compiler.arg(root().join(source)).args(["-x", "none"]);
    match linking {
        Linking::Static => compiler.arg(lib.join("libkolo.a")).args(["-lpthread", "-ldl", "-lm"]),
        Linking::Dynamic => {
            compiler.arg("-L").arg(&lib).arg("-lkolo").arg(format!("-Wl,-rpath,{}", lib.display())).arg("-lpthread")
        }
    };
    run(compiler.arg("-o").arg(&program));
    program
}

/// A program under `kolo run`; what the ranks say.
fn ranks(world: usize, before: &[&str], program: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["run", "-n", &world.to_string(), "--"]).args(before).arg(program).args(arguments);
    String::from_utf8_lossy(&run(&mut command).stdout).into_owned()
}

/// What Rust keeps for a thread is an `Arc`, which points into its block and not at its start: that
/// is "possibly lost" by valgrind's terms, and reachable by Rust's. What is definitely lost counts,
/// and any wrong access.
const VALGRIND: [&str; 6] = [
    "valgrind",
    "--quiet",
    "--error-exitcode=9",
    "--leak-check=full",
    "--show-leak-kinds=definite,indirect",
    "--errors-for-leak-kinds=definite,indirect",
];

/// How programs are built: each language with each library.
const WAYS: [(Language, Linking); 4] = [
    (Language::C, Linking::Dynamic),
    (Language::Cpp, Linking::Static),
    (Language::C, Linking::Static),
    (Language::Cpp, Linking::Dynamic),
];

/// Returns how a program is built: in some ways, which differ between programs, or, where all cases are
/// tried, in each.
fn ways(some: Range<usize>) -> &'static [(Language, Linking)] {
    if common::all() { &WAYS } else { &WAYS[some] }
}

fn rendezvous_folder(name: &str) -> String {
    let folder = folder().join(name);
    // What an earlier run left.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn every_collective() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(0..2) {
        let program = compile("tests/c/collectives.c", language, linking);
        let is_first = matches!((language, linking), (Language::C, Linking::Dynamic));
        for world in if common::all() || is_first { &[1, 2, 4][..] } else { &[2] }.iter().copied() {
            // Large buffers take their time: once is enough, and with four ranks on few processors not even
            // that.
            let is_large = if common::all() { world < 4 || is_first } else { world == 2 && is_first };
            let most = if is_large { "70000" } else { "5" };
            let said = ranks(world, &[], &program, &[most]);
            assert_eq!(said.matches("every collective").count(), world, "{said}");
        }
    }
}

/// A program in C has no subscriber of `tracing`.
#[test]
fn warnings_are_written_in_c_too() {
    if !have(&["gcc"]) {
        return;
    }
    let program = compile("tests/c/collectives.c", Language::C, Linking::Dynamic);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kolo"));
    command.args(["run", "-n", "2", "--"]).arg(program).arg("5").env("KOLO_TIMEUOT", "3s").env_remove("KOLO_LOG");
    let said = String::from_utf8_lossy(&run(&mut command).stderr).into_owned();
    assert_eq!(said.matches("the nearest that it reads is KOLO_TIMEOUT").count(), 1, "{said}");
}

#[test]
fn misuse_is_refused() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(1..2) {
        let program = compile("tests/c/misuse.c", language, linking);
        for world in [1, 2, 4] {
            let said = ranks(world, &[], &program, &[]);
            assert_eq!(said.matches("misuse is refused").count(), world, "{said}");
        }
    }
}

#[test]
fn ranks_meet() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    let folder = rendezvous_folder("rendezvous");
    for &(language, linking) in ways(0..1) {
        let program = compile("tests/c/rendezvous.c", language, linking);
        for world in ["1", "2", "4"] {
            run(Command::new(&program).args([world, &folder]));
        }
    }
}

#[test]
fn failures_are_errors() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(2..3) {
        let program = compile("tests/c/failures.c", language, linking);
        let said = ranks(2, &[], &program, &[]);
        assert_eq!(said.matches("failures are errors").count(), 2, "{said}");
    }
}

/// Its handlers of forks are registered before the library is used.
#[test]
fn forks_do_no_harm() {
    if !have(&["gcc"]) {
        return;
    }
    for linking in [Linking::Static, Linking::Dynamic] {
        let said = ranks(2, &[], &compile("tests/c/forks.c", Language::C, linking), &[]);
        assert_eq!(said.matches("forks do no harm").count(), 2, "{said}");
    }
}

#[test]
fn those_that_are_left_go_on() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(0..1) {
        let program = compile("tests/c/shrink.c", language, linking);
        let said = ranks(3, &[], &program, &[]);
        assert_eq!(said.matches("goes on").count(), 2, "{said}");
    }
}

#[test]
fn a_newcomer_joins() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(1..2) {
        let program = compile("tests/c/grow.c", language, linking);
        let said = ranks(2, &[], &program, &[]);
        assert_eq!(said.matches("of three goes on").count(), 3, "{said}");
    }
}

#[test]
fn the_reducer() {
    if !have(&["gcc", "g++"]) {
        return;
    }
    for &(language, linking) in ways(3..4) {
        let program = compile("tests/c/reducer.c", language, linking);
        for world in [1, 2, 4] {
            let said = ranks(world, &[], &program, &[]);
            assert_eq!(said.matches("the reducer works").count(), world, "{said}");
        }
    }
}

/// Only where all cases are tried: programs are some fifty times as slow there.
#[test]
fn valgrind_finds_nothing() {
    if !common::all() || !have(&["gcc", "valgrind"]) {
        return;
    }
    let compile = |name: &str| compile(&format!("tests/c/{name}.c"), Language::C, Linking::Dynamic);
    let folder = rendezvous_folder("valgrind");
    let (collectives, misuse, rendezvous, failures) =
        (compile("collectives"), compile("misuse"), compile("rendezvous"), compile("failures"));
    for world in [1, 2] {
        ranks(world, &VALGRIND, &collectives, &["5"]);
        ranks(world, &VALGRIND, &misuse, &[]);
        run(Command::new("valgrind").args(&VALGRIND[1..]).arg(&rendezvous).args([&world.to_string(), &folder]));
    }
    ranks(2, &VALGRIND, &failures, &[]);
    ranks(2, &VALGRIND, &compile("reducer"), &[]);
}

#[test]
fn the_valgrind_of_the_tests_finds_leaks() {
    if !have(&["gcc", "valgrind"]) {
        return;
    }
    let source = folder().join("leak.c");
    prefix();
    fs::write(
        &source,
        "#include <kolo.h>\nint main(void) { kolo_comm_t c; void *p = 0; return kolo_comm_init_env(&c, p); }\n\
         #include <stdlib.h>\n__attribute__((constructor)) static void leak(void) { *(volatile char *)malloc(8) = 0; }\n",
    )
    .unwrap();
    let program = compile(source.to_str().unwrap(), Language::C, Linking::Dynamic);
    let status = Command::new("valgrind").args(&VALGRIND[1..]).arg(program).output().unwrap().status;
    assert_eq!(status.code(), Some(9), "the leak was not found");
}

#[test]
fn examples() {
    if !have(&["gcc", "pkg-config"]) {
        return;
    }
    let mut seen = 0;
    for entry in fs::read_dir(root().join("examples/c")).unwrap() {
        let source = entry.unwrap().path();
        if source.extension().is_none_or(|extension| extension != "c") {
            continue;
        }
        let name = source.file_stem().unwrap().to_str().unwrap().to_owned();
        // The command in its head, with all warnings, in a folder of its own.
        let text = fs::read_to_string(&source).unwrap();
        let line = text.lines().map(|line| line.trim_start_matches([' ', '*'])).find(|line| line.starts_with("cc "));
        let (compile, start) = line.expect("the head says how to compile it").split_once(" && ").unwrap();
        let folder = PathBuf::from(rendezvous_folder(&name));
        let compile =
            compile.replace("cc -std=c99", &format!("gcc -std=c99 {} -Wl,-rpath,{}/lib", WARNINGS.join(" "), prefix().display()));
        let compile = compile.replace(&format!("{name}.c"), source.to_str().unwrap());
        let bin = Path::new(env!("CARGO_BIN_EXE_kolo")).parent().unwrap().display().to_string();
        let path = format!("{bin}:{}", std::env::var("PATH").unwrap());
        let packages = prefix().join("lib/pkgconfig");
        let mut shell = Command::new("sh");
        shell.current_dir(&folder).env("PATH", path).env("PKG_CONFIG_PATH", packages);
        let output = run(shell.args(["-c", &format!("set -e; {compile}; {start}")]));
        let said = String::from_utf8_lossy(&output.stdout);
        let (ranks, words) = match name.as_str() {
            "all_reduce" => (4, "success, 1.5"),
            "registered" => (4, "4, of 4 ranks"),
            "unique_id" => (4, "sums 4 6 12"),
            "data_parallel" => (2, "y = 3.00 x + 1.00"),
            "errors" => (2, "rank 1 on "),
            "go_on" => (2, "2 ranks are left, the last sum is 2"),
            other => panic!("what does the example {other} say?"),
        };
        assert_eq!(said.matches(words).count(), ranks, "{name}: {said}");
        seen += 1;
    }
    assert_eq!(seen, 6);
}

#[test]
fn the_library_shows_only_its_own() {
    if !have(&["nm", "readelf"]) {
        return;
    }
    let library = prefix().join("lib/libkolo.so");
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&library)).stdout;
    let symbols = String::from_utf8(symbols).unwrap();
    let names: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').next_back()).collect();
    let foreign: Vec<&&str> = names.iter().filter(|name| !name.starts_with("kolo_")).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    // All that the header declares, and nothing else.
    let header = fs::read_to_string(prefix().join("include/kolo.h")).unwrap();
    let declared = |name: &str| header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}("));
    assert!(names.len() > 40 && names.iter().all(|name| declared(name)), "{names:?}");
    let dynamic = run(Command::new("readelf").arg("-d").arg(&library)).stdout;
    let version: Vec<&str> = env!("CARGO_PKG_VERSION").split('.').collect();
    let abi = if version[0] == "0" { format!("0.{}", version[1]) } else { version[0].to_owned() };
    let soname = format!("[libkolo.so.{abi}]");
    assert!(String::from_utf8_lossy(&dynamic).contains(&soname), "{soname} is not the name of the library");
    assert!(prefix().join(format!("lib/libkolo.so.{abi}")).exists());
}

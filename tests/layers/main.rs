//! The structure of the crates, which no compiler checks: imports go down the floors, files of a
//! folder form no circle, and the operating system stays in `sys`.

mod c_library;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use source::{ModulePath, Source, Sources};

/// A folder of sources, with the number of files below which the tests look in the wrong place.
const CRATES: [(&str, usize); 6] =
    [("src", 150), ("burn/src", 6), ("capi/src", 10), ("cli/src", 20), ("examples/resnet/src", 10), ("nccl/src", 15)];

/// What only `sys` says, in code without spaces.
const OS_WORDS: [&str; 10] = [
    "target_os",
    "target_family",
    "cfg(unix",
    "cfg(windows",
    "cfg!(unix",
    "cfg!(windows",
    "raw_os_error",
    "libc::",
    "rustix::",
    "std::os::",
];

/// What creates a file or a folder, in code without spaces. What `OpenOptions` open is opened by
/// `sys::open_own`.
const CREATING: [&str; 5] = ["fs::write(", "File::create", "create_dir", "DirBuilder", ".create_new("];

/// What makes descriptors that stay open or are written to, in code without spaces.
const MAKING_DESCRIPTORS: [&str; 21] = [
    "mio::Poll::new",
    "mio::Waker::new(",
    "TcpListener::bind(",
    "TcpStream::connect(",
    "TcpStream::connect_timeout(",
    "UdpSocket::bind(",
    "UnixListener::bind",
    "UnixStream::connect",
    "UnixStream::pair",
    "Socket::new(",
    ".accept()",
    ".try_clone()",
    "recvmsg(&self",
    "memfd_create(\"",
    "pidfd_open(pid",
    "kqueue)",
    "shm::open(",
    "options.open(",
    "get_if_addrs",
    "to_socket_addrs(",
    "get_connection",
];

/// What reads the environment, in code without spaces.
const READING_ENVIRONMENT: [&str; 3] = ["env::var", "env::temp_dir", "getenv"];

/// What creates files in folders that the program has made for itself.
const IN_OWN_FOLDERS: [&str; 4] =
    ["run/process/unix.rs", "run/process/windows.rs", "compare/trial.rs", "compare/system/windows.rs"];

/// Where durations are no timeouts of the protocol: what the system does, settings, measurements and
/// how often a thread looks.
const OTHER_DURATIONS: [&str; 11] = [
    "config/",
    "doctor.rs",
    "exec/costs/",
    "network/fuzz.rs",
    "network/listener/accept.rs",
    "progress/tasks.rs",
    "rendezvous/store/redis.rs",
    "shm/",
    "sys/",
    "timeouts.rs",
    "transport/rail.rs",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the sources of one of [`CRATES`], which all tests share.
fn read(folder: &str) -> &'static Sources {
    static READ: [OnceLock<Sources>; CRATES.len()] = [const { OnceLock::new() }; CRATES.len()];
    let at = CRATES.iter().position(|(its, _)| *its == folder).expect("not a folder of CRATES");
    let sources = READ[at].get_or_init(|| Sources::read(&root().join(folder)));
    let (count, at_least) = (sources.iter().count(), CRATES[at].1);
    assert!(count >= at_least, "only {count} files were found in {folder}: the test looks in the wrong place");
    sources
}

/// The floors of the library, from the top down, as docs/architecture.md draws them. A module may
/// import those below its own line.
fn floors() -> &'static [Vec<String>] {
    static FLOORS: OnceLock<Vec<Vec<String>>> = OnceLock::new();
    FLOORS.get_or_init(|| {
        let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
        let (_, section) = page.split_once("## The floors\n").expect("docs/architecture.md has the floors");
        let rows = section.split("```").nth(1).unwrap().lines().skip(1);
        let names = |row: &str| row.split("  ").next().unwrap().split(", ").map(str::to_owned).collect();
        rows.map(names).collect()
    })
}

/// Each import of a floor above, or of a neighbour on the same one.
fn imports_upwards(sources: &Sources) -> Vec<String> {
    let floor = |module: &str| floors().iter().position(|floor| floor.iter().any(|name| name == module));
    let mut wrong = Vec::new();
    for source in sources.iter() {
        let Some(module) = source.module.first() else { continue };
        let Some(own) = floor(module) else {
            wrong.push(format!("{module} is on no floor"));
            continue;
        };
        for (other, items) in sources.references(source) {
            let is_below = match other.first() {
                Some(other) => other == module || floor(other).is_some_and(|other| other > own),
                // What the crate exports at its root is for users.
                None => false,
            };
            if !is_below {
                wrong.push(format!("{} imports {:?} of {}", source.file, items, other.join("::")));
            }
        }
    }
    wrong
}

/// Files of one folder that import each other in a circle. A folder in the folder counts as one
/// file. The folder's own file, `mod.rs`, is not counted: it may define what its files have in
/// common, and put them together.
fn circles(sources: &Sources) -> Vec<String> {
    // By folder, from one entry to another.
    let mut folders: BTreeMap<ModulePath, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for source in sources.iter() {
        for other in sources.references(source).into_keys() {
            let common = source.module.iter().zip(&other).take_while(|(a, b)| a == b).count();
            let (Some(from), Some(to)) = (source.module.get(common), other.get(common)) else { continue };
            let folder = folders.entry(source.module[..common].to_vec()).or_default();
            folder.entry(from.clone()).or_default().insert(to.clone());
        }
    }
    let mut found = Vec::new();
    for (folder, mut imports) in folders {
        // A file that imports none of the rest, or that none of the rest imports, is in no circle.
        loop {
            let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
            let before = imports.len();
            imports.retain(|file, _| imported.contains(file));
            let files: BTreeSet<String> = imports.keys().cloned().collect();
            imports.retain(|_, others| {
                others.retain(|other| files.contains(other));
                !others.is_empty()
            });
            if imports.len() == before {
                break;
            }
        }
        if !imports.is_empty() {
            found.push(format!("in src/{}: {imports:?}", folder.join("/")));
        }
    }
    found
}

fn take_all_from_above(sources: &Sources) -> Vec<String> {
    sources.iter().filter(|source| source.takes_all_from_above()).map(|source| source.file.clone()).collect()
}

fn os_words_outside_sys(sources: &Sources) -> Vec<String> {
    let outside = sources.iter().filter(|source| source.module.first().is_none_or(|module| module != "sys"));
    outside
        .flat_map(|source| {
            OS_WORDS
                .iter()
                .filter(move |word| source.code.contains(**word))
                .map(|word| format!("{} mentions {word}", source.file))
        })
        .collect()
}

/// Every file that is created past `sys::write_file`, where another user may have planted a link or a
/// pipe.
fn creates_files(sources: &Sources) -> Vec<String> {
    let is_allowed = |source: &&Source| {
        let is_sys = source.module.first().is_some_and(|module| module == "sys");
        // The folders that the user names for plots, for man pages and for logs are the user's.
        let is_users = ["plan/plots.rs", "completions.rs", "run/logs.rs"].contains(&source.file.as_str());
        is_sys || IN_OWN_FOLDERS.contains(&source.file.as_str()) || is_users
    };
    let others = sources.iter().filter(|source| !is_allowed(source));
    others
        .flat_map(|source| {
            let code = without_documentation(&source.code);
            let is_there = |word: &&&str| code.contains(**word) && !(**word == ".create_new(" && code.contains("open_own("));
            CREATING.iter().filter(is_there).map(|word| format!("{} says {word}", source.file)).collect::<Vec<_>>()
        })
        .collect()
}

/// Every time that a message shows with as many digits as it has.
fn shows_times_by_debug(sources: &Sources) -> Vec<String> {
    let words = [":.0?}", ":.1?}", "=?began.elapsed()", ",?after,"];
    let shows = |source: &&Source| words.iter().any(|word| source.code.contains(word));
    sources.iter().filter(shows).map(|source| source.file.clone()).collect()
}

/// Code without its documentation, which may have examples.
fn without_documentation(code: &str) -> String {
    let (mut rest, mut kept) = (code, String::new());
    while let Some((before, after)) = rest.split_once("#[doc=") {
        kept += before;
        rest = after.split_once("\"]").map_or("", |(_, rest)| rest);
    }
    kept + rest
}

/// Every file that makes more descriptors than it keeps away from the numbers of standard input,
/// output and error.
fn makes_standard_descriptors(sources: &Sources) -> Vec<String> {
    // Their standard input, output and error are no numbers.
    let others = sources.iter().filter(|source| !source.module.iter().any(|module| module == "windows"));
    others
        .filter_map(|source| {
            let code = without_documentation(&source.code);
            let count = |word: &str| code.matches(word).count();
            let (makes, kept) = (MAKING_DESCRIPTORS.iter().map(|word| count(word)).sum::<usize>(), count("above_standard("));
            (makes > kept).then(|| format!("{}: {makes} and {kept}", source.file))
        })
        .collect()
}

/// Every read of the environment past `sys::variable`, also in programs in which no variable counts.
fn reads_environment(sources: &Sources) -> Vec<String> {
    let others = sources.iter().filter(|source| source.file != "sys/environment.rs");
    others
        .flat_map(|source| {
            let code = without_documentation(&source.code);
            let words = READING_ENVIRONMENT.iter().filter(|word| code.contains(**word));
            words.map(|word| format!("{} says {word}", source.file)).collect::<Vec<_>>()
        })
        .collect()
}

/// Every named timeout outside `timeouts`.
fn timeouts_elsewhere(sources: &Sources) -> Vec<String> {
    let others = sources.iter().filter(|source| !OTHER_DURATIONS.iter().any(|file| source.file.starts_with(file)));
    others.filter(|source| names_duration(&source.code)).map(|source| source.file.clone()).collect()
}

/// Whether a constant is a duration, in code without spaces.
fn names_duration(code: &str) -> bool {
    code.split("const").skip(1).any(|rest| {
        let name: String =
            rest.chars().take_while(|letter| letter.is_ascii_uppercase() || "_0123456789".contains(*letter)).collect();
        !name.is_empty() && rest[name.len()..].starts_with(":Duration=")
    })
}

/// Every name for something that is lent, but for the registered memory of `shm`.
fn lends_something_else(sources: &Sources) -> Vec<String> {
    let others = sources.iter().filter(|source| source.module.first().is_none_or(|module| module != "shm"));
    let lends = |source: &&Source| {
        let code = source.text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let mut words = code.flat_map(|line| line.split(|letter: char| !letter.is_alphabetic()));
        words.any(|word| ["lend", "lends", "lent", "lender", "loan"].iter().any(|one| word.eq_ignore_ascii_case(one)))
    };
    others.filter(lends).map(|source| source.file.clone()).collect()
}

/// Every use of cudarc but in `cuda`, and where users hand its streams and buffers over.
fn cudarc_outside_cuda(sources: &Sources) -> Vec<String> {
    let is_allowed = |file: &str| {
        ["cuda/", "communicator/stream/", "ddp/on_device/", "ddp/on_stream/", "ddp/parameter.rs", "lib.rs"]
            .iter()
            .any(|folder| file.starts_with(folder))
    };
    let others = sources.iter().filter(|source| !is_allowed(&source.file));
    others.filter(|source| source.code.contains("cudarc")).map(|source| source.file.clone()).collect()
}

/// Every event that the program's subscriber alone would get.
fn events_past_the_log(sources: &Sources) -> Vec<String> {
    let others = sources.iter().filter(|source| source.module.first().is_none_or(|module| module != "log"));
    others.filter(|source| source.code.contains("tracing::")).map(|source| source.file.clone()).collect()
}

#[test]
fn only_the_log_knows_tracing() {
    let wrong = events_past_the_log(read("src"));
    assert!(wrong.is_empty(), "take crate::log::warn!() and the like:\n{}", wrong.join("\n"));
}

/// What only a build with the feature `cuda` compiles: the file that declares it, and how, in code without
/// spaces.
const ON_GPUS: [(&str, &str); 6] = [
    ("lib.rs", "#[cfg(feature=\"cuda\")]modcuda;"),
    ("lib.rs", "#[cfg(feature=\"cuda\")]moddevice;"),
    ("ddp/mod.rs", "#[cfg_attr(not(feature=\"cuda\"),path=\"no_device.rs\")]modon_device;"),
    ("ddp/mod.rs", "#[cfg(feature=\"cuda\")]modon_stream;"),
    ("communicator/mod.rs", "#[cfg(feature=\"cuda\")]modstream;"),
    ("sys/linux/mod.rs", "#[cfg(any(feature=\"cuda\",test))]modexported_file;"),
];

/// The compiler refuses what a build without the feature needs of these modules.
#[test]
fn a_build_for_hosts_compiles_no_cuda() {
    let sources = read("src");
    for (file, declared) in ON_GPUS {
        let source = sources.iter().find(|source| source.file == file).expect("the file is there");
        assert!(source.code.contains(declared), "{file} does not say {declared}");
    }
    let is_on_gpus = |module: &[String]| match module {
        [first, second, ..] => matches!(
            (&first[..], &second[..]),
            ("cuda" | "device", _) | ("ddp", "on_device" | "on_stream") | ("communicator", "stream")
        ),
        [only] => matches!(&only[..], "cuda" | "device"),
        [] => true,
    };
    let words = ["crate::cuda::", "cudarc::", "crate::device::"];
    let known: Vec<&str> = sources
        .iter()
        .filter(|source| !is_on_gpus(&source.module) && words.iter().any(|word| source.code.contains(word)))
        .map(|source| &source.file[..])
        .collect();
    // Each in an item of its own for the feature.
    assert_eq!(known, ["communicator/mod.rs", "ddp/parameter.rs", "doctor.rs"]);
}

#[test]
fn imports_go_down() {
    let sources = read("src");
    let wrong = imports_upwards(sources);
    assert!(wrong.is_empty(), "against the direction:\n{}", wrong.join("\n"));
    let modules: BTreeSet<&str> = sources.iter().filter_map(|source| Some(source.module.first()?.as_str())).collect();
    let named: Vec<&str> = floors().iter().flatten().map(String::as_str).collect();
    assert_eq!(named.len(), modules.len(), "docs/architecture.md names a module twice, or one that is gone: {named:?}");
    assert_eq!(named.into_iter().collect::<BTreeSet<_>>(), modules, "each floor is a module, and each module is on a floor");
}

/// A rule that sources keep.
type Rule = fn(&Sources) -> Vec<String>;

#[test]
fn files_of_a_folder_import_each_other_in_no_circle() {
    in_all_crates(circles);
}

#[test]
fn only_tests_take_all_names_from_above() {
    in_all_crates(take_all_from_above);
}

fn in_all_crates(rule: Rule) {
    let wrong: Vec<String> = CRATES
        .iter()
        .flat_map(|&(folder, _)| rule(read(folder)).into_iter().map(move |wrong| format!("{folder}: {wrong}")))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_sys_knows_the_operating_system() {
    let wrong = os_words_outside_sys(read("src"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_are_created_by_one_function() {
    for folder in ["src", "capi/src", "cli/src"] {
        let wrong = creates_files(read(folder));
        assert!(wrong.is_empty(), "{folder}: write files by sys::write_file:\n{}", wrong.join("\n"));
    }
}

#[test]
fn descriptors_have_numbers_above_the_standard_ones() {
    let wrong = makes_standard_descriptors(read("src"));
    assert!(wrong.is_empty(), "make descriptors within sys::above_standard:\n{}", wrong.join("\n"));
}

#[test]
fn only_registered_memory_is_lent() {
    let wrong = lends_something_else(read("src"));
    assert!(wrong.is_empty(), "export, expose or view what is not lent to an operation: {wrong:?}");
}

#[test]
fn timeouts_are_in_one_module() {
    let wrong = timeouts_elsewhere(read("src"));
    assert!(wrong.is_empty(), "put timeouts into src/timeouts.rs: {wrong:?}");
    let is_stale =
        |file: &&&str| !read("src").iter().any(|source| source.file.starts_with(**file) && names_duration(&source.code));
    let stale: Vec<_> = OTHER_DURATIONS.iter().filter(is_stale).collect();
    assert!(stale.is_empty(), "no longer needed in OTHER_DURATIONS: {stale:?}");
}

#[test]
fn times_are_shown_by_one_function() {
    let wrong = shows_times_by_debug(read("src"));
    assert!(wrong.is_empty(), "show times by error::shown::time in {wrong:?}");
}

#[test]
fn the_environment_is_read_by_one_function() {
    for folder in ["src", "capi/src"] {
        let wrong = reads_environment(read(folder));
        assert!(wrong.is_empty(), "{folder}: read variables by sys::variable:\n{}", wrong.join("\n"));
    }
}

#[test]
fn only_cuda_and_its_public_face_know_cudarc() {
    let wrong = cudarc_outside_cuda(read("src"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A module file is `x/mod.rs` if there is a folder `x`, and `x.rs` otherwise.
#[test]
fn a_module_is_a_file_or_a_folder() {
    let mut checked = 0;
    for (folder, _) in CRATES {
        for source in read(folder).iter() {
            let beside = root().join(folder).join(source.file.trim_end_matches(".rs"));
            assert!(!beside.is_dir(), "{folder}/{} stands beside a folder of its name: call it mod.rs", source.file);
            checked += 1;
        }
    }
    assert!(checked > 200, "only {checked} files were found: the test looks in the wrong place");
}

#[test]
fn each_rule_finds_what_is_planted() {
    let clean = [
        ("lib.rs", "mod shm; mod engine; mod sys; mod cuda; pub use shm::flags::Flag;"),
        ("ddp/buckets.rs", "/// std::fs::write(path, \"a\"); [\"\"]\npub fn f() {}"),
        ("sys.rs", "#[cfg(unix)] pub fn name() -> i32 { libc::getpid() }"),
        (
            "shm/mod.rs",
            "mod flags; mod window; #[cfg(test)] mod tests; pub(crate) use flags::Flag; pub(crate) use window::Window;",
        ),
        ("shm/flags.rs", "use crate::sys; pub struct Flag; #[cfg(test)] mod tests { use super::*; use crate::ddp; }"),
        ("shm/window.rs", "use super::Flag; pub struct Window(Flag); // crate::ddp"),
        ("shm/tests.rs", "use super::*; use crate::ddp::Reducer;"),
        ("cuda/mod.rs", "pub use cudarc::driver::CudaStream;"),
        ("ddp/mod.rs", "pub struct Reducer;"),
    ];
    let planted: [(Rule, &str, &str); 21] = [
        (lends_something_else, "ddp/buckets.rs", "pub fn f() { let lent = 1; }"),
        (timeouts_elsewhere, "ddp/buckets.rs", "pub(super) const SOON: Duration = Duration::from_secs(1);"),
        (imports_upwards, "shm/flags.rs", "use crate::ddp::Reducer;"),
        (imports_upwards, "shm/flags.rs", "fn f() { crate::ddp::Reducer; }"),
        (imports_upwards, "shm/flags.rs", "fn f() { println!(\"{}\", crate::ddp::COUNT); }"),
        (imports_upwards, "shm/flags.rs", "use crate::{sys, ddp::{Reducer as R}};"),
        (imports_upwards, "shm/flags.rs", "use crate::Flag as Other; use crate::Error;"),
        (circles, "shm/flags.rs", "use super::window::Window;"),
        (circles, "shm/flags.rs", "use super::Window;"),
        (circles, "shm/flags.rs", "fn f() -> super::window::Window { todo!() }"),
        (take_all_from_above, "shm/flags.rs", "use super::*;"),
        (take_all_from_above, "shm/flags.rs", "mod inner { use super::super::*; }"),
        (os_words_outside_sys, "shm/flags.rs", "fn f(error: std::io::Error) { error.raw_os_error(); if cfg!(windows) {} }"),
        (cudarc_outside_cuda, "shm/flags.rs", "use cudarc::driver::CudaStream;"),
        (creates_files, "shm/flags.rs", "fn f() { std::fs::write(path, text).unwrap(); }"),
        (creates_files, "shm/flags.rs", "fn f() { std::fs::create_dir_all(path).unwrap(); }"),
        (makes_standard_descriptors, "shm/flags.rs", "fn f() { above_standard(|| a.accept()); b.accept(); }"),
        (reads_environment, "shm/flags.rs", "fn f() { std::env::var_os(\"KOLO_RANK\"); }"),
        (events_past_the_log, "shm/flags.rs", "fn f() { tracing::warn!(\"late\"); }"),
        (shows_times_by_debug, "shm/flags.rs", "fn f(time: Duration) { format!(\"{time:.1?}\"); }"),
        (shows_times_by_debug, "shm/flags.rs", "fn f() { crate::log::info!(after = ?began.elapsed(), \"started\"); }"),
    ];
    let rules: [Rule; 12] = [
        lends_something_else,
        timeouts_elsewhere,
        imports_upwards,
        circles,
        take_all_from_above,
        os_words_outside_sys,
        cudarc_outside_cuda,
        creates_files,
        makes_standard_descriptors,
        reads_environment,
        events_past_the_log,
        shows_times_by_debug,
    ];
    for rule in rules {
        assert_eq!(rule(&Sources::parse(clean)), [""; 0]);
    }
    for (rule, file, text) in planted {
        let sources = clean.map(|(name, clean)| (name, if name == file { text } else { clean }));
        assert!(!rule(&Sources::parse(sources)).is_empty(), "not found: {file}: {text}");
    }
}

/// The age of measured costs in a file outlives processes, and so counts by the wall clock.
#[test]
fn only_reports_and_files_read_the_wall_clock() {
    let sources = read("src");
    let reads = |source: &&Source| ["SystemTime", "sys::wall"].iter().any(|word| source.code.contains(word));
    let readers: Vec<&str> = sources.iter().filter(reads).map(|source| source.file.as_str()).collect();
    assert_eq!(readers, ["exec/costs/cache.rs", "log.rs", "sys/clock.rs", "trace/dump.rs"]);
}

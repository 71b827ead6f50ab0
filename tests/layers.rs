//! Imports go one way, and what the documents say of settings and tests is so: what no compiler checks.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors of the library, from the top down. A module may import those below its own line.
const FLOORS: [&[&str]; 16] = [
    &["raw", "fuzzing", "doctor"],
    &["ddp"],
    &["communicator"],
    &["exec"],
    &["shm", "engine"],
    &["cuda"],
    &["bootstrap"],
    &["transport"],
    &["failure"],
    &["config", "trace"],
    &["schedule", "reduce"],
    &["wire", "sync"],
    &["sys"],
    &["buffer"],
    &["error"],
    &["types"],
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    files(folder, "rs")
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|its| its == extension) {
            found.push(path);
        }
    }
    found
}

fn library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The top-level modules of the crate that a source names: after `crate::`, or in the braces of `use crate::{...}`.
fn imports(source: &str) -> BTreeSet<String> {
    named_in(source, "crate::")
}

fn named_in(source: &str, root: &str) -> BTreeSet<String> {
    let code: String = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let name = |text: &str| text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices(root) {
        let rest = &code[at + root.len()..];
        match rest.strip_prefix('{') {
            None => _ = found.insert(name(rest)),
            Some(list) => {
                let mut depth = 0;
                let mut start = true;
                for (i, letter) in list.char_indices() {
                    match letter {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        letter if start && !letter.is_whitespace() => {
                            found.insert(name(&list[i..]));
                            start = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    found
}

#[test]
fn imports_go_one_way() {
    let floor = |module: &str| FLOORS.iter().position(|floor| floor.contains(&module));
    let library = library();
    let modules: BTreeSet<String> = fs::read_dir(&library)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .filter(|module| module != "lib")
        .collect();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in sources(&library) {
        let relative = file.strip_prefix(&library).unwrap();
        let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.trim_end_matches(".rs");
        if module == "lib" || is_test(relative) {
            continue;
        }
        let own = floor(module).unwrap_or_else(|| panic!("{module} is on no floor"));
        for import in imports(code(&fs::read_to_string(&file).unwrap())) {
            checked += 1;
            let is_below = match floor(&import) {
                Some(other) => other > own || import == module,
                // What the crate exports at its root is for users, and for the layers that they see.
                None => module == "communicator",
            };
            if !is_below {
                wrong.push(format!("{} imports {import}", relative.display()));
            }
        }
    }
    assert!(checked > 150, "only {checked} imports were found: the test looks in the wrong place");
    assert!(wrong.is_empty(), "against the direction:\n{}", wrong.join("\n"));
    let listed: BTreeSet<String> = FLOORS.iter().flat_map(|floor| floor.iter().map(|&module| module.to_owned())).collect();
    assert_eq!(listed, modules, "the floors are those of the library");
}

/// Tests use what their layer is for.
fn is_test(file: &Path) -> bool {
    file.components()
        .any(|part| ["tests", "tests.rs", "on_a_gpu.rs", "simulation.rs"].iter().any(|name| part.as_os_str() == *name))
}

/// A source without its tests.
fn code(source: &str) -> &str {
    source.split("mod tests {").next().unwrap()
}

#[test]
fn the_import_test_sees_what_it_should() {
    let source = "use crate::a::B;\nuse crate::{c::D, e::{F, G}, H};\n// use crate::comment;\nfn f() { crate::i::j(); }";
    assert_eq!(imports(source).into_iter().collect::<Vec<_>>(), ["H", "a", "c", "e", "i"]);
}

fn c_library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("capi/src")
}

/// The items that the documentation hides.
fn hidden(source: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for after in source.split("#[doc(hidden)]").skip(1) {
        let item = after.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("#[")).unwrap_or_default();
        // What a `use` ends with, or the name after `fn`, `mod` and the like.
        let (text, most) = match item.split_once(" use ").or(item.split_once("use ")) {
            Some((_, path)) => (path.rsplit_once("::").map_or(path, |(_, last)| last), usize::MAX),
            None => (item, 1),
        };
        let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|word| !word.is_empty());
        let names = words
            .filter(|word| !["pub", "const", "unsafe", "fn", "mod", "struct", "enum", "trait", "type", "crate"].contains(word));
        found.extend(names.take(most).map(str::to_owned));
    }
    found
}

#[test]
fn the_c_library_uses_what_is_documented() {
    let hidden: BTreeSet<String> =
        sources(&library()).iter().flat_map(|file| hidden(&fs::read_to_string(file).unwrap())).collect();
    assert!(hidden.contains("fuzzing"), "only {hidden:?} were found: the test looks in the wrong place");
    let mut checked = 0;
    for file in sources(&c_library()) {
        let source = fs::read_to_string(&file).unwrap();
        for name in named_in(&source, "kolo::") {
            checked += 1;
            assert!(!hidden.contains(&name) && !name.starts_with("__"), "{} uses kolo::{name}", file.display());
        }
    }
    assert!(checked > 20, "only {checked} names were found: the test looks in the wrong place");
}

#[test]
fn the_check_of_hidden_items_finds_what_is_planted() {
    let source = "#[cfg(test)]\n#[doc(hidden)]\npub mod a;\n#[doc(hidden)]\n#[inline]\npub fn b() -> C {}\npub fn c() {}\n\
                  #[doc(hidden)]\npub use x::y::{d, e};";
    assert_eq!(hidden(source).into_iter().collect::<Vec<_>>(), ["a", "b", "d", "e"]);
    assert_eq!(
        named_in("use kolo::{a, d::E};\nfn f() { kolo::__g() }", "kolo::").into_iter().collect::<Vec<_>>(),
        ["__g", "a", "d"]
    );
}

/// Two versions of kolo in one program are two crates, whose symbols must differ.
#[test]
fn only_the_c_library_exports_symbols() {
    for file in sources(&library()) {
        let source = fs::read_to_string(&file).unwrap();
        assert!(!source.contains("no_mangle") && !source.contains("export_name"), "{} exports a symbol", file.display());
    }
}

/// The variants of an enum, which begin lines of four blanks.
fn variants<'a>(source: &'a str, name: &str) -> Vec<&'a str> {
    let body = source.split(&format!("pub enum {name} {{\n")).nth(1).unwrap().split("\n}").next().unwrap();
    let variant =
        |line: &'a str| line.strip_prefix("    ").filter(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()));
    let name = |line: &'a str| line.split(|letter: char| !letter.is_alphanumeric()).next().unwrap();
    body.lines().filter_map(variant).map(name).collect()
}

/// In another crate, a match over an enum that may grow needs an arm for the rest.
#[test]
fn every_error_and_cause_has_a_number_in_c() {
    let kolo = fs::read_to_string(library().join("error.rs")).unwrap();
    let capi = fs::read_to_string(c_library().join("error.rs")).unwrap();
    for (name, least) in [("Error", 15), ("Cause", 15)] {
        let variants = variants(&kolo, name);
        assert!(variants.len() > least, "only {variants:?} were found: the test looks in the wrong place");
        for variant in variants {
            let is_there = [" ", "(", " {"].iter().any(|end| capi.contains(&format!("{name}::{variant}{end}")));
            assert!(is_there, "capi/src/error.rs has no number for {name}::{variant}");
        }
    }
}

#[test]
fn only_sys_knows_the_operating_system() {
    for file in sources(&library()) {
        let relative = file.strip_prefix(library()).unwrap().to_owned();
        let source = fs::read_to_string(&file).unwrap();
        if relative.starts_with("sys") || is_test(&relative) {
            continue;
        }
        let source = code(&source);
        for system in ["target_os", "cfg(unix)", "cfg(windows)", "libc::", "rustix::", "std::os::"] {
            assert!(!source.contains(system), "{} mentions {system}", relative.display());
        }
    }
}

#[test]
fn all_variables_are_in_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = fs::read_to_string(root.join("docs/settings.md")).unwrap();
    // What `kolo run` and the tests tell their own processes is no setting.
    let internal = [
        "KOLO_STORE_SERVED",
        "KOLO_LOCAL_RANK",
        "KOLO_LOCAL_WORLD_SIZE",
        "KOLO_TEST_ALL",
        "KOLO_TEST_REDIS",
        "KOLO_TEST_SEED",
        "KOLO_TEST_SEEDS",
        "KOLO_TEST_NVRTC",
        "KOLO_TEST_GPU",
        "KOLO_WRITE_PTX",
    ];
    let mut names = BTreeSet::new();
    for file in sources(&library()).into_iter().chain(sources(&root.join("cli/src"))) {
        let source = fs::read_to_string(file).unwrap();
        for (at, _) in source.match_indices("\"KOLO_") {
            let text = source[at + 1..].split('"').next().unwrap();
            // The beginning of names is none.
            if text.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_') && !text.ends_with('_') {
                names.insert(text.to_owned());
            }
        }
    }
    assert!(names.len() > 10, "{names:?}");
    for name in names.iter().filter(|name| !internal.contains(&name.as_str())) {
        assert!(table.contains(&format!("`{name}`")), "{name} is not in docs/settings.md");
    }
    for line in table.lines().filter(|line| line.starts_with("| `KOLO_")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(names.contains(name), "{name} is in docs/settings.md, but nothing reads it");
    }
}

/// The names of all tests: functions with that attribute, those of pytest, and the entries of lists such as `("row_01_killed", processes::killed)`.
fn tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    for file in files(&root.join("torch"), "py") {
        let source = fs::read_to_string(&file).unwrap();
        let functions = source.lines().filter_map(|line| line.trim().strip_prefix("def test_")?.split('(').next());
        names.extend(functions.map(|name| format!("test_{name}")));
    }
    for file in
        ["src", "tests", "capi/src", "capi/tests", "cli/src", "cli/tests"].iter().flat_map(|folder| sources(&root.join(folder)))
    {
        let source = fs::read_to_string(&file).unwrap();
        let mut is_test = false;
        for line in source.lines().map(str::trim) {
            is_test |= line == "#[test]";
            if let Some((_, function)) = line.split_once("fn ").filter(|_| is_test) {
                names.extend(function.split(['(', '<']).next().map(str::to_owned));
                is_test = false;
            }
            // A test that is ignored is not run.
            is_test &= !line.starts_with("#[ignore");
            if let Some(entry) = line.strip_prefix("(\"").and_then(|rest| rest.split_once("\", ")) {
                names.insert(entry.0.to_owned());
            }
        }
    }
    names
}

#[test]
fn the_table_of_faults_names_tests_that_exist() {
    let table = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md")).unwrap();
    let tests = tests();
    let mut named = BTreeSet::new();
    for line in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| #")) {
        let fields: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, _, _, shown_by] = fields[..] else { panic!("not a row of four fields: {line}") };
        let is_name = |word: &&str| {
            word.contains('_') && word.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter))
        };
        let names: Vec<&str> = shown_by.split('`').skip(1).step_by(2).filter(is_name).collect();
        for name in &names {
            assert!(tests.contains(*name), "row {number} of docs/faults.md is shown by {name}, which is no test");
        }
        assert!(!names.is_empty() || shown_by.starts_with("not shown"), "row {number} of docs/faults.md is shown by nothing");
        named.extend(names.into_iter().map(str::to_owned));
    }
    assert!(named.len() > 40, "only {named:?} were found: the test looks in the wrong place");
    let is_row = |name: &&String| name.starts_with("row_");
    let forgotten: Vec<_> = tests.iter().filter(is_row).filter(|name| !named.contains(*name)).collect();
    assert!(forgotten.is_empty(), "docs/faults.md does not name {forgotten:?}");
}

/// In `CONTRIBUTING.md`, items follow the files that they are in.
#[test]
fn the_checklists_name_files_and_items_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let is_path = |word: &str| !word.contains(char::is_whitespace) && (word.contains('/') || word.ends_with(".md"));
    let is_item = |word: &str| word.chars().all(|letter| letter.is_alphanumeric() || "_:".contains(letter));
    let mut checked = 0;
    for checklist in page.split("\n## How to add ").skip(1) {
        let mut files: Vec<(&str, String)> = Vec::new();
        let mut is_complete = false;
        for (i, word) in checklist.split('`').enumerate() {
            if i % 2 == 0 {
                is_complete |= word.lines().skip(1).any(|line| line.starts_with(|first: char| first.is_ascii_digit()));
            } else if is_path(word) {
                let text = fs::read_to_string(root.join(word)).unwrap_or_else(|error| panic!("{word}: {error}"));
                if std::mem::take(&mut is_complete) {
                    files.clear();
                }
                files.push((word, text));
            } else if is_item(word) {
                is_complete = true;
                for (file, text) in &files {
                    let is_there = word.split("::").all(|part| text.contains(part));
                    assert!(is_there, "CONTRIBUTING.md says that {word} is in {file}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 80, "only {checked} items were found: the test looks in the wrong place");
}

#[test]
fn only_reports_read_the_wall_clock() {
    let mut readers = BTreeSet::new();
    for file in sources(&library()) {
        let source = fs::read_to_string(&file).unwrap();
        if source.contains("SystemTime") || source.contains("sys::wall") {
            readers.insert(file.strip_prefix(library()).unwrap().display().to_string());
        }
    }
    assert_eq!(readers.into_iter().collect::<Vec<_>>(), ["sys/clock.rs", "trace/dump.rs"]);
}

//! The documentation matches the repository: links, paths and names in it lead somewhere, and its
//! lines are short.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The longest line of prose, in characters.
const LONGEST: usize = 100;

/// The most words of the README, of docs/ and of the page on performance.
const README_WORDS: usize = 600;
const DOCS_WORDS: usize = 20_000;
const PERFORMANCE_WORDS: usize = 1500;

/// Folders of the repository whose paths pages name in backticks.
const FOLDERS: [&str; 15] = [
    ".ci/",
    "benches/",
    "burn/",
    "capi/",
    "cli/",
    "cuda-kernels/",
    "docs/",
    "examples/",
    "fuzz/",
    "include/",
    "python/",
    "scripts/",
    "src/",
    "tests/",
    "torch/",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The README, those of packages, and all pages of docs/, relative to the repository.
fn pages() -> Vec<PathBuf> {
    let mut found = vec![
        "README.md".into(),
        "burn/README.md".into(),
        "nccl/README.md".into(),
        "python/README.md".into(),
        "torch/README.md".into(),
    ];
    let docs = files(&root().join("docs"), "md");
    found.extend(docs.iter().map(|page| page.strip_prefix(root()).unwrap().to_owned()));
    found.sort();
    found
}

fn text(page: &Path) -> String {
    fs::read_to_string(root().join(page)).unwrap()
}

/// The lines of a page without its code blocks, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut is_code = false;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            found.push((at + 1, ""));
        } else if !is_code {
            found.push((at + 1, line));
        }
    }
    found
}

/// What is in backticks, and what is not: pieces of text with the number of the line where each
/// begins.
fn pieces(text: &str) -> [Vec<(usize, String)>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    let mut kind = 0;
    let mut piece = String::new();
    let mut began = 1;
    for (number, line) in prose(text) {
        // A paragraph and a row of a table close what they open.
        if line.is_empty() || line.starts_with('|') {
            found[kind].push((began, std::mem::take(&mut piece)));
            (kind, began) = (0, number);
        }
        for letter in line.chars().chain(['\n']) {
            if letter == '`' {
                found[kind].push((began, std::mem::take(&mut piece)));
                (kind, began) = (1 - kind, number);
            } else {
                piece.push(letter);
            }
        }
    }
    found[kind].push((began, piece));
    found
}

/// The targets of a page's links and images, and of the definitions of links, which the crate's
/// documentation replaces.
fn links(text: &str) -> Vec<(usize, String)> {
    // The text of a link may be code: then the piece after it begins with the target.
    let [plain, _] = pieces(text);
    let definition = |(line, text): (usize, &str)| Some((line, text.strip_prefix('[')?.split_once("]: ")?.1.trim().to_owned()));
    let mut found: Vec<_> = prose(text).into_iter().filter_map(definition).collect();
    for (line, piece) in plain {
        for (at, _) in piece.match_indices("](") {
            let target = piece[at + 2..].split(')').next().unwrap().trim().to_owned();
            found.push((line + piece[..at].matches('\n').count(), target));
        }
    }
    found
}

/// The anchors of a page's headings, as GitHub and mdBook name them.
fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (_, line) in prose(text) {
        let Some(heading) = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')) else { continue };
        let is_kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
        let anchor: String = heading.to_lowercase().chars().filter(is_kept).collect::<String>().replace(' ', "-");
        let earlier = found.iter().filter(|other| **other == anchor).count();
        found.push(if earlier == 0 { anchor } else { format!("{anchor}-{earlier}") });
    }
    found
}

/// `folder/../x` is `x`; `None` outside the repository.
fn resolve(folder: &Path, target: &str) -> Option<PathBuf> {
    let mut path = PathBuf::new();
    for part in folder.join(target).components() {
        match part {
            Component::ParentDir => path.pop().then_some(())?,
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    Some(path)
}

/// What is wrong with the links of a page.
fn broken_links(page: &Path, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (line, link) in links(text) {
        if link.contains("://") {
            continue;
        }
        let mut complain = |what: &str| wrong.push(format!("{}:{line}: {link} {what}", page.display()));
        let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
        let is_self = target.is_empty();
        let found = if is_self { Some(page.to_owned()) } else { resolve(page.parent().unwrap(), target) };
        let Some(found) = found.filter(|found| is_self || root().join(found).exists()) else {
            complain("does not exist");
            continue;
        };
        if page.starts_with("docs") && !found.starts_with("docs") {
            complain("leaves docs/, which the book does not have: name the path in backticks");
        }
        if page.starts_with("docs") && page != Path::new("docs/SUMMARY.md") && found.ends_with("README.md") && !is_self {
            complain("names a file that the book calls index.html: link to its folder");
        }
        if !anchor.is_empty() {
            let headings = if is_self { anchors(text) } else { anchors(&self::text(&found)) };
            if !headings.iter().any(|heading| heading == anchor) {
                complain("is not the anchor of a heading");
            }
        }
    }
    wrong
}

/// Paths of the repository in backticks that lead nowhere.
fn missing_paths(page: &Path, text: &str) -> Vec<String> {
    let [_, code] = pieces(text);
    let mut wrong = Vec::new();
    for (line, code) in code {
        let path = code.split(|letter: char| letter.is_whitespace()).next().unwrap().trim_end_matches('/');
        let is_path = FOLDERS.iter().any(|folder| path.starts_with(folder)) && !path.contains(['*', '<']);
        if is_path && !root().join(path).exists() {
            wrong.push(format!("{}:{line}: `{path}` does not exist", page.display()));
        }
    }
    wrong
}

/// Lines of prose that are too long. Rows of tables, code and lines that are one link may be
/// longer.
fn long_lines(page: &Path, text: &str) -> Vec<String> {
    let is_link = |line: &str| {
        let link = line.trim_start_matches(['-', ' ', '!']);
        link.starts_with("http") && !link.contains(' ') || link.starts_with('[') && link.find(')') == Some(link.len() - 1)
    };
    let is_long = |line: &&str| line.chars().count() > LONGEST && !line.trim_start().starts_with('|') && !is_link(line);
    let long = prose(text).into_iter().filter(|(_, line)| is_long(line));
    long.map(|(number, line)| format!("{}:{number}: {} characters", page.display(), line.chars().count())).collect()
}

/// The functions that a page's tables name, each with the file or folder that the next field names,
/// which lacks them.
fn missing_functions(page: &Path, text: &str) -> (usize, Vec<String>) {
    let mut checked = 0;
    let mut wrong = Vec::new();
    for (line, row) in prose(text).into_iter().filter(|(_, line)| line.starts_with('|')) {
        let fields: Vec<&str> = row.split('|').map(str::trim).collect();
        for pair in fields.windows(2) {
            let [Some(name), Some(place)] = [pair[0], pair[1]].map(|field| field.strip_prefix('`')?.strip_suffix('`')) else {
                continue;
            };
            if !place.starts_with("src/") {
                continue;
            }
            checked += 1;
            let function = name.rsplit("::").next().unwrap();
            if !sources(&root().join(place)).iter().any(|source| defines(source, function)) {
                wrong.push(format!("{}:{line}: {place} has no function {name}", page.display()));
            }
        }
    }
    (checked, wrong)
}

/// The text of a file, or of all Rust files in a folder.
fn sources(path: &Path) -> Vec<String> {
    let files = if path.is_dir() { files(path, "rs") } else { vec![path.to_owned()] };
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}

fn defines(source: &str, function: &str) -> bool {
    let ends = |rest: &str| rest.starts_with(['(', '<']);
    source.match_indices(&format!("fn {function}")).any(|(at, found)| ends(&source[at + found.len()..]))
}

fn in_all_pages(check: impl Fn(&Path, &str) -> Vec<String>) {
    let pages = pages();
    assert!(pages.len() > 10, "only {pages:?} were found: the test looks in the wrong place");
    let wrong: Vec<String> = pages.iter().flat_map(|page| check(page, &text(page))).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn links_lead_somewhere() {
    let count: usize = pages().iter().map(|page| links(&text(page)).len()).sum();
    assert!(count > 50, "only {count} links were found: the test looks in the wrong place");
    in_all_pages(broken_links);
}

#[test]
fn paths_in_the_repository_exist() {
    in_all_pages(missing_paths);
}

#[test]
fn lines_of_prose_are_short() {
    in_all_pages(long_lines);
}

#[test]
fn pages_are_short() {
    let words = |page: &Path| text(page).split_whitespace().count();
    let readme = words(Path::new("README.md"));
    assert!(readme <= README_WORDS, "README.md has {readme} words: move what a newcomer does not need to docs/");
    let docs: usize = pages().iter().filter(|page| page.starts_with("docs")).map(|page| words(page)).sum();
    assert!(docs <= DOCS_WORDS, "docs/ has {docs} words: say each thing once, and how it came about in a commit");
    let performance = words(Path::new("docs/performance.md"));
    assert!(performance <= PERFORMANCE_WORDS, "docs/performance.md has {performance} words: keep figures and commands");
}

#[test]
fn the_book_has_every_page() {
    let summary = text(Path::new("docs/SUMMARY.md"));
    let listed: Vec<PathBuf> = links(&summary).into_iter().map(|(_, target)| Path::new("docs").join(target)).collect();
    for page in pages().iter().filter(|page| page.starts_with("docs") && !page.ends_with("SUMMARY.md")) {
        assert_eq!(listed.iter().filter(|listed| *listed == page).count(), 1, "docs/SUMMARY.md lists {} once", page.display());
    }
}

#[test]
fn the_walk_of_an_all_reduce_names_functions_that_exist() {
    let page = Path::new("docs/architecture.md");
    let (checked, wrong) = missing_functions(page, &text(page));
    assert!(checked > 9, "only {checked} functions were found: the test looks in the wrong place");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The files with an extension below a folder.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    files_where(folder, &|path| path.extension().is_some_and(|its| its == extension))
}

fn files_where(folder: &Path, is_wanted: &dyn Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // What cargo builds below a package is no source.
            if !path.ends_with("target") {
                found.extend(files_where(&path, is_wanted));
            }
        } else if is_wanted(&path) {
            found.push(path);
        }
    }
    found
}

#[test]
fn all_variables_are_in_the_table() {
    let table = fs::read_to_string(root().join("docs/settings.md")).unwrap();
    // What `kolo run` and the tests tell their own processes is no setting.
    let internal = [
        "KOLO_STORE_SERVED",
        "KOLO_LOCAL_RANK",
        "KOLO_LOCAL_WORLD_SIZE",
        "KOLO_TEST_ALL",
        "KOLO_TEST_ENDS",
        "KOLO_TEST_REDIS",
        "KOLO_TEST_SEED",
        "KOLO_TEST_SEEDS",
        "KOLO_TEST_NVRTC",
        "KOLO_TEST_GPU",
        "KOLO_TEST_IS_RANK",
        "KOLO_WRITE_PICTURE",
        "KOLO_WRITE_PTX",
    ];
    let mut names = BTreeSet::new();
    for file in ["src", "cli/src"].iter().flat_map(|folder| files(&root().join(folder), "rs")) {
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
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (builder, header) = (read("src/communicator/builder.rs"), read("include/kolo.h"));
    let rows = read("src/config/table.rs");
    for line in table.lines().filter(|line| line.starts_with("| `KOLO_")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(names.contains(name), "{name} is in docs/settings.md, but nothing reads it");
        let (option, field) = match &name["KOLO_".len()..] {
            "JOB_ID" => ("job".to_owned(), "job"),
            "TLS_CA" => ("tls".to_owned(), "tls_ca"),
            "INTERFACE" => ("interface".to_owned(), "interfaces"),
            "NETWORK_LATENCY" => ("cost_model".to_owned(), "network_latency_us"),
            "NETWORK_BANDWIDTH" => ("cost_model".to_owned(), "network_gigabytes_per_s"),
            // Arguments of the functions that make a communicator.
            own @ ("STORE" | "RANK" | "WORLD_SIZE") => (own.to_lowercase(), ""),
            own => (own.to_lowercase(), own),
        };
        let field = field.to_lowercase();
        let is_option = builder.contains(&format!("pub fn {option}(")) || rows.contains(&format!("\n        {option}("));
        assert!(is_option, "docs/settings.md says that {name} is the option {option}");
        let is_field =
            [format!(" {field};"), format!("*{field};"), format!(" {field}_ms;")].iter().any(|field| header.contains(field));
        assert!(field.is_empty() || is_field, "docs/settings.md says that {name} is the field {field} of kolo_config_t");
    }
}

/// The names of all tests: functions with that attribute, those of pytest, and the entries of lists
/// such as `("row_01_killed", processes::killed)`.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files(&root().join("torch"), "py") {
        let source = fs::read_to_string(&file).unwrap();
        let functions = source.lines().filter_map(|line| line.trim().strip_prefix("def test_")?.split('(').next());
        names.extend(functions.map(|name| format!("test_{name}")));
    }
    for file in ["src", "tests", "capi/src", "capi/tests", "cli/src", "cli/tests"]
        .iter()
        .flat_map(|folder| files(&root().join(folder), "rs"))
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

/// Returns the tests that a page's table of failures names in its last column, after checking that
/// each exists and that each row names one or says why not.
fn shown_by(page: &str, is_row: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let tests = tests();
    let mut named = BTreeSet::new();
    for line in text(Path::new(page)).lines().filter(|line| line.starts_with("| ") && is_row(line)) {
        let (_, shown_by) = line.trim_end_matches(" |").rsplit_once(" | ").unwrap();
        let is_name = |word: &&str| {
            word.contains('_') && word.chars().all(|letter| letter.is_ascii_lowercase() || "_0123456789".contains(letter))
        };
        let names: Vec<&str> = shown_by.split('`').skip(1).step_by(2).filter(is_name).collect();
        for name in &names {
            assert!(tests.contains(*name), "{page}: {name}, which is no test, shows: {line}");
        }
        assert!(!names.is_empty() || shown_by.starts_with("not shown"), "{page}: nothing shows: {line}");
        named.extend(names.into_iter().map(str::to_owned));
    }
    named
}

#[test]
fn the_table_of_faults_names_tests_that_exist() {
    let named = shown_by("docs/faults.md", |line| !line.starts_with("| #"));
    assert!(named.len() > 40, "only {named:?} were found: the test looks in the wrong place");
    let is_row = |name: &&String| name.starts_with("row_");
    let tests = tests();
    let forgotten: Vec<_> = tests.iter().filter(is_row).filter(|name| !named.contains(*name)).collect();
    assert!(forgotten.is_empty(), "docs/faults.md does not name {forgotten:?}");
}

#[test]
fn the_failures_of_others_on_windows_have_tests() {
    let named = shown_by("docs/platforms.md", |line| line.starts_with("| \""));
    assert!(named.len() > 10, "only {named:?} were found: the test looks in the wrong place");
}

/// In `CONTRIBUTING.md`, items follow the files that they are in.
#[test]
fn the_checklists_name_files_and_items_that_exist() {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let is_path = |word: &str| !word.contains(char::is_whitespace) && (word.contains('/') || word.ends_with(".md"));
    let is_item = |word: &str| word.chars().all(|letter| letter.is_alphanumeric() || "_:".contains(letter));
    let mut checked = 0;
    for checklist in page.split("\n## How to add ").skip(1) {
        let mut files: Vec<(&str, String)> = Vec::new();
        let mut is_complete = false;
        for (i, word) in checklist.split('`').enumerate() {
            if i % 2 == 0 {
                let begins = |line: &str| line.starts_with("- ") || line.starts_with(|first: char| first.is_ascii_digit());
                is_complete |= word.lines().skip(1).any(begins);
            } else if is_path(word) {
                let text = fs::read_to_string(root().join(word)).unwrap_or_else(|error| panic!("{word}: {error}"));
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

/// To add a collective or a setting takes few places, each a file of the numbered steps, or the place
/// that uses it.
#[test]
fn the_checklists_count_their_places() {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    for (heading, count, most) in [("a collective", "with ten places:", 10), ("a setting", "Five places:", 5)] {
        let checklist = page.split(&format!("\n## How to add {heading}\n")).nth(1).unwrap();
        let (before, steps) = checklist.split_once("\n1. ").unwrap();
        assert!(before.contains(count), "{heading}: {before}");
        let steps = steps.split("\n\n").next().unwrap();
        let files = steps.split('`').skip(1).step_by(2).filter(|word| word.contains('/') || word.ends_with(".md"));
        let files: BTreeSet<&str> = files.filter(|word| !word.contains(' ')).collect();
        let places = files.len() + steps.matches("The place that uses it").count();
        assert_eq!(places, most, "{heading}: {files:?}");
    }
}

/// A boxed error that `main` returns is printed with quotes, or as the fields of a struct. Errors of kolo
/// are sentences.
#[test]
fn programs_of_the_examples_print_errors_as_sentences() {
    let mut programs = 0;
    for folder in ["examples", "burn/examples"] {
        for file in files(&root().join(folder), "rs") {
            let text = fs::read_to_string(&file).unwrap();
            programs += usize::from(text.contains("fn main()"));
            assert!(!text.contains("fn main() -> Result<"), "{}: print the error, and return an ExitCode", file.display());
        }
    }
    assert!(programs > 10, "only {programs} programs were found: the test looks in the wrong place");
}

/// Files whose text has the names that pages use: sources of every language, and stages.
fn all_sources() -> String {
    let folders =
        ["src", "burn", "capi", "cli", "examples", "include", "python", "scripts", "tests", "torch", "cuda-kernels", ".ci"];
    let mut text = String::new();
    for folder in folders {
        for file in files_where(&root().join(folder), &|path| {
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            path.parent().is_some_and(|parent| parent.ends_with("stages"))
                || ["rs", "py", "cpp", "h", "c", "sh", "toml"].contains(&ending)
        }) {
            // A name that only this test has is none.
            if !file.ends_with("tests/docs.rs") {
                text += &fs::read_to_string(&file).unwrap_or_default();
            }
        }
    }
    text
}

/// The names of kolo in a piece of code on a page, each with the text by which sources define it.
fn names_of_kolo(code: &str) -> Vec<(String, String)> {
    let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let mut found = Vec::new();
    for name in code.split(|letter| !is_of_name(letter)).map(|name| name.trim_matches(':')) {
        let is_prefixed = ["KOLO_", "kolo_"].iter().any(|prefix| name.starts_with(prefix) && name.len() > prefix.len());
        if is_prefixed && !name.contains(':') && !name.ends_with('_') {
            found.push((name.to_owned(), name.to_owned()));
        } else if let Some((kind, item)) = name.rsplit_once("::") {
            let is_type = kind.rsplit("::").next().unwrap().starts_with(char::is_uppercase);
            let is_function = item.starts_with(char::is_lowercase);
            // Functions are methods of a type, the others its variants or constants.
            match is_type {
                true if is_function => found.push((name.to_owned(), format!("fn {item}"))),
                true => found.push((name.to_owned(), item.to_owned())),
                false => {}
            }
        }
    }
    found
}

/// The features that a page names: "the feature `tls`", `--features cuda,tls` and `FEATURES=tls`.
fn features_of(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (before, separators) in [("feature `", "`"), ("--features ", " `\n):;"), ("FEATURES=", " `\n")] {
        for (at, _) in text.match_indices(before) {
            let list = text[at + before.len()..].split(|letter| separators.contains(letter)).next().unwrap();
            found.extend(list.split(',').filter(|name| !name.is_empty()).map(str::to_owned));
        }
    }
    found
}

#[test]
fn names_of_kolo_on_pages_exist() {
    let sources = all_sources();
    let mut checked = 0;
    let mut wrong = Vec::new();
    // burn's README names items of burn.
    for page in pages().into_iter().filter(|page| !page.starts_with("burn")) {
        let text = text(&page);
        let [_, code] = pieces(&text);
        for (line, piece) in code {
            for (name, defined) in names_of_kolo(&piece) {
                checked += 1;
                let is_there = match defined.strip_prefix("fn ") {
                    Some(_) => ["(", "<"].iter().any(|after| sources.contains(&format!("{defined}{after}"))),
                    None => sources.contains(&defined),
                };
                if !is_there {
                    wrong.push(format!("{}:{line}: no source has {name}", page.display()));
                }
            }
        }
    }
    assert!(checked > 200, "only {checked} names were found: the test looks in the wrong place");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn features_and_versions_on_pages_are_those_of_the_packages() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let manifests =
        ["Cargo.toml", "capi/Cargo.toml", "cli/Cargo.toml", "burn/Cargo.toml", "examples/resnet/Cargo.toml"].map(read);
    let has_feature = |name: &str| manifests.iter().any(|manifest| manifest.contains(&format!("\n{name} = [")));
    let minimums: BTreeSet<&str> = manifests
        .iter()
        .flat_map(|manifest| manifest.split("\nrust-version = \"").skip(1))
        .map(|rest| rest.split('"').next().unwrap())
        .collect();
    let ours = manifests[0].split("\nrust-version = \"").nth(1).unwrap().split('"').next().unwrap();
    let stage = read(".ci/stages/pytorch-frameworks");
    let mut checked = 0;
    for page in pages() {
        let text = text(&page);
        for name in features_of(&text) {
            checked += 1;
            assert!(has_feature(&name), "{}: no package has the feature {name}", page.display());
        }
        // "Rust 1.89", in prose.
        for rest in text.split("Rust 1.").skip(1) {
            let version = format!("1.{}", rest.split(|letter: char| !letter.is_ascii_digit()).next().unwrap());
            assert!(minimums.contains(&*version), "{}: no package needs Rust {version}", page.display());
        }
    }
    assert!(checked > 10, "only {checked} features were found: the test looks in the wrong place");
    for page in ["README.md", "docs/getting-started.md"] {
        assert!(read(page).contains(&format!("Rust {ours} or newer")), "{page} names another Rust than {ours}");
    }
    // "- Accelerate 1.15.0: what runs"
    let frameworks = read("docs/pytorch.md");
    for name in ["Accelerate", "Transformers", "Lightning", "DeepSpeed", "Ray Train", "torchft", "vLLM"] {
        let item = frameworks.split(&format!("\n- {name} ")).nth(1).unwrap_or_else(|| panic!("docs/pytorch.md lacks {name}"));
        let version = item.split([':', ' ']).next().unwrap();
        let message = format!("docs/pytorch.md says {name} {version}, and .ci/stages/pytorch-frameworks installs another");
        assert!(stage.contains(&format!("=={version}")), "{message}");
    }
}

/// A blank line in a table ends it: the rows that follow are text.
#[test]
fn tables_have_heads() {
    in_all_pages(|page, text| {
        let lines: Vec<_> = prose(text).into_iter().map(|(_, line)| line).collect();
        let begins = |at: &usize| lines[*at].starts_with('|') && (*at == 0 || !lines[*at - 1].starts_with('|'));
        let has_head = |at: &usize| lines.get(at + 1).is_some_and(|next| next.starts_with("|-"));
        let headless = (0..lines.len()).filter(begins).filter(|at| !has_head(at));
        headless.map(|at| format!("{}:{}: rows without a head", page.display(), at + 1)).collect()
    });
}

/// Stages begin in the root of the repository, and read nothing beside it.
#[test]
fn stages_read_nothing_beside_the_checkout() {
    let stages = files_where(&root().join(".ci/stages"), &|_| true);
    assert!(stages.len() > 30, "only {} stages were found: the test looks in the wrong place", stages.len());
    for stage in stages {
        let text = fs::read_to_string(&stage).unwrap();
        let leaves = |word: &str| word.strip_prefix("../").is_some_and(|rest| rest.starts_with(char::is_alphanumeric));
        let words = text.split(|letter: char| letter.is_whitespace() || "='\"".contains(letter));
        let left: Vec<_> = words.filter(|word| leaves(word)).collect();
        assert!(left.is_empty(), "{} reads {left:?}, which a clone does not have", stage.display());
    }
}

/// Reports of GPUs are in docs/gpu. A page that says that no GPU has run kolo must name what has not.
#[test]
fn no_page_denies_what_a_report_shows() {
    assert!(!files(&root().join("docs/gpu"), "json").is_empty());
    in_all_pages(|page, text| {
        let denied = ["not yet run on a GPU", "no GPU has run kolo", "No GPU has run kolo", "takes the network for uniform"];
        denied.iter().filter(|words| text.contains(*words)).map(|words| format!("{}: {words}", page.display())).collect()
    });
}

#[test]
fn the_checks_find_what_is_planted() {
    let page = Path::new("docs/planted.md");
    let found = |text: &str| broken_links(page, text).len();
    assert_eq!(
        found("# Two words\n[a](settings.md), [b](settings.md#stores), [c](#two-words), [`d`](faults.md), [e](https://x.y)"),
        0
    );
    assert_eq!(found("`[a](none.md)`\n\n```text\n[b](none.md)\n```"), 0);
    assert_eq!(found("[a](none.md)"), 1);
    assert_eq!(found("[`a`](none.md)"), 1);
    assert_eq!(found("[two\nlines](none.md)"), 1);
    assert_eq!(found("| [a](none.md) | ![b](none.svg) |"), 2);
    assert_eq!(found("[a](settings.md#none)"), 1);
    assert_eq!(found("[a](#none)\n\n```text\n# None\n```"), 1);
    assert_eq!(found("[a](../README.md)"), 2, "it leaves the book, and is a README");
    assert_eq!(found("[a](../../README.md)"), 1);
    assert_eq!(broken_links(page, "one\n\ntwo [a](none.md)"), ["docs/planted.md:3: none.md does not exist"]);

    let missing = |text: &str| missing_paths(page, text).len();
    assert_eq!(missing("`src/lib.rs`, `src/shm`, `fuzz/run 60`, `tests/*.rs`, `a/b`"), 0);
    assert_eq!(missing("`src/none.rs` and\n`tests/none`"), 2);

    let words = "word ".repeat(25);
    let long = |text: &str| long_lines(page, text).len();
    assert_eq!(long(&format!("{words}\n\n| {words} |\n\n```text\n{words}\n```\n\nhttps://x.y/{}", "x".repeat(100))), 1);
    assert_eq!(long(&words[..100]), 0);

    let names = |text: &str| names_of_kolo(text).into_iter().map(|(_, defined)| defined).collect::<Vec<_>>();
    assert_eq!(
        names("KOLO_RANK=0 kolo_comm_split(Error::Revoked, Step::view); KOLO_ kolo::ddp::Reducer a::b"),
        ["KOLO_RANK", "kolo_comm_split", "Revoked", "fn view"]
    );
    assert_eq!(features_of("the feature `tls`, `--features cuda,redis` and FEATURES=tls x"), ["tls", "cuda", "redis", "tls"]);

    let functions = |text: &str| missing_functions(page, text);
    assert_eq!(functions("| 1 | `Communicator::split` | `src/communicator/split.rs` |"), (1, Vec::new()));
    assert_eq!(functions("| 1 | `Window::run` | `src/shm` |\n| 2 | `none` | `src/shm` |").1.len(), 1);
}

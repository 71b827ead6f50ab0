//! The C library uses what the crate documents, and has a number for each of its errors.

use std::collections::BTreeSet;
use std::fs;

use crate::{read, root};

/// The first names after `root`, such as `kolo::`, in paths and in the braces of a `use`.
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
    let hidden: BTreeSet<String> = read("src").iter().flat_map(|source| hidden(&source.text)).collect();
    assert!(hidden.contains("fuzzing"), "only {hidden:?} were found: the test looks in the wrong place");
    let mut checked = 0;
    for source in read("capi/src").iter() {
        for name in named_in(&source.text, "kolo::") {
            checked += 1;
            assert!(!hidden.contains(&name) && !name.starts_with("__"), "capi/src/{} uses kolo::{name}", source.file);
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
    for source in read("src").iter() {
        let exports = ["no_mangle", "export_name"].iter().any(|attribute| source.code.contains(attribute));
        assert!(!exports, "src/{} exports a symbol", source.file);
    }
}

/// The variants of an enum, which begin lines of four blanks more than the enum.
fn variants<'a>(source: &'a str, name: &str) -> Vec<&'a str> {
    let (before, rest) = source.split_once(&format!("pub enum {name} {{\n")).unwrap();
    let indent = before.rsplit('\n').next().unwrap();
    let body = rest.split(&format!("\n{indent}}}")).next().unwrap();
    let start = format!("{indent}    ");
    let variant =
        |line: &'a str| line.strip_prefix(&start).filter(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()));
    let name = |line: &'a str| line.split(|letter: char| !letter.is_alphanumeric()).next().unwrap();
    body.lines().filter_map(variant).map(name).collect()
}

/// In another crate, a match over an enum that may grow needs an arm for the rest.
#[test]
fn every_error_and_cause_has_a_number_in_c() {
    let capi = fs::read_to_string(root().join("capi/src/error.rs")).unwrap();
    for (name, file) in [("Error", "mod.rs"), ("Cause", "cause.rs")] {
        let kolo = fs::read_to_string(root().join("src/error").join(file)).unwrap();
        let variants = variants(&kolo, name);
        assert!(variants.len() > 15, "only {variants:?} were found: the test looks in the wrong place");
        for variant in variants {
            let is_there = [" ", "(", " {"].iter().any(|end| capi.contains(&format!("{name}::{variant}{end}")));
            assert!(is_there, "capi/src/error.rs has no number for {name}::{variant}");
        }
    }
}

//! The README and the pages of docs/ name commands, options and defaults that the program has.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The commands that `kolo --help` lists.
fn commands() -> Vec<String> {
    let help = help(&[]);
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.map(|line| line.split_whitespace().next().unwrap().to_owned()).filter(|name| name != "help").collect()
}

fn help(command: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kolo")).args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn pages() -> Vec<(PathBuf, String)> {
    fn add(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                add(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = vec![root.join("README.md")];
    add(&root.join("docs"), &mut paths);
    paths.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

/// The code of a page: lines of blocks, with those that they continue on, and what is in backticks.
fn code(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, part) in page.split("```").enumerate() {
        match at % 2 {
            1 => found.extend(part.replace("\\\n", " ").lines().map(str::to_owned)),
            _ => found.extend(part.split('`').skip(1).step_by(2).map(str::to_owned)),
        }
    }
    found
}

/// The commands of `kolo` in a line, with their options.
fn options(line: &str, commands: &[String]) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    let (mut before, mut is_open) = ("", false);
    for word in line.split_whitespace() {
        let begins = before == "kolo" || before.ends_with("/kolo") || before == "--";
        match word {
            "#" | "|" | "&" | "&&" | ";" | "--" => is_open = false,
            _ if begins && commands.iter().any(|command| command == word) => {
                found.push((word.to_owned(), Vec::new()));
                is_open = true;
            }
            _ if is_open && word.starts_with("--") => {
                let name = word.split('=').next().unwrap().trim_end_matches([',', ')', '.']);
                found.last_mut().unwrap().1.push(name.to_owned());
            }
            _ => {}
        }
        before = word;
    }
    found
}

fn has_option(help: &str, option: &str) -> bool {
    let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '-';
    help.match_indices(option).any(|(at, _)| !help[at + option.len()..].starts_with(is_of_name))
}

/// The default of an option in a help text.
fn default(help: &str, option: &str) -> String {
    // The help breaks lines anywhere.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let rest = &help[help.find(&format!("{option} <")).unwrap_or_else(|| panic!("{option}: {help}"))..];
    rest.split("[default: ").nth(1).unwrap().split(']').next().unwrap().to_owned()
}

#[test]
fn pages_name_commands_and_options_that_exist() {
    let commands = commands();
    let helps: BTreeMap<&str, String> = commands.iter().map(|command| (&**command, help(&[command]))).collect();
    let mut checked = 0;
    for (path, text) in pages() {
        for (command, options) in code(&text).iter().flat_map(|line| options(line, &commands)) {
            for option in options {
                checked += 1;
                assert!(has_option(&helps[&*command], &option), "{}: kolo {command} has no option {option}", path.display());
            }
        }
    }
    assert!(checked > 30, "only {checked} options were found: the test looks in the wrong place");
    let first = pages().into_iter().find(|(path, _)| path.ends_with("getting-started.md")).unwrap().1;
    for command in &commands {
        assert!(first.contains(&format!("| `kolo {command}")), "docs/getting-started.md has no row for kolo {command}");
    }
}

#[test]
fn pages_state_the_defaults_of_the_help() {
    let commands = commands();
    let mut checked = 0;
    for (path, text) in pages() {
        // "`--interval`, default `500ms`"
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for (at, between) in text.match_indices("`, default `") {
            let option = text[..at].rsplit('`').next().unwrap();
            let stated = text[at + between.len()..].split('`').next().unwrap();
            if option.starts_with("--") {
                let of = commands.iter().map(|command| help(&[command])).find(|help| has_option(help, option)).unwrap();
                assert_eq!(default(&of, option), stated, "{}: {option}", path.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 0);
    let plan = help(&["plan"]);
    let number = |option: &str| default(&plan, option).rsplit(' ').next().unwrap().trim_end_matches("us").to_owned();
    let scale = pages().into_iter().find(|(path, _)| path.ends_with("scale.md")).unwrap().1;
    let scale = scale.split_whitespace().collect::<Vec<_>>().join(" ");
    for stated in [
        format!("{} us between hosts", number("--latency")),
        format!("{} us for a message", number("--overhead")),
        format!("{} GB/s", number("--bandwidth")),
    ] {
        assert!(scale.contains(&stated), "docs/scale.md does not say {stated}");
    }
}

#[test]
fn commands_are_found_in_lines() {
    let commands = ["run", "bench"].map(str::to_owned);
    let found = options("KOLO_X=1 target/kolo run -n 2 --grace 1s -- bench x --check # --none", &commands);
    assert_eq!(found, [("run".to_owned(), vec!["--grace".to_owned()]), ("bench".to_owned(), vec!["--check".to_owned()])]);
    assert!(has_option("  --plot <FILE>", "--plot") && !has_option("  --plots <FOLDER>", "--plot"));
}

//! The variables of the environment: their names, and how their values are read.

use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

use super::VARIABLES;
use crate::error::{Error, Result};
use crate::{log, sys};

/// How the names go on, after `KOLO_`, of variables that kolo's own tests, examples and builds read.
const OTHERS: [&str; 10] =
    ["COUNTS_", "FAKE_", "FEATURES", "GPU_FIGURES", "LIBRARY", "LIGHTGBM", "PLATFORM", "RESNET_", "TORCH_CPP", "WRITE_"];

/// The variable with the names, separated by commas, of which the program that has started this process
/// has warned.
pub const TOLD: &str = "KOLO_UNKNOWN";

/// Returns the variables of this process that begin with `KOLO_` and that kolo does not read: they may be
/// misspelt. Those of which the program that started this process has warned are not among them.
pub fn unknown_variables() -> Vec<String> {
    unknown(sys::variable_names(), &process_env(TOLD).unwrap_or_default())
}

fn unknown(names: impl Iterator<Item = String>, told: &str) -> Vec<String> {
    let is_of_tests = |name: &str| name.contains("_TEST_") || OTHERS.iter().any(|other| name["KOLO_".len()..].starts_with(other));
    let is_known = |name: &str| VARIABLES.contains(&name) || is_of_tests(name) || told.split(',').any(|known| known == name);
    let mut unknown: Vec<String> = names.filter(|name| name.starts_with("KOLO_") && !is_known(name)).collect();
    unknown.sort_unstable();
    unknown
}

/// Says that kolo does not read these variables, and which ones may be meant.
pub fn describe_unknown(names: &[String]) -> String {
    let describe = |name: &String| match nearest(name) {
        Some(known) => format!("kolo does not read {name} (the nearest that it reads is {known})"),
        None => format!("kolo does not read {name}"),
    };
    names.iter().map(describe).collect::<Vec<_>>().join("; ")
}

/// What to do about variables that kolo does not read.
pub const UNKNOWN_VARIABLES: &str = "correct the name, or unset it; docs/settings.md lists all variables";

/// Warns, once for each process, of variables that kolo does not read, where this process is the
/// first of its host.
pub(crate) fn warn_of_unknown_variables(is_first: impl FnOnce() -> bool) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let unknown = unknown_variables();
        if !unknown.is_empty() && is_first() {
            log::warn!("{}; {UNKNOWN_VARIABLES}", describe_unknown(&unknown));
        }
    });
}

/// Returns the variable that is most like a name, if at least half of the letters are right.
fn nearest(name: &str) -> Option<&'static str> {
    let without = |name: &'static str| name.strip_prefix("KOLO_").unwrap_or(name);
    let known: Vec<&str> = VARIABLES.iter().map(|known| without(known)).collect();
    let found = nearest_of(name.strip_prefix("KOLO_")?, &known)?;
    VARIABLES.iter().copied().find(|known| without(known) == found)
}

/// Returns the word that is most like another one, if at least half of the letters are right.
pub fn nearest_of<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let distances = known.iter().map(|known| (distance(word.as_bytes(), known.as_bytes()), *known));
    distances.min().filter(|(distance, _)| 2 * distance <= word.len()).map(|(_, known)| known)
}

/// Returns how many letters must be added, removed, replaced or swapped with their neighbour to make
/// one word of another.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// Looks up an environment variable. Tests pass an environment of their own.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the process's environment. An empty variable counts as not set, except one that protects a
/// job: a job that was meant to have a secret or TLS must not run without it.
pub(crate) fn process_env(name: &str) -> Option<String> {
    // A value that is not UTF-8 is refused where it is read, and not taken for one that is not set.
    let value = sys::variable(name)?.to_string_lossy().into_owned();
    let may_be_empty = name.starts_with("KOLO_SECRET") || name.starts_with("KOLO_TLS_");
    Some(value).filter(|value| may_be_empty || !value.is_empty())
}

/// Reads a path from the process's environment as it is: a path need not be UTF-8.
pub(super) fn path_of_environment(name: &str) -> Option<PathBuf> {
    sys::variable(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

pub(crate) const DURATION: &str = "a duration, more than 0, such as 90, 1.5s, 500ms, 25us or 10m";
/// What [`bandwidth`] parses, for messages.
pub const BANDWIDTH: &str = "gigabytes per second, more than 0";

pub(super) fn flag(text: &str) -> Option<bool> {
    match text {
        "0" | "false" | "no" => Some(false),
        "1" | "true" | "yes" => Some(true),
        _ => None,
    }
}

/// Parses gigabytes per second, as `KOLO_NETWORK_BANDWIDTH` has them.
pub fn bandwidth(text: &str) -> Option<f64> {
    text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0 && (1e-9 / rate).is_finite())
}

/// Returns the value of a variable of the process's environment, or an error that says what it may
/// be. Ignores a variable that is empty, and blanks around a value.
pub fn variable<T>(name: &str, expected: &str, parse_value: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    parse(&process_env, name, expected, parse_value)
}

/// Returns a variable's value, or an error that says what it may be.
pub(crate) fn parse<T>(env: Env<'_>, name: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    env(name).map(|value| parse(value.trim()).ok_or_else(|| Error::setting(name, &value, expected))).transpose()
}

/// Parses a duration of the `KOLO_*` variables. `90` and `1.5s` are seconds; other units are `us`,
/// `ms` and `m`.
pub fn duration(text: &str) -> Option<Duration> {
    let unit = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let number: f64 = text[..unit].trim().parse().ok()?;
    let scale = match &text[unit..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number * scale).ok()
}

pub(super) fn some_time(text: &str) -> Option<Duration> {
    duration(text).filter(|duration| !duration.is_zero())
}

/// Returns the error for an empty setting that protects a job, which would otherwise run without
/// protection.
pub(super) fn empty(setting: &str, expected: &str, what: &str) -> Error {
    let way_out = match setting.starts_with("KOLO_") {
        true => format!("remove the variable ({})", sys::how_to_remove(setting)),
        false => "leave the option out (NULL in C)".to_owned(),
    };
    Error::setting(setting, "", format!("it is set but empty; give {expected}, or, for a job without {what}, {way_out}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_named_with_the_one_that_was_meant() {
        let names = ["TIMEUOT", "SECRT", "TIMEOUT", "TEST_ALL", "FAKE_GPUS", "WEATHER"];
        let told = |before: &str| {
            describe_unknown(&unknown(names.iter().map(|name| format!("KOLO_{name}")).chain(["PATH".to_owned()]), before))
        };
        let [secret, timeout, weather] = [
            "kolo does not read KOLO_SECRT (the nearest that it reads is KOLO_SECRET)",
            "kolo does not read KOLO_TIMEUOT (the nearest that it reads is KOLO_TIMEOUT)",
            "kolo does not read KOLO_WEATHER",
        ];
        assert_eq!(told(""), [secret, timeout, weather].join("; "));
        assert_eq!(told("KOLO_TIMEUOT,KOLO_SECRT"), weather);
        let nets = ["resnet152", "resnet20", "resnet50"];
        assert_eq!(
            ["resnet21", "resnet51", "vgg16"].map(|net| nearest_of(net, &nets)),
            [Some("resnet20"), Some("resnet50"), None]
        );
        let words = [("", "", 0), ("ab", "ba", 1), ("abc", "", 3), ("kitten", "sitting", 3), ("abcd", "acbd", 1)];
        for (a, b, expected) in words {
            assert_eq!(distance(a.as_bytes(), b.as_bytes()), expected, "{a} {b}");
        }
    }
}

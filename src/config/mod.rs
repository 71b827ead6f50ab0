//! The settings of a communicator, from options and environment variables: one row each of
//! `table.rs`. `docs/settings.md` lists them.

pub(crate) mod choices;
mod environment;
pub(crate) mod kinds;
mod secret;
mod table;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::log;
use crate::schedule::Algorithm;
use crate::schedule::select::CostModel;
use crate::wire::{Reader, Writer};
pub(crate) use choices::*;
use environment::path_of_environment;
pub use environment::{
    BANDWIDTH, TOLD, UNKNOWN_VARIABLES, bandwidth, describe_unknown, duration, nearest_of, unknown_variables, variable,
};
pub(crate) use environment::{Env, parse, process_env, warn_of_unknown_variables};
pub(crate) use kinds::*;
pub(crate) use secret::secret_of;
pub use secret::{secret_given, secret_in};
pub(crate) use table::{own_settings, shared_settings};

/// Defines a struct of settings, and one of the options that override them, by the rows of the table.
macro_rules! define_settings {
    (
        $(#[$meta:meta])*
        struct $Settings:ident, $Options:ident $(with $part:ident: $Part:ident, $PartOptions:ident)?;
        $($(#[$doc:meta])* $name:ident($($argument:ident: $given:ty),+) as $kind:ty = $default:expr, $($variable:literal),+;)*
    ) => {
        $(#[$meta])*
        pub(crate) struct $Settings {
            $(pub(crate) $part: $Part,)?
            $(pub(crate) $name: <$kind as Kind>::Value,)*
        }

        impl Default for $Settings {
            fn default() -> $Settings {
                $Settings { $($part: $Part::default(),)? $($name: $default,)* }
            }
        }

        impl $Settings {
            const VARIABLES: &[&str] = &[$($($variable),+),*];

            fn read(env: Env<'_>) -> Result<$Settings> {
                let default = $Settings::default();
                Ok($Settings {
                    $($part: $Part::read(env)?,)?
                    $($name: <$kind as Kind>::read(env, &[$($variable),+])?.unwrap_or(default.$name),)*
                })
            }
        }

        /// The options of a program: what is set, or why it is wrong.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct $Options {
            $(pub(crate) $part: $PartOptions,)?
            $(pub(crate) $name: Option<Result<<$kind as Kind>::Value>>,)*
        }

        impl $Options {
            const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Sets the option of that name from text. Returns whether there is one.
            fn set_text(&mut self, name: &str, text: &str) -> Result<bool> {
                match name {
                    $(stringify!($name) => self.$name = Some(Ok(<$kind as Kind>::parse(name, text)?)),)*
                    $(_ if self.$part.set_text(name, text)? => {})?
                    _ => return Ok(false),
                }
                Ok(true)
            }

            /// Overrides the settings for which there is an option.
            pub(crate) fn apply(self, settings: &mut $Settings) -> Result<()> {
                $(self.$part.apply(&mut settings.$part)?;)?
                $(if let Some(given) = self.$name { settings.$name = given?; })*
                Ok(())
            }
        }

        /// The rows of the table, for tests.
        #[cfg(test)]
        impl $Settings {
            fn rows() -> Vec<tests::Row> {
                vec![$(tests::Row {
                    name: stringify!($name),
                    variables: &[$($variable),+],
                    right: <$kind as Kind>::right(),
                    wrong: <$kind as Kind>::wrong(),
                },)*]
            }
        }
    };
}

shared_settings! { define_settings! {
    /// The settings that all ranks take from rank 0.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct SharedSettings, SharedOptions;
} }

own_settings! { define_settings! {
    /// The settings of a rank.
    #[derive(Clone, Debug)]
    struct Settings, Options with shared: SharedSettings, SharedOptions;
} }

/// Defines what rank 0 publishes of its settings.
macro_rules! define_wire {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $given:ty),+) as $kind:ty = $default:expr, $($variable:literal),+;)*) => {
        impl SharedSettings {
            pub(crate) fn write(&self, writer: &mut Writer) {
                $(<$kind as Shared>::write(&self.$name, writer);)*
            }

            /// Takes what [`SharedSettings::write`] wrote; `None` if a value is none.
            pub(crate) fn take(reader: &mut Reader<'_>) -> Option<SharedSettings> {
                Some(SharedSettings { $($name: <$kind as Shared>::take(reader)?,)* })
            }
        }
    };
}

shared_settings! { define_wire! {} }

impl Settings {
    pub(crate) fn from_env(env: Env<'_>) -> Result<Settings> {
        // What follows may log.
        log::start(parse(env, "KOLO_LOG", log::LEVEL, log::level)?);
        Settings::read(env)
    }
}

impl Options {
    /// Sets the option of that name from text.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if there is no such option, or if its value is wrong.
    pub(crate) fn set(&mut self, name: &str, text: &str) -> Result<()> {
        if self.set_text(name, text)? {
            return Ok(());
        }
        let known: Vec<&str> = SharedOptions::NAMES.iter().chain(Options::NAMES).copied().collect();
        Err(Error::setting(name, text, format!("no option has this name; known are {}", known.join(", "))))
    }
}

/// The variables beside those of the table that kolo, its program and torch_kolo read or set.
const OTHER_VARIABLES: &[&str] = &[
    "KOLO_AS_GLOO",
    "KOLO_CACHE_DIR",
    "KOLO_FAILURE_FILE",
    "KOLO_JOB_ID",
    "KOLO_LOCAL_RANK",
    "KOLO_LOCAL_WORLD_SIZE",
    "KOLO_LOG",
    "KOLO_RANK",
    "KOLO_RUN_REMOTE",
    "KOLO_RUN_SSH",
    "KOLO_SECRET",
    "KOLO_SECRET_FILE",
    "KOLO_STORE",
    "KOLO_STORE_SERVED",
    "KOLO_TORCH_IMPL",
    "KOLO_UNKNOWN",
    "KOLO_WORLD_SIZE",
];

/// The variables that kolo, its program and torch_kolo read or set. `docs/settings.md` describes them.
pub const VARIABLES: &[&str] = {
    const LISTS: [&[&str]; 3] = [SharedSettings::VARIABLES, Settings::VARIABLES, OTHER_VARIABLES];
    const ALL: [&str; LISTS[0].len() + LISTS[1].len() + LISTS[2].len()] = {
        let (mut all, mut at, mut list) = ([""; _], 0, 0);
        while list < LISTS.len() {
            let mut i = 0;
            while i < LISTS[list].len() {
                all[at] = LISTS[list][i];
                (i, at) = (i + 1, at + 1);
            }
            list += 1;
        }
        all
    };
    &ALL
};

/// Returns the algorithm that the process's environment chooses, and the costs by which algorithms
/// are compared otherwise: those that a job takes from it.
///
/// # Errors
///
/// [`Error::Setting`] if a variable has an invalid value.
pub fn selection_of_environment() -> Result<(Option<Algorithm>, CostModel)> {
    let algorithm = <Option<Algorithm> as Kind>::read(&process_env, &["KOLO_ALGORITHM"])?;
    let costs = <Costs as Kind>::read(&process_env, &["KOLO_NETWORK_LATENCY", "KOLO_NETWORK_BANDWIDTH"])?;
    let default = SharedSettings::default();
    Ok((algorithm.unwrap_or(default.algorithm), costs.unwrap_or(default.cost_model).model))
}

/// Returns the folder for files that later jobs use: `KOLO_CACHE_DIR`, or `kolo` in the cache folder
/// of the system.
pub(crate) fn cache_folder(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("KOLO_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("kolo")))
        .or_else(|| set("LOCALAPPDATA").map(|folder| folder.join("kolo")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("kolo")))
}

/// Returns whether `tcp://` stores accept other machines without a secret, if the variable is set.
pub(crate) fn insecure(env: Env<'_>) -> Result<Option<bool>> {
    bool::read(env, &["KOLO_INSECURE"])
}

/// The timeout of the start, unless one is set.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the path of this host in the network, if a variable gives it.
pub(crate) fn topology(env: Env<'_>) -> Result<Option<String>> {
    Topology::read(env, &["KOLO_TOPOLOGY"])
}

/// Returns the ports at which an environment lets a process listen.
pub(crate) fn ports(env: Env<'_>) -> Result<Option<RangeInclusive<u16>>> {
    RangeInclusive::read(env, &["KOLO_PORTS"])
}

/// Parses the range of ports that the setting of that name holds.
///
/// # Errors
///
/// [`Error::Setting`] if the text is no range of ports.
pub fn ports_given(setting: &str, text: &str) -> Result<RangeInclusive<u16>> {
    RangeInclusive::parse(setting, text)
}

/// Returns where a rank writes which rank its failure names, for `kolo run`.
pub(crate) fn failure_file() -> Option<PathBuf> {
    path_of_environment("KOLO_FAILURE_FILE")
}

/// Returns the secret that the environment of this process holds or names: that of `KOLO_SECRET`,
/// else that in the file `KOLO_SECRET_FILE`. Reads the file within `KOLO_START_TIMEOUT`.
///
/// # Errors
///
/// One of the variables is set but holds no secret or is empty, or the file cannot be read in time
/// or may be read by others.
pub fn secret_of_environment() -> Result<Option<[u8; 32]>> {
    let timeout = Duration::read(&process_env, &["KOLO_START_TIMEOUT"])?.unwrap_or(START_TIMEOUT);
    secret_of(&process_env, Instant::now() + timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings> {
        Settings::from_env(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn one_rule_says_whether_a_job_is_insecure() {
        let read = |value: &str| insecure(&|_| Some(value.to_owned()));
        assert_eq!(["1", "true", "yes"].map(|value| read(value).unwrap()), [Some(true); 3]);
        assert_eq!(["0", "false", "no"].map(|value| read(value).unwrap()), [Some(false); 3]);
        assert!(matches!(read("maybe"), Err(Error::Setting { .. })));
        assert_eq!(insecure(&|_| None).unwrap(), None);
    }

    /// A row of the table.
    pub(super) struct Row {
        pub(super) name: &'static str,
        pub(super) variables: &'static [&'static str],
        pub(super) right: Vec<&'static str>,
        pub(super) wrong: Vec<(&'static str, &'static str)>,
    }

    fn rows() -> Vec<Row> {
        SharedSettings::rows().into_iter().chain(Settings::rows()).collect()
    }

    /// Returns the settings of an environment and one option.
    fn with_option(variables: &[(&str, &str)], name: &str, text: &str) -> Result<Settings> {
        let (mut options, mut read) = (Options::default(), settings(variables)?);
        options.set(name, text)?;
        options.apply(&mut read)?;
        Ok(read)
    }

    #[test]
    fn every_setting_is_read_from_its_variable_and_its_option() {
        for Row { name, variables, right, wrong } in rows() {
            assert!(!right.is_empty(), "{name}");
            let unset = format!("{:?}", settings(&[]).unwrap());
            let mut has_effect = false;
            // The option wins.
            if let ([variable], [first, .., last]) = (variables, &right[..]) {
                let both = with_option(&[(variable, first)], name, last).unwrap();
                assert_eq!(format!("{both:?}"), format!("{:?}", with_option(&[], name, last).unwrap()), "{name}");
            }
            for text in right {
                let options = format!("{:?}", with_option(&[], name, text).unwrap());
                has_effect |= options != unset;
                // What comes in several variables is a list as one text.
                let values = if variables.len() == 1 { vec![text] } else { text.split(',').collect() };
                let values: Vec<_> = variables.iter().copied().zip(values).collect();
                assert_eq!(format!("{:?}", settings(&values).unwrap()), options, "{values:?}");
                // A wrong variable is an error even where an option is given.
                for (other, _) in &wrong {
                    assert!(with_option(&[(variables[0], other)], name, text).is_err() || variables.len() > 1, "{name}");
                }
                let shared = with_option(&[], name, text).unwrap().shared;
                let mut writer = Writer::default();
                shared.write(&mut writer);
                let mut reader = Reader::new(&writer.0);
                assert_eq!(SharedSettings::take(&mut reader), Some(shared), "{name}={text}");
                assert!(reader.is_at_end());
            }
            assert!(has_effect, "{name}");
            for (text, hint) in wrong {
                let by_option = with_option(&[], name, text).unwrap_err().to_string();
                assert!(by_option.contains(name) && by_option.contains(text) && by_option.contains(hint), "{by_option}");
                if let [variable] = variables {
                    let error = settings(&[(variable, text)]).unwrap_err().to_string();
                    assert!(error.contains(variable) && error.contains(text) && error.contains(hint), "{error}");
                }
            }
        }
        let error = Options::default().set("copymode", "cma").unwrap_err().to_string();
        assert!(error.contains("copymode") && error.contains("copy_mode"), "{error}");
    }

    #[test]
    fn options_override_variables() {
        let overridden = with_option(&[("KOLO_TRANSPORT", "tcp"), ("KOLO_TIMEOUT", "5")], "transport", "shm").unwrap();
        assert_eq!((overridden.shared.transport, overridden.timeout), (Transport::Shm, Duration::from_secs(5)));
    }

    #[test]
    fn several_variables_make_one_setting() {
        let read = settings(&[("KOLO_NETWORK_LATENCY", "5us"), ("KOLO_NETWORK_BANDWIDTH", "12.5")]).unwrap();
        let Costs { model, are_measured } = read.shared.cost_model;
        assert!((model.network.latency - 5e-6).abs() < 1e-12 && (model.network.per_byte - 8e-11).abs() < 1e-15);
        assert!(!are_measured && settings(&[]).unwrap().shared.cost_model.are_measured);
        assert_eq!(settings(&[("GLOO_SOCKET_IFNAME", "eth0")]).unwrap().interface.as_deref(), Some("eth0"));
        for (name, value, hint) in [
            ("KOLO_LOG", "loud", "off, error, warn"),
            ("KOLO_NETWORK_BANDWIDTH", "0", "more than 0"),
            ("KOLO_TLS_CA", "", "or, for a job without TLS, remove the variable"),
            ("KOLO_TLS_KEY", "", "the path of a PEM file"),
        ] {
            let error = settings(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value) && error.contains(hint), "{error}");
        }
        let incomplete = settings(&[("KOLO_TLS_CA", "ca.pem")]).unwrap_err().to_string();
        assert!(incomplete.contains("KOLO_TLS_CERT") && incomplete.contains("belong together"), "{incomplete}");
    }

    /// All others are taken for misspelt.
    #[test]
    fn every_variable_is_known_and_documented() {
        let is_of_name = |letter: char| letter.is_ascii_uppercase() || letter == '_';
        let words = include_str!("../../docs/settings.md").split(|letter| !is_of_name(letter));
        let documented: std::collections::BTreeSet<&str> =
            words.filter(|word| word.starts_with("KOLO_") && !word.ends_with('_')).collect();
        assert_eq!(documented, VARIABLES.iter().copied().collect());
        let read = std::cell::RefCell::new(Vec::new());
        let env = |name: &str| {
            read.borrow_mut().push(name.to_owned());
            None
        };
        Settings::from_env(&env).unwrap();
        secret_of(&env, late()).unwrap();
        for name in read.into_inner().iter().filter(|name| name.starts_with("KOLO_")) {
            assert!(VARIABLES.contains(&&**name), "{name} is read");
        }
    }

    #[test]
    fn the_documentation_has_the_defaults_and_all_values() {
        let page = include_str!("../../docs/settings.md");
        let unset = format!("{:?}", settings(&[]).unwrap());
        let shared: Vec<&str> = SharedSettings::rows().iter().map(|row| row.name).collect();
        let mut checked = 0;
        for Row { name, variables, right, .. } in rows() {
            for variable in variables {
                let is_its = |line: &&str| {
                    line.starts_with("| `")
                        && line.split(" | ").next().is_some_and(|cell| cell.contains(&format!("`{variable}`")))
                };
                let row = page.lines().find(is_its);
                let row = row.unwrap_or_else(|| panic!("docs/settings.md has no row for {variable}"));
                let cells: Vec<&str> = row.split(" | ").collect();
                let is_marked = cells[0].ends_with('*');
                assert_eq!(is_marked, shared.contains(&name), "docs/settings.md marks what ranks take from rank 0: {variable}");
                if let Some(default) = cells[1].strip_prefix('`').and_then(|default| default.strip_suffix('`')) {
                    let read = format!("{:?}", settings(&[(variable, default)]).unwrap());
                    assert_eq!(read, unset, "docs/settings.md says that the default of {variable} is {default}");
                    checked += 1;
                }
                // Each name, of a setting that has names.
                let is_name = |text: &str| text.len() > 1 && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
                for text in right.iter().filter(|text| is_name(text) && **text != "yes") {
                    assert!(row.contains(&format!("`{text}`")), "docs/settings.md does not name {text} for {variable}");
                }
            }
        }
        assert!(checked > 10, "only {checked} defaults were found: the test looks in the wrong place");
        let row = |name: &str| page.lines().find(|line| line.starts_with(&format!("| `{name}`"))).unwrap();
        let network = CostModel::default().network;
        let latency = format!("{:.0} us", network.latency * 1e6);
        assert!(row("KOLO_NETWORK_LATENCY").contains(&latency), "{latency}");
        let bandwidth = format!("{}", 1e-9 / network.per_byte);
        assert!(row("KOLO_NETWORK_BANDWIDTH").contains(&bandwidth), "{bandwidth}");
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn the_folder_comes_from_the_environment() {
        let of = |set: &[(&str, &str)]| {
            cache_folder(|name| set.iter().find(|(set, _)| *set == name).map(|(_, value)| value.into()))
                .map(|folder| folder.display().to_string().replace('\\', "/"))
        };
        let all = [("KOLO_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/b"), ("LOCALAPPDATA", "/c"), ("HOME", "/d")];
        let expected = ["/a", "/b/kolo", "/c/kolo", "/d/.cache/kolo"];
        for (i, expected) in expected.into_iter().enumerate() {
            assert_eq!(of(&all[i..]).as_deref(), Some(expected));
        }
        assert_eq!(of(&[("KOLO_CACHE_DIR", ""), ("HOME", "/d")]).as_deref(), Some("/d/.cache/kolo"));
        assert_eq!(of(&[]), None);
    }
}

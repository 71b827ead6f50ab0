//! The log. Its events are those of `tracing`: the program's subscriber gets them. While a program
//! has none, kolo writes warnings, or what `KOLO_LOG` asks for, to standard error itself. It installs
//! no subscriber for that, so a program may install its own at any time, and gets the events from
//! then on.

use std::fmt::{Debug, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use tracing::dispatcher::{self, Dispatch};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, NoSubscriber};
use tracing::{Event, Metadata, Subscriber};

/// Passes an event on to the program's subscriber, or to [`Writer`]. The arguments are those of
/// `tracing`.
macro_rules! event {
    ($level:ident, $name:ident, $($arguments:tt)+) => {
        if tracing::Level::$level <= tracing::level_filters::LevelFilter::current() {
            $crate::log::pass_on(&|| tracing::$name!($($arguments)+));
        }
    };
}
macro_rules! error_event { ($($arguments:tt)+) => { $crate::log::event!(ERROR, error, $($arguments)+) } }
macro_rules! warn_event { ($($arguments:tt)+) => { $crate::log::event!(WARN, warn, $($arguments)+) } }
macro_rules! info_event { ($($arguments:tt)+) => { $crate::log::event!(INFO, info, $($arguments)+) } }
macro_rules! debug_event { ($($arguments:tt)+) => { $crate::log::event!(DEBUG, debug, $($arguments)+) } }

// Attributes of the compiler have some of these names.
pub(crate) use {debug_event as debug, error_event as error, event, info_event as info, warn_event as warn};

/// What [`level`] parses, for messages.
pub const LEVEL: &str = "off, error, warn, info, debug or trace";

/// Parses the level of `KOLO_LOG`.
pub fn level(text: &str) -> Option<LevelFilter> {
    // Numbers are levels of `tracing`, but no words.
    text.parse().ok().filter(|_| text.starts_with(|letter: char| letter.is_ascii_alphabetic()))
}

/// Writes events to standard error.
static WRITER: OnceLock<Dispatch> = OnceLock::new();

/// Starts to log, from this level on, if the process does not yet.
pub(crate) fn start(level: Option<LevelFilter>) {
    // As long as it lives, `tracing` passes events of its level on, to whatever is current.
    WRITER.get_or_init(|| Dispatch::new(Writer { level: level.unwrap_or(LevelFilter::WARN) }));
}

/// Has an event reach the program's subscriber, or the writer if there is none.
pub(crate) fn pass_on(event: &dyn Fn()) {
    match WRITER.get() {
        Some(writer) if dispatcher::get_default(|current| current.is::<NoSubscriber>()) => {
            dispatcher::with_default(writer, event)
        }
        _ => event(),
    }
}

struct Writer {
    level: LevelFilter,
}

impl Subscriber for Writer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let is_own = metadata.target().split("::").next() == Some(env!("CARGO_CRATE_NAME"));
        is_own && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {:>5} kolo[{}]:", now(), event.metadata().level(), std::process::id()));
        event.record(&mut line);
        line.0.push('\n');
        // In one call, because other ranks may write there too. There is nowhere else to report an error.
        let _ = std::io::stderr().write_all(line.0.as_bytes());
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // The message comes first.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

/// Returns the time, in UTC: `2026-11-27T19:24:30.123Z`.
fn now() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    show(since)
}

fn show(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (days, second) = (seconds / 86400, seconds % 86400);
    // Years begin in March, so that a leap day is the last day of one; 400 of them have 146097 days.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (400 * era + year + u64::from(month >= 10), if month < 10 { month + 3 } else { month - 9 });
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since_1970.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, shown) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (951_868_800, "2000-03-01T00:00:00.007Z"),
            (1_767_225_599, "2025-12-31T23:59:59.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(show(Duration::new(seconds, 7_000_000)), shown);
        }
    }

    #[test]
    fn levels_are_words() {
        assert_eq!(["off", "Error", "warn", "TRACE"].map(|text| level(text).is_some()), [true; 4]);
        assert_eq!(["", "3", "warning", "warn,kolo=debug"].map(|text| level(text).is_some()), [false; 4]);
    }
}

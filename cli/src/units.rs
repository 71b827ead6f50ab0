//! Sizes and times as people write and read them.

use std::time::Duration;

/// The bytes of the largest address space of a process.
const MOST_BYTES: u64 = 1 << 56;

/// Parses a size in bytes: `8`, `4K`, `1M`, `2G` (powers of 1024; `KiB` and `KB` mean the same as
/// `K`).
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| format!("{text:?} is no size; write 8, 4K, 1M or 2G"))?;
    let shift = match text[digits..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("{text:?} has an unknown unit; write 8, 4K, 1M or 2G")),
    };
    number
        .checked_mul(1 << shift)
        .filter(|&bytes| bytes <= MOST_BYTES)
        .ok_or_else(|| format!("{text:?} is more than memory can hold; the most is {}T", MOST_BYTES >> 40))
}

/// The longest time: 100 years, as for the variables. It can be added to a time without overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Parses a time as the `KOLO_*` variables do: `25us`, `1.5ms`, `2s`, `1m`; without a unit,
/// seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let time = kolo::settings::duration(text.trim()).map(|time| time.min(LONGEST));
    time.ok_or_else(|| format!("{text:?} is no time; write 25us, 1.5ms, 2s or 1m"))
}

/// Returns a size with its unit: `4 KiB`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if value.fract() == 0.0 { format!("{value} {unit}") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Says which sizes are measured in place of those that were asked for, if they are not the same.
pub(crate) fn show_rounded(asked: &[u64], measured: impl IntoIterator<Item = u64>) -> Option<String> {
    let pairs = asked.iter().zip(measured).filter(|(asked, measured)| *asked != measured);
    let pairs: Vec<String> = pairs.map(|(asked, measured)| format!("{asked} is measured as {measured}")).collect();
    (!pairs.is_empty()).then(|| format!("bytes, in whole elements: {}", pairs.join(", ")))
}

/// Returns a time with its unit: `12.3 us`.
pub(crate) fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1e-6 => format!("{:.0} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// Returns a number with its noun: `1 rank`, `4 ranks`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Returns a list of ranks that stays short for thousands of ranks: `rank 3`, `ranks 0, 1, 5 to 9`.
pub(crate) fn show_ranks(ranks: &[usize]) -> String {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let mut text = String::new();
    for run in sorted.chunk_by(|a, b| a + 1 == *b) {
        let shown = match run {
            [only] => only.to_string(),
            [first, second] => format!("{first}, {second}"),
            [first, .., last] => format!("{first} to {last}"),
            [] => continue,
        };
        text += if text.is_empty() { "" } else { ", " };
        text += &shown;
    }
    format!("{} {text}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, micros) in [("25us", 25), ("1.5ms", 1500), ("2", 2_000_000), ("2s", 2_000_000), ("1m", 60_000_000)] {
            assert_eq!(duration(text), Ok(Duration::from_micros(micros)), "{text}");
        }
        assert!(std::time::Instant::now().checked_add(duration("10000000000000000000").unwrap()).is_some());
        for text in ["", "us", "-1", "1h", "nan", "1e300"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ranks() {
        assert_eq!(show_ranks(&[3]), "rank 3");
        assert_eq!(show_ranks(&[9, 1, 2, 5, 6, 7]), "ranks 1, 2, 5 to 7, 9");
    }

    #[test]
    fn sizes() {
        for (text, value) in
            [("8", 8), ("4K", 4096), ("1M", 1 << 20), ("2GiB", 2 << 30), ("3kb", 3072), (" 0 ", 0), ("65536T", 1 << 56)]
        {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "K", "1.5M", "-1", "9x", "65537T", "99999999999T"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert_eq!(show_bytes(1 << 20), "1 MiB");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_seconds(0.00025), "250.0 us");
    }
}

//! How messages show times, numbers and ranks.

use std::fmt;
use std::time::Duration;

use crate::types::Rank;

/// Shows a time as `1.5s`, `83.0ms` or `0.2us`.
pub(crate) fn time(time: Duration) -> impl fmt::Display + fmt::Debug {
    struct Time(Duration);

    impl fmt::Display for Time {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let seconds = self.0.as_secs_f64();
            match self.0.as_micros() {
                0..1_000 => write!(f, "{:.1}us", seconds * 1e6),
                1_000..1_000_000 => write!(f, "{:.1}ms", seconds * 1e3),
                _ => write!(f, "{seconds:.1}s"),
            }
        }
    }

    impl fmt::Debug for Time {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            fmt::Display::fmt(self, f)
        }
    }

    Time(time)
}

/// Returns a number with its noun: `1 rank`, `4 ranks`.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Lists ranks with their runs shortened, as `1, 2, 5 to 9`: there may be thousands.
pub(crate) fn list(ranks: &[Rank]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let run = rest.iter().enumerate().take_while(|&(i, &rank)| first.checked_add(i) == Some(rank)).count();
        if !text.is_empty() {
            text += ", ";
        }
        text += &match run {
            1 => first.to_string(),
            2 => format!("{first}, {}", first + 1),
            _ => format!("{first} to {}", first + run - 1),
        };
        rest = &rest[run..];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_one_decimal_and_a_unit() {
        for (nanos, shown) in
            [(200, "0.2us"), (83_400, "83.4us"), (83_000_000, "83.0ms"), (1_244_012_747, "1.2s"), (300_000_000_000, "300.0s")]
        {
            assert_eq!(time(Duration::from_nanos(nanos)).to_string(), shown);
        }
    }

    #[test]
    fn many_ranks_are_listed_shortly() {
        assert_eq!(list(&[1]), "1");
        assert_eq!(list(&[1, 2, 5, 6, 7, 9]), "1, 2, 5 to 7, 9");
        // A store may return any number.
        let last = usize::MAX;
        assert_eq!(list(&[last - 1, last, 0]), format!("{}, {last}, 0", last - 1));
    }
}

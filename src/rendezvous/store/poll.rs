//! Asks a server again until its answer is there.

use std::time::{Duration, Instant};

use crate::error::StoreError;

/// Calls `ask` until it returns an answer or the timeout has passed, at growing intervals.
pub(super) fn poll<T>(
    timeout: Duration,
    mut ask: impl FnMut() -> Result<Option<T>, StoreError>,
) -> Result<Option<T>, StoreError> {
    let deadline = Instant::now() + timeout;
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(answer) = ask()? {
            return Ok(Some(answer));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 3 / 2).min(Duration::from_millis(25));
    }
}

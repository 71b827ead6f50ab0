//! How long ranks wait during the rendezvous.

use std::time::Duration;

/// How long to wait for one key before checking for a new run info.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// How much later than rank 0 the others give up, so that they read its reason.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// The pause before reading again a value that has to change.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

//! How tests wait for an event, and the names of what they make. The tests of the library's modules have
//! this file, too.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The deadline of operations that should succeed. Only a defect takes so long, even on a busy
/// machine. It is shorter than the default deadline of an operation.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// Waits until something is so. Panics with `otherwise` if it never is.
#[track_caller]
pub(crate) fn wait_until(otherwise: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    for looks in 0u32.. {
        if is_so() {
            return;
        }
        assert!(Instant::now() < deadline, "{otherwise}");
        if looks < 100 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_millis(1)) }
    }
}

/// Returns a port of this host that is free.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns a name that no other test has, of this process or another one.
pub(crate) fn fresh() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("kolo-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

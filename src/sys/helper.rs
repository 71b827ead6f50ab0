//! System calls that may block without end, such as resolving a name or a file operation on a
//! network file system. A helper thread makes them. The caller waits for the result until its
//! deadline, and then abandons the call.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::advice::NAME_SERVERS;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that makes the blocking calls of one kind, one after the other.
///
/// A process has one helper of each kind. So a call that never returns costs one thread, however
/// often it is repeated: calls of the same kind wait behind it, each until its own deadline.
pub(crate) struct Helper {
    jobs: Sender<Job>,
}

/// The helpers of this process by kind. A forked child has none of its parent's threads, so the
/// process is part of the key.
static HELPERS: Mutex<BTreeMap<(u32, String), Weak<Helper>>> = Mutex::new(BTreeMap::new());

impl Helper {
    /// Returns the helper of a kind. Its thread ends when the helper has no holder and all its
    /// calls have returned.
    pub(crate) fn of(kind: impl Into<String>) -> io::Result<Arc<Helper>> {
        let key = (std::process::id(), kind.into());
        let (sender, receiver) = channel::<Job>();
        let own = Arc::new(Helper { jobs: sender });
        // No fork finds this locked, because a child has helpers of its own.
        let helper = super::between_forks(|| {
            let mut helpers = HELPERS.lock();
            helpers.retain(|_, helper| helper.strong_count() > 0);
            let known = helpers.get(&key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                helpers.insert(key, Arc::downgrade(&own));
                own.clone()
            })
        });
        if Arc::ptr_eq(&helper, &own) {
            // If this fails, the receiver is dropped, so that calls of other threads to this helper
            // fail at once.
            std::thread::Builder::new().name("kolo-helper".to_owned()).spawn(move || receiver.iter().for_each(|job| job()))?;
        }
        Ok(helper)
    }

    /// Makes a call on the helper's thread. Returns `None` if the call has not returned by the
    /// deadline. A call that has not begun by then never begins.
    pub(crate) fn call<T: Send + 'static>(
        self: &Arc<Helper>,
        deadline: Instant,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let result = Arc::new(Mutex::new(None));
        let returned = result.clone();
        self.run(deadline, Box::new(move || *returned.lock() = Some(call())))?;
        result.lock().take()
    }

    /// [`Helper::call`] without the type of the result, compiled once for all of them.
    fn run(self: &Arc<Helper>, deadline: Instant, call: Job) -> Option<()> {
        let (sender, receiver) = sync_channel(1);
        let is_wanted = Arc::new(AtomicBool::new(true));
        let (wanted, helper) = (is_wanted.clone(), self.clone());
        let job = move || {
            // While the call runs, others of its kind find this helper.
            let _helper = helper;
            if wanted.load(Ordering::Relaxed) {
                // A caller that has abandoned the call does not receive its result.
                _ = sender.send(std::panic::catch_unwind(AssertUnwindSafe(call)));
            }
        };
        self.jobs.send(Box::new(job)).ok()?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(())) => Some(()),
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(_) => {
                is_wanted.store(false, Ordering::Relaxed);
                None
            }
        }
    }
}

/// Makes a call that may block without end on the helper of its kind. If it has not returned by the
/// deadline, fails with [`io::ErrorKind::TimedOut`] and `advice`.
pub(crate) fn by_deadline<T: Send + 'static, E: Send + 'static>(
    kind: impl Into<String>,
    deadline: Instant,
    advice: &'static str,
    call: impl FnOnce() -> Result<T, E> + Send + 'static,
    failed: impl FnOnce(io::Error) -> E,
) -> Result<T, E> {
    match Helper::of(kind).map(|helper| helper.call(deadline, call)) {
        Ok(Some(result)) => result,
        Ok(None) => Err(failed(io::Error::new(io::ErrorKind::TimedOut, advice))),
        Err(error) => Err(failed(error)),
    }
}

/// Resolves a host's name, or parses its address.
pub(crate) fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    resolve_by(deadline, host, port, |host, port| Ok(super::above_standard(|| (host, port).to_socket_addrs())?.collect()))
}

fn resolve_by(
    deadline: Instant,
    host: &str,
    port: u16,
    resolver: fn(&str, u16) -> io::Result<Vec<SocketAddr>>,
) -> io::Result<Vec<SocketAddr>> {
    let name = host.to_owned();
    by_deadline(format!("resolve {host}"), deadline, NAME_SERVERS, move || resolver(&name, port), |error| error)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(60);

    /// A lock that the test holds, in place of a system that does not answer.
    static SILENCE: Mutex<()> = Mutex::new(());
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn a_silent_resolver_is_abandoned_at_the_deadline_and_asked_once() {
        let silent = |_: &str, port| {
            ASKED.fetch_add(1, Ordering::SeqCst);
            drop(SILENCE.lock());
            Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))])
        };
        let silence = SILENCE.lock();
        for _ in 0..20 {
            let error = resolve_by(Instant::now() + SOON, "silent", 7, silent).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(error.to_string().contains("no name server"), "{error}");
        }
        // Twenty attempts wait for one thread, and other names do not wait for it.
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        let other = resolve_by(Instant::now() + LATE, "other", 7, |_, port| Ok(vec![([10, 0, 0, 2], port).into()]));
        assert_eq!(other.unwrap(), [SocketAddr::from(([10, 0, 0, 2], 7))]);
        drop(silence);
        // Calls that were abandoned before they began are never made.
        assert_eq!(resolve_by(Instant::now() + LATE, "silent", 7, silent).unwrap().len(), 1);
        assert_eq!(ASKED.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_helper_outlives_a_panic_and_ends_with_its_holders() {
        let helper = Helper::of("panics").unwrap();
        let panics = || helper.call::<()>(Instant::now() + LATE, || std::panic::resume_unwind(Box::new("of the call")));
        let panic = std::panic::catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        assert_eq!(*panic.downcast::<&str>().unwrap(), "of the call");
        assert_eq!(helper.call(Instant::now() + LATE, || 7), Some(7));
        assert!(Arc::ptr_eq(&helper, &Helper::of("panics").unwrap()));
        let weak = Arc::downgrade(&helper);
        // The job of the last call holds the helper until it has ended, shortly after its result.
        drop(helper);
        let deadline = Instant::now() + LATE;
        while weak.strong_count() > 0 {
            assert!(Instant::now() < deadline, "the helper is still held");
            std::thread::yield_now();
        }
    }

    #[test]
    fn addresses_need_no_resolver() {
        let past = Instant::now();
        assert_eq!(resolve("127.0.0.1", 9, past).unwrap(), [SocketAddr::from(([127, 0, 0, 1], 9))]);
        assert_eq!(resolve("::1", 9, past).unwrap().len(), 1);
        assert!(!resolve("localhost", 9, Instant::now() + LATE).unwrap().is_empty());
    }
}

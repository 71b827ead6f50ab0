//! Signals that ask a command to end, which then reports what it has measured so far.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, unbounded};

use crate::complain;
use crate::run::process::{Event, Signal, watch_signals};

/// How long after a signal a command says that it has not ended yet.
const NOTICE: Duration = Duration::from_secs(1);

/// Whether a signal has asked this process to end.
#[derive(Clone, Default)]
pub(crate) struct Interrupt(Arc<OnceLock<Signal>>);

impl Interrupt {
    /// Watches for signals. At the second one, the process ends at once, after `clean_up`. It also does if
    /// it has not ended by itself so long after the first, if `patience` is given. Until then it soon says
    /// that it has not ended yet, if it `says` so.
    pub(crate) fn watch(
        patience: Option<Duration>,
        says: bool,
        clean_up: impl Fn() + Send + 'static,
    ) -> Result<Interrupt, String> {
        let failed = |error: std::io::Error| format!("cannot watch for signals: {error}");
        let interrupt = Interrupt::default();
        let (events, signals) = unbounded();
        watch_signals(&events).map_err(failed)?;
        let first = interrupt.clone();
        let watch = move || {
            // The sender lives as long as the process.
            let _events = events;
            let end = |signal: Signal| {
                clean_up();
                if says {
                    complain(&format!("kolo: stopped by {signal}"));
                }
                std::process::exit(signal.exit_code())
            };
            let (mut notice, mut latest) = (None, None);
            loop {
                let event = match notice.or(latest) {
                    Some(next) => signals.recv_deadline(next),
                    None => signals.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                match event {
                    Ok(Event::Signalled(signal)) if signal.ends() => {
                        if first.0.set(signal).is_err() {
                            end(signal);
                        }
                        notice = says.then(|| Instant::now() + NOTICE);
                        latest = patience.map(|patience| Instant::now() + patience);
                    }
                    Ok(_) => {}
                    Err(_) if notice.take().is_some() => {
                        let signal = first.signal().map_or_else(String::new, |signal| signal.to_string());
                        complain(&format!("kolo: {signal}: a measurement still runs; another signal ends it at once"));
                    }
                    Err(_) => first.signal().into_iter().for_each(end),
                }
            }
        };
        std::thread::Builder::new().name("interrupt".to_owned()).spawn(watch).map_err(failed)?;
        Ok(interrupt)
    }

    /// Returns the signal, if there was one.
    pub(crate) fn signal(&self) -> Option<Signal> {
        self.0.get().copied()
    }
}

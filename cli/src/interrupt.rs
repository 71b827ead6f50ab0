//! Signals that ask a command to end, which then reports what it has measured so far.

use std::sync::{Arc, OnceLock};

use crossbeam_channel::unbounded;

use crate::run::process::{Event, Signal, watch_signals};

/// Whether a signal has asked this process to end.
#[derive(Clone, Default)]
pub(crate) struct Interrupt(Arc<OnceLock<Signal>>);

impl Interrupt {
    /// Watches for signals. At the second one, the process ends at once, after `clean_up`.
    pub(crate) fn watch(clean_up: impl Fn() + Send + 'static) -> Result<Interrupt, String> {
        let failed = |error: std::io::Error| format!("cannot watch for signals: {error}");
        let interrupt = Interrupt::default();
        let (events, signals) = unbounded();
        watch_signals(&events).map_err(failed)?;
        let first = interrupt.clone();
        let watch = move || {
            // The sender lives as long as the process.
            let _events = events;
            for event in signals {
                if let Event::Signalled(signal) = event
                    && signal.ends()
                    && first.0.set(signal).is_err()
                {
                    clean_up();
                    std::process::exit(signal.exit_code());
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

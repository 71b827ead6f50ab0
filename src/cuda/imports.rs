//! The allocations of other processes that this process has open. By CUDA IPC, a process can open
//! each only once, so communicators share them, and it can open no other one at the same address. To
//! close one waits for all streams, so it is done later, when no stream is held back.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::device::{Address, Device, Handle};
use crate::error::Result;

#[derive(Default)]
pub(crate) struct Imports {
    states: Arc<States>,
}

type States = Mutex<HashMap<Handle, State>>;

enum State {
    /// A thread is opening it.
    Opening,
    Open(Weak<Import>),
    /// To be closed, unless it is wanted again before.
    Closing(Address),
    /// The driver is closing it.
    Closed,
}

/// An allocation of another process that is open here.
pub(crate) struct Import {
    device: Arc<dyn Device>,
    states: Arc<States>,
    handle: Handle,
    /// Its first byte.
    pub(crate) address: Address,
}

impl Imports {
    /// Opens an allocation, or returns it if it is open. Returns `None` if it may succeed later, when
    /// others have been closed.
    pub(crate) fn open(&self, device: &Arc<dyn Device>, handle: &Handle) -> Result<Option<Arc<Import>>> {
        let import = |address| Arc::new(Import { device: device.clone(), states: self.states.clone(), handle: *handle, address });
        {
            let mut states = self.states.lock();
            let known = match states.get(handle) {
                // Another thread may be dropping it.
                Some(State::Open(open)) => open.upgrade(),
                Some(&State::Closing(address)) => Some(import(address)),
                Some(State::Opening | State::Closed) => None,
                None => {
                    states.insert(*handle, State::Opening);
                    drop(states);
                    return self.open_new(device, handle, import);
                }
            };
            if let Some(known) = &known {
                states.insert(*handle, State::Open(Arc::downgrade(known)));
            }
            Ok(known)
        }
    }

    fn open_new(
        &self,
        device: &Arc<dyn Device>,
        handle: &Handle,
        import: impl FnOnce(Address) -> Arc<Import>,
    ) -> Result<Option<Arc<Import>>> {
        let result = device.import(handle);
        let mut states = self.states.lock();
        match result {
            Ok(address) => {
                let opened = import(address);
                states.insert(*handle, State::Open(Arc::downgrade(&opened)));
                Ok(Some(opened))
            }
            Err(error) => {
                states.remove(handle);
                let is_being_closed = states.values().any(|state| matches!(state, State::Closing(_) | State::Closed));
                if is_being_closed { Ok(None) } else { Err(error) }
            }
        }
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let (device, states, handle) = (self.device.clone(), self.states.clone(), self.handle);
        let held = device.held().clone();
        if !held.is_own() {
            return;
        }
        states.lock().insert(handle, State::Closing(self.address));
        held.later(move || {
            let closing = {
                let mut states = states.lock();
                let Some(&State::Closing(address)) = states.get(&handle) else { return };
                states.insert(handle, State::Closed);
                address
            };
            // SAFETY: it was imported, nothing can get it again, and no stream is held back.
            unsafe { device.close(closing) };
            states.lock().remove(&handle);
        });
    }
}

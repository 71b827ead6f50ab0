//! Ends a communicator when a call panics, which is a defect of this library. The caller may catch
//! the panic and free its buffers, so nothing may refer to them any more.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::state::CommState;
use crate::error::Error;
use crate::exec::Core;
use crate::types::Op;

impl CommState {
    /// Runs a part of a call. If it panics, the communicator ends before the panic continues.
    #[inline(always)]
    pub(crate) fn unless_it_panics<R>(&self, core: &mut Core, op: Op, part: impl FnOnce(&mut Core) -> R) -> R {
        let unwinding = Unwinding { shared: self, core, op };
        let result = part(unwinding.core);
        std::mem::forget(unwinding);
        result
    }
}

/// Dropped only by a panic.
struct Unwinding<'a> {
    shared: &'a CommState,
    core: &'a mut Core,
    op: Op,
}

impl Drop for Unwinding<'_> {
    #[cold]
    fn drop(&mut self) {
        // A panic that left this destructor would end the process.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            self.core.forget_buffers();
            self.shared.fail(self.core, Error::Panicked { op: self.op });
        }));
        if ended.is_err() {
            crate::log::error!("ending a communicator because of a panic panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use crate::failure::PANICS;
    use crate::{Cause, Communicator, Error, Op};

    /// Rank 0 panics while it waits for rank 1, which calls afterwards.
    fn panic_in(call: impl Fn(&Communicator) -> crate::Result<()> + Send) {
        let comms = Communicator::in_process(2).unwrap();
        let (comms, panicked) = (&comms, &Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                PANICS.set(true);
                let caught = catch_unwind(AssertUnwindSafe(|| call(&comms[0])));
                let refers = comms[0].exec.state.core.lock().refers_to_buffers();
                let later = comms[0].barrier();
                panicked.wait();
                assert!(caught.is_err(), "it did not wait");
                assert!(!refers, "messages refer to a buffer that was given back");
                match later.unwrap_err() {
                    Error::Revoked { first } => assert!(matches!(*first, Error::Panicked { .. }), "{first}"),
                    other => panic!("{other}"),
                }
            });
            scope.spawn(move || {
                panicked.wait();
                match comms[1].recv(&mut [0u8; 1 << 20], 0).unwrap_err() {
                    Error::Peer { rank: 0, cause: Cause::Revoked, .. } => {}
                    other => panic!("{other}"),
                }
            });
        });
    }

    /// Its peer must not believe that the program of rank 0 has ended as it should.
    #[test]
    fn peers_of_a_rank_whose_thread_panics_are_told() {
        let mut comms = Communicator::in_process(2).unwrap();
        let peer = comms.pop().unwrap();
        let comm = comms.pop().unwrap();
        std::thread::scope(|scope| {
            let program = scope.spawn(move || {
                comm.barrier().unwrap();
                let rows: &[u8] = &[];
                // The panic of a program, in the middle of its work.
                rows[comm.rank()]
            });
            peer.barrier().unwrap();
            for _ in 0..2 {
                let error = peer.barrier().unwrap_err();
                let first = if let Error::Revoked { first } = &error { first } else { &error };
                assert!(matches!(first, Error::Peer { rank: 0, cause: Cause::Panicked, .. }), "{error}");
            }
            assert!(program.join().is_err());
        });
    }

    #[test]
    fn nothing_refers_to_the_buffers_of_a_call_that_panicked() {
        panic_in(|comm| comm.send(&vec![1u8; 1 << 20], 1));
        panic_in(|comm| comm.send_recv(&vec![1u8; 1 << 20], 1, &mut [0u8; 1], 1));
        panic_in(|comm| comm.barrier());
        assert_eq!(Error::Panicked { op: Op::Send }.culprit(), None);
    }
}

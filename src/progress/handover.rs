//! How a queued call runs on its caller's thread.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The turn of a queued call, which its caller takes on its own thread.
pub(super) struct Handover {
    turn: SyncSender<Done>,
}

/// The caller keeps its turn until it drops this.
pub(super) struct Done {
    _sender: SyncSender<()>,
}

impl Handover {
    pub(super) fn new() -> (Handover, Receiver<Done>) {
        let (turn, taken) = sync_channel(1);
        (Handover { turn }, taken)
    }

    /// Gives the caller its turn, and waits until it has had it. Meanwhile the call counts as
    /// pending, so no other thread takes the core between two of its operations.
    pub(super) fn give(self) {
        let (sender, done) = sync_channel(0);
        if self.turn.send(Done { _sender: sender }).is_ok() {
            // An error: the sender has been dropped, and nothing is ever sent.
            _ = done.recv();
        }
    }
}

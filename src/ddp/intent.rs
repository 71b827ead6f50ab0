//! What each rank is about to do, so that ranks that have joined can take part.

use super::core::Core;
use super::exchange::Exchange;
use crate::error::{ReducerError, Result};
use crate::types::Rank;

/// What a rank is about to do, when ranks that have joined must take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// It has no more input, and does what the others do.
    Joined,
    Step,
    /// It rebuilds the buckets, before a step.
    Rebuild,
    Parameters(Exchange),
    Buffers(Exchange),
}

impl Intent {
    pub(super) fn call(self) -> &'static str {
        match self {
            Intent::Joined => "join",
            Intent::Step | Intent::Rebuild => "begin",
            Intent::Parameters(Exchange::Broadcast(_)) => "broadcast_parameters",
            Intent::Parameters(Exchange::Average) => "average_parameters",
            Intent::Buffers(_) => "sync_buffers",
        }
    }

    /// The kind of call, the kind of exchange, and its root.
    fn encode(self) -> [u32; 3] {
        let exchange = |exchange| match exchange {
            Exchange::Broadcast(root) => [0, root as u32],
            Exchange::Average => [1, 0],
        };
        let ([how, root], kind) = match self {
            Intent::Joined => ([0, 0], 0),
            Intent::Step => ([0, 0], 1),
            Intent::Parameters(how) => (exchange(how), 2),
            Intent::Buffers(how) => (exchange(how), 3),
            Intent::Rebuild => ([0, 0], 4),
        };
        [kind, how, root]
    }

    /// Returns `None` for words that no rank encodes.
    fn decode([kind, how, root]: [u32; 3]) -> Option<Intent> {
        let exchange = match how {
            0 => Exchange::Broadcast(root as Rank),
            1 => Exchange::Average,
            _ => return None,
        };
        match kind {
            0 => Some(Intent::Joined),
            1 => Some(Intent::Step),
            2 => Some(Intent::Parameters(exchange)),
            3 => Some(Intent::Buffers(exchange)),
            4 => Some(Intent::Rebuild),
            _ => None,
        }
    }
}

impl Core {
    /// Exchanges intents with the other ranks. Returns what all ranks do that have not joined, and
    /// which ranks these are. A collective call.
    pub(super) fn exchange_intents(&self, mine: Intent) -> Result<(Intent, Vec<bool>)> {
        let mut all = vec![0; 3 * self.comm.world_size()];
        self.comm.all_gather(&mine.encode(), &mut all)?;
        let intents = all.chunks_exact(3).map(|words| Intent::decode([words[0], words[1], words[2]]));
        let intents = intents.collect::<Option<Vec<Intent>>>().unwrap_or_default();
        let mut others = intents.iter().filter(|&&intent| intent != Intent::Joined);
        let first = others.next().copied().unwrap_or(Intent::Joined);
        if intents.is_empty() || others.any(|&other| other != first) {
            let why = "another rank calls something else; all must make the same calls in the same order";
            return Err(ReducerError::Moment { call: mine.call(), why }.into());
        }
        Ok((first, intents.iter().map(|&intent| intent != Intent::Joined).collect()))
    }

    /// [`Core::exchange_intents`] for a rank that has not joined. Returns which ranks have not.
    pub(super) fn announce(&self, mine: Intent) -> Result<Vec<bool>> {
        self.exchange_intents(mine).map(|(_, active)| active)
    }
}

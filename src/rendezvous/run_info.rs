//! What rank 0 writes first: the number of the run, and how the other ranks learn its secret. The
//! run info of a waiting list is the same, with the number of the list.
//!
//! ```text
//! "kolo-run", run (16), how the others learn the secret (1), then 32 bytes:
//!     0  they were given it         MAC, which only a rank with the same secret can compute
//!     1  they read it here          the secret; in stores that only the ranks can read
//!     2  they agree on it           rank 0's public key, see `key_exchange`
//! ```

use super::signed::SignedStore;
use super::store::Store;
use crate::network::identity::{Identity, Run};

/// The run info's key. All other keys begin with the number of a run or of a waiting list. A growth
/// puts `growth-<number>/` before each.
pub(super) const NAME: &str = "run";

/// The key of the run info of a waiting list.
pub(super) const WAITING_LIST: &str = "waiting-list";

const MAGIC: &[u8; 8] = b"kolo-run";
const GIVEN: u8 = 0;
const SHARED: u8 = 1;
const AGREED: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RunInfo {
    pub(super) run: Run,
    pub(super) secret: Source,
}

/// How the ranks of a run learn its secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// The ranks were given the secret before the start. The MAC shows that rank 0 was given the
    /// same.
    Given { mac: [u8; 32] },
    /// The ranks read it in the store, which only they can read.
    Shared { secret: [u8; 32] },
    /// The ranks agree on it through the store. This is rank 0's public key.
    Agreed { public: [u8; 32] },
}

impl std::fmt::Debug for Source {
    /// Writes how the secret is learned, without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Given { .. } => "given",
            Source::Shared { .. } => "shared",
            Source::Agreed { .. } => "agreed",
        })
    }
}

impl RunInfo {
    /// Makes the run info with this key of a rank 0 that was given its secret.
    pub(super) fn of_given(name: &str, store: &dyn Store, identity: &Identity) -> RunInfo {
        let signed = SignedStore::new(store, identity).sign(name, 0, &[]);
        let mac = signed.try_into().expect("a signed empty value is the MAC alone");
        RunInfo { run: identity.run(), secret: Source::Given { mac } }
    }

    /// Returns whether a rank 0 with the secret, job and run of `identity` made the run info with
    /// this key.
    pub(super) fn is_of(&self, name: &str, store: &dyn Store, identity: &Identity) -> bool {
        let Source::Given { mac } = &self.secret else { return false };
        SignedStore::new(store, identity).open(name, 0, mac).is_some()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, rest) = match &self.secret {
            Source::Given { mac } => (GIVEN, mac),
            Source::Shared { secret } => (SHARED, secret),
            Source::Agreed { public } => (AGREED, public),
        };
        [&MAGIC[..], &self.run, &[kind], rest].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<RunInfo> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (run, rest) = rest.split_first_chunk()?;
        let (&kind, rest) = rest.split_first()?;
        let rest: [u8; 32] = rest.try_into().ok()?;
        let secret = match kind {
            GIVEN => Source::Given { mac: rest },
            SHARED => Source::Shared { secret: rest },
            AGREED => Source::Agreed { public: rest },
            _ => return None,
        };
        Some(RunInfo { run: *run, secret })
    }
}

/// Decodes what a store holds in place of the run info.
#[cfg(any(fuzzing, test))]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(run_info) = RunInfo::decode(bytes) {
        assert_eq!(run_info.encode(), bytes, "a run info changes when it is decoded and encoded");
    }
}

/// Returns run infos of every kind.
#[cfg(any(fuzzing, test))]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let sources = [Source::Given { mac: [1; 32] }, Source::Shared { secret: [2; 32] }, Source::Agreed { public: [9; 32] }];
    sources.map(|secret| RunInfo { run: [3; 16], secret }.encode()).to_vec()
}

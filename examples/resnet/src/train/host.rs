//! Finds the ranks on the same machine, which share its cores.
//!
//! It compares the names of the machines. Shared memory does not tell, because it depends on the
//! system and the settings.

use kolo::Communicator;
use sha2::{Digest, Sha256};

/// The place of this rank among the ranks of its machine.
#[derive(Debug, PartialEq)]
pub(super) struct Here {
    /// The number of ranks on this machine.
    pub(super) ranks: usize,
    /// The number of this rank among them.
    pub(super) place: usize,
    /// The number of ranks on the machine that has most.
    pub(super) most: usize,
}

impl Here {
    /// Finds the place. This is a collective call.
    pub(super) fn find(comm: &Communicator) -> kolo::Result<Here> {
        let digest: [u8; 32] = Sha256::digest(name()).into();
        let mut all = vec![0; digest.len() * comm.world_size()];
        comm.all_gather(&digest, &mut all)?;
        Ok(Here::among(&all.chunks_exact(digest.len()).collect::<Vec<_>>(), comm.rank()))
    }

    fn among<T: PartialEq>(names: &[T], rank: usize) -> Here {
        let count = |of: &T, names: &[T]| names.iter().filter(|name| *name == of).count();
        let most = names.iter().map(|name| count(name, names)).max().unwrap_or(1);
        Here { ranks: count(&names[rank], names), place: count(&names[rank], &names[..rank]), most }
    }
}

/// Returns the declared name of this machine, or its own.
fn name() -> String {
    let declared = ["KOLO_HOST", "COMPUTERNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    #[cfg(unix)]
    let declared = declared.or_else(|| Some(rustix::system::uname().nodename().to_string_lossy().into_owned()));
    declared.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_machine_are_counted_however_they_are_numbered() {
        let among = |names: &str, rank| Here::among(&names.bytes().collect::<Vec<_>>(), rank);
        assert_eq!(among("aabbb", 1), Here { ranks: 2, place: 1, most: 3 });
        assert_eq!(among("abab", 2), Here { ranks: 2, place: 1, most: 2 });
        assert_eq!(among("a", 0), Here { ranks: 1, place: 0, most: 1 });
    }
}

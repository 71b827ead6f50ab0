//! What distinguishes a process from the others of its machine.

/// A process of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) id: u32,
    /// When the process was created, in units of the system, on systems that soon give its id to
    /// another process. 0 on others, and if it is not known.
    pub(crate) created: u64,
}

impl Process {
    /// Returns the process that has an id now.
    pub(crate) fn with_id(id: u32) -> Process {
        Process { id, created: 0 }
    }
}

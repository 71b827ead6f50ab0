//! How the ranks of a job that are processes reach each other: connections in, connections out,
//! links, queries and shared memory.
//!
//! | file | what it does |
//! |---|---|
//! | `fabric` | what a communicator is built on: its ranks, their hosts, and how links open |
//! | `process` | the [`Network`] of a process: its peers, and connecting to them |
//! | `peer_info`, `identity` | what ranks know of each other; what proves that a process is one |
//! | `listener` | the sockets on which a process takes connections, and the handshake |
//! | `mailbox` | keeps the connections that came in until they are asked for |
//! | `opener` | opens the links of a communicator |
//! | `rails` | opens the connections of a link over several network interfaces |
//! | `address`, `topology` | the advertised address of this machine; where hosts are in the network |
//! | `control` | sends queries to peers beside the operations |
//! | `host_setup` | how the ranks of a host find out that they can share memory |
//! | `exported`, `region_exchange` | the regions of memory that other ranks may map; how they are fetched |
//! | `in_process` | the same for ranks that are threads of one process |
//! | `offered`, `attachment` | what a process offers to `kolo top`, and the file that says so |

pub(crate) mod address;
pub(crate) mod attachment;
mod control;
mod exported;
pub(crate) mod fabric;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
pub(crate) mod host_setup;
pub(crate) mod identity;
mod in_process;
pub(crate) mod listener;
mod mailbox;
mod offered;
mod opener;
pub(crate) mod peer_info;
mod process;
mod rails;
mod region_exchange;
pub(crate) mod topology;

pub(crate) use mailbox::{Dispatcher, Mailbox};
pub(crate) use process::{LinkSettings, Network};

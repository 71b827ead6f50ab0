//! How the ranks of a job that are processes reach each other: connections in, connections out,
//! links, queries and shared memory.
//!
//! | file | what it does |
//! |---|---|
//! | `process` | the [`Network`] of a process: its peers, and connecting to them |
//! | `mailbox` | keeps the connections that came in until they are asked for |
//! | `opener` | opens the links of a communicator |
//! | `rails` | opens the connections of a link over several network interfaces |
//! | `control` | sends queries to peers beside the operations |
//! | `lent`, `lender` | the regions of memory that other ranks may map; how they are fetched |

mod control;
mod lender;
mod lent;
mod mailbox;
mod opener;
mod process;
mod rails;

pub(super) use control::NetworkControl;
pub(super) use lender::NetworkLender;
pub(super) use mailbox::{CHECK_INTERVAL, Dispatcher, Mailbox};
pub(crate) use opener::NetworkOpener;
pub(super) use process::LinkSettings;
pub(crate) use process::Network;
pub(super) use rails::kind_of_links;

//! Links that move bytes between two ranks. They know nothing of collectives.
//!
//! A [`Link`] is an ordered, reliable stream in each direction. No call on it blocks: the engine
//! tries all links that it needs, and sleeps in [`Mesh::sleep`] when none of them makes progress.
//!
//! | file | what it does |
//! |---|---|
//! | `link` | the trait of all links |
//! | `mesh` | the links of one rank, and where it sleeps on them |
//! | [`tcp`], `stripe`, [`tls`] | a link over one TCP connection, over several, and over an encrypted one |
//! | [`congestion`] | congestion control and number of connections of a link, by its round trip |
//! | [`rail_link`], `rail` | a link over several network interfaces, and one connection of it |
//! | `copying` | how a ring copies large messages, by measurement |
//! | `loopback` | the link of a rank to itself |
//! | `stripes` | how links over several connections cut their streams |
//! | `receive_buffer` | where arrived bytes wait, in links over sockets |
//! | [`shm`], [`memory`], `ring_link`, `ring` | links in shared memory between processes and between threads, and their rings |

pub(crate) mod congestion;
mod copying;
mod link;
mod loopback;
pub(crate) mod memory;
mod mesh;
mod rail;
pub(crate) mod rail_link;
mod receive_buffer;
mod ring;
mod ring_link;
pub(crate) mod shm;
mod stripe;
mod stripes;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
pub(crate) mod tls;

pub(crate) use link::{ALIGN, Link, cause_of, is_end_of_peer};
pub(crate) use loopback::MOST_WAITING;
pub(crate) use mesh::{Mesh, NoLink, NoPeers, Opener};

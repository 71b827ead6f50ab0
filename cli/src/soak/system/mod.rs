//! What a soak does to processes, where systems differ.

#[cfg(unix)]
mod unix;
#[cfg(unix)]
use unix as platform;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as platform;

pub(super) use platform::{
    CUTS_CONNECTIONS, HAS_FORKS, HAS_SIGNALS, LocalListener, ask_for_trace, cut_a_connection, free_in_a_child, go_on, kill,
    kill_this_process, listeners, stop_this_process,
};

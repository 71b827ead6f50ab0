//! The caller's side of a call on a device: all of its work is enqueued on a stream ([`enqueue`]).
//! Before the first large call, the ranks find out how their data can pass ([`mode`]), and verify
//! that they reach each other's memory ([`verify`]). A CUDA graph may capture a call ([`capture`]).

mod capture;
mod enqueue;
mod mode;
mod verify;

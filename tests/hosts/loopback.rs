//! A rank that advertises loopback to another host, where something else listens at its address.

use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;

use kolo::Communicator;

const PORT: u16 = 20_000;

/// The role says who advertises loopback: `1`, the rank on the second host, while a process of the
/// first host listens at its address and never answers; or `all`, and then the first rank's own
/// listener is at the second rank's address.
pub(crate) fn rank() -> ExitCode {
    let role = std::env::var("KOLO_TEST_ROLE").unwrap();
    let rank = std::env::var("KOLO_RANK").unwrap();
    let _stranger =
        (role == "1" && rank == "0").then(|| TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).expect("the port is free"));
    let mut builder = Communicator::builder();
    if role == "all" || rank == "1" {
        builder = builder.interface("lo").ports(PORT..=PORT);
    }
    let error = builder.connect().and_then(|comm| comm.barrier()).unwrap_err().to_string();
    // The second rank waits for the first one, which gives up.
    let expected = if rank == "0" { "rank 1 " } else { "rank 0 " };
    let is_why = rank == "1" || error.contains("cannot be reached at 127.0.0.1:20000");
    assert!(error.contains(expected) && is_why, "rank {rank}: {error}");
    println!("{error}");
    ExitCode::SUCCESS
}

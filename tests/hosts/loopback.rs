//! A rank that advertises loopback to another host, where something else listens at its address.

use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;

use kolo::Communicator;

const PORT: u16 = 20_000;

/// The role says which ranks advertise loopback: `1`, the rank on the second host, while rank 0 holds
/// a socket at that address on its own host, and never answers there; or `all`, and then the own
/// listener of rank 0 is at the address of rank 1.
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
    // Either rank may notice it first, and then tells the other one.
    let is_why = error.contains("cannot be reached at 127.0.0.1:20000") || error.contains("advertises a loopback address");
    assert!(is_why && !error.contains("rank 0 "), "rank {rank}: {error}");
    assert!(rank == "1" || error.contains("rank 1 "), "rank {rank}: {error}");
    println!("{error}");
    ExitCode::SUCCESS
}
